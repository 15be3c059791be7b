"""Workers as processes on this machine, with the same Python as this process."""

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
from .forking import (
    READY_S,
    UNKNOWN,
    Forked,
    ForkServerLink,
    ForkServerLost,
    can_fork,
    shared_server,
)
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
# O_NOFOLLOW, because somebody may have put a link in the place of a log.
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class LocalLauncher(Launcher):
    """Starts workers on this machine. With ``log_dir`` they log to ``log_dir/worker-I.log``."""

    name = "local"
    remote = False
    same_python = True
    directory = None  # the system's directory for temporary files

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._server: ForkServerLink | None = None
        self._lost_servers = 0
        # This process's environment and directory when `prepare` is called.
        self._environment: dict[str, str] = {}
        self._cwd: str | None = None
        # The marks of all this launcher's processes begin with this one; see `processes`. If this
        # process is itself a worker, its own mark comes first.
        self._mark = f"{os.environ.get(VARIABLE, '')}{secrets.token_hex(8)}."
        self._marks: dict[int, str] = {}  # each process's mark, by PID

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        if not self.remote:
            flags = [*flags, "--head-directory", directory, "--head-pid", str(os.getpid())]
        super().prepare(num_workers, flags, directory)
        self._environment = {**os.environ, **self.variables(), PATH: json.dumps(import_path())}
        self._cwd = current_directory()

    def command(self, index: int) -> list[str]:
        return [*self.prefix, *python_command(WORKER, *self.worker_flags(index))]

    def variables(self) -> dict[str, str]:
        # One BLAS thread per worker, because a worker's cores are for its environments.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed()}

    def environment(self, mark: str) -> dict[str, str]:
        """Return the environment variables of a worker's command; see `processes` for the mark."""
        return {**self._environment, VARIABLE: mark}

    def start_worker(self, index: int) -> None:
        mark = f"{self._mark}{secrets.token_hex(4)}."
        with self.output(index) as output:
            process = self._fork(index, mark, output) or self._spawn(index, mark, output)
        self._marks[process.pid] = mark
        self._processes[index] = process

    @property
    def can_fork(self) -> bool:
        """Whether this system can fork, and workers have the command that `_fork` implies."""
        is_plain = type(self).command is LocalLauncher.command and not self.prefix
        return is_plain and can_fork()

    @property
    def _forks(self) -> bool:
        return self.may_fork and self.can_fork and self._lost_servers < 2

    def _fork(self, index: int, mark: str, output: IO[bytes] | None) -> Forked | None:
        """Fork a worker. Return None if that is not possible here.

        Raises:
            OSError: the worker cannot be forked now.
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
        # A process group of its own, so that Ctrl-C reaches only the head, which then stops its
        # workers cleanly. Not a session of its own, because Linux may divide the cores between
        # sessions, regardless of the niceness of their processes.
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
        """Open the file for a command's output; None stands for this process's output."""
        if (log := self.log(index)) is None:
            return contextlib.nullcontext()
        try:
            return open(os.open(log, LOG_FLAGS, 0o666), "ab")
        except OSError as error:
            # If no file can be opened, no process can be started, either.
            if index not in self._processes or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # A replacement without a log is better than none.
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
        # A process that is stuck in the kernel, for example on a lost file system, stays.
        _await(processes, deadline + 6)
        while kill_marked(self._mark) and time.monotonic() < deadline + 7:
            time.sleep(0.01)

    def _tell_failures(self, timeout: float) -> None:
        """Warn about workers that failed as they closed, if they had any time to close."""
        deadline = time.monotonic() + min(timeout, 1)
        for index, process in self._processes.items():
            # A forked worker's exit code is known a moment after the worker has ended.
            while (exit := self.exit(index)) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            code = process.returncode
            if timeout > 0 and code and exit is not None and not exit.by_signal:
                text = "worker %d failed as it closed its environments (exit code %d)%s"
                log = self.log(index)
                logger.warning(text, index, code, f"; see {log}" if log else "")


@contextlib.contextmanager
def _outputs(output: IO[bytes] | None) -> Iterator[list[int]]:
    """Yield the descriptors of a worker's two outputs: ``output``, or this process's own.

    If one of this process's own is closed, the null device takes its place.
    """
    with open(os.devnull, "ab") as null:
        if output is not None:
            yield [output.fileno()] * 2
        else:
            own = (1, sys.__stdout__), (2, sys.__stderr__)
            yield [file if _is_open(file, stream) else null.fileno() for file, stream in own]


def _is_open(file: int, stream: Any) -> bool:
    """Return whether this process has an output.

    If the process started without the output, the number belongs to another file.
    """
    try:
        os.fstat(file)
    except OSError:
        return False
    return stream is not None


def kill_group(process: subprocess.Popen[bytes] | Forked) -> None:
    """Kill a process and its group, where processes of its environments may have outlived it."""
    process.kill()  # it may have left the group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _await(processes: list[subprocess.Popen[bytes] | Forked], deadline: float) -> bool:
    """Wait until these processes have ended, or until ``deadline``. Return whether they ended."""
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False
    return True
