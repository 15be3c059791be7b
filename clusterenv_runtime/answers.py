"""What workers answer, opened and checked: once, when it arrives, so that behind this everything is what it says.

What an answer must be follows from the spaces, from what was asked for, and from the policy that was published. A value
of an observation may be anything of its dtype, as environments may say what they like.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from gymnasium import Space, spaces

from .codec import unpack
from .errors import ProtocolError
from .protocol import Call, Collect, CutOff, Message, Part, Reply, Reset, Step
from .rollout import OBSERVATIONS, RolloutPart
from .spaces import leaves_of, one_of
from .sync import sampled_states

if TYPE_CHECKING:
    import torch


class Published(NamedTuple):
    """What is known of the published policy; shapes and dtypes are those of what it gives at one state."""

    version: int = 0
    since: int = 1  # the first version of its structure
    params_shape: tuple[int, ...] = ()
    actions_shape: tuple[int, ...] = ()


class Opener:
    """Opens workers' answers, and refuses what cannot be one.

    Args:
        space: the single observation space.
        action_space: the single action space.
    """

    def __init__(self, space: Space, action_space: Space) -> None:
        self._space, self._action_space, self._example = space, action_space, one_of(space)
        self._generator: torch.Generator | None = None  # to try states on

    def __call__(
        self, asked: Message, answer: Reply | Part, frames: list[Any], num_envs: int, published: Published
    ) -> Reply | RolloutPart:
        """Return the part in an answer, or the `Reply` with its value and infos unpacked.

        Args:
            asked: the request.
            answer: its answer.
            frames: that message's frames.
            num_envs: how many environments the worker has.
            published: what acted, or what came after it.

        Raises:
            ProtocolError: it is not what was asked for.
        """
        if isinstance(asked, Collect) != isinstance(answer, Part):
            raise ProtocolError(f"a {type(answer).__name__} to a {type(asked).__name__}")
        if isinstance(answer, Part):
            return self._open_part(asked.num_steps, answer, frames[1:], num_envs, published)
        answer.value, answer.infos = unpack(answer.value, frames[1:]), unpack(answer.infos, frames[1:])
        self._check_reply(asked, answer, num_envs)
        return answer

    def _open_part(
        self, num_steps: int, answer: Part, buffers: list[Any], num_envs: int, published: Published
    ) -> RolloutPart:
        values = {name: unpack(value, buffers, copy=False) for name, value in answer.part.items()}
        try:
            part = msgspec.convert(values, RolloutPart)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a part of a rollout is malformed: {error}") from None
        example, *observations = leaves_of(self._space, self._example, *(getattr(part, name) for name in OBSERVATIONS))
        if not 0 < part.version <= published.version:
            newest = f"and {published.version} is the newest"
            raise ProtocolError(f"it says that it acted on version {part.version}, {newest}")
        if not 0 <= answer.waited < math.inf:
            raise ProtocolError(f"it says that it waited for {answer.waited} seconds")
        if answer.generator:
            self._check_generator(answer.generator)
        steps = num_steps, num_envs
        _check("rewards", part.rewards, "f", steps)
        _check("logprobs", part.logprobs, "f", steps)
        _check("terminations", part.terminations, "b", steps)
        _check("truncations", part.truncations, "b", steps)
        is_known = part.version >= published.since
        _check("actions", part.actions, "biuf", steps, published.actions_shape if is_known else None)
        states = (len(sampled_states(num_steps * num_envs)),)
        _check("params", part.params, "f", states, published.params_shape if is_known else None)
        episodes = (part.episodes.size,)
        _check("episodes", part.episodes, "i", episodes)
        _check("episodic_returns", part.episodic_returns, "f", episodes)
        _check("episodic_lengths", part.episodic_lengths, "i", episodes)
        for name in ("rewards", "logprobs", "params", "episodic_returns"):
            if np.isnan(getattr(part, name)).any():
                raise ProtocolError(f"{name} hold NaN")
        self._check_actions(part.actions)
        ends = int(np.count_nonzero(part.terminations | part.truncations))
        for name, leading, leaves in zip(OBSERVATIONS, (steps, (ends,), (num_envs,)), observations, strict=True):
            _check_observations(name, leaves, example, leading)
        return part

    def _check_generator(self, state: bytes) -> None:
        import torch  # there by now, as a policy has acted

        if self._generator is None:
            self._generator = torch.Generator("cpu")
        try:
            self._generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
        except RuntimeError as error:
            raise ProtocolError(f"the state of its random numbers: {error}") from None

    def _check_actions(self, actions: np.ndarray) -> None:
        space = self._action_space
        if isinstance(space, spaces.Discrete) and not np.all(
            (actions >= space.start) & (actions < space.start + space.n)
        ):
            raise ProtocolError(f"actions are not of {space}")

    def _check_reply(self, asked: Message, reply: Reply, num_envs: int) -> None:
        is_reset, is_step = isinstance(asked, Reset), isinstance(asked, Step | CutOff)
        if is_reset or is_step:
            if is_step and not (isinstance(reply.value, tuple) and len(reply.value) == 4):
                raise ProtocolError(f"a step gives four values, got {type(reply.value).__name__}")
            observations, *arrays = reply.value if is_step else (reply.value,)
            _check_observations("observations", *leaves_of(self._space, observations, self._example), (num_envs,))
            for name, array, kinds in zip(("rewards", "terminations", "truncations"), arrays, "fbb", strict=False):
                _check(name, array, kinds, (num_envs,))
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
            _check(name, leaf, one.dtype.kind, leading, one.shape[1:])
        elif not (isinstance(leaf, tuple) and len(leaf) == leading[0]):
            raise ProtocolError(f"{name} must be {leading[0]} in a tuple, got a {type(leaf).__name__}")


def _check(name: str, array: Any, kinds: str, leading: tuple[int, ...], trailing: tuple[int, ...] | None = ()) -> None:
    """Raise ProtocolError if this is not an array of such dtypes as torch reads, and of this shape.

    The trailing shape is not checked if it is None.
    """
    if not isinstance(array, np.ndarray):
        raise ProtocolError(f"{name} must be an array, got a {type(array).__name__}")
    shape = array.shape[: len(leading)] if trailing is None else array.shape
    is_readable = array.dtype.kind in kinds and array.dtype.isnative and array.dtype.itemsize <= 8
    if shape != leading + (trailing or ()) or not is_readable:
        wanted = f"{leading + (trailing or ())}{' and more' if trailing is None else ''}"
        found = f"{array.dtype.str} of shape {array.shape}"
        raise ProtocolError(f"{name} must be of shape {wanted} and kind {kinds!r}, got {found}")
