"""The Optuna study of a sweep: which configurations wait, run, have finished or failed."""

import fcntl
import math
import sys
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from ..tables import result_of, write_table
from .process import is_running
from .sweep import Sweep

REPEATS = "repeats"  # the attribute of a trial that names the failed one that it repeats
FINISHED = TrialState.COMPLETE, TrialState.PRUNED  # with a number as metric, and without


class Study:
    """A study in OUTPUT/study.db. Several processes may use it, each `alone`."""

    def __init__(self, sweep: Sweep, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._sweep = sweep
        self._output = output
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        grid = sweep.grid() if sweep.method == "grid" else []
        self._total = len(grid) or sweep.run_cap or 0
        with self.alone():
            self._study = optuna.create_study(
                storage=f"sqlite:///{output}/study.db",
                sampler=TPESampler() if sweep.method == "bayes" else RandomSampler(),
                # More draws are the same study.
                study_name=sweep.name_of([sweep.parameters, sweep.method, sweep.metric, len(grid)]),
                direction=sweep.metric.goal,
                load_if_exists=True,
            )
            for trial in self._trials(TrialState.FAIL, *FINISHED):
                if trial.state == TrialState.FAIL or not result_of(self.directory(trial.params)):
                    self._repeat(trial)
            for each in grid[len(self._trials()) :]:
                self._study.enqueue_trial(each)

    def alone(self) -> IO[str]:
        """Return a file, which keeps other processes away until it is closed."""
        lock = open(self._output / "lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def directory(self, configuration: dict[str, Any]) -> Path:
        return self._output / self._sweep.name_of(configuration)

    def take(self) -> Trial | None:
        """Return the next trial to run, or None if none is left."""
        for each in self._trials(TrialState.RUNNING):
            if not is_running(self.directory(each.params)):  # it was interrupted
                self._repeat(self._study.tell(each.number, state=TrialState.FAIL))
        if len(self._trials()) >= self._total and not self._trials(TrialState.WAITING):
            return None
        return self._study.ask(self._sweep.space)

    def finish(self, trial: Trial) -> None:
        """Note the outcome of a trial, which is in its directory. If it has failed, it is repeated
        when the study is opened again.
        """
        directory, metric = self.directory(trial.params), self._sweep.metric.name
        result = result_of(directory)
        value = result.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            self._study.tell(trial, value)
        elif result and metric not in result:
            sys.exit(f"error: no {metric} in {directory}; it has {', '.join(result)}")
        else:
            self._study.tell(trial, state=TrialState.PRUNED if result else TrialState.FAIL)

    def is_busy(self) -> bool:
        """Return whether any process runs a trial."""
        return bool(self._trials(TrialState.RUNNING))

    def left(self) -> int:
        """Return how many configurations have not finished."""
        return self._total - len(self._trials(*FINISHED))

    def write_results(self) -> str:
        """Write results.csv. Return the progress."""
        rows = {}
        for trial in self._trials(*FINISHED):
            directory = self.directory(trial.params)
            if result := result_of(directory):
                plain = {k: v for k, v in result.items() if not isinstance(v, dict | list)}
                run = {"run": directory / result["run"]}
                rows[directory] = trial.params | plain | trial.params | run
        write_table(self._output / "results.csv", list(rows.values()))
        done = f"{self._total - self.left()} of {self._total} done"
        if not self._trials(TrialState.COMPLETE):
            return done
        best = self._study.best_trial
        return f"{done}; best {self._sweep.metric.name} {best.value:.4g}: {best.params}"

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials, of these states if there are any, that no other trial repeats."""
        trials = self._study.get_trials(deepcopy=False)
        repeated = {each.user_attrs.get(REPEATS) for each in trials}
        last = [each for each in trials if each.number not in repeated]
        return [each for each in last if each.state in states or not states]

    def _repeat(self, trial: FrozenTrial) -> None:
        configuration = trial.system_attrs.get("fixed_params", trial.params)
        self._study.enqueue_trial(configuration, {REPEATS: trial.number})
