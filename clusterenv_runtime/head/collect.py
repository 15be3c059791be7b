"""Adaptive Policy Synchronization as the user sees it: publish, and let workers act on that policy
or on their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded

from ..arrays.spaces import is_batched
from ..envs.blueprint import Blueprint
from ..rollout import Rollout
from ..wire.part import RolloutPart
from ..wire.protocol import Collect, Structure
from .episodes import Episodes
from .handle import Served, State, WorkerHandle
from .start import Head

if TYPE_CHECKING:
    from ..policy.base import Policy


class Collector:
    """What workers were asked to act, and what becomes of their parts.

    Args:
        head: the workers, and the policy's versions.
        blueprint: their environments.
    """

    def __init__(self, head: Head, blueprint: Blueprint) -> None:
        self._pool, self._store, self._rule, self._recovery = (
            head.pool,
            head.store,
            head.rule,
            head.recovery,
        )
        self._space = space = blueprint.single_observation_space
        self._is_batched = is_batched(space)
        self._infos = {
            key: np.zeros(()) for key in blueprint.info_keys
        }  # what one is like, as far as is known
        self.granted: dict[
            int, int
        ] = {}  # seq -> worker, of requests to act that are outstanding, oldest first
        self.overlapped: int | None = None  # the steps of the rollout that was requested ahead

    @contextlib.contextmanager
    def _gives_up_after_error(self) -> Iterator[None]:
        """Give up all that is outstanding if an environment raises meanwhile; what else is raised
        leaves it.
        """
        try:
            yield
        except BaseException:
            if self._has_raised:
                self._give_up()
            raise

    def _give_up(self) -> None:
        """Forget all that is outstanding; the next rollout has the same number on all workers
        again.
        """
        self._pool.forget(self.granted)
        self.granted = {}
        asked = max(worker.asked_rollouts for worker in self._pool.workers)
        for worker in self._pool.workers:
            worker.asked_rollouts = asked

    @property
    def _has_raised(self) -> bool:
        """Whether an environment has raised since all were reset, and the user knows."""
        return bool(self._pool.failed) and not self._pool.errors

    def assert_can_act(self, method: str, num_steps: int, was_reset: bool) -> None:
        """Raise ValueError or ResetNeeded if a policy cannot act for so many steps, after a reset,
        and no error.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if not was_reset or self._pool.failed:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`.")
        self._assert_arrays()

    def _assert_arrays(self) -> None:
        if not self._is_batched:
            instead = "leave out what does not with the wrapper FilterObservation, or make it one, see docs/policies.md"
            raise ValueError(
                f"a policy needs observations that become arrays, got {self._space}: {instead}"
            )

    def publish(self, policy: Policy) -> int:
        """Make the policy's weights the next version, and return its number."""
        self._assert_arrays()
        if self._store.publish(policy, self._pool.workers[0].episodes.seen):
            for worker in (
                self._pool.workers
            ):  # each answers when it has loaded it, and nobody waits for that
                self._pool.forget([self._pool.ask(worker, Structure(), self._store.structure)])
            self._pool.exchange()
        return self._store.version

    def rollout(self, policy: Policy, num_steps: int, overlap: bool) -> Rollout:
        """Publish ``policy``, let all workers act, and join their parts; see `ClusterEnv.rollout`."""
        if self.overlapped not in (None, num_steps):
            raise ValueError(
                f"the overlapped rollout was requested with {self.overlapped} steps, not {num_steps}"
            )
        was_ahead, self.overlapped = self.overlapped is not None, None
        try:
            if not was_ahead:
                self._grant(num_steps, self._pool.workers, policy)
            seqs = sorted(self.granted, key=self.granted.__getitem__)
            parts = [self._open(served) for served in self._pool.gather(seqs)]
        except BaseException:  # also of an interrupted rollout nothing is left
            self._give_up()
            raise
        self.granted = {}
        if was_ahead:
            self.publish(policy)
        if overlap:
            try:
                self._ask_ahead(num_steps, self._pool.workers)
            finally:
                self.overlapped = num_steps if self.granted else None
        return Rollout.join(parts, np.arange(self._pool.workers[-1].rows.stop), self._infos)

    def send(self, num_steps: int, worker: int | None) -> None:
        """Ask this worker, or all, to act; see `ClusterEnv.send`."""
        if self._store.is_of_several_learners:
            raise ValueError(
                "with several learners there is `rollout`, and no `send`, so that all workers pull together"
            )
        if self.overlapped is not None:
            raise AlreadyPendingCallError(
                "Calling `send` while an overlapped `rollout` is outstanding.", "rollout"
            )
        workers = self._pool.workers
        if worker is not None and not 0 <= worker < len(workers):
            raise ValueError(f"worker must be 0 to {len(workers) - 1}, got {worker}")
        self._ask_ahead(num_steps, workers if worker is None else [workers[worker]])

    def _ask_ahead(self, num_steps: int, workers: Sequence[WorkerHandle]) -> None:
        """Ask these workers to act, and serve all until those that will pull have their weights."""
        if not self._store.structure:
            raise ValueError("there is no policy to act on: `publish` it first")
        busy = set(self.granted.values())
        pulling = []  # workers that have nothing else to do, and that will ask for weights now
        for worker, request in self._grant(num_steps, workers):
            if worker.index not in busy and self._rule.wants_pull(worker.copy.held, request):
                pulling.append(worker)

        def lacks_weights(worker: WorkerHandle) -> bool:
            return worker.state == State.READY and worker.copy.held != self._store.version

        # Answered now, so that they need not wait until you have learned, and get these weights and
        # no later ones.
        with self._gives_up_after_error():
            self._pool.wait_until(
                lambda: self._pool.errors or not any(map(lacks_weights, pulling)), self.granted
            )

    def _grant(
        self, num_steps: int, workers: Sequence[WorkerHandle], policy: Policy | None = None
    ) -> list[tuple[WorkerHandle, Collect]]:
        """Publish ``policy``, if there is a new one, and ask these workers to act."""
        if policy is not None:
            self.publish(policy)
        requests = self._store.requests([worker.copy for worker in workers], num_steps)
        self._pool.require(*workers)
        granted = list(zip(workers, requests, strict=True))
        self._recovery.is_loaded = False
        for worker, request in granted:
            request.seed, request.rollout = self._recovery.seed, worker.asked_rollouts
            self.granted[self._pool.ask(worker, request)] = worker.index
            worker.asked_rollouts += 1
        return granted

    def recv(self, worker: int | None) -> tuple[int, Rollout]:
        """Return the next answer to `send`, of this worker or of whichever is first; see
        `ClusterEnv.recv`.
        """
        if self._has_raised:
            raise ResetNeeded(
                "Cannot call `recv` before all environments are `reset`, as one has raised."
            )
        seqs: Collection[int] = self.granted  # of all; or the oldest of one
        if worker is not None:
            seqs = [seq for seq, index in self.granted.items() if index == worker][:1]
        if not seqs or self.overlapped is not None:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        with self._gives_up_after_error():
            served = self._pool.first(seqs)
        index = self.granted.pop(served.request.seq)
        part, rows = self._open(served), self._pool.workers[index].rows
        return index, Rollout.join([part], np.arange(rows.start, rows.stop), self._infos)

    def _open(self, served: Served) -> RolloutPart:
        """Return a worker's part, and note what it tells of the worker."""
        worker, part = self._pool.workers[served.request.worker], served.message
        worker.episodes = Episodes(part.next_observations, np.zeros(worker.num_envs, bool))
        worker.rollouts = served.request.message.rollout + 1
        if served.is_last:  # its process has been replaced since, and holds nothing
            worker.episodes.lost()
        else:
            self._store.acted(worker.copy, part)
        return part
