"""A configuration's directory: a subdirectory per attempt, and result.json after a finished one."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time

from experiments.machine import here

from .configurations import fill_macros, nest

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def directory_of(sweep, flat, output):
    what = json.dumps([sweep["program"], sweep["command"], nest(flat)], sort_keys=True, default=str)
    return output / hashlib.sha256(what.encode()).hexdigest()[:12]


def first_of(sweep, known, output):
    """Return the index of each configuration's directory, the first if it was drawn several times.

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
    """Write a file with `write`, and move it into place.

    Other processes see all of the file or nothing.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    write(temporary)
    temporary.replace(path)


def checkpoints(directory):
    """Return the checkpoints of a configuration, in the order of its attempts."""
    return sorted(directory.glob("attempt-*/runs/*/checkpoint-*.pt"))


def open_log(attempt):
    """Open the log of an attempt. Return None if the attempt is still running.

    A running attempt, perhaps on another machine, holds a lock on its log.
    """
    log = open(attempt / "log.txt", "ab")  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return log.close()
    except OSError:
        pass  # a file system without locks
    return log


def last_words(log):
    """Return the last line of a log, shortened, or "" if the log has none."""
    with open(log, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("error: ")[:200]


def end_with_this_process():
    """Have the kernel end a run cleanly, by SIGTERM, if this process is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Attempt:
    """A run of one configuration, which goes on from the last checkpoint if there is one.

    The run is a process in its own group, so that a Ctrl-C reaches only the sweep, which stops the
    run.

    Attributes:
        flat: The configuration.
        directory: The configuration's directory.
        path: The attempt's own directory, inside the configuration's.
    """

    def __init__(self, sweep, flat, directory):
        self.flat = flat
        self.directory = directory
        macros = fill_macros(sweep, nest(flat))
        command = [part for word in map(str, sweep["command"]) for part in macros.get(word, [word])]
        self.path = directory / f"attempt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        saved, log = checkpoints(directory), None
        while saved and not log:  # resume the last attempt that no process runs
            last = saved.pop().parent
            if log := open_log(last.parents[1]):
                self.path = last.parents[1]
                command += ["--resume", str(last.relative_to(self.path))]
        self.path.mkdir(parents=True, exist_ok=True)
        with log or open_log(self.path) as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.path,
                # With "offline", a command with --track needs no account.
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
        """The seconds that the run has taken so far."""
        return time.monotonic() - self._started

    @property
    def status(self):
        """The run's exit status, or None while it is running."""
        return self._process.poll()

    def stop(self):
        """Ask the run to save and to end."""
        self._process.terminate()

    def kill(self):
        """Kill the run, with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def conclude(self):
        """Write the result of an attempt that has ended. Return what went wrong, or None."""
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
