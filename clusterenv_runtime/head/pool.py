"""The workers as one: asks them, hears their answers, and has those replaced that die."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from .. import protocol
from ..errors import DeadlineError, Interrupted, StartupError, WorkerDiedError
from ..launchers import Exit, Launcher
from ..launchers.base import worker_flags
from ..protocol import Close, Error, Hello, Message, Part, Ping, Pull, Reply, Weights
from ..versions import PolicyStore
from .failures import to_exception
from .handle import State, WorkerHandle
from .recovery import Recovery
from .requests import Request, Requests
from .supervisor import Supervisor
from .transport import Received, Transport

logger = logging.getLogger(__name__)
PING_S = 1.0  # how often the head tries whether workers can be reached
FLOOD = 1000  # messages that are handled before the head looks after its workers
ServedRequest = tuple[Request, Reply | Part, list[Any]]  # what was asked, the answer, and its buffers


class WorkerPool:
    """The workers of one head. It works only while it waits for them, in the thread that waits.

    What a worker has not answered when it dies is asked of the one that replaces it, in the same order and under the
    same ``seq``, after what `Recovery` says that it must be told first.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        transport: Transport,
        launcher: Launcher,
        supervisor: Supervisor,
        recovery: Recovery,
        store: PolicyStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers, self.transport = workers, transport
        self._launcher, self._supervisor, self._recovery, self._store = launcher, supervisor, recovery, store
        self._clock, self._requests = clock, Requests()
        self._by_identity: dict[bytes, WorkerHandle] = {}
        self._former: set[bytes] = set()  # identities of the lost: what still comes from them is of no use
        self._errors: list[tuple[str, Error]] = []  # that are to be raised, and whose they are
        self._next_ping, self._closed = 0.0, False
        self.interrupted = False  # whether a wait is to raise Interrupted; a signal handler or a thread may set it

    def start(self, min_workers: int, startup_timeout: float, worker_timeout: float) -> None:
        """Start all workers, and return when so many have built their environments.

        Raises:
            StartupError, WorkerDiedError: a worker does not come up.
        """
        flags = worker_flags(self.transport.address, self.transport.key_file, startup_timeout, worker_timeout)
        self._launcher.prepare(len(self.workers), flags, self.transport.directory)
        self._supervisor.all_must_start = min_workers == len(self.workers)
        self._supervisor.start()

        def are_up() -> bool:
            return self.has_failed or sum(worker.state == State.READY for worker in self.workers) >= min_workers

        self._wait(are_up)
        self._supervisor.all_must_start = False

    def ask(self, worker: WorkerHandle, message: Message, *buffers: Any) -> int:
        """Send a request, now or when the worker is there, and return its ``seq``.

        Raises:
            WorkerDiedError: there is no such worker any more.
        """
        if worker.state == State.ENDED:
            raise WorkerDiedError(f"{self._supervisor.describe(worker)} is gone")
        request = self._requests.add(worker.index, message, buffers)
        self._send(worker, request.seq, message, *buffers)
        return request.seq

    def gather(self, seqs: list[int], timeout: float | None = None) -> list[ServedRequest]:
        """Return these requests and their answers, once they are all here.

        Raises:
            DeadlineError: not all have answered within ``timeout`` seconds; they are given up.
            Interrupted: ``interrupted`` was set; they are given up.
            WorkerDiedError: a worker is gone, and is not replaced.
            EnvError: an environment raised; or the exception itself, if it is Python's or Gymnasium's, caused by this.
        """
        try:
            self._wait(self._requests.watch(seqs), seqs, timeout)
        except BaseException:
            self._requests.forget(seqs)
            raise
        return [self._take(seq) for seq in seqs]

    def first(self, seqs: Collection[int]) -> ServedRequest:
        """Return the first of these requests to be answered, with its answer."""
        self.wait_until(lambda: self.has_failed or self._requests.first_answered(seqs) is not None, seqs)
        return self._take(self._requests.first_answered(seqs))

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up waiting for these requests: their answers, but not their errors, are dropped."""
        self._requests.forget(seqs)

    def wait_until(self, done: Callable[[], bool], seqs: Iterable[int]) -> None:
        """Serve the workers until ``done``, as long as those of ``seqs`` can answer; see `gather`.

        Also if it is done already: whoever waits for weights waits behind others' answers.
        """
        are_settled = self._requests.watch(seqs)
        self._wait(lambda: done() or are_settled(), seqs)
        if not done():
            gone = [worker for worker in self.workers if worker.state == State.ENDED]
            raise WorkerDiedError(f"there will be no answer: {self._describe(gone)} is gone")

    @property
    def has_failed(self) -> bool:
        """Whether there is an error that the next wait will raise."""
        return bool(self._errors)

    def _wait(self, done: Callable[[], bool], seqs: Iterable[int] = (), timeout: float | None = None) -> None:
        """Receive, answer and supervise until ``done``; raise what has failed meanwhile."""
        deadline = math.inf if timeout is None else self._clock() + timeout
        while True:
            for _ in range(FLOOD):
                if (received := self.transport.receive()) is None:
                    break
                self._handle(received)
            self._raise_if_interrupted()
            if self._clock() >= self._supervisor.next_look:
                self._supervise()
            if done():
                break
            now = self._clock()
            if now >= deadline:
                late = [self.workers[index] for index in self._requests.workers(seqs)]
                raise DeadlineError("No answer from " + self._describe(late))
            self.transport.wait(max(min(deadline, self._supervisor.next_look) - now, 0))
        if self._errors:
            errors, self._errors = self._errors, []
            raise to_exception(errors)

    def _raise_if_interrupted(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise Interrupted("interrupted while waiting for workers")

    def _supervise(self) -> None:
        if self._clock() > self._next_ping:
            self._next_ping = self._clock() + PING_S
            for worker in self.workers:
                self._send(worker, None, Ping())
        for worker, text in self._supervisor.look():
            self._raise_if_interrupted()  # a scheduler that ends a job may tell head and workers at once
            if worker.identity is not None:
                del self._by_identity[worker.identity]
                self._former.add(worker.identity)
                worker.identity = None
            try:
                self._supervisor.replace(worker, text)
            except WorkerDiedError:
                self._requests.forget_worker(worker.index)
                raise
            self._recovery.lost(worker, text, self._requests.of(worker.index))

    def _handle(self, received: Received) -> None:
        worker = self._by_identity.get(received.identity)
        match received.message:
            case _ if received.identity in self._former:
                pass
            case Hello() as hello:
                if worker is None:  # else said again, while the head was busy
                    self._greet(received.identity, hello)
            case message if worker is None:
                self.transport.drop(received.identity, f"a {type(message).__name__} of a stranger")
            case message:
                worker.heard = self._clock()
                self._handle_answer(worker, received.seq, message, received.frames)

    def _handle_answer(self, worker: WorkerHandle, seq: int | None, message: Any, frames: list[Any]) -> None:
        expected = self._requests.is_outstanding(seq, worker.index)
        match message:
            case Pull():  # also for a request given up since: that worker waits all the same
                if worker.is_connected:
                    version, weights = self._store.pull(worker.copy)
                    self._send(worker, seq, Weights(version), weights)
            case Error() if expected or message.fatal:
                if message.fatal:  # even if it answers a request given up since: there will be no other answer
                    self._supervisor.end(worker, "shut down after its error")
                    self._requests.forget_worker(worker.index)
                self._requests.forget([seq])
                self._errors.append((self._supervisor.describe(worker), message))
            case Error():
                name = self._supervisor.describe(worker)
                logger.warning("%s could not do again what its predecessor did: %s", name, message.message)
            case Reply() | Part() if expected:  # else late or duplicate
                self._requests.answer(seq, frames)
                worker.losses = 0
                if isinstance(message, Part):
                    worker.generator = message.generator
                    worker.waited += message.waited
            case Reply() if seq == worker.building and worker.state == State.BUILDING:
                self._supervisor.is_ready(worker)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        worker = self.workers[hello.index] if 0 <= hello.index < len(self.workers) else None
        if worker is None or worker.state != State.STARTING:
            text = f"a hello from {hello.host}, pid {hello.pid}: there is no worker {hello.index} to come"
            self.transport.drop(identity, text)
            return
        self._by_identity[identity] = worker
        self._supervisor.said_hello(worker, identity, hello.host, hello.pid)
        if (mismatch := protocol.mismatch(hello)) is not None:
            if self._supervisor.all_must_start:
                raise StartupError(f"{self._supervisor.describe(worker)} {mismatch}")
            self._supervisor.lose(worker, Exit(f"it {mismatch}"))
            return
        for seq, message, buffers in self._recovery.orders(worker, self._requests.of(worker.index)):
            seq = self._requests.next_seq() if seq is None else seq
            worker.building = seq if worker.building is None else worker.building
            self._send(worker, seq, message, *buffers)

    def _send(self, worker: WorkerHandle, seq: int | None, message: Message, *buffers: Any) -> None:
        """Send a message, unless the worker is not there: then what is outstanding will be sent when one comes."""
        if worker.is_connected and not self.transport.send(worker.identity, protocol.frames(seq, message, *buffers)):
            self._supervisor.lose(worker)

    def _take(self, seq: int) -> ServedRequest:
        request, (header, *buffers) = self._requests.take(seq)
        _, message = protocol.decode_answer(header)
        return request, message, buffers

    def _describe(self, workers: Iterable[WorkerHandle]) -> str:
        return ", ".join(map(self._supervisor.describe, workers))

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if need be. Safe to call twice."""
        if self._closed:
            return
        self._closed, deadline = True, self._clock() + timeout
        for worker in self.workers:
            self._send(worker, None, Close())
        # One that sees this socket closed before it has read that it is to close has failed.
        while self._clock() < deadline and any(worker.is_connected for worker in self.workers):
            for _ in range(FLOOD):
                if self.transport.receive() is None:
                    break
            self.transport.wait(0.01)
            for worker in self.workers:
                self._send(worker, None, Ping())
        self._launcher.stop(max(deadline - self._clock(), 0))
        self.transport.close()
