"""A policy's structure: everything in it except its weights and its `Policy.numbers`.

The structure travels once, in a pickle (`pickled`). At each publish, the store checks whether
anything except weights and numbers has changed since the last publish. For this, `parts_of`
describes each part of the policy by a value that stays equal as long as the part stays the same,
and `changed_parts` names the parts that differ. A changed attribute is therefore noticed, whether
it is on the policy or on one of its modules. There are two exceptions. Attributes that change by
themselves whenever the policy acts, for example counters, do not count: `probe` finds their names
by comparing the parts before and after the policy acts. And changes inside an object are noticed
only for the classes that `_described` knows.

This module imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import types
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from ..errors import one_line
from .base import Policy
from .tensors import bytes_of, empty_copy, numbers_of

TORCHS_OWN = vars(nn.Module()).keys()  # the attributes that every module has


def check_policy(policy: Any) -> None:
    """Raise TypeError if this is not a `Policy`, and ValueError if it is one that cannot travel."""
    if not isinstance(policy, Policy):
        found = policy.__name__ if isinstance(policy, type) else type(policy).__name__
        wanted = "expected a Policy, such as CategoricalPolicy(actor)"
        raise TypeError(f"{wanted}, got {found}; see docs/policies.md")
    if not list(policy.parameters()):
        raise ValueError("the policy has no parameters, so there is nothing to learn or to pull")
    if any(map(nn.parameter.is_lazy, [*policy.parameters(), *policy.buffers()])):
        text = "the policy has lazy modules that have not seen an input"
        raise ValueError(f"{text}: call it once, then publish it")
    numbers_of(policy)


def parts_of(policy: Policy) -> dict[str, Any]:
    """Return a description of each part of the policy, by the part's name.

    Raises:
        ValueError: an attribute contains itself, or is nested too deeply.
    """
    try:
        return _parts_of(policy)
    except RecursionError:
        raise ValueError("an attribute of the policy contains itself, or is too deep") from None


def _parts_of(policy: Policy) -> dict[str, Any]:
    named = [*policy.named_parameters(), *policy.named_buffers()]
    parts: dict[str, Any] = {
        "numbers": tuple(policy.numbers),
        "tensors": tuple((name, tensor.shape, tensor.dtype) for name, tensor in named),
    }
    weights = {id(tensor) for _, tensor in named}
    for path, module in policy.named_modules():
        parts[f"module {path}"] = type(module)
        for name, value in vars(module).items():
            if name in TORCHS_OWN:
                # Among these attributes, only hooks can change what the module computes. Their keys
                # do not count, because they are numbers that grow each time a hook is registered.
                if name.endswith("_hooks") and value:
                    parts[f"{path}.{name}"] = _described(list(value.values()), weights)
            elif module is not policy or name not in policy.numbers:
                parts[f"{path}.{name}"] = _described(value, weights)
    return parts


def changed_parts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of the parts that differ."""
    names = before.keys() | after.keys()
    return {name for name in names if before.get(name) != after.get(name)}


def pickled(policy: Policy) -> bytes:
    """Return the pickle of a policy in which shapes replace weights, and zeros replace numbers.

    Raises:
        ValueError: the policy cannot travel, or has parameters that no pull would update.
    """
    file = io.BytesIO()
    try:
        structure = empty_copy(policy, "meta")
        for name in policy.numbers:
            setattr(structure, name, 0.0)
        _Pickler(file).dump(structure)
    except Exception as error:
        raise ValueError(f"the policy cannot be sent to workers: {one_line(error)}") from error
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """A pickler that refuses parameters outside the weights, which `empty_copy` leaves as is."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.requires_grad:
            shape = tuple(value.shape)
            raise ValueError(
                f"it has a parameter {shape} that no module registers, as in a list or a function: "
                "workers would keep it as it is. Use nn.ModuleList, or make it an attribute"
            )
        return super().reducer_override(value)


def _described(value: Any, weights: set[int]) -> Any:
    """Return a value that is equal for two attributes with the same content.

    Content counts for numbers, texts, arrays, and containers of them. Any other object is equal
    only to itself. ``weights`` holds the ids of the tensors that travel with each pull, whose
    content does not count.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return repr(value)  # a text, because NaN does not equal NaN
    if isinstance(value, torch.Tensor) and id(value) in weights:
        return torch.Tensor
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return value.dtype, value.shape, bytes_of(value.detach()).cpu().numpy().tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), *(_described(item, weights) for item in value)
    return _Itself(value)


class _Itself:
    """A stand-in that equals only stand-ins for the same object.

    It keeps the object alive, so that no other object can get its `id`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Itself) and other.value is self.value
