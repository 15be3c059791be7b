"""Who lives, who is lost, and who is to be replaced: deadlines over all workers at once.

Nothing here waits or touches a socket. The head calls `Supervisor.look` again and again while it
waits for workers. Each call takes every process as far as it can go at that time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import StartupError, WorkerDiedError
from ..launchers import Exit, Launcher
from ..options import ClusterOptions
from .worker import ALIVE, Process, State, Worker

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # how often the head looks at living processes,
LOOK_HERE_S = 0.05  # and at those of this machine, which the system shows at once
SOON_S = 0.01  # how often it looks while a process is being lost
# How long it looks for the reason of a loss: a link may break a moment before its process ends.
REASON_S = 1.0
KILL_S = 5.0  # how long it waits for a killed process to be gone
NOTICE_S = 60.0  # how often it tells the user that a worker has yet to be started
RETRY_S = 1.0, 2.0, 4.0  # the pauses between attempts to start a replacement; the last one repeats


class Supervisor:
    """Watches the workers' processes.

    Args:
        workers: all of them. Only the supervisor changes the states of their processes.
        launcher: starts, kills and knows the processes.
        options: the timeouts, and how many processes of one worker in a row may be lost. For
            ``startup_timeout`` seconds the system may also refuse to start a replacement.
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
        # Until all have started, a process that ends by itself or is late ends the run.
        self.all_must_start = False
        self.next_look = self._next_check = 0.0

    def start(self, all_must_start: bool) -> None:
        """Start all processes.

        Raises:
            StartupError: one cannot be started.
        """
        self.all_must_start = all_must_start
        try:
            self._launcher.start()
        except OSError as error:
            raise StartupError(f"cannot start the workers: {error}") from None
        for worker in self.workers:
            worker.process = self._new_process()

    def stop(self, timeout: float) -> None:
        """End all processes, within about ``timeout`` seconds."""
        self._launcher.stop(timeout)

    def _new_process(self) -> Process:
        return Process(self.clock(), self._startup_timeout)

    def note_hello(self, worker: Worker, identity: bytes, host: str, pid: int) -> None:
        """Note that a process is there. It is told next what to build."""
        process = worker.process
        process.state = State.BUILDING
        process.identity = identity
        process.host = host
        process.pid = pid
        process.heard = self.clock()
        process.deadline = process.heard + self._startup_timeout

    def note_built(self, worker: Worker) -> None:
        """Note that a worker has built one of its environments, and has others to build."""
        if worker.process.state == State.BUILDING:
            worker.process.deadline = self.clock() + self._startup_timeout

    def note_ready(self, worker: Worker) -> None:
        """Note that a worker has built all of its environments."""
        if worker.process.state == State.BUILDING:
            worker.process.state = State.READY
            worker.has_been_ready = True
            if all(each.process.state == State.READY for each in self.workers):
                self.all_must_start = False

    def lose(self, worker: Worker, reason: Exit | None = None) -> None:
        """Note that a worker's process or link is gone. An unknown reason is looked for later."""
        process = worker.process
        if process.state in ALIVE:
            process.state = State.LOST
            process.exit = reason
            process.deadline = self.clock() + REASON_S
            self.next_look = min(self.next_look, self.clock() + SOON_S)

    def refuse(self, worker: Worker, text: str) -> None:
        """Note that a worker's process broke the protocol. Nothing it says from now on counts."""
        worker.process.is_refused = True
        self.lose(worker, Exit(text))

    def end(self, worker: Worker, because: str) -> None:
        """Note that a worker will not answer any more, and that it will not be replaced."""
        worker.process.state = State.ENDED
        worker.process.ended_because = because

    def look(self) -> list[tuple[Worker, str]]:
        """Take every process further. Return the workers to `replace` now, each with its reason.

        Raises:
            StartupError: not all have started, and some did not in time.
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
        """Take a process further that does not live; return why to replace it now, or else ""."""
        process = worker.process
        index = worker.index
        if process.state == State.LOST:
            # All that it had sent was read since the last look. Its last messages may have been
            # responses, or may say why it ended.
            process.exit = process.exit or self._launcher.exit(index)
            if process.exit is not None or now >= process.deadline:
                # A process that is only stopped or cut off must not come back.
                self._launcher.kill(index)
                process.state = State.KILLED
                process.deadline = now + KILL_S
        if process.state == State.KILLED:
            if self._launcher.has_ended(index) or now >= process.deadline:
                return f"{self.describe(worker)} died: {self._reason(process, now)}"
        elif process.state == State.REFUSED and now >= process.deadline:
            self._start(worker)
            silence = now - process.heard
            if process is worker.process and silence >= self._startup_timeout:
                text = f"could not be started for {silence:.0f} s: {process.refusal}"
                return f"{self.describe(worker)} {text}"
        return ""

    def _check_living(self, now: float) -> None:
        """Lose the processes that have ended, or that are late."""
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
                    text = "still waiting for worker %d to be started: %s"
                    logger.warning(text, worker.index, why)
            elif process.state != State.READY and now > process.deadline:
                late.append(worker)
        timeout = f"{self._startup_timeout:g} s"
        text = f"did not come up and build the next of its environments within {timeout}"
        if late and self.all_must_start:
            raise StartupError(f"{', '.join(map(self.describe, late))} {text}")
        for worker in late:
            self.lose(worker, Exit(text, by_signal=True))

    def _reason(self, process: Process, now: float) -> str:
        if process.exit is not None:
            return process.exit.reason
        silence = f"silent for {self._options.worker_timeout:g} s"
        last = f"its last answer came {now - process.heard:.0f} s ago"
        return f"cut off, or {silence} ({last}); is it stopped, or its machine or network down?"

    def replace(self, worker: Worker, text: str) -> None:
        """Start another process in place of one that was lost.

        Raises:
            WorkerDiedError: too many were lost in a row, or the process ended by itself before all
                had started, or the replacement could not be started for too long.
        """
        lost = worker.process
        if lost.state == State.REFUSED:
            self.end(worker, "lost")
            raise WorkerDiedError(text)
        before = worker.losses
        worker.losses += 1
        ended_by_itself = lost.exit is not None and not lost.exit.by_signal
        if before >= self._options.restarts_in_a_row or self.all_must_start and ended_by_itself:
            self.end(worker, "lost")
            again = f" (and so did {before} before it, one after the other)" if before else ""
            raise WorkerDiedError(text + again)
        worker.process = self._new_process()
        self._start(worker)

    def _start(self, worker: Worker) -> None:
        """Try to start a replacement.

        The system may refuse it for some seconds, for lack of memory, processes or open files.
        Then `look` calls this again after a pause. Refused attempts use up none of the restarts.
        """
        process = worker.process
        try:
            self._launcher.start_worker(worker.index)
        except OSError as error:
            pause = RETRY_S[min(process.refusals, len(RETRY_S) - 1)]
            process.state = State.REFUSED
            process.deadline = self.clock() + pause
            process.refusals += 1
            process.refusal = str(error)
            if process.refusals == 2:  # the first time, the loss itself has yet to be logged
                text = "worker %d cannot be started, which is tried again for up to %g s: %s"
                logger.warning(text, worker.index, self._startup_timeout, error)
        else:
            worker.process = self._new_process()

    def describe(self, worker: Worker) -> str:
        """Return a worker's name for the user, with where it runs and its log."""
        return worker.describe(self._launcher.log(worker.index))
