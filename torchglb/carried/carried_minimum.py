"""The constrained minimum of N growing losses, followed from round to round."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, entry, kernel, record
from torchglb.carried.carried_loss import CarriedLoss, add_rows, choose_order
from torchglb.carried.kernels import (
    FACTS,
    Carried,
    Workspace,
    carried_in,
    carry_row,
    memory_size,
    sum_rows,
    workspace,
)
from torchglb.carried.minimum import (
    SEARCH,
    Dense,
    Goal,
    Quadratic,
    dense,
    places_in,
    search_minimum,
)
from torchglb.carried.monomials import Packed, unpack
from torchglb.carried.source import RowArrays, RowSource
from torchglb.carried.taylor import Constants
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


class ImaginedRows(NamedTuple):
    """One more row of every problem, which is in passes and in the sums of nobody; or of none.

    Attributes:
        x: ``(N, d)``, or ``(0, d)``.
        y: weights times rewards, ``(N,)``.
        w: weights, ``(N,)``.
    """

    x: Floats
    y: Floats
    w: Floats


NO_ROWS = ImaginedRows(np.empty((0, 1)), np.empty(0), np.empty(0))


class ImaginedSource(RowSource):
    """The rows of another source and one more of every problem.

    Args:
        source: the rows.
        rows: the imagined ones, each in every process.
    """

    def __init__(self, source: RowSource, rows: ImaginedRows) -> None:
        super().__init__(source.family, source.history)
        self.rows = rows

    def pass_at(  # noqa: D102
        self, b: int, point: Floats, table: Packed, work: Workspace, rows: RowArrays | None = None
    ) -> float:
        trace = super().pass_at(b, point, table, work, rows)
        # the sums of the pass as those of a carried point, to which a row can be added
        memory = np.zeros((1, memory_size(table.dim, 1, table.count)))
        passed = carried_in(memory[0], table.dim, 1, table.count)
        passed.points[:, 0], passed.trace[0] = point, trace
        passed.sums[:, 0], passed.rest[:, 0] = work.sums, work.rest
        x, y, w = (given[None, b : b + 1] for given in self.rows)
        add_rows(self, x, y, w, memory, table, 1)
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
        self.carried.catch_up(self.source)
        return self._search(ridge, tilt, Goal(tol, math.inf, math.inf))

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
        self.carried.catch_up(self.source)
        found = self._search(ridge, tilt, Goal(math.inf, tol, hessian_tol))
        at = self.carried.expand_with(ridge, tilt, found.theta)
        _, slope, hessian_error, trace, _ = at.errors.T
        return CarriedEstimates(
            found.theta,
            found.high,
            at.gradient,
            at.hessian,
            self.search["excess"].copy(),
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
        source = self.source
        self.carried.catch_up(source)
        other = self.copy()
        other.carried.append(source, x[:, None], y[:, None], w[:, None])
        found = other._search(ridge, tilt, Goal(math.inf, tol, math.inf), ImaginedRows(x, y, w))
        for b in found.passes.nonzero()[0].tolist():  # the next search would need a pass too
            self.carried.move(source, b, 0, other.carried.of(b).points[:, 0].copy())
        self.places[:], self.search[:] = other.places, other.search
        return found

    def _search(
        self, ridge: Floats, tilt: Floats, goal: Goal, more: ImaginedRows = NO_ROWS
    ) -> Enclosed:
        """The minima from sums that are up to date, with all passes that are needed."""
        source, carried = self.source, self.carried
        fixed = (carried.constants, carried.table)
        searches = BallSearches(carried.memory, self.places, self.search, *fixed, ridge, tilt)
        if source.is_direct:
            find_minima(source.compiled, source.arrays(), searches, goal, more)
        else:  # compiled code cannot read the rows: passes are made from here
            seen = ImaginedSource(source, more) if len(more.x) else source
            size = (carried.table.dim, carried.table.count)
            work, algebra = workspace(*size), dense(*size)
            for b in range(source.problems):
                self.search["passes"][b] = self.search["answered"][b] = 0
                trace = 0.0
                while search_on(b, searches, goal, work, trace, algebra):
                    at = self.places[b, 2]
                    trace = carried.checked_pass(seen, b, at, carried.table, work)
                    self.search["answered"][b] = 1
        state = self.search.copy()
        return Enclosed(self.places[:, 1].copy(), state["low"], state["high"], state["passes"])

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


class BallSearches(NamedTuple):
    """The searches of N problems.

    Attributes:
        memory: what is carried, ``(N, size)``.
        places: vectors, ``(N, 4, d)``.
        state: of dtype ``SEARCH``, ``(N,)``.
        constants: S, C and R, ``(N, 3)``.
        table: the monomials of the sums.
        ridge: lambda, ``(N,)``.
        tilt: ``(N, d)``.
    """

    memory: Floats
    places: Floats
    state: Any
    constants: Floats
    table: Packed
    ridge: Floats
    tilt: Floats


@kernel
def _search_one(
    b: int, searches: BallSearches, goal: Goal, work: Workspace, trace: float, algebra: Dense
) -> int:
    """:func:`search_minimum` for one problem of a batch."""
    packed, c = searches.table, searches.constants[b]
    return search_minimum(
        record(searches.state, b),
        places_in(searches.places[b]),
        carried_in(searches.memory[b], packed.dim, 1, packed.count),
        Quadratic(searches.ridge[b], searches.tilt[b]),
        Constants(c[0], c[1], c[2]),
        goal,
        unpack(packed),
        work,
        trace,
        algebra,
    )


@entry
def search_on(
    b: int, searches: BallSearches, goal: Goal, work: Workspace, trace: float, algebra: Dense
) -> int:
    """The same, from Python."""
    return _search_one(b, searches, goal, work, trace, algebra)


@entry
def find_minima(
    family: CompiledFamily, rows: RowArrays, searches: BallSearches, goal: Goal, more: ImaginedRows
) -> None:
    """The minimum of every problem, with all passes that it needs; imagined rows are in those."""
    table, count, d = unpack(searches.table), searches.table.count, searches.table.dim
    work, algebra, monomial = workspace(d, count), dense(d, count), np.empty(count)
    extra = np.zeros(1 + FACTS)
    for b in range(searches.memory.shape[0]):
        state, at = record(searches.state, b), places_in(searches.places[b]).trial
        # the sums of a pass as those of a carried point, to which a row can be added
        sums, rest = work.sums.reshape(count, 1), work.rest.reshape(1 + d, 1)
        passed = Carried(at.reshape(d, 1), sums, rest, extra[:1], extra[1:])
        state.passes, state.answered = 0, 0
        while _search_one(b, searches, goal, work, extra[0], algebra):
            X, w, y = rows.X[b], rows.w[b], rows.y[b]
            extra[0] = sum_rows(family, X, w, y, 0, rows.used, at, table, work)
            if more.x.shape[0] > 0:
                x, scratch = more.x[b], work.scratch
                carry_row(family, x, more.w[b], more.y[b], passed, table, scratch, monomial)
            state.answered = 1
