"""The workers as one: asks them, hears their responses, and has those replaced that die."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..errors import DeadlineError, StartupError, WorkerDiedError, printable
from ..policy.versions import PolicyStore, Published
from ..wire import protocol
from ..wire.part import RolloutPart
from ..wire.protocol import Built, Close, Error, Hello, Message, Part, Ping, Pull, Reply, Weights
from .answers import Opener
from .failures import Failures
from .interrupts import Interrupt, hold_ctrl_c, let_go_of_ctrl_c
from .recovery import Recovery
from .supervisor import Supervisor
from .transport import Malformed, Outgoing, Received, Transport
from .worker import CONNECTED, Process, Request, State, Worker

PING_S = 1.0  # how often the head tries whether workers can be reached


class Requests:
    """Numbers requests. Keeps each until its response comes, and the response until it is taken."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.outstanding: dict[int, Request] = {}  # by seq, oldest first
        self.answered: dict[int, Request] = {}  # by seq, in the order of the responses

    def add(
        self, worker: Worker, message: Message, buffers: tuple[Any, ...], published: Published
    ) -> int:
        """Keep a request, and return its number."""
        seq = next(self.numbers)
        self.outstanding[seq] = Request(seq, worker, message, buffers, published)
        return seq

    def answer(self, seq: int, response: Reply | RolloutPart, process: Process) -> None:
        """Keep the response to an outstanding request."""
        request = self.outstanding.pop(seq)
        request.response = response
        request.process = process
        self.answered[seq] = request

    def forget(self, seqs: Iterable[int]) -> None:
        """Stop waiting for these, and drop their responses."""
        for seq in seqs:
            self.outstanding.pop(seq, None)
            self.answered.pop(seq, None)

    def forget_worker(self, worker: Worker) -> None:
        """Stop waiting for this worker."""
        for request in self.of(worker):
            del self.outstanding[request.seq]

    def of(self, worker: Worker) -> list[Request]:
        """Return the outstanding requests of this worker, oldest first."""
        return [request for request in self.outstanding.values() if request.worker is worker]

    def are_settled(self, seqs: Collection[int]) -> bool:
        """Say whether none of these is outstanding."""
        return self.outstanding.keys().isdisjoint(seqs)

    def first_answered(self, seqs: Collection[int]) -> int | None:
        """Return the first of these that was answered, or None if none was."""
        return next((seq for seq in self.answered if seq in seqs), None)


class WorkerPool:
    """The workers of one head. It works only while the head waits for them, in the thread that waits.

    A replacement is asked everything that the lost process had not answered, in the same order and
    under the same ``seq``, after what `Recovery` says that it must be told first.
    """

    def __init__(
        self,
        transport: Transport,
        supervisor: Supervisor,
        recovery: Recovery,
        store: PolicyStore,
        opener: Opener,
    ) -> None:
        self.workers = supervisor.workers
        self.transport = transport
        self.failures = Failures()
        self.interrupt = Interrupt()
        self._supervisor = supervisor
        self._clock = supervisor.clock
        self._recovery = recovery
        self._store = store
        self._open = opener
        self._requests = Requests()
        self._by_identity: dict[bytes, Worker] = {}  # of all processes so far
        self._outbox: list[Outgoing] = []
        self._inbox = deque[Received]()  # messages that are not handled to the end
        self._next_ping = 0.0
        self._is_closed = False

    def start(self, min_workers: int) -> None:
        """Start all workers. Return when so many have built their environments."""
        self._supervisor.start(all_must_start=min_workers == len(self.workers))

        def enough_are_ready() -> bool:
            ready = sum(worker.process.state == State.READY for worker in self.workers)
            return self.failures.are_untold or ready >= min_workers

        self._wait(enough_are_ready)

    def ask(self, worker: Worker, message: Message, *buffers: Any) -> int:
        """Make a request to a worker, and return its ``seq``. `exchange` sends it.

        Raises:
            WorkerDiedError: the worker is gone for good.
        """
        self.require(worker)
        seq = self._requests.add(worker, message, buffers, self._store.published)
        self._post(worker, seq, message, *buffers)
        return seq

    def require(self, *workers: Worker) -> None:
        """Raise WorkerDiedError if one of these is gone for good."""
        for worker in workers:
            if worker.process.state == State.ENDED:
                raise WorkerDiedError(f"{self._supervisor.describe(worker)} is gone")

    def gather(self, seqs: Collection[int], timeout: float | None = None) -> list[Request]:
        """Return these requests, once all have a response. If this raises, they are given up.

        Raises:
            DeadlineError, Interrupted, KeyboardInterrupt: it took too long, or is to end.
            WorkerDiedError: a worker is gone for good.
            EnvError: an environment raised. An exception of Python's or Gymnasium's is raised
                itself, caused by this.
        """
        try:
            self._wait(lambda: self._requests.are_settled(seqs), timeout)
            return [self._requests.answered.pop(seq) for seq in seqs]
        except BaseException:
            self._requests.forget(seqs)
            raise

    def first(self, seqs: Collection[int]) -> Request:
        """Return the first of these requests that has a response."""

        def is_answered() -> bool:
            return self._requests.first_answered(seqs) is not None

        self.wait_until(lambda: self.failures.are_untold or is_answered(), seqs)
        return self._requests.answered.pop(self._requests.first_answered(seqs))

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up these requests. Their responses are dropped, and errors that end nothing."""
        self._requests.forget(seqs)

    def wait_until(self, done: Callable[[], bool], seqs: Collection[int]) -> None:
        """Serve the workers until ``done``, as long as one of ``seqs`` is outstanding; see `gather`.

        They are served once even if it is done already, as a worker may wait for its weights.
        """
        self._wait(lambda: done() or self._requests.are_settled(seqs))
        if not done():
            self.require(*self.workers)

    def _wait(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Exchange messages and supervise until ``done``, then raise the errors that came."""
        deadline = math.inf if timeout is None else self._clock() + timeout
        try:
            while True:
                until = -math.inf if done() else min(deadline, self._supervisor.next_look)
                self._serve(max(until - self._clock(), 0))
                if self._clock() >= self._supervisor.next_look:
                    self._supervise()
                self.interrupt.raise_requested()
                if done():
                    break
                if self._clock() >= deadline:
                    late = [worker for worker in self.workers if self._requests.of(worker)]
                    names = ", ".join(map(self._supervisor.describe, late))
                    raise DeadlineError(f"No answer from {names}")
        finally:
            if self._outbox:  # weights, for example, that a worker waits for
                self.exchange()
        self.failures.raise_untold()

    def exchange(self, seconds: float | None = None) -> list[Received]:
        """Send the outbox. With ``seconds``, wait up to that for messages, and return them."""
        outbox, self._outbox = self._outbox, []
        received, closed = self.transport.exchange(outbox, seconds)
        for identity in closed:
            worker = self._by_identity[identity]
            if worker.process.identity == identity:  # else it has been replaced
                self._supervisor.lose(worker)
        return received

    def _serve(self, seconds: float) -> None:
        self._inbox.extend(self.exchange(0 if self._inbox else seconds))
        while self._inbox:
            received = self._inbox[0]
            # If this raises, for example at Ctrl-C, the message is handled once more.
            answered = self._handle(received)
            self._inbox.popleft()
            if answered is not None:
                self._by_identity[received.identity].process.asked.pop(answered, None)
            self.interrupt.raise_requested()

    def _supervise(self) -> None:
        hold_ctrl_c()  # now and then, as a notebook lets go of it for each cell
        if self._clock() > self._next_ping:
            self._next_ping = self._clock() + PING_S
            for worker in self.workers:
                self._post(worker, None, Ping())
        for worker, reason in self._supervisor.look():
            # A scheduler that ends a job may tell head and workers at once.
            self.interrupt.raise_requested()
            if worker.process.identity is not None:
                self.transport.forget(worker.process.identity)
            try:
                self._supervisor.replace(worker, reason)
            except WorkerDiedError:
                self._requests.forget_worker(worker)
                raise
            self._recovery.lost(worker, reason, self._requests.of(worker))

    def _handle(self, received: Received) -> int | None:
        """Handle a message. Return the number of the request that it answers, if it answers one."""
        worker = self._by_identity.get(received.identity)
        if worker is not None and not worker.process.is_heard(received.identity):
            return None
        seq, message = received.read(is_strange=worker is None)
        if worker is None:
            if isinstance(message, Hello):
                self._greet(received.identity, message)
            else:
                self.transport.drop(received.identity, f"{message} of a stranger")
            return None
        worker.process.heard = self._clock()
        match message:
            case Hello():  # said again, while the head was busy
                return None
            case Malformed():
                self._refuse(worker, f"it sent {message}")
            case Built():
                self._supervisor.has_built_one(worker)
            case Pull():
                self._send_weights(worker, seq, message)
                return None
            case _ if seq not in worker.process.asked:
                self._refuse(worker, "it answered what it was not asked, or had answered already")
            case Error():
                self._take_error(worker, seq, message)
            case Reply() | Part():
                self._take_response(worker, seq, message, received.frames)
        return seq

    def _greet(self, identity: bytes, hello: Hello) -> None:
        worker = self.workers[hello.index] if 0 <= hello.index < len(self.workers) else None
        if worker is None or worker.process.state != State.STARTING:
            text = f"a hello from {hello.host}, pid {hello.pid}: no worker {hello.index}"
            return self.transport.drop(identity, text)
        self._by_identity[identity] = worker
        self._supervisor.said_hello(worker, identity, hello.host, hello.pid)
        if (mismatch := protocol.mismatch(hello)) is not None:
            if self._supervisor.all_must_start:
                raise StartupError(f"{self._supervisor.describe(worker)} {mismatch}")
            return self._refuse(worker, f"it {mismatch}")
        process = worker.process
        for seq, message, buffers in self._recovery.orders(worker, self._requests.of(worker)):
            seq = next(self._requests.numbers) if seq is None else seq
            if process.building is None:
                process.building = seq
            self._post(worker, seq, message, *buffers)

    def _send_weights(self, worker: Worker, seq: int | None, pull: Pull) -> None:
        """Answer a pull, even for a request that was given up: that worker waits all the same."""
        process = worker.process
        if not process.may_pull(seq, pull.version, self._store.version):
            return self._refuse(worker, "it pulled for what it was not asked")
        if process.state in CONNECTED:
            weights, buffers = self._store.pull(worker.copy, pull.version)
            self._post(worker, seq, weights, *buffers)
        process.pulled = seq, pull.version

    def _take_error(self, worker: Worker, seq: int, error: Error) -> None:
        if fault := worker.fault_of(seq, error):
            return self._refuse(worker, fault)
        if seq in self._requests.outstanding or error.ends:
            self.failures.add(worker.index, self._supervisor.describe(worker), error)
            self._requests.forget([seq])
        else:
            text = f"an error of worker {worker.index}, not waited for: {error}"
            self.transport.drop(worker.process.identity, text)
        if error.ends:  # none of its other requests will be answered
            self._requests.forget_worker(worker)
        if error.fatal:
            self._supervisor.end(worker, "shut down after its error")

    def _take_response(
        self, worker: Worker, seq: int, message: Reply | Part, frames: list[Any]
    ) -> None:
        process = worker.process
        request = self._requests.outstanding.get(seq)
        if request is None:  # it was given up, or answers an order of `Recovery`
            if seq == process.building:
                self._supervisor.is_ready(worker)
            return
        policies = request.published, self._store.published
        try:
            response = self._open(request.message, message, frames, worker.num_envs, *policies)
        except Exception as error:  # no message of a worker may end the run
            return self._refuse(worker, f"its answer was wrong: {printable(str(error))}")
        self._requests.answer(seq, response, process)
        process.answers += 1
        if isinstance(message, Part):
            worker.waited += message.waited
        # A replacement may answer two requests without a step: one to cut off, and one to reset.
        if isinstance(message, Part) or process.answers > 2:
            worker.losses = 0

    def _refuse(self, worker: Worker, text: str) -> None:
        self._post(worker, None, Close())
        self._supervisor.refuse(worker, text)

    def _post(self, worker: Worker, seq: int | None, message: Message, *buffers: Any) -> None:
        """Put a message in the outbox, if the worker is connected. Else `_greet` posts requests."""
        process = worker.process
        if process.state in CONNECTED:
            self._outbox.append(Outgoing(process.identity, seq, message, buffers))
            if seq is not None and not isinstance(message, Weights):
                process.asked[seq] = message

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if need be.

        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = self._clock() + timeout
        with contextlib.ExitStack() as in_the_end:  # even if Ctrl-C is pressed again and again
            in_the_end.callback(let_go_of_ctrl_c)
            in_the_end.callback(self.transport.close)
            in_the_end.callback(lambda: self._supervisor.stop(max(deadline - self._clock(), 0)))
            for worker in self.workers:
                self._post(worker, None, Close())
            self.exchange()
            # The socket stays open until the workers have left: a worker whose link breaks before
            # it has read that it is to close ends as if the head had failed.
            while self._clock() < deadline and any(
                worker.process.state in CONNECTED for worker in self.workers
            ):
                self.exchange(0.01)
                for worker in self.workers:
                    self._post(worker, None, Ping())
                if self.interrupt.is_ctrl_c:
                    deadline = self._clock()
