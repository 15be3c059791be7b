"""A policy's tensors: what a worker needs of them to act, and what travels with each pull.

Float32 parameters may be rounded, see `differences`. All other tensors travel as they are: a buffer
may be a normalizer's, or an index.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from ..arrays.trees import map_tree
from .base import Policy


def to_tensors(observations: Any, policy: Policy, device: torch.device | str = "cpu") -> Any:
    """Return copies of a tree of arrays as tensors, with the dtypes that the policy wants."""

    def convert(array: np.ndarray) -> torch.Tensor:
        is_float = policy.float_observations or array.dtype.kind == "f"
        return torch.tensor(array, dtype=torch.float32 if is_float else None, device=device)

    return map_tree(convert, observations)


def numbers_of(policy: Policy) -> list[float]:
    """Return the values of `Policy.numbers`.

    Raises:
        ValueError: an attribute that it names is no number.
    """
    for name in policy.numbers:
        value = getattr(policy, name, None)
        if not isinstance(value, Real):
            text = f"{name!r} is among the policy's numbers {policy.numbers!r}, but is no number"
            raise ValueError(f"{text}: {value!r}")
    return [float(getattr(policy, name)) for name in policy.numbers]


def set_numbers(policy: Policy, numbers: Sequence[float]) -> None:
    """Undo `numbers_of` in place."""
    for name, number in zip(policy.numbers, numbers, strict=True):
        setattr(policy, name, number)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, ``(bytes,)`` uint8, in the order of its elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def rounded_sizes(policy: Policy) -> list[int]:
    """Return how many elements each of the tensors has that may be rounded."""
    return [tensor.numel() for tensor in _tensors(policy) if is_rounded(tensor)]


@torch.no_grad()
def flat_weights(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of the weights that may be rounded, ``(weights,)`` float32, and of the bytes of
    all other tensors, on the policy's device.
    """
    tensors = _tensors(policy)
    flat = torch.cat([bytes_of(tensor) for tensor in tensors])
    size = sum(tensor.nbytes for tensor in tensors if is_rounded(tensor))
    return flat[:size].view(torch.float32), flat[size:]


@torch.no_grad()
def load_weights(policy: Policy, weights: Any, others: Any) -> None:
    """Undo `flat_weights` in place, from readable buffers.

    Raises:
        RuntimeError: the buffers have another size than the policy's tensors.
    """
    flat = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in (weights, others)])
    tensors = _tensors(policy)
    parts = torch.from_numpy(flat).split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # A clone, because a view as another dtype needs an aligned start.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def empty_copy(policy: Policy, device: str) -> Policy:
    """Return a copy whose parameters and buffers have shapes but no data, on this device."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        # Not empty_like, which imports sympy for a tensor on torch's meta device: 0.4 s.
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(new, requires_grad=False) if is_parameter else new

    # Through deepcopy's memo, so that no weight is copied and tied weights stay tied.
    memo = {id(tensor): empty(tensor) for tensor in _tensors(policy)}
    # A module may keep a tensor of its last forward, whose graph deepcopy refuses.
    for module in policy.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach()
    return copy.deepcopy(policy, memo)


def _tensors(policy: Policy) -> list[torch.Tensor]:
    """Return all parameters and buffers, those first that may be rounded."""
    tensors = [*policy.parameters(), *policy.buffers()]
    return sorted(tensors, key=lambda tensor: not is_rounded(tensor))


def is_rounded(tensor: torch.Tensor) -> bool:
    """Whether a policy's tensor is one that may be rounded."""
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32
