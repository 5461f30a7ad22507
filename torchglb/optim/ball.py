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

from torchglb.arrays import known_none, length, limits, matvec
from torchglb.linalg import minimize_on_ball
from torchglb.optim.loop import Progress, iterate, select
from torchglb.optim.numbers import Numbers, column, dot, known_all, norm, numbers, pick, tensor
from torchglb.optim.result import SolveResult

#: sufficient decrease, as a share of the decrease that the slope predicts
ARMIJO = 1e-4
#: a segment shorter than this share of the full step counts as stuck
SHORTEST = 1e-10


def frank_wolfe_gap(theta: Tensor, gradient: Tensor, radius: Tensor) -> Tensor:
    """``<grad, theta> + S|grad|``, written without cancellation for theta on the sphere.

    With ``v = -S grad/|grad|`` it equals ``|grad| ((S^2 - |theta|^2) + |theta - v|^2) / (2 S)``.

    Example:
        >>> import torch
        >>> theta, gradient = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
        >>> frank_wolfe_gap(theta, gradient, torch.tensor(2.0))
        tensor(1.)
    """
    return tensor(careful_gap(theta, gradient, numbers(radius)), theta)


def careful_gap(theta: Tensor, gradient: Tensor, radius: Numbers) -> Numbers:
    """:func:`frank_wolfe_gap` for bookkeeping."""
    steepness = norm(gradient)
    # the small number is lost in rounding unless the gradient is zero
    reach = radius / (steepness + limits(theta)[1] ** 0.5)
    distance, size = norm(theta + column(reach, theta) * gradient), norm(theta)
    inside = (radius - size) * (radius + size)
    return steepness * ((inside > 0) * inside + distance * distance) / (2.0 * radius)


class Derivatives(NamedTuple):
    """Value ``(*B)``, gradient ``(*B, d)`` and, for Newton, Hessian ``(*B, d, d)``.

    Example:
        >>> import torch
        >>> def evaluate(theta):  # |theta - (2, 0)|^2/2
        ...     off = theta - torch.tensor([2.0, 0.0]).double()
        ...     return off.square().sum(-1) / 2, off, torch.eye(2).double()
        >>> from torchglb.optim import newton
        >>> start, S = torch.zeros(2).double(), torch.tensor(1.0).double()
        >>> _, there = newton(evaluate, start, S, tol=1e-9)
        >>> there.gradient
        tensor([-1.,  0.], dtype=torch.float64)
    """

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class Point(NamedTuple):
    """Where a descent stands."""

    theta: Tensor
    gradient: Tensor
    hessian: Tensor  # (*B, 0) where there is none
    s: Tensor  # the last step, zero at the start
    y: Tensor  # the change of the gradient over it
    memory: Tensor  # what the model keeps of earlier steps; (*B, 0) for Newton
    value: Numbers
    gap: Numbers
    length: Numbers  # of the segment to try next, as a share of the full step
    best: Numbers  # the least gap so far
    stalled: Numbers  # steps without effect, in a row


def regular_factor(hessian: Tensor) -> tuple[Tensor, Numbers]:
    """The Cholesky factor, and whether its pivots are too large to be rounding."""
    factor, info = torch.linalg.cholesky_ex(hessian)
    low, high = torch.aminmax(torch.diagonal(factor, dim1=-2, dim2=-1), dim=-1)
    return factor, (numbers(info) == 0) & is_regular(numbers(low), numbers(high), factor)


def is_regular(low: Numbers, high: Numbers, factor: Tensor) -> Numbers:
    """Whether the least pivot of a Cholesky factor, next to the largest, is more than rounding."""
    return low > 16 * limits(factor)[0] ** 0.5 * high


def look_back(gradient: Tensor, hessian: Tensor, s: Tensor) -> Numbers:
    """``t^2`` for the share t of the last step s that Newton's step goes on by, else 0.

    ``t = <g, s>/<s, Hs>`` is the projection of ``H^-1 g`` onto s in the metric of the Hessian; see
    :mod:`torchglb.optim.newton`.
    """
    share = dot(gradient, s) / (dot(s, matvec(hessian, s)) + limits(s)[1])
    share = share * share
    return pick(share <= 0.25, share, 0.0)  # while steps shrink: far out there is nothing to learn


def descend(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    model: Callable[[Point], Tensor],
    remember: Callable[[Tensor, Tensor, Tensor], Tensor],
    memory: Tensor,
    start: Tensor,
    radius: Tensor,
    tol: float,
    max_steps: int,
    patience: int,
) -> tuple[SolveResult, Derivatives]:
    """The loop shared by Newton and L-BFGS; one evaluation per step.

    Args:
        evaluate: the objective with derivatives at ``theta (*B, d)``.
        model: from a point to the minimiser of its quadratic model on the ball.
        remember: ``(memory, s, y) -> memory`` after an accepted step.
        memory: the first memory.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: stop when ``gap <= tol (1 + |value|)``.
        max_steps: limit on evaluations after the first.
        patience: how many steps without effect, in a row, count as stuck.
    """
    # inference mode spares every operation the bookkeeping of autograd; NaN and infinity are found
    # by the loop
    with torch.inference_mode(), np.errstate(all="ignore"):
        point, status, num_steps = _descend(
            evaluate, model, remember, memory, start, radius, tol, max_steps, patience
        )
    value, gap = tensor(point.value, start), tensor(point.gap, start)
    theta, value, gap, gradient, hessian, status, num_steps = (
        t.clone() if t.is_inference() else t
        for t in (point.theta, value, gap, point.gradient, point.hessian, status, num_steps)
    )
    result = SolveResult(theta, value, gap, status, num_steps)
    return result, Derivatives(value, gradient, hessian)


def _descend(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    model: Callable[[Point], Tensor],
    remember: Callable[[Tensor, Tensor, Tensor], Tensor],
    memory: Tensor,
    start: Tensor,
    radius: Tensor,
    tol: float,
    max_steps: int,
    patience: int,
) -> tuple[Point, Tensor, Tensor]:
    eps = torch.finfo(start.dtype).eps
    S = numbers(radius)

    def gap_at(theta: Tensor, gradient: Tensor, value: Numbers) -> Numbers:
        steepness = norm(gradient)
        plain = dot(gradient, theta) + S * steepness
        # far from convergence the plain formula will do
        far = plain > 2.0 * tol * (1.0 + abs(value))
        if known_all(far):
            return plain
        return pick(far, plain, careful_gap(theta, gradient, S))

    def report(point: Point) -> Progress:
        converged = point.gap <= tol * (1.0 + abs(point.value))
        stuck = (point.stalled >= patience) | (point.length < SHORTEST)
        # an infinite value or a NaN anywhere makes this sum not finite
        return Progress(converged, stuck, abs(point.gap + point.value) < torch.inf)

    def step(point: Point) -> tuple[Point, Progress]:
        target = model(point)
        s = target - point.theta
        slope = dot(point.gradient, s) * point.length
        theta = target
        if not known_all(point.length == 1.0):
            theta = torch.lerp(point.theta, target, column(point.length, target))
            s = theta - point.theta
        value, gradient, hessian = evaluate(theta)
        value, y = numbers(value), gradient - point.gradient
        noise = 8 * eps * (1.0 + abs(point.value))
        accept = value <= point.value + ARMIJO * slope + noise
        gap = gap_at(theta, gradient, value)
        # at the limit of the arithmetic a step lowers neither the value nor the gap
        idled = (abs(slope) <= noise) & (gap > 0.8 * point.best)
        new = Point(
            theta=theta,
            gradient=gradient,
            hessian=hessian,
            s=s,
            y=y,
            memory=remember(point.memory, s, y),
            value=value,
            gap=gap,
            length=full,
            best=pick(gap < point.best, gap, point.best),
            stalled=(point.stalled + 1.0) * idled,
        )
        if not known_all(accept):
            # after a refusal: the minimum of the parabola through what is known, within [.1, .5]
            excess = tensor(value - point.value - slope, theta)
            parabola = tensor(-0.5 * slope, theta) / excess
            shrink = numbers(parabola.nan_to_num(0.1).clamp(0.1, 0.5))
            new = select(accept, new, point._replace(length=point.length * shrink))
        return new, report(new)

    here, gradient, hessian = evaluate(start)
    value, zero = numbers(here), torch.zeros_like(start)
    gap = gap_at(start, gradient, value)
    full = numbers(torch.ones_like(here))
    point = Point(start, gradient, hessian, zero, zero, memory, value, gap, full, gap, 0.0 * full)
    return iterate(step, point, report(point), max_steps)


def minimize_model(
    eigenvalues: Tensor, basis: Tensor, theta: Tensor, gradient: Tensor, radius: Tensor
) -> Tensor:
    """The minimiser over the ball of the model with Hessian ``Q diag(e) Q'``, e ascending."""
    turned = basis.mT
    force = matvec(turned, gradient)
    # where the curvature is pure rounding and so is the force, stay as short as possible
    rounding = 8 * theta.shape[-1] * limits(theta)[0]
    largest = eigenvalues[..., -1:]
    flat = eigenvalues <= rounding * largest
    if known_all(~flat):
        free = theta - matvec(basis, force / eigenvalues)
        if known_all(length(free) <= radius):
            return free
    b = eigenvalues * matvec(turned, theta) - force
    if not known_none(flat):
        scale = length(gradient)[..., None] + largest * radius[..., None]
        b = torch.where(flat & (abs(b) <= rounding * scale), 0.0, b)
    u, _ = minimize_on_ball(eigenvalues, b, radius)
    return matvec(basis, u)
