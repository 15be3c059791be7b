"""Checkpoints of a training script: written whole or not at all, never unpickled freely.

A checkpoint is a file of `torch.save` whose name holds its step and its SHA-256:
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

from ..errors import CheckpointError

logger = logging.getLogger(__name__)
PLAIN = bool, int, float, str, bytes
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{64})\.pt")


class _Entry(NamedTuple):
    """A file with a checkpoint's name."""

    step: int
    time: int  # when it was written, in nanoseconds; 0 if it has been removed meanwhile
    path: Path
    digest: str


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
    path = directory / f"checkpoint-{step:012d}-{digest}.pt"
    temporary.replace(path)
    _fsync(directory)
    others = [entry for entry in _checkpoints(directory) if entry.path != path]
    replaced_by_it = [entry for entry in others if entry.step >= step]
    before_it = [entry for entry in others if entry.step < step]
    for entry in replaced_by_it + before_it[1:]:
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:  # the new one is there, whatever keeps an old one
            logger.warning("cannot remove the old checkpoint %s: %s", entry.path, error.strerror)


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
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:  # not through a link, which would overwrite another file
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
    passed = set[_Entry]()
    while True:  # the directory is read anew after each failure, as a live run may have saved
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
            problem = "it is not as it was written"
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                continue  # the run has removed it, as there is a newer one
            problem = error.strerror
        except Exception as error:  # whatever somebody's file makes torch raise, with its own words
            problem = f"it is not of a run ({type(error).__name__})"
        logger.warning("skipped the checkpoint %s: %s", entry.path, problem)


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    return os.path.isdir(directory) and bool(_checkpoints(Path(directory)))


class _State(msgspec.Struct):
    """What all checkpoints hold; see `Run.save`."""

    args: dict[str, Any]
    parts: dict[str, Any]
    rng: dict[str, Any]
    global_step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    wandb_id: str | None
    waiting: Annotated[float, msgspec.Meta(ge=0, lt=2**53)] = 0.0


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
    """Raise ValueError if this is not its ``state_dict``. Torch checks little, and with fused
    kernels writes beyond.
    """
    fresh = copy.deepcopy(optimizer)
    for group in fresh.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    fresh.step()  # so that it has all that it keeps
    expected = fresh.state_dict()
    # Of parameters that have had no gradient it has kept nothing.
    expected["state"] = {
        key: kept for key, kept in expected["state"].items() if key in state["state"]
    }
    if _form(state) != _form(expected):
        raise ValueError("its state is not what an optimizer of these parameters has")


def _form(tree: Any) -> Any:
    """Return what must fit in a tree: its keys, types, and its tensors' shapes and dtypes."""
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
    """Return the files with a checkpoint's name in ``directory``, the newest first."""
    found = []
    for name in os.listdir(directory):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        path = directory / name
        time = 0
        with suppress(FileNotFoundError):  # a live run has removed it since
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
    """Return the states of this process's random number generators: Python's, NumPy's, and torch's
    on each device.
    """
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = [name, keys.tolist(), *rest]
    states = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    return {**states, "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`, on those of its devices that there are."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
            torch.cuda.set_rng_state(cuda, device)
