"""What a process must be told to be a worker: the first of its rows, or one in place of another
that died.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from ..policy.sync import SyncRule
from ..policy.versions import PolicyStore
from ..wire.protocol import CutOff, Message, Reset, SetAttr, Setup, Step, Structure
from .handle import PendingRequest, WorkerHandle

logger = logging.getLogger(__name__)
Order = tuple[int | None, Message, tuple[Any, ...]]  # seq, if it is known, message and buffers


def _resets_all(message: Message) -> bool:
    return isinstance(message, Reset) and not message.partial


class Recovery:
    """Makes a replacement what its predecessor was, except that it begins new episodes.

    A dead process takes its episodes with it. The one in its place builds the environments anew and
    resets them with fresh seeds. Its noise follows from what it is asked. If the user steps the
    environments, the step says that the old episodes are truncated.
    """

    def __init__(self, rule: SyncRule, store: PolicyStore) -> None:
        self._rule = pickle.dumps(rule)
        self._store = store
        self._sys_path = [os.fsencode(path) for path in sys.path if path]
        self.attributes: dict[
            str, list[Any]
        ] = {}  # of all environments, as the user has set them last
        self._options: dict[str, Any] | None = None  # of the user's last reset of all
        self.restarts: list[dict[str, Any]] = []  # worker, time, reason and seeds of each
        self.seed = secrets.randbits(62)  # of the noise, until the user gives one
        self.is_loaded = (
            False  # whether that comes from a checkpoint, and no rollout has been asked since
        )

    def orders(self, worker: WorkerHandle, unanswered: list[PendingRequest]) -> list[Order]:
        """Return what makes a process this worker, and then what it is to answer."""
        orders: list[Order] = [
            (None, Setup(self._sys_path, worker.first_row), (worker.setup, self._rule))
        ]
        if self._store.structure:
            orders.append((None, Structure(), (self._store.structure,)))
        for name, values in self.attributes.items():
            orders.append((None, SetAttr(name), (cloudpickle.dumps(values[worker.rows]),)))
        if worker.seeds is not None and not any(
            _resets_all(request.message) for request in unanswered
        ):
            orders.append(
                (None, Reset(), (cloudpickle.dumps((worker.seeds, self._options, None)),))
            )
        for request in unanswered:
            message, buffers = request.message, request.buffers
            if isinstance(message, Step | CutOff) and worker.episodes.cut is not None:
                message, *buffers = worker.episodes.step(None)
            orders.append((request.seq, message, tuple(buffers)))
        return orders

    def lost(self, worker: WorkerHandle, text: str, unanswered: list[PendingRequest]) -> None:
        """Note that a worker's process has died, and will be replaced."""
        worker.copy.forget()
        number = sum(restart["worker"] == worker.index for restart in self.restarts) + 1
        if worker.seeds is not None:
            worker.episodes.lost()
            if not any(
                _resets_all(request.message) for request in unanswered
            ):  # else the seeds of the user
                worker.seeds = self._fresh_seeds(worker, number)
        self.restarts.append(
            {"worker": worker.index, "time": time.time(), "reason": text, "seeds": worker.seeds}
        )
        logger.warning("%s; another is started, replacement %d of this worker", text, number)

    def _fresh_seeds(self, worker: WorkerHandle, number: int) -> list[int | None]:
        given = worker.user_seeds
        entropy = [*(seed for seed in given if seed is not None), worker.first_row, number]
        fresh = (
            np.random.SeedSequence(entropy).generate_state(len(given)) >> 1
        ).tolist()  # some take only 31 bits
        return [None if old is None else new for old, new in zip(given, fresh, strict=True)]

    def reset(
        self,
        workers: Sequence[WorkerHandle],
        seeds: list[int | None],
        options: dict[str, Any] | None,
    ) -> None:
        """Note that the user resets all environments, and with a seed the noise, unless its seed
        was just loaded.

        Of several seeds, that of the noise is the first.
        """
        self._options = options
        given = [
            seed - row for row, seed in enumerate(seeds, workers[0].offset) if seed is not None
        ]
        begins_anew = bool(given) and not self.is_loaded
        if begins_anew:
            self.seed = given[0] % 2**62
        for worker in workers:
            worker.user_seeds = worker.seeds = seeds[worker.rows]
            worker.episodes.reset()
            if begins_anew:
                worker.asked_rollouts = worker.rollouts = 0

    def state_dict(self, workers: Iterable[WorkerHandle]) -> dict[str, Any]:
        rollouts = max(worker.rollouts for worker in workers)
        return {"seed": self.seed, "rollouts": rollouts, "restarts": list(self.restarts)}

    def load_state_dict(self, workers: Iterable[WorkerHandle], state: dict[str, Any]) -> None:
        self.seed, self.restarts, self.is_loaded = state["seed"], list(state["restarts"]), True
        for worker in workers:
            worker.asked_rollouts = worker.rollouts = state["rollouts"]
