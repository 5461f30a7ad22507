"""Likelihood-ratio sets from priors that are centred at the tested parameter.

For a parameter theta and a scale lambda let ``M_t(theta) = E exp(L_t(theta) - L_t(nu))`` with
``nu ~ N(theta, I/lambda)``. If theta* = theta, this is (at most) a martingale of mean 1; the prior
may depend on the theta that is tested, because only theta* has to be held. So is any average
``sum_j w_j M_j`` over scales and over the uniform prior, with weights and scales fixed beforehand,
and by Ville's inequality ``{theta : sum_j w_j M_j(theta) < 1/delta}`` holds theta* at all times
with probability 1 - delta. That set has no simple shape. But by Donsker and Varadhan, for any
posterior ``P = N(c, W^-1)``,

    ``log M(theta) >= L(theta) - E_P L - KL(P || N(theta, I/lambda))
                    = L(theta) - (lambda/2)|theta - c|^2 - A,``
    ``A = E_P L + [lambda tr W^-1 - d + log det(W/lambda)]/2``,

and for the uniform prior ``log M(theta) >= L(theta) - A_0``, with A_0 the level of a posterior less
``log(1/delta)``. With weights q over the priors too, chosen after the data, concavity of the
logarithm joins them: ``log sum_j w_j M_j >= sum_j q_j (log M_j + log(w_j/q_j))``, so that

    ``L(theta) - (lambda_q/2)|theta - c|^2 <= B_q``, ``lambda_q = sum_j q_j lambda_j``,
    ``B_q = log(1/delta) + sum_j q_j (A_j + log(q_j/w_j))``    (lambda_0 = 0)

is a superset that holds theta* on the same event, for any c, W and q: choosing them costs nothing.
With all of q on one prior this pays ``log(1/w_j)`` for the choice; spread over neighbouring scales
it pays less. Where ``H(theta) >= lambda_q I`` the left side is convex (:mod:`.curvature`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import numbers_on
from torchglb.checks import check_count, check_positive, check_probability, refuse
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import frank_wolfe_gap
from torchglb.radii.base import (
    Evaluation,
    Radius,
    Refinement,
    State,
    checked_centre,
    conclude,
    reward_length,
    rounding,
)
from torchglb.radii.posterior.candidates import posterior_at
from torchglb.radii.posterior.curvature import SLACK, curved_region
from torchglb.radii.posterior.gaussian import (
    check_whole_line,
    normal_prior,
    normal_row_increments,
    scale_of_problems,
    tempered,
)
from torchglb.radii.posterior.uniform import PACBayes, check_inner
from torchglb.radii.problem import Problem
from torchglb.rounding import round_up
from torchglb.rows.sums import Expansion
from torchglb.ucb import ConvexRegion

#: of the sums over a dozen priors, relative to their sizes
AVERAGING = 1e-13
#: squared distances, in units of S^2, at which posteriors over the priors are made
PRICES = tuple(4.0 * 2.0 ** (-0.5 * j) for j in range(49))
#: share of the proven curvature that a scale may take
USABLE = 0.99
#: the radius of the uniform prior
INNER = PACBayes()


def in_double(likelihood: NegativeLogLikelihood) -> NegativeLogLikelihood:
    """The same rows in float64."""
    if likelihood.X.dtype == torch.float64:
        return likelihood
    return likelihood.rebuild([t.double() for t in likelihood.tensors()])


def prior_costs(
    likelihood: NegativeLogLikelihood, point: Tensor, at: Expansion, scales: Tensor
) -> Tensor:
    """``A_j - L(c)`` of the module's formula for K scales, from above, ``(*B, K)``.

    ``W = H(c) + lambda I``; a pass of O(n d^2) for each scale. Differentiable in all but the
    scales.

    Args:
        likelihood: L in float64.
        point: c, ``(*B, d)``.
        at: L there; any positive semidefinite matrix for its Hessian keeps the statement.
        scales: ``(*B, K)``.
    """
    prior = normal_prior(likelihood.family, 1.0 / scales)
    candidate = tempered(torch.ones_like(scales))
    origin = torch.zeros_like(point)[..., None, :]  # divergence from a prior that is centred at c
    divergence, root = posterior_at(prior, origin, at.hessian[..., None, :, :], candidate)
    added = torch.stack(
        [normal_row_increments(likelihood, point, part) for part in root.unbind(-3)], dim=-1
    )
    norm = torch.linalg.vector_norm(point, dim=-1)
    size = at.loss.abs()[..., None] + added
    rewards = reward_length(likelihood)[..., None]
    return divergence + added + rounding(torch.float64, size, rewards, norm[..., None])


class Averages(NamedTuple):
    """Posteriors over the priors, J of each problem or one: where their sets end, how they bend.

    Attributes:
        excess: ``B_q - L(c)``, ``(*B, J)`` or ``(*B)``.
        scale: ``lambda_q``, likewise; 0 for the uniform prior alone.
    """

    excess: Tensor
    scale: Tensor


def average_priors(
    log_failure: float, costs: Tensor, scales: Tensor, log_weights: Tensor, prices: Tensor
) -> Averages:
    """The best q for each price: ``q_j`` proportional to ``w_j exp(-A_j - lambda_j rho/2)``.

    At distance ``|theta - c|^2 = rho`` the set's bound on the loss is ``B_q + lambda_q rho/2``; the
    least over q is attained there. Then ``B_q = log(1/delta) - log sum_j w_j exp(-A_j - lambda_j
    rho/2) - lambda_q rho/2``.

    Args:
        log_failure: ``log(1/delta)``.
        costs: ``A_j - L(c)``, ``(*B, 1 + K)``, the uniform prior first.
        scales: ``lambda_j``, 0 for the uniform prior, ``(*B, 1 + K)``.
        log_weights: ``log w_j``, ``(1 + K)``.
        prices: rho, ``(*B, J)``.
    """
    half = 0.5 * prices[..., None]
    exponents = (log_weights - costs)[..., None, :] - half * scales[..., None, :]
    total = torch.logsumexp(exponents, dim=-1)
    q = torch.softmax(exponents, dim=-1)
    scale = (q * scales[..., None, :]).sum(-1)
    bent = half[..., 0] * scale
    excess = log_failure - total - bent
    sizes = costs.abs().amax(-1, keepdim=True) + total.abs() + bent
    return Averages(excess + AVERAGING * sizes, scale)


def centred_level(
    likelihood: NegativeLogLikelihood,
    delta: float,
    centre: ArrayLike,
    scale: ArrayLike,
    weight: float = 1.0,
) -> Tensor:
    """B of ``L(theta) - (lambda/2)|theta - c|^2 <= B`` for a prior of one scale, ``(*B)``.

    ``B = log(1/(w delta)) + E_P L + [lambda tr W^-1 - d + log det(W/lambda)]/2`` with ``P = N(c,
    W^-1)`` and ``W = H(c) + lambda I``: with probability 1 - delta the set holds theta* at all
    times (see the module). Two passes. Weights of rows in [0, 1], each chosen before its reward,
    keep the statement. Differentiable in rows and centre.

    Args:
        likelihood: L, without ridge or tilt; of a family whose constants hold on the whole line.
        delta: in (0, 1).
        centre: c, any point, best the estimate, ``(*B, d)``.
        scale: lambda > 0, fixed before the data; a number or ``(*B)``.
        weight: w in (0, 1], of this prior among others that share delta.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> loss = NegativeLogLikelihood(Bernoulli(), torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> round(float(centred_level(loss, 0.05, torch.zeros(2), 0.5)), 2)
        4.79
    """
    check_probability("delta", delta)
    point = checked_centre(likelihood, centre).double()
    check_whole_line(likelihood.family)
    scales = scale_of_problems("scale", scale, likelihood)
    if check_positive("weight", weight) > 1.0:
        raise refuse("weight", "a number in (0, 1]", weight)
    rows = in_double(likelihood)
    at = rows.expand(point)
    costs = prior_costs(rows, point, at, scales[..., None])
    return at.loss + costs[..., 0] - math.log(weight * delta)


# ---- the radius ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Centred(Radius):
    """Priors ``N(theta, I/lambda_k)`` around the tested parameter, and the uniform one.

    The set of this module, ``L(theta) - (lambda/2)|theta - c|^2 <= B``, with ``c = theta_hat`` and
    ``lambda_k = ratio^k d/S^2``, k = 0, ..., scales - 1. Its height does not grow with log n, as
    that of any fixed prior does. Proven is

    - validity, for all times at once, whatever is chosen below (one martingale, Ville);
    - that the set is convex within an ellipsoid around the outer set ``{L <= level of the uniform
      prior at delta * uniform}``: only such posteriors over the scales are used whose lambda is at
      most the curvature of :mod:`.curvature`. Where there is none (few rows, rows that do not
      span), the outer set is all that is left.

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
        if not check_positive("ratio", self.ratio) > 1.0:
            raise refuse("ratio", "a number above 1", self.ratio)
        check_probability("uniform", self.uniform)
        check_inner(self.inner)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_whole_line(problem.family)
        return self.inner.init(self._outer(problem))

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        return self.inner.update(self._outer(problem), state, x, r, w)

    def evaluate(  # noqa: D102
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> Evaluation:
        found = self.inner.evaluate(self._outer(problem), state, likelihood, estimate)
        outer = found.level.double()
        rows, point = in_double(likelihood), estimate.theta.double()
        at, errors = rows.expand_with_errors(point, in_blocks=True)
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
        refinement = _refinement(problem, point, level, bend, outer, region)
        passes, loss = found.passes + self.scales + 4.0, estimate.loss.double()
        whole = conclude(problem, best, loss, passes, found.state)
        return whole._replace(refinement=refinement)

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
    ) -> Averages:
        """Of all posteriors over the priors that are proven convex the one with least volume.

        The uniform prior alone where there is none.
        """
        S2, device = problem.S.square(), problem.S.device
        steps = numbers_on(tuple(self.ratio**k for k in range(self.scales)), device)
        scales = problem.dim / S2[..., None] * steps
        costs = prior_costs(rows, point, at, scales)
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
        return Averages(excess.gather(-1, best)[..., 0], scale.gather(-1, best)[..., 0])


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
    bend = round_up(scale, dtype).double()
    norm = torch.linalg.vector_norm(point, dim=-1)
    paid = 4.0 * eps * bend * (problem.S + norm).square()
    shifted = level + 0.5 * bend * point.square().sum(-1) + paid
    none = bend == 0
    shifted = torch.where(none, outer, shifted)
    with torch.no_grad():
        eye = torch.eye(problem.dim, dtype=torch.float64, device=point.device)
        parts = (
            point.detach().to(dtype),
            torch.where(none[..., None, None], eye, region.shape.detach()).to(dtype),
            torch.where(none, torch.inf, region.size.detach()).to(dtype),
            region.curvature.detach().to(dtype),
        )
        proof = ConvexRegion.of(parts)
    ends = (round_up(outer, dtype), round_up(shifted, dtype))
    return Refinement(*ends, -bend.to(dtype), point.to(dtype), proof)
