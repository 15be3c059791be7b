"""The command line of a worker."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import StartupError
from ..wire.security import read_key_file
from .connection import Connection, End
from .worker import Worker


class Output(io.FileIO):
    """An output that loses what it cannot write: a full disk is no reason to end."""

    def write(self, data: Any) -> int:
        """Write, and return the length of all data."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = argparse.ArgumentParser(
        prog="clusterenv_runtime.worker", description="A ClusterEnv environment worker."
    )
    add = parser.add_argument
    add("--connect", required=True, metavar="ADDRESS", help="the head's address, as ZeroMQ has it")
    add("--index", required=True, type=int, help="which of the head's workers this is, from 0")
    add("--startup-timeout", type=float, default=60, help="seconds to try to reach the head")
    add("--head-timeout", type=float, default=30, help="seconds of a silent link before giving up")
    add("--head-pid", type=int, help="the head's, if it is this process's parent")
    add("--head-directory", metavar="DIR", help="to remove, should that parent vanish")
    add("--key-file", metavar="FILE", help="the run's keys, for tcp; only its owner may read it")
    return parser.parse_args(arguments)


def main(
    arguments: list[str] | None = None, head_has_left: Callable[[], bool] | None = None
) -> None:
    """Be a worker until the head says that it is enough, or is gone.

    Args:
        arguments: instead of the command line's.
        head_has_left: says whether the head's process has ended, if this one is on its machine;
            by default it follows from ``--head-pid``.
    """
    args = parse(arguments)
    _handle_signals()
    sys.stdout, sys.stderr = map(_output, (1, 2))
    logging.basicConfig(format=f"worker {args.index}: %(message)s")
    try:
        keys = None if args.key_file is None else read_key_file(args.key_file)
    except StartupError as error:
        sys.exit(f"error: {error}")
    timeouts = args.startup_timeout, args.head_timeout
    head_has_left = head_has_left or _watch_parent(args.head_pid)
    connection = Connection(args.connect, keys, *timeouts, head_has_left, args.head_directory)
    worker = Worker(connection)
    try:
        with contextlib.suppress(End):
            connection.greet(args.index)
            worker.run()
    finally:
        worker.close()
        connection.close()
        warnings.simplefilter("ignore", ResourceWarning)  # its pulse lives as long as this process
        _flush_files()
        gc.freeze()  # to collect torch's objects at exit would take most of a second


def _flush_files() -> None:
    """Write what is left in files that nobody has closed, as the interpreter's own end would."""
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    for file in [each for each in gc.get_objects() if type(each) in kinds]:
        with contextlib.suppress(Exception):
            file.flush()


def _watch_parent(head: int | None) -> Callable[[], bool] | None:
    """Return what says whether the head was this process's parent, and is no more."""

    def has_left() -> bool:
        return os.getppid() not in (head, 0)  # 0 is a parent outside of this pid namespace

    if head is None:
        return None
    if has_left():
        with contextlib.suppress(OSError):
            os.kill(head, 0)
            return None  # the head lives: this process's parent is a --worker-prefix
    return has_left


def _output(file: int) -> io.TextIOWrapper:
    raw = Output(file, "w", closefd=False)
    return io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)


def _end(*_: object) -> None:
    raise End


def _handle_signals() -> None:
    """End in order at Ctrl-C, and at SIGTERM even as the first process of a container.

    A KeyboardInterrupt is then an environment's own, and an error as any other.
    """
    # A shell has its background jobs ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if os.getpid() == 1:  # the kernel keeps signals from it that it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


if __name__ == "__main__":
    main()
