"""The head's side of the wire: its one listening socket and the workers behind it."""

from __future__ import annotations

import builtins
import logging
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import zmq

from . import protocol
from .errors import DeadlineError, EnvError, Interrupted, StartupError, WorkerDiedError
from .launchers import Launcher, listening_address, worker_flags
from .protocol import Close, Error, Hello, Message, Ping, Pull, Reply
from .recovery import Recovery
from .security import Gate, HeadKeys

logger = logging.getLogger(__name__)
POLL_MS = 200  # how often a waiting head looks whether its workers live
PING_S = 1.0  # how often it tries whether they can be reached
NOTICE_S = 60.0  # how often it says that a worker has not been started yet


@dataclass
class Link:
    """One worker, as the head knows it."""

    index: int
    rows: slice  # its environments
    identity: bytes | None = None  # of its connection; None until it has said hello, and after it was lost
    place: str = "no hello yet"  # host and pid
    setup: int = 0  # the seq of the request that builds its environments
    ready: bool = False  # whether they are built
    came: bool = False  # whether they have been once
    losing: bool = False  # while a dead one is being replaced: what it still says is of no use
    ended: bool = False  # after its error: there will be no other
    heard: float = field(default_factory=time.monotonic)  # of it last, or when it was started
    losses: int = 0  # of its processes, since there was an answer
    told: float = field(default_factory=time.monotonic)  # when the user was last told that it has not been started


class Head:
    """Starts workers, asks them, hears their answers, replaces those that die, and closes them.

    What a worker has not answered when it dies is asked of the one that replaces it, in the same order and under the
    same ``seq``, after what ``recovery`` says that it must be told first.
    """

    def __init__(
        self,
        rows: Iterable[slice],
        launcher: Launcher,
        recovery: Recovery,
        on_pull: Callable[[int], list[Any]],
        min_workers: int,
        max_restarts: int,
        startup_timeout: float,
        worker_timeout: float,
        bind_address: str | None,
        port: int,
        security: str,
        keys: HeadKeys | None,
    ) -> None:
        self.links = [Link(index, row) for index, row in enumerate(rows)]
        self._launcher, self._recovery, self._max_restarts = launcher, recovery, max_restarts
        self._started = min_workers < len(self.links)  # then a start that fails is a loss
        self._on_pull, self._seq = on_pull, 0  # worker -> frames of the answer
        self._startup_timeout, self._worker_timeout = startup_timeout, worker_timeout
        # libzmq's own thread notices a silent link, whatever Python does at either end; a message to it then fails.
        self._ping, self._next_ping = protocol.frames(Ping()), 0.0
        self._known: dict[bytes, Link] = {}  # by identity
        self._former: set[bytes] = set()  # identities of the lost: what still comes from them is of no use
        # seq -> worker, request and its buffers, of what is not answered, oldest first
        self._outstanding: dict[int, tuple[int, Message, tuple[Any, ...]]] = {}
        # seq -> frames of what nobody has taken yet, oldest first. They are decoded again when taken: thousands,
        # held decoded, are so many objects that Python's garbage collector takes more time than all the rest.
        self._replies: dict[int, list[zmq.Frame]] = {}
        self._errors: list[tuple[Link, Error]] = []  # that are to be raised
        self._next_look = 0.0  # at the workers' processes
        self.interrupted = False  # whether a wait is to raise Interrupted; a signal handler or a thread may set it
        self.dropped = 0  # messages so far that were malformed or of strangers
        self._complained_of: set[bytes] = set()
        if launcher.directory is not None:
            launcher.directory.mkdir(parents=True, exist_ok=True)
        # 0700: nobody else can dial in
        self._directory = tempfile.TemporaryDirectory(prefix="clusterenv-", dir=launcher.directory)
        address = listening_address(bind_address, port or "*", self._directory.name)
        if not bind_address and len(address) > len("ipc://") + 107:
            raise StartupError(f"the socket's path {address} is longer than 107 bytes: set TMPDIR to a shorter one")
        self._context, self._gate, key_file = zmq.Context(), None, None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True  # a message to a worker that has gone raises instead of vanishing
        self._socket.sndhwm = 0  # one that does not read must not block the head; what it is sent is bounded
        protocol.set_limits(self._socket, worker_timeout)
        try:
            if bind_address and security == "curve":
                key_file = Path(self._directory.name) / "key"
                self._gate = Gate(self._context, self._socket, key_file, keys)
            try:
                self._socket.bind(address)
            except zmq.ZMQError as error:
                raise StartupError(f"cannot listen on {address}: {error.strerror}") from None
            address = self._socket.last_endpoint.decode().rstrip("\0")
            flags = worker_flags(address, key_file, startup_timeout, worker_timeout)
            launcher.prepare(len(self.links), flags, self._directory.name)
            launcher.start()
            self._await_workers(min_workers)
        except BaseException:
            self.close(timeout=0)
            raise

    def ask(self, worker: int, message: Message, *buffers: Any) -> int:
        """Send a request with a fresh ``seq``, now or when the worker is there, and return that."""
        link = self.links[worker]
        if link.ended:
            raise WorkerDiedError(f"{self.describe(link)} is gone")
        self._seq += 1
        message.seq = self._seq
        self._outstanding[self._seq] = worker, message, buffers
        self._send(link, protocol.frames(message, *buffers))
        return message.seq

    def gather(self, seqs: list[int], timeout: float | None = None, copy: bool = True) -> list[Reply]:
        """Return the replies to all of these requests, once they are here.

        Arrays in the replies are writable copies, or with ``copy=False`` views of the messages.

        Raises:
            DeadlineError: not all have answered within ``timeout`` seconds; they are given up.
            Interrupted: ``interrupted`` was set; they are given up.
            WorkerDiedError: a worker that has not answered is gone.
            EnvError: an environment raised; or the exception itself, if it is Python's or Gymnasium's, caused by this.
        """
        try:
            self._wait(self._answered(seqs), lambda: self._awaited(seqs), timeout)
        except BaseException:
            self.forget(seqs)
            raise
        return [self._open(seq, copy) for seq in seqs]

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up waiting for these requests: their replies, but not their errors, are dropped."""
        for seq in seqs:
            self._outstanding.pop(seq, None)
            self._replies.pop(seq, None)

    def first(self, seqs: Collection[int]) -> tuple[int, Reply]:
        """Return the first of these requests to be answered, and the reply, with views of its message."""

        def arrived() -> int | None:
            # One is looked up; of many, the first reply is almost always one.
            some, others = (seqs, self._replies) if len(seqs) == 1 else (self._replies, seqs)
            return next((seq for seq in some if seq in others), None)

        self.wait_until(lambda: self.failed or arrived() is not None, seqs)
        seq = arrived()
        return seq, self._open(seq, copy=False)

    def wait_until(self, done: Callable[[], bool], seqs: Iterable[int]) -> None:
        """Answer pulls and keep replies until ``done``, as long as the workers of ``seqs`` live; see `gather`.

        Also if it is done already: whoever waits for weights waits behind others' replies.
        """
        answered = self._answered(seqs)
        self._wait(lambda: done() or answered(), lambda: self._awaited(seqs))
        if not done():
            gone = ", ".join(self.describe(link) for link in self.links if link.ended)
            raise WorkerDiedError(f"there will be no answer: {gone} is gone")

    def _answered(self, seqs: Iterable[int]) -> Callable[[], bool]:
        """Return a function that says whether none of these requests is outstanding, be it asked ever so often."""
        rest, seq = iter(seqs), None

        def answered() -> bool:
            nonlocal seq
            while seq not in self._outstanding:  # what has been answered is not asked again
                if (seq := next(rest, None)) is None:
                    return True
            return False

        return answered

    def _awaited(self, seqs: Iterable[int]) -> list[Link]:
        workers = {self._outstanding[seq][0] for seq in seqs if seq in self._outstanding}
        return [self.links[worker] for worker in sorted(workers)]

    def _wait(self, done: Callable[[], bool], awaited: Callable[[], list[Link]], timeout: float | None = None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            for _ in range(1000):  # more may be a flood
                if not self._receive():
                    break
            if self.interrupted:
                self.interrupted = False
                raise Interrupted("interrupted while waiting for workers")
            if time.monotonic() > self._next_look:
                self._look(awaited())
            if done():
                break
            if time.monotonic() >= deadline:
                raise DeadlineError("No answer from " + ", ".join(map(self.describe, awaited())))
            self._socket.poll(min(POLL_MS, max(deadline - time.monotonic(), 0) * 1000))
        if self._errors:
            errors, self._errors = self._errors, []
            self._raise(errors)

    @property
    def failed(self) -> bool:
        """Whether there is an error that the next wait will raise."""
        return bool(self._errors)

    def _handle(self, link: Link | None, message: Any, frames: list[zmq.Frame]) -> None:
        if link is None:
            return  # of no worker we know
        if isinstance(message, Pull):  # also for a request given up since: that worker waits all the same
            if link.identity is not None:  # else it is being lost
                self._send(link, self._on_pull(link.index))
            return
        seq = getattr(message, "seq", None)
        expected = seq in self._outstanding and self._outstanding[seq][0] == link.index
        if isinstance(message, Error) and (expected or message.fatal):
            self._errors.append((link, message))
            if message.fatal:  # even if it answers a request given up since: there will be no other answer
                self._end(link)
                link.place += ", shut down after its error"
            self._outstanding.pop(seq, None)
        elif isinstance(message, Reply) and expected:  # else late or duplicate
            del self._outstanding[seq]
            self._replies[seq] = frames
            link.losses = 0
            self._recovery.answered(link.index, message.generator)
        elif isinstance(message, Reply) and seq == link.setup:
            link.ready = link.came = True
        elif isinstance(message, Error):
            logger.warning("%s could not do again what its predecessor did: %s", self.describe(link), message.message)

    def _open(self, seq: int, copy: bool) -> Reply:
        header, *buffers = [frame.buffer for frame in self._replies.pop(seq)]
        reply = protocol.decode_answer(header)
        reply.value = protocol.unpack(reply.value, buffers, copy)
        reply.infos = protocol.unpack(reply.infos, buffers)
        return reply

    def close(self, timeout: float) -> None:
        """Close every worker within about ``timeout`` seconds, by force if need be. Safe to call twice."""
        if self._socket.closed:
            return
        for link in self.links:
            if link.identity is not None:
                try:
                    self._socket.send_multipart([link.identity, *protocol.frames(Close())], zmq.NOBLOCK)
                except zmq.ZMQError:
                    logger.debug("worker %d had gone before it was closed", link.index)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(map(self._reaches, self.links)):
            time.sleep(0.01)  # one that sees this socket closed before it has read that it is to close has failed
        self._launcher.stop(max(deadline - time.monotonic(), 0))
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._directory.cleanup()

    def _reaches(self, link: Link) -> bool:
        """Say whether a worker's link is open still."""
        try:
            if link.identity is not None:
                self._socket.send_multipart([link.identity, *self._ping], zmq.NOBLOCK)
            return link.identity is not None
        except zmq.ZMQError:
            return False

    def describe(self, link: Link) -> str:
        log = self._launcher.log(link.index)
        rows = f"environments {link.rows.start} to {link.rows.stop - 1}"
        return f"worker {link.index} ({link.place}, {rows}{'' if log is None else f', log {log}'})"

    def _send(self, link: Link, frames: list[Any]) -> None:
        if link.identity is None:
            return  # what is outstanding will be sent when it joins
        try:
            self._socket.send_multipart([link.identity, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(link)

    def _receive(self) -> bool:
        """Handle a message, and say whether there was one."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if identity.bytes in self._former:
            return True
        try:
            message = protocol.decode_answer(frames[0].buffer)
        except Exception as error:  # msgspec's, UnicodeDecodeError, RecursionError: a stranger may send anything
            self._drop(identity.bytes, "a malformed message: %s", error)
            return True
        link = self._known.get(identity.bytes)
        if isinstance(message, Hello):
            self._greet(identity.bytes, message)
        elif link is None:
            self._drop(identity.bytes, "a %s of a stranger", type(message).__name__)
        else:
            link.heard = time.monotonic()
            self._handle(link, message, frames)
        return True

    def _look(self, awaited: list[Link]) -> None:
        """See whether these workers' processes live, come up in time, and can be reached; all messages are read."""
        now = time.monotonic()
        self._next_look = now + POLL_MS / 1000
        for link in awaited:
            if self._launcher.exit_reason(link.index) is not None:
                self._lose(link)
            elif link.identity is None and (pending := self._launcher.pending(link.index)):
                link.heard = now  # its time is counted from when it is started
                if now > link.told + NOTICE_S:
                    link.told = now
                    logger.warning("still waiting for worker %d to be started: %s", link.index, pending)
            elif not link.ready and now > link.heard + self._startup_timeout:
                late = f"did not come up and build its environments within {self._startup_timeout:g} s"
                if not self._started:
                    raise StartupError(f"{', '.join(map(self.describe, awaited))} {late}")
                self._lose(link, late)
        if now > self._next_ping:
            self._next_ping = now + PING_S
            for link in awaited:
                self._send(link, self._ping)

    def _drop(self, identity: bytes, text: str, *arguments: Any) -> None:
        """Count a message that is not for us; say so once per peer, and of a hundred peers at most."""
        self.dropped += 1
        if identity not in self._complained_of and len(self._complained_of) < 100:
            self._complained_of.add(identity)
            logger.warning("dropped " + text, *arguments)

    def _await_workers(self, number: int) -> None:
        def ready() -> bool:
            return self.failed or sum(link.ready for link in self.links) >= number

        self._wait(ready, lambda: [link for link in self.links if not link.ready])
        self._started = True

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if identity in self._known:
            return  # said again, while the head was busy
        link = self.links[hello.index] if 0 <= hello.index < len(self.links) else None
        if link is None or link.identity is not None or link.losing or link.ended:
            text = "a hello from %s, pid %d: there is no worker %d to come"
            self._drop(identity, text, hello.host, hello.pid, hello.index)
            return
        link.place = f"{hello.host}, pid {hello.pid}"
        if hello.protocol != protocol.PROTOCOL_VERSION:
            raise StartupError(
                f"{self.describe(link)} speaks protocol {hello.protocol}, the head {protocol.PROTOCOL_VERSION}: "
                "install the same clusterenv_runtime on both"
            )
        ours = protocol.shared_versions()
        if differing := [name for name in ours if hello.versions.get(name, ours[name]) != ours[name]]:
            theirs = ", ".join(f"{name} {hello.versions[name]} (head: {ours[name]})" for name in differing)
            raise StartupError(f"{self.describe(link)} runs {theirs}: install the same versions on both")
        link.identity, link.heard = identity, time.monotonic()
        self._known[identity] = link
        unanswered = [request for worker, *request in self._outstanding.values() if worker == link.index]
        for number, (message, buffers) in enumerate(self._recovery.join(link.index, unanswered)):
            if not message.seq:  # else it is outstanding
                self._seq += 1
                message.seq = self._seq
            if number == 0:
                link.setup = message.seq
            self._send(link, protocol.frames(message, *buffers))

    def _end(self, link: Link) -> None:
        """There will be no answer of this worker, and no other in its place."""
        link.identity, link.ended = None, True
        self._outstanding = {seq: request for seq, request in self._outstanding.items() if request[0] != link.index}

    def _lose(self, link: Link, reason: str | None = None) -> None:
        """Replace a worker that has died, unless its last words were an error.

        Raises:
            WorkerDiedError: it is not to be replaced, or not once more.
            Interrupted: the head was, too.
        """
        if link.losing or link.ended:
            return
        identity, link.identity, link.ready, link.losing = link.identity, None, False, True
        try:
            deadline = time.monotonic() + 1  # the link may break a moment before the process ends
            while reason is None and time.monotonic() < deadline:
                reason = self._launcher.exit_reason(link.index) or time.sleep(0.01)
            self._launcher.kill(link.index)  # should it be only stopped, or cut off: it is not to come back
            for _ in range(10_000):  # its last words may be an answer, or say why
                if not self._receive():
                    break
        finally:
            link.losing = False
        if identity is not None:
            del self._known[identity]
            self._former.add(identity)
        if link.ended:
            return
        if self.interrupted:  # a scheduler that ends a job may tell head and workers at once
            self.interrupted = False
            raise Interrupted("interrupted when a worker ended")
        if reason is None:
            reason = f"cut off, or silent for {self._worker_timeout:g} s (its last answer came "
            reason += f"{time.monotonic() - link.heard:.0f} s ago); is it stopped, or its machine or network down?"
        text = f"{self.describe(link)} died: {reason}"
        link.losses += 1
        if link.losses > self._max_restarts or not self._started:
            self._end(link)
            again = f" (and so did {link.losses - 1} before it, one after the other)" * (link.losses > 1)
            raise WorkerDiedError(text + again)
        unanswered = [message for worker, message, _ in self._outstanding.values() if worker == link.index]
        self._recovery.lost(link.index, text, unanswered)
        link.place, link.setup, link.heard = "no hello yet", 0, time.monotonic()
        self._launcher.restart(link.index)

    def _raise(self, errors: list[tuple[Link, Error]]) -> NoReturn:
        """Raise the last of ``errors``, logging them as Gymnasium's AsyncVectorEnv does, where a worker is one env."""
        for _, error in errors:
            if error.fatal and error.env is not None:
                gym.logger.error(f"Received the following error from Worker-{error.env} - Shutting it down")
                gym.logger.error("%s", error.traceback)
        link, error = errors[-1]
        if error.fatal and error.env is not None:
            gym.logger.error("Raising the last exception back to the main process.")
        which = "the policy or an environment" if error.env is None else f"environment {error.env}"
        cause = EnvError(f"{which} on {self.describe(link)} raised {error.kind}: {error.message}\n\n{error.traceback}")
        exception = _local_exception(error)
        if exception is None:
            raise cause
        raise exception from cause


def _local_exception(error: Error) -> Exception | None:
    """Make the exception a worker names, if it is one of Python's or Gymnasium's that takes one text."""
    module, _, name = error.kind.rpartition(".")
    kind = getattr({"builtins": builtins, "gymnasium.error": gym.error}.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(error.message)
    except TypeError:  # UnicodeDecodeError and the like want more
        return None
