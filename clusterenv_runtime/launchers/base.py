"""The base class of launchers, and how a worker's process ended."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

WORKER = "clusterenv_runtime.worker"  # the module that workers run


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended: the reason, and whether a signal ended it.

    After a signal, a replacement may fare better.
    """

    reason: str
    by_signal: bool = False


class Launcher:
    """Starts the workers of one head.

    Only `stop` may block for long, because the head must serve its workers between the other calls.
    A launcher of your own defines `remote` and `start_worker`, and as many of `exit`, `kill`,
    `has_ended` and `stop` as it can; `command` is for the scripts' ``--dry-run``. A package can
    make it known by name, as an entry point of the group ``clusterenv.launchers``.

    Args:
        log_dir: the directory for the launcher's files, for example the workers' logs. The keys are
            there, too, so a launcher for several machines needs a file system that these share.
        prefix: a command line that goes before each worker's command.

    Raises:
        ValueError: the prefix is not a command line.
    """

    name = "of your own"
    # Whether workers may run on other machines, so that the head must listen over tcp.
    remote = True
    # Whether workers run the same Python as this process, with the same packages.
    same_python = False
    # Whether you start the workers yourself. They read your copy of the keys if you made the keys.
    by_hand = False
    # The resources of each worker, for example {"CPU": 2}. What they mean is up to the launcher.
    resources: Mapping[str, float] = MappingProxyType({})
    # Whether workers may be forked from one process, and the modules that this process imports.
    may_fork = True
    preload: Sequence[str] = ()
    startup_timeout = 60.0  # seconds that a worker may take to start

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        # Absolute, because this process may change its directory.
        self.log_dir = None if log_dir is None else Path(log_dir).absolute()
        try:
            self.prefix = shlex.split(prefix)
        except ValueError as error:
            raise ValueError(f"worker_prefix {prefix}: {error}") from None
        self.num_workers = 0  # until `prepare` sets it
        self.flags: list[str] = []

    @property
    def directory(self) -> Path | None:
        """The directory in which the head makes its private one, where workers can read their keys.

        None stands for the system's directory for temporary files.
        """
        return self.log_dir

    @property
    def can_fork(self) -> bool:
        """Whether workers can be forked from one process."""
        return False

    def address(self, num_workers: int) -> str | None:
        """Return the address for the head to listen on over tcp if the user gives none.

        Return None if the launcher knows no address.

        Raises:
            StartupError: there is no such address; the error message says why.
        """
        return None

    def check_resources(self, resources: Mapping[str, float], num_workers: int) -> None:
        """Check that each worker can have these resources, before they become `resources`.

        Raises:
            ValueError: this launcher does not know one of the resources.
            StartupError: there are not enough resources.
        """
        if resources:
            raise ValueError(
                "worker_resources goes with a launcher that gives workers resources, "
                f"not {self.name}"
            )

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        """Take over the number of workers, their flags, and the head's private directory."""
        self.num_workers = num_workers
        self.flags = flags

    def arguments(self, index: int) -> list[str]:
        """Return the arguments with which Python runs a worker."""
        return ["-m", WORKER, *self.worker_flags(index)]

    def worker_flags(self, index: int) -> list[str]:
        """Return the flags of a worker."""
        return ["--index", str(index), *self.flags]

    def command(self, index: int) -> list[str]:
        """Return the command that starts a worker."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `command` needs in addition to this process's."""
        return {}

    def start(self) -> None:
        """Start all workers."""
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(self.num_workers):
            self.start_worker(index)

    def start_worker(self, index: int) -> None:
        """Start a worker's process: the first one, or a replacement for a killed one.

        Raises:
            OSError: the process cannot be started now. For a replacement, the head tries again.
        """
        raise NotImplementedError

    def pending(self, index: int) -> str | None:
        """Return what a worker's start waits for; None once it has started and has a deadline."""
        return None

    def log(self, index: int) -> str | None:
        """Return the path of a worker's log; None if the worker writes to this process's output."""
        return None

    def exit(self, index: int) -> Exit | None:
        """Return how a worker's process ended; None if it is running, or if nobody knows."""
        return None

    def kill(self, index: int) -> None:
        """Begin to kill a worker's process, if the launcher can reach it."""

    def has_ended(self, index: int) -> bool:
        """Return whether nothing is left of a killed worker, as far as this launcher can tell."""
        return True

    def stop(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to exit, then terminate them, then kill them."""
