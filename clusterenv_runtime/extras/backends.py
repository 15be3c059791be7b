"""Backends of environments that step together: EnvPool, and vector versions of environments."""

from __future__ import annotations

import secrets
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from ..arrays.trees import map_space


class EnvPoolVectorEnv(VectorEnv):
    """EnvPool's environments in Gymnasium's API. Each has its own seed, and autoreset is disabled.

    EnvPool fixes the seeds when it makes the environments. Therefore the first `reset` makes them,
    and so does each `reset` with seeds. A seed of None stands for a random seed. The only option is
    ``reset_mask``, which selects environments whose episodes have ended. The infos of Atari games
    hold the statistics of whole games, see `_count`.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env_id: str, num_envs: int, **kwargs: Any) -> None:
        import envpool

        if env_id not in envpool.list_all_envs():
            raise gym.error.NameNotFound(
                f"EnvPool has no {env_id}; envpool.list_all_envs() lists what it has"
            )
        self.num_envs = num_envs
        self._pool: Any = None  # EnvPool's object, which the first reset makes
        # One thread is the default, because each core has a worker.
        kwargs = {"num_threads": 1, **kwargs, "num_envs": num_envs}
        self._make = partial(envpool.make_gymnasium, env_id, **kwargs)
        with warnings.catch_warnings():  # bounds lose precision as float32
            warnings.simplefilter("ignore")
            spec = envpool.make_spec(env_id, **kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(seed, int):
            seed = [seed + i for i in range(self.num_envs)]
        seeds = seed or [None] * self.num_envs
        mask = (options or {}).get("reset_mask")
        if self._pool is None or any(one is not None for one in seeds):
            self.close_extras()
            self._pool = self._make(
                seed=[secrets.randbits(31) if one is None else one % 2**31 for one in seeds]
            )
            mask = None
        if mask is None:
            self._observations, infos = self._pool.reset()
            self._returns = np.zeros(self.num_envs)
            self._lengths = np.zeros(self.num_envs, np.int64)
        else:
            space, rows = self.single_observation_space, np.flatnonzero(mask).astype(np.int32)
            # The step after an episode's last step resets the environment, whatever the action.
            # EnvPool's `reset` would begin a new Atari game where only a life was lost.
            some, _, _, _, infos = self._pool.step(
                create_empty_array(self.single_action_space, len(rows)), rows
            )

            def merged(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
                leaf = leaf.copy()  # the user has the observations of the last step
                leaf[mask] = new
                return leaf

            self._observations = map_space(merged, space, self._observations, some)
        return self._observations, infos

    def step(self, actions: Any) -> Any:
        self._observations, rewards, terminations, truncations, infos = self._pool.step(actions)
        if "reward" in infos:
            self._count(infos, truncations)
        return self._observations, rewards, terminations, truncations, infos

    def _count(self, infos: dict[str, Any], truncations: np.ndarray) -> None:
        """Add the returns and lengths of finished games to the infos, as Gymnasium does.

        The returns are of rewards before clipping. A game may span several episodes, one per life.
        """
        self._returns += infos["reward"]
        self._lengths += 1
        over = infos["terminated"].astype(bool) | truncations
        infos |= {
            "episode": {"r": self._returns.copy(), "l": self._lengths.copy()},
            "_episode": over,
        }
        self._returns[over] = self._lengths[over] = 0

    def close_extras(self, **_: Any) -> None:
        if self._pool is not None:
            self._pool.close()


def make_vec(backend: str, env_id: str, num_envs: int, **kwargs: Any) -> VectorEnv:
    """Make environments that step together, with the backend "vector" or "envpool".

    ``kwargs`` go to the constructor of the environments. With "vector", the environment must have
    a vector version, registered as Gymnasium's `vector_entry_point`. Atari games (ALE) have one in
    C++, which gets one thread by default, as EnvPool does, and resets in an episode's last step.
    Gymnasium's own vector version, of CartPole, supports only next-step autoreset, so `Together`
    refuses it.

    Raises:
        gymnasium.error.Error: there is no such environment, or it has no vector version.
        ModuleNotFoundError: EnvPool is not installed.
        ValueError: there is no such backend.
    """
    if backend == "vector":
        if "ale_py" in str(getattr(gym.registry.get(env_id), "vector_entry_point", None)):
            kwargs = {"num_threads": 1, "autoreset_mode": AutoresetMode.SAME_STEP, **kwargs}
        return gym.make_vec(env_id, num_envs, "vector_entry_point", **kwargs)
    if backend != "envpool":
        raise ValueError(f"backend must be 'vector' or 'envpool', got {backend!r}")
    try:
        return EnvPoolVectorEnv(env_id, num_envs, **kwargs)
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        raise ModuleNotFoundError(
            "EnvPool is not installed: pip install envpool", name="envpool"
        ) from None
