"""A worker's environments, stepped one by one: with the head's actions, or by a policy."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, iterate

from ..arrays.trees import map_space, merge_rows
from ..envs.blueprint import LayoutOf
from ..errors import EnvRaised
from ..wire.part import RolloutPart
from .connection import End
from .transitions import Counts, OwnStatistics, Transitions, begin_step, stack

if TYPE_CHECKING:
    from ..policy.actor import Actor


class EnvsOneByOne:
    """Environments that behave, step for step, as they do in Gymnasium's `SyncVectorEnv`.

    Args:
        env_fns: functions that make the environments.
        layout_of: returns the layout of environments, given the spaces of one of them.
        built: a function that is called after each environment is built.
        first_row: the first environment's row.
        seed: the seed of the global random generators while environments are built.

    Attributes:
        layout: the spaces and modes of all environments, given by the first one.
        spaces: each environment's observation space if these may differ, otherwise empty.
        infos: pairs of an environment's index on this worker and an info, in the order in which
            they arose; the head merges them.

    Raises:
        EnvRaised: an environment raised an exception, here or in a method that calls it.
        SpacesError: an environment's spaces differ from those of the first one.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        layout_of: LayoutOf,
        built: Callable[[], None] = lambda: None,
        first_row: int = 0,
        seed: int = 0,
    ) -> None:
        self._first_row = first_row
        self.num_envs = len(env_fns)
        self.infos: list[tuple[int, dict[str, Any]]] = []
        # The infos of each environment's last reset by the head.
        self._reset_infos: list[tuple[int, dict[str, Any]]] = []
        self._current: int | None = None  # the environment that is being called
        self._envs: list[gym.Env] = []
        with self._names_env():
            for i, env_fn in enumerate(env_fns):
                self._current = i
                seed_globals(seed, first_row + i)
                self._envs.append(env_fn())
                built()
        first = self._envs[0]
        self.metadata = first.metadata
        self.render_mode = first.render_mode
        self.layout = layout_of(first.observation_space, first.action_space)
        self.spaces = self.layout.spaces_of(self._envs)
        self._space = self.layout.single_observation_space
        self._mode = self.layout.autoreset_mode
        self._action_space = batch_space(self.layout.single_action_space, len(env_fns))
        self._own = [OwnStatistics.of(env) for env in self._envs]
        self._seen: list[Any] = [None] * self.num_envs  # each environment's last observation
        self._ended = np.zeros(self.num_envs, bool)  # whether an ended episode awaits its reset
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)

    @contextlib.contextmanager
    def _names_env(self) -> Iterator[None]:
        """Raise `EnvRaised` from an exception of the environment that is being called."""
        try:
            yield
        except BaseException as error:
            if self._current is None or isinstance(error, End):
                raise
            raise EnvRaised(self._current) from error
        finally:
            self._current = None

    def _observations(self) -> Any:
        """Return the last observations as a batch of copies, which environments cannot change."""

        def own(leaf: Any) -> Any:
            return leaf if isinstance(leaf, np.ndarray) else deepcopy(leaf)

        return map_space(own, self._space, stack(self._space, self._seen))

    def _add_info(self, env: int, info: dict[str, Any]) -> None:
        if info:
            self.infos.append((env, info))

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: np.ndarray | None = None,
    ) -> Any:
        """Reset all environments, or those where ``mask`` is True. Return all observations."""
        rows = np.ones(self.num_envs, bool) if mask is None else mask
        self._ended[rows] = False
        self._returns[rows] = self._lengths[rows] = 0
        with self._names_env():
            for i in np.flatnonzero(rows).tolist():
                self._current = i
                if seeds[i] is not None:
                    seed_globals(seeds[i], self._first_row + i)
                self._seen[i], info = self._envs[i].reset(seed=seeds[i], options=options)
                self._add_info(i, info)
        others = [pair for pair in self._reset_infos if not rows[pair[0]]]
        self._reset_infos = others + self.infos
        return self._observations()

    def step(self, actions: Sequence[Any]) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """Step each environment. Return observations, rewards, terminations and truncations."""
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros((2, self.num_envs), bool)
        resets = self._ended & (self._mode == AutoresetMode.NEXT_STEP)
        with self._names_env():
            for i, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
                self._current = i
                if resets[i]:
                    self._seen[i], info = env.reset()
                    self._add_info(i, info)
                    continue
                if self._ended[i]:  # autoreset is disabled
                    raise AssertionError("an environment must be reset after its episode has ended")
                self._seen[i], rewards[i], terminations[i], truncations[i], info = env.step(action)
                has_ended = terminations[i] or truncations[i]
                if has_ended and self._mode == AutoresetMode.SAME_STEP:
                    # The reset may overwrite the environment's arrays.
                    final = _copy_arrays({"final_obs": self._seen[i], "final_info": info})
                    self._add_info(i, final)
                    self._seen[i], info = env.reset()
                self._add_info(i, info)
        ended = terminations | truncations
        self._count(rewards, ~resets, ended)
        self._ended = ended & (self._mode != AutoresetMode.SAME_STEP)
        return self._observations(), rewards, terminations, truncations

    def _count(self, rewards: np.ndarray, lengths: Any, ended: np.ndarray) -> None:
        """Add a step to the episodes' returns and lengths, and start new ones at 0."""
        self._returns += rewards
        self._lengths += lengths
        self._returns[ended] = self._lengths[ended] = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or get its attribute. Return the results."""
        results = []
        with self._names_env():
            for i, env in enumerate(self._envs):
                self._current = i
                value = env.get_wrapper_attr(name)
                results.append(value(*args, **kwargs) if callable(value) else value)
        return tuple(results)

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of each environment to its value in ``values``."""
        with self._names_env():
            for i, (env, value) in enumerate(zip(self._envs, values, strict=True)):
                self._current = i
                env.set_wrapper_attr(name, value)

    def cut_off(self, last: Any, cut: np.ndarray) -> Any:
        """Return a step's results as if it had truncated the episodes where ``cut`` is True.

        The environments have just been reset. ``last`` holds the observations before the reset.
        Rows that are not cut show the reset. See `protocol.CutOff`.
        """
        begun = self._observations()
        is_same_step = self._mode == AutoresetMode.SAME_STEP
        lost = iterate(batch_space(self._space, self.num_envs), last)
        for i, observation in enumerate(lost):
            if cut[i]:
                final = {"final_obs": observation, "final_info": {}} if is_same_step else {}
                self._add_info(i, {"worker_lost": True, **final})
        if not is_same_step:
            begun = merge_rows(self._space, cut, last, begun)
            self._ended = cut.copy()
        self.infos += [(i, info) for i, info in self._reset_infos if not self._ended[i]]
        return begun, np.zeros(self.num_envs), np.zeros(self.num_envs, bool), cut

    def collect(self, actor: Actor, num_steps: int) -> RolloutPart:
        """Act and step ``num_steps`` times. Reset each episode in the step that ends it."""
        if self._ended.any():
            self.reset([None] * self.num_envs, None, self._ended.copy())
        self.infos.clear()
        space = self._space
        starts = self._lengths == 0
        transitions = Transitions(self._observations(), num_steps, starts)
        finals: list[Any] = []  # the last observations of ended episodes
        episodes: list[tuple[int, float, int]] = []  # (transition, return, length)
        actor.start(starts)
        for step in range(num_steps + 1):
            now = map_space(lambda leaf: leaf[step], space, transitions.observations)  # noqa: B023
            concatenate(space, self._seen, now)
            if step == num_steps:
                break
            actions = actor.act(now, starts)
            if isinstance(actions, dict | tuple):
                actions = iterate(self._action_space, actions)
            pairs = list(zip(self._envs, actions, strict=True))
            begin_step(self._own)
            with self._names_env():
                for i, (env, action) in enumerate(pairs):
                    self._current = i
                    transition = step * self.num_envs + i
                    self._seen[i], reward, terminated, truncated, info = env.step(action)
                    transitions.rewards[step, i] = reward
                    for key in self.layout.info_keys:
                        if key in info:
                            transitions.add_info(key, [transition], np.array(info[key])[None])
                    if terminated or truncated:
                        transitions.terminations[step, i] = terminated
                        transitions.truncations[step, i] = truncated
                        finals.append(deepcopy(self._seen[i]))  # the reset may overwrite it
                        counts = self._end(i, reward)
                        if counts is not None:
                            episodes.append((transition, *counts))
            starts = transitions.terminations[step] | transitions.truncations[step]
            self._count(transitions.rewards[step], 1, starts)
        return transitions.part(actor, stack(space, finals), self.layout.stacks, episodes)

    def _end(self, i: int, reward: float) -> Counts | None:
        """Reset an environment whose episode has ended. Return the episode's return and length.

        Return None if the episode goes on according to the environment's own statistics.
        """
        seen = float(self._returns[i] + reward), int(self._lengths[i] + 1)
        self._seen[i], _ = self._envs[i].reset()
        own = self._own[i]
        return seen if own is None else own.counts(seen)

    def close(self) -> None:
        """Close all environments, even if some of them raise."""
        with contextlib.ExitStack() as stack:
            for env in reversed(self._envs):
                stack.callback(env.close)


def seed_globals(*numbers: int) -> None:
    """Seed the global generators of `random`, NumPy and, if it is loaded, torch.

    Environments may draw from these generators. Policies do not.
    """
    first, second, third = np.random.SeedSequence(numbers, spawn_key=(0,)).generate_state(3)
    random.seed(int(first))
    np.random.seed(second)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int(third))


def _copy_arrays(value: Any) -> Any:
    """Copy a value's containers, with copies of the arrays in them."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copy_arrays(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy_arrays, value))
    return value
