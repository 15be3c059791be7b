"""Rollout: the arrays that cross the boundary between the runtime and the user's loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from .spaces import map_space


@dataclass
class Rollout:
    """``num_steps`` steps of all environments, or of one worker's. There are no dead steps in it.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the spaces' own.
    """

    rows: np.ndarray  # (num_envs,) int64, which environments these are
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: np.ndarray  # (num_steps, num_envs, ...)
    logprobs: np.ndarray  # (num_steps, num_envs) float32, of the actions under the policy that took them
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: Any  # (episodes, ...) what the steps that ended one led to, ordered as their nonzero()
    next_observations: Any  # (num_envs, ...) after the last step; README's Limits say what "vector" ones make of it
    policy_versions: np.ndarray  # (num_envs,) int64, the version that acted
    episodic_returns: np.ndarray  # (num_episodes,) float64, of the episodes that ended here, by step, then environment
    episodic_lengths: np.ndarray  # (num_episodes,) int64

    @classmethod
    def join(cls, space: Space, parts: list[dict[str, Any]], rows: np.ndarray) -> Rollout:
        """Join the workers' parts, given in row order; ``space`` is the single observation space."""

        def concatenate(leaves: Sequence[np.ndarray], axis: int, order: Any) -> np.ndarray:
            if len(leaves) > 1:
                return np.concatenate(leaves, axis)[order]
            return _writable(leaves[0]) if axis == 1 else leaves[0].copy()  # the head keeps the last observations

        def join(name: str, axis: int, order: Any = ...) -> np.ndarray:
            return concatenate([part[name] for part in parts], axis, order)

        def join_observations(name: str, axis: int, order: Any = ...) -> Any:
            trees = [part[name] for part in parts]
            return map_space(lambda *leaves: concatenate(leaves, axis, order), space, *trees)

        sizes = [len(part["rewards"][0]) for part in parts]

        def global_order(flat: Iterable[np.ndarray]) -> Any:
            """Order by step, then environment, what each worker has numbered ``step * its environments + one``."""
            if len(parts) == 1:
                return ...
            first_rows, num_envs = np.cumsum([0, *sizes[:-1]]), sum(sizes)
            numbers = [k // n * num_envs + first + k % n for k, n, first in zip(flat, sizes, first_rows, strict=True)]
            return np.argsort(np.concatenate(numbers))

        # Not every environment counts every episode.
        ended = global_order(np.flatnonzero(part["terminations"] | part["truncations"]) for part in parts)
        counted = global_order(part["episodes"] for part in parts)
        return cls(
            rows=rows,
            observations=join_observations("observations", 1),
            final_observations=join_observations("final_observations", 0, ended),
            next_observations=join_observations("next_observations", 0),
            policy_versions=np.repeat([part["version"] for part in parts], sizes),
            episodic_returns=join("episodic_returns", 0, counted),
            episodic_lengths=join("episodic_lengths", 0, counted),
            **{name: join(name, 1) for name in ("actions", "logprobs", "rewards", "terminations", "truncations")},
        )


class _Memory:
    """What an array looks at, for another to look at and to write to."""

    def __init__(self, array: np.ndarray) -> None:
        interface = array.__array_interface__
        self.array, self.__array_interface__ = array, {**interface, "data": (interface["data"][0], False)}


def _writable(array: np.ndarray) -> np.ndarray:
    """Return a copy of a view of a received message; or if it is large the message's memory, which is nobody else's."""
    return array.copy() if array.nbytes < 2**16 or not array.flags.aligned else np.asarray(_Memory(array))
