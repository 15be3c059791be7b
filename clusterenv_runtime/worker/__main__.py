"""A worker of a ClusterEnv: ``python -m clusterenv_runtime.worker``."""

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import warnings

from ..errors import StartupError
from ..messages import PULSE_S
from ..security import read_key_file
from .connection import Connection, End
from .worker import Worker


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse ``arguments``, or the command line if ``arguments`` is None."""
    parser = argparse.ArgumentParser(prog="clusterenv_runtime.worker", description=__doc__)
    add = parser.add_argument
    add("--connect", required=True, metavar="ADDRESS", help="the head's address, as for ZeroMQ")
    add("--index", required=True, type=int, help="which of the workers this is, from 0")
    add("--startup-timeout", type=float, default=60, help="seconds to try to reach the head")
    add("--head-timeout", type=float, default=30, help="seconds that the link may be silent")
    add("--pulse", type=float, default=PULSE_S, help="seconds between signs of life, at most")
    add("--head-pid", type=int, help="the head's process ID, on this machine")
    add("--head-directory", metavar="DIR", help="a directory to remove if the head ends")
    add("--key-file", metavar="FILE", help="the run's keys, for tcp; only its owner may read it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run a worker until the head ends it or is gone."""
    args = parse(arguments)
    _handle_signals()
    for stream in sys.stdout, sys.stderr:
        if stream is not None:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    logging.basicConfig(format=f"worker {args.index}: %(message)s")
    try:
        keys = None if args.key_file is None else read_key_file(args.key_file)
    except StartupError as error:
        sys.exit(f"error: {error}")
    connection = Connection(args, keys)
    worker = Worker(connection)
    try:
        with contextlib.suppress(End):
            connection.greet()
            worker.run()
    finally:
        worker.close()
        connection.close()
        warnings.simplefilter("ignore", ResourceWarning)  # the pulse stays open to the end
        gc.freeze()  # collecting torch's objects at exit would take most of a second


def _end(*_: object) -> None:
    raise End


def _handle_signals() -> None:
    """End cleanly on Ctrl-C, and end on SIGTERM even as the first process of a container.

    A KeyboardInterrupt then comes from an environment's own code, and is an error like any other.
    """
    # A shell's background jobs ignore Ctrl-C, and must go on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if os.getpid() == 1:  # the kernel sends PID 1 only the signals that it handles
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


if __name__ == "__main__":
    main()
