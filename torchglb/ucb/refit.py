"""The optimistic program of a growing history on a device: every round is solved anew.

A device is fast at passes over the history and slow at everything that the host has to wait for.
So nothing is carried there but the last estimate, from which the next one starts: a round is one
fit and one solve of all arms by the batched native solver, a few passes each. (To start from the
last round's maximisers instead of the estimate was measured once, over 40 rounds: at d = 2 it
saves up to 17% of the operator calls, at d = 5 and 10 it costs 12 to 21% more.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_like,
    check_positive,
    check_shape,
    check_tensors,
    check_tolerance,
    refuse,
)
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.forgetting import Forgetting, ForgettingHistory
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.ucb.incremental import Choice
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.native import native_support


class RefitProgram:
    """What :class:`torchglb.ucb.AnchoredProgram` is on a CPU, with the same questions.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        level_tol: of the minimum of the loss.
        aggregate: merge repeated arms in the history.
        validate: check the values of what is appended.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> program = RefitProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> program.argmax([[1.0, 0.0], [0.0, 1.0]], radius=1.0).upper.shape
        torch.Size([2])
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        level_tol: float = 1e-6,
        aggregate: bool = False,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.family, self.domain = family, domain
        self.level_tol = check_positive("level_tol", level_tol)
        self.tie_tol = 1e-7 if dtype == torch.float64 else 1e-4
        self.history = History(
            domain.dim,
            batch_shape,
            aggregate,
            family=family,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        self.batch_shape = self.history.batch_shape
        like = torch.zeros((), dtype=dtype, device=self.history.device)
        self._start = like.new_zeros((*self.batch_shape, domain.dim))
        self._passes = like.new_zeros(self.batch_shape)

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``."""
        return self._passes.clone()

    def fork(self) -> RefitProgram:
        """A copy over the same rows: questions to it leave this program as it is."""
        return copy.copy(self)

    def beside(self, anchors: int) -> RefitProgram:
        """The same; there are no anchors on a device."""
        return self.fork()

    def over(self, history: History) -> RefitProgram:
        """The same over another history, of the same rows."""
        self.history = history
        return self

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds observations, as :meth:`History.append` does."""
        self.history.append(x, r, weight)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        mine = {"start": self._start.clone(), "passes": self._passes.clone()}
        return {"history": self.history.state_dict(), **mine}

    def load_state_dict(self, state: Mapping[str, Any], *, history: bool = True) -> None:
        """See :meth:`torchglb.ucb.AnchoredProgram.load_state_dict`."""
        wanted = set(self.state_dict()) - (set() if history else {"history"})
        if missing := wanted - set(state):
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        check_tensors("state", state, {"start": self._start, "passes": self._passes})
        if history:
            self.history.load_state_dict(state["history"])
        self._start, self._passes = state["start"].clone(), state["passes"].clone()

    @torch.no_grad()
    def minimum(self, regularization: float | Tensor = 0.0) -> Estimate:
        """``min L`` over the ball, to ``level_tol``."""
        fit = minimize_likelihood(
            self._loss(regularization), self.domain, start=self._first(), throw=False
        )
        return fit.estimate()

    def _first(self) -> Tensor:
        """Where a fit starts, ``(*B, d)``."""
        return self._start

    def _loss(self, regularization: float | Tensor) -> NegativeLogLikelihood:
        ridge = self._numbers("regularization", regularization)
        return NegativeLogLikelihood.of(self.family, self.history, regularization=ridge)

    def _numbers(self, name: str, given: Any) -> float | Tensor:
        """A number, or a tensor that broadcasts to ``*B``; a level aside, never NaN or negative."""
        if not isinstance(given, Tensor | np.ndarray | list):
            if isinstance(given, bool) or not isinstance(given, Real):
                raise refuse(name, "a number or a tensor", repr(given))
            if name != "level" and not float(given) >= 0.0:
                raise refuse(name, "numbers of at least 0", given)
            return float(given)
        given = as_like(name, given, self._start)
        try:
            numbers = given.expand(self.batch_shape)
        except RuntimeError:
            wanted = f"shape {tuple(self.batch_shape)} or one that broadcasts to it"
            raise refuse(name, wanted, f"shape {tuple(given.shape)}") from None
        if self.history.validate and name != "level":
            checks = ValueChecks()
            checks.require(name, numbers >= 0, "numbers of at least 0", numbers)
            checks.settle()
        return numbers

    def _level(self, radius: float | Tensor | None, level: Tensor | None, least: Tensor) -> Tensor:
        """The level, given or a height above the least loss."""
        if (radius is None) == (level is None):
            got = "none" if level is None else "both"
            raise refuse("radius, level", "exactly one of them", got)
        if radius is not None:
            return least + self._numbers("radius", radius)
        return torch.zeros_like(least) + self._numbers("level", level)

    def program(
        self,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
    ) -> SublevelProgram:
        """The program as it stands now."""
        level = self._level(radius, level, self.minimum(regularization).loss)
        return SublevelProgram(self._loss(regularization), self.domain, level)

    @torch.no_grad()
    def argmax(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int = 100,
        throw: bool = True,
    ) -> Choice:
        """The arm with the largest ``h(x)``; see :meth:`torchglb.ucb.AnchoredProgram.argmax`."""
        arms = as_like("arms", arms, self._start)
        check_shape("arms", arms, (*self.batch_shape, "K", self.domain.dim))
        if not arms.shape[-2]:
            raise refuse("arms", "at least one arm", f"shape {tuple(arms.shape)}")
        tie = self.tie_tol if tol is None else check_tolerance("tol", tol)
        sharp = 1.0 if value_tol is None else check_tolerance("value_tol", value_tol)
        loss = self._loss(regularization)
        self._level(radius, level, self._passes)  # refused before anything is computed
        fit = minimize_likelihood(loss, self.domain, start=self._first(), throw=False)
        program = SublevelProgram(loss, self.domain, self._level(radius, level, fit.loss))
        found = native_support(
            program,
            arms,
            center=fit.theta,
            tol=min(tie, sharp) / 4,
            max_steps=max_steps,
            throw=False,
            validate=False,
        )
        self._start = torch.where(torch.isfinite(fit.theta), fit.theta, self._start)
        passes = fit.num_steps.to(self._passes.dtype) + 1.0
        self._passes = self._passes + passes
        index = found.upper.argmax(-1)
        status = found.status.gather(-1, index[..., None])[..., 0]
        return Choice(index, found.upper, found.lower, status, passes).checked(throw)

    def bound(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        tol: float = 1e-7,
        max_steps: int = 100,
        throw: bool = True,
    ) -> Choice:
        """Bounds on all arms; see :meth:`torchglb.ucb.AnchoredProgram.bound`."""
        given: dict[str, Any] = {"level": level, "regularization": regularization, "throw": throw}
        return self.argmax(arms, radius, tol=tol, value_tol=tol, max_steps=max_steps, **given)


class ForgettingProgram(RefitProgram):
    """The same over rows that are forgotten; fits start from what the history carries.

    Args:
        forgetting: ``Discount(gamma)`` or ``Window(n)``.
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        level_tol: as in :class:`RefitProgram`, and so are the others.
        validate: look at the values of what comes in.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> program = ForgettingProgram(glb.Window(100), glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> program.argmax([[1.0, 0.0], [0.0, 1.0]], radius=1.0).upper.shape
        torch.Size([2])
    """

    history: ForgettingHistory

    def __init__(
        self,
        forgetting: Forgetting,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        level_tol: float = 1e-6,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            family,
            domain,
            batch_shape,
            level_tol=level_tol,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        self.over(
            ForgettingHistory(
                forgetting,
                family,
                domain,
                batch_shape,
                validate=validate,
                dtype=dtype,
                device=device,
            )
        )

    def _first(self) -> Tensor:
        return self.history.start()
