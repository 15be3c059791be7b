"""The process that runs a configuration, and the files in the configuration's directory."""

import csv
import ctypes
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.machine import here

from .sweep import Sweep

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def replace(path: Path, text: str) -> None:
    """Write a file, of which other processes see all or nothing."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(path, text.getvalue())


def result_of(directory: Path) -> dict[str, Any]:
    """Return the result of a configuration; empty if it has not finished."""
    try:
        return dict(json.loads((directory / "result.json").read_text()))
    except (OSError, ValueError):
        return {}


def checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("runs/*/checkpoint-*.pt"))


def is_running(directory: Path) -> bool:
    """Return whether a process, perhaps on another machine, runs a configuration."""
    with suppress(FileNotFoundError), open(directory / "log.txt") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Process(subprocess.Popen[bytes]):
    """A process that runs a configuration, from its last checkpoint if there is one.

    It has a group of its own, so that a Ctrl-C reaches only the sweep, which stops it. It and this
    object hold a lock on its log.
    """

    def __init__(self, sweep: Sweep, configuration: dict[str, Any], directory: Path) -> None:
        self.configuration = configuration
        self.directory = directory
        command = sweep.words(configuration, sys.executable, str(Path(sweep.program).resolve()))
        if saved := checkpoints(directory):
            command += ["--resume", str(saved[-1].parent.relative_to(directory))]
        directory.mkdir(exist_ok=True)
        self._log = open(directory / "log.txt", "ab")  # noqa: SIM115
        fcntl.flock(self._log, fcntl.LOCK_EX)
        self._start = self._log.tell()
        super().__init__(
            command,
            cwd=directory,
            # With "offline", a command with --track needs no account.
            env={"WANDB_MODE": "offline", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
            # The kernel ends a run cleanly if this process is killed.
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def end(self) -> None:
        """Kill what is left of the process and of those that it has started. Give up the lock."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self._log.close()

    def conclude(self) -> str:
        """Write the result of a process that has ended, or return what went wrong."""
        if self.returncode:
            text = (self.directory / "log.txt").read_bytes()[self._start :].decode(errors="replace")
            words = text.strip().rpartition("\n")[2].removeprefix("error: ")
            return f"ended with status {self.returncode}: {words[:200]}"
        found = sorted(self.directory.glob("runs/*/summary.json"), key=os.path.getmtime)
        try:
            summary = json.loads(found[-1].read_text())
        except (IndexError, ValueError):
            return "left no readable runs/*/summary.json"
        run = str(found[-1].parent.relative_to(self.directory))
        result = {"parameters": self.configuration, "summary": summary, "run": run, **here()}
        replace(self.directory / "result.json", json.dumps(result, indent=2, default=str))
        return ""
