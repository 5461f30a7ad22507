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
from torchglb.backend.dense import cholesky, copy_vector, length, solve_factored
from torchglb.carried.free_certificate import (
    Algebra,
    FreeSearch,
    FreeState,
    Wish,
    algebra_for,
    expand,
    is_enough,
    look,
)
from torchglb.carried.kernels import Workspace, carried_in, put_point, sum_rows, workspace
from torchglb.carried.minimum import DONE, PASS, Quadratic
from torchglb.carried.monomials import Packed, unpack
from torchglb.carried.source import RowArrays
from torchglb.carried.taylor import Constants
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


@kernel
def search_free(state: FreeState, search: FreeSearch, answer: Workspace, trace: float) -> int:
    """Goes on until the wish is fulfilled, or a pass at theta is needed.

    Args:
        state: a record of dtype ``FREE``.
        search: what it works on.
        answer: the sums at theta, if it was answered.
        trace: of the Hessian there.

    Returns:
        DONE, PASS or GRADIENT.
    """
    theta, carried, table, memory = search.theta, search.carried, search.table, search.memory
    wish, steepness = search.wish, carried.facts[0] * search.constants.concordance
    if state.answered == PASS:
        slot = _oldest(search.used)
        sums = answer.sums[: table.count]
        put_point(carried, slot, theta, sums, answer.rest, trace)
        state.corrected = 0
        # a jump that led upwards is taken back, and is the last one
        state.leapt = int(_start(search) != slot)
    elif state.answered == GRADIENT:
        slot = _nearest(carried.points, theta)
        expand(search, slot)
        for k in range(theta.shape[0]):
            memory.correction[k] = answer.sums[1 + k] - memory.gradient[k]
            memory.place[k] = theta[k]
        state.corrected = 1 + slot
    else:
        state.clock += 1
        state.corrected, state.leapt = 0, 0
        _start(search)
    state.answered = 0
    bold = wish.fleeting and table.count >= DEAR
    first, hessian_error, reach = -1.0, math.inf, math.inf
    for _ in range(MAX_STEPS):
        slot = _nearest(carried.points, theta)
        search.used[slot] = state.clock
        view = look(state, search, slot, bold)
        if is_enough(state, search, view):
            return DONE
        hessian_error, reach = view.hessian_error, view.reach
        if first < 0.0:
            first = view.decrement
        # the gradient is not known well enough to be followed; whoever is bold follows a guess
        known = max(min(view.slope, GUESS * first), view.rounding) if bold else view.slope
        if not view.decrement > known or (bold and reach > FAR):
            break
        if _step(theta, steepness, state.leapt == 0, memory) > FAR and state.leapt == 0:
            hessian_error, reach = math.inf, math.inf  # no polynomial knows of what is there
            break
    if state.passes >= MAX_PASSES:
        return DONE
    state.passes += 1
    fine = reach <= FAR if bold else hessian_error <= min(RENEW, wish.hessian_tol)
    return GRADIENT if fine and table.count >= DEAR else PASS


@kernel
def _oldest(used: Ints) -> int:
    """The carried point that has been of no use for the longest time."""
    slot = 0
    for a in range(used.shape[0]):
        if used[a] < used[slot]:
            slot = a
    return slot


@kernel
def _nearest(points: Floats, theta: Floats) -> int:
    """The carried point that is nearest to theta."""
    best, least = 0, math.inf
    for a in range(points.shape[1]):
        squared = 0.0
        for k in range(theta.shape[0]):
            away = theta[k] - points[k, a]
            squared += away * away
        if squared < least:
            best, least = a, squared
    return best


@kernel
def _start(search: FreeSearch) -> int:
    """Begins at the carried point with the smallest F, which is known there; which one."""
    theta, carried, quadratic = search.theta, search.carried, search.quadratic
    best, least = 0, math.inf
    for a in range(carried.points.shape[1]):
        value = carried.sums[0, a]
        for k in range(theta.shape[0]):
            at = carried.points[k, a]
            value += (0.5 * quadratic.ridge * at - quadratic.tilt[k]) * at
        if value < least:
            best, least = a, value
    for k in range(theta.shape[0]):
        theta[k] = carried.points[k, best]
    return best


@kernel
def _step(theta: Floats, steepness: float, leap: bool, memory: Algebra) -> float:
    """Newton's step v; returns ``D = R X |v|``.

    Where D is not small the step is shortened by ``log(1 + D)/D``, unless it is to be a leap.
    """
    step = memory.vectors[1]
    if not cholesky(memory.hessian, 0.0, memory.factor):
        return 0.0
    solve_factored(memory.factor, memory.gradient, step)
    reach = steepness * length(step)
    short = reach > 1.0 and not (leap and reach > FAR)
    share = math.log1p(reach) / reach if short else 1.0
    for k in range(theta.shape[0]):
        theta[k] -= share * step[k]
    return reach


class FreeSearches(NamedTuple):
    """The searches of N problems.

    Attributes:
        memory: what is carried, ``(N, size)``.
        used: when each carried point was of use, ``(N, A)``.
        state: of dtype ``FREE``, ``(N,)``.
        constants: S, C and R, ``(N, 3)``.
        table: the monomials of the sums.
        ridge: lambda, ``(N,)``.
        tilt: ``(N, d)``.
        theta: ``(N, d)``; the minimisers in the end.
        tol: from here on as in :class:`Wish`.
        hessian_tol: a number.
        arms: ``(N, K, d)``.
        doubt: ``(N,)``.
        other: ``(N, d)``.
        fleeting: of all.
    """

    memory: Floats
    used: Ints
    state: Any
    constants: Floats
    table: Packed
    ridge: Floats
    tilt: Floats
    theta: Floats
    tol: float
    hessian_tol: float
    arms: Floats
    doubt: Floats
    other: Floats
    fleeting: bool


@kernel
def _search_one(
    b: int, searches: FreeSearches, work: Workspace, trace: float, algebra: Algebra
) -> int:
    """:func:`search_free` for one problem of a batch."""
    s, packed, c = searches, searches.table, searches.constants[b]
    search = FreeSearch(
        s.theta[b],
        s.used[b],
        carried_in(s.memory[b], packed.dim, s.used.shape[1], packed.count),
        Quadratic(s.ridge[b], s.tilt[b]),
        Constants(c[0], c[1], c[2]),
        Wish(s.tol, s.hessian_tol, s.arms[b], s.doubt[b], s.other[b], s.fleeting),
        unpack(packed),
        algebra,
    )
    return search_free(record(s.state, b), search, work, trace)


@entry
def search_free_on(
    b: int, searches: FreeSearches, work: Workspace, trace: float, algebra: Algebra
) -> int:
    """The same, from Python."""
    return _search_one(b, searches, work, trace, algebra)


@entry
def find_free(
    family: CompiledFamily, rows: RowArrays, searches: FreeSearches, linear: Packed, hessian: Floats
) -> None:
    """The minimiser of every problem, with all passes that it needs, and the Hessians there."""
    packed, first = searches.table, unpack(linear)
    table, work = unpack(packed), workspace(packed.dim, packed.count)
    algebra = algebra_for(packed.dim, packed.count)
    for b in range(searches.memory.shape[0]):
        found, theta, trace = record(searches.state, b), searches.theta[b], 0.0
        found.passes, found.answered = 0, 0
        while True:
            asked = _search_one(b, searches, work, trace, algebra)
            if asked == DONE:
                break
            wanted, X, w, y = table if asked == PASS else first, rows.X[b], rows.w[b], rows.y[b]
            trace = sum_rows(family, X, w, y, 0, rows.used, theta, wanted, work)
            found.answered = asked
        for i in range(packed.dim):
            copy_vector(algebra.hessian[i], hessian[b, i])
