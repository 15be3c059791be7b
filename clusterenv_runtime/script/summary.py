"""The summary of a run, ``summary.json``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def summary_of(args: Any, envs: dict[str, Any], eval_returns: np.ndarray) -> dict[str, Any]:
    """Return what the flags, the state of a `ClusterEnv` and an evaluation say of a run."""
    mean, deviation = None, None
    if len(eval_returns):
        mean, deviation = float(eval_returns.mean()), float(eval_returns.std())
    return {
        "pulls_per_worker": envs["pulls"] / envs["workers"], "sync_bytes": envs["sync_bytes"],
        "eval_return_mean": mean, "eval_return_std": deviation,
        "kl_threshold": args.kl_threshold, "seed": args.seed, "env_id": args.env_id,
        "worker_restarts": envs["restarts"], "args": vars(args),
    }  # fmt: skip


def finite(value: Any) -> Any:
    """Return what JSON can hold of a value: None in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
