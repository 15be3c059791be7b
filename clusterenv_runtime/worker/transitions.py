"""The steps of a rollout while they are taken, and the part that is sent of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from ..rollout import RolloutPart
from ..spaces import map_space
from ..sync import sampled_states

if TYPE_CHECKING:
    from .actor import Actor


class Transitions:
    """Room for ``num_steps`` steps of the environments that ``observations``, a batch of ``space``, is of.

    ``starts`` ``(num_envs,)`` says which of these have begun an episode.
    """

    def __init__(self, space: gym.Space, observations: Any, num_steps: int, starts: np.ndarray) -> None:
        self._space, self._starts, shape = space, starts, (num_steps, len(starts))
        # One step further than the rest: what the last step led to.
        self.observations = map_space(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), space, observations
        )
        self.rewards = np.empty(shape)
        self.terminations, self.truncations = np.zeros(shape, bool), np.zeros(shape, bool)

    def part(
        self,
        actor: Actor,
        final_observations: Any,
        episodes: list[tuple[int, float, int]] | np.ndarray,
        steps: np.ndarray | None = None,
    ) -> RolloutPart:
        """Return what is sent of these steps.

        ``episodes`` are (step * num_envs + environment, return, length); ``steps``, if the actor acted more often than
        there are steps, says which of its steps each of ours is.
        """
        actions, logprobs, params = actor.finish(sampled_states(self.rewards.size), steps)
        numbers, returns, lengths = np.array(episodes, np.float64).reshape(-1, 3).T
        return RolloutPart(
            version=actor.version,
            starts=self._starts,
            observations=map_space(lambda leaf: leaf[:-1], self._space, self.observations),
            actions=actions,
            logprobs=logprobs,
            rewards=self.rewards,
            terminations=self.terminations,
            truncations=self.truncations,
            final_observations=final_observations,
            next_observations=map_space(lambda leaf: leaf[-1], self._space, self.observations),
            episodes=numbers.astype(np.int64),
            episodic_returns=returns.copy(),
            episodic_lengths=lengths.astype(np.int64),
            params=params,
        )


def stack(space: gym.Space, items: list[Any]) -> Any:
    """Return a batch of these, which may be none."""
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty
