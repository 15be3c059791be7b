"""How environments travel: what they have of the script, and the large arrays that they share."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

LARGE = 2**20  # bytes of an array that is held once for all workers


class LargeArrays:
    """Copies of large arrays, one for all pickles that have the same array."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], bytes] = {}  # by address and size

    def collector(self, copies: list[bytes]) -> Callable[[pickle.PickleBuffer], bool]:
        """Return a ``buffer_callback`` that adds the copy of each large array to ``copies``."""

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            data = np.frombuffer(buffer.raw(), np.uint8)
            if data.nbytes < LARGE:
                return True  # the array remains in the pickle
            key = data.ctypes.data, data.nbytes
            if key not in self._copies:
                self._copies[key] = data.tobytes()
            copies.append(self._copies[key])
            return False

        return is_small


def dumps_noting(
    value: Any,
    of_script: dict[str, Any],
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
) -> bytes:
    """Return a cloudpickle of ``value``.

    Add to ``of_script``, by name, each class and function of the script that is in it. A worker
    that pickles one again looks for it in ``__main__``.
    """
    with io.BytesIO() as file:
        _Pickler(file, of_script, buffer_callback).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        of_script: dict[str, Any],
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None,
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._of_script = of_script

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            name = value.__qualname__
            if getattr(sys.modules["__main__"], name, None) is value:
                self._of_script[name] = value
        return super().reducer_override(value)
