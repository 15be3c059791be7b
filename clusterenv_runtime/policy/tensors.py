"""A policy's tensors and numbers: what a worker needs to act, and what travels with each pull.

Float32 parameters may be rounded, see `differences`. All other tensors travel unrounded, because a
buffer may belong to a normalizer or hold an index.
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
    """Return a copy of a tree of arrays as tensors, with the dtypes that the policy wants."""

    def convert(array: np.ndarray) -> torch.Tensor:
        is_float = policy.float_observations or array.dtype.kind == "f"
        return torch.tensor(array, dtype=torch.float32 if is_float else None, device=device)

    return map_tree(convert, observations)


def numbers_of(policy: Policy) -> list[float]:
    """Return the values of `Policy.numbers`.

    Raises:
        ValueError: an attribute that `Policy.numbers` names is not a number.
    """
    for name in policy.numbers:
        value = getattr(policy, name, None)
        if not isinstance(value, Real):
            text = f"{name!r} is among the policy's numbers {policy.numbers!r}, but is not a number"
            raise ValueError(f"{text}: {value!r}")
    return [float(getattr(policy, name)) for name in policy.numbers]


def set_numbers(policy: Policy, numbers: Sequence[float]) -> None:
    """Set the attributes in `Policy.numbers` to the values that `numbers_of` returned."""
    for name, number in zip(policy.numbers, numbers, strict=True):
        setattr(policy, name, number)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, ``(bytes,)`` uint8, in the order of its elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def rounded_sizes(policy: Policy) -> list[int]:
    """Return the number of elements of each tensor that may be rounded."""
    return [tensor.numel() for tensor in _tensors(policy) if is_rounded(tensor)]


@torch.no_grad()
def flat_weights(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of a policy's tensors as two flat tensors, on the policy's device.

    The first holds the weights that may be rounded, ``(weights,)`` float32. The second holds the
    bytes of all other tensors.
    """
    tensors = _tensors(policy)
    flat = torch.cat([bytes_of(tensor) for tensor in tensors])
    size = sum(tensor.nbytes for tensor in tensors if is_rounded(tensor))
    return flat[:size].view(torch.float32), flat[size:]


@torch.no_grad()
def load_weights(policy: Policy, weights: Any, others: Any) -> None:
    """Load what `flat_weights` returned into a policy, from readable buffers.

    Raises:
        RuntimeError: the buffers do not have the size of the policy's tensors.
    """
    flat = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in (weights, others)])
    tensors = _tensors(policy)
    parts = torch.from_numpy(flat).split([tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # A clone, because a view as another dtype needs an aligned start.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def empty_copy(policy: Policy, device: str) -> Policy:
    """Return a copy on ``device`` whose parameters and buffers have shapes but no data."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        # Not empty_like, which takes 0.4 s to import sympy for a tensor on torch's meta device.
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(new, requires_grad=False) if is_parameter else new

    # Through deepcopy's memo, so that no weight is copied and tied weights stay tied.
    memo = {id(tensor): empty(tensor) for tensor in _tensors(policy)}
    # A module may keep a tensor of its last forward pass, whose graph deepcopy refuses.
    for module in policy.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach()
    return copy.deepcopy(policy, memo)


def _tensors(policy: Policy) -> list[torch.Tensor]:
    """Return all parameters and buffers, beginning with the tensors that may be rounded."""
    tensors = [*policy.parameters(), *policy.buffers()]
    return sorted(tensors, key=lambda tensor: not is_rounded(tensor))


def is_rounded(tensor: torch.Tensor) -> bool:
    """Return whether a policy's tensor may be rounded."""
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32
