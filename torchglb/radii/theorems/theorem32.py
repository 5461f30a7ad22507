"""Theorem 3.2: an ellipsoid around the likelihood-ratio set of a self-concordant family.

``{theta : |theta - theta_hat|^2 in (H + lam I) <= gamma}`` with ``H`` the Hessian at theta_hat,
which must lie in the ball. Every gamma here holds wherever ``L(theta) <= L(theta_hat) + beta^2``
and ``|theta| <= S`` do: no further delta is spent. ``gap >= max <grad L(theta_hat), theta_hat -
theta>`` over the ball, which is ``<grad, theta_hat> + S |grad|``, pays for an inexact theta_hat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import as_floats, check_count, check_shape, check_sizes
from torchglb.distributed import WHOLE, Shards
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rounding import round_up


def regularization_for(S: ArrayLike, self_concordance: ArrayLike) -> Tensor | float:
    """``lam = 1/(8 S^2 (1 + S R_s))``, for which ``4 S^2 lam <= 1/2``: lam then costs at most 1.

    Example:
        >>> regularization_for(1.0, 1.0)
        0.0625
    """
    concordance = check_sizes("self_concordance", self_concordance, finite=False)
    return balanced_ridge(check_sizes("S", S, positive=True), concordance)


def balanced_ridge(S: Tensor | float, self_concordance: Tensor | float) -> Tensor | float:
    """:func:`regularization_for` of what has been checked."""
    return 1.0 / (8.0 * S * S * (1.0 + S * self_concordance))


def theorem32(
    radius: ArrayLike,
    S: ArrayLike,
    self_concordance: ArrayLike,
    regularization: ArrayLike,
    gap: ArrayLike = 0.0,
) -> Tensor:
    """Theorem 3.2 as printed: ``gamma = 2 (1 + S R_s) (4 S^2 lam + beta^2)``.

    (The factor pays for replacing the Hessian between two points by that at theta_hat, which lam
    does not need: ``2 (1 + S R_s) beta^2 + lam (S + |theta_hat|)^2`` is valid too, and smaller. The
    fixed point below is never above that.)

    Args:
        radius: beta^2 >= 0, ``(*B)``.
        S: radius of the ball.
        self_concordance: R_s on the ball.
        regularization: lam >= 0.
        gap: Frank-Wolfe gap of theta_hat.

    Example:
        >>> theorem32(torch.tensor(3.0), 2.0, 1.0, 0.0)
        tensor(18.)
    """
    height = as_floats("radius", check_sizes("radius", radius, finite=False))
    size, concordance, lam = _constants(S, self_concordance, regularization)
    return printed_gamma(height, size, concordance, lam, check_sizes("gap", gap, finite=False))


def _constants(
    S: ArrayLike, self_concordance: ArrayLike, regularization: ArrayLike
) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """S, R_s and lam, checked."""
    return (
        check_sizes("S", S),
        check_sizes("self_concordance", self_concordance, finite=False),
        check_sizes("regularization", regularization),
    )


def printed_gamma(
    radius: Tensor,
    S: Tensor | float,
    self_concordance: Tensor | float,
    regularization: Tensor | float,
    gap: Tensor | float = 0.0,
) -> Tensor:
    """:func:`theorem32` of what has been checked."""
    factor = 2.0 * (1.0 + S * self_concordance)
    return factor * (4.0 * S * S * regularization + radius + gap)


def gap_of_rounding(hessian: Tensor, farthest: Tensor, doubt: float) -> Tensor:
    """What a Hessian that is not exact adds to ``gap``, of which gamma is at least twice as much.

    Args:
        hessian: H, ``(*B, d, d)``.
        farthest: no ``|theta - theta_hat|`` is larger, ``(*B)``.
        doubt: what H may have lost, relative to its trace.
    """
    trace = torch.diagonal(hessian, dim1=-2, dim2=-1).sum(-1).detach()
    return 0.5 * doubt * trace * farthest.square()


def contraction(D: Tensor) -> Tensor:
    """``phi(D) = (D - 1 + e^-D)/D^2 = int_0^1 (1 - v) e^(-v D) dv``, 1/2 at D = 0, falling."""
    series = 0.5 - D / 6.0 + D**2 / 24.0 - D**3 / 120.0  # below phi, as the terms alternate
    safe = torch.where(D > 1e-2, D, torch.ones_like(D))
    return torch.where(D > 1e-2, (safe + torch.expm1(-safe)) / safe.square(), series)


def lengths_in_inverse(X: Tensor, matrix: Tensor) -> Tensor:
    """At least ``|x_s| in matrix^-1``, ``(*B, n)``; infinite where that is not known.

    What a factor and a solution by it may lose, in units of the trace, is taken from the diagonal:
    the factor as computed is then one of a matrix below this one.
    """
    d = matrix.shape[-1]
    trace = torch.diagonal(matrix.detach(), dim1=-2, dim2=-1).sum(-1)
    lost = 8.0 * (d + 1.0) * torch.finfo(matrix.dtype).eps * trace
    eye = torch.eye(d, dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix - lost[..., None, None] * eye)
    square = torch.linalg.solve_triangular(factor, X.mT, upper=False).square().sum(-2)
    length = square.clamp_min(torch.finfo(X.dtype).tiny).sqrt()  # with a derivative at x = 0 too
    return torch.where((failed == 0)[..., None], length, torch.full_like(length, torch.inf))


def theorem32_fixed_point(
    radius: ArrayLike,
    S: ArrayLike,
    self_concordance: ArrayLike,
    regularization: ArrayLike,
    center_norm: ArrayLike,
    X: ArrayLike,
    hessian: ArrayLike,
    w: ArrayLike | None = None,
    gap: ArrayLike = 0.0,
    steps: int = 20,
    shards: Shards = WHOLE,
) -> Tensor:
    """The sharpest gamma: its factor tends to 2 instead of 2 (1 + S R_s) as data come in.

    Between theta_hat and any theta of the set, ``m''`` falls at most by the rate R_s |<x, theta -
    theta_hat>| <= D, and ``L(theta) - L(theta_hat) >= phi(D) |theta - theta_hat|^2 in H - gap``
    with ``phi(D) = (D - 1 + e^-D)/D^2``. Start with ``D = R_s max_s |x_s| (S + |theta_hat|)``,
    then repeat ``gamma = (beta^2 + gap)/phi(D) + lam (S + |theta_hat|)^2`` and ``D = R_s max_s
    min(sqrt(gamma) |x_s| in (H + lam I)^-1, |x_s| (S + |theta_hat|))``: every iterate is valid,
    and they fall. One pass for the norms of the rows, O(n d^2), then O(n) per step.

    Args:
        radius: beta^2 >= 0, ``(*B)``.
        S: radius of the ball.
        self_concordance: R_s on the ball.
        regularization: lam > 0, or lam = 0 if H is invertible.
        center_norm: ``|theta_hat|``, ``(*B)``.
        X: features ``(*B, n, d)``.
        hessian: H, ``(*B, d, d)``.
        w: row weights ``(*B, n)``; rows of weight 0 are left out.
        gap: Frank-Wolfe gap of theta_hat.
        steps: iterations.
        shards: completes the maxima over these rows where others are on other ranks.

    Example:
        >>> X, hessian = torch.eye(2), torch.eye(2)
        >>> beta, length = torch.tensor(3.0), torch.tensor(1.0)
        >>> sharp = theorem32_fixed_point(beta, 2.0, 1.0, 0.5, length, X, hessian)
        >>> bool(sharp <= theorem32(beta, 2.0, 1.0, 0.5))
        True
    """
    X = as_floats("X", X)
    if X.ndim < 2:
        check_shape("X", X, ("*B", "n", "d"))
    hessian = as_floats("hessian", hessian)
    check_shape("hessian", hessian, (*X.shape[:-2], X.shape[-1], X.shape[-1]))
    if w is not None:
        w = as_floats("w", check_sizes("w", w))
        check_shape("w", w, X.shape[:-1])
    height = as_floats("radius", check_sizes("radius", radius, finite=False))
    size, concordance, lam = _constants(S, self_concordance, regularization)
    norm = as_floats("center_norm", check_sizes("center_norm", center_norm))
    rest = check_sizes("gap", gap, finite=False), check_count("steps", steps, least=1), shards
    return fixed_point(height, size, concordance, lam, norm, X, hessian, w, *rest)


def fixed_point(
    radius: Tensor,
    S: Tensor | float,
    self_concordance: Tensor | float,
    regularization: Tensor | float,
    center_norm: Tensor,
    X: Tensor,
    hessian: Tensor,
    w: Tensor | None = None,
    gap: Tensor | float = 0.0,
    steps: int = 20,
    shards: Shards = WHOLE,
) -> Tensor:
    """:func:`theorem32_fixed_point` of what has been checked."""
    dtype = X.dtype
    if X.is_cpu:  # in float32, lam may be less than what a factor loses
        X, hessian = X.double(), hessian.double()
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    lam = torch.as_tensor(regularization, dtype=X.dtype, device=X.device)
    # a matrix that is not positive definite bounds nothing; ``reach`` is left
    local = lengths_in_inverse(X, hessian + lam[..., None, None] * eye)
    reach = torch.linalg.vector_norm(X, dim=-1) * (S + center_norm)[..., None]  # both (*B, n)
    if w is not None:
        local, reach = (torch.where(w > 0, t, torch.zeros_like(t)) for t in (local, reach))
    unknown = torch.isinf(local)
    local = torch.where(unknown, 0.0, local)
    ridge = lam * (S + center_norm).square()
    curvature = shards.maximum(largest(reach)) * self_concordance
    gamma = (radius + gap) / contraction(curvature) + ridge
    for _ in range(steps):
        rows = torch.minimum(gamma.sqrt()[..., None] * local, reach)
        rows = torch.where(unknown, reach, rows)
        farthest = shards.maximum(largest(rows))
        curvature = torch.minimum(farthest * self_concordance, curvature)
        gamma = (radius + gap) / contraction(curvature) + ridge
    return round_up(gamma, dtype)


def fixed_point_around(
    likelihood: NegativeLogLikelihood,
    theta_hat: Tensor,
    hessian: Tensor,
    radius: Tensor,
    S: Tensor,
    self_concordance: Tensor,
    regularization: Tensor,
    gap: Tensor,
) -> Tensor:
    """:func:`theorem32_fixed_point` for the rows of a likelihood, around ``theta_hat (*B, d)``."""
    constants = (S, self_concordance, regularization, torch.linalg.vector_norm(theta_hat, dim=-1))
    rows = (likelihood.X, hessian, likelihood.w)
    return fixed_point(radius, *constants, *rows, gap, shards=likelihood.shards)


def largest(rows: Tensor) -> Tensor:
    """The maximum over the last axis, 0 where it is empty."""
    return torch.cat([rows, rows.new_zeros((*rows.shape[:-1], 1))], dim=-1).amax(-1)
