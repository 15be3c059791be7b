"""A worker's two connections to the head, and the end of the process when there is no head any
more.
"""

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
from typing import Any

import zmq
import zmq.utils.monitor

from ..launchers.processes import VARIABLE, kill_marked
from ..wire import protocol
from ..wire.security import WorkerKeys

logger = logging.getLogger(__name__)
# after how long a worker that waits for the head's first answer says again that it is there
HELLO_S = 5.0
MAX_HELLO_S = 60.0  # after how long in the end, as each time it is twice as long
# longer than it takes to end: what the head has not read yet would be lost behind another link
RECONNECT_MS = 2000
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # by a `security.Gate`


class End(BaseException):
    """There is nothing more to do: the head has said so, or Ctrl-C; or a request failed. It may
    come at any time.
    """


class Connection:
    """Sends and receives. When the head has gone, it ends this process, whatever its environments
    are doing.

    Args:
        address: the head's, as ZeroMQ writes it.
        keys: over tcp with CURVE.
        startup_timeout: seconds to try to reach the head.
        timeout: seconds of a silent link before giving up.
        parent: the head's pid, if it is this process's parent.
        directory: to remove, should that parent vanish.
    """

    def __init__(
        self,
        address: str,
        keys: WorkerKeys | None,
        startup_timeout: float,
        timeout: float,
        parent: int | None,
        directory: str | None,
    ) -> None:
        self._startup_timeout, self._parent, self._directory = startup_timeout, parent, directory
        if self._parent_has_left():
            with contextlib.suppress(OSError):
                os.kill(parent, 0)
                # it lives, our parent is of a --worker-prefix; the link will tell when it ends
                self._parent = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = b"w" + secrets.token_bytes(
            16
        )  # nobody can take it, as nobody else knows it
        self._socket.linger = 5000  # the last message may be why we die
        # the head bounds what it asks; were pings to pile up unread, the link would seem dead
        self._socket.rcvhwm = 0
        # libzmq's own thread notices a silent link, whatever Python does at either end: that of a
        # second socket, which lives until the process ends, as the head would take its end for this
        # one's.
        self._pulse = zmq.Context().socket(zmq.DEALER)
        self._pulse.routing_id = protocol.pulse_of(self._socket.routing_id)
        self._pulse.linger = self._pulse.rcvhwm = 0
        protocol.keep_alive(self._pulse, timeout)
        self._shows, self._shown_at = (
            threading.Event(),
            0.0,
        )  # set when the pulse is connected, and when that was
        self._monitors = [
            self._dial(socket, address, keys, timeout) for socket in (self._pulse, self._socket)
        ]
        self._pulse.send(
            protocol.encode((None, protocol.Ping()))
        )  # from now on the head counts on it
        threading.Thread(target=self._exit_with_head, daemon=True).start()
        self.waited = 0.0  # seconds in `receive` since this was last set to 0

    @staticmethod
    def _dial(
        socket: zmq.Socket[bytes], address: str, keys: WorkerKeys | None, silence: float
    ) -> zmq.Socket[bytes]:
        """Connect a socket, and return its monitor."""
        # The kernel notices where a network has lost this connection alone, be there something to
        # send or not.
        seconds = int(min(max(silence, 4), 30_000))  # it takes no more
        socket.tcp_maxrt = seconds * 1000
        socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 2
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = seconds // 2, seconds // 4
        socket.connect_timeout = socket.reconnect_ivl = RECONNECT_MS
        protocol.set_limits(socket, protocol.MAX_REQUEST_FRAME)
        if keys is not None:
            keys.secure(socket)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSED | zmq.EVENT_DISCONNECTED
        )
        socket.ipv6 = "[" in address
        socket.connect(os.fsencode(address))  # the path of a socket file need not be UTF-8
        return monitor

    def greet(self, index: int) -> None:
        """Say hello as this one of the head's workers, until the head's first message is there."""
        versions = protocol.shared_versions()
        host = re.sub(r"[^\w.:-]", "_", socket.gethostname())[:255]  # the head takes no others
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, index, host, os.getpid(), versions)
        self.send(None, hello)
        start, warned, pause = time.monotonic(), False, HELLO_S
        # Once more from time to time: the head may not know yet that the one before is dead. If it
        # learns for long, it reads nothing, and what piles up there is limited.
        while not self._socket.poll(pause * 1000):
            self.send(None, hello)
            pause = min(2 * pause, MAX_HELLO_S)
            if not warned and (warned := time.monotonic() > start + self._startup_timeout):
                text = "no answer for %g s: the head is busy, or does not expect this worker"
                logger.warning(text, self._startup_timeout)

    def settle(self) -> None:
        """Wait until the head would notice the end of this process's pulse: before that it is given
        time to start.
        """
        self._shows.wait()  # else this process ends after `startup_timeout`
        time.sleep(max(self._shown_at + 1.5 * protocol.PULSE_S - time.monotonic(), 0))

    def send(self, seq: int | None, message: protocol.Message, *buffers: Any) -> None:
        self._socket.send_multipart(protocol.frames(seq, message, *buffers), copy=False)

    def receive(self) -> tuple[int | None, protocol.Request, list[Any]]:
        """Return the next message that is no ping: its ``seq``, header and buffers.

        Raises:
            End: it says that it is enough.
        """
        start, request = time.perf_counter(), None
        while request is None or isinstance(request, protocol.Ping):
            header, *buffers = self._socket.recv_multipart(copy=False)
            try:
                seq, request = protocol.decode_request(header.buffer)
            except Exception as error:  # whatever bytes make msgspec raise
                logger.warning("dropped a malformed message: %s", error)
        if isinstance(request, protocol.Close):
            raise End
        self.waited += time.perf_counter() - start
        return seq, request, [buffer.buffer for buffer in buffers]

    def close(self) -> None:
        """Close it, once what was sent has left, and remove what a head that was killed has left."""
        self._socket.close()
        self._context.term()
        self._tidy_up()

    def _parent_has_left(self) -> bool:
        """Say whether the head was this process's parent, and is no more."""
        return self._parent is not None and os.getppid() not in (
            self._parent,
            0,
        )  # 0: it is not in our pid namespace

    def _tidy_up(self) -> None:
        if self._parent_has_left() and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _exit_with_head(self) -> None:
        events, connected, deadline = set[int](), 0, time.monotonic() + self._startup_timeout
        poller = zmq.Poller()
        for each in (self._pulse, *self._monitors):
            poller.register(each, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated):
            while not events & {REFUSED, zmq.EVENT_DISCONNECTED}:
                # What is not connected yet is tried again and again: the network may be down for a
                # moment.
                if self._parent_has_left() or (connected < 2 and time.monotonic() >= deadline):
                    break
                for each, _ in poller.poll(1000):
                    if each is self._pulse:
                        each.recv_multipart()  # the head's pings
                        continue
                    events.add(event := zmq.utils.monitor.recv_monitor_message(each)["event"])
                    connected += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    if each is self._monitors[0] and event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self._shown_at = time.monotonic()
                        self._shows.set()
            if REFUSED in events:
                logger.error("the head refuses this worker, as it has other keys: exiting")
            else:
                logger.error("there is no head at the other end: exiting")
            deadline = time.monotonic() + 1  # a process's links close a moment before it has ended
            while (
                self._parent is not None
                and not self._parent_has_left()
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            self._tidy_up()
            if VARIABLE in os.environ:
                kill_marked(os.environ[VARIABLE])
            os._exit(1)
        for monitor in self._monitors:
            monitor.close()
