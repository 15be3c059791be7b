"""The opening of workers' responses, which are checked once, when they arrive.

Other code can rely on the form of an opened response. This form follows from the spaces, the
request and the published policy. An array may hold any value of its dtype: workers themselves
refuse values that no learner can use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from gymnasium.vector.utils import create_empty_array

from ..arrays.frames import Frames
from ..arrays.trees import map_space, map_tree
from ..envs.blueprint import EnvLayout
from ..errors import ProtocolError
from ..policy.versions import Published
from ..wire.buffers import Arrays
from ..wire.codec import unpack
from ..wire.part import OBSERVATIONS, Layout, RolloutPart
from ..wire.protocol import Call, Collect, CutOff, Evaluate, Message, Part, Reply, Reset, Step


class OpenedReply(NamedTuple):
    """A `Reply` with its value and infos unpacked."""

    value: Any
    infos: list[tuple[int, dict[Any, Any]]]  # (environment, info)
    dropped: list[str] = []


def value_of(response: Reply, frames: list[Any]) -> Any:
    """Return a reply's value, without a check of the value's form.

    Raises:
        ProtocolError: the value is malformed.
    """
    arrays = Arrays(frames[1:])
    value = unpack(response.value, arrays)
    arrays.end()
    return value


class Opener:
    """Opens workers' responses, and refuses those that do not match their requests.

    Args:
        envs: the layout of the environments, which responses must match.
    """

    def __init__(self, envs: EnvLayout) -> None:
        self._info_keys = envs.info_keys
        self._stacks = envs.stacks
        space = envs.single_observation_space
        one = create_empty_array(space, 1)
        self._observations = space, one
        # Examples of a step's results besides observations: rewards, terminations and truncations.
        self._numbers = [np.empty(1, dtype) for dtype in (np.float64, np.bool_, np.bool_)]
        # Examples of an evaluation's results: returns, lengths, and which episodes have ended.
        self._scores = [np.empty(1, dtype) for dtype in (np.float64, np.int64, np.bool_)]
        self._frames: list[np.ndarray] = []  # one frame of each stack, ``(1, *frame)``
        self._sent = map_space(self._as_sent, space, self._stacks, one)
        # The last policy's example, and the layout of its parts.
        self._layout: tuple[dict[str, Any], Layout] | None = None

    def _as_sent(self, is_stack: bool, one: Any) -> Any:
        if not is_stack:
            return one
        self._frames.append(one[0, :1])
        return np.empty(one.shape[:2], np.int32)

    def __call__(
        self,
        asked: Message,
        response: Reply | Part,
        frames: list[Any],
        num_envs: int,
        policy: Published | None,
    ) -> OpenedReply | RolloutPart:
        """Return the part in a response, or the reply with its value and infos unpacked.

        Args:
            asked: the request.
            response: the response to it.
            frames: the frames of the response.
            num_envs: how many environments the worker has.
            policy: the policy whose weights the worker was last sent; None if it was sent none.

        Raises:
            ProtocolError: the response does not match the request.
        """
        if isinstance(asked, Collect) != isinstance(response, Part):
            raise ProtocolError(f"a {type(response).__name__} to a {type(asked).__name__}")
        arrays = Arrays(frames[1:])
        if isinstance(response, Part):
            if policy is None or response.version != policy.version:
                held = 0 if policy is None else policy.version
                text = f"it says that it acted on version {response.version}"
                raise ProtocolError(f"{text}, but it was last sent version {held}")
            opened = self._open_part(asked, response, arrays, num_envs, policy)
        else:
            opened = self._open_reply(asked, response, arrays, num_envs)
        arrays.end()
        return opened

    def _open_part(
        self, asked: Collect, response: Part, arrays: Arrays, num_envs: int, policy: Published
    ) -> RolloutPart:
        if unknown := response.infos.keys() - self._info_keys:
            raise ProtocolError(f"infos have {unknown!r:.100}, which nobody asked for")
        sizes = {
            "steps": asked.num_steps,
            "envs": num_envs,
            "states": asked.states * num_envs,
            "ends": response.ends,
            "episodes": response.episodes,
        }
        part = self._layout_of(policy.example).unpack(response, sizes, arrays)
        ends = np.count_nonzero(part.terminations | part.truncations)
        if ends != response.ends:
            raise ProtocolError(f"there are {response.ends} final_observations for {ends} ends")
        if part.frames:
            self._unfold(part)
        return part

    def _layout_of(self, example: dict[str, Any]) -> Layout:
        """Return the layout of parts from a policy with this example."""
        if self._layout is None or self._layout[0] is not example:
            observations = dict.fromkeys(OBSERVATIONS, self._sent)
            self._layout = example, Layout({**example, **observations}, self._frames)
        return self._layout[1]

    def _unfold(self, part: RolloutPart) -> None:
        """Replace the frame indices in a part's observations with stacks of the frames."""

        def stacked(is_stack: bool, index: Any) -> Any:
            if not is_stack:
                return index
            frames = next(rest)
            # as unsigned integers, negative indices are the largest
            if index.size and index.view(np.uint32).max() >= len(frames):
                said = f"observations have {len(frames)} frames"
                raise ProtocolError(f"{said}, but indices of others")
            return Frames(frames, index)

        for name in OBSERVATIONS:
            rest = iter(part.frames)
            tree = map_tree(stacked, self._stacks, getattr(part, name))
            # final and next observations are few, so their stacks are gathered here
            setattr(part, name, tree if name == "observations" else map_tree(np.asarray, tree))

    def _open_reply(
        self, asked: Message, response: Reply, arrays: Arrays, num_envs: int
    ) -> OpenedReply:
        value, infos = unpack(response.value, arrays), unpack(response.infos, arrays)

        def check(one: Any, leaf: Any, number: int = num_envs) -> None:
            if isinstance(one, np.ndarray):
                fits = leaf.dtype == one.dtype and leaf.shape == (number, *one.shape[1:])
            else:
                fits = isinstance(leaf, tuple) and len(leaf) == number
            if not fits:
                raise ValueError(f"{number} like {one!r:.100} are wanted, got {leaf!r:.100}")

        try:
            match asked:
                case Reset():
                    map_space(check, *self._observations, value)
                case Step() | CutOff():
                    observations, *numbers = value
                    map_space(check, *self._observations, observations)
                    for one, leaf in zip(self._numbers, numbers, strict=True):
                        check(one, leaf)
                case Evaluate():
                    number = sum(asked.episodes)
                    for one, leaf in zip(self._scores, value, strict=True):
                        check(one, leaf, number)
                case Call() if not (type(value) is tuple and len(value) == num_envs):
                    raise ValueError(f"{num_envs} values are wanted, got {value!r:.100}")
            pairs = msgspec.convert(infos, list[tuple[int, dict[Any, Any]]])
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            msgspec.ValidationError,
        ) as error:
            raise ProtocolError(f"this is no response to {asked}: {error!r}") from None
        if not all(0 <= env < num_envs for env, _ in pairs):
            raise ProtocolError("infos are of environments that do not exist")
        return OpenedReply(value, pairs, response.dropped)
