"""The Optuna study of a sweep: which configurations wait, run, have finished or failed."""

import fcntl
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from .process import is_running, result_of, write_table
from .sweep import Sweep, check

# The attributes of a trial: its configuration's directory, and the trial that it repeats, if any.
NAME, REPEATS = "directory", "repeats"
FINISHED = TrialState.COMPLETE, TrialState.PRUNED  # with a number as metric, and without


class Study:
    """A study in OUTPUT/study.db. Several processes may use it, each `alone`."""

    def __init__(self, sweep: Sweep, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._sweep = sweep
        self._output = output
        self._lock = open(output / "lock", "w")  # noqa: SIM115
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self.alone():
            self._study = optuna.create_study(
                storage=f"sqlite:///{output}/study.db",
                study_name=sweep.study_name(),
                direction=sweep.metric.goal,
                load_if_exists=True,
            )
            trials = self._trials()
            for trial in trials:
                is_gone = trial.state in FINISHED and not result_of(output / trial.user_attrs[NAME])
                if is_gone or trial.state == TrialState.FAIL:
                    self._repeat(trial)
            known = {trial.user_attrs[NAME] for trial in trials}
            grid = {sweep.name_of(each): each for each in sweep.grid()}
            for name in grid:
                if name not in known:
                    self._study.enqueue_trial(grid[name], {NAME: name})
            self._total = len(grid) or sweep.run_cap or 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def take(self) -> tuple[int, dict[str, Any], Path] | None:
        """Return a trial's number, configuration and directory, or None if none is left."""
        for each in self._trials(TrialState.RUNNING):
            if not is_running(self._output / each.user_attrs[NAME]):  # it was interrupted
                self._repeat(self._study.tell(each.number, state=TrialState.FAIL))
        drawn = len(self._trials())
        if drawn >= self._total and not self._trials(TrialState.WAITING):
            return None
        sampler = TPESampler if self._sweep.method == "bayes" else RandomSampler
        self._study.sampler = sampler(seed=drawn)
        trial = self._study.ask(self._sweep.varied)
        configuration = self._sweep.configuration(trial.params)
        name = self._sweep.name_of(configuration)
        trial.set_user_attr(NAME, name)
        return trial.number, configuration, self._output / name

    def finish(self, number: int, directory: Path) -> None:
        """Note the outcome of a trial, which is in its directory. If it has failed, it is repeated
        when the study is opened again.
        """
        if not (result := result_of(directory)):
            self._study.tell(number, state=TrialState.FAIL)
            return
        summary, metric = result["summary"], self._sweep.metric.name
        check(metric in summary, f"no {metric} in {directory}; it has {', '.join(summary)}")
        value = summary[metric]
        if isinstance(value, int | float) and math.isfinite(value):
            self._study.tell(number, value)
        else:
            self._study.tell(number, state=TrialState.PRUNED)

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
            directory = self._output / trial.user_attrs[NAME]
            if result := result_of(directory):
                summary, parameters = result["summary"].items(), result["parameters"]
                plain = {key: each for key, each in summary if not isinstance(each, dict | list)}
                paths = {"run": directory / result["run"]}
                rows[directory] = parameters | plain | parameters | paths
        write_table(self._output / "results.csv", list(rows.values()))
        done = f"{self._total - self.left()} of {self._total} done"
        if not self._trials(TrialState.COMPLETE):
            return done
        best = self._study.best_trial
        label = self._sweep.label(self._sweep.configuration(best.params))
        return f"{done}; best {self._sweep.metric.name} {best.value:.4g}: {label}"

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials, of these states if there are any, that no other trial repeats."""
        trials = self._study.get_trials(deepcopy=False)
        trials = [each for each in trials if NAME in each.user_attrs]
        repeated = {each.user_attrs.get(REPEATS) for each in trials}
        last = [each for each in trials if each.number not in repeated]
        return [each for each in last if each.state in states or not states]

    def _repeat(self, trial: FrozenTrial) -> None:
        configuration = trial.system_attrs.get("fixed_params", trial.params)
        attributes = {NAME: trial.user_attrs[NAME], REPEATS: trial.number}
        self._study.enqueue_trial(configuration, attributes)
