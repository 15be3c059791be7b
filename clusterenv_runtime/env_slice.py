"""A worker's rows: stepped one by one for the head, or acted in by a policy, at a stretch."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from .spaces import map_space, merge_rows
from .sync import SyncRule, sampled_states


class EnvSlice(SyncVectorEnv):
    """A worker's rows: Gymnasium's SyncVectorEnv, with infos kept per environment for the head to merge."""

    def __init__(
        self,
        env_fns: list[Any],
        observation_mode: Any,
        autoreset_mode: AutoresetMode,
        single_observation_space: gym.Space,
        single_action_space: gym.Space,
        rule: SyncRule,
    ) -> None:
        self.rule = rule
        self.infos: list[tuple[int, dict[str, Any]]] = []  # (environment, info) in the order they arose
        mode = observation_mode if observation_mode == "same" else (gym.spaces.Discrete(1), single_observation_space)
        env_fns = [partial(_build, env_fn, i) for i, env_fn in enumerate(env_fns)]
        super().__init__(env_fns, observation_mode=mode, autoreset_mode=autoreset_mode)
        for name, expected in (("observation", single_observation_space), ("action", single_action_space)):
            if (space := getattr(self, f"single_{name}_space")) != expected:
                raise RuntimeError(
                    f"ClusterEnv(..., observation_mode={observation_mode!r}) however the sub-environments {name} "
                    f"spaces are not equivalent. Environment 0 has {expected}, another has {space}."
                    + (" If this is intentional, use `observation_mode='different'` instead." * (name == "observation"))
                )
        # The head has iterated over the actions already; a Box makes `step` take what it is given, item by item.
        self.action_space = gym.spaces.Box(0, 1, (self.num_envs,))
        # Environments that count their own episodes (RecordEpisodeStatistics) know better than the sum of rewards.
        keys = [env.has_wrapper_attr("_stats_key") and env.get_wrapper_attr("_stats_key") for env in self.envs]
        self._stats_key = keys[0] if all(keys) else None
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if "final_obs" in env_info:  # an environment may reuse these arrays in the reset that follows
            env_info = _copy_arrays(env_info)
        if env_info:
            self.infos.append((env_num, env_info))
        return vector_infos

    def take_infos(self) -> list[tuple[int, dict[str, Any]]]:
        infos, self.infos = self.infos, []
        return infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask", slice(None))
        self._returns[mask] = self._lengths[mask] = 0
        result = super().reset(seed=seed, options=options)
        self._reset_infos = list(self.infos)
        return result

    def step(self, actions: Any) -> Any:
        ended = self._autoreset_envs  # with their last step: they have been reset then, or are in this one
        result = super().step(actions)
        self._returns[ended] = self._lengths[ended] = 0
        self._returns += result[1]
        self._lengths += ~ended if self.autoreset_mode == AutoresetMode.NEXT_STEP else 1
        return result

    def cut_off(self, last: Any, cut: np.ndarray) -> Any:
        """Return what `step` would, had ``last`` come before it, and been the last of the episodes of ``cut``.

        The environments have just been reset; the rows that are not cut show that. See `protocol.Lost`.
        """
        begun, self._autoreset_envs = deepcopy(self._observations), np.zeros(self.num_envs, bool)
        for i, observation in enumerate(iterate(batch_space(self.single_observation_space, self.num_envs), last)):
            info: dict[str, Any] = {"worker_lost": True} if cut[i] else {}
            if cut[i] and self.autoreset_mode == AutoresetMode.SAME_STEP:
                info |= {"final_obs": observation, "final_info": {}}
            self._add_info({}, info, i)
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            begun, self._autoreset_envs = merge_rows(self.single_observation_space, cut, last, begun), cut
        self.infos += [(i, info) for i, info in self._reset_infos if not self._autoreset_envs[i]]
        return begun, np.zeros(self.num_envs), np.zeros(self.num_envs, bool), cut

    def collect(self, actor: Any, num_steps: int) -> dict[str, Any]:
        """Act and step ``num_steps`` times; return this worker's part of a `Rollout`, see `Rollout.join`."""
        ended, self._autoreset_envs = self._autoreset_envs, np.zeros(self.num_envs, bool)
        self._returns[ended] = self._lengths[ended] = 0
        if self.autoreset_mode != AutoresetMode.SAME_STEP and ended.any():
            self.reset(options={"reset_mask": ended})  # from here on an episode is reset within its last step
        self.infos.clear()
        space, shape = self.single_observation_space, (num_steps, self.num_envs)
        observations = map_space(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), space, self._observations
        )
        rewards, terminations, truncations = np.empty(shape), np.zeros(shape, bool), np.zeros(shape, bool)
        final_observations: list[Any] = []
        episodes: list[tuple[int, float, int]] = []  # (step * num_envs + environment, return, length)
        actor.start(*shape)
        for step in range(num_steps + 1):
            now = map_space(lambda leaf: leaf[step], space, observations)  # noqa: B023
            concatenate(space, self._env_obs, now)
            if step == num_steps:
                break
            i = None  # while the policy acts: see failed_env
            for i, (env, action) in enumerate(zip(self.envs, actor.act(now), strict=True)):
                self._env_obs[i], reward, terminated, truncated, info = env.step(action)
                rewards[step, i] = reward
                if terminated or truncated:
                    terminations[step, i], truncations[step, i] = terminated, truncated
                    final_observations.append(deepcopy(self._env_obs[i]))  # the reset may write to it
                    if self._stats_key is None:
                        counted = {"r": self._returns[i] + reward, "l": self._lengths[i] + 1}
                    else:
                        counted = info.get(self._stats_key)
                    if counted is not None:
                        episodes.append((step * self.num_envs + i, float(counted["r"]), int(counted["l"])))
                    self._env_obs[i], _ = env.reset()
            self._returns += rewards[step]
            self._lengths += 1
            ended = terminations[step] | truncations[step]
            self._returns[ended] = self._lengths[ended] = 0
        self._observations = deepcopy(now)
        return rollout_part(
            actor, space, observations, rewards, terminations, truncations, stack(space, final_observations), episodes
        )


def rollout_part(
    actor: Any,
    space: gym.Space,
    observations: Any,
    rewards: np.ndarray,
    terminations: np.ndarray,
    truncations: np.ndarray,
    final_observations: Any,
    episodes: Any,
    steps: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return a worker's part of a `Rollout`, see `Rollout.join`.

    ``observations`` go one step further than the rest; ``episodes`` are (step * num_envs + environment, return,
    length); ``steps``, if the actor acted more often than there are steps, says which of its steps each of ours is.
    """
    actions, logprobs, params = actor.finish(sampled_states(rewards.size), steps)
    numbers, returns, lengths = np.array(episodes, np.float64).reshape(-1, 3).T
    return {
        "observations": map_space(lambda leaf: leaf[:-1], space, observations),
        "actions": actions,
        "logprobs": logprobs,
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
        "final_observations": final_observations,
        "next_observations": map_space(lambda leaf: leaf[-1], space, observations),
        "episodes": numbers.astype(np.int64),
        "episodic_returns": returns.copy(),
        "episodic_lengths": lengths.astype(np.int64),
        "params": params,
    }


def _copy_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copy_arrays, value))
    return {key: _copy_arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def stack(space: gym.Space, items: list[Any]) -> Any:
    """Return a batch of these, which may be none."""
    empty = create_empty_array(space, len(items), np.empty)
    return concatenate(space, items, empty) if items else empty


def _build(env_fn: Callable[[], gym.Env], i: int) -> gym.Env:
    return env_fn()


def failed_env(error: BaseException) -> int | None:
    """Return which environment raised: the ``i`` of SyncVectorEnv's loops and of `_build`, read from the traceback."""
    files = (__file__, gym.vector.sync_vector_env.__file__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in files]
    return next((frame.f_locals["i"] for frame in frames if "i" in frame.f_locals), None)
