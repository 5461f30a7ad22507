"""L-BFGS on the ball: the low-rank model, minimised exactly on the ball.

With pairs ``S = [s_i]``, ``Y = [y_i]`` the model's Hessian in compact form is
``B = gamma I - W M^-1 W'``, ``W = [gamma S, Y]``, ``M = [[gamma S'S, L], [L', -D]]``, where L is
the strict lower triangle of S'Y and D its diagonal. On the span of W it is a 2m x 2m matrix; on the
complement it is gamma. So the ball-constrained minimiser needs one QR and one small
eigendecomposition, O(d m^2), and nothing of size d x d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.linalg import minimize_on_ball
from torchglb.optim.ball import Derivatives, Point, descend
from torchglb.optim.numbers import dot, known_all, norm, numbers, pick
from torchglb.optim.result import SolveResult


def lbfgs(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    radius: Tensor,
    *,
    tol: float,
    max_steps: int = 2000,
    history_size: int = 8,
) -> tuple[SolveResult, Derivatives]:
    """Minimises a smooth convex function over the ball from values and gradients.

    Args:
        evaluate: value and gradient at ``theta (*B, d)``.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: relative tolerance on the Frank-Wolfe gap.
        max_steps: limit on evaluations.
        history_size: m, the number of pairs remembered.

    Returns:
        The result, and the evaluation at its point (its Hessian is empty).

    Example:
        >>> import torch
        >>> def evaluate(theta):  # |theta - (2, 0)|^2/2
        ...     off = theta - torch.tensor([2.0, 0.0]).double()
        ...     return off.square().sum(-1) / 2, off
        >>> start, S = torch.zeros(2).double(), torch.tensor(1.0).double()
        >>> result, _ = lbfgs(evaluate, start, S, tol=1e-9)
        >>> result.point
        tensor([1., 0.], dtype=torch.float64)
    """
    nothing = start.new_zeros((*start.shape[:-1], 0))
    memory = start.new_zeros((*start.shape, 2 * history_size))
    S = numbers(radius)

    def with_empty_hessian(theta: Tensor) -> Derivatives:
        value, gradient = evaluate(theta)
        return Derivatives(value, gradient, nothing)

    def model(point: Point) -> Tensor:
        theta, gradient = point.theta, point.gradient
        pairs = _Pairs.of(point.memory, gradient, radius)
        # most steps end inside the ball, where the inverse of the model is all that is needed
        free = theta - _inverse_times(pairs, gradient)
        inside = norm(free) <= S
        if known_all(inside):
            return free
        return pick(inside, free, _minimize_compact(pairs, theta, gradient, radius))

    return descend(
        with_empty_hessian,
        model,
        _remember,
        memory,
        start,
        radius,
        tol,
        max_steps,
        patience=200,  # without second derivatives the last digits of the gap come slowly
    )


class _Pairs(NamedTuple):
    S: Tensor  # (*B, d, m), oldest first; zero columns where there is none yet
    Y: Tensor
    inner: Tensor  # S'Y, with 1 on the diagonal of missing pairs
    used: Tensor  # (*B, m)
    gamma: Tensor  # (*B), the curvature outside the span of the pairs

    @classmethod
    def of(cls, memory: Tensor, gradient: Tensor, radius: Tensor) -> _Pairs:
        S, Y = memory.chunk(2, dim=-1)
        inner = S.mT @ Y
        diagonal = torch.diagonal(inner, dim1=-2, dim2=-1)
        used = diagonal > 0
        newest = Y[..., -1]
        tiny = torch.finfo(memory.dtype).tiny
        gamma = torch.linalg.vecdot(newest, newest) / diagonal[..., -1].clamp_min(tiny)
        # before the first pair: a gradient step of length min(S, 1)
        first = torch.linalg.vector_norm(gradient, dim=-1) / radius.clamp_max(1.0)
        gamma = torch.where(used[..., -1], gamma, first).clamp_min(tiny)
        return cls(S, Y, inner + torch.diag_embed((~used).to(inner.dtype)), used, gamma)


def _remember(memory: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Drops the oldest pair for the newest; a pair without positive curvature is not taken."""
    S, Y = memory.chunk(2, dim=-1)
    good = dot(s, y) > 1e-10 * norm(s) * norm(y)
    shifted = torch.cat([S[..., 1:], s[..., None], Y[..., 1:], y[..., None]], dim=-1)
    return shifted if known_all(good) else pick(good, shifted, memory)


def _inverse_times(pairs: _Pairs, gradient: Tensor) -> Tensor:
    """``B^-1 g``, in the compact form of the inverse.

    With R the upper triangle of S'Y: ``a = R^-1 S'g``, ``v = g - Y a``, and
    ``B^-1 g = v/gamma + S R^-T (D a - Y'v/gamma)``.
    """
    S, Y, R = pairs.S, pairs.Y, pairs.inner
    diagonal = torch.diagonal(R, dim1=-2, dim2=-1)[..., None]
    # only the triangle that is named is read
    a = torch.linalg.solve_triangular(R, S.mT @ gradient[..., None], upper=True)
    scaled = (gradient[..., None] - Y @ a) / pairs.gamma[..., None, None]
    b = torch.linalg.solve_triangular(R.mT, diagonal * a - Y.mT @ scaled, upper=False)
    return (scaled + S @ b)[..., 0]


def _minimize_compact(pairs: _Pairs, theta: Tensor, gradient: Tensor, radius: Tensor) -> Tensor:
    tiny = torch.finfo(theta.dtype).tiny
    gamma = pairs.gamma[..., None, None]
    # scaling the pairs to unit curvature keeps the middle matrix well conditioned: D = I
    unit = torch.diagonal(pairs.inner, dim1=-2, dim2=-1).rsqrt()
    S, Y = pairs.S * unit[..., None, :], pairs.Y * unit[..., None, :]
    m = S.shape[-1]
    lower = torch.tril(S.mT @ Y, diagonal=-1)
    missing = torch.diag_embed((~pairs.used).to(theta.dtype))
    D = torch.eye(m, dtype=theta.dtype, device=theta.device).expand_as(lower)
    middle = torch.cat(
        [
            torch.cat([gamma * (S.mT @ S) + missing, lower], dim=-1),
            torch.cat([lower.mT, -D], dim=-1),
        ],
        dim=-2,
    )
    W = torch.cat([gamma * S, Y], dim=-1)
    if theta.shape[-1] > 2 * m:
        Q, R = torch.linalg.qr(W)  # zero columns give arbitrary but orthonormal directions
    else:
        Q = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device).expand(
            *theta.shape, theta.shape[-1]
        )
        R = W
    eye = torch.eye(Q.shape[-1], dtype=theta.dtype, device=theta.device)
    small = gamma * eye - R @ torch.linalg.solve_ex(middle, R.mT.contiguous())[0]
    small = torch.nan_to_num(0.5 * (small + small.mT), nan=0.0, posinf=0.0, neginf=0.0)
    eigenvalues, turn = torch.linalg.eigh(small)
    floor = 1e-12 * torch.maximum(gamma[..., 0], eigenvalues[..., -1:].abs())
    eigenvalues = torch.maximum(eigenvalues, floor)
    basis = Q @ turn

    # the model in the basis, and one more coordinate for everything orthogonal to it
    at, force = ((basis.mT @ v[..., None])[..., 0] for v in (theta, gradient))
    b_inside = eigenvalues * at - force
    g = gamma[..., 0]
    outside = g * (theta - (basis @ at[..., None])[..., 0]) - (
        gradient - (basis @ force[..., None])[..., 0]
    )
    size = torch.linalg.vector_norm(outside, dim=-1, keepdim=True)
    u, _ = minimize_on_ball(
        torch.cat([eigenvalues, g], dim=-1), torch.cat([b_inside, size], dim=-1), radius
    )
    inside = (basis @ u[..., :-1, None])[..., 0]
    return inside + outside * (u[..., -1:] / size.clamp_min(tiny))
