"""What a row adds to the radii, compiled: its statistics, and what a posterior's width costs on it.

The formulas of :mod:`torchglb.radii.statistics`, :mod:`torchglb.radii.laws` and
:mod:`torchglb.radii.increments`, one problem at a time, in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, entry, kernel, vectorised
from torchglb.backend.dense import dot, length
from torchglb.carried.kernels import chunk_product, features
from torchglb.families.bernoulli import logistic_variance
from torchglb.families.bounded import (
    cloglog_variance,
    probit_partition,
    probit_variance,
)
from torchglb.families.compiled import (
    CLOGLOG,
    EXPONENTIAL,
    LOGISTIC,
    PROBIT,
    SQUARE,
    CompiledFamily,
)
from torchglb.families.row_terms import CHUNK, FIRST, SCRATCH, SECOND, TERMS, W, Y, row_terms

#: beyond this exponent a bound is infinite
OVERFLOW = 700.0


# ---- the law of a coordinate -------------------------------------------------------------------


class CompiledLaw(NamedTuple):
    """One coordinate U of a posterior.

    Attributes:
        normal: standard normal; else of density ``(1 - u^2)^(nu - 1/2)``, ``nu = d/2 + k``.
        second: ``E U^2``.
        absolute: ``E |U|``.
        nu: of the density.
        even: ``1/(j (nu + j))``, the ratios of the terms of ``E cosh(sU) - 1``, ``(terms + 1,)``.
        every: ``E|U|^j / (j E|U|^(j-1))``, those of ``E e^(a|U|)``, ``(3 terms + 1,)``.
    """

    normal: bool
    second: float
    absolute: float
    nu: float
    even: Floats
    every: Floats


@kernel
def law_of(family: CompiledFamily, normal: bool, dim: int, shape: float, terms: int) -> CompiledLaw:
    """Of a Gaussian posterior, or one of shape k on an ellipsoid, with the tables it is used by."""
    if normal:
        return CompiledLaw(True, 1.0, math.sqrt(2.0 / math.pi), 0.0, np.zeros(1), np.zeros(1))
    nu = 0.5 * dim + shape
    even, every = np.zeros(terms + 1), np.zeros(1)
    for j in range(1, terms + 1):
        even[j] = 1.0 / (j * (nu + j))
    if family.code == PROBIT or family.code == CLOGLOG:
        every = np.zeros(3 * terms + 1)
        for j in range(2, 3 * terms + 1):
            upper = math.lgamma(0.5 * (j + 1)) + math.lgamma(nu + 0.5 * (j + 1))
            lower = math.lgamma(0.5 * j) + math.lgamma(nu + 1.0 + 0.5 * j)
            every[j] = math.exp(upper - lower) / j
    absolute = math.exp(math.lgamma(nu + 1.0) - math.lgamma(nu + 1.5)) / math.sqrt(math.pi)
    return CompiledLaw(False, 1.0 / (2.0 * nu + 2.0), absolute, nu, even, every)


@kernel
def series_tail(v: float, last: int) -> float:
    """At least ``sum_{i >= 0} v^i / (K+1)_i``: see :func:`torchglb.radii.laws._tail`."""
    if v > OVERFLOW:
        return math.inf
    always = 1.0 + math.expm1(v) / (last + 1)
    if v < 0.99 * (last + 1):
        return min(1.0 / (1.0 - v / (last + 1)), always)
    return always


@kernel
def hyperbolic(law: CompiledLaw, s2: float) -> float:
    """At least ``E cosh(s U) - 1``."""
    if law.normal:
        return math.expm1(0.5 * s2) if 0.5 * s2 < OVERFLOW else math.inf
    y, last = 0.25 * s2, law.even.shape[0] - 1
    total = series_tail(y / (law.nu + last + 1.0), last)
    for j in range(last, 1, -1):
        total = 1.0 + y * total * law.even[j]
    return y * total * law.even[1]


@kernel
def exponential(law: CompiledLaw, a: float) -> float:
    """At least ``E[e^(a|U|) - 1 - a|U|]``; infinite for a normal U, whose families need none."""
    if law.normal:
        return math.inf
    last = law.every.shape[0] - 1
    total = series_tail(a, last)
    for j in range(last, 2, -1):
        total = 1.0 + a * total * law.every[j]
    return 0.5 * a * a * total * law.second


@kernel
def growth(family: CompiledFamily, law: CompiledLaw, s2: float, concordance: float) -> float:
    """G(s) with ``E m(z + sU) - m(z) <= m''(z) G(s)``: :func:`torchglb.radii.increments.growth`."""
    if family.code == SQUARE:
        return 0.5 * s2 * law.second
    if family.code == LOGISTIC or family.code == EXPONENTIAL:
        return hyperbolic(law, s2)
    rate = max(concordance, 1e-6)
    return exponential(law, rate * math.sqrt(s2)) / (rate * rate)


@kernel
def row_increment(
    family: CompiledFamily, law: CompiledLaw, z: float, s2: float, concordance: float, top: float
) -> float:
    """At least ``E m(z + sU) - m(z)``: :func:`torchglb.radii.increments.increment`.

    Args:
        family: gives m.
        law: of U.
        z: ``<x, c>``.
        s2: ``s^2``.
        concordance: R on the support of ``z + sU``.
        top: the largest m'' there.
    """
    if family.code == SQUARE:
        return 0.5 * s2 * law.second
    if family.code == EXPONENTIAL:
        return math.exp(min(z, 709.0)) * hyperbolic(law, s2)
    if family.code == LOGISTIC:
        spread = 2.0 * logistic_variance(z) * hyperbolic(law, s2)
        best = 0.5 * family.trials * math.log1p(spread) if spread < math.inf else math.inf
    elif family.code == PROBIT and law.normal:
        wide = math.sqrt(1.0 + s2)
        best = wide * probit_partition(z / wide) - probit_partition(z)
    elif law.normal:
        best = math.inf
    else:
        nearest = math.copysign(max(abs(z) - math.sqrt(s2), 0.0), z)
        here, local = cloglog_variance(z), cloglog_variance(nearest)
        if family.code == PROBIT:
            here, local = probit_variance(z), probit_variance(nearest)
        best = here * growth(family, law, s2, concordance)
        best = best if best >= 0.0 else math.inf  # inf * 0
        best = min(best, 0.5 * local * s2 * law.second)
    best = min(best, 0.5 * top * s2 * law.second)
    return min(best, 0.5 * (family.high - family.low) * math.sqrt(s2) * law.absolute)


@vectorised
def squared_widths(X: Floats, start: int, count: int, cover: Floats, out: Floats) -> None:
    """``x_s' W^-1 x_s`` of some rows of ``X (d, n)``; the last CHUNK of ``out`` is memory."""
    d, part = X.shape[0], out[CHUNK:]
    for s in range(count):
        out[s] = 0.0
    for i in range(d):
        x, half = X[i, start : start + count], 0.5 * cover[i, i]
        for s in range(count):
            part[s] = half * x[s]
        for j in range(i + 1, d):
            other, factor = X[j, start : start + count], cover[i, j]
            for s in range(count):
                part[s] += factor * other[s]
        for s in range(count):
            out[s] += 2.0 * x[s] * part[s]


@kernel
def add_increment(
    family: CompiledFamily,
    law: CompiledLaw,
    x: Floats,
    point: Floats,
    cover: Floats,
    concordance: float,
    top: float,
) -> float:
    """``(E m(z + s U) - m(z))/g`` of one row, ``s^2 = x' W^-1 x``."""
    d, s2 = x.shape[0], 0.0
    for i in range(d):
        part = 0.0
        for j in range(d):
            part += cover[i, j] * x[j]
        s2 += x[i] * part
    found = row_increment(family, law, dot(x, point), max(s2, 0.0), concordance, top)
    return found * family.scale


@kernel
def sum_increments(
    family: CompiledFamily,
    law: CompiledLaw,
    X: Floats,
    w: Floats,
    rows: int,
    point: Floats,
    cover: Floats,
    concordance: float,
    top: float,
) -> float:
    """``sum_s w_s (E m(z_s + s_s U) - m(z_s))/g``, ``s_s^2 = x_s' W^-1 x_s``: a pass."""
    z, s2, total = np.zeros(SCRATCH), np.zeros(2 * CHUNK), 0.0
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        features(X, start, count, point, z)
        squared_widths(X, start, count, cover, s2)
        for s in range(count):
            z[s] = row_increment(family, law, z[s], max(s2[s], 0.0), concordance, top)
        total += chunk_product(z, w[start:], count)
    return total * family.scale


# ---- statistics --------------------------------------------------------------------------------


class CompiledStatistics(NamedTuple):
    """:class:`torchglb.radii.RowStatistics` of one problem, in its own memory, field by field."""

    sums: Floats  # number, weight, longest, extreme
    middle: Floats
    width: Floats
    width_gram: Floats
    residual: Floats
    slope_gram: Floats
    rest: Floats  # ball_loss, reward_length


@kernel
def statistics_in(memory: Floats, dim: int) -> CompiledStatistics:
    """The sums that lie in memory ``(size,)``."""
    a = 4 + dim
    b = a + 1 + dim * dim
    c = b + dim
    e = c + dim * dim
    return CompiledStatistics(
        memory[:4],
        memory[4:a],
        memory[a : a + 1],
        memory[a + 1 : b].reshape(dim, dim),
        memory[b:c],
        memory[c:e].reshape(dim, dim),
        memory[e:],
    )


class CompiledRule(NamedTuple):
    """:class:`torchglb.radii.ball_mean.BallRule` of one problem, and the largest m'' there."""

    nodes: Floats
    weights: Floats
    error: float
    top: float


@kernel
def rule_in(numbers: Floats) -> CompiledRule:
    """From :meth:`torchglb.radii.Problem.compiled_rules` of a problem."""
    nodes = (numbers.shape[0] - 2) // 2
    error, top = numbers[2 * nodes], numbers[2 * nodes + 1]
    return CompiledRule(numbers[:nodes], numbers[nodes : 2 * nodes], error, top)


@kernel
def ball_mean(family: CompiledFamily, rule: CompiledRule, a: float, scratch: Floats) -> float:
    """At least ``E m(a U)``, U a coordinate of a uniform point of the ball."""
    half, total = CHUNK // 2, 0.0
    for start in range(0, rule.nodes.shape[0], half):
        count = min(half, rule.nodes.shape[0] - start)
        for i in range(2 * count):
            node = rule.nodes[start + i % count]
            scratch[i] = a * node if i < count else -a * node
            scratch[W + i], scratch[Y + i] = 1.0, 0.0
        row_terms(family, scratch, 2 * count, 2)
        for i in range(count):
            even = 0.5 * (scratch[TERMS + i] + scratch[TERMS + count + i])
            total += even * rule.weights[start + i]
    return total + rule.error


@kernel
def undispersed(family: CompiledFamily) -> CompiledFamily:
    """The same family with g = 1."""
    code, trials, _, low, high, whole, largest = family
    return CompiledFamily(code, trials, 1.0, low, high, whole, largest)


@kernel
def add_statistics(
    family: CompiledFamily,
    rule: CompiledRule,
    S: float,
    x: Floats,
    r: float,
    w: float,
    found: CompiledStatistics,
    scratch: Floats,
) -> None:
    """Adds one row. ``family`` is the one of dispersion 1."""
    d, norm = x.shape[0], length(x)
    a = S * norm
    ball_loss = ball_mean(family, rule, a, scratch)
    for i in range(3):
        scratch[W + i], scratch[Y + i] = 1.0, 0.0
    scratch[0], scratch[1], scratch[2] = a, -a, 0.0
    row_terms(family, scratch, 3, 2)
    high, low, centre = scratch[FIRST], scratch[FIRST + 1], scratch[FIRST + 2]
    half = 0.5 * (high - low)
    slope = rule.top
    if family.code == SQUARE:
        slope = 1.0
    elif family.code == LOGISTIC:
        slope = 0.25 * family.trials
    elif family.code == EXPONENTIAL:
        slope = scratch[SECOND]
    if w > 0.0:
        found.sums[0] += 1.0
        found.sums[2] = max(found.sums[2], norm)
    found.sums[1] += w
    found.sums[3] += w * norm * max(abs(r - low), abs(r - high))
    found.width[0] += w * half
    found.rest[0] += w * ball_loss
    found.rest[1] += w * abs(r) * norm
    for i in range(d):
        found.middle[i] += w * (0.5 * (high + low) - r) * x[i]
        found.residual[i] += w * (centre - r) * x[i]
        for j in range(d):
            found.width_gram[i, j] += w * half * x[i] * x[j]
            found.slope_gram[i, j] += w * slope * x[i] * x[j]


@entry
def carry_statistics(
    family: CompiledFamily,
    x: Floats,
    r: Floats,
    w: Floats,
    S: Floats,
    rules: Floats,
    memory: Floats,
) -> None:
    """Adds k rows of every problem, ``x (N, k, d)``, to its statistics ``(N, size)``.

    ``rules`` as for :func:`rule_in`.
    """
    scratch, d, plain = np.zeros(SCRATCH), x.shape[2], undispersed(family)
    for b in range(x.shape[0]):
        found, rule = statistics_in(memory[b], d), rule_in(rules[b])
        for s in range(x.shape[1]):
            add_statistics(plain, rule, S[b], x[b, s], r[b, s], w[b, s], found, scratch)
