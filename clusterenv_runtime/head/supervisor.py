"""Decides which worker processes are alive, lost, or due for replacement.

The deadlines of all workers run at the same time. Nothing here waits or touches a socket, except
that a launcher may take some seconds to start a replacement. The head calls `Supervisor.look`
repeatedly while it waits for workers. Each call advances every process as far as possible at that
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import StartupError, WorkerDiedError
from ..launchers import Exit, Launcher
from ..options import ClusterOptions
from .worker import ALIVE, Process, State, Worker

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # how often the head looks at living processes on other machines
LOOK_HERE_S = 0.05  # and on this machine, where the system shows an end at once
SOON_S = 0.01  # how often the head looks while a process is lost or killed
# How long the head looks for the reason of a loss: a link may break just before its process ends.
REASON_S = 1.0
KILL_S = 5.0  # how long the head waits for a killed process to end
NOTICE_S = 60.0  # how often the head tells the user that a worker has not been started yet
RETRY_S = 1.0, 2.0, 4.0  # the pauses between attempts to start a replacement; the last one repeats


class Supervisor:
    """Watches the workers' processes.

    Args:
        workers: all workers. Only the supervisor changes the states of their processes.
        launcher: starts and kills the processes, and knows how they ended.
        options: the timeouts, and how many processes of one worker may be lost in a row. The
            ``startup_timeout`` also limits how long the system may refuse to start a replacement.
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
        self.all_must_start = False
        self.next_look = self._next_check = 0.0

    def start(self, all_must_start: bool) -> None:
        """Start all processes.

        Raises:
            StartupError: a process cannot be started.
        """
        self.all_must_start = all_must_start
        try:
            self._launcher.start()
        except OSError as error:
            raise StartupError(f"cannot start the workers: {error}") from None
        for worker in self.workers:
            worker.process = self._new_process()

    def stop(self, timeout: float) -> None:
        """End all processes within about ``timeout`` seconds."""
        self._launcher.stop(timeout)

    def _new_process(self) -> Process:
        return Process(self.clock(), self._startup_timeout)

    def note_hello(self, worker: Worker, identity: bytes, host: str, pid: int) -> None:
        """Note that a worker's process has said hello. It gets its orders next."""
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
        """Note that a worker's process or link is gone. `look` finds out an unknown reason."""
        process = worker.process
        if process.state in ALIVE:
            process.state = State.LOST
            process.exit = reason
            process.deadline = self.clock() + REASON_S
            self.next_look = min(self.next_look, self.clock() + SOON_S)

    def refuse(self, worker: Worker, text: str) -> None:
        """Note that a worker's process broke the protocol. Its messages no longer count."""
        worker.process.is_refused = True
        self.lose(worker, Exit(text))

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
        """Advance a process that is not alive. Return why to replace it now, or otherwise ""."""
        process = worker.process
        index = worker.index
        if process.state == State.LOST:
            # Everything that the process sent has been read since the last look. Its last messages
            # may have been responses, or may have said why it ended.
            process.exit = process.exit or self._launcher.exit(index)
            if process.exit is not None or now >= process.deadline:
                # A process that is only stopped or cut off must not come back.
                self._launcher.kill(index)
                process.state = State.KILLED
                process.deadline = now + KILL_S
        if process.state == State.KILLED:
            if self._launcher.has_ended(index) or now >= process.deadline:
                return f"{self.describe(worker)} died: {self._reason(process, now)}"
        elif process.state == State.NOT_STARTED and now >= process.deadline:
            self._start(worker)
            silence = now - process.heard
            if process is worker.process and silence >= self._startup_timeout:
                text = f"could not be started for {silence:.0f} s: {process.start_error}"
                return f"{self.describe(worker)} {text}"
        return ""

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
                    text = "still waiting for worker %d to be started: %s"
                    logger.warning(text, worker.index, why)
            elif process.state != State.READY and now > process.deadline:
                late.append(worker)
        timeout = f"{self._startup_timeout:g} s"
        text = f"did not come up or build the next environment within {timeout}"
        if late and self.all_must_start:
            raise StartupError(f"{', '.join(map(self.describe, late))} {text}")
        for worker in late:
            self.lose(worker, Exit(text, by_signal=True))

    def _reason(self, process: Process, now: float) -> str:
        if process.exit is not None:
            return process.exit.reason
        last = f"its last message came {now - process.heard:.0f} s ago"
        return f"cut off or silent ({last}); is it stopped, or is its machine or network down?"

    def replace(self, worker: Worker, text: str) -> None:
        """Start a replacement for a lost process.

        Raises:
            WorkerDiedError: too many processes were lost in a row, the process ended by itself
                before all had started, or the replacement could not be started for too long.
        """
        lost = worker.process
        if lost.state == State.NOT_STARTED:
            self.end(worker, "lost")
            raise WorkerDiedError(text)
        before = worker.losses
        worker.losses += 1
        ended_by_itself = lost.exit is not None and not lost.exit.by_signal
        if before >= self._options.restarts_in_a_row or self.all_must_start and ended_by_itself:
            self.end(worker, "lost")
            again = f" (and so did {before} before it, in a row)" if before else ""
            raise WorkerDiedError(text + again)
        worker.process = self._new_process()
        self._start(worker)

    def _start(self, worker: Worker) -> None:
        """Try to start a replacement.

        The system may refuse for some seconds, for lack of memory, processes or open files. Then
        `look` calls this method again after a pause. Refused attempts do not use up restarts.
        """
        process = worker.process
        try:
            self._launcher.start_worker(worker.index)
        except OSError as error:
            pause = RETRY_S[min(process.failed_starts, len(RETRY_S) - 1)]
            process.state = State.NOT_STARTED
            process.deadline = self.clock() + pause
            process.failed_starts += 1
            process.start_error = str(error)
            if process.failed_starts == 2:  # at first, the loss itself is not logged yet
                text = "worker %d cannot be started, trying again for up to %g s: %s"
                logger.warning(text, worker.index, self._startup_timeout, error)
        else:
            worker.process = self._new_process()

    def describe(self, worker: Worker) -> str:
        """Return a worker's name for the user, with its host, environments and log."""
        return worker.describe(self._launcher.log(worker.index))
