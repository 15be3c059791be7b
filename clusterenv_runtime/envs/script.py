"""The classes and functions of the script, so that environments find them in ``__main__``."""

from __future__ import annotations

import io
import sys
from types import FunctionType
from typing import Any

import cloudpickle


def dumps_noting(value: Any, of_script: dict[str, Any]) -> bytes:
    """Return a cloudpickle of ``value``.

    Add to ``of_script``, by name, each class and function of the script that is in it. A worker
    that pickles one again looks for it in ``__main__``.
    """
    with io.BytesIO() as file:
        _Pickler(file, of_script).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, of_script: dict[str, Any]) -> None:
        super().__init__(file)
        self._of_script = of_script

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            name = value.__qualname__
            if getattr(sys.modules["__main__"], name, None) is value:
                self._of_script[name] = value
        return super().reducer_override(value)
