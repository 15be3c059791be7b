"""A process that stands by: it has imported what takes long, and waits to be told which worker it is."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from collections.abc import Iterable

from ..launchers.processes import LOG_FLAGS


def wait_for_arguments(modules: Iterable[str]) -> list[str]:
    """Import these, and return a worker's arguments once the launcher has written them to stdin.

    From then on this process is like one that was started with them. It ends if nothing comes: stdin closes with the
    head, however that ends, unless the head has forked a process, which then has the other end, too.
    """
    parent = os.getppid()
    for module in modules:
        importlib.import_module(module)
    while not select.select([0], [], [], 1.0)[0]:
        if os.getppid() != parent:
            sys.exit()
    if not (line := sys.stdin.readline()).endswith("\n"):
        sys.exit()
    log, *arguments = json.loads(line)
    _replace(0, os.devnull, os.O_RDONLY)
    if log is not None:
        _replace(1, log, LOG_FLAGS)
        os.dup2(1, 2)
    sys.argv[1:] = arguments
    return arguments


def _replace(descriptor: int, path: str, flags: int) -> None:
    """Open a file in place of another."""
    file = os.open(path, flags, 0o666)
    os.dup2(file, descriptor)
    os.close(file)
