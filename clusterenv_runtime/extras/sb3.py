"""Stable-Baselines3: a `VecEnv` whose environments live in worker processes.

from clusterenv_runtime.extras.sb3 import ClusterVecEnv

envs = ClusterVecEnv([make_env] * 8, num_workers=2)
PPO("MlpPolicy", envs).learn(100_000)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env import VecEnv

from ..env import ClusterEnv


class Numbered(gym.Wrapper):
    """A wrapper on a worker that knows its environment's number, for calls to some environments.

    It puts each info into a list, so that a vector environment does not merge the infos.
    """

    def __init__(self, env_fn: Callable[[], gym.Env], number: int) -> None:
        super().__init__(env_fn())
        self.number = number

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation, {"info": [info]}

    def step(self, action: Any) -> Any:
        *results, info = self.env.step(action)
        return *results, {"info": [info]}

    def call_of(self, numbers: Sequence[int], name: str, args: Any, kwargs: Any) -> Any:
        """Call a method if this environment is among ``numbers``. Otherwise return None."""
        if self.number in numbers:
            return self.env.get_wrapper_attr(name)(*args, **kwargs)

    def set_wrapper_attr(self, name: str, value: Any, **_: Any) -> bool:
        """Set an attribute on the environment itself, as SB3 does, and not on what it wraps."""
        setattr(self.env, name, value)
        return True

    def is_wrapped_by(self, wrapper: type[gym.Wrapper]) -> bool:
        """Return whether the environment is wrapped by this class."""
        return is_wrapped(self.env, wrapper)


class ClusterVecEnv(VecEnv):
    """A `VecEnv` equal to ``DummyVecEnv(env_fns)`` to the last bit: rewards, infos and seeds, too.

    Args:
        env_fns: functions that make the environments, as `DummyVecEnv` takes them.
        num_workers: the number of worker processes.
        options: other options of `ClusterEnv`.

    Raises:
        TypeError, ValueError, RuntimeError, StartupError, WorkerDiedError: as in `ClusterEnv`.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gym.Env]], num_workers: int = 2, **options: Any
    ) -> None:
        numbered = [partial(Numbered, env_fn, number) for number, env_fn in enumerate(env_fns)]
        self.envs = envs = ClusterEnv(numbered, num_workers, autoreset_mode="SameStep", **options)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set before.

        Raises:
            ValueError: the options are not the same for all environments.
        """
        options = self._options[0]
        if any(other != options for other in self._options):
            raise ValueError("all environments are reset with the same options")
        observations, infos = self.envs.reset(seed=list(self._seeds), options=options or None)
        self.reset_infos = self._of_each(infos)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Request a step of all environments."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Return observations, float32 rewards, ends of episodes, and each environment's info."""
        observations, rewards, terminations, truncations, found = self.envs.step(self._actions)
        dones = terminations | truncations
        infos, finals = self._of_each(found), self._of_each(found.get("final_info", {}))
        for number in np.flatnonzero(dones):
            self.reset_infos[number] = infos[number]
            infos[number] = finals[number] | {"terminal_observation": found["final_obs"][number]}
        for number in np.flatnonzero(found.get("worker_lost", [])):
            infos[number]["worker_lost"] = True
        for info, terminated, truncated in zip(infos, terminations, truncations, strict=True):
            info["TimeLimit.truncated"] = bool(truncated and not terminated)
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def get_images(self) -> Any:
        """Return what each environment renders."""
        return self.envs.render()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the selected environments, if `ClusterEnv.call` can return it."""
        return self.env_method("get_wrapper_attr", attr_name, indices=indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the selected environments."""
        if len({*self._numbers(indices)}) == self.num_envs:
            self.envs.set_attr(attr_name, [value] * self.num_envs)  # also on replacements
        else:
            self.env_method("__setattr__", attr_name, value, indices=indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the selected environments."""
        numbers = self._numbers(indices)
        results = self.envs.call("call_of", numbers, method_name, method_args, method_kwargs)
        return [results[number] for number in numbers]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        """Return whether each of the selected environments is wrapped by this class."""
        wrapped = self.envs.call("is_wrapped_by", wrapper_class)
        return [wrapped[number] for number in self._numbers(indices)]

    def _of_each(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each environment's info, which `Numbered` has put into a list."""
        return [found[0] if found else {} for found in infos.get("info", [None] * self.num_envs)]

    def _numbers(self, indices: Any) -> list[int]:
        # Numbers may be negative.
        return [range(self.num_envs)[number] for number in self._get_indices(indices)]
