"""The optimistic program in compiled code: one problem at a time, one arm after the other.

The mathematics is that of :mod:`torchglb.ucb.solvers.native`: every evaluated point bounds an arm
from above by its cut and from below by its chord to the centre; new points come from sequential
quadratic programming. Arms for which quadratic models mislead are searched by the dual.

Arms are unit vectors here; lengths multiply bounds at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from torchglb.backend import Floats, inlined, kernel, record_type
from torchglb.backend.dense import EPS, TINY, copy_vector, dot, length, matrix_trace
from torchglb.backend.tridiagonal import Tridiagonal, tridiagonal_form, tridiagonal_memory
from torchglb.carried.kernels import Workspace
from torchglb.carried.monomials import Monomials
from torchglb.carried.rounding import compensated
from torchglb.families.row_terms import CHUNK
from torchglb.mle.newton import (
    CONVERGED,
    INACCURATE,
    MAX_STEPS,
    NONFINITE,
    RUNNING,
    NewtonMemory,
    PointExpansion,
    RowLoss,
    copy_point,
    expand,
    minimize,
    new_memory,
    new_point,
    pass_memory,
    pass_table,
)
from torchglb.mle.secant import SecantMemory, secant_memory, slope_pass
from torchglb.ucb.kernels import (
    ON_SPHERE,
    STEP_ROWS,
    Curvature,
    QuadraticModel,
    ball_multiplier,
    come_back,
    cut_rounding,
    cut_value,
    feasible_share,
    sqp_step,
    stop_at_cut,
)

#: a search that has not narrowed its gap for so many steps is given up
PATIENCE = 25
#: and after so many it may be that rounding is what is left
ENOUGH = 2
#: how well the sphere is met by a first step
ROUGH = 1e-3
#: a change of the curvature by more than such a factor is rounding
UNSEEN = 1e-3
#: a point whose squared length is above this share of S^2 may be held by the ball
NEAR = 0.98
#: up to so many features a Hessian costs little beside its pass, and the first point has one too:
#: else the second has, from which on gradients tell enough of the change
CHEAP = 4


class LevelSet(NamedTuple):
    """The set of one problem, ``{|theta| <= S, F(theta) <= B}``."""

    loss: RowLoss  # F
    level: float  # B
    radius: float  # S
    squares: Floats  # of the lengths of the rows, (n,)
    magnitude: float  # of the rows and the tilt, which bounds rounding; see add_totals
    center_loss: float  # F at a point of the set, if there is one, as computed
    center_error: float  # what rounding may have done to it
    region: Floats  # of ConvexRegion, c, W and gamma; empty for none


class ArmState(Protocol):
    """What is known of one arm; bounds are those of its unit vector x until the end."""

    scale: float  # a power of two that the arm was divided by
    length: float  # of the arm over its scale
    upper: float  # bounds on h
    lower: float
    offset: float  # of the cut <normal, theta> <= offset that gave upper
    upper_paid: float  # what rounding costs upper, and lower by what it aims at
    lower_paid: float  # what it costs lower beside that
    multiplier: float  # of the level, dh/dB, in the end
    status: int


ARM = record_type(ArmState)


class SearchMemory(NamedTuple):
    """Memory of a search."""

    table: Monomials  # of passes with the Hessian
    work: Workspace  # of passes
    pairs: SecantMemory  # of passes without
    at: PointExpansion  # the point to evaluate
    last: PointExpansion  # the one before it
    next: Floats  # the one after it, (d,)
    inner: Floats  # a point of the set, (d,)
    outer: Floats  # a point outside, (d,)
    tilt: Floats  # (d,)
    work_vectors: Floats  # STEP_ROWS rows of d
    center_form: Tridiagonal  # the Hessian at the centre, in tridiagonal form
    form: Tridiagonal  # that at a point of the search
    estimate: NewtonMemory  # of the dual search


@inlined
def search_memory(dim: int) -> SearchMemory:
    """For problems with so many features."""
    return SearchMemory(
        pass_table(dim),
        pass_memory(dim),
        secant_memory(dim),
        new_point(dim),
        new_point(dim),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros((STEP_ROWS, dim)),
        tridiagonal_memory(dim),
        tridiagonal_memory(dim),
        new_memory(dim),
    )


class ArmSearch(NamedTuple):
    """What the search of an arm works on, beside its state: a record in a tuple would be a copy."""

    x: Floats  # a unit vector, or zero, (d,)
    theta: Floats  # a feasible point that attains the lower bound, (d,)
    normal: Floats  # of the cut that gave the upper one, (d,)
    level: LevelSet
    center: PointExpansion  # a point of the set, if there is one, and what F is there
    memory: SearchMemory
    tol: float  # of the gap: upper - lower <= tol (1 + |upper|)


# ---- what a point proves -----------------------------------------------------------------------


class Evaluated(NamedTuple):
    """What holds at an evaluated point."""

    loss: float  # F as computed
    loss_error: float  # what rounding may have done to it, and to points on its chords
    error: float  # what rounding may have done to the offset of the cut
    gradient_norm: float  # |grad F|
    offset: float  # of the cut <grad F, theta> <= offset, which pays for rounding


@kernel
def pull_in(region: Floats, theta: Floats) -> None:
    """Moves a point with ``|theta - c|^2_W > gamma`` towards c, up to the edge."""
    d, square = theta.shape[0], 0.0
    if region.shape[0] == 0 or not region[-1] < math.inf:
        return
    center, shape, gamma = region[:d], region[d : d + d * d].reshape(d, d), region[-1]
    for i in range(d):
        row = 0.0
        for j in range(d):
            row += shape[i, j] * (theta[j] - center[j])
        square += row * (theta[i] - center[i])
    if square > gamma:
        share = math.sqrt(gamma / square)
        for i in range(d):
            theta[i] = center[i] + share * (theta[i] - center[i])


@kernel
def evaluate(level: LevelSet, memory: SearchMemory, with_hessian: bool) -> Evaluated:
    """One pass at ``memory.at``, and what it proves; without a Hessian the old one stays."""
    at, loss = memory.at, level.loss
    if with_hessian:
        value = expand(loss, memory.table, memory.work, at)
        trace = matrix_trace(at.hessian)
    else:
        none = at.hessian[:0]
        value, trace = slope_pass(
            loss, at.theta, memory.work, memory.pairs, level.squares, at.gradient, none
        )
    return evaluated(loss, value, trace, at, level.level, level.radius, level.magnitude)


@kernel
def update_hessian(last: PointExpansion, at: PointExpansion, work: Floats) -> None:
    """The Hessian at a point from the last one and the change of the gradient, by BFGS.

    ``H + y y'/s'y - H s s'H/s'H s`` with the step s and the change y has the curvature that was
    seen along s. Where that is rounding, the old one stays.
    """
    d, change, bent = at.theta.shape[0], work[0], work[1]
    seen, known = 0.0, 0.0
    for i in range(d):
        change[i] = at.gradient[i] - last.gradient[i]
        bent[i] = 0.0
        for j in range(d):
            bent[i] += last.hessian[i, j] * (at.theta[j] - last.theta[j])
        step = at.theta[i] - last.theta[i]
        seen += step * change[i]
        known += step * bent[i]
    sound = 0.0 < UNSEEN * known < seen < known / UNSEEN
    for i in range(d):
        for j in range(d):
            at.hessian[i, j] = last.hessian[i, j]
            if sound:
                at.hessian[i, j] += change[i] * change[j] / seen - bent[i] * bent[j] / known


@kernel
def evaluated(
    problem: RowLoss,
    loss: float,
    trace: float,
    at: PointExpansion,
    level: float,
    radius: float,
    magnitude: float,
) -> Evaluated:
    """What loss, gradient and the trace of the Hessian prove; for levels that may be infinite.

    With the magnitude m of the rows the terms of the loss add up to at most ``|F| + 2 |theta| m``,
    and what an error of z does to them to ``|theta| (m + |theta| tr H)``; where a row of a Poisson
    loss is so short that ``|x| |theta| < 1``, to its term. A point on a chord is rounded by some
    ``eps S``, which changes its loss by that much of its slopes, ``m + S tr H``; likewise. A
    negative ridge counts by its size.
    """
    d, size, rows = at.theta.shape[0], length(at.theta), problem.y.shape[0]
    trace += 2.0 * d * max(-problem.ridge, 0.0)
    offset = level - loss + dot(at.gradient, at.theta)
    finite_level = level if abs(level) < math.inf else 0.0
    finite_offset = offset if abs(offset) < math.inf else 0.0
    # a chunk of a pass has no more terms than there are rows
    roundings = compensated(d) - CHUNK + min(rows, CHUNK)
    terms = abs(loss) + size * (3.0 * magnitude + size * trace)
    loss_error = EPS * (roundings * terms + 12.0 * radius * (magnitude + radius * trace))
    error = roundings * cut_rounding(finite_level, loss, finite_offset, trace, magnitude, radius)
    return Evaluated(loss, loss_error, error, length(at.gradient), offset + error)


@kernel
def weight_of_cut(x: Floats, normal: Floats, offset: float, radius: float) -> float:
    """alpha of ``min alpha offset + S |x - alpha normal|``, the dual of ball and half-space."""
    norm = max(length(normal), TINY)
    distance = offset / norm
    if not distance < radius:
        return 0.0
    along, across = dot(x, normal) / norm, 0.0
    for k in range(x.shape[0]):
        part = x[k] - along * (normal[k] / norm)
        across += part * part
    near = max(distance, -radius)
    chord = math.sqrt((radius - near) * (radius + near))
    return max(along - near * math.sqrt(across) / max(chord, TINY), 0.0) / norm


@kernel
def tighten_upper(arm: ArmState, search: ArmSearch, at: PointExpansion, found: Evaluated) -> None:
    """Lowers the upper bound of an arm by the cut of an evaluated point."""
    x, bound, radius = search.x, math.inf, search.level.radius
    if found.gradient_norm > 0.0:
        bound = cut_value(x, at.gradient, found.gradient_norm, found.offset, radius)
    elif found.offset < 0.0:  # a half-space without a normal that holds nothing
        bound = -math.inf
    if bound < arm.upper:
        arm.upper = bound
        copy_vector(at.gradient, search.normal)
        arm.offset = found.offset
        alpha = weight_of_cut(x, at.gradient, found.offset, radius)
        rounding = found.error + found.loss_error + search.level.center_error
        arm.upper_paid = alpha * rounding if alpha > 0.0 else 0.0


@kernel
def raise_lower(
    arm: ArmState,
    search: ArmSearch,
    start: Floats,
    start_loss: float,
    end: Floats,
    end_loss: float,
    error: float,
) -> None:
    """Raises the lower bound of an arm by the feasible part of a segment.

    It leads from a point of the set to any point of the ball; ``error`` is that of any loss on it.
    """
    x, d, base, slope, level = search.x, start.shape[0], 0.0, 0.0, search.level
    share = feasible_share(end_loss + error, start_loss + error, level.level)
    ideal = feasible_share(end_loss, start_loss, level.level)  # but for rounding
    for i in range(d):
        base += x[i] * start[i]
        slope += x[i] * (end[i] - start[i])
    value = base + share * slope - (2.0 * d + 8.0) * EPS * level.radius
    if value > arm.lower:
        arm.lower = value
        arm.lower_paid = max(base + ideal * slope - value, 0.0)
        for i in range(d):
            search.theta[i] = start[i] + share * (end[i] - start[i])


@kernel
def is_closed(arm: ArmState, tol: float, stalled: int) -> bool:
    """Whether ``upper - lower <= tol (1 + |upper|)``; if progress has stalled, up to rounding.

    What both bounds pay for rounding is not theirs to narrow, and what they would be without it is
    uncertain by as much again.
    """
    gap, scale = arm.upper - arm.lower, arm.length
    if stalled >= ENOUGH:
        gap -= 2.0 * (arm.upper_paid + arm.lower_paid)
    return scale * gap <= tol * (1.0 + scale * abs(arm.upper))


@kernel
def learn(arm: ArmState, search: ArmSearch, at: PointExpansion, found: Evaluated) -> None:
    """What an evaluated point says of an arm."""
    tighten_upper(arm, search, at, found)
    level, center = search.level, search.center.theta
    error = found.loss_error + level.center_error
    if level.center_loss + level.center_error <= level.level:
        raise_lower(arm, search, center, level.center_loss, at.theta, found.loss, error)


# ---- the search of one arm ---------------------------------------------------------------------


@kernel
def _aim(level: LevelSet) -> float:
    """A little below the level: what counts as feasible, but for the error of the point itself."""
    if not abs(level.level) < math.inf:
        return level.level
    margin = 24.0 * EPS * (abs(level.level) + abs(level.center_loss))
    return level.level - margin - level.center_error


@kernel
def search_arm(arm: ArmState, search: ArmSearch, max_steps: int) -> None:
    """Closes the gap of an arm; ``memory.center_form`` is the Hessian at the centre."""
    level, memory, center, tol = search.level, search.memory, search.center, search.tol
    at, last, x = memory.at, memory.last, search.x
    inner, inner_loss, stalled = memory.inner, level.center_loss, 0
    copy_vector(center.theta, inner)
    if is_closed(arm, tol, 0):
        arm.status = CONVERGED
        return
    hessian = Curvature(memory.center_form, 1.0, 0.0)
    slack = _aim(level) - level.center_loss - level.center_error
    model = QuadraticModel(center.theta, center.gradient, hessian, slack)
    sqp_step(x, model, level.radius, 0.0, ROUGH, memory.work_vectors, memory.next)
    gap = arm.upper - arm.lower
    arm.status = arm_status(arm, tol, stalled, PATIENCE, max_steps == 0)
    for step in range(1, max_steps + 1):
        if arm.status != RUNNING:
            break
        lower = arm.lower
        copy_point(center if step == 1 else at, last)
        copy_vector(memory.next, at.theta)
        pull_in(level.region, at.theta)
        fresh = stalled > 0 or step == 2 or (step == 1 and x.shape[0] <= CHEAP)
        found = evaluate(level, memory, fresh)
        if not fresh:
            update_hessian(last, at, memory.work_vectors)
        value = found.loss
        learn(arm, search, at, found)
        left = arm.upper - arm.lower
        stalled = 0 if left < 0.9 * gap else stalled + 1
        gap = left
        arm.status = arm_status(arm, tol, stalled, PATIENCE, step == max_steps)
        if arm.status != RUNNING:
            break
        if value - level.level > level.level - level.center_loss:
            come_back(at.theta, at.gradient, value, inner, inner_loss, level.level, memory.next)
        else:
            _step_from(search, arm.offset, found)
        if value + found.loss_error <= level.level and arm.lower > lower:
            copy_vector(at.theta, inner)
            inner_loss = value


@kernel
def _step_from(search: ArmSearch, offset: float, found: Evaluated) -> None:
    """An SQP step from the evaluated point, up to the best cut, into ``memory.next``."""
    level, memory = search.level, search.memory
    at, x, work = memory.at, search.x, memory.work_vectors
    on_sphere = dot(at.theta, at.theta) > NEAR * level.radius * level.radius
    tridiagonal_form(at.hessian, memory.form, work[0])
    slack = _aim(level) - found.loss - found.loss_error
    model = QuadraticModel(at.theta, at.gradient, Curvature(memory.form, 1.0, 0.0), slack)
    guess = ball_multiplier(x, at.gradient, at.theta) if on_sphere else 0.0
    sqp_step(x, model, level.radius, guess, ON_SPHERE, work, memory.next)
    stop_at_cut(at.theta, memory.next, search.normal, offset)


@kernel
def arm_status(arm: ArmState, tol: float, stalled: int, patience: int, is_last: bool) -> int:
    """Of an arm after a step."""
    if not abs(arm.upper - arm.lower) < math.inf:
        return NONFINITE
    if is_closed(arm, tol, stalled):
        return CONVERGED
    if stalled > patience:
        return INACCURATE
    return MAX_STEPS if is_last else RUNNING


# ---- by the dual -----------------------------------------------------------------------------

#: a search that has not narrowed its gap for so many multipliers is given up
DUAL_PATIENCE = 12
#: how many are tried at all
MAX_MULTIPLIERS = 80
#: until a maximiser lies outside the set, multipliers fall by this factor
FALL = 8.0
#: of the estimates, as of any
ESTIMATE_TOL, ESTIMATE_STEPS = 1e-9, 200


@kernel
def search_dual(arm: ArmState, search: ArmSearch) -> None:
    """Closes the gap of an arm by its dual (:mod:`torchglb.ucb.solvers.dual_search`).

    For a multiplier ``lambda > 0`` of the loss ``lambda B + max <x, theta> - lambda F(theta)`` over
    the ball is at least h(x), with equality at the best one; the maximiser is an estimate with a
    tilt of ``x/lambda``. The chord between one inside the set and one outside tells the next.
    """
    level, memory, center, x = search.level, search.memory, search.center.theta, search.x
    loss, here, inner, outer = level.loss, memory.estimate.here, memory.inner, memory.outer
    copy_vector(center, inner)
    copy_vector(center, outer)
    copy_vector(center, here.theta)
    inner_loss, outer_loss = level.center_loss, math.inf
    errors, stalled = level.center_error, 0
    room = level.level - inner_loss
    multiplier = (arm.upper - dot(x, inner)) / room if room > 0.0 else 1.0
    if not 0.0 < multiplier < math.inf:
        multiplier = 1.0
    arm.status = MAX_STEPS
    for _ in range(MAX_MULTIPLIERS):
        for i in range(x.shape[0]):
            memory.tilt[i] = loss.tilt[i] + x[i] / multiplier
        tilted = RowLoss(loss.family, loss.X, loss.w, loss.y, loss.ridge, memory.tilt)
        minimize(
            tilted,
            level.radius,
            ESTIMATE_TOL,
            ESTIMATE_STEPS,
            memory.table,
            memory.estimate,
            memory.work,
        )
        copy_vector(here.theta, memory.at.theta)
        gap = arm.upper - arm.lower
        found = evaluate(level, memory, False)
        value = found.loss
        tighten_upper(arm, search, memory.at, found)
        errors = max(errors, found.loss_error)
        if value + 2.0 * errors <= level.level:
            copy_vector(here.theta, inner)
            inner_loss = value
        else:
            copy_vector(here.theta, outer)
            outer_loss = value
        if inner_loss + 2.0 * errors <= level.level:
            raise_lower(arm, search, inner, inner_loss, outer, outer_loss, 2.0 * errors)
        stalled = 0 if arm.upper - arm.lower < 0.9 * gap else stalled + 1
        arm.status = arm_status(arm, search.tol, stalled, DUAL_PATIENCE, True)
        if arm.status != MAX_STEPS:
            return
        slope = (dot(x, outer) - dot(x, inner)) / (outer_loss - inner_loss)
        multiplier = slope if slope > 0.0 else multiplier / FALL
