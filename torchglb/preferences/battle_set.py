"""The confidence set of a leaderboard: bounds on all contrasts of many competitors at once.

Two martingales, mixed half and half, so that both statements hold together at delta:

- a uniform prior on the ball: ``L(theta) <= B_0`` (:mod:`torchglb.radii.posterior.uniform`);
- normal priors ``N(theta, I/lam_k)`` centred at the parameter that is tested, lam_k fixed
  beforehand: ``L(theta) - (lam_k/2)|theta - c|^2 <= B_k`` for every k and every c. There is no
  log n per dimension in it. It is convex where the Hessian is at least lam_k I, which
  self-concordance proves on the first set; only such k are used.

Pairs may be chosen in any way from what was seen before; both hold at all times. All competitors
are part of theta, also those that no battles connect: which groups there are depends on the results
that came before, and the statement must not. (Scores of a group may be shifted together: the loss
does not see it, and neither do levels, since c may be shifted as theta* is.)
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy import linalg

from torchglb.backend import Floats
from torchglb.domain import Ball
from torchglb.families import Bernoulli
from torchglb.linalg import cut_ball
from torchglb.preferences.bradley_terry import EPS, BattleLoss, ScorePoint, fit_scores
from torchglb.radii import Problem
from torchglb.radii.posterior.candidates import posterior_at
from torchglb.radii.posterior.increments import increment
from torchglb.radii.posterior.laws import Law, NormalLaw
from torchglb.radii.posterior.uniform import on_ellipsoids, uniform_prior

#: posteriors of the uniform prior that are tried: kappa, rho^2/(d + 2 + 2k), shape k
KAPPA, SPREAD, SHAPES = (0.5, 0.75, 0.9), (1.0, 2.0), (0.0, 2.0, 8.0, 32.0)
#: the centre of such a posterior is at most so far from the middle, relative to S
DEEPEST = 0.95
#: lam_k of the priors that are centred at the tested parameter
SCALES = tuple(0.25 * 6.0**k for k in range(8))
#: what inverting well-conditioned matrices may lose, relative
INVERSION = 1e-8
#: rounds in which the sets sharpen each other
ROUNDS = 8
#: Newton steps of a bound
BOUND_STEPS = 12
#: of a half width, what no cut could take from it any more
NEAR = 2e-3


class Region(NamedTuple):
    """``L(theta) - (lam/2)|theta - theta_hat|^2 <= level``, and an ellipsoid around it.

    Attributes:
        lam: 0 for the uniform prior.
        level: B.
        cover: V; ``<c, theta - theta_hat>^2 <= c'Vc`` for centred contrasts, ``(d, d)``.
        size: the mean of ``sqrt(x'Vx)`` over the rows.
    """

    lam: float
    level: float
    cover: Floats
    size: float


class BattleSet:
    """Where theta can be: theta* is in it at all times, with probability at least 1 - delta.

    Args:
        loss: of the battles.
        S: ``|theta*| <= S`` for the centred scores and the coefficients.
        delta: the failure probability.

    Example:
        >>> from torchglb.preferences.battles import battles_of
        >>> battles = battles_of(["a", "a", "b"], ["b", "b", "a"], [1.0, 1.0, 0.0])
        >>> found = BattleSet(BattleLoss(battles.rows, np.zeros(2, int)), S=4.0, delta=0.05)
        >>> bool(found.exact(np.array([1.0, -1.0])) > 0)
        True
    """

    def __init__(self, loss: BattleLoss, S: float, delta: float) -> None:
        self.loss, self.S, self.delta = loss, S, delta
        self.fit = fit_scores(loss, S)
        at, half = self.fit.at, 0.5 * delta
        norm = float(np.linalg.norm(at.theta))
        #: what an estimate on the sphere, or short of the minimum, may lose: grad L <= this
        gap = float(at.gradient @ at.theta) + S * float(np.linalg.norm(at.gradient))
        self._gap = max(gap, 0.0) + 2.0 * S * at.gradient_error
        #: keeps the curvature invertible; costs ridge (S + |theta_hat|)^2 of gamma
        self._ridge = 1.0 / (8.0 * S * S * (1.0 + S))
        self._paid = self._ridge * (S + norm) ** 2
        #: |<x, theta - theta_hat>| of every row is at most this
        self._far = np.full(len(loss.rows.left), self._longest * (S + norm))
        self._choose(half)

    @property
    def theta(self) -> Floats:
        """The estimate, ``(K + C,)``."""
        return self.fit.at.theta

    # ---- levels --------------------------------------------------------------------------

    @cached_property
    def _longest(self) -> float:
        """The length of the longest row."""
        controls = self.loss.rows.controls
        return math.sqrt(2.0 + float((controls**2).sum(-1).max(initial=0.0)))

    def _uniform_level(self, delta: float) -> float:
        """``log(1/delta) + KL(P || Q) + E_P L``, the least over the posteriors.

        Rows and parameters are scaled so that rows have length at most 1.
        """
        scale, loss = 1.0 / self._longest, self.loss
        problem = Problem(Bernoulli(), Ball(loss.dim, self.S / scale), delta)
        prior = uniform_prior(problem)
        norm = float(np.linalg.norm(self.theta))
        at = loss.at(min(1.0, DEEPEST * self.S / norm) * self.theta if norm > 0 else self.theta)
        point = torch.from_numpy(at.theta / scale)
        hessian = torch.from_numpy(scale**2 * at.hessian)
        best, doubt = math.inf, EPS * len(loss.rows.left)
        for shape in SHAPES:
            for kappa in KAPPA:
                for spread in SPREAD:
                    rho2 = spread * (loss.dim + 2.0 * shape + 2.0)
                    numbers = torch.tensor([kappa, rho2, shape], dtype=torch.float64)
                    candidate = on_ellipsoids(loss.dim, *numbers)
                    divergence, root = posterior_at(prior, point, hessian, candidate, doubt)
                    cover = root.mT @ root
                    law = prior.law(0.5 * loss.dim + candidate.shape)
                    added = self._increments(problem, law, at, scale**2 * cover.numpy())
                    best = min(best, float(divergence) + added)
        return problem.log_failure + best + at.loss + at.loss_error

    def _increments(self, problem: Problem, law: Law, at: ScorePoint, cover: Floats) -> float:
        """``sum_s E m(z_s + s_s U) - m(z_s)``, from above: a pass."""
        rows = self.loss.rows
        s2 = torch.from_numpy(self.loss.lengths(cover) * (1.0 + INVERSION))
        z = torch.from_numpy(self.loss.predictors(at.theta))
        each = increment(problem.family, law, z, s2, None, torch.tensor(0.25))
        return float(each @ torch.from_numpy(rows.weight)) * (1.0 + 1e-10)

    def _centred_level(self, lam: float, delta: float) -> float:
        """``log(8/delta) + KL + E_P L`` without ``(lam/2)|theta - c|^2``, for P = N(c, W^-1)."""
        at, loss = self.fit.at, self.loss
        values = np.maximum(self._spectrum, 0.0)
        problem = Problem(Bernoulli(), Ball(loss.dim, self.S), delta)
        matrix = at.hessian + lam * np.eye(loss.dim)
        cover = linalg.cho_solve(linalg.cho_factor(matrix), np.eye(loss.dim))
        added = self._increments(problem, NormalLaw(), at, cover)
        divergence = 0.5 * float((np.log1p(values / lam) - values / (values + lam)).sum())
        level = problem.log_failure + math.log(len(SCALES)) + divergence * (1.0 + 1e-10)
        return level + at.loss + at.loss_error + added

    @cached_property
    def _spectrum(self) -> Floats:
        """The eigenvalues of the Hessian."""
        return np.linalg.eigvalsh(self.fit.at.hessian).astype(np.float64)

    def _choose(self, delta: float) -> None:
        """The smallest ellipsoid, and the smallest set over which maxima can be found.

        Every set may use that theta is in all others: what one says of ``|<x, theta - theta_hat>|``
        sharpens the next. Ellipsoids need no convexity; cuts do.
        """
        levels = {0.0: self._uniform_level(delta)}
        levels |= {lam: self._centred_level(lam, delta) for lam in SCALES}
        found: dict[float, Region] = {}
        for _ in range(ROUNDS):
            before = float(self._far.sum())
            for lam, level in levels.items():
                for _ in range(ROUNDS if not found else 1):
                    region = self._region(lam, level)
                    if region is None:  # the prior is too narrow for what is known
                        break
                    found[lam] = region
            if float(self._far.sum()) > 0.99 * before:
                break
        self.region = min(found.values(), key=lambda region: region.size)
        # m'' falls at most by e^-|<x, theta - theta_hat>|: there the Hessian is at least lam I
        curvature = self.loss.curvature(self.theta) * np.exp(-self._far)
        values = np.linalg.eigvalsh(self.loss.gram(curvature))
        least = float(values[0] - INVERSION * values[-1])
        convex = [region for region in found.values() if region.lam <= least or region.lam == 0.0]
        #: the set of the exact bounds
        self.convex = min(convex, key=lambda region: region.size)

    def _region(self, lam: float, level: float) -> Region | None:
        """A step of the fixed point of Theorem 3.2, with a rate of its own for each row.

        ``L(theta) - L(theta_hat) >= sum_s w_s m''_s phi(D_s) <x_s, theta - theta_hat>^2 - gap`` if
        ``|<x_s, theta - theta_hat>| <= D_s``: a row that is hardly known spoils its own rate only.
        """
        at, d = self.fit.at, self.loss.dim
        height = level - at.loss + at.loss_error + self._gap + self._paid
        matrix = self.loss.gram(self.loss.curvature(self.theta) * _contraction(self._far))
        matrix += (self._ridge - 0.5 * lam) * np.eye(d)
        values = np.linalg.eigvalsh(matrix) if lam > 0.0 else np.ones(1)
        if values[0] <= INVERSION * values[-1]:
            return None
        cover = linalg.cho_solve(linalg.cho_factor(matrix), np.eye(d))
        cover = (0.5 * height * (1.0 + INVERSION)) * (cover + cover.T)
        local = np.sqrt(self.loss.lengths(cover)) * (1.0 + INVERSION)
        self._far = np.minimum(self._far, local)
        return Region(lam, level, cover, float(local.mean()))

    # ---- bounds on contrasts -------------------------------------------------------------

    def rough(self, contrasts: Floats) -> Floats:
        """Upper bounds on ``max <c, theta>`` for centred contrasts ``(P, d)``: no pass.

        The smaller of what the ellipsoid and the ball allow.
        """
        square = np.maximum(((contrasts @ self.region.cover) * contrasts).sum(-1), 0.0)
        size = np.linalg.norm(contrasts, axis=-1)
        return self._ends(contrasts @ self.theta, square, size)

    def rough_pairs(self) -> Floats:
        """:meth:`rough` of ``s_i - s_j`` for all pairs, ``(K, K)``."""
        K = self.loss.competitors
        scores, part = self.theta[:K], self.region.cover[:K, :K]
        own = np.diag(part)
        square = np.maximum(own[:, None] + own[None, :] - 2.0 * part, 0.0)
        bound = self._ends(scores[:, None] - scores[None, :], square, math.sqrt(2.0))
        np.fill_diagonal(bound, 0.0)
        return bound

    def _ends(self, middle: Floats, square: Floats, size: Floats | float) -> Floats:
        length = np.sqrt(square) * (1.0 + INVERSION)
        bound = np.minimum(middle + length, self.S * size)
        return bound + 1e-11 * (1.0 + np.abs(middle)) * (1.0 + size)

    @cached_property
    def _factor(self) -> tuple[Floats, bool]:
        """The Cholesky factor of the Hessian at theta_hat."""
        matrix = self.loss.fixed(self.fit.at.hessian) + self._ridge * np.eye(self.loss.dim)
        return linalg.cho_factor(matrix)

    def exact(self, contrast: Floats) -> float:
        """A certified upper bound on ``max <c, theta>``, closed as far as arithmetic goes.

        Newton's method on the optimality conditions ``grad G(theta) = u c``, ``G(theta) = B``, G
        the left side of the region; each of its points gives a cut
        (:func:`torchglb.linalg.cut_ball`), the least of which is returned. Where the ball or the
        edge of convexity holds the points back, cuts do not close the gap entirely; where the
        ellipsoid is smaller than the region, there is nothing to gain, which a point well inside
        the region shows whose contrast is as large.
        """
        hat, region = self.fit.at, self.convex
        best = float(self.rough(contrast[None, :])[0])
        direction = linalg.cho_solve(self._factor, contrast)
        length = math.sqrt(max(float(contrast @ direction), 1e-300))
        u = math.sqrt(2.0 * max(region.level - hat.loss, 1e-12)) / length
        at, value = self._moved(hat, u * direction), math.inf
        for _ in range(BOUND_STEPS):
            before, value = value, self._cut(at, contrast)
            at_rest = abs(before - value) < 1e-9 * (1.0 + abs(value))
            best = min(best, value)
            if at_rest or self._reaches(at, contrast, best):
                break
            step = self._towards(at, contrast, u)
            if step is None:
                break
            move, u = step
            at = self._moved(at, move)
        return best

    def _reaches(self, at: ScorePoint, contrast: Floats, bound: float) -> bool:
        """Whether a point well inside region and ball has nearly the bound for its contrast."""
        hat, level = self.fit.at, self.convex.level
        if level - at.loss - at.loss_error < NEAR * (level - hat.loss):
            return False
        left = bound - float(contrast @ at.theta)
        whole = bound - float(contrast @ hat.theta)
        return left <= NEAR * whole and float(np.linalg.norm(at.theta)) <= self.S

    def _moved(self, at: ScorePoint, move: Floats) -> ScorePoint:
        """G with its derivatives at another point, which stays where G is certainly convex."""
        hat, lam = self.fit.at.theta, self.convex.lam
        theta = at.theta + move
        if lam > 0.0:
            far = np.abs(self.loss.predictors(theta - hat))
            share = float((far / self._far).max(initial=0.0))
            theta = hat + min(1.0, 0.999 / max(share, 0.999)) * (theta - hat)
        found = self.loss.at(theta)
        if lam == 0.0:
            return found
        away = theta - hat
        return found._replace(
            loss=found.loss - 0.5 * lam * float(away @ away) * (1.0 - 1e-12),
            gradient=found.gradient - lam * away,
            hessian=found.hessian - lam * np.eye(len(away)),
            loss_error=found.loss_error + 1e-12 * lam * float(away @ away),
            gradient_error=found.gradient_error + 8.0 * EPS * lam * float(np.linalg.norm(theta)),
        )

    def _towards(self, at: ScorePoint, contrast: Floats, u: float) -> tuple[Floats, float] | None:
        """The Newton step on the optimality conditions, no longer than the model is good for."""
        try:
            factor = linalg.cho_factor(self.loss.fixed(at.hessian))
        except linalg.LinAlgError:
            return None
        along = linalg.cho_solve(factor, contrast)
        off = linalg.cho_solve(factor, at.gradient - u * contrast)
        slope = float(at.gradient @ along)
        if not slope > 0.0:
            return None
        change = (self.convex.level - at.loss + float(at.gradient @ off)) / slope
        move = change * along - off
        largest = float(np.abs(self.loss.predictors(move)).max(initial=0.0))
        size = min(1.0, 1.5 / largest) if largest > 0 else 1.0
        new = u + size * change
        return (size * move, new) if math.isfinite(new) and new > 0.0 else None

    def _cut(self, at: ScorePoint, contrast: Floats) -> float:
        """What ``G(point) + <grad G(point), theta - point> <= B`` allows within the ball."""
        along = float(at.gradient @ at.theta)
        size = float(np.linalg.norm(at.theta)) + self.S
        paid = at.loss_error + size * at.gradient_error
        paid += (16.0 + 2.0 * self.loss.dim) * EPS * size * float(np.linalg.norm(at.gradient))
        paid += 8.0 * EPS * (abs(self.convex.level) + abs(at.loss) + abs(along))
        offset = np.array(self.convex.level - at.loss + along + paid)
        given = (contrast, at.gradient, offset, np.array(self.S))
        cut = cut_ball(*(torch.from_numpy(part) for part in given))
        return float(cut.value) + (8 + self.loss.dim) * EPS * self.S * float(cut.whole)


def _contraction(D: Floats) -> Floats:
    """``(D - 1 + e^-D)/D^2``, rounded down; 1/2 at D = 0."""
    safe = np.maximum(D, 1e-2)
    found = (safe + np.expm1(-safe)) / safe**2 * (1.0 - 1e-12)
    return np.where(D > 1e-2, found, 0.5 - D / 6.0)
