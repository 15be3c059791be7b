"""What the user's loop gets: the steps of all workers, joined."""

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
    """The episodes of an evaluation, in the order of their seeds: what `ClusterEnv.evaluate`
    returns.
    """

    returns: np.ndarray  # (episodes,) float64, as `Rollout.episodic_returns`
    lengths: np.ndarray  # (episodes,) int64, in steps
    # (episodes,) bool; the others were left after ``max_steps``, and count as far as they went
    ended: np.ndarray


@dataclass
class Rollout:
    """``num_steps`` steps of all environments, or of one worker's: what `ClusterEnv.rollout` and
    `recv` return.

    Every step is a real transition: resets are not steps of their own. Arrays have the dtypes of
    the spaces where these have one. Observations are arrays, or for Dict and Tuple spaces dicts and
    tuples of arrays; "tree" below means this. What a step led to is the next row of
    ``observations``, except where an episode ended: there the next row begins another episode, and
    ``final_observations`` has the end of this one. So values to bootstrap from are:

        done = rollout.terminations | rollout.truncations  # (num_steps, num_envs)
        values = critic(np.concatenate([rollout.observations, rollout.next_observations[None]]))
        next_values = values[1:].copy()  # of what each step led to
        # Where an episode ended, its own end counts, and not the start of the next one.
        next_values[done] = critic(rollout.final_observations)
        # Nothing follows a termination; after a truncation something would have.
        next_values[rollout.terminations] = 0

    Attributes:
        rows: ``(num_envs,)`` int64, the numbers of these environments.
        starts: ``(num_envs,)`` bool, whether the first observation is the first of an episode, as
            after a loss.
        observations: a tree of ``(num_steps, num_envs, ...)``, what the policy acted on. With
            ``frame_stack`` those that are stacks are `Frames`.
        actions: a tree of ``(num_steps, num_envs, ...)``, what the policy drew; what the
            environment got of it is up to `Policy.to_env`.
        logprobs: ``(num_steps, num_envs)`` floats, of the actions under the policy that took them.
        states: a tree of ``(num_envs, ...)``, the policy's memory before the first step, initial
            where ``starts`` is True; None if it has none.
        extras: ``{name: (num_steps, num_envs, ...)}``, what `Policy.extras` gives.
        infos: ``{name: (num_steps, num_envs, ...)}`` of each of ``info_keys``, zero where a step
            had none; under ``"_name"``, bool, where it had one.
        rewards: ``(num_steps, num_envs)`` float64.
        terminations: ``(num_steps, num_envs)`` bool, whether this step ended the episode by itself.
        truncations: ``(num_steps, num_envs)`` bool, whether the episode was cut off after this
            step.
        final_observations: a tree of ``(ends, ...)``, the last observation of each episode that
            ended here, in the order of ``(terminations | truncations).nonzero()``: by step, then
            environment.
        next_observations: a tree of ``(num_envs, ...)``, after the last step: what the next rollout
            begins with.
        policy_versions: ``(num_envs,)`` int64, the version last pulled by the worker that acted.
        episodic_returns: ``(num_episodes,)`` float64, of the episodes that ended here, by step,
            then environment: the sums of their rewards. Gymnasium's RecordEpisodeStatistics counts
            instead, where it is around an environment and has seen the end: so the end of a life is
            none of an episode if the wrapper that ends it stands around the statistics.
        episodic_lengths: ``(num_episodes,)`` int64, in steps.
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
        """Join the workers' parts, given in row order.

        ``infos`` has for each of ``info_keys`` zeros like the last value that has come; those that
        come now take their place.
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
        """Return chunks of `ClusterEnv.recv`, of one ``num_steps``, side by side as one rollout.

        A worker's chunks go on one after the other, in as many columns: ``rows`` says whose they
        are. Episodes come chunk by chunk.
        """
        return cls(
            rows=np.concatenate([chunk.rows for chunk in chunks]),
            infos={
                key: _concatenate([each.infos[key] for each in chunks]) for key in chunks[0].infos
            },
            policy_versions=np.concatenate([chunk.policy_versions for chunk in chunks]),
            **_join_fields(chunks, {}),
        )


# The fields that a rollout has of its parts, and the axis along which they are joined.
_JOINED = {
    name: axes.index("envs") if "envs" in axes else 0
    for name, axes in AXES.items()
    if name in Rollout.__dataclass_fields__
}


def _join_fields(
    parts: Sequence[RolloutPart | Rollout], counted: dict[tuple[str, ...], list[np.ndarray]]
) -> dict[str, Any]:
    """Return these fields, joined; ``counted`` are by axis the steps that ended what is to come in
    their order, as numbers step * num_envs + environment.
    """
    fields = {}
    for name, axis in _JOINED.items():
        trees = [getattr(part, name) for part in parts]
        is_kept = name == "next_observations"  # the head keeps the views of these
        fields[name] = _joined(trees, axis, is_kept)
    if len(parts) > 1:
        sizes = [part.rewards.shape[1] for part in parts]
        ended = [np.flatnonzero(part.terminations | part.truncations) for part in parts]
        # some ends may not count as those of episodes
        orders = {axes: _in_order(own, sizes) for axes, own in {ENDS: ended, **counted}.items()}
        for name in _JOINED:
            if AXES[name] in orders:
                fields[name] = map_tree(itemgetter(orders[AXES[name]]), fields[name])
    return fields


def _concatenate(infos: list[np.ndarray]) -> np.ndarray:
    """Return infos of chunks side by side; before the first has come, its shape is not known."""
    most = max((values.shape for values in infos), key=len)
    alike = [
        values if values.ndim == len(most) else np.zeros((*values.shape, *most[2:]), bool)
        for values in infos
    ]
    return np.concatenate(alike, 1)


def _joined(trees: list[Any], axis: int, copy: bool) -> Any:
    """Return trees of arrays along an axis as one, see `join`; None if there are none."""
    if isinstance(trees[0], np.ndarray):  # as most are
        return join(trees, axis, copy)
    if trees[0] is None:
        return None
    return map_tree(lambda *leaves: join(leaves, axis, copy), *trees)


def _join_infos(
    parts: list[RolloutPart], sizes: list[int], known: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the infos of parts as arrays, zeros where a step had none, and where it had some."""
    joined = {}
    shape = len(parts[0].rewards), sum(sizes)
    for key in known:
        came = [part.infos[key][1] for part in parts if key in part.infos]
        if came:
            shapes = {values.shape[1:] for values in came}
            if len(shapes) > 1:
                text = ", ".join(map(str, sorted(shapes)))
                raise ValueError(f"info {key!r} has not the same shape on all workers: {text}")
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
    """Return the order by step, then environment, of what each worker numbers by
    step * num_envs + environment.
    """
    first_rows = np.cumsum([0, *sizes[:-1]])
    keys = []
    for own, first, size in zip(numbers, first_rows, sizes, strict=True):
        steps, rows = np.divmod(own, size)
        keys.append(steps * sum(sizes) + first + rows)
    return np.argsort(np.concatenate(keys))
