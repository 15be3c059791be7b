"""The results of a run: its summary, and the plot of its learning curve."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from .checkpoint import replaced
from .curve import LearningCurve


def summary_of(
    args: Any, envs: dict[str, Any], curve: LearningCurve, eval_returns: np.ndarray
) -> dict[str, Any]:
    """Return a run's summary, from its flags, the state of its `ClusterEnv`, its learning curve and
    the returns of its final evaluation.
    """
    mean, deviation = None, None
    if len(eval_returns):
        mean, deviation = float(eval_returns.mean()), float(eval_returns.std())
    return {
        "mean_return_100": curve.mean_return, "evaluations": curve.evaluations,
        "pulls_per_worker": envs["pulls"] / envs["workers"], "sync_bytes": envs["sync_bytes"],
        "eval_return_mean": mean, "eval_return_std": deviation,
        "kl_threshold": args.kl_threshold, "seed": args.seed, "env_id": args.env_id,
        "worker_restarts": envs["restarts"], "args": vars(args),
    }  # fmt: skip


def write_results(directory: str, summary: dict[str, Any], curve: LearningCurve) -> None:
    """Write ``summary.json`` and ``learning_curve.png`` of a run.

    Raises:
        OSError: a file cannot be written.
    """
    args = summary["args"]
    with replaced(f"{directory}/summary.json") as file:
        file.write(msgspec.json.format(as_json(summary), indent=2))
    with replaced(f"{directory}/learning_curve.png") as file:
        curve.plot(f"{args['exp_name']} on {args['env_id']}, seed {args['seed']}", file)


def as_json(summary: dict[str, Any]) -> bytes:
    """Return a summary as JSON, with null in place of numbers that are not finite."""
    return msgspec.json.encode(summary, enc_hook=float)  # for NumPy's numbers
