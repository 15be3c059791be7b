"""Trees of arrays, and stacks of frames that keep each frame once.

A tree is one leaf, or a dict or tuple of trees. A batch of a Gymnasium space is a tree of arrays,
or of tuples of elements that cannot be batched.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import create_empty_array

FLOAT32_MAX = np.finfo(np.float32).max
LARGE = 2**16  # bytes; a received array of at least this size stays where it is


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


def map_space(function: Callable[..., Any], space: Space[Any], *trees: Any) -> Any:
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


def is_batched(space: Space[Any]) -> bool:
    """Return whether batches of ``space`` consist of arrays only."""
    found: list[Any] = []
    map_space(found.append, space, create_empty_array(space, 1))
    return all(isinstance(leaf, np.ndarray) for leaf in found)


class Frames:
    """An array of stacks ``(..., stack, *frame)`` that gathers stacks when it is indexed.

    A stack is, for example, the last four frames of a game. ``frames[i]`` is an array or, after
    `to`, a tensor of the stacks there, and ``np.asarray(frames)`` is an array of all stacks.
    Because neighboring stacks share frames, this takes a fraction of that array's memory.

    Args:
        frames: ``(num_frames, *frame)``, each frame once.
        index: ``(..., stack)`` integers, the indices of each stack's frames.
    """

    def __init__(self, frames: Any, index: Any) -> None:
        self.frames, self.index = frames, index

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self.frames.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.frames.dtype

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: Any) -> Any:
        """Return the stacks at one or several places of the leading axes.

        Raises:
            IndexError: ``key`` has an Ellipsis before its end, and so counts from the last axis.
        """
        if isinstance(key, tuple) and any(each is ... for each in key[:-1]):
            raise IndexError(
                "stacks are indexed from their first axis on; "
                "np.asarray(frames) can be indexed from any axis"
            )
        index = self.index[key]
        if isinstance(self.frames, np.ndarray):
            return self.frames[index]
        # For rows, this is several times as fast as an index in brackets.
        return self.frames.index_select(0, index.reshape(-1)).view(
            *index.shape, *self.frames.shape[1:]
        )

    def only(self, key: Any) -> "Frames":
        """Return the stacks at several places, with copies of only their frames.

        The frames must be in arrays, not tensors.
        """
        index, is_used = self.index[key], np.zeros(len(self.frames), bool)
        is_used[index] = True
        return Frames(self.frames[is_used], np.cumsum(is_used)[index] - 1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def reshape(self, *shape: Any) -> "Frames":
        """Return the same stacks with other leading axes; ``shape`` is as in NumPy.

        Raises:
            ValueError: the last axes of ``shape`` are not those of a stack.
        """
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        stack = self.shape[self.index.ndim - 1 :]
        if shape[len(shape) - len(stack) :] != stack:
            raise ValueError(f"stacks are {stack}: they cannot be reshaped to {shape}")
        return Frames(self.frames, self.index.reshape(shape[: len(shape) - len(stack) + 1]))

    def to(self, device: Any) -> "Frames":
        """Return the same stacks with tensors on a torch device, where stacks are then gathered.

        Tensors are copied to a GPU from pinned memory, while the program goes on.
        """
        import torch

        def moved(array: Any) -> torch.Tensor:
            tensor = torch.as_tensor(array)
            pinned = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
            return (
                tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)
            )

        return Frames(moved(self.frames), moved(self.index))


def fold(
    stacks: np.ndarray, finals: np.ndarray, ended: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take stacks apart. Return the frames, the indices of the stacks, and those of the final ones.

    The stacks may hold any values. A stack that continues the one before adds its last frame, a
    stack that repeats one frame adds that frame, and any other stack adds all of its frames.

    Args:
        stacks: ``(num_steps + 1, num_envs, stack, *frame)``, one step after another.
        finals: ``(ends, stack, *frame)``, the stacks after the steps that ended an episode, in the
            order of the nonzero() of ``ended``.
        ended: ``(num_steps, num_envs)`` bool, which steps ended an episode.
    """
    index = np.empty(stacks.shape[:3], np.int32)
    final_index = np.empty(finals.shape[:2], np.int32)
    frames: list[np.ndarray] = []
    number = 0

    def add(stack: np.ndarray, before: bytes, index_before: np.ndarray, places: np.ndarray) -> None:
        """Write the indices of a stack's frames to ``places``.

        ``before`` holds the bytes of the frames that the stack shares with the one before, if it
        continues that one.
        """
        nonlocal number
        if stack[:-1].tobytes() == before:  # several times as fast as comparing arrays
            places[:-1], new = index_before[1:], stack[-1:]
        elif stack.tobytes() == stack[-1].tobytes() * len(stack):
            places[:-1], new = number, stack[-1:]
        else:
            places[:-1], new = np.arange(number, number + len(stack) - 1), stack
        number += len(new)
        places[-1] = number - 1
        frames.append(new)

    end, before = 0, [b""] * stacks.shape[1]
    for step, now in enumerate(stacks):
        for env, stack in enumerate(now):
            add(stack, before[env], index[step - 1, env], index[step, env])
            before[env] = stack[1:].tobytes()
        for env in np.flatnonzero(ended[step]).tolist() if step < len(ended) else ():
            add(finals[end], before[env], index[step, env], final_index[end])
            end += 1
    return np.concatenate(frames), index, final_index


def join(arrays: Sequence[Any], axis: int = 0, copy: bool = False) -> Any:
    """Join arrays along an axis, or both arrays of `Frames`. The result is writable.

    A single array is copied, unless it is large and ``copy`` is False. A large array stays a view,
    for example of a received message, whose memory nobody else uses. A small view would keep the
    whole message in memory. An array that is not writable or not aligned is always copied: a
    message's frame may begin at an address that does not suit every dtype.
    """
    first = arrays[0]
    if isinstance(first, Frames):
        frames = [each.frames for each in arrays]
        firsts = itertools.accumulate(map(len, frames[:-1]), initial=0)
        index = [each.index + first for each, first in zip(arrays, firsts, strict=True)]
        return Frames(join(frames, copy=copy), np.concatenate(index, axis))
    if len(arrays) > 1:
        return np.concatenate(arrays, axis)
    if copy or first.nbytes < LARGE or not (first.flags.aligned and first.flags.writeable):
        return first.copy()
    return first
