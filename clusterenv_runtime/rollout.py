"""What the user's loop gets: the steps of all workers, joined."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays.spaces import join
from .arrays.trees import map_tree
from .wire.part import RolloutPart

MAX_INFO_ZEROS = (
    2**26
)  # bytes of these that a rollout may have, or as many times what came as the next
MAX_INFO_RATIO = 16


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
            then environment.
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

        ``infos`` has for each of ``info_keys`` one that has come before; those that come now take
        its place.
        """
        sizes = [part.rewards.shape[1] for part in parts]
        # Not every environment counts every episode.
        ended = _in_order(
            (np.flatnonzero(part.terminations | part.truncations) for part in parts), sizes
        )
        counted = _in_order((part.episodes for part in parts), sizes)

        each = {
            name: [getattr(part, name) for part in parts] for name in RolloutPart.__struct_fields__
        }
        return cls(
            rows=rows,
            infos=_join_infos(each["infos"], parts[0].rewards.shape[0], sizes, infos),
            starts=join(each["starts"]),
            states=None if parts[0].states is None else join(each["states"]),
            policy_versions=np.repeat(each["version"], sizes),
            episodic_returns=join(each["episodic_returns"])[counted],
            episodic_lengths=join(each["episodic_lengths"])[counted],
            next_observations=join(
                each["next_observations"], copy=True
            ),  # the head keeps the views
            final_observations=map_tree(lambda leaf: leaf[ended], join(each["final_observations"])),
            **{
                name: join(each[name], axis=1)
                for name in (
                    "observations",
                    "actions",
                    "extras",
                    "logprobs",
                    "rewards",
                    "terminations",
                    "truncations",
                )
            },  # fmt: skip
        )


def _join_infos(
    infos: list[dict[str, Any]], num_steps: int, sizes: list[int], known: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return what workers have sent of their infos as arrays, zeros where there was none, and where
    there was some.
    """
    joined: dict[str, np.ndarray] = {}
    for key in known:
        found = {
            number: each[key][1]
            for number, each in enumerate(infos)
            if key in each and len(each[key][1])
        }
        shapes = Counter(values.shape[1:] for values in found.values())
        if shapes:  # that of most, and among these the one there was before
            shape = max(
                shapes, key=lambda shape, key=key: (shapes[shape], shape == known[key].shape)
            )
            if others := {
                number: values.shape[1:]
                for number, values in found.items()
                if values.shape[1:] != shape
            }:
                which = ", ".join(f"{other} on worker {number}" for number, other in others.items())
                warnings.warn(
                    f"Info {key} is left out where it is not {shape}, but {which}.", stacklevel=2
                )
            found = {number: values for number, values in found.items() if number not in others}
            known[key] = np.zeros(shape, np.result_type(*found.values()))
        size, came = (
            num_steps * sum(sizes) * known[key].nbytes,
            sum(values.nbytes for values in found.values()),
        )
        if size > max(MAX_INFO_ZEROS, MAX_INFO_RATIO * came):
            text = f"a rollout of it would be {size} bytes, and most steps have none"
            warnings.warn(f"Info {key} is left out: {text}.", stacklevel=2)
            continue
        values = np.zeros((num_steps, sum(sizes), *known[key].shape), known[key].dtype)
        mask, first = np.zeros(values.shape[:2], bool), 0
        for number, size in enumerate(sizes):
            if number in found:
                steps, rows = np.divmod(infos[number][key][0], size)
                values[steps, first + rows], mask[steps, first + rows] = found[number], True
            first += size
        joined[key], joined[f"_{key}"] = values, mask
    return joined


def _in_order(flat: Iterable[np.ndarray], sizes: list[int]) -> Any:
    """Return the order by step, then environment, of what workers number by ``step * num_envs +
    environment``.
    """
    if len(sizes) == 1:
        return ...
    first_rows, num_envs = np.cumsum([0, *sizes[:-1]]), sum(sizes)
    numbers = [
        k // n * num_envs + first + k % n
        for k, n, first in zip(flat, sizes, first_rows, strict=True)
    ]
    return np.argsort(np.concatenate(numbers))
