"""Adaptive Policy Synchronization as the user sees it: publish a policy, let workers act on it or on the one they hold."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded

from .errors import ProtocolError
from .head.handle import State, WorkerHandle
from .head.pool import ServedRequest, WorkerPool
from .protocol import Structure
from .rollout import Rollout, RolloutPart
from .spaces import is_batched
from .sync import SyncRule
from .versions import PolicyStore

if TYPE_CHECKING:
    from .policy import Policy

logger = logging.getLogger(__name__)


class Collector:
    """What workers were asked to act, and what becomes of their parts.

    Args:
        pool, store: the workers, and the policy's versions.
        rule: when they pull.
        space: the single observation space.
    """

    def __init__(self, pool: WorkerPool, store: PolicyStore, rule: SyncRule, space: Space) -> None:
        self._pool, self._store, self._rule, self._space = pool, store, rule, space
        self._granted: dict[int, int] = {}  # seq -> worker, of requests to act that are outstanding, oldest first
        self._overlapped: int | None = None  # the steps of the rollout that was requested ahead

    def assert_idle(self, method: str) -> None:
        """Raise AlreadyPendingCallError if workers were asked to act, and have not been heard."""
        if self._granted:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `send` to complete.", "send"
            )

    def assert_can_act(self, method: str, num_steps: int, was_reset: bool) -> None:
        """Raise ValueError or ResetNeeded if a policy cannot act for so many steps."""
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if not was_reset:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`.")
        if not is_batched(self._space):
            raise ValueError(f"a policy needs observations that become arrays, got {self._space}")

    @property
    def has_overlapped(self) -> bool:
        """Whether a rollout was requested ahead."""
        return self._overlapped is not None

    def publish(self, policy: Policy) -> int:
        """Make the policy's weights the next version, and return its number."""
        if self._store.publish(policy):
            for worker in self._pool.workers:  # each answers when it has loaded it, and nobody waits for that
                self._pool.forget([self._pool.ask(worker, Structure(), self._store.structure)])
        return self._store.version

    def rollout(self, policy: Policy, num_steps: int, overlap: bool) -> Rollout:
        """Publish ``policy``, let all workers act, and join their parts; see `ClusterEnv.rollout`."""
        if self._overlapped not in (None, num_steps):
            raise ValueError(f"the overlapped rollout was requested with {self._overlapped} steps, not {num_steps}")
        was_ahead, self._overlapped = self.has_overlapped, None
        if not was_ahead:
            self.publish(policy)
        try:
            if not was_ahead:
                self.send(num_steps, self._pool.workers)
            seqs = sorted(self._granted, key=self._granted.__getitem__)
            parts = [self._open(served) for served in self._pool.gather(seqs)]
        finally:  # also of an interrupted rollout nothing is left
            self._pool.forget(self._granted)
            self._granted = {}
        if was_ahead:
            self.publish(policy)
        if overlap:
            try:
                self.send(num_steps, self._pool.workers)
            finally:
                self._overlapped = num_steps if self._granted else None
        return Rollout.join(self._space, parts, np.arange(self._pool.workers[-1].rows.stop))

    def send(self, num_steps: int, workers: Sequence[WorkerHandle]) -> None:
        """Ask these workers to act, and serve all until those that will pull have their weights."""
        if not self._store.version:
            raise ValueError("there is no policy to act on: `publish` it first")
        busy = set(self._granted.values())
        pulling = []  # workers that have nothing else to do, and that will ask for weights now
        divergence = self._store.mean_divergence(worker.copy for worker in workers)  # one for all: they pull together
        for worker in workers:
            request = self._store.request(worker.copy, num_steps, divergence)
            if self._rule.wants_pull(worker.copy.held, request) and worker.index not in busy:
                pulling.append(worker)
            self._granted[self._pool.ask(worker, request, *worker.take_generator())] = worker.index

        def lacks_weights(worker: WorkerHandle) -> bool:
            return worker.state == State.READY and worker.copy.held != self._store.version

        # Answered now, so that they need not wait until you have learned, and get these weights and no later ones.
        self._pool.wait_until(lambda: self._pool.has_failed or not any(map(lacks_weights, pulling)), self._granted)

    def recv(self, worker: int | None) -> tuple[int, Rollout]:
        """Return the next answer to `send`, of this worker or of whichever is first; see `ClusterEnv.recv`."""
        seqs: Collection[int] = self._granted  # of all; or the oldest of one
        if worker is not None:
            seqs = [seq for seq, index in self._granted.items() if index == worker][:1]
        if not seqs:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        served = self._pool.first(seqs)
        index = self._granted.pop(served[0].seq)
        part, rows = self._open(served), self._pool.workers[index].rows
        return index, Rollout.join(self._space, [part], np.arange(rows.start, rows.stop))

    def _open(self, served: ServedRequest) -> RolloutPart:
        """Return a worker's part, and note what it tells of the worker."""
        request, message, buffers = served
        worker = self._pool.workers[request.worker]
        num_envs = worker.rows.stop - worker.rows.start
        try:
            part = RolloutPart.unpack(message.part, buffers, self._space, request.message.num_steps, num_envs)
        except ProtocolError as error:
            raise ProtocolError(f"{worker.describe()}: {error}") from None
        self._store.acted(worker.copy, part)
        worker.episodes.saw(part.next_observations)
        return part
