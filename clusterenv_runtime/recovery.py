"""What a process must be told to be a worker, be it the first of its rows or one in place of another that died."""

from __future__ import annotations

import logging
import time
from typing import Any

import cloudpickle
import numpy as np

from .protocol import Collect, Lost, Requests, Reset, SetAttr, Setup, Step, Structure
from .sync import PolicyStore

logger = logging.getLogger(__name__)


class Recovery:
    """The head's memory of what the workers were told, and of what the user knows of their environments.

    A dead process takes its episodes with it. The one in its place builds the environments anew and resets them with
    fresh seeds; if the user steps them, the step says that the old episodes are truncated.
    """

    def __init__(self, rows: list[slice], setups: list[bytes], sys_path: list[str], store: PolicyStore) -> None:
        self._rows, self._setups, self._sys_path, self._store = rows, setups, sys_path, store
        self.attributes: dict[str, list[Any]] = {}  # as the user has set them last
        self._seeds: list[list[int | None]] = []  # of each worker's last reset; empty before the first
        self._original: list[int | None] = []  # the first of each worker's in the user's last reset
        self._options: dict[str, Any] | None = None
        self._seen: list[Any] = [None] * len(rows)  # the observations the user has of each worker
        self._begun_anew: set[int] = set()  # workers whose episodes are lost, which the user has not been told
        self.restarts: list[dict[str, Any]] = []

    def join(self, worker: int, unanswered: Requests) -> Requests:
        """Return what makes a process this worker, and then what it is to answer."""
        rows = self._rows[worker]
        requests: Requests = [(Setup(0, self._sys_path, rows.start), (self._setups[worker],))]
        if self._store.structure:
            requests.append((Structure(0), (self._store.structure,)))
        for name, values in self.attributes.items():
            requests.append((SetAttr(0, name), (cloudpickle.dumps(values[rows]),)))
        if self._seeds and not any(isinstance(request, Reset) and not request.partial for request, _ in unanswered):
            requests.append((Reset(0), (cloudpickle.dumps((self._seeds[worker], self._options, None)),)))
        for request, buffers in unanswered:
            if isinstance(request, Step | Lost) and worker in self._begun_anew:
                seq, (request, buffers) = request.seq, self.step(worker, None)
                request.seq = seq
            elif isinstance(request, Collect):
                buffers = self._store.generator(worker)  # the first draws its noise as the lost one did
            requests.append((request, buffers))
        return requests

    def lost(self, worker: int, text: str) -> None:
        """Note that a worker's process has died, and will be replaced."""
        self._store.lost(worker)
        if self._seen[worker] is not None:
            self._begun_anew.add(worker)
        seeds, number = None, sum(restart["worker"] == worker for restart in self.restarts) + 1
        if self._seeds:
            seeds = self._seeds[worker]
            if self._original[worker] is not None:
                sequence = np.random.SeedSequence([self._original[worker], self._rows[worker].start, number])
                seeds = self._seeds[worker] = sequence.generate_state(len(seeds)).tolist()
        self.restarts.append({"worker": worker, "time": time.time(), "reason": text, "seeds": seeds})
        logger.warning("%s; another is started (its %d.), with seeds %s", text, number, seeds)

    def reset(self, seeds: list[int | None], options: dict[str, Any] | None) -> None:
        """Note that the user resets all environments."""
        self._seeds, self._options = [seeds[rows] for rows in self._rows], options
        self._original = [part[0] for part in self._seeds]
        self._begun_anew.clear()

    def step(self, worker: int, actions: Any) -> tuple[Step | Lost, tuple[bytes]]:
        """Return the request to step a worker's environments, or to say that their episodes are lost."""
        if worker in self._begun_anew:
            self._begun_anew.remove(worker)
            return Lost(0), (cloudpickle.dumps(self._seen[worker]),)
        return Step(0), (cloudpickle.dumps(actions),)

    def saw(self, worker: int, observations: Any, begun_anew: bool) -> None:
        """Note what the user now has of a worker's environments, and whether that is a beginning."""
        self._seen[worker] = observations
        if begun_anew:
            self._begun_anew.discard(worker)
