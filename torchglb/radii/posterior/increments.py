"""What a posterior of positive width costs: ``E m(z + sU) - m(z)``, from above, per observation.

U is symmetric, so only the even part of m around z counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson, QuasiBounded, has_formulas_of
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import row_sum
from torchglb.radii.posterior.laws import BallLaw, Law, NormalLaw, Prior

#: numbers of which copies are made without a second thought
LARGE = 1 << 20


def growth(family: GLMFamily, law: Law, s2: Tensor, self_concordance: Tensor | None) -> Tensor:
    """G(s) with ``E m(z + sU) - m(z) <= m''(z) G(s)`` for all z, and G(s)/s^2 increasing.

    Gaussian: ``s^2 E U^2/2`` (exact). Poisson and binomial: ``E cosh(sU) - 1`` (exact for
    Poisson; for binomial from ``log(1 + v) <= v`` in :func:`increment`). Any family with ``|m'''|
    <= R m''``: ``E[e^(Rs|U|) - 1 - Rs|U|]/R^2``.

    Args:
        family: gives m.
        law: of U.
        s2: ``s^2``.
        self_concordance: R, for families without a formula of their own; None gives infinity.
    """
    if has_formulas_of(family, Gaussian):
        return 0.5 * s2 * law.second_moment()
    if has_formulas_of(family, Binomial, Poisson):
        return law.hyperbolic(s2)
    if self_concordance is None:
        return torch.full_like(s2, math.inf)
    rate = self_concordance.clamp_min(1e-6).to(s2.dtype)  # a larger R is valid too
    return law.exponential(rate * _root(s2)) / rate.square()


def increment(
    family: GLMFamily,
    law: Law,
    z: Tensor,
    s2: Tensor,
    self_concordance: Tensor | None,
    max_variance: Tensor | None,
) -> Tensor:
    """At least ``E m(z + sU) - m(z)``, elementwise: the least of what is known for the family.

    - Gaussian ``s^2 E U^2/2`` and Poisson ``e^z (E cosh(sU) - 1)``, both exact.
    - Binomial of N trials, p = sigma(z): ``(N/2) log(1 + 2 p(1-p) (E cosh(sU) - 1))``, by Jensen.
    - Probit with normal U: ``k m(z/k) - m(z)``, ``k^2 = 1 + s^2``, exact.
    - ``m''(z) G(s)`` with G of :func:`growth`.
    - Probit and cloglog with ``|U| <= 1``: ``s^2 E U^2/2`` times the largest m'' on [z - s, z + s],
      which is taken at the point nearest to 0, where m'' peaks.
    - ``max m'' s^2 E U^2/2``, and ``(b - a) s E|U|/2`` for rewards, hence means, in [a, b].

    Args:
        family: gives m.
        law: of U.
        z: ``<x, c>``.
        s2: ``s^2``.
        self_concordance: R on the support of ``z + sU``, or None.
        max_variance: of m'' on the support of ``z + sU``, or None.
    """
    quasi = has_formulas_of(family, QuasiBounded)
    if has_formulas_of(family, Gaussian):
        return growth(family, law, s2, None)
    if has_formulas_of(family, Poisson):
        return family.variance(z) * growth(family, law, s2, None)
    if has_formulas_of(family, Binomial):
        spread = 2.0 / family.trials * family.variance(z) * law.hyperbolic(s2)
        # an overflow of E cosh would give inf * 0 in the far tails of p(1-p)
        best = 0.5 * family.trials * torch.log1p(torch.nan_to_num(spread, nan=math.inf))
    elif quasi and family.link == "probit" and isinstance(law, NormalLaw):
        wide = (1.0 + s2).sqrt()
        best = wide * family.log_partition(z / wide) - family.log_partition(z)
    else:
        best = family.variance(z) * growth(family, law, s2, self_concordance)
        best = torch.nan_to_num(best, nan=math.inf)
    if quasi and isinstance(law, BallLaw):
        nearest = torch.sign(z) * (z.abs() - _root(s2)).clamp_min(0.0)
        local = 0.5 * family.variance(nearest) * s2 * law.second_moment()
        best = torch.minimum(best, local)
    if max_variance is not None:
        best = torch.minimum(best, 0.5 * max_variance * s2 * law.second_moment())
    low, high = family.reward_range
    if high - low < math.inf:
        best = torch.minimum(best, 0.5 * (high - low) * _root(s2) * law.mean_absolute())
    return best


def aggregated_increment(
    family: GLMFamily, law: Law, trace: Tensor, longest: Tensor, self_concordance: Tensor | None
) -> Tensor:
    """``sum_s E m(z_s + s_s U) - m(z_s)`` over g, from the trace alone: no pass.

    ``m''(z) G(s) <= m''(z) s^2 G(s_max)/s_max^2`` since G(s)/s^2 increases, and the sum of
    ``m''(z_s) s_s^2/g`` is ``tr(W^-1 H)``.

    Args:
        family: gives m.
        law: of U.
        trace: ``tr(W^-1 H)``.
        longest: ``s_max^2``, of the shape of the trace.
        self_concordance: R_s, which broadcasts with the trace, or None.
    """
    longest = longest.clamp_min(1e-12)
    ratio = growth(family, law, longest, self_concordance) / longest
    # no rows, no increment, even where the ratio has overflowed
    return torch.where(trace > 0, trace * ratio, torch.zeros_like(ratio))


def row_increments(
    likelihood: NegativeLogLikelihood,
    point: Tensor,
    root: Tensor,
    prior: Prior,
    nu: Tensor,
) -> Tensor:
    """``sum_s E m(z_s + s_s U) - m(z_s)`` over g, ``s_s = |M x_s|``: one pass. ``(*B)``.

    ``M'M`` is the covariance W^-1. Of W^-1 itself the products with rows would cancel: along many
    rows the posterior is narrow, and as wide as the prior across them.

    Args:
        likelihood: the rows.
        point: the centre c, ``(*B, d)``.
        root: M, ``(*B, d, d)``.
        prior: with what bounds the losses on the support of the posterior.
        nu: of the law of U, ``(*B)``.
    """
    dtype, family = likelihood.X.dtype, likelihood.family

    def column(values: Tensor | None) -> Tensor | None:  # (*B) -> (*B, 1), as the rows
        return None if values is None else values.to(dtype)[..., None]

    root, point = root.to(dtype), point.to(dtype)[..., None]
    # d products and the dtype round |M| |x|
    lost = (root.shape[-1] + 1.0) * torch.finfo(dtype).eps
    paid = lost * torch.linalg.matrix_norm(root.detach())[..., None]
    bounds = column(prior.concordance), column(prior.top)
    law, each = prior.law(nu.to(dtype)[..., None]), []
    for rows in likelihood.parts():
        s2 = (_root(_squared_lengths(rows.X, root)) + paid).square()
        each.append(increment(family, law, (rows.X @ point)[..., 0], s2, *bounds))
    return row_sum(likelihood, torch.cat(each, dim=-1))


def _squared_lengths(X: Tensor, root: Tensor) -> Tensor:
    """``|M x_s|^2`` of every row, ``(*B, n)``; many rows in parts, to save memory."""
    if X.numel() <= LARGE:
        return (X @ root.mT).square().sum(-1)
    parts = X.split(max(1, LARGE * X.shape[-2] // X.numel()), dim=-2)
    return torch.cat([(part @ root.mT).square().sum(-1) for part in parts], dim=-1)


def _root(s2: Tensor) -> Tensor:
    """``s``, with a derivative also at 0."""
    return s2.clamp_min(torch.finfo(s2.dtype).tiny).sqrt()
