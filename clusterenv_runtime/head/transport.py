"""The head's only listening socket. It knows connections, but no workers."""

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
from ..wire.buffers import MAX_FRAME
from ..wire.protocol import FromWorker, Message, Ping
from ..wire.security import Gate, HeadKeys, write_key_file

logger = logging.getLogger(__name__)
MOST_FILES = 65_536
HANDSHAKE_MS = 10_000  # the time in which a peer must complete its handshake
MAX_HELLO = 2**16  # bytes in the first message of a connection
PING = protocol.encode((None, Ping()))
POLLIN = int(zmq.POLLIN)
MOST_AT_ONCE = 1000  # messages received in a row; then the head supervises its workers


def listening_address(bind_address: str | None, port: int | str, directory: str) -> str:
    """Return the address to listen on for workers, in ZeroMQ's notation."""
    if not bind_address:
        return f"ipc://{directory}/head"
    host = f"[{bind_address}]" if ":" in bind_address else bind_address
    return f"tcp://{host}:{port}"


def raise_file_limit() -> None:
    """Raise this process's limit on open files, because each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def remove_own(directory: str, pid: int) -> None:
    """Remove a directory of process ``pid``, unless this process is a fork of it."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Outgoing:
    """A message to one connection, with the raw buffers that follow it. ``seq`` may be None."""

    identity: bytes
    seq: int | None
    message: Message
    buffers: tuple[Any, ...] = ()


@dataclass
class Received:
    """A message from one connection. ``frames`` are its raw buffers, the header first."""

    identity: bytes
    frames: list[Any]

    def read(self, is_strange: bool = False) -> tuple[int | None, FromWorker | str]:
        """Return ``seq`` and the message, or None and a text that describes an invalid message.

        A stranger's message must be short. A message may take much more memory than its frames, so
        do not keep many messages.
        """
        if is_strange and sum(map(len, self.frames)) > MAX_HELLO:
            return None, "a long message"
        try:
            return protocol.decode_from_worker(self.frames[0])
        except Exception as error:  # a peer may send anything
            return None, f"a malformed message: {printable(str(error))}"


class Transport:
    """The head's socket. It sends and receives all messages in `exchange`.

    A simulated transport needs `exchange`, `drop`, `forget`, `restore`, `close`, and the attributes
    `address`, `key_file` and `directory`.

    Args:
        bind_address: an IP address or network interface to listen on over tcp; None for a socket
            file.
        port: the tcp port to listen on; 0 for a random free one.
        security: "curve" or "none", over tcp.
        keys: keys that were made in advance; None for fresh keys.
        parent: the directory in which to make the private directory for socket and keys; None for
            the system's directory of temporary files.

    Raises:
        StartupError: the head cannot listen at this address.
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
        self.dropped = 0  # the number of messages dropped so far, see `drop`
        self._complained_of: set[bytes] = set()
        self._pulses: dict[bytes, bool] = {}  # by identity: whether it missed the last `Ping`
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        # The directory's mode is 0700, so no other user can connect to a socket file there.
        self.directory = tempfile.mkdtemp(prefix="clusterenv-", dir=parent)
        self.key_file: Path | None = None
        self._remove = weakref.finalize(self, remove_own, self.directory, os.getpid())
        self._context = zmq.Context()
        self._gate: Gate | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._set_options()
        try:
            self._socket.ipv6 = ":" in (bind_address or "")
            if bind_address and security == "curve":
                keys = keys or HeadKeys.make()
                self.key_file = Path(self.directory) / "key"
                self._keys = keys.workers()
                write_key_file(self.key_file, self._keys)
                self._gate = Gate(self._context, self._socket, keys)
            self._bind(listening_address(bind_address, port or "*", self.directory))
        except BaseException:
            self.close()
            raise
        self.address = os.fsdecode(self._socket.last_endpoint).rstrip("\0")

    def _set_options(self) -> None:
        socket = self._socket
        socket.linger = 0
        # Sending to a closed connection raises an error instead of losing the message.
        socket.router_mandatory = True
        # All messages are read at once. If libzmq stopped reading from a connection, and the
        # connection then broke, its next PONG would fail an assertion and end the process.
        socket.rcvhwm = 0
        socket.backlog = 4096  # many workers may connect at once
        # A worker that does not read must not block the head. The data for it is bounded, because
        # the head asks for more only after the worker has answered.
        socket.sndhwm = 0
        # Without this, messages under an identity that is taken would stay in libzmq forever.
        socket.router_handover = True
        protocol.set_limits(socket, MAX_FRAME)
        # Connections to machines that are gone close eventually. The head notices sooner that a
        # worker is gone, see `_has_pulse`.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 60
        socket.handshake_ivl = HANDSHAKE_MS

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

    def exchange(
        self, outbox: Iterable[Outgoing], seconds: float | None
    ) -> tuple[list[Received], list[bytes]]:
        """Send the messages in ``outbox``, and wait up to ``seconds`` for messages to receive.

        If ``seconds`` is None, only send. Return the received messages, and the identities of
        closed connections.
        """
        closed = [out.identity for out in outbox if not self._send(out)]
        received: list[Received] = []
        if seconds is None:
            return received, closed
        if not (closed or seconds == 0 or self._has_message()):
            self._socket.poll(seconds * 1000)
        for _ in range(MOST_AT_ONCE):
            # If no message is left, `recv_multipart` would raise, and pyzmq would lose an exception
            # that a signal handler raises at that moment.
            if not self._has_message():
                break
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            message = Received(identity.bytes, [frame.buffer for frame in frames])
            if message.identity.startswith(b"p") and message.frames == [PING]:
                if len(self._pulses) < MOST_FILES:  # there cannot be more connections
                    self._pulses[message.identity] = False
            else:
                received.append(message)
        return received, closed

    def _has_message(self) -> bool:
        # Several times as fast as the attribute `events` and pyzmq's enumeration.
        return bool(self._socket.getsockopt(zmq.EVENTS) & POLLIN)

    def _send(self, out: Outgoing) -> bool:
        """Send a message. Return whether the connection is still open."""
        header = protocol.encode((out.seq, out.message))
        is_open = self._reaches([out.identity, header, *out.buffers])
        return is_open and (not isinstance(out.message, Ping) or self._has_pulse(out.identity))

    def _has_pulse(self, identity: bytes) -> bool:
        """Send a `Ping` to a worker's second connection. Return False if it missed two in a row.

        A process that ends closes both connections, but the head may not have received its last
        messages yet. A worker need not have a second connection.
        """
        pulse = protocol.pulse_of(identity)
        if pulse not in self._pulses:
            return True
        missed_before = self._pulses[pulse]
        self._pulses[pulse] = not self._reaches([pulse, PING])
        return not (missed_before and self._pulses[pulse])

    def _reaches(self, frames: list[Any]) -> bool:
        """Send these frames, the identity first. Return whether the identity is connected."""
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def forget(self, identity: bytes) -> None:
        """Forget the second connection of a lost worker."""
        self._pulses.pop(protocol.pulse_of(identity), None)

    def restore(self) -> None:
        """Make the private directory and its files again, if somebody has removed them.

        Raises:
            StartupError: they cannot be made.
        """
        is_file = self.address.startswith("ipc://")
        needed = self.key_file or self.address.removeprefix("ipc://")
        if not (self.key_file or is_file) or os.path.exists(needed):
            return
        logger.warning("%s was removed, but new workers need it: making it again", self.directory)
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if self.key_file:
                write_key_file(self.key_file, self._keys)
        except OSError as error:
            raise StartupError(f"cannot make {self.directory} again: {error}") from None
        if is_file:  # the other workers' connections remain open
            self._bind(self.address)

    def drop(self, identity: bytes, text: str) -> None:
        """Count a message that is ignored, and log it once per peer, for 100 peers at most."""
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
