"""Small batched linear algebra: quadratics on balls, cuts of balls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def idle(mask: Tensor) -> bool:
    """Whether a masked computation may be skipped because no element needs it.

    Only a CPU is asked: there the answer is free, elsewhere it would be a host synchronisation and
    computing what nobody needs is cheaper.
    """
    return mask.device.type == "cpu" and not bool(mask.any())


def minimize_on_ball(
    eigenvalues: Tensor, coefficients: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    """The minimiser of ``u' diag(e) u / 2 - b'u`` over ``|u| <= S``, by its secular equation.

    With a multiplier ``nu >= 0``, ``u = b / (e + nu)``; either nu = 0 and u is inside, or
    ``|u| = S``. ``1/|u(nu)|`` is concave and increasing, so Newton's iteration from the left never
    overshoots and converges quadratically.

    Args:
        eigenvalues: e >= 0, ``(*B, d)``.
        coefficients: b, ``(*B, d)``.
        radius: S, broadcasts with ``*B``.

    Returns:
        u ``(*B, d)`` and nu ``(*B)``. Directions with e = b = 0 get u = 0.
    """
    tiny = torch.finfo(eigenvalues.dtype).tiny
    radius = radius.expand(eigenvalues.shape[:-1])

    def solve(nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = (eigenvalues + nu[..., None]).clamp_min(tiny)
        u = coefficients / shifted
        return u, torch.linalg.vector_norm(u, dim=-1), shifted

    u, norm, _ = solve(torch.zeros_like(radius))
    outside = ~(norm <= radius)
    nu = torch.zeros_like(radius)
    if idle(outside):
        return u, nu
    # one term alone already reaches the sphere here, so the root lies to the right
    nearest = (coefficients.abs() / radius[..., None] - eigenvalues).amax(-1).clamp_min(0.0)
    nu = torch.where(outside, nearest, nu)
    moving = outside
    for _ in range(30):
        u, norm, shifted = solve(nu)
        slope = (u * u / shifted).sum(-1)
        step = (norm * norm / slope.clamp_min(tiny)) * (norm / radius - 1.0)
        nu = torch.where(moving, nu + step.clamp_min(0.0), nu)
        moving = moving & (step > 1e-15 * nu)
        if idle(moving):
            break
    u, norm, _ = solve(nu)
    # land on the sphere exactly, up to rounding
    shrink = torch.where(norm > radius, radius / norm.clamp_min(tiny), torch.ones_like(norm))
    return u * shrink[..., None], nu


class Cut(NamedTuple):
    """What a half-space leaves of the ball, seen from x: value and multiplier, batched."""

    value: Tensor
    multiplier: Tensor


def cut_ball(x: Tensor, normal: Tensor, offset: Tensor, radius: Tensor) -> Cut:
    """``max <x, theta>`` over ``|theta| <= S`` and ``<normal, theta> <= offset``, in closed form.

    By duality it is ``min over alpha >= 0 of alpha offset + S |x - alpha normal|``, so the value is
    an upper bound over every subset of ball and half-space; the minimising alpha is the multiplier,
    its derivative in ``offset``. All arguments broadcast; the last axis of ``x`` and ``normal`` is
    d. An empty intersection has the value ``-inf``.
    """
    tiny = torch.finfo(x.dtype).tiny
    length = torch.linalg.vector_norm(normal, dim=-1)
    unit = normal / length.clamp_min(tiny)[..., None]
    # a half-space without a normal holds everything or nothing
    edge = torch.where(offset >= 0, torch.inf, -torch.inf)
    reach = torch.where(length > tiny, offset / length.clamp_min(tiny), edge)
    along = (x * unit).sum(-1)
    across = torch.linalg.vector_norm(x - along[..., None] * unit, dim=-1)
    whole = torch.linalg.vector_norm(x, dim=-1)
    inactive = (reach >= radius) | (radius * along <= reach * whole)
    near = torch.minimum(torch.maximum(reach, -radius), radius)
    chord = ((radius - near) * (radius + near)).sqrt()
    value = torch.where(inactive, radius * whole, near * along + chord * across)
    multiplier = (along - near * across / chord.clamp_min(tiny)) / length.clamp_min(tiny)
    return Cut(
        torch.where(reach < -radius, -torch.inf, value),
        torch.where(inactive, 0.0, multiplier.clamp_min(0.0)),
    )


def inverse_forms(x: Tensor, matrix: Tensor) -> Tensor:
    """``|x|^2 in M^-1`` for vectors ``(*B, K, d)`` and positive definite ``(*B, d, d)``: O(d^3)."""
    factor = torch.linalg.cholesky(matrix)
    return torch.linalg.solve_triangular(factor, x.mT, upper=False).square().sum(-2)


def woodbury_inverse_forms(x: Tensor, rows: Tensor, weights: Tensor, ridge: Tensor) -> Tensor:
    """``|x|^2 in M^-1`` for ``M = sum_s w_s x_s x_s' + lambda I``, by Woodbury: O(n d (n + K)).

    ``(|x|^2 - |(lambda I + A A')^(-1/2) A x|^2) / lambda`` with ``A = sqrt(w) X``: the way to go
    while there are fewer rows than features.

    Args:
        x: vectors ``(*B, K, d)``.
        rows: X, ``(*B, n, d)``.
        weights: w >= 0, ``(*B, n)``.
        ridge: lambda > 0, ``(*B)``.
    """
    scaled = rows * weights.sqrt()[..., None]
    eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    factor = torch.linalg.cholesky(scaled @ scaled.mT + ridge[..., None, None] * eye)
    white = torch.linalg.solve_triangular(factor, scaled @ x.mT, upper=False)  # (*B, n, K)
    left = x.square().sum(-1) - white.square().sum(-2)
    return left.clamp_min(0.0) / ridge[..., None]
