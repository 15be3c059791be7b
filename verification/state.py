"""What the rules of `verification.model` are about: a head, its workers, and what is on its way
between them.

All of it is immutable. A message is a tuple of its kind, and of fields as in
`clusterenv_runtime.wire.protocol`.
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
    """What must never happen has happened."""


class Request(NamedTuple):
    """What the user asks of one worker: to collect a rollout, or to step its environments."""

    seq: int
    worker: int
    kind: str  # "collect" or "step"
    version: int = 0  # that was published when it was asked
    behavior: int = 0  # the version that the divergence is of; 0 if it is unknown
    diverged: bool = False  # whether it is above the threshold
    structure: int = 0  # of the policy, when it was asked


class Worker(NamedTuple):
    """A worker, as the head knows it."""

    phase: str = STARTING
    number: int = 1  # of the process that was started last
    greeted: int = 0  # of the process that said hello; 0 for none
    losses: int = 0  # of processes in a row
    held: int = 0  # the version that it was sent last
    chain: tuple[
        int, ...
    ] = ()  # the versions of the differences that made the weights which it holds
    behavior: int = 0  # the version that it acted on when last heard of
    measured: int = 0  # the version whose divergence is known
    cut: bool = False  # whether its episodes are lost, and the user does not know
    seen: int = 0  # the process whose episodes the user has seen last


class Process(NamedTuple):
    """A worker's process, and what is on its way to and from it."""

    worker: int
    number: int
    stage: str = "new"  # then "idle" or "pulling", and in the end "dead"
    held: int = 0
    chain: tuple[int, ...] = ()
    structure: int = 0
    last: int = 0  # the seq of the request that it has begun last
    request: Request | None = None  # for which it pulls
    later: tuple = ()  # what came meanwhile
    down: tuple = ()  # from the head
    up: tuple = (("hello",),)  # to the head

    def says(self, *message: Any) -> Process:
        """Return the process after it has sent a message."""
        return self._replace(up=(*self.up, message))

    def dead(self) -> Process:
        """Return what is left of it when it has died: what it has sent."""
        return Process(self.worker, self.number, "dead", up=self.up)


class State(NamedTuple):
    """Everything, with what the user may yet do and what may yet go wrong, so that it comes to an
    end.
    """

    workers: tuple[Worker, ...]
    processes: tuple[Process, ...]
    calls: tuple[tuple[str, int], ...]  # how often the user may yet do what
    faults: int  # how many things may yet go wrong
    requests: tuple[Request, ...] = ()  # outstanding, oldest first
    answers: tuple = ()  # not taken yet: (request, message, worker's number, greeted)
    # the user's call that is under way: its kind and what it waits for; () for none
    waiting: tuple = ()
    granted: tuple[int, ...] = ()  # the seq of what was sent and not received, oldest first
    structures: tuple[int, ...] = ()  # of the policy in each version that was published
    seq: int = 0  # of the last request
    error: bool = False  # whether one is to be raised
    over: bool = False

    @property
    def version(self) -> int:
        """The version that was published last; 0 for none."""
        return len(self.structures)

    @property
    def structure(self) -> int:
        """That version's structure."""
        return self.structures[-1] if self.structures else 0

    def with_worker(self, index: int, worker: Worker) -> State:
        return self._replace(workers=(*self.workers[:index], worker, *self.workers[index + 1 :]))

    def with_process(self, index: int, process: Process) -> State:
        return self.with_processes((*self.processes[:index], process, *self.processes[index + 1 :]))

    def with_processes(self, processes: Iterable[Process]) -> State:
        """Return the state with these, but without those that are dead and have nothing more to
        say.
        """
        return self._replace(
            processes=tuple(each for each in processes if each.stage != "dead" or each.up)
        )

    def post(self, index: int, message: tuple) -> State:
        """Return the state after the head has sent a message to a worker, if there is a process
        that listens.
        """
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
        """Return the state in which the user has one such call fewer, or None if there was none
        left.
        """
        if not dict(self.calls).get(call):
            return None
        return self._replace(
            calls=tuple((name, number - (name == call)) for name, number in self.calls)
        )
