"""The weights of the rows, one after another: compiled, O(d^2 + m d) per row."""

from __future__ import annotations

import math

from torchglb.backend import Floats, entry, kernel
from torchglb.backend.elementary import exp
from torchglb.families.bernoulli import logistic, logistic_variance
from torchglb.families.bounded import (
    cloglog_mean,
    cloglog_variance,
    probit_mean,
    probit_variance,
)
from torchglb.families.compiled import EXPONENTIAL, LOGISTIC, PROBIT, SQUARE, CompiledFamily


@kernel
def mean_and_variance(family: CompiledFamily, z: float) -> tuple[float, float]:
    """``mu(z)`` and ``m''(z)``."""
    if family.code == LOGISTIC:
        return family.trials * logistic(z), family.trials * logistic_variance(z)
    if family.code == SQUARE:
        return z, 1.0
    if family.code == EXPONENTIAL:
        return exp(z), exp(z)
    if family.code == PROBIT:
        return probit_mean(z), probit_variance(z)
    return cloglog_mean(z), cloglog_variance(z)


@kernel
def learn_row(
    x: Floats,
    surprise: float,
    curvature: float,
    weight: float,
    radius: float,
    contrasts: Floats,
    inverse: Floats,
    forms: Floats,
    guess: Floats,
    step: Floats,
    out: Floats,
) -> None:
    """The weights of one row, then what it teaches; see :func:`weigh_rows`."""
    d, m = x.shape[0], contrasts.shape[0]
    form = 0.0
    for i in range(d):
        total = 0.0
        for j in range(d):
            total += inverse[i, j] * x[j]
        step[i] = total
        form += x[i] * total
    information = weight * curvature
    shrink = information / (1.0 + information * form)
    for k in range(m):
        along = 0.0
        for i in range(d):
            along += contrasts[k, i] * step[i]
        a = along / forms[k]
        # whatever rounding leaves of the matrix: a weight is any number fixed before the reward
        out[k] = weight * a if math.isfinite(a) and forms[k] > 0.0 else 0.0
        forms[k] -= shrink * along * along
    for i in range(d):
        scaled = shrink * step[i]
        for j in range(d):
            inverse[i, j] -= scaled * step[j]
    # one Newton step; inverse @ x is now step / (1 + information form)
    size, length = weight * surprise / (1.0 + information * form), 0.0
    for i in range(d):
        guess[i] += size * step[i]
        length += guess[i] * guess[i]
    if not length <= radius * radius:
        inside = radius / math.sqrt(length) if math.isfinite(length) else 0.0
        for i in range(d):
            guess[i] = guess[i] * inside if inside > 0.0 else 0.0


@entry
def weigh_rows(
    family: CompiledFamily,
    X: Floats,
    r: Floats,
    w: Floats,
    known: Floats,
    radius: float,
    floor: float,
    contrasts: Floats,
    inverse: Floats,
    forms: Floats,
    guess: Floats,
    out: Floats,
) -> None:
    """The weights of k rows, in their order; state is changed in place.

    Args:
        family: gives mean and variance.
        X: ``(k, d)``.
        r: rewards, ``(k)``.
        w: weights of the rows, ``(k)``.
        known: mean and variance at the running estimate, ``(k, 2)``, if not the family gives them;
            else ``(0, 2)``.
        radius: S.
        floor: the least curvature that a row is taken to have.
        contrasts: C, ``(m, d)``.
        inverse: ``H^-1``, ``(d, d)``.
        forms: ``c' H^-1 c``, ``(m)``.
        guess: a running estimate, ``(d)``.
        out: ``(k, m)``, receives ``w_s x_s' H^-1 c / (c' H^-1 c)``.
    """
    step = guess.copy()
    for s in range(X.shape[0]):
        if known.shape[0] > 0:
            mean, variance = known[s, 0], known[s, 1]
        else:
            z = 0.0
            for i in range(X.shape[1]):
                z += X[s, i] * guess[i]
            mean, variance = mean_and_variance(family, z)
        curvature = max(variance * family.scale, floor)
        surprise = (r[s] - mean) * family.scale
        learn_row(
            X[s], surprise, curvature, w[s], radius, contrasts, inverse, forms, guess, step, out[s]
        )


@entry
def least_dual(a: Floats, f2: Floats) -> float:
    """``min nu/2 + sum_i f_i^2/(2 (nu - a_i))`` over ``nu > max(a, 0)``, by bisection.

    The slope is ``1/2 - sum_i f_i^2/(2 (nu - a_i)^2)``: negative to the left of the minimum. Any nu
    gives an upper bound of the maximum that this is the dual of; here the slope is not negative.
    """
    lowest, total = 0.0, 0.0
    for i in range(a.shape[0]):
        lowest = max(lowest, a[i])
        total += f2[i]
    low, high = lowest, lowest + math.sqrt(total) + 1e-12 * (1.0 + lowest)
    for _ in range(60):
        nu = 0.5 * (low + high)
        steep = 0.0
        for i in range(a.shape[0]):
            if f2[i] > 0.0:  # else nu may come down to a_i, where it would be 0/0
                steep += f2[i] / ((nu - a[i]) * (nu - a[i]))
        if steep > 1.0:
            low = nu
        else:
            high = nu
    value = 0.5 * high
    for i in range(a.shape[0]):
        if f2[i] > 0.0:
            value += 0.5 * f2[i] / (high - a[i])
    return value
