"""The data that the user's loop gets: rollouts, joined from all workers' parts, and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from .arrays.frames import join
from .arrays.trees import map_tree
from .wire.part import AXES, ENDS, EPISODES, RolloutPart


class Evaluation(NamedTuple):
    """The result of `ClusterEnv.evaluate`: its episodes, ordered by environment, then time."""

    returns: np.ndarray  # (episodes,) float64, see `Rollout.episodic_returns`
    lengths: np.ndarray  # (episodes,) int64, in steps
    # (episodes,) bool; False if the episode was left after ``max_steps``, and counts up to there
    ended: np.ndarray


@dataclass
class Rollout:
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
            where a step had none. The key ``"_name"`` has a bool array, True where a step had one.
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
    starts: np.ndarray
    observations: Any
    actions: Any
    logprobs: np.ndarray
    states: Any
    extras: dict[str, np.ndarray]
    infos: dict[str, np.ndarray]
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    final_observations: Any
    next_observations: Any
    policy_versions: np.ndarray
    episodic_returns: np.ndarray
    episodic_lengths: np.ndarray

    @classmethod
    def join(
        cls, parts: list[RolloutPart], rows: np.ndarray, infos: dict[str, np.ndarray]
    ) -> Rollout:
        """Join the workers' parts, which are in row order.

        ``infos`` maps each of ``info_keys`` to zeros like the last value received. If ``parts``
        have values of a key, zeros like these replace its entry.
        """
        sizes = [part.rewards.shape[1] for part in parts]
        return cls(
            rows=rows,
            infos=_join_infos(parts, sizes, infos),
            policy_versions=np.repeat([part.version for part in parts], sizes),
            **_join_fields(parts, {EPISODES: [part.episodes for part in parts]}),
        )

    @classmethod
    def concatenate(cls, chunks: Sequence[Rollout]) -> Rollout:
        """Join chunks of `ClusterEnv.recv` that have the same ``num_steps``, side by side.

        Each chunk has columns of its own, even where several chunks of one worker follow each
        other. ``rows`` has each column's environment. Episodes are ordered chunk by chunk.
        """
        return cls(
            rows=np.concatenate([chunk.rows for chunk in chunks]),
            infos={
                key: _concatenate([each.infos[key] for each in chunks]) for key in chunks[0].infos
            },
            policy_versions=np.concatenate([chunk.policy_versions for chunk in chunks]),
            **_join_fields(chunks, {}),
        )


# The fields that a rollout takes from its parts, and the axis along which each is joined.
_JOINED = {
    name: axes.index("envs") if "envs" in axes else 0
    for name, axes in AXES.items()
    if name in Rollout.__dataclass_fields__
}


def _join_fields(
    parts: Sequence[RolloutPart | Rollout], counted: dict[tuple[str, ...], list[np.ndarray]]
) -> dict[str, Any]:
    """Return the fields of `_JOINED`, joined, with the items of ended episodes ordered by step.

    ``counted`` maps further axes to the steps of the items along them: for each part, the numbers
    step * num_envs + environment.
    """
    fields = {}
    for name, axis in _JOINED.items():
        trees = [getattr(part, name) for part in parts]
        is_kept = name == "next_observations"  # the head keeps the parts' arrays
        fields[name] = _joined(trees, axis, is_kept)
    if len(parts) > 1:
        sizes = [part.rewards.shape[1] for part in parts]
        ended = [np.flatnonzero(part.terminations | part.truncations) for part in parts]
        # not every end counts as the end of an episode
        orders = {axes: _in_order(own, sizes) for axes, own in {ENDS: ended, **counted}.items()}
        for name in _JOINED:
            if AXES[name] in orders:
                fields[name] = map_tree(itemgetter(orders[AXES[name]]), fields[name])
    return fields


def _concatenate(infos: list[np.ndarray]) -> np.ndarray:
    """Join one info of several chunks side by side.

    Chunks from before the info's first value lack its shape, so zeros of that shape replace them.
    """
    most = max((values.shape for values in infos), key=len)
    alike = [
        values if values.ndim == len(most) else np.zeros((*values.shape, *most[2:]), bool)
        for values in infos
    ]
    return np.concatenate(alike, 1)


def _joined(trees: list[Any], axis: int, copy: bool) -> Any:
    """Join trees of arrays along an axis, see `join`. Return None if the trees are None."""
    if isinstance(trees[0], np.ndarray):  # the usual case
        return join(trees, axis, copy)
    if trees[0] is None:
        return None
    return map_tree(lambda *leaves: join(leaves, axis, copy), *trees)


def _join_infos(
    parts: list[RolloutPart], sizes: list[int], known: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the parts' infos as arrays and masks: zero and False where a step had none."""
    joined = {}
    shape = len(parts[0].rewards), sum(sizes)
    for key in known:
        came = [part.infos[key][1] for part in parts if key in part.infos]
        if came:
            shapes = {values.shape[1:] for values in came}
            if len(shapes) > 1:
                text = ", ".join(map(str, sorted(shapes)))
                raise ValueError(f"info {key!r} must have the same shape on all workers: {text}")
            known[key] = np.zeros(shapes.pop(), np.result_type(*came))
        values = np.zeros((*shape, *known[key].shape), known[key].dtype)
        has_some = np.zeros(shape, bool)
        first_rows = np.cumsum([0, *sizes[:-1]])
        for part, first, size in zip(parts, first_rows, sizes, strict=True):
            if key in part.infos:
                numbers, found = part.infos[key]
                steps, rows = np.divmod(numbers, size)
                values[steps, first + rows] = found
                has_some[steps, first + rows] = True
        joined[key] = values
        joined[f"_{key}"] = has_some
    return joined


def _in_order(numbers: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """Return the indices that order the items of all workers by step, then environment.

    Each worker numbers its items step * num_envs + environment.
    """
    first_rows = np.cumsum([0, *sizes[:-1]])
    keys = []
    for own, first, size in zip(numbers, first_rows, sizes, strict=True):
        steps, rows = np.divmod(own, size)
        keys.append(steps * sum(sizes) + first + rows)
    return np.argsort(np.concatenate(keys))
