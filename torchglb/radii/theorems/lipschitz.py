"""Lipschitz constants of the loss over the ball: Table 1 of the paper, and tighter ones from data.

``L_t = max_{|theta| <= S} |grad L_t(theta)|``, for features of norm at most 1. With row weights w
in [0, 1] the loss is ``sum_s w_s (m - r_s z)/g`` and sums of weights take the place of counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import length
from torchglb.checks import (
    as_floats,
    check_count,
    check_positive,
    check_probability,
    check_shape,
    check_size_tensor,
    check_sizes,
    check_tolerance,
    refuse,
)
from torchglb.families import Gaussian, GLMFamily, Poisson, check_family, has_formulas_of
from torchglb.radii.statistics import RowStatistics

ROUNDING = 1e-12  # relative; above the error of any d x d eigenvalue here


class LipschitzBound(NamedTuple):
    """An upper bound on L_t, and the probability with which it may fail at some t.

    Attributes:
        value: ``(*B)``.
        failure: 0 for a deterministic bound.

    Example:
        >>> table1_bounded(torch.tensor(100.0), torch.tensor(4.0), 0.25, noise=1.0).failure
        0.0
    """

    value: Tensor
    failure: float


# ---- Table 1, as printed -----------------------------------------------------------------------


def table1_bounded(
    count: ArrayLike,
    S: ArrayLike,
    max_variance: ArrayLike,
    noise: float,
    dispersion: float = 1.0,
) -> LipschitzBound:
    """Table 1, "bounded by M": ``(M + 2 S R_mudot) n / g``.

    Assumes ``|r - mu(<x, theta*>)| <= M`` almost surely. Deterministic. The row of the Bernoulli
    family, ``(1 + S/2) n``, is that of M = 1 and R_mudot = 1/4; loose, as n is a bound too.

    Args:
        count: n, or the sum of the weights; ``(*B)``.
        S: radius of the ball, ``(*B)``.
        max_variance: R_mudot on the ball.
        noise: M; ``b - a`` for rewards in [a, b].
        dispersion: g.

    Example:
        >>> n, S = torch.tensor(100.0), torch.tensor(4.0)
        >>> float(table1_bounded(n, S, max_variance=0.25, noise=1.0).value)
        300.0
    """
    top = check_sizes("max_variance", max_variance, finite=False)
    constants = top, check_tolerance("noise", noise), check_positive("dispersion", dispersion)
    return _bounded(check_size_tensor("count", count), check_size_tensor("S", S), *constants)


def _bounded(
    count: Tensor, S: Tensor, max_variance: Tensor | float, noise: float, dispersion: float
) -> LipschitzBound:
    """:func:`table1_bounded` of what has been checked."""
    return LipschitzBound((noise + 2.0 * S * max_variance) * count / dispersion, 0.0)


def table1_subgaussian(
    count: ArrayLike,
    S: ArrayLike,
    dim: int,
    delta: float,
    *,
    sigma: float,
    max_variance: ArrayLike = 1.0,
    dispersion: float = 1.0,
) -> LipschitzBound:
    """Table 1, sub-Gaussian noise, with the constants of its proposition in the appendix.

    ``(2/g) (R_mudot S n + 2 pi sigma sqrt(n log(pi^2 d t^2 / (3 delta))))``, t = n + 1, for all t
    at once with probability 1 - delta. (Table 1 omits the constants; and it does not say that
    this delta is spent on top of that of Theorem 3.1.) Weights at most 1 shrink the noise, so n
    rows of any weights are covered.

    Example:
        >>> n, S = torch.tensor(100.0), torch.tensor(1.0)
        >>> round(float(table1_subgaussian(n, S, dim=2, delta=0.05, sigma=1.0).value), 1)
        672.0
    """
    check_probability("delta", delta)
    sigma, g = check_tolerance("sigma", sigma), check_positive("dispersion", dispersion)
    top = check_sizes("max_variance", max_variance, finite=False)
    rows, size = check_size_tensor("count", count), check_size_tensor("S", S)
    return _subgaussian(rows, size, check_count("dim", dim, least=1), delta, sigma, top, g)


def _subgaussian(
    count: Tensor,
    S: Tensor,
    dim: int,
    delta: float,
    sigma: float,
    max_variance: Tensor | float,
    dispersion: float,
) -> LipschitzBound:
    """:func:`table1_subgaussian` of what has been checked."""
    union = torch.log(math.pi**2 * dim * (count + 1) ** 2 / (3.0 * delta))
    noise = 2.0 * math.pi * sigma * torch.sqrt(count * union)
    return LipschitzBound(2.0 / dispersion * (max_variance * S * count + noise), delta)


def table1_poisson(count: ArrayLike, S: ArrayLike, dim: int, delta: float) -> LipschitzBound:
    """Table 1, Poisson, as printed in the proposition of the appendix.

    S > 1: ``C n + 2/(1 - 2e^-S) log(pi^2 (d+1) t^2/(3 delta))`` with
    ``C = (1 - 2e^-S)(e^S + 2S + 2 log(2(1 - 2e^-S)/e))/4 + 2 S e^S``; S <= 1:
    ``C n + 4 log(...)`` with ``C = (e^S + 4S + 4 log(8 + 2e^S))/16 + 2 S e^S``.
    With probability 1 - delta for all t. (The printed proof does not hold: its bound on the moment
    generating function falls below 1 for small arguments. The statement survives, since
    :func:`poisson_martingale` is smaller.)

    Example:
        >>> n, S = torch.tensor(100.0), torch.tensor(1.0)
        >>> round(float(table1_poisson(n, S, dim=2, delta=0.05).value), 1)
        708.7
    """
    check_probability("delta", delta)
    sizes = check_size_tensor("count", count), check_size_tensor("S", S)
    return _poisson(*sizes, check_count("dim", dim, least=1), delta)


def _poisson(count: Tensor, S: Tensor, dim: int, delta: float) -> LipschitzBound:
    """:func:`table1_poisson` of what has been checked."""
    union = torch.log(math.pi**2 * (dim + 1) * (count + 1) ** 2 / (3.0 * delta))
    rate = torch.exp(S)
    shrink = 1.0 - 2.0 / torch.exp(S.clamp_min(1.0))
    large = 0.25 * shrink * (rate + 2.0 * S + 2.0 * torch.log(2.0 * shrink / math.e))
    small = (rate + 4.0 * S + 4.0 * torch.log(8.0 + 2.0 * rate)) / 16.0
    slope = torch.where(S > 1.0, large, small) + 2.0 * S * rate
    offset = torch.where(S > 1.0, 2.0 / shrink, torch.full_like(shrink, 4.0))
    return LipschitzBound(slope * count + offset * union, delta)


def table1(
    family: GLMFamily, statistics: RowStatistics, S: Tensor, max_variance: Tensor, delta: float
) -> LipschitzBound | None:
    """The row of Table 1 that fits a family, or None where the table has none.

    Args:
        family: rewards of finite range take the bounded row (Bernoulli is its special case).
        statistics: the running sums.
        S: ``(*B)``.
        max_variance: R_mudot, ``(*B)``.
        delta: spent only by the rows that hold with high probability (Gaussian, Poisson).
    """
    low, high = family.reward_range
    g, dim = family.dispersion, statistics.residual.shape[-1]
    if high - low < math.inf:
        return _bounded(statistics.weight, S, max_variance, high - low, g)
    if has_formulas_of(family, Gaussian):
        return _subgaussian(statistics.number, S, dim, delta, family.sigma, 1.0, g)
    if has_formulas_of(family, Poisson):
        return _poisson(statistics.number, S, dim, delta)
    return None


# ---- tighter -----------------------------------------------------------------------------------


def poisson_martingale(
    weight: ArrayLike, S: ArrayLike, dim: int, delta: float, tilt: float = 0.5
) -> LipschitzBound:
    """Poisson rewards: ``2 sinh(S) n + (psi(tilt) e^S n + log((d+1)/delta)) / tilt``.

    ``psi(u) = e^u - 1 - u``. With probability 1 - delta for all t, no union over t: the trace of
    ``exp(tilt sum Y_s - psi(tilt) e^S n)``, Y the Hermitian dilation of ``(r - mu) x``, is a
    supermartingale of initial value d + 1. Weights w <= 1 obey ``psi(w tilt) <= w psi(tilt)``.

    Args:
        weight: n, or the sum of the weights; ``(*B)``.
        S: ``(*B)``.
        dim: d.
        delta: in (0, 1).
        tilt: above 0, fixed before the data.

    Example:
        >>> n, S = torch.tensor(100.0), torch.tensor(1.0)
        >>> round(float(poisson_martingale(n, S, dim=2, delta=0.05).value), 1)
        324.1
    """
    check_probability("delta", delta)
    tilt, dim = check_positive("tilt", tilt), check_count("dim", dim, least=1)
    count, size = check_size_tensor("weight", weight), check_size_tensor("S", S)
    excess = math.expm1(tilt) - tilt
    noise = (excess * torch.exp(size) * count + math.log((dim + 1) / delta)) / tilt
    return LipschitzBound(2.0 * torch.sinh(size) * count + noise, delta)


def data_lipschitz(family: GLMFamily, statistics: RowStatistics, S: ArrayLike) -> LipschitzBound:
    """The least of three deterministic bounds on L_t from the data: no delta is spent.

    With a = S|x|, [lo, hi] = [mu(-a), mu(a)], mid-point and half-width h, and the largest slope
    m'' on [-a, a]:

    - ``U1 = sum |x| max(|r - lo|, |r - hi|)``,
    - ``U2 = |sum (mid - r) x| + sqrt(lambda_max(sum h x x') sum h)``,
    - ``U3 = |sum (mu(0) - r) x| + S lambda_max(sum slope x x')``,

    each over g; and for the Gaussian family the exact value. O(d^3), no pass.

    Example:
        >>> import torchglb as glb
        >>> problem = glb.radii.Problem(glb.Bernoulli(), glb.Ball(2, 4.0), delta=0.05)
        >>> rows = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double()
        >>> sums = glb.radii.empty_statistics(problem)
        >>> sums = glb.radii.update_statistics(problem, sums, *rows)
        >>> bool(data_lipschitz(glb.Bernoulli(), sums, problem.S).value <= 2.0)
        True
    """
    check_family(family)
    if not isinstance(statistics, RowStatistics):
        raise refuse("statistics", "RowStatistics", type(statistics).__name__)
    size = as_floats("S", check_sizes("S", S, positive=True))
    return least_lipschitz(family, statistics, size)


def least_lipschitz(family: GLMFamily, statistics: RowStatistics, S: Tensor) -> LipschitzBound:
    """:func:`data_lipschitz` of what has been checked."""
    if has_formulas_of(family, Gaussian):
        return _secular(statistics.slope_gram, -statistics.residual, S, family.dispersion)
    widest = torch.linalg.eigvalsh(statistics.width_gram)[..., -1].clamp_min(0.0)
    steepest = torch.linalg.eigvalsh(statistics.slope_gram)[..., -1].clamp_min(0.0)
    u1 = statistics.extreme
    u2 = length(statistics.middle) + torch.sqrt(widest * statistics.width)
    u3 = length(statistics.residual) + S * steepest
    least = torch.minimum(u1, torch.minimum(u2, u3))
    return LipschitzBound((1.0 + ROUNDING) * least / family.dispersion, 0.0)


def gaussian_lipschitz(
    gram: ArrayLike, moment: ArrayLike, S: ArrayLike, dispersion: float = 1.0, steps: int = 8
) -> LipschitzBound:
    """The exact L_t of the squared loss: ``max_{|theta| <= S} |V theta - b| / g``.

    Maximising a convex quadratic over a ball has no duality gap. With V = Q diag(v) Q', every
    ``lam > max v^2`` gives the upper bound ``lam S^2 + sum b_i^2 lam/(lam - v_i^2)`` on the square;
    the best lam is found by Newton's method on the secular equation, from the left. Whatever lam
    it reaches, the value is an upper bound. O(d^3), no pass.

    Args:
        gram: ``V = sum w x x'``, ``(*B, d, d)``.
        moment: ``b = sum w r x``, ``(*B, d)``.
        S: ``(*B)``.
        dispersion: g.
        steps: Newton steps.

    Example:
        >>> V, b = torch.diag(torch.tensor([2.0, 1.0])), torch.zeros(2)
        >>> round(float(gaussian_lipschitz(V, b, torch.tensor(3.0)).value), 4)
        6.0
    """
    V, b = as_floats("gram", gram), as_floats("moment", moment)
    if not b.ndim:
        check_shape("moment", b, ("*B", "d"))
    check_shape("gram", V, (*V.shape[:-2], b.shape[-1], b.shape[-1]))
    size = as_floats("S", check_sizes("S", S, positive=True))
    constants = check_positive("dispersion", dispersion), check_count("steps", steps)
    return _secular(V, b, size, *constants)


def _secular(
    gram: Tensor, moment: Tensor, S: Tensor, dispersion: float, steps: int = 8
) -> LipschitzBound:
    """:func:`gaussian_lipschitz` of what has been checked."""
    v, Q = torch.linalg.eigh(gram)
    v = v.clamp_min(0.0)
    b = (Q.mT @ moment[..., None])[..., 0]
    top = v[..., -1]
    excess = (top[..., None] - v) * (top[..., None] + v)  # top^2 - v^2, without cancellation
    pull = (v * b).square()
    # lam = top^2 + tau: sum pull/(excess + tau)^2 = S^2; the last term alone gives a lower end
    scale = top.square() + b.square().sum(-1) / S.square()
    tiny = torch.finfo(v.dtype).tiny
    floor = torch.finfo(v.dtype).eps * scale + tiny**0.25  # whose cube is still a number
    tau = torch.maximum(pull[..., -1].sqrt() / S, floor)
    for _ in range(steps):
        gap = excess + tau[..., None]
        length2 = (pull / gap.square()).sum(-1)
        slope = (pull / gap.pow(3)).sum(-1)
        # Newton on 1/length(tau) = 1/S, concave in tau, so that steps from the left stay there
        length = length2.sqrt()
        step = length2 * (length / S - 1.0) / slope.clamp_min(tiny)
        tau = torch.maximum(tau + torch.where(slope > 0, step, torch.zeros_like(step)), floor)
    lam = top.square() + tau
    square = lam * S.square() + (b.square() * lam[..., None] / (excess + tau[..., None])).sum(-1)
    return LipschitzBound((1.0 + ROUNDING) * square.sqrt() / dispersion, 0.0)
