"""The constrained minimum of N growing losses, followed from round to round."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.carried.carried_loss import CarriedLoss, add_rows, choose_order
from torchglb.carried.kernels import Workspace, carried_in, memory_size, workspace
from torchglb.carried.minima import ImaginedRows, find_minima, search_on
from torchglb.carried.minimum import SEARCH, Goal, dense
from torchglb.carried.monomials import Packed
from torchglb.carried.source import RowArrays, RowSource
from torchglb.checks import check_tensors
from torchglb.domain import Ball
from torchglb.families.compiled import CompiledFamily

#: derivatives of the highest order of a carried minimum's polynomial
LARGEST_ORDER = 256


class Enclosed(NamedTuple):
    """The minimum of every problem.

    Attributes:
        theta: ``(N, d)``, in the ball.
        low: ``(N,)``; the minimum is at least this,
        high: ``(N,)``; and F(theta) at most this.
        passes: ``(N,)``, over the history, that it took.
    """

    theta: Floats
    low: Floats
    high: Floats
    passes: Floats


class CarriedEstimates(NamedTuple):
    """The constrained minimiser of every problem, with the derivatives there.

    Attributes:
        theta: ``(N, d)``, in the ball.
        high: F(theta) is at most this, ``(N,)``.
        gradient: of F, ``(N, d)``.
        hessian: of F, ``(N, d, d)``.
        excess: F(theta) is at most so much larger than the minimum, ``(N,)``.
        gradient_error: Euclidean, at most: ``sqrt(tr H)`` times that in the dual norm, ``(N,)``.
        hessian_error: relative, at most, ``(N,)``.
        passes: ``(N,)``, over the history, that it took.
    """

    theta: Floats
    high: Floats
    gradient: Floats
    hessian: Floats
    excess: Floats
    gradient_error: Floats
    hessian_error: Floats
    passes: Floats


class ImaginedSource(RowSource):
    """The rows of another source and one more of every problem, which is in nobody's sums.

    Args:
        source: the rows.
        rows: the imagined ones, each in every process.
    """

    def __init__(self, source: RowSource, rows: ImaginedRows) -> None:
        super().__init__(source.family, source.history)
        self.rows = rows

    def pass_at(  # noqa: D102
        self,
        b: int,
        point: Floats,
        table: Packed,
        work: Workspace,
        rows: RowArrays | None = None,
    ) -> float:
        trace = super().pass_at(b, point, table, work, rows)
        # the sums of the pass as those of a carried point, to which a row can be added
        memory = np.zeros((1, memory_size(table.dim, 1, table.count)))
        passed = carried_in(memory[0], table.dim, 1, table.count)
        passed.points[:, 0], passed.trace[0] = point, trace
        passed.sums[:, 0], passed.rest[:, 0] = work.sums, work.rest
        more = (given[None, b : b + 1] for given in self.rows)
        add_rows(self, *more, memory, table, 1)
        work.sums[:], work.rest[:] = passed.sums[:, 0], passed.rest[:, 0]
        return float(passed.trace[0])


class CarriedMinimum:
    """``min L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over the ball, through time.

    Args:
        source: the rows.
        domain: the ball.
        largest: derivatives of the highest order of the polynomial.

    Attributes:
        carried: the loss near its minimum.
        places: vectors of the search, ``(N, 4, d)``; see :class:`torchglb.carried.minimum.Places`.
        search: its state, ``(N,)``.
    """

    def __init__(self, source: RowSource, domain: Ball, largest: int = LARGEST_ORDER) -> None:
        self.source = source
        order = choose_order(source.family, domain.dim, domain.max_radius, largest)
        self.carried = CarriedLoss(source.family, domain, source.problems, 1, order)
        self.places = np.zeros((source.problems, 4, domain.dim))
        self.search = np.zeros(source.problems, SEARCH)

    def find(self, ridge: Floats, tilt: Floats, tol: float) -> Enclosed:
        """The minimum to a tolerance; a pass only where the polynomial is not good enough.

        Args:
            ridge: lambda of every problem, ``(N,)``; it may change between calls.
            tilt: ``(N, d)``.
            tol: of the enclosure; rounding may leave it wider.
        """
        self._search(ridge, tilt, Goal(tol, math.inf, math.inf))
        return self._found()

    def estimate(
        self, ridge: Floats, tilt: Floats, tol: float, hessian_tol: float
    ) -> CarriedEstimates:
        """The minimiser with gradient and Hessian; arguments as in :meth:`find`.

        Args:
            ridge: lambda, ``(N,)``.
            tilt: ``(N, d)``.
            tol: of theta in the norm of the Hessian; rounding may leave it larger.
            hessian_tol: relative error of the Hessian, in the order of semidefinite matrices.
        """
        self._search(ridge, tilt, Goal(math.inf, tol, hessian_tol))
        found, excess = self._found(), self.search["excess"].copy()
        at = self.carried.expand_with(ridge, tilt, found.theta)
        _, slope, hessian_error, trace, _ = at.errors.T
        return CarriedEstimates(
            found.theta,
            found.high,
            at.gradient,
            at.hessian,
            excess,
            gradient_error=slope * np.sqrt(trace),
            hessian_error=hessian_error,
            passes=found.passes,
        )

    def predict(
        self, x: Floats, y: Floats, w: Floats, ridge: Floats, tilt: Floats, tol: float
    ) -> Enclosed:
        """The minimiser with one more row of every problem, which is only imagined.

        Args:
            x: the rows, ``(N, d)``.
            y: their weights times their rewards, ``(N,)``.
            w: their weights, ``(N,)``.
            ridge: lambda, ``(N,)``.
            tilt: ``(N, d)``.
            tol: as in :meth:`estimate`.
        """
        source, goal, imagined = self.source, Goal(math.inf, tol, math.inf), ImaginedRows(x, y, w)
        self.carried.catch_up(source)
        if source.is_direct:
            find_minima(*self._given(), ridge, tilt, goal, imagined)
            return self._found()
        other = self.copy()
        other.carried.append(source, x[:, None], y[:, None], w[:, None])
        other.source = ImaginedSource(source, imagined)
        other._search_with_passes(ridge, tilt, goal)
        moved = (other.carried.points != self.carried.points).any((-2, -1))
        for b in np.nonzero(moved)[0]:  # the next search would need a pass too
            self.carried.move(source, int(b), 0, other.carried.points[b, 0])
        self.places[:], self.search[:] = other.places, other.search
        return self._found()

    def _given(
        self,
    ) -> tuple[CompiledFamily, Floats, Floats, Floats, int, Floats, Floats, Any, Floats, Packed]:
        """What a search with passes of its own is given: family, rows, and its state."""
        X, w, y, used = self.source.arrays()
        return (self.source.compiled, X, w, y, used, *self._searched())

    def _searched(self) -> tuple[Floats, Floats, Any, Floats, Packed]:
        """What a search reads and writes."""
        carried = self.carried
        return (carried.memory, self.places, self.search, carried.constants, carried.table)

    def _found(self) -> Enclosed:
        search = self.search.copy()
        theta = self.places[:, 1].copy()
        return Enclosed(theta, search["low"], search["high"], search["passes"])

    def _search(self, ridge: Floats, tilt: Floats, goal: Goal) -> None:
        self.carried.catch_up(self.source)
        if self.source.is_direct:
            nothing = np.empty(0)
            imagined = ImaginedRows(np.empty((0, self.carried.dim)), nothing, nothing)
            find_minima(*self._given(), ridge, tilt, goal, imagined)
        else:
            self._search_with_passes(ridge, tilt, goal)

    def _search_with_passes(self, ridge: Floats, tilt: Floats, goal: Goal) -> None:
        """A search where compiled code cannot read the rows: passes are made from here."""
        table = self.carried.table
        size = (table.dim, table.count)
        work, algebra = workspace(*size), dense(*size)
        for b in range(self.source.problems):
            self.search["passes"][b] = self.search["answered"][b] = 0
            trace = 0.0
            while search_on(b, *self._searched(), ridge, tilt, goal, work, trace, algebra):
                trace = self.carried.checked_pass(self.source, b, self.places[b, 2], table, work)
                self.search["answered"][b] = 1

    def look(self, ridge: Floats, tilt: Floats, tol: float) -> Enclosed:
        """:meth:`find` on a copy: a question that changes nothing."""
        return self.copy().find(ridge, tilt, tol)

    def copy(self) -> CarriedMinimum:
        """With sums of its own, over the same rows."""
        new = copy.copy(self)
        new.carried = self.carried.copy()
        new.places, new.search = self.places.copy(), self.search.copy()
        return new

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit by bit."""
        shift = torch.from_numpy(self.places[:, 0].copy())
        return {**self.carried.state_dict(), "shift": shift}

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors(name, state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.check_state("state", state)
        self.carried.load_state_dict(state)
        self.places[:] = 0.0
        self.places[:, 0] = state["shift"].numpy()
