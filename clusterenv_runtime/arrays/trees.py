"""Values that are one leaf, or dicts and tuples of such values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Return a tree of what ``function`` makes of the leaves that these trees have in the same
    place.

    Raises:
        ValueError: they are not of the same structure.
    """
    first = trees[0]
    if isinstance(first, dict):
        if any(not isinstance(tree, dict) or tree.keys() != first.keys() for tree in trees):
            raise ValueError("one tree has not the keys of another")
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


def filled(tree: Any, values: list[Any]) -> Any:
    """Return a tree like another, with these values for its leaves, in order."""
    rest = iter(values)
    return map_tree(lambda _: next(rest), tree)
