"""Workers that are forked from one process, within milliseconds.

The workers share the memory of the modules that this process imports. It calls nothing in torch,
and has no threads, no keys, and no socket except its link to the head. It ends with the head.

The link is a pair of sockets. Each message is a packet with a JSON list. For each worker the head
sends a mark, the worker's arguments and environment variables, with two descriptors for its output.
The response has the mark, and the worker's pid or, if it cannot be forked, the reason. When a
worker has ended, the process sends the worker's pid and exit code, negative for a signal.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StartupError, one_line

MAX_MESSAGE = 2**18  # bytes
UNKNOWN = 256  # the code of a worker that outlived the process that would report it
# Descriptors below 3 are those of input and outputs. Each worker ends as any Python would, except
# that its last exit handler ends it at once: the rest of the interpreter's end would write to all
# shared pages, and so copy them.
CODE = """import atexit
while os.open(os.devnull, os.O_RDWR) < 3: pass
codes = [1]
atexit.register(lambda: os._exit(codes[-1]))
atexit.register(lambda: print(end="", flush=True))
from clusterenv_runtime.launchers.fork_server import serve
from clusterenv_runtime.messages import shared_versions
{}
shared_versions()  # cached for all workers
main(serve({}, {}))
codes.append(0)"""


class ForkServer:
    """The head's link to the process, which runs ``CODE``.

    Args:
        command: the command that starts the process.
        variables: environment variables in addition to this process's.
    """

    def __init__(self, command: tuple[str, ...], variables: frozenset[tuple[str, str]]) -> None:
        self._news: dict[str | int, Any] = {}  # by mark a pid or a reason, by pid an exit code
        self._asked = set[int]()  # workers asked about since the last look for exit codes
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**os.environ, **dict(variables)}
            process = subprocess.Popen(command, env=env, stdin=theirs.fileno(), process_group=0)
        # These are called in the reverse order. The workers go on.
        for end in process.wait, process.kill, self._link.close:
            weakref.finalize(self, end)

    def fork(
        self,
        mark: str,
        arguments: list[str],
        variables: dict[str, str],
        outputs: Sequence[int],
        timeout: float,
    ) -> "Forked":
        """Fork a worker with these arguments, variables and output descriptors.

        Raises:
            OSError: the process does not respond within ``timeout`` seconds, or has ended.
            StartupError: a worker cannot be forked.
        """
        with self._lock:
            order = json.dumps([mark, arguments, variables])
            socket.send_fds(self._link, [order.encode()], outputs)
            answer = self._await(mark, timeout)
        if isinstance(answer, str):
            raise StartupError(answer)
        return Forked(self, answer)

    def code_of(self, pid: int) -> int | None:
        """Return a worker's exit code, or None if there is none yet."""
        with self._lock:
            # One look at the link serves all workers that are asked about in turn.
            if self._asked and not (pid in self._asked or pid in self._news):
                self._asked.add(pid)
                return None
            self._asked = {pid}
            try:
                return self._await(pid, 0)  # type: ignore[no-any-return]
            except BlockingIOError:
                return None
            except OSError:
                return None if is_running(pid) else UNKNOWN

    def _await(self, key: str | int, timeout: float) -> Any:
        self._link.settimeout(timeout)
        while key not in self._news:
            data = self._link.recv(MAX_MESSAGE)
            if not data:
                raise ConnectionError
            about, value = json.loads(data)
            self._news[about] = value
        return self._news.pop(key)


def is_running(pid: int) -> bool:
    """Return whether a process of this user is there, and has not ended."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/environ").read_bytes())  # empty once it has ended
    return False


@dataclass
class Forked:
    """A forked worker, with the part of the interface of `subprocess.Popen` that launchers use."""

    server: ForkServer
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the worker's exit code, or None if there is none yet."""
        if self.returncode is None:
            self.returncode = self.server.code_of(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve(head_pid: int, modules: Sequence[str]) -> list[str]:
    """Fork workers until the head, the parent of this process, is gone.

    Return only in a worker: its arguments.
    """
    link = socket.socket(fileno=os.dup(0))
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), 0)
    try:
        head = os.pidfd_open(head_pid)
    except ProcessLookupError:  # a worker that it has ordered removes what it has left
        head = null  # readable, like the descriptor of a process that has ended
    fault = _fault_of(modules)
    # What torch and others would clean up at exit touches many pages, and takes most of a second.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # a worker's garbage collection would copy these objects' pages

    def send(*message: Any) -> None:
        with suppress(OSError):  # the head is gone, which is noticed below
            link.send(json.dumps(message).encode())

    def report_ends(*_: Any) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                send(ended[0], os.waitstatus_to_exitcode(ended[1]))

    signal.signal(signal.SIGCHLD, report_ends)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    while True:
        ready, _, _ = select.select([link, head], [], [])  # type: ignore[type-var]
        order, outputs = b"", list[int]()
        with suppress(ConnectionError):  # the head has not read all messages
            if link in ready:  # a fork of a head that has ended may hold the link open
                order, outputs, _, _ = socket.recv_fds(link, MAX_MESSAGE, 2)
        if not order:
            os._exit(0)
        mark, arguments, variables = json.loads(order)
        try:
            answer = fault or os.fork()
        except OSError as error:
            answer = f"a worker cannot be forked: {error}"
        if answer == 0:
            link.close()
            _become_worker(mark, variables, outputs)
            return arguments  # type: ignore[no-any-return]
        send(mark, answer)
        if fault:
            os._exit(1)
        for output in outputs:
            os.close(output)


def _fault_of(modules: Sequence[str]) -> str:
    """Import these modules. Return why no workers can be forked then, or an empty string."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"worker_preload: cannot import {module}: {one_line(error)}"
        if threading.active_count() > 1:
            return f"worker_preload: {module} starts threads, which forked workers would not have"
    return ""


def _become_worker(mark: str, variables: dict[str, str], outputs: Sequence[int]) -> None:
    """Make this fork a process like one that was started with these variables and outputs."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(variables)
    # The system shows the variables of the process that forks, but this name.
    Path("/proc/self/comm").write_text(mark)
    np.random.seed()  # Python reseeds only its own generator in each fork
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
