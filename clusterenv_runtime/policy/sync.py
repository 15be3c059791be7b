"""Adaptive Policy Synchronization: when a worker pulls, and on which states the head measures.

The head measures, and the worker decides. After each update, the head evaluates its new policy on
the observations that each worker has just acted on. With the next request, it sends the worker one
number, the worker's divergence. If all workers are asked at once, the number is the mean over all
of them, so all workers pull together, and one policy acts in the whole rollout. Weights travel only
when a worker asks for them. Source: *Adaptive Policy Synchronization for Scalable RL* (arXiv
2507.10990). The head's side is in `versions`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from ..messages import Collect

KL_STATES = 1024  # measured states of all rows together; one per row if there are more rows
# The limit on the numbers in the observations of these states, because convolutions are slow: 148
# stacks of four 84 x 84 frames.
KL_ELEMENTS = 2**22
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples, modulo 1, spread evenly


class SyncRule(msgspec.Struct, frozen=True):
    """The rule by which a worker pulls. `options.ClusterOptions` explains and checks its fields."""

    mode: str = "kl"
    kl_threshold: float = 0.01
    interval: int | None = None
    max_lag: int | None = None

    def wants_pull(self, held: int, request: Collect) -> bool:
        """Return whether a worker that holds version ``held`` (0: none) pulls for ``request``."""
        lag = request.version - held
        if held == 0 or (self.max_lag is not None and lag > self.max_lag):
            return True
        if self.mode == "kl":  # a NaN divergence pulls, too
            return (
                lag > 0 and held == request.behavior and not request.divergence <= self.kl_threshold
            )
        return self.mode == "always" and lag > 0 or self.mode == "interval" and lag >= self.interval


def states_of_each_row(num_steps: int, num_rows: int, elements: int) -> int:
    """Return on how many states of each row the divergence is measured.

    ``elements`` is how many numbers one observation holds.
    """
    return min(max(min(KL_STATES, KL_ELEMENTS // max(elements, 1)) // num_rows, 1), num_steps)


@functools.cache
def measured_states(num_steps: int, rows: range, number: int, in_sequence: bool) -> np.ndarray:
    """Return the indices of the states whose distribution parameters a worker sends.

    An index is step * len(rows) + environment. The steps depend on the numbers of the rows, and not
    on which worker has the rows. ``number`` states of each row are spread evenly over the rollout.
    If they are ``in_sequence``, as a policy with a state needs them, they are the row's first ones.
    """
    steps, places = np.arange(number)[:, None], np.arange(len(rows))
    if not in_sequence:
        steps = ((steps + np.array(rows) * GOLDEN_RATIO % 1) * num_steps / number).astype(np.int64)
    return (steps * len(rows) + places).reshape(-1)
