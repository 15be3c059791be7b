"""The state of `verification.model`: a head, its workers, and the messages between them.

All of it is immutable. A message is a tuple of its kind and its fields, as in
`clusterenv_runtime.messages`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

STARTING, BUILDING, READY, LOST, KILLED, ENDED = (
    "starting",
    "building",
    "ready",
    "lost",
    "killed",
    "ended",
)


class Violation(AssertionError):
    """An event that must never happen has happened."""


class Request(NamedTuple):
    """The user's request to one worker: to collect a rollout, or to step or reset environments."""

    seq: int
    worker: int
    kind: str  # "collect", "step" or "reset"
    version: int = 0  # the published version at the time of the request
    behavior: int = 0  # the version whose divergence was measured; 0 if unknown
    diverged: bool = False  # whether the divergence is above the threshold
    structure: int = 0  # the policy's structure at the time of the request


class Worker(NamedTuple):
    """A worker, as the head knows it."""

    phase: str = STARTING
    number: int = 1  # number of the process that was started last
    greeted: int = 0  # number of the process that said hello; 0 for none
    losses: int = 0  # number of processes lost in a row
    held: int = 0  # the version that the head has sent last
    # The versions whose differences make up the held weights.
    chain: tuple[int, ...] = ()
    behavior: int = 0  # the version that acted for its last response
    measured: int = 0  # the version whose divergence is known
    seen: int = 0  # the process whose episodes the user has seen last


class Process(NamedTuple):
    """A worker's process, and the messages on the way to and from it."""

    worker: int
    number: int
    stage: str = "new"  # later "idle" or "pulling", and in the end "dead"
    held: int = 0
    chain: tuple[int, ...] = ()
    structure: int = 0
    last: int = 0  # the seq of the request that it began last
    cut: bool = False  # whether its next step reports that a former process's episodes are lost
    request: Request | None = None  # the request for which it pulls
    later: tuple = ()  # messages that came during a pull
    down: tuple = ()  # messages from the head
    up: tuple = (("hello",),)  # messages to the head

    def says(self, *message: Any) -> Process:
        """Return the process after it has sent a message."""
        return self._replace(up=(*self.up, message))

    def dead(self) -> Process:
        """Return the process after its death, which leaves only the messages that it has sent."""
        return Process(self.worker, self.number, "dead", up=self.up)


class State(NamedTuple):
    """The whole state.

    It includes the user's remaining calls and the remaining faults, so that every run comes to an
    end.
    """

    workers: tuple[Worker, ...]
    processes: tuple[Process, ...]
    calls: tuple[tuple[str, int], ...]  # how often the user may still make each call
    faults: int  # how many faults may still happen
    requests: tuple[Request, ...] = ()  # outstanding, oldest first
    answers: tuple = ()  # responses not taken yet: (request, message, worker's number, greeted)
    # The user's current call: its kind, and the results that it waits for; () for none.
    waiting: tuple = ()
    # The seqs of the requests of `send` whose results the user has not received, oldest first.
    granted: tuple[int, ...] = ()
    structures: tuple[int, ...] = ()  # the policy's structure in each published version
    seq: int = 0  # the seq of the last request
    to_reset: bool = False  # whether a step was given up, so that the user must reset
    error: bool = False  # whether the user must get an error
    over: bool = False

    @property
    def version(self) -> int:
        """The version that was published last; 0 for none."""
        return len(self.structures)

    @property
    def structure(self) -> int:
        """The structure of the last published version; 0 for none."""
        return self.structures[-1] if self.structures else 0

    def with_worker(self, index: int, worker: Worker) -> State:
        return self._replace(workers=(*self.workers[:index], worker, *self.workers[index + 1 :]))

    def with_process(self, index: int, process: Process) -> State:
        return self.with_processes((*self.processes[:index], process, *self.processes[index + 1 :]))

    def with_processes(self, processes: Iterable[Process]) -> State:
        """Return the state with these processes, except dead ones that have no more messages."""
        return self._replace(
            processes=tuple(each for each in processes if each.stage != "dead" or each.up)
        )

    def post(self, index: int, message: tuple) -> State:
        """Return the state after the head has sent a message to a worker, if a process listens."""
        worker = self.workers[index]
        if worker.phase not in (BUILDING, READY):
            return self
        to = index, worker.greeted
        return self._replace(
            processes=tuple(
                each._replace(down=(*each.down, message))
                if (each.worker, each.number) == to and each.stage != "dead"
                else each
                for each in self.processes
            )
        )

    def after(self, call: str) -> State | None:
        """Return the state with one such call fewer left to the user, or None if none was left."""
        if not dict(self.calls).get(call):
            return None
        return self._replace(
            calls=tuple((name, number - (name == call)) for name, number in self.calls)
        )
