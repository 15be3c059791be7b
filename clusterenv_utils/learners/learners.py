"""The learners of one run, which `torchrun` starts and supervises, and their collectives.

They hold the same networks and draw the same random numbers. Each collects from its share of the
environments and learns from its share of each minibatch, and their gradients are averaged. They
meet through torchrun's store and communicate by torch.distributed. Neither encrypts or
authenticates, so several machines must be in a network that you trust.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clusterenv_runtime.arrays import Frames
from clusterenv_runtime.errors import Interrupted, LearnerLostError, one_line

PR_SET_PDEATHSIG = 1  # asks Linux for a signal when the parent dies


class Learners:
    """The learners of a run. This process is one of them, and without `torchrun` the only one.

    A lost learner closes its connections, which the others notice at once. They wait for a silent
    one as long as torch.distributed does by default: 30 minutes.

    Attributes:
        rank: this learner's number. The first learner, 0, writes logs and checkpoints, and
            evaluates.
        world_size: the number of learners.
        backend: the backend of torch.distributed. Learners that share a GPU use Gloo, because NCCL
            refuses them.
        first_row: the number of this learner's first environment among those of all learners.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.backend = "gloo"
        self.first_row = 0
        self._store: dist.Store | None = None  # torchrun's store, which outlasts its restarts

    @classmethod
    def of_torchrun(cls, cuda: bool) -> Learners:
        """Meet the other learners, if torchrun has started this process, and return them all.

        ``cuda`` says whether they learn on GPUs if there are any.

        Raises:
            LearnerLostError: the other learners are out of reach.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        learners = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        with suppress(AttributeError):  # not on Linux
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if cuda and torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
            if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:
                learners.backend = "cpu:gloo,cuda:nccl"
        learners._run(learners._meet)
        return learners

    def _meet(self) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False)
        # Without the prefix, torch would use the learners' addresses from before a restart.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], self._store)
        ranks = {"rank": self.rank, "world_size": self.world_size}
        dist.init_process_group(self.backend, store=store, **ranks)

    @property
    def command(self) -> list[str]:
        """The command that starts as many learners, up to the script and its flags."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return ["python"]
        number = os.environ["GROUP_WORLD_SIZE"]
        nodes = [] if number == "1" else ["--nnodes", number]
        return ["torchrun", *nodes, "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]

    # For use between updates, where nothing is half done: a lost learner interrupts the run.
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of ``values`` over all learners. Raises as `gather` does."""
        return np.sum(self.gather(values), axis=0)

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Return all learners' one-dimensional ``values``, whose lengths may differ.

        Raises:
            Interrupted: another learner is lost.
        """
        if self.world_size == 1:
            return [values]
        try:
            return [part.numpy() for part in self._gather_uneven(torch.tensor(values))]
        except LearnerLostError as error:
            raise Interrupted(str(error)) from None

    def tell(self, text: str) -> list[str]:
        """Send ``text`` to all learners, and return theirs, in order. Raises as `gather` does."""
        parts = self.gather(np.frombuffer(text.encode(), np.uint8))
        return [part.tobytes().decode() for part in parts]

    # For use in an update: all that communicate raise LearnerLostError if a learner is lost.
    def rows(self, number: int) -> range:
        """Return this learner's share of ``number`` items, by index. All shares are equal."""
        each = number // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def gather_rows(self, values: Any) -> Any:
        """Return ``(num_steps, num_envs, ...)`` of all learners' ``(num_steps, own_envs, ...)``.

        ``values`` is a tensor, or `Frames` of tensors.
        """
        if self.world_size == 1:
            return values
        if not isinstance(values, Frames):
            return torch.cat(self._gather(values), dim=1)
        parts = self._gather_uneven(values.frames)
        before = sum(map(len, parts[: self.rank]))
        return Frames(torch.cat(parts), self.gather_rows(values.index + before))

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Return the average of ``values`` over all learners."""
        if self.world_size == 1:
            return values
        values = values.detach().clone()
        self._run(dist.all_reduce, values)
        return values / self.world_size

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average each gradient over all learners. The gradients travel as one flat tensor."""
        if self.world_size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        average = self.average(parameters_to_vector(gradients))
        vector_to_parameters(average, gradients)

    def _gather_uneven(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return all learners' ``values``, whose lengths may differ."""
        lengths = self._gather(torch.tensor([len(values)], device=values.device))
        padded = values.new_zeros((int(max(lengths)), *values.shape[1:]))
        padded[: len(values)] = values
        parts = zip(self._gather(padded), lengths, strict=True)
        return [part[: int(length)] for part, length in parts]

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        self._run(dist.all_gather, parts, values.contiguous())
        return parts

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            text = f"learner {self.rank} has lost the others: {one_line(error)}"
            raise LearnerLostError(text) from None

    # The end, and a restart by torchrun.
    def part(self) -> None:
        """Leave the other learners, once all have trained to the end."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def note_run(self, name: str) -> None:
        """Store the run's name, in case torchrun restarts all learners."""
        if self.rank == 0 and self._store is not None:
            self._store.set("run", name)

    def run_before(self) -> str:
        """Return the name of the run that torchrun restarts, on the first learner; or ""."""
        if self.rank > 0 or self._store is None or not self._store.check(["run"]):
            return ""
        return self._store.get("run").decode()
