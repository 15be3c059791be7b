"""A run of a training script: a directory, logs, and a loop that saves and ends cleanly."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.errors import CheckpointError
from clusterenv_runtime.policy.base import Policy
from clusterenv_runtime.rollout import Rollout

from .arguments import ScriptArgs, check_flags
from .checkpoint import as_checkpoint_error, rng_state, save_checkpoint, set_rng_state
from .checks import check, check_finite, one_line_for
from .directory import RunDirectory
from .dry_run import worker_commands
from .environments import env_setup
from .evaluation import Evaluations
from .logs import Logs, log_in
from .model import save_model
from .output import print_line
from .progress import Progress, end_of, say, size_of, start_of, status_of
from .resume import flags_of, name_of, resume_command
from .signals import Signals
from .status import StatusFile
from .stream import chunks
from .summary import summary_of, write_results

logger = logging.getLogger(__name__)
T = TypeVar("T")
ALWAYS_FIXED = "num_envs", "envs_per_worker", "env_kwargs"


class Run:
    """A run of a script, in ``runs/NAME``: its logs, checkpoints, evaluations, loop, and end.

        run = Run(parse(Args))
        args = run.args  # with --resume the run's flags, except for those given now
        writer = run.begin()  # --dry-run ends here
        with env_setup(run):
            envs = run.keep("envs", ClusterEnv(...))
        agent = run.keep("agent", Agent(envs))
        with run.training(envs, agent, policy):
            for iteration in run.iterations(args.num_iterations, args.batch_size):
                run.global_step += args.batch_size
                run.report(rollout, versions=iteration)
            run.finish(evaluate(args, envs, policy))

    Args:
        args: the flags of the command line, as `parse` returns them.
        fixed: the names of the flags that must not change when the run is resumed.

    Attributes:
        args: the flags of the run.
        global_step: the environment steps so far, which the script or `stream` counts.
        waiting: the seconds spent waiting for chunks.
        video_name: the ``run_name`` to pass to `make_env`.
    """

    has_learners = False  # whether torchrun may have started several processes
    writes = True  # whether this process writes the logs and files
    program = ("python",)  # the command that runs the script

    def __init__(self, args: ScriptArgs, fixed: Iterable[str] = ()) -> None:
        if not self.has_learners:
            _check_is_alone()
        name = _new_name(args) if args.resume is None else name_of(args.resume, args.run_name)
        self.directory = RunDirectory(f"runs/{name}")
        if args.resume is not None:
            self.directory.load(locks=self.writes and not args.dry_run)
            args = flags_of(self.directory.saved, args, [*ALWAYS_FIXED, *fixed])
        if args.num_envs is None:
            args.num_envs = args.num_workers * args.envs_per_worker
        check_flags(args)
        self.args = cast(Any, args)  # the script's class has more fields
        self.global_step: int = self.directory.saved.get("global_step", 0)
        self.waiting: float = self.directory.saved.get("waiting", 0.0)
        done = f"the {self.global_step} steps that {args.resume} has done"
        total = f"--total-timesteps {self.args.total_timesteps}"
        check(self.args.total_timesteps >= self.global_step, f"{total} must be at least {done}")

    def begin(self) -> SummaryWriter:
        """Create the run's directory and return the writer of its logs; --dry-run exits here."""
        args, saved = self.args, self.directory.saved
        if args.dry_run:
            print_line("\n".join(worker_commands(args, f"{self.directory.path}/workers")))
            sys.exit()
        if args.track and self.writes:
            log_in()
        self._signals = Signals(speaks=self.writes)
        self._make_directory()
        self.video_name = _video_name(self)
        self.logs = self._open_logs(self.global_step, not saved, saved.get("wandb_id"))
        self.keep("curve", self.logs.curve)
        self._progress = Progress(is_quiet=not self.writes)
        self._status = StatusFile(self)
        if self.writes:
            say(start_of(args, self.directory.path, saved))
        return self.logs.writer

    def _make_directory(self) -> None:
        self.directory.make(may_exist=self.args.run_name is not None)

    def _open_logs(self, step: int, is_new: bool, wandb_id: str | None) -> Logs:
        return Logs(self.directory.path, self.args, step, is_new, wandb_id)

    def options(self) -> dict[str, Any]:
        """Return the options of the run's `ClusterEnv`: its flags, and where its workers log."""
        return {**self.args.options(), "log_dir": f"{self.directory.path}/workers"}

    def keep(self, name: str, part: T) -> T:
        """Have checkpoints hold the state of ``part``. Return it, restored in a resumed run."""
        self.directory.keep(name, part)
        return part

    def save(self) -> None:
        """Write a checkpoint, and with --save-model the model.

        Raises:
            CheckpointError: a file cannot be written, or the weights are not finite.
        """
        self._unwritten: Any = None
        # Logs up to here belong to this checkpoint. A resumed run drops later logs.
        self.logs.writer.flush()
        self._unwritten = {
            "parts": self.directory.state_dicts(), "rng": rng_state(), "args": asdict(self.args),
            "global_step": self.global_step, "seconds": self.seconds,
            "wandb_id": self.logs.wandb_id, "waiting": self.waiting,
        }  # fmt: skip
        self._write()

    @as_checkpoint_error()
    def _write(self) -> None:
        save_checkpoint(self.directory.path, self._unwritten, self.global_step)
        if self.args.save_model:
            save_model(self.directory.path, self._model.state_dict(), self.args)
        self._unwritten = None

    def _try_to_save(self) -> None:
        """Save, or warn, because a full disk may have room the next time, or in `finish`."""
        try:
            self.save()
        except CheckpointError as error:
            text = "no checkpoint of %s at step %d: %s; training goes on"
            logger.warning(text, self.directory.path, self.global_step, error)

    @contextmanager
    def training(self, envs: ClusterEnv, model: torch.nn.Module, policy: Policy) -> Iterator[None]:
        """Train in this block. The time counts, and a signal writes a checkpoint and ends the run.

        --save-model saves ``model``, and --eval-interval evaluates ``policy``. Build nothing here
        that draws random numbers, because a resumed run restores its generators first.
        """
        with env_setup(self):
            self._evaluations = Evaluations(self.args, envs, policy, model, self.logs)
        self._envs, self._model = envs, model
        self._unwritten = None
        self._trained_seconds: float | None = None
        self._has_ended = False
        if saved := self.directory.saved:
            self.directory.restore("rng", lambda: set_rng_state(saved["rng"]))
        self._start = time.monotonic() - saved.get("seconds", 0)
        to_go_on = resume_command(self.args, self.directory.path, [*self.program])
        saving = self._signals.saving(envs, self.save, to_go_on)
        telling = self._status.training(envs)
        with envs, self._evaluations, self.logs.writer, self._progress.bar, telling, saving:
            yield

    @property
    def seconds(self) -> float:
        """The seconds of training so far; never 0, because some clocks advance in large steps."""
        return self._trained_seconds or max(time.monotonic() - self._start, 1e-3)

    def iterations(self, number: int, steps: int) -> Iterator[int]:
        """Yield the iterations that remain of ``number``, each of ``steps`` environment steps.

        They count from 1. Between two of them, the run writes a checkpoint if one is due, and
        responds to signals. After --max-seconds, the next one that calls `report` is the last.
        """
        check(number >= 1, f"--total-timesteps must be at least {steps}, one iteration's steps")
        done = -(-self.global_step // steps)
        self._number = number
        self._progress.begin(number, done)
        self._saved_at = time.monotonic()
        self._stop = False
        try:
            for self._iteration in range(done + 1, number + 1):
                self._signals.raise_if_received()
                self._evaluations.go_on(self.global_step)
                if time.monotonic() - self._saved_at > self.args.checkpoint_interval:
                    self._try_to_save()
                    self._saved_at = time.monotonic()
                self._progress.tell(f"step {self.global_step:,}")
                self._status.tell()
                yield self._iteration
                if self._stop:
                    break
        finally:  # also if the loop is left by `break`
            self._trained_seconds = self.seconds
        self._end_training()

    def _end_training(self) -> None:
        """Write the last checkpoint, and end the evaluations during training."""
        self._has_ended = True
        self._progress.end()
        self._status.write("evaluating")
        self._try_to_save()
        self._signals.raise_if_received()
        if self._evaluations.finish(self._signals.raise_if_received):
            self._try_to_save()

    def stream(self, envs: ClusterEnv, explore: Callable[[int], None]) -> Iterator[Rollout]:
        """Yield a chunk for each remaining iteration; ``explore`` sets numbers of the next one."""
        return chunks(self, envs, explore)

    def _is_time_up(self) -> bool:
        return self.args.max_seconds is not None and self.seconds > self.args.max_seconds

    def add_episodes(self, rollout: Rollout) -> None:
        """Count the episodes of a rollout. End the run if its observations are not finite."""
        check_finite(rollout)
        self.logs.curve.add_episodes(rollout.episodic_returns, rollout.episodic_lengths)

    def report_is_due(self) -> bool:
        """Return whether this iteration is one of some 200 to 400 that `report`, or the last."""
        is_one = self._iteration % max(self._number // 200, 1) == 0
        return is_one or self._iteration == self._number or self._is_time_up()

    def report(self, rollout: Rollout, versions: int) -> None:
        """Log the episodes since the last report, and the synchronization of the policy.

        ``rollout`` is the latest one. Workers could have pulled ``versions`` versions by now.
        """
        step, sps = self.global_step, int(self.global_step / self.seconds)
        pulls, kl, lag, sync_bytes, restarts = self._measures(rollout)
        scalars = {
            **self.logs.curve.add_point(step, pulls, versions),
            "charts/SPS": sps, "charts/worker_restarts": restarts,
            "sync/pulls_per_worker": pulls, "sync/policy_lag": lag, "sync/bytes": sync_bytes,
        }  # fmt: skip
        if np.isfinite(kl):  # once every worker has acted
            scalars["sync/kl"] = kl
        for tag, value in scalars.items():
            self.logs.writer.add_scalar(tag, value, step)
        status = status_of(step, sps, self.logs.curve.mean_return, kl, pulls, versions)
        self._progress.show(self._iteration, status)
        self._stop = self._is_time_up()

    def _measures(self, rollout: Rollout) -> tuple[float, float, float, int, int]:
        """Return mean pulls per worker, mean KL and lag per environment, bytes, and restarts."""
        sums = self._sum(_measured(self._envs, rollout)).tolist()
        workers, pulls, num_envs, kl, rows, lag, sync_bytes, restarts = sums
        return pulls / workers, kl / num_envs, lag / max(rows, 1), int(sync_bytes), int(restarts)

    def _sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of values over all learners."""
        return values

    def finish(self, eval_returns: np.ndarray, **more: Any) -> None:
        """End the workers, log the evaluation, and write the curve and ``summary.json``."""
        if not self._has_ended:  # the loop was left by `break`
            self._end_training()
        self._envs.close()
        self._signals.raise_if_received()
        if len(eval_returns):
            self.logs.writer.add_scalar("eval/return_mean", eval_returns.mean(), self.global_step)
        envs, curve = self.directory.parts.get("envs", self._envs), self.logs.curve
        summary = {
            "global_step": self.global_step, "wall_seconds": self.seconds,
            "sps": self.global_step / self.seconds, **more,
            **summary_of(self.args, envs.state_dict(), curve, eval_returns),
        }  # fmt: skip
        self.logs.add_summary(summary)
        try:
            with one_line_for(
                OSError, CheckpointError, text=f"cannot write to {self.directory.path}"
            ):
                write_results(self.directory.path, summary, curve)
                if self._unwritten:
                    self._write()
            self._status.write("finished")
        finally:  # print last, so that no file depends on it, but also if a file fails
            say(end_of(summary, self.directory.path))


def _check_is_alone() -> None:
    """Exit with a one-line error if torchrun has started this process."""
    alone = f"{sys.argv[0]} has one learner, and torchrun starts several"
    check("TORCHELASTIC_RUN_ID" not in os.environ, f"{alone}: see docs/learners.md")


def _new_name(args: Any) -> str:
    if args.run_name is not None:
        return str(args.run_name)
    env_id = re.sub("[/:]", "-", args.env_id)
    now = datetime.now()
    time_of_day = f"{now:%H%M%S}-{now.microsecond // 1000:03}"  # jobs of an array start together
    return f"{env_id}__{args.exp_name}__{args.seed}__{now:%Y%m%d}-{time_of_day}"


def _video_name(run: Run) -> str:
    """Return the folder in `videos` to which a run records. A resumed run has a new one.

    Turn --capture-video off if the run has no steps left.
    """
    args, step = run.args, run.global_step
    ends_at = getattr(args, "num_iterations", 0) * size_of(args)
    if args.capture_video and 0 < ends_at <= step:
        args.capture_video = False  # only the evaluation is left
        instead = "--eval-video records one more evaluation episode"
        logger.warning("--capture-video has nothing left to record; %s", instead)
    name = run.directory.name
    return f"{name}/from-{step}" if run.directory.saved else name


def _measured(envs: ClusterEnv, rollout: Rollout) -> np.ndarray:
    """Return sums over workers and environments, and the numbers of both, as float64."""
    lags = envs.policy_version - rollout.policy_versions
    shares = [len(rows) for rows in np.array_split(range(envs.num_envs), envs.num_workers)]
    sums = [
        envs.num_workers, envs.pulls.sum(), envs.num_envs, envs.divergence @ shares,
        len(lags), lags.sum(), envs.sync_bytes, len(envs.restarts),
    ]  # fmt: skip
    return np.array(sums, np.float64)
