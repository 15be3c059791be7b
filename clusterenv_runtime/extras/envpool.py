"""EnvPool: environments in C++ that step together on a worker.

from clusterenv_runtime.extras.envpool import EnvPoolVectorEnv

envs = ClusterEnv(partial(EnvPoolVectorEnv, "LunarLander-v3"), num_workers=2, num_envs=64)
"""

from __future__ import annotations

import secrets
import warnings
from functools import partial
from typing import Any

import envpool
import numpy as np
from gymnasium.error import NameNotFound
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from ..arrays import map_space


class EnvPoolVectorEnv(VectorEnv):
    """EnvPool's environments in Gymnasium's API. Each has its own seed, and autoreset is disabled.

    EnvPool fixes the seeds when it makes the environments. Therefore the first `reset` makes them,
    and so does each `reset` with seeds. A seed of None stands for a random seed. The only option is
    ``reset_mask``, which selects environments whose episodes have ended.

    The infos hold the returns and lengths of ended episodes, as those of Gymnasium's
    RecordEpisodeStatistics do. For Atari games they are those of whole games, which may span
    several episodes, one per life, and of rewards before clipping.

    Args:
        env_id: EnvPool's name of the environment.
        num_envs: the number of environments.
        kwargs: keyword arguments of EnvPool. The default is one thread, because each core has a
            worker.

    Raises:
        gymnasium.error.NameNotFound: EnvPool has no such environment.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    # ClusterEnv takes the episodes from the infos, and gives each environment its own seed.
    keeps_episodes = takes_seeds = True

    def __init__(self, env_id: str, num_envs: int, **kwargs: Any) -> None:
        if env_id not in envpool.list_all_envs():
            raise NameNotFound(
                f"EnvPool has no {env_id}; envpool.list_all_envs() lists what it has"
            )
        self.num_envs = num_envs
        self._pool: Any = None  # EnvPool's object, which the first reset makes
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
        seeds, mask = seed or [None] * self.num_envs, (options or {}).get("reset_mask")
        if self._pool is None or any(one is not None for one in seeds):
            self.close_extras()
            self._pool = self._make(
                seed=[secrets.randbits(31) if one is None else one % 2**31 for one in seeds]
            )
            mask = None
        if mask is None:
            self._observations, infos = self._pool.reset()
            self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
            return self._observations, infos
        rows = np.flatnonzero(mask).astype(np.int32)
        # The step after an episode's last step resets the environment, whatever the action.
        # EnvPool's `reset` would begin a new Atari game where only a life was lost.
        actions = create_empty_array(self.single_action_space, len(rows))
        begun, _, _, _, infos = self._pool.step(actions, rows)

        def merged(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
            leaf = leaf.copy()  # the user has the observations of the last step
            leaf[mask] = new
            return leaf

        space = self.single_observation_space
        self._observations = map_space(merged, space, self._observations, begun)
        return self._observations, infos

    def step(self, actions: Any) -> Any:
        self._observations, rewards, terminations, truncations, infos = self._pool.step(actions)
        # Atari's infos have the reward before clipping, and say whether the game is over.
        returns, lengths = self._returns + infos.get("reward", rewards), self._lengths + 1
        over = infos.get("terminated", terminations).astype(bool) | truncations
        infos |= {"episode": {"r": returns, "l": lengths}, "_episode": over}
        self._returns, self._lengths = np.where(over, 0, returns), np.where(over, 0, lengths)
        return self._observations, rewards, terminations, truncations, infos

    def close_extras(self, **_: Any) -> None:
        if self._pool is not None:
            self._pool.close()
