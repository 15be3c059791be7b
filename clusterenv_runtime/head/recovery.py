"""What the head sends a new process to make it a given worker, and the numbers that seed its noise.

A replacement gets the same orders as the first process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import random
import secrets
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from ..envs.large import contents, places
from ..envs.likeness import Likeness
from ..policy.sync import SyncRule
from ..policy.versions import PolicyStore
from ..wire.protocol import Collect, CutOff, Message, Reset, SetAttr, Setup, Step, Structure
from .requests import Request
from .worker import Worker

logger = logging.getLogger(__name__)
SHOWN = 3  # how many files of edited code a warning names, at most
_open: weakref.WeakSet[Recovery] = weakref.WeakSet()
Order = tuple[int | None, Message, tuple[Any, ...]]  # seq, None if it is new; message; buffers


def _reset_all(requests: Iterable[Request]) -> bool:
    messages = [request.message for request in requests]
    return any(isinstance(message, Reset) and not message.partial for message in messages)


class Recovery:
    """Makes a replacement the same as its predecessor, except that it begins new episodes.

    When a process dies, its episodes are lost. Its replacement builds the environments again and
    resets them with fresh seeds. Requests determine its noise. If the user steps the environments,
    the next step reports the old episodes as truncated.
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
        self._shares_memory = shares_memory  # whether workers can open this process's files
        # The modification times of all imported modules' files. The script is not among them,
        # because workers get it as it was at the start.
        modules = [module for name, module in sys.modules.items() if name != "__main__"]
        files = {getattr(module, "__file__", None) for module in modules} - {None}
        self._mtimes = {file: _mtime(file) for file in files}
        self._store = store
        self._options = cloudpickle.dumps(None)  # options of the last reset of all environments
        # What the user set, by name: for each worker, a pickle of its environments' values.
        self.attributes: dict[str, list[bytes]] = {}
        self.restarts: list[dict[str, Any]] = []  # each one's worker, time, reason and seeds
        # Seeds the draws of environments while they are built. It is unique among open instances.
        self._built_with = number_of_globals()
        while any(other._built_with == self._built_with for other in _open):
            self._built_with = (self._built_with + 1) % 2**62
        _open.add(self)
        self.seed = secrets.randbits(62)  # the seed of the noise, random until the user gives one
        self._is_loaded = False  # whether the seed was loaded, with no rollout requested since

    def close(self) -> None:
        """Let another `Recovery` use the number that seeds the building of environments."""
        _open.discard(self)

    def orders(self, worker: Worker, unanswered: list[Request]) -> list[Order]:
        """Return the orders that make a process this worker, then the unanswered requests."""
        setup = Setup(worker.numbers.start, self._built_with)
        setup.shares_memory = self._shares_memory and bool(worker.arrays)
        arrays = [places(worker.arrays)] if setup.shares_memory else contents(worker.arrays)
        buffers = worker.setup, self._rule, self._likeness, *arrays
        orders: list[Order] = [(None, setup, buffers)]
        if self._store.structure:
            orders.append((None, Structure(), (self._store.structure,)))
        for name, values in self.attributes.items():
            orders.append((None, SetAttr(name), (values[worker.index],)))
        if worker.seeds is not None and not _reset_all(unanswered):
            options = pickle.loads(self._options)
            reset = cloudpickle.dumps((with_fresh(worker.seeds), options, None))
            orders.append((None, Reset(), (reset,)))
        for request in unanswered:
            message, buffers = request.message, request.buffers
            if isinstance(message, Step | CutOff) and worker.episodes.cut is not None:
                message, *buffers = worker.episodes.step(None)
            orders.append((request.seq, message, tuple(buffers)))
        return orders

    def lost(self, worker: Worker, reason: str, unanswered: list[Request]) -> None:
        """Note that a worker's process has died and is being replaced."""
        worker.copy.forget()
        number = sum(restart["worker"] == worker.index for restart in self.restarts) + 1
        if worker.seeds is not None:
            worker.episodes.lost()
            if not _reset_all(unanswered):  # otherwise the user's own seeds are still unused
                worker.seeds = _fresh_seeds(worker, number)
        self.restarts.append(
            {"worker": worker.index, "time": time.time(), "reason": reason, "seeds": worker.seeds}
        )
        text = "%s; another is started, replacement %d of this worker%s"
        logger.warning(text, reason, number, self._edits())

    def _edits(self) -> str:
        """Return a text that names code files edited since the start; "" if there are none."""
        times = self._mtimes.items()
        edited = sorted(file for file, mtime in times if _mtime(file) != mtime)
        if not edited:
            return ""
        names = ", ".join(edited[:SHOWN])
        more = f" and {len(edited) - SHOWN} more" if len(edited) > SHOWN else ""
        return f"; it runs code that was changed since the others started: {names}{more}"

    def seed_noise(self, worker: Worker, request: Collect) -> None:
        """Set a request's seed and rollout number, which determine the rollout's noise."""
        request.seed = self.seed
        request.rollout = worker.asked_rollouts
        worker.asked_rollouts += 1
        self._is_loaded = False

    def reset(
        self, workers: Sequence[Worker], seeds: list[int | None], options: dict[str, Any] | None
    ) -> None:
        """Note that the user resets all environments.

        The first given seed, less its row, also seeds the noise, unless the noise's seed was just
        loaded.
        """
        self._options = cloudpickle.dumps(options)
        first = workers[0].numbers.start
        given = [seed - row for row, seed in enumerate(seeds, first) if seed is not None]
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


def with_fresh(seeds: list[int | None]) -> list[int]:
    """Return seeds, with a random seed where none was given.

    Without random seeds, environments would continue from the generators' state that an evaluation
    or the worker's start has left, which is the same each time.
    """
    return [secrets.randbits(31) if seed is None else seed for seed in seeds]


def _fresh_seeds(worker: Worker, number: int) -> list[int | None]:
    """Return seeds for replacement ``number`` of a worker, derived from the last seeds."""
    given = [seed for seed in worker.seeds if seed is not None]
    sequence = np.random.SeedSequence([*given, worker.numbers.start, number])
    # Some environments take only seeds of 31 bits.
    fresh = (sequence.generate_state(worker.num_envs) >> 1).tolist()
    return [None if old is None else new for old, new in zip(worker.seeds, fresh, strict=True)]


def _mtime(file: str) -> int | None:
    """Return a file's modification time in nanoseconds; None if the file does not exist."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def number_of_globals() -> int:
    """Return a number of 62 bits, derived from the states of the global random generators."""
    _, keys, *others = np.random.get_state()
    states = [str(random.getstate()).encode(), keys.tobytes(), str(others).encode()]
    if torch := sys.modules.get("torch"):
        states.append(torch.get_rng_state().numpy().tobytes())
    return int.from_bytes(hashlib.sha256(b"".join(states)).digest()[:8]) >> 2
