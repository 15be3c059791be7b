"""Workers that are forked from one process: the head's side of `worker.fork_server`.

The link to that process is a pair of sockets. Each message is a packet with a JSON object:

- The head sends ``modules``. Once these modules are imported, the response has ``fault``: None, or
  text for the user.
- For each worker the head sends ``mark``, ``arguments``, ``variables`` and ``unset``, with two
  descriptors for the worker's output. The response has ``mark`` and ``pid``, with a descriptor of
  the process, or it has ``mark`` and ``errno``.
- When a worker has ended, the process sends ``mark`` and ``code``, a code as in
  `subprocess.Popen.returncode`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import StartupError
from .processes import VARIABLE, python_command
from .start import PATH

MAX_MESSAGE = 2**18  # bytes
# The modules that a worker imports to act. They import torch.
ACTING = "clusterenv_runtime.policy.actor", "clusterenv_runtime.extras.policies"
READY_S = 60.0  # minimum seconds that the process gets to import its modules
FORK_S = 10.0  # seconds that it may take to fork
MOST_S = 2e6  # the longest wait; Python hands milliseconds to `poll` in 32 bits
UNKNOWN = 256  # the code of a worker that outlived the process that would report it
# Prefixes of variables that take effect when an interpreter, a library or torch is loaded.
AT_LOAD = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
)


class ForkServerLost(Exception):
    """The process that forks workers has ended, or does not respond."""


def has_ended(process: int, timeout: float = 0.0) -> bool:
    """Wait up to ``timeout`` seconds for a process to end, by its descriptor.

    Return whether the process has ended.
    """
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


class Forked:
    """A forked worker, with the part of the interface of `subprocess.Popen` that launchers use."""

    def __init__(self, server: ForkServerLink, mark: str, pid: int, file: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._mark = mark
        self._file = file
        weakref.finalize(self, os.close, file)

    def poll(self) -> int | None:
        """Return the worker's exit code, or None if there is none yet."""
        if self.returncode is None and has_ended(self._file):
            self.returncode = self._server.code_of(self._mark)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait until the worker has ended.

        Raises:
            subprocess.TimeoutExpired: the worker has not ended within ``timeout`` seconds.
        """
        if not has_ended(self._file, timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, number)


class ForkServerLink:
    """The link to the process that forks workers.

    The process starts at the first `fork`.

    Args:
        variables: the environment variables of the process.
        modules: the modules that it imports before it forks.
    """

    def __init__(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        self._variables = dict(variables)
        self._codes: dict[str, int] = {}  # exit codes of ended workers, by mark
        self._lock = threading.Lock()
        self._is_started = False
        self._is_ready = False
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._close = weakref.finalize(self, self._link.close)
        self._send({"modules": list(modules)}, [])

    def _start(self) -> None:
        opened = [self._theirs.detach()]
        try:
            opened.append(os.pidfd_open(os.getpid()))
            # Numbers below 3 are those of input and outputs, which may be closed here.
            for file in tuple(opened):
                opened.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3))
            passed = opened[2:]
            process = subprocess.Popen(
                python_command("clusterenv_runtime.worker.fork_server", *map(str, passed)),
                env=self._variables,
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                process_group=0,  # Ctrl-C must reach only the head
            )
        except BaseException:
            self._close()  # the order is dropped; the next one goes to another process
            raise
        finally:
            _close_all(opened)
        self._close.detach()
        self._close = weakref.finalize(self, _close, self._link, process)
        self._is_started = True

    def fork(
        self,
        mark: str,
        arguments: list[str],
        variables: Mapping[str, str],
        outputs: list[int],
        ready_s: float,
    ) -> Forked:
        """Fork a worker with these arguments, environment variables, and two output descriptors.

        The process may take ``ready_s`` seconds to import its modules.

        Raises:
            OSError: the worker cannot be forked now.
            ForkServerLost: the process that forks workers has ended, or does not respond.
            StartupError: a module cannot be imported.
        """
        before = self._variables
        changed = {name: text for name, text in variables.items() if before.get(name) != text}
        unset = [name for name in before if name not in variables]
        order = {"mark": mark, "arguments": arguments, "variables": changed, "unset": unset}
        with self._lock:
            self._send(order, outputs)
            # The order is sent first. Its worker cleans up if this process is killed from here on.
            if not self._is_started:
                self._start()
            self._await_ready(ready_s)
            answer, files = self._receive(FORK_S)
            while answer["mark"] != mark:  # for another worker, or an interrupted order
                _close_all(files)
                answer, files = self._receive(FORK_S)
        number = answer.get("errno")
        if number is None and not files:  # the kernel withheld it: too many files are open here
            os.kill(answer["pid"], signal.SIGKILL)
            number = errno.EMFILE
        if number is not None:
            raise OSError(number, os.strerror(number))
        return Forked(self, mark, answer["pid"], files[0])

    def code_of(self, mark: str) -> int | None:
        """Return a worker's exit code, or None if it is not known yet."""
        with self._lock:
            try:
                while mark not in self._codes:
                    _, files = self._receive(0)
                    _close_all(files)
            except BlockingIOError:
                return None
            except ForkServerLost:
                return UNKNOWN
            return self._codes.pop(mark)

    @property
    def is_open(self) -> bool:
        """Whether the process was still alive when it was last needed."""
        return self._close.alive

    def _await_ready(self, seconds: float) -> None:
        if not self._is_ready:
            answer, _ = self._receive(seconds)
            if answer["fault"] is not None:
                self._close()
                raise StartupError(f"worker_preload: {answer['fault']}")
            self._is_ready = True

    def _send(self, message: dict[str, Any], files: list[int]) -> None:
        if not self.is_open:
            raise ForkServerLost
        try:
            socket.send_fds(self._link, [json.dumps(message).encode()], files)
        except ConnectionError:
            self._lose()

    def _receive(self, seconds: float) -> tuple[dict[str, Any], list[int]]:
        """Return the next message with its descriptors. Note the exit code of an ended worker.

        Raises:
            BlockingIOError: there is no message, and ``seconds`` is 0.
            ForkServerLost: no message arrives within ``seconds``, or the process has ended.
        """
        if not self.is_open:
            raise ForkServerLost
        self._link.settimeout(min(seconds, MOST_S))
        try:
            data, files, _, _ = socket.recv_fds(self._link, MAX_MESSAGE, 1)
        except (TimeoutError, ConnectionError):
            self._lose()
        if not data:
            self._lose()
        message = json.loads(data)
        if "code" in message:
            self._codes[message["mark"]] = message["code"]
        return message, list(files)

    def _lose(self) -> NoReturn:
        self._close()
        raise ForkServerLost


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _close(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the process that forks workers. The workers go on."""
    link.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:  # it is importing, or is stopped
        process.kill()
        process.wait()


@dataclass
class _Shared:
    """The process that forks workers for all launchers here that need one like it."""

    likeness: Any = None
    server: ForkServerLink | None = None


_shared = _Shared()


@functools.cache  # a later shortage of open files says nothing about the system
def can_fork() -> bool:
    """Return whether this system has everything that forking needs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def shared_server(variables: Mapping[str, str], preload: Sequence[str]) -> ForkServerLink:
    """Return a process whose forks resemble a new process with these variables.

    It imports torch if this process has imported torch. ``preload`` names further modules to
    import.
    """
    modules = [*(ACTING if "torch" in sys.modules else ()), *preload]
    likeness = (
        os.getpid(),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        {name: text for name, text in variables.items() if name.startswith(AT_LOAD)},
        modules,
        variables.get(PATH) if preload else None,  # where these modules are found
    )
    if _shared.server is None or _shared.likeness != likeness or not _shared.server.is_open:
        # Not a worker's mark, but as long as one; see `fork_server`.
        inherited = os.environ.get(VARIABLE, "")
        unmarked = re.sub(r"\w", "0", variables[VARIABLE].removeprefix(inherited))
        _shared.server = ForkServerLink({**variables, VARIABLE: inherited + unmarked}, modules)
        _shared.likeness = likeness
    return _shared.server
