"""What the user has registered with Gymnasium at the head, which workers do not know by themselves."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from ..errors import one_line

# says Gymnasium of each that is registered once more
OVERRIDING = r".*Overriding environment .* already in registry"


def packed_registry() -> dict[str, bytes | str]:
    """Return a cloudpickle of each environment that is not Gymnasium's own, or why there is none,
    by id.
    """
    specs = {env_id: spec for env_id, spec in gym.registry.items() if not _is_gymnasiums(spec)}
    return {env_id: _packed(spec) for env_id, spec in specs.items()}


def _is_gymnasiums(spec: EnvSpec) -> bool:
    return str(spec.entry_point).startswith("gymnasium.")


def _packed(spec: EnvSpec) -> bytes | str:
    try:
        return cloudpickle.dumps(spec)
    except Exception as error:  # whatever an argument's own code raises
        return f"it cannot be pickled: {one_line(error)}"


def load_registry(packed: dict[str, bytes | str]) -> None:
    """Register these. What cannot be here says why when it is made, as most environments never are."""
    for env_id, data in packed.items():
        try:
            gym.registry[env_id] = (
                _stub(env_id, data) if isinstance(data, str) else pickle.loads(data)
            )
        except Exception as error:  # such as of a module that is missing here
            gym.registry[env_id] = _stub(env_id, f"it cannot be unpickled: {one_line(error)}")
    # A package that is imported from now on registers its own once more.
    warnings.filterwarnings("ignore", OVERRIDING)


def _stub(env_id: str, reason: str) -> EnvSpec:
    return EnvSpec(
        env_id,
        entry_point=partial(_raise, f"{env_id} is registered at the head, but not here: {reason}"),
    )


def _raise(text: str, **_: Any) -> NoReturn:
    raise gym.error.Error(text)
