"""The steps of a rollout while they are taken, and the part that is sent of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from ..arrays.frames import fold
from ..arrays.spaces import map_space
from ..arrays.trees import map_tree
from ..wire.part import RolloutPart, fault_of_info

if TYPE_CHECKING:
    from ..policy.actor import Actor


class Transitions:
    """Room for ``num_steps`` steps of the environments that ``observations``, a batch of ``space``,
    is of.

    ``starts`` ``(num_envs,)`` says which of these have begun an episode.
    """

    def __init__(
        self, space: gym.Space, observations: Any, num_steps: int, starts: np.ndarray
    ) -> None:
        self._starts, shape = starts, (num_steps, len(starts))
        self._found: dict[str, list[tuple[Any, Any]]] = {}  # of infos: (which steps, values)
        # One step further than the rest: what the last step led to.
        self.observations = map_space(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), space, observations
        )
        self.rewards = np.empty(shape)
        self.terminations, self.truncations = np.zeros(shape, bool), np.zeros(shape, bool)

    def add_info(self, key: str, steps: Any, values: Any) -> None:
        """Keep what infos have under a key at some steps, numbered by step * num_envs +
        environment.
        """
        self._found.setdefault(key, []).append((steps, values))

    def _infos(self) -> dict[str, Any]:
        infos = {}
        for key, found in self._found.items():
            steps = np.concatenate([steps for steps, _ in found])
            try:
                values = np.concatenate([np.asarray(values) for _, values in found])
            except ValueError:
                raise ValueError(f"info {key!r} has not the same shape in all steps") from None
            if (fault := fault_of_info(values)) is not None:
                raise ValueError(f"info {key!r} {fault}")
            order = steps.argsort()
            infos[key] = steps[order], values[order]
        return infos

    def part(
        self,
        actor: Actor,
        final_observations: Any,
        stacks: Any,
        episodes: list[tuple[int, float, int]] | np.ndarray,
    ) -> RolloutPart:
        """Return what is sent of these steps.

        ``stacks`` says which observations are stacks of frames, see `are_stacks`. ``episodes``
        are (step * num_envs + environment, return, length).
        """
        numbers, returns, lengths = np.array(episodes, np.float64).reshape(-1, 3).T
        frames, found = (
            list[np.ndarray](),
            list[tuple[Any, Any]](),
        )  # of each leaf: observations, and final ones

        def folded(is_stack: bool, leaf: Any, final: Any) -> int:
            if is_stack:
                each, leaf, final = fold(leaf, final, self.terminations | self.truncations)
                frames.append(each)
            found.append((leaf, final))
            return len(found) - 1

        places = map_tree(folded, stacks, self.observations, final_observations)
        return RolloutPart(
            version=actor.version,
            starts=self._starts,
            observations=map_tree(lambda place: found[place][0][:-1], places),
            infos=self._infos(),
            rewards=self.rewards,
            terminations=self.terminations,
            truncations=self.truncations,
            final_observations=map_tree(lambda place: found[place][1], places),
            next_observations=map_tree(lambda place: found[place][0][-1], places),
            episodes=numbers.astype(np.int64),
            episodic_returns=returns.copy(),
            episodic_lengths=lengths.astype(np.int64),
            frames=tuple(frames),
            **actor.finish(),
        )


def stack(space: gym.Space, items: list[Any]) -> Any:
    """Return a batch of these, which may be none."""
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty
