"""A worker's two links to the head, and the end of the process when there is no head any more."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..launchers.processes import VARIABLE, kill_marked
from ..wire import protocol
from ..wire.security import WorkerKeys

logger = logging.getLogger(__name__)
HELLO_S = 5.0  # a worker says hello again after this time without an answer
# A link that breaks is not made again before the process ends: what the head has not read yet
# would be lost behind a new link.
RECONNECT_MS = 2000
SUCCEEDED, REFUSED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH


class End(BaseException):
    """The worker ends: the head said so, Ctrl-C was pressed, or a request failed for good.

    It may be raised at any time.
    """


class Connection:
    """Sends and receives messages. It ends the process when the head is gone, whatever that does.

    Args:
        address: the head's, as ZeroMQ writes it.
        keys: the run's keys, over tcp with CURVE.
        startup_timeout: seconds to try to reach the head.
        timeout: seconds of a silent link before giving up.
        head_has_left: says whether the head's process has ended; None if that cannot be seen here.
        directory: a directory to remove when it has.
    """

    def __init__(
        self,
        address: str,
        keys: WorkerKeys | None,
        startup_timeout: float,
        timeout: float,
        head_has_left: Callable[[], bool] | None,
        directory: str | None,
    ) -> None:
        self._startup_timeout = startup_timeout
        self._sees_head = head_has_left is not None
        self._head_has_left = head_has_left or (lambda: False)
        self._directory = directory
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = b"w" + secrets.token_bytes(16)  # nobody can guess and take it
        self._socket.linger = 5000  # the last message may say why this process ends
        # The head bounds its requests. If pings could not pile up, the link would seem dead.
        self._socket.rcvhwm = 0
        # A second socket shows that this process lives: libzmq's own thread answers for it,
        # whatever Python does. It lives until the process ends, as the head takes its end for this.
        self._pulse = zmq.Context().socket(zmq.DEALER)
        self._pulse.routing_id = protocol.pulse_of(self._socket.routing_id)
        self._pulse.linger = self._pulse.rcvhwm = 0
        protocol.keep_alive(self._pulse, timeout)
        self._is_settled = threading.Event()  # see `settle`
        self._monitors = [
            _dial(each, address, keys, timeout) for each in (self._pulse, self._socket)
        ]
        # The head counts on the pulse now. If it has refused it already, this process will end.
        with contextlib.suppress(zmq.Again):
            self._pulse.send(protocol.encode((None, protocol.Ping())), zmq.DONTWAIT)
        threading.Thread(target=self._exit_with_head, daemon=True).start()
        self.waited = 0.0  # seconds in `receive` since this was last set to 0

    def greet(self, index: int) -> None:
        """Say hello as worker ``index`` until the head's first message is there."""
        host = re.sub(r"[^\w.:-]", "_", socket.gethostname())[:255]  # the head takes no others
        hello = protocol.Hello(
            protocol.PROTOCOL_VERSION, index, host, os.getpid(), protocol.shared_versions()
        )
        start = time.monotonic()
        has_warned = False
        self.send(None, hello)
        # The head may not know yet that the worker before this one is dead, so one hello is not
        # enough.
        while not self._socket.poll(HELLO_S * 1000):
            self.send(None, hello)
            waited = time.monotonic() - start
            if waited > self._startup_timeout and not has_warned:
                has_warned = True
                text = "no answer for %.0f s: the head is busy, or does not expect this worker"
                logger.warning(text, waited)

    def settle(self) -> None:
        """Wait until the head would notice the end of this process's pulse."""
        self._is_settled.wait()  # if the pulse never connects, this process ends

    def send(self, seq: int | None, message: protocol.Message, *buffers: Any) -> None:
        self._socket.send_multipart(protocol.frames(seq, message, *buffers), copy=False)

    def receive(self, waits: bool = True) -> tuple[int | None, protocol.FromHead, list[Any]] | None:
        """Return the next message that is no ping: its ``seq``, header and buffers.

        Unless this ``waits``, return None if none has come.

        Raises:
            End: the message is `Close`.
        """
        start = time.perf_counter()
        while waits or self._socket.poll(0):
            header, *buffers = self._socket.recv_multipart(copy=False)
            try:
                seq, request = protocol.decode_from_head(header.buffer)
            except Exception as error:  # bytes can make msgspec raise many kinds
                logger.warning("dropped a malformed message: %s", error)
                continue
            if isinstance(request, protocol.Close):
                raise End
            if not isinstance(request, protocol.Ping):
                self.waited += time.perf_counter() - start
                return seq, request, [buffer.buffer for buffer in buffers]
        return None

    def close(self) -> None:
        """Close the link once all messages have left, and tidy up behind a head that was killed."""
        self._socket.close()
        self._context.term()
        self._tidy_up()

    def _tidy_up(self) -> None:
        if self._head_has_left() and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _exit_with_head(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # by `close`
            logger.error("%s: exiting", self._wait_until_head_is_gone())
            # The links of a process close a moment before it has ended.
            deadline = time.monotonic() + 1
            while self._sees_head and not self._head_has_left():
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
            self._tidy_up()
            if VARIABLE in os.environ:
                kill_marked(os.environ[VARIABLE])
            os._exit(1)
        for monitor in self._monitors:
            monitor.close()

    def _wait_until_head_is_gone(self) -> str:
        """Return why there is no head, once there is none. Read the pulse's pings until then."""
        gone = "there is no head at the other end"
        deadline = time.monotonic() + self._startup_timeout
        connected = 0
        poller = zmq.Poller()
        for each in (self._pulse, *self._monitors):
            poller.register(each, zmq.POLLIN)
        while not self._head_has_left():
            # libzmq tries a link that does not connect again: the network may be down for a moment.
            if connected < 2 and time.monotonic() >= deadline:
                return gone
            for each, _ in poller.poll(1000):
                if each is self._pulse:
                    each.recv_multipart()
                    continue
                event = recv_monitor_message(each)["event"]
                if event == REFUSED:
                    return "the head refuses this worker, as it has other keys"
                if event == zmq.EVENT_DISCONNECTED:
                    return gone
                connected += 1
                if each is self._monitors[0]:
                    time.sleep(1.5 * protocol.PULSE_S)  # the first sign of it comes after one
                    self._is_settled.set()
        return gone


def _dial(
    socket: zmq.Socket[bytes], address: str, keys: WorkerKeys | None, silence: float
) -> zmq.Socket[bytes]:
    """Connect a socket to the head, and return the socket's monitor."""
    # The kernel notices that a network has lost this connection alone, whether or not there is
    # something to send.
    seconds = int(min(max(silence, 4), 30_000))  # the kernel takes no more
    socket.tcp_maxrt = seconds * 1000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_cnt = 2
    socket.tcp_keepalive_idle = seconds // 2
    socket.tcp_keepalive_intvl = seconds // 4
    socket.connect_timeout = socket.reconnect_ivl = RECONNECT_MS
    protocol.set_limits(socket, protocol.MAX_REQUEST_FRAME)
    if keys is not None:
        keys.secure(socket)
    monitor = socket.get_monitor_socket(SUCCEEDED | REFUSED | zmq.EVENT_DISCONNECTED)
    socket.ipv6 = "[" in address
    socket.connect(os.fsencode(address))  # the path of a socket file need not be UTF-8
    return monitor
