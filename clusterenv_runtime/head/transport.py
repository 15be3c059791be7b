"""The head's only listening socket. It knows connections, but no workers."""

import contextlib
import logging
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from .. import messages
from ..errors import StartupError
from ..security import Gate, HeadKeys, write_key_file

logger = logging.getLogger(__name__)
MOST_FILES = 65_536
HANDSHAKE_MS = 10_000  # the time in which a peer must complete its handshake
POLLIN = int(zmq.POLLIN)
EVERYWHERE = "tcp://0.0.0.0", "tcp://[::]", "tcp://[::ffff:0.0.0.0]"
MOST_AT_ONCE = 1000  # messages received in a row; then the head supervises its workers
Received = tuple[bytes, list[Any]]  # a connection's identity, and the frames of its message


def listening_address(bind_address: str | None, port: int | str, directory: str) -> str:
    """Return the address to listen on for workers, in ZeroMQ's notation."""
    if not bind_address:
        return f"ipc://{directory}/head"
    host = f"[{bind_address}]" if ":" in bind_address else bind_address
    return f"tcp://{host}:{port}"


class FileLimit:
    """This process's limit on open files, raised while somebody holds it.

    Each connection is an open file.
    """

    holders = 0
    before = raised = 0, 0  # the limits, soft and hard

    @classmethod
    def hold(cls) -> None:
        cls.holders += 1
        if cls.holders == 1:
            cls.before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
            cls.raised = most, hard
            if soft != resource.RLIM_INFINITY and soft < most:
                resource.setrlimit(resource.RLIMIT_NOFILE, cls.raised)

    @classmethod
    def release(cls) -> None:
        cls.holders -= 1
        if cls.holders == 0 and resource.getrlimit(resource.RLIMIT_NOFILE) == cls.raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, cls.before)


def clean_up(directory: str, pid: int) -> None:
    """Clean up after a `Transport` of process ``pid``, unless this process is a fork of it."""
    if os.getpid() == pid:
        FileLimit.release()
        shutil.rmtree(directory, ignore_errors=True)


class Transport:
    """The head's socket. A simulated transport has the same methods, and the attributes `address`,
    `key_file` and `directory`.

    Args:
        bind_address: an IP address to listen on over tcp, where only the run's workers are
            admitted; None for a socket file.
        port: the tcp port to listen on; 0 for a random free one.
        keys: keys that were made in advance; None for fresh keys.
        parent: the directory in which to make the private directory for socket and keys; None for
            the system's directory of temporary files.

    Raises:
        StartupError: the head cannot listen at this address.
    """

    def __init__(
        self, bind_address: str | None, port: int, keys: HeadKeys | None, parent: Path | None
    ) -> None:
        self.dropped = 0  # the number of messages dropped so far, see `drop`
        self._is_sending = False
        self._pulses: dict[bytes, bool] = {}  # by identity: whether it missed the last `Ping`
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        # The directory's mode is 0700, so no other user can connect to a socket file there.
        self.directory = tempfile.mkdtemp(prefix="clusterenv-", dir=parent)
        self.key_file: Path | None = None
        FileLimit.hold()
        self._clean_up = weakref.finalize(self, clean_up, self.directory, os.getpid())
        self._context = zmq.Context()
        self._gate: Gate | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._set_options()
        try:
            self._socket.ipv6 = ":" in (bind_address or "")
            if bind_address:
                keys = keys or HeadKeys.make()
                self.key_file = Path(self.directory) / "key"
                write_key_file(self.key_file, keys.workers())
                self._gate = Gate(self._context, self._socket, keys)
            self._bind(listening_address(bind_address, port or "*", self.directory))
            self.address = os.fsdecode(self._socket.last_endpoint).rstrip("\0")
            if self.address.startswith(EVERYWHERE):
                raise StartupError(f"bind_address must be one address, not all, as {bind_address}")
        except BaseException:
            self.close()
            raise

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
        messages.set_limit(socket)
        # Connections to machines that are gone close eventually. The head notices sooner that a
        # worker is gone, see `has_pulse`.
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

    def send(self, identity: bytes, frames: Sequence[Any]) -> bool:
        """Send a message. Return whether the connection is still open."""
        if self._is_sending:  # Ctrl-C came amid the last message: end it here
            self._socket.send(b"")
        self._is_sending, is_open = True, True
        try:
            self._socket.send_multipart([identity, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            is_open = False
        self._is_sending = False
        return is_open

    def receive(self, seconds: float) -> list[Received]:
        """Return the messages that have arrived. Wait up to ``seconds`` for the first one."""
        received: list[Received] = []
        if seconds > 0 and not self._has_message():
            self._socket.poll(seconds * 1000)
        for _ in range(MOST_AT_ONCE):
            # If no message is left, `recv_multipart` would raise, and pyzmq would lose an exception
            # that a signal handler raises at that moment.
            if not self._has_message():
                break
            first, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            identity = first.bytes
            if not identity.startswith(b"p"):
                received.append((identity, [frame.buffer for frame in frames]))
            else:
                self._pulses[identity] = False
        return received

    def _has_message(self) -> bool:
        # Several times as fast as the attribute `events` and pyzmq's enumeration.
        return bool(self._socket.getsockopt(zmq.EVENTS) & POLLIN)

    def has_pulse(self, identity: bytes) -> bool:
        """Send a `Ping` to both connections of a worker. Return whether they are open.

        The second connection must miss two in a row: a process that ends closes both connections,
        but the head may not have received its last messages yet.
        """
        pulse = messages.pulse_of(identity)
        if pulse in self._pulses:
            missed_before = self._pulses[pulse]
            self._pulses[pulse] = not self.send(pulse, messages.PING)
            if missed_before and self._pulses[pulse]:
                return False
        return self.send(identity, messages.PING)

    def forget(self, identity: bytes) -> None:
        """Forget the second connection of a lost worker."""
        self._pulses.pop(messages.pulse_of(identity), None)

    def drop(self, text: str) -> None:
        """Count a message that is ignored, and log the first ones."""
        self.dropped += 1
        if self.dropped <= 100:
            logger.warning("dropped %s", text)

    def close(self) -> None:
        """Close the socket and remove the directory. Safe to call twice."""
        self._socket.close()
        if self._gate is not None:
            self._gate.stop()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        self._clean_up()
