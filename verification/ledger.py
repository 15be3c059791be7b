"""Environments with labeled observations, and a ledger of what the user has received.

Each observation says where it comes from.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from .world import World

# The world of the environments. Workers unpickle their environments and find it here.
world: World | None = None


class WrongBatch(AssertionError):
    """The user's results differ from what the environments did."""


def length_of(life: int) -> int:
    """Return the number of steps of an episode."""
    return 2 + life % 5


def reward_of(row: int, life: int, step: int) -> float:
    """Return the reward of the step that leads to this observation."""
    return row + life / 2**10 + step / 2**20


class Labelled(gym.Env):
    """An environment that observes (row, number of the episode among all episodes, step).

    Its steps may take long, and may raise.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)
    mark = 0  # the user sets it

    def __init__(self, row: int) -> None:
        self.row, self.life, self.step_number = row, 0, 0

    def _observation(self) -> np.ndarray:
        return np.array([self.row, self.life, self.step_number], np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin a new episode."""
        super().reset(seed=seed)
        world.work(self.row)
        self.life, self.step_number = world.begin_episode(), 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Take one step."""
        world.work(self.row)
        self.step_number += 1
        ends = self.step_number == length_of(self.life)
        reward = reward_of(self.row, self.life, self.step_number)
        return (
            self._observation(),
            reward,
            ends and self.life % 2 == 0,
            ends and self.life % 2 == 1,
            {},
        )


class Ledger:
    """The user's last observation of each row, and the check that the next one follows from it."""

    def __init__(self, num_envs: int) -> None:
        # Episode and step; None if they are unknown, as before a reset.
        self._last: list[tuple[int, int] | None] = [None] * num_envs
        # The last observations before a call that may have had no effect.
        self._given_up = list(self._last)
        # Whether the user has seen the episode's end, but not the next episode.
        self._ended = [False] * num_envs
        self._seen: set[tuple[int, int]] = set()  # (episode, step)
        # How many rollouts are outstanding that do not yet follow an evaluation; None for no
        # evaluation. The next rollout after them begins another episode.
        self._before: list[int | None] = [None] * num_envs

    def reset(self, observations: np.ndarray, mask: np.ndarray) -> None:
        """Check the result of a reset of the environments in ``mask``."""
        for row, observation in enumerate(observations):
            if mask[row]:
                self._begins(row, observation)
                self._before[row] = None
            elif self._last[row] is not None:
                stays = self._is(row, observation, *self._last[row])
                self._assert(stays, row, "is not reset, but shows", observation)

    def step(
        self,
        observations: np.ndarray,
        rewards: np.ndarray,
        ends: np.ndarray,
        cuts: np.ndarray,
        infos: dict[str, Any],
    ) -> None:
        """Check the result of a step of all environments."""
        lost = infos.get("worker_lost", np.zeros(len(rewards), bool))
        for row, observation in enumerate(observations):
            flags = bool(ends[row]), bool(cuts[row])
            if self._ended[row]:
                self._begins(row, observation)
                self._assert(
                    rewards[row] == 0 and flags == (False, False),
                    row,
                    "begins with",
                    rewards[row],
                    flags,
                )
            elif lost[row]:
                known = self._last[row] is None or self._is(row, observation, *self._last[row])
                self._assert(known, row, "is lost at", observation)
                self._assert(
                    rewards[row] == 0 and flags == (False, True),
                    row,
                    "is lost with",
                    rewards[row],
                    flags,
                )
                self._ended[row] = True  # the next episode follows
            else:
                self._goes_on(row, observation, rewards[row], flags)

    def rollout(self, rollout: Any, rows: np.ndarray) -> None:
        """Check a rollout of these rows."""
        ends = rollout.terminations | rollout.truncations
        finals = iter(rollout.final_observations)
        final_of = {(step, column): next(finals) for step, column in np.argwhere(ends)}
        for column, row in enumerate(rows):
            first = rollout.observations[0, column]
            starts = rollout.starts[column]
            self._assert(starts == (first[2] == 0), row, "starts", starts, "with", first)
            before = self._before[row]
            self._before[row] = before - 1 if before else None
            if self._ended[row] or before == 0:
                self._begins(row, first)
            elif self._last[row] is None or not self._is(row, first, *self._last[row]):
                self._jumps(row, first)
            after = [*rollout.observations[1:, column], rollout.next_observations[column]]
            for step, observation in enumerate(after):
                flags = (
                    bool(rollout.terminations[step, column]),
                    bool(rollout.truncations[step, column]),
                )
                seen = final_of[step, column] if any(flags) else observation
                self._goes_on(row, seen, rollout.rewards[step, column], flags)
                if any(flags):
                    self._begins(row, observation)

    def evaluate(self, evaluation: Any, shares: np.ndarray) -> None:
        """Check an evaluation, to which each row contributes as many episodes as its share."""
        rows = np.repeat(np.arange(len(shares)), shares)
        for row, total, length in zip(rows, evaluation.returns, evaluation.lengths, strict=True):
            sums = sum(reward_of(row, 0, step + 1) for step in range(int(length)))
            life = round((total - sums) * 2**10 / length)
            right = length == length_of(life) and abs(total - sums - length * life / 2**10) < 1e-9
            self._assert(right and (life, 0) not in self._seen, row, "scores", total, length)
            self._seen.add((life, 0))

    def will_begin(self, row: int, before: int) -> None:
        """Note that the row begins another episode after so many outstanding rollouts."""
        self._before[row] = before

    def lose_track(self, rows: np.ndarray) -> None:
        """Note that the user has given up a call, which these rows may still have executed."""
        for row in rows:
            self._given_up[row] = self._last[row] or self._given_up[row]
            self._last[row], self._ended[row], self._before[row] = None, False, None

    def _is(self, row: int, observation: np.ndarray, life: int, step: int) -> bool:
        return observation.tolist() == [row, life, step]

    def _begins(self, row: int, observation: np.ndarray) -> None:
        number, life, step = observation.astype(int).tolist()
        self._assert(
            number == row and step == 0 and (life, 0) not in self._seen,
            row,
            "begins with",
            observation,
        )
        self._last[row], self._ended[row] = (life, 0), False
        self._seen.add((life, 0))

    def _jumps(self, row: int, observation: np.ndarray) -> None:
        """Check an observation that does not follow from the last one.

        It belongs to another process's episode, or follows a call that was given up.
        """
        number, life, step = observation.astype(int).tolist()
        last, is_old = (
            self._last[row],
            (life, step) in self._seen and (life, step) != self._given_up[row],
        )
        self._assert(number == row and not is_old, row, "goes on with", observation)
        if last is not None:
            others = world.lives[last[0]] != world.lives[life]
            self._assert(step == 0 and others, row, "jumps from", last, "to", observation)
        self._last[row], self._ended[row] = (life, step), False
        self._seen.add((life, step))

    def _goes_on(
        self, row: int, observation: np.ndarray, reward: float, flags: tuple[bool, bool]
    ) -> None:
        if self._last[row] is None:
            self._jumps(row, observation)
            self._ended[row] = any(flags)
            return
        life, step = self._last[row][0], self._last[row][1] + 1
        expected = (
            step == length_of(life) and life % 2 == 0,
            step == length_of(life) and life % 2 == 1,
        )
        self._assert(
            self._is(row, observation, life, step),
            row,
            "goes on with",
            observation,
            "after",
            self._last[row],
        )
        self._assert(reward == reward_of(row, life, step), row, "has the reward", reward)
        self._assert(flags == expected, row, "ends as", flags)
        self._assert((life, step) not in self._seen, row, "comes twice", observation)
        self._seen.add((life, step))
        self._last[row], self._ended[row] = (life, step), any(flags)

    def _assert(self, holds: bool, *words: Any) -> None:
        if not holds:
            raise WrongBatch("row " + " ".join(map(str, words)))
