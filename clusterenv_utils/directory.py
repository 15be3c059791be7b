"""The directory of a run: its lock, its checkpoints, and the parts that these hold."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from clusterenv_runtime.errors import CheckpointError, RunLockedError, one_line

from .checkpoint import check_run, load_checkpoint, load_part
from .checks import check, one_line_for
from .model import is_finite

logger = logging.getLogger(__name__)
_FLOCK = "hhqqi"  # the C struct flock: type, whence, start, length, pid


class RunDirectory:
    """A run's directory, which one process uses at a time, and the parts that its checkpoints hold.

    Attributes:
        path: ``runs/NAME``.
        saved: the checkpoint to resume from, or an empty dict.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.saved: dict[str, Any] = {}
        self._is_new = False
        self.parts: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return os.path.relpath(self.path, "runs")

    def load(self, locks: bool = True) -> None:
        """Lock the directory and load its newest checkpoint, or exit with a one-line error."""
        with (
            one_line_for(OSError, text=f"cannot write to {self.path}"),
            one_line_for(CheckpointError, RunLockedError),
        ):
            # Lock first, because the lock's holder may be about to write the next checkpoint.
            if locks and os.path.isdir(self.path):
                lock(self.path)
            saved = load_checkpoint(self.path)
            check_run(saved)
        self.saved = saved

    def make(self, may_exist: bool) -> None:
        """Create and lock the directory, which no two runs share, or exit with a one-line error."""
        is_resumed = bool(self.saved)
        with (
            one_line_for(OSError, text=f"cannot write to {self.path}"),
            one_line_for(RunLockedError),
        ):
            self._is_new = not os.path.exists(self.path)
            os.makedirs(self.path, exist_ok=is_resumed or may_exist)
            lock(self.path)
        has_begun = any(name.startswith("checkpoint-") for name in os.listdir(self.path))
        to_go_on = f"to resume it: --resume {self.path}, otherwise choose another --run-name"
        check(is_resumed or not has_begun, f"{self.path} has already begun; {to_go_on}")

    def remove(self) -> None:
        """Remove the directory, if `make` created it."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # the parent directory holds other runs
                os.rmdir(os.path.dirname(self.path))

    def keep(self, name: str, part: Any) -> None:
        """Have checkpoints hold the state of a part, and load its state from `saved`, if any."""
        if name in self.parts:
            raise ValueError(f"there is a part {name!r} already")
        self.parts[name] = part
        if self.saved:
            parts = self.saved["parts"]
            of_another = f"{self.path} is from another version of this script"
            check(name in parts, f"{of_another}: it has no {name!r}")
            self.restore(name, lambda: load_part(part, parts[name]))

    def restore(self, name: str, load: Callable[[], object]) -> None:
        """Load a piece of `saved`, which anyone may have made, or exit with a one-line error."""
        try:
            load()
        except Exception as error:
            why = f"its {name!r} does not fit: {one_line(error)}"
            check(False, f"{self.path} cannot be resumed: {why}")

    def state_dicts(self) -> dict[str, Any]:
        """Return the state of each kept part, by name.

        Raises:
            CheckpointError: the weights are not finite, so no run could resume from them.
        """
        for part in self.parts.values():
            if isinstance(part, torch.nn.Module) and not is_finite(part):
                raise CheckpointError("the weights are not finite")
        return {name: part.state_dict() for name, part in self.parts.items()}


def holder_of(directory: str | os.PathLike[str]) -> str:
    """Return which process has locked the run in ``directory``; empty if none has.

    Raises:
        OSError: the lock cannot be queried.
    """
    path = os.path.join(directory, "lock")
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        # Linux returns the lock that conflicts with a lock on the whole file.
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return "" if kind == fcntl.F_UNLCK else file.read(1000).decode(errors="replace")


def check_exists(directory: str) -> None:
    """Exit with a one-line error if there is no such run. The error names the runs that exist."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(os.path.abspath(directory))
    names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    there = [name for name in names if os.path.isdir(f"{parent}/{name}")]
    listed = ", ".join(there[:10]) + ", ..." * (len(there) > 10) or "none"
    check(False, f"there is no run {directory}; existing runs: {listed}")


def lock(directory: str | os.PathLike[str]) -> None:
    """Keep other processes from training the run in ``directory`` until this process ends.

    The file ``lock`` there names this process, and remains. Locking again changes nothing.

    Raises:
        RunLockedError: another process, here or on a machine that shares the directory, trains the
            run.
        OSError: the file cannot be written.
    """
    # The file stays open. The lock belongs to the process, so children do not inherit it. With
    # flock it would belong to the descriptor. Through a link another file would be emptied.
    file = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        who = os.read(file, 1000).decode(errors="replace") or "another process"
        raise RunLockedError(f"{directory} is being trained by {who}") from None
    except OSError as error:
        text = "cannot keep other processes from training %s: %s"
        logger.warning(text, directory, error.strerror)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
