"""The exact optimistic (UCB) program: one statement, three solvers.

``support(program, arms)`` is ``max <x, theta>`` over ``{|theta| <= S, L(theta) <= B}`` for every
arm.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torchglb.array_like import ArrayLike
from torchglb.choices import ProgramSolver
from torchglb.ucb.ball_arms import BallChoice, argmax_ball
from torchglb.ucb.growing import Choice
from torchglb.ucb.incremental.program import AnchoredProgram
from torchglb.ucb.program import ConvexRegion, SublevelProgram, SupportResult
from torchglb.ucb.refit import RefitProgram
from torchglb.ucb.solvers import Conic, Layer, Native, Solver, solver_of
from torchglb.ucb.solvers.native import native_support
from torchglb.ucb.solvers.settings import ConicSettings, LayerSettings, NativeSettings

__all__ = [
    "AnchoredProgram",
    "BallChoice",
    "Choice",
    "Conic",
    "ConvexRegion",
    "Layer",
    "Native",
    "RefitProgram",
    "SublevelProgram",
    "SupportResult",
    "argmax_ball",
    "native_support",
    "support",
]


@overload
def support(
    program: SublevelProgram,
    arms: ArrayLike,
    solver: Literal["native"] = "native",
    **options: Unpack[NativeSettings],
) -> SupportResult: ...


@overload
def support(
    program: SublevelProgram,
    arms: ArrayLike,
    solver: Literal["conic"],
    **options: Unpack[ConicSettings],
) -> SupportResult: ...


@overload
def support(
    program: SublevelProgram,
    arms: ArrayLike,
    solver: Literal["layer"],
    **options: Unpack[LayerSettings],
) -> SupportResult: ...


@overload
def support(program: SublevelProgram, arms: ArrayLike, solver: Solver) -> SupportResult: ...


def support(
    program: SublevelProgram,
    arms: ArrayLike,
    solver: ProgramSolver | Solver = "native",
    **options: Any,
) -> SupportResult:
    """``h(x) = max <x, theta>`` over the program's set, for every arm ``(*B, K, d)``.

    Args:
        program: the batch of programs.
        arms: ``(*B, K, d)``, a tensor or NumPy array of any real dtype, or lists.
        solver: a solver with its settings, ``Native(tol=...)`` (certified, the default),
            ``Conic(...)`` (cvxpy, the oracle) or ``Layer(...)`` (cvxpylayers, differentiable, for
            small histories); or one of the names ``"native"``, ``"conic"``, ``"layer"``.
        options: settings of a solver that is given by its name: ``support(program, arms,
            tol=1e-6)`` is ``support(program, arms, Native(tol=1e-6))``. One that the solver does
            not have is refused by name, and by a type checker too. ``validate`` (of the native
            solver) covers arms, rewards, weights, regularisation and centre; the other two look at
            all but the centre with ``throw``. Rows and levels that are not finite are not refused:
            their element is NONFINITE.

    Example:
        >>> import torchglb as glb
        >>> rows = glb.Rows([[1, 0], [0, 1]], [1, 0])
        >>> loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), level=2.0)
        >>> glb.support(program, [[1, 0], [0, 1]]).upper
        tensor([3.0000, 1.7565], dtype=torch.float64)
    """
    return solver_of(solver, options).support(program, arms)
