"""The directory of a run: its lock, its checkpoints, and what else it holds of the run's parts."""

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

from ..errors import CheckpointError, RunLockedError, one_line
from .checkpoint import check_run, load_checkpoint, load_part
from .checks import check, one_line_for
from .model import is_finite

logger = logging.getLogger(__name__)
_FLOCK = "hhqqi"  # the C library's: kind, whence, start, length, pid


class RunDirectory:
    """A run's directory, for one process at a time, and the parts that its checkpoints hold.

    Attributes:
        path: ``runs/NAME``.
        saved: the checkpoint to go on from, or an empty dict.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.saved: dict[str, Any] = {}
        self._is_new = False
        self._parts: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return os.path.relpath(self.path, "runs")

    def load(self, locks: bool = True) -> None:
        """Lock it and load its newest checkpoint, or exit with one line."""
        with (
            one_line_for(OSError, text=f"cannot write to {self.path}"),
            one_line_for(CheckpointError, RunLockedError),
        ):
            # First the lock: whoever has it may be about to write the next checkpoint.
            if locks and os.path.isdir(self.path):
                lock(self.path)
            saved = load_checkpoint(self.path)
            check_run(saved)
        self.saved = saved

    def make(self, may_exist: bool) -> None:
        """Make and lock it, or exit with one line: two runs never share one."""
        is_resumed = bool(self.saved)
        with (
            one_line_for(OSError, text=f"cannot write to {self.path}"),
            one_line_for(RunLockedError),
        ):
            self._is_new = not os.path.exists(self.path)
            os.makedirs(self.path, exist_ok=is_resumed or may_exist)
            lock(self.path)
        has_begun = any(name.startswith("checkpoint-") for name in os.listdir(self.path))
        to_go_on = f"to go on: --resume {self.path}, else another --run-name"
        check(is_resumed or not has_begun, f"{self.path} has begun already; {to_go_on}")

    def remove(self) -> None:
        """Remove it, if `make` has made it."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # other runs are there
                os.rmdir(os.path.dirname(self.path))

    def keep(self, name: str, part: Any) -> None:
        """Have checkpoints hold the state of a part, and load that of `saved`, if there is one."""
        if name in self._parts:
            raise ValueError(f"there is a part {name!r} already")
        self._parts[name] = part
        if self.saved:
            parts = self.saved["parts"]
            of_another = f"{self.path} is of another version of this script"
            check(name in parts, f"{of_another}: it has no {name!r}")
            self.restore(name, lambda: load_part(part, parts[name]))

    def restore(self, name: str, load: Callable[[], object]) -> None:
        """Load something of `saved`, or exit with one line: a stranger may have made it."""
        try:
            load()
        except Exception as error:
            why = f"its {name!r} does not fit: {one_line(error)}"
            check(False, f"{self.path} cannot be resumed: {why}")

    def state_dicts(self) -> dict[str, Any]:
        """Return the state of each part that is kept, by its name.

        Raises:
            CheckpointError: nobody could go on from these weights.
        """
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module) and not is_finite(part):
                raise CheckpointError("the weights are not finite")
        return {name: part.state_dict() for name, part in self._parts.items()}


def holder_of(directory: str | os.PathLike[str]) -> str:
    """Return who has locked the run in ``directory``; an empty text if nobody has, any more.

    Raises:
        OSError: it cannot be found out.
    """
    path = os.path.join(directory, "lock")
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        # What Linux says of the lock in the way of another one, of the whole file.
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return "" if kind == fcntl.F_UNLCK else file.read(1000).decode(errors="replace")


def check_exists(directory: str) -> None:
    """Exit with one line if there is no such directory; it names those that there are."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(os.path.abspath(directory))
    names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    there = [name for name in names if os.path.isdir(f"{parent}/{name}")]
    listed = ", ".join(there[:10]) + ", ..." * (len(there) > 10) or "none"
    check(False, f"there is no run {directory}; there: {listed}")


def lock(directory: str | os.PathLike[str]) -> None:
    """Keep other processes from training the run in ``directory`` until this process ends.

    The file ``lock`` there names this process, and stays. To lock once more changes nothing.

    Raises:
        RunLockedError: another process, here or on a machine that shares the directory, trains it.
        OSError: the file cannot be written.
    """
    # The file stays open. The lock belongs to the process and not to the descriptor, as it would
    # with flock, so its children have no part in it. Through a link another file would be emptied.
    file = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        who = os.read(file, 1000).decode(errors="replace") or "another process"
        raise RunLockedError(f"{directory} is being trained by {who}") from None
    except OSError as error:
        text = "no other process may train %s, but that cannot be ensured: %s"
        logger.warning(text, directory, error.strerror)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
