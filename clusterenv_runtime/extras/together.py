"""Environments that step together on a worker: Gymnasium's vector environments, or EnvPool's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import create_empty_array
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from ..arrays.trees import map_space
from ..envs.blueprint import LayoutOf
from ..wire.part import RolloutPart
from ..worker.transitions import Counts, OwnStatistics, Transitions, begin_step, stack
from .backends import EnvPoolVectorEnv

if TYPE_CHECKING:
    from ..policy.actor import Actor


class AutoresetError(ValueError):
    """Environments that step together reset in the step after an episode's last step."""


class Together:
    """Environments that step together: ``ClusterEnv(Together(make), num_envs=64)``.

    Args:
        make: a function that takes a number of environments and returns a `VectorEnv` of that many.
            The autoreset mode of the `VectorEnv` must be "SameStep" or "Disabled".
    """

    def __init__(self, make: Callable[[int], VectorEnv]) -> None:
        self._make = make

    def build(self, layout_of: LayoutOf, num_envs: int) -> EnvsTogether:
        """Make a worker's environments.

        Raises:
            AutoresetError: their autoreset mode is "NextStep", or they do not state a mode.
        """
        envs = self._make(num_envs)
        if autoreset_mode(envs) == AutoresetMode.NEXT_STEP:
            envs.close()
            raise AutoresetError(
                f"{type(envs.unwrapped).__name__} has the autoreset mode 'NextStep', which "
                "ClusterEnv does not support for environments that step together: make it with "
                "autoreset_mode='SameStep' (a SyncVectorEnv with gym.make_vec(..., "
                "vector_kwargs={'autoreset_mode': 'SameStep'})), or let the environments step "
                "one by one"
            )
        return EnvsTogether(envs, layout_of, num_envs)


def autoreset_mode(envs: VectorEnv) -> AutoresetMode:
    """Return the autoreset mode that a vector environment states, by default NEXT_STEP."""
    return AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))


def key_of_statistics(envs: VectorEnv) -> str | None:
    """Return the info key of the episode statistics that the environments keep themselves.

    Gymnasium's RecordEpisodeStatistics and EnvPool keep them. For all other vector environments the
    key is None.
    """
    while isinstance(envs, VectorWrapper):
        if isinstance(envs, RecordEpisodeStatistics):
            return envs._stats_key
        envs = envs.env
    return "episode" if isinstance(envs, EnvPoolVectorEnv) else None


class EnvsTogether:
    """A worker's environments in one vector environment, in which a policy acts.

    An error in the vector environment does not say which environment raised it.

    Args:
        envs: the environments.
        layout_of: a function that returns the environments' layout from the spaces of one of them.
        num_envs: the number of environments that the head expects.

    Raises:
        RuntimeError: ``envs`` has more or fewer environments.
    """

    def __init__(self, envs: VectorEnv, layout_of: LayoutOf, num_envs: int) -> None:
        if envs.num_envs != num_envs:
            raise RuntimeError(
                f"the function was asked for {num_envs} environments and made {envs.num_envs}"
            )
        self.num_envs = num_envs
        self.metadata = envs.metadata
        self.render_mode = envs.render_mode
        self.layout = layout_of(envs.single_observation_space, envs.single_action_space)
        self.spaces: list[Space[Any]] = []  # empty: all environments have the same spaces
        self._envs = envs
        self._space = self.layout.single_observation_space
        self._example = create_empty_array(self._space, 1)
        self._mode = autoreset_mode(envs)
        self.infos: list[Any] = []  # empty: infos of a reset have no place in a rollout
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._key = key_of_statistics(envs)
        # The statistics of each environment, where the vector environment keeps none.
        inside = envs.unwrapped
        each = inside.envs if self._key is None and isinstance(inside, SyncVectorEnv) else []
        self._own = [OwnStatistics.of(env) for env in each] or [None] * num_envs

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Set an attribute of each environment, or of the one object that holds all environments.

        Such an object gets the value if it is the same for all rows, and otherwise an array of the
        rows' values.

        Raises:
            AttributeError: the environments have no attribute of this name.
        """
        if hasattr(self._envs, "set_attr"):
            self._envs.set_attr(name, values)
            return
        envs = self._envs.unwrapped
        getattr(envs, name)
        is_one = len({pickle.dumps(value) for value in values}) == 1
        setattr(envs, name, values[0] if is_one else np.array(values))

    def reset(self, seeds: list[int | None], options: dict[str, Any] | None) -> Any:
        """Reset all environments. Return the observations."""
        # Other vector environments take only the seed of their first environment.
        kinds = EnvPoolVectorEnv | SyncVectorEnv | AsyncVectorEnv
        takes_all = isinstance(self._envs.unwrapped, kinds)
        seed: Any = seeds if takes_all else seeds[0]
        observations, _ = self._envs.reset(seed=seed, options=options)
        self._observations = self._of_space(observations)
        self._returns[:] = self._lengths[:] = 0
        # A copy, because the reply sends its arrays uncopied, perhaps while the environments step.
        return deepcopy(self._observations)

    def _of_space(self, observations: Any) -> Any:
        """Return a batch in the dtypes of its space, because not all environments keep to them."""

        def cast(leaf: Any, example: Any) -> Any:
            is_array = isinstance(example, np.ndarray)
            return leaf.astype(example.dtype, copy=False) if is_array else leaf

        return map_space(cast, self._space, observations, self._example)

    def collect(self, actor: Actor, num_steps: int) -> RolloutPart:
        """Act and step ``num_steps`` times. Reset environments in the step that ends an episode."""
        space = self._space
        starts = self._lengths == 0
        transitions = Transitions(self._observations, num_steps, starts)
        finals = [_take(space, self._observations, slice(0))]  # the last observations of episodes
        episodes: list[Any] = []  # (transition, return, length)
        actor.start(starts)
        for step in range(num_steps):
            self._see(transitions, step)
            actions = actor.act(self._observations, starts)
            begin_step(self._own)
            seen, rewards, terminations, truncations, infos = self._envs.step(actions)
            ended = terminations | truncations
            self._returns += rewards
            self._lengths += 1
            transitions.rewards[step] = rewards
            transitions.terminations[step] = terminations
            transitions.truncations[step] = truncations
            self._keep_infos(transitions, step, infos, ended)
            if ended.any():
                led_to = infos["final_obs"] if self._mode == AutoresetMode.SAME_STEP else seen
                finals.append(self._final(led_to, np.flatnonzero(ended)))
                seen, counted = self._end(ended, seen, infos)
                for row, counts in counted.items():
                    episodes.append((step * self.num_envs + row, *counts))
            self._observations, starts = self._of_space(seen), ended
        self._see(transitions, num_steps)
        final = map_space(lambda *leaves: np.concatenate(leaves), space, *finals)
        return transitions.part(actor, final, self.layout.stacks, episodes)

    def _end(
        self, ended: np.ndarray, seen: Any, infos: dict[str, Any]
    ) -> tuple[Any, dict[int, Counts]]:
        """Reset the environments whose episodes have ended, unless they reset themselves.

        Return the observations, and by row the return and length of each episode that counts.
        """
        if self._mode == AutoresetMode.DISABLED:
            seen, _ = self._envs.reset(options={"reset_mask": ended})
        own = None if self._key is None else infos.get(self._key)
        counted = {}
        for row in np.flatnonzero(ended).tolist():
            seen_here = self._returns[row], self._lengths[row]
            counts: Counts | None = seen_here
            statistics = self._own[row]
            if statistics is not None:
                counts = statistics.counts(seen_here)
            elif own is not None:
                counts = (own["r"][row], own["l"][row]) if infos[f"_{self._key}"][row] else None
            if counts is not None:
                counted[row] = counts
        self._returns[ended] = self._lengths[ended] = 0
        return seen, counted

    def _see(self, transitions: Transitions, step: int) -> None:
        """Write the current observations to this step of the transitions."""

        def write(room: np.ndarray, leaf: np.ndarray) -> None:
            room[step] = leaf

        map_space(write, self._space, transitions.observations, self._observations)

    def _final(self, batch: Any, rows: np.ndarray) -> Any:
        """Return a copy of some rows of a batch, which may be an array of rows as objects."""
        if isinstance(batch, np.ndarray) and batch.dtype == object:
            return self._of_space(stack(self._space, list(batch[rows])))
        return self._of_space(_take(self._space, batch, rows))

    def _keep_infos(
        self, transitions: Transitions, step: int, infos: dict[str, Any], ended: np.ndarray
    ) -> None:
        """Keep those infos of a step that ``info_keys`` names."""
        everywhere = np.ones(self.num_envs, bool)
        sources = [(infos, everywhere)]
        if self._mode == AutoresetMode.SAME_STEP:
            # Where an episode has ended, ``infos`` holds the infos of the reset.
            sources = [(infos, ~ended), (infos.get("final_info", {}), ended)]
        for key in self.layout.info_keys:
            for source, among in sources:
                if key in source:
                    rows = np.flatnonzero(among & source.get(f"_{key}", everywhere))
                    if rows.size:
                        values = np.asarray(source[key])[rows]
                        transitions.add_info(key, step * self.num_envs + rows, values)


def _take(space: Space[Any], batch: Any, indices: Any) -> Any:
    """Return a copy of these rows of a batch of ``space``, whose leaves are arrays."""
    return map_space(lambda leaf: leaf[indices], space, batch)
