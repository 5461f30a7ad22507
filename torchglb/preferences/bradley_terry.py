"""Bradley-Terry over many competitors: the loss of sparse rows and its minimiser.

``P(a beats b) = sigma(s_a - s_b + <f, u>)``: one-hot features for the competitors, controls f. Only
differences of scores within a group that battles connect are identified, so theta = (s, u) stands
for the representative whose scores add up to 0 in each group, and every statement is about
contrasts within a group. A pass is O(n) for n distinct rows, a Newton step O(d^3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import linalg

from torchglb.backend import Floats, Ints
from torchglb.errors import SolverError
from torchglb.preferences.kernels import expand, gram, squared_lengths
from torchglb.rounding import EVALUATION

EPS = float(np.finfo(np.float64).eps)
#: Newton steps of a fit
FIT_STEPS = 100


class BattleRows(NamedTuple):
    """Distinct rows with their counts: competitors ``(n,)``, controls ``(n, C)``, counts, wins.

    Attributes:
        left: a.
        right: b.
        controls: f.
        weight: how often the row was seen.
        wins: how often a won; ties count half.
    """

    left: Ints
    right: Ints
    controls: Floats
    weight: Floats
    wins: Floats


class ScorePoint(NamedTuple):
    """The loss at theta, its derivatives, and bounds on what rounding did to loss and gradient."""

    theta: Floats
    loss: float
    gradient: Floats
    hessian: Floats
    loss_error: float
    gradient_error: float


@dataclass(frozen=True, eq=False)
class BattleLoss:
    """The negative log-likelihood of battles between K competitors.

    Args:
        rows: distinct rows.
        group: the number of each competitor's group, ``(K,)``; groups are what battles connect.
    """

    rows: BattleRows
    group: Ints

    @property
    def competitors(self) -> int:
        """K."""
        return len(self.group)

    @property
    def dim(self) -> int:
        """d = K + C."""
        return self.competitors + self.rows.controls.shape[1]

    def at(self, theta: Floats, curved: bool = True) -> ScorePoint:
        """One pass; without the Hessian if it is not wanted."""
        d = self.dim
        gradient, sums = np.empty(d), np.empty(3)
        hessian = np.empty((d, d) if curved else (0, 0))
        theta = np.ascontiguousarray(theta)
        expand(*self.rows, theta, gradient, hessian, sums)
        loss, size, steep = (float(v) for v in sums)
        # terms lose EVALUATION roundings each, z itself a few more; the sums are compensated
        lost = (EVALUATION + 8.0 + self.rows.controls.shape[1]) * EPS
        reach = float(np.abs(theta).max(initial=0.0))
        return ScorePoint(
            theta, loss, gradient, hessian, lost * (size + reach * steep), lost * steep
        )

    @cached_property
    def _members(self) -> Floats:
        """The unit vector of each group, ``(groups, K)``: directions that no battle sees."""
        found = np.equal.outer(np.arange(self.group.max() + 1), self.group).astype(np.float64)
        return found / np.sqrt(found.sum(-1, keepdims=True))

    def centred(self, theta: Floats) -> Floats:
        """The representative whose scores add up to 0 in each group."""
        found, units = theta.copy(), self._members
        scores = found[: self.competitors]
        scores -= (units @ scores) @ units
        return found

    def fixed(self, hessian: Floats) -> Floats:
        """The Hessian with curvature along the directions that no battle sees.

        That changes nothing for differences of centred parameters.
        """
        K, units = self.competitors, self._members
        found = hessian.copy()
        found[:K, :K] += max(float(np.trace(hessian)) / len(hessian), 1e-3) * (units.T @ units)
        return found

    def predictors(self, theta: Floats) -> Floats:
        """``<x, theta>`` of every row."""
        rows, K = self.rows, self.competitors
        return theta[rows.left] - theta[rows.right] + rows.controls @ theta[K:]

    def curvature(self, theta: Floats) -> Floats:
        """``w m''(<x, theta>)`` of every row."""
        e = np.exp(-np.abs(self.predictors(theta)))
        return self.rows.weight * e / (1.0 + e) ** 2

    def gram(self, weight: Floats) -> Floats:
        """``sum_p w_p x_p x_p'``, with curvature along the directions that no battle sees."""
        rows, found = self.rows, np.empty((self.dim, self.dim))
        gram(rows.left, rows.right, rows.controls, weight, found)
        return self.fixed(found)

    def lengths(self, cover: Floats) -> Floats:
        """``x' M x`` of every row."""
        rows, found = self.rows, np.empty(len(self.rows.left))
        squared_lengths(rows.left, rows.right, rows.controls, np.ascontiguousarray(cover), found)
        return found


class ScoreFit(NamedTuple):
    """The minimiser over the ball.

    Attributes:
        at: the point.
        inside: whether it is the unconstrained minimiser, or the ball holds it back.
    """

    at: ScorePoint
    inside: bool


def fit_scores(loss: BattleLoss, S: float) -> ScoreFit:
    """``argmin L`` over ``|theta| <= S``: Newton, and a ridge that is found by bisection outside.

    Raises:
        SolverError: if Newton's method does not converge, which it should.
    """
    found = _newton(loss, np.zeros(loss.dim), 0.0, S)
    if found is not None:
        return ScoreFit(found, True)
    low, high = 1e-12, 1e6  # |theta| falls as the ridge grows
    start = np.zeros(loss.dim)
    while high / low > 1.0 + 1e-9:
        ridge = math.sqrt(low * high)
        at = _newton(loss, start, ridge, math.inf)
        if at is None:
            raise SolverError("the Bradley-Terry fit did not converge")
        if np.linalg.norm(at.theta) > S:
            low = ridge
        else:
            high, start = ridge, at.theta
    return ScoreFit(loss.at(start), False)


def _newton(loss: BattleLoss, theta: Floats, ridge: float, limit: float) -> ScorePoint | None:
    """The minimiser of ``L + ridge |theta|^2/2``; None if it is longer than the limit."""
    at = loss.at(theta)
    for _ in range(FIT_STEPS):
        gradient = at.gradient + ridge * at.theta
        noise = 4.0 * (at.gradient_error + ridge * EPS * np.linalg.norm(at.theta))
        matrix = loss.fixed(at.hessian) + ridge * np.eye(loss.dim)
        try:
            step = linalg.cho_solve(linalg.cho_factor(matrix), gradient)
        except linalg.LinAlgError:  # curvature has underflowed: the minimum is far outside
            return None
        decrease = float(gradient @ step)
        if decrease <= 1e-22 or np.linalg.norm(gradient) <= noise:
            return at if np.linalg.norm(at.theta) <= limit else None
        value = at.loss + 0.5 * ridge * float(at.theta @ at.theta)
        size = 1.0
        for _ in range(60):
            new = loss.at(loss.centred(at.theta - size * step))
            lower = new.loss + 0.5 * ridge * float(new.theta @ new.theta)
            slack = at.loss_error + new.loss_error
            if lower <= value - 1e-4 * size * decrease + slack:
                break
            size *= 0.5
        at = new
        if np.linalg.norm(at.theta) > 4.0 * limit:
            return None
    return at if np.linalg.norm(at.theta) <= limit else None
