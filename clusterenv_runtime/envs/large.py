"""Large arrays of environments: the head holds each once, for all workers."""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGE = 2**20  # bytes of an array that is held once for all workers


class _File:
    """A file in memory, which grows. It is open as long as this object lives."""

    def __init__(self) -> None:
        self._number = os.memfd_create("clusterenv")
        weakref.finalize(self, os.close, self._number)
        self.path = f"/proc/{os.getpid()}/fd/{self._number}"
        self._size = 0

    def add(self, data: np.ndarray) -> tuple[mmap.mmap, int]:
        """Append a copy of some bytes; return it, and where it begins."""
        start = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._number, start + data.nbytes)
        copy = mmap.mmap(self._number, data.nbytes, offset=start)
        copy[:] = data.data
        self._size = start + data.nbytes
        return copy, start


@dataclass
class LargeArray:
    """A copy of a large array: its bytes, and where other processes of this machine find them."""

    data: mmap.mmap | bytes
    place: bytes = b""  # as `open_array` takes it; empty if the system has no files in memory
    file: _File | None = None


class LargeArrays:
    """Copies of large arrays, one for all pickles that have the same array."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], LargeArray] = {}  # by address and size
        self._file: _File | None = None

    def collector(self, copies: list[LargeArray]) -> Callable[[pickle.PickleBuffer], bool]:
        """Return a ``buffer_callback`` that adds the copy of each large array to ``copies``."""

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            data = np.frombuffer(buffer.raw(), np.uint8)
            if data.nbytes < LARGE:
                return True  # the array remains in the pickle
            key = data.ctypes.data, data.nbytes
            if key not in self._copies:
                self._copies[key] = self._copy(data)
            copies.append(self._copies[key])
            return False

        return is_small

    def _copy(self, data: np.ndarray) -> LargeArray:
        try:
            self._file = self._file or _File()
            copy, start = self._file.add(data)
        except (AttributeError, OSError):
            return LargeArray(data.tobytes())
        place = pickle.dumps((self._file.path, start, data.nbytes))
        return LargeArray(copy, place, self._file)


def open_array(place: Any) -> mmap.mmap:
    """Return the bytes of a large array. What is written to them remains in this process."""
    path, start, size = pickle.loads(place)
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
