"""All workers as one pool: sends requests, waits for responses, and has dead workers replaced."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..errors import DeadlineError, WorkerDiedError
from ..wire.protocol import Close, Message, Ping
from .interrupts import Interrupt, hold_ctrl_c, let_go_of_ctrl_c
from .messenger import Messenger
from .requests import Request
from .worker import CONNECTED, State, Worker

logger = logging.getLogger(__name__)
waits = logging.getLogger(f"{__name__}.waits")
SAY_S = 5.0  # how often a long wait is logged
PING_S = 1.0  # how often the head checks that it can reach its workers
NOTICE_S = 3.0  # after this time `close` tells the user for which workers it waits
LEAVE_S = 3.0  # how long a process may take to end once its environments are closed


class WorkerPool:
    """The workers of one head. The pool works only in the thread that waits, and while it waits.

    A replacement first gets the orders of `Recovery`. Then it gets all requests that the lost
    process had not answered, in the same order and with the same ``seq``.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._supervisor = messenger.supervisor
        self._requests = messenger.requests
        self._clock = messenger.supervisor.clock
        self.workers = messenger.supervisor.workers
        self.failures = messenger.failures
        self.interrupt = Interrupt()
        self._next_ping = 0.0
        self._is_closed = False

    def start(self, min_workers: int) -> None:
        """Start all workers. Return once ``min_workers`` of them have built their environments."""
        self._supervisor.start(all_must_start=min_workers == len(self.workers))

        def enough_are_ready() -> Any:
            ready = sum(worker.process.state == State.READY for worker in self.workers)
            return self.failures.untold or ready >= min_workers

        self._wait(enough_are_ready)

    def ask(self, worker: Worker, message: Message, *buffers: Any) -> int:
        """Make a request to a worker, and return its ``seq``. `exchange` sends the request.

        Raises:
            WorkerDiedError: the worker is gone and will not be replaced.
        """
        self.require(worker)
        seq = self._requests.add(worker, message, buffers)
        self._messenger.post(worker, seq, message, *buffers)
        return seq

    def require(self, *workers: Worker) -> None:
        """Raise WorkerDiedError if one of these workers is gone and will not be replaced."""
        for worker in workers:
            if worker.process.state == State.ENDED:
                raise WorkerDiedError(f"{self._supervisor.describe(worker)} is gone")

    def exchange(self) -> None:
        """Send the requests that were made."""
        self._messenger.exchange()

    def settle(self, seqs: Collection[int], timeout: float | None = None) -> None:
        """Wait until all of these requests have a response.

        Raises:
            DeadlineError: ``timeout`` seconds have passed.
            Interrupted, KeyboardInterrupt: the wait was interrupted.
            WorkerDiedError: a worker is gone and will not be replaced.
            EnvError: an environment raised an exception. If this process knows its class, or a base
                of it, that exception is raised instead, with this error as its cause.
        """
        self._wait(lambda: self._requests.are_settled(seqs), timeout)

    def gather(self, seqs: Collection[int], timeout: float | None = None) -> list[Request]:
        """Wait until all of these requests have a response, see `settle`, and return them.

        If this raises an error, the requests are given up.
        """
        try:
            self.settle(seqs, timeout)
            return [self._requests.answered.pop(seq) for seq in seqs]
        except BaseException:
            self._requests.forget(seqs)
            raise

    def first(self, seqs: Collection[int]) -> Request:
        """Wait for a response to any of these requests. Return the first that has one."""
        self.wait_until(lambda: self._requests.first_answered(seqs) is not None, seqs)
        return self._requests.answered.pop(self._requests.first_answered(seqs))

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up these requests: drop their responses, and errors that do not end anything."""
        self._requests.forget(seqs)

    def outstanding(self, seqs: Iterable[int]) -> list[int]:
        """Return the requests that have no response yet. Drop the responses to the others."""
        waiting = [seq for seq in seqs if seq in self._requests.outstanding]
        self._requests.forget(set(seqs) - set(waiting))
        return waiting

    def wait_until(self, done: Callable[[], Any], seqs: Collection[int]) -> None:
        """Serve the workers until ``done`` holds, an error comes, or all ``seqs`` have a response.

        Messages are handled once even if ``done`` already holds, because a worker may be waiting
        for weights. This method raises the errors of `settle`.
        """
        self._wait(lambda: done() or self.failures.untold or self._requests.are_settled(seqs))
        if not done():
            self.require(*self.workers)

    def _wait(self, done: Callable[[], Any], timeout: float | None = None) -> None:
        """Exchange messages and supervise until ``done`` holds, then raise the errors that came."""
        began = self._clock()
        deadline = math.inf if timeout is None else began + timeout
        next_word = began + SAY_S
        try:
            while True:
                until = -math.inf if done() else min(deadline, self._supervisor.next_look)
                self._serve(max(until - self._clock(), 0))
                if self._clock() >= self._supervisor.next_look:
                    self._supervise()
                self.interrupt.raise_requested()
                if done():
                    break
                if self._clock() >= next_word:
                    next_word += SAY_S
                    text = "waiting for %d of %d workers"
                    waits.info(text, len(self._late), len(self.workers))
                if self._clock() >= deadline:
                    names = ", ".join(map(self._supervisor.describe, self._late))
                    raise DeadlineError(f"No response from {names}")
        finally:
            if self._messenger.outbox:  # weights, for example, that a worker waits for
                self.exchange()
        self.failures.raise_untold()

    @property
    def _late(self) -> list[Worker]:
        """The workers that are not ready, or have not answered a request."""
        at_rest = State.READY, State.ENDED
        return [
            worker
            for worker in self.workers
            if self._requests.of(worker) or worker.process.state not in at_rest
        ]

    def _serve(self, seconds: float) -> None:
        self._messenger.exchange(0 if self._messenger.inbox else seconds)
        while self._messenger.inbox:
            self._messenger.handle_next()
            self.interrupt.raise_requested()

    def _supervise(self) -> None:
        hold_ctrl_c()  # repeatedly, because a notebook restores Python's handler for each cell
        if self._clock() > self._next_ping:
            self._next_ping = self._clock() + PING_S
            for worker in self.workers:
                self._messenger.post(worker, None, Ping())
        for worker, reason in self._supervisor.look():
            # A scheduler that ends a job may signal the head and its workers at the same time.
            self.interrupt.raise_requested()
            if worker.process.identity is not None:
                self._messenger.transport.forget(worker.process.identity)
            self._messenger.transport.restore()
            try:
                self._supervisor.replace(worker, reason)
            except WorkerDiedError:
                self._requests.forget_worker(worker)
                raise
            self._messenger.recovery.lost(worker, reason, self._requests.of(worker))

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if necessary.

        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._messenger.recovery.close()
        deadline = self._clock() + timeout
        with contextlib.ExitStack() as in_the_end:  # even if Ctrl-C is pressed repeatedly
            in_the_end.callback(let_go_of_ctrl_c)
            in_the_end.callback(self._messenger.transport.close)
            in_the_end.callback(
                lambda: self._supervisor.stop(min(max(deadline - self._clock(), 0), LEAVE_S))
            )
            for worker in self.workers:
                self._messenger.post(worker, None, Close())
            self.exchange()
            notice = self._clock() + NOTICE_S
            # The socket stays open until the workers have left: a worker whose link breaks before
            # it has read `Close` ends as if the head had failed.
            while self._clock() < deadline and self._connected:
                self._messenger.exchange(0.01)
                for worker in self.workers:
                    self._messenger.post(worker, None, Ping())
                if self.interrupt.is_ctrl_c:
                    deadline = self._clock()
                if self._clock() >= notice:
                    notice = math.inf
                    names = ", ".join(map(self._supervisor.describe, self._connected))
                    text = "waiting up to %g s for environments to close: %s"
                    logger.warning(text, timeout, names)
            if timeout > 0:
                for worker in self._connected:
                    text = "%s is killed before its environments are closed"
                    logger.warning(text, self._supervisor.describe(worker))

    @property
    def _connected(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.state in CONNECTED]
