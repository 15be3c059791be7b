"""Checkpoints of a training script: written completely or not at all, and unpickled as plain data.

A checkpoint is a file that `torch.save` writes. Its name holds its step and its SHA-256:
``checkpoint-STEP-DIGEST.pt``.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import logging
import os
import random
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import torch

from clusterenv_runtime.errors import CheckpointError

logger = logging.getLogger(__name__)
PLAIN = bool, int, float, str, bytes
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{64})\.pt")


class _Entry(NamedTuple):
    """A file that is named like a checkpoint."""

    step: int
    time: int  # time of the last write, in nanoseconds; 0 if the file has been removed
    path: Path
    digest: str


class _Hashed:
    """A writable file, with the digest of the data written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.flush = file.flush
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:  # torch turns it into a RuntimeError without the reason
            self.error = error
            raise


class Counters(SimpleNamespace):
    """A script's own numbers, for `Run.keep`.

    ``Counters(gradient_steps=0)`` has an attribute ``gradient_steps``.
    """

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint holds no numbers of NumPy, such as a sum of rewards.
        held = vars(self).items()
        return {name: kept.item() if isinstance(kept, np.generic) else kept for name, kept in held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_checkpoint(directory: str | os.PathLike[str], state: dict[str, Any], step: int) -> None:
    """Write ``state`` as a checkpoint, and keep the last two checkpoints.

    ``state`` consists of tensors, numbers, strings, bytes, None, and containers of these types.
    Whenever this process or its machine dies, the directory holds the previous checkpoint or this
    one. This checkpoint replaces any of the same ``step`` or of later steps.

    Raises:
        TypeError: ``state`` holds something that `load_checkpoint` would refuse.
        OSError: the checkpoint cannot be written.
    """
    _check(state, "state")
    directory = Path(directory)
    temporary = directory / "checkpoint.tmp"  # the next save replaces what a killed process left
    with _on_disk(temporary) as file:
        digest = dump(state, file)
    path = directory / f"checkpoint-{step:012d}-{digest}.pt"
    temporary.replace(path)
    _fsync(directory)
    others = [entry for entry in _checkpoints(directory) if entry.path != path]
    replaced_by_it = [entry for entry in others if entry.step >= step]
    before_it = [entry for entry in others if entry.step < step]
    for entry in replaced_by_it + before_it[1:]:
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:  # the new checkpoint is complete even if an old one stays
            logger.warning("cannot remove the old checkpoint %s: %s", entry.path, error.strerror)


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Turn an OSError in this block into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.strerror or error) from None


@contextmanager
def replaced(path: str, syncs: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` after this block, when all of it is on disk.

    Without ``syncs`` the file does not wait for the disk, and may be empty after the machine
    crashes.
    """
    temporary = Path(f"{path}.tmp")
    with _on_disk(temporary, syncs) as file:
        yield file
    temporary.replace(path)


@contextmanager
def _on_disk(path: Path, syncs: bool = True) -> Iterator[BinaryIO]:
    """Open a new file. After this block it is all on disk, or removed if an error occurred."""
    try:
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:  # "x" follows no link, which would overwrite another file
            yield file
            file.flush()
            if syncs:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # frees its space, because the disk may be full
        raise


def dump(state: dict[str, Any], file: BinaryIO) -> str:
    """Write a state to a file, and return the SHA-256 of the data written.

    Raises:
        OSError: the file cannot be written.
    """
    hashed = _Hashed(file)
    try:
        torch.save(state, hashed)
    except RuntimeError as error:
        raise hashed.error or error from None
    return hashed.digest.hexdigest()


def load_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the newest undamaged state in ``directory``, with its tensors on the CPU.

    The run may be training, and may replace its checkpoints during the call.

    Raises:
        CheckpointError: there is no such run, or it has no undamaged checkpoint.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"there is no run {directory}")
    passed = set[_Entry]()
    while True:  # list again after each failure, because a live run may have saved
        entries = _checkpoints(Path(directory))
        entry = next((entry for entry in entries if entry not in passed), None)
        if entry is None:
            damaged = f"all {len(entries)} checkpoints in {directory} are damaged"
            raise CheckpointError(damaged if entries else f"there is no checkpoint in {directory}")
        passed.add(entry)
        try:
            with open(entry.path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == entry.digest:
                    file.seek(0)
                    return torch.load(file, map_location="cpu", weights_only=True)
            problem = "it is damaged"
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                continue  # the run has removed it, because there is a newer one
            problem = error.strerror
        except Exception as error:  # of any kind; a stranger's file can choose the text
            problem = f"it is not a run's checkpoint ({type(error).__name__})"
        logger.warning("skipped the checkpoint %s: %s", entry.path, problem)


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    return os.path.isdir(directory) and bool(_checkpoints(Path(directory)))


class _State(msgspec.Struct):
    """The content of every checkpoint; see `Run.save`."""

    args: dict[str, Any]
    parts: dict[str, Any]
    rng: dict[str, Any]
    global_step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    wandb_id: str | None
    waiting: Annotated[float, msgspec.Meta(ge=0, lt=2**53)] = 0.0


def check_run(state: Any) -> None:
    """Raise CheckpointError if a state is not one that `Run` saves. The parts check themselves."""
    try:
        msgspec.convert(state, _State)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"it is not a run's checkpoint: {error}") from None


def load_part(part: Any, state: dict[str, Any]) -> None:
    """Restore a part of a run from its ``state_dict``, which anyone may have made.

    Raises:
        Exception: the state does not fit the part. The type depends on the part.
    """
    if isinstance(part, torch.optim.Optimizer):
        _check_optimizer(part, state)
    part.load_state_dict(state)


def _check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise ValueError if ``state`` cannot be a ``state_dict`` of this optimizer.

    Torch checks little, and its fused kernels would write out of bounds.
    """
    fresh = copy.deepcopy(optimizer)
    for group in fresh.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    fresh.step()  # so that it has all of its state
    expected = fresh.state_dict()
    # The saved optimizer has no state for parameters that have had no gradient.
    expected["state"] = {
        key: kept for key, kept in expected["state"].items() if key in state["state"]
    }
    if _form(state) != _form(expected):
        raise ValueError("its state does not match an optimizer of these parameters")


def _form(tree: Any) -> Any:
    """Return a tree's form: its keys and types, and its tensors' shapes, dtypes and contiguity."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.is_contiguous()
    if isinstance(tree, dict):
        return {key: _form(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [_form(item) for item in tree]
    return type(tree)


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check(key, f"a key of {where}")
            _check(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif type(value) is bytes and not value:
        raise TypeError(f"a checkpoint cannot hold {where}: torch does not load empty bytes")
    elif not isinstance(value, torch.Tensor | None) and type(value) not in PLAIN:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"a checkpoint cannot hold {where}, which is a {kind}")


def _checkpoints(directory: Path) -> list[_Entry]:
    """Return the files in ``directory`` that are named like checkpoints, newest first."""
    found = []
    for name in os.listdir(directory):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        path = directory / name
        time = 0
        with suppress(FileNotFoundError):  # a live run may have removed it
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                continue
            time = info.st_mtime_ns
        found.append(_Entry(int(match[1]), time, path, match[2]))
    return sorted(found, reverse=True)


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rng_state() -> dict[str, Any]:
    """Return the states of this process's random number generators.

    They are Python's, NumPy's, and torch's on each device.
    """
    name, keys, *rest = np.random.get_state()
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
