"""The constrained minimum of N growing losses, followed from round to round.

:class:`CarriedSearch` is what it shares with the minimum over R^d: sums, passes, saving.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchglb.backend import Floats, entry, inlined, record
from torchglb.carried.carried_loss import CarriedLoss, add_by_torch, choose_order
from torchglb.carried.kernels import TOTALS, Carried, Workspace, carry_row, workspace
from torchglb.carried.minimum import (
    PASS,
    SEARCH,
    BallSearch,
    Goal,
    SearchVectors,
    search_minimum,
    vectors_of,
)
from torchglb.carried.model import Dense, Objectives, Polynomials, dense, objective_of, only_model
from torchglb.carried.monomials import Monomials, monomials
from torchglb.carried.source import RowArrays, RowSource, pass_over
from torchglb.checks import check_tensors
from torchglb.domain import Ball
from torchglb.families.compiled import CompiledFamily

#: derivatives of the highest order of a carried minimum's polynomial
MOST_DERIVATIVES = 256


class Enclosed(NamedTuple):
    """The minimum of every problem."""

    theta: Floats  # (N, d), in the ball
    low: Floats  # (N,); the minimum is at least this
    high: Floats  # (N,); F(theta) is at most this
    excess: Floats  # (N,); F(theta) is at most so much larger than the minimum, whatever both are
    passes: Floats  # (N,), over the history, that it took


class ImaginedRows(NamedTuple):
    """One more row of every problem, which is in passes and in the sums of nobody; or of none."""

    x: Floats  # (N, d), or (0, d)
    y: Floats  # weights times rewards, (N,)
    w: Floats  # weights, (N,)


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
        self, b: int, point: Floats, table: Monomials, work: Workspace
    ) -> float:
        extra = np.array([super().pass_at(b, point, table, work), *np.zeros(TOTALS)])
        x, y, w = (given[b] for given in self.rows)
        add_by_torch(self.family, x, y, w, as_carried(point, work, extra), table)
        return float(extra[0])


@inlined
def as_carried(point: Floats, work: Workspace, extra: Floats) -> Carried:
    """The sums of a pass as those of a carried point, to which a row can be added.

    Its trace is the first number of ``extra``, ``(1 + TOTALS,)``.
    """
    d, count = point.shape[0], work.sums.shape[0]
    sums, rest = work.sums.reshape(count, 1), work.rest.reshape(1 + d, 1)
    return Carried(point.reshape(d, 1), sums, rest, extra[:1], extra[1:])


class CarriedSearch(ABC):
    """The minimisers of N growing losses, followed from round to round.

    Args:
        source: the rows.
        domain: a ball on which the family's constants are taken.
        points: A, at which the loss is carried.
        largest: derivatives of the highest order of the polynomials.
        kind: dtype of the state of a search.

    Attributes:
        carried: the loss at these points.
        search: the state of every search, ``(N,)``.
    """

    def __init__(
        self, source: RowSource, domain: Ball, points: int, largest: int, kind: np.dtype[Any]
    ) -> None:
        self.source = source
        order = choose_order(source.family, domain.dim, domain.max_radius, largest)
        self.carried = CarriedLoss(source.family, domain, source.problems, points, order)
        self.search = np.zeros(source.problems, kind)

    @abstractmethod
    def _kept(self) -> dict[str, NDArray[Any]]:
        """What is kept from one search to the next beside the sums, as views by name."""

    def _search_from_here(
        self,
        search_on: Callable[..., int],
        searches: Any,
        points: Floats,
        make_pass: Callable[[int, Floats, Monomials, Workspace], float],
    ) -> None:
        """All searches where compiled code cannot read the rows: passes are made from here.

        Args:
            search_on: goes on with one problem until it is done or needs a pass.
            searches: of all problems.
            points: where each wants its pass, ``(N, d)``.
            make_pass: at the point of one problem.
        """
        table, linear = self.carried.table, monomials(self.carried.dim, 1)
        work, memory = workspace(table.dim, table.count), dense(table.dim, table.count)
        for b in range(self.source.problems):
            self.search["passes"][b] = self.search["answered"][b] = 0
            trace = 0.0
            while asked := search_on(b, searches, work, trace, memory):
                trace = make_pass(b, points[b], table if asked == PASS else linear, work)
                self.search["answered"][b] = asked

    def copy(self) -> Self:
        """With sums of its own, over the same rows."""
        new = copy.copy(self)
        new.carried = self.carried.copy()
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(new, name, value.copy())
        return new

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit by bit."""
        kept = {name: torch.from_numpy(value.copy()) for name, value in self._kept().items()}
        return {**self.carried.state_dict(), **kept}

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors(name, state, self.state_dict())
        self.carried.check_state(name, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.check_state("state", state)
        self.carried.load_state_dict(state)
        for name, value in self._kept().items():
            value[:] = state[name].detach().numpy()


class CarriedMinimum(CarriedSearch):
    """``min L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over the ball, through time.

    Args:
        source: the rows.
        domain: the ball.
        largest: derivatives of the highest order of the polynomial.
    """

    def __init__(self, source: RowSource, domain: Ball, largest: int = MOST_DERIVATIVES) -> None:
        super().__init__(source, domain, 1, largest, SEARCH)
        self._vectors = np.zeros((3, source.problems, domain.dim))

    @property
    def vectors(self) -> SearchVectors:
        """Those of all searches, where they lie."""
        return SearchVectors(*self._vectors)

    def _kept(self) -> dict[str, NDArray[Any]]:
        return {"shift": self.vectors.shift}

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
    ) -> tuple[Enclosed, Polynomials]:
        """The minimiser, and F there with its derivatives; arguments as in :meth:`find`.

        Args:
            ridge: lambda, ``(N,)``.
            tilt: ``(N, d)``.
            tol: of theta in the norm of the Hessian; rounding may leave it larger.
            hessian_tol: relative error of the Hessian, in the order of semidefinite matrices.
        """
        self.carried.catch_up(self.source)
        found = self._search(ridge, tilt, Goal(math.inf, tol, hessian_tol))
        return found, self.carried.expand(found.theta, 0, ridge, tilt)

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
        self._vectors[:], self.search[:] = other._vectors, other.search
        return found

    def _search(
        self, ridge: Floats, tilt: Floats, goal: Goal, more: ImaginedRows = NO_ROWS
    ) -> Enclosed:
        """The minima from sums that are up to date, with all passes that are needed."""
        source, carried = self.source, self.carried
        searches = BallSearches(carried.objectives(ridge, tilt), self.vectors, self.search, goal)
        if source.is_direct:
            find_minima(source.compiled, source.arrays(), searches, more)
        else:
            seen = ImaginedSource(source, more) if len(more.x) else source
            make_pass = partial(carried.checked_pass, seen)
            self._search_from_here(search_on, searches, self.vectors.trial, make_pass)
        known = {name: self.search[name].copy() for name in Enclosed._fields[1:]}
        return Enclosed(self.vectors.theta.copy(), **known)

    def look(self, ridge: Floats, tilt: Floats, tol: float) -> Enclosed:
        """:meth:`find` on a copy: a question that changes nothing."""
        return self.copy().find(ridge, tilt, tol)


class BallSearches(NamedTuple):
    """The searches of N problems."""

    objectives: Objectives  # F of each
    vectors: SearchVectors  # (N, d) each
    state: Any  # of dtype SEARCH, (N,)
    goal: Goal  # when to end


@entry
def search_on(b: int, searches: BallSearches, work: Workspace, trace: float, memory: Dense) -> int:
    """:func:`search_minimum` for one problem of a batch."""
    F = searches.objectives
    model = only_model(objective_of(F.sums, b, F.ridge[b], F.tilt[b]))
    search = BallSearch(vectors_of(searches.vectors, b), model, memory)
    return search_minimum(record(searches.state, b), search, searches.goal, work, trace)


@entry
def find_minima(
    family: CompiledFamily, rows: RowArrays, searches: BallSearches, more: ImaginedRows
) -> None:
    """The minimum of every problem, with all passes that it needs; imagined rows are in those."""
    table = searches.objectives.sums.table
    count, d = table.count, table.dim
    work, memory, monomial = workspace(d, count), dense(d, count), np.empty(count)
    extra = np.zeros(1 + TOTALS)
    for b in range(searches.state.shape[0]):
        state, at = record(searches.state, b), searches.vectors.trial[b]
        passed = as_carried(at, work, extra)
        state.passes, state.answered = 0, 0
        while search_on(b, searches, work, extra[0], memory):
            extra[0] = pass_over(family, rows, b, at, table, work)
            if more.x.shape[0] > 0:
                x, scratch = more.x[b], work.scratch
                carry_row(family, x, more.w[b], more.y[b], passed, table, scratch, monomial)
            state.answered = 1
