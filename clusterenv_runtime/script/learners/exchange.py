"""What the learners of a run compute together: sums, shares of minibatches, gradients."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...errors import Interrupted, LearnerLostError, one_line

POLL_S = 0.0005  # between looks whether the others have arrived
GRACE_S = 0.1  # more for what all may have begun, before an interrupt has its way
LONG_GRACE_S = 2.0  # more for what all have begun


class Share(NamedTuple):
    """What of a minibatch is one learner's."""

    start: int  # its first sample, of those that `Learners.share` returns
    end: int
    weight: float  # its part of the whole minibatch
    adv_mean_std: (
        tuple[torch.Tensor, torch.Tensor] | None
    )  # mean and deviation of the whole one's advantages


class Exchange:
    """One of several learners, and what it computes together with the others; or the only one.

    Attributes:
        rank: which it is; the first, 0, writes logs and checkpoints, and evaluates.
        world_size: how many there are.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._flat = torch.empty(
            0
        )  # gradients; memory that is new each time would cost as much as to send it
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
        try:
            work, late = dist.all_gather(rows, own, async_op=True), None
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
            raise Interrupted(
                f"learner {self.rank} has lost the others: {one_line(error)}"
            ) from None

    # An update: what interrupts it, ends the run without saving.
    def rows(self, number: int) -> range:
        """Return which of a number of things in a row are this learner's; all have as many."""
        each = number // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def share(
        self, inds: np.ndarray, size: int, num_envs: int, advantages: torch.Tensor
    ) -> tuple[np.ndarray, Iterable[Share]]:
        """Divide the samples ``inds`` of the whole batch, in minibatches of ``size``, among the
        learners.

        Return which samples of its own batch are this learner's, and of each minibatch its share.

        Args:
            inds: permuted alike on all learners: ``step * num_envs + env``, which is of the learner
                that has this environment; or whole environments, ``env``.
            size: of a minibatch.
            num_envs: how many environments all learners have.
            advantages: ``(len(inds), ...)`` of all samples in order, see `whole`.
        """
        if self.world_size == 1:
            ends = range(size, len(inds) + 1, size)
            return inds, (Share(end - size, end, 1.0, None) for end in ends)
        steps, envs = np.divmod(inds, num_envs)
        rows = self.rows(num_envs)
        is_own = (envs >= rows.start) & (envs < rows.stop)
        own = (steps * len(rows) + envs - rows.start)[is_own]
        bounds = np.concatenate([[0], np.cumsum(is_own)[size - 1 :: size]]).tolist()
        shuffled = advantages[torch.as_tensor(inds, device=advantages.device)].view(
            len(inds) // size, -1
        )

        def shares() -> Iterator[Share]:
            for (start, end), minibatch in zip(itertools.pairwise(bounds), shuffled, strict=True):
                mean_std = minibatch.mean(), minibatch.std()
                first = (
                    min(start, len(own) - 1) if start == end else start
                )  # where it has none: any, of no weight
                yield Share(first, max(end, first + 1), (end - start) / size, mean_std)

        return own, shares()

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``(num_steps, num_envs)`` of all learners' ``(num_steps, own_envs)``."""
        if self.world_size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        self._update(dist.all_gather, parts, values.contiguous())
        return torch.cat(parts, dim=1)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter], weight: float) -> None:
        """Make each gradient the sum of all learners', of this one times ``weight``; they travel as
        one flat tensor.
        """
        if self.world_size == 1:
            return
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        sizes = [parameter.numel() for parameter in parameters]
        if (sum(sizes), parameters[0].device) != (len(self._flat), self._flat.device):
            self._flat = torch.empty(sum(sizes), device=parameters[0].device)
        torch.cat([parameter.grad.reshape(-1) for parameter in parameters], out=self._flat).mul_(
            weight
        )
        self._update(dist.all_reduce, self._flat)
        for parameter, grad in zip(parameters, self._flat.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over all learners."""
        if self.world_size > 1:
            values = values.detach().clone()
            self._update(dist.all_reduce, values)
        return values

    def moments(self, values: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray, int]]:
        """Yield mean and variance over the first axis, and length, of each learner's float64
        ``values``.
        """
        mean, var, number = values.mean(0), values.var(0), len(values)
        if self.world_size == 1:
            yield mean, var, number
            return
        own = torch.as_tensor(np.concatenate([[number], mean.reshape(-1), var.reshape(-1)]))
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        self._update(dist.all_gather, rows, own)
        for row in rows:
            means, variances = row[1:].numpy().reshape(2, *np.shape(mean))
            yield means, variances, int(row[0])

    def _update(self, collective: Callable[..., Any], *tensors: Any) -> None:
        try:
            collective(*tensors)
        except RuntimeError as error:
            raise LearnerLostError(
                f"learner {self.rank} has lost the others: {one_line(error)}"
            ) from None


def fingerprint(model: torch.nn.Module) -> list[int]:
    """Return checksums of all that a model consists of, and of NumPy's random numbers."""
    crc = 0
    for value in model.state_dict().values():
        crc = zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), crc)
    return [crc, zlib.crc32(np.random.get_state()[1].tobytes())]
