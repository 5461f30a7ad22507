"""Ways to solve the optimistic program, as objects that hold their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torchglb.checks import check_choice, kind_of, refuse, with_nearest
from torchglb.choices import ProgramSolver
from torchglb.ucb.program import SublevelProgram, SupportResult
from torchglb.ucb.solvers.native import native_support


@runtime_checkable
class Solver(Protocol):
    """Solves programs for all arms."""

    def support(self, program: SublevelProgram, arms: Any) -> SupportResult:
        """``h(x)`` of every arm."""
        ...


@dataclass(frozen=True)
class Native:
    """Our own solver: compiled on a CPU, batched torch elsewhere; see :func:`native_support`.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> found = glb.support(program, [[1.0, 0.0]], Native(tol=1e-5))
        >>> found.status
        tensor([0])
    """

    center: Any = None
    tol: float | None = None
    max_steps: int = 100
    throw: bool = True
    validate: bool = True

    def support(self, program: SublevelProgram, arms: Any) -> SupportResult:
        """``h(x)`` of every arm."""
        return native_support(program, arms, **vars(self))


@dataclass(frozen=True)
class Conic:
    """A cone solver of cvxpy, the oracle (:mod:`torchglb.ucb.solvers.conic.oracle`).

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> found = glb.support(program, [[1.0, 0.0]], Conic(tol=1e-5))
        >>> found.status
        tensor([0])
    """

    solver: str = "CLARABEL"
    fallbacks: Sequence[str] = ("ECOS", "SCS")
    tol: float = 1e-7
    max_steps: int | None = None
    throw: bool = True

    def support(self, program: SublevelProgram, arms: Any) -> SupportResult:
        """``h(x)`` of every arm."""
        from torchglb.ucb.solvers.conic.oracle import conic_support

        return conic_support(program, arms, **vars(self))


@dataclass(frozen=True)
class Layer:
    """A layer of cvxpylayers, for small histories; see :class:`UCBLayer`.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> found = glb.support(program, [[1.0, 0.0]], Layer(tol=1e-5))
        >>> found.status
        tensor([0])
    """

    solver: str = "CLARABEL"
    fallbacks: Sequence[str] = ("ECOS", "SCS")
    mode: str = "lsqr"
    tol: float = 1e-6
    max_steps: int | None = None
    throw: bool = True

    def support(self, program: SublevelProgram, arms: Any) -> SupportResult:
        """``h(x)`` of every arm."""
        from torchglb.ucb.solvers.conic.layer import layer_support

        return layer_support(program, arms, **vars(self))


BY_NAME: dict[str, type[Native] | type[Conic] | type[Layer]] = {
    "native": Native,
    "conic": Conic,
    "layer": Layer,
}


def solver_of(solver: ProgramSolver | Solver, options: Mapping[str, Any]) -> Solver:
    """The solver that a name and options, or an object, stand for."""
    if not isinstance(solver, str):
        if isinstance(solver, type) or not isinstance(solver, Solver):
            raise refuse("solver", "a solver or its name", kind_of(solver))
        if options:
            raise refuse("options", "none beside a solver object", sorted(options))
        return solver
    chosen = BY_NAME[check_choice("solver", solver, tuple(BY_NAME))]
    known = list(chosen.__dataclass_fields__)
    for option in sorted(set(options) - set(known)):
        expected = f"settings of {chosen.__name__} ({', '.join(known)})"
        raise refuse("options", expected, with_nearest(option, known))
    return chosen(**options)
