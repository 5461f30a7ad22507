"""What a posterior's width costs on a row, compiled.

The formulas of :mod:`torchglb.radii.posterior.laws` and :mod:`torchglb.radii.posterior.increments`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, allocating, kernel, vectorised
from torchglb.backend.dense import EPS, dot
from torchglb.carried.kernels import LossRows, chunk_product, features
from torchglb.families.bernoulli import logistic_variance
from torchglb.families.bounded import cloglog_variance, probit_partition, probit_variance
from torchglb.families.compiled import (
    CLOGLOG,
    EXPONENTIAL,
    LOGISTIC,
    PROBIT,
    SQUARE,
    CompiledFamily,
)
from torchglb.families.row_terms import CHUNK, SCRATCH
from torchglb.radii.posterior.centre_kernels import CompiledPrior

#: beyond this exponent a bound is infinite
OVERFLOW = 700.0


# ---- the law of a coordinate -------------------------------------------------------------------


class CompiledLaw(NamedTuple):
    """One coordinate U of a posterior."""

    normal: bool  # standard normal; else of density (1 - u^2)^(nu - 1/2), nu = d/2 + k
    second: float  # E U^2
    absolute: float  # E |U|
    nu: float  # of the density
    even: Floats  # 1/(j (nu + j)), the ratios of the terms of E cosh(sU) - 1, (terms + 1,)
    every: Floats  # E|U|^j / (j E|U|^(j-1)), those of E e^(a|U|), (3 terms + 1,)


@allocating
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
    """At least ``sum_{i >= 0} v^i / (K+1)_i``: see :func:`torchglb.radii.posterior.laws._tail`."""
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
    """G(s) with ``E m(z + sU) - m(z) <= m''(z) G(s)``: :func:`.increments.growth`."""
    if family.code == SQUARE:
        return 0.5 * s2 * law.second
    if family.code == LOGISTIC or family.code == EXPONENTIAL:
        return hyperbolic(law, s2)
    rate = max(concordance, 1e-6)
    return exponential(law, rate * math.sqrt(s2)) / (rate * rate)


@kernel
def row_increment(
    family: CompiledFamily, prior: CompiledPrior, law: CompiledLaw, z: float, s2: float
) -> float:
    """At least ``E m(z + sU) - m(z)``: :func:`torchglb.radii.posterior.increments.increment`.

    Args:
        family: gives m.
        prior: has R and the largest m'' on the support of ``z + sU``.
        law: of U.
        z: ``<x, c>``.
        s2: ``s^2``.
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
        best = here * growth(family, law, s2, prior.concordance)
        best = best if best >= 0.0 else math.inf  # inf * 0
        best = min(best, 0.5 * local * s2 * law.second)
    best = min(best, 0.5 * prior.top * s2 * law.second)
    return min(best, 0.5 * (family.high - family.low) * math.sqrt(s2) * law.absolute)


@vectorised
def squared_widths(X: Floats, start: int, count: int, root: Floats, out: Floats) -> None:
    """``|M x_s|^2`` of some rows of ``X (d, n)``; the last CHUNK of ``out`` is memory."""
    d, part = X.shape[0], out[CHUNK:]
    for s in range(count):
        out[s] = 0.0
    for i in range(d):
        for s in range(count):
            part[s] = 0.0
        for j in range(i + 1):
            x, factor = X[j, start : start + count], root[i, j]
            for s in range(count):
                part[s] += factor * x[s]
        for s in range(count):
            out[s] += part[s] * part[s]


@kernel
def width_rounding(root: Floats) -> float:
    """What rounding may take from ``|M x|``, for ``|x| <= 1``: d roundings of ``|M| |x|``."""
    d, total = root.shape[0], 0.0
    for i in range(d):
        total += dot(root[i], root[i])
    return d * EPS * math.sqrt(total)


@kernel
def widened(s2: float, paid: float) -> float:
    """``(s + paid)^2``."""
    s = math.sqrt(s2) + paid
    return s * s


@kernel
def add_increment(
    family: CompiledFamily,
    prior: CompiledPrior,
    law: CompiledLaw,
    x: Floats,
    point: Floats,
    root: Floats,
) -> float:
    """``(E m(z + s U) - m(z))/g`` of one row, ``s = |M x|``."""
    s2 = 0.0
    for i in range(x.shape[0]):
        part = dot(root[i, : i + 1], x[: i + 1])
        s2 += part * part
    s2 = widened(s2, width_rounding(root))
    return row_increment(family, prior, law, dot(x, point), s2) * family.scale


@allocating
def sum_increments(
    family: CompiledFamily,
    prior: CompiledPrior,
    law: CompiledLaw,
    rows: LossRows,
    point: Floats,
    root: Floats,
) -> float:
    """``sum_s w_s (E m(z_s + s_s U) - m(z_s))/g``, ``s_s = |M x_s|``: a pass.

    ``M'M`` is the covariance W^-1, M lower triangular. Of W^-1 itself the products with rows would
    cancel: along many rows the posterior is narrow, and as wide as the prior across them.
    """
    z, s2, total, ones = np.zeros(SCRATCH), np.zeros(2 * CHUNK), 0.0, np.ones(CHUNK)
    X, w, n, paid = rows.X, rows.w, rows.y.shape[0], width_rounding(root)
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        features(X, start, count, point, z)
        squared_widths(X, start, count, root, s2)
        for s in range(count):
            z[s] = row_increment(family, prior, law, z[s], widened(s2[s], paid))
        total += chunk_product(z, w[start:] if w.shape[0] else ones, count)
    return total * family.scale
