"""One run of a training script: its directory, its logs, what its checkpoints hold, and how it
ends.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from ..env import ClusterEnv
from ..errors import one_line, print_line
from ..rollout import Rollout
from .arguments import resume_command
from .checkpoint import load_part, replaced, rng_state, save_checkpoint, save_model, set_rng_state
from .checks import check
from .curve import LearningCurve
from .directory import meet
from .dry_run import worker_commands
from .learners.exchange import fingerprint
from .learners.learners import Learners
from .learners.watch import DONE
from .learners.workers import AllWorkers, options_of_one
from .logs import NoLogs, log_in, open_logs, start_wandb
from .signals import Signals

logger = logging.getLogger(__name__)
T = TypeVar("T")


def say(text: str) -> None:
    """Print a line if it can be written: a full disk, or a terminal that is gone, is no reason to
    end a run.
    """
    with suppress(OSError):
        print_line(text)


class Run:
    """A run of a script, in ``runs/NAME``: its logs, its checkpoints, which hold all that it is
    told to keep, its end.

        args, saved = parse(Args)
        run = Run(args, saved)  # --dry-run ends here
        envs = run.keep("envs", ClusterEnv(...))
        agent = run.keep("agent", Agent(envs))
        with run.training(envs, agent):
            for iteration in run.iterations(args.num_iterations, args.batch_size):
                run.global_step += args.batch_size
                run.report(rollout, versions=iteration)
            run.finish(evaluate(args, make_env, act))

    Args:
        args: the script's arguments, as they are to be logged.
        saved: the checkpoint to go on from, or an empty dict, as `parse` returns it.
        learners: all learners of the run, if it may have several.
    """

    def __init__(self, args: Any, saved: dict[str, Any], learners: Learners | None = None) -> None:
        self.args, self._saved = args, saved
        self.global_step: int = saved.get("global_step", 0)
        started = Learners.of_torchrun().world_size
        alone = f"{sys.argv[0]} has one learner, but torchrun has started {started}"
        check(started == 1 or learners, f"{alone}: see docs/learners.md")
        self.learners = learners or Learners()
        number = self.learners.world_size
        self._workers: AllWorkers | None = None
        self._parts: dict[str, Any] = {}
        self.curve = self.keep("curve", LearningCurve())
        enough = args.total_timesteps >= self.global_step
        done = f"the {self.global_step} steps that {args.resume} has done"
        check(enough, f"--total-timesteps {args.total_timesteps} must be at least {done}")
        name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}"
        self.name = args.resumed_name or args.run_name or name
        is_first = self.learners.rank == 0
        if args.dry_run:
            check(
                number == 1,
                "--dry-run prints the workers' commands of one learner: run it without torchrun",
            )
            print_line("\n".join(worker_commands(args, f"runs/{self.name}/workers")))
            sys.exit()
        if args.track and is_first:
            log_in()
        self._signals = Signals(self.learners)
        self.name = meet(args, self.learners, self.name, self.global_step)
        self.directory = f"runs/{self.name}"
        self._wandb = None
        if args.track and is_first:
            self._wandb = start_wandb(args, self.name, saved.get("wandb_id"))
        try:
            self.writer = (
                open_logs(self.directory, self.global_step + bool(saved)) if is_first else NoLogs()
            )
        except OSError as error:
            check(False, f"cannot write to {self.directory}: {error.strerror}")
        table = "\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", self.global_step)

    @property
    def rows(self) -> range:
        """Which of the ``args.num_envs`` environments this learner's workers have."""
        return self.learners.rows(self.args.num_envs)

    def options(self) -> dict[str, Any]:
        """Return what `ClusterEnv` takes of the flags, and for one of several learners."""
        options = {**self.args.options(), "log_dir": f"{self.directory}/workers"}
        is_alone = self.learners.world_size == 1
        return options if is_alone else options_of_one(options, self.learners, self.rows.start)

    def keep(self, name: str, part: T) -> T:
        """Have checkpoints hold the ``state_dict`` of ``part``, and return it; if resumed, as the
        last one has it.
        """
        if name in self._parts:
            raise ValueError(f"there is a part {name!r} already")
        kept: Any = part
        if isinstance(part, ClusterEnv):
            kept = self._workers = AllWorkers(part, self.learners)
        self._parts[name] = kept
        if self._saved:
            parts = self._saved.get("parts", {})
            check(
                name in parts,
                f"{self.args.resume} is of another version of this script: it has no {name!r}",
            )
            self._load(name, lambda: load_part(kept, parts[name]))
        return part

    def _load(self, name: str, load: Callable[[], object]) -> None:
        """Load something of the checkpoint, or exit with one line: whoever made it may have put
        anything there.
        """
        try:
            load()
        except Exception as error:
            why = one_line(error)
            check(False, f"{self.args.resume} cannot be resumed: its {name!r} does not fit: {why}")

    def save(self) -> None:
        """Write a checkpoint, and with --save-model the model; several learners all call this."""
        # up to here the logs belong to this checkpoint, what comes later is dropped on resume
        self.writer.flush()
        with self.learners.saving():
            parts = {name: part.state_dict() for name, part in self._parts.items()}
            if self.learners.rank > 0:
                # all but its workers' state, which it has handed in, the first learner has, too
                return
            self._state = {
                "parts": parts, "rng": rng_state(),
                "args": asdict(self.args), "global_step": self.global_step, "seconds": self.seconds,
                "wandb_id": self._wandb.id if self._wandb else None,
            }  # fmt: skip
            self._write()

    def _write(self) -> None:
        save_checkpoint(self.directory, self._state, self.global_step)
        if self.args.save_model:
            save_model(
                f"{self.directory}/{self.args.exp_name}.cleanrl_model", self._model.state_dict()
            )

    def _try_to_save(self) -> None:
        """Save, or warn: a disk that is full now need not be at the next time, or in `finish`."""
        try:
            self.save()
            self._unsaved = False
        except OSError as error:
            self._unsaved = True
            at, why = f"{self.directory} at step {self.global_step}", error.strerror or error
            logger.warning("no checkpoint of %s: %s; training goes on", at, why)

    @contextmanager
    def training(self, envs: ClusterEnv, model: torch.nn.Module) -> Iterator[None]:
        """Train in this block: the time counts, and a signal writes a checkpoint and ends the run.

        ``model`` is what --save-model saves. All that draws random numbers to be built must have
        been built before: a resumed run takes those of its checkpoint up here.
        """
        self._envs, self._model = envs, model
        self._workers = self._workers or AllWorkers(envs, self.learners)
        if self._saved:
            self._load("rng", lambda: set_rng_state(self._saved["rng"]))
        self._start = time.monotonic() - self._saved.get("seconds", 0)
        columns = TextColumn("{task.fields[status]}"), TimeRemainingColumn(), TextColumn("left")
        console = Console(quiet=self.learners.rank > 0 or not sys.stdout.isatty())
        self._is_live = console.is_terminal and not console.is_dumb_terminal  # else `report` prints
        self._progress = Progress(*columns, console=console)
        learners = self.learners
        to_go_on = resume_command(self.args, self.directory, learners.command)
        learners.raise_if_interrupted = self._signals.raise_if_received
        learners.note_run(self.name)
        if learners.watch is not None:
            learners.watch.end = self._signals.interrupt
        with envs, self.writer, self._progress, self._signals.saving(envs, self.save, to_go_on):
            yield

    @property
    def seconds(self) -> float:
        """How long the run has trained, all its parts together; never 0, even if the clock stands
        still.
        """
        return max(time.monotonic() - self._start, 1e-3)

    def iterations(self, number: int, steps: int) -> Iterator[int]:
        """Yield the iterations that are left of ``number``, of so many environment ``steps`` each,
        counted from 1.

        Between two of them a checkpoint is written if one is due, and signals are heeded. The last
        is the one that `report`s after --max-seconds, if that comes first. Then there is a
        checkpoint, and the workers end. Do not leave it by ``break``, or there is neither.
        """
        self._number = number
        done, self._saved_at = -(-self.global_step // steps), time.monotonic()
        self._agreed = False, False  # what `_by_clock` of the first learner has said, for all
        self._task = self._progress.add_task(
            "train", total=number, completed=done, status="starting"
        )
        self._printed, self._stop = done * 20 // number, False
        for self._iteration in range(done + 1, number + 1):
            self._signals.raise_if_received()
            if self._due[0]:
                self._try_to_save()
                self._saved_at, self._agreed = time.monotonic(), (False, False)
            yield self._iteration
            if self._stop:
                break
        self._trained_seconds = self.seconds
        self._progress.stop()
        self._try_to_save()
        self._envs.close()
        self._signals.raise_if_received()
        self.learners.leave(DONE)
        if self.learners.rank > 0:
            sys.exit()

    def add_episodes(self, rollout: Rollout) -> None:
        """Count the episodes of a rollout, and of the other learners'. Call it before anything is
        learned from it.

        Several learners agree here on what the clock of the first one says, and compare their
        models.
        """
        facts = list(_by_clock(self))
        if self.learners.world_size > 1:
            facts += fingerprint(self._model)
        own = np.concatenate([facts, rollout.episodic_returns, rollout.episodic_lengths])
        all_ranks = self.learners.gather(own)
        _check_alike([row[2 : len(facts)] for row in all_ranks], self.global_step)
        self._agreed = tuple(map(bool, all_ranks[0][:2]))
        for row in all_ranks:
            returns, lengths = row[len(facts) :].reshape(2, -1)
            self.curve.add_episodes(returns, lengths.astype(np.int64))

    @property
    def _due(self) -> tuple[bool, bool]:
        """Whether a checkpoint is due, and whether the time is up; for several learners as they
        have agreed.
        """
        return _by_clock(self) if self.learners.world_size == 1 else self._agreed

    def report_is_due(self) -> bool:
        """Whether to `report` this iteration, where there are many short ones: 200 times in a run,
        and the last.
        """
        every = max(self._number // 200, 1)
        return self._iteration % every == 0 or self._iteration == self._number or self._due[1]

    def report(self, rollout: Rollout, versions: int) -> None:
        """Log what all scripts do: the episodes since the last report, and the synchronization of
        the policy.

        Args:
            rollout: the last one.
            versions: how many policy versions the workers could have pulled so far.
        """
        step, sps = self.global_step, int(self.global_step / self.seconds)
        totals = self._workers.totals(self._envs.policy_version - rollout.policy_versions)
        pulls, kl = (
            totals["pulls"],
            totals["kl"],
        )  # per worker; KL is inf until every worker has acted
        scalars = {
            **self.curve.add_point(step, pulls, versions),
            "charts/SPS": sps, "charts/worker_restarts": totals["restarts"], "sync/pulls_per_worker": pulls,
            "sync/policy_lag": totals["lag"], "sync/bytes": totals["bytes"],
        }  # fmt: skip
        if np.isfinite(kl):
            scalars["sync/kl"] = kl
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        iteration, mean_return = self._iteration, self.curve.mean_return
        status = f"step {step:,} SPS {sps} {_status(mean_return, kl)}, pulled {pulls:g} of {versions} versions"
        self._progress.update(self._task, completed=iteration, status=status)
        if not self._is_live and iteration * 20 // self._number > self._printed:
            self._printed = iteration * 20 // self._number
            if self.learners.rank == 0:
                say(status)
        self._stop = self._due[1]

    def finish(self, eval_returns: np.ndarray, **more: Any) -> None:
        """Log and print the evaluation, draw the learning curve, and write ``summary.json``, with
        ``more`` in it.

        Numbers that are not finite are null in it. If a file cannot be written, exit with one line.
        """
        if len(eval_returns):
            self.writer.add_scalar("eval/return_mean", eval_returns.mean(), self.global_step)
        summary = _finite(_summary(self, eval_returns, more))
        if self._wandb:
            self._wandb.summary.update(summary)
        try:
            with replaced(f"{self.directory}/summary.json") as file:
                file.write(json.dumps(summary, indent=2).encode())
            with replaced(f"{self.directory}/learning_curve.png") as file:
                args = self.args
                self.curve.plot(f"{args.exp_name} on {args.env_id}, seed {args.seed}", file)
            if self._unsaved:
                self._write()
        except OSError as error:
            check(False, f"cannot write to {self.directory}: {error.strerror or error}")
        finally:  # last, as no output is worth a file; but also where there is none
            _say_end(self, summary["pulls_per_worker"], eval_returns)


def _say_end(run: Run, pulls: float, eval_returns: np.ndarray) -> None:
    say(f"{run.global_step:,} steps in {run._trained_seconds:.0f} s; {pulls:g} pulls a worker")
    say(f"{_means(run.curve.mean_return, eval_returns)}; see {run.directory}")


def _finite(value: Any) -> Any:
    """Return what JSON can hold of a value: None in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _status(mean_return: float, kl: float) -> str:
    mean = f"{mean_return:.1f}" if np.isfinite(mean_return) else "of no episode yet"
    return (
        f"return {mean} KL {kl:.3f} nats"
        if np.isfinite(kl)
        else f"return {mean} KL not measured yet"
    )


def _means(mean_return: float, eval_returns: np.ndarray) -> str:
    evaluation = f", in the evaluation {eval_returns.mean():.1f}" if len(eval_returns) else ""
    return f"mean return {mean_return:.1f}{evaluation}"


def _by_clock(run: Run) -> tuple[bool, bool]:
    is_due, most = (
        time.monotonic() - run._saved_at > run.args.checkpoint_interval,
        run.args.max_seconds,
    )
    return is_due, most is not None and run.seconds > most


def _check_alike(fingerprints: list[np.ndarray], step: int) -> None:
    """Exit with one line if the learners' models or random numbers differ."""
    for rank, own in enumerate(fingerprints):
        for fits, what in zip(
            own == fingerprints[0], ("model is", "random numbers are"), strict=False
        ):
            after = f"after step {step}: a machine may be broken, or of another kind"
            check(fits, f"learner {rank}'s {what} not the first one's {after}")


def _summary(run: Run, eval_returns: np.ndarray, more: dict[str, Any]) -> dict[str, Any]:
    seconds, mean_return, workers = (
        run._trained_seconds,
        run.curve.mean_return,
        run._workers.known(),
    )
    evaluation = (
        [float(eval_returns.mean()), float(eval_returns.std())]
        if len(eval_returns)
        else [None, None]
    )
    return {
        "global_step": run.global_step, "wall_seconds": seconds, "sps": run.global_step / seconds, **more,
        "pulls_per_worker": workers["pulls"] / workers["workers"], "sync_bytes": workers["sync_bytes"],
        "mean_return_100": mean_return,
        "eval_return_mean": evaluation[0], "eval_return_std": evaluation[1],
        "kl_threshold": run.args.kl_threshold, "seed": run.args.seed, "env_id": run.args.env_id,
        "worker_restarts": workers["restarts"], "args": vars(run.args),
    }  # fmt: skip
