"""The centred radius: scales of a prior around the tested parameter, mixed with the uniform one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import numbers_on
from torchglb.checks import check_count, refuse
from torchglb.estimate import Estimate
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.optim import frank_wolfe_gap
from torchglb.radii.base import Evaluation, Radius, Refinement, State, check_likelihood
from torchglb.radii.centred import average_priors, in_double, prior_costs
from torchglb.radii.curvature import SLACK, curved_region
from torchglb.radii.gaussian_prior import check_whole_line
from torchglb.radii.posterior_radii import PACBayes
from torchglb.radii.problem import Problem
from torchglb.rounding import round_up
from torchglb.ucb import ConvexRegion

#: squared distances, in units of S^2, at which posteriors over the priors are made
PRICES = tuple(4.0 * 2.0 ** (-0.5 * j) for j in range(49))
#: share of the proven curvature that a scale may take
USABLE = 0.99
#: the radius of the uniform prior
INNER = PACBayes()


class _Chosen(NamedTuple):
    """The best set of each problem; where none is proven convex, the scale is 0. ``(*B)`` each."""

    excess: Tensor  # B_q - L(c)
    scale: Tensor  # lambda_q


@dataclass(frozen=True)
class Centred(Radius):
    """Priors ``N(theta, I/lambda_k)`` around the tested parameter, and the uniform one.

    The set of :mod:`torchglb.radii.centred`, ``L(theta) - (lambda/2)|theta - c|^2 <= B``, with ``c
    = theta_hat`` and ``lambda_k = ratio^k d/S^2``, k = 0, ..., scales - 1. Its height does not grow
    with log n, as that of any fixed prior does. Proven is

    - validity, for all times at once, whatever is chosen below (one martingale, Ville);
    - that the set is convex within an ellipsoid around the outer set ``{L <= level of the uniform
      prior at delta * uniform}``: only such posteriors over the scales are used whose lambda is at
      most the curvature of :mod:`torchglb.radii.curvature`. Where there is none (few rows, rows
      that do not span), the outer set is all that is left.

    Among the posteriors that remain the one with the least volume is taken, to second order.
    ``Evaluation.refinement`` holds that set. ``Evaluation.level`` is what it says of the loss
    alone: with ``kappa`` the curvature, ``|theta - c|^2 <= 2 (B - L(c) + gap)/(kappa - lambda)``,
    hence ``L(theta) <= B + (lambda/2)|theta - c|^2`` is bounded; never above the outer level.

    An evaluation costs that of ``inner`` and some ``scales + 4`` passes, O(n d^2) each.

    Args:
        scales: how many.
        ratio: of one scale to the one before.
        uniform: the weight of the uniform prior, in (0, 1); the scales share the rest equally.
        inner: the radius of the uniform prior.

    Example:
        >>> Centred(scales=12).uniform
        0.5
    """

    scales: int = 8
    ratio: float = 4.0
    uniform: float = 0.5
    inner: PACBayes = INNER

    def __post_init__(self) -> None:
        check_count("scales", self.scales, least=1)
        if not 1.0 < self.ratio < math.inf:
            raise refuse("ratio", "a number above 1", self.ratio)
        if not 0.0 < self.uniform < 1.0:
            raise refuse("uniform", "a number in (0, 1)", self.uniform)
        if not isinstance(self.inner, PACBayes):
            raise refuse("inner", "a PACBayes radius", type(self.inner).__name__)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_whole_line(problem.family)
        return self.inner.init(self._outer(problem))

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        return self.inner.update(self._outer(problem), state, x, r, w)

    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        estimate: Estimate,
    ) -> Evaluation:
        check_likelihood(likelihood)
        outer_problem = self._outer(problem)
        found = self.inner.evaluate(outer_problem, state, likelihood, estimate)
        outer = found.level.double()
        rows, point = in_double(likelihood), estimate.theta.double()
        at, errors = rows.expand_with_errors(point)
        gap = frank_wolfe_gap(point, at.gradient, problem.S) + 2.0 * problem.S * errors.gradient
        region = curved_region(
            rows,
            point,
            at,
            (outer - at.loss).clamp_min(0.0) + errors.loss,
            gap.clamp_min(0.0) + errors.loss,
            problem.S,
            problem.self_concordance,
            problem.dtype,
        )
        chosen = self._choose(problem, rows, point, at, outer, region)
        level, bend = at.loss + errors.loss + chosen.excess, chosen.scale
        room = torch.where(bend > 0, region.curvature - bend, 1.0)
        farthest = 2.0 * (chosen.excess + gap.clamp_min(0.0) + 2.0 * errors.loss) / room
        of_loss = level + 0.5 * bend * farthest * (1.0 + SLACK)
        best = torch.where(bend > 0, torch.minimum(of_loss, outer), outer)
        height = best - estimate.loss.double()
        refinement = _refinement(problem, point, level, bend, outer, region)
        if problem.dtype != torch.float64:
            best, height = round_up(best, problem.dtype), round_up(height, problem.dtype)
        passes = found.passes + self.scales + 4.0
        return Evaluation(best, height, problem.delta, 0.0, passes, found.state, refinement)

    def _outer(self, problem: Problem) -> Problem:
        """The problem of the uniform prior, which has its share of delta."""
        key = (self, "outer")
        if key not in problem.prepared:
            share = dataclasses.replace(problem, delta=self.uniform * problem.delta)
            problem.prepared[key] = share
        share = problem.prepared[key]
        assert isinstance(share, Problem)
        return share

    def _choose(
        self,
        problem: Problem,
        rows: NegativeLogLikelihood,
        point: Tensor,
        at: Expansion,
        outer: Tensor,
        region: ConvexRegion,
    ) -> _Chosen:
        """Of all posteriors over the priors that are proven convex the one with least volume."""
        S2, device = problem.S.square(), problem.S.device
        steps = numbers_on(tuple(self.ratio**k for k in range(self.scales)), device)
        scales = problem.dim / S2[..., None] * steps
        costs = prior_costs(rows, point, at.loss, at.hessian, scales)
        first = (outer - self._outer(problem).log_failure - at.loss)[..., None]
        each = math.log((1.0 - self.uniform) / self.scales)
        weights = numbers_on((math.log(self.uniform), *(each,) * self.scales), device)
        found = average_priors(
            problem.log_failure,
            torch.cat([first, costs], dim=-1),
            torch.cat([torch.zeros_like(first), scales], dim=-1),
            weights,
            S2[..., None] * numbers_on(PRICES, device),
        )
        # the uniform prior alone
        excess = torch.cat([found.excess, (outer - at.loss)[..., None]], dim=-1)
        scale = torch.cat([found.scale, torch.zeros_like(first)], dim=-1)
        with torch.no_grad():
            values = torch.linalg.eigvalsh(at.hessian).clamp_min(0.0)[..., None, :]
            left = values - scale[..., None]
            volume = excess.log() - left.log().mean(-1)
            usable = (scale <= USABLE * region.curvature[..., None]) & torch.isfinite(volume)
            volume = torch.where(usable, volume, torch.inf)
            proven = (region.curvature > 0) & torch.isfinite(volume).any(-1)
            last = torch.full_like(volume[..., 0], len(PRICES), dtype=torch.int64)
            best = torch.where(proven, volume.argmin(-1), last)[..., None]
        return _Chosen(excess.gather(-1, best)[..., 0], scale.gather(-1, best)[..., 0])


def _refinement(
    problem: Problem,
    point: Tensor,
    level: Tensor,
    scale: Tensor,
    outer: Tensor,
    region: ConvexRegion,
) -> Refinement:
    """The set in the dtype of the problem, rounded outwards.

    A larger lambda makes the set larger; a tilt that is rounded moves ``<tilt, theta>`` by at most
    ``eps lambda |c| S``.
    """
    dtype, eps = problem.dtype, torch.finfo(problem.dtype).eps
    bend = scale if dtype == torch.float64 else round_up(scale, dtype).double()
    norm = torch.linalg.vector_norm(point, dim=-1)
    paid = 4.0 * eps * bend * (problem.S + norm).square()
    shifted = level + 0.5 * bend * point.square().sum(-1) + paid
    none = bend == 0
    shifted = torch.where(none, outer, shifted)
    with torch.no_grad():
        eye = torch.eye(problem.dim, dtype=torch.float64, device=point.device)
        proof = ConvexRegion(
            point.detach().to(dtype),
            torch.where(none[..., None, None], eye, region.shape.detach()).to(dtype),
            torch.where(none, torch.inf, region.size.detach()).to(dtype),
            region.curvature.detach().to(dtype),
        )
    if dtype == torch.float64:
        return Refinement(outer, shifted, -bend, point, proof)
    ends = (round_up(outer, dtype), round_up(shifted, dtype))
    return Refinement(*ends, -bend.to(dtype), point.to(dtype), proof)
