"""The constrained minimum of a carried loss, certified, mostly without a pass; compiled.

``F(theta) = L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over the ball. A Newton step on the
Taylor polynomial at the carried point gives the minimiser, and self-concordance an enclosure of the
minimum. Only where that is wider than the tolerance is a pass asked for, at the minimiser, to which
the carried point then moves: a damped Newton's method over the history, resumed where its sums are.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from torchglb.backend import Floats, inlined, kernel, record_type
from torchglb.backend.dense import (
    EPS,
    cholesky,
    dot,
    forward,
    frank_wolfe_gap,
    inverse_trace,
    length,
    minimize_on_ball,
)
from torchglb.carried.kernels import Carried, Workspace, put_point
from torchglb.carried.monomials import Monomials
from torchglb.carried.rounding import compensated, plain
from torchglb.carried.taylor import (
    Constants,
    Error,
    error_at,
    taylor_gradient,
    taylor_hessian,
    taylor_powers,
    taylor_value,
)

#: what a search answers
DONE, PASS = 0, 1
#: steps on one polynomial; passes of one search; quarterings of a step that leads upwards
MODEL_STEPS, MAX_PASSES, MAX_TRIES = 3, 60, 30
#: a step lowers the loss by this share of what the slope promises, or it is shortened
ARMIJO = 1e-4
#: from here on the ball counts as active, relative to S^2
ON_SPHERE = 1.0 - 1e-6


class Quadratic(NamedTuple):
    """What is added to the loss of the data: ``(lambda/2)|theta|^2 - <tilt, theta>``."""

    ridge: float
    tilt: Floats


@kernel
def quadratic_value(quadratic: Quadratic, theta: Floats) -> float:
    """The value at theta."""
    return 0.5 * quadratic.ridge * dot(theta, theta) - dot(quadratic.tilt, theta)


class SearchState(Protocol):
    """Where a search stands; all but the enclosure is of use only while a pass is awaited.

    Attributes:
        low: the minimum lies between this
        high: and this, and so does F(theta).
        excess: F(theta) is at most so much larger than the minimum, whatever both are.
        reducible: what of it is not rounding.
        length: share of the full step that is tried.
        passes: so far; whoever begins anew sets it to 0.
        tries: steps in a row that led upwards.
        answered: whether the pass that was asked for has been made.
        rounding: an enclosure of this width is as good as arithmetic allows.
    """

    low: float
    high: float
    excess: float
    reducible: float
    length: float
    passes: int
    tries: int
    answered: int
    rounding: float


SEARCH = record_type(SearchState)


class Places(NamedTuple):
    """Vectors of a search, ``(d,)`` each.

    Attributes:
        shift: from the carried point to the minimiser of its polynomial; kept between searches.
        theta: the minimiser.
        trial: where a pass is wanted.
        move: the full step from the carried point.
    """

    shift: Floats
    theta: Floats
    trial: Floats
    move: Floats


@inlined
def places_in(memory: Floats) -> Places:
    """The vectors in memory ``(4, d)``."""
    return Places(memory[0], memory[1], memory[2], memory[3])


class Dense(NamedTuple):
    """Memory for small algebra: d x d matrices and vectors.

    Attributes:
        hessian: ``(d, d)``.
        factor: ``(d, d)``.
        vectors: ``(6, d)``.
        powers: ``(count,)``.
    """

    hessian: Floats
    factor: Floats
    vectors: Floats
    powers: Floats


@inlined
def dense(dim: int, count: int) -> Dense:
    """For so many features and monomials."""
    return Dense(np.zeros((dim, dim)), np.zeros((dim, dim)), np.zeros((6, dim)), np.zeros(count))


class Goal(NamedTuple):
    """When a search ends; an infinite entry asks for nothing.

    Attributes:
        width: of the enclosure of the minimum; a wider one is taken where it is due to rounding.
        local: if the width is infinite, theta is within this of the minimiser in the norm of the
            Hessian, to first order: half of its square is what F(theta) may be above the minimum,
            beside rounding. Values of a polynomial are worse than its gradient, squared, so that
            the minimum itself may remain unknown.
        hessian: relative error of the polynomial's Hessian at theta.
    """

    width: float
    local: float
    hessian: float


class BallSearch(NamedTuple):
    """What a search works on, beside its state: a record in a tuple would be a copy.

    Attributes:
        places: its vectors.
        carried: one point's sums.
        quadratic: what is added to the loss.
        constants: S, C and R.
        table: the monomials of the sums.
        memory: for algebra.
    """

    places: Places
    carried: Carried
    quadratic: Quadratic
    constants: Constants
    table: Monomials
    memory: Dense


@kernel
def search_minimum(
    state: SearchState,
    places: Places,
    carried: Carried,
    quadratic: Quadratic,
    constants: Constants,
    goal: Goal,
    table: Monomials,
    answer: Workspace,
    trace: float,
    memory: Dense,
) -> int:
    """Goes on with a :class:`BallSearch` until the goal is reached, or a pass is needed.

    Args:
        state: a record of dtype ``SEARCH``.
        places: its vectors.
        carried: one point's sums.
        quadratic: what is added to the loss.
        constants: S, C and R.
        goal: when to end.
        table: the monomials of the sums.
        answer: the sums at ``places.trial``, if it was answered.
        trace: of the Hessian there.
        memory: for algebra.

    Returns:
        DONE or PASS.
    """
    search = BallSearch(places, carried, quadratic, constants, table, memory)
    before, found = math.inf, False
    if not _resume(state, search, answer, trace):
        return PASS
    for _ in range(MODEL_STEPS):
        _newton_step(state, search)
        left, enough = state.high - state.low, max(goal.width, state.rounding)
        if goal.width == math.inf:
            left, enough = state.reducible, 0.5 * goal.local * goal.local
        found = left <= enough
        # else another step on this polynomial would not help
        if found or not left < 0.5 * before:
            break
        before = left
    if not found:
        _step_safely(state, search)
        return _ask(state, search)
    if goal.hessian < math.inf:
        found = _error(search, carried.sums[0, 0]).hessian <= goal.hessian
    return DONE if found else _ask(state, search)


@kernel
def _error(search: BallSearch, value: float) -> Error:
    """What is certain of the polynomial at theta, where it has this value."""
    carried, table = search.carried, search.table
    sums = carried.sums.reshape(table.count)
    return error_at(
        search.places.shift,
        value,
        sums,
        carried.trace[0],
        carried.facts,
        search.constants,
        table.order,
    )


@kernel
def _step_safely(state: SearchState, search: BallSearch) -> None:
    """Leaves theta where a pass is worth it: a share of the way to it leads downwards.

    Far from its point the polynomial may lead upwards; its quadratic part there does not.
    """
    if state.high <= _carried_value(search):
        return
    shift = search.places.shift
    for k in range(shift.shape[0]):
        shift[k] = 0.0
    _newton_step(state, search)


@kernel
def _carried_value(search: BallSearch) -> float:
    """F at the carried point."""
    carried, quadratic = search.carried, search.quadratic
    squared, tilted = 0.0, 0.0
    for k in range(carried.points.shape[0]):
        squared += carried.points[k, 0] * carried.points[k, 0]
        tilted += quadratic.tilt[k] * carried.points[k, 0]
    return carried.sums[0, 0] + 0.5 * quadratic.ridge * squared - tilted


@kernel
def _resume(state: SearchState, search: BallSearch, answer: Workspace, trace: float) -> bool:
    """Moves to where a pass was made; False if it led upwards and a shorter step is to be tried."""
    refused = state.answered != 0 and not _take(search, answer, trace)
    state.answered = 0
    if not refused:
        state.tries, state.length = 0, 1.0
        return True
    state.tries, state.length = state.tries + 1, 0.25 * state.length
    if state.tries > MAX_TRIES:
        return True
    _try(state, search)
    return False


@kernel
def _ask(state: SearchState, search: BallSearch) -> int:
    """Asks for a pass at the minimiser of the polynomial, unless there were too many."""
    places = search.places
    if state.passes >= MAX_PASSES or state.tries > MAX_TRIES:
        return DONE
    for k in range(places.move.shape[0]):
        places.move[k] = places.theta[k] - search.carried.points[k, 0]
    _try(state, search)
    state.passes += 1
    return PASS


@kernel
def _try(state: SearchState, search: BallSearch) -> None:
    """The next point to look at: some share of the full step."""
    places = search.places
    for k in range(places.move.shape[0]):
        places.trial[k] = search.carried.points[k, 0] + state.length * places.move[k]


@kernel
def _take(search: BallSearch, answer: Workspace, trace: float) -> bool:
    """Moves the carried point to where the pass was made, if the loss is enough smaller there.

    Enough is a share of what the slope promises (Armijo): steps between two points of equal loss,
    one on either side of the minimum, would never end.
    """
    places, carried, quadratic, slope = search.places, search.carried, search.quadratic, 0.0
    for k in range(places.trial.shape[0]):
        at = carried.points[k, 0]
        gradient = carried.sums[1 + k, 0] + quadratic.ridge * at - quadratic.tilt[k]
        slope += gradient * (places.trial[k] - at)
    before = _carried_value(search)
    after = answer.sums[0] + quadratic_value(quadratic, places.trial)
    allowed = before + ARMIJO * min(slope, 0.0) + 64.0 * EPS * abs(before)
    if not after <= allowed and before < math.inf:
        return False
    # memory may be larger than this polynomial needs
    sums = answer.sums[: search.table.count]
    put_point(carried, 0, places.trial, sums, answer.rest, trace)
    for k in range(places.shift.shape[0]):
        places.shift[k] = 0.0
    return True


@kernel
def _newton_step(state: SearchState, search: BallSearch) -> None:
    """One Newton step on the polynomial, over the ball, and what it certifies.

    From below by self-concordance at the Lagrangian ``F + nu (|theta|^2 - S^2)/2``: with its Newton
    decrement delta in a lower bound M of its Hessian at theta, and ``b = R max|x_s| / sqrt(least
    eigenvalue of M)``, the minimum is at most ``2 delta^2/(1 + sqrt(1 - b delta))^2`` below (the
    largest ``delta s - s^2/(2 + b s)``). M: the polynomial's Hessian at the point before is at most
    1 + its relative error times the true one, which shrinks by at most ``e^(-R D)`` on the way to
    theta. And by the Frank-Wolfe gap, which needs no curvature. The better one counts.
    """
    places, carried, memory = search.places, search.carried, search.memory
    quadratic, constants, table = search.quadratic, search.constants, search.table
    d, radius = places.theta.shape[0], constants.radius
    hessian, factor, powers = memory.hessian, memory.factor, memory.powers
    v = memory.vectors
    gradient, before, b, y = v[0], v[1], v[2], v[3]
    sums = carried.sums.reshape(table.count)
    theta, shift, longest = places.theta, places.shift, carried.facts[0]
    taylor_powers(shift, table, powers)
    taylor_gradient(sums, powers, table, gradient)
    taylor_hessian(sums, powers, table, hessian)
    earlier = _error(search, sums[0])
    for k in range(d):
        before[k] = carried.points[k, 0] + shift[k]
        gradient[k] += quadratic.ridge * before[k] - quadratic.tilt[k]
        hessian[k, k] += quadratic.ridge
    minimize_on_ball(hessian, gradient, before, radius, factor, b, y, theta)
    moved = 0.0
    for k in range(d):
        shift[k] = theta[k] - carried.points[k, 0]
        moved += (theta[k] - before[k]) * (theta[k] - before[k])
    taylor_powers(shift, table, powers)
    value = taylor_value(sums, powers, table) + quadratic_value(quadratic, theta)
    taylor_gradient(sums, powers, table, gradient)
    for k in range(d):
        gradient[k] += quadratic.ridge * theta[k] - quadratic.tilt[k]
    error = _error(search, value)
    state.high = value + error.value
    size = abs(sums[0]) + abs(value) + 4.0 * radius * carried.facts[1]
    state.rounding = 4.0 * compensated(d) * EPS * size
    base = value - 2.0 * error.value
    gap = frank_wolfe_gap(theta, gradient, radius)
    excess = gap + 2.0 * radius * error.slope * math.sqrt(error.trace)
    reducible = max(excess - state.rounding, 0.0)
    low = base - excess
    known = 0.0
    if max(earlier.hessian, error.hessian) < 1.0:  # else the polynomial may bend downwards
        shrink = math.exp(-constants.concordance * longest * math.sqrt(moved))
        known = shrink / (1.0 + max(earlier.hessian, error.hessian))
    squared, nu, off_sphere = dot(theta, theta), 0.0, 0.0
    if squared >= ON_SPHERE * radius * radius:
        nu = max(-dot(gradient, theta) / (radius * radius), 0.0)
        off_sphere = 0.5 * nu * max(radius * radius - squared, 0.0)
        base -= off_sphere
        for k in range(d):
            gradient[k] += nu * theta[k]
    for i in range(d):
        for j in range(d):
            hessian[i, j] *= known
    lost = plain(d, carried.facts[2]) * EPS * error.trace
    if known > 0.0 and cholesky(hessian, nu - lost, factor):
        forward(factor, gradient, y)
        decrement = length(y) + error.slope
        stiffness = constants.concordance * longest * math.sqrt(inverse_trace(factor, b))
        left = 1.0 - stiffness * decrement
        if left >= 0.0:
            ratio = decrement / (1.0 + math.sqrt(left))
            low = max(low, base - 2.0 * ratio * ratio)
            excess = min(excess, off_sphere + 2.0 * ratio * ratio)
            terms = 2.0 * carried.facts[1] + length(gradient) + 2.0 * length(quadratic.tilt)
            lost_slope = compensated(d) * EPS * terms + lost * length(shift)
            rest = max(decrement - lost_slope * math.sqrt(inverse_trace(factor, b)), 0.0)
            reducible = min(reducible, max(off_sphere - state.rounding, 0.0) + rest * rest)
    state.low = low if low == low else -math.inf
    state.excess = excess + 2.0 * error.rounding if excess == excess else math.inf
    state.reducible = reducible if reducible == reducible else math.inf
