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
from typing import Any

from ..errors import StartupError
from ..wire.security import read_key_file
from .connection import Connection, End
from .worker import Worker


class Output(io.FileIO):
    """Where what is printed is lost if it cannot be written: a full disk is no reason to end."""

    def write(self, data: Any) -> int:
        """Write, and say that it has worked."""
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def main() -> None:
    """Be a worker until the head says that it is enough, or is gone."""
    parser = argparse.ArgumentParser(
        prog="clusterenv_runtime.worker", description="A ClusterEnv environment worker."
    )
    parser.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS",
        help="the head's address, as ZeroMQ writes it",
    )
    parser.add_argument(
        "--index", required=True, type=int, help="which of the head's workers this is, from 0"
    )
    parser.add_argument(
        "--startup-timeout", type=float, default=60, help="seconds to try to reach the head"
    )
    parser.add_argument(
        "--head-timeout", type=float, default=30, help="seconds of a silent link before giving up"
    )
    parser.add_argument("--head-pid", type=int, help="the head's, if it is this process's parent")
    parser.add_argument(
        "--head-directory", metavar="DIR", help="to remove, should that parent vanish"
    )
    parser.add_argument(
        "--key-file", metavar="FILE", help="the run's keys, for tcp; only its owner may read it"
    )
    args = parser.parse_args()
    _handle_signals()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            Output(file, "w", closefd=False), errors="backslashreplace", write_through=True
        )
        for file in (1, 2)
    )
    logging.basicConfig(format=f"worker {args.index}: %(message)s")
    try:
        keys = None if args.key_file is None else read_key_file(args.key_file)
    except StartupError as error:
        sys.exit(f"error: {error}")
    connection = Connection(
        args.connect,
        keys,
        args.startup_timeout,
        args.head_timeout,
        args.head_pid,
        args.head_directory,
    )
    worker = Worker(connection)
    try:
        with contextlib.suppress(End):
            connection.greet(args.index)
            worker.run()
    finally:
        worker.close()
        connection.close()
        gc.freeze()  # this process ends: to collect what torch has made would take most of a second


def _handle_signals() -> None:
    """End in order at Ctrl-C, and at SIGTERM even as the first process of a container."""

    def end(
        *_: object,
    ) -> None:  # so that a KeyboardInterrupt is an environment's, and an error like any other
        raise End

    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else it is ignored, as by a shell's jobs
        signal.signal(signal.SIGINT, end)
    if os.getpid() == 1:  # the kernel spares it what it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


if __name__ == "__main__":
    main()
