"""What APS has done so far, and what has been lost, as the user sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .start import Head


class Measures:
    """The attributes of a `ClusterEnv` that tell of its workers, without asking them."""

    _head: Head

    @property
    def policy_version(self) -> int:
        """The version last published; 0 before the first."""
        return self._head.store.version

    @property
    def pulls(self) -> np.ndarray:
        """Weight pulls so far, ``(num_workers,)`` int64."""
        return np.array([worker.copy.pulls for worker in self._head.pool.workers], np.int64)

    @property
    def held_versions(self) -> np.ndarray:
        """The version that each worker holds, ``(num_workers,)`` int64; 0 before its first pull."""
        return np.array([worker.copy.held for worker in self._head.pool.workers], np.int64)

    @property
    def sync_bytes(self) -> int:
        """Bytes of weights sent so far, to all workers."""
        return self._head.store.bytes_sent

    @property
    def divergence(self) -> np.ndarray:
        """Mean KL(policy a worker last acted on || published policy), ``(num_workers,)``.

        It is in nats per action dimension, of which a discrete action has one. It is inf before a
        worker has acted.
        """
        return np.array([worker.copy.divergence for worker in self._head.pool.workers])

    @property
    def hosts(self) -> list[str]:
        """The name of each worker's machine; empty before it has connected."""
        return [worker.process.host for worker in self._head.pool.workers]

    @property
    def steps(self) -> np.ndarray:
        """Environment steps of the rollouts that each worker has sent so far, ``(num_workers,)``
        int64.
        """
        return np.array([worker.steps for worker in self._head.pool.workers], np.int64)

    @property
    def waiting_seconds(self) -> np.ndarray:
        """Seconds that each worker has spent without a request or without weights,
        ``(num_workers,)``.
        """
        return np.array([worker.waited for worker in self._head.pool.workers])

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """One dict for each replaced process: worker, time (Unix), reason, environments' seeds."""
        return list(self._head.recovery.restarts)
