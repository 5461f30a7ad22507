"""Newton's method on the ball: the exact quadratic model, solved by its secular equation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchglb.optim.ball import Evaluation, descend, minimize_model
from torchglb.optim.numbers import numbers, pick, surely
from torchglb.optim.result import SolveResult


def newton(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    start: Tensor,
    radius: Tensor,
    *,
    tol: float,
    max_steps: int = 200,
) -> tuple[SolveResult, Evaluation]:
    """Minimises a smooth convex function over the ball; quadratic convergence, O(d^3) per step.

    Args:
        evaluate: value, gradient and Hessian at ``theta (*B, d)``.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: relative tolerance on the Frank-Wolfe gap.
        max_steps: limit on evaluations.

    Returns:
        The result, and the evaluation at its point.
    """
    S = numbers(radius)
    flat = 16 * torch.finfo(start.dtype).eps ** 0.5  # pivots this small may be rounding

    def model(theta: Tensor, gradient: Tensor, hessian: Tensor, memory: Tensor) -> Tensor:
        # most steps end inside the ball, where a Cholesky factor is all that is needed
        factor, info = torch.linalg.cholesky_ex(hessian)
        free = theta - torch.cholesky_solve(gradient[..., None], factor)[..., 0]
        low, high = torch.aminmax(torch.diagonal(factor, dim1=-2, dim2=-1), dim=-1)
        regular = (numbers(info) == 0) & (numbers(low) > flat * numbers(high))
        inside = regular & (numbers(torch.linalg.vector_norm(free, dim=-1)) <= S)
        if surely(inside):
            return free
        # a NaN would make eigh raise for the whole batch; its element is stopped by its status
        largest = torch.finfo(hessian.dtype).max ** 0.5
        clean = torch.nan_to_num(hessian, nan=0.0).clamp(-largest, largest)
        eigenvalues, basis = torch.linalg.eigh(clean)
        on_ball = minimize_model(eigenvalues.clamp_min(0.0), basis, theta, gradient, radius)
        return pick(inside, free, on_ball)

    nothing = start.new_zeros((*start.shape[:-1], 0))
    return descend(evaluate, model, None, nothing, start, radius, tol, max_steps, patience=3)
