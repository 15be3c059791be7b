"""A worker's rows in a vector environment that steps them together: Gymnasium's own, or EnvPool's."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from .env_slice import EnvSlice, rollout_part, stack
from .spaces import map_space
from .sync import SyncRule


class EnvPoolVectorEnv(VectorEnv):
    """EnvPool's environments, each with its own seed, that are reset when asked (Gymnasium's disabled autoreset).

    EnvPool fixes the seeds when it makes the environments, so they are made at the first `reset`, and at each with
    seeds; where a seed is None, with a random one. Of the options there is only ``reset_mask``.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env_id: str, num_envs: int, **kwargs: Any) -> None:
        import envpool

        if env_id not in envpool.list_all_envs():
            raise gym.error.NameNotFound(f"EnvPool has no {env_id}; envpool.list_all_envs() tells what it has")
        self.num_envs, self._pool = num_envs, None
        # By default one thread: there is a worker for every core.
        kwargs = {"num_threads": 1, **kwargs, "num_envs": num_envs}
        self._make = partial(envpool.make_gymnasium, env_id, **kwargs)
        with warnings.catch_warnings():  # of bounds that lose precision as float32
            warnings.simplefilter("ignore")
            spec = envpool.make_spec(env_id, **kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> Any:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        mask = (options or {}).get("reset_mask")
        if self._pool is None or any(one is not None for one in seeds):
            self.close_extras()
            self._pool = self._make(seed=[secrets.randbits(31) if one is None else one % 2**31 for one in seeds])
            mask = None
        if mask is None:
            self._observations, infos = self._pool.reset()
        else:
            some, infos = self._pool.reset(np.flatnonzero(mask).astype(np.int32))

            def put(leaf: np.ndarray, new: np.ndarray) -> np.ndarray:
                leaf = leaf.copy()  # the user has the one from before
                leaf[mask] = new
                return leaf

            self._observations = map_space(put, self.single_observation_space, self._observations, some)
        return self._observations, infos

    def step(self, actions: Any) -> Any:
        self._observations, *result = self._pool.step(actions)
        return self._observations, *result

    def close_extras(self, **_: Any) -> None:
        if self._pool is not None:
            self._pool.close()


def make_vec(backend: str, env_id: str, num_envs: int, **kwargs: Any) -> VectorEnv:
    """Make environments that step together, of the backend "vector", which is their own such version, or "envpool".

    ``kwargs`` go to their constructor. Gymnasium itself has such a version, with NumPy, of CartPole only.

    Raises:
        gymnasium.error.Error: there is no such environment, or no such version of it.
        ModuleNotFoundError: EnvPool is not installed.
    """
    if backend == "vector":
        return gym.make_vec(env_id, num_envs, "vector_entry_point", **kwargs)
    if backend != "envpool":
        raise ValueError(f"backend must be 'vector' or 'envpool', got {backend!r}")
    try:
        return EnvPoolVectorEnv(env_id, num_envs, **kwargs)
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        raise ModuleNotFoundError("there is no EnvPool here: pip install envpool", name="envpool") from None


class BatchSlice:
    """A worker's rows, stepped together by a vector environment; they are for a policy to act in, at a stretch."""

    def __init__(
        self,
        env_fns: Callable[[int], VectorEnv],
        num_envs: int,
        single_observation_space: gym.Space,
        single_action_space: gym.Space,
        rule: SyncRule,
        **_: Any,
    ) -> None:
        self.rule, self.num_envs, self._envs = rule, num_envs, env_fns(num_envs)
        if self._envs.num_envs != num_envs:
            raise RuntimeError(f"the function was asked for {num_envs} environments and made {self._envs.num_envs}")
        for name, expected in (("observation", single_observation_space), ("action", single_action_space)):
            if (space := getattr(self._envs, f"single_{name}_space")) != expected:
                raise RuntimeError(f"the environments' {name} space here is {space}, at the head it was {expected}")
        self.single_observation_space = single_observation_space
        self._mode = AutoresetMode(self._envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._observations: Any = None
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._dead = np.zeros(num_envs, bool)  # rows that the next step resets, whatever the action

    def close(self) -> None:
        self._envs.close()

    def take_infos(self) -> list[Any]:
        return []

    def reset(self, *, seed: list[int | None], options: dict[str, Any] | None) -> Any:
        one_each = isinstance(self._envs, EnvPoolVectorEnv | SyncVectorEnv)  # Gymnasium wants one for all
        self._observations, infos = self._envs.reset(seed=seed if one_each else seed[0], options=options)
        self._returns[:], self._lengths[:], self._dead[:] = 0, 0, False
        return deepcopy(self._observations), infos  # it is sent without copying, perhaps while we go on

    def collect(self, actor: Any, num_steps: int) -> dict[str, Any]:
        """Act and step until each row has ``num_steps`` transitions; return this worker's part of a `Rollout`.

        Where the step after an episode's last one only resets (Gymnasium's next-step autoreset), rows get there at
        different times. What those that were first do until the last one has is not in the rollout.
        """
        space, shape = self.single_observation_space, (num_steps, self.num_envs)
        observations = map_space(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype), space, self._observations
        )
        rewards, terminations, truncations = np.empty(shape), np.zeros(shape, bool), np.zeros(shape, bool)
        final_observations = [map_space(lambda leaf: leaf[:0], space, self._observations)]
        episodes: list[np.ndarray] = [np.empty((0, 3))]  # as in `rollout_part`; those beyond our steps come last
        actor.start(*shape)
        aligned, step, count = self._mode != AutoresetMode.NEXT_STEP, 0, np.zeros(self.num_envs, np.int64)
        step_of = None if aligned else np.zeros(shape, np.int64)  # which of our steps each transition was
        while True:
            # The rows whose next observation is still wanted, and where; then those whose next transition is.
            rows = slice(None) if aligned else np.flatnonzero(count <= num_steps)
            here = step if aligned else (count[rows], rows)

            def put(leaf: np.ndarray, new: np.ndarray) -> None:
                leaf[here] = new[rows]  # noqa: B023

            map_space(put, space, observations, self._observations)
            if count.min() >= num_steps:
                break
            if not aligned:
                rows = np.flatnonzero(~self._dead & (count < num_steps))
                here = count[rows], rows
                step_of[here] = step
            seen, reward, terminated, truncated, info = self._envs.step(actor.act(self._observations))
            rewards[here], terminations[here], truncations[here] = reward[rows], terminated[rows], truncated[rows]
            self._returns += reward
            self._lengths += 1
            self._returns[self._dead] = self._lengths[self._dead] = 0
            count += ~self._dead
            ended = terminated | truncated
            if ended.any():
                rows = np.flatnonzero(ended)
                numbers = (count[rows] - 1) * self.num_envs + rows
                episodes.append(np.stack([numbers, self._returns[rows], self._lengths[rows]], 1))
                final = info["final_obs"] if self._mode == AutoresetMode.SAME_STEP else seen
                final_observations.append(_take(space, final, rows))
                self._returns[ended] = self._lengths[ended] = 0
                if self._mode == AutoresetMode.DISABLED:
                    seen, _ = self._envs.reset(options={"reset_mask": ended})
            if not aligned:
                self._dead = ended
            self._observations = seen
            step += 1
        counted = np.concatenate(episodes)
        order = counted[:, 0].argsort()  # by transition, which is not always the order that they came in
        ends = order[counted[order, 0] < rewards.size]
        return rollout_part(
            actor, space, observations, rewards, terminations, truncations,
            map_space(lambda *leaves: np.concatenate(leaves)[ends], space, *final_observations),
            counted[order], step_of,
        )  # fmt: skip


def _take(space: gym.Space, batch: Any, rows: np.ndarray) -> Any:
    """Return a copy of these rows of a batch, or of an array of objects."""
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return stack(space, list(batch[rows]))
    return map_space(lambda leaf: leaf[rows], space, batch)


def make_slice(registry: dict[str, Any], **settings: Any) -> EnvSlice | BatchSlice:
    """Build a worker's rows as `ClusterEnv` has set them up, with what the user has registered there."""
    gym.registry.update(registry)
    return (BatchSlice if callable(settings["env_fns"]) else EnvSlice)(**settings)
