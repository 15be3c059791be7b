"""The user's own registrations with Gymnasium, sent from the head to its workers."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from ..errors import one_line

# Gymnasium's warning about an environment that is registered a second time.
OVERRIDING = r".*Overriding environment .* already in registry"


def packed_registry() -> dict[str, bytes | str]:
    """Return by id a cloudpickle of each environment that is not Gymnasium's own.

    A string in its place says why there is none.
    """
    return {
        env_id: _packed(spec)
        for env_id, spec in gym.registry.items()
        if not str(spec.entry_point).startswith("gymnasium.")
    }


def _packed(spec: EnvSpec) -> bytes | str:
    try:
        return cloudpickle.dumps(spec)
    except Exception as error:  # an argument's own code may raise anything
        return f"it cannot be pickled: {one_line(error)}"


def load_registry(packed: dict[str, bytes | str]) -> None:
    """Register these environments.

    An environment that cannot be registered here says why when it is made: most are never made.
    """
    for env_id, data in packed.items():
        if isinstance(data, bytes):
            try:
                gym.registry[env_id] = pickle.loads(data)
                continue
            except Exception as error:  # a module may be missing here
                data = f"it cannot be unpickled: {one_line(error)}"
        reason = f"{env_id} is registered at the head, but not here: {data}"
        gym.registry[env_id] = EnvSpec(env_id, entry_point=partial(_raise, reason))
    # A package that is imported from now on registers its environments a second time.
    warnings.filterwarnings("ignore", OVERRIDING)


def _raise(text: str, **_: Any) -> NoReturn:
    raise gym.error.Error(text)
