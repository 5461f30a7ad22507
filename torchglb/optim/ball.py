"""Minimising a smooth convex function over the ball of radius S, batched.

Every step minimises a quadratic model *on the ball*, then searches the segment towards that
minimiser. The segment stays feasible, so no projection can spoil the descent. Newton's model is the
exact Hessian; L-BFGS keeps a low-rank one. The stopping test is the Frank-Wolfe gap
``<grad, theta> + S |grad| = max over the ball of <grad, theta - v>``, a bound on the suboptimality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.linalg import minimize_on_ball
from torchglb.optim.loop import Progress, iterate
from torchglb.optim.result import SolveResult

#: sufficient decrease, as a share of the decrease that the slope predicts
ARMIJO = 1e-4
#: a segment shorter than this share of the full step counts as stuck
SHORTEST = 1e-10


def frank_wolfe_gap(theta: Tensor, gradient: Tensor, radius: Tensor) -> Tensor:
    """``<grad, theta> + S|grad|``, written without cancellation for theta on the sphere.

    With ``v = -S grad/|grad|`` it equals ``|grad| ((S^2 - |theta|^2) + |theta - v|^2) / (2 S)``.
    """
    length = torch.linalg.vector_norm(gradient, dim=-1)
    norm = torch.linalg.vector_norm(theta, dim=-1)
    unit = gradient / length.clamp_min(torch.finfo(gradient.dtype).tiny)[..., None]
    away = (theta + radius[..., None] * unit).square().sum(-1)
    inside = ((radius - norm) * (radius + norm)).clamp_min(0.0)
    return length * (inside + away) / (2.0 * radius)


class Evaluation(NamedTuple):
    """Value ``(*B)``, gradient ``(*B, d)`` and, for Newton, Hessian ``(*B, d, d)``."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class _Point(NamedTuple):
    theta: Tensor
    value: Tensor
    gradient: Tensor
    hessian: Tensor  # of the model; (*B, 0) where there is none
    memory: Tensor  # L-BFGS pairs (*B, d, 2m); (*B, 0) for Newton
    direction: Tensor
    slope: Tensor
    length: Tensor  # of the segment still to try, as a share of the direction
    gap: Tensor
    stalled: Tensor


Model = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Remember = Callable[[Tensor, Tensor, Tensor], Tensor]


def descend(
    evaluate: Callable[[Tensor], Evaluation],
    model: Model,
    remember: Remember,
    memory: Tensor,
    start: Tensor,
    radius: Tensor,
    tol: float,
    max_steps: int,
) -> tuple[SolveResult, Evaluation]:
    """The loop shared by Newton and L-BFGS; one evaluation per step.

    Args:
        evaluate: the objective with derivatives at ``theta (*B, d)``.
        model: ``(theta, gradient, hessian, memory, radius) -> `` minimiser of the model on the ball.
        remember: ``(memory, s, y) -> memory`` after an accepted step.
        memory: the first memory.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: stop when ``gap <= tol (1 + |value|)``.
        max_steps: limit on evaluations after the first.
    """
    eps = torch.finfo(start.dtype).eps

    def aim(theta: Tensor, gradient: Tensor, hessian: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        direction = model(theta, gradient, hessian, memory, radius) - theta
        return direction, (gradient * direction).sum(-1)

    def report(point: _Point) -> Progress:
        scale = 1.0 + point.value.abs()
        converged = point.gap <= tol * scale
        stuck = (point.stalled >= 3) | (point.length < SHORTEST)
        finite = torch.isfinite(point.gap) & torch.isfinite(point.value)
        return Progress(converged, stuck, finite)

    def step(point: _Point) -> tuple[_Point, Progress]:
        theta = point.theta + point.length[..., None] * point.direction
        value, gradient, hessian = evaluate(theta)
        noise = 8 * eps * (1.0 + point.value.abs())
        accept = value <= point.value + ARMIJO * point.length * point.slope + noise
        gap = frank_wolfe_gap(theta, gradient, radius)
        # at the limit of the arithmetic a step neither lowers the value nor the gap
        idle = (point.length * point.slope.abs() <= noise) & (gap > 0.5 * point.gap)

        # after a refusal: the minimum of the parabola through what is known, kept within [.1, .5]
        excess = value - point.value - point.length * point.slope
        parabola = -0.5 * point.slope * point.length / excess.clamp_min(eps * eps)
        shrink = torch.where(torch.isfinite(parabola), parabola, 0.1).clamp(0.1, 0.5)

        yes = accept[..., None]
        memory = remember(point.memory, theta - point.theta, gradient - point.gradient)
        kept = _Point(
            theta=torch.where(yes, theta, point.theta),
            value=torch.where(accept, value, point.value),
            gradient=torch.where(yes, gradient, point.gradient),
            hessian=_where(accept, hessian, point.hessian),
            memory=_where(accept, memory, point.memory),
            direction=point.direction,
            slope=point.slope,
            length=torch.where(accept, torch.ones_like(value), point.length * shrink),
            gap=torch.where(accept, gap, point.gap),
            stalled=torch.where(accept & idle, point.stalled + 1, point.stalled),
        )
        direction, slope = aim(kept.theta, kept.gradient, kept.hessian, kept.memory)
        kept = kept._replace(direction=direction, slope=slope)
        return kept, report(kept)

    value, gradient, hessian = evaluate(start)
    direction, slope = aim(start, gradient, hessian, memory)
    point = _Point(
        theta=start,
        value=value,
        gradient=gradient,
        hessian=hessian,
        memory=memory,
        direction=direction,
        slope=slope,
        length=torch.ones_like(value),
        gap=frank_wolfe_gap(start, gradient, radius),
        stalled=torch.zeros_like(value),
    )
    point, status, num_steps = iterate(step, point, report(point), max_steps)
    result = SolveResult(point.theta, point.value, point.gap, status, num_steps)
    return result, Evaluation(point.value, point.gradient, point.hessian)


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where`` with the mask's trailing axes filled in; empty tensors pass through."""
    if a.numel() == 0:
        return a
    return torch.where(mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim)), a, b)


def minimize_model(
    eigenvalues: Tensor, basis: Tensor, theta: Tensor, gradient: Tensor, radius: Tensor
) -> Tensor:
    """The minimiser over the ball of the model with Hessian ``Q diag(e) Q'`` at ``theta``."""
    turned = basis.mT
    at = (turned @ theta[..., None])[..., 0]
    force = (turned @ gradient[..., None])[..., 0]
    pull = eigenvalues * at  # Q' H theta
    b = pull - force
    # where the curvature is pure rounding and so is the pull, stay as short as possible
    eps = torch.finfo(theta.dtype).eps
    flat = eigenvalues <= 8 * eps * eigenvalues.amax(-1, keepdim=True)
    scale = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) + pull.abs().amax(-1, keepdim=True)
    b = torch.where(flat & (b.abs() <= 8 * eps * scale), torch.zeros_like(b), b)
    u, _ = minimize_on_ball(eigenvalues, b, radius)
    return (basis @ u[..., None])[..., 0]
