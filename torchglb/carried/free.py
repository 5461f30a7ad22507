"""The minimiser of a carried loss over all of R^d, searched until it is certain enough; compiled.

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

from torchglb.backend import Floats, Ints, entry, kernel, record
from torchglb.backend.dense import cholesky, copy_vector, distance, length, solve_factored
from torchglb.carried.free_certificate import FreeGoal, FreeSearch, FreeState, is_enough, look
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
from torchglb.carried.monomials import Packed
from torchglb.carried.source import RowArrays, pass_over
from torchglb.families.compiled import CompiledFamily

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
#: the rows of the vectors of a search, as in :class:`FreeSearch`
THETA, CORRECTION, CORRECTED_AT = 0, 1, 2


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
    theta, objective, goal, memory = search.theta, search.objective, search.goal, search.memory
    carried, table = objective.carried, objective.table
    concordance = loss_concordance(objective)
    _begin_or_resume(state, search, answer, trace)
    bold = goal.used_once and table.count >= DEAR
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
    fine = reach <= FAR if bold else hessian_error <= min(RENEW, goal.hessian_tol)
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
    vectors: Floats  # of each search, (N, 3, d), at THETA, CORRECTION and CORRECTED_AT
    hessian: Floats  # of F at theta in the end, (N, d, d)
    tol: float  # this and the rest as in FreeGoal, of every problem
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
    arms, tilt_error, reference = s.arms[b], s.tilt_error[b], s.reference[b]
    goal = FreeGoal(s.tol, s.hessian_tol, arms, tilt_error, reference, s.used_once)
    theta, correction, at = (
        s.vectors[b, THETA],
        s.vectors[b, CORRECTION],
        s.vectors[b, CORRECTED_AT],
    )
    objective = objective_of(F.sums, b, F.ridge[b], F.tilt[b])
    search = FreeSearch(theta, correction, at, s.used[b], objective, goal, memory)
    asked = search_free(record(s.state, b), search, work, trace)
    if asked == DONE:
        for i in range(theta.shape[0]):
            copy_vector(memory.hessian[i], s.hessian[b, i])
    return asked


@entry
def find_free(
    family: CompiledFamily, rows: RowArrays, searches: FreeSearches, linear: Packed
) -> None:
    """The minimiser of every problem, with all passes that it needs."""
    table = searches.objectives.sums.table
    work, memory = workspace(table.dim, table.count), dense(table.dim, table.count)
    for b in range(searches.vectors.shape[0]):
        found, theta, trace = record(searches.state, b), searches.vectors[b, THETA], 0.0
        found.passes, found.answered = 0, 0
        while True:
            asked = search_free_on(b, searches, work, trace, memory)
            if asked == DONE:
                break
            trace = pass_over(family, rows, b, theta, table if asked == PASS else linear, work)
            found.answered = asked
