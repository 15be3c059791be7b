"""The process that forks workers.

Each worker starts within milliseconds, and all workers share the memory of the modules that are
imported here. This process imports what all workers need. It calls nothing in torch, and has no
threads, no keys, and no socket except its link to the head. It ends when the head ends or closes
the link. `launchers.forking`, the head's side of the link, describes the messages.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import one_line
from ..launchers.forking import MAX_MESSAGE, has_ended
from ..launchers.processes import VARIABLE
from ..launchers.start import PATH
from ..wire.protocol import shared_versions
from .__main__ import main as be_worker

Order = dict[str, Any]


class ForkServer:
    """Forks a worker for each order from the head, and reports how the worker ends.

    Args:
        link: the socket to the head.
        head: the descriptor (pidfd) of the head's process.
    """

    def __init__(self, link: socket.socket, head: int) -> None:
        self._link = link
        self._head = head
        self._workers: dict[int, tuple[int, str]] = {}  # pid and mark, by the process's descriptor
        self._mark = os.environ[VARIABLE]
        self._poll = select.poll()
        self._poll.register(self._head, select.POLLIN)
        self._poll.register(link, select.POLLIN)

    def prepare(self) -> None:
        """Import the modules that the head names, and report whether that succeeded."""
        order, _ = self._receive()
        fault = None
        for module in order["modules"]:
            try:
                importlib.import_module(module)
            except Exception as error:
                fault = f"cannot import {module}: {one_line(error)}"
                break
        shared_versions()  # cached for the `Hello` of each worker
        gc.collect()
        gc.freeze()  # a worker's garbage collection would copy these objects' pages
        self._send({"fault": fault})

    def serve(self) -> Order | None:
        """Fork workers until the head is gone, then return None. In a worker, return its order."""
        while True:
            ready = [file for file, _ in self._poll.poll()]
            for file in self._workers.keys() & set(ready):
                self._report_end(file)
            if self._link.fileno() in ready:
                order, outputs = self._receive()
                if not order:
                    return None
                if self._fork(order["mark"]):
                    self._become_worker(order, outputs)
                    return order
                for output in outputs:
                    os.close(output)
            elif self._head in ready:  # a fork of the head may hold the link open
                return None

    def _fork(self, mark: str) -> bool:
        """Fork a worker, whose mark is visible at once. Return whether this is the new process."""
        _show_mark(mark)
        try:
            pid = os.fork()
        except OSError as error:
            _show_mark(self._mark)
            self._send({"mark": mark, "errno": error.errno})
            return False
        if pid == 0:
            return True
        _show_mark(self._mark)
        with contextlib.suppress(OSError):  # the worker does the same, and may have ended
            os.setpgid(pid, pid)
        file = os.pidfd_open(pid)
        self._workers[file] = pid, mark
        self._poll.register(file, select.POLLIN)
        self._send({"mark": mark, "pid": pid}, [file])
        return False

    def _become_worker(self, order: Order, outputs: list[int]) -> None:
        self._link.close()
        for file in self._workers:
            os.close(file)
        os.setpgid(0, 0)
        for file, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, file)
            os.close(output)
        for name in order["unset"]:
            os.environ.pop(name, None)
        os.environ.update(order["variables"])
        if path := os.environ.pop(PATH, None):  # `sys.path` has changed since this process started
            sys.path[:] = json.loads(path)
        importlib.invalidate_caches()  # a directory may be new
        time.tzset()
        np.random.seed()  # Python reseeds only its own generator in each fork
        index = order["arguments"][order["arguments"].index("--index") + 1]
        Path("/proc/self/comm").write_text(f"worker {index}")  # the name that `top` shows

    def _report_end(self, file: int) -> None:
        pid, mark = self._workers.pop(file)
        self._poll.unregister(file)
        os.close(file)
        _, status = os.waitpid(pid, 0)
        self._send({"mark": mark, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any], files: list[int] = []) -> None:  # noqa: B006
        with contextlib.suppress(OSError):  # the head is gone, which `serve` will notice
            socket.send_fds(self._link, [json.dumps(message).encode()], files)

    def _receive(self) -> tuple[Order, list[int]]:
        """Return the next message and its descriptors; an empty message if the link is closed."""
        try:
            data, files, _, _ = socket.recv_fds(self._link, MAX_MESSAGE, 2)
        except ConnectionError:  # the head has ended before it read all messages
            return {}, []
        return json.loads(data or b"{}"), list(files)


def _show_mark(mark: str) -> None:
    """Overwrite the mark in the variables that the system shows for this process.

    The new mark is as long as the old one.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    data = os.fsencode(mark)
    ctypes.memmove(getenv(os.fsencode(VARIABLE)), data, len(data))


def main() -> None:
    """Fork workers until the head is gone. Each worker ends in this function, too."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # later descriptors must not get the number of a closed output
    os.close(file)
    link, head = map(int, sys.argv[1:])
    server = ForkServer(socket.socket(fileno=link), head)
    server.prepare()
    order = server.serve()
    if order is None:
        os._exit(0)  # there is nothing to clean up
    be_worker(order["arguments"], partial(has_ended, head))
    # The interpreter's shutdown would write to the shared memory of all objects, and so copy it.
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
