"""How environments travel with what they need from the script.

They need its classes and functions, and the environments that it has registered with Gymnasium.
"""

from __future__ import annotations

import functools
import importlib
import io
import operator
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from ..errors import one_line

Cached = type(functools.lru_cache(len))
IMPORT = importlib._bootstrap._find_and_load.__code__.co_filename  # of Python's import code
LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


def register_script() -> None:
    """Make the script's definitions travel with their code, even if this process was spawned.

    In a process that `multiprocessing` has spawned, the script is a module of another name.
    """
    main = sys.modules["__main__"]
    if main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)


def dumps_noting(
    value: Any,
    of_script: dict[str, Any],
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
) -> bytes:
    """Return a cloudpickle of ``value``.

    Add each of the script's classes and functions in ``value`` to ``of_script``, by name. A worker
    that pickles one of them again looks for it in ``__main__``.

    Raises:
        TypeError: something in ``value`` cannot be pickled.
    """
    with io.BytesIO() as file:
        try:
            _Pickler(file, of_script, buffer_callback).dump(value)
        except Exception as error:  # an object's own code may raise anything
            text = "an environment refers to an object that cannot be copied to its worker"
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
    """Return a function that caches its results, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def packed_registry(of_script: dict[str, Any]) -> dict[str, bytes | str]:
    """Return a cloudpickle of each environment that is registered here, by its ID.

    If an environment cannot be pickled, a string in its place says why. ``of_script`` is as in
    `dumps_noting`.
    """
    return {env_id: _packed(spec, of_script) for env_id, spec in gym.registry.items()}


def _packed(spec: EnvSpec, of_script: dict[str, Any]) -> bytes | str:
    try:
        return dumps_noting(spec, of_script)
    except TypeError as error:
        return str(error)


def load_registry(packed: dict[str, bytes | str]) -> None:
    """Register these environments.

    If an environment cannot be registered here, making it raises an error that says why. Most
    environments are never made.
    """
    heads = {env_id: _unpacked(env_id, data) for env_id, data in packed.items()}
    registry = Registry(gym.registry, heads)
    for module in (gym, gym.envs, registration):
        module.registry = registry


def _unpacked(env_id: str, data: bytes | str) -> EnvSpec:
    if isinstance(data, bytes):
        try:
            return pickle.loads(data)
        except Exception as error:  # a module may be missing here
            data = f"it cannot be unpickled: {one_line(error)}"
    reason = f"{env_id} is registered at the head, but not here: {data}"
    return EnvSpec(env_id, entry_point=functools.partial(_raise, reason))


class Registry(dict[str, EnvSpec]):
    """The environments that are registered here or at the head.

    The head's entries take precedence over entries that modules register here when they are
    imported later. An environment that registers an entry itself replaces the head's, as it would
    at the head.
    """

    def __init__(self, here: dict[str, EnvSpec], heads: dict[str, EnvSpec]) -> None:
        super().__init__({**here, **heads})
        self._heads = frozenset(heads)

    def __contains__(self, env_id: object) -> bool:
        # Gymnasium warns if an environment that is in the registry is registered again.
        return super().__contains__(env_id) and not self._is_held(env_id)

    def __setitem__(self, env_id: str, spec: EnvSpec) -> None:
        if not self._is_held(env_id):
            super().__setitem__(env_id, spec)

    def _is_held(self, env_id: object) -> bool:
        return env_id in self._heads and _is_importing()


def _is_importing() -> bool:
    frames = traceback.walk_stack(None)
    return any(frame.f_code.co_filename == IMPORT for frame, _ in frames)


def _raise(text: str, **_: Any) -> NoReturn:
    raise gym.error.Error(text)
