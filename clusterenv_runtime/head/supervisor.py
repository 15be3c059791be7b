"""Who lives, who is lost, and who is to be replaced: deadlines over all workers at once, none of
whom waits.

Nothing here waits or touches a socket. `Supervisor.look` is called again and again while the head
waits for workers; each call takes every worker's state as far as it goes at that time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import StartupError, WorkerDiedError
from ..launchers import Exit, Launcher
from .handle import State, WorkerHandle

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # how often the workers' processes are looked at
SOON_S = 0.01  # how often while one of them is lost
# how long to look for the reason of a loss: a link may break a moment before its process ends
REASON_S = 1.0
KILL_S = 5.0  # how long to wait for a killed process to be gone
NOTICE_S = 60.0  # how often to say that a worker has not been started yet
RETRY_S = 1.0, 2.0, 4.0  # the pauses between attempts to start a replacement; the last one repeats


class Supervisor:
    """Watches the workers' processes.

    Args:
        workers: all of them. Only this changes their states.
        launcher: starts, kills and knows the processes.
        startup_timeout: seconds for a process to start, and then to build each of its environments.
            For so long the system may also refuse to start a replacement.
        worker_timeout: seconds of silence after which a link is cut, for the texts.
        max_restarts: that many of one worker's processes in a row may be replaced without an answer
            of them.
        clock: the time in seconds.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        launcher: Launcher,
        startup_timeout: float,
        worker_timeout: float,
        max_restarts: int,
        clock: Callable[[], float],
    ) -> None:
        self._workers, self._launcher, self._clock = workers, launcher, clock
        self._startup_timeout, self._worker_timeout = startup_timeout, worker_timeout
        self._max_restarts = max_restarts
        self.all_must_start = (
            True  # until they have: one that ends by itself, or is late, ends the run
        )
        self.next_look = self._next_look_at_all = 0.0

    def start(self) -> None:
        """Start all processes.

        Raises:
            StartupError: one cannot be started.
        """
        try:
            self._launcher.start()
        except OSError as error:
            raise StartupError(f"cannot start the workers: {error}") from None
        for worker in self._workers:
            self._begin(worker)

    def _begin(self, worker: WorkerHandle) -> None:
        worker.state, worker.identity, worker.building, worker.exit = (
            State.STARTING,
            None,
            None,
            None,
        )
        worker.host, worker.pid, worker.asked, worker.pulled, worker.answers = "", 0, {}, (0, 0), 0
        worker.heard = worker.noticed = self._clock()
        worker.deadline = worker.heard + self._startup_timeout
        worker.refusals, worker.refusal = 0, ""

    def said_hello(self, worker: WorkerHandle, identity: bytes, host: str, pid: int) -> None:
        """Note that a worker's process is there, and is told what to build."""
        worker.state, worker.identity, worker.host, worker.pid = State.BUILDING, identity, host, pid
        worker.heard, worker.built = self._clock(), 0
        worker.deadline = worker.heard + self._startup_timeout

    def builds(self, worker: WorkerHandle) -> None:
        """Note that a worker has built one of its environments; it says so at most once of each."""
        worker.built += 1
        if worker.built <= worker.num_envs:
            worker.deadline = self._clock() + self._startup_timeout

    def is_ready(self, worker: WorkerHandle) -> None:
        """Note that a worker has built its environments."""
        worker.state, worker.has_been_ready = State.READY, True

    def lose(self, worker: WorkerHandle, reason: Exit | None = None) -> None:
        """Note that a worker's process or link is gone; why is found out later, if it is not known."""
        if worker.state in (State.STARTING, State.BUILDING, State.READY):
            worker.state, worker.exit, worker.deadline = (
                State.LOST,
                reason,
                self._clock() + REASON_S,
            )
            self.next_look = min(self.next_look, self._clock() + SOON_S)

    def end(self, worker: WorkerHandle, because: str) -> None:
        """Note that there will be neither an answer of this worker nor another in its place."""
        worker.state, worker.ended_because = State.ENDED, because

    def look(self) -> list[tuple[WorkerHandle, str]]:
        """Take every worker's state further; return whom to replace now by `replace`, and in what
        words they were lost.

        Raises:
            StartupError: not all have started, and some did not in time.
        """
        now, lost, late = self._clock(), [], []
        at_all = now >= self._next_look_at_all  # else only at those that are being lost
        if at_all:
            self._next_look_at_all = now + LOOK_S
        for worker in self._workers:
            if worker.state in (State.STARTING, State.BUILDING, State.READY):
                if not at_all:
                    continue
                if (exit := self._launcher.exit(worker.index)) is not None:
                    self.lose(worker, exit)
                elif (
                    worker.state != State.READY
                    and not self._is_pending(worker, now)
                    and now > worker.deadline
                ):
                    late.append(worker)
            elif worker.state == State.LOST:
                # Since the last look, all that it had sent has been read: its last words may be an
                # answer, or say why.
                worker.exit = worker.exit or self._launcher.exit(worker.index)
                if worker.exit is not None or now >= worker.deadline:
                    # Should it be only stopped, or cut off: it is not to come back.
                    self._launcher.kill(worker.index)
                    worker.state, worker.deadline = State.KILLED, now + KILL_S
            elif worker.state == State.KILLED and (
                self._launcher.has_ended(worker.index) or now >= worker.deadline
            ):
                lost.append((worker, f"{self.describe(worker)} died: {self._why(worker, now)}"))
            elif worker.state == State.REFUSED and now >= worker.deadline:
                self._start(worker)
                if worker.state == State.REFUSED and now - worker.heard >= self._startup_timeout:
                    text = f"could not be started for {now - worker.heard:.0f} s: {worker.refusal}"
                    lost.append((worker, f"{self.describe(worker)} {text}"))
        if late:
            self._handle_late(late)
        in_between = any(worker.state in (State.LOST, State.KILLED) for worker in self._workers)
        self.next_look = (
            min(self._next_look_at_all, now + SOON_S) if in_between else self._next_look_at_all
        )
        return lost

    def _is_pending(self, worker: WorkerHandle, now: float) -> bool:
        """Say whether a worker's process has yet to be started, which may take as long as it does."""
        reason = self._launcher.pending(worker.index) if worker.state == State.STARTING else None
        if reason is None:
            return False
        worker.deadline = now + self._startup_timeout
        if now > worker.noticed + NOTICE_S:
            worker.noticed = now
            logger.warning("still waiting for worker %d to be started: %s", worker.index, reason)
        return True

    def _handle_late(self, late: list[WorkerHandle]) -> None:
        text = f"did not come up and build the next of its environments within {self._startup_timeout:g} s"
        if self.all_must_start:
            raise StartupError(f"{', '.join(map(self.describe, late))} {text}")
        for worker in late:
            self.lose(worker, Exit(text, by_signal=True))

    def _why(self, worker: WorkerHandle, now: float) -> str:
        if worker.exit is not None:
            return worker.exit.reason
        return (
            f"cut off, or silent for {self._worker_timeout:g} s (its last answer came {now - worker.heard:.0f} s ago); "
            "is it stopped, or its machine or network down?"
        )

    def replace(self, worker: WorkerHandle, text: str) -> None:
        """Start another process in place of one that was lost.

        Raises:
            WorkerDiedError: there have been too many of them, or it ended by itself before all had
                started, or it could not be started for too long.
        """
        if worker.state == State.REFUSED:
            self.end(worker, "lost")
            raise WorkerDiedError(text)
        worker.losses += 1
        cannot_start = self.all_must_start and worker.exit is not None and not worker.exit.by_signal
        if worker.losses > self._max_restarts or cannot_start:
            self.end(worker, "lost")
            again = (
                f" (and so did {worker.losses - 1} before it, one after the other)"
                if worker.losses > 1
                else ""
            )
            raise WorkerDiedError(text + again)
        worker.process += 1
        self._begin(worker)
        self._start(worker)

    def _start(self, worker: WorkerHandle) -> None:
        """Try to start a replacement.

        The system may refuse it for some seconds, for lack of memory, processes or open files.
        Then `look` calls this again after a pause, and the attempt uses up none of the restarts.
        """
        try:
            self._launcher.start_worker(worker.index)
        except OSError as error:
            pause = RETRY_S[min(worker.refusals, len(RETRY_S) - 1)]
            worker.state, worker.deadline = State.REFUSED, self._clock() + pause
            worker.refusals, worker.refusal = worker.refusals + 1, str(error)
            if worker.refusals == 2:  # the first time, the loss itself has yet to be logged
                text = "worker %d cannot be started, which is tried again for up to %g s: %s"
                logger.warning(text, worker.index, self._startup_timeout, error)
        else:
            self._begin(worker)

    def describe(self, worker: WorkerHandle) -> str:
        """Return a worker's name for the user, with where it runs and its log."""
        return worker.describe(self._launcher.log(worker.index))
