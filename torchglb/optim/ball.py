"""Minimising a smooth convex function over the ball of radius S, batched.

Every step minimises a quadratic model *on the ball*, then searches the segment towards that
minimiser. The segment stays feasible, so no projection can spoil the descent. Newton's model is the
exact Hessian; L-BFGS keeps a low-rank one. The stopping test is the Frank-Wolfe gap
``<grad, theta> + S |grad| = max over the ball of <grad, theta - v>``, a bound on the suboptimality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.linalg import minimize_on_ball
from torchglb.optim.loop import Progress, iterate, select
from torchglb.optim.numbers import Numbers, column, numbers, pick, surely, tensor
from torchglb.optim.result import SolveResult

#: sufficient decrease, as a share of the decrease that the slope predicts
ARMIJO = 1e-4
#: a segment shorter than this share of the full step counts as stuck
SHORTEST = 1e-10


def frank_wolfe_gap(theta: Tensor, gradient: Tensor, radius: Tensor) -> Tensor:
    """``<grad, theta> + S|grad|``, written without cancellation for theta on the sphere.

    With ``v = -S grad/|grad|`` it equals ``|grad| ((S^2 - |theta|^2) + |theta - v|^2) / (2 S)``.
    """
    return tensor(_gap(theta, gradient, numbers(radius)), theta)


def _gap(theta: Tensor, gradient: Tensor, radius: Numbers) -> Numbers:
    length = numbers(torch.linalg.vector_norm(gradient, dim=-1))
    # the small number is lost in rounding unless the gradient is zero
    reach = radius / (length + torch.finfo(theta.dtype).tiny ** 0.5)
    away = theta + column(reach, theta) * gradient  # theta - v
    distance, norm = (numbers(torch.linalg.vector_norm(v, dim=-1)) for v in (away, theta))
    inside = (radius - norm) * (radius + norm)
    return length * ((inside > 0) * inside + distance * distance) / (2.0 * radius)


class Evaluation(NamedTuple):
    """Value ``(*B)``, gradient ``(*B, d)`` and, for Newton, Hessian ``(*B, d, d)``."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class _Point(NamedTuple):
    theta: Tensor
    gradient: Tensor
    hessian: Tensor  # of the model; (*B, 0) where there is none
    memory: Tensor  # L-BFGS pairs (*B, d, 2m); (*B, 0) for Newton
    value: Numbers
    gap: Numbers
    length: Numbers  # of the segment to try next, as a share of the full step
    best: Numbers  # the least gap so far
    stalled: Numbers  # steps without effect, in a row


Model = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Remember = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def descend(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    model: Model,
    remember: Remember | None,
    memory: Tensor,
    start: Tensor,
    radius: Tensor,
    tol: float,
    max_steps: int,
    patience: int,
) -> tuple[SolveResult, Evaluation]:
    """The loop shared by Newton and L-BFGS; one evaluation per step.

    Args:
        evaluate: the objective with derivatives at ``theta (*B, d)``.
        model: ``(theta, gradient, hessian, memory) -> `` minimiser of the model on the ball.
        remember: ``(memory, s, y) -> memory`` after an accepted step; None keeps none.
        memory: the first memory.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: stop when ``gap <= tol (1 + |value|)``.
        max_steps: limit on evaluations after the first.
        patience: how many steps without effect, in a row, count as stuck.
    """
    eps = torch.finfo(start.dtype).eps
    S = numbers(radius)

    def report(point: _Point) -> Progress:
        converged = point.gap <= tol * (1.0 + abs(point.value))
        stuck = (point.stalled >= patience) | (point.length < SHORTEST)
        # an infinite value or a NaN anywhere makes this sum not finite
        return Progress(converged, stuck, abs(point.gap + point.value) < torch.inf)

    def step(point: _Point) -> tuple[_Point, Progress]:
        target = model(point.theta, point.gradient, point.hessian, point.memory)
        direction = target - point.theta
        slope = numbers(torch.linalg.vecdot(point.gradient, direction)) * point.length
        if surely(point.length == 1.0):
            theta = target
        else:
            theta = torch.lerp(point.theta, target, column(point.length, target))
        value, gradient, hessian = evaluate(theta)
        value = numbers(value)
        noise = 8 * eps * (1.0 + abs(point.value))
        accept = value <= point.value + ARMIJO * slope + noise
        gap = _gap(theta, gradient, S)
        # at the limit of the arithmetic a step lowers neither the value nor the gap
        idled = (abs(slope) <= noise) & (gap > 0.8 * point.best)
        new = _Point(
            theta=theta,
            gradient=gradient,
            hessian=hessian,
            memory=point.memory,
            value=value,
            gap=gap,
            length=full,
            best=pick(gap < point.best, gap, point.best),
            stalled=(point.stalled + 1.0) * idled,
        )
        if remember is not None:
            s, y = theta - point.theta, gradient - point.gradient
            new = new._replace(memory=remember(point.memory, s, y))
        if not surely(accept):
            # after a refusal: the minimum of the parabola through what is known, within [.1, .5]
            excess = tensor(value - point.value - slope, theta)
            parabola = tensor(-0.5 * slope, theta) / excess
            shrink = numbers(parabola.nan_to_num(0.1).clamp(0.1, 0.5))
            new = select(accept, new, point._replace(length=point.length * shrink))
        return new, report(new)

    with np.errstate(all="ignore"):  # NaN and infinity are found by report
        value, gradient, hessian = evaluate(start)
        full = numbers(torch.ones_like(value))
        point = _Point(
            theta=start,
            gradient=gradient,
            hessian=hessian,
            memory=memory,
            value=numbers(value),
            gap=(gap := _gap(start, gradient, S)),
            length=full,
            best=gap,
            stalled=0.0 * full,
        )
        point, status, num_steps = iterate(step, point, report(point), max_steps)
    value = tensor(point.value, start)
    result = SolveResult(point.theta, value, tensor(point.gap, start), status, num_steps)
    return result, Evaluation(value, point.gradient, point.hessian)


def minimize_model(
    eigenvalues: Tensor, basis: Tensor, theta: Tensor, gradient: Tensor, radius: Tensor
) -> Tensor:
    """The minimiser over the ball of the model with Hessian ``Q diag(e) Q'`` at ``theta``."""
    turned = basis.mT
    at = (turned @ theta[..., None])[..., 0]
    force = (turned @ gradient[..., None])[..., 0]
    b = eigenvalues * at - force
    # where the curvature is pure rounding and so is the force, stay as short as possible
    rounding = 8 * theta.shape[-1] * torch.finfo(theta.dtype).eps
    largest = eigenvalues.amax(-1, keepdim=True)
    scale = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) + largest * radius[..., None]
    flat = (eigenvalues <= rounding * largest) & (b.abs() <= rounding * scale)
    b = torch.where(flat, torch.zeros_like(b), b)
    u, _ = minimize_on_ball(eigenvalues, b, radius)
    return (basis @ u[..., None])[..., 0]
