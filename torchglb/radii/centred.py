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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_positive, check_probability, refuse
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import check_likelihood, reward_length, rounding
from torchglb.radii.gaussian_prior import check_whole_line, normal_at, normal_row_increments

#: of the sums over a dozen priors, relative to their sizes
AVERAGING = 1e-13


def in_double(likelihood: NegativeLogLikelihood) -> NegativeLogLikelihood:
    """The same rows in float64."""
    X, r, w = likelihood.X, likelihood.r, likelihood.w
    if X.dtype == torch.float64:
        return likelihood
    return likelihood.over(X.double(), r.double(), None if w is None else w.double())


def prior_costs(
    likelihood: NegativeLogLikelihood,
    point: Tensor,
    loss: Tensor,
    hessian: Tensor,
    scales: Tensor,
) -> Tensor:
    """``A_j - L(c)`` of the module's formula for K scales, from above, ``(*B, K)``.

    ``W = H(c) + lambda I``; a pass of O(n d^2) for each scale. Differentiable in all but the
    scales.

    Args:
        likelihood: L in float64.
        point: c, ``(*B, d)``.
        loss: L(c), ``(*B)``.
        hessian: H(c), ``(*B, d, d)``; any positive semidefinite matrix keeps the statement.
        scales: ``(*B, K)``.
    """
    variance = 1.0 / scales
    origin = torch.zeros_like(point)[..., None, :]  # divergence from a prior that is centred at c
    one = torch.ones_like(variance)
    divergence, cover = normal_at(origin, hessian[..., None, :, :], variance, one)
    added = torch.stack(
        [normal_row_increments(likelihood, point, part) for part in cover.unbind(-3)], dim=-1
    )
    norm = torch.linalg.vector_norm(point, dim=-1)
    size = loss.abs()[..., None] + added
    rewards = reward_length(likelihood)[..., None]
    return divergence + added + rounding(torch.float64, size, rewards, norm[..., None])


class Posteriors(NamedTuple):
    """For J prices, posteriors over the priors: where their sets end, and how they are bent.

    Attributes:
        excess: ``B_q - L(c)``, ``(*B, J)``.
        scale: ``lambda_q``, ``(*B, J)``.
    """

    excess: Tensor
    scale: Tensor


def average_priors(
    log_failure: float, costs: Tensor, scales: Tensor, log_weights: Tensor, prices: Tensor
) -> Posteriors:
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
    return Posteriors(excess + AVERAGING * sizes, scale)


def centred_level(
    likelihood: NegativeLogLikelihood,
    delta: float,
    centre: Tensor,
    scale: float | Tensor,
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
    check_likelihood(likelihood)
    check_whole_line(likelihood.family)
    if not isinstance(scale, Tensor):
        check_positive("scale", scale)
    if not 0.0 < weight <= 1.0:
        raise refuse("weight", "a number in (0, 1]", weight)
    rows, point = in_double(likelihood), centre.double()
    at = rows.expand(point)
    scales = torch.as_tensor(scale, dtype=torch.float64, device=point.device).expand(at.loss.shape)
    costs = prior_costs(rows, point, at.loss, at.hessian, scales[..., None])
    return at.loss + costs[..., 0] - math.log(weight * delta)
