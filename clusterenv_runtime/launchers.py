"""Launchers start worker processes, say whether they live, and stop them: here, or wherever you start them yourself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

LAUNCHERS = "local", "slurm", "external"
_WORKER = ["-m", "clusterenv_runtime.worker"]


def listening_address(bind_address: str | None, port: int | str, directory: str) -> str:
    """Return where to listen for workers, as ZeroMQ writes it."""
    return f"tcp://{bind_address}:{port}" if bind_address else f"ipc://{directory}/head"


def worker_flags(
    address: str, key_file: str | os.PathLike[str] | None, startup_timeout: float, worker_timeout: float
) -> list[str]:
    """Return the flags of `clusterenv_runtime.worker` that all workers of a head have in common."""
    timeouts = ["--startup-timeout", str(startup_timeout), "--head-timeout", str(worker_timeout)]
    return ["--connect", address, *([] if key_file is None else ["--key-file", str(key_file)]), *timeouts]


class Launcher:
    """What the head needs to know of how its workers come to be. With ``log_dir`` it may leave files there.

    ``prefix`` is what goes before each worker's command.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        self._log_dir, self._prefix = None if log_dir is None else Path(log_dir), shlex.split(prefix)
        self._num_workers, self._flags = 0, list[str]()

    @property
    def started(self) -> bool:
        """Whether this launcher has workers already; one launcher serves one ClusterEnv."""
        return self._num_workers > 0

    @property
    def directory(self) -> Path | None:
        """Where the head makes its private directory, so that workers can read their keys; None if anywhere will do."""
        return None if self._log_dir is None else self._log_dir.absolute()

    def address(self, num_workers: int) -> str | None:
        """Return the address to listen on if the user gives none; None for a socket file of this machine."""
        return None

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        """Note how many workers there will be, their flags, and the head's private directory."""
        self._num_workers, self._flags = num_workers, flags

    def command(self, index: int) -> list[str]:
        """Return the command that starts a worker."""
        raise NotImplementedError

    def arguments(self, index: int) -> list[str]:
        """Return the arguments of that command's Python."""
        return [*_WORKER, "--index", str(index), *self._flags]

    def variables(self) -> dict[str, str]:
        """Return the environment variables that this adds to those of `command`."""
        return {}

    def start(self) -> None:
        """Start all workers."""
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(self._num_workers):
            self.restart(index)

    def restart(self, index: int) -> None:
        """Start a worker, in place of one that is killed if it still runs."""
        raise NotImplementedError

    def pending(self, index: int) -> str | None:
        """Return what a worker's start is waiting for, or None if it has been started. From then it has a deadline."""
        return None

    def log(self, index: int) -> str | None:
        """Return the path of a worker's log, or None if there is none or its output goes to this process's."""
        return None

    def exit_reason(self, index: int) -> str | None:
        """Return how a worker's process ended, or None while it runs or if nobody knows."""
        return None

    def kill(self, index: int) -> None:
        """End a worker's process at once, as far as it can be reached."""

    def stop(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to exit by themselves, then terminate them, then kill them."""


class LocalLauncher(Launcher):
    """Workers as subprocesses of this Python. With ``log_dir`` their output goes to ``log_dir/worker-I.log``."""

    directory = None  # the system's place for temporary files

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        super().__init__(log_dir, prefix)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        flags = [*flags, "--head-directory", directory, "--head-pid", str(os.getpid())]
        super().prepare(num_workers, flags, directory)

    def command(self, index: int) -> list[str]:
        return [*self._prefix, sys.executable, *self.arguments(index)]

    def variables(self) -> dict[str, str]:
        paths = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        # One BLAS thread each: a worker's cores are its environments'.
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": os.pathsep.join(paths)}

    def restart(self, index: int) -> None:
        if index in self._processes:
            self.kill(index)
        log = None if self._log_dir is None else open(self.log(index), "ab")  # noqa: SIM115
        try:
            self._processes[index] = self._spawn(index, log)
        finally:
            if log is not None:
                log.close()

    def _spawn(self, index: int, output: object) -> subprocess.Popen[bytes]:
        env = {**self._inherited(), **self.variables()}
        # A process group of its own, so that Ctrl-C reaches the head alone, which then stops its workers in order. No
        # session: Linux may share the cores out between sessions, whatever the niceness of who is in them.
        return subprocess.Popen(
            self.command(index), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )

    def _inherited(self) -> dict[str, str]:
        return dict(os.environ)

    def log(self, index: int) -> str | None:
        return None if self._log_dir is None else str(self._log_dir / f"worker-{index}.log")

    def exit_reason(self, index: int) -> str | None:
        code = self._processes[index].poll()
        if code is None:
            return None
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"

    def kill(self, index: int) -> None:
        process = self._processes[index]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what its environments have started
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, on a file system that is gone
            process.wait(5)

    def stop(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for end, stop in ((deadline, None), (deadline + 1, "terminate"), (deadline + 6, "kill")):
            for process in self._processes.values():
                if stop is not None and process.poll() is None:
                    getattr(process, stop)()
            for process in self._processes.values():
                try:
                    process.wait(max(end - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    break
            else:
                break
        for process in self._processes.values():  # what their environments have started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class ExternalLauncher(Launcher):
    """Workers that you start: it prints their commands and lets the head wait for as long as you need.

    The keys, if there are any, are in a file below ``log_dir``, which their commands name.
    """

    def address(self, num_workers: int) -> str | None:
        raise ValueError("workers that are started elsewhere need an address to connect to: give bind_address")

    def command(self, index: int) -> list[str]:
        return [*self._prefix, "env", "OMP_NUM_THREADS=1", "python", *self.arguments(index)]

    def start(self) -> None:
        print("run these, each once, wherever you like:")
        super().start()

    def restart(self, index: int) -> None:
        print(shlex.join(self.command(index)), flush=True)

    def pending(self, index: int) -> str | None:
        return "nobody has run its command yet"


def make_launcher(name: str, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> Launcher:
    """Return the launcher of this name: "local", "slurm" or "external".

    Raises:
        StartupError: it cannot start workers here; the text says what to do.
    """
    if name == "slurm":
        from .slurm import SlurmLauncher

        return SlurmLauncher(log_dir, prefix)
    return (ExternalLauncher if name == "external" else LocalLauncher)(log_dir, prefix)
