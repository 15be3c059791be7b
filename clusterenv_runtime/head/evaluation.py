"""The evaluation of a policy on the workers, in the environments in which it trains."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded

from ..rollout import Evaluation
from ..wire.protocol import Evaluate
from .start import Head
from .worker import Worker

if TYPE_CHECKING:
    from ..policy.base import Policy

logger = logging.getLogger(__name__)


def evaluate(
    head: Head,
    spaces: tuple[Space, Space],
    policy: Policy,
    episodes: int,
    seed: int,
    deterministic: bool,
    max_steps: int,
) -> Evaluation:
    """Have the workers play episodes in environments of these spaces, of an observation and an
    action; see `ClusterEnv.evaluate`.

    The policy is not published, and no worker pulls: each evaluation brings its own weights.
    """
    # This brings torch, as the policy has by now.
    from ..policy.player import packed

    least = {"episodes": (episodes, 1), "seed": (seed, 0), "max_steps": (max_steps, 1)}
    for name, (number, smallest) in least.items():
        if number < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {number}")
    pool = head.pool
    if pool.failures.to_reset:
        raise ResetNeeded("Cannot call `evaluate` before calling `reset`, as one has raised.")
    seen = pool.workers[0].episodes.seen
    numbers, buffers = packed(policy, *spaces, seen, deterministic)
    shares = shares_of(episodes, pool.workers[-1].rows.stop)
    pool.require(*pool.workers)
    seqs = []
    for worker in pool.workers:
        if any(own := shares[worker.rows]):
            seeds = _seeds_after(worker)
            request = Evaluate(own, seed, deterministic, max_steps, numbers, seeds)
            worker.evaluated = pool.ask(worker, request, *buffers)
            seqs.append(worker.evaluated)
    parts = [request.response.value for request in pool.gather(seqs)]
    evaluation = Evaluation(*map(np.concatenate, zip(*parts, strict=True)))
    if left := np.count_nonzero(~evaluation.ended):
        text = "%d of %d episodes of the evaluation had not ended after %d steps"
        counts = f"{text}: what they had returned by then counts"
        logger.warning(counts, left, episodes, max_steps)
    return evaluation


def shares_of(episodes: int, num_envs: int) -> list[list[int]]:
    """Return which episodes each environment plays: as many as any other, or one more.

    This is settled before they begin. Of the first episodes that end, wherever they do, too many
    would be short.
    """
    firsts = [episodes * row // num_envs for row in range(num_envs + 1)]
    return [list(range(*pair)) for pair in zip(firsts[:-1], firsts[1:], strict=True)]


def _seeds_after(worker: Worker) -> list[int | None]:
    """Return the seeds with which a worker's environments go on training; they follow from those
    before.
    """
    if worker.seeds is None:
        return [None] * worker.num_envs
    # Some environments take only 31 bits.
    worker.seeds = [
        None if seed is None else int(np.random.SeedSequence([seed, 1]).generate_state(1)[0] >> 1)
        for seed in worker.seeds
    ]
    return worker.seeds
