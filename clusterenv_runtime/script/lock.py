"""The lock of a run's directory: one process at a time trains the run."""

from __future__ import annotations

import fcntl
import logging
import os
import socket

from ..errors import RunLockedError

logger = logging.getLogger(__name__)


def lock(directory: str | os.PathLike[str]) -> None:
    """Keep other processes from training the run in ``directory`` until this process ends, however
    it ends.

    Its file ``lock`` says who has it, and stays. To lock once more changes nothing.

    Raises:
        RunLockedError: another process, here or on a machine that shares the directory, trains it.
        OSError: the file cannot be written.
    """
    # Never closed. The lock is the process's, not the descriptor's as with flock, so no child of it
    # has a part in it. A link would have another file emptied here.
    file = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        who = os.read(file, 1000).decode(errors="replace") or "another process"
        raise RunLockedError(f"{directory} is being trained by {who}") from None
    except OSError as error:
        logger.warning(
            "no other process may train %s, but that cannot be ensured: %s",
            directory,
            error.strerror,
        )
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
