"""Whether a process has ended; and the processes that a worker's environments have started,
wherever they have gone.

A process can leave its group, and the system forgets a parent that has died. But each process
inherits the environment variables of its parent, and a worker's variables hold a mark. Only Linux
shows the variables of a process. Elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from pathlib import Path

VARIABLE = "CLUSTERENV_WORKER"


def has_ended(process: int, timeout: float = 0.0) -> bool:
    """Wait for up to ``timeout`` seconds until a process has ended, by its descriptor."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def kill_marked(mark: str) -> bool:
    """Kill the processes whose mark begins so, except this one. Return whether there were any.

    True if that cannot be seen because too many files are open.
    """
    found = False
    start = f"\0{VARIABLE}={mark}".encode()
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
