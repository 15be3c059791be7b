"""What the learners of a run compute together: sums, shares of minibatches, gradients."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...arrays.frames import Frames
from ...errors import Interrupted, LearnerLostError, one_line

POLL_S = 0.0005  # between looks whether the others have arrived
GRACE_S = 0.1  # more for what all may have begun, before an interrupt has its way
LONG_GRACE_S = 2.0  # more for what all have begun


class Exchange:
    """One of several learners, and what it computes together with the others; or the only one.

    Attributes:
        rank: which it is; the first, 0, writes logs and checkpoints, and evaluates.
        world_size: how many there are.
        first_row: the number of its first environment among those of all learners.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.first_row = 0
        self.raise_if_interrupted: Callable[[], None] = lambda: None

    # Numbers, where nothing is half done: a signal interrupts the wait.
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of float64 ``values`` over all learners.

        Raises:
            Interrupted: this learner is to end, or another has.
        """
        return values if self.world_size == 1 else np.sum(self.gather(values), axis=0)

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Return all learners' float64 ``values``, which may be of different lengths. Raises as
        `sum`.
        """
        if self.world_size == 1:
            return [values]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._all_gather(sizes, torch.tensor([values.size]), GRACE_S)
        most = int(max(sizes))
        padded = torch.zeros(most, dtype=torch.float64)
        padded[: values.size] = torch.as_tensor(values.reshape(-1))
        rows = [torch.empty(most, dtype=torch.float64) for _ in range(self.world_size)]
        self._all_gather(rows, padded, LONG_GRACE_S)
        return [row[: int(size)].numpy() for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, grace: float) -> None:
        late = None
        try:
            work = dist.all_gather(rows, own, async_op=True)
            while not work.is_completed():
                try:
                    self.raise_if_interrupted()
                except Interrupted:
                    # If all have come already, the others go on, and so does this one: it ends
                    # after their update.
                    late = late or time.monotonic() + grace
                    if time.monotonic() > late:
                        raise
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, Interrupted):
                raise
            raise Interrupted(self._lost(error)) from None

    # An update: what interrupts it, ends the run without saving.
    def rows(self, number: int) -> range:
        """Return which of a number of things in a row are this learner's; all have as many."""
        each = number // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def gather_rows(self, values: Any) -> Any:
        """Return ``(num_steps, num_envs, ...)`` of all learners' ``(num_steps, own_envs, ...)``.

        ``values`` are a tensor, or `Frames` of tensors.
        """
        if self.world_size == 1:
            return values
        if not isinstance(values, Frames):
            return torch.cat(self._gather(values), dim=1)
        # Each learner has another number of frames. So each sends as many as the one with most.
        number = torch.tensor([len(values.frames)], device=values.frames.device)
        most = int(max(self._gather(number)))
        padded = values.frames.new_zeros((most, *values.frames.shape[1:]))
        padded[: len(values.frames)] = values.frames
        frames = torch.cat(self._gather(padded))
        return Frames(frames, self.gather_rows(values.index + self.rank * most))

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        self._update(dist.all_gather, parts, values.contiguous())
        return parts

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Return the average of ``values`` over all learners."""
        if self.world_size == 1:
            return values
        values = values.detach().clone()
        self._update(dist.all_reduce, values)
        return values / self.world_size

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make each gradient the average of all learners'; they travel as one flat tensor."""
        if self.world_size == 1:
            return
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        sizes = [parameter.numel() for parameter in parameters]
        self._update(dist.all_reduce, gradients)
        gradients /= self.world_size
        for parameter, gradient in zip(parameters, gradients.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)

    def _update(self, collective: Callable[..., Any], *tensors: Any) -> None:
        try:
            collective(*tensors)
        except RuntimeError as error:
            raise LearnerLostError(self._lost(error)) from None

    def _lost(self, error: RuntimeError) -> str:
        return f"learner {self.rank} has lost the others: {one_line(error)}"


def fingerprint(model: torch.nn.Module) -> list[int]:
    """Return checksums of all that a model consists of, and of NumPy's random numbers."""
    crc = 0
    for value in model.state_dict().values():
        crc = zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), crc)
    return [crc, zlib.crc32(np.random.get_state()[1].tobytes())]
