"""Starting a Python like this one, and finding all processes that belong to a worker.

A worker's environments may start processes of their own. Such a process can leave its group, and
the system forgets a parent that has died. But each process inherits its parent's environment
variables, and a worker's variables hold a mark. Only Linux shows the variables of a process. On
other systems, no such process is found.
"""

from __future__ import annotations

import errno
import multiprocessing.process
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from . import start

VARIABLE = "CLUSTERENV_WORKER"


def current_directory() -> str | None:
    """Return the current directory, or None if it has been removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


def import_path() -> list[str]:
    """Return `sys.path` for another process, with absolute entries only.

    A relative entry may come from before this process changed its directory, so it is
    resolved against both the first and the current directory.
    """
    directories = filter(None, [multiprocessing.process.ORIGINAL_DIR, current_directory()])
    directories = list(dict.fromkeys(directories))
    path = []
    for entry in sys.path:
        if not isinstance(entry, str):  # imports skip it
            continue
        if os.path.isabs(entry):
            path.append(entry)
        else:
            path += [os.path.normpath(os.path.join(each, entry)) for each in directories]
    return path


def hash_seed() -> str:
    """Return the seed with which all workers hash strings: this process's, if it is known."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return "1" if seed in ("", "random") else seed


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a Python like this one.

    The variable `start.PATH` holds the `sys.path` of the new process.
    """
    flags = subprocess._args_from_interpreter_flags()  # as `multiprocessing` does
    for name, value in sys._xoptions.items():
        flags += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *flags, start.__file__, module, *arguments]


def kill_marked(mark: str) -> bool:
    """Kill the processes whose mark begins with ``mark``, except this one.

    Return whether there were any, or True if too many files are open to find out.
    """
    found = False
    start = f"\0{VARIABLE}={mark}".encode()
    try:
        names = os.listdir("/proc")
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    for pid in map(int, filter(str.isdecimal, names)):
        with suppress(OSError):  # the process has ended, or is another user's
            if start in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                found = True
    return found
