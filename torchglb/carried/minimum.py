"""The constrained minimum of a carried loss, certified, mostly without a pass; compiled.

``F(theta) = L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over the ball. A Newton step on the
Taylor polynomial at the carried point gives the minimiser, and self-concordance an enclosure of the
minimum. Only where that is wider than the tolerance is a pass asked for, at the minimiser, to which
the carried point then moves: a damped Newton's method over the history, resumed where its sums are.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from torchglb.backend import Floats, inlined, kernel, record_type
from torchglb.backend.dense import (
    EPS,
    copy_vector,
    distance,
    dot,
    frank_wolfe_gap,
    minimize_on_ball,
)
from torchglb.carried.kernels import Workspace, put_point
from torchglb.carried.model import (
    Dense,
    Model,
    decrement_of,
    error_at,
    expand,
    gradient_at,
    loss_at,
    loss_concordance,
    loss_rounding,
    quadratic_value,
)

#: what a search answers
DONE, PASS = 0, 1
#: steps on one polynomial; passes of one search; quarterings of a step that leads upwards
MODEL_STEPS, MAX_PASSES, MAX_TRIES = 3, 60, 30
#: a step lowers the loss by this share of what the slope promises, or it is shortened
ARMIJO = 1e-4
#: from here on the ball counts as active, relative to S^2
ON_SPHERE = 1.0 - 1e-6


class SearchState(Protocol):
    """Where a search stands; all but the enclosure is of use only while a pass is awaited."""

    low: float  # the minimum is at least this
    high: float  # the minimum and F(theta) are at most this
    excess: float  # F(theta) is at most so much larger than the minimum, whatever both are
    reducible: float  # what of it is not rounding
    length: float  # share of the full step that is tried
    passes: int  # so far; whoever begins anew sets it to 0
    tries: int  # steps in a row that led upwards
    answered: int  # whether the pass that was asked for has been made
    rounding: float  # an enclosure of this width is as good as arithmetic allows


SEARCH = record_type(SearchState)


class SearchVectors(NamedTuple):
    """The vectors of a search, ``(d,)`` each; of N searches ``(N, d)``.

    Attributes:
        shift: from the carried point to the minimiser of its polynomial; kept between searches.
        theta: the minimiser.
        trial: where a pass is wanted.
    """

    shift: Floats
    theta: Floats
    trial: Floats


@inlined
def vectors_of(every: SearchVectors, b: int) -> SearchVectors:
    """Those of one search."""
    return SearchVectors(every.shift[b], every.theta[b], every.trial[b])


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
    """What a search works on, beside its state: a record in a tuple would be a copy."""

    vectors: SearchVectors
    model: Model  # F near the only carried point
    memory: Dense  # for algebra


@kernel
def search_minimum(
    state: SearchState, search: BallSearch, goal: Goal, answer: Workspace, trace: float
) -> int:
    """Goes on until the goal is reached, or a pass is needed.

    Args:
        state: a record of dtype ``SEARCH``.
        search: what it works on.
        goal: when to end.
        answer: the sums at ``vectors.trial``, if it was answered.
        trace: of the Hessian there.

    Returns:
        DONE or PASS.
    """
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
        model = search.model
        error = error_at(model, search.vectors.theta, model.sums[0], search.memory)
        found = error.hessian <= goal.hessian
    return DONE if found else _ask(state, search)


@kernel
def _step_safely(state: SearchState, search: BallSearch) -> None:
    """Leaves theta where a pass is worth it: a share of the way to it leads downwards.

    Far from its point the polynomial may lead upwards; its quadratic part there does not.
    """
    objective = search.model.objective
    if not state.high <= loss_at(objective.carried, objective.quadratic, 0):
        search.vectors.shift[:] = 0.0
        _newton_step(state, search)


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
    if state.passes >= MAX_PASSES or state.tries > MAX_TRIES:
        _give_up(state, search)
        return DONE
    _try(state, search)
    state.passes += 1
    return PASS


@kernel
def _give_up(state: SearchState, search: BallSearch) -> None:
    """Goes back to the carried point, where F is known, if little is certain of it at theta."""
    vectors, model, memory = search.vectors, search.model, search.memory
    if state.high <= loss_at(model.objective.carried, model.objective.quadratic, 0):
        return
    copy_vector(model.point, vectors.theta)
    vectors.shift[:] = 0.0
    expand(model, vectors.theta, memory, memory.vectors[0], True)
    known = error_at(model, vectors.theta, model.sums[0], memory).hessian
    _certify(state, search, known, 0.0)


@kernel
def _try(state: SearchState, search: BallSearch) -> None:
    """The next point to look at: some share of the way from the carried point to theta."""
    vectors, point = search.vectors, search.model.point
    for k in range(point.shape[0]):
        vectors.trial[k] = point[k] + state.length * (vectors.theta[k] - point[k])


@kernel
def _take(search: BallSearch, answer: Workspace, trace: float) -> bool:
    """Moves the carried point to where the pass was made, if the loss is enough smaller there.

    Enough is a share of what the slope promises (Armijo): steps between two points of equal loss,
    one on either side of the minimum, would never end.
    """
    vectors, point, slope = search.vectors, search.model.point, 0.0
    carried, quadratic = search.model.objective.carried, search.model.objective.quadratic
    for k in range(point.shape[0]):
        slope += gradient_at(carried, quadratic, k, 0) * (vectors.trial[k] - point[k])
    before = loss_at(carried, quadratic, 0)
    after = answer.sums[0] + quadratic_value(quadratic, vectors.trial)
    allowed = before + ARMIJO * min(slope, 0.0) + 64.0 * EPS * abs(before)
    if not after <= allowed and before < math.inf:
        return False
    # memory may be larger than this polynomial needs
    sums = answer.sums[: search.model.objective.table.count]
    put_point(carried, 0, vectors.trial, sums, answer.rest, trace)
    vectors.shift[:] = 0.0
    return True


@kernel
def _newton_step(state: SearchState, search: BallSearch) -> None:
    """One Newton step on the polynomial, over the ball, and what it certifies."""
    vectors, model, memory = search.vectors, search.model, search.memory
    theta, constants = vectors.theta, model.objective.constants
    v = memory.vectors
    gradient, before = v[0], v[1]
    for k in range(theta.shape[0]):
        before[k] = model.point[k] + vectors.shift[k]
    expand(model, before, memory, gradient, True)
    known = error_at(model, before, model.sums[0], memory).hessian
    minimize_on_ball(
        memory.hessian, gradient, before, constants.radius, memory.factor, v[2], v[3], theta
    )
    for k in range(theta.shape[0]):
        vectors.shift[k] = theta[k] - model.point[k]
    _certify(state, search, known, distance(theta, before))


@kernel
def _certify(state: SearchState, search: BallSearch, hessian_error: float, moved: float) -> None:
    """Encloses the minimum after a step of a length, from a point whose Hessian is in the memory.

    From below by self-concordance at the Lagrangian ``F + nu (|theta|^2 - S^2)/2``: with its Newton
    decrement delta in a lower bound M of its Hessian at theta, and ``b = R max|x_s| / sqrt(least
    eigenvalue of M)``, the minimum is at most ``2 delta^2/(1 + sqrt(1 - b delta))^2`` below (the
    largest ``delta s - s^2/(2 + b s)``). M: the polynomial's Hessian at the point before is at most
    1 + its relative error times the true one, which shrinks by at most ``e^(-R D)`` on the way to
    theta. (What the polynomial's slope errs by is known in the dual norm of H: s is |u| in H, in
    whose dual norm a gradient is no longer than in that of M.) And by the Frank-Wolfe gap, which
    needs no curvature. The better one counts.
    """
    model, theta, memory = search.model, search.vectors.theta, search.memory
    d, radius, gradient = theta.shape[0], model.objective.constants.radius, memory.vectors[0]
    concordance = loss_concordance(model.objective)
    value = expand(model, theta, memory, gradient, False)
    error = error_at(model, theta, value, memory)
    state.high = value + error.value
    state.rounding = 4.0 * loss_rounding(model, value)
    base = value - 2.0 * error.value
    gap = frank_wolfe_gap(theta, gradient, radius)
    excess = gap + 2.0 * radius * error.slope * math.sqrt(error.trace)
    reducible = max(excess - state.rounding, 0.0)
    low = base - excess
    squared, nu, off_sphere = dot(theta, theta), 0.0, 0.0
    if squared >= ON_SPHERE * radius * radius:
        nu = max(-dot(gradient, theta) / (radius * radius), 0.0)
        off_sphere = 0.5 * nu * max(radius * radius - squared, 0.0)
        base -= off_sphere
        for k in range(d):
            gradient[k] += nu * theta[k]
    off = max(hessian_error, error.hessian)
    if off < 1.0:  # else the polynomial may bend downwards
        known = math.exp(-concordance * moved) / (1.0 + off)
        for i in range(d):
            for j in range(d):
                memory.metric[i, j] = known * memory.hessian[i, j]
        decrement = decrement_of(model, gradient, nu, error.trace, memory)
        delta = decrement.value + error.slope
        left = 1.0 - concordance * decrement.flatness * delta if delta < math.inf else -1.0
        if left >= 0.0:
            ratio = delta / (1.0 + math.sqrt(left))
            low = max(low, base - 2.0 * ratio * ratio)
            excess = min(excess, off_sphere + 2.0 * ratio * ratio)
            rest = max(delta - decrement.rounding, 0.0)
            reducible = min(reducible, max(off_sphere - state.rounding, 0.0) + rest * rest)
    state.low = low if low == low else -math.inf  # NaN proves nothing
    state.excess = excess + 2.0 * error.rounding if excess == excess else math.inf
    state.reducible = reducible if reducible == reducible else math.inf
