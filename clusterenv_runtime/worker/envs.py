"""A worker's environments: a Gymnasium vector environment that the head or a policy steps.

Usually this is a `SyncVectorEnv`, in which each environment is a `Row`. It can also be a
`VectorEnv` that the user's function makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

from ..arrays import Frames, fold, leaves, map_space, map_tree, not_finite
from ..errors import EnvRaised
from ..messages import Collect, Part
from .rows import Row, find_wrapper, seed_globals

if TYPE_CHECKING:
    from ..policy.actor import Actor
    from ..setup import EnvFns

# The end of an episode: its row, its last observation, and its return and length; no numbers if
# these are the sums of what was seen, and None if another episode goes on inside.
Ended = tuple[int, Any, tuple[float, int] | tuple[()] | None]


class WorkerEnvs:
    """The environments of one worker.

    Args:
        env_fns: functions that make one environment each, or one function that makes a `VectorEnv`
            of a given number of environments.
        rows: the numbers of these environments among all workers' environments.
        autoreset_mode: of the steps that the head asks for. A rollout resets an environment in the
            step that ends its episode.
        info_keys: see `ClusterEnv`.
        frame_stack: see `ClusterEnv`.
        seed: of the global random generators, together with the row, before each is built.
        register: puts the head's entries into the registry, and returns whether others were there.
        after_each: called after each environment is built.

    Raises:
        EnvRaised: an environment raised an exception, here or in a method that calls it.
        RuntimeError, ValueError: the environments do not fit each other, or these arguments.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        rows: range,
        autoreset_mode: AutoresetMode,
        info_keys: Sequence[str],
        frame_stack: int | None,
        seed: int = 0,
        register: Callable[[], bool] = lambda: False,
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_envs = len(rows)
        self._numbers = rows
        self._info_keys = info_keys
        self._rows: list[Row] = []  # empty in the user's own kind of vector environment

        def build(make: Callable[..., Any], number: int, *args: int) -> Any:
            register()
            seed_globals(seed, number)
            try:
                env = make(*args)
                if register():  # a module that was imported for it has replaced the head's entries
                    env.close()
                    seed_globals(seed, number)
                    env = make(*args)
            except BaseException as error:
                raise EnvRaised(number) from error
            after_each()
            return env

        try:
            if callable(env_fns):
                self.vector: VectorEnv = build(env_fns, rows[0], len(rows))
                self._mode = _mode_of(self.vector, len(rows))
                if type(self.vector) is SyncVectorEnv:  # as if the user had given a list
                    pairs = zip(self.vector.envs, rows, strict=True)
                    self._rows = [Row(*pair) for pair in pairs]
            else:
                self._mode = autoreset_mode
                for make, number in zip(env_fns, rows, strict=True):
                    self._rows.append(Row(build(make, number), number))
            if self._rows:
                builders = [lambda row=row: row for row in self._rows]
                self.vector = RowEnvs(builders, copy=False, autoreset_mode=self._mode)
            self._space = self.vector.single_observation_space
            self._stacks = _stacks(self._space, frame_stack)
        except BaseException:
            self.close()
            raise
        # The info key under which a vector environment reports the episodes that count.
        own = find_wrapper(self.vector, RecordVectorStatistics)
        keeps = getattr(self.vector.unwrapped, "keeps_episodes", False)
        self._statistics_key = own._stats_key if own else "episode" if keeps else None
        self._observations: Any = None  # after the last reset or step
        self._room = create_empty_array(self._space, self.num_envs)  # for those of a rollout
        self._ended = np.zeros(self.num_envs, bool)  # whether an ended episode awaits its reset
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._must_reset = False  # whether lost episodes cannot be shown as truncated
        self._has_acted = False  # whether a policy has acted

    def describe(self) -> dict[str, Any]:
        """Return what the head must know about these environments."""
        envs = self.vector
        return {
            "observation_space": envs.single_observation_space,
            "action_space": envs.single_action_space,
            "metadata": {**(envs.metadata or {}), "autoreset_mode": self._mode.value},
            "render_mode": envs.render_mode,
        }

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in ``mask``. Return observations and infos."""
        if mask is not None and not mask.any():  # the head resets other workers' rows
            return deepcopy(self._observations), {}
        chosen = np.ones(self.num_envs, bool) if mask is None else mask
        self._ended[chosen] = False
        self._returns[chosen] = self._lengths[chosen] = 0
        self._must_reset &= mask is not None
        if mask is not None:
            options = {**(options or {}), "reset_mask": mask}
        seed: Any = list(seeds) if any(each is not None for each in seeds) else None
        if seed and not self._rows:
            seed_globals(seed[0] or 0, self._numbers[0])
            # Other vector environments take only the seed of their first environment.
            if not isinstance(self.vector.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                seed = seed if getattr(self.vector.unwrapped, "takes_seeds", False) else seed[0]
        observations, infos = self.vector.reset(seed=seed, options=options)
        if mask is not None and self._rows:
            # The vector environment has not seen the steps of the last rollout.
            space, room = self.vector.observation_space, create_empty_array(self._space, len(mask))
            choices = zip(
                mask, iterate(space, observations), iterate(space, self._observations), strict=True
            )
            rows = [new if is_new else old for is_new, new, old in choices]
            observations = concatenate(self._space, rows, room)
        self._observations = observations
        return deepcopy(observations), infos

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Step each environment. Return observations, rewards, terminations, truncations, infos."""
        if self._must_reset:
            raise RuntimeError(
                "this worker was replaced, and a vector environment then begins anew: `reset` it"
            )
        # In these rows, the step is a reset.
        is_reset = self._ended & (self._mode == AutoresetMode.NEXT_STEP)
        self._observations, rewards, terminations, truncations, infos = self.vector.step(actions)
        ended = terminations | truncations
        self._returns += rewards
        self._lengths += ~is_reset
        self._returns[ended] = self._lengths[ended] = 0
        self._ended = ended & (self._mode != AutoresetMode.SAME_STEP)
        return deepcopy(self._observations), rewards, terminations, truncations, infos

    def cut_off(self, seen: Any, ended: np.ndarray) -> None:
        """Continue for a process that has died, see `messages.CutOff`."""
        if not self._has_acted:  # otherwise the user has yet to see that rollout
            self._must_reset, self._ended = not self._rows, ended.copy()
            space, seen = self.vector.observation_space, deepcopy(seen)
            begun = iterate(space, deepcopy(self._observations))
            shown = zip(iterate(space, seen), ended.tolist(), strict=True)
            for row, first, row._seen in zip(self._rows, begun, shown, strict=False):
                row._begun, self._observations = row._begun or (first, row._info), seen

    def collect(self, actor: Actor, request: Collect) -> Part:
        """Act and step as asked for. Reset environments in the step that ends an episode."""
        pending = self._ended | np.array([row._begun is not None for row in self._rows] or False)
        self._must_reset, self._has_acted = False, True
        if pending.any():
            self.reset([None] * self.num_envs, None, pending)
        shape = num_steps, _ = request.num_steps, self.num_envs
        first_starts = starts = self._lengths == 0
        # One step more than the other arrays: the observations after the last step.
        observations = map_tree(
            lambda leaf: np.empty((num_steps + 1, *leaf.shape), leaf.dtype),
            create_empty_array(self._space, self.num_envs, np.empty),
        )
        rewards = np.empty(shape)
        terminations, truncations = np.zeros((2, *shape), bool)
        infos: dict[str, np.ndarray] = {}
        finals: list[Any] = []  # the last observations of ended episodes
        episodes: list[tuple[int, float, int]] = []  # step * num_envs + row, return, length
        advance = self._step_rows if self._rows else self._step_vector
        actor.start(request, self._numbers, starts)
        for step in range(num_steps):
            actions = actor.act(self._write(observations, step), starts)
            results = rewards[step], terminations[step], truncations[step]
            ends = advance(actions, results, partial(_add_info, infos, shape, step))
            starts = terminations[step] | truncations[step]
            self._returns += rewards[step]
            self._lengths += 1
            for row, final, counts in ends:
                finals.append(final)
                if counts is not None:
                    seen = float(self._returns[row]), int(self._lengths[row])
                    episodes.append((step * self.num_envs + row, *(counts or seen)))
            self._returns[starts] = self._lengths[starts] = 0
        self._write(observations, num_steps)
        numbers, returns, lengths = np.array(episodes, np.float64).reshape(-1, 3).T
        final = create_empty_array(self._space, len(finals), np.empty)
        final = concatenate(self._space, finals, final) if finals else final
        acted_on = map_tree(lambda leaf: leaf[:-1], observations)
        part = Part(
            version=actor.version,
            starts=first_starts,
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            episodes=numbers.astype(np.int64),
            episodic_returns=returns.copy(),
            episodic_lengths=lengths.astype(np.int64),
            infos=infos,
            **self._fold(observations, final, terminations | truncations),
            **actor.finish(),
        )
        _check_finite(part, acted_on, self._numbers)
        return part

    def under_way(self) -> list[tuple[float, int]]:
        """Return the return and the length, so far, of each environment's current episode."""
        return list(zip(self._returns.tolist(), self._lengths.tolist(), strict=True))

    def _step_rows(
        self,
        actions: Any,
        results: Sequence[np.ndarray],
        add_info: Callable[..., None],
    ) -> list[Ended]:
        """Step each row, and reset it if its episode ends. Return the ends of episodes.

        Write rewards, terminations and truncations to ``results``. `SyncVectorEnv.step` would do
        the same, but takes several microseconds for each row.
        """
        rewards, terminations, truncations = results
        ends, observations = [], []
        pairs = zip(self._rows, iterate(self.vector.action_space, actions), strict=True)
        for i, (row, action) in enumerate(pairs):
            observation, rewards[i], terminated, truncated, info = row.step(action)
            for key in self._info_keys:
                if key in info:
                    add_info(key, [i], np.asarray(info[key])[None])
            if terminated or truncated:
                terminations[i], truncations[i] = terminated, truncated
                final, (observation, _) = observation, row.reset()
                ends.append((i, final, row._counts()))
            observations.append(observation)
        self._observations = concatenate(self._space, observations, self._room)
        return ends

    def _step_vector(
        self,
        actions: Any,
        results: Sequence[np.ndarray],
        add_info: Callable[..., None],
    ) -> list[Ended]:
        """Step the user's vector environment, like `_step_rows`."""
        rewards, terminations, truncations = results
        self._observations, rewards[:], terminations[:], truncations[:], infos = self.vector.step(
            actions
        )
        ended = terminations | truncations
        has_reset = self._mode == AutoresetMode.SAME_STEP
        # Where an episode has ended, the infos are then those of the reset.
        of_ends = infos.get("final_info", {}) if has_reset else infos
        for source, among in (infos, ~ended), (of_ends, ended):
            for key in self._info_keys:
                rows = np.flatnonzero(among & source.get(f"_{key}", True))
                if key in source and rows.size:
                    add_info(key, rows, np.asarray(source[key])[rows])
        if not ended.any():
            return []
        batch = infos["final_obs"] if has_reset else self._observations
        if not (isinstance(batch, np.ndarray) and batch.dtype == object):
            batch = list(iterate(self.vector.observation_space, deepcopy(batch)))
        if not has_reset:
            self._observations, _ = self.vector.reset(options={"reset_mask": ended})
        key, told = self._statistics_key, {**of_ends, **infos}
        own = told.get(key)
        ends: list[Ended] = []
        for row in np.flatnonzero(ended).tolist():
            counts: tuple[Any, ...] | None = ()
            if key is not None:
                is_reported = own is not None and told[f"_{key}"][row]
                counts = (float(own["r"][row]), int(own["l"][row])) if is_reported else None
            ends.append((row, batch[row], counts))
        return ends

    def _write(self, observations: Any, step: int) -> Any:
        """Write the current observations to a step of the rollout, and return that step."""

        def write(room: np.ndarray, leaf: np.ndarray) -> np.ndarray:
            room[step] = leaf
            return room[step]

        return map_space(write, self._space, observations, self._observations)

    def _fold(self, observations: Any, final: Any, ended: np.ndarray) -> dict[str, Any]:
        """Return the part's observations, with each frame of a stack once."""

        def split(is_stack: bool, leaf: Any, final_leaf: Any) -> list[Any]:
            if not is_stack:
                return [leaf[:-1], leaf[-1], final_leaf]
            frames, index, final_index = fold(leaf, final_leaf, ended)
            return [Frames(frames, each) for each in (index[:-1], index[-1], final_index)]

        parts = map_tree(split, self._stacks, observations, final)
        names = "observations", "next_observations", "final_observations"
        return {name: map_tree(lambda leaf: leaf[i], parts) for i, name in enumerate(names)}  # noqa: B023

    def close(self) -> None:
        """Close all environments, even if some of them raise."""
        with contextlib.ExitStack() as stack:
            for row in self._rows:
                stack.callback(row.close)
            if not self._rows and hasattr(self, "vector"):
                self.vector.close()


class RowEnvs(SyncVectorEnv):
    """Returns the infos of each row by its number, for the head to merge.

    The first row of all workers that has an info determines its dtype.
    """

    def _add_info(
        self, vector_infos: dict[Any, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[Any, Any]:
        if env_info:
            vector_infos.setdefault(env_num, {}).update(_copied(env_info))
        return vector_infos


def _copied(info: Any) -> Any:
    """Return an info with copies of its arrays, which the environment may use again."""
    if type(info) is dict:
        return {key: _copied(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info


def _add_info(
    infos: dict[str, np.ndarray],
    shape: tuple[int, int],
    step: int,
    key: str,
    rows: Any,
    values: np.ndarray,
) -> None:
    """Keep an info's values ``(rows, ...)`` in some rows of a step, zero where a step has none.

    Raises:
        ValueError: these are no numbers, or have another shape than the values before.
    """
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"info {key!r} has no place in a rollout: it is neither a number nor an array of "
            "numbers"
        )
    dtype = values.dtype if values.ndim > 1 else np.dtype(np.float64)
    if key not in infos:
        infos[key] = np.zeros(shape + values.shape[1:], dtype)
        infos[f"_{key}"] = np.zeros(shape, bool)
    kept = infos[key]
    if kept.shape[2:] != values.shape[1:]:
        raise ValueError(
            f"info {key!r} must have the same shape in all steps, got {kept.shape[2:]} and "
            f"{values.shape[1:]}"
        )
    infos[key] = kept = kept.astype(np.result_type(kept, dtype), copy=False)
    kept[step, rows] = values
    infos[f"_{key}"][step, rows] = True


def _mode_of(envs: VectorEnv, num_envs: int) -> AutoresetMode:
    """Return the autoreset mode of a user's vector environment, in which a policy can act."""
    name = type(envs.unwrapped).__name__
    if envs.num_envs != num_envs:
        raise RuntimeError(f"the function was asked for {num_envs} environments, and its {name} "
                           f"has {envs.num_envs}")  # fmt: skip
    mode = (envs.metadata or {}).get("autoreset_mode")
    if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        stated = "states no autoreset mode" if mode is None else "has the autoreset mode 'NextStep'"
        raise ValueError(
            f"{name} {stated}: make it with autoreset_mode='SameStep' or 'Disabled' (gym.make_vec "
            "with vector_kwargs={'autoreset_mode': 'SameStep'}), or give ClusterEnv a list of "
            "functions that make one environment each"
        )
    return AutoresetMode(mode)


def _stacks(space: gym.Space, frame_stack: int | None) -> Any:
    """Return whether each leaf of an observation is a stack of ``frame_stack`` arrays."""

    def is_stack(leaf: Any) -> bool:
        is_array = isinstance(leaf, np.ndarray)
        return is_array and leaf.ndim > 2 and leaf.shape[1] == frame_stack

    stacks = map_space(is_stack, space, create_empty_array(space, 1))
    if frame_stack is not None and not any(leaves(stacks)):
        raise ValueError(
            f"frame_stack is {frame_stack}, but no observation is a stack of {frame_stack} arrays: "
            f"{space} (FrameStackObservation makes stacks)"
        )
    return stacks


def _check_finite(part: Part, observations: Any, rows: range) -> None:
    """Raise an error if rewards or log-probabilities of a part are not finite.

    If the policy acted on ``observations`` ``(num_steps, num_envs, ...)`` that are not finite
    either, these are the reason.
    """
    name, wrong = "rewards", ~np.isfinite(part.rewards)
    if not wrong.any():
        if (finite := np.isfinite(part.logprobs)).all():
            return
        name, wrong = "observations", not_finite(observations, 2) & ~finite.all(0)
        if not wrong.any():
            raise ValueError("log-probabilities are not finite: has the policy diverged?")
    found = [rows[row] for row in np.flatnonzero(wrong.any(0))]
    step = int(wrong.any(1).argmax())
    raise EnvRaised(found[0]) from ValueError(
        f"not all {name} are finite from step {step} of the rollout on: environment "
        + ", ".join(map(str, found))
    )
