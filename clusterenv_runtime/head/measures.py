"""The attributes that show the user what APS has done so far, and which processes were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .start import Head


class Measures:
    """The attributes of a `ClusterEnv` that describe its workers. Reading them asks no worker."""

    _head: Head

    @property
    def policy_version(self) -> int:
        """The last published policy version; 0 before the first."""
        return self._head.store.version

    @property
    def pulls(self) -> np.ndarray:
        """The number of each worker's pulls so far, ``(num_workers,)`` int64."""
        return np.array([worker.copy.pulls for worker in self._head.pool.workers], np.int64)

    @property
    def held_versions(self) -> np.ndarray:
        """The version that each worker holds, ``(num_workers,)`` int64; 0 before its first pull."""
        return np.array([worker.copy.held for worker in self._head.pool.workers], np.int64)

    @property
    def sync_bytes(self) -> int:
        """The bytes of weights sent to all workers so far."""
        return self._head.store.bytes_sent

    @property
    def divergence(self) -> np.ndarray:
        """The mean KL(policy a worker last acted on || published policy), ``(num_workers,)``.

        The divergence is in nats per action dimension; a discrete action has one dimension. It is
        inf before a worker has acted.
        """
        return np.array([worker.copy.divergence for worker in self._head.pool.workers])

    @property
    def hosts(self) -> list[str]:
        """The name of each worker's machine; empty before the worker has connected."""
        return [worker.process.host for worker in self._head.pool.workers]

    @property
    def steps(self) -> np.ndarray:
        """The environment steps in each worker's rollouts so far, ``(num_workers,)`` int64."""
        return np.array([worker.steps for worker in self._head.pool.workers], np.int64)

    @property
    def waiting_seconds(self) -> np.ndarray:
        """The seconds that each worker has waited for requests or weights, ``(num_workers,)``."""
        return np.array([worker.waited for worker in self._head.pool.workers])

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """One dict per replaced process: worker, time (Unix), reason, and seeds.

        The seeds are those by which the replacement resets its environments first.
        """
        return list(self._head.recovery.restarts)
