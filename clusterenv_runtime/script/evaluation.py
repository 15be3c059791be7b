"""The evaluation of a script's policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..env import ClusterEnv
from ..policy.base import Policy
from .progress import say

FIRST_SEED = 100_000  # so far the seeds are from those of training


def evaluate(args: Any, envs: ClusterEnv, policy: Policy) -> np.ndarray:
    """Have the workers play --eval-episodes episodes, and return their returns,
    ``(eval_episodes,)``.
    """
    if not args.eval_episodes:
        return np.empty(0)
    workers = min(envs.num_workers, args.eval_episodes)
    plurals = "s" * (args.eval_episodes > 1), "s" * (workers > 1)
    say(f"evaluating {args.eval_episodes} episode{plurals[0]} on {workers} worker{plurals[1]}")
    seed = args.seed + FIRST_SEED
    is_deterministic = args.eval_deterministic
    return envs.evaluate(
        policy, args.eval_episodes, seed=seed, deterministic=is_deterministic
    ).returns
