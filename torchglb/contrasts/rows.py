"""Bounds on a family along one row, over all parameters of a joint set.

``z`` is ``<x, theta_hat>``, and ``<x, theta*> = z + t`` with ``|t| <= reach``. Everything is
elementwise and without the factor 1/g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.families.compiled import EXPONENTIAL, LOGISTIC, SQUARE
from torchglb.radii.theorems.theorem32 import contraction


def shape_of(family: GLMFamily) -> int | None:
    """Which formulas below are exact for it; None for the general ones."""
    known = family.compiled()
    shipped = isinstance(family, Gaussian | Binomial | Poisson)
    return known.code if known is not None and shipped else None


def expansion(D: Tensor) -> Tensor:
    """``(e^D - 1 - D)/D^2``, from above; 1/2 at D = 0, rising."""
    series = 0.5 + D / 6.0 + D**2 / 12.0  # above, for D <= 1e-2
    safe = torch.where(D > 1e-2, D, torch.ones_like(D))
    return torch.where(D > 1e-2, (torch.expm1(safe) - safe) / safe.square(), series)


def least_curvature(family: GLMFamily, z: Tensor, reach: Tensor, concordance: float) -> Tensor:
    """k with ``m(z + t) - m(z) - m'(z) t >= k t^2`` for all ``|t| <= reach``.

    Where ``|m'''| <= R m''`` on the segment, ``m''(z + v t) >= m''(z) e^(-R v |t|)``, and twice
    integrated ``k = m''(z) phi(R reach)``. For the logistic model ``m'''/m'' = -tanh(z/2)``, so on
    that segment R is at most ``tanh((|z| + reach)/2)``: small where z is.

    Args:
        family: gives m.
        z: any shape.
        reach: the same shape.
        concordance: R_s on the ball.
    """
    variance = family.variance(z)
    shape = shape_of(family)
    if shape == SQUARE:
        return 0.5 * variance
    rate = torch.full_like(z, concordance)
    if shape == LOGISTIC:
        rate = torch.minimum(rate, torch.tanh(0.5 * (z.abs() + reach)))
    return variance * contraction(rate * reach)


def bend_bound(
    family: GLMFamily,
    z: Tensor,
    shift: Tensor,
    reach: Tensor,
    concordance: float,
    wide: float | Tensor,
) -> Tensor:
    """k with ``D(z + t) - D(z) - D'(z) t <= k t^2/2`` for all ``|t| <= reach``.

    Here ``D(y) = m(y + shift) - m(y)``; k may be negative.

    - Gaussian: D is linear, k = 0.
    - Poisson: ``D(z + t) - D(z) - D'(z) t = e^z (e^shift - 1)(e^t - 1 - t)``, and ``(e^t - 1 -
      t)/t^2`` rises in t: k is twice that with t = reach if shift > 0, else with t = -reach.
    - Binomial: ``D''(z) + |D'''| reach/3`` with ``|D'''(y)| <= |shift| max |m''''|`` over all
      points between; with v = m''/N, ``m''''/N = v - 6 v^2``, whose extremes over a range of v are
      at its ends or 1/24 at v = 1/12.
    - Any family with ``|m'''| <= R m''``: ``D''(y) <= m''(y)(e^(R |shift|) - 1)`` and ``m''(y) <=
      m''(z) e^(R reach)``.

    Args:
        family: gives m.
        z: any shape.
        shift: ``(*, k)`` for z ``(k)``.
        reach: shaped like z.
        concordance: R_s on the ball.
        wide: R_s on the ball enlarged by the longest shift; broadcasts with it.
    """
    shape = shape_of(family)
    if shape == SQUARE:
        return torch.zeros_like(z * shift)
    if shape == EXPONENTIAL:
        size = 2.0 * family.variance(z) * torch.expm1(shift)
        return size * torch.where(shift > 0, expansion(reach), contraction(reach))
    if shape == LOGISTIC:
        low = z - reach + shift.clamp_max(0.0)
        high = z + reach + shift.clamp_min(0.0)
        fourth = _largest_fourth(family, low, high)
        second = family.variance(z + shift) - family.variance(z)
        return second + shift.abs() * fourth * reach / 3.0
    growth = torch.expm1(wide * shift.abs()) * torch.exp(concordance * reach)
    return family.variance(z) * growth


def _largest_fourth(family: GLMFamily, low: Tensor, high: Tensor) -> Tensor:
    """``max |m''''|`` of the logistic model over [low, high]."""
    assert isinstance(family, Binomial)
    trials = float(family.trials)
    near = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
    far = torch.maximum(low.abs(), high.abs())
    most, least = family.variance(near) / trials, family.variance(far) / trials
    ends = torch.maximum((most - 6.0 * most**2).abs(), (least - 6.0 * least**2).abs())
    peak = (least <= 1.0 / 12.0) & (most >= 1.0 / 12.0)
    return trials * torch.where(peak, ends.clamp_min(1.0 / 24.0), ends)
