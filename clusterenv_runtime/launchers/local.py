"""Workers as subprocesses of this Python."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from .base import WORKER, Exit, Launcher
from .forking import READY_S, UNKNOWN, Forked, ForkServer, ForkServerLost, can_fork, shared_server
from .processes import (
    VARIABLE,
    current_directory,
    hash_seed,
    import_path,
    kill_marked,
    python_command,
)
from .start import PATH

logger = logging.getLogger(__name__)
# Somebody may have put a link in the place of a log.
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class LocalLauncher(Launcher):
    """Starts workers on this machine. With ``log_dir`` they log to ``log_dir/worker-I.log``."""

    name = "local"
    remote = False
    same_python = True
    directory = None  # the system's directory of temporary files

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._server: ForkServer | None = None
        self._lost_servers = 0
        # These are this process's when `prepare` is called.
        self._environment: dict[str, str] = {}
        self._cwd: str | None = None
        # All processes of this launcher have a mark that begins so; see `processes`. A worker that
        # has workers itself passes its own mark on.
        self._mark = f"{os.environ.get(VARIABLE, '')}{secrets.token_hex(8)}."
        self._marks: dict[int, str] = {}  # by pid

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        if not self.remote:
            flags = [*flags, "--head-directory", directory, "--head-pid", str(os.getpid())]
        super().prepare(num_workers, flags, directory)
        self._environment = {**os.environ, **self.variables(), PATH: json.dumps(import_path())}
        self._cwd = current_directory()

    def command(self, index: int) -> list[str]:
        return [*self.prefix, *python_command(WORKER, *self.worker_flags(index))]

    def variables(self) -> dict[str, str]:
        # One thread of BLAS each: a worker's cores are for its environments.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed()}

    def environment(self, mark: str) -> dict[str, str]:
        """Return the environment variables of a command; see `processes` for the mark."""
        return {**self._environment, VARIABLE: mark}

    def start_worker(self, index: int) -> None:
        mark = f"{self._mark}{secrets.token_hex(4)}."
        with self.output(index) as output:
            process = self._fork(index, mark, output) or self._spawn(index, mark, output)
        self._marks[process.pid] = mark
        self._processes[index] = process

    @property
    def can_fork(self) -> bool:
        """Whether this system forks, and the command is no other than `_fork` has it."""
        is_plain = type(self).command is LocalLauncher.command and not self.prefix
        return is_plain and can_fork()

    @property
    def _forks(self) -> bool:
        return self.may_fork and self.can_fork and self._lost_servers < 2

    def _fork(self, index: int, mark: str, output: IO[bytes] | None) -> Forked | None:
        """Fork a worker; return None if that is not possible here.

        Raises:
            OSError: it cannot be forked now.
            StartupError: a module to preload cannot be imported.
        """
        variables = self.environment(mark)
        while self._forks:
            try:
                if self._server is None:
                    self._server = shared_server(variables, self.preload)
                flags, ready_s = self.worker_flags(index), max(READY_S, self.startup_timeout)
                with _outputs(output) as outputs:
                    return self._server.fork(mark, flags, variables, outputs, ready_s)
            except ForkServerLost:
                self._server = None
                self._lost_servers += 1
                if not self._forks:
                    text = "the process that forks workers was lost twice: they are started singly"
                    logger.warning(text)
        return None

    def _spawn(self, index: int, mark: str, output: IO[bytes] | None) -> subprocess.Popen[bytes]:
        # A process group of its own, so that Ctrl-C reaches the head alone, which then stops its
        # workers in order. It is no session, as Linux may share the cores out between sessions,
        # whatever the niceness of their processes.
        with _outputs(output) as (stdout, stderr):
            return subprocess.Popen(
                self.command(index),
                env=self.environment(mark),
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
            )

    def output(self, index: int) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        """Open the file to which a command's output goes; None is this process's output."""
        if (log := self.log(index)) is None:
            return contextlib.nullcontext()
        try:
            return open(os.open(log, LOG_FLAGS, 0o666), "ab")
        except OSError as error:
            # Without open files no process can be started, either.
            if index not in self._processes or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # A replacement is worth more than its log.
            logger.warning("from now on worker %d has no log: %s", index, error)
            return open(os.devnull, "ab")

    def log(self, index: int) -> str | None:
        return None if self.log_dir is None else str(self.log_dir / f"worker-{index}.log")

    def exit(self, index: int) -> Exit | None:
        code = self._processes[index].poll()
        if code is None:
            return None
        if code == UNKNOWN:
            return Exit("it ended, and so did the process that it was forked from", by_signal=True)
        if code >= 0:  # above 128 it stands for a signal, if the prefix is a shell
            return Exit(f"exit code {code}", by_signal=128 < code <= 192)
        names = {number.value: number.name for number in signal.Signals}
        return Exit(f"killed by {names.get(-code, f'signal {-code}')}", by_signal=True)

    def kill(self, index: int) -> None:
        kill_group(self._processes[index])

    def has_ended(self, index: int) -> bool:
        process = self._processes[index]
        return process.poll() is not None and not kill_marked(self._marks[process.pid])

    def stop(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        processes = list(self._processes.values())
        if _await(processes, deadline):
            self._tell_failures(timeout)
        else:
            for process in processes:
                process.terminate()
            _await(processes, deadline + 1)
        for process in processes:
            kill_group(process)
        # A process in the kernel, for example on a file system that is gone, stays.
        _await(processes, deadline + 6)
        while kill_marked(self._mark) and time.monotonic() < deadline + 7:
            time.sleep(0.01)

    def _tell_failures(self, timeout: float) -> None:
        """Say which workers have failed at the end, if they had any time for it."""
        deadline = time.monotonic() + min(timeout, 1)
        for index, process in self._processes.items():
            # How a forked worker has ended is known a moment after it has.
            while (code := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if code is not None and timeout > 0 and 0 < code < UNKNOWN:
                text = "worker %d failed as it closed its environments (exit code %d)%s"
                log = self.log(index)
                logger.warning(text, index, code, f"; see {log}" if log else "")


@contextlib.contextmanager
def _outputs(output: IO[bytes] | None) -> Iterator[list[int]]:
    """Open a worker's two outputs: this one, or this process's own as far as they are open."""
    with open(os.devnull, "ab") as null:
        if output is not None:
            yield [output.fileno()] * 2
        else:
            own = (1, sys.__stdout__), (2, sys.__stderr__)
            yield [file if _is_open(file, stream) else null.fileno() for file, stream in own]


def _is_open(file: int, stream: Any) -> bool:
    """Say whether this process has an output. If it started without, the file is another one."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return stream is not None


def kill_group(process: subprocess.Popen[bytes] | Forked) -> None:
    """Kill a process with its group: what its environments have started may have outlived it."""
    process.kill()  # it may have left the group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _await(processes: list[subprocess.Popen[bytes] | Forked], deadline: float) -> bool:
    """Wait until these have ended, or a time of `time.monotonic`; return whether they have."""
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False
    return True
