"""The theory in numbers: kappa, the regret bound with its constants, the realised certificate."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    as_floats,
    as_like,
    check_positive,
    check_shape,
    refuse,
)
from torchglb.families import GLMFamily
from torchglb.radii import self_concordance_of


def kappa(family: GLMFamily, S: float) -> float:
    """``max 1/m''(<x, theta>)`` over ``|x| <= 1``, ``|theta| <= S``; infinite where m'' vanishes.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> round(kappa(Bernoulli(), 4.0), 2)
        56.62
    """
    least = family.min_variance(check_positive("S", S))
    return 1.0 / least if least > 0 else math.inf


def kappa_star(family: GLMFamily, z: ArrayLike) -> Tensor:
    """``kappa_* = 1 / mean_t m''(<x_t*, theta*>)``: how flat the means are at the best arms.

    Args:
        family: gives m''.
        z: ``<x_t*, theta*>`` for every round, ``(*B, T)``, T >= 1.

    Returns:
        ``(*B)``.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> kappa_star(Bernoulli(), torch.zeros(10))
        tensor(4.)
    """
    z = as_floats("z", z)
    if z.ndim == 0 or z.shape[-1] == 0:
        raise refuse("z", "shape (*B, T) with T of at least 1", f"shape {tuple(z.shape)}")
    return 1.0 / family.variance(z).mean(-1)


class RegretBound(NamedTuple):
    """A bound on the regret, and where it comes from; each ``(*B)``.

    Attributes:
        value: ``min(T D, D N + 2 X)``.
        leading: the part that grows as sqrt(T), ``2 sqrt(a2 T / kappa_*)``.
        transient: all the rest of ``2 X``; it carries kappa.
        warmup: ``D N``, the rounds on which an arm is still new.
        vacuous: whether the value is only ``T D``, what any algorithm has.
    """

    value: Tensor
    leading: Tensor
    transient: Tensor
    warmup: Tensor
    vacuous: Tensor


def regret_bound(
    family: GLMFamily,
    S: float,
    dim: int,
    horizon: int,
    radius: ArrayLike,
    kappa_star: ArrayLike,
    *,
    largest_gap: float | None = None,
    regularization: float | None = None,
) -> RegretBound:
    """Theorem 4.1 with every constant, for an optimistic algorithm over likelihood-ratio sets.

    With ``b2 = 4 lam S^2 + max_t beta_t^2``, e = 1/log 2, k = kappa, R = R_s, Rm the largest m'',
    and D the largest difference of two mean rewards:

    - ``N = (2d/log 2) [log(1 + Rm/(2 lam g log 2)) + log(1 + 1/(2 k lam g log 2))]``,
    - ``a2 = 2 g e d b2 log(1 + Rm T/(2 d g lam))``,
    - ``C = 7 g k R Rm e d b2 log(1 + T/(2 d g k lam))``,
    - ``X = C + a2 R + sqrt(a2^2 R^2 + a2 (T/kappa_* + 2 R C))``,

    ``Reg(T) <= min(T D, D N + 2 X)`` with probability 1 - delta, on the event of the confidence
    sequence. (Gaps in the paper's proof are repaired, with other constants.) In small problems
    the transient term, which carries kappa, makes it vacuous: what a run can act on is
    :func:`realised_certificate`.

    Args:
        family: self-concordant on the ball.
        S: radius of the ball.
        dim: d.
        horizon: T.
        radius: the largest beta_t^2 up to T, ``(*B)``.
        kappa_star: of :func:`kappa_star`, ``(*B)``.
        largest_gap: D; ``mu(S) - mu(-S)`` if left out.
        regularization: lam of the proof; ``1/(4 S^2)`` if left out.

    Example:
        >>> from torchglb.families import Gaussian
        >>> bound = regret_bound(Gaussian(), 1.0, 2, 10**6, torch.tensor(30.0), torch.tensor(1.0))
        >>> bool(bound.vacuous)
        False
    """
    check_positive("S", S)
    radius = as_floats("radius", radius)
    kappa_star = as_like("kappa_star", kappa_star, radius)
    if horizon < 1 or dim < 1:
        raise refuse("horizon, dim", "at least 1", (horizon, dim))
    lam = 1.0 / (4.0 * S * S) if regularization is None else regularization
    check_positive("regularization", lam)
    g, R, Rm, k = (
        family.dispersion,
        self_concordance_of(family, S),
        family.max_variance(S),
        kappa(family, S),
    )
    if not math.isfinite(k):
        raise refuse("family", "a finite kappa on the ball", k)
    ends = family.mean(torch.tensor([-S, S], dtype=torch.float64))
    gap = float(ends[1] - ends[0])
    gap = gap if largest_gap is None else min(gap, check_positive("largest_gap", largest_gap))
    log2 = math.log(2.0)
    new_arms = math.log1p(Rm / (2 * lam * g * log2)) + math.log1p(1 / (2 * k * lam * g * log2))
    warmup = torch.full_like(radius, gap * 2 * dim / log2 * new_arms)
    b2 = 4.0 * lam * S * S + radius
    a2 = 2 * g * dim / log2 * b2 * math.log1p(Rm * horizon / (2 * dim * g * lam))
    growth = math.log1p(horizon / (2 * dim * g * k * lam))
    C = 7 * g * k * R * Rm * dim / log2 * b2 * growth
    root = torch.sqrt((a2 * R).square() + a2 * (horizon / kappa_star + 2 * R * C))
    total = 2.0 * (C + a2 * R + root)
    leading = 2.0 * torch.sqrt(a2 * horizon / kappa_star)
    worst = gap * horizon
    value = torch.clamp_max(warmup + total, worst)
    return RegretBound(value, leading, total - leading, warmup, warmup + total >= worst)


def realised_certificate(
    upper: ArrayLike, lower: ArrayLike, largest_gap: ArrayLike | None = None
) -> Tensor:
    """What a run certifies about its own regret: ``sum_{s<=t} min(D, upper_s - lower_s)``.

    ``lower`` is the lower end of the interval of the mean reward of the arm that was played,
    ``upper`` the largest upper end of all arms of the round: that of the same arm, if it is certain
    that this was the optimistic choice. On the event of the confidence sequence (probability 1 -
    delta) the regret up to every t is at most this: nothing unknown enters.

    Args:
        upper: ``(*B, T)``, on the scale of the mean.
        lower: ``(*B, T)``.
        largest_gap: D, a bound on the regret of one round.

    Returns:
        ``(*B, T)``, for every t.

    Example:
        >>> realised_certificate(torch.tensor([1.0, 0.75]), torch.tensor([0.0, 0.25]))
        tensor([1.0000, 1.5000])
    """
    upper = as_floats("upper", upper)
    lower = as_like("lower", lower, upper)
    check_shape("lower", lower, upper.shape)
    width = upper - lower
    if largest_gap is not None:
        cap = torch.as_tensor(largest_gap, dtype=width.dtype, device=width.device)
        width = torch.minimum(width, cap)
    return width.cumsum(-1)
