"""The network of a schedule's policies, which is small and has several structures."""

import torch
from torch import nn


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
