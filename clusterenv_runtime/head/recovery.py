"""What a process must be told to be a worker: the first one, or a replacement."""

from __future__ import annotations

import logging
import pickle
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from ..envs.large import contents, places
from ..envs.likeness import Likeness
from ..envs.randomness import number_of_globals
from ..policy.sync import SyncRule
from ..policy.versions import PolicyStore
from ..wire.protocol import Collect, CutOff, Message, Reset, SetAttr, Setup, Step, Structure
from .edits import Edits
from .requests import Request
from .worker import Worker

logger = logging.getLogger(__name__)
Order = tuple[int | None, Message, tuple[Any, ...]]  # seq, if it is known, message and buffers


def _reset_all(requests: Iterable[Request]) -> bool:
    messages = [request.message for request in requests]
    return any(isinstance(message, Reset) and not message.partial for message in messages)


class Recovery:
    """Makes a replacement what its predecessor was, except that it begins new episodes.

    A process takes its episodes with it when it dies. Its replacement builds the environments again
    and resets them with fresh seeds. Its noise follows from what it is asked. If the user steps the
    environments, the next step says that the old episodes are truncated.
    """

    def __init__(
        self,
        rule: SyncRule,
        store: PolicyStore,
        likeness: Likeness,
        shares_memory: bool = False,
    ) -> None:
        self._rule = pickle.dumps(rule)
        self._likeness = pickle.dumps(likeness)
        self._shares_memory = shares_memory  # whether workers can open files of this process
        self._edits = Edits()
        self._store = store
        self._options: dict[str, Any] | None = None  # of the user's last reset of all
        self.attributes: dict[str, list[Any]] = {}  # of all environments, as the user set them
        self.restarts: list[dict[str, Any]] = []  # worker, time, reason and seeds of each
        self._built_with = number_of_globals()  # seeds what environments draw when they are built
        self.seed = secrets.randbits(62)  # of the noise, until the user gives one
        self._is_loaded = False  # whether that comes from a checkpoint, and no rollout was asked

    def orders(self, worker: Worker, unanswered: list[Request]) -> list[Order]:
        """Return what makes a process this worker, and then what it is to answer."""
        setup = Setup(worker.numbers.start, self._built_with)
        setup.shares_memory = self._shares_memory and bool(worker.arrays)
        arrays = [places(worker.arrays)] if setup.shares_memory else contents(worker.arrays)
        buffers = worker.setup, self._rule, self._likeness, *arrays
        orders: list[Order] = [(None, setup, buffers)]
        if self._store.structure:
            orders.append((None, Structure(), (self._store.structure,)))
        for name, values in self.attributes.items():
            orders.append((None, SetAttr(name), (cloudpickle.dumps(values[worker.rows]),)))
        if worker.seeds is not None and not _reset_all(unanswered):
            reset = cloudpickle.dumps((worker.seeds, self._options, None))
            orders.append((None, Reset(), (reset,)))
        for request in unanswered:
            message, buffers = request.message, request.buffers
            if isinstance(message, Step | CutOff) and worker.episodes.cut is not None:
                message, *buffers = worker.episodes.step(None)
            orders.append((request.seq, message, tuple(buffers)))
        return orders

    def lost(self, worker: Worker, reason: str, unanswered: list[Request]) -> None:
        """Note that a worker's process has died, and is replaced."""
        worker.copy.forget()
        number = sum(restart["worker"] == worker.index for restart in self.restarts) + 1
        if worker.seeds is not None:
            worker.episodes.lost()
            if not _reset_all(unanswered):  # else the user's own seeds are still to be used
                worker.seeds = _fresh_seeds(worker, number)
        self.restarts.append(
            {"worker": worker.index, "time": time.time(), "reason": reason, "seeds": worker.seeds}
        )
        text = "%s; another is started, replacement %d of this worker%s"
        logger.warning(text, reason, number, self._edits.describe())

    def number(self, worker: Worker, request: Collect) -> None:
        """Say in a request to act which rollout it is, and so which noise it draws."""
        request.seed = self.seed
        request.rollout = worker.asked_rollouts
        worker.asked_rollouts += 1
        self._is_loaded = False

    def reset(
        self, workers: Sequence[Worker], seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        """Note that the user resets all environments.

        The first seed that is given seeds the noise, too, unless its seed was just loaded.
        """
        self._options = options
        rows = range(workers[0].offset, workers[0].offset + len(seeds))
        given = [seed - row for row, seed in zip(rows, seeds, strict=True) if seed is not None]
        for worker in workers:
            worker.seeds = seeds[worker.rows]
            worker.evaluated = 0
            worker.episodes.reset()
        if given and not self._is_loaded:
            self.seed = given[0] % 2**62
            for worker in workers:
                worker.asked_rollouts = worker.rollouts = 0

    def state_dict(self, workers: Iterable[Worker]) -> dict[str, Any]:
        rollouts = max(worker.rollouts for worker in workers)
        return {"seed": self.seed, "rollouts": rollouts, "restarts": list(self.restarts)}

    def load_state_dict(self, workers: Iterable[Worker], state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self.restarts = list(state["restarts"])
        self._is_loaded = True
        for worker in workers:
            worker.asked_rollouts = worker.rollouts = state["rollouts"]


def _fresh_seeds(worker: Worker, number: int) -> list[int | None]:
    """Return seeds for replacement ``number`` of a worker; they follow from those before."""
    given = [seed for seed in worker.seeds if seed is not None]
    sequence = np.random.SeedSequence([*given, worker.numbers.start, number])
    # Some environments take only 31 bits.
    fresh = (sequence.generate_state(worker.num_envs) >> 1).tolist()
    return [None if old is None else new for old, new in zip(worker.seeds, fresh, strict=True)]
