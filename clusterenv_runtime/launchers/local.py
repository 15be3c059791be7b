"""Workers as subprocesses of this Python."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from .base import Exit, Launcher
from .processes import VARIABLE, kill_marked

logger = logging.getLogger(__name__)
LOG_FLAGS = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
)  # somebody may have put a link there


class LocalLauncher(Launcher):
    """Starts workers on this machine. With ``log_dir`` their output goes to
    ``log_dir/worker-I.log``.
    """

    name, remote = "local", False
    directory = None  # the system's place for temporary files

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._replaced: list[subprocess.Popen[bytes]] = []  # killed, and perhaps not yet reaped
        # What the marks of all processes begin with, in a worker its own; and the marks by pid. See
        # `processes`.
        self._mark, self._marks = (
            f"{os.environ.get(VARIABLE, '')}{secrets.token_hex(8)}.",
            dict[int, str](),
        )

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        flags = [*flags, "--head-directory", directory, "--head-pid", str(os.getpid())]
        super().prepare(num_workers, flags, directory)

    def command(self, index: int) -> list[str]:
        return [*self.prefix, sys.executable, *self.arguments(index)]

    def variables(self) -> dict[str, str]:
        paths = [
            str(Path(__file__).resolve().parents[2]),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        # One BLAS thread each: a worker's cores are its environments'.
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def environment(self, mark: str) -> dict[str, str]:
        """Return the environment variables of a command; see `processes` for the mark."""
        return {**os.environ, **self.variables(), VARIABLE: mark}

    def start_worker(self, index: int) -> None:
        if index not in self._processes:
            self._processes[index] = self._start_process(index)
            return
        self._replaced = [process for process in self._replaced if process.poll() is None]
        self._replaced.append(self._processes[index])
        self._processes[index] = self._start_process(index)

    def _start_process(self, index: int) -> subprocess.Popen[bytes]:
        mark = f"{self._mark}{secrets.token_hex(4)}."
        with self.output(index) as output:
            # A process group of its own, so that Ctrl-C reaches the head alone, which then stops
            # its workers in order. No session: Linux may share the cores out between sessions,
            # whatever the niceness of who is in them.
            process = subprocess.Popen(
                self.command(index),
                env=self.environment(mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self._marks[process.pid] = mark
        return process

    def output(self, index: int) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        """Open the file to which a command's output goes; None is this process's."""
        if (log := self.log(index)) is None:
            return contextlib.nullcontext()
        try:
            return open(os.open(log, LOG_FLAGS, 0o666), "ab")
        except OSError as error:
            if index not in self._processes or error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # for lack of open files, the process could not be started either
            logger.warning(
                "from now on worker %d has no log: %s", index, error
            )  # what it does is worth more
            return open(os.devnull, "ab")

    def log(self, index: int) -> str | None:
        return None if self.log_dir is None else str(self.log_dir / f"worker-{index}.log")

    def exit(self, index: int) -> Exit | None:
        code = self._processes[index].poll()
        if code is None:
            return None
        if (
            code >= 0
        ):  # above 128 it stands for a signal, as a shell tells it, which may be the prefix
            return Exit(f"exit code {code}", by_signal=128 < code <= 192)
        names = {number.value: number.name for number in signal.Signals}
        return Exit(f"killed by {names.get(-code, f'signal {-code}')}", by_signal=True)

    def kill(self, index: int) -> None:
        kill_group(self._processes[index])

    def has_ended(self, index: int) -> bool:
        process = self._processes[index]
        return process.poll() is not None and not kill_marked(self._marks[process.pid])

    def stop(self, timeout: float) -> None:
        replaced = [process for process in self._replaced if process.poll() is None]
        deadline = time.monotonic() + timeout
        processes = [*self._processes.values(), *replaced]
        if not _await(processes, deadline):
            for process in processes:
                process.terminate()
            if not _await(processes, deadline + 1):
                for process in processes:
                    process.kill()
                _await(
                    processes, deadline + 6
                )  # one that is in the kernel, on a file system that is gone, stays
        for process in processes:
            kill_group(process)
        while kill_marked(self._mark) and time.monotonic() < deadline + 7:
            time.sleep(0.01)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, with what is left of its group: what its environments have started may have
    outlived it.
    """
    process.kill()  # it may have left the group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _await(processes: Iterable[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until these have ended, or until a time of `time.monotonic`; return whether they have."""
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False
    return True
