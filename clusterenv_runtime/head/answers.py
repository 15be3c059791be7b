"""Workers' answers, opened and checked once, when they arrive: behind this everything is what it
says.

What an answer must be follows from the spaces, from the request, and from the policy that was
published. An observation may hold any value of its dtype, as environments may say what they like.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from gymnasium.vector.utils import create_empty_array

from ..arrays.frames import Frames
from ..arrays.spaces import map_space
from ..arrays.trees import map_tree
from ..envs.layout import EnvLayout
from ..errors import ProtocolError
from ..policy.versions import Published
from ..wire.buffers import Arrays
from ..wire.codec import unpack
from ..wire.part import OBSERVATIONS, Layout, RolloutPart, fault_of
from ..wire.protocol import Call, Collect, CutOff, Message, Part, Reply, Reset, Step

# The arrays that a step gives beside observations, one number for each environment.
_STEP = {"rewards": np.float64, "terminations": np.bool_, "truncations": np.bool_}


class OpenedReply(NamedTuple):
    """A `Reply` with its value and infos unpacked."""

    value: Any
    infos: list[tuple[int, dict[Any, Any]]]  # (environment, info)
    dropped: list[str] = []


class Opener:
    """Opens workers' answers, and refuses what cannot be one.

    Args:
        envs: the layout of the environments, which the answers must have.
    """

    def __init__(self, envs: EnvLayout) -> None:
        self._space = space = envs.single_observation_space
        self._action_space = envs.single_action_space
        self._info_keys = envs.info_keys
        self._example = create_empty_array(space, 1)
        self._stacks = envs.stacks
        self._frames: list[np.ndarray] = []  # of each stack one, ``(1, *frame)``
        self._sent = map_space(self._as_sent, space, self._stacks, self._example)
        self._layout: tuple[dict[str, Any], Layout] | None = None  # and what policy it is of

    def _as_sent(self, is_stack: bool, one: Any) -> Any:
        if not is_stack:
            return one
        self._frames.append(one[0, :1])
        return np.empty(one.shape[:2], np.int32)

    def __call__(
        self,
        asked: Message,
        answer: Reply | Part,
        frames: list[Any],
        num_envs: int,
        asked_at: Published,
        published: Published,
    ) -> OpenedReply | RolloutPart:
        """Return the part in an answer, or its value and infos.

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
        arrays = Arrays(frames[1:])
        if isinstance(answer, Part):
            policy = published if answer.version >= published.since else asked_at
            opened = self._open_part(asked, answer, arrays, num_envs, policy, published.version)
        else:
            value, infos = unpack(answer.value, arrays), unpack(answer.infos, arrays)
            self._check_value(asked, value, num_envs)
            opened = OpenedReply(value, _checked_infos(infos, num_envs), answer.dropped)
        arrays.end()
        return opened

    def _open_part(
        self,
        asked: Collect,
        answer: Part,
        arrays: Arrays,
        num_envs: int,
        policy: Published,
        newest: int,
    ) -> RolloutPart:
        if not policy.since <= answer.version <= newest:
            possible = f"but these are {policy.since} to {newest}"
            raise ProtocolError(f"it says that it acted on version {answer.version}, {possible}")
        if unknown := answer.infos.keys() - self._info_keys:
            raise ProtocolError(f"infos have {unknown!r:.100}, which nobody asked for")
        sizes = {
            "steps": asked.num_steps,
            "envs": num_envs,
            "states": asked.states * num_envs,
            "ends": answer.ends,
            "episodes": answer.episodes,
        }
        part = self._layout_of(policy.example).unpack(answer, sizes, arrays)
        ends = np.count_nonzero(part.terminations | part.truncations)
        if ends != answer.ends:
            raise ProtocolError(f"final_observations are {answer.ends}, of {ends} ends")
        given = part.actions if policy.is_identity else None
        if (fault := fault_of(part, self._action_space, given)) is not None:
            raise ProtocolError(fault)
        self._unfold(part)
        return part

    def _layout_of(self, example: dict[str, Any]) -> Layout:
        """Return the layout of parts in which a policy of this example has acted."""
        if self._layout is None or self._layout[0] is not example:
            observations = dict.fromkeys(OBSERVATIONS, self._sent)
            self._layout = example, Layout({**example, **observations}, self._frames)
        return self._layout[1]

    def _unfold(self, part: RolloutPart) -> None:
        """Put stacks of a part's frames where their indices are."""
        if not part.frames:
            return

        def stacked(is_stack: bool, index: Any) -> Any:
            if not is_stack:
                return index
            frames = next(rest)
            # as unsigned numbers, those below 0 are the largest
            if index.size and index.view(np.uint32).max() >= len(frames):
                said = f"observations are of {len(frames)} frames"
                raise ProtocolError(f"{said}, and say that they are of others")
            return Frames(frames, index)

        for name in OBSERVATIONS:
            rest = iter(part.frames)
            tree = map_tree(stacked, self._stacks, getattr(part, name))
            # of the others there are few
            setattr(part, name, tree if name == "observations" else map_tree(np.asarray, tree))

    def _check_value(self, asked: Message, value: Any, num_envs: int) -> None:
        """Raise ProtocolError if this is no value of a reply to a request."""
        match asked:
            case Call():
                if not (isinstance(value, list | tuple) and len(value) == num_envs):
                    found = type(value).__name__
                    raise ProtocolError(f"a call gives {num_envs} values, got a {found}")
            case Reset():
                self._check_observations(value, num_envs)
            case Step() | CutOff():
                if not (isinstance(value, tuple) and len(value) == 1 + len(_STEP)):
                    raise ProtocolError(f"a step gives four values, got a {type(value).__name__}")
                self._check_observations(value[0], num_envs)
                for (name, dtype), array in zip(_STEP.items(), value[1:], strict=True):
                    _check(name, array, dtype, (num_envs,))

    def _check_observations(self, observations: Any, num_envs: int) -> None:
        def check(one: Any, leaf: Any) -> None:
            if isinstance(one, np.ndarray):
                _check("observations", leaf, one.dtype, (num_envs, *one.shape[1:]))
            elif not (isinstance(leaf, tuple) and len(leaf) == num_envs):
                raise TypeError(f"{num_envs} in a tuple are wanted, got a {type(leaf).__name__}")

        try:
            map_space(check, self._space, self._example, observations)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"observations are not of {self._space}: {error!r}") from None


def _checked_infos(infos: Any, num_envs: int) -> list[tuple[int, dict[Any, Any]]]:
    pairs = _converted("infos", infos, list[tuple[int, dict[Any, Any]]])
    if not all(0 <= env < num_envs for env, _ in pairs):
        raise ProtocolError("infos are of environments that there are not")
    return pairs


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{name}: {error}") from None


def _check(name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """Raise ProtocolError if this is not an array of this dtype and shape."""
    if not isinstance(array, np.ndarray):
        raise ProtocolError(f"{name} must be an array, got a {type(array).__name__}")
    if array.shape != shape or array.dtype != dtype:
        expected, found = np.dtype(dtype).str, array.dtype.str
        raise ProtocolError(f"{name} must be {expected} {shape}, got {found} {array.shape}")
