"""What a process must be told to be a worker, be it the first one or a replacement; and the numbers
from which its noise follows.
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
SHOWN = 3  # files of edited code that a warning names
_open: weakref.WeakSet[Recovery] = weakref.WeakSet()
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
        # When the files were written of all modules that are imported here. The script is none of
        # them: it travels as it was.
        modules = [module for name, module in sys.modules.items() if name != "__main__"]
        files = {getattr(module, "__file__", None) for module in modules} - {None}
        self._mtimes = {file: _mtime(file) for file in files}
        self._store = store
        self._options = cloudpickle.dumps(None)  # of the user's last reset of all
        # As the user set them: for each worker a pickle of its environments' values.
        self.attributes: dict[str, list[bytes]] = {}
        self.restarts: list[dict[str, Any]] = []  # worker, time, reason and seeds of each
        # Seeds what environments draw when they are built. Those of two that are open differ.
        self._built_with = number_of_globals()
        while any(other._built_with == self._built_with for other in _open):
            self._built_with = (self._built_with + 1) % 2**62
        _open.add(self)
        self.seed = secrets.randbits(62)  # of the noise, until the user gives one
        self._is_loaded = False  # whether that comes from a checkpoint, and no rollout was asked

    def close(self) -> None:
        """Let another one build with the same number."""
        _open.discard(self)

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
        logger.warning(text, reason, number, self._edits())

    def _edits(self) -> str:
        """Return a text that names the files of code edited since; "" if there are none."""
        times = self._mtimes.items()
        edited = sorted(file for file, mtime in times if _mtime(file) != mtime)
        if not edited:
            return ""
        names = ", ".join(edited[:SHOWN])
        more = f" and {len(edited) - SHOWN} more" if len(edited) > SHOWN else ""
        return f"; it runs code that was changed since the others started: {names}{more}"

    def seed_noise(self, worker: Worker, request: Collect) -> None:
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
    """Return seeds with a random one where none was given.

    Without it, environments would go on from the state of the generators that an evaluation or the
    worker's start has left, which is the same each time.
    """
    return [secrets.randbits(31) if seed is None else seed for seed in seeds]


def _fresh_seeds(worker: Worker, number: int) -> list[int | None]:
    """Return seeds for replacement ``number`` of a worker; they follow from those before."""
    given = [seed for seed in worker.seeds if seed is not None]
    sequence = np.random.SeedSequence([*given, worker.numbers.start, number])
    # Some environments take only 31 bits.
    fresh = (sequence.generate_state(worker.num_envs) >> 1).tolist()
    return [None if old is None else new for old, new in zip(worker.seeds, fresh, strict=True)]


def _mtime(file: str) -> int | None:
    """Return when a file was written, in nanoseconds; None if it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def number_of_globals() -> int:
    """Return a number of 62 bits that follows from the states of the global generators."""
    _, keys, *others = np.random.get_state()
    states = [str(random.getstate()).encode(), keys.tobytes(), str(others).encode()]
    if torch := sys.modules.get("torch"):
        states.append(torch.get_rng_state().numpy().tobytes())
    return int.from_bytes(hashlib.sha256(b"".join(states)).digest()[:8]) >> 2
