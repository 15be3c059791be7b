"""The directory of a configuration: a subdirectory for each attempt to run it, and result.json when
one has finished.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clusterenv_runtime.__main__ import processor

from .configurations import fill_macros, nest

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def directory_of(sweep, flat, output):
    what = json.dumps([sweep["program"], sweep["command"], nest(flat)], sort_keys=True, default=str)
    return output / hashlib.sha256(what.encode()).hexdigest()[:12]


def first_of(sweep, known, output):
    """Give each configuration's directory its index; the first index if it was drawn several times.

    `known` has the configurations by their indices, in order.
    """
    first = {}
    for index, flat in known.items():
        first.setdefault(directory_of(sweep, flat, output), index)
    return first


def result_of(directory):
    try:
        return json.loads((directory / "result.json").read_text())
    except (OSError, ValueError):
        return None


def replace(path, write):
    """Let `write` write a file and put it in place at once: another process sees all of it or
    nothing.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    write(temporary)
    temporary.replace(path)


def checkpoints(directory):
    """List the checkpoints of a configuration, those of the last attempt at the end."""
    return sorted(directory.glob("attempt-*/runs/*/checkpoint-*.pt"))


def open_log(attempt):
    """Open the log of an attempt; None if the attempt is still running, perhaps on another machine:
    it holds a lock on its log.
    """
    log = open(attempt / "log.txt", "ab")  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return log.close()
    except OSError:
        pass  # a file system without locks
    return log


def here():
    """Tell what a result depends on besides its parameters: the versions and the kind of machine,
    but not its owner.
    """
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "pyzmq", "envpool"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    with contextlib.suppress(OSError):  # no git
        command = [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty",
            "--exclude=*",
        ]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        versions |= {"commit": commit} if commit else {}
    return {"versions": versions, "machine": f"{processor()}, {os.cpu_count()} cores"}


def last_words(log):
    """Return the last line of a log, shortened; "" if the log has none."""
    with open(log, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("error: ")[:200]


def end_with_this_process():
    """Have the kernel end a run, in order, if this process is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Attempt:
    """A run of one configuration, from its last checkpoint if it has any.

    It is a process in a group of its own: a Ctrl-C goes to the sweep alone, which stops it.

    Attributes:
        flat: The configuration.
        directory: The configuration's.
        path: The attempt's own, which is below that.
    """

    def __init__(self, sweep, flat, directory):
        self.flat = flat
        self.directory = directory
        macros = fill_macros(sweep, nest(flat))
        command = [part for word in map(str, sweep["command"]) for part in macros.get(word, [word])]
        self.path = directory / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        saved, log = checkpoints(directory), None
        while saved and not log:  # the last attempt that no process runs
            last = saved.pop().parent
            if log := open_log(last.parents[1]):
                self.path = last.parents[1]
                command += ["--resume", str(last.relative_to(self.path))]
        self.path.mkdir(parents=True, exist_ok=True)
        with log or open_log(self.path) as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.path,
                # With "offline", --track, if it is in the command, needs no account.
                env={"WANDB_MODE": "offline", **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=end_with_this_process,
            )
        self._started = time.monotonic()

    @property
    def seconds(self):
        """How long it has run so far."""
        return time.monotonic() - self._started

    @property
    def status(self):
        """The exit status, None while it runs."""
        return self._process.poll()

    def stop(self):
        """Ask it to save and to end."""
        self._process.terminate()

    def kill(self):
        """End it now, with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def conclude(self):
        """Write the result of an attempt that has ended; return what went wrong, or None."""
        log = self.path / "log.txt"
        if self.status != 0:
            words = last_words(log)
            return f"ended with status {self.status}{words and ': '}{words}; see {log}"
        try:
            (summary,) = self.path.glob("runs/*/summary.json")
            summary = json.loads(summary.read_text())
        except ValueError:
            return f"left no readable runs/*/summary.json; see {log}"
        result = {"parameters": nest(self.flat), "summary": summary, "attempt": self.path.name}
        text = json.dumps({**result, **here()}, indent=2, default=str)
        return replace(self.directory / "result.json", lambda path: path.write_text(text))
