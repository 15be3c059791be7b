"""The workers' commands, which --dry-run prints."""

from __future__ import annotations

import os
import shlex
from typing import NoReturn

import zmq

from clusterenv_runtime.head.transport import listening_address

from .arguments import ScriptArgs
from .errors import one_line_for
from .progress import say


def show_workers(args: ScriptArgs, log_dir: str) -> NoReturn:
    """Print the workers' commands, one per line, and end the process."""
    say("\n".join(worker_commands(args, log_dir)))
    raise SystemExit


def worker_commands(args: ScriptArgs, log_dir: str) -> list[str]:
    """Return the workers' commands.

    PORT stands for a random port, and KEYS for the directory that the head creates where the
    launcher wants it.
    """
    launcher = args.make_launcher(log_dir)
    keys, address = os.path.join(launcher.directory or "", "KEYS"), args.check(launcher)
    if args.bind_address:  # it may be the name of an interface
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            probe.ipv6 = ":" in args.bind_address
            with one_line_for(zmq.ZMQError, text=f"--bind-address {args.bind_address}"):
                probe.bind(listening_address(args.bind_address, "*", keys))
            address = probe.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")[0]
            address = address.strip("[]")
    key_file = f"{keys}/key" if address else None
    address = listening_address(address, args.port or "PORT", keys)
    launcher.prepare(args.num_workers, args.worker_flags(launcher, address, key_file), keys)
    variables = [f"{name}={value}" for name, value in launcher.variables().items()]
    before = ["env", *variables] if variables else []
    indices = range(args.num_workers)
    commands = [shlex.join([*before, *launcher.command(index)]) for index in indices]
    if args.eval_interval is not None:
        commands += worker_commands(args.of_evaluation, f"{log_dir}/evaluation")
    return commands
