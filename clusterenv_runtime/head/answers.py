"""What workers answer, opened and checked: once, when it arrives, so that behind this everything is
what it says.

What an answer must be follows from the spaces, from what was asked for, and from the policy that
was published. A value of an observation may be anything of its dtype, as environments may say what
they like.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from ..arrays.frames import Frames
from ..arrays.spaces import are_stacks, leaves_of, map_space
from ..arrays.trees import map_tree
from ..errors import ProtocolError
from ..policy.versions import Published
from ..wire.codec import Unpacker
from ..wire.packed import Array
from ..wire.part import OBSERVATIONS, RolloutPart, fault_of, fault_of_info
from ..wire.protocol import Call, Collect, CutOff, Message, Part, Reply, Reset, Step

_FIELDS = set(RolloutPart.__struct_fields__)
_BOOLS, _INTS, _FLOATS = (np.empty(1, dtype) for dtype in (bool, np.int64, np.float64))  # examples


class Opener:
    """Opens workers' answers, and refuses what cannot be one.

    Args:
        space: the single observation space.
        action_space: the single action space.
        info_keys: what of infos is in a part.
        frame_stack: which of its observations are stacks, see `are_stacks`.
    """

    def __init__(
        self,
        space: Space,
        action_space: Space,
        info_keys: Collection[str] = (),
        frame_stack: int | None = None,
    ) -> None:
        self._space, self._action_space, self._example = (
            space,
            action_space,
            create_empty_array(space, 1),
        )
        self._info_keys, self._stacks = info_keys, are_stacks(space, frame_stack)
        self._stack, index = frame_stack, np.empty((1, frame_stack or 0), np.int32)
        self._frames: list[np.ndarray] = []  # of each stack one, ``(frame_stack, *frame)``

        def sent(is_stack: bool, one: Any) -> Any:
            if is_stack:
                self._frames.append(one[0])
            return index if is_stack else one

        self._sent = map_space(sent, space, self._stacks, self._example)

    def __call__(
        self,
        asked: Message,
        answer: Reply | Part,
        frames: list[Any],
        num_envs: int,
        asked_at: Published,
        published: Published,
    ) -> Reply | RolloutPart:
        """Return the part in an answer, or the `Reply` with its value and infos unpacked.

        Args:
            asked: the request.
            answer: its answer.
            frames: that message's frames.
            num_envs: how many environments the worker has.
            asked_at: what was published when that was asked.
            published: what is now.

        Raises:
            ProtocolError: it is not what was asked for.
        """
        if isinstance(asked, Collect) != isinstance(answer, Part):
            raise ProtocolError(f"a {type(answer).__name__} to a {type(asked).__name__}")
        if isinstance(answer, Part):
            return self._open_part(
                asked.num_steps, asked.states, answer, frames[1:], num_envs, asked_at, published
            )
        unpack = Unpacker(frames[1:])
        answer.value, answer.infos = unpack(answer.value), unpack(answer.infos)
        self._check_reply(asked, answer, num_envs)
        return answer

    def _open_part(
        self,
        num_steps: int,
        states: int,
        answer: Part,
        buffers: list[Any],
        num_envs: int,
        asked_at: Published,
        published: Published,
    ) -> RolloutPart:
        packed = answer.part
        if packed.keys() != _FIELDS:
            raise ProtocolError(
                f"a part has missing or unknown fields: {sorted(packed.keys() ^ _FIELDS)!r:.200}"
            )
        if type(version := packed["version"]) is not int:
            raise ProtocolError(f"version must be an int, got a {type(version).__name__}")
        policy = published if version >= published.since else asked_at
        if not policy.since <= version <= published.version:
            possible = f"but these are {asked_at.since} to {published.version}"
            raise ProtocolError(f"it says that it acted on version {version}, {possible}")
        if not 0 <= answer.waited < 2**53:  # so that no sum of these is infinite
            raise ProtocolError(f"it says that it waited for {answer.waited} seconds")
        steps, episodes, example_of = (
            (num_steps, num_envs),
            (_length(packed["episodes"]),),
            policy.example,
        )
        forms = {
            name: (packed[name], example, leading)
            for name, example, leading in (
                ("starts", _BOOLS, (num_envs,)), ("rewards", _FLOATS, steps), ("terminations", _BOOLS, steps),
                ("truncations", _BOOLS, steps), ("actions", example_of["actions"], steps),
                ("logprobs", example_of["logprobs"], steps), ("extras", example_of["extras"], steps),
                ("params", example_of["params"], (states * num_envs,)), ("states", example_of["states"], (num_envs,)),
                ("episodes", _INTS, episodes), ("episodic_returns", _FLOATS, episodes),
                ("episodic_lengths", _INTS, episodes),
            )
        }  # fmt: skip
        unpack = Unpacker(buffers, copy=False)
        values, infos, frames = (
            unpack.arrays(forms),
            unpack(packed["infos"]),
            unpack.tree_of(packed["frames"]),
        )
        ended = (values["terminations"] | values["truncations"]).reshape(-1)
        ends = int(np.count_nonzero(ended))
        leading = zip(OBSERVATIONS, (steps, (ends,), (num_envs,)), strict=True)
        values |= unpack.arrays({name: (packed[name], self._sent, axes) for name, axes in leading})
        part = RolloutPart(version=version, infos=infos, **values)
        self._check_infos(part.infos, ended.size)
        if (
            fault := fault_of(part, self._action_space if policy.is_identity else None)
        ) is not None:
            raise ProtocolError(fault)
        if part.episodes.size:
            within = part.episodes[part.episodes < ended.size]  # some go further
            if (
                part.episodes[0] < 0
                or np.any(np.diff(part.episodes) <= 0)
                or not np.all(ended[within])
            ):
                raise ProtocolError("episodes are counted that have not ended")
            if part.episodes.size > 4 * ended.size or np.any(part.episodic_lengths < 1):
                raise ProtocolError("episodes are counted that were none")
        self._unfold(part, unpack, frames, ended.size + num_envs + ends)
        return part

    def _unfold(self, part: RolloutPart, unpack: Unpacker, found: Any, stacks: int) -> None:
        """Open the frames of a part, and put that many stacks of them where their indices are."""
        if not isinstance(found, tuple):
            raise ProtocolError(f"frames must be in a tuple, got a {type(found).__name__}")
        if len(found) != len(self._frames):
            raise ProtocolError(f"frames are of {len(self._frames)} observations, got {len(found)}")
        all_frames, most = list[np.ndarray](), stacks * (self._stack or 0)
        for each, example in zip(found, self._frames, strict=True):
            frames = unpack.arrays({"frames": (each, example, (_length(each),))})["frames"]
            if len(frames) > most:
                raise ProtocolError(
                    f"{len(frames)} frames are too many for {stacks} stacks of {self._stack}"
                )
            all_frames.append(frames)

        def stacked(is_stack: bool, index: Any) -> Any:
            if not is_stack:
                return index
            frames = next(remaining)
            if index.size and index.view(np.uint32).max() >= len(
                frames
            ):  # those below 0 are the largest
                raise ProtocolError(
                    f"observations are of {len(frames)} frames, and say that they are of others"
                )
            return Frames(frames, index)

        for name in OBSERVATIONS if all_frames else ():
            remaining = iter(all_frames)
            trees = map_tree(stacked, self._stacks, getattr(part, name))
            setattr(
                part, name, trees if name == "observations" else map_tree(np.asarray, trees)
            )  # the others are few

    def _check_infos(self, infos: dict[str, Any], size: int) -> None:
        for key, found in infos.items():
            if key not in self._info_keys or not (isinstance(found, tuple) and len(found) == 2):
                raise ProtocolError(f"infos have {key!r:.100}, which nobody asked for")
            where, values = found
            _check("steps of infos", where, np.int64, np.shape(where)[:1])
            is_numbers = (
                isinstance(values, np.ndarray) and values.ndim and values.dtype.kind in "biuf"
            )
            if not (is_numbers and values.dtype.isnative and values.dtype.itemsize <= 8):
                raise ProtocolError(f"info {key!r} must be an array of numbers")
            _check(f"info {key!r}", values, values.dtype, where.shape, values.shape[1:])
            if (fault := fault_of_info(values)) is not None:
                raise ProtocolError(f"info {key!r} {fault}")
            if np.any(where < 0) or np.any(where >= size) or np.any(np.diff(where) <= 0):
                raise ProtocolError(f"info {key!r} is of steps that there are not")

    def _check_reply(self, asked: Message, reply: Reply, num_envs: int) -> None:
        is_reset, is_step = isinstance(asked, Reset), isinstance(asked, Step | CutOff)
        if is_reset or is_step:
            if is_step and not (isinstance(reply.value, tuple) and len(reply.value) == 4):
                raise ProtocolError(f"a step gives four values, got {type(reply.value).__name__}")
            observations, *arrays = reply.value if is_step else (reply.value,)
            _check_observations(
                "observations", *leaves_of(self._space, observations, self._example), (num_envs,)
            )
            dtypes = {"rewards": np.float64, "terminations": bool, "truncations": bool}
            for (name, dtype), array in zip(dtypes.items(), arrays, strict=False):
                _check(name, array, dtype, (num_envs,))
        elif isinstance(asked, Call) and not (
            isinstance(reply.value, list | tuple) and len(reply.value) == num_envs
        ):
            raise ProtocolError(f"a call gives {num_envs} values, got {type(reply.value).__name__}")
        if not isinstance(reply.infos, list):
            raise ProtocolError(f"infos are a list, got {type(reply.infos).__name__}")
        for info in reply.infos:
            is_pair = isinstance(info, tuple) and len(info) == 2 and isinstance(info[1], dict)
            if not (is_pair and type(info[0]) is int and 0 <= info[0] < num_envs):
                raise ProtocolError(
                    f"infos are pairs of an environment and a dict, got {type(info).__name__}"
                )


def _check_observations(
    name: str, leaves: list[Any], example: list[Any], leading: tuple[int, ...]
) -> None:
    for leaf, one in zip(leaves, example, strict=True):
        if isinstance(one, np.ndarray):
            _check(name, leaf, one.dtype, leading, one.shape[1:])
        elif not (isinstance(leaf, tuple) and len(leaf) == leading[0]):
            raise ProtocolError(
                f"{name} must be {leading[0]} in a tuple, got a {type(leaf).__name__}"
            )


def _length(packed: Any) -> int:
    """Return how long an array says that it is."""
    return packed.shape[0] if isinstance(packed, Array) and packed.shape else 0


def _check(
    name: str, array: Any, dtype: Any, leading: tuple[int, ...], trailing: tuple[int, ...] = ()
) -> None:
    """Raise ProtocolError if this is not an array of this dtype and shape."""
    if not isinstance(array, np.ndarray):
        raise ProtocolError(f"{name} must be an array, got a {type(array).__name__}")
    if array.shape != leading + trailing or array.dtype != dtype:
        expected, found = np.dtype(dtype).str, array.dtype.str
        raise ProtocolError(
            f"{name} must be {expected} {leading + trailing}, got {found} {array.shape}"
        )
