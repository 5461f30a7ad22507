"""An ellipsoid around the joint set, seen from the estimate, and how far it reaches on each row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.contrasts.rows import least_curvature
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.posterior.gaussian import holds_on_line, normal_row_increments

#: scales of the centred prior
SCALES = 8
#: rounds in which reach and matrix sharpen each other
ROUNDS = 8
#: what the arithmetic with a matrix may change of a bound, relative to it
LINEAR_ALGEBRA = 1e-4


class Reach(NamedTuple):
    """How far the joint set reaches from theta_hat: in a ball and in ellipsoids, all at once.

    Attributes:
        ball: ``|u|`` at most.
        factors: Cholesky factors of the ellipsoids' matrices, ``(d, d)`` each.
    """

    ball: float
    factors: tuple[Tensor, ...]

    def along(self, rows: Tensor) -> Tensor:
        """``|<x, u>|`` at most, for ``(k, d)``."""
        found = torch.linalg.vector_norm(rows, dim=-1) * self.ball
        for factor in self.factors:
            found = torch.minimum(found, _lengths(factor, rows))
        return found


class Enclosure(NamedTuple):
    """``{theta_hat + u : u' M u <= 1}`` contains the joint set.

    Attributes:
        matrix: M, ``(d, d)``.
        factor: its Cholesky factor.
        reach: of this ellipsoid and those that led to it.
        lam: of the budget that gave it: the scale of a centred prior, or of a ridge where negative.
    """

    matrix: Tensor
    factor: Tensor
    reach: Reach
    lam: float

    def lengths(self, rows: Tensor) -> Tensor:
        """``max |<x, u>|`` over the ellipsoid, for ``(k, d)``."""
        return _lengths(self.factor, rows)


def _lengths(factor: Tensor, rows: Tensor) -> Tensor:
    white = torch.linalg.solve_triangular(factor, rows.mT, upper=False)
    return torch.linalg.vector_norm(white, dim=0) * (1.0 + LINEAR_ALGEBRA)


class Budget(NamedTuple):
    """``L(theta*) - L(theta_hat) <= height + (lam/2)|theta* - theta_hat|^2``; lam of any sign."""

    height: float
    lam: float


def centred_budgets(
    likelihood: NegativeLogLikelihood, center: Tensor, hessian: Tensor, S: float, log_level: float
) -> list[Budget]:
    """What a prior centred at the tested parameter says of theta*, for each of its scales.

    For every theta, ``M_t(theta) = (1/8) sum_k E exp(L_t(theta) - L_t(nu))``, ``nu ~ N(theta,
    I/lam_k)``, is at most a martingale of mean 1 if theta* = theta: each ``exp(L_t(theta*) -
    L_t(nu))`` is, for a fixed nu (with weights in [0, 1] by Jensen's inequality), and the prior may
    depend on the theta that is tested. So ``M_t(theta*) < A`` for all t with probability at least
    ``1 - 1/A``. By Donsker and Varadhan's formula with the law ``P = N(theta_hat, W^-1)``,

        ``log(8 A) > L(theta*) - E_P L - KL(P || N(theta*, I/lam))``,
        ``KL = (lam tr W^-1 + lam |theta* - theta_hat|^2 - d + log det(W/lam))/2``,

    for every k and any W; here ``W = H + lam I``. That is the budget with ``height = log(8 A) +
    sum_s E m(z_s + sU) - m(z_s) + (lam tr W^-1 - d + log det(W/lam))/2``. (P is symmetric about
    theta_hat, so only the even part of the loss counts in E_P L.)

    Args:
        likelihood: the rows of one problem.
        center: theta_hat, ``(d)``.
        hessian: H there, ``(d, d)``.
        S: the radius of the ball; the scales are ``lam_k = 4^k d/S^2``.
        log_level: ``log A``.
    """
    if not holds_on_line(likelihood.family):
        return []  # the prior has no edge, and other families' constants hold on the ball only
    d, found = center.shape[-1], []
    values, basis = torch.linalg.eigh(hessian)
    values = values.clamp_min(0.0)
    for k in range(SCALES):
        lam = d / S**2 * 4.0**k
        if lam > 2.0 * float(values[-1]):
            break  # not even the best direction is left
        scale = values + lam
        root = basis.mT / scale.sqrt()[:, None]
        spread = float(normal_row_increments(likelihood, center, root))
        divergence = 0.5 * float((lam / scale - 1.0 + (scale / lam).log()).sum())
        height = log_level + math.log(SCALES) + spread + divergence
        if height < math.inf:
            found.append(Budget(height * (1.0 + 1e-9), lam))
    return found


def enclose(
    likelihood: NegativeLogLikelihood,
    center: Tensor,
    S: float,
    concordance: float,
    budgets: list[Budget],
    gap: float,
) -> Enclosure | None:
    """The smallest ellipsoid that the budgets give; None if they give none.

    With ``u = theta* - theta_hat``, ``t_s = <x_s, u>`` and ``|t_s| <= reach_s``,

        ``L(theta*) - L(theta_hat) >= <grad L(theta_hat), u> + sum_s (w_s/g) k_s t_s^2``

    with k_s of :func:`least_curvature`, and the first term is at least ``-gap``, by the
    Frank-Wolfe gap of theta_hat over the ball, which contains theta*. With ``K = sum_s (w_s/g) k_s
    x_s x_s'`` a budget becomes ``u' (K - (lam/2) I) u <= height + gap``: an ellipsoid where that
    matrix is positive definite. It bounds ``|t_s|`` again, which sharpens k_s; at first the ball
    does, ``|t_s| <= |x_s| (S + |theta_hat|)``. All budgets hold at once, so that each round may
    take the best, by ``tr(M^-1 K)``, the sum of ``reach^2`` with the rows' curvature.

    Args:
        likelihood: the rows of one problem.
        center: theta_hat, ``(d)``.
        S: the radius of the ball.
        concordance: R_s on it.
        budgets: of the joint set.
        gap: at least ``<grad L(theta_hat), theta_hat - theta>`` over the ball.
    """
    family, (n, d) = likelihood.family, likelihood.X.shape
    eye = torch.eye(d, dtype=torch.float64)
    known = Reach(S + float(torch.linalg.vector_norm(center)), ())
    best: Enclosure | None = None
    for _ in range(ROUNDS):
        K, settled = torch.zeros_like(eye), best is not None
        for rows in likelihood.parts():  # the reach of a row is not kept, but found anew
            X = rows.X.double()
            before = reach = known.along(X)
            if best is not None:
                reach = torch.minimum(before, best.lengths(X))
                settled = settled and bool((reach >= 0.99 * before).all())
            bend = least_curvature(family, X @ center, reach, concordance) / family.dispersion
            K += (X.mT * (bend if rows.w is None else bend * rows.w)) @ X
        budget = _smallest(K, budgets, gap, n)
        if budget is None:
            break
        known = known if best is None else best.reach
        matrix = (K - 0.5 * budget.lam * eye) / (budget.height + gap)
        factor = torch.linalg.cholesky(matrix)
        best = Enclosure(matrix, factor, Reach(known.ball, (*known.factors, factor)), budget.lam)
        if settled:
            break
    return best


def _smallest(K: Tensor, budgets: list[Budget], gap: float, rows: int) -> Budget | None:
    """The budget of the least ``tr(M^-1 K)`` whose matrix M is far from a singular one, or None."""
    values, best, size = torch.linalg.eigvalsh(K), None, math.inf
    d = len(values)
    for budget in budgets:
        shifted = values - 0.5 * budget.lam
        low, high = float(shifted[0]), float(shifted[-1])
        # sums of n rows, and solving with it, err by some (n + d^2) eps times the condition
        if not low * LINEAR_ALGEBRA > (rows + 16.0 * d * d) * 2.3e-16 * (high + abs(budget.lam)):
            continue
        trace = (budget.height + gap) * float((values / shifted).sum())
        if trace < size:
            size, best = trace, budget
    return best
