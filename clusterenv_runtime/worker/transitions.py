"""The steps of a rollout while they are taken, and the part that is sent of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from ..arrays.frames import fold
from ..arrays.trees import filled, leaves, map_tree
from ..wire.part import RolloutPart

if TYPE_CHECKING:
    from ..policy.actor import Actor


class Transitions:
    """Room for ``num_steps`` steps of some environments.

    Args:
        observations: a batch of arrays, the observations before the first step.
        num_steps: how many steps there are to be.
        starts: ``(num_envs,)`` bool, which of these observations have begun an episode.
    """

    def __init__(self, observations: Any, num_steps: int, starts: np.ndarray) -> None:
        shape = num_steps, len(starts)
        self._starts = starts
        self._infos: dict[str, list[tuple[Any, Any]]] = {}  # (steps, values) by key
        # One step further than the rest: what the last step led to.
        self.observations = map_tree(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), observations
        )
        self.rewards = np.empty(shape)
        self.terminations = np.zeros(shape, bool)
        self.truncations = np.zeros(shape, bool)

    def add_info(self, key: str, steps: Any, values: Any) -> None:
        """Keep the values of an info at some steps, numbered by step * num_envs + environment."""
        self._infos.setdefault(key, []).append((steps, values))

    def _joined_infos(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        joined = {}
        for key, found in self._infos.items():
            steps, values = zip(*found, strict=True)
            try:
                array = np.concatenate([np.asarray(each) for each in values])
            except ValueError:
                raise ValueError(f"info {key!r} has not the same shape in all steps") from None
            if array.dtype.kind not in "biuf":
                what = "it is neither a number nor an array of numbers"
                raise ValueError(f"info {key!r} has no place in a rollout: {what}")
            joined[key] = np.concatenate(steps, dtype=np.int64), array
        return joined

    def part(
        self,
        actor: Actor,
        final_observations: Any,
        stacks: Any,
        episodes: list[tuple[int, float, int]],
    ) -> RolloutPart:
        """Return what is sent of these steps.

        Args:
            actor: what acted in them.
            final_observations: a batch of what the steps that ended an episode led to, in order.
            stacks: which observations are stacks of frames, see `EnvLayout.stacks`.
            episodes: of each that counts step * num_envs + environment, return, and length.
        """
        numbers, returns, lengths = np.array(episodes, np.float64).reshape(-1, 3).T
        ended = self.terminations | self.truncations
        given = map_tree(lambda leaf: leaf[:-1], self.observations)
        observations = leaves(self.observations)
        finals = leaves(final_observations)
        frames = []
        for place, is_stack in enumerate(leaves(stacks)):
            if is_stack:
                folded = fold(observations[place], finals[place], ended)
                each, observations[place], finals[place] = folded
                frames.append(each)
        return RolloutPart(
            version=actor.version,
            starts=self._starts,
            observations=filled(stacks, [leaf[:-1] for leaf in observations]),
            rewards=self.rewards,
            terminations=self.terminations,
            truncations=self.truncations,
            final_observations=filled(stacks, finals),
            next_observations=filled(stacks, [leaf[-1] for leaf in observations]),
            episodes=numbers.astype(np.int64),
            episodic_returns=returns.copy(),
            episodic_lengths=lengths.astype(np.int64),
            infos=self._joined_infos(),
            frames=frames,
            **actor.finish(given),
        )


def stack(space: gym.Space, items: list[Any]) -> Any:
    """Return a batch of these, which may be none."""
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty
