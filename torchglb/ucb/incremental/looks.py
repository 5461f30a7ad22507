"""One look at the maximiser of an arm: where it is, and what it proves of all arms; compiled.

Where a polynomial of the loss is certain enough at the maximiser, its tangent there, with all of
its errors paid for, is a cut, and the point drawn back to the level is feasible. Else a pass over
the history is asked for, and the point becomes an anchor.
"""

from __future__ import annotations

import math

from torchglb.backend import Floats, kernel
from torchglb.backend.dense import TINY, distance, dot, length
from torchglb.backend.tridiagonal import reduce, tridiagonal_form
from torchglb.carried.kernels import least_used, put_point
from torchglb.carried.model import (
    Model,
    error_at,
    expand,
    gradient_at,
    loss_at,
    loss_concordance,
    model_at,
)
from torchglb.carried.taylor import hessian_at
from torchglb.ucb.incremental.cutting_planes import (
    lower_bound,
    lower_upper_bound,
    scan,
    sum_rounding,
)
from torchglb.ucb.incremental.kkt import maximise_on_model
from torchglb.ucb.incremental.round_state import BLOCK, CarriedProblem, Level, Round, RoundState
from torchglb.ucb.kernels import (
    ON_SPHERE,
    Curvature,
    QuadraticModel,
    ball_multiplier,
    come_back,
    cut_value,
    feasible_share,
    sqp_step,
    stop_at_cut,
)

#: a model may err by this share of what is still to be found out
ERROR_SHARE = 0.25
#: a model may err by this share of the level's height over the minimum, where it leads the way
LEADING_SHARE = 0.1
#: a look without a pass costs as much as a pass over so many rows: where such looks have cost as
#: much as a pass since the last one, a pass is made, whose anchor spares later rounds their looks
ROWS_PER_LOOK = 250.0
#: values that are wanted more closely than this need a look in every round, whatever the anchors
COARSE = 1e-3
#: points this close, relative to their distance from the centre, are the same
NEARBY = 1e-2
#: a look without a pass has helped if it leaves at most this share of an arm's gap
HELPFUL = 0.5


@kernel
def look(state: RoundState, round_: Round, wanted: float) -> bool:
    """Looks at the maximiser of ``state.arm``; whether a pass at ``memory.trial`` is needed.

    Args:
        state: of the round.
        round_: the rest of it.
        wanted: to what the gap of the arm has to shrink.
    """
    problem, arms, memory = round_.problem, round_.arms, round_.memory
    arm, floor = state.arm, _floor(state, round_)
    if arms.feasible[arm] < 0:
        memory.chosen[0], memory.chosen[BLOCK] = arm, 1
        scan(round_)
    x, slot = arms.units[arm], arms.feasible[arm]
    wanted = wanted / max(arms.lengths[arm], TINY)
    before = arms.upper[arm] - arms.lower[arm]
    minimum, enough = problem.minimum, False
    anchor = model_at(problem.anchors, slot, memory.dense)
    if state.reduced == 0:  # the Hessian of the data at the carried minimum, for all looks
        hessian_at(minimum.sums, 1.0, memory.minimum_form.reflections)
        reduce(memory.minimum_form, memory.step[0])
        state.reduced = 1
    if problem.anchors.table.order > 2:
        enough = _look_by_anchor(round_, anchor, x, slot, wanted)
    elif minimum.objective.constants.ratio == 0.0:
        _propose_from_minimum(round_, x)
    else:
        _propose_from_anchor(round_, arm, slot)
    if not enough and not _is_enough(round_, wanted):
        return True
    free_looks = problem.use.free_looks
    if round_.settings.value_tol >= COARSE and free_looks[0] * ROWS_PER_LOOK >= problem.rows:
        return True
    free_looks[0] += 1.0
    if enough:
        _learn_from_model(round_, anchor, floor)
    else:
        _learn_from_model(round_, minimum, floor)
    # the next look would start from the same anchor: what did not help now never will
    return not arms.upper[arm] - arms.lower[arm] <= HELPFUL * before


@kernel
def _floor(state: RoundState, round_: Round) -> float:
    """Arms whose upper bounds are below this do not matter any more."""
    return -math.inf if round_.settings.close_all else round_.arms.lower[state.leader]


@kernel
def _look_by_anchor(round_: Round, model: Model, x: Floats, slot: int, wanted: float) -> bool:
    """The maximiser by the polynomial of an anchor, into ``memory.trial``; whether it is enough.

    Where the polynomial might be far from the truth, the point is that of a safer quadratic one.
    """
    problem, level, memory = round_.problem, round_.level, round_.memory
    d, use, start, trial = x.shape[0], problem.use, memory.start, memory.trial
    for k in range(d):
        start[k] = model.point[k] + use.shift[k, slot]
    goal = level.low - 2.0 * use.excess[slot]  # a point can be proven feasible there
    dense, gradient = memory.dense, memory.gradient
    solution = maximise_on_model(round_, x, model, goal)
    loss = expand(model, trial, dense, gradient, False)
    error = error_at(model, trial, loss, dense)
    sound = solution.found and error.value <= LEADING_SHARE * (level.low - level.center_loss)
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    enough = sound and solution.multiplier * doubt <= ERROR_SHARE * wanted
    if solution.multiplier == 0.0:  # a pole must be feasible
        enough = enough and loss + error.value <= level.low
    if enough and solution.multiplier > 0.0:  # the next look starts from here
        for k in range(d):
            use.shift[k, slot] = dense.shift[k]
        use.excess[slot] = error.value
    if not sound:
        far = _is_far(expand(model, start, dense, gradient, False), level)
        if not (far and _propose_anew(round_, x, start)):
            loss = expand(model, start, dense, gradient, True)
            tridiagonal_form(dense.hessian, memory.form, memory.step[0])
            hessian = Curvature(memory.form, 1.0, 0.0)
            _step_from(round_, x, QuadraticModel(start, gradient, hessian, goal - loss), loss)
    return enough


@kernel
def _dip(slope_error: float, problem: CarriedProblem) -> float:
    """How much lower than its computed tangent the loss may be because of the slope's error.

    A slope that errs by e in the dual norm of the Hessian puts a point at a distance delta in its
    norm lower by e delta, but the curvature puts it ``delta^2 / (2 + 2 R X S)`` higher, X the
    longest row: never lower than by ``e^2 (1 + R X S)/2``.
    """
    growth = loss_concordance(problem.anchors) * problem.anchors.constants.radius
    return 0.5 * slope_error * slope_error * (1.0 + growth)


@kernel
def _is_far(loss: float, level: Level) -> bool:
    """Whether a point is so far outside the set that a model made there says little of it."""
    return loss - level.high > level.high - level.center_loss


@kernel
def _propose_anew(round_: Round, x: Floats, start: Floats) -> bool:
    """The maximiser as the carried minimum has it, instead of a far point; False if that is it."""
    trial = round_.memory.trial
    _propose_from_minimum(round_, x)
    return distance(trial, start) > NEARBY * distance(trial, round_.level.center)


@kernel
def _step_from(round_: Round, x: Floats, model: QuadraticModel, loss: float) -> None:
    """An SQP step from a point with this loss, into ``memory.trial``; back from far outside."""
    level, step, trial = round_.level, round_.memory.step, round_.memory.trial
    start, gradient = model.theta, model.gradient
    if _is_far(loss, level):
        come_back(start, gradient, loss, level.center, level.center_loss, level.low, trial)
    else:
        guess = ball_multiplier(x, gradient, start)
        sqp_step(x, model, level.radius, guess, ON_SPHERE, step, trial)


@kernel
def _propose_from_minimum(round_: Round, x: Floats) -> None:
    """The maximiser where the loss is its own polynomial, as for Gaussian rewards."""
    level, memory = round_.level, round_.memory
    loss = expand(round_.problem.minimum, level.center, memory.dense, memory.normal, False)
    hessian = Curvature(memory.minimum_form, 1.0, level.quadratic.ridge)
    model = QuadraticModel(level.center, memory.normal, hessian, level.low - loss)
    _step_from(round_, x, model, loss)


@kernel
def _propose_from_anchor(round_: Round, arm: int, slot: int) -> None:
    """An SQP step from an anchor, with the minimum's Hessian scaled to the trace of the anchor's.

    A Hessian of its own for every anchor would need as many looks.
    """
    level, memory, anchors = round_.level, round_.memory, round_.problem.anchors.carried
    d, point = memory.trial.shape[0], memory.dense.point
    carried = round_.problem.minimum.objective.carried
    flat = not (anchors.trace[slot] > 0.0 and carried.trace[0] > 0.0)
    scale = 1.0 if flat else anchors.trace[slot] / carried.trace[0]
    shift = level.quadratic.ridge + (1.0 if flat else 0.0)
    for i in range(d):
        memory.gradient[i] = gradient_at(anchors, level.quadratic, i, slot)
    x, loss = round_.arms.units[arm], loss_at(anchors, level.quadratic, slot)
    if _is_far(loss, level) and _propose_anew(round_, x, point):
        return
    hessian = Curvature(memory.minimum_form, scale, shift)
    model = QuadraticModel(point, memory.gradient, hessian, level.low - loss)
    _step_from(round_, x, model, loss)
    cut = round_.arms.cut[arm]
    for k in range(d):
        memory.normal[k] = gradient_at(anchors, level.quadratic, k, cut)
    stop_at_cut(point, memory.trial, memory.normal, memory.cuts.offset[cut])


@kernel
def _is_enough(round_: Round, wanted: float) -> bool:
    """Whether the minimum's own polynomial is certain enough of the loss at the trial point."""
    problem, level, memory = round_.problem, round_.level, round_.memory
    error = error_at(problem.minimum, memory.trial, level.high, memory.dense)
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    if not doubt <= LEADING_SHARE * (level.low - level.center_loss):
        return False
    expand(problem.minimum, memory.trial, memory.dense, memory.normal, False)
    # dh/dB at the maximiser is 1/|grad F| times a cosine
    return doubt <= ERROR_SHARE * wanted * length(memory.normal)


@kernel
def _learn_from_model(round_: Round, model: Model, floor: float) -> None:
    """Bounds on the arms that matter from a model at the trial point, with its errors paid for."""
    level, memory = round_.level, round_.memory
    trial, gradient = memory.trial, memory.gradient
    loss = expand(model, trial, memory.dense, gradient, False)
    error = error_at(model, trial, loss, memory.dense)
    offset = level.high - loss + dot(gradient, trial)
    rounding = sum_rounding(level, loss, offset, error.trace)
    excess = error.value + rounding
    offset += excess + _dip(error.slope, round_.problem)
    _learn(round_, floor, loss + excess, offset, rounding)


@kernel
def _learn(round_: Round, floor: float, loss: float, offset: float, rounding: float) -> None:
    """Bounds from a cut and a point on all arms that may still be above a floor.

    The cut is ``<memory.gradient, theta> <= offset``; F is at most ``loss`` at ``memory.trial``.
    """
    arms, level, memory = round_.arms, round_.level, round_.memory
    d, gradient, point = memory.trial.shape[0], memory.gradient, memory.residual
    share = feasible_share(loss, level.center_loss, level.low - rounding)
    for k in range(d):
        point[k] = level.center[k] + share * (memory.trial[k] - level.center[k])
    norm = max(length(gradient), TINY)
    for k in range(arms.upper.shape[0]):
        x, size = arms.units[k], arms.lengths[k]
        if size == 0.0 or arms.upper[k] <= floor:
            continue
        lower_upper_bound(arms, k, cut_value(x, gradient, norm, offset, level.radius))
        lower = lower_bound(dot(x, point), size, level.radius, d)
        arms.lower[k] = max(arms.lower[k], lower)


@kernel
def new_anchor(state: RoundState, round_: Round, trace: float) -> None:
    """A pass has been made at the trial point: it becomes an anchor, and bounds the arms."""
    problem, arms, memory = round_.problem, round_.arms, round_.memory
    slot, answer = least_used(problem.use.last), memory.anchor_pass
    put_point(problem.anchors.carried, slot, memory.trial, answer.sums, answer.rest, trace)
    problem.use.free_looks[0] = 0.0
    arms.cut[state.arm], arms.feasible[state.arm] = slot, slot
    loss, offset, rounding = _cut_of(state, round_, slot)
    _learn(round_, _floor(state, round_), loss + rounding, offset, rounding)


@kernel
def anchor_at_minimum(state: RoundState, round_: Round) -> int:
    """The carried minimum becomes an anchor of first order as it is, without a pass; which."""
    slot, model = least_used(round_.problem.use.last), round_.problem.minimum
    minimum, count = model.objective.carried, 1 + model.point.shape[0]
    sums, rest = model.sums[:count], minimum.rest.reshape(count)
    put_point(round_.problem.anchors.carried, slot, model.point, sums, rest, minimum.trace[0])
    _cut_of(state, round_, slot)
    return slot


@kernel
def _cut_of(state: RoundState, round_: Round, slot: int) -> tuple[float, float, float]:
    """The cut of an anchor that is new: F there, the offset, what both pay for rounding.

    The gradient goes into the memory, and what later scans of this round read of the anchor is
    brought up to date, but for the products by which they choose.
    """
    level, memory, cuts = round_.level, round_.memory, round_.memory.cuts
    anchors, use, along = round_.problem.anchors.carried, round_.problem.use, 0.0
    for k in range(memory.gradient.shape[0]):
        use.shift[k, slot] = 0.0
        memory.gradient[k] = gradient_at(anchors, level.quadratic, k, slot)
        along += memory.gradient[k] * anchors.points[k, slot]
    use.excess[slot], use.last[slot] = 0.0, float(state.number)
    loss = loss_at(anchors, level.quadratic, slot)
    offset = level.high - loss + along
    rounding = sum_rounding(level, loss, offset, anchors.trace[slot])
    cuts.offset[slot] = offset + rounding
    cuts.inverse_norm[slot] = 1.0 / max(length(memory.gradient), TINY)
    cuts.share[slot] = feasible_share(loss + rounding, level.center_loss, level.low - rounding)
    return loss, offset + rounding, rounding
