"""What outlives a worker's processes: its unanswered requests, and the orders for a replacement.

A replacement is the same as its predecessor, except that it begins new episodes. It builds the
environments again and resets them with fresh seeds. Requests determine its noise. If the user steps
the environments, the next step reports the old episodes as truncated.
"""

import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from .. import messages
from ..launchers import Launcher
from ..messages import Message
from ..options import ClusterOptions
from ..policy.versions import PolicyStore
from ..setup import Process as Preparation
from .workers import Process, Supervisor, Worker

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """A message to one worker that asks for a response."""

    seq: int
    worker: Worker
    message: Message
    response: Any = None  # the `Part`, or the value of the `Reply`
    process: Process | None = None  # the process that responded
    dropped: list[str] = field(default_factory=list)  # see `messages.Reply`

    @property
    def process_is_gone(self) -> bool:
        """Whether the process that responded has been replaced since."""
        return self.process is not self.worker.process


class Recovery(Supervisor):
    """The state of all workers that does not depend on their processes."""

    def __init__(
        self,
        workers: Sequence[Worker],
        launcher: Launcher,
        options: ClusterOptions,
        learners: Any,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(workers, launcher, options, clock)
        copies = [worker.copy for worker in workers]
        self.store = PolicyStore(copies, options.weights == "difference", learners)
        self.rule = options.rule
        self._preparation = Preparation(launcher)
        self.outstanding: dict[int, Request] = {}  # by seq, oldest first
        self._reset_options = cloudpickle.dumps(None)  # of the last reset of all environments
        # What the user set, by name: for each worker, a pickle of its environments' values.
        self.attributes: dict[str, list[bytes]] = {}
        self.restarts: list[dict[str, Any]] = []  # each one's worker, time, reason and seeds
        generator = random.Random()
        generator.setstate(random.getstate())
        self._building_seed = generator.getrandbits(62)
        self.seed = secrets.randbits(62)  # of the noise; random until the user gives one
        self._is_loaded = False  # whether the seed was loaded, with no rollout requested since

    def _requests_of(self, worker: Worker) -> list[Request]:
        return [request for request in self.outstanding.values() if request.worker is worker]

    def _orders(self, worker: Worker) -> Iterable[Message]:
        """Return the messages that make a process this worker."""
        yield messages.Setup(
            first_row=worker.numbers.start,
            seed=self._building_seed,
            rule=self.rule,
            process=self._preparation,
            environments=worker.environments,
            arrays=worker.arrays,
        )
        if self.store.structure:
            yield messages.Structure(self.store.structure)
        for name, values in self.attributes.items():
            yield messages.SetAttr(name, values[worker.index])
        if worker.seeds is not None and not self._will_reset(worker):
            yield messages.Reset(with_fresh(worker.seeds), self._reset_options)
            worker.process.is_cut_off = worker.seen is not None
            if worker.process.is_cut_off:
                yield messages.CutOff(worker.seen, worker.ended)

    def _will_reset(self, worker: Worker) -> bool:
        asked = [request.message for request in self._requests_of(worker)]
        return any(isinstance(each, messages.Reset) and each.mask is None for each in asked)

    def _note_loss(self, worker: Worker, reason: str) -> None:
        """Note that a worker's process has died and is being replaced.

        Its episodes are lost. The replacement resets its environments with fresh seeds.
        """
        worker.copy.forget()
        number = sum(restart["worker"] == worker.index for restart in self.restarts) + 1
        # Otherwise the user's own seeds are still unused.
        if worker.seeds is not None and not self._will_reset(worker):
            worker.seeds = derived(worker.seeds, worker.numbers.start, number)
        self.restarts.append(
            {"worker": worker.index, "time": time.time(), "reason": reason, "seeds": worker.seeds}
        )
        logger.warning("%s; another is started, replacement %d of this worker", reason, number)

    def seed_noise(self, worker: Worker, request: messages.Collect) -> None:
        """Set a request's seed and rollout number, which determine the rollout's noise."""
        request.seed = self.seed
        request.rollout = worker.asked_rollouts
        worker.asked_rollouts += 1
        self._is_loaded = False

    def note_reset(self, seeds: list[int | None], options: bytes) -> None:
        """Note that the user resets all environments.

        The first given seed, less its row, also seeds the noise, unless the noise's seed was just
        loaded.
        """
        self._reset_options = options
        first = self.workers[0].numbers.start
        given = [seed - row for row, seed in enumerate(seeds, first) if seed is not None]
        for worker in self.workers:
            worker.seeds = seeds[worker.rows]
            worker.evaluated = 0
        if given and not self._is_loaded:
            self.seed = given[0] % 2**62
            for worker in self.workers:
                worker.asked_rollouts = worker.rollouts = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, summed over all workers, and the state of the noise."""
        return {
            **self.store.state_dict(),
            "waiting_seconds": math.fsum(worker.waited for worker in self.workers),
            "seed": self.seed,
            "rollouts": max(worker.rollouts for worker in self.workers),
            "restarts": list(self.restarts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a head, which may have had another number of workers."""
        self.store.load_state_dict(state)
        self.seed, self.restarts = state["seed"], list(state["restarts"])
        for worker in self.workers:
            worker.waited = state["waiting_seconds"] / state["workers"]
            worker.asked_rollouts = worker.rollouts = state["rollouts"]
        self._is_loaded = True


def derived(seeds: list[int | None], *how: int) -> list[int | None]:
    """Return seeds that follow from others. Some environments take only seeds of 31 bits."""
    sequences = [seed if seed is None else np.random.SeedSequence([seed, *how]) for seed in seeds]
    return [each and int(each.generate_state(1)[0] >> 1) for each in sequences]


def with_fresh(seeds: list[int | None]) -> list[int]:
    """Return seeds, with a random seed where none was given.

    Without random seeds, environments would continue from the generators' state that an evaluation
    or the worker's start has left, which is the same each time.
    """
    return [secrets.randbits(31) if seed is None else seed for seed in seeds]
