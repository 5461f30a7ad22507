"""Newton's method on the ball: the exact quadratic model, solved by its secular equation.

Inside the ball a step also looks back. With the last step s and the change y of the gradient over
it, ``s - H^-1 y`` shows how much the curvature has changed on the way. A Newton step p that goes on
by a share ``t = <p, y>/<s, y>`` of s will meet ``t^2`` of that change, so it becomes
``p - t^2 (s - H^-1 y)``: Chebyshev's third-order step, with the third derivative from a difference.
It costs one more right-hand side and usually saves one evaluation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchglb.optim.approach import Shortcuts, approach
from torchglb.optim.ball import (
    Evaluation,
    Point,
    careful_gap,
    descend,
    minimize_model,
    regular_factor,
)
from torchglb.optim.numbers import column, dot, norm, numbers, pick, surely
from torchglb.optim.result import SolveResult


def newton(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    start: Tensor,
    radius: Tensor,
    *,
    tol: float,
    max_steps: int = 200,
    shortcuts: Shortcuts | None = None,
) -> tuple[SolveResult, Evaluation]:
    """Minimises a smooth convex function over the ball; fast local convergence, O(d^3) per step.

    Args:
        evaluate: value, gradient and Hessian at ``theta (*B, d)``.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: relative tolerance on the Frank-Wolfe gap.
        max_steps: limit on evaluations.
        shortcuts: the same function, for a first approach at a lower price.

    Returns:
        The result, and the evaluation at its point; its Hessian is empty where the approach led
        there without one.
    """
    S = numbers(radius)
    limits = torch.finfo(start.dtype)

    def model(point: Point) -> Tensor:
        theta, gradient, hessian, s, y, *_ = point
        # most steps end inside the ball, where a Cholesky factor is all that is needed
        factor, regular = regular_factor(hessian)
        p, q = torch.cholesky_solve(torch.stack([gradient, y], dim=-1), factor).unbind(-1)
        share = dot(p, y) / (dot(s, y) + limits.tiny)
        share = share * share
        share = share * (share <= 0.25)  # while steps shrink: far out there is nothing to learn
        free = theta - p
        if not surely(share == 0.0):
            free = free - column(share, theta) * (s - q)

        inside = regular & (norm(free) <= S)
        if surely(inside):
            return free
        # a NaN would make eigh raise for the whole batch; its element is stopped by its status
        largest = limits.max**0.5
        clean = torch.nan_to_num(hessian, nan=0.0).clamp(-largest, largest)
        eigenvalues, basis = torch.linalg.eigh(clean)
        on_ball = minimize_model(eigenvalues.clamp_min(0.0), basis, theta, gradient, radius)
        return pick(inside, free, on_ball)

    def remember(memory: Tensor, s: Tensor, y: Tensor) -> Tensor:
        return memory  # the point itself has all that is needed

    nothing, at, before = start.new_zeros((*start.shape[:-1], 0)), None, 0
    if shortcuts is not None and start.device.type == "cpu":
        with torch.inference_mode(), np.errstate(all="ignore"):
            place = approach(shortcuts, start, radius, tol=tol, max_steps=max_steps)
            value = shortcuts.value(torch.from_numpy(place.theta)).numpy()
            gap = careful_gap(place.theta, place.gradient, S)
        start, slope = torch.from_numpy(place.theta), torch.from_numpy(place.gradient)
        bend = nothing if place.hessian is None else torch.from_numpy(place.hessian)
        there = Evaluation(torch.as_tensor(value), slope, bend)
        if surely(gap <= tol * (1.0 + abs(value))):
            num_steps = torch.as_tensor(place.num_steps)
            status = torch.zeros_like(num_steps)
            gaps = torch.as_tensor(gap, dtype=start.dtype)
            return SolveResult(start, there.value, gaps, status, num_steps), there
        at, before = None if place.hessian is None else there, place.num_steps
    return descend(
        evaluate,
        model,
        remember,
        nothing,
        start,
        radius,
        tol,
        max_steps,
        patience=3,
        at=at,
        before=before,
    )
