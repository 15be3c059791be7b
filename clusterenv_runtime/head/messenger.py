"""The exchange of messages with workers: each message that arrives is checked and handled here."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..envs.blueprint import Blueprint, SpacesError
from ..errors import StartupError, printable
from ..policy.versions import PolicyStore
from ..wire import protocol
from ..wire.codec import name_of
from ..wire.protocol import (
    Built,
    Close,
    Collect,
    Error,
    Evaluate,
    Hello,
    Message,
    Part,
    Pull,
    Reply,
    Step,
    Weights,
)
from .recovery import Recovery
from .requests import Failures, Requests
from .responses import Opener, value_of
from .supervisor import Supervisor
from .transport import Outgoing, Received, Transport
from .worker import CONNECTED, State, Worker


class Messenger:
    """Sends messages to workers, and handles workers' messages.

    A process sends `Hello`, and gets the orders that make it a worker. The worker answers each
    request once, and may pull weights before that. A worker that sends anything else is lost, and a
    warning names it.
    """

    def __init__(
        self,
        transport: Transport,
        supervisor: Supervisor,
        recovery: Recovery,
        store: PolicyStore,
        blueprint: Blueprint,
    ) -> None:
        self.transport = transport
        self.supervisor = supervisor
        self.recovery = recovery
        self.store = store
        self.requests = Requests()
        self.failures = Failures()
        self._blueprint = blueprint
        self._open: Opener | None = None  # None until the layout of environments is known
        self._by_identity: dict[bytes, Worker] = {}  # includes former processes
        self.outbox: list[Outgoing] = []
        self.inbox = deque[Received]()  # received messages, not yet completely handled

    def post(self, worker: Worker, seq: int | None, message: Message, *buffers: Any) -> None:
        """Put a message in the outbox, if the worker is connected.

        Requests to a worker that is not connected are posted when it says hello.
        """
        process = worker.process
        if process.state in CONNECTED:
            self.outbox.append(Outgoing(process.identity, seq, message, buffers))
            if seq is not None and not isinstance(message, Weights):
                process.asked[seq] = message

    def exchange(self, seconds: float | None = None) -> None:
        """Send the outbox. Wait up to ``seconds`` for messages, unless this is None."""
        outbox, self.outbox = self.outbox, []
        received, closed = self.transport.exchange(outbox, seconds)
        self.inbox.extend(received)
        for identity in closed:
            worker = self._by_identity[identity]
            if worker.process.identity == identity:  # otherwise it has been replaced
                self.supervisor.lose(worker)

    def handle_next(self) -> None:
        """Handle the oldest message. If this raises, the next call handles the message again."""
        received = self.inbox[0]
        answered = self._handle(received)
        self.inbox.popleft()
        if answered is not None:
            self._by_identity[received.identity].process.asked.pop(answered, None)

    def _handle(self, received: Received) -> int | None:
        """Handle a message. Return the ``seq`` of the request that it answers, or None."""
        worker = self._by_identity.get(received.identity)
        if worker is None:
            self._meet(received)
            return None
        if not worker.process.is_heard(received.identity):
            return None
        seq, message = received.read()
        worker.process.heard = self.supervisor.clock()
        match message:
            case Hello():  # sent again while the head was busy
                return None
            case str():  # an invalid message
                self._refuse(worker, f"it sent {message}")
            case Built():
                self.supervisor.note_built(worker)
            case Pull():
                self._send_weights(worker, seq, message)
                return None
            case _ if seq not in worker.process.asked:
                self._refuse(worker, "it answered a request that it was not sent, or did so twice")
            case Error():
                self._take_error(worker, seq, message)
            case Reply() | Part():
                self._take_response(worker, seq, message, received.frames)
        return seq

    def _meet(self, received: Received) -> None:
        """Send a new process its orders if it says hello. Drop the message of a stranger."""
        identity, workers = received.identity, self.supervisor.workers
        _, hello = received.read(is_strange=True)
        if not isinstance(hello, Hello):
            return self.transport.drop(identity, f"{hello} from a stranger")
        worker = workers[hello.index] if 0 <= hello.index < len(workers) else None
        if worker is None or worker.process.state != State.STARTING:
            text = f"a hello from {hello.host}, pid {hello.pid}: no worker {hello.index}"
            return self.transport.drop(identity, text)
        self._by_identity[identity] = worker
        self.supervisor.note_hello(worker, identity, hello.host, hello.pid)
        if (mismatch := protocol.mismatch(hello)) is not None:
            if self.supervisor.all_must_start:
                raise StartupError(f"{self.supervisor.describe(worker)} {mismatch}")
            return self._refuse(worker, f"it {mismatch}")
        process = worker.process
        for seq, message, buffers in self.recovery.orders(worker, self.requests.of(worker)):
            seq = next(self.requests.seqs) if seq is None else seq
            if process.building is None:
                process.building = seq
            self.post(worker, seq, message, *buffers)

    def _send_weights(self, worker: Worker, seq: int | None, pull: Pull) -> None:
        """Answer a pull, even for a request that was given up, because the worker waits anyway."""
        process = worker.process
        if not process.may_pull(seq, pull.version, self.store.version):
            return self._refuse(worker, "it pulled when no request allowed it")
        if process.state in CONNECTED:
            weights, buffers = self.store.pull(worker.copy, pull.version)
            self.post(worker, seq, weights, *buffers)
            process.policy = self.store.published
        process.pulled = seq, pull.version

    def _take_error(self, worker: Worker, seq: int, error: Error) -> None:
        if seq in self.requests.outstanding or error.ends:
            self.failures.add(worker.index, self.supervisor.describe(worker), error)
            self.requests.forget([seq])
        else:
            text = f"an error of worker {worker.index}, not waited for: {error}"
            self.transport.drop(worker.process.identity, text)
        if error.ends:  # none of its other requests will be answered
            self.requests.forget_worker(worker)
        if error.fatal:
            self.supervisor.end(worker, "shut down after its error")

    def _take_response(
        self, worker: Worker, seq: int, message: Reply | Part, frames: list[Any]
    ) -> None:
        process = worker.process
        request = self.requests.outstanding.get(seq)
        if request is None:  # it was given up, or is an order of `Recovery`
            if seq == process.building:
                self._take_built(worker, seq, message, frames)
            return
        try:
            response = self._open(request.message, message, frames, worker.num_envs, process.policy)
        except Exception as error:  # a worker's message must not end the run
            return self._refuse(worker, f"its answer was wrong: {printable(str(error))}")
        self.requests.answer(seq, response)
        if isinstance(message, Part):
            worker.waited += message.waited
        asked = process.asked[seq]
        # If the user has seen all episodes end, a step may do no more than reset environments.
        has_stepped = isinstance(asked, Step) and not worker.episodes.ended.all()
        if has_stepped or isinstance(asked, Collect | Evaluate):
            worker.losses = 0

    def _take_built(
        self, worker: Worker, seq: int, message: Reply | Part, frames: list[Any]
    ) -> None:
        """Learn which environments a worker has built. They must match the other workers'."""
        try:
            self._blueprint.learn(value_of(message, frames), worker.rows)
            if self._open is None:
                layout = self._blueprint.layout
                self._open = Opener(layout)
                self.store.act_in(layout.single_observation_space, layout.single_action_space)
        except SpacesError as error:
            self.post(worker, None, Close())
            kind = name_of(type(error))
            self._take_error(worker, seq, Error(None, kind, str(error), "", fatal=True))
        except Exception as error:  # a worker may send anything
            self._refuse(worker, f"its answer was wrong: {printable(str(error))}")
        else:
            self.supervisor.note_ready(worker)

    def _refuse(self, worker: Worker, text: str) -> None:
        self.post(worker, None, Close())
        self.supervisor.refuse(worker, text)
