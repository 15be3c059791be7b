"""A worker's rows, stepped one by one: for the head, or by a policy that acts in them, at a
stretch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, SupportsIndex

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, iterate

from ..arrays.spaces import are_stacks, map_space, merge_rows
from ..wire.part import RolloutPart
from .connection import End
from .transitions import Transitions, stack

if TYPE_CHECKING:
    from ..policy.actor import Actor


class EnvRaised(Exception):
    """Environment ``env`` of a worker's rows raised this exception's cause."""

    def __init__(self, env: int) -> None:
        super().__init__(env)
        self.env = env


class _Envs(list[gym.Env]):
    """Environments, and which of them was taken last: the one that raises, if one does."""

    current: int | None = None

    def __iter__(self) -> Iterator[gym.Env]:
        for self.current, env in enumerate(super().__iter__()):
            yield env
        self.current = None

    def __getitem__(self, index: SupportsIndex) -> gym.Env:
        self.current = index
        return super().__getitem__(index)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Raise `EnvRaised` from what an environment raises; what none does passes through."""
        self.current = None
        try:
            yield
        except BaseException as error:
            if self.current is None or isinstance(error, End):
                raise
            raise EnvRaised(int(self.current)) from error


def stats_key(envs: Sequence[gym.Env]) -> str | None:
    """Return under which info environments count their own episodes (RecordEpisodeStatistics); None
    if not all do.
    """
    keys = [
        env.has_wrapper_attr("_stats_key") and env.get_wrapper_attr("_stats_key") for env in envs
    ]
    return keys[0] if all(keys) else None


class EnvsOneByOne(SyncVectorEnv):
    """Gymnasium's SyncVectorEnv, with infos kept per environment for the head to merge.

    ``built`` is called after each environment is.

    Raises:
        EnvRaised: from what an environment raises, here and in the methods that step it.
        RuntimeError: the environments are not of the head's spaces.
    """

    def __init__(
        self,
        env_fns: list[Callable[[], gym.Env]],
        observation_mode: Any,
        autoreset_mode: AutoresetMode,
        single_observation_space: gym.Space,
        single_action_space: gym.Space,
        info_keys: tuple[str, ...] = (),
        frame_stack: int | None = None,
        built: Callable[[], None] = lambda: None,
        **_: Any,
    ) -> None:
        self._info_keys = info_keys
        self._stacks = are_stacks(single_observation_space, frame_stack)
        self._batched_actions = batch_space(single_action_space, len(env_fns))
        self.infos: list[
            tuple[int, dict[str, Any]]
        ] = []  # (environment, info) in the order they arose
        mode = (
            observation_mode
            if observation_mode == "same"
            else (gym.spaces.Discrete(1), single_observation_space)
        )
        numbered = _Envs(env_fns)
        with numbered.named():
            envs = _Envs()
            for env_fn in numbered:
                envs.append(env_fn())
                built()
        super().__init__(
            [lambda env=env: env for env in envs],
            observation_mode=mode,
            autoreset_mode=autoreset_mode,
        )
        self.envs = envs
        for name, expected in (
            ("observation", single_observation_space),
            ("action", single_action_space),
        ):
            if (space := getattr(self, f"single_{name}_space")) != expected:
                raise RuntimeError(
                    f"ClusterEnv(..., observation_mode={observation_mode!r}) however the sub-environments {name} "
                    f"spaces are not equivalent. Environment 0 has {expected}, another has {space}."
                    + (
                        " If this is intentional, use `observation_mode='different'` instead."
                        * (name == "observation")
                    )
                )
        # The head has iterated over the actions already; a Box makes `step` take what it is given,
        # item by item.
        self.action_space = gym.spaces.Box(0, 1, (self.num_envs,))
        self._stats_key = stats_key(self.envs)  # they know better than the sum of rewards
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        if (
            "final_obs" in env_info
        ):  # an environment may reuse these arrays in the reset that follows
            env_info = _copy_arrays(env_info)
        if env_info:
            self.infos.append((env_num, env_info))
        return vector_infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask", slice(None))
        if (
            isinstance(mask, np.ndarray) and not mask.any()
        ):  # other workers' rows are reset; it is Gymnasium's error
            return self._observations, {}
        self._returns[mask] = self._lengths[mask] = 0
        with self.envs.named():
            result = super().reset(seed=seed, options=options)
        self._reset_infos = list(self.infos)
        return result

    def step(self, actions: Any) -> Any:
        ended = (
            self._autoreset_envs
        )  # with their last step: they have been reset then, or are in this one
        with self.envs.named():
            result = super().step(actions)
        self._returns[ended] = self._lengths[ended] = 0
        self._returns += result[1]
        self._lengths += ~ended if self.autoreset_mode == AutoresetMode.NEXT_STEP else 1
        return result

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with self.envs.named():
            return super().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: Any) -> None:
        with self.envs.named():
            super().set_attr(name, values)

    def cut_off(self, last: Any, cut: np.ndarray) -> Any:
        """Return what `step` would, had ``last`` come before it, and been the last of the episodes
        of ``cut``.

        The environments have just been reset; the rows that are not cut show that. See
        `protocol.CutOff`.
        """
        begun, self._autoreset_envs = deepcopy(self._observations), np.zeros(self.num_envs, bool)
        for i, observation in enumerate(
            iterate(batch_space(self.single_observation_space, self.num_envs), last)
        ):
            info: dict[str, Any] = {"worker_lost": True} if cut[i] else {}
            if cut[i] and self.autoreset_mode == AutoresetMode.SAME_STEP:
                info |= {"final_obs": observation, "final_info": {}}
            self._add_info({}, info, i)
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            begun, self._autoreset_envs = (
                merge_rows(self.single_observation_space, cut, last, begun),
                cut,
            )
        self.infos += [(i, info) for i, info in self._reset_infos if not self._autoreset_envs[i]]
        return begun, np.zeros(self.num_envs), np.zeros(self.num_envs, bool), cut

    def collect(self, actor: Actor, num_steps: int) -> RolloutPart:
        """Act and step ``num_steps`` times. Episodes that end are reset within the step."""
        ended, self._autoreset_envs = self._autoreset_envs, np.zeros(self.num_envs, bool)
        self._returns[ended] = self._lengths[ended] = 0
        if self.autoreset_mode != AutoresetMode.SAME_STEP and ended.any():
            self.reset(
                options={"reset_mask": ended}
            )  # from here on an episode is reset within its last step
        self.infos.clear()
        space = self.single_observation_space
        starts = self._lengths == 0
        transitions = Transitions(space, self._observations, num_steps, starts)
        final_observations: list[Any] = []
        episodes: list[
            tuple[int, float, int]
        ] = []  # (step * num_envs + environment, return, length)
        actor.start(num_steps, starts)
        envs = list(self.envs)  # a plain one is faster
        with self.envs.named():
            for step in range(num_steps + 1):
                self.envs.current = None  # while the policy acts
                now = map_space(lambda leaf: leaf[step], space, transitions.observations)  # noqa: B023
                concatenate(space, self._env_obs, now)
                if step == num_steps:
                    break
                actions = actor.act(now, starts)
                if isinstance(actions, dict | tuple):
                    actions = iterate(self._batched_actions, actions)
                for i, (env, action) in enumerate(list(zip(envs, actions, strict=True))):
                    self.envs.current = i
                    self._env_obs[i], reward, terminated, truncated, info = env.step(action)
                    transitions.rewards[step, i] = reward
                    for key in self._info_keys:
                        if key in info:
                            transitions.add_info(
                                key, [step * self.num_envs + i], np.array(info[key])[None]
                            )
                    if terminated or truncated:
                        transitions.terminations[step, i], transitions.truncations[step, i] = (
                            terminated,
                            truncated,
                        )
                        final_observations.append(
                            deepcopy(self._env_obs[i])
                        )  # the reset may write to it
                        counted = self._counted(i, reward, info)
                        if counted is not None:
                            episodes.append(
                                (step * self.num_envs + i, float(counted["r"]), int(counted["l"]))
                            )
                        self._env_obs[i], _ = env.reset()
                self._returns += transitions.rewards[step]
                self._lengths += 1
                starts = transitions.terminations[step] | transitions.truncations[step]
                self._returns[starts] = self._lengths[starts] = 0
        self._observations = deepcopy(now)
        return transitions.part(actor, stack(space, final_observations), self._stacks, episodes)

    def _counted(self, i: int, reward: float, info: dict[str, Any]) -> dict[str, Any] | None:
        """Return the return "r" and length "l" of an episode that has ended; None if it is not to
        count.
        """
        if self._stats_key is not None:
            return info.get(self._stats_key)
        return {"r": self._returns[i] + reward, "l": self._lengths[i] + 1}


def _copy_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copy_arrays, value))
    return (
        {key: _copy_arrays(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
