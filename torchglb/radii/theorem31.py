"""Theorem 3.1: the likelihood-ratio confidence sequence, from a Lipschitz constant."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_probability, refuse
from torchglb.radii.lipschitz import LipschitzBound

INFIMA = ("exact", "closed_form")


class LipschitzRadius(NamedTuple):
    """A radius that rests on a Lipschitz constant, and how delta was divided between the two.

    Attributes:
        radius: beta^2, ``(*B)``.
        delta_likelihood: spent on the likelihood ratio.
        delta_lipschitz: spent on the constant; 0 if that is deterministic.
    """

    radius: Tensor
    delta_likelihood: float
    delta_lipschitz: float


def shrinkage_infimum(slope: Tensor, dim: int, inf: str = "exact") -> Tensor:
    """``inf_{0 < c <= 1} d log(1/c) + c slope``, elementwise.

    Equal to ``slope`` if ``slope <= d`` (c = 1; also where it is negative), else to
    ``d log(slope/d) + d`` (c = d/slope). The closed form of the paper, ``d log(e max(1,
    slope/d))``, says d where the slope is below d: at t = 1 it is d, and the infimum 0.

    Args:
        slope: ``2 S L_t`` in Theorem 3.1.
        dim: d.
        inf: ``"exact"`` or ``"closed_form"``.

    Example:
        >>> shrinkage_infimum(torch.tensor([0.0, 1.0, 2.0]), dim=2)
        tensor([0., 1., 2.])
    """
    check_choice("inf", inf, INFIMA)
    log_form = dim * torch.log(slope.clamp_min(dim) / dim) + dim
    return log_form if inf == "closed_form" else torch.where(slope <= dim, slope, log_form)


def shrinkage(slope: float, dim: int, inf: str = "exact") -> float:
    """:func:`shrinkage_infimum` of a number."""
    if inf == "exact" and slope <= dim:
        return slope
    return dim * math.log(max(slope, dim) / dim) + dim


def shared_delta(lipschitz: LipschitzBound | Tensor, delta: float) -> tuple[LipschitzBound, float]:
    """The bound (a tensor stands for a deterministic one), and what it leaves of delta."""
    check_probability("delta", delta)
    if isinstance(lipschitz, Tensor):
        lipschitz = LipschitzBound(lipschitz, 0.0)
    left = delta - lipschitz.failure
    if left <= 0:
        expected = f"a Lipschitz bound that fails with probability below delta = {delta:g}"
        raise refuse("lipschitz", expected, f"{lipschitz.failure:g}")
    return lipschitz, left


def theorem31(
    lipschitz: LipschitzBound | Tensor,
    S: Tensor | float,
    dim: int,
    delta: float,
    inf: str = "exact",
) -> LipschitzRadius:
    """Theorem 3.1: ``beta^2 = log(1/delta) + inf_{0<c<=1} d log(1/c) + 2 S L_t c``.

    With probability 1 - delta, for all t at once, ``L_t(theta*) <= L_t(theta_hat) + beta_t^2``, for
    any theta_hat in the ball (the MLE plays no part in validity; Algorithm 1 misprints its argmin
    as argmax). Assumes ``|theta*| <= S``, and that L_t holds; if L_t may fail with probability p,
    the likelihood ratio gets delta - p, so that the whole statement has probability 1 - delta.
    (The paper spends delta twice.) Row weights in [0, 1], each chosen before its reward, keep the
    statement: by Jensen ``E[ratio^w] <= (E ratio)^w <= 1``. O(1), no pass.

    Args:
        lipschitz: L_t, ``(*B)``; a tensor stands for a deterministic bound.
        S: radius of the ball.
        dim: d.
        delta: in (0, 1).
        inf: ``"exact"`` or ``"closed_form"`` (see :func:`shrinkage_infimum`).

    Example:
        >>> round(float(theorem31(torch.tensor(300.0), 4.0, 2, 0.05).radius), 3)
        19.176
    """
    lipschitz, left = shared_delta(lipschitz, delta)
    infimum = shrinkage_infimum(2.0 * S * lipschitz.value, dim, inf)
    return LipschitzRadius(infimum - math.log(left), left, lipschitz.failure)
