"""What is kept of steps: of a rollout the part that is sent, of an evaluation the scores of its
episodes. An environment may count its episodes itself.
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

Counts = tuple[float, int]  # the return of an episode, and its length


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


class OwnStatistics:
    """What an environment's outermost RecordEpisodeStatistics says of its episodes.

    Wrappers around it may end episodes that go on for it, as where a game loses a life; or it may
    not see an end, as where a time limit stands around it.
    """

    def __init__(self, wrapper: RecordEpisodeStatistics) -> None:
        self._wrapper = wrapper
        self.begin_step()

    @classmethod
    def of(cls, env: gym.Env) -> Self | None:
        """Return the statistics of an environment; None if it keeps none."""
        while isinstance(env, gym.Wrapper):
            if isinstance(env, RecordEpisodeStatistics):
                return cls(env)
            env = env.env
        return None

    def begin_step(self) -> None:
        """Note what there is before a step."""
        self._ended = self._wrapper.episode_count
        self._begun = self._wrapper.episode_start_time

    def counts(self, seen: Counts) -> Counts | None:
        """Return what counts of an episode that has ended, once the environment is reset.

        That is what they say; or what the worker has ``seen``, if another episode has begun without
        a word of theirs. None stands for an episode that goes on.
        """
        has_seen_end = self._wrapper.episode_count > self._ended
        if has_seen_end and self._wrapper.return_queue:
            return float(self._wrapper.return_queue[-1]), int(self._wrapper.length_queue[-1])
        return seen if self._wrapper.episode_start_time != self._begun else None


def begin_step(statistics: Sequence[OwnStatistics | None]) -> None:
    """Note what there is before a step of several environments."""
    for own in statistics:
        if own is not None:
            own.begin_step()


class Scores:
    """Of each environment of a worker the first episodes, as many as it is to play.

    Args:
        wanted: how many episodes of each environment count.
        max_steps: after so many an episode is left, and counts as far as it went.
    """

    def __init__(self, wanted: Sequence[int], max_steps: int) -> None:
        self._missing = list(wanted)
        self._max_steps = max_steps
        # Of each environment its episodes: the return, the length, and whether it has ended.
        self._found: list[list[tuple[float, int, bool]]] = [[] for _ in wanted]
        self._returns = np.zeros(len(wanted))  # of the episodes under way
        self._lengths = np.zeros(len(wanted), np.int64)
        self._was_left = np.zeros(len(wanted), bool)  # what is under way is the rest of an episode

    @property
    def are_complete(self) -> bool:
        return not any(self._missing)

    def add(self, part: RolloutPart) -> None:
        """Count the episodes in the next steps of all environments."""
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
        """Note an episode that has ended, or, without its counts, one that is left.

        Of one that was left the rest is no other one, unless it is as long again.
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
        """Return the returns, the lengths, and which have ended, by environment, then time."""
        episodes = [each for of_one in self._found for each in of_one]
        returns, lengths, ended = zip(*episodes, strict=True)
        return np.array(returns), np.array(lengths, np.int64), np.array(ended)
