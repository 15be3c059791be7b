"""One worker's part of a rollout: its layout, its encoding, and the check of its values."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
from gymnasium import Space

from ..arrays.trees import FLOAT32_MAX, are_actions, leaves, map_tree
from ..errors import EnvRaised, ProtocolError
from .buffers import Arrays, to_buffers
from .protocol import Part

_INT64 = np.dtype(np.int64)
Tree = Any  # an array, or dicts and tuples of arrays
STEPS = "steps", "envs"
ENVS = ("envs",)
ENDS = ("ends",)  # the steps that ended an episode
EPISODES = ("episodes",)  # the ended episodes that count
STATES = ("states",)  # the states on which the divergence is measured


class RolloutPart(msgspec.Struct, gc=False):
    """One worker's part of a rollout: ``steps`` steps of its ``envs`` environments.

    The annotation of an array names its leading axes and its dtype. Observations have the shapes
    and dtypes of their space. Arrays that come from the policy and have no dtype here have the
    policy's dtypes.
    """

    version: int  # the version of the policy that acted
    # whether each environment's first observation here is the first of an episode
    starts: Annotated[np.ndarray, ENVS, np.bool_]
    observations: Annotated[Tree, STEPS]  # the observations that the policy acted on
    actions: Annotated[Tree, STEPS]
    logprobs: Annotated[np.ndarray, STEPS]  # the actions' log-probabilities under their policy
    states: Annotated[Tree, ENVS]  # the policy's states before the first step; None if it has none
    extras: Annotated[dict[str, np.ndarray], STEPS]  # the result of `Policy.extras`
    rewards: Annotated[np.ndarray, STEPS, np.float64]
    terminations: Annotated[np.ndarray, STEPS, np.bool_]
    truncations: Annotated[np.ndarray, STEPS, np.bool_]
    # the last observation of each ended episode, ordered as (terminations | truncations).nonzero()
    final_observations: Annotated[Tree, ENDS]
    next_observations: Annotated[Tree, ENVS]  # the observations after the last step
    episodes: Annotated[np.ndarray, EPISODES, np.int64]  # the step that ended each, as in ``infos``
    episodic_returns: Annotated[np.ndarray, EPISODES, np.float64]
    episodic_lengths: Annotated[np.ndarray, EPISODES, np.int64]
    params: Annotated[Tree, STATES]  # the distribution parameters at `measured_states`
    # for each key of ``info_keys`` that occurred: the steps that had it, (n,) int64, numbered by
    # step * envs + environment, and the values, (n, ...)
    infos: dict[str, tuple[np.ndarray, np.ndarray]]
    # the frames of each stacked observation, each once; the stacks are indices of them, see `fold`
    frames: list[np.ndarray] = []


_FORMS = {
    name: hint.__metadata__
    for name, hint in get_type_hints(RolloutPart, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
AXES: dict[str, tuple[str, ...]] = {name: form[0] for name, form in _FORMS.items()}
DTYPES = {name: np.dtype(form[1]) for name, form in _FORMS.items() if len(form) > 1}
_ALL_AXES = set(AXES.values())
OBSERVATIONS = "observations", "final_observations", "next_observations"
OF_POLICY = "actions", "logprobs", "states", "extras", "params"


def pack_part(part: RolloutPart, waited: float) -> tuple[Part, list[Any]]:
    """Return the message that carries a part, and its buffers.

    Raises:
        ValueError: an array does not have its field's axes.
    """
    sizes = dict(zip(STEPS, part.rewards.shape, strict=True))
    sizes["ends"] = int(np.count_nonzero(part.terminations | part.truncations))
    sizes["episodes"] = len(part.episodes)
    sizes["states"] = len(leaves(part.params)[0])
    arrays: list[np.ndarray] = []
    layout = {}
    for name, axes in AXES.items():
        tree = getattr(part, name)
        found = [leaf for leaf in leaves(tree) if leaf is not None]
        leading = tuple(sizes[axis] for axis in axes)
        for leaf in found:
            if leaf.shape[: len(axes)] != leading:
                raise ValueError(f"{name} must begin with the axes {leading}, got {leaf.shape}")
        arrays += found
        layout[name] = _described(tree, len(axes))
    infos = {}
    for key, (steps, values) in part.infos.items():
        arrays += steps, values
        infos[key] = len(steps), values.dtype.str, values.shape[1:]
    arrays += part.frames
    frames = [len(each) for each in part.frames]
    ends, episodes = sizes["ends"], sizes["episodes"]
    layout["frames"] = _described(tuple(part.frames), 1)
    message = Part(part.version, layout, ends, episodes, frames, infos, waited)
    return message, to_buffers(arrays)


def _described(tree: Tree, axes: int) -> str:
    """Return a tree's structure, dtypes and shapes as text, without the first ``axes`` axes."""

    def text(leaf: np.ndarray | None) -> str | None:
        return None if leaf is None else f"{leaf.dtype.str} {leaf.shape[axes:]}"

    return str(map_tree(text, tree))


class Layout:
    """The layout of a part's arrays, which the head knows before the part arrives.

    Args:
        examples: trees of arrays ``(1, ...)``, by field, for the fields that have no dtype in
            `RolloutPart`.
        frames: one frame of each stacked observation, ``(1, ...)``.
    """

    def __init__(self, examples: dict[str, Tree], frames: list[np.ndarray]) -> None:
        self._examples = {
            name: np.empty(1, DTYPES[name]) if name in DTYPES else examples[name] for name in AXES
        }
        self._frames = frames
        self._described = {name: _described(tree, 1) for name, tree in self._examples.items()}
        self._described["frames"] = _described(tuple(frames), 1)

    def unpack(self, answer: Part, sizes: dict[str, int], arrays: Arrays) -> RolloutPart:
        """Return the part. Its stacked observations are indices of its frames.

        Raises:
            ProtocolError: the part does not have this layout.
        """
        if answer.layout != self._described:
            for name, expected in self._described.items():
                if (found := answer.layout.get(name)) != expected:
                    raise ProtocolError(f"{name} must be {expected}, got {found}")
            unknown = answer.layout.keys() - self._described.keys()
            raise ProtocolError(f"unknown fields {unknown!r:.200}")
        if len(answer.frames) != len(self._frames):
            raise ProtocolError(f"there are frames of {len(answer.frames)} observations")

        def take(one: np.ndarray | None) -> Any:
            return None if one is None else arrays.take(name, one.dtype, leading + one.shape[1:])

        shapes = {axes: tuple([sizes[axis] for axis in axes]) for axes in _ALL_AXES}
        fields = {}
        for name, example in self._examples.items():
            leading = shapes[AXES[name]]
            if isinstance(example, np.ndarray):  # most fields are single arrays
                fields[name] = arrays.take(name, example.dtype, leading + example.shape[1:])
            else:
                fields[name] = map_tree(take, example)
        infos = {}
        for key, (number, dtype, shape) in answer.infos.items():
            steps = arrays.take(f"steps of info {key!r}", _INT64, (number,))
            values = arrays.take(f"info {key!r}", np.dtype(dtype), (number, *shape))
            if not number or steps.min() < 0 or steps.max() >= sizes["steps"] * sizes["envs"]:
                raise ProtocolError(f"info {key!r} has steps that do not exist")
            infos[key] = steps, values
        frames = [
            arrays.take("frames", one.dtype, (number, *one.shape[1:]))
            for number, one in zip(answer.frames, self._frames, strict=True)
        ]
        return RolloutPart(version=answer.version, infos=infos, frames=frames, **fields)


def check_part(part: RolloutPart, action_space: Space, given: Tree = None) -> None:
    """Raise an error if a part has values that no learner can use.

    Observations may have any values. ``given`` are the actions that the environments received; None
    if these cannot be wrong.

    Raises:
        EnvRaised: the values come from an environment. The cause says which values they are.
        ValueError: the values come from the policy.
    """
    num_envs = part.rewards.shape[1]
    steps = {"rewards": np.arange(part.rewards.size), "episodic_returns": part.episodes}
    for name, numbers in steps.items():
        values = getattr(part, name).ravel()
        # learners convert them to float32; this comparison is also False for NaN
        is_wrong = ~(np.abs(values) <= FLOAT32_MAX)
        if is_wrong.any():
            fault = ValueError(f"{name} are not all finite numbers of float32")
            raise EnvRaised(int(numbers[is_wrong][0] % num_envs)) from fault
    for name in OF_POLICY:
        for leaf in leaves(getattr(part, name)):
            if leaf is None or leaf.dtype.kind != "f" or _is_tame(leaf):
                continue
            if name == "actions" and not np.isfinite(leaf).all():
                raise ValueError("actions are not all finite")
            if np.isnan(leaf).any():
                raise ValueError(f"{name} hold NaN: has the policy diverged?")
            if name == "logprobs" and np.isneginf(leaf).any():
                cause = "has the policy diverged?"
                raise ValueError(f"logprobs are of actions that cannot have been drawn: {cause}")
    if given is not None and not are_actions(action_space, given, len(STEPS)):
        raise ValueError(f"actions are not of {action_space}")


def _is_tame(numbers: np.ndarray) -> bool:
    """Return whether the sum of squares, a quick test, shows that all are finite and none huge."""
    return bool(np.vdot(numbers, numbers) < FLOAT32_MAX)
