"""Workers as processes on this machine, with the same Python as this process.

A worker's environments may start processes of their own. Such a process can leave its group, and
the system forgets a parent that has died. But each process inherits its parent's environment
variables, and one of a worker's variables ends with the worker's mark. The system does not show the
variables of a forked worker, but its name, which is the mark. Only Linux shows these of a process.
On other systems, no such process is found.
"""

import functools
import logging
import multiprocessing.spawn
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

from .base import WORKER, Exit, Launcher, hash_seed
from .fork_server import CODE, UNKNOWN, Forked, ForkServer

logger = logging.getLogger(__name__)
Process = subprocess.Popen[bytes] | Forked
MAIN = f"from {WORKER}.__main__ import main"
VARIABLE = "CLUSTERENV_WORKER"  # holds the marks of a worker and of the worker that started it
MARK = r"worker-\w{8}"  # as long as a process's name may be
# O_NOFOLLOW, because somebody may have put a link in the place of a log.
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# The modules that a worker imports to act. They import torch.
ACTING = "clusterenv_runtime.policy.actor", "clusterenv_runtime.extras.policies"
READY_S = 60.0  # seconds for the process that forks to import its modules
LONGEST_S = 1e6  # the longest wait that all systems accept
# Starts a process that forks for all launchers here that need one like it.
shared_server = functools.lru_cache(maxsize=2)(ForkServer)


def current_directory() -> str | None:
    """Return the current directory, or None if it has been removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


FIRST_DIRECTORY = current_directory()


def import_path() -> list[str]:
    """Return `sys.path` for another process, with absolute entries only.

    A relative entry may come from before this process changed its directory, so it is resolved
    against both the first and the current directory.
    """
    directories = [each or "/" for each in (FIRST_DIRECTORY, current_directory())]
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # imports skip others
    paths = dict.fromkeys(os.path.join(at, entry) for entry in entries for at in directories)
    return [*filter(os.path.exists, paths)]  # an editable installation has an entry that is no path


def python_command(code: str) -> list[str]:
    """Return the command that runs code in a Python like this one, with the same `sys.path`.

    With ``-m``, the current directory would come before the standard library. With PYTHONPATH, so
    would this package's folder, also in the simulators that environments start.
    """
    _, *flags = multiprocessing.spawn.get_command_line()
    first = f"import os, sys; sys.path[:] = {import_path()!a}"
    return [sys.executable, *flags[: flags.index("-c")], "-c", f"{first}; {code}"]


class LocalLauncher(Launcher):
    """Starts workers on this machine. With ``log_dir`` they log to ``log_dir/worker-I.log``."""

    name = "local"
    remote = False
    directory = None  # the system's directory for temporary files
    _next_search = 0.0  # the time of the next search for what is left of workers

    @property
    def can_fork(self) -> bool:  # type: ignore[override]
        """Whether this system can fork, and workers have the command that forking implies."""
        is_plain = type(self).command is LocalLauncher.command and not self.prefix
        return is_plain and sys.platform == "linux"

    def prepare(self, num_workers: int, flags: list[str], directory: str, **how: Any) -> None:
        self._processes: dict[int, Process] = {}
        self._gone = set[int]()  # workers of which nothing is left
        self._marks = [f"worker-{secrets.token_hex(4)}" for _ in range(num_workers)]
        if not self.remote:
            flags = [*flags, "--head-directory", directory, "--head-pid", str(os.getpid())]
        super().prepare(num_workers, flags, directory, **how)
        # What this process is like now. A replacement gets the same.
        variables = self.variables()
        self._environment = {**os.environ, **variables}
        self._cwd = current_directory()
        self._python = python_command(f"{MAIN}; main()")
        modules = [*(ACTING if "torch" in sys.modules else ()), *self.preload]
        code = CODE.format(MAIN, os.getpid(), modules)
        # The modules that it imports may look at all variables.
        seen = self._environment if self.preload else variables
        self._kind = tuple(python_command(code)), frozenset(seen.items())

    def command(self, index: int) -> list[str]:
        return [*self.prefix, *self._python, *self.arguments(index)[2:]]

    def variables(self) -> dict[str, str]:
        # One BLAS thread per worker, because a worker's cores are for its environments.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed()}

    def environment(self, mark: str) -> dict[str, str]:
        """Return the environment variables of a worker's command."""
        before = self._environment.get(VARIABLE, "")  # if this process is itself a worker
        return {**self._environment, VARIABLE: f"{before}.{mark}"}

    def start_worker(self, index: int) -> None:
        self._gone.discard(index)
        mark, timeout = self._marks[index], min(READY_S + self.startup_timeout, LONGEST_S)
        environment = self.environment(mark)
        with self.outputs(index) as outputs:
            for _ in range(2 if self.fork and self.can_fork else 0):
                arguments = self.arguments(index)[2:]
                with suppress(OSError):
                    self._processes[index] = shared_server(*self._kind).fork(
                        mark, arguments, environment, outputs, timeout
                    )
                    return
                shared_server.cache_clear()
                logger.warning("the process that forks workers was lost")
            # A process group of its own, so that Ctrl-C reaches only the head, which then stops its
            # workers cleanly. Not a session of its own, because Linux may divide the cores between
            # sessions, regardless of the niceness of their processes.
            self._processes[index] = subprocess.Popen(
                self.command(index),
                env=environment,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                process_group=0,
            )

    @contextmanager
    def outputs(self, index: int) -> Iterator[list[int]]:
        """Open the descriptors for the two outputs of a worker's command."""
        if (log := self.log(index)) is None:
            files = [_own_output(1, sys.__stdout__), _own_output(2, sys.__stderr__)]
        else:
            files = [os.open(log, LOG_FLAGS, 0o666)] * 2
        try:
            yield files
        finally:
            for file in set(files):
                os.close(file)

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
        if self._processes[index].poll() is None:
            return False
        if (start := time.monotonic()) >= self._next_search:
            # One search serves all workers that have ended.
            ended = [each for each in self._processes if self.exit(each)]
            found = kill_marked(self._marks[each] for each in ended)
            self._gone = {each for each in ended if self._marks[each] not in found}
            self._next_search = 2 * time.monotonic() - start
        return index in self._gone

    def stop(self, timeout: float) -> None:
        processes = self._processes.values()
        if not self._await(timeout):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            self._await(1)
        for process in processes:
            kill_group(process)
        # A process that is stuck in the kernel, for example on a lost file system, stays.
        self._await(5 + len(processes) / 20, kills=True)

    def _await(self, seconds: float, kills: bool = False) -> bool:
        """Wait until all processes have ended. Return whether they have within these seconds.

        With ``kills``, kill also what they have left.
        """
        deadline = time.monotonic() + seconds
        processes = self._processes.values()
        while any(process.poll() is None for process in processes) or (
            kills and kill_marked(self._marks)
        ):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True


def _own_output(number: int, stream: Any) -> int:
    """Return a new descriptor for an output of this process, or for the null device if closed."""
    with suppress(OSError):
        if stream is not None:  # otherwise the number belongs to another file
            # A worker would lose what it writes to a full pipe that does not block. It opens the
            # pipe again, as one that blocks.
            reopens = not os.get_blocking(number)
            return os.open(f"/dev/fd/{number}", os.O_WRONLY) if reopens else os.dup(number)
    return os.open(os.devnull, os.O_WRONLY)


def kill_group(process: Process) -> None:
    """Kill a process and its group, where processes of its environments may have outlived it."""
    process.send_signal(signal.SIGKILL)  # it may have left the group
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_marked(marks: Iterable[str]) -> set[str]:
    """Kill the processes with one of these marks, except this one. Return the marks of those."""
    marks, found = set(marks), set[str]()
    for process in map(Path, glob("/proc/[0-9]*")):  # none if no more files can be opened
        with suppress(OSError):  # it has ended, or is another user's
            variables = (process / "environ").read_text("latin-1")
            name = (process / "comm").read_text("latin-1")
            own = marks.intersection(re.findall(MARK, name + variables))
            # One without variables has ended.
            if own and variables and process.name != str(os.getpid()):
                os.kill(int(process.name), signal.SIGKILL)
                found |= own
    return found
