"""The few statistics of a report: means, pairs of runs on the same random numbers, shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special  # scipy.stats takes half a second to import

from torchglb.checks import check_count, check_probability, refuse


class MeanError(NamedTuple):
    """A mean over replicates and its standard error (NaN for a single replicate).

    Example:
        >>> estimate(np.array([1.0, 3.0])).error
        1.0
    """

    mean: float
    error: float


class Paired(NamedTuple):
    """One sample minus another, replicate by replicate.

    Attributes:
        difference: mean difference and its standard error.
        wins: pairs in which the first is smaller.
        losses: pairs in which it is larger.
        t_test: two-sided p-value of the paired t-test; NaN for a single pair.
        sign_test: two-sided p-value of the exact sign test; ties are left out.

    Example:
        >>> found = paired(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 3.5]))
        >>> found.wins, found.losses, round(found.difference.mean, 2)
        (3, 0, -1.17)
    """

    difference: MeanError
    wins: int
    losses: int
    t_test: float
    sign_test: float


def estimate(values: np.ndarray) -> MeanError:
    """The mean of ``values (R,)`` and its standard error.

    Example:
        >>> estimate(np.array([1.0, 3.0]))
        MeanError(mean=2.0, error=1.0)
    """
    count = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return MeanError(float(values.mean()), error)


def paired(first: np.ndarray, second: np.ndarray) -> Paired:
    """Compares two samples that share their random numbers, ``(R,)`` each.

    Differences that are all equal leave the t-test without a scale: its p-value is then 1 if they
    are all zero, else 0.

    Example:
        >>> paired(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 3.5])).wins
        3
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise refuse("second", f"one value for each of {first.shape}", f"shape {second.shape}")
    difference = first - second
    wins, losses = int((difference < 0).sum()), int((difference > 0).sum())
    # twice the smaller tail of a fair coin, whose two tails are alike
    sign = min(1.0, 2.0 * float(special.bdtr(min(wins, losses), wins + losses, 0.5)))
    return Paired(estimate(difference), wins, losses, _t_test(difference), sign)


def _t_test(difference: np.ndarray) -> float:
    count = len(difference)
    if count == 1:
        return math.nan
    mean, error = estimate(difference)
    if not error > 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return float(2.0 * special.stdtr(count - 1, -abs(mean) / error))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: p-values for m comparisons at once, whatever their dependence.

    With ``p_(1) <= ... <= p_(m)``, the k-th becomes ``max over j <= k of min(1, (m - j + 1)
    p_(j))``: rejecting those of at most alpha makes one false rejection or more with probability at
    most alpha. NaN (no test) stays NaN and is not counted.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    known = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, largest = [math.nan] * len(p), 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        corrected[place] = largest
    return corrected


def welch(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p-value of Welch's t-test, for samples that share nothing.

    With ``v = var/n`` of each sample, ``t = (mean - mean') / sqrt(v + v')`` has about
    ``(v + v')^2 / (v^2/(n - 1) + v'^2/(n' - 1))`` degrees of freedom. NaN without a scale: for a
    single replicate, or where both samples are constant.
    """
    n, m = len(first), len(second)
    if min(n, m) < 2 or not (np.ptp(first) or np.ptp(second)):
        return math.nan
    v, w = float(np.var(first, ddof=1)) / n, float(np.var(second, ddof=1)) / m
    t = abs(float(np.mean(first) - np.mean(second))) / math.sqrt(v + w)
    share = v / (v + w)  # the squares themselves may underflow
    freedom = 1.0 / (share**2 / (n - 1) + (1.0 - share) ** 2 / (m - 1))
    return float(2.0 * special.stdtr(freedom, -t))


def binomial_interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The exact (Clopper-Pearson) interval of a share.

    Example:
        >>> [round(end, 3) for end in binomial_interval(0, 10)]
        [0.0, 0.308]
    """
    check_count("trials", trials, least=1)
    if check_count("hits", hits) > trials:
        raise refuse("hits", f"at most {trials}", hits)
    tail = (1.0 - check_probability("level", level)) / 2.0
    low = float(special.betaincinv(hits, trials - hits + 1, tail)) if hits else 0.0
    high = float(special.betaincinv(hits + 1, trials - hits, 1.0 - tail)) if hits < trials else 1.0
    return low, high
