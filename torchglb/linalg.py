"""Small batched linear algebra: quadratics on balls, cuts of balls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import Array, at_least, dot, idle, length, library, limits


def minimize_on_ball(eigenvalues: Array, coefficients: Array, radius: Array) -> tuple[Array, Array]:
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
    xp = library(eigenvalues)
    _, tiny = limits(eigenvalues)
    if radius.shape != eigenvalues.shape[:-1]:
        radius = xp.broadcast_to(radius, eigenvalues.shape[:-1])

    def solve(nu: Array) -> tuple[Array, Array, Array]:
        shifted = at_least(eigenvalues + nu[..., None], tiny)
        u = coefficients / shifted
        return u, length(u), shifted

    nu = 0.0 * radius
    u, norm, _ = solve(nu)
    outside = ~(norm <= radius)
    if idle(outside):
        return u, nu
    # one term alone already reaches the sphere here, so the root lies to the right
    nearest = xp.amax(abs(coefficients) / radius[..., None] - eigenvalues, -1)
    nu = xp.where(outside, at_least(nearest, 0.0), nu)
    moving = outside
    for _ in range(30):
        u, norm, shifted = solve(nu)
        slope = at_least(dot(u, u / shifted), tiny)
        step = (norm * norm / slope) * (norm / radius - 1.0)
        nu = xp.where(moving, nu + at_least(step, 0.0), nu)
        moving = moving & (step > 1e-15 * nu)
        if idle(moving):
            break
    u, norm, _ = solve(nu)
    # land on the sphere exactly, up to rounding
    shrink = xp.where(norm > radius, radius / at_least(norm, tiny), 1.0)
    return u * shrink[..., None], nu


class Cut(NamedTuple):
    """A half-space that cuts the ball, seen from x; all entries broadcast."""

    radius: Array  # S
    steep: Array  # |normal|
    reach: Array  # how far the half-space reaches along its normal
    near: Array  # the same, but no farther than the ball
    chord: Array  # the radius of the disc that the plane cuts out
    along: Array  # x in the direction of the normal
    across: Array  # and across it
    whole: Array  # |x|
    idle: Array  # whether the maximiser over the ball obeys the cut anyway

    @property
    def value(self) -> Array:
        """``max <x, theta>`` over ball and half-space; -inf where they do not meet."""
        where = library(self.along).where
        cut = self.near * self.along + self.chord * self.across
        value = where(self.idle, self.radius * self.whole, cut)
        return where(self.reach < -self.radius, -float("inf"), value)

    @property
    def multiplier(self) -> Array:
        """The derivative of the value in the offset."""
        chord = at_least(self.chord, limits(self.along)[1])
        alpha = (self.along - self.near * self.across / chord) / self.steep
        return library(alpha).where(self.idle, 0.0, at_least(alpha, 0.0))


def cut_ball(x: Array, normal: Array, offset: Array, radius: Array) -> Cut:
    """The part of the ball ``|theta| <= S`` with ``<normal, theta> <= offset``, in closed form.

    By duality ``max <x, theta>`` over it is ``min over alpha >= 0 of alpha offset + S |x - alpha
    normal|``, so the value is an upper bound over every subset of ball and half-space; the
    minimising alpha is the multiplier. All arguments broadcast; the last axis of ``x`` and
    ``normal`` is d. A half-space without a normal holds everything or, if its offset is negative,
    nothing.
    """
    xp = library(x)
    steep = at_least(length(normal), limits(x)[1])
    unit, reach = normal / steep[..., None], offset / steep
    along, whole = dot(x, unit), length(x)
    across = length(x - along[..., None] * unit)
    idle = (reach >= radius) | (radius * along <= reach * whole)
    near = xp.minimum(xp.maximum(reach, -radius), radius)
    chord = xp.sqrt((radius - near) * (radius + near))
    return Cut(radius, steep, reach, near, chord, along, across, whole, idle)


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
