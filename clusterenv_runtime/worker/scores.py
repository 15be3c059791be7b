"""The episodes of an evaluation: which have been played, and what they returned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..wire.part import RolloutPart


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
