"""Adaptive Policy Synchronization: when a worker pulls, and on which states the divergence is measured.

The head measures, the worker decides. After each update the head evaluates its new policy on observations each worker
has just acted on, and sends it one number, its divergence, with the next request. If all are asked at once that is the
mean of all, so they pull at once, and a rollout is of one policy. Weights move only when a worker asks for them.
Source: *Adaptive Policy Synchronization for Scalable RL* (arXiv 2507.10990). The head's side is in `versions`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from ..wire.protocol import Collect

KL_STATES = 256  # of each worker at most


class SyncRule(msgspec.Struct, frozen=True):
    """When a worker pulls; `options.ClusterOptions` says what the parts mean, and checks them."""

    mode: str = "kl"
    kl_threshold: float = 0.01
    interval: int | None = None
    max_lag: int | None = None

    def wants_pull(self, held: int, request: Collect) -> bool:
        """Whether a worker holding version ``held`` (0: none) pulls before it acts on ``request``."""
        lag = request.version - held
        if held == 0 or (self.max_lag is not None and lag > self.max_lag):
            return True
        if self.mode == "kl":  # NaN pulls too
            return lag > 0 and held == request.behavior and not request.divergence <= self.kl_threshold
        return self.mode == "always" and lag > 0 or self.mode == "interval" and lag >= self.interval


@functools.cache
def sampled_states(num_states: int, most: int = KL_STATES) -> np.ndarray:
    """Indices of the evenly spread states the divergence is measured on, the same at worker and head."""
    return np.linspace(0, num_states - 1, min(num_states, most)).astype(np.int64)


@functools.cache
def sampled_rows(num_steps: int, num_envs: int, most: int = KL_STATES) -> np.ndarray:
    """Indices of the environments that it is measured on, from their first step to their last: one at least."""
    return sampled_states(num_envs, max(most // num_steps, 1))


@functools.cache
def measured_states(num_steps: int, num_envs: int, in_sequence: bool) -> np.ndarray:
    """Indices, step * num_envs + environment, of the states whose distribution parameters a worker sends.

    If they are ``in_sequence``, as a policy with a state needs them, they are those of `sampled_rows`.
    """
    if not in_sequence:
        return sampled_states(num_steps * num_envs)
    return (np.arange(num_steps)[:, None] * num_envs + sampled_rows(num_steps, num_envs)).reshape(-1)
