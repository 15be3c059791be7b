"""Checkpoints and models: whole files or none, one process for each run, and only plain data.

A checkpoint is a file ``checkpoint-STEP.pt`` that `torch.save` writes. A model is a file
``EXP_NAME.cleanrl_model``, from which another program can use what a run has trained.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import socket
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import numpy as np
import torch

from .arguments import ScriptArgs
from .errors import CheckpointError, RunLockedError

logger = logging.getLogger(__name__)
KEPT = 2  # the newest checkpoints, in case the last one is damaged
PLAIN = bool, int, float, str, bytes
_NAME = re.compile(r"checkpoint-(\d+)\.pt")


class State(msgspec.Struct):
    """The content of a run's checkpoint."""

    args: dict[str, Any]
    parts: dict[str, Any]
    rng: dict[str, Any]
    global_step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    waiting: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    wandb_id: str | None


class Counters(SimpleNamespace):
    """A script's own numbers, for `Run.keep`: ``Counters(gradient_steps=0)``."""

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint holds no numbers of NumPy, such as a sum of rewards.
        held = vars(self).items()
        return {name: kept.item() if isinstance(kept, np.generic) else kept for name, kept in held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_checkpoint(directory: str | os.PathLike[str], state: dict[str, Any], step: int) -> None:
    """Write ``state`` as a checkpoint, and keep the one before it.

    Whenever this process or its machine dies, the directory holds the previous checkpoint or this
    one. This checkpoint replaces those of later steps.

    Raises:
        TypeError: the state holds something other than tensors, plain values, and their containers.
        OSError: the checkpoint cannot be written.
    """
    _check_plain(state, "state")
    path = Path(directory, f"checkpoint-{step:012d}.pt")
    with replaced(path) as file:
        dump(state, file)
    others = [other for other in _checkpoints(directory) if other != path]
    later = [other for other in others if other > path]
    for other in later + [each for each in others if each < path][KEPT - 1 :]:
        try:
            other.unlink(missing_ok=True)
        except OSError as error:  # the new checkpoint is complete even if an old one stays
            logger.warning("cannot remove the old checkpoint %s: %s", other, error.strerror)


def load_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the newest undamaged state in ``directory``, with its tensors on the CPU.

    The run may be training, and may replace its checkpoints during the call.

    Raises:
        CheckpointError: there is no such run, or it has no undamaged checkpoint.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"there is no run {directory}")
    passed: set[tuple[Path, int]] = set()
    while True:  # list again after each failure, because a live run may have saved
        found = [(path, _written(path)) for path in _checkpoints(directory)]
        path, written = next((each for each in found if each not in passed), (None, 0))
        if path is None:
            damaged = f"all {len(found)} checkpoints in {directory} are damaged"
            raise CheckpointError(damaged if found else f"there is no checkpoint in {directory}")
        passed.add((path, written))
        try:
            return cast(dict[str, Any], load(path))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                continue  # the run has removed it, because there is a newer one
            problem = error.strerror
        except Exception as error:  # of any kind; a stranger's file can choose the text
            problem = f"it is damaged, or not a checkpoint ({type(error).__name__})"
        logger.warning("skipped the checkpoint %s: %s", path, problem)


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    return os.path.isdir(directory) and bool(_checkpoints(directory))


def load(path: str | os.PathLike[str]) -> Any:
    """Return what a file of `torch.save` holds: plain data, because it may be a stranger's."""
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():  # torch itself compares no checksums
            raise zipfile.BadZipFile
    return torch.load(path, map_location="cpu", weights_only=True)


def save_model(directory: str, state: dict[str, Any], args: ScriptArgs, kind: str = "") -> None:
    """Write a model: its ``state_dict``, the run's flags, and the name of the script's file.

    ``kind`` is part of the file's name: ``.best``, or empty for the last model.

    Raises:
        OSError: the file cannot be written. The previous file stays.
    """
    saved = {"model": state, "args": asdict(args), "script": os.path.basename(sys.argv[0])}
    with replaced(f"{directory}/{args.exp_name}{kind}.cleanrl_model") as file:
        dump(saved, file)


def is_finite(model: torch.nn.Module) -> bool:
    """Return whether all weights of a model are finite. Its buffers may be masks of infinities."""
    return all(bool(weight.isfinite().all()) for weight in model.parameters())


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` after this block, when all of it is on disk."""
    path = Path(path)
    # The next file replaces what a killed process has left.
    temporary = path.with_name("checkpoint.tmp" if path.suffix == ".pt" else f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # "x" follows no link, which would overwrite a file
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)  # frees its space, because the disk may be full
        raise
    temporary.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Telling:
    """A file that remembers its error, which torch turns into a RuntimeError without the reason."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.flush = file, file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def dump(state: dict[str, Any], file: BinaryIO) -> None:
    """Write a state to a file. Raises OSError if that fails."""
    telling = _Telling(file)
    try:
        torch.save(state, cast(BinaryIO, telling))
    except RuntimeError as error:
        raise telling.error or error from None


def _check_plain(value: Any, where: str) -> None:
    """Raise TypeError if `load` would refuse the value."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) is bytes and not value:
        raise TypeError(f"a checkpoint cannot hold {where}: torch does not load empty bytes")
    elif not isinstance(value, torch.Tensor | None) and type(value) not in PLAIN:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"a checkpoint cannot hold {where}, which is a {kind}")


def _checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a directory, newest first."""
    paths = [Path(directory, name) for name in os.listdir(directory) if _NAME.fullmatch(name)]
    return sorted((path for path in paths if path.is_file()), reverse=True)


def _written(path: Path) -> int:
    """Return when a file was written, in nanoseconds; 0 if a live run has removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def lock(directory: str | os.PathLike[str]) -> None:
    """Keep other processes from training the run in ``directory`` until this process ends.

    The file ``lock`` there names this process, and remains. Locking again changes nothing.

    Raises:
        RunLockedError: another process, here or on a machine that shares the directory, trains the
            run.
        OSError: the file cannot be written.
    """
    # The lock belongs to the process, so children do not inherit it, and it is gone as soon as this
    # process closes any descriptor of the file: so none is closed here, also not one that failed.
    # Through a link another file would be emptied.
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


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's, and on each device torch's random numbers."""
    name, keys, *rest = cast(Any, np.random.get_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = [name, keys.tolist(), *rest]
    states = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    return {**states, "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned, on the devices that exist here."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
            torch.cuda.set_rng_state(cuda, device)
