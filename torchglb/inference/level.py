"""Where estimate and radius meet: the level of the confidence set of rows that keep coming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import Floats
from torchglb.carried.rounding import plain
from torchglb.carried.source import RowArrays
from torchglb.checks import check_same, check_shape, refuse
from torchglb.choices import EllipsoidKind
from torchglb.estimate import Estimate
from torchglb.forgetting import ForgettingHistory
from torchglb.inference.estimation import RunningEstimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii import Problem, Radius
from torchglb.radii.base import State, as_level
from torchglb.radii.posterior.base import PosteriorRadius
from torchglb.radii.theorems.theorem32 import (
    balanced_ridge,
    fixed_point_around,
    gap_of_rounding,
    printed_gamma,
)
from torchglb.rounding import round_up
from torchglb.rows.checks import as_rows


class Height:
    """Where the level is: one of the two.

    Args:
        radius: how far it is above the minimum of the loss, a number or ``(*B)``.
        level: B itself, ``(*B)``; or what makes it, which a round in compiled code never asks.
        levels: the level of N problems once more, ``(N,)``, as compiled code reads it.
    """

    def __init__(
        self,
        radius: float | Tensor | None = None,
        level: Tensor | Callable[[], Tensor] | None = None,
        levels: Floats | None = None,
    ) -> None:
        self.radius, self._level, self.levels = radius, level, levels

    @property
    def level(self) -> Tensor | None:
        """B itself, ``(*B)``."""
        if callable(self._level):
            self._level = self._level()
        return self._level


#: rows that came by another way are shown to a radius so many at a time, which bounds the copies
LATE = 1 << 14

#: where a sequence stands
Mark = tuple[Any, RunningEstimate, State, int]


class GrowingLevel:
    """Rows, the estimate from them and the radius around it: one of each, and in step.

    Args:
        problem: family, ball and delta.
        radius: the radius, settings only.
        fitted: what estimates, and has the rows.
        ellipsoid: ``"fixed_point"`` or ``"theorem"``, of :meth:`ellipsoid_radius`.
    """

    def __init__(
        self, problem: Problem, radius: Radius, fitted: RunningEstimate, ellipsoid: EllipsoidKind
    ) -> None:
        self.problem, self.radius, self.ellipsoid = problem, radius, ellipsoid
        self.family, self.domain, self.delta = problem.family, problem.domain, problem.delta
        self.fitted, self.history = fitted, fitted.history
        self._forgets = isinstance(self.history, ForgettingHistory)
        self._state = radius.init(problem)
        self._seen = 0  # rows that the radius' state has
        #: whether the radius depends on the number of rows alone
        self.counts_rows = radius.of_rows(problem, 0) is not None
        #: whether the radius may be shown plain rows when it is asked, from the history
        self._reads_late = (
            isinstance(radius, PosteriorRadius)
            and not self._forgets
            and not self.history.aggregate
            and self.history.is_whole
            and self.history.dtype == torch.float64
            and self.history.device.type == "cpu"
        )
        self._fresh: Any = None  # what was made of the rows so far: a cache

    def __len__(self) -> int:
        """The number of observations so far."""
        return len(self.history)

    # ---- rows ----------------------------------------------------------------------------

    def learn(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:
        """:meth:`update` with tensors ``x (*B, k, d)``, ``r``, ``weight (*B, k)`` that fit."""
        self._catch_up()
        mark, estimate = self.mark(), self.fitted.copy()
        try:
            estimate.append(x, r, weight)
            state = self._state
            if not self._forgets:
                state = self.radius.update(self.problem, state, x, r, weight)
            seen = len(self.history)
        except BaseException:  # rows that the radius has not seen would make its level wrong
            self.reset(mark)
            raise
        # no call from here on: nothing can come in between
        self.fitted, self._state, self._fresh, self._seen = estimate, state, None, seen

    def learn_at_once(self, x: ArrayLike, r: ArrayLike, longest: float) -> int:
        """:meth:`learn` of plain rows, checked, by compiled calls where there are such.

        Args:
            x: ``(*B, d)`` or ``(*B, k, d)``.
            r: ``(*B)`` or ``(*B, k)``.
            longest: a row may be so long; 0 for no checks of values.

        Returns:
            How many rows; 0 for anything that has to go the long way, which has changed nothing.
        """
        if self._reads_late:
            rows = self.fitted.append_at_once(x, r, longest)
            if rows:
                self._fresh = None
            return rows
        if self._forgets or self._seen != len(self.history):
            return 0
        mark = self.mark()
        try:
            rows = self.fitted.append_at_once(x, r, longest)
            if rows == 0:
                return 0
            assert isinstance(x, Tensor)
            assert isinstance(r, Tensor)
            given = as_rows(x, r, self.problem.batch_shape, self.problem.dim)
            state = self.radius.update(self.problem, self._state, *given)
        except BaseException:  # as in learn
            self.reset(mark)
            raise
        self._state, self._fresh, self._seen = state, None, self._seen + rows
        return rows

    def mark(self) -> Mark:
        """Where the sequence stands, for :meth:`reset`; costs nothing."""
        return self.history.mark(), self.fitted, self._state, self._seen

    def reset(self, mark: Mark) -> None:
        """Forgets the rows since a mark."""
        held, self.fitted, self._state, self._seen = mark
        self.history.reset(held)
        self._fresh = None

    def _catch_up(self) -> None:
        """Shows the radius rows that came to the history by another way."""
        history, rows = self.history, len(self.history)
        if self._seen == rows or self._forgets:
            return
        if history.aggregate or not history.is_whole or self._seen > rows:
            raise refuse("history", f"{self._seen} rows, as the radius has seen", rows)
        X, r, w = history.view()
        for start in range(self._seen, rows, LATE):
            stop = min(start + LATE, rows)
            late = [t[..., start:stop] for t in (X.mT, r, w) if t is not None]
            state = self.radius.update(self.problem, self._state, late[0].mT, *late[1:])
            # as in learn: no call, or an interruption would show it rows twice
            self._state, self._fresh, self._seen = state, None, stop

    # ---- the level -----------------------------------------------------------------------

    def estimate(self) -> Estimate:
        """The minimiser over the ball of the loss of the rows, and what is known there."""
        return self.fitted.copy().estimate(self._likelihood())

    def height(self, *, advance: bool = False) -> Height:
        """Where the level of the set is: all that an exact policy asks in a round.

        Args:
            advance: whether the radius may keep what it found on the way, for the next round.
        """
        if self.counts_rows and not self._forgets:
            return Height(self.radius_of_rows())
        likelihood = self._likelihood
        if self._forgets:
            rows = likelihood()
            problem, state = self._rows_that_count(rows)
            if self.counts_rows:
                return Height(self._rounded(self.radius.of_rows(problem, rows.num_rows)))
            return Height(level=self._evaluated(rows, problem, state)[0])
        late = self._late()
        if late is None:
            self._catch_up()
        known = self.radius.levels(self.problem, self._state, likelihood, late, self._seen)
        if known is None:
            self._catch_up()
            radius = self.radius.above_minimum(self.problem, self._state)
            if radius is not None:
                return Height(self._rounded(radius))
            level, state = self._evaluated(likelihood(), self.problem, self._state)
            height = Height(level=level)
        else:
            levels, state = known
            height = Height(None, partial(as_level, self.problem, levels), levels)
        if advance:
            seen = len(self.history)
            # what was made of fewer rows goes with it: nobody else would notice
            fresh = self._fresh if self._seen == seen else None
            self._state, self._seen, self._fresh = state, seen, fresh
        return height

    def radius_of_rows(self) -> float | Tensor | None:
        """beta^2 of the rows so far, where it depends on their number alone (``counts_rows``)."""
        return self._rounded(self.radius.of_rows(self.problem, len(self.history)))

    def _rounded(self, radius: float | Tensor | None) -> float | Tensor | None:
        """In the dtype of the rows, not below what it was."""
        return round_up(radius, self.history.dtype) if isinstance(radius, Tensor) else radius

    def _late(self) -> RowArrays | None:
        """All rows, if the radius has not seen the last and compiled code may read them there."""
        history, rows = self.history, len(self.history)
        if self._seen >= rows or not self._reads_late or history.keeps_graph:
            return None
        arrays = RowArrays(*history.arrays())
        return arrays if arrays.used == rows else None

    def _evaluated(
        self, likelihood: NegativeLogLikelihood, problem: Problem, state: State
    ) -> tuple[Tensor, State]:
        """The level from an estimate, and the radius' next state."""
        estimate = self.fitted.copy().estimate(likelihood)
        found = self.radius.evaluate(problem, state, likelihood, estimate)
        return found.level, found.state

    def radius_at(
        self, likelihood: NegativeLogLikelihood, estimate: Estimate, *, advance: bool = False
    ) -> Tensor:
        """beta^2 ``(*B)`` at an estimate; ``advance`` as in :meth:`height`."""
        self._catch_up()
        found = self.radius.evaluate(self.problem, self._state, likelihood, estimate)
        if advance:
            self._state = found.state
        return found.radius

    def _likelihood(self) -> NegativeLogLikelihood:
        return NegativeLogLikelihood.of(self.family, self.history)

    def _rows_that_count(self, likelihood: NegativeLogLikelihood) -> tuple[Problem, State]:
        """The problem, and what the radius knows of the rows.

        Where rows are forgotten: as if those that count had come alone, at the delta of now.
        """
        if not self._forgets:
            return self.problem, self._state
        problem = self.problem.at_time(len(self) + 1)
        rows = (likelihood.X, likelihood.r, likelihood.w)
        return problem, self.radius.update(problem, self.radius.init(problem), *rows)

    # ---- ellipsoids ----------------------------------------------------------------------

    @property
    def ridge(self) -> Tensor:
        """lambda of the ellipsoids ``H + lambda I``, ``(*B)``."""
        S, concordance = self._of_ellipsoids
        return torch.as_tensor(balanced_ridge(S, concordance))

    @cached_property
    def _of_ellipsoids(self) -> tuple[Tensor, Tensor]:
        """S and R_s, ``(*B)``."""
        dtype = self.history.dtype
        return self.problem.S.to(dtype), self.problem.self_concordance.to(dtype)

    def ellipsoid_radius(
        self, likelihood: NegativeLogLikelihood, fit: Estimate, radius: Tensor, hessian: Tensor
    ) -> Tensor:
        """gamma ``(*B)`` of the ellipsoid ``H + lambda I`` around an estimate.

        Args:
            likelihood: the loss of the rows.
            fit: the estimate.
            radius: beta^2 there, ``(*B)``.
            hessian: H, ``(*B, d, d)``; gamma pays for its rounding.
        """
        (S, concordance), lam = self._of_ellipsoids, self.ridge
        # |v|^2 in the Hessian may be so much less than in the exact one, for any v that matters
        farthest = S + torch.linalg.vector_norm(fit.theta, dim=-1)
        gap = fit.gap(S) + gap_of_rounding(hessian, farthest, self._hessian_doubt(likelihood))
        if fit.hessian_error is not None:  # |.|^2 in H may be so many times as large
            grown = fit.hessian_error.exp()
            radius, gap = grown * radius, grown * gap
        if self.ellipsoid == "theorem":
            return printed_gamma(radius, S, concordance, lam, gap)
        return fixed_point_around(likelihood, fit.theta, hessian, radius, S, concordance, lam, gap)

    def _hessian_doubt(self, likelihood: NegativeLogLikelihood) -> float:
        """What the Hessian of an estimate may have lost, relative to its trace."""
        if not likelihood.X.is_cpu:
            return likelihood.lost_in_hessian()
        # a product of fewer rows than features in their dtype; or a sum in float64, then rounded
        d, eps = likelihood.dim, torch.finfo(likelihood.X.dtype).eps
        return (d + 4.0) * eps + plain(d, len(self.history)) * torch.finfo(torch.float64).eps

    # ---- saving --------------------------------------------------------------------------

    def sums(self) -> State:
        """A copy of the radius' sums, which are all that a sequence has beside its estimate."""
        self._catch_up()
        return {name: t.detach().clone() for name, t in self._state.items()}

    def checked_sums(self, saved: Mapping[str, Any]) -> State:
        """A copy of saved sums; refuses those of another radius or shape."""
        if set(saved) != set(self._state):
            raise refuse("state['radius']", f"the entries {sorted(self._state)}", sorted(saved))
        for name, old in self._state.items():
            label = f"state['radius'][{name!r}]"
            check_same(label, saved[name], "the sequence", old)
            check_shape(label, saved[name], old.shape)
        # in C order, as compiled code reads it
        order = torch.contiguous_format
        return {name: t.clone(memory_format=order) for name, t in saved.items()}

    def resume(self, sums: State) -> None:
        """Goes on from sums over the rows of the history."""
        self._state, self._seen, self._fresh = sums, len(self.history), None
