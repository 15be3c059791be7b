"""The workers of several learners as if one had them."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np

from ...env import ClusterEnv
from ..arguments import DIVIDED
from .learners import Learners

SUMS = (
    "workers",
    "pulls",
    "waiting_seconds",
    "sync_bytes",
)  # in a ClusterEnv's state, what is counted


def options_of_one(options: dict[str, Any], learners: Learners, first_row: int) -> dict[str, Any]:
    """Return what one of several learners' `ClusterEnv` takes, of the options for all of them."""
    number = learners.world_size
    divided = {name: options[name] and options[name] // number for name in DIVIDED}
    log_dir = f"{options['log_dir']}/learner-{learners.rank}"
    return (
        options
        | divided
        | {"first_row": first_row, "log_dir": log_dir, "sum_over_learners": learners.sum}
    )


class AllWorkers:
    """The workers of all learners as if one had them, so that a checkpoint fits any number of
    learners.
    """

    def __init__(self, envs: ClusterEnv, learners: Learners) -> None:
        self._envs, self._learners, self._saves = envs, learners, itertools.count()
        self._others: dict[
            int, dict[str, Any]
        ] = {}  # by rank the last known state of others', for the first one

    def state_dict(self) -> dict[str, Any]:
        """Return to the first learner the state of all workers; those of one that has died as it
        was known last.
        """
        own, number = self._envs.state_dict(), self._envs.num_workers
        _, *others = self._learners.hand_in(
            f"workers {next(self._saves)}", msgspec.msgpack.encode(own)
        )
        for rank, data in enumerate(others, 1):
            if data is not None:
                self._others[rank] = state = msgspec.msgpack.decode(data)
                for restart in state["restarts"]:
                    restart["worker"] += rank * number
        return self._joined(own)

    def known(self) -> dict[str, Any]:
        """Return the state of the own workers, and of others' as of the last `state_dict`."""
        return self._joined(self._envs.state_dict())

    def _joined(self, own: dict[str, Any]) -> dict[str, Any]:
        states = [own, *self._others.values()]
        sums = {name: sum(state[name] for state in states) for name in SUMS}
        return (
            own
            | sums
            | {"restarts": [restart for state in states for restart in state["restarts"]]}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up; what is counted for all workers together, the first learner takes."""
        if self._learners.rank > 0:
            state = state | {"sync_bytes": 0, "restarts": []}
        self._envs.load_state_dict(state)

    def totals(self, lags: np.ndarray) -> dict[str, float]:
        """Return what is known of all workers; ``lags`` are in versions, of the own environments."""
        envs = self._envs
        shares = list(map(len, np.array_split(range(envs.num_envs), envs.num_workers)))
        own = [
            envs.num_workers, envs.pulls.sum(), envs.num_envs, envs.divergence @ shares, envs.sync_bytes,
            len(envs.restarts), len(lags), lags.sum(),
        ]  # fmt: skip
        sums = self._learners.sum(np.array(own, np.float64)).tolist()
        workers, pulls, num_envs, kl, sync_bytes, restarts, rows, lag = sums
        return {
            "pulls": pulls / workers, "kl": kl / num_envs, "bytes": int(sync_bytes), "restarts": int(restarts),
            "lag": lag / max(rows, 1),
        }  # fmt: skip
