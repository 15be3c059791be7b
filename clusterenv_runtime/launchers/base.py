"""The base class of launchers, how a worker's process ended, and workers that you start yourself.

A launcher of your own derives from `Launcher`.
"""

import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        resources: what each worker gets, in a form of the launcher's own, for example "CPU=2". A
            launcher that gives workers resources does not pass them on to this class.

    Raises:
        ValueError: the prefix is not a command line, or the launcher gives workers no resources.
    """

    name = "of your own"
    # Whether workers may run on other machines, so that the head must listen over tcp.
    remote = True
    # Whether you start the workers yourself. They read your copy of the keys if you made the keys.
    by_hand = False
    # Whether workers can be forked from one process on this machine, and so open its files.
    can_fork = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        prefix: str = "",
        resources: str = "",
    ) -> None:
        # Absolute, because this process may change its directory.
        self.log_dir = None if log_dir is None else Path(log_dir).absolute()
        try:
            self.prefix = shlex.split(prefix)
        except ValueError as error:
            raise ValueError(f"worker_prefix {prefix}: {error}") from None
        if resources:
            raise ValueError(
                "worker_resources goes with a launcher that gives workers resources, "
                f"not {self.name}"
            )
        self.num_workers = 0  # until `prepare` sets it
        self.flags: list[str] = []

    @property
    def directory(self) -> Path | None:
        """The directory in which the head makes its private one, where workers can read their keys.

        None stands for the system's directory for temporary files.
        """
        return self.log_dir

    def check(self, num_workers: int) -> None:
        """Check that so many workers can be started.

        Raises:
            ValueError: an argument of this launcher is not valid.
            StartupError: there is no room for the workers; the error message says why.
        """

    def address(self, num_workers: int) -> str | None:
        """Return the address for the head to listen on over tcp if the user gives none.

        Return None if the launcher knows no address.

        Raises:
            StartupError: there is no such address; the error message says why.
        """
        return None

    def prepare(
        self,
        num_workers: int,
        flags: list[str],
        directory: str,
        *,
        fork: bool = True,
        preload: Sequence[str] = (),
        startup_timeout: float = 60.0,
    ) -> None:
        """Take over what the head knows only now. Workers are started later.

        Args:
            num_workers: the number of workers.
            flags: the flags of all workers.
            directory: the head's private directory.
            fork: whether to fork workers from one process, if `can_fork`.
            preload: modules that this process imports before.
            startup_timeout: seconds that a worker may take to start.
        """
        self.num_workers = num_workers
        self.flags = flags
        self.fork, self.preload, self.startup_timeout = fork, preload, startup_timeout

    def arguments(self, index: int) -> list[str]:
        """Return the arguments with which Python runs a worker."""
        return ["-m", WORKER, "--index", str(index), *self.flags]

    def command(self, index: int) -> list[str]:
        """Return the command that starts a worker."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `command` needs in addition to this process's."""
        return {}

    def start(self) -> None:
        """Start all workers.

        Raises:
            OSError, StartupError: a worker cannot be started.
        """
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(self.num_workers):
            self.start_worker(index)

    def start_worker(self, index: int) -> None:
        """Start a worker's process: the first one, or a replacement for a killed one.

        Raises:
            OSError, StartupError: the process cannot be started, which ends the run.
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


def hash_seed() -> str:
    """Return the seed with which all workers hash strings: this process's, if it is known."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return seed if seed.isdigit() else "1"


class ExternalLauncher(Launcher):
    """Prints the workers' commands. The head waits as long as you need to run them.

    The commands name the workers' key file, if there is one: a file below ``log_dir``, or your own
    copy of it if you made the keys.
    """

    name = "external"
    by_hand = True

    def command(self, index: int) -> list[str]:
        variables = ["OMP_NUM_THREADS=1", f"PYTHONHASHSEED={hash_seed()}"]
        return [*self.prefix, "env", *variables, "python", *self.arguments(index)]

    def start(self) -> None:
        print("run these, each once, wherever you like:")
        super().start()

    def start_worker(self, index: int) -> None:
        # A replacement has the same command, so nothing is lost if it cannot be printed again.
        with contextlib.suppress(OSError):
            print(shlex.join(self.command(index)), flush=True)

    def pending(self, index: int) -> str | None:
        return "nobody has run its command yet"
