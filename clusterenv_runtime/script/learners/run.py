"""A run that several learners share: one directory, one log, and one clock."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from ...env import ClusterEnv
from ...errors import LearnerLostError
from ...policy.base import Policy
from ...rollout import Rollout
from ..arguments import ScriptArgs, spell
from ..checkpoint import has_checkpoint
from ..checks import check, one_line_for
from ..curve import LearningCurve
from ..logs import Logs
from ..run import Run
from ..signals import Signals
from .exchange import fingerprint
from .learners import Learners
from .signals import LearnersSignals
from .watch import DONE

T = TypeVar("T")
DIVIDED = "num_workers", "min_workers"  # flags that count for all learners together


class LearnersRun(Run):
    """A `Run` of several learners, of which this process is one. The first one writes its files.

    Attributes:
        learners: all of them.
        rows: the environments of this learner, of ``args.num_envs``.
    """

    has_learners = True

    def __init__(self, args: ScriptArgs, fixed: Iterable[str] = ()) -> None:
        self._agreed = False, False  # whether a checkpoint is due, and whether the time is up
        self._workers: SharedWorkers | None = None
        with one_line_for(LearnerLostError):
            self.learners = Learners.of_torchrun()
            name = self.learners.run_before()
            if name is not None:
                path = f"runs/{name}" if has_checkpoint(f"runs/{name}") else ""
                args.resume = self.learners.tell("resume", path) or args.resume
        self.writes = self.learners.rank == 0
        super().__init__(args, fixed)
        if self.learners.world_size > 1:
            check_for_learners(self.args, self.learners.world_size)
        self.rows = self.learners.rows(self.args.num_envs)
        self.learners.first_row = self.rows.start

    def _load(self, args: ScriptArgs) -> None:
        with one_line_for(LearnerLostError):
            if self.writes:
                super()._load(args)
                self.learners.tell("step", str(self.directory.saved["global_step"]))
            else:
                self.directory.load(int(self.learners.tell("step", "")), locks=False)

    def _make_signals(self) -> Signals:
        return LearnersSignals(self.learners) if self.learners.world_size > 1 else Signals()

    def _make_directory(self) -> None:
        flags = {spell(name): value for name, value in vars(self.args).items()}
        with one_line_for(LearnerLostError):
            self.learners.meet({**flags, "done": self.global_step}, self.args.cuda)
            if self.writes:
                super()._make_directory()
            name = self.learners.tell("name", self.name)
        check(os.path.basename(name) == name, f"the first learner's run is {name!r}, no name")
        self.directory.path = f"runs/{name}"

    def _open_logs(self, step: int, is_new: bool, wandb_id: str | None) -> Any:
        return super()._open_logs(step, is_new, wandb_id) if self.writes else _NoLogs()

    def options(self) -> dict[str, Any]:
        """Return the options of this learner's `ClusterEnv`."""
        options, number = super().options(), self.learners.world_size
        if number == 1:
            return options
        for name in DIVIDED:
            options[name] = options[name] and options[name] // number
        options["log_dir"] += f"/learner-{self.learners.rank}"
        return options | {"learners": self.learners}

    def keep(self, name: str, part: T) -> T:
        if not isinstance(part, ClusterEnv):
            return super().keep(name, part)
        self._workers = SharedWorkers(part, self.writes)
        super().keep(name, self._workers)
        return part

    def save(self) -> None:
        with self.learners.saving():
            if self.writes:
                super().save()

    @contextmanager
    def training(self, envs: ClusterEnv, model: torch.nn.Module, policy: Policy) -> Iterator[None]:
        self._workers = self._workers or SharedWorkers(envs, self.writes)
        if not self.writes:
            self.args.eval_interval = None  # the first one evaluates
        self.program = self.learners.command
        self.learners.raise_if_interrupted = self._signals.raise_if_received
        self.learners.note_run(self.name)
        if self.learners.watch is not None:
            self.learners.watch.end = self._signals.interrupt
        with super().training(envs, model, policy):
            yield

    def iterations(self, number: int, steps: int) -> Iterator[int]:
        yield from super().iterations(number, steps)
        self.learners.leave(DONE)
        if not self.writes:
            sys.exit()

    def _is_save_due(self) -> bool:
        return super()._is_save_due() if self.learners.world_size == 1 else self._agreed[0]

    def _is_time_up(self) -> bool:
        return super()._is_time_up() if self.learners.world_size == 1 else self._agreed[1]

    def add_episodes(self, rollout: Rollout) -> None:
        """Count the episodes of all learners' rollouts. Call it before you learn from yours.

        Here the learners agree on what the clock of the first one says, and compare their models.
        """
        if self.learners.world_size == 1:
            super().add_episodes(rollout)
            return
        clock = [super()._is_save_due(), super()._is_time_up()]
        facts = [*clock, *fingerprint(self._model)]
        own = np.concatenate([facts, rollout.episodic_returns, rollout.episodic_lengths])
        all_ranks = self.learners.gather(own)
        check_alike([row[len(clock) : len(facts)] for row in all_ranks], self.global_step)
        self._agreed = bool(all_ranks[0][0]), bool(all_ranks[0][1])
        for row in all_ranks:
            returns, lengths = row[len(facts) :].reshape(2, -1)
            self.logs.curve.add_episodes(returns, lengths.astype(np.int64))

    def _measures(self, rollout: Rollout) -> tuple[float, float, float, int, int]:
        measures = super()._measures(rollout)
        *_, sync_bytes, _ = measures
        self._workers.others_bytes = sync_bytes - self._envs.sync_bytes
        return measures

    def _sum(self, values: np.ndarray) -> np.ndarray:
        return self.learners.sum(values)

    def _envs_state(self) -> dict[str, Any]:
        return self._workers.state_dict()


class SharedWorkers:
    """The state of a learner's `ClusterEnv` in a checkpoint, which any number of learners can load.

    It has the pulls and restarts of the first learner's workers, and the bytes of all. All workers
    pull together, but for replacements.
    """

    def __init__(self, envs: ClusterEnv, is_first: bool) -> None:
        self._envs, self._is_first = envs, is_first
        self.others_bytes = 0  # of weights, that other learners have sent

    def state_dict(self) -> dict[str, Any]:
        state = self._envs.state_dict()
        return state | {"sync_bytes": state["sync_bytes"] + self.others_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._is_first:
            state = state | {"sync_bytes": 0, "restarts": []}
        self._envs.load_state_dict(state)


class _NoLogs(Logs):
    """In place of `Logs`, for all learners but the first."""

    def __init__(self) -> None:
        self.curve = LearningCurve()
        self.wandb = None
        self.writer = _NoWriter()


class _NoWriter:
    def __enter__(self) -> _NoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: Any) -> None:
        pass

    add_scalar = add_text = flush = close = _nothing


def check_for_learners(args: ScriptArgs, number: int) -> None:
    """Exit with one line if these flags do not go with so many learners."""
    one = "one learner: run it without torchrun"
    check(not args.dry_run, f"--dry-run prints the workers' commands of {one}")
    for name in ("num_envs", *DIVIDED):
        value = getattr(args, name) or 0
        multiple = f"must be a multiple of the {number} learners of torchrun"
        check(value % number == 0, f"{spell(name)} {value} {multiple}")
    own = f"cannot be that of {number} learners: each listens on one of its own"
    check(not args.port, f"--port {args.port} {own}")
    gpus = torch.cuda.device_count() if args.cuda else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fewer = f"this machine has {gpus} GPUs for its {here} learners"
    check(not gpus or here <= gpus, f"{fewer}: start fewer of them, or give --no-cuda")


def check_alike(fingerprints: list[np.ndarray], step: int) -> None:
    """Exit with one line if the learners' models or random numbers differ."""
    after = f"after step {step}: a machine may be broken, or of another kind"
    for rank, own in enumerate(fingerprints):
        same_model, same_numbers = own == fingerprints[0]
        check(same_model, f"learner {rank}'s model is not the first one's {after}")
        check(same_numbers, f"learner {rank}'s random numbers are not the first one's {after}")
