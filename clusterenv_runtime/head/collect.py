"""Adaptive Policy Synchronization as the user sees it: publish a policy, and let workers act.

Workers act on the published version, or on the version that they hold.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded

from ..arrays.trees import is_batched
from ..envs.blueprint import Blueprint
from ..rollout import Rollout
from ..wire.part import RolloutPart
from ..wire.protocol import Collect, Structure
from .requests import Request, reset_needed
from .start import Head
from .worker import Episodes, State, Worker

if TYPE_CHECKING:
    from ..policy.base import Policy


class Collector:
    """The requests to act, and the rollouts made from the responses.

    Args:
        head: the workers, and the policy's versions.
        blueprint: the environments.
    """

    def __init__(self, head: Head, blueprint: Blueprint) -> None:
        self._pool = head.pool
        self._store = head.store
        self._rule = head.rule
        self._recovery = head.recovery
        self._space = blueprint.layout.single_observation_space
        # For each info key, zeros like its last value; a scalar zero before the first value.
        self._infos = {key: np.zeros(()) for key in blueprint.layout.info_keys}
        self.granted: dict[int, int] = {}  # requests not taken yet, seq -> worker, oldest first
        self.overlapped: int | None = None  # the ``num_steps`` of the rollout requested ahead

    def assert_can_act(self, method: str, num_steps: int) -> None:
        """Raise ValueError or ResetNeeded if no policy can act for ``num_steps`` steps now."""
        if operator.index(num_steps) < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if self._pool.failures.to_reset:
            raise reset_needed(method)
        if self._pool.workers[0].seeds is None:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`.")
        self.assert_arrays()

    def assert_arrays(self) -> None:
        """Raise ValueError if no policy can act on the observations."""
        if not is_batched(self._space):
            raise ValueError(
                f"a policy needs observations that become arrays, got {self._space}: leave out "
                "other parts with the wrapper FilterObservation, or make them arrays, see "
                "docs/policies.md"
            )

    def publish(self, policy: Policy) -> int:
        """Publish the policy's weights as the next version, and return the version's number."""
        self.assert_arrays()
        workers = self._pool.workers
        if self._store.publish(policy, workers[0].episodes.seen):
            for worker in workers:  # nobody waits until the workers have loaded it
                self._pool.forget([self._pool.ask(worker, Structure(), self._store.structure)])
            self._pool.exchange()
        return self._store.version

    def rollout(self, policy: Policy, num_steps: int, overlap: bool) -> Rollout:
        """Publish ``policy``, let workers act, and join their parts; see `ClusterEnv.rollout`."""
        ahead, workers = self.overlapped, self._pool.workers
        if ahead not in (None, num_steps):
            raise ValueError(
                f"the overlapped rollout was requested with {ahead} steps, not {num_steps}"
            )
        self.overlapped = None
        try:
            if ahead is None:
                self.publish(policy)
                self._grant(num_steps, workers)
            seqs = sorted(self.granted, key=self.granted.__getitem__)  # in the order of the rows
            parts = [self._take(request) for request in self._pool.gather(seqs)]
        except BaseException:  # an interrupted rollout leaves no request behind
            self._give_up()
            raise
        self.granted = {}
        if ahead is not None:
            self.publish(policy)
        if overlap:
            try:
                self._grant_ahead(num_steps, workers)
            finally:
                self.overlapped = num_steps if self.granted else None
        return Rollout.join(parts, np.arange(workers[-1].rows.stop), self._infos)

    def send(self, num_steps: int, worker: int | None) -> None:
        """Ask one worker, or all if ``worker`` is None, to act; see `ClusterEnv.send`."""
        if self._store.learners is not None:
            raise ValueError(
                "with several learners, use `rollout` instead of `send`, so that all workers "
                "pull together"
            )
        if self.overlapped is not None:
            raise AlreadyPendingCallError(
                "Calling `send` while an overlapped `rollout` is outstanding.", "rollout"
            )
        workers = self._pool.workers
        if worker is not None and not 0 <= worker < len(workers):
            raise ValueError(f"worker must be 0 to {len(workers) - 1}, got {worker}")
        self._grant_ahead(num_steps, workers if worker is None else [workers[worker]])

    def recv(self, worker: int | None) -> tuple[int, Rollout]:
        """Return a worker's index and its next chunk; see `ClusterEnv.recv`."""
        if self._pool.failures.must_reset:
            raise reset_needed("recv")
        seqs: Collection[int] = self.granted
        if worker is not None:  # a worker answers its oldest request first
            seqs = [seq for seq, index in self.granted.items() if index == worker][:1]
        if not seqs or self.overlapped is not None:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        with self.giving_up_after_errors():
            request = self._pool.first(seqs)
        del self.granted[request.seq]
        part, rows = self._take(request), request.worker.rows
        rollout = Rollout.join([part], np.arange(rows.start, rows.stop), self._infos)
        return request.worker.index, rollout

    def _grant(self, num_steps: int, workers: Sequence[Worker]) -> list[tuple[Worker, Collect]]:
        """Ask these workers to act. Return each worker with its request."""
        requests = self._store.requests([worker.copy for worker in workers], num_steps)
        self._pool.require(*workers)
        granted = list(zip(workers, requests, strict=True))
        for worker, request in granted:
            self._recovery.seed_noise(worker, request)
            self.granted[self._pool.ask(worker, request)] = worker.index
        return granted

    def _grant_ahead(self, num_steps: int, workers: Sequence[Worker]) -> None:
        """Ask these workers to act, and serve all workers until those that pull now have weights.

        These workers then need not wait while the user learns, and they get the weights of this
        version and not of a later one. Each worker decides by itself whether it pulls. The head can
        predict the decision, because both apply the same rule to the same request.
        """
        if not self._store.structure:
            raise ValueError("there is no policy to act on: `publish` one first")
        busy = set(self.granted.values())  # busy workers pull only after their responses
        pulling = [
            worker
            for worker, request in self._grant(num_steps, workers)
            if worker.index not in busy and self._rule.wants_pull(worker.copy.held, request)
        ]

        def have_weights() -> bool:
            return all(
                worker.copy.held == self._store.version or worker.process.state != State.READY
                for worker in pulling
            )

        with self.giving_up_after_errors():
            self._pool.wait_until(have_weights, self.granted)

    def _take(self, request: Request) -> RolloutPart:
        """Return a worker's part, and update what the head knows of the worker."""
        worker, part = request.worker, request.response
        worker.episodes = Episodes.begun(part.next_observations, worker.num_envs)
        worker.rollouts = request.message.rollout + 1
        worker.steps += part.rewards.size
        if request.seq > worker.evaluated:
            worker.evaluated = 0
        if request.process_is_gone:  # its replacement holds no weights
            worker.episodes.lost()
        else:
            self._store.acted(worker.copy, part)
        return part

    @contextlib.contextmanager
    def giving_up_after_errors(self) -> Iterator[None]:
        """Give up all outstanding requests if the block raises an environment's error."""
        try:
            yield
        except BaseException:
            if self._pool.failures.must_reset:
                self._give_up()
            raise

    def _give_up(self) -> None:
        """Forget all outstanding requests. The next rollout gets the same number on all workers."""
        self._pool.forget(self.granted)
        self.granted = {}
        self.overlapped = None
        asked = max(worker.asked_rollouts for worker in self._pool.workers)
        for worker in self._pool.workers:
            worker.asked_rollouts = asked
