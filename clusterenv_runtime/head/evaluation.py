"""The evaluation of a policy on the workers, in their training environments."""

from __future__ import annotations

import logging
import multiprocessing
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.error import NoAsyncCallError

from ..arrays.trees import map_tree
from ..envs.blueprint import Blueprint
from ..errors import DeadlineError, one_line
from ..rollout import Evaluation
from ..wire.protocol import Evaluate
from .recovery import with_fresh
from .requests import reset_needed
from .start import Head
from .worker import Worker

if TYPE_CHECKING:
    from ..policy.base import Policy

logger = logging.getLogger(__name__)
# Some environments never end an episode; Atari's games end after 27,000 steps at most.
MAX_STEPS = 30_000


class Evaluator:
    """The evaluation that is under way, and its result.

    Args:
        head: the workers.
        blueprint: the environments.
    """

    def __init__(self, head: Head, blueprint: Blueprint) -> None:
        self._pool = head.pool
        layout = blueprint.layout
        self._spaces = layout.single_observation_space, layout.single_action_space
        self._seqs: list[int] = []  # the requests of the evaluation under way
        self._max_steps = 0  # its limit of steps per episode

    @property
    def is_pending(self) -> bool:
        return bool(self._seqs)

    def ask(
        self,
        policy: Policy,
        episodes: int,
        seed: int = 100_000,
        deterministic: bool = False,
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Have the workers play episodes; see `ClusterEnv.evaluate`.

        The policy is not published, and no worker pulls: the requests carry the weights.
        """
        episodes, seed, max_steps = map(operator.index, (episodes, seed, max_steps))
        least = {"episodes": (episodes, 1), "seed": (seed, 0), "max_steps": (max_steps, 1)}
        for name, (number, smallest) in least.items():
            if number < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {number}")
        self._assert_none_has_raised("evaluate")
        workers = self._pool.workers
        seen = workers[0].episodes.seen
        numbers, buffers = _packed(policy, *self._spaces, seen, deterministic)
        shares = shares_of(episodes, workers[-1].rows.stop)
        self._pool.require(*workers)
        self._max_steps = max_steps
        for worker in workers:
            if any(own := shares[worker.rows]):
                seeds = _seeds_after(worker)
                request = Evaluate(own, seed, bool(deterministic), max_steps, numbers, seeds)
                worker.evaluated = self._pool.ask(worker, request, *buffers)
                self._seqs.append(worker.evaluated)
        self._pool.exchange()

    def wait(self, timeout: float | None) -> Evaluation:
        """Return the result of the evaluation; see `ClusterEnv.evaluate_wait`."""
        if not self.is_pending:
            text = "Calling `evaluate_wait` without any prior call to `evaluate_async`."
            raise NoAsyncCallError(text, "evaluate")
        try:
            self._assert_none_has_raised("evaluate_wait")
            self._pool.settle(self._seqs, timeout)
        except DeadlineError as error:
            text = f"The call to `evaluate_wait` has timed out after {timeout} second(s). {error}"
            raise multiprocessing.TimeoutError(text) from None
        except BaseException:
            self._pool.forget(self._seqs)
            self._seqs = []
            raise
        seqs, self._seqs = self._seqs, []
        parts = [request.response.value for request in self._pool.gather(seqs)]
        evaluation = Evaluation(*map(np.concatenate, zip(*parts, strict=True)))
        if left := np.count_nonzero(~evaluation.ended):
            text = "%d of %d episodes of the evaluation had not ended after %d steps"
            counts = f"{text}: their returns up to then count"
            logger.warning(counts, left, len(evaluation.ended), self._max_steps)
        return evaluation

    def _assert_none_has_raised(self, method: str) -> None:
        if self._pool.failures.must_reset:
            raise reset_needed(method)


def _packed(
    policy: Policy, space: Space, action_space: Space, seen: Any, deterministic: bool
) -> tuple[list[float], list[Any]]:
    """Return a policy's numbers, and buffers with its structure and its weights.

    The arguments are those of `probe`, and `Evaluate.deterministic`.

    Raises:
        TypeError: ``policy`` is not a `Policy`.
        ValueError: the policy cannot act in these environments, or ``deterministic`` is True and
            its distribution has no mode.
    """
    # These modules import torch, which the policy has imported already.
    import torch

    from ..policy.probe import probe
    from ..policy.structure import check_policy, pickled
    from ..policy.tensors import flat_weights, numbers_of

    check_policy(policy)
    params = probe(policy, space, action_space, seen).example["params"]
    if deterministic:
        try:
            policy.mode(map_tree(torch.from_numpy, params))
        except Exception as error:
            text = f"the policy's distribution has no mode: {one_line(error)}"
            raise ValueError(f"{text}; evaluate it with its noise") from error
    weights = [part.cpu().numpy().data for part in flat_weights(policy)]
    return numbers_of(policy), [pickled(policy), *weights]


def shares_of(episodes: int, num_envs: int) -> list[int]:
    """Return how many episodes each environment plays. These numbers differ by one at most.

    They are fixed before the episodes begin. If instead the first episodes to end in any
    environment counted, too many of them would be short.
    """
    firsts = [episodes * row // num_envs for row in range(num_envs + 1)]
    return np.diff(firsts).tolist()


def _seeds_after(worker: Worker) -> list[int]:
    """Return the seeds with which a worker's environments continue training.

    They are derived from the last seeds, or random if there are none.
    """
    if worker.seeds is None:
        return with_fresh([None] * worker.num_envs)
    # Some environments take only seeds of 31 bits.
    worker.seeds = [
        None if seed is None else int(np.random.SeedSequence([seed, 1]).generate_state(1)[0] >> 1)
        for seed in worker.seeds
    ]
    return with_fresh(worker.seeds)
