"""A worker's two links to the head, and the end of its process when the head is gone."""

import contextlib
import logging
import os
import secrets
import select
import shutil
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from .. import messages
from ..errors import ProtocolError
from ..launchers.local import VARIABLE, kill_marked
from ..pickling import from_frames
from ..security import WorkerKeys

logger = logging.getLogger(__name__)
HELLO_S = 5.0  # seconds without a message from the head before a worker repeats its `Hello`
# Long enough that a broken link is not made again before the process ends: a new link would lose
# the messages that the head has not read yet.
RECONNECT_MS = 2000
SUCCEEDED, REFUSED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH


class End(BaseException):
    """The end of the worker: the head sent `Close`, Ctrl-C was pressed, or a request was fatal.

    Ctrl-C may raise it anywhere.
    """


class Connection:
    """Sends and receives messages. Ends the process when the head is gone, whatever it is doing.

    Args:
        args: the worker's command line, see `__main__.parse`.
        keys: the run's keys, for tcp with CURVE; otherwise None.
    """

    def __init__(self, args: Namespace, keys: WorkerKeys | None) -> None:
        self._args = args
        self._head_has_left = watch(args.head_pid)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = b"w" + secrets.token_bytes(16)  # cannot be guessed and taken over
        self._socket.linger = 5000  # ms; the last message may say why this process ends
        # No limit: the head bounds its own requests, and if pings could not queue up, the link
        # would seem dead.
        self._socket.rcvhwm = 0
        # A second socket shows that this process is alive: libzmq's own thread answers heartbeats,
        # whatever Python does. The socket stays open until the process ends, because the head takes
        # its closing for the end of the process.
        self._pulse = zmq.Context().socket(zmq.DEALER)
        self._pulse.routing_id = messages.pulse_of(self._socket.routing_id)
        self._pulse.linger = self._pulse.rcvhwm = 0
        messages.keep_alive(self._pulse, args.head_timeout, args.pulse)
        self._is_settled = threading.Event()  # see `settle`
        self._monitors = [
            _dial(each, args.connect, keys, args.head_timeout)
            for each in (self._pulse, self._socket)
        ]
        # After this message the head expects the pulse to stay. If the head has already refused the
        # connection, the message cannot be sent, and this process will end.
        with contextlib.suppress(zmq.Again):
            self._pulse.send_multipart(messages.PING, zmq.DONTWAIT)
        threading.Thread(target=self._exit_with_head, daemon=True).start()
        self.waited = 0.0  # seconds spent in `receive` since this was last set to 0

    def greet(self) -> None:
        """Send `Hello` until the head's first message arrives."""
        host, pid, versions = socket.gethostname(), os.getpid(), messages.shared_versions()
        hello = messages.Hello(messages.PROTOCOL_VERSION, self._args.index, host, pid, versions)
        frames = messages.hello_frames(hello)
        start = time.monotonic()
        has_warned = False
        self._socket.send_multipart(frames)
        # One `Hello` is not enough: the head drops it while it does not know yet that the process
        # before this one is dead.
        while not self._socket.poll(HELLO_S * 1000):
            self._socket.send_multipart(frames)
            waited = time.monotonic() - start
            if waited > self._args.startup_timeout and not has_warned:
                has_warned = True
                logger.warning(
                    "no response for %.0f s: the head is busy, or does not expect this worker",
                    waited,
                )

    def settle(self) -> None:
        """Wait until the pulse is established, so that the head would notice its end."""
        self._is_settled.wait()  # if the pulse never connects, this process ends

    def send(self, seq: int | None, message: messages.Message, allowed: tuple[type, ...]) -> None:
        """Send a message with values of these classes, see `messages.worker_frames`."""
        self._socket.send_multipart(messages.worker_frames(seq, message, allowed), copy=False)

    def receive(self, waits: bool = True) -> tuple[int | None, messages.Message] | None:
        """Return ``seq`` and the next message other than `Ping`.

        Unless ``waits`` is True, return None if no message has arrived.

        Raises:
            End: the message is `Close`.
        """
        start = time.perf_counter()
        while waits or self._socket.poll(0):
            frames = self._socket.recv_multipart(copy=False)
            try:
                seq, message = from_frames([frame.buffer for frame in frames])
            except ProtocolError as error:  # as a rule Ctrl-C came while the head sent this
                logger.error("%s: exiting", error)
                raise End from None
            if isinstance(message, messages.Close):
                raise End
            if not isinstance(message, messages.Ping):
                self.waited += time.perf_counter() - start
                return seq, message
        return None

    def close(self) -> None:
        """Close the link after all messages are sent, and clean up after a head that was killed."""
        self._socket.close()
        self._context.term()
        self._tidy_up()

    def _tidy_up(self) -> None:
        if self._head_has_left() and self._args.head_directory is not None:
            shutil.rmtree(self._args.head_directory, ignore_errors=True)

    def _exit_with_head(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # `close` terminates the context
            logger.error("%s: exiting", self._wait_until_head_is_gone())
            # A process's links close a moment before the process has ended.
            for _ in range(100 if self._args.head_pid else 0):
                if not self._head_has_left():
                    time.sleep(0.01)
            self._tidy_up()
            kill_marked(os.environ.get(VARIABLE, "").split(".")[-1:])  # the last mark is its own
            os._exit(1)
        for monitor in self._monitors:
            monitor.close()

    def _wait_until_head_is_gone(self) -> str:
        """Wait until there is no head, and return why. Read the pulse's pings until then."""
        gone = "there is no head at the other end"
        deadline = time.monotonic() + self._args.startup_timeout
        connected: set[zmq.Socket[bytes]] = set()
        poller = zmq.Poller()
        for each in (self._pulse, *self._monitors):
            poller.register(each, zmq.POLLIN)
        while not self._head_has_left():
            # Until the deadline, libzmq retries a link that does not connect: the network may be
            # down for a moment.
            if len(connected) < 2 and time.monotonic() >= deadline:
                return gone
            for each, _ in poller.poll(1000):
                if each is self._pulse:
                    each.recv_multipart()
                    continue
                event = recv_monitor_message(each)["event"]
                if event == REFUSED:
                    return "the head refuses this worker because its keys are not this run's"
                if event == zmq.EVENT_DISCONNECTED:
                    if each in connected:
                        return gone
                    continue  # the head was too busy for the handshake; libzmq tries again
                connected.add(each)
                if each is self._monitors[0]:
                    time.sleep(1.5 * self._args.pulse)  # the first heartbeat comes after one
                    self._is_settled.set()
        return gone


def _dial(
    socket: zmq.Socket[bytes], address: str, keys: WorkerKeys | None, silence: float
) -> zmq.Socket[bytes]:
    """Connect a socket to the head, and return the socket's monitor."""
    # The kernel notices when the network has lost this connection alone, whether or not there is
    # anything to send.
    seconds = int(min(max(silence, 4), 30_000))  # the kernel accepts no more
    socket.tcp_maxrt = seconds * 1000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_cnt = 2
    socket.tcp_keepalive_idle = seconds // 2
    socket.tcp_keepalive_intvl = seconds // 4
    socket.connect_timeout = socket.reconnect_ivl = RECONNECT_MS
    messages.set_limit(socket)
    if keys is not None:
        keys.secure(socket)
    monitor = socket.get_monitor_socket(SUCCEEDED | REFUSED | zmq.EVENT_DISCONNECTED)
    socket.ipv6 = "[" in address
    socket.connect(os.fsencode(address))  # the path of a socket file need not be UTF-8
    return monitor


def watch(head: int | None) -> Callable[[], bool]:
    """Return a function that returns whether the head's process is seen to have ended."""
    if head is None:
        return lambda: False
    try:
        descriptor = os.pidfd_open(head)
    except ProcessLookupError:
        return lambda: os.getppid() > 0  # 0 is a parent outside this PID namespace, as the head is
    except OSError:  # the system forbids it
        return lambda: False
    return lambda: bool(select.select([descriptor], [], [], 0)[0])
