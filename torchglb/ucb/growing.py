"""The optimistic program of a growing history: what it is asked, whoever answers.

On a CPU that is :class:`torchglb.ucb.AnchoredProgram`, which carries what it knows from round to
round, elsewhere :class:`torchglb.ucb.RefitProgram`, which solves every round anew.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_like,
    check_batch_shape,
    check_count,
    check_entries,
    check_flag,
    check_positive,
    check_shape,
    check_tolerance,
    refuse,
)
from torchglb.domain import Ball, check_ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily, check_family
from torchglb.identity import check_belongs, describe
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import raise_unless_converged
from torchglb.rounding import round_up
from torchglb.rows.history import History
from torchglb.ucb.incremental.round_state import Settings
from torchglb.ucb.program import SublevelProgram

#: of float64, in which bounds are brought together
EPS = torch.finfo(torch.float64).eps


def raised(value: Tensor) -> Tensor:
    """A float64 sum of a few terms that were rounded, from above."""
    return torch.where(value.isinf(), value, value + 4.0 * EPS * value.abs())


@dataclass(frozen=True)
class Choice:
    """The optimistic arm of every problem, with what is known of all arms.

    Attributes:
        index: ``(*B)``, the arm with the largest ``h(x)``, up to ``tol`` where arms tie.
        upper: ``(*B, K)``, certified upper bounds.
        lower: ``(*B, K)``, certified lower bounds (of a choice that is CONVERGED the winner's beats
            all others' upper bounds, but for ``tol`` and what a :class:`RefitProgram` says).
        status: ``(*B)``, of :class:`torchglb.optim.Status`: INFEASIBLE where the level is below the
            minimum, NONFINITE where a NaN came in, INACCURATE where rounding hides the winner, or
            where the level is so close to the minimum that no point is feasible for certain.
        passes: ``(*B)``, passes over the history that this choice took, the minimum included; but
            not those of a problem whose arms had to be solved one by one.

    Example:
        >>> import torchglb as glb
        >>> program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> choice = program.argmax([[1.0, 0.0], [0.0, 1.0]], radius=1.0)
        >>> choice.index.shape, choice.upper.shape
        (torch.Size([]), torch.Size([2]))
    """

    index: Tensor
    upper: Tensor
    lower: Tensor
    status: Tensor
    passes: Tensor

    def checked(self, throw: bool) -> Choice:
        """Itself; raises SolverError, if ``throw``, where a problem's choice is not certain."""
        if throw:
            raise_unless_converged(self.status, "the choice of an arm")
        return self


class GrowingProgram(ABC):
    """The optimistic program over a history that grows by a few rows per round.

    Args:
        family: the GLM family.
        domain: the ball.
        history: the rows.
        level_tol: the minimum of the loss is certified to this, or to what rounding leaves.
    """

    #: passes before a round is given up: so many, and so many for each arm
    first_steps: ClassVar[int] = 20
    steps_per_arm: ClassVar[int] = 10

    @staticmethod
    def check_problem(family: GLMFamily, domain: Ball, batch_shape: tuple[int, ...]) -> None:
        """Refuses what no program can be about."""
        check_family(family)
        check_ball(domain, batch_shape=check_batch_shape(batch_shape))

    def __init__(self, family: GLMFamily, domain: Ball, history: History, level_tol: float) -> None:
        self.family, self.domain, self.history = family, domain, history
        self.batch_shape = history.batch_shape
        self.level_tol = check_positive("level_tol", level_tol)
        self.tie_tol = 1e-7 if history.dtype == torch.float64 else 1e-4

    @property
    @abstractmethod
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""

    def fork(self) -> Self:
        """A copy over the same rows: questions to it leave this program as it is."""
        return copy.copy(self)

    def over(self, history: History) -> Self:
        """The same over another history, of the same rows."""
        self.history = history
        return self

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds observations, as :meth:`History.append` does."""
        self.history.append(x, r, weight)

    # ---- saving --------------------------------------------------------------------------

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a state has beside the rows."""

    @abstractmethod
    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""

    @abstractmethod
    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was checked, over the rows that it belongs to."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        rows = self.history.state_dict()
        return {"settings": self._settings(), "history": rows, **self._state()}

    def _settings(self) -> dict[str, Any]:
        """What the sums depend on; another would make them wrong."""
        return {"family": describe(self.family), "S": describe(self.domain.radius)}

    def load_state_dict(self, state: Mapping[str, Any], *, history: bool = True) -> None:
        """Continues from a saved state; refuses one of another kind.

        Args:
            state: of :meth:`state_dict`.
            history: whether the rows are loaded too; else they are there already, those of a
                program beside this one.
        """
        wanted = {"settings"} | set(self._state()) | ({"history"} if history else set())
        check_entries("state", state, wanted)
        check_belongs("state['settings']", state["settings"], self._settings())
        self._check_state(state)
        if history:
            self.history.load_state_dict(state["history"])
        self._load_state(state)

    # ---- the program of this round -------------------------------------------------------

    @abstractmethod
    def minimum(self, regularization: ArrayLike = 0.0) -> Estimate:
        """``min L`` over the ball, certified to ``level_tol``; changes nothing."""

    def _loss(self, ridge: float | Tensor) -> NegativeLogLikelihood:
        rows, shards = self.history.exact_view(), self.history.shards
        loss = NegativeLogLikelihood(self.family, *rows, regularization=ridge, shards=shards)
        return loss.came_from(self.history)

    def _numbers(self, name: str, given: Any) -> float | Tensor:
        """A number, or a tensor that broadcasts to ``*B``; a level aside, never NaN or negative.

        Nor is a ridge infinite.
        """
        finite = name == "regularization"
        expected = "non-negative finite numbers" if finite else "numbers of at least 0"
        if not isinstance(given, Tensor | np.ndarray | list | tuple):
            if isinstance(given, bool) or not isinstance(given, Real):
                raise refuse(name, "a number or a tensor", repr(given))
            if name != "level" and not (float(given) >= 0.0 and not (finite and math.isinf(given))):
                raise refuse(name, expected, given)
            return float(given)
        given = as_like(name, given, self.history)
        try:
            numbers = given.expand(self.batch_shape)
        except RuntimeError:
            wanted = f"shape {tuple(self.batch_shape)} or one that broadcasts to it"
            raise refuse(name, wanted, f"shape {tuple(given.shape)}") from None
        if name != "level" and (self.history.validate or numbers.is_cpu):
            checks = ValueChecks()
            holds = (numbers >= 0) & (numbers < math.inf) if finite else numbers >= 0
            checks.require(name, holds, expected, numbers)
            checks.settle()
        return numbers

    def program(
        self,
        radius: ArrayLike | None = None,
        *,
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
    ) -> SublevelProgram:
        """The program as it stands now, for ``support``, ``argmax_ball`` and pictures of the set.

        It is in the dtype of the history; or in float64 where merged rows have more digits.

        Args:
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term.
        """
        name, height = self._height(radius, level)
        ridge = self._numbers("regularization", regularization)
        loss = self._loss(ridge)
        if name == "radius":
            height = round_up(raised(self.minimum(ridge).loss.double() + height), loss.X.dtype)
        else:
            height = loss.X.new_zeros(self.batch_shape) + height
        return SublevelProgram(loss, self.domain, height)

    def _height(
        self, radius: ArrayLike | None, level: ArrayLike | None
    ) -> tuple[str, float | Tensor]:
        """What was given of the two, by name."""
        if (radius is None) == (level is None):
            got = "none" if level is None else "both"
            raise refuse("radius, level", "exactly one of them", got)
        name = "radius" if level is None else "level"
        return name, self._numbers(name, radius if level is None else level)

    # ---- arms ----------------------------------------------------------------------------

    def argmax(
        self,
        arms: ArrayLike,
        radius: ArrayLike | None = None,
        *,
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int | None = None,
        throw: bool = True,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``. No ``upper`` is
                below h and no ``lower`` above it, whatever of ``min L`` is not known: where
                beta^2 is below what rounding leaves of that, ``lower`` is minus infinity.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied; 1e-7, and 1e-4 in
                float32.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: passes (or four times as many looks without one) before all arms of a problem
                are solved to tolerance, 20 and 10 for each arm if left out; where every round is
                solved anew, passes for each arm, 100.
            throw: raise where the choice of a problem is not certain; else see ``status``.

        Raises:
            SolverError: names the problems, such as those whose set is empty, unless ``throw`` is
                False.
        """
        throw = check_flag("throw", throw)
        tie = self.tie_tol if tol is None else check_tolerance("tol", tol)
        own = math.inf if value_tol is None else check_tolerance("value_tol", value_tol)
        choice = self._ask(arms, radius, level, regularization, tie, own, False, max_steps)
        return choice.checked(throw)

    def bound(
        self,
        arms: ArrayLike,
        radius: ArrayLike | None = None,
        *,
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
        tol: float = 1e-7,
        max_steps: int | None = None,
        throw: bool = True,
    ) -> Choice:
        """Bounds on ``h(x)`` of all arms, each closed to ``tol (1 + |h|)``.

        Args:
            arms: ``(*B, K, d)``.
            radius: as in :meth:`argmax`.
            level: the same.
            regularization: the same.
            tol: of every gap.
            max_steps: as in :meth:`argmax`.
            throw: the same.
        """
        throw, closed = check_flag("throw", throw), check_tolerance("tol", tol)
        choice = self._ask(arms, radius, level, regularization, closed, closed, True, max_steps)
        return choice.checked(throw)

    def _ask(
        self,
        arms: ArrayLike,
        radius: ArrayLike | None,
        level: ArrayLike | None,
        regularization: ArrayLike,
        tie: float,
        value_tol: float,
        every: bool,
        max_steps: int | None,
    ) -> Choice:
        """A round; whatever is wrong is refused before anything is computed."""
        given = as_like("arms", arms, self.history).detach()
        check_shape("arms", given, (*self.batch_shape, "K", self.domain.dim))
        if given.shape[-2] == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(given.shape)}")
        name, height = self._height(radius, level)
        ridge = self._numbers("regularization", regularization)
        steps = self._steps(given.shape[-2]) if max_steps is None else max_steps
        check_count("max_steps", steps)
        settings = Settings(name == "radius", self.level_tol, tie, value_tol, every, steps)
        return self._round(given, height, ridge, settings)

    def _steps(self, arms: int) -> int:
        return self.first_steps + self.steps_per_arm * arms

    @abstractmethod
    def _round(
        self, arms: Tensor, height: float | Tensor, ridge: float | Tensor, settings: Settings
    ) -> Choice:
        """A round with a level of this height."""
