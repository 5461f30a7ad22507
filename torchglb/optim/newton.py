"""Newton's method on the ball: the exact quadratic model, solved by its secular equation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchglb.optim.ball import Evaluation, descend, minimize_model
from torchglb.optim.result import SolveResult


def newton(
    evaluate: Callable[[Tensor], Evaluation],
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

    def model(theta: Tensor, gradient: Tensor, hessian: Tensor, memory: Tensor, radius: Tensor) -> Tensor:
        # a NaN would make eigh raise for the whole batch; its element is stopped by its status
        clean = torch.nan_to_num(hessian, nan=0.0, posinf=1e300, neginf=-1e300)
        eigenvalues, basis = torch.linalg.eigh(clean)
        return minimize_model(eigenvalues.clamp_min(0.0), basis, theta, gradient, radius)

    nothing = start.new_zeros((*start.shape[:-1], 0))
    return descend(evaluate, model, lambda m, s, y: m, nothing, start, radius, tol, max_steps)
