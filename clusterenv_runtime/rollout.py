"""The arrays that cross the boundary: from a worker to the head, and from the runtime to the user's loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space

from .codec import Packed, pack, unpack
from .errors import ProtocolError
from .protocol import Call, Collect, CutOff, Message, Part, Reply, Reset, Step
from .spaces import join, join_arrays, leaves_of, take
from .sync import sampled_states

OBSERVATIONS = "observations", "final_observations", "next_observations"


class RolloutPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What one worker sends of a rollout: ``num_steps`` steps of its ``num_envs`` environments.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the spaces' own.
    """

    version: int  # of the policy that acted
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: np.ndarray  # (num_steps, num_envs, ...)
    logprobs: np.ndarray  # (num_steps, num_envs) float32, of the actions under the policy that took them
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: Any  # (ends, ...) what the steps that ended an episode led to, ordered as their nonzero()
    next_observations: Any  # (num_envs, ...) after the last step
    episodes: np.ndarray  # (num_episodes,) int64, which step ended each that counts: step * num_envs + environment
    episodic_returns: np.ndarray  # (num_episodes,) float64
    episodic_lengths: np.ndarray  # (num_episodes,) int64
    params: np.ndarray  # (states, ...) the policy's distribution parameters at `sampled_states`

    def pack(self, buffers: list[Any]) -> dict[str, Packed]:
        """Return what `protocol.Part` holds, and append the data of the arrays to ``buffers``."""
        return {name: pack(getattr(self, name), buffers) for name in self.__struct_fields__}

    @classmethod
    def unpack(
        cls, fields: dict[str, Packed], buffers: list[Any], space: Space, example: Any, num_steps: int, num_envs: int
    ) -> RolloutPart:
        """Undo `pack`, with views of ``buffers``; ``example`` is any batch of ``space``, the single observation space.

        Raises:
            ProtocolError: it is not such a part, or not one of so many steps and environments.
        """
        values = {name: unpack(value, buffers, copy=False) for name, value in fields.items()}
        try:
            part = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a part of a rollout is malformed: {error}") from None
        leaves = leaves_of(space, example, *(getattr(part, name) for name in OBSERVATIONS))
        part._check(num_steps, num_envs, *leaves)
        return part

    def _check(self, num_steps: int, num_envs: int, example: list[np.ndarray], *observations: list[Any]) -> None:
        steps = num_steps, num_envs
        for name, kinds in (("rewards", "f"), ("logprobs", "f"), ("terminations", "b"), ("truncations", "b")):
            _check_array(name, getattr(self, name), steps, kinds, ndim=2)
        _check_array("actions", self.actions, steps, "biuf")
        _check_array("params", self.params, (len(sampled_states(num_steps * num_envs)),), "f")
        for name, kinds in (("episodes", "i"), ("episodic_returns", "f"), ("episodic_lengths", "i")):
            _check_array(name, getattr(self, name), (self.episodes.size,), kinds, ndim=1)
        ends = int(np.count_nonzero(self.terminations | self.truncations))
        for name, leading, leaves in zip(OBSERVATIONS, (steps, (ends,), (num_envs,)), observations, strict=True):
            _check_observations(name, leaves, example, leading)


def open_answer(
    space: Space, example: Any, asked: Message, answer: Reply | Part, frames: list[Any], num_envs: int, newest: int
) -> Reply | RolloutPart:
    """Return the part in an answer, or the `Reply` with its value and infos unpacked.

    Args:
        space: the single observation space.
        example: a batch of it, of one.
        asked: the request.
        answer: its answer.
        frames: that message's frames.
        num_envs: how many environments the worker has.
        newest: the version that was published last.

    Raises:
        ProtocolError: it is not what was asked for.
    """
    if isinstance(asked, Collect) != isinstance(answer, Part):
        raise ProtocolError(f"a {type(answer).__name__} to a {type(asked).__name__}")
    if isinstance(answer, Reply):
        answer.value, answer.infos = unpack(answer.value, frames[1:]), unpack(answer.infos, frames[1:])
        _check_reply(asked, answer, space, example, num_envs)
        return answer
    part = RolloutPart.unpack(answer.part, frames[1:], space, example, asked.num_steps, num_envs)
    if not 0 < part.version <= newest:
        raise ProtocolError(f"it says that it acted on version {part.version}, and {newest} is the newest")
    return part


def _check_reply(asked: Message, reply: Reply, space: Space, example: Any, num_envs: int) -> None:
    is_reset, is_step = isinstance(asked, Reset), isinstance(asked, Step | CutOff)
    if is_reset or is_step:
        if is_step and not (isinstance(reply.value, tuple) and len(reply.value) == 4):
            raise ProtocolError(f"a step gives four values, got {type(reply.value).__name__}")
        observations, *arrays = reply.value if is_step else (reply.value,)
        _check_observations("observations", *leaves_of(space, observations, example), (num_envs,))
        for name, array, kinds in zip(("rewards", "terminations", "truncations"), arrays, "fbb", strict=False):
            _check_array(name, array, (num_envs,), kinds, ndim=1)
    elif isinstance(asked, Call) and not (isinstance(reply.value, list | tuple) and len(reply.value) == num_envs):
        raise ProtocolError(f"a call gives {num_envs} values, got {type(reply.value).__name__}")
    infos = [] if reply.infos is None else reply.infos
    for info in infos if isinstance(infos, list) else [infos]:
        is_pair = isinstance(info, tuple) and len(info) == 2 and isinstance(info[1], dict)
        if not (is_pair and type(info[0]) is int and 0 <= info[0] < num_envs):
            raise ProtocolError(f"infos are pairs of an environment and a dict, got {type(info).__name__}")


def _check_observations(name: str, leaves: list[Any], example: list[Any], leading: tuple[int, ...]) -> None:
    for leaf, one in zip(leaves, example, strict=True):
        if isinstance(one, np.ndarray):
            shape = leading + one.shape[1:]
            _check_array(name, leaf, shape, one.dtype.kind, len(shape))
        elif not (isinstance(leaf, tuple) and len(leaf) == leading[0]):
            raise ProtocolError(f"{name} must be {leading[0]} in a tuple, got a {type(leaf).__name__}")


def _check_array(name: str, array: Any, leading: tuple[int, ...], kinds: str, ndim: int | None = None) -> None:
    if not isinstance(array, np.ndarray):
        raise ProtocolError(f"{name} must be an array, got a {type(array).__name__}")
    if array.shape[: len(leading)] != leading or array.dtype.kind not in kinds or ndim not in (None, array.ndim):
        found = f"{array.dtype} of shape {array.shape}"
        raise ProtocolError(f"{name} must be of shape {leading} and kind {kinds!r}, got {found}")


@dataclass
class Rollout:
    """``num_steps`` steps of all environments, or of one worker's. There are no dead steps in it.

    Observations are arrays, or for Dict and Tuple spaces dicts and tuples of arrays. Dtypes are the spaces' own.
    """

    rows: np.ndarray  # (num_envs,) int64, which environments these are
    observations: Any  # (num_steps, num_envs, ...) what the policy acted on
    actions: np.ndarray  # (num_steps, num_envs, ...)
    logprobs: np.ndarray  # (num_steps, num_envs) float32, of the actions under the policy that took them
    rewards: np.ndarray  # (num_steps, num_envs) float64
    terminations: np.ndarray  # (num_steps, num_envs) bool
    truncations: np.ndarray  # (num_steps, num_envs) bool
    final_observations: Any  # (episodes, ...) what the steps that ended one led to, ordered as their nonzero()
    next_observations: Any  # (num_envs, ...) after the last step; docs/limits.md says what "vector" ones make of it
    policy_versions: np.ndarray  # (num_envs,) int64, the version last pulled by the worker that acted
    episodic_returns: np.ndarray  # (num_episodes,) float64, of the episodes that ended here, by step, then environment
    episodic_lengths: np.ndarray  # (num_episodes,) int64

    @classmethod
    def join(cls, space: Space, parts: list[RolloutPart], rows: np.ndarray) -> Rollout:
        """Join the workers' parts, given in row order; ``space`` is the single observation space."""
        sizes = [part.rewards.shape[1] for part in parts]
        # Not every environment counts every episode.
        ended = _in_order((np.flatnonzero(part.terminations | part.truncations) for part in parts), sizes)
        counted = _in_order((part.episodes for part in parts), sizes)

        each = {name: [getattr(part, name) for part in parts] for name in RolloutPart.__struct_fields__}
        return cls(
            rows=rows,
            policy_versions=np.repeat(each["version"], sizes),
            episodic_returns=np.concatenate(each["episodic_returns"])[counted],
            episodic_lengths=np.concatenate(each["episodic_lengths"])[counted],
            observations=join(space, each["observations"], axis=1),
            next_observations=join(space, each["next_observations"], copy=True),  # the head keeps the views
            final_observations=take(space, join(space, each["final_observations"]), ended),
            **{
                name: join_arrays(each[name], axis=1)
                for name in ("actions", "logprobs", "rewards", "terminations", "truncations")
            },
        )


def _in_order(flat: Iterable[np.ndarray], sizes: list[int]) -> Any:
    """Return the order by step, then environment, of what workers number by ``step * num_envs + environment``."""
    if len(sizes) == 1:
        return ...
    first_rows, num_envs = np.cumsum([0, *sizes[:-1]]), sum(sizes)
    numbers = [k // n * num_envs + first + k % n for k, n, first in zip(flat, sizes, first_rows, strict=True)]
    return np.argsort(np.concatenate(numbers))
