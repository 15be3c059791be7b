"""Conversion of arrays to a message's buffers, and back.

Both sides go through the same arrays in the same order, so messages carry no offsets of arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ProtocolError

MAX_FRAME = 2**18  # bytes in one frame to the head; a stranger's handshake may have as many
SMALL = 2**16  # bytes; smaller arrays share frames, because a frame costs several microseconds
ALIGNMENT = 8  # bytes; arrays in a shared frame are aligned to this for the processor


def to_buffers(arrays: Iterable[np.ndarray]) -> list[Any]:
    """Return the data of arrays as buffers.

    Small arrays share buffers. Large contiguous arrays are not copied.
    """
    buffers: list[Any] = []
    shared: bytearray | None = None
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if len(data) >= SMALL:
            buffers += [data[at : at + MAX_FRAME] for at in range(0, len(data), MAX_FRAME)]
            continue
        if shared is None or len(shared) + len(data) > MAX_FRAME:
            shared = bytearray()
            buffers.append(shared)
        shared += data
        shared += bytes(-len(shared) % ALIGNMENT)
    return buffers


class Arrays:
    """The arrays in a message's buffers, taken one after another.

    Arrays are views of the buffers, but an array in several buffers is a copy. No byte belongs to
    two arrays, so they need no more memory than the message.
    """

    def __init__(self, buffers: Iterable[Any]) -> None:
        self._buffers = iter(buffers)
        self._shared: Any = None
        self._at = 0  # the offset of the next small array in the shared buffer

    def take(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return the next array.

        Raises:
            ProtocolError: the message is too short for an array of this dtype and shape, or there
                is no array of this shape.
        """
        size = dtype.itemsize * math.prod(shape)
        at = 0
        if size >= SMALL:
            number = -(-size // MAX_FRAME)
            data = next(self._buffers, b"") if number == 1 else self._joined(number)
            is_long_enough = len(data) == size
        else:
            if self._shared is None or self._at + size > MAX_FRAME:
                self._shared = next(self._buffers, b"")
                self._at = 0
            data, at = self._shared, self._at
            self._at += size + -size % ALIGNMENT
            is_long_enough = self._at <= len(data)
        if not is_long_enough:  # checked here because NumPy's own check overflows
            raise ProtocolError(f"{name} must be {dtype.str} {shape}, but the message is too short")
        try:
            return np.ndarray(shape, dtype, data, at)
        except ValueError as error:  # the array has no elements, but its sizes overflow
            raise ProtocolError(f"{name} cannot be {dtype.str} {shape}: {error}") from None

    def _joined(self, number: int) -> bytearray:
        return bytearray().join(itertools.islice(self._buffers, number))

    def end(self) -> None:
        """Raise ProtocolError if the message holds more than the arrays that were taken."""
        left = len(self._shared) - self._at if self._shared is not None else 0
        if left or next(self._buffers, None) is not None:
            raise ProtocolError("the message is longer than its arrays")
