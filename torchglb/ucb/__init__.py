"""The exact optimistic (UCB) program: one statement, three solvers.

``support(program, arms)`` is ``max <x, theta>`` over ``{|theta| <= S, L(theta) <= B}`` for every
arm.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchglb.checks import check_choice
from torchglb.ucb.anchored import AnchoredProgram, Choice, Minimum
from torchglb.ucb.ball_arms import BallChoice, argmax_ball
from torchglb.ucb.native import native_support
from torchglb.ucb.program import SublevelProgram, SupportResult

__all__ = [
    "AnchoredProgram",
    "BallChoice",
    "Choice",
    "Minimum",
    "SublevelProgram",
    "SupportResult",
    "argmax_ball",
    "native_support",
    "support",
]


def support(
    program: SublevelProgram, arms: Tensor, solver: str = "native", **options: Any
) -> SupportResult:
    """``h(x) = max <x, theta>`` over the program's set, for every arm ``(*B, K, d)``.

    Args:
        program: the batch of programs.
        arms: ``(*B, K, d)``.
        solver: ``"native"`` (batched torch, certified, the default), ``"conic"`` (cvxpy, the
            oracle) or ``"layer"`` (cvxpylayers, differentiable, for small histories).
        options: of the chosen solver: see ``native_support``, ``conic_support``, ``layer_support``.

    Example:
        >>> import torch, torchglb as glb
        >>> X, r = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), torch.tensor(2.0).double())
        >>> glb.support(program, X).upper
        tensor([3.0000, 1.5170], dtype=torch.float64)
    """
    check_choice("solver", solver, ("native", "conic", "layer"))
    if solver == "conic":
        from torchglb.ucb.conic import conic_support

        return conic_support(program, arms, **options)
    if solver == "layer":
        from torchglb.ucb.layer import layer_support

        return layer_support(program, arms, **options)
    return native_support(program, arms, **options)
