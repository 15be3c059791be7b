"""All that a worker's environments have started, wherever it has gone.

A process group does not hold what leaves it, and parents are forgotten when they die. But a process inherits the
environment variables that its parent began with, so there a worker carries a mark. Only Linux shows them: elsewhere,
nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

VARIABLE = "CLUSTERENV_WORKER"


def kill_marked(mark: str) -> bool:
    """Kill the processes, but not this one, whose mark begins so; return whether there were any that had not ended."""
    found, start = False, f"\0{VARIABLE}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if start in b"\0" + (directory / "environ").read_bytes() and int(directory.name) != os.getpid():
                os.kill(int(directory.name), signal.SIGKILL)
                found = True
    return found
