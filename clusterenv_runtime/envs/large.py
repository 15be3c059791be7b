"""Large arrays of environments, each of which the head holds once for all workers."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

LARGE = 2**20  # bytes; an array of at least this size is held once for all workers
ALIGNED = 64  # bytes; each array begins at a multiple of this


class _File:
    """A file in memory, or a temporary file if the system has no files in memory.

    The file is open as long as this object lives.
    """

    def __init__(self) -> None:
        try:
            self.number = os.memfd_create("clusterenv")
        except (AttributeError, OSError):
            with tempfile.TemporaryFile() as file:
                self.number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.number)
        self._size = 0

    def add(self, data: np.ndarray) -> LargeArray:
        """Append a copy of these bytes. Return the place of the copy."""
        start = -(-self._size // ALIGNED) * ALIGNED
        self._size = start + data.nbytes
        os.ftruncate(self.number, self._size)
        with mmap.mmap(self.number, 0) as memory:
            memory[start:] = data.data
        return LargeArray(self, start, self._size)


class LargeArray(NamedTuple):
    """The place of a large array's copy: its file, and its start and end in bytes."""

    file: _File
    start: int
    end: int


class LargeArrays:
    """Copies of large arrays, one for all pickles that hold the same array."""

    def __init__(self) -> None:
        # By address and size. The array is kept, too, so that no other array can get its address.
        self._copies: dict[tuple[int, int], tuple[LargeArray, np.ndarray]] = {}
        self._file: _File | None = None

    def collector(self, copies: list[LargeArray]) -> Callable[[pickle.PickleBuffer], bool]:
        """Return a ``buffer_callback`` that adds the copy of each large array to ``copies``."""

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            data = np.frombuffer(buffer.raw(), np.uint8)
            if data.nbytes < LARGE:
                return True  # the array remains in the pickle
            key = data.ctypes.data, data.nbytes
            if key not in self._copies:
                self._file = self._file or _File()
                self._copies[key] = self._file.add(data), data
            copies.append(self._copies[key][0])
            return False

        return is_small


def contents(arrays: Sequence[LargeArray]) -> list[memoryview]:
    """Return the bytes of these arrays, which are in one file."""
    return _slices(arrays[0].file.number, [each[1:] for each in arrays]) if arrays else []


def places(arrays: Sequence[LargeArray]) -> bytes:
    """Return where other processes on this machine find these arrays; see `open_shared`."""
    path = f"/proc/{os.getpid()}/fd/{arrays[0].file.number}"
    return pickle.dumps((path, [each[1:] for each in arrays]))


def open_shared(places: Any) -> list[memoryview]:
    """Return the bytes of large arrays. Writes to them stay in this process."""
    path, slices = pickle.loads(places)
    with open(path, "rb") as file:
        return _slices(file.fileno(), slices)


def _slices(file: int, slices: Sequence[tuple[int, int]]) -> list[memoryview]:
    memory = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
    return [memory[start:end] for start, end in slices]
