"""Is S too small? What the likelihood says about a ball that holds the estimate back.

Take the ball of twice the radius. Theorem 3.1 with the uniform prior there holds for every theta*:
with probability 1 - delta, at all times at once,

    ``L(theta*) <= min over B(2S) of L + inf_c { d log(1/c) + 4 S c K } + log(1/delta)``

with K a Lipschitz constant of L on B(2S); that of the rows is ``K = sum_s w_s |x_s| max |mu(z) -
r_s|/g`` over ``|z| <= 2 S |x_s|``, at one of the two ends since mu increases. If ``|theta*| <= S``,
then ``min over B(S) of L <= L(theta*)``. So where the minimum over B(S) is above that level, the
assumption ``|theta*| <= S`` is refuted: under it this happens, at any time, with probability at
most delta.

By convexity the loss falls by at most ``|grad L(theta_hat)| 3 S`` from B(S) to B(2S): unless the
score at an estimate on the sphere is longer than ``log(1/delta)/(3 S)``, nothing else is computed.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import as_floats, check_probability
from torchglb.domain import Ball, check_ball
from torchglb.errors import BoundaryWarning
from torchglb.estimate import Estimate
from torchglb.identity import describe
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.radii.base import row_sum
from torchglb.radii.theorems.lipschitz import LipschitzBound
from torchglb.radii.theorems.theorem31 import from_lipschitz

#: an estimate this close to the sphere is on it
NEAR = 1e-6


@torch.no_grad()
def radius_refuted(
    likelihood: NegativeLogLikelihood, domain: Ball, theta_hat: ArrayLike, delta: float
) -> Tensor:
    """Whether the rows refute ``|theta*| <= S`` at level delta, ``(*B)``.

    Args:
        likelihood: the loss L of the rows, without ridge or tilt.
        domain: the ball B(S).
        theta_hat: the minimiser of L over it, ``(*B, d)``.
        delta: the probability, over all times, of refuting an S that is large enough.

    Costs a pass, and one more fit where the ball is active and the score is long.

    Example:
        >>> from torchglb.families import Gaussian
        >>> X, r = torch.ones(500, 1).double(), torch.full((500,), 6.0).double()
        >>> loss = NegativeLogLikelihood(Gaussian(), X, r)
        >>> radius_refuted(loss, Ball(1, 2.0), torch.tensor([2.0]).double(), 0.05)
        tensor(True)
    """
    check_probability("delta", delta)
    check_ball(domain, likelihood.dim)
    at = Estimate.at(likelihood, domain, as_floats("theta_hat", theta_hat).detach())
    assert at.gradient is not None
    S = domain.radius_like(at.loss).expand(at.loss.shape)
    active = torch.linalg.vector_norm(at.theta, dim=-1) >= S * (1.0 - NEAR)
    longest = torch.linalg.vector_norm(at.gradient, dim=-1) * 3.0 * S
    pulled = active & (longest > math.log(1.0 / delta))
    if not bool(pulled.any()):
        return pulled
    wider = domain.resized(2.0 * S)
    outer = minimize_likelihood(likelihood, wider, start=at.theta, throw=False, loss_only=True)
    steepness = _steepness(likelihood, 2.0 * S)
    bound = LipschitzBound(steepness, 0.0)
    beta2 = from_lipschitz(bound, 2.0 * S.double(), likelihood.dim, delta).radius
    level = outer.loss.double() + beta2
    lost = 64.0 * torch.finfo(at.loss.dtype).eps * (at.loss.abs() + outer.loss.abs()).double()
    return pulled & (at.lower_bound.double() > level + lost)


def warn_of_boundary(domain: Ball, delta: float, stacklevel: int) -> None:
    """Says that S is too small.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_boundary(Ball(2, 2.0), 0.05, stacklevel=1)
        >>> caught[0].category.__name__
        'BoundaryWarning'
    """
    warnings.warn(
        f"the observations refute |theta*| <= S = {describe(domain.radius)} at level "
        f"{delta:g}: intervals within this ball are wrong. Take a larger S, or "
        'radius="gaussian-prior", which needs none.',
        BoundaryWarning,
        stacklevel=stacklevel + 1,
    )


def _steepness(likelihood: NegativeLogLikelihood, radius: Tensor) -> Tensor:
    """K, ``(*B)``: a Lipschitz constant of the loss on the ball of this radius."""
    family, r = likelihood.family, likelihood.r
    length = torch.linalg.vector_norm(likelihood.X, dim=-1)
    reach = radius[..., None] * length
    worst = torch.maximum((family.mean(reach) - r).abs(), (family.mean(-reach) - r).abs())
    return row_sum(likelihood, worst.double() * length)
