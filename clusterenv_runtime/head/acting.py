"""Acting on workers: rollouts, requests to act, and evaluations."""

from __future__ import annotations

import logging
import multiprocessing
import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded

from ..arrays import is_batched, map_tree
from ..errors import Interrupted
from ..messages import Collect, Evaluate, Structure
from ..rollout import Evaluation, Rollout
from .recovery import Request, derived, with_fresh
from .stepping import SteppedEnv, reset_needed
from .workers import State, Worker

if TYPE_CHECKING:
    from ..policy.base import Policy

logger = logging.getLogger(__name__)
# Some environments never end an episode; Atari's games end after 27,000 steps at most.
MAX_STEPS = 30_000


class ActingEnv(SteppedEnv):
    """A vector environment whose workers act."""

    # For each info key, zeros like its last value; a scalar zero before the first value.
    _known_infos: dict[str, np.ndarray]

    def rollout(self, policy: Policy, num_steps: int, *, overlap: bool = False) -> Rollout:
        """Publish ``policy``, let all workers act for ``num_steps`` steps, and return the rollout.

        Each worker acts on the published version or on the version that it holds. Nothing crosses
        the network between its first and last step. An episode that ends is reset within the same
        step, regardless of ``autoreset_mode``. With ``overlap``, the next rollout is requested
        before this one is returned: the workers act while you learn, on a policy that is one
        version older.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act in these environments, ``num_steps`` is
                less than 1, or it differs from the overlapped rollout's ``num_steps``.
            Exception: an environment or the policy raised it on a worker. Its cause is an
                `EnvError`.
            WorkerDiedError: too many replacements of a worker have died in a row.
        """
        self._assert_is_running()
        if self._overlapped is None:
            self._assert_idle("rollout")
        self._assert_can_act("rollout", num_steps)
        ahead, workers = self._overlapped, self._pool.workers
        if ahead not in (None, num_steps):
            raise ValueError(
                f"the overlapped rollout was requested with {ahead} steps, not {num_steps}"
            )
        self._overlapped = None
        try:
            if ahead is None:
                self.publish(policy)
                self._grant(num_steps, workers)
            parts = [self._take(request) for request in self._pool.gather([*self._granted])]
        except BaseException:  # an interrupted rollout leaves no request behind
            self._give_up()
            raise
        self._granted = {}
        if ahead is not None:
            self.publish(policy)
        if overlap:
            try:
                self._grant_ahead(num_steps, workers)
            except Interrupted as error:  # the next wait, as this rollout is complete
                self._pool.interrupt = error
            finally:
                self._overlapped = num_steps if self._granted else None
        return Rollout.join(parts, np.arange(self.num_envs), self._known_infos)

    def publish(self, policy: Policy) -> int:
        """Publish the policy's current weights as the next version. Return the version number.

        This also measures each worker's divergence from the new version. `rollout` publishes by
        itself. If it is called before the first `reset`, the workers load torch before they reset
        their environments, and the first rollout does not wait for it.

        Raises:
            ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: the policy cannot act in these environments.
        """
        self._assert_is_running()
        self._assert_batched()
        with self._pool.closing_on_ctrl_c():
            if self._pool.store.publish(policy):
                for worker in self._pool.workers:  # nobody waits until the workers have loaded it
                    self._pool.post(worker, Structure(self._pool.store.structure))
        return self._pool.store.version

    def send(self, num_steps: int, worker: int | None = None) -> None:
        """Ask one worker, or all workers, to act for another ``num_steps`` steps.

        A worker acts on the last published version or on the version that it holds. It answers its
        requests in order, so a worker with more than one request never waits for you. Idle workers
        that will pull get their weights before this method returns. That takes milliseconds, except
        after the first `publish`: then the workers import torch, which takes seconds.

        Raises:
            ResetNeeded, AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            ValueError: no policy has been published, the observations are not arrays,
                ``num_steps`` is less than 1, there is no such worker, or there are several
                learners.
        """
        self._assert_idle("send")
        self._assert_can_act("send", num_steps)
        if self._pool.store.learners is not None:
            raise ValueError(
                "with several learners, use `rollout` instead of `send`, so that all workers "
                "pull together"
            )
        if self._overlapped is not None:
            raise AlreadyPendingCallError(
                "Calling `send` while an overlapped `rollout` is outstanding.", "rollout"
            )
        workers = self._pool.workers
        if worker is not None and not 0 <= worker < len(workers):
            raise ValueError(f"worker must be 0 to {len(workers) - 1}, got {worker}")
        self._grant_ahead(num_steps, workers if worker is None else [workers[worker]])

    def recv(self, worker: int | None = None) -> tuple[int, Rollout]:
        """Wait for the next response to `send`. Return the worker's number and its chunk.

        The chunk is the rollout of the worker's rows. Without ``worker``, the next response of any
        worker is returned.

        Raises:
            NoAsyncCallError: no request of `send` is outstanding.
        """
        self._assert_is_running()
        if self._pool.to_reset and not self._pool.errors:
            raise reset_needed("recv")
        seqs: Collection[int] = self._granted
        if worker is not None:  # a worker answers its oldest request first
            seqs = [seq for seq, index in self._granted.items() if index == worker][:1]
        if not seqs or self._overlapped is not None:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "recv")
        request = self._pool.first(seqs)
        del self._granted[request.seq]
        part, rows = self._take(request), request.worker.rows
        numbers = np.arange(rows.start, rows.stop)
        return request.worker.index, Rollout.join([part], numbers, self._known_infos)

    def evaluate(
        self,
        policy: Policy,
        episodes: int,
        *,
        seed: int = 100_000,
        deterministic: bool = False,
        max_steps: int = MAX_STEPS,
    ) -> Evaluation:
        """Have the workers play ``episodes`` episodes with ``policy``. Return the results.

        All environments play at once, and each plays its share of the episodes. The first episodes
        of each environment count, so that long episodes count as much as short ones. An episode is
        what `Rollout.episodic_returns` counts as one: in Atari, a whole game. Each environment is
        reset with its own seed, ``seed`` plus the environment's number. Its later episodes follow
        from that seed, as in all of Gymnasium's vector environments, and so does the policy's
        noise. Therefore an evaluation gives the same result on any number of workers, except where
        a matrix product rounds differently.

        Afterwards training continues as before, even with outstanding rollouts: versions, pulls and
        noise do not change. The environments of workers that have played begin another episode with
        the next rollout, with seeds that follow from those of `reset`. Before the next `step`, they
        must be `reset`.

        Args:
            policy: the policy to evaluate. It need not be the published one.
            episodes: the number of episodes.
            seed: the seed of the first environment.
            deterministic: whether the policy takes the mode of its distribution instead of drawing
                actions.
            max_steps: the number of steps, or up to 31 fewer than played, after which an unfinished
                episode counts as it is, with a warning. Its environment plays no other one.

        Raises:
            ResetNeeded: an environment has raised an exception, or a step was given up.
            AlreadyPendingCallError, ClosedEnvironmentError: as for `step`.
            TypeError, ValueError: ``policy`` is no `Policy`, an argument is out of range, or an
                episode's return is not finite.
            Exception: an environment or the policy raised it on a worker, a NotImplementedError if
                the policy's distribution has no mode. Its cause is an `EnvError`.
        """
        self.evaluate_async(
            policy, episodes, seed=seed, deterministic=deterministic, max_steps=max_steps
        )
        return self.evaluate_wait()

    def evaluate_async(
        self,
        policy: Policy,
        episodes: int,
        *,
        seed: int = 100_000,
        deterministic: bool = False,
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Start to evaluate the policy as it is now, with the arguments of `evaluate`.

        Until `evaluate_wait` has returned, only `publish`, `recv` and the next overlapped `rollout`
        may be called.
        """
        self._assert_idle("evaluate")
        self._assert_batched()
        episodes, seed, max_steps = map(operator.index, (episodes, seed, max_steps))
        least = {"episodes": (episodes, 1), "seed": (seed, 0), "max_steps": (max_steps, 1)}
        for name, (number, smallest) in least.items():
            if number < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {number}")
        pool = self._pool
        if pool.to_reset:
            raise reset_needed("evaluate")
        # This module imports torch, which the policy has imported already.
        from ..policy.tensors import check_policy, flat_weights, numbers_of, pickled

        check_policy(policy)
        structure, numbers = pickled(policy), numbers_of(policy)
        weights = [part.cpu().numpy() for part in flat_weights(policy)]
        # How many episodes each environment plays is fixed before they begin. If instead the first
        # episodes to end in any environment counted, too many of them would be short.
        shares = np.diff([episodes * row // self.num_envs for row in range(self.num_envs + 1)])
        pool.require(*pool.workers)
        with pool.closing_on_ctrl_c():
            for worker in pool.workers:
                if (own := shares[worker.rows]).any():
                    request = Evaluate(
                        structure,
                        weights,
                        numbers,
                        bool(deterministic),
                        own.tolist(),
                        seed,
                        max_steps,
                        _seeds_after(worker),
                    )
                    worker.evaluated = pool.ask(worker, request)
                    self._evaluation.append(worker.evaluated)

    def evaluate_wait(self, timeout: float | None = None) -> Evaluation:
        """Wait for the evaluation to end, and return its results.

        Raises:
            multiprocessing.TimeoutError: the evaluation has not ended within ``timeout`` seconds.
                It goes on: call this method again. A ``timeout`` of 0 only checks for the end.
            NoAsyncCallError: no evaluation is under way.
        """
        self._assert_is_running()
        if not self._evaluation:
            raise NoAsyncCallError(
                "Calling `evaluate_wait` without any prior call to `evaluate_async`.", "evaluate"
            )
        pool, seqs = self._pool, self._evaluation
        try:
            if pool.to_reset and not pool.errors:
                raise reset_needed("evaluate_wait")
            pool.settle(seqs, timeout)
        except multiprocessing.TimeoutError:
            raise
        except BaseException:
            pool.forget(seqs)
            self._evaluation = []
            raise
        self._evaluation = []
        requests = pool.gather(seqs)
        parts = zip(*(request.response for request in requests), strict=True)
        evaluation = Evaluation(*map(np.concatenate, parts))
        if left := np.count_nonzero(~evaluation.ended):
            logger.warning(
                "%d of %d episodes of the evaluation had not ended after %d steps: their returns "
                "up to then count",
                left,
                len(evaluation.ended),
                requests[0].message.max_steps,
            )
        return evaluation

    # Requests.
    def _assert_can_act(self, method: str, num_steps: int) -> None:
        if operator.index(num_steps) < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if self._pool.to_reset:
            raise reset_needed(method)
        if self._pool.workers[0].seeds is None:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`.")
        self._assert_batched()

    def _assert_batched(self) -> None:
        if not is_batched(self.single_observation_space):
            raise ValueError(
                "a policy needs observations that become arrays, got "
                f"{self.single_observation_space}: leave out other parts with the wrapper "
                "FilterObservation, or make them arrays, see docs/policies.md"
            )

    def _grant(self, num_steps: int, workers: Sequence[Worker]) -> list[tuple[Worker, Collect]]:
        """Ask these workers to act. Return each worker with its request."""
        pool = self._pool
        requests = pool.store.requests([worker.copy for worker in workers], num_steps)
        pool.require(*workers)
        granted = list(zip(workers, requests, strict=True))
        with pool.closing_on_ctrl_c():
            for worker, request in granted:
                pool.seed_noise(worker, request)
                self._granted[pool.ask(worker, request)] = worker.index
        return granted

    def _grant_ahead(self, num_steps: int, workers: Sequence[Worker]) -> None:
        """Ask these workers to act, and serve all workers until those that pull now have weights.

        These workers then need not wait while the user learns, and they get the weights of this
        version and not of a later one. Each worker decides by itself whether it pulls. The head can
        predict the decision, because both apply the same rule to the same request.
        """
        store = self._pool.store
        if not store.structure:
            raise ValueError("there is no policy to act on: `publish` one first")
        busy = set(self._granted.values())  # busy workers pull only after their responses
        pulling = [
            worker
            for worker, request in self._grant(num_steps, workers)
            if worker.index not in busy and self._pool.rule.wants_pull(worker.copy.held, request)
        ]

        def have_weights() -> bool:
            return all(
                worker.copy.held == store.version or worker.process.state != State.READY
                for worker in pulling
            )

        self._pool.wait_until(have_weights, self._granted)

    def _take(self, request: Request) -> Any:
        """Return a worker's `Part`, and update what the head knows of the worker."""
        worker, part = request.worker, request.response
        # These are few, so their stacks are gathered here.
        part.final_observations = map_tree(np.asarray, part.final_observations)
        part.next_observations = map_tree(np.asarray, part.next_observations)
        self._pool.note_seen(request, part.next_observations, np.zeros(worker.num_envs, bool))
        worker.rollouts = request.message.rollout + 1
        worker.steps += part.rewards.size
        worker.waited += part.waited
        if request.seq > worker.evaluated:
            worker.evaluated = 0
        if not request.process_is_gone:  # otherwise its replacement holds no weights
            self._pool.store.acted(worker.copy, part)
        return part

    def _assert_idle(self, method: str) -> None:
        if self._pool.to_reset and not self._pool.errors:  # an environment has raised
            self._give_up()
        super()._assert_idle(method)

    def _give_up(self) -> None:
        """Forget all outstanding requests. The next rollout gets the same number on all workers."""
        self._pool.forget(self._granted)
        self._granted = {}
        self._overlapped = None
        asked = max(worker.asked_rollouts for worker in self._pool.workers)
        for worker in self._pool.workers:
            worker.asked_rollouts = asked


def _seeds_after(worker: Worker) -> list[int]:
    """Return the seeds with which a worker's environments continue after an evaluation.

    They are derived from the last seeds, or random if there are none.
    """
    if worker.seeds is None:
        return with_fresh([None] * worker.num_envs)
    worker.seeds = derived(worker.seeds, 1)
    return with_fresh(worker.seeds)
