"""The file ``status.json`` in a run's directory, for programs that watch the run."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from clusterenv_runtime.env import ClusterEnv
from clusterenv_runtime.errors import one_line

from .checkpoint import replaced
from .signals import CTRL_C, PREEMPTED

if TYPE_CHECKING:
    from .run import Run

FILE = "status.json"
EVERY_S = 1.0  # seconds between two writes in training, at least
RATES = 10  # the number of writes over which rates are taken
MOST_POINTS = 200  # the most points of the learning curve in the file

Count = Annotated[int, msgspec.Meta(ge=0)]
State = Literal["starting", "training", "evaluating", "finished", "interrupted", "failed", "gone"]


class WorkerStatus(msgspec.Struct):
    """A worker's status. Rates are of the last seconds, or of the last iterations if long."""

    host: str  # empty before the worker connects
    version: Count  # the policy version that the worker holds; 0 for none
    lag: Count  # the number of versions published since
    divergence: float | None  # in nats per action dimension; None before the worker acts
    pulls: Count
    sps: float  # environment steps per second
    waiting: float  # the fraction of its time without a request or without weights
    restarts: Count


class Status(msgspec.Struct):
    """The status of a run. With several learners, the workers are those of the first."""

    state: State
    reason: str = ""  # why the run has failed, or is gone
    time: float = 0.0  # when this was written, in Unix seconds
    global_step: Count = 0
    total_timesteps: Count = 0
    seconds: float = 0.0  # the time spent training
    sps: float = 0.0  # environment steps per second
    mean_return: float | None = None  # the mean over the last 100 episodes
    policy_version: Count = 0
    points: list[tuple[int, float | None]] = []  # (global_step, mean return)
    workers: list[WorkerStatus] = []


class StatusFile:
    """Writes the `Status` of a run, if this process writes the run's files."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path = f"{run.directory.path}/{FILE}"
        self._due = 0.0
        self._envs: ClusterEnv | None = None
        # The time, the run's steps, each worker's steps, and each worker's seconds of waiting.
        self._past: deque[np.ndarray] = deque(maxlen=RATES)
        self.write("starting")
        if run.writes:
            weakref.finalize(self, _end, self._path)  # at the latest when this process ends

    @contextmanager
    def training(self, envs: ClusterEnv) -> Iterator[None]:
        """Include the workers in the status, and record an error that ends this block."""
        self._envs = envs
        try:
            yield
        except BaseException as error:
            is_signal = isinstance(error, SystemExit) and error.code in (PREEMPTED, CTRL_C)
            self.write("interrupted" if is_signal else "failed", one_line(error) * (not is_signal))
            raise

    def tell(self) -> None:
        """Write the status if it is due."""
        if time.monotonic() >= self._due:
            self.write("training")
            self._due = time.monotonic() + EVERY_S

    def write(self, state: State, reason: str = "") -> None:
        """Write the status. A full disk is ignored, because checkpoints and logs warn of it."""
        run = self._run
        if not run.writes:
            return
        curve = run.logs.curve
        status = Status(state, reason, time.time(), run.global_step, run.args.total_timesteps)
        status.mean_return = curve.mean_return
        number = len(curve.points)
        few = np.linspace(0, number - 1, min(number, MOST_POINTS)).astype(int)
        status.points = [curve.points[index][:2] for index in few]
        if self._envs is not None:
            status.seconds = run.seconds
            self._add_workers(status, self._envs)
        _leave(self._path, status)

    def _add_workers(self, status: Status, envs: ClusterEnv) -> None:
        now = [time.monotonic()], [status.global_step], envs.steps, envs.waiting_seconds
        self._past.append(np.concatenate(now))
        seconds, *changes = self._past[-1] - self._past[0]
        rates = [float(change / max(seconds, 1e-9)) for change in changes]
        status.sps = rates[0]
        status.policy_version = envs.policy_version
        lost = [restart["worker"] for restart in envs.restarts]
        columns = (
            envs.hosts, envs.held_versions.tolist(), envs.divergence.tolist(), envs.pulls.tolist(),
            rates[1 : envs.num_workers + 1], rates[envs.num_workers + 1 :],
        )  # fmt: skip
        for index, row in enumerate(zip(*columns, strict=True)):
            host, version, divergence, pulls, sps, waiting = row
            lag = envs.policy_version - version
            restarts = lost.count(index)
            status.workers.append(
                WorkerStatus(host, version, lag, divergence, pulls, sps, waiting, restarts)
            )


def _leave(path: str, status: Status) -> None:
    with suppress(OSError), replaced(path, syncs=False) as file:
        file.write(msgspec.json.encode(status))


def _end(path: str) -> None:
    """Mark a run as failed if it was still starting.

    Nothing here refers to the run, because the run's workers would then live as long as this
    process.
    """
    with suppress(OSError, msgspec.DecodeError):
        with open(path, "rb") as file:
            status = msgspec.json.decode(file.read(), type=Status)
        if status.state == "starting":
            status.state = "failed"
            status.reason = "it ended before training; its output says why"
            _leave(path, status)
