"""The workers as one: asks them, waits for their responses, and has those replaced that die."""

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
PING_S = 1.0  # how often the head tries whether workers can be reached
NOTICE_S = 3.0  # after this time the user is told for whom `close` waits
LEAVE_S = 3.0  # how long a process may take to end once its environments are closed


class WorkerPool:
    """The workers of one head. It works only in the thread that waits for them, while it waits.

    A replacement is asked everything that the lost process had not answered, in the same order and
    under the same ``seq``, after what `Recovery` says that it must be told first.
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
        """Start all workers. Return when so many have built their environments."""
        self._supervisor.start(all_must_start=min_workers == len(self.workers))

        def enough_are_ready() -> Any:
            ready = sum(worker.process.state == State.READY for worker in self.workers)
            return self.failures.untold or ready >= min_workers

        self._wait(enough_are_ready)

    def ask(self, worker: Worker, message: Message, *buffers: Any) -> int:
        """Make a request to a worker, and return its ``seq``. `exchange` sends it.

        Raises:
            WorkerDiedError: the worker is gone for good.
        """
        self.require(worker)
        seq = self._requests.add(worker, message, buffers, self._messenger.store.published)
        self._messenger.post(worker, seq, message, *buffers)
        return seq

    def require(self, *workers: Worker) -> None:
        """Raise WorkerDiedError if one of these is gone for good."""
        for worker in workers:
            if worker.process.state == State.ENDED:
                raise WorkerDiedError(f"{self._supervisor.describe(worker)} is gone")

    def exchange(self) -> None:
        """Send what was asked."""
        self._messenger.exchange()

    def settle(self, seqs: Collection[int], timeout: float | None = None) -> None:
        """Wait until all of these requests have a response.

        Raises:
            DeadlineError, Interrupted, KeyboardInterrupt: it took too long, or is to end.
            WorkerDiedError: a worker is gone for good.
            EnvError: an environment raised. An exception of Python's or Gymnasium's is raised
                itself, caused by this.
        """
        self._wait(lambda: self._requests.are_settled(seqs), timeout)

    def gather(self, seqs: Collection[int], timeout: float | None = None) -> list[Request]:
        """Return these requests, once all have a response; see `settle`. If this raises, they are
        given up.
        """
        try:
            self.settle(seqs, timeout)
            return [self._requests.answered.pop(seq) for seq in seqs]
        except BaseException:
            self._requests.forget(seqs)
            raise

    def first(self, seqs: Collection[int]) -> Request:
        """Return the first of these requests that has a response."""
        self.wait_until(lambda: self._requests.first_answered(seqs) is not None, seqs)
        return self._requests.answered.pop(self._requests.first_answered(seqs))

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up these requests. Their responses are dropped, and errors that end nothing."""
        self._requests.forget(seqs)

    def outstanding(self, seqs: Iterable[int]) -> list[int]:
        """Return those of these requests that have no response. Drop the responses of others."""
        waiting = [seq for seq in seqs if seq in self._requests.outstanding]
        self._requests.forget(set(seqs) - set(waiting))
        return waiting

    def wait_until(self, done: Callable[[], Any], seqs: Collection[int]) -> None:
        """Serve the workers until ``done`` or an error, while one of ``seqs`` is outstanding; see
        `settle`.

        They are served once even if it is done already, as a worker may wait for its weights.
        """
        self._wait(lambda: done() or self.failures.untold or self._requests.are_settled(seqs))
        if not done():
            self.require(*self.workers)

    def _wait(self, done: Callable[[], Any], timeout: float | None = None) -> None:
        """Exchange messages and supervise until ``done``, then raise the errors that came."""
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
                    raise DeadlineError(f"No answer from {names}")
        finally:
            if self._messenger.outbox:  # weights, for example, that a worker waits for
                self.exchange()
        self.failures.raise_untold()

    @property
    def _late(self) -> list[Worker]:
        """The workers that start, or have not answered a request."""
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
        hold_ctrl_c()  # now and then, as a notebook lets go of it for each cell
        if self._clock() > self._next_ping:
            self._next_ping = self._clock() + PING_S
            for worker in self.workers:
                self._messenger.post(worker, None, Ping())
        for worker, reason in self._supervisor.look():
            # A scheduler that ends a job may tell head and workers at once.
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
        """Close every worker within about ``timeout`` seconds, by force if need be.

        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._messenger.recovery.close()
        deadline = self._clock() + timeout
        with contextlib.ExitStack() as in_the_end:  # even if Ctrl-C is pressed again and again
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
            # it has read that it is to close ends as if the head had failed.
            while self._clock() < deadline and self._connected:
                self._messenger.exchange(0.01)
                for worker in self.workers:
                    self._messenger.post(worker, None, Ping())
                if self.interrupt.is_ctrl_c:
                    deadline = self._clock()
                if self._clock() >= notice:
                    notice = math.inf
                    names = ", ".join(map(self._supervisor.describe, self._connected))
                    text = "waiting up to %g s until the environments are closed of %s"
                    logger.warning(text, timeout, names)
            if timeout > 0:
                for worker in self._connected:
                    text = "%s is killed before its environments are closed"
                    logger.warning(text, self._supervisor.describe(worker))

    @property
    def _connected(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.state in CONNECTED]
