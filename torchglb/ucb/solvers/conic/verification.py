"""What any points prove about the optimistic program, and how to make good points better.

:func:`certify` trusts nobody: by convexity any point gives an upper bound, and any point with the
minimiser c gives a feasible one. :func:`sharpen` is Newton's method on the KKT conditions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import cut_ball
from torchglb.ucb.bounds import certified_cut, rounded_off

_EPS = torch.finfo(torch.float64).eps


class Certificate(NamedTuple):
    """What P points prove about ``h(x)``.

    Attributes:
        upper: ``(P)``, upper bounds; ``-inf`` proves that the set is empty.
        multiplier: ``(P)``, alpha of the dual bound.
        ball_multiplier: ``(P)``, ``|x - alpha g|``.
        lower: ``(P)``, lower bounds.
        theta: ``(P, d)``, feasible points that attain them.
    """

    upper: Tensor
    multiplier: Tensor
    ball_multiplier: Tensor
    lower: Tensor
    theta: Tensor


def certify(
    loss: NegativeLogLikelihood,
    radius: float,
    level: float,
    center: Tensor,
    x: Tensor,
    points: Tensor,
) -> Certificate:
    """What points ``(P, d)`` prove about ``h(x)``, whoever proposed them.

    Upper: on the set ``L(p) + <g, theta - p> <= L(theta) <= B``, so by weak duality, whatever
    alpha >= 0 is, ``h(x) <= alpha (B - L(p) + <g, p>) + S |x - alpha g|``. Lower: a point of the
    ball at which the loss is at most B, whatever its rounding; by convexity ``L(c + t (p - c))``
    lies below its chord, so a few chords reach the boundary. What proves nothing is infinite.
    """
    S, c = torch.tensor(radius, dtype=torch.float64), into_ball(center, radius)
    lost = (len(x) + 6) * _EPS  # of a sum of d products, relative to the sum of their sizes
    finite = torch.isfinite(points).all(-1)
    inner = into_ball(torch.where(finite[:, None], points, c), radius)
    at, errors = loss.expand_with_errors(inner)
    offset, _ = certified_cut(inner, at, errors, torch.full_like(at.loss, level), S)
    cut = cut_ball(x, at.gradient, offset, S)
    alpha = cut.multiplier
    rest = torch.linalg.vector_norm(x - alpha[:, None] * at.gradient, dim=-1)
    first, size = torch.where(alpha > 0, alpha * offset, 0.0), torch.linalg.vector_norm(x)
    # |alpha g| <= |x| + |rest|, which is what subtracting, squaring and adding may err by
    upper = first + S * rest + lost * (first.abs() + S * (size + rest))
    upper = torch.where(cut.value == -torch.inf, cut.value, upper)
    upper = torch.where(finite & ~torch.isnan(upper), upper, torch.inf)

    def largest_loss(theta: Tensor) -> Tensor:
        """What the loss may be at a point, or some roundings away from it."""
        at, errors = loss.expand_with_errors(theta)
        return at.loss + (errors.loss + rounded_off(errors.steepness, S))

    start, end = largest_loss(c), largest_loss(inner)
    goal = level - 2.0 * (end - at.loss)  # which rounding does not lift above the level
    t = torch.where(end <= level, 1.0, torch.where(start <= level, 0.0, -1.0))
    there = torch.where(t == 1.0, end, start)
    for _ in range(6):
        rise = ((goal - there) / (end - there)).clamp(0.0, 1.0)
        ahead = torch.where((t >= 0) & (t < 1), t + rise * (1 - t), t)
        loss_ahead = largest_loss(c + ahead.clamp_min(0.0)[:, None] * (inner - c))
        better = (ahead > t) & (loss_ahead <= level)
        t, there = torch.where(better, ahead, t), torch.where(better, loss_ahead, there)
    theta = torch.where((t == 1.0)[:, None], inner, c + t[:, None] * (inner - c))
    theta = torch.where((t >= 0)[:, None], theta, torch.nan)
    lower = torch.where(t >= 0, theta @ x - lost * S * size, -torch.inf)
    return Certificate(upper, alpha, rest, lower, theta)


def into_ball(points: Tensor, radius: float) -> Tensor:
    """Points outside pulled to the sphere, a rounding inside of it."""
    inside = radius * (1 - 4 * _EPS)
    norm = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return torch.where(norm > inside, points * (inside / norm), points)


def sharpen(
    loss: NegativeLogLikelihood,
    radius: float,
    level: float,
    x: Tensor,
    points: Tensor,
    on_level: Tensor,
    on_sphere: Tensor,
    steps: int,
) -> Tensor:
    """Newton's method on ``x = lam grad L(theta) + nu theta`` from points ``(P, d)``.

    Each point comes with a guess of what holds at the solution: ``L(theta) = B`` (or else
    lam = 1, as for the minimum of L, where x = 0) and ``|theta| = S`` (or else nu = 0).

    Returns:
        theta ``(P, d)``: maybe wild, maybe NaN; :func:`certify` judges.
    """
    d, eye = points.shape[-1], torch.eye(points.shape[-1], dtype=points.dtype)
    a, b = on_level.to(points)[:, None], on_sphere.to(points)[:, None]
    theta = points
    value, g, hessian = loss.expand(theta)
    columns = torch.stack([a * g, b * theta], -1)  # multipliers by least squares
    target = x - (1 - a) * g
    lam, nu = least_squares(columns, target).split(1, -1)
    lam = torch.where(on_level[:, None], lam, torch.ones_like(lam))
    for _ in range(steps):
        size = torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(1e-300)
        u = g / size  # lam is measured in units of 1/|g|
        residual = torch.cat(
            [
                lam * g + nu * theta - x,
                torch.where(a > 0, (value[:, None] - level) / size, (lam - 1) * size),
                torch.where(b > 0, 0.5 * (theta.square().sum(-1, True) - radius**2), nu),
            ],
            -1,
        )
        jacobian = torch.cat(
            [
                torch.cat([lam[..., None] * hessian + nu[..., None] * eye, u[..., None],
                           theta[..., None]], -1),
                torch.cat([a * u, 1 - a, torch.zeros_like(a)], -1)[:, None],
                torch.cat([b * theta, torch.zeros_like(b), 1 - b], -1)[:, None],
            ],
            -2,
        )  # fmt: skip
        step = least_squares(jacobian, residual)
        theta = theta - step[:, :d]
        lam, nu = lam - step[:, d : d + 1] / size, nu - step[:, d + 1 :]
        value, g, hessian = loss.expand(theta)
    return theta


def least_squares(A: Tensor, b: Tensor) -> Tensor:
    """Least-squares solutions of least norm; NaN where the system is not finite."""
    finite = torch.isfinite(A).all(-1).all(-1) & torch.isfinite(b).all(-1)
    A = torch.where(finite[:, None, None], A, torch.zeros_like(A))
    b = torch.where(finite[:, None], b, torch.zeros_like(b))
    solution = torch.linalg.lstsq(A, b[..., None], driver="gelsd").solution[..., 0]
    return torch.where(finite[:, None], solution, torch.nan)
