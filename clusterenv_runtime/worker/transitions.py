"""What a worker keeps of its steps: a rollout's part to send, or the scores of an evaluation.

An environment may count its episodes itself; see `OwnStatistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers import RecordEpisodeStatistics

from ..arrays.frames import fold
from ..arrays.trees import filled, leaves, map_tree
from ..wire.part import RolloutPart

if TYPE_CHECKING:
    from ..policy.actor import Actor

Counts = tuple[float, int]  # the return and the length of an episode


class Transitions:
    """Storage for ``num_steps`` steps of a worker's environments.

    Args:
        observations: the observations before the first step, a batch of arrays.
        num_steps: the number of steps to store.
        starts: ``(num_envs,)`` bool, whether each of these observations begins an episode.
    """

    def __init__(self, observations: Any, num_steps: int, starts: np.ndarray) -> None:
        shape = num_steps, len(starts)
        self._starts = starts
        self._infos: dict[str, list[tuple[Any, Any]]] = {}  # pairs of steps and values, by key
        # One step more than the other arrays: the observations after the last step.
        self.observations = map_tree(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), observations
        )
        self.rewards = np.empty(shape)
        self.terminations = np.zeros(shape, bool)
        self.truncations = np.zeros(shape, bool)

    def add_info(self, key: str, steps: Any, values: Any) -> None:
        """Keep an info's values at some steps, numbered by step * num_envs + environment."""
        self._infos.setdefault(key, []).append((steps, values))

    def _joined_infos(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        joined = {}
        for key, found in self._infos.items():
            steps, values = zip(*found, strict=True)
            try:
                array = np.concatenate([np.asarray(each) for each in values])
            except ValueError:
                raise ValueError(f"info {key!r} must have the same shape in all steps") from None
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
        """Return these steps as a part of a rollout.

        Args:
            actor: the actor that acted in these steps.
            final_observations: a batch of the observations after each step that ended an episode,
                in order.
            stacks: which observations are stacks of frames; see `EnvLayout.stacks`.
            episodes: (step * num_envs + environment, return, length) of each episode that counts.
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
    """Return a batch of ``items``, which may be empty."""
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty


class OwnStatistics:
    """The episodes that an environment's outermost RecordEpisodeStatistics counts.

    Wrappers around it may end an episode that goes on inside, for example when a life is lost in a
    game. It may also miss an end, for example that of a time limit around it.
    """

    def __init__(self, wrapper: RecordEpisodeStatistics) -> None:
        self._wrapper = wrapper
        self.begin_step()

    @classmethod
    def of(cls, env: gym.Env) -> Self | None:
        """Return the statistics of an environment, or None if it keeps none."""
        while isinstance(env, gym.Wrapper):
            if isinstance(env, RecordEpisodeStatistics):
                return cls(env)
            env = env.env
        return None

    def begin_step(self) -> None:
        """Note the wrapper's state before a step."""
        self._ended = self._wrapper.episode_count
        self._begun = self._wrapper.episode_start_time

    def counts(self, seen: Counts) -> Counts | None:
        """Return the counts of an ended episode, after the environment is reset.

        These are the wrapper's counts, or those that the worker has ``seen`` if the wrapper began
        another episode without counting this one. None means that the wrapper's episode goes on.
        """
        has_seen_end = self._wrapper.episode_count > self._ended
        if has_seen_end and self._wrapper.return_queue:
            return float(self._wrapper.return_queue[-1]), int(self._wrapper.length_queue[-1])
        return seen if self._wrapper.episode_start_time != self._begun else None


def begin_step(statistics: Sequence[OwnStatistics | None]) -> None:
    """Note the wrappers' states before a step of several environments."""
    for own in statistics:
        if own is not None:
            own.begin_step()


class Scores:
    """The scores of an evaluation: the first episodes of each of a worker's environments.

    Args:
        wanted: how many episodes of each environment count.
        max_steps: the steps after which an episode is abandoned; it counts as far as it went.
    """

    def __init__(self, wanted: Sequence[int], max_steps: int) -> None:
        self._missing = list(wanted)
        self._max_steps = max_steps
        # By environment, the return and the length of each episode, and whether it has ended.
        self._found: list[list[tuple[float, int, bool]]] = [[] for _ in wanted]
        self._returns = np.zeros(len(wanted))  # returns of the current episodes
        self._lengths = np.zeros(len(wanted), np.int64)
        self._was_left = np.zeros(len(wanted), bool)  # whether an abandoned episode goes on

    @property
    def are_complete(self) -> bool:
        return not any(self._missing)

    def add(self, part: RolloutPart) -> None:
        """Add the next steps of all environments, and count the episodes in them."""
        counts = zip(part.episodic_returns.tolist(), part.episodic_lengths.tolist(), strict=True)
        ends = dict(zip(part.episodes.tolist(), counts, strict=True))
        num_envs = len(self._missing)
        for step, rewards in enumerate(part.rewards):
            self._returns += rewards
            self._lengths += 1
            for row in range(num_envs):
                end = ends.get(step * num_envs + row)
                if end is not None or self._lengths[row] >= self._max_steps:
                    self._end(row, end)

    def _end(self, row: int, counts: tuple[float, int] | None) -> None:
        """Note an episode that has ended or, without ``counts``, is abandoned.

        The rest of an abandoned episode does not count, unless it lasts for ``max_steps`` again.
        """
        has_ended = counts is not None
        is_rest = has_ended and self._was_left[row]
        if self._missing[row] and not is_rest:
            seen = float(self._returns[row]), int(self._lengths[row])
            self._found[row].append((*(counts or seen), has_ended))
            self._missing[row] -= 1
        self._was_left[row] = not has_ended
        self._returns[row] = self._lengths[row] = 0

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the returns, the lengths, and which episodes ended, by environment, then time."""
        episodes = [each for of_one in self._found for each in of_one]
        returns, lengths, ended = zip(*episodes, strict=True)
        return np.array(returns), np.array(lengths, np.int64), np.array(ended)
