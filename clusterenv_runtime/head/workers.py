"""The workers as the head sees them, and the supervision of their processes.

The deadlines of all workers run at the same time. Nothing here waits or touches a socket, except
that a launcher may take some seconds to start a replacement.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import StartupError, WorkerDiedError
from ..launchers import Exit, Launcher
from ..options import ClusterOptions
from ..policy.versions import PolicyCopy

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # how often the head looks at living processes on other machines
LOOK_HERE_S = 0.05  # and on this machine, where the system shows an end at once
SOON_S = 0.01  # how often the head looks while a process is lost or killed
# How long the head looks for the reason of a loss: a link may break just before its process ends.
REASON_S = 1.0
KILL_S = 5.0  # how long the head waits for a killed process to end
NOTICE_S = 60.0  # how often the head tells the user that a worker has not been started yet


class State(enum.Enum):
    """The states of a process: STARTING, BUILDING and READY follow one another.

    A process that is lost is LOST, then KILLED. ENDED is final.
    """

    STARTING = "starting"  # it has not said hello yet
    BUILDING = "building"  # it has said hello, and builds its environments
    READY = "ready"  # it answers requests
    # The process or its link is gone. The head reads the last messages and finds out the reason.
    LOST = "lost"
    KILLED = "killed"  # it is being killed, so that a replacement can take its place
    ENDED = "ended"  # no replacement will take its place


ALIVE = State.STARTING, State.BUILDING, State.READY
CONNECTED = State.BUILDING, State.READY  # messages can be sent to it


@dataclass(eq=False)
class Process:
    """One process of a worker. Each start makes a new object, so no earlier state remains.

    Times are in seconds of the head's clock.
    """

    deadline: float = 0.0  # the time by which the state must have changed
    heard: float = 0.0  # when its last message came; at first, when it was started
    noticed: float = 0.0  # when the user was last told that it has not been started yet
    state: State = State.STARTING
    identity: bytes | None = None  # the connection's ZeroMQ identity; None before `Hello`
    host: str = ""
    pid: int = 0
    # Whether it continues for a dead process whose end the user has not seen; see `CutOff`.
    is_cut_off: bool = False
    exit: Exit | None = None  # how it was lost; None until the head knows
    ended_because: str = ""  # why no replacement will take its place; empty if one may


@dataclass(eq=False)
class Worker:
    """A worker: its current process, and the state that outlives its processes."""

    index: int
    rows: slice  # the environments' rows
    offset: int = 0  # the head's first environment among those of all learners
    environments: bytes = b""  # the pickle of what it builds
    arrays: Any = None  # the large arrays of that pickle

    process: Process = field(default_factory=Process)
    copy: PolicyCopy = field(default_factory=PolicyCopy)
    seeds: list[int | None] | None = None  # the last reset's seeds; None before the first
    seen: Any = None  # the last observations that the user saw; None before the first reset
    asked_rollouts: int = 0  # rollouts requested since the noise was seeded
    rollouts: int = 0  # how many of these rollouts have come
    steps: int = 0  # environment steps in all rollouts that have come
    # The seq of the evaluation after which the environments need a reset; 0 if they need none.
    evaluated: int = 0
    waited: float = 0.0  # seconds so far spent waiting for a request or for weights
    losses: int = 0  # processes lost in a row, without a step in between

    def __post_init__(self) -> None:
        # The environments' numbers, for seeds and for the user.
        self.numbers = range(self.offset + self.rows.start, self.offset + self.rows.stop)
        self.num_envs = len(self.numbers)
        self.copy.rows = self.numbers
        # Whether the user has seen an episode's end, but not the reset after it.
        self.ended = np.zeros(self.num_envs, bool)


class Supervisor:
    """Decides which processes are alive, lost, or due for replacement.

    Args:
        workers: all workers. Only the supervisor changes the states of their processes.
        launcher: starts and kills the processes, and knows how they ended.
        options: the timeouts, and how many processes of one worker may be lost in a row.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        launcher: Launcher,
        options: ClusterOptions,
        clock: Callable[[], float],
    ) -> None:
        self.workers = workers
        self.clock = clock
        self._launcher = launcher
        self._startup_timeout = options.startup_timeout
        self._options = options
        # Whether a process that ends by itself or is late ends the run. False once all are ready.
        self.all_must_start = True
        self.next_look = self._next_check = 0.0

    def start_all(self) -> None:
        """Start all processes.

        Raises:
            StartupError: a process cannot be started.
        """
        try:
            self._launcher.start()
        except OSError as error:
            raise StartupError(f"cannot start the workers: {error}") from None
        for worker in self.workers:
            worker.process = self._new_process()

    def _new_process(self) -> Process:
        now = self.clock()
        return Process(now + self._startup_timeout, now, now)

    def note_hello(self, worker: Worker, identity: bytes, host: str, pid: int) -> None:
        """Note that a worker's process has said hello. It gets its orders next."""
        process = worker.process
        process.state = State.BUILDING
        process.identity, process.host, process.pid = identity, host, pid
        process.heard = self.clock()
        self.note_built(process)

    def note_built(self, process: Process) -> None:
        """Note that a process may take as long as at its start for its next environment."""
        process.deadline = self.clock() + self._startup_timeout

    def note_ready(self, worker: Worker) -> None:
        """Note that a worker has built all of its environments."""
        worker.process.state = State.READY
        self.all_must_start &= any(each.process.state != State.READY for each in self.workers)

    def lose(self, worker: Worker, reason: Exit | None = None) -> None:
        """Note that a worker's process or link is gone. `look` finds out an unknown reason."""
        process = worker.process
        if process.state in ALIVE:
            process.state = State.LOST
            process.exit = reason
            process.deadline = self.clock() + REASON_S
            self.next_look = min(self.next_look, self.clock() + SOON_S)

    def end(self, worker: Worker, because: str) -> None:
        """Note that a worker will not answer any more requests, and will not be replaced."""
        worker.process.state = State.ENDED
        worker.process.ended_because = because

    def look(self) -> list[tuple[Worker, str]]:
        """Advance every process. Return the workers to `replace` now, each with the reason.

        Raises:
            StartupError: all workers must start, and some have not started in time.
        """
        now = self.clock()
        reasons = [(worker, self._look_at(worker, now)) for worker in self.workers]
        if now >= self._next_check:
            self._next_check = now + (LOOK_S if self._launcher.remote else LOOK_HERE_S)
            self._check_living(now)
        self.next_look = self._next_check
        if any(worker.process.state in (State.LOST, State.KILLED) for worker in self.workers):
            self.next_look = min(self._next_check, now + SOON_S)
        return [(worker, reason) for worker, reason in reasons if reason]

    def _look_at(self, worker: Worker, now: float) -> str:
        """Advance a lost process. Return why to replace it now, or otherwise ""."""
        process = worker.process
        if process.state == State.LOST:
            # Everything that the process sent has been read since the last look. Its last messages
            # may have been responses, or may have said why it ended.
            process.exit = process.exit or self._launcher.exit(worker.index)
            if process.exit is not None or now >= process.deadline:
                # A process that is only stopped or cut off must not come back.
                self._launcher.kill(worker.index)
                process.state = State.KILLED
                process.deadline = now + KILL_S
        if process.state != State.KILLED:
            return ""
        if not self._launcher.has_ended(worker.index) and now < process.deadline:
            return ""
        reason = (
            process.exit.reason
            if process.exit
            else (
                f"cut off or silent (its last message came {now - process.heard:.0f} s ago); is it "
                "stopped, or is its machine or network down?"
            )
        )
        return f"{self.describe(worker)} died: {reason}"

    def _check_living(self, now: float) -> None:
        """Note the loss of the processes that have ended or are late."""
        late = []
        for worker in self.workers:
            process = worker.process
            if process.state not in ALIVE:
                continue
            if (exit := self._launcher.exit(worker.index)) is not None:
                self.lose(worker, exit)
            elif process.state == State.STARTING and (why := self._launcher.pending(worker.index)):
                process.deadline = now + self._startup_timeout
                if now > process.noticed + NOTICE_S:
                    process.noticed = now
                    logger.warning(
                        "still waiting for worker %d to be started: %s", worker.index, why
                    )
            elif process.state != State.READY and now > process.deadline:
                late.append(worker)
        text = f"did not come up or build the next environment within {self._startup_timeout:g} s"
        if late and self.all_must_start:
            raise StartupError(f"{', '.join(map(self.describe, late))} {text}")
        for worker in late:
            self.lose(worker, Exit(text, by_signal=True))

    def replace(self, worker: Worker, reason: str) -> None:
        """Start a replacement for a lost process.

        Raises:
            WorkerDiedError: too many processes were lost in a row, the process ended by itself
                before all had started, or the replacement cannot be started.
        """
        lost, before = worker.process, worker.losses
        worker.losses += 1
        ended_by_itself = lost.exit is not None and not lost.exit.by_signal
        most = self._options.max_worker_restarts * (self._options.on_worker_loss == "restart")
        if before >= most or self.all_must_start and ended_by_itself:
            again = f" (and so did {before} before it, in a row)" if before else ""
            raise WorkerDiedError(reason + again)
        try:
            self._launcher.start_worker(worker.index)
        except (OSError, StartupError) as error:
            raise WorkerDiedError(f"{reason}; no replacement can be started: {error}") from None
        worker.process = self._new_process()

    def describe(self, worker: Worker) -> str:
        """Return a worker's name for the user, with its host, environments and log."""
        process, log = worker.process, self._launcher.log(worker.index)
        parts = [
            f"{process.host}, pid {process.pid}" if process.host else "no hello yet",
            f"environments {worker.numbers[0]} to {worker.numbers[-1]}",
            process.ended_because,
            "" if log is None else f"log {log}",
        ]
        return f"worker {worker.index} ({', '.join(filter(None, parts))})"
