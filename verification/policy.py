"""The policy of a schedule, which is small and has several structures."""

from __future__ import annotations

import functools

import torch
from torch import nn

from clusterenv_runtime import CategoricalPolicy
from clusterenv_runtime.policy.probe import Probed, probe

from .ledger import Labelled


class Net(nn.Module):
    """A network with the logits of two actions.

    Its unused weights change its structure.
    """

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.linspace(-1e-3, 1e-3, 2 * (3 + unused)).reshape(3 + unused, 2)
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return logits ``(batch, 2)`` of observations ``(batch, 3)``."""
        return observations @ self.weight[:3]


@functools.cache
def probed(num_weights: int) -> Probed:
    """Return the result of probing a policy of this size.

    The result is always the same. Without the cache, probing would take a fifth of all the time.
    """
    policy = CategoricalPolicy(Net(num_weights // 2 - 3))
    return probe(policy, Labelled.observation_space, Labelled.action_space, None)
