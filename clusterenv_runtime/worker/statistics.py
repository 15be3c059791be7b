"""The statistics that an environment keeps of its own episodes, by Gymnasium's wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import gymnasium as gym
from gymnasium.wrappers import RecordEpisodeStatistics

Counts = tuple[float, int]  # the return of an episode, and its length


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
