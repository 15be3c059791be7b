"""A policy as it travels for an evaluation: whole, with its weights.

This module imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import Space

from ..arrays.trees import map_tree
from ..errors import one_line
from .base import Policy
from .probe import probe
from .structure import check_policy, pickled
from .tensors import flat_weights, numbers_of


def packed(
    policy: Policy, space: Space, action_space: Space, seen: Any, deterministic: bool
) -> tuple[list[float], list[Any]]:
    """Return the numbers of a policy that is to be evaluated, and as buffers its structure and its
    weights.

    The arguments are those of `probe`, and `Evaluate.deterministic`.

    Raises:
        TypeError: it is no `Policy`.
        ValueError: it cannot act in these environments.
    """
    check_policy(policy)
    params = probe(policy, space, action_space, seen).example["params"]
    if deterministic:
        try:
            policy.distribution(map_tree(torch.from_numpy, params)).mode  # noqa: B018
        except Exception as error:
            text = f"the policy's distribution has no mode: {one_line(error)}"
            raise ValueError(f"{text}; evaluate it with its noise") from error
    weights = [part.cpu().numpy().data for part in flat_weights(policy)]
    return numbers_of(policy), [pickled(policy), *weights]
