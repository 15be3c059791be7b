"""The head's one listening socket. It knows connections, and no workers; nothing above it is called
from here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from ..errors import StartupError, printable
from ..wire import protocol
from ..wire.codec import MAX_FRAME
from ..wire.protocol import Answer, Message, Ping
from ..wire.security import Gate, HeadKeys

logger = logging.getLogger(__name__)
MOST_FILES = 65_536
HANDSHAKE_MS = 10_000  # in which a peer must have shown who it is
MAX_HELLO = 2**16  # bytes of the first message of a connection
PING = protocol.encode((None, Ping()))
MOST_AT_ONCE = 1000  # messages that are received at once; then the head looks after its workers


def listening_address(bind_address: str | None, port: int | str, directory: str) -> str:
    """Return where to listen for workers, as ZeroMQ writes it."""
    if not bind_address:
        return f"ipc://{directory}/head"
    return (
        f"tcp://[{bind_address}]:{port}" if ":" in bind_address else f"tcp://{bind_address}:{port}"
    )


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: each connection is one, and a stranger
    may open many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def remove_own(directory: str, pid: int) -> None:
    """Remove a directory of this process's, and not one of the process that it was forked from."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Outgoing:
    """A message to one connection, of a request or (None) of none, with raw buffers after it."""

    identity: bytes
    seq: int | None
    message: Message
    buffers: tuple[Any, ...] = ()


@dataclass
class Malformed:
    """What came instead of a message, in words."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Received:
    """A message of one connection; ``frames`` are its raw buffers, the header's first."""

    identity: bytes
    frames: list[Any]

    def read(self, is_strange: bool = False) -> tuple[int | None, Answer | Malformed]:
        """Return ``seq`` and message. What it says may take much more room than its frames, so do
        not keep many.
        """
        if is_strange and sum(map(len, self.frames)) > MAX_HELLO:
            return None, Malformed("a long message")
        try:
            return protocol.decode_answer(self.frames[0])
        except (
            Exception
        ) as error:  # msgspec's, UnicodeDecodeError, RecursionError: anything may be sent
            return None, Malformed(f"a malformed message: {printable(str(error))}")


class Transport:
    """Sends and receives messages, all in `exchange`.

    A simulation of it needs `exchange`, `drop`, `forget`, `close`, and the attributes `address`,
    `key_file` and `directory`.

    Args:
        bind_address: an IP address or network interface to listen on over tcp; None for a socket
            file.
        port: to listen on over tcp; 0 for a random free one.
        security: over tcp "curve" or "none".
        keys: made ahead, or None for fresh ones.
        parent: where the private directory with socket and keys is made; None for the system's
            place.

    Raises:
        StartupError: it cannot listen there.
    """

    def __init__(
        self,
        bind_address: str | None,
        port: int,
        security: str,
        keys: HeadKeys | None,
        parent: Path | None,
    ) -> None:
        raise_file_limit()
        self.dropped = 0  # messages so far that were malformed or of strangers
        self._complained_of: set[bytes] = set()
        self._pulses: dict[
            bytes, bool
        ] = {}  # by identity, whether it was missing at the last `Ping`
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        # 0700: nobody else can dial in
        self.directory, self.key_file = tempfile.mkdtemp(prefix="clusterenv-", dir=parent), None
        self._remove = weakref.finalize(self, remove_own, self.directory, os.getpid())
        self._context, self._gate = zmq.Context(), None
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.linger = 0
        self._socket.router_mandatory = (
            True  # a message to a worker that has gone raises instead of vanishing
        )
        # All is read at once. Where libzmq has stopped to read from a connection that then breaks,
        # its next PONG would end the process, by an assertion, and so would a PING, of which the
        # head sends none.
        self._socket.rcvhwm = 0
        self._socket.backlog = 4096  # many workers may come at once
        # One that does not read must not block the head. What it is sent is bounded: it cannot
        # answer what it has not read, see `Requests.number`, and only then is it asked for more.
        self._socket.sndhwm = 0
        self._socket.router_handover = (
            True  # else libzmq keeps what comes under an identity that is taken for ever
        )
        protocol.set_limits(self._socket, MAX_FRAME)
        # Connections to machines that are gone close in the end; that of a worker is noticed
        # sooner, see `_has_pulse`.
        self._socket.tcp_keepalive, self._socket.tcp_keepalive_idle = 1, 60
        self._socket.handshake_ivl = HANDSHAKE_MS
        try:
            self._socket.ipv6 = ":" in (bind_address or "")
            if bind_address and security == "curve":
                self.key_file = Path(self.directory) / "key"
                self._gate = Gate(self._context, self._socket, self.key_file, keys)
            self._bind(listening_address(bind_address, port or "*", self.directory))
        except BaseException:
            self.close()
            raise
        self.address = os.fsdecode(self._socket.last_endpoint).rstrip("\0")

    def _bind(self, address: str) -> None:
        data = os.fsencode(address)  # the path of a socket file need not be UTF-8
        if address.startswith("ipc://") and len(data) > len("ipc://") + 107:
            raise StartupError(
                f"the socket's path {address} is longer than 107 bytes: set TMPDIR to a shorter one"
            )
        try:
            self._socket.bind(data)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot listen on {address}: {zmq.strerror(error.errno)}") from None

    @property
    def refused(self) -> int:
        """Connections with a foreign key so far."""
        return 0 if self._gate is None else self._gate.refused

    def exchange(
        self, outbox: Iterable[Outgoing], seconds: float | None
    ) -> tuple[list[Received], list[bytes]]:
        """Send these, and wait for up to ``seconds`` until there is something to receive; with None
        only send.

        Return what has come, and the identities of those whose connection is closed.
        """
        closed = [out.identity for out in outbox if not self._send(out)]
        received, number = list[Received](), 0
        milliseconds = -1 if seconds is None else 0 if closed else seconds * 1000
        while milliseconds >= 0 and number < MOST_AT_ONCE and self._poller.poll(milliseconds):
            message = self._receive()
            number += 1
            if message.identity.startswith(b"p") and message.frames == [PING]:
                if len(self._pulses) < MOST_FILES:  # more cannot be open
                    self._pulses[message.identity] = False
            else:
                received.append(message)
            milliseconds = 0
        return received, closed

    def _send(self, out: Outgoing) -> bool:
        """Send a message, and say whether the connection is open still."""
        is_open = self._reaches(
            [out.identity, protocol.encode((out.seq, out.message)), *out.buffers]
        )
        return is_open and (not isinstance(out.message, Ping) or self._has_pulse(out.identity))

    def _has_pulse(self, identity: bytes) -> bool:
        """Say whether a worker's second connection is open, or was at the last `Ping`, or has never
        been.

        A process that ends closes both, but what it has sent before may not have been received yet.
        """
        pulse = protocol.pulse_of(identity)
        if pulse not in self._pulses:
            return True
        was_missing, self._pulses[pulse] = self._pulses[pulse], not self._reaches([pulse, PING])
        return not (was_missing and self._pulses[pulse])

    def _reaches(self, frames: list[Any]) -> bool:
        """Send these to the identity that is the first, and say whether there is one."""
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _receive(self) -> Received:
        """Return the next message, which is there."""
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        return Received(frames[0].bytes, [frame.buffer for frame in frames[1:]])

    def forget(self, identity: bytes) -> None:
        """Keep nothing of a worker that is lost."""
        self._pulses.pop(protocol.pulse_of(identity), None)

    def drop(self, identity: bytes, text: str) -> None:
        """Count a message that is not for us; say so once per peer, and of a hundred peers at most."""
        self.dropped += 1
        if identity not in self._complained_of and len(self._complained_of) < 100:
            self._complained_of.add(identity)
            logger.warning("dropped %s", text)

    def close(self) -> None:
        """Close the socket and remove the directory. Safe to call twice."""
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        self._remove()
