"""What a paired comparison over a few dozen items is worth: intervals, exact tests, the least visible effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def scipy_stats() -> Any:
    """Return ``scipy.stats``, which the exact tests need and bootstrap intervals do not.

    Raises:
        RidgeFillError: SciPy is not installed.
    """
    try:
        import scipy.stats
    except ImportError as error:
        raise RidgeFillError("the package 'scipy' is not installed: run pip install 'ridgefill[gate]'") from error
    return scipy.stats


@dataclass(frozen=True)
class McNemar:
    """The exact McNemar test of paired yes-or-no outcomes: only the pairs that differ count.

    Attributes:
        lost: pairs that only the first side has right.
        gained: pairs that only the second side has right.
        p: two-sided, of a split as uneven as this one if both sides were equally good.
        change: second minus first, as a share of all pairs, with Tango's score interval: the differences that a score
            test does not reject. Few pairs without a difference are not taken for equal sides.
    """

    lost: int
    gained: int
    p: float
    change: Interval


def exact_mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Return the exact McNemar test of two sides on the same items (scipy.stats.binomtest on the pairs that differ).

    Raises:
        RidgeFillError: the sides differ in length, or are empty.
    """
    binomtest = scipy_stats().binomtest
    if len(first) != len(second) or not first:
        raise RidgeFillError(f"McNemar's test needs pairs, found {len(first)} and {len(second)} outcomes")
    lost = sum(a and not b for a, b in zip(first, second, strict=True))
    gained = sum(b and not a for a, b in zip(first, second, strict=True))
    p = float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
    return McNemar(lost, gained, p, score_interval(lost, gained, len(first)))


def score_interval(lost: int, gained: int, pairs: int, *, level: float = 0.95) -> Interval:
    """Return ``(gained - lost) / pairs`` with its score interval (Tango, Statistics in Medicine 17, 1998).

    Both bounds solve ``|gained - lost - pairs d| = z sqrt(pairs (2 q + d (1 - d)))``, where q is the most likely share
    of lost pairs if the true difference is d.
    """
    stats = scipy_stats()
    z = float(stats.norm.ppf((1 + level) / 2))

    def score(d: float) -> float:
        b = -gained - lost + (2 * pairs - gained + lost) * d
        q = (math.sqrt(b * b + 8 * pairs * lost * d * (1 - d)) - b) / (4 * pairs)
        deviation = math.sqrt(max(0.0, pairs * (2 * q + d * (1 - d))))
        distance = gained - lost - pairs * d
        return distance / deviation if deviation else math.copysign(math.inf, distance) if distance else 0.0

    def bound(inside: float, outside: float, wanted: float) -> float:
        for _ in range(60):  # the score falls as d grows
            middle = (inside + outside) / 2
            if abs(score(middle)) < wanted:
                inside = middle
            else:
                outside = middle
        return inside

    estimate = (gained - lost) / pairs
    return Interval(estimate, bound(estimate, -1.0, z), bound(estimate, 1.0, z))


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of the sign test: how uneven the signs are of differences that are not zero."""
    binomtest = scipy_stats().binomtest
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return float(binomtest(up, up + down).pvalue) if up + down else 1.0


def minimum_detectable_effect(differences: Sequence[float], *, level: float = 0.95, power: float = 0.8) -> float:
    """Return the least mean difference that as many units, as unlike as these, show with this power.

    ``(z_level + z_power) sd / sqrt(n)``, the usual normal approximation (scipy.stats.norm); "this run could not have
    seen less than …".
    """
    norm = scipy_stats().norm
    data = _checked(differences, "differences")
    z = norm.ppf((1 + level) / 2) + norm.ppf(power)
    return float(z * data.std(ddof=1) / np.sqrt(len(data)))


def minimum_detectable_losses(level: float = 0.95) -> int:
    """Return how many pairs must differ, all one way, before McNemar's exact test tells them from chance: 6 at 95%."""
    count = 1
    while 2 * 0.5**count > 1 - level:
        count += 1
    return count


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
