"""The data that the user's loop gets: rollouts, joined from all workers' parts, and evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from .arrays import Frames, join, leaves, map_space, map_tree


class Evaluation(NamedTuple):
    """The result of `ClusterEnv.evaluate`: its episodes, ordered by environment, then time."""

    # (episodes,) float64, see `Rollout.episodic_returns`; fewer if some do not end
    returns: np.ndarray
    lengths: np.ndarray  # (episodes,) int64, in steps
    # (episodes,) bool; False if the episode was left after ``max_steps``, and counts up to there
    ended: np.ndarray


@dataclass
class _Steps:
    """The fields that a rollout and a worker's part have in common, see `Rollout`."""

    starts: np.ndarray
    observations: Any
    actions: Any
    logprobs: np.ndarray
    states: Any
    extras: dict[str, Any]
    infos: dict[str, np.ndarray]
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    final_observations: Any
    next_observations: Any
    episodic_returns: np.ndarray
    episodic_lengths: np.ndarray


@dataclass
class Rollout(_Steps):
    """``num_steps`` steps of all environments, or of one worker's environments.

    `ClusterEnv.rollout` and `ClusterEnv.recv` return rollouts. Every step is a real transition: a
    reset is not a step of its own. Arrays have the dtypes of their spaces, where a space has a
    dtype. Observations are arrays or, for Dict and Tuple spaces, dicts and tuples of arrays; below,
    "tree" stands for all of these. The observation that a step led to is the next row of
    ``observations``, except where the step ended an episode. There, the next row begins another
    episode, and ``final_observations`` has the last observation of the episode that ended.
    Therefore the values to bootstrap from are:

        done = rollout.terminations | rollout.truncations  # (num_steps, num_envs)
        values = critic(np.concatenate([rollout.observations, rollout.next_observations[None]]))
        next_values = values[1:].copy()  # after each step
        # Where an episode ended, take its last observation, not the first one of the next episode.
        next_values[done] = critic(rollout.final_observations)
        # Nothing follows a termination. After a truncation, the episode would have continued.
        next_values[rollout.terminations] = 0

    Attributes:
        rows: ``(num_envs,)`` int64, the numbers of the environments.
        starts: ``(num_envs,)`` bool, whether the first observation begins an episode, as it does
            after a worker is replaced.
        observations: a tree of ``(num_steps, num_envs, ...)``, the observations that the policy
            acted on. With ``frame_stack``, stacked observations are `Frames`.
        actions: a tree of ``(num_steps, num_envs, ...)``, the actions that the policy drew.
            `Policy.to_env` determines what the environments get for them.
        logprobs: ``(num_steps, num_envs)`` floats, the log-probabilities of the actions under the
            policy that drew them.
        states: a tree of ``(num_envs, ...)``, the policy's state before the first step, which is
            the initial one where ``starts`` is True; None if the policy has no state.
        extras: ``{name: (num_steps, num_envs, ...)}``, the values that `Policy.extras` returns.
        infos: ``{name: (num_steps, num_envs, ...)}``, the values of each of ``info_keys``, zero
            where a step had none. Numbers and bools are float64, arrays keep their dtype. The key
            ``"_name"`` has a bool array, True where a step had one.
        rewards: ``(num_steps, num_envs)`` float64.
        terminations: ``(num_steps, num_envs)`` bool, whether the step terminated the episode.
        truncations: ``(num_steps, num_envs)`` bool, whether the episode was truncated after the
            step.
        final_observations: a tree of ``(ends, ...)``, the last observation of each episode that
            ended in this rollout, in the order of ``(terminations | truncations).nonzero()``: by
            step, then environment.
        next_observations: a tree of ``(num_envs, ...)``, the observations after the last step, with
            which the next rollout begins.
        policy_versions: ``(num_envs,)`` int64, the version last pulled by the worker that acted.
        episodic_returns: ``(num_episodes,)`` float64, the returns of the episodes that ended in
            this rollout, by step, then environment. A return is the sum of the episode's rewards.
            Where an environment has Gymnasium's RecordEpisodeStatistics, and that wrapper has seen
            the episode's end, the wrapper's return counts instead. Therefore a lost life does not
            count as the end of an episode if the wrapper that ends episodes at lost lives is
            outside that wrapper.
        episodic_lengths: ``(num_episodes,)`` int64, the lengths of these episodes in steps.
    """

    rows: np.ndarray
    policy_versions: np.ndarray

    @classmethod
    def join(cls, parts: list["Part"], rows: np.ndarray, infos: dict[str, np.ndarray]) -> "Rollout":
        """Join the workers' parts, which are in row order.

        ``infos`` maps each of ``info_keys`` to zeros like its values, float64 before the first one
        has come, and is kept up to date here.

        Raises:
            ValueError: an info's values have different shapes.
        """
        sizes = [part.rewards.shape[1] for part in parts]
        return cls(
            rows=rows,
            infos=_join_infos(parts, infos),
            policy_versions=np.repeat([part.version for part in parts], sizes),
            **_join_fields(parts, [part.episodes for part in parts]),
        )

    @classmethod
    def concatenate(cls, chunks: Sequence["Rollout"]) -> "Rollout":
        """Join chunks of `ClusterEnv.recv` that have the same ``num_steps``, side by side.

        Each chunk has columns of its own, even where several chunks of one worker follow each
        other. ``rows`` has each column's environment. Episodes are ordered chunk by chunk.
        """
        infos = {key: [chunk.infos[key] for chunk in chunks] for key in chunks[0].infos}
        return cls(
            rows=np.concatenate([chunk.rows for chunk in chunks]),
            infos={key: _side_by_side(values) for key, values in infos.items()},
            policy_versions=np.concatenate([chunk.policy_versions for chunk in chunks]),
            **_join_fields(chunks, None),
        )


@dataclass
class Part(_Steps):
    """The response to a `Collect`: one worker's part of a rollout.

    ``infos`` lacks the keys that had no value.
    """

    version: int  # the version of the policy that acted
    episodes: np.ndarray  # (num_episodes,) int64, the step * num_envs + row that ended each
    params: Any  # (states, ...), the distribution parameters at `sync.measured_states`
    waited: float = 0.0  # seconds that the worker has waited since its last part

    def check(self, space: Space[Any], num_steps: int, num_envs: int) -> None:
        """Check that the part has the form that a request of the head asks for.

        Raises:
            ValueError, AttributeError, LookupError, TypeError: it does not.
        """
        steps = num_steps, num_envs
        count = len(self.episodes)
        for names, dtype, shape in (
            ("rewards", np.float64, steps),
            ("terminations truncations", np.bool_, steps),
            ("starts", np.bool_, (num_envs,)),
            ("episodes episodic_lengths", np.int64, (count,)),
            ("episodic_returns", np.float64, (count,)),
        ):
            for name in names.split():
                _check(name, getattr(self, name), np.dtype(dtype), shape)
        policys = {"logprobs": self.logprobs, "actions": self.actions, "extras": self.extras}
        for name, tree in {**policys, **self.infos}.items():
            for leaf in leaves(tree):
                _check(name, leaf, leaf.dtype, steps, 2)
        ends = int(np.count_nonzero(self.terminations | self.truncations))
        one = create_empty_array(space, 1)
        for kind, leading in ("", steps), ("final_", (ends,)), ("next_", (num_envs,)):

            def check(array: Any, one: np.ndarray) -> None:
                _check(name, array, one.dtype, leading + one.shape[1:])  # noqa: B023

            map_space(check, space, getattr(self, name := f"{kind}observations"), one)


def _check(
    name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...], axes: int | None = None
) -> None:
    parts = (array.frames, array.index) if isinstance(array, Frames) else (array,)
    if not all(isinstance(part, np.ndarray) for part in parts):
        raise TypeError(f"{name} must be arrays, got a {type(array)}")
    if array.dtype != dtype or array.shape[:axes] != shape:
        raise ValueError(f"{name} must be {dtype} {shape}, got {array.dtype} {array.shape}")
    if isinstance(array, Frames) and array.index.size:
        first, last = array.index.min(), array.index.max()
        if array.index.dtype.kind != "i" or first < 0 or last >= len(array.frames):
            raise ValueError(f"{name} have indices of frames that do not exist")


# The fields that are joined along their first axis. The others have the steps there.
FIRST = ["starts", "states", "next_observations"]
FIRST += ["final_observations", "episodic_returns", "episodic_lengths"]


def _join_fields(
    parts: Sequence[Part | Rollout], episodes: list[np.ndarray] | None
) -> dict[str, Any]:
    """Return the joined fields. Items of episodes are ordered by step, then environment.

    ``episodes`` is None if the items of those that count stay ordered part by part.
    """
    joined: dict[str, Any] = {}
    for name in _Steps.__dataclass_fields__.keys() - {"infos"}:
        trees = [getattr(part, name) for part in parts]
        how = int(name not in FIRST), name == "next_observations"  # the head keeps the parts' own
        joined[name] = (
            None if trees[0] is None else map_tree(lambda *each: join(each, *how), *trees)  # noqa: B023
        )
    if len(parts) > 1:
        sizes = [part.rewards.shape[1] for part in parts]
        ends = [np.flatnonzero(part.terminations | part.truncations) for part in parts]
        order = _order(ends, sizes)
        finals = joined["final_observations"]
        joined["final_observations"] = map_tree(lambda leaf: leaf[order], finals)
        if episodes is not None:
            order = _order(episodes, sizes)
            for name in "episodic_returns", "episodic_lengths":
                joined[name] = joined[name][order]
    return joined


def _side_by_side(infos: list[np.ndarray]) -> np.ndarray:
    """Join one info of several chunks.

    Chunks from before the info's first value lack its shape, so zeros of that shape replace them.
    """
    like = max(infos, key=np.ndim)
    return np.concatenate(
        [
            values if values.ndim == like.ndim else np.zeros(values.shape + like.shape[2:], bool)
            for values in infos
        ],
        1,
    )


def _join_infos(parts: list[Part], known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    infos = {}
    for key in known:
        found = [part.infos[key] for part in parts if key in part.infos]
        shapes = {values.shape[2:] for values in found}
        if known[key].ndim:  # a value has come before
            shapes.add(known[key].shape)
        if len(shapes) > 1:
            raise ValueError(
                f"info {key!r} must have the same shape in all environments, got "
                f"{' and '.join(map(str, sorted(shapes)))}"
            )
        if found:
            before = [known[key]] if known[key].ndim else []
            known[key] = np.zeros(shapes.pop(), np.result_type(*found, *before))
        for name, zeros in (key, known[key]), (f"_{key}", np.zeros((), bool)):
            own = [
                part.infos.get(name, np.zeros(part.rewards.shape + zeros.shape, bool))
                for part in parts
            ]
            infos[name] = np.concatenate(own, 1, dtype=zeros.dtype)
    return infos


def _order(numbers: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """Return the indices that order the items of all parts by step, then environment.

    Each part numbers its items step * num_envs + environment, and has them in this order.
    """
    steps = [own // size for own, size in zip(numbers, sizes, strict=True)]
    return np.argsort(np.concatenate(steps), kind="stable")
