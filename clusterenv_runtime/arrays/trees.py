"""Trees: values that are one leaf, or dicts and tuples of trees.

A batch of a Gymnasium space is a tree of arrays, or of tuples of elements that cannot be batched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import concatenate, create_empty_array

FLOAT32_MAX = np.finfo(np.float32).max


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply ``function`` to the leaves that these trees have in the same place. Return the results.

    Raises:
        ValueError: the trees differ in structure.
    """
    first = trees[0]
    if isinstance(first, dict):
        if any(not isinstance(tree, dict) or tree.keys() != first.keys() for tree in trees):
            raise ValueError("one tree does not have the keys of another")
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        if not all(isinstance(tree, tuple) for tree in trees):
            raise ValueError("one tree has no tuple where another has one")
        return tuple(map_tree(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    if not isinstance(tree, dict | tuple):
        return [tree]
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def not_finite(tree: Any, axes: int) -> np.ndarray:
    """Return a mask of the places that hold a number that is not a finite float32.

    ``tree`` is a tree of arrays. The mask has the first ``axes`` axes of these arrays.
    """
    first, *_ = leaves(tree)
    found = np.zeros(first.shape[:axes], bool)
    for leaf in leaves(tree):
        if leaf.dtype.kind == "f":
            found |= ~(np.abs(leaf) <= FLOAT32_MAX).all(tuple(range(axes, len(leaf.shape))))
    return found


def filled(tree: Any, values: list[Any]) -> Any:
    """Return a tree like ``tree``, with these values as its leaves, in order."""
    rest = iter(values)
    return map_tree(lambda _: next(rest), tree)


def map_space(function: Callable[..., Any], space: Space, *trees: Any) -> Any:
    """Apply ``function`` to the leaves of batches of ``space``. Return a tree of the results.

    The leaves are arrays, or tuples of elements that cannot be batched.
    """
    if isinstance(space, spaces.Dict):
        return {
            key: map_space(function, sub, *(tree[key] for tree in trees))
            for key, sub in space.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, *trees, strict=True)
        return tuple(map_space(function, sub, *own) for sub, *own in parts)
    return function(*trees)


def merge_rows(space: Space, mask: np.ndarray, there: Any, elsewhere: Any) -> Any:
    """Return a batch of ``space`` with the rows of ``there`` where ``mask`` is True.

    The other rows are those of ``elsewhere``.
    """

    def merge(left: Any, right: Any) -> Any:
        if isinstance(left, np.ndarray):
            return np.where(mask.reshape(-1, *[1] * (left.ndim - 1)), left, right)
        return tuple(pair[not chosen] for chosen, *pair in zip(mask, left, right, strict=True))

    return map_space(merge, space, there, elsewhere)


def is_batched(space: Space) -> bool:
    """Return whether batches of ``space`` consist of arrays only."""
    found: list[Any] = []
    map_space(found.append, space, create_empty_array(space, 1))
    return all(isinstance(leaf, np.ndarray) for leaf in found)


def one_of(space: Space) -> Any:
    """Return a batch of one element of ``space``, always the same one.

    The element is a sample, or zeros if none can be drawn.
    """
    batch = create_empty_array(space, 1)
    # NumPy cannot draw numbers between bounds as far apart as float64's.
    with contextlib.suppress(Exception):
        own = copy.deepcopy(space)  # a copy, so that the space's own generator stays as it is
        own.seed(0)
        batch = concatenate(space, [own.sample()], batch)
    return batch


def are_actions(space: Space, actions: Any, axes: int) -> bool:
    """Return whether a batch of actions with ``axes`` leading axes is of a space.

    Actions of a Box may lie beyond its bounds.
    """
    if isinstance(space, spaces.Dict):
        return isinstance(actions, dict) and all(
            are_actions(sub, actions.get(key), axes) for key, sub in space.items()
        )
    if isinstance(space, spaces.Tuple):
        is_like = isinstance(actions, tuple) and len(actions) == len(space)
        return is_like and all(
            are_actions(*pair, axes) for pair in zip(space, actions, strict=True)
        )
    if not isinstance(actions, np.ndarray) or actions.shape[axes:] != space.shape:
        return False
    kind = actions.dtype.kind
    if isinstance(space, spaces.Box):
        return kind in "fiu"
    if isinstance(space, spaces.MultiBinary):
        return bool(((actions == 0) | (actions == 1)).all())
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        number = space.n if isinstance(space, spaces.Discrete) else space.nvec
        is_within = (actions >= space.start) & (actions < space.start + number)
        return kind in "iu" and bool(is_within.all())
    return False


def check_actions(space: Space, actions: Any) -> None:
    """Raise ValueError if a batch of actions is not of a space; see `are_actions`."""
    if not are_actions(space, actions, 1):
        given = map_tree(lambda leaf: f"{leaf.dtype} {leaf.shape[1:]}, such as {leaf[0]}", actions)
        raise ValueError(f"the policy's actions are not of {space}, but {given}")
