"""Checkpoints of a training script: written whole or not at all, never unpickled freely.

A checkpoint is a file of `torch.save` whose name holds its step and its SHA-256:
``checkpoint-STEP-DIGEST.pt``.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch

from ..errors import CheckpointError
from ..options import NotNegative, NotNegativeNumber

logger = logging.getLogger(__name__)
PLAIN = bool, int, float, str, bytes


class _Hashed:
    """A file to write to, and the digest of what was written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.flush = file.flush
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:  # torch would make a RuntimeError of it, without the reason
            self.error = error
            raise


class Counters(SimpleNamespace):
    """A script's own numbers, for `Run.keep`: ``Counters(gradient_steps=0)`` has an attribute
    ``gradient_steps``.
    """

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def save_checkpoint(directory: str | os.PathLike[str], state: dict[str, Any], step: int) -> None:
    """Write ``state``, of tensors, numbers, strings, bytes, None and containers of these, and keep
    the last two.

    Whenever this process or its machine dies, the directory holds the checkpoint before this one,
    or this one. Any of this ``step`` or of later ones gives way to it.

    Raises:
        TypeError: there is something else in ``state``, which `load_checkpoint` would refuse.
        OSError: it cannot be written.
    """
    _check(state, "state")
    directory = Path(directory)
    temporary = directory / "checkpoint.tmp"  # the next one overwrites what a killed process left
    with _on_disk(temporary) as file:
        digest = dump(state, file)
    name = f"checkpoint-{step:012d}"
    path = directory / f"{name}-{digest}.pt"
    temporary.replace(path)
    _fsync(directory)
    found = _checkpoints(directory)
    before_it = [other for other in found if other.name < name]
    for other in set(found) - {path, *before_it[:1]}:
        try:
            other.unlink(missing_ok=True)
        except OSError as error:  # the new one is there, whatever keeps an old one
            logger.warning("cannot remove the old checkpoint %s: %s", other, error.strerror)


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Make a `CheckpointError` of an error of the disk."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(error.strerror or error) from None


@contextmanager
def replaced(path: str, syncs: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` after this block, when all of it is on disk.

    Without ``syncs`` it does not wait for the disk: after a crash of the machine it may be empty.
    """
    temporary = Path(f"{path}.tmp")
    with _on_disk(temporary, syncs) as file:
        yield file
    temporary.replace(path)


@contextmanager
def _on_disk(path: Path, syncs: bool = True) -> Iterator[BinaryIO]:
    """Open a new file: after this block all of it is on disk, or it is gone."""
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            if syncs:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # the disk may be full
        raise


def dump(state: dict[str, Any], file: BinaryIO) -> str:
    """Write a state, and return the SHA-256 of what was written.

    Raises:
        OSError: it cannot be written.
    """
    hashed = _Hashed(file)
    try:
        torch.save(state, hashed)
    except RuntimeError as error:
        raise hashed.error or error from None
    return hashed.digest.hexdigest()


def load_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the newest state in ``directory`` that is not damaged, with tensors on the CPU.

    The run may be alive, and replace its checkpoints meanwhile.

    Raises:
        CheckpointError: there is none.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"there is no run {directory}")
    passed: set[Path] = set()
    while left := [path for path in _checkpoints(directory) if path not in passed]:
        path = left[0]  # they are listed anew after each failure, as a live run may have saved
        passed.add(path)
        try:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == path.stem.split("-")[-1]:
                    file.seek(0)
                    return torch.load(file, map_location="cpu", weights_only=True)
            problem = "it is not as it was written"
        except FileNotFoundError:
            continue  # the run has removed it, as there is a newer one
        except OSError as error:
            problem = error.strerror
        except Exception as error:  # whatever somebody's file makes torch raise, with its own words
            problem = f"it is not of a run ({type(error).__name__})"
        logger.warning("skipped the checkpoint %s: %s", path, problem)
    damaged = f"all {len(passed)} checkpoints in {directory} are damaged"
    raise CheckpointError(damaged if passed else f"there is no checkpoint in {directory}")


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    return bool(_checkpoints(directory))


class _State(msgspec.Struct):
    """What all checkpoints hold; see `Run.save`."""

    args: dict[str, Any]
    parts: dict[str, Any]
    rng: dict[str, Any]
    global_step: NotNegative
    seconds: NotNegativeNumber
    wandb_id: str | None
    waiting: NotNegativeNumber = 0.0


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
    part.load_state_dict(state)
    if isinstance(part, torch.optim.Optimizer):
        _check_fused(part)


def _check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if fused kernels, which check nothing, would write beyond a tensor."""
    fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    for parameter in itertools.chain(*fused):
        for kept in optimizer.state.get(parameter, {}).values():
            is_number = kept is None or kept.ndim == 0
            if not is_number and (kept.shape != parameter.shape or not kept.is_contiguous()):
                raise ValueError("its state is not what an optimizer of these parameters has")


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


def _checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in ``directory``, if there is one, the newest first."""
    return sorted(Path(directory).glob("checkpoint-*-*.pt"), reverse=True)


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rng_state() -> dict[str, Any]:
    """Return the states of this process's random number generators: Python's, NumPy's, and torch's
    on each device.
    """
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = [name, keys.tolist(), *rest]
    python, own = random.getstate(), torch.get_rng_state()
    return {"python": python, "numpy": numpy, "torch": own, "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`, on those of its devices that there are."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device in range(min(torch.cuda.device_count(), len(state["cuda"]))):
            torch.cuda.set_rng_state(state["cuda"][device], device)
