"""What a policy consists of besides its weights: what travels once, and what makes it another
policy.

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

TORCHS_OWN = vars(nn.Module()).keys()  # the attributes of every module


def layout_of(policy: Policy) -> dict[str, Any]:
    """Return by name the shapes and dtypes of what travels with each pull, and what else the
    modules consist of.

    When these change the policy has another structure. What is among ``numbers`` may change without
    that.
    """
    named = [*policy.named_parameters(), *policy.named_buffers()]
    found: dict[str, Any] = {
        "numbers": tuple(policy.numbers),
        "order": tuple(name for name, _ in named),
    }
    found |= {f"tensor {name}": (tensor.shape, tensor.dtype) for name, tensor in named}
    travelling = {id(tensor) for _, tensor in named}
    for path, module in policy.named_modules():
        found[f"module {path}"] = type(module)
        for name, value in vars(module).items():
            if name in TORCHS_OWN:  # of these hooks alone may do something to what is computed
                if name.endswith("_hooks") and value:
                    found[f"{path}.{name}"] = tuple(map(id, value.values()))
            elif module is not policy or name not in policy.numbers:
                found[f"{path}.{name}"] = _fixed(value, travelling)
    return found


def pickled(policy: Policy) -> bytes:
    """Return a policy as it travels: by cloudpickle, with shapes for weights, and zeros for
    ``numbers``.

    Raises:
        ValueError: it cannot travel, or has parameters that would not travel again.
    """
    file = io.BytesIO()
    try:
        structure = policy.with_empty_tensors("meta")
        for name in policy.numbers:
            setattr(structure, name, 0.0)
        _Pickler(file).dump(structure)
    except Exception as error:
        raise ValueError(f"the policy cannot be sent to workers: {one_line(error)}") from error
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if (
            isinstance(value, nn.Parameter) and value.requires_grad
        ):  # one that has been emptied does not
            text = f"it has a parameter {tuple(value.shape)} that no module registers, as in a list or a function"
            raise ValueError(
                f"{text}: workers would keep it as it is. Use nn.ModuleList, or make it an attribute"
            )
        return super().reducer_override(value)


def _fixed(value: Any, travelling: set[int]) -> Any:
    """Return what is equal for two attributes that are: of numbers, texts, arrays and containers
    what is in them.

    ``travelling`` are the ids of tensors that come with each pull, whatever is in them.
    """
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float | np.generic):
        return repr(value)  # NaN is like NaN
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor) and id(value) in travelling:
        return torch.Tensor
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type != "meta"
    ):
        return (
            value.dtype,
            value.shape,
            value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, list | tuple | set | frozenset):
        items = [_fixed(item, travelling) for item in value]
        return type(value), frozenset(items) if isinstance(value, set | frozenset) else tuple(items)
    if isinstance(value, dict):
        return tuple(
            (_fixed(key, travelling), _fixed(item, travelling)) for key, item in value.items()
        )
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return _fixed(vars(value), travelling)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fixed(
            {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)},
            travelling,
        )
    return id(value)
