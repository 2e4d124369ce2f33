"""Paired bootstrap intervals: what a mean over a few dozen windows is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgefill.errors import RidgeFillError


@dataclass(frozen=True)
class Interval:
    """An estimate over all units and its percentile-bootstrap interval (95% unless asked otherwise)."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean of ``values`` with its bootstrap interval.

    For a paired comparison pass the differences: one value per unit (window, document), both sides measured on it.

    Raises:
        RidgeFillError: fewer than two values, or one that is not finite.
    """
    data = _checked(values, "values")
    means = data[_draws(len(data), resamples, seed)].mean(axis=1)  # [resamples]
    return _interval(float(data.mean()), means, level)


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Return mean(numerators) / mean(denominators) with its bootstrap interval, the pairs kept together.

    A ratio of means, not a mean of ratios: a unit whose denominator is nearly zero carries no weight of its own.

    Raises:
        RidgeFillError: the sequences differ in length, have fewer than two values, or one that is not finite; or the
            denominators' mean is zero.
    """
    top, bottom = _checked(numerators, "numerators"), _checked(denominators, "denominators")
    if len(top) != len(bottom):
        raise RidgeFillError(f"a paired ratio needs equal lengths, found {len(top)} and {len(bottom)}")
    if bottom.mean() == 0:
        raise RidgeFillError("the denominators' mean is zero: the ratio does not exist")
    draws = _draws(len(top), resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hit a zero mean: it then counts as infinite
        ratios = top[draws].mean(axis=1) / bottom[draws].mean(axis=1)
    return _interval(float(top.mean() / bottom.mean()), np.nan_to_num(ratios, nan=np.inf), level)


def _checked(values: Sequence[float], name: str) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or len(data) < 2:
        raise RidgeFillError(f"{name}: an interval needs at least two numbers in a row, found shape {data.shape}")
    if not np.isfinite(data).all():
        raise RidgeFillError(f"{name}: {int((~np.isfinite(data)).sum())} of {len(data)} values are not finite")
    return data


def _draws(count: int, resamples: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, count, (resamples, count))


def _interval(estimate: float, resampled: NDArray[np.float64], level: float) -> Interval:
    # "inverted_cdf" takes order statistics: it never computes inf - inf.
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(estimate, float(low), float(high))
