"""The user's own registrations with Gymnasium, sent from the head to its workers."""

from __future__ import annotations

import importlib
import pickle
import traceback
from functools import partial
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from ..errors import one_line
from .script import dumps_noting

IMPORT = importlib._bootstrap._find_and_load.__code__.co_filename  # of Python's own code


def packed_registry(of_script: dict[str, Any]) -> dict[str, bytes | str]:
    """Return by id a cloudpickle of each environment that is registered here.

    A string in its place says why there is none. ``of_script`` is as in `script.dumps_noting`.
    """
    return {env_id: _packed(spec, of_script) for env_id, spec in gym.registry.items()}


def _packed(spec: EnvSpec, of_script: dict[str, Any]) -> bytes | str:
    try:
        return dumps_noting(spec, of_script)
    except TypeError as error:
        return str(error)


def load_registry(packed: dict[str, bytes | str]) -> None:
    """Register these environments.

    An environment that cannot be registered here says why when it is made: most are never made.
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
    return EnvSpec(env_id, entry_point=partial(_raise, reason))


class Registry(dict[str, EnvSpec]):
    """What is registered here, and what is registered at the head.

    The head's entries hold, whatever modules register that are imported here later. An environment
    that registers one itself replaces it, as it would at the head.
    """

    def __init__(self, here: dict[str, EnvSpec], heads: dict[str, EnvSpec]) -> None:
        super().__init__({**here, **heads})
        self._heads = frozenset(heads)

    def __contains__(self, env_id: object) -> bool:
        # Gymnasium warns of an environment that is here and registered a second time.
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
