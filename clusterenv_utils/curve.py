"""The learning curve of a run.

It consists of the returns of episodes and of evaluations, and the policy's pulls and versions.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, BinaryIO

import msgspec
import numpy as np


def on_grid(
    places: np.ndarray, values: np.ndarray, grid: np.ndarray, last: bool = False
) -> np.ndarray:
    """Return values at the points of an ascending grid, ``(points,)`` float64.

    A point gets the mean of the values since the previous point, or with ``last`` the last of these
    values. A point without values repeats the previous point. Points before the first value are
    NaN.

    Args:
        places: the positions of the values, ``(number,)``.
        values: ``(number,)``.
        grid: ``(points,)``. Values beyond its end do not count.
        last: whether to take the last value, for numbers that only grow.
    """
    points = np.searchsorted(grid, places)
    found = np.full(len(grid), np.nan)
    filled = np.full(len(grid), -1)
    for point in np.unique(points[points < len(grid)]):
        new = values[points == point]
        found[point] = new[-1] if last else new.mean()
        filled[point] = point
    latest = np.maximum.accumulate(filled)
    return np.where(latest < 0, np.nan, found[latest])


class LearningCurve:
    """Collects episodes and the points of the curve.

    Attributes:
        points: (global_step, mean return, pulls per worker, policy versions).
        evaluations: (global_step, mean return) of each policy that was evaluated during training.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float, int]] = []
        self.evaluations: list[tuple[int, float]] = []
        self._recent_returns: deque[float] = deque(maxlen=100)
        self._returns: list[float] = []  # the returns of the episodes since the last point
        self._lengths: list[int] = []

    def add_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        self._recent_returns.extend(returns.tolist())
        self._returns += returns.tolist()
        self._lengths += lengths.tolist()

    def add_point(self, global_step: int, pulls: float, versions: int) -> dict[str, float]:
        """Add a point. Return the scalars to log, by name.

        They are the mean return of the last 100 episodes, and means over the episodes since the
        previous point.
        """
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
