"""A worker's one connection to the head, and the end of the process when there is no head any more."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.utils.monitor

from .. import protocol
from ..protocol import Hello, Message, Request
from ..security import WorkerKeys

logger = logging.getLogger(__name__)
HELLO_S = 5.0  # how often a worker that waits for the head's first answer says that it is there


@dataclass
class HeadAddress:
    """Where the head is, and how its end is noticed."""

    address: str
    keys: WorkerKeys | None  # over tcp with CURVE
    startup_timeout: float  # seconds to try to reach it
    timeout: float  # seconds of a silent link before giving up
    parent: int | None  # its pid, if it is this process's parent
    directory: str | None  # to remove, should that parent vanish

    @property
    def has_left_us(self) -> bool:
        """Whether the head was this process's parent, and is no more."""
        return self.parent is not None and os.getppid() != self.parent

    def tidy_up(self) -> None:
        """Remove what a head that was killed has left."""
        if self.has_left_us and self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


class Connection:
    """Sends and receives. When the head has gone, it ends this process, whatever its environments are doing."""

    def __init__(self, head: HeadAddress, index: int) -> None:
        self._head, self._context = head, zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 5000  # the last message may be why we die
        self._socket.connect_timeout = 2000  # ms, and then once more
        self._socket.rcvhwm = 0  # the head bounds what it asks; were pings to pile up unread, the link would seem dead
        protocol.set_limits(self._socket, head.timeout)
        if head.keys is not None:
            head.keys.secure(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        threading.Thread(target=self._exit_with_head, daemon=True).start()
        self._socket.connect(head.address)
        versions = protocol.shared_versions()
        self._hello = Hello(protocol.PROTOCOL_VERSION, index, socket.gethostname(), os.getpid(), versions)
        self.waited = 0.0  # seconds in `receive` since this was last set to 0

    def greet(self) -> None:
        """Say hello, until the head's first message is there."""
        self.send(None, self._hello)
        start, warned = time.monotonic(), False
        # Once more from time to time: the head may not know yet that the one before is dead.
        while not self._socket.poll(HELLO_S * 1000):
            self.send(None, self._hello)
            if not warned and (warned := time.monotonic() > start + self._head.startup_timeout):
                text = "no answer for %g s: the head is busy, or does not expect this worker"
                logger.warning(text, self._head.startup_timeout)

    def send(self, seq: int | None, message: Message, *buffers: Any) -> None:
        self._socket.send_multipart(protocol.frames(seq, message, *buffers), copy=False)

    def receive(self) -> tuple[int | None, Request, list[Any]]:
        """Return the next message that is no ping: its ``seq``, header and buffers."""
        start, request = time.perf_counter(), None
        while request is None or isinstance(request, protocol.Ping):
            header, *buffers = self._socket.recv_multipart(copy=False)
            try:
                seq, request = protocol.decode_request(header.buffer)
            except Exception as error:  # whatever bytes make msgspec raise
                logger.warning("dropped a malformed message: %s", error)
        self.waited += time.perf_counter() - start
        return seq, request, [buffer.buffer for buffer in buffers]

    def close(self) -> None:
        """Close it, once what was sent has left."""
        self._socket.close()
        self._context.term()

    def _exit_with_head(self) -> None:
        event, connected, head = None, False, self._head
        deadline = time.monotonic() + head.startup_timeout
        with contextlib.suppress(zmq.ContextTerminated):
            # What is not connected yet is tried again and again: the network may be down for a moment.
            while event != zmq.EVENT_DISCONNECTED and (
                connected or not head.has_left_us and time.monotonic() < deadline
            ):
                if self._monitor.poll(1000):
                    event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                    connected = True
            logger.error("there is no head at the other end: exiting")
            deadline = time.monotonic() + 1  # a process's links close a moment before it has ended
            while head.parent is not None and not head.has_left_us and time.monotonic() < deadline:
                time.sleep(0.01)
            head.tidy_up()
            os._exit(1)
        self._monitor.close()
