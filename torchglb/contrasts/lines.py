"""What the weighted rewards say of one contrast: a bound for each scale, and all of them mixed.

Write ``b_s`` for the weight of row s in the contrast c, fixed before its reward is seen, and, for a
scale u of either sign, ``D_s(theta) = m(z_s + u b_s) - m(z_s)`` with ``z_s = <x_s, theta>``. By the
moment generating function of the rewards

    ``exp( sum_s [u b_s r_s - D_s(theta*)]/g )``

is a martingale of mean 1 (a supermartingale where the family's law dominates that of the rewards),
and so is its mean over fixed scales with fixed weights. Around theta_hat, with ``u = theta* -
theta_hat``, ``t_s = <x_s, u>``,

    ``sum_s D_s(theta*)/g = sum_s D_s(theta_hat)/g + <p, u> + rest``,  ``p = sum_s D_s'(theta_hat)
    x_s/g``,  ``rest <= u' A u/2``,  ``A = sum_s k_s x_s x_s'/g``,

with k_s of :func:`torchglb.contrasts.rows.bend_bound`: exact but for the last inequality. Split ``p
= alpha c + e``. Then the exponent is at least

    ``base - alpha (<c, theta*> - <c, theta_hat>)``,
    ``base = sum_s [u b_s r_s - D_s(theta_hat)]/g - max (<e, u> + u' A u/2)``,

the maximum over an ellipsoid that contains the joint set. This is a line in the value of the
contrast. Any alpha is valid; ``alpha = <c, M^-1 p>/<c, M^-1 c>`` makes e orthogonal to c in the
ellipsoid's metric, where the leak ``<e, u>`` is about least.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.contrasts.enclosure import LINEAR_ALGEBRA, Enclosure
from torchglb.contrasts.kernels import least_dual
from torchglb.contrasts.rows import bend_bound
from torchglb.families import GLMFamily
from torchglb.radii import self_concordance_of

#: scales ``u_k = 2^(1 - k) sqrt(g)`` of both signs, for contrasts of length 1
SCALES = 14
#: how many of them are looked at, on each side of the best
NEIGHBOURS = 1
EPS = 2.220446049250313e-16


def scale_weights() -> list[float]:
    """The weight of each scale and sign: proportional to ``1/(k + 4)``, of sum 1 over both signs.

    The k-th is at its best when the information ``1/<c, H^-1 c>`` is about ``3 * 4^k``; the weights
    favour what is met early on.
    """
    raw = [1.0 / (k + 4.0) for k in range(SCALES)]
    return [0.5 * value / sum(raw) for value in raw]


class LinearisedRows(NamedTuple):
    """Some rows at the estimate.

    Attributes:
        X: ``(k, d)``.
        r: rewards, ``(k)``.
        z: ``<x, theta_hat>``, ``(k)``.
        mean: ``mu(z)``, ``(k)``.
        normaliser: ``m(z)``, ``(k)``.
        reach: ``|<x, theta* - theta_hat>|`` at most, ``(k)``.
    """

    X: Tensor
    r: Tensor
    z: Tensor
    mean: Tensor
    normaliser: Tensor
    reach: Tensor

    @classmethod
    def of(
        cls, family: GLMFamily, X: Tensor, r: Tensor, center: Tensor, enclosure: Enclosure
    ) -> LinearisedRows:
        """Rows ``(k, d)`` at theta_hat."""
        z = X @ center
        given = family.mean(z), family.log_partition(z)
        return cls(X, r, z, *given, enclosure.reach.along(X))


class Line(NamedTuple):
    """``base - alpha v``, v the value of the contrast less that of the estimate.

    Attributes:
        log_weight: of the scale.
        base: at the estimate.
        alpha: positive for a scale u > 0, which bounds the contrast from below.
        score: base without the paid terms.
        bent: the maximum of ``<e, u> + u' A u/2``.
        leak: of ``<e, u>`` alone.
    """

    log_weight: float
    base: float
    alpha: float
    score: float
    bent: float
    leak: float


class LineSums:
    """Sums over the rows that give the lines of one contrast; O(d^2) per row and line.

    Args:
        family: gives m.
        dim: d.
        scales: which k; both signs of each.
        longest: ``|b_s|`` at most.
        S: the radius of the ball.
        concordance: R_s on the ball.
    """

    def __init__(
        self,
        family: GLMFamily,
        dim: int,
        scales: list[int],
        longest: float,
        S: float,
        concordance: float,
    ) -> None:
        sizes = {k: 2.0 ** (1 - k) * math.sqrt(family.dispersion) for k in scales}
        # the exponentials of a longer shift are of no use
        self.scales = [k for k in scales if sizes[k] * longest < 30.0 for _ in range(2)]
        u = [sizes[k] * sign for k, sign in zip(self.scales, itertools.cycle((1.0, -1.0)))]
        wide = [self_concordance_of(family, S + abs(each) * longest) for each in u]
        self.family, self.S, self.concordance, self.rows = family, S, concordance, 0
        self.u, self.wide = (torch.tensor(t, dtype=torch.float64)[:, None] for t in (u, wide))
        self.score, self.size, self.steep = torch.zeros((3, len(u)), dtype=torch.float64)
        self.p = torch.zeros((len(u), dim), dtype=torch.float64)
        self.A = torch.zeros((len(u), dim, dim), dtype=torch.float64)

    def add(self, rows: LinearisedRows, b: Tensor) -> None:
        """Adds rows with weights b, ``(k)``."""
        self.rows += len(b)
        if not self.scales:
            return
        family, h = self.family, self.u * b  # (lines, k)
        X, r, z, mean, normaliser, reach = rows
        sizes = 1.0 + r.abs() + mean.abs() + normaliser.abs()
        moved = z + h
        rise = family.log_partition(moved) - normaliser - h * mean
        slope = family.mean(moved) - mean
        bend = bend_bound(family, z, h, reach, self.concordance, self.wide)
        self.score += (h * (r - mean) - rise).sum(-1)
        self.size += ((1.0 + h.abs()) * sizes + rise.abs()).sum(-1)
        self.steep += (slope.abs() + EPS * sizes).sum(-1)
        self.p += slope @ X
        for A, curvature in zip(self.A, bend, strict=True):
            A += (X.mT * curvature) @ X

    def lines(self, contrast: Tensor, enclosure: Enclosure) -> list[Line]:
        """The lines of a contrast c of length 1; without those whose sums are not finite."""
        weights, found, g = scale_weights(), [], self.family.dispersion
        toward = torch.cholesky_solve(contrast[:, None], enclosure.factor)[:, 0]
        for i, k in enumerate(self.scales):
            p, A, score = self.p[i] / g, self.A[i] / g, float(self.score[i]) / g
            finite = torch.isfinite(p).all() and torch.isfinite(A).all()
            if not (math.isfinite(score) and bool(finite)):
                continue
            alpha = float(toward @ p) / float(toward @ contrast)
            if not alpha * float(self.u[i]) > 0:
                continue
            e = p - alpha * contrast
            leak = float(enclosure.lengths(e[None])[0])
            bent = largest_on_ellipsoid(e, A, enclosure.factor)
            # sums of n terms, each of them rounded a few times
            sizes = float(self.size[i]) + 2.0 * self.S * float(self.steep[i])
            rounding = (self.rows + 64) * EPS * sizes / g
            base = score - bent - rounding
            if not math.isfinite(base):  # what is not known is no evidence
                continue
            found.append(Line(math.log(weights[k]), base, alpha, score, bent, leak))
        return found


def largest_on_ellipsoid(e: Tensor, A: Tensor, factor: Tensor) -> float:
    """At least ``max <e, u> + u' A u/2`` over ``|L' u| <= 1``, by duality.

    In coordinates ``y = V' L' u`` with ``L^-1 A L^-T = V diag(a) V'`` and ``f = V' L^-1 e``, for
    every ``nu > max(a, 0)``: ``f'y + sum_i a_i y_i^2/2 <= nu/2 + sum_i [f_i y_i - (nu - a_i)
    y_i^2/2] <= nu/2 + sum_i f_i^2/(2 (nu - a_i))``. Convex in nu, and the least value is the
    maximum itself (:func:`torchglb.contrasts.kernels.least_dual`).

    Args:
        e: ``(d)``.
        A: symmetric, ``(d, d)``.
        factor: L, the Cholesky factor of the ellipsoid's matrix.
    """
    half = torch.linalg.solve_triangular(factor, A, upper=False)
    white = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    a, V = torch.linalg.eigh(0.5 * (white + white.mT))
    f2 = (V.mT @ torch.linalg.solve_triangular(factor, e[:, None], upper=False))[:, 0].square()
    # what the whitening's rounding is relative to
    spread = float(a.abs().max()) + math.sqrt(float(f2.sum()))
    return least_dual(a.numpy(), f2.numpy()) + LINEAR_ALGEBRA * spread


def mixture_ends(lines: list[Line], log_level: float) -> tuple[float, float]:
    """The least and the largest v with ``log sum_k w_k exp(base_k - alpha_k v) <= log_level``.

    The exponents are lower bounds, so this holds for the true v wherever the martingale stays below
    its level. Each line alone bounds v; from there Newton's iteration on the convex sum comes
    closer from outside, and never passes an end.
    """
    ends = []
    for sign in (-1.0, 1.0):  # the lower end, the upper end
        side = [line for line in lines if sign * line.alpha < 0]
        v = math.inf
        for line in side:
            v = min(v, (log_level - line.log_weight - line.base) / abs(line.alpha))
        for _ in range(40):
            if not math.isfinite(v):
                break
            value, slope = log_sum(lines, sign * v)
            slope *= sign
            if not (slope > 0.0 and value > log_level + 1e-9):
                break
            v -= (value - log_level) / slope
        ends.append(sign * v + sign * 1e-9 * (1.0 + abs(v)) if math.isfinite(v) else sign * v)
    return ends[0], ends[1]


def log_sum(lines: list[Line], v: float) -> tuple[float, float]:
    """``log sum_k w_k exp(base_k - alpha_k v)`` and its derivative in v."""
    exponents = [line.log_weight + line.base - line.alpha * v for line in lines]
    top = max(exponents)
    parts = [math.exp(exponent - top) for exponent in exponents]
    total = sum(parts)
    slope = -sum(part * line.alpha for part, line in zip(parts, lines, strict=True)) / total
    return top + math.log(total), slope
