"""Estimates from few seeds: interquartile means (IQM) with bootstrap intervals,
https://arxiv.org/abs/2108.13264.
"""

import numpy as np

ENOUGH = 5  # seeds for an interval


def iqm(values, axis=0):
    """Return the mean of the middle half; NaN where a value is missing."""
    size, cut = np.shape(values)[axis], np.shape(values)[axis] // 4
    middle = np.take(
        np.partition(values, (cut, size - cut - 1), axis), range(cut, size - cut), axis
    )
    return np.where(np.isnan(values).any(axis), np.nan, middle.mean(axis))


def difference(a, b, axis=0):
    return iqm(a, axis) - iqm(b, axis)


def interval(statistic, *samples, resamples=2000):
    """Return a statistic of samples (seeds, ...), paired if there are several, and its 95%
    percentile interval.

    With few seeds the interval would be little but their range, so it is NaN.
    """
    draws = np.random.default_rng(0).integers(len(samples[0]), size=(resamples, len(samples[0])))
    found = statistic(*(sample[draws] for sample in samples), axis=1)
    low, high = np.percentile(found, [2.5, 97.5], axis=0) + (
        0 if len(samples[0]) >= ENOUGH else np.nan
    )
    return statistic(*samples), low, high
