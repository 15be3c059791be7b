"""What a run leaves: the logs of TensorBoard and Weights & Biases, its curve, and its summary."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO

import msgspec
import numpy as np
from torch.utils.tensorboard import SummaryWriter

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.errors import one_line

from .checkpoint import replaced
from .errors import ScriptError, one_line_for

FLUSH_S = 10  # seconds between flushes, after which other programs can read the logs


def open_writer(directory: str, args: Any, step: int, is_new: bool) -> SummaryWriter:
    """Return a writer of logs to a run's directory, with its flags as a table.

    A resumed run drops the logs after its checkpoint's ``step``.
    """
    with one_line_for(OSError, text=f"cannot write to {directory}"):
        purge_step = step if is_new else step + 1
        writer = SummaryWriter(directory, purge_step=purge_step, flush_secs=FLUSH_S)
    table = "\n".join([f"|{key}|{value}|" for key, value in vars(args).items()])
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", step)
    return writer


class NoWriter(nullcontext[None]):
    """Stands in for a `SummaryWriter` where another learner writes. Its methods write nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def _wandb() -> Iterator[Any]:
    """Import W&B, and turn its own errors in this block into a `ScriptError`."""
    import wandb

    try:
        yield wandb
    except wandb.Error as error:
        says = one_line(error).rstrip(".")
        hint = "without an account, WANDB_MODE=offline logs into files"
        raise ScriptError(f"--track: {says}; {hint}") from error


def log_in() -> None:
    """Log in to Weights & Biases, which asks for the key on a terminal."""
    if os.environ.get("WANDB_MODE", "online") == "online":
        with _wandb() as wandb:
            wandb.login()


def start_wandb(args: Any, name: str, id: str | None) -> Any:
    """Return the run ``name`` in Weights & Biases. If one has that ``id`` already, it continues.

    Videos are not uploaded, because W&B's patch of `RecordVideo` does not support Gymnasium 1.
    """
    with _wandb() as wandb:
        run = wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=name, id=id,
            config=vars(args), save_code=True, sync_tensorboard=True, resume="allow",
        )  # fmt: skip
    wandb.define_metric("*", step_metric="global_step")
    return run


class LearningCurve:
    """Collects episodes and the points of the curve.

    Attributes:
        points: for each report (global_step, mean return of the last 100 episodes, pulls per
            worker, policy versions).
        evaluations: (global_step, mean return) of each evaluation during training.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float, int]] = []
        self.evaluations: list[tuple[int, float]] = []
        self._recent_returns: deque[float] = deque(maxlen=100)
        self._returns: list[float] = []  # of the episodes since the last point
        self._lengths: list[int] = []

    def add_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        self._recent_returns.extend(returns.tolist())
        self._returns += returns.tolist()
        self._lengths += lengths.tolist()

    def add_point(self, global_step: int, pulls: float, versions: int) -> dict[str, float]:
        """Add a point. Return the scalars to log, by name."""
        self.points.append((global_step, self.mean_return, pulls, versions))
        scalars = {"charts/mean_return_100": self.mean_return}
        if self._returns:
            scalars["charts/episodic_return"] = float(np.mean(self._returns))
            scalars["charts/episodic_length"] = float(np.mean(self._lengths))
        self._returns, self._lengths = [], []
        return scalars

    @property
    def mean_return(self) -> float:
        """The mean return of the last 100 episodes; NaN before the first episode."""
        return float(np.mean(self._recent_returns)) if self._recent_returns else float("nan")

    @property
    def best_return(self) -> float:
        """The highest mean return of an evaluation; minus infinity before the first evaluation."""
        return max((mean for _, mean in self.evaluations), default=-math.inf)

    def state_dict(self) -> dict[str, Any]:
        return {
            "points": self.points, "evaluations": self.evaluations,
            "recent": list(self._recent_returns), "returns": self._returns,
            "lengths": self._lengths,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points = msgspec.convert(state["points"], list[tuple[int, float, float, int]])
        self.evaluations = msgspec.convert(state["evaluations"], list[tuple[int, float]])
        self._returns = msgspec.convert(state["returns"], list[float])
        self._lengths = msgspec.convert(state["lengths"], list[int])
        self._recent_returns.extend(msgspec.convert(state["recent"], list[float]))

    def plot(self, title: str, file: BinaryIO) -> None:
        # The import takes half a second, which a run need not wait for at its start.
        from matplotlib.figure import Figure

        steps, returns, pulls, versions = np.array(self.points).reshape(-1, 4).T
        figure = Figure(figsize=(7, 5.5), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        top.plot(steps, returns, color="#0072B2", label="last 100 episodes")
        if self.evaluations:
            top.plot(*zip(*self.evaluations, strict=True), "o-", color="#009E73", label="evaluated")
        top.legend(frameon=False)
        top.set(title=title, ylabel="mean return")
        bottom.plot(steps, versions, "--", color="#555555", label="policy versions")
        bottom.plot(steps, pulls, color="#D55E00", label="pulls per worker")
        bottom.set(xlabel="environment steps", ylabel="cumulative number")
        bottom.legend(frameon=False)
        figure.savefig(file, dpi=150)


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
    """Write ``summary.json`` and ``learning_curve.png`` of a run. Raises OSError if that fails."""
    args = summary["args"]
    with replaced(f"{directory}/summary.json") as file:
        file.write(msgspec.json.format(as_json(summary), indent=2))
    with replaced(f"{directory}/learning_curve.png") as file:
        curve.plot(f"{args['exp_name']} on {args['env_id']}, seed {args['seed']}", file)


def as_json(summary: dict[str, Any]) -> bytes:
    """Return a summary as JSON, with null in place of numbers that are not finite."""
    return msgspec.json.encode(summary, enc_hook=float)  # for NumPy's numbers


def workers_scalars(envs: ClusterEnv, seconds: float) -> dict[str, float]:
    """Return each worker's speed, share of time spent waiting, and lag, by the scalars' names."""
    lags = envs.policy_version - envs.held_versions
    columns = {"SPS": envs.steps, "waiting": envs.waiting_seconds, "policy_lag": lags * seconds}
    return {
        f"workers/{name}_{index}": float(value / seconds)
        for name, values in columns.items()
        for index, value in enumerate(values)
    }
