"""What a process must be told to be a worker, be it the first of its rows or one in place of another that died."""

from __future__ import annotations

import logging
import time
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from .protocol import Collect, Lost, Message, Requests, Reset, SetAttr, Setup, Step, Structure
from .spaces import merge_rows
from .sync import PolicyStore

logger = logging.getLogger(__name__)


def _resets_all(message: Message) -> bool:
    return isinstance(message, Reset) and not message.partial


class Recovery:
    """The head's memory of what the workers were told, and of what the user knows of their environments.

    A dead process takes its episodes with it. The one in its place builds the environments anew, resets them with fresh
    seeds, and draws its policy's noise where the last answer left off. If the user steps the environments, the step
    says that the old episodes are truncated.
    """

    def __init__(
        self, rows: list[slice], setups: list[bytes], sys_path: list[str], store: PolicyStore, space: Space
    ) -> None:
        self._rows, self._setups, self._sys_path, self._store, self._space = rows, setups, sys_path, store, space
        self.attributes: dict[str, list[Any]] = {}  # as the user has set them last
        self.restarts: list[dict[str, Any]] = []
        self._seeds: list[list[int | None]] = []  # of each worker's last reset; empty before the first
        self._original: list[list[int | None]] = []  # of the user's last reset of all
        self._options: dict[str, Any] | None = None
        self._seen: list[Any] = [None] * len(rows)  # the observations the user has of each worker
        self._ended = np.zeros(rows[-1].stop, bool)  # environments whose end the user has seen, but not what follows
        self._cut = np.zeros(rows[-1].stop, bool)  # environments whose episode is lost, which the user does not know
        # of the policy's noise, after each worker's last answer
        self._generators: list[bytes | None] = [None] * len(rows)
        self._restore: set[int] = set()  # workers that get theirs back with their next request
        self._loaded = False

    def join(self, worker: int, unanswered: Requests) -> Requests:
        """Return what makes a process this worker, and then what it is to answer."""
        rows = self._rows[worker]
        requests: Requests = [(Setup(0, self._sys_path, rows.start), (self._setups[worker],))]
        if self._store.structure:
            requests.append((Structure(0), (self._store.structure,)))
        for name, values in self.attributes.items():
            requests.append((SetAttr(0, name), (cloudpickle.dumps(values[rows]),)))
        if self._seeds and not any(_resets_all(request) for request, _ in unanswered):
            requests.append((Reset(0), (cloudpickle.dumps((self._seeds[worker], self._options, None)),)))
        for request, buffers in unanswered:
            if isinstance(request, Step | Lost) and self._cut[rows].any():
                seq, (request, buffers) = request.seq, self.step(worker, None)
                request.seq = seq
            elif isinstance(request, Collect):
                buffers = self.generator(worker) or buffers
            requests.append((request, buffers))
        return requests

    def lost(self, worker: int, text: str, unanswered: list[Message]) -> None:
        """Note that a worker's process has died, and will be replaced."""
        self._store.lost(worker)
        self._restore.add(worker)
        rows = self._rows[worker]
        seeds, number = None, sum(restart["worker"] == worker for restart in self.restarts) + 1
        if self._seeds:
            if self._seen[worker] is not None:
                self._cut[rows] = ~self._ended[rows]
            if not any(map(_resets_all, unanswered)):  # else those of the user
                given = self._original[worker]
                entropy = [*(seed for seed in given if seed is not None), rows.start, number]
                fresh = np.random.SeedSequence(entropy).generate_state(len(given)).tolist()
                self._seeds[worker] = [None if old is None else new for old, new in zip(given, fresh, strict=True)]
            seeds = self._seeds[worker]
        self.restarts.append({"worker": worker, "time": time.time(), "reason": text, "seeds": seeds})
        logger.warning("%s; another is started (its %d.), with seeds %s", text, number, seeds)

    def reset(self, seeds: list[int | None], options: dict[str, Any] | None) -> None:
        """Note that the user resets all environments, and with seeds the noise, but for one that was just loaded."""
        self._original, self._options = [seeds[rows] for rows in self._rows], options
        self._seeds = list(self._original)
        self._cut[:] = self._ended[:] = False
        if not self._loaded:
            self._generators = [None] * len(self._rows)
        self._loaded = False

    def step(self, worker: int, actions: Any) -> tuple[Step | Lost, tuple[bytes]]:
        """Return the request to step a worker's environments, or to say that their episodes are lost."""
        cut = self._cut[self._rows[worker]]
        if cut.any():
            return Lost(0), (cloudpickle.dumps((self._seen[worker], cut.copy())),)
        return Step(0), (cloudpickle.dumps(actions),)

    def saw(self, worker: int, observations: Any, ended: Any = False, mask: np.ndarray | None = None) -> Any:
        """Note what the user gets of a worker's environments, all or after a reset of some; return the observations.

        ``ended`` are the rows that show the end of an episode, not what follows it.
        """
        rows = self._rows[worker]
        if mask is None:
            self._cut[rows], self._ended[rows] = False, ended
        else:
            self._cut[rows] &= ~mask
            self._ended[rows] &= ~mask
            # What has begun without the user's knowledge is for the next step to tell.
            if self._cut[rows].any():
                observations = merge_rows(self._space, ~self._cut[rows], observations, self._seen[worker])
        self._seen[worker] = observations
        return observations

    def answered(self, worker: int, generator: bytes) -> None:
        """Note the state of a worker's random numbers that came with an answer, if any did."""
        self._generators[worker] = generator or self._generators[worker]

    def generator(self, worker: int) -> tuple[bytes, ...]:
        """Return the buffers of a worker's next request to act: that state, if its process does not have it."""
        state = self._generators[worker] if worker in self._restore else None
        self._restore.discard(worker)
        return (state,) if state else ()

    def state_dict(self) -> dict[str, Any]:
        return {"generators": list(self._generators), "restarts": list(self.restarts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["generators"]) != len(self._rows):
            raise ValueError(f"the state is of {len(state['generators'])} workers, these are {len(self._rows)}")
        self._generators, self.restarts = list(state["generators"]), list(state["restarts"])
        self._restore, self._loaded = set(range(len(self._rows))), True
