"""Checkpoints of a training script: written whole or not at all, never unpickled freely.

A checkpoint is a file of `torch.save` whose name holds its step and its SHA-256: ``checkpoint-STEP-DIGEST.pt``.
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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import torch

from ..codec import check_torch, check_twister
from ..errors import CheckpointError, one_line

logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{64})\.pt")


class _Hashed:
    """A file to write to, and the digest of what was written."""

    def __init__(self, file: Any) -> None:
        self._file, self.flush, self.digest, self.error = file, file.flush, hashlib.sha256(), None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:  # torch would make a RuntimeError of it, without the reason
            self.error = error
            raise


class Counters(SimpleNamespace):
    """A script's own numbers, for `Run.keep`: ``Counters(gradient_steps=0)`` has an attribute ``gradient_steps``."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_checkpoint(directory: str | os.PathLike[str], state: dict[str, Any], step: int) -> None:
    """Write ``state``, of tensors, numbers, strings, bytes, None and containers of these, and keep the last two.

    Whenever this process or its machine dies, the directory holds the checkpoint before this one, or this one. Any of
    this ``step`` or of later ones gives way to it.

    Raises:
        TypeError: there is something else in ``state``, which `load_checkpoint` would refuse.
        OSError: it cannot be written.
    """
    _check(state, "state")
    directory = Path(directory)
    temporary = directory / "checkpoint.tmp"  # of a process killed while it saved, too: the next one overwrites it
    with _on_disk(temporary) as file:
        digest = _dump(state, file)
    path = directory / f"checkpoint-{step:012d}-{digest}.pt"
    temporary.replace(path)
    _fsync(directory)
    earlier = [(at, other) for at, _, other in _checkpoints(directory) if other != path]
    for other in [other for at, other in earlier if at >= step] + [other for at, other in earlier if at < step][1:]:
        other.unlink()


def save_model(path: str, state: dict[str, Any]) -> None:
    """Write the ``state_dict`` of a model, whole; if that fails, what was at ``path`` stays.

    Raises:
        OSError: it cannot be written.
    """
    with replaced(path) as file:
        _dump(state, file)


@contextmanager
def replaced(path: str) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` after this block, when all of it is on disk."""
    temporary = Path(f"{path}.tmp")
    with _on_disk(temporary) as file:
        yield file
    temporary.replace(path)


@contextmanager
def _on_disk(path: Path) -> Iterator[BinaryIO]:
    """Open a new file: after this block all of it is on disk, or it is gone."""
    try:
        path.unlink(missing_ok=True)
        # Not through a link that somebody has put there: it would have another file overwritten.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # the disk may be full
        raise


def _dump(state: dict[str, Any], file: BinaryIO) -> str:
    """Write a state, and return the SHA-256 of what was written."""
    hashed = _Hashed(file)
    try:
        torch.save(state, hashed)
    except RuntimeError as error:
        raise hashed.error or error from None
    return hashed.digest.hexdigest()


def load_checkpoint(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Return the newest state in ``directory`` that is not damaged, or that of a ``step``, with tensors on the CPU.

    Raises:
        CheckpointError: there is none.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"there is no run {directory}")
    checkpoints = [each for each in _checkpoints(Path(directory)) if step in (None, each[0])]
    for _, digest, path in checkpoints:
        try:
            # A link or a pipe might never end.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is not a file")
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    file.seek(0)
                    return torch.load(file, map_location="cpu", weights_only=True)
            problem = "it is not as it was written"
        except OSError as error:
            problem = error.strerror
        except Exception as error:  # whatever somebody's file makes torch raise
            problem = f"it is not of a run: {one_line(error)}"
        logger.warning("skipped the checkpoint %s: %s", path, problem)
    damaged = f"all {len(checkpoints)} checkpoints in {directory} are damaged"
    raise CheckpointError(damaged if checkpoints else f"there is no checkpoint in {directory}")


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    return os.path.isdir(directory) and bool(_checkpoints(Path(directory)))


class _State(msgspec.Struct):
    """What all checkpoints hold; see `Run.save`."""

    args: dict[str, Any]
    parts: dict[str, Any]
    rng: dict[str, Any]
    global_step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    wandb_id: str | None


def check_run(state: Any) -> None:
    """Raise CheckpointError if a state is not what a `Run` saves; its parts check themselves."""
    try:
        msgspec.convert(state, _State)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"it is not of a run: {error}") from None


def load_part(part: Any, state: dict[str, Any]) -> None:
    """Have a part of a run go on from its ``state_dict``, which may be anybody's.

    Raises:
        Exception: it is not one of this part; whatever that raises.
    """
    if isinstance(part, torch.optim.Optimizer):
        _check_optimizer(part, state)
    part.load_state_dict(state)


def _check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise ValueError if this is not its ``state_dict``. Torch checks little, and with fused kernels writes beyond."""
    fresh = copy.deepcopy(optimizer)
    for group in fresh.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    fresh.step()  # so that it has all that it keeps
    expected = fresh.state_dict()
    # Of parameters that have had no gradient it has kept nothing.
    expected["state"] = {key: kept for key, kept in expected["state"].items() if key in state["state"]}
    _check_alike(state, expected, "state")


def _check_alike(found: Any, expected: Any, where: str) -> None:
    """Raise ValueError if two trees of dicts, lists and tuples differ in keys, types, or tensors' shapes and dtypes."""
    fits = type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        fits = fits and (found.shape, found.dtype) == (expected.shape, expected.dtype) and found.is_contiguous()
    elif isinstance(expected, dict):
        fits = fits and found.keys() == expected.keys()
    elif isinstance(expected, list | tuple):
        fits = fits and len(found) == len(expected)
    if not fits:
        raise ValueError(f"{where} is not what an optimizer of these parameters has")
    if isinstance(expected, dict | list | tuple):
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            _check_alike(found[key], expected[key], f"{where}[{key!r}]")


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check(key, f"a key of {where}")
            _check(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif type(value) is bytes and not value:
        raise TypeError(f"a checkpoint cannot hold {where}, which is empty bytes: torch would not load them")
    elif not (value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str, bytes)):
        raise TypeError(f"a checkpoint cannot hold {where}, which is a {type(value).__module__}.{type(value).__name__}")


def _checkpoints(directory: Path) -> list[tuple[int, str, Path]]:
    """Return step, digest and path of each checkpoint in ``directory``, the newest first."""
    found = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda item: (int(item[0][1]), item[1].stat().st_mtime_ns), reverse=True)
    return [(int(match[1]), match[2], path) for match, path in found]


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rng_state() -> dict[str, Any]:
    """Return the states of this process's random number generators: Python's, NumPy's, and torch's on each device."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = [name, keys.tolist(), *rest]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`, on those of its devices that there are."""
    random.setstate(state["python"])
    name, key, position, *_ = state["numpy"]
    check_twister(key, position)
    np.random.set_state(tuple(state["numpy"]))
    check_torch(state["torch"].numpy().tobytes())
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
            torch.cuda.set_rng_state(cuda, device)
