"""Wrappers for Atari games, like CleanRL's: an episode is one life, and begins with a shot."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import gymnasium as gym

with suppress(ModuleNotFoundError):  # Gymnasium then says what is missing
    import ale_py

    gym.register_envs(ale_py)


class EpisodicLife(gym.Wrapper):
    """Ends an episode with each life. The next episode continues the game.

    A reset begins a new game if the game is over, or if the reset gets a seed.
    """

    is_over, lives = True, 0

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.is_over = terminated or truncated
        before, self.lives = self.lives, self._lives_left()
        return observation, reward, terminated or 0 < self.lives < before, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.is_over |= seed is not None
        if not self.is_over:
            observation, _, terminated, truncated, info = self.env.step(0)
            self.is_over = terminated or truncated
        if self.is_over:
            observation, info = self.env.reset(seed=seed, options=options)
        self.is_over, self.lives = False, self._lives_left()
        return observation, info

    def _lives_left(self) -> int:
        game: Any = self.unwrapped
        return int(game.ale.lives())


class FireReset(gym.Wrapper):
    """Fires after each reset, because some games do not begin otherwise."""

    def reset(self, **kwargs: Any) -> Any:
        self.env.reset(**kwargs)
        observation, _, terminated, truncated, info = self.env.step(1)
        return self.env.reset(**kwargs) if terminated or truncated else (observation, info)
