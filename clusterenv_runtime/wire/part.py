"""What one worker sends of a rollout, and what of its values no learner can use."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space, spaces

from ..arrays.trees import leaves
from .codec import pack
from .packed import Packed

OBSERVATIONS = "observations", "final_observations", "next_observations"
MAX_INFO_BYTES, MAX_INFO_AXES = (
    2**18,
    32,
)  # of one step's: where it is missing, a rollout has zeros in its place
MOST = np.finfo(np.float32).max


class RolloutPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What one worker sends of a rollout: ``num_steps`` steps of its ``num_envs`` environments.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the
    spaces' own. Actions, states and params are as the policy has them: arrays, or dicts and tuples
    of arrays.
    """

    version: int  # of the policy that acted
    starts: np.ndarray  # (num_envs,) bool, whether the first observation is the first of an episode
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: Any  # (num_steps, num_envs, ...)
    logprobs: (
        np.ndarray
    )  # (num_steps, num_envs) floats, of the actions under the policy that took them
    states: Any  # (num_envs, ...) of the policy before the first step, None if it has none
    extras: dict[str, np.ndarray]  # (num_steps, num_envs, ...) what `Policy.extras` gives
    infos: dict[
        str, Any
    ]  # for each of ``info_keys`` that has come: which steps had it, (n,) as below, and (n, ...)
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: (
        Any  # (ends, ...) what the steps that ended an episode led to, ordered as their nonzero()
    )
    next_observations: Any  # (num_envs, ...) after the last step
    episodes: (
        np.ndarray
    )  # (num_episodes,) int64, which step ended each that counts: step * num_envs + environment
    episodic_returns: np.ndarray  # (num_episodes,) float64
    episodic_lengths: np.ndarray  # (num_episodes,) int64
    params: Any  # (states, ...) the policy's distribution parameters at `measured_states`
    frames: tuple[
        np.ndarray, ...
    ] = ()  # of observations that are stacks each frame once: they are indices, see `fold`

    def pack(self, buffers: list[Any]) -> dict[str, Packed]:
        """Return what `protocol.Part` holds, and append the data of the arrays to ``buffers``."""
        return {name: pack(getattr(self, name), buffers) for name in self.__struct_fields__}


def fault_of(part: RolloutPart, action_space: Space | None, given: Any = None) -> str | None:
    """Say what of a part's values no learner can use, if anything. Observations may be whatever
    there is.

    ``given`` is what environments got instead of the actions, if they did. Without a space, neither
    is looked at.
    """
    for name in ("rewards", "episodic_returns"):  # which a learner takes as float32
        if not np.all(np.abs(getattr(part, name)) <= MOST):  # nor is NaN
            return f"{name} are not all finite numbers of float32"
    for name in ("logprobs", "params", "states", "extras", "actions"):
        for leaf in leaves(getattr(part, name)):
            if leaf is None or leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            if name == "actions":
                return f"{name} are not all finite"
            if np.isnan(leaf).any():
                return f"{name} hold NaN: has the policy diverged?"
            if name == "logprobs" and np.isneginf(leaf).any():
                return (
                    "logprobs are of actions that cannot have been drawn: has the policy diverged?"
                )
    if action_space is not None and _are_beyond(
        action_space, part.actions if given is None else given
    ):
        return f"actions are not of {action_space}"
    return None


def _are_beyond(space: Space, actions: Any) -> bool:
    """Say whether actions are of the shape of a space of integers, and not in it."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        number = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if not isinstance(actions, np.ndarray) or actions.shape[2:] != space.shape:
            return False
        return bool(((actions < space.start) | (actions >= space.start + number)).any())
    if (
        isinstance(space, spaces.Dict)
        and isinstance(actions, dict)
        and actions.keys() == space.spaces.keys()
    ):
        return any(_are_beyond(space[key], actions[key]) for key in actions)
    if (
        isinstance(space, spaces.Tuple)
        and isinstance(actions, tuple)
        and len(actions) == len(space.spaces)
    ):
        return any(map(_are_beyond, space.spaces, actions))
    return False


def fault_of_info(values: np.ndarray) -> str | None:
    """Say why infos ``(steps, ...)`` have no place in a rollout, where others that have none are
    zeros as large.
    """
    if values.dtype.kind not in "biuf":
        return "has no place in a rollout: it is neither a number nor an array of them"
    one = values.dtype.itemsize * math.prod(values.shape[1:])
    if values.ndim > MAX_INFO_AXES + 1 or one > MAX_INFO_BYTES:
        return f"has no place in a rollout: it has more than {MAX_INFO_BYTES} bytes, or than {MAX_INFO_AXES} axes"
    return None
