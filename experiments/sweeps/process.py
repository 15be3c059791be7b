"""The process that runs a configuration, and the files in the configuration's directory."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..machine import here
from .sweep import Sweep


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
        self.directory = directory
        command = sweep.words(configuration, sys.executable, str(Path(sweep.program).resolve()))
        for saved in sorted(directory.glob("runs/*/checkpoint-*.pt"))[-1:]:
            command += ["--resume", str(saved.parent.relative_to(directory))]
        directory.mkdir(exist_ok=True)
        self._log = open(directory / "log.txt", "ab")  # noqa: SIM115
        fcntl.flock(self._log, fcntl.LOCK_EX)
        super().__init__(
            command,
            cwd=directory,
            # With "offline", a command with --track needs no account.
            env={"WANDB_MODE": "offline", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
            # The kernel ends a run cleanly if this process has ended: PR_SET_PDEATHSIG is 1.
            preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM),
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
            text = (self.directory / "log.txt").read_text(errors="replace")
            words = text.strip().rpartition("\n")[2].removeprefix("error: ")
            return f"ended with status {self.returncode}: {words[:200]}"
        try:
            path = max(self.directory.glob("runs/*/summary.json"), key=os.path.getmtime)
            summary = json.loads(path.read_text())
        except ValueError:
            return "left no readable runs/*/summary.json"
        result = {**summary, **here(), "run": str(path.parent.relative_to(self.directory))}
        (self.directory / "result.json").write_text(json.dumps(result, indent=2))
        return ""
