"""Small batched linear algebra: quadratics on balls, cuts of balls."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import dot, known_none, length, limits
from torchglb.backend.inverse_forms import PLAIN, plain_bounds
from torchglb.errors import SolverError
from torchglb.recording import is_plain
from torchglb.rounding import two_product, two_sum

#: limit of the root search for a multiplier of the ball; it converges quadratically
ROOT_STEPS = 30


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
    _, tiny = limits(eigenvalues)
    if radius.shape != eigenvalues.shape[:-1]:
        radius = torch.broadcast_to(radius, eigenvalues.shape[:-1])

    def solve(nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = (eigenvalues + nu[..., None]).clamp_min(tiny)
        u = coefficients / shifted
        return u, length(u), shifted

    nu = 0.0 * radius
    u, norm, _ = solve(nu)
    outside = ~(norm <= radius)
    if known_none(outside):
        return u, nu
    # one term alone already reaches the sphere here, so the root lies to the right
    nearest = torch.amax(abs(coefficients) / radius[..., None] - eigenvalues, -1)
    nu = torch.where(outside, nearest.clamp_min(0.0), nu)
    moving = outside
    for _ in range(ROOT_STEPS):
        u, norm, shifted = solve(nu)
        slope = dot(u, u / shifted).clamp_min(tiny)
        step = (norm * norm / slope) * (norm / radius - 1.0)
        nu = torch.where(moving, nu + step.clamp_min(0.0), nu)
        moving = moving & (step > 1e-15 * nu)
        if known_none(moving):
            break
    u, norm, _ = solve(nu)
    # land on the sphere exactly, up to rounding
    shrink = torch.where(norm > radius, radius / norm.clamp_min(tiny), 1.0)
    return u * shrink[..., None], nu


class Cut(NamedTuple):
    """A half-space that cuts the ball, seen from x; all entries broadcast."""

    radius: Tensor  # S
    steep: Tensor  # |normal|
    reach: Tensor  # how far the half-space reaches along its normal
    near: Tensor  # the same, but no farther than the ball
    chord: Tensor  # the radius of the disc that the plane cuts out
    along: Tensor  # x in the direction of the normal
    across: Tensor  # and across it
    whole: Tensor  # |x|
    idle: Tensor  # whether the maximiser over the ball obeys the cut anyway

    @property
    def value(self) -> Tensor:
        """``max <x, theta>`` over ball and half-space; -inf where they do not meet."""
        cut = self.near * self.along + self.chord * self.across
        value = torch.where(self.idle, self.radius * self.whole, cut)
        return torch.where(self.reach < -self.radius, -float("inf"), value)

    @property
    def multiplier(self) -> Tensor:
        """The derivative of the value in the offset."""
        chord = self.chord.clamp_min(limits(self.along)[1])
        alpha = (self.along - self.near * self.across / chord) / self.steep
        return torch.where(self.idle, 0.0, alpha.clamp_min(0.0))


def cut_ball(x: Tensor, normal: Tensor, offset: Tensor, radius: Tensor) -> Cut:
    """The part of the ball ``|theta| <= S`` with ``<normal, theta> <= offset``, in closed form.

    By duality ``max <x, theta>`` over it is ``min over alpha >= 0 of alpha offset + S |x - alpha
    normal|``, so the value is an upper bound over every subset of ball and half-space; the
    minimising alpha is the multiplier. All arguments broadcast; the last axis of ``x`` and
    ``normal`` is d. A half-space without a normal holds everything or, if its offset is negative,
    nothing.
    """
    steep = length(normal).clamp_min(limits(x)[1])
    unit, reach = normal / steep[..., None], offset / steep
    along, whole = dot(x, unit), length(x)
    across = length(x - along[..., None] * unit)
    idle = (reach >= radius) | (radius * along <= reach * whole)
    near = torch.minimum(torch.maximum(reach, -radius), radius)
    chord = torch.sqrt((radius - near) * (radius + near))
    return Cut(radius, steep, reach, near, chord, along, across, whole, idle)


def exit_distance(square: Tensor, along: Tensor, room: Tensor) -> Tensor:
    """The positive root of ``square t^2 + 2 along t = room``, for ``room >= 0``."""
    room = room.clamp_min(0.0)
    root = (along * along + square * room).sqrt()
    # of the two forms of the root the one that does not cancel
    tiny = torch.finfo(root.dtype).tiny
    outward = room / (along + root).clamp_min(tiny)
    return torch.where(along > 0, outward, (root - along) / square.clamp_min(tiny))


def distance_to_sphere(point: Tensor, direction: Tensor, S: Tensor) -> Tensor:
    """The largest t with ``|point + t direction| <= S``, for a point of the ball; all broadcast."""
    room = S.square() - point.square().sum(-1)
    return exit_distance(direction.square().sum(-1), (point * direction).sum(-1), room)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower factor of positive definite matrices ``(*B, d, d)``.

    Raises:
        SolverError: if rounding hides that they are.
    """
    try:
        return torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise SolverError(
            f"a matrix is not positive definite in {matrix.dtype}: its ridge is too small next to "
            "the rows. Take dtype=torch.float64, or another S or lambda"
        ) from None


def inverse_forms(x: Tensor, matrix: Tensor) -> Tensor:
    """``|x|^2 in M^-1`` for vectors ``(*B, K, d)`` and positive definite ``(*B, d, d)``: O(d^3)."""
    factor = cholesky(matrix)
    return torch.linalg.solve_triangular(factor, x.mT, upper=False).square().sum(-2)


def inverse_form_bounds(x: Tensor, matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Certified bounds ``low <= x' M^-1 x <= high`` for symmetric positive definite M.

    For any y, with the residual ``r = x - M y``,

    ``x' M^-1 x = x'y + r'y + r' M^-1 r``,  and  ``0 <= r' M^-1 r <= |r|^2 / e``

    with e > 0 below the least eigenvalue of M. So the error of y enters squared: relative to the
    form it is about ``(eps cond)^2``. Residual and products are summed in two numbers (Ogita, Rump
    and Oishi 2005: an error of eps of the result and ``(n eps)^2`` of the sizes), but where plain
    sums will do.

    Args:
        x: ``(*B, K, d)``.
        matrix: M, ``(*B, d, d)``.
        factor: its Cholesky factor, as computed.

    Returns:
        low and high, ``(*B, K)``; high is infinite where M is not provably positive definite.
    """
    plain = _plain_bounds(x.detach(), matrix.detach())
    if plain is not None and not bool(torch.isnan(plain[0]).any()):
        return plain
    d, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    lopsided = (matrix != matrix.mT).flatten(-2).any(-1)[..., None]
    matrix = 0.5 * (matrix + matrix.mT)
    y = torch.cholesky_solve(x.mT, factor).mT
    size = x.abs() + y.abs() @ matrix.abs()
    r, error = x - y @ matrix, (d + 2) * eps * size
    form = (x * y).sum(-1) + (r * y).sum(-1)
    sizes = ((x.abs() + r.abs()) * y.abs()).sum(-1)
    doubt = (y.abs() * error).sum(-1) + 2 * (d + 2) * eps * sizes
    coarse = ~(doubt <= PLAIN * form.abs())
    if plain is not None or not known_none(coarse):
        r = residual(x, y, matrix)
        error = eps * r.abs() + ((d + 2) * eps) ** 2 * size
        form = careful_dot(torch.cat([x, r], dim=-1), torch.cat([y, y], dim=-1))
        doubt = (y.abs() * error).sum(-1) + eps * form.abs() + ((2 * d + 1) * eps) ** 2 * sizes
    # symmetrising rounds an entry once
    doubt = doubt + torch.where(lopsided, 2 * eps * (y.abs() * size).sum(-1), 0.0)
    left = (r.abs() + error).square().sum(-1) / least_eigenvalue(matrix)[..., None]
    low = (form - doubt).clamp_min(0.0) * (1 - 4 * eps)
    high = (form + doubt + left) * (1 + (d + 8) * eps)
    high = torch.where(torch.isnan(high), torch.inf, high)
    if plain is not None:  # a form is not another one for what its neighbours need
        known = ~torch.isnan(plain[0])
        low, high = torch.where(known, plain[0], low), torch.where(known, plain[1], high)
    return low, high


def _plain_bounds(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same in compiled code, NaN where more is needed; None if it cannot read the numbers."""
    if not (x.dtype == torch.float64 and is_plain(x) and is_plain(matrix)):
        return None
    (*batch, K, d), N = x.shape, math.prod(x.shape[:-2])
    rows, squares = x.reshape(N, K, d), matrix.expand(*batch, d, d).reshape(N, d, d)
    low, high = x.new_empty((2, N, K))
    arrays = (t.contiguous().numpy() for t in (rows, squares, low, high))
    plain_bounds(*arrays)
    return low.view(*batch, K), high.view(*batch, K)


def residual(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """``x - M y`` for vectors ``(*B, K, d)`` and symmetric M, summed in two numbers."""
    total, rest = x, torch.zeros_like(x)
    for j in range(matrix.shape[-1]):
        product, lost = two_product(matrix[..., j, None, :], -y[..., j, None])
        total, more = two_sum(total, product)
        rest = rest + (lost + more)
    return total + rest


def careful_dot(u: Tensor, v: Tensor) -> Tensor:
    """``<u, v>`` over the last axis, summed in two numbers."""
    products, lost = two_product(u, v)
    total, rest = torch.zeros_like(products[..., 0]), lost.sum(-1)
    for j in range(products.shape[-1]):
        total, more = two_sum(total, products[..., j])
        rest = rest + more
    return total + rest


def least_eigenvalue(matrix: Tensor) -> Tensor:
    """A certified lower bound on the least eigenvalue of symmetric ``(*B, d, d)``; 0 if unknown.

    If the Cholesky factorisation of ``M - s I`` runs to completion, the least eigenvalue of M is at
    least ``s - c tr(M)`` with ``c = (d + 4) eps / 2`` (Rump 2006), whatever the guess s rests on.
    """
    d, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    eye = torch.eye(d, dtype=matrix.dtype, device=matrix.device)
    trace = torch.diagonal(matrix, dim1=-2, dim2=-1).sum(-1)
    guess = torch.linalg.eigvalsh(matrix)[..., 0].clamp_min(0.0)
    bound = torch.zeros_like(guess)
    for share in (0.5, 0.875):
        failed = torch.linalg.cholesky_ex(matrix - (share * guess)[..., None, None] * eye).info
        proven = share * guess - 0.5 * (d + 4) * eps * trace
        bound = torch.where(failed == 0, torch.maximum(bound, proven), bound)
    return bound


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
    factor = cholesky(scaled @ scaled.mT + ridge[..., None, None] * eye)
    white = torch.linalg.solve_triangular(factor, scaled @ x.mT, upper=False)  # (*B, n, K)
    left = x.square().sum(-1) - white.square().sum(-2)
    return left.clamp_min(0.0) / ridge[..., None]
