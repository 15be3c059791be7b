"""What a run leaves in its directory for those who look at it while it runs: ``status.json``."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from ..env import ClusterEnv
from ..errors import one_line
from .checkpoint import replaced
from .signals import CTRL_C, PREEMPTED

if TYPE_CHECKING:
    from .run import Run

FILE = "status.json"
EVERY_S = 1.0  # how often it is written, at most
RATES = 10  # over how many times that it was written rates are taken
MOST_POINTS = 200  # of the curve

Count = Annotated[int, msgspec.Meta(ge=0)]
State = Literal["starting", "training", "evaluating", "finished", "interrupted", "failed", "gone"]


class WorkerStatus(msgspec.Struct):
    """One worker. Rates are of the last seconds, or of the last iterations if these are long."""

    host: str  # empty before it has connected
    version: Count  # of the policy that it holds; 0 for none
    lag: Count  # versions that have been published since
    divergence: float | None  # in nats per action dimension; None before it has acted
    pulls: Count
    sps: float  # environment steps a second
    waiting: float  # the share of its time without a request or without weights
    restarts: Count


class Status(msgspec.Struct):
    """A run. With several learners its workers are those of the first."""

    state: State
    reason: str = ""  # why it has failed, or is gone
    time: float = 0.0  # when this was written, Unix
    global_step: Count = 0
    total_timesteps: Count = 0
    seconds: float = 0.0  # of training
    sps: float = 0.0  # environment steps a second
    mean_return: float | None = None  # of the last 100 episodes
    policy_version: Count = 0
    points: list[tuple[int, float | None]] = []  # global_step, mean return
    workers: list[WorkerStatus] = []


class StatusFile:
    """Writes the `Status` of a run, if this process writes its files."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._path = f"{run.directory.path}/{FILE}"
        self._due = 0.0
        self._envs: ClusterEnv | None = None
        # The time, the run's steps, each worker's, and the seconds that each has waited.
        self._past: deque[np.ndarray] = deque(maxlen=RATES)
        self.write("starting")
        if run.writes:
            weakref.finalize(self, _end, self._path)  # at the latest when this process ends

    @contextmanager
    def training(self, envs: ClusterEnv) -> Iterator[None]:
        """Tell also of the workers, and if this block fails, of that."""
        self._envs = envs
        try:
            yield
        except BaseException as error:
            is_signal = isinstance(error, SystemExit) and error.code in (PREEMPTED, CTRL_C)
            self.write("interrupted" if is_signal else "failed", one_line(error) * (not is_signal))
            raise

    def tell(self) -> None:
        """Write it if it is due."""
        if time.monotonic() >= self._due:
            self.write("training")
            self._due = time.monotonic() + EVERY_S

    def write(self, state: State, reason: str = "") -> None:
        """Write it; if the disk is full, checkpoints and logs tell of that."""
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
    """Note of a run that is starting that it has ended. No run is referred to here, or its workers
    would live as long as this process.
    """
    with suppress(OSError, msgspec.DecodeError):
        with open(path, "rb") as file:
            status = msgspec.json.decode(file.read(), type=Status)
        if status.state == "starting":
            status.state = "failed"
            status.reason = "it ended before training; its output says why"
            _leave(path, status)
