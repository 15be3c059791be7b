"""What Gymnasium's spaces mean for batches: which become arrays, and how ``SyncVectorEnv``'s
arguments are read.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    iterate,
)

from ..errors import ProtocolError
from .frames import Frames
from .trees import leaves, map_tree


def observation_spaces(
    mode: str | tuple[Space, Space],
    single: Space,
    num_envs: int,
    env_fns: Sequence[Callable[[], gym.Env]],
) -> tuple[Space, Space]:
    """Return the single and the batched space that SyncVectorEnv's ``observation_mode`` asks for.

    ``single`` is the space of the first of ``env_fns``; the others are made only to read their
    differing spaces.

    Raises:
        ValueError, TypeError: ``mode`` is not "same", "different" or a tuple of two spaces.
    """
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
        return mode[1], mode[0]
    if mode == "same":
        return single, batch_space(single, num_envs)
    if mode == "different":
        all_spaces = [single]
        for env_fn in env_fns[1:]:
            env = env_fn()
            all_spaces.append(env.observation_space)
            env.close()
        return single, batch_differing_spaces(all_spaces)
    raise ValueError(
        "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
        f"space, actual got {mode}"
    )


def check_reset_mask(mask: Any, num_envs: int) -> None:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(
            f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}"
        )
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )


def is_batched(space: Space) -> bool:
    """Return whether batches of ``space`` are (nested) arrays."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(
            map(
                is_batched,
                space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces,
            )
        )
    return isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    )


def are_stacks(space: Space, size: int | None) -> Any:
    """Return of each leaf of ``space`` whether it is a stack of ``size`` frames: a Box of so many
    arrays.
    """
    if isinstance(space, spaces.Dict):
        return {key: are_stacks(sub, size) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(are_stacks(sub, size) for sub in space.spaces)
    return isinstance(space, spaces.Box) and len(space.shape) > 1 and space.shape[0] == size


def one_of(space: Space) -> Any:
    """Return a batch of one of ``space``, always the same: of zeros if none can be drawn, and else
    of anything.
    """
    batch = create_empty_array(space, 1)
    if is_batched(space):
        with contextlib.suppress(
            Exception
        ):  # NumPy draws no numbers from bounds as wide as float64's
            own = copy.deepcopy(space)  # whose random numbers are nobody else's
            own.seed(0)
            batch = concatenate(space, [own.sample()], batch)
    return batch


def check_actions(space: Space, actions: Any) -> None:
    """Raise ValueError if some actions are not of a space; those of a Box may lie beyond its
    bounds.
    """

    def fits(space: Space, action: Any) -> bool:
        if isinstance(space, spaces.Dict):
            return all(fits(sub, action[key]) for key, sub in space.items())
        if isinstance(space, spaces.Tuple):
            return all(map(fits, space.spaces, action))
        if isinstance(space, spaces.Box):
            return np.shape(action) == space.shape and np.asarray(action).dtype.kind in "fiu"
        return space.contains(action)

    if isinstance(actions, np.ndarray):
        actions = np.unique(actions, axis=0)  # of a Discrete one of each, not hundreds
    try:
        wrong = not all(
            fits(space, action)
            for action in iterate(batch_space(space, len(leaves(actions)[0])), actions)
        )
    except (LookupError, TypeError, ValueError):
        wrong = True
    if wrong:
        given = map_tree(lambda leaf: f"{leaf.dtype} {leaf.shape[1:]}, such as {leaf[0]}", actions)
        raise ValueError(f"the policy's actions are not of {space}, but {given}")


def map_space(function: Callable[..., Any], space: Space, *trees: Any) -> Any:
    """Apply ``function`` to the leaves of batches of ``space``: arrays, or tuples of what cannot be
    batched.
    """
    if isinstance(space, spaces.Dict):
        return {
            key: map_space(function, sub, *(tree[key] for tree in trees))
            for key, sub in space.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, *trees, strict=True)
        return tuple(map_space(function, sub, *leaves) for sub, *leaves in parts)
    return function(*trees)


def leaves_of(space: Space, *batches: Any) -> list[list[Any]]:
    """Return for each of some batches of ``space`` its leaves, in order.

    Raises:
        ProtocolError: one is not of the structure of ``space``.
    """
    leaves: list[list[Any]] = [[] for _ in batches]
    try:
        for found, batch in zip(leaves, batches, strict=True):
            map_space(found.append, space, batch)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"observations are not of {space}: {error!r}") from None
    return leaves


def take(space: Space, batch: Any, indices: Any) -> Any:
    """Return a copy of these rows of a batch of ``space``, whose leaves are arrays."""
    return map_space(lambda leaf: leaf[indices], space, batch)


def join(trees: Sequence[Any], axis: int = 0, copy: bool = False) -> Any:
    """Return trees of arrays along an axis, as one; see `join_arrays`."""
    if isinstance(trees[0], np.ndarray):  # as most are
        return join_arrays(trees, axis, copy)
    return map_tree(lambda *leaves: join_arrays(leaves, axis, copy), *trees)


def join_arrays(arrays: Sequence[Any], axis: int = 0, copy: bool = False) -> Any:
    """Return arrays along an axis as one, writable. A single one is copied, unless without ``copy``
    it is large.

    Then it remains a view, such as of a received message, whose memory is nobody else's. A small
    view would keep all of that. Where a frame of a message begins, not every dtype may. `Frames`
    are joined in both.
    """
    if isinstance(arrays[0], Frames):
        frames = [each.frames for each in arrays]
        firsts = itertools.accumulate(map(len, frames[:-1]), initial=0)
        index = [each.index + first for each, first in zip(arrays, firsts, strict=True)]
        return Frames(join_arrays(frames, copy=copy), np.concatenate(index, axis))
    if len(arrays) > 1:
        return np.concatenate(arrays, axis)
    (array,) = arrays
    is_view = not copy and array.nbytes >= 2**16 and array.flags.aligned and array.flags.writeable
    return array if is_view else array.copy()


def merge_rows(space: Space, mask: np.ndarray, there: Any, elsewhere: Any) -> Any:
    """Return a batch of ``space`` with the rows of ``there`` where ``mask`` is True, and of
    ``elsewhere`` where not.
    """

    def merge(left: Any, right: Any) -> Any:
        if isinstance(left, np.ndarray):
            return np.where(mask.reshape(-1, *[1] * (left.ndim - 1)), left, right)
        return tuple(pair[not chosen] for chosen, *pair in zip(mask, left, right, strict=True))

    return map_space(merge, space, there, elsewhere)
