"""The episodes of an evaluation: which have been played, and what they returned."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.randomness import seed_globals
from ..wire.protocol import Evaluate
from .statistics import OwnStatistics


class Scores:
    """What became of each episode of an evaluation that a worker plays.

    Args:
        request: the evaluation.
    """

    def __init__(self, request: Evaluate) -> None:
        self._found: dict[int, tuple[float, int, bool]] = {}  # by the episode's number
        self._missing = sum(map(len, request.episodes))

    @property
    def are_complete(self) -> bool:
        return len(self._found) == self._missing

    def add(self, number: int, episodic_return: float, length: int, has_ended: bool) -> None:
        """Note the return of an episode.

        Raises:
            ValueError: it is not finite.
        """
        if not math.isfinite(episodic_return):
            raise ValueError(f"an episode of the evaluation has returned {episodic_return}")
        self._found[number] = float(episodic_return), int(length), has_ended

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the returns, the lengths, and which have ended, in the order of the numbers."""
        in_order = [self._found[number] for number in sorted(self._found)]
        returns, lengths, ended = zip(*in_order, strict=True)
        return np.array(returns), np.array(lengths, np.int64), np.array(ended)


class Game:
    """The episodes that one environment plays in an evaluation, one after the other.

    An episode is one that counts, see `OwnStatistics`: of Atari a whole game, of several lives.

    Attributes:
        number: of the episode under way; None after the last one.
        seen: the last observation.
    """

    def __init__(
        self, env: gym.Env, own: OwnStatistics | None, numbers: Sequence[int], request: Evaluate
    ) -> None:
        self._env = env
        self._own = own
        self._request = request
        self._numbers = deque(numbers)
        self.number: int | None = None
        self.seen: Any = None

    def begin(self) -> None:
        """Begin the next episode, if there is one: each has a seed of its own."""
        self.number = self._numbers.popleft() if self._numbers else None
        self._return = 0.0
        self._length = 0
        if self.number is not None:
            seed = self._request.seed + self.number
            seed_globals(seed)
            self.seen, _ = self._env.reset(seed=seed)

    def step(self, action: Any, scores: Scores) -> bool:
        """Step the environment; return whether its next observation begins an episode."""
        if self._own is not None:
            self._own.begin_step()
        self.seen, reward, terminated, truncated, _ = self._env.step(action)
        self._return += float(reward)
        self._length += 1
        has_ended = bool(terminated or truncated)
        counts = self._end() if has_ended else None
        if counts is not None:
            scores.add(self.number, *counts, True)
        elif self._length >= self._request.max_steps:
            scores.add(self.number, self._return, self._length, False)
        else:
            return has_ended
        self.begin()
        return True

    def _end(self) -> tuple[float, int] | None:
        """Return what counts of an episode that has ended; if it goes on, reset the environment."""
        seen = self._return, self._length
        if self._own is None:
            return seen
        if not self._own.have_seen_end:  # only the reset tells
            self.seen, _ = self._env.reset()
        return self._own.counts(seen)
