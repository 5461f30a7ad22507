"""One look at one problem: what the joint set and the weighted rewards say of each contrast."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.choices import Relation
from torchglb.contrasts.enclosure import Budget, Enclosure, centred_budgets, enclose
from torchglb.contrasts.lines import (
    NEIGHBOURS,
    SCALES,
    Line,
    LinearisedRows,
    LineSums,
    log_sum,
    mixture_ends,
)
from torchglb.contrasts.weights import WeighedRows
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import frank_wolfe_gap


class Joint(NamedTuple):
    """The joint set of one problem.

    Attributes:
        rows: with their weights.
        center: theta_hat, ``(d)``.
        height: ``L(theta*) - L(theta_hat)`` at most, in the likelihood-ratio set.
        log_level: ``log A``: ``M(theta*) < A`` of the two joint martingales' mean.
        S: the radius of the ball.
        concordance: R_s on it.
        centred: whether the centred prior has half of the level.
    """

    rows: WeighedRows
    center: Tensor
    height: float
    log_level: float
    S: float
    concordance: float
    centred: bool

    @property
    def likelihood(self) -> NegativeLogLikelihood:
        """The loss of its rows."""
        return self.rows.likelihood

    def raised(self, more: float) -> Joint:
        """The set of a level A that is ``e^more`` times as high."""
        return self._replace(height=self.height + more, log_level=self.log_level + more)


class Look(NamedTuple):
    """What is known of the m contrasts of one problem.

    Attributes:
        at_center: ``<c, theta_hat>``, ``(m)``.
        joint: the half width of the enclosing ellipsoid, ``(m)``; infinite without one.
        lines: of each contrast.
        enclosure: of the joint set, or None.
    """

    at_center: list[float]
    joint: list[float]
    lines: list[list[Line]]
    enclosure: Enclosure | None

    def ends(self, which: int, log_level: float) -> tuple[float, float]:
        """Ends of one contrast: of its lines at a level, within the ellipsoid."""
        center, half = self.at_center[which], self.joint[which]
        low, high = -half, half
        if self.lines[which]:
            below, above = mixture_ends(self.lines[which], log_level)
            low, high = max(low, below), min(high, above)
        return center + low, center + high

    def log_evidence(self, which: int, value: float, relation: Relation) -> float:
        """``log sum_k w_k exp(line_k)`` at least, over the part of the joint set in a null.

        Over ``<c, theta> <= value`` a line with alpha > 0 is least at the value itself, and the
        others have no bound; likewise for ``>=``.
        """
        v = value - self.at_center[which]
        lines = self.lines[which]
        if relation != "==":
            sign = 1.0 if relation == "<=" else -1.0
            lines = [line for line in lines if sign * line.alpha > 0]
        if abs(v) > self.joint[which] and (
            relation == "==" or (v < 0 if relation == "<=" else v > 0)
        ):
            return math.inf  # no such point in the joint set
        return log_sum(lines, v)[0] if lines else -math.inf


def look(joint: Joint, wanted: list[float]) -> Look:
    """Everything at once: O(n d^2) for the joint set, and for each contrast and scale.

    Rows are walked over some at a time, and nothing of size n is made of them.

    Args:
        joint: the set.
        wanted: for each contrast the logarithm of the level that its martingale should reach; the
            scales are chosen for it.
    """
    likelihood, center = joint.likelihood, joint.center
    at, errors = likelihood.expand_with_errors(center)
    S = torch.tensor(joint.S, dtype=torch.float64)
    gap = float(frank_wolfe_gap(center, at.gradient, S)) * (1.0 + 1e-12)
    gap += float(errors.loss + 2.0 * S * errors.gradient)
    # theta* is in the ball, so |u| <= wide: 1/wide^2 may be added as a ridge that costs 1
    wide = joint.S + float(torch.linalg.vector_norm(center))
    budgets = [Budget(joint.height, 0.0), Budget(joint.height + 1.0, -2.0 / wide**2)]
    if joint.centred:
        level = joint.log_level + math.log(2.0)
        budgets += centred_budgets(likelihood, center, at.hessian, joint.S, level)
    found = enclose(likelihood, center, joint.S, joint.concordance, budgets, gap)
    contrasts = torch.from_numpy(joint.rows.contrasts)
    at_center, m = (contrasts @ center).tolist(), len(contrasts)
    if found is None:
        return Look(at_center, [math.inf] * m, [[] for _ in range(m)], None)
    family, d = likelihood.family, likelihood.dim
    information, longest = torch.zeros((2, m), dtype=torch.float64)
    for block in joint.rows.blocks():
        information += family.variance(block.X @ center) @ block.b.square()
        longest = torch.maximum(longest, block.b.abs().amax(0))
    sums = []
    for j in range(m):
        scales = _near(float(information[j]), wanted[j])
        sums.append(LineSums(family, d, scales, float(longest[j]), joint.S, joint.concordance))
    for block in joint.rows.blocks():
        rows = LinearisedRows.of(family, block.X, block.r, center, found)
        for each, b in zip(sums, block.b.mT, strict=True):
            each.add(rows, b)
    lines = [each.lines(c, found) for each, c in zip(sums, contrasts, strict=True)]
    return Look(at_center, found.lengths(contrasts).tolist(), lines, found)


def _near(information: float, wanted: float) -> list[int]:
    """The scales around ``u = sqrt(2 wanted/information)``, where the bound is about least.

    Which are looked at may depend on the data: the others only add to the martingale.
    """
    if not 0.0 < information < math.inf:
        return []
    best = 1.0 - 0.5 * math.log2(2.0 * max(wanted, 1.0) / information)
    middle = min(max(round(best), 0), SCALES - 1)
    low, high = max(middle - NEIGHBOURS, 0), min(middle + NEIGHBOURS, SCALES - 1)
    return list(range(low, high + 1))
