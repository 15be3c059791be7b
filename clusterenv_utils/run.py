"""A run of a training script: a directory, logs, and a loop that saves and ends cleanly."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch

from clusterenv_runtime import ClusterEnv, Policy, Rollout, StartupError
from clusterenv_runtime.errors import one_line

from .arguments import (
    ScriptArgs,
    check_flags,
    new_name,
    resume_command,
    resumed_flags,
    resumed_path,
)
from .checkpoint import (
    State,
    has_checkpoint,
    is_finite,
    load_checkpoint,
    lock,
    rng_state,
    save_checkpoint,
    save_model,
    set_rng_state,
)
from .dry_run import show_workers
from .errors import (
    CheckpointError,
    ScriptError,
    check,
    check_finite,
    one_line_for,
    one_line_for_environments,
)
from .evaluation import Evaluations
from .logs import (
    FLUSH_S,
    LearningCurve,
    NoWriter,
    as_json,
    log_in,
    open_writer,
    start_wandb,
    summary_of,
    workers_scalars,
    write_results,
)
from .progress import Progress, changes_of, end_of, say, start_of, status_of
from .signals import Signals
from .stream import ready_chunks

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Run:
    """A run of a script, in ``runs/NAME``: its logs, checkpoints, evaluations, loop, and end.

        run = Run(parse(Args))
        args = run.args  # with --resume the run's flags, except for those given now
        writer = run.begin()  # --dry-run ends here
        with run.setup():
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
        rank: of several learners, which share the run, this one's number. Learner 0 alone writes
            the run's files.
        program: the command that runs the script, up to its name.

    Attributes:
        args: the flags of the run.
        path: the run's directory.
        global_step: the environment steps so far, which the script or `stream` counts.
        waiting: the seconds spent waiting for chunks.
        stops: whether this iteration is the last one. `report` sets it after --max-seconds.
        video_name: the ``run_name`` to pass to `make_env`. A resumed run has a new one.
    """

    def __init__(
        self,
        args: ScriptArgs,
        fixed: Iterable[str] = (),
        rank: int | None = None,
        program: Iterable[str] = ("python",),
    ) -> None:
        alone = f"{sys.argv[0]} has one learner, and torchrun starts several: see docs/learners.md"
        check(rank is not None or "TORCHELASTIC_RUN_ID" not in os.environ, alone)
        self._writes, self._program = not rank, program
        self.parts: dict[str, Any] = {}
        self._saved: State | None = None
        if args.resume is None:
            self.path = f"runs/{args.run_name or new_name(args)}"
        else:
            self.path = resumed_path(args)
            with one_line_for(OSError, text=f"cannot write to {self.path}"):
                # Lock first, because the lock's holder may be about to write the next checkpoint.
                if self._writes and not args.dry_run and os.path.isdir(self.path):
                    lock(self.path)
                saved = load_checkpoint(self.path)
            with one_line_for(msgspec.ValidationError, text=f"{self.path} is no run's"):
                self._saved = msgspec.convert(saved, State)
            args = resumed_flags(self._saved.args, args, fixed)
        if args.num_envs is None:
            args.num_envs = args.num_workers * args.envs_per_worker
        check_flags(args)
        self.args = cast(Any, args)  # the script's class has more fields
        self.name = os.path.relpath(self.path, "runs")
        self.global_step = self._saved.global_step if self._saved else 0
        self.waiting = self._saved.waiting if self._saved else 0.0
        self.video_name = f"{self.name}/from-{self.global_step}" if self._saved else self.name
        self.stops = False
        total = f"--total-timesteps {self.args.total_timesteps}"
        done = f"the {self.global_step} steps that {args.resume} has done"
        check(self.args.total_timesteps >= self.global_step, f"{total} must be at least {done}")

    def begin(self) -> Any:
        """Create the run's directory, which no two runs share, and return the writer of its logs.

        --dry-run prints the workers' commands and ends here.
        """
        args, step = self.args, self.global_step
        total = f"--total-timesteps {args.total_timesteps}"
        check(getattr(args, "num_iterations", 1), f"{total} is less than one iteration")
        if args.dry_run:
            show_workers(args, f"{self.path}/workers")
        if args.track and self._writes:
            log_in()
        self._signals = Signals(speaks=self._writes)
        self._is_new = False
        if self._writes:
            self._make_directory()
        self.curve = self.keep("curve", LearningCurve())
        self._wandb = None
        if args.track and self._writes:
            self._wandb = start_wandb(
                args, self.name, self._saved.wandb_id if self._saved else None
            )
        is_new = self._saved is None
        self.writer: Any = (
            open_writer(self.path, args, step, is_new) if self._writes else NoWriter()
        )
        self._progress = Progress(is_quiet=not self._writes)
        if self._writes:
            say(start_of(args, self.path))
            if self._saved:
                say(changes_of(args, self._saved.args, step))
        return self.writer

    def _make_directory(self) -> None:
        is_resumed, may_exist = self._saved is not None, self.args.run_name is not None
        with one_line_for(OSError, text=f"cannot write to {self.path}"):
            self._is_new = not os.path.exists(self.path)
            os.makedirs(self.path, exist_ok=is_resumed or may_exist)
            lock(self.path)
        to_go_on = f"to resume it: --resume {self.path}, otherwise choose another --run-name"
        has_begun = f"{self.path} has already begun; {to_go_on}"
        check(is_resumed or not has_checkpoint(self.path), has_begun)

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Make the environments in this block, and check their spaces.

        If flags are wrong, remove the directory of a new run, and raise a `ScriptError`. Remove it
        also if a signal ends the wait for workers.
        """
        try:
            with one_line_for_environments(self.args):
                yield
        except (ScriptError, StartupError, SystemExit):
            self._progress.close()
            if self._is_new:
                self.writer.close()
                shutil.rmtree(self.path, ignore_errors=True)
                with suppress(OSError):  # the parent directory holds other runs
                    os.rmdir(os.path.dirname(self.path))
            raise

    def options(self) -> dict[str, Any]:
        """Return the options of the run's `ClusterEnv`: its flags, and where its workers log."""
        return {**self.args.options(), "log_dir": f"{self.path}/workers"}

    def keep(self, name: str, part: T, in_checkpoints: bool = True) -> T:
        """Have checkpoints hold the state of ``part``. Return it, restored in a resumed run.

        The part has the methods ``state_dict`` and ``load_state_dict``. Without ``in_checkpoints``,
        new checkpoints hold no state of it. What the resumed one holds is restored all the same.
        """
        if name in self.parts:
            raise ValueError(f"there is a part {name!r} already")
        self.parts[name] = part if in_checkpoints else None
        if self._saved:
            parts = self._saved.parts
            of_another = f"{self.path} is from another version of this script"
            check(name in parts, f"{of_another}: it has no {name!r}")
            if (state := parts[name]) is not None:
                self._restore(name, lambda: cast(Any, part).load_state_dict(state))
        return part

    def _restore(self, name: str, load: Callable[[], object]) -> None:
        """Load a piece of the checkpoint, which anyone may have made."""
        try:
            load()
        except Exception as error:
            why = f"its {name!r} does not fit: {one_line(error)}"
            raise ScriptError(f"{self.path} cannot be resumed: {why}") from error

    def save(self) -> None:
        """Write a checkpoint, and with --save-model the model.

        Raises:
            CheckpointError: a file cannot be written, or the weights are not finite.
        """
        self._unwritten: State | None = None
        if not self._writes:
            return
        for part in self.parts.values():
            if isinstance(part, torch.nn.Module) and not is_finite(part):
                raise CheckpointError("the weights are not finite")
        parts = {
            name: None if part is None else part.state_dict() for name, part in self.parts.items()
        }
        wandb_id = self._wandb.id if self._wandb else None
        self._unwritten = State(
            asdict(self.args), parts, rng_state(), self.global_step, self.seconds, self.waiting,
            wandb_id,
        )  # fmt: skip
        self._write()

    def _write(self) -> None:
        state = self._unwritten
        if state is None:
            return
        try:
            with suppress(OSError):  # of a full disk, which may still have room for a checkpoint
                # Logs up to here belong to this checkpoint. A resumed run drops later logs.
                self.writer.flush()
            save_checkpoint(self.path, msgspec.structs.asdict(state), state.global_step)
            if self.args.save_model:
                save_model(self.path, self._model.state_dict(), self.args)
        except OSError as error:
            raise CheckpointError(error.strerror or error) from None
        self._unwritten = None

    def _try_to_save(self) -> None:
        """Save, or warn, because a full disk may have room the next time, or in `finish`."""
        try:
            self.save()
        except CheckpointError as error:
            text = "no checkpoint of %s at step %d: %s; training goes on"
            logger.warning(text, self.path, self.global_step, error)

    @contextmanager
    def training(self, envs: ClusterEnv, model: torch.nn.Module, policy: Policy) -> Iterator[None]:
        """Train in this block. The time counts, and a signal writes a checkpoint and ends the run.

        --save-model saves ``model``, and --eval-interval evaluates ``policy``. Build nothing here
        that draws random numbers, because a resumed run restores its generators first.
        """
        with self.setup():
            self._evaluations = Evaluations(self.args, envs, policy, model, self.curve, self.writer)
        self._envs, self._model = envs, model
        self._unwritten = None
        self._trained_seconds: float | None = None
        self._has_ended = False
        self._next_workers_log = 0.0
        seconds = 0.0
        if saved := self._saved:
            seconds = saved.seconds
            self._restore("rng", lambda: set_rng_state(saved.rng))
        self._start = time.monotonic() - seconds
        to_go_on = resume_command(self.args, self.path, self._program)
        try:
            with envs, self._signals.saving(envs, self.save, to_go_on):
                yield
        finally:
            self._evaluations.close()
            self._progress.close()
            with suppress(OSError):  # of a full disk, which has ended the run already
                self.writer.close()

    @property
    def seconds(self) -> float:
        """The seconds of training so far; never 0, because some clocks advance in large steps."""
        return self._trained_seconds or max(time.monotonic() - self._start, 1e-3)

    def iterations(self, number: int, steps: int) -> Iterator[int]:
        """Yield the iterations that remain of ``number``, each of ``steps`` environment steps.

        They count from 1. Between two of them, the run writes a checkpoint if one is due, and
        responds to signals. After --max-seconds, the next one that calls `report` is the last.
        """
        check(number >= 1, f"--total-timesteps is less than the {steps} steps of one iteration")
        done = -(-self.global_step // steps)
        self._number = number
        self._progress.begin(number, done)
        self._saved_at = time.monotonic()
        self.stops = False
        try:
            for self._iteration in range(done + 1, number + 1):
                self._signals.raise_if_received()
                self._evaluations.go_on(self.global_step)
                if time.monotonic() - self._saved_at > self.args.checkpoint_interval:
                    self._try_to_save()
                    self._saved_at = time.monotonic()
                self._progress.tell(f"step {self.global_step:,}")
                yield self._iteration
                if self.stops:
                    break
        finally:  # also if the loop is left by `break`
            self._trained_seconds = self.seconds
        self._end_training()

    def _end_training(self) -> None:
        """Write the last checkpoint, and end the evaluations during training."""
        self._has_ended = True
        self._progress.end()
        self._try_to_save()
        self._signals.raise_if_received()
        if self._evaluations.finish(self._signals.raise_if_received):
            self._try_to_save()

    def chunks(self, envs: ClusterEnv) -> Iterator[Rollout]:
        """Yield the remaining chunks of a run that takes `num_workers` in each iteration.

        If each iteration publishes the policy once, before its chunks, no policy that acted is
        older than `max_policy_lag` + `outstanding` versions.
        """
        left = self.args.num_iterations - self.global_step // self.args.batch_size
        lag = self.args.max_policy_lag
        return ready_chunks(self, envs, left * self.args.num_workers, lag, lambda: None)

    def stream(self, envs: ClusterEnv, explore: Callable[[int], None]) -> Iterator[Rollout]:
        """Yield a chunk for each remaining iteration, and count its steps in `global_step`.

        Before each request, ``explore(steps)`` sets the `Policy.numbers` that travel with it.
        """
        number, size = self.args.num_iterations, self.args.chunk_size
        done = -(-self.global_step // size)
        explore(self.global_step)
        steps = itertools.count((done + 1) * size, size)
        ready = ready_chunks(self, envs, number - done, None, lambda: explore(next(steps)))
        for _, chunk in zip(self.iterations(number, size), ready, strict=False):
            # From here to the next chunk, nothing waits for workers, so a checkpoint holds this
            # chunk either completely or not at all. If it is not finite, the run ends before it
            # counts.
            self.add_episodes(chunk)
            self.global_step += size
            yield chunk

    def add_episodes(self, rollout: Rollout) -> None:
        """Count the episodes of a rollout. End the run if its observations are not finite."""
        check_finite(rollout)
        self.curve.add_episodes(rollout.episodic_returns, rollout.episodic_lengths)

    def _is_time_up(self) -> bool:
        return self.args.max_seconds is not None and self.seconds > self.args.max_seconds

    def report_is_due(self) -> bool:
        """Return whether this iteration is one of some 200 to 400 that `report`, or the last."""
        is_one = self._iteration % max(self._number // 200, 1) == 0
        return is_one or self._iteration == self._number or self._is_time_up()

    def report(self, rollout: Rollout, versions: int) -> None:
        """Log the episodes since the last report, and the synchronization of the policy.

        ``rollout`` is the latest one. Workers could have pulled ``versions`` versions by now.
        """
        envs, step, sps = self._envs, self.global_step, int(self.global_step / self.seconds)
        shares = [len(rows) for rows in np.array_split(range(envs.num_envs), envs.num_workers)]
        pulls = float(envs.pulls.mean())
        kl = float(envs.divergence @ shares) / envs.num_envs
        lags = envs.policy_version - rollout.policy_versions
        scalars = {
            **self.curve.add_point(step, pulls, versions),
            "charts/SPS": sps, "charts/worker_restarts": len(envs.restarts),
            "sync/pulls_per_worker": pulls, "sync/policy_lag": lags.sum() / max(len(lags), 1),
            "sync/bytes": envs.sync_bytes,
        }  # fmt: skip
        if np.isfinite(kl):  # once every worker has acted
            scalars["sync/kl"] = kl
        if self.waiting:  # for chunks, of a stream
            scalars["time/learner_waiting"] = self.waiting
            scalars["time/workers_waiting"] = envs.waiting_seconds.mean()
        self._add_scalars(scalars)
        if time.monotonic() > self._next_workers_log:
            self._next_workers_log = time.monotonic() + FLUSH_S
            self._add_scalars(workers_scalars(envs, self.seconds))
        status = status_of(step, sps, self.curve.mean_return, kl, pulls, versions)
        self._progress.show(self._iteration, status)
        self.stops = self._is_time_up()

    def log(self, group: str, scalars: dict[str, torch.Tensor | float]) -> None:
        """Log scalars as ``group/name``: numbers, and tensors with one copy from their device."""
        tensors = {name: each for name, each in scalars.items() if isinstance(each, torch.Tensor)}
        values = torch.stack([*tensors.values()]).tolist() if tensors else []
        numbers = {**scalars, **dict(zip(tensors, values, strict=True))}
        self._add_scalars({f"{group}/{name}": value for name, value in numbers.items()})

    def _add_scalars(self, scalars: dict[str, Any]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, self.global_step)

    def finish(self, eval_returns: np.ndarray, **more: Any) -> None:
        """End the workers, log the evaluation, and write the curve and ``summary.json``."""
        if not self._has_ended:  # the loop was left by `break`
            self._end_training()
        self._envs.close()
        self._signals.raise_if_received()
        if len(eval_returns):
            self.writer.add_scalar("eval/return_mean", eval_returns.mean(), self.global_step)
        summary = {
            "global_step": self.global_step, "wall_seconds": self.seconds,
            "sps": self.global_step / self.seconds, **more,
            "policy_versions": self._envs.policy_version, "learner_waiting_seconds": self.waiting,
            "workers_waiting_seconds": self._envs.waiting_seconds.tolist(),
            **summary_of(self.args, self._envs.state_dict(), self.curve, eval_returns),
        }  # fmt: skip
        if self._wandb:
            self._wandb.summary.update(msgspec.json.decode(as_json(summary)))
        try:
            with one_line_for(OSError, CheckpointError, text=f"cannot write to {self.path}"):
                write_results(self.path, summary, self.curve)
                self._write()
        finally:  # print last, so that no file depends on it, but also if a file fails
            say(end_of(summary, self.path))
