"""Leaders among uncertain scores, factors of uncertain matrices, points of ball and ellipsoid."""

from __future__ import annotations

import math

import torch
from scipy import special
from torch import Tensor

from torchglb.arrays import known_none
from torchglb.domain import Ball
from torchglb.linalg import minimize_on_ball
from torchglb.optim.ball import minimize_model
from torchglb.radii.posterior.curvature import kept_ellipsoid


def log_chi_square_ratio(dim: int, level: float) -> float:
    """``log(F_d(2 level)/F_d(level))``, F_d the cdf of chi^2 with d degrees of freedom."""
    whole, half = special.gammainc(0.5 * dim, (level, 0.5 * level))
    return math.log(whole / half)


def ellipsoid_in(
    dtype: torch.dtype, center: Tensor, matrix: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Centre, matrix and gamma in a dtype of a set that holds ``|theta - c|_W^2 <= gamma``.

    Args:
        dtype: that of the parts, which are rounded, or a narrower one.
        center: c, ``(*B, d)``.
        matrix: W, positive definite, ``(*B, d, d)``.
        gamma: ``(*B)``; it may be infinite.
    """
    if dtype == matrix.dtype:
        return center.clone(), matrix.clone(), gamma
    kept = center.to(dtype)
    off = kept.double() - center
    moved = ((matrix @ off[..., None])[..., 0] * off).sum(-1).sqrt()
    radius = gamma.sqrt() + moved
    longest = radius / torch.linalg.eigvalsh(matrix)[..., 0].sqrt()  # of its half axes
    shape, paid = kept_ellipsoid(matrix, radius.square(), longest, dtype)
    return kept, shape, torch.where(gamma < torch.inf, paid, torch.inf)


def towards(theta: Tensor) -> Tensor:
    """The arm of the unit ball with the largest ``<x, theta>``; the first axis if theta is 0."""
    norm = torch.linalg.vector_norm(theta, dim=-1, keepdim=True)
    first = torch.zeros_like(theta)
    first[..., 0] = 1.0
    unit = theta / norm.clamp_min(torch.finfo(theta.dtype).tiny)
    return torch.where(norm > 0, unit * (1.0 - torch.finfo(theta.dtype).eps), first)


def certain_leader(scores: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The arm with the largest score, ``(*B)``, and whether it is the largest of the true scores.

    Args:
        scores: ``(*B, K)``.
        error: each score is at most so far from the true one, ``(*B, K)``.
    """
    leader = scores.argmax(-1, keepdim=True)
    others = (scores + error).scatter(-1, leader, -torch.inf).amax(-1)
    lowest = (scores - error).gather(-1, leader)[..., 0]
    return leader[..., 0], lowest >= others


def cholesky_change(doubt: Tensor, dim: int) -> Tensor:
    """How far a Cholesky factor may be from that of a matrix between ``e^-doubt A, e^doubt A``.

    With ``A = L L'`` that matrix is ``L (I + E) L'``, ``|E|_F <= e = sqrt(d)(e^doubt - 1)``, and
    its factor ``L (I + G)``. ``G + G' = E - G G'``, and the lower half of a symmetric matrix, with
    half of its diagonal, has at most ``1/sqrt(2)`` of its Frobenius norm: ``|G| <= (e +
    |G|^2)/sqrt(2)``. Followed from E = 0 on, ``|G| <= (1 - sqrt(1 - 2 e))/sqrt(2)`` if e <= 1/2.

    Args:
        doubt: ``(*B)``.
        dim: d.

    Returns:
        The bound on ``|G|_F``, ``(*B)``; infinite if e > 1/2.
    """
    e = math.sqrt(dim) * torch.expm1(doubt)
    root = (1.0 - 2.0 * e).clamp_min(0.0).sqrt()
    change = math.sqrt(2.0) * e / (1.0 + root)
    return torch.where(e <= 0.5, change, torch.inf)


def farthest_point(center: Tensor, matrix: Tensor, gamma: Tensor) -> Tensor:
    """The longest theta with ``|theta - c|^2`` in W at most gamma; it gives the best arm of a ball.

    ``max over |x| <= 1 of <x, c> + sqrt(gamma) |x|`` in W^-1 is ``max |theta|`` over the ellipsoid,
    at ``x = theta/|theta|``. In the eigenvectors of W, with ``y_i = sqrt(e_i)(theta_i - c_i)``, on
    the sphere ``|y|^2 = gamma``, ``|theta|^2`` is up to a constant

    ``2 sum_i y_i c_i/sqrt(e_i) - sum_i a_i y_i^2``,  ``a_i = 1/e_min - 1/e_i >= 0``:

    a convex problem over the ball, whose solution is moved to the sphere along the axis of e_min,
    where a = 0.

    Args:
        center: c, ``(*B, d)``.
        matrix: W, positive definite, ``(*B, d, d)``.
        gamma: the squared radius, ``(*B)``.
    """
    e, basis = torch.linalg.eigh(matrix)  # ascending: the first axis is the longest
    c = (basis.mT @ center[..., None])[..., 0]
    flatness = 1.0 / e
    y, _ = minimize_on_ball(flatness[..., :1] - flatness, c * flatness.sqrt(), gamma.sqrt())
    first = y[..., 0]
    left = (gamma - y[..., 1:].square().sum(-1)).clamp_min(0.0).sqrt()
    y = torch.cat([torch.where(first < 0, -left, left)[..., None], y[..., 1:]], dim=-1)
    return (basis @ (c + y * flatness.sqrt())[..., None])[..., 0]


def project_in_norm(theta: Tensor, matrix: Tensor, domain: Ball) -> Tensor:
    """The point of the ball nearest to ``theta (*B, d)`` in the norm of ``matrix (*B, d, d)``.

    A point inside stays as it is, bit by bit.
    """
    radius = domain.radius_like(theta).expand(theta.shape[:-1])
    outside = torch.linalg.vector_norm(theta, dim=-1) > radius
    if known_none(outside):
        return theta
    eigenvalues, basis = torch.linalg.eigh(matrix)
    nearest = minimize_model(eigenvalues, basis, theta, torch.zeros_like(theta), radius)
    return torch.where(outside[..., None], nearest, theta)
