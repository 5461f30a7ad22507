"""The minimisers over R^d of N growing losses with a ridge, followed from round to round.

``F(theta) = L(theta) + (lambda/2)|theta|^2 - <tilt, theta>``, lambda > 0. Newton's method on the
Taylor polynomials of carried points, each step on that of the nearest one; where its remainder
hides what is asked for, a pass is asked for (:mod:`torchglb.carried.free_certificate`).

The place of a pass becomes a carried point, instead of the one that has been of no use for the
longest time; unless a polynomial has many terms, so that such a pass is dear, and its Hessian is
good enough, or nobody comes back to this place: then a pass for the gradient alone corrects it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchglb.backend import Floats, Ints, entry, kernel, record
from torchglb.backend.dense import cholesky, copy_vector, distance, length, solve_factored
from torchglb.carried.carried_minimum import CarriedSearch
from torchglb.carried.free_certificate import FREE, FreeSearch, FreeState, is_enough, look
from torchglb.carried.kernels import Workspace, least_used, put_point, workspace
from torchglb.carried.minimum import DONE, PASS
from torchglb.carried.model import (
    Dense,
    Objectives,
    dense,
    expand,
    loss_at,
    loss_concordance,
    model_at,
    objective_of,
)
from torchglb.carried.monomials import Monomials, monomials
from torchglb.carried.source import RowArrays, RowSource, pass_over
from torchglb.domain import Ball
from torchglb.families.compiled import CompiledFamily

#: derivatives of the highest order of a polynomial
MOST_DERIVATIVES = 1600
#: Newton steps between two passes, and passes of one search
MAX_STEPS, MAX_PASSES = 60, 30
#: a place that is R X times this far away is one that no carried point knows: a pass there decides
FAR = 3.0
#: share of the gradient that steps on a polynomial beyond its remainder leave for the pass
GUESS = 1e-3
#: from so many terms on, polynomials are corrected
DEAR = 100
#: but one whose Hessian may be wrong by this share would have to be corrected too often
RENEW = 0.05
#: what a search asks for, beside a pass for all sums: one for loss and gradient
GRADIENT = 2


@kernel
def search_free(state: FreeState, search: FreeSearch, answer: Workspace, trace: float) -> int:
    """Goes on until the goal is reached, or a pass at theta is needed.

    Args:
        state: a record of dtype ``FREE``.
        search: what it works on.
        answer: the sums at theta, if it was answered.
        trace: of the Hessian there.

    Returns:
        DONE, PASS or GRADIENT.
    """
    theta, objective, memory = search.theta, search.objective, search.memory
    carried, table = objective.carried, objective.table
    concordance = loss_concordance(objective)
    _begin_or_resume(state, search, answer, trace)
    bold = search.used_once and table.count >= DEAR
    first, hessian_error, reach = -1.0, math.inf, math.inf
    for _ in range(MAX_STEPS):
        slot = _nearest(carried.points, theta)
        search.used[slot] = state.clock
        view = look(state, search, model_at(objective, slot, memory), bold)
        if is_enough(state, search, view):
            return DONE
        hessian_error, reach = view.hessian_error, view.reach
        if first < 0.0:
            first = view.decrement.value
        # the gradient is not known well enough to be followed; whoever is bold follows a guess
        guess = max(min(view.slope, GUESS * first), view.decrement.rounding)
        known = guess if bold else view.slope
        if not view.decrement.value > known or (bold and reach > FAR):
            break
        if _step(theta, concordance, state.leapt == 0, memory) > FAR and state.leapt == 0:
            hessian_error, reach = math.inf, math.inf  # no polynomial knows of what is there
            break
    if state.passes >= MAX_PASSES:
        return DONE
    state.passes += 1
    fine = reach <= FAR if bold else hessian_error <= min(RENEW, search.hessian_tol)
    return GRADIENT if fine and table.count >= DEAR else PASS


@kernel
def _begin_or_resume(state: FreeState, search: FreeSearch, answer: Workspace, trace: float) -> None:
    """Takes the pass that was made, as a new point or as a correction; or begins a search."""
    theta, objective, memory = search.theta, search.objective, search.memory
    if state.answered == PASS:
        slot = least_used(search.used)
        sums = answer.sums[: objective.table.count]
        put_point(objective.carried, slot, theta, sums, answer.rest, trace)
        state.corrected = 0
        # a jump that led upwards is taken back, and is the last one
        state.leapt = int(_start(search) != slot)
    elif state.answered == GRADIENT:
        slot = _nearest(objective.carried.points, theta)
        gradient, quadratic = memory.vectors[0], objective.quadratic
        expand(model_at(objective, slot, memory), theta, memory, gradient, False)
        for k in range(theta.shape[0]):
            added = quadratic.ridge * theta[k] - quadratic.tilt[k]
            search.correction[k] = answer.sums[1 + k] + added - gradient[k]
            search.corrected_at[k] = theta[k]
        state.corrected = 1 + slot
    else:
        state.clock += 1
        state.corrected, state.leapt = 0, 0
        _start(search)
    state.answered = 0


@kernel
def _nearest(points: Floats, theta: Floats) -> int:
    """The carried point that is nearest to theta."""
    best, least = 0, math.inf
    for a in range(points.shape[1]):
        away = distance(theta, points[:, a])
        if away < least:
            best, least = a, away
    return best


@kernel
def _start(search: FreeSearch) -> int:
    """Begins at the carried point with the smallest F, which is known there; which one."""
    theta, carried, best, least = search.theta, search.objective.carried, 0, math.inf
    for a in range(carried.points.shape[1]):
        value = loss_at(carried, search.objective.quadratic, a)
        if value < least:
            best, least = a, value
    for k in range(theta.shape[0]):
        theta[k] = carried.points[k, best]
    return best


@kernel
def _step(theta: Floats, concordance: float, leap: bool, memory: Dense) -> float:
    """Newton's step v; returns ``D = R X |v|``.

    Where D is not small the step is shortened by ``log(1 + D)/D``, unless it is to be a leap.
    """
    step = memory.vectors[1]
    if not cholesky(memory.hessian, 0.0, memory.factor):
        return 0.0
    solve_factored(memory.factor, memory.vectors[0], step)
    reach = concordance * length(step)
    short = reach > 1.0 and not (leap and reach > FAR)
    share = math.log1p(reach) / reach if short else 1.0
    for k in range(theta.shape[0]):
        theta[k] -= share * step[k]
    return reach


class FreeSearches(NamedTuple):
    """The searches of N problems."""

    objectives: Objectives  # F of each
    used: Ints  # when each carried point was of use, (N, A)
    state: Any  # of dtype FREE, (N,)
    hessian: Floats  # of F at theta in the end, (N, d, d)
    theta: Floats  # (N, d), this and the rest as in FreeSearch, of every problem
    correction: Floats  # (N, d)
    corrected_at: Floats  # (N, d)
    tol: float
    hessian_tol: float
    arms: Floats  # (N, K, d)
    tilt_error: Floats  # (N,)
    reference: Floats  # (N, d)
    used_once: bool


@entry
def search_free_on(
    b: int, searches: FreeSearches, work: Workspace, trace: float, memory: Dense
) -> int:
    """:func:`search_free` for one problem of a batch."""
    s, F = searches, searches.objectives
    theta = s.theta[b]
    search = FreeSearch(
        theta,
        s.correction[b],
        s.corrected_at[b],
        s.used[b],
        objective_of(F.sums, b, F.ridge[b], F.tilt[b]),
        memory,
        s.tol,
        s.hessian_tol,
        s.arms[b],
        s.tilt_error[b],
        s.reference[b],
        s.used_once,
    )
    asked = search_free(record(s.state, b), search, work, trace)
    if asked == DONE:
        for i in range(theta.shape[0]):
            copy_vector(memory.hessian[i], s.hessian[b, i])
    return asked


@entry
def find_free(
    family: CompiledFamily, rows: RowArrays, searches: FreeSearches, linear: Monomials
) -> None:
    """The minimiser of every problem, with all passes that it needs."""
    table = searches.objectives.sums.table
    work, memory = workspace(table.dim, table.count), dense(table.dim, table.count)
    for b in range(searches.theta.shape[0]):
        found, theta, trace = record(searches.state, b), searches.theta[b], 0.0
        found.passes, found.answered = 0, 0
        while True:
            asked = search_free_on(b, searches, work, trace, memory)
            if asked == DONE:
                break
            trace = pass_over(family, rows, b, theta, table if asked == PASS else linear, work)
            found.answered = asked


# ---- through time ------------------------------------------------------------------------------


class Free(NamedTuple):
    """The minimiser of every problem.

    Attributes:
        theta: ``(N, d)``.
        high: F(theta) is at most this, ``(N,)``.
        hessian: of F there, ``(N, d, d)``.
        hessian_error: of it, relative to the true one there, ``(N,)``; infinite if not known.
        distance: of the minimiser, ``<x, u>`` is at most this times ``sqrt(1 + hessian_error)``
            times the length of x in the inverse of ``hessian``, ``(N,)``; infinite if not known.
        length: the same in the Euclidean norm, ``(N,)``.
        leader: the arm with the largest ``<x, theta>``, ``(N,)``, if arms were given.
        certain: whether it is also the minimiser's, ``(N,)``.
        passes: over the history that it took, ``(N,)``.
    """

    theta: Floats
    high: Floats
    hessian: Floats
    hessian_error: Floats
    distance: Floats
    length: Floats
    leader: Ints
    certain: Ints
    passes: Ints


class FreeMinimum(CarriedSearch):
    """``argmin L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over R^d, through time.

    Args:
        source: the rows.
        domain: a ball on which the family's constants are taken; minimisers that are not certain
            to lie inside have an infinite ``length``.
        points: A, at which the loss is carried; more than one where tilts change.
        largest: derivatives of the highest order of the polynomials.
    """

    def __init__(
        self, source: RowSource, domain: Ball, points: int = 1, largest: int = MOST_DERIVATIVES
    ) -> None:
        super().__init__(source, domain, points, largest, FREE)
        self._used = np.zeros((source.problems, points), np.int64)

    def _kept(self) -> dict[str, NDArray[Any]]:
        return {"used": self._used, "clock": self.search["clock"]}

    def find(
        self,
        ridge: Floats,
        tilt: Floats,
        tol: float,
        hessian_tol: float = np.inf,
        arms: Floats | None = None,
        tilt_error: Floats | None = None,
        reference: Floats | None = None,
    ) -> Free:
        """The minimiser to a tolerance; a pass only where no polynomial is good enough.

        Args:
            ridge: lambda > 0 of every problem, ``(N,)``.
            tilt: ``(N, d)``.
            tol: of the distance, relative to 1 + |theta|; rounding may leave it larger.
            hessian_tol: relative error of the Hessian, in the order of semidefinite matrices.
            arms: ``(N, K, d)``: the search ends as soon as the largest ``<x, theta>`` is certain;
                or would be if the tilt were exact.
            tilt_error: by how much each tilt may be off, ``(N,)``, in the dual norm of the Hessian
                of F at the reference.
            reference: the points where that norm is taken, ``(N, d)``.
        """
        source, carried = self.source, self.carried
        carried.catch_up(source)
        N, d = tilt.shape
        arms = np.empty((N, 0, d)) if arms is None else np.ascontiguousarray(arms, np.float64)
        (theta, correction, corrected_at), hessian = np.zeros((3, N, d)), np.empty((N, d, d))
        searches = FreeSearches(
            objectives=carried.objectives(ridge, tilt),
            used=self._used,
            state=self.search,
            hessian=hessian,
            theta=theta,
            correction=correction,
            corrected_at=corrected_at,
            tol=float(tol),
            hessian_tol=float(hessian_tol),
            arms=arms,
            tilt_error=np.zeros(N) if tilt_error is None else tilt_error,
            reference=np.zeros((N, d)) if reference is None else reference,
            used_once=bool(tilt.any()),  # nobody comes back to the minimiser of a random tilt
        )
        if source.is_direct:
            find_free(source.compiled, source.arrays(), searches, monomials(d, 1))
        else:
            self._search_from_here(search_free_on, searches, theta, source.pass_at)
        state = self.search.copy()
        known = {name: state[name] for name in Free._fields if name not in ("theta", "hessian")}
        return Free(theta=theta.copy(), hessian=hessian, **known)
