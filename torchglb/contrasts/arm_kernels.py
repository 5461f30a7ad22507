"""Contrast bounds of a fixed arm set from sums by arm: O(K d^2 + K^2) per look, whatever n is.

Rows are copies of K arms x_i. For contrast k and arm i are carried, over the rows of that arm, with
b_s the weight of a row in the contrast times its weight w_s in the loss,

    ``B_ki = sum_s b_s``,  ``P_kiu = sum_s psi(u b_s)``,  ``psi(h) = (e^(R|h|) - 1 - R|h|)/R^2``,

and ``Y_k = sum_s b_s r_s`` over all. For families with ``|m'''| <= R m''`` on the whole line, ``m(z
+ h) - m(z) - h mu(z) <= m''(z) psi(h)``, so that with fixed scales u of both signs and weights w_u

    ``|Y_k - sum_i B_ki mu(z_i*)| <= slab = min_u ( g log(1/(w_u delta')) + sum_i m''(z_i*) P_kiu
    )/u``

for all t at once with probability ``1 - delta'``. On the joint set ``|z_i* - z_i| <= reach_i``
(:func:`reaches`), which bounds ``m''(z_i*)``, and with ``t = z* - z``, ``w = sum_i B_ki m''(z_i)
x_i``, ``e = w - alpha c``,

    ``sum_i B_ki (mu(z_i*) - mu(z_i)) = alpha <c, u> + <e, u> + rest``,
    ``|rest| <= sum_i |B_ki| q_i t_i^2``,

so ``<c, theta*>`` is within ``(slab + max <e, u> + max rest)/alpha`` of ``<c, theta_hat> + (Y_k -
sum_i B_ki mu(z_i))/alpha``.
"""

from __future__ import annotations

import math

from torchglb.backend import Floats, Ints, entry, kernel
from torchglb.backend.dense import EPS, cholesky, dot, exponential, forward, solve_factored
from torchglb.contrasts.kernels import learn_row, mean_and_variance
from torchglb.families.bernoulli import logistic_variance
from torchglb.families.compiled import LOGISTIC, SQUARE, CompiledFamily

#: rounds in which reach and ellipsoid sharpen each other
ROUNDS = 5
#: what the arithmetic with the ellipsoid's matrix may change of a length, relative to it
LINEAR_ALGEBRA = 1e-6
#: the square of a shorter arm may underflow: its own sums say nothing then
SHORTEST = 1e-100


@kernel
def rate_of(family: CompiledFamily) -> float:
    """R on the whole line: 0 for Gaussian rewards, 1 for binomial and Poisson ones."""
    return 0.0 if family.code == SQUARE else 1.0


@kernel
def cumulant(h: float, rate: float) -> float:
    """psi, rounded up."""
    a = abs(h)
    if rate == 0.0 or a < 1e-3:
        return 0.5 * a * a * (1.0 + rate * a)  # above, as e^a - 1 - a <= a^2/2 (1 + a) there
    if a > 300.0:
        return math.inf
    return (math.expm1(a) - a) * (1.0 + 1e-12)


@entry
def add_rows(
    family: CompiledFamily,
    X: Floats,
    r: Floats,
    w: Floats,
    place: Ints,
    radius: float,
    floor: float,
    contrasts: Floats,
    scales: Floats,
    inverse: Floats,
    forms: Floats,
    guess: Floats,
    counts: Floats,
    B: Floats,
    P: Floats,
    Y: Floats,
) -> None:
    """Rows in their order, in place: O(d^2 + K d + K U) each.

    Args:
        family: gives mean and variance.
        X: ``(k, d)``.
        r: ``(k)``.
        w: weights of the rows in [0, 1], ``(k)``.
        place: which arm each is; -1 for none, and then it has weight 0 in all contrasts.
        radius: S.
        floor: the least curvature that a row is taken to have.
        contrasts: the arms, of length 1, ``(K, d)``.
        scales: ``(U)``.
        inverse: ``(d, d)``.
        forms: ``(K)``.
        guess: ``(d)``.
        counts: sum of the weights of each arm's rows, ``(K)``.
        B: ``(K, K)``.
        P: ``(K, K, U)``.
        Y: ``(K)``.
    """
    step, b, rate = guess.copy(), forms.copy(), rate_of(family)
    for s in range(X.shape[0]):
        z = dot(X[s], guess)
        mean, variance = mean_and_variance(family, z)
        surprise, curvature = (r[s] - mean) * family.scale, max(variance * family.scale, floor)
        learn_row(
            X[s], surprise, curvature, w[s], radius, contrasts, inverse, forms, guess, step, b
        )
        i = place[s]
        if i < 0:
            continue
        counts[i] += w[s]
        for k in range(b.shape[0]):
            B[k, i] += b[k]
            Y[k] += b[k] * r[s]
            for u in range(scales.shape[0]):
                P[k, i, u] += cumulant(scales[u] * b[k], rate)


@kernel
def contraction(D: float) -> float:
    """``(D - 1 + e^-D)/D^2``, from below."""
    if D < 1e-2:
        return 0.5 - D / 6.0
    return (D + math.expm1(-D)) / (D * D)


@kernel
def local_rate(family: CompiledFamily, z: float, reach: float) -> float:
    """R between ``z - reach`` and ``z + reach``."""
    if family.code == LOGISTIC:
        return math.tanh(0.5 * (abs(z) + reach))
    return rate_of(family)


@kernel
def largest_variance(family: CompiledFamily, z: float, reach: float) -> float:
    """``max m''`` between ``z - reach`` and ``z + reach``."""
    if family.code == SQUARE:
        return 1.0
    if family.code == LOGISTIC:
        return family.trials * logistic_variance(max(abs(z) - reach, 0.0))
    return exponential(z + reach)


@kernel
def second_order(family: CompiledFamily, z: float, variance: float, reach: float) -> float:
    """q with ``|mu(z + t) - mu(z) - m''(z) t| <= q t^2`` for ``|t| <= reach``.

    For the logistic model ``|m'''(z)|/2 + max |m''''| reach/6``, with v = m''/N and ``m''''/N = v -
    6 v^2`` (:func:`torchglb.contrasts.rows.bend_bound`); else ``R m'' (e^(R D) - 1 - R D)/(R
    D)^2``, D = reach.
    """
    if family.code == SQUARE:
        return 0.0
    if family.code == LOGISTIC:
        most = logistic_variance(max(abs(z) - reach, 0.0))
        least = logistic_variance(abs(z) + reach)
        fourth = max(abs(most - 6.0 * most * most), abs(least - 6.0 * least * least))
        if least <= 1.0 / 12.0 <= most:
            fourth = max(fourth, 1.0 / 24.0)
        third = variance * math.tanh(0.5 * abs(z))
        return 0.5 * third + family.trials * fourth * reach / 6.0
    if reach < 1e-2:
        return variance * (0.5 + reach)
    if reach > 300.0:
        return math.inf
    return variance * (math.expm1(reach) - reach) / (reach * reach)


@kernel
def reaches(
    family: CompiledFamily,
    arms: Floats,
    z: Floats,
    variances: Floats,
    counts: Floats,
    height: float,
    wide: float,
    reach: Floats,
    matrix: Floats,
    factor: Floats,
    y: Floats,
) -> bool:
    """How far the joint set reaches on each arm, and its ellipsoid; False if there is none.

    As in :func:`torchglb.contrasts.enclosure.enclose`, with ``|u| <= wide`` of the ball as a ridge:
    ``u' (K + I/wide^2) u <= height + 1``. The factor is that of the matrix divided by the right
    side, so that ``|<x, u>|`` is at most the length of ``L^-1 x``.
    """
    K, d = arms.shape
    for i in range(K):
        reach[i] = math.sqrt(dot(arms[i], arms[i])) * wide * (1.0 + (d + 4.0) * EPS)
    for _ in range(ROUNDS):
        for a in range(d):
            for b in range(a + 1):
                matrix[a, b] = 0.0
            matrix[a, a] = 1.0 / (wide * wide * (height + 1.0))
        for i in range(K):
            if counts[i] == 0.0:
                continue
            rate = local_rate(family, z[i], reach[i])
            bend = counts[i] * family.scale * variances[i] * contraction(rate * reach[i])
            bend /= height + 1.0
            for a in range(d):
                part = bend * arms[i, a]
                for b in range(a + 1):
                    matrix[a, b] += part * arms[i, b]
        # what sums, factor and solutions by it may lose is taken from the diagonal: the factor as
        # computed is then one of a matrix below this one
        trace = 0.0
        for a in range(d):
            trace += matrix[a, a]
        if not cholesky(matrix, -(K + 4.0 * d * d + 16.0) * EPS * trace, factor):
            return False
        moved = False
        for i in range(K):
            forward(factor, arms[i], y)
            length = math.sqrt(dot(y, y)) * (1.0 + LINEAR_ALGEBRA)
            if length < reach[i]:
                moved = moved or length < 0.95 * reach[i]
                reach[i] = length
        if not moved:
            break
    return True


@entry
def arm_bounds(
    family: CompiledFamily,
    arms: Floats,
    lengths: Floats,
    center: Floats,
    height: float,
    wide: float,
    counts: Floats,
    B: Floats,
    P: Floats,
    Y: Floats,
    scales: Floats,
    levels: Floats,
    lower: Floats,
    upper: Floats,
) -> None:
    """Ends of ``<x_k, theta*>`` for the K arms; infinite where their sums say nothing.

    Args:
        family: gives m.
        arms: ``(K, d)``.
        lengths: of the arms, ``(K)``.
        center: theta_hat, ``(d)``.
        height: ``L(theta*) - L(theta_hat)`` at most, plus the Frank-Wolfe gap.
        wide: ``S + |theta_hat|``.
        counts: sum of the weights of each arm's rows, ``(K)``.
        B: ``(K, K)``.
        P: ``(K, K, U)``.
        Y: ``(K)``.
        scales: u, ``(U)``.
        levels: ``g log(1/(w_u delta'))``, ``(U)``.
        lower: receives the lower ends, ``(K)``.
        upper: receives the upper ends, ``(K)``.
    """
    K, d = arms.shape
    z, means, variances, reach, bends = (
        lengths.copy(), lengths.copy(), lengths.copy(), lengths.copy(), lengths.copy()
    )  # fmt: skip
    matrix, factor = arms[:1].T * arms[:1], arms[:1].T * arms[:1]
    y, w, e = center.copy(), center.copy(), center.copy()
    for i in range(K):
        z[i] = dot(arms[i], center)
        means[i], variances[i] = mean_and_variance(family, z[i])
        lower[i], upper[i] = -math.inf, math.inf
    if not reaches(family, arms, z, variances, counts, height, wide, reach, matrix, factor, y):
        return
    for i in range(K):
        bends[i] = second_order(family, z[i], variances[i], reach[i])
    for k in range(K):
        if not lengths[k] > 0.0:
            lower[k], upper[k] = 0.0, 0.0
            continue
        if lengths[k] < SHORTEST:
            continue
        slab = math.inf
        for u in range(scales.shape[0]):
            total = levels[u]
            for i in range(K):
                if P[k, i, u] > 0.0:
                    total += largest_variance(family, z[i], reach[i]) * P[k, i, u]
            slab = min(slab, total / scales[u])
        score, size = Y[k], abs(Y[k])
        w[:] = 0.0
        each, ratio = 0.0, 0.0
        for i in range(K):
            if B[k, i] == 0.0:
                continue
            score -= B[k, i] * means[i]
            size += abs(B[k, i] * means[i])
            part = B[k, i] * variances[i]
            for a in range(d):
                w[a] += part * arms[i, a]
            paid = abs(B[k, i]) * bends[i]
            each += paid * reach[i] * reach[i]
            # K's part of this arm in the ellipsoid is at most 1
            rate = local_rate(family, z[i], reach[i])
            known = counts[i] * family.scale * variances[i] * contraction(rate * reach[i])
            ratio = max(ratio, paid / known if known > 0.0 else math.inf)
        rest = min(each, ratio * (height + 1.0))
        # c = x_k / |x_k|
        solve_factored(factor, arms[k], y)
        form, along = dot(y, arms[k]), dot(y, w)
        alpha = along / form * lengths[k]
        if not alpha > 1e-6 * abs(form):
            continue
        for a in range(d):
            e[a] = w[a] - alpha * arms[k, a] / lengths[k]
        forward(factor, e, y)
        leak = math.sqrt(dot(y, y)) * (1.0 + LINEAR_ALGEBRA)
        half = slab + leak + rest + 1e-11 * size
        middle = z[k] / lengths[k]
        lower[k] = lengths[k] * (middle + (score - half) / alpha)
        upper[k] = lengths[k] * (middle + (score + half) / alpha)
