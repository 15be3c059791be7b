"""A run that several learners share: one directory, one log, and one clock."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.rollout import Rollout

from ..arguments import ScriptArgs, spell
from ..checkpoint import has_checkpoint
from ..checks import check, check_finite
from ..curve import LearningCurve
from ..logs import Logs
from ..run import Run
from .learners import Learners

T = TypeVar("T")


class LearnersRun(Run):
    """A `Run` of several learners. This process is one of them; the first one writes its files.

    Attributes:
        learners: all learners.
        rows: the indices of this learner's environments, among ``args.num_envs``.
    """

    has_learners = True

    def __init__(self, args: ScriptArgs, fixed: Iterable[str] = ()) -> None:
        self.learners = Learners.of_torchrun(args.cuda)
        self.writes = self.learners.rank == 0
        self.program = self.learners.command
        before = f"runs/{self.learners.run_before()}"
        resume = before if has_checkpoint(before) else ""
        args.resume = self.learners.tell(resume)[0] or args.resume
        super().__init__(args, fixed)
        check_for_learners(self.args, self.learners.world_size)
        flags = {spell(name): repr(value) for name, value in vars(self.args).items()}
        flags["the checkpoint's step"] = str(self.global_step)
        flags["torch.distributed's backend"] = self.learners.backend
        check_flags_are_alike([json.loads(text) for text in self.learners.tell(json.dumps(flags))])
        if not self.writes:
            self.args.eval_interval = None  # only the first learner evaluates
        self.rows = self.learners.rows(self.args.num_envs)
        self.learners.first_row = self.rows.start
        self._time_is_up = False

    def _make_directory(self) -> None:
        if self.writes:
            super()._make_directory()
        name = self.learners.tell(self.directory.name)[0]
        self.learners.note_run(name)
        self.directory.path = f"runs/{name}"

    def _open_logs(self, step: int, is_new: bool, wandb_id: str | None) -> Any:
        return super()._open_logs(step, is_new, wandb_id) if self.writes else _NoLogs()

    def options(self) -> dict[str, Any]:
        """Return the options of this learner's `ClusterEnv`."""
        options, number = super().options(), self.learners.world_size
        if number == 1:
            return options
        options["num_workers"] //= number
        options["log_dir"] += f"/learner-{self.learners.rank}"
        return options | {"learners": self.learners}

    def keep(self, name: str, part: T) -> T:
        if not isinstance(part, ClusterEnv):
            return super().keep(name, part)
        self._workers = SharedWorkers(part, self.writes)
        super().keep(name, self._workers)
        return part

    def save(self) -> None:
        if self.writes:
            super().save()

    def _end_training(self) -> None:
        super()._end_training()
        self.learners.part()
        if not self.writes:
            sys.exit()

    def _is_time_up(self) -> bool:
        return self._time_is_up

    def add_episodes(self, rollout: Rollout) -> None:
        """Count the episodes of all learners' rollouts. Call it before learning from this one's.

        The learners also agree on what the first one's clock says, and compare their models.
        """
        check_finite(rollout, self.rows.start)
        facts = [super()._is_time_up(), *fingerprint(self._model)]
        own = np.concatenate([facts, rollout.episodic_returns, rollout.episodic_lengths])
        everyones = self.learners.gather(own)
        check_models_are_alike([row[1 : len(facts)] for row in everyones], self.global_step)
        self._time_is_up = bool(everyones[0][0])
        for row in everyones:
            returns, lengths = row[len(facts) :].reshape(2, -1)
            self.logs.curve.add_episodes(returns, lengths.astype(np.int64))

    def _measures(self, rollout: Rollout) -> tuple[float, float, float, int, int]:
        measures = super()._measures(rollout)
        *_, sync_bytes, _ = measures
        self._workers.others_bytes = sync_bytes - self._envs.sync_bytes
        return measures

    def _sum(self, values: np.ndarray) -> np.ndarray:
        return self.learners.sum(values)


class SharedWorkers:
    """The state of a learner's `ClusterEnv` in a checkpoint, which any number of learners can load.

    It has the pulls and restarts of the first learner's workers, and the bytes of all learners. All
    workers pull together, except for replacements.
    """

    def __init__(self, envs: ClusterEnv, is_first: bool) -> None:
        self._envs, self._is_first = envs, is_first
        self.others_bytes = 0  # bytes of weights that other learners have sent

    def state_dict(self) -> dict[str, Any]:
        state = self._envs.state_dict()
        return state | {"sync_bytes": state["sync_bytes"] + self.others_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._is_first:
            state = state | {"sync_bytes": 0, "restarts": []}
        self._envs.load_state_dict(state)


class _NoLogs(Logs):
    """Stands in for `Logs` on all learners except the first."""

    def __init__(self) -> None:
        self.curve = LearningCurve()
        self.wandb = None
        self.writer = _NoWriter()


class _NoWriter(nullcontext):
    """Stands in for a `SummaryWriter`. Its methods write nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def fingerprint(model: torch.nn.Module) -> list[int]:
    """Return checksums of a model's state, and of the state of torch's random number generator."""
    crc = 0
    for value in model.state_dict().values():
        crc = zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), crc)
    generators = torch.cuda if torch.cuda.is_initialized() else torch
    return [crc, zlib.crc32(generators.get_rng_state().numpy())]


def check_for_learners(args: ScriptArgs, number: int) -> None:
    """Exit with a one-line error if these flags do not work with ``number`` learners."""
    one = "one learner: run it without torchrun"
    check(number == 1 or not args.dry_run, f"--dry-run prints the workers' commands of {one}")
    for name in ("num_envs", "num_workers"):
        value = getattr(args, name)
        multiple = f"must be a multiple of the {number} learners of torchrun"
        check(value % number == 0, f"{spell(name)} {value} {multiple}")
    own = f"cannot serve {number} learners: each listens on its own port"
    check(number == 1 or not args.port, f"--port {args.port} {own}")


def check_flags_are_alike(flags: list[dict[str, str]]) -> None:
    """Exit with a one-line error if a learner's flags are not those of the first learner."""
    for rank, own in enumerate(flags):
        for name, value in own.items():
            first = flags[0].get(name)
            has = f"learner {rank} has {name} {value}, learner 0 has {first}"
            check(value == first, f"{has}: all must have the same")


def check_models_are_alike(fingerprints: list[np.ndarray], step: int) -> None:
    """Exit with a one-line error if the learners' models or random numbers differ."""
    after = f"after step {step}: a machine may be broken, or of a different kind"
    for rank, own in enumerate(fingerprints):
        same_model, same_numbers = own == fingerprints[0]
        check(same_model, f"learner {rank}'s model is not the first one's {after}")
        check(same_numbers, f"learner {rank}'s random numbers are not the first one's {after}")
