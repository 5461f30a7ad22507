"""L-BFGS on the ball: the low-rank model, minimised exactly on the ball.

With pairs ``S = [s_i]``, ``Y = [y_i]`` the model's Hessian in compact form is
``B = gamma I - W M^-1 W'``, ``W = [gamma S, Y]``, ``M = [[gamma S'S, L], [L', -D]]``, where L is the
strict lower triangle of S'Y and D its diagonal. On the span of W it is a 2m x 2m matrix; on the
complement it is gamma. So the ball-constrained minimiser needs one QR and one small
eigendecomposition, O(d m^2), and nothing of size d x d.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchglb.linalg import minimize_on_ball
from torchglb.optim.ball import Evaluation, descend
from torchglb.optim.result import SolveResult


def lbfgs(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    radius: Tensor,
    *,
    tol: float,
    max_steps: int = 2000,
    history_size: int = 8,
) -> tuple[SolveResult, Evaluation]:
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
    """
    nothing = start.new_zeros((*start.shape[:-1], 0))
    memory = start.new_zeros((*start.shape, 2 * history_size))

    def with_empty_hessian(theta: Tensor) -> Evaluation:
        value, gradient = evaluate(theta)
        return Evaluation(value, gradient, nothing)

    def model(theta: Tensor, gradient: Tensor, hessian: Tensor, memory: Tensor, radius: Tensor) -> Tensor:
        del hessian
        return _minimize_compact(theta, gradient, memory, radius)

    return descend(
        with_empty_hessian, model, _remember, memory, start, radius, tol, max_steps
    )


def _remember(memory: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Drops the oldest pair for the newest; a pair without positive curvature is not taken."""
    S, Y = memory.chunk(2, dim=-1)
    curvature = (s * y).sum(-1)
    size = torch.linalg.vector_norm(s, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    good = curvature > 1e-10 * size
    shifted = torch.cat([S[..., 1:], s[..., None], Y[..., 1:], y[..., None]], dim=-1)
    return torch.where(good[..., None, None], shifted, memory)


def _minimize_compact(theta: Tensor, gradient: Tensor, memory: Tensor, radius: Tensor) -> Tensor:
    tiny = torch.finfo(theta.dtype).tiny
    S, Y = memory.chunk(2, dim=-1)
    m = S.shape[-1]
    inner = S.mT @ Y
    diagonal = torch.diagonal(inner, dim1=-2, dim2=-1)
    used = diagonal > 0  # columns of pairs that exist
    newest = diagonal[..., -1]
    length = torch.linalg.vector_norm(gradient, dim=-1)
    # before the first pair: a gradient step of length min(S, 1)
    first = length / radius.clamp_max(1.0)
    gamma = torch.where(newest > 0, Y[..., -1].square().sum(-1) / newest.clamp_min(tiny), first)
    gamma = gamma.clamp_min(tiny)[..., None, None]

    # scaling the pairs to unit curvature keeps the middle matrix well conditioned
    unit = torch.where(used, diagonal.clamp_min(tiny).rsqrt(), torch.ones_like(diagonal))
    S, Y = S * unit[..., None, :], Y * unit[..., None, :]
    inner = S.mT @ Y
    missing = torch.diag_embed((~used).to(theta.dtype))
    lower = torch.tril(inner, diagonal=-1)
    D = torch.diag_embed(torch.diagonal(inner, dim1=-2, dim2=-1)) + missing
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
