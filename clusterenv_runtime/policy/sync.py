"""Adaptive Policy Synchronization: when a worker pulls, and by which states the divergence is
measured.

The head measures, the worker decides. After each update the head evaluates its new policy on
observations each worker has just acted on, and sends it one number, its divergence, with the next
request. If all are asked at once, the number is the mean over all, so all pull at once, and one
policy acts in the whole rollout. Weights move only when a worker asks for them. Source: *Adaptive
Policy Synchronization for Scalable RL* (arXiv 2507.10990). The head's side is in `versions`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from ..wire.protocol import Collect

KL_STATES = 1024  # of all rows together, or one of each if these are more
# Numbers in the observations of these states: 148 stacks of four 84 x 84 frames, as convolutions
# are slow.
KL_ELEMENTS = 2**22
GOLDEN_RATIO = (5**0.5 - 1) / 2  # whose multiples spread evenly


class SyncRule(msgspec.Struct, frozen=True):
    """When a worker pulls; `options.ClusterOptions` says what the parts mean, and checks them."""

    mode: str = "kl"
    kl_threshold: float = 0.01
    interval: int | None = None
    max_lag: int | None = None

    def wants_pull(self, held: int, request: Collect) -> bool:
        """Whether a worker with version ``held`` (0: none) pulls before it acts on ``request``."""
        lag = request.version - held
        if held == 0 or (self.max_lag is not None and lag > self.max_lag):
            return True
        if self.mode == "kl":  # NaN pulls too
            return (
                lag > 0 and held == request.behavior and not request.divergence <= self.kl_threshold
            )
        return self.mode == "always" and lag > 0 or self.mode == "interval" and lag >= self.interval


def states_of_each_row(num_steps: int, num_rows: int, elements: int) -> int:
    """Return on how many states of each row the divergence is measured; ``elements`` are the
    numbers in one.
    """
    return min(max(min(KL_STATES, KL_ELEMENTS // max(elements, 1)) // num_rows, 1), num_steps)


@functools.cache
def measured_states(num_steps: int, rows: range, number: int, in_sequence: bool) -> np.ndarray:
    """Return the indices, step * len(rows) + environment, of the states whose distribution
    parameters a worker sends.

    They follow from the rows' numbers, whichever worker has them. ``number`` states of each row are
    spread evenly over the rollout. If they are ``in_sequence``, as a policy with a state needs
    them, they are each row's first ones.
    """
    steps, places = np.arange(number)[:, None], np.arange(len(rows))
    if not in_sequence:
        steps = ((steps + np.array(rows) * GOLDEN_RATIO % 1) * num_steps / number).astype(np.int64)
    return (steps * len(rows) + places).reshape(-1)
