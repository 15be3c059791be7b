"""What the head needs to know of how its workers come to be."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended: in words, and whether a signal did it, so that another may fare
    better.
    """

    reason: str
    by_signal: bool = False


class Launcher:
    """Starts the workers of one head. What is called while they run must not wait; only `stop` may.

    A launcher of your own defines `remote`, `command`, `start_worker`, and if it can `exit`,
    `kill`, `has_ended` and `stop`. A package that names it as an entry point of the group
    ``clusterenv.launchers`` makes it known by that name.

    Args:
        log_dir: where it may leave files, such as the workers' logs. For a launcher on several
            machines this must be on a file system they share: their keys are there, too.
        prefix: goes before each worker's command.
    """

    name = "of your own"
    remote = (
        True  # whether workers may run on other machines, so that the head must listen over tcp
    )
    by_hand = (
        False  # whether you start its workers, with your own copy of the keys that you have made
    )
    resources: Mapping[str, float] = MappingProxyType(
        {}
    )  # of each worker, as in {"CPU": 2}; the rest is up to it

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        self.log_dir, self.prefix = None if log_dir is None else Path(log_dir), shlex.split(prefix)
        self.num_workers, self.flags = 0, list[str]()

    @property
    def started(self) -> bool:
        """Whether this launcher has workers already."""
        return self.num_workers > 0

    @property
    def directory(self) -> Path | None:
        """Where the head makes its private directory, so that workers can read their keys; None if
        anywhere will do.
        """
        return None if self.log_dir is None else self.log_dir.absolute()

    def address(self, num_workers: int) -> str | None:
        """Return the address to listen on over tcp if the user gives none; None if there is none.

        Raises:
            StartupError: the text says why there is none.
        """
        return None

    def check_resources(self, resources: Mapping[str, float], num_workers: int) -> None:
        """Check that each worker can have these, before they become `resources`.

        Raises:
            ValueError: this launcher does not know them; the text goes on after the option's name.
            StartupError: there are too few of them.
        """
        if resources:
            raise ValueError(f"goes with a launcher that gives workers resources, not {self.name}")

    def prepare(self, num_workers: int, flags: list[str], directory: str) -> None:
        """Note how many workers there will be, their flags, and the head's private directory."""
        self.num_workers, self.flags = num_workers, flags

    def arguments(self, index: int) -> list[str]:
        """Return the arguments of a worker's Python."""
        return ["-m", "clusterenv_runtime.worker", "--index", str(index), *self.flags]

    def command(self, index: int) -> list[str]:
        """Return the command that starts a worker."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return the environment variables that this adds to those of `command`."""
        return {}

    def start(self) -> None:
        """Start all workers."""
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(self.num_workers):
            self.start_worker(index)

    def start_worker(self, index: int) -> None:
        """Start a worker's process: the first one, or one in place of another, which was killed.

        Raises:
            OSError: it cannot be started now. In place of another, it is tried again in seconds.
        """
        raise NotImplementedError

    def pending(self, index: int) -> str | None:
        """Return what a worker's start is waiting for, or None if it has been started. From then it
        has a deadline.
        """
        return None

    def log(self, index: int) -> str | None:
        """Return the path of a worker's log, or None if there is none or its output goes to this
        process's.
        """
        return None

    def exit(self, index: int) -> Exit | None:
        """Return how a worker's process ended, or None while it runs or if nobody knows."""
        return None

    def kill(self, index: int) -> None:
        """Begin to end a worker's process by force, if it can be reached."""

    def has_ended(self, index: int) -> bool:
        """Return whether, as far as this launcher can tell, nothing is left of a worker that was
        killed.
        """
        return True

    def stop(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to exit by themselves, then terminate them, then
        kill them.
        """


def worker_flags(
    address: str,
    key_file: str | os.PathLike[str] | None,
    startup_timeout: float,
    worker_timeout: float,
) -> list[str]:
    """Return the flags of `clusterenv_runtime.worker` that all workers of a head have in common."""
    timeouts = ["--startup-timeout", str(startup_timeout), "--head-timeout", str(worker_timeout)]
    return [
        "--connect",
        address,
        *([] if key_file is None else ["--key-file", str(key_file)]),
        *timeouts,
    ]
