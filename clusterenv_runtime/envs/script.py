"""How environments travel, with what they have of the script."""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle

from ..errors import one_line

Cached = type(functools.lru_cache(len))
LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


def dumps_noting(
    value: Any,
    of_script: dict[str, Any],
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
) -> bytes:
    """Return a cloudpickle of ``value``.

    Add to ``of_script``, by name, each class and function of the script that is in it. A worker
    that pickles one again looks for it in ``__main__``.

    Raises:
        TypeError: something in it cannot be pickled.
    """
    with io.BytesIO() as file:
        try:
            _Pickler(file, of_script, buffer_callback).dump(value)
        except Exception as error:  # an object's own code may raise anything
            text = "an environment refers to what cannot be copied to its worker"
            raise TypeError(f"{text}: {one_line(error)}") from error
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
        if type(value) in LOCKS:
            return LOCKS[type(value)], ()
        if isinstance(value, type | FunctionType | Cached):
            name = value.__qualname__
            if getattr(sys.modules["__main__"], name, None) is value:
                self._of_script[name] = value
        if isinstance(value, Cached) and not _can_be_imported(value):
            return _cached, (value.__wrapped__, value.cache_parameters()), vars(value)
        return super().reducer_override(value)


def _can_be_imported(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    if module is sys.modules["__main__"]:
        return False
    try:
        return operator.attrgetter(value.__qualname__)(module) is value
    except AttributeError:
        return False


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Return a function that remembers results, with none so far."""
    return functools.lru_cache(**parameters)(function)
