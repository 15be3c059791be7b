"""One environment of a worker, as Gymnasium's `SyncVectorEnv` and a rollout call it."""

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorWrapper
from gymnasium.wrappers import RecordEpisodeStatistics

from ..errors import EnvRaised
from .connection import End

NUMBERS = {float, int, bool, np.float64, np.float32}


class Row:
    """One environment as `SyncVectorEnv` calls it, whose exceptions become `EnvRaised`.

    It is no `gymnasium.Wrapper`, so it needs only the methods that `SyncVectorEnv` needs.
    """

    def __init__(self, env: Any, number: int) -> None:
        self._env = env
        self._number = number
        self._shape = env.observation_space.shape  # None for Dict, Text and others
        self._statistics = find_wrapper(env, RecordEpisodeStatistics)
        self._before = 0, 0.0  # the state of the statistics before the step
        self._info: dict[str, Any] = {}  # of the last reset
        # While a process continues for a dead one: what the user saw last, and whether that was an
        # episode's end; and the first reset, which the user has not seen yet.
        self._seen: tuple[Any, bool] = None, False
        self._begun: tuple[Any, dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raise self._raised(error) from error

    def _raised(self, error: BaseException) -> BaseException:
        return error if isinstance(error, End) else EnvRaised(self._number)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        seed = kwargs.get("seed")
        begun, self._begun = self._begun, None
        if begun is not None and seed is None and not kwargs.get("options"):
            return begun
        if seed is not None:
            seed_globals(seed, self._number)
        observation, self._info = self._call(self._env.reset, **kwargs)
        return observation, self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._begun is not None:
            return self._continue()
        if (statistics := self._statistics) is not None:
            self._before = statistics.episode_count, statistics.episode_start_time
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
            if type(reward) not in NUMBERS:
                reward = _number(reward)
            shape = getattr(observation, "shape", ())  # a list and a number have none
            if self._shape not in (None, shape) and (shape := np.shape(observation)) != self._shape:
                raise ValueError(f"its observation must have the shape {self._shape}, got {shape}")
        except BaseException as error:
            raise self._raised(error) from error
        if terminated or truncated:
            observation = deepcopy(observation)  # the reset may overwrite it
        return observation, reward, terminated, truncated, info

    def _continue(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Truncate the episode of a process that died. If the user saw its end, show the reset."""
        seen, has_ended = self._seen
        if has_ended:
            (begun, info), self._begun = self._begun, None
            return begun, 0.0, False, False, info
        return seen, 0.0, False, True, {"worker_lost": True}

    def get_wrapper_attr(self, name: str) -> Any:
        value = self._call(self._env.get_wrapper_attr, name)
        return partial(self._call, value) if callable(value) else value

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        self._call(self._env.set_wrapper_attr, name, value)

    def close(self) -> None:
        self._call(self._env.close)

    def _counts(self) -> tuple[float, int] | tuple[()] | None:
        """Return the counts of an ended episode, see `Ended`, after the environment is reset.

        A `RecordEpisodeStatistics` among the wrappers may have counted another return. It may also
        have missed an end, for example that of a time limit around it, and then its next episode
        begins. Otherwise its episode goes on, for example when only a life is lost in a game.
        """
        if (own := self._statistics) is None:
            return ()
        count, start = self._before
        if own.episode_count > count and own.return_queue:
            return float(own.return_queue[-1]), int(own.length_queue[-1])
        return () if own.episode_start_time != start else None


def find_wrapper(env: Any, kind: Any) -> Any:
    """Return the outermost wrapper of this kind, or None."""
    while isinstance(env, gym.Wrapper | VectorWrapper):
        if isinstance(env, kind):
            return env
        env = env.env
    return None


def _number(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"its reward must be a number, got {reward!r:.100}") from None


def seed_globals(*numbers: int) -> None:
    """Seed the global generators of `random`, NumPy and, if it is loaded, torch.

    Environments may draw from these generators. Policies do not.
    """
    first, second, third = np.random.SeedSequence(numbers, spawn_key=(0,)).generate_state(3)
    random.seed(int(first))
    np.random.seed(second)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int(third))
