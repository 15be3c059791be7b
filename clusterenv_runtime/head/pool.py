"""The workers as one: asks them, hears their answers, and has those replaced that die."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from secrets import randbits
from typing import Any

from ..errors import DeadlineError, StartupError, WorkerDiedError, printable
from ..launchers import Exit, Launcher
from ..policy.versions import PolicyStore, Published
from ..wire import protocol
from ..wire.part import RolloutPart
from ..wire.protocol import Built, Close, Error, Hello, Message, Part, Ping, Pull, Reply, Weights
from .answers import Opener
from .ctrl_c import hold_ctrl_c, let_go_of_ctrl_c
from .failures import to_exception
from .handle import CONNECTED, PendingRequest, Served, State, WorkerHandle
from .recovery import Recovery
from .supervisor import Supervisor
from .transport import Malformed, Outgoing, Received, Transport

PING_S = 1.0  # how often the head tries whether workers can be reached


class Requests:
    """Numbers requests; keeps each until it is answered, and the answer until it is taken."""

    def __init__(self) -> None:
        self._number = 0  # of the last one
        self.outstanding: dict[int, PendingRequest] = {}  # by seq, oldest first
        self.answers: dict[
            int, tuple[PendingRequest, Reply | RolloutPart, int]
        ] = {}  # by seq, with whose it is

    def add(
        self, worker: WorkerHandle, message: Message, buffers: tuple[Any, ...], published: Published
    ) -> int:
        """Keep a request, and return its number."""
        seq = self.number()
        self.outstanding[seq] = PendingRequest(seq, worker.index, message, buffers, published)
        return seq

    def number(self) -> int:
        """Return a number above all before. Nobody can guess it: who answers under it has read what
        was sent so far.
        """
        self._number += 1 + randbits(24)
        return self._number

    def answer(self, seq: int, answer: Reply | RolloutPart, process: int) -> None:
        """Keep the answer to a request that is outstanding."""
        self.answers[seq] = self.outstanding.pop(seq), answer, process

    def forget(self, seqs: Iterable[int]) -> None:
        """Neither wait for these any more, nor keep their answers."""
        for seq in seqs:
            self.outstanding.pop(seq, None)
            self.answers.pop(seq, None)

    def forget_worker(self, worker: int) -> None:
        """Wait no more for anything of this worker."""
        self.outstanding = {
            seq: request for seq, request in self.outstanding.items() if request.worker != worker
        }

    def of(self, worker: int) -> list[PendingRequest]:
        """Return what this worker has not answered, oldest first."""
        return [request for request in self.outstanding.values() if request.worker == worker]

    def first_answered(self, seqs: Collection[int]) -> int | None:
        """Return the first of these to be answered, or None if none is."""
        # One is looked up; of many, the first answer is almost always one.
        some, others = (seqs, self.answers) if len(seqs) == 1 else (self.answers, seqs)
        return next((seq for seq in some if seq in others), None)

    def watch(self, seqs: Iterable[int]) -> Callable[[], bool]:
        """Return a function that says whether none of these is outstanding; asking it often costs
        little.
        """
        rest = list(seqs)

        def are_settled() -> bool:
            while (
                rest and rest[-1] not in self.outstanding
            ):  # what has been answered is not asked again
                rest.pop()
            return not rest

        return are_settled


class WorkerPool:
    """The workers of one head. It works only while it waits for them, in the thread that waits.

    What a worker has not answered when it dies is asked of the one that replaces it, in the same
    order and under the same ``seq``, after what `Recovery` says that it must be told first.
    """

    def __init__(
        self, workers: list[WorkerHandle], transport: Transport, launcher: Launcher, supervisor: Supervisor,
        recovery: Recovery, store: PolicyStore, opener: Opener, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.workers, self.transport, self._open = workers, transport, opener
        self._launcher, self._supervisor, self._recovery, self._store = (
            launcher,
            supervisor,
            recovery,
            store,
        )
        self._clock, self._requests, self._next_ping, self._closed = clock, Requests(), 0.0, False
        self._by_identity: dict[bytes, WorkerHandle] = {}
        self._former, self.failed = (
            set[bytes](),
            set[int](),
        )  # lost processes' identities; who raised, until a reset
        self.errors: list[
            tuple[str, Error]
        ] = []  # that the next wait will raise, and whose they are
        self._outbox, self._inbox = (
            list[Outgoing](),
            deque[Received](),
        )  # to be sent; not yet handled to the end
        self.interrupted: BaseException | None = (
            None  # what a wait is to raise; handlers and threads may set it
        )

    def start(self, min_workers: int) -> None:
        """Start all workers, and return when so many have built their environments; see
        `start_head`.
        """
        self._supervisor.all_must_start = min_workers == len(self.workers)
        self._supervisor.start()
        self._wait(
            lambda: (
                self.errors
                or sum(each.state == State.READY for each in self.workers) >= min_workers
            )
        )
        self._supervisor.all_must_start = False

    def ask(self, worker: WorkerHandle, message: Message, *buffers: Any) -> int:
        """Request something of a worker that is still there, and return the ``seq``; `exchange`
        sends it.
        """
        self.require(worker)
        seq = self._requests.add(worker, message, buffers, self._store.published)
        self._post(worker, seq, message, *buffers)
        return seq

    def require(self, *workers: WorkerHandle) -> None:
        """Raise WorkerDiedError if there will be no answer of one of these."""
        for worker in workers:
            if worker.state == State.ENDED:
                raise WorkerDiedError(f"{self._supervisor.describe(worker)} is gone")

    def gather(self, seqs: list[int], timeout: float | None = None) -> list[Served]:
        """Return these requests and their answers, once they are all here.

        Raises:
            DeadlineError, Interrupted, KeyboardInterrupt: it took too long, or is to end; the
                requests are given up.
            WorkerDiedError: a worker is gone, and is not replaced.
            EnvError: an environment raised; or the exception itself, if it is Python's or
                Gymnasium's, caused by this.
        """
        try:
            self._wait(self._requests.watch(seqs), seqs, timeout)
            return [self._take(seq) for seq in seqs]
        except BaseException:
            self._requests.forget(seqs)
            raise

    def first(self, seqs: Collection[int]) -> Served:
        """Return the first of these requests to be answered, with its answer."""
        self.wait_until(
            lambda: self.errors or self._requests.first_answered(seqs) is not None, seqs
        )
        return self._take(self._requests.first_answered(seqs))

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up waiting for these requests: their answers are dropped, and of their errors those
        that end nothing.
        """
        self._requests.forget(seqs)

    def wait_until(self, done: Callable[[], bool], seqs: Iterable[int]) -> None:
        """Serve the workers until ``done``, as long as those of ``seqs`` can answer; see `gather`.

        Also if it is done already: whoever waits for weights waits behind others' answers.
        """
        are_settled = self._requests.watch(seqs)
        self._wait(lambda: done() or are_settled(), seqs)
        if not done():
            self.require(*self.workers)

    def _wait(
        self, done: Callable[[], bool], seqs: Iterable[int] = (), timeout: float | None = None
    ) -> None:
        """Exchange messages and supervise until ``done``; raise what has failed meanwhile."""
        deadline = math.inf if timeout is None else self._clock() + timeout
        try:
            while True:
                until = -math.inf if done() else min(deadline, self._supervisor.next_look)
                self._serve(max(until - self._clock(), 0))
                if self._clock() >= self._supervisor.next_look:
                    self._supervise()
                self._raise_if_interrupted()
                if done():
                    break
                if self._clock() >= deadline:
                    late = (worker for worker in self.workers if self._requests.of(worker.index))
                    raise DeadlineError(
                        "No answer from " + ", ".join(map(self._supervisor.describe, late))
                    )
        finally:
            if self._outbox:  # such as the weights that were waited for
                self.exchange()
        if self.errors:
            self.raise_errors()

    def raise_errors(self) -> None:
        """Raise what environments have raised, of which there is some, and which the user was not
        told yet.
        """
        errors, self.errors = self.errors, []
        raise to_exception(errors)

    def exchange(self, seconds: float | None = None) -> list[Received]:
        """Send what was asked, and with ``seconds`` wait up to that for what comes; return it."""
        outbox, self._outbox = self._outbox, []
        received, closed = self.transport.exchange(outbox, seconds)
        for worker in filter(None, map(self._by_identity.get, closed)):  # others have been replaced
            self._supervisor.lose(worker)
        return received

    def _serve(self, seconds: float) -> None:
        self._inbox.extend(self.exchange(0 if self._inbox else seconds))
        while self._inbox:
            received = self._inbox[0]
            answered = self._handle(
                received
            )  # should it raise, Ctrl-C for instance, it is handled once more
            self._inbox.popleft()
            if (worker := self._by_identity.get(received.identity)) is not None:
                worker.asked.pop(answered, None)
            self._raise_if_interrupted()

    def _raise_if_interrupted(self) -> None:
        if (error := self.interrupted) is not None:
            self.interrupted = None
            raise error

    def _supervise(self) -> None:
        hold_ctrl_c()  # now and then, as a notebook lets go of it for each cell
        if self._clock() > self._next_ping:
            self._next_ping = self._clock() + PING_S
            for worker in self.workers:
                self._post(worker, None, Ping())
        for worker, text in self._supervisor.look():
            # a scheduler that ends a job may tell head and workers at once
            self._raise_if_interrupted()
            if self._by_identity.pop(worker.identity, None) is not None:
                self.transport.forget(worker.identity)
            self._former.add(worker.identity)  # None if it has never come
            try:
                self._supervisor.replace(worker, text)
            except WorkerDiedError:
                self._requests.forget_worker(worker.index)
                raise
            self._recovery.lost(worker, text, self._requests.of(worker.index))

    def _handle(self, received: Received) -> int | None:
        """Handle a message; return the number of the request that it is the answer to, if it is
        one.
        """
        if received.identity in self._former:
            return
        worker = self._by_identity.get(received.identity)
        seq, message = received.read(is_strange=worker is None)
        match message:
            case Hello() if worker is None:  # else said again, while the head was busy
                self._greet(received.identity, message)
            case _ if worker is None:
                self.transport.drop(received.identity, f"{message} of a stranger")
            case Malformed():
                self._refuse(worker, f"it sent {message}")
            case _:
                worker.heard = self._clock()
                self._handle_answer(worker, seq, message, received.frames)
                return None if isinstance(message, Pull) else seq

    def _handle_answer(
        self, worker: WorkerHandle, seq: int | None, message: Any, frames: list[Any]
    ) -> None:
        request = self._requests.outstanding.get(seq)
        match message:
            case Reply() | Part() | Error() if seq not in worker.asked:
                self._refuse(worker, "it answered what it was not asked, or had answered already")
            case Pull() | Error() if fault := worker.fault_of(seq, message, self._store.version):
                self._refuse(worker, fault)
            case Pull():  # also for a request given up since: that worker waits all the same
                if worker.state in CONNECTED:
                    weights, buffers = self._store.pull(worker.copy, message.version)
                    self._post(worker, seq, weights, *buffers)
                worker.pulled = seq, message.version
            case Error() if request is not None or message.ends:
                self.errors.append((self._supervisor.describe(worker), message))
                self._requests.forget([seq])
                if (
                    message.ends
                ):  # even if it answers a request given up since: there will be no other answer
                    self.failed.add(worker.index)
                    self._requests.forget_worker(worker.index)
                if message.fatal:
                    self._former.add(worker.identity)
                    self.failed.discard(worker.index)  # there is nothing to reset any more
                    self._supervisor.end(worker, "shut down after its error")
            case Error():
                self.transport.drop(
                    worker.identity, f"an error of worker {worker.index}, not waited for: {message}"
                )
            case Reply() | Part() if request is not None:  # else given up
                policies = request.published, self._store.published
                try:
                    answer = self._open(
                        request.message, message, frames, worker.num_envs, *policies
                    )
                except (
                    Exception
                ) as error:  # ProtocolError; but nothing that a worker sends is to end the run
                    return self._refuse(worker, f"its answer was wrong: {printable(str(error))}")
                self._requests.answer(seq, answer, worker.process)
                worker.answers += 1
                if isinstance(message, Part):
                    worker.waited += message.waited
                if (
                    isinstance(message, Part) or worker.answers > 2
                ):  # a cut-off and a reset are no steps
                    worker.losses = 0
            case Reply() if seq == worker.building and worker.state == State.BUILDING:
                self._supervisor.is_ready(worker)
            case Built() if worker.state == State.BUILDING:
                self._supervisor.builds(worker)

    def _refuse(self, worker: WorkerHandle, text: str) -> None:
        self._former.add(worker.identity)  # nor is what it says after that to be believed
        self._post(worker, None, Close())
        self._supervisor.lose(worker, Exit(text))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        worker = self.workers[hello.index] if 0 <= hello.index < len(self.workers) else None
        if worker is None or worker.state != State.STARTING:
            return self.transport.drop(
                identity, f"a hello from {hello.host}, pid {hello.pid}: no worker {hello.index}"
            )
        self._by_identity[identity] = worker
        self._supervisor.said_hello(worker, identity, hello.host, hello.pid)
        if (mismatch := protocol.mismatch(hello)) is not None:
            if self._supervisor.all_must_start:
                raise StartupError(f"{self._supervisor.describe(worker)} {mismatch}")
            return self._refuse(worker, f"it {mismatch}")
        for seq, message, buffers in self._recovery.orders(worker, self._requests.of(worker.index)):
            seq = self._requests.number() if seq is None else seq
            worker.building = seq if worker.building is None else worker.building
            self._post(worker, seq, message, *buffers)

    def _post(self, worker: WorkerHandle, seq: int | None, message: Message, *buffers: Any) -> None:
        """Put a message in the outbox; if the worker is not there, what is outstanding is posted
        when one comes.
        """
        if worker.state in CONNECTED:
            self._outbox.append(Outgoing(worker.identity, seq, message, buffers))
            if seq is not None and not isinstance(message, Weights):  # which answer its own pull
                worker.asked[seq] = message

    def _take(self, seq: int) -> Served:
        request, answer, process = self._requests.answers.pop(seq)
        return Served(request, answer, process != self.workers[request.worker].process)

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if need be. Safe to call
        twice.
        """
        if self._closed:
            return
        self._closed, deadline = True, self._clock() + timeout
        with contextlib.ExitStack() as in_the_end:  # even if Ctrl-C is pressed again and again
            in_the_end.callback(let_go_of_ctrl_c)
            in_the_end.callback(self.transport.close)
            in_the_end.callback(lambda: self._launcher.stop(max(deadline - self._clock(), 0)))
            for worker in self.workers:
                self._post(worker, None, Close())
            self.exchange()
            # One that sees this socket closed before it has read that it is to close has failed.
            while self._clock() < deadline and any(
                worker.state in CONNECTED for worker in self.workers
            ):
                self.exchange(0.01)
                for worker in self.workers:
                    self._post(worker, None, Ping())
                deadline = (
                    self._clock() if isinstance(self.interrupted, KeyboardInterrupt) else deadline
                )
