"""Estimates from few seeds: interquartile means (IQM) with bootstrap intervals.

https://arxiv.org/abs/2108.13264
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import bootstrap, trim_mean

ENOUGH = 5  # the fewest seeds for an interval


def iqm(values: Any, axis: int = 0) -> np.ndarray:
    """Return the mean of the middle half of the values; NaN where a value is missing."""
    return trim_mean(values, 0.25, axis)


def interval(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, resamples: int = 2000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a statistic of samples ``(seeds, ...)``, and the ends of its 95% percentile interval.

    The seeds are resampled, and several samples in pairs. With few seeds the interval would be
    little more than their range, so it is NaN.

    Args:
        statistic: a function of as many arrays as there are samples, along an ``axis``.
        samples: the values of each seed.
        resamples: the number of resamples.
    """
    value = statistic(*samples, axis=0)
    if len(samples[0]) < ENOUGH:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    found = bootstrap(
        samples, statistic, n_resamples=resamples, vectorized=True, paired=True, axis=0,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return value, found.low, found.high
