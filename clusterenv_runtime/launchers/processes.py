"""All that a worker's environments have started, wherever it has gone.

A process group does not hold what leaves it, and parents are forgotten when they die. But a process
inherits the environment variables that its parent began with, so there a worker carries a mark.
Only Linux shows them: elsewhere, nothing is found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path

VARIABLE = "CLUSTERENV_WORKER"


def kill_marked(mark: str) -> bool:
    """Kill the processes, but not this one, whose mark begins so; return whether there were any
    that had not ended.

    If that cannot be seen, as too many files are open, there may have been.
    """
    found, start = False, f"\0{VARIABLE}={mark}".encode()
    try:
        names = os.listdir("/proc")
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    for pid in map(int, filter(str.isdecimal, names)):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if start in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                found = True
    return found
