"""One look at the maximiser of an arm: where it is, and what it proves of all arms; compiled.

Where a polynomial of the loss is certain enough at the maximiser, its tangent there, with all of
its errors paid for, is a cut, and the point drawn back to the level is feasible. Else a pass over
the history is asked for, and the point becomes an anchor.
"""

from __future__ import annotations

from typing import NamedTuple

from torchglb.backend import Floats, inlined, kernel
from torchglb.backend.dense import EPS, TINY, dot, length
from torchglb.backend.tridiagonal import reduce, tridiagonal_form
from torchglb.carried.kernels import put_point
from torchglb.carried.monomials import Monomials
from torchglb.carried.taylor import Constants, Error, error_at
from torchglb.ucb.incremental.cutting_planes import (
    BLOCK,
    Arms,
    Level,
    gradient_at,
    loss_at,
    lower_bound,
    scan,
    sum_rounding,
)
from torchglb.ucb.incremental.kkt import expand, maximise_on_model
from torchglb.ucb.incremental.round_state import (
    AnchorNotes,
    CarriedProblem,
    Memory,
    RoundState,
    Settings,
)
from torchglb.ucb.kernels import (
    Curvature,
    come_back,
    cut_value,
    feasible_share,
    sqp_point,
    stop_at_cut,
)

#: a model may err by this share of what is still to be found out
MODEL_SHARE = 0.25
#: a model may err by this share of the level's height over the minimum, where it leads the way
TRUST = 0.1
#: a look without a pass costs as much as a pass over so many rows: where such looks have cost as
#: much as a pass since the last one, a pass is made, whose anchor spares later rounds their looks
ROWS_PER_LOOK = 250.0
#: values that are wanted more closely than this need a look in every round, whatever the anchors
COARSE = 1e-3
#: points this close, relative to their distance from the centre, are the same
NEARBY = 1e-2
#: a look without a pass has helped if it leaves at most this share of an arm's gap
ENOUGH = 0.5


class Model(NamedTuple):
    """The polynomial of the loss of the data at a point.

    Attributes:
        point: ``(d,)``.
        sums: its derivatives, ``(count,)``.
        trace: of the Hessian.
        facts: of :class:`torchglb.carried.kernels.Carried`.
        table: its monomials.
        constants: what bounds its remainder.
    """

    point: Floats
    sums: Floats
    trace: float
    facts: Floats
    table: Monomials
    constants: Constants


@inlined
def model_at_minimum(problem: CarriedProblem) -> Model:
    """That of the carried minimum."""
    carried, table = problem.minimum, problem.minimum_table
    point, sums = carried.points.reshape(table.dim), carried.sums.reshape(table.count)
    constants = problem.minimum_constants
    return Model(point, sums, carried.trace[0], carried.facts, table, constants)


@inlined
def _model_at_anchor(problem: CarriedProblem, slot: int, memory: Memory) -> Model:
    """That of an anchor, copied into the memory."""
    anchors, table = problem.anchors, problem.table
    for i in range(table.count):
        memory.local[i] = anchors.sums[i, slot]
    for k in range(table.dim):
        memory.point[k] = anchors.points[k, slot]
    trace, facts = anchors.trace[slot], anchors.facts
    return Model(memory.point, memory.local, trace, facts, table, problem.constants)


@kernel
def model_value(
    model: Model, theta: Floats, level: Level, memory: Memory, gradient: Floats, bent: bool
) -> float:
    """F at theta; its gradient, and, if ``bent``, its Hessian into the memory."""
    point, sums, table = model.point, model.sums, model.table
    return expand(theta, point, sums, level.quadratic, table, memory.dense, gradient, bent)


@kernel
def _model_error(model: Model, theta: Floats, loss: float, p: Floats) -> Error:
    """How far the model may be from F at theta, which is about ``loss``; p has their distance."""
    for k in range(p.shape[0]):
        p[k] = theta[k] - model.point[k]
    order = model.table.order
    return error_at(p, loss, model.sums, model.trace, model.facts, model.constants, order)


@kernel
def look(
    state: RoundState,
    problem: CarriedProblem,
    arms: Arms,
    level: Level,
    settings: Settings,
    wanted: float,
    floor: float,
    memory: Memory,
) -> bool:
    """Looks at the maximiser of one arm; whether a pass at ``memory.trial`` is needed.

    Arms whose upper bounds are below the floor do not matter any more.
    """
    arm = state.arm
    if arms.touch[arm] < 0:
        memory.chosen[0], memory.chosen[BLOCK] = arm, 1
        scan(arms, memory.chosen, problem.anchors, level, memory.cuts, memory.left)
    x, slot = arms.units[arm], arms.touch[arm]
    wanted = wanted / max(arms.lengths[arm], TINY)
    before = arms.upper[arm] - arms.lower[arm]
    model, enough = _model_at_anchor(problem, slot, memory), False
    if state.reduced == 0:
        _reduce_minimum(problem, memory)
        state.reduced = 1
    if model.table.order > 2:
        enough = _look_by_anchor(problem, model, level, x, slot, wanted, memory)
    elif problem.minimum_constants.ratio == 0.0:
        _propose_from_minimum(problem, level, x, memory)
    else:
        _propose_from_anchor(problem, arms, level, arm, slot, memory)
    if not enough:
        model = model_at_minimum(problem)
        if not _is_enough(problem, model, level, wanted, memory):
            return True
    free = problem.notes.free
    if settings.value_tol >= COARSE and free[0] * ROWS_PER_LOOK >= problem.rows:
        return True
    free[0] += 1.0
    _learn_from_model(problem, model, arms, level, memory, floor)
    # the next look would start from the same anchor: what did not help now never will
    return not arms.upper[arm] - arms.lower[arm] <= ENOUGH * before


@kernel
def _look_by_anchor(
    problem: CarriedProblem,
    model: Model,
    level: Level,
    x: Floats,
    slot: int,
    wanted: float,
    memory: Memory,
) -> bool:
    """The maximiser by the polynomial of an anchor, into ``memory.trial``; whether it is enough.

    Where the polynomial might be far from the truth, the point is that of a safer quadratic one.
    """
    d, notes, start, trial = x.shape[0], problem.notes, memory.start, memory.trial
    for k in range(d):
        start[k] = model.point[k] + notes.shift[k, slot]
    goal = level.low - 2.0 * notes.excess[slot]  # a point can be proven feasible there
    solution = maximise_on_model(
        x,
        start,
        model.point,
        model.sums,
        level.quadratic,
        goal,
        level.radius,
        model.table,
        memory.dense,
        memory.system,
        trial,
    )
    p, gradient = memory.left, memory.gradient
    loss = model_value(model, trial, level, memory, gradient, False)
    error = _model_error(model, trial, loss, p)
    sound = solution.found and error.value <= TRUST * (level.low - level.center_loss)
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    enough = sound and solution.multiplier * doubt <= MODEL_SHARE * wanted
    if solution.multiplier == 0.0:  # a pole must be feasible
        enough = enough and loss + error.value <= level.low
    if enough and solution.multiplier > 0.0:  # the next look starts from here
        for k in range(d):
            notes.shift[k, slot] = p[k]
        notes.excess[slot] = error.value
    if not sound:
        far = _is_far(model_value(model, start, level, memory, gradient, False), level)
        if not (far and _propose_anew(problem, level, x, start, memory)):
            loss = model_value(model, start, level, memory, gradient, True)
            tridiagonal_form(memory.dense.hessian, memory.form, memory.step[0])
            hessian = Curvature(memory.form, 1.0, 0.0)
            _step_from(x, start, loss, gradient, hessian, goal, level, memory)
    return enough


@kernel
def _dip(slope_error: float, problem: CarriedProblem) -> float:
    """How much lower than its computed tangent the loss may be because of the slope's error.

    A slope that errs by e in the dual norm of the Hessian puts a point at a distance delta in its
    norm lower by e delta, but the curvature puts it ``delta^2 / (2 + 2 R S D)`` higher, D the
    longest row: never lower than by ``e^2 (1 + R S D)/2``.
    """
    constants = problem.constants
    stiff = constants.concordance * problem.anchors.facts[0] * constants.radius
    return 0.5 * slope_error * slope_error * (1.0 + stiff)


@kernel
def _is_far(loss: float, level: Level) -> bool:
    """Whether a point is so far outside the set that a model made there says little of it."""
    return loss - level.high > level.high - level.center_loss


@kernel
def _propose_anew(
    problem: CarriedProblem, level: Level, x: Floats, start: Floats, memory: Memory
) -> bool:
    """The maximiser as the carried minimum has it, instead of a far point; False if that is it."""
    trial, off, away = memory.trial, 0.0, 0.0
    _propose_from_minimum(problem, level, x, memory)
    for k in range(x.shape[0]):
        off += (trial[k] - start[k]) * (trial[k] - start[k])
        away += (trial[k] - level.center[k]) * (trial[k] - level.center[k])
    return off > NEARBY * NEARBY * away


@kernel
def _step_from(
    x: Floats,
    start: Floats,
    loss: float,
    gradient: Floats,
    hessian: Curvature,
    goal: float,
    level: Level,
    memory: Memory,
) -> None:
    """An SQP step from a point, into ``memory.trial``; back from far outside."""
    trial, center, radius = memory.trial, level.center, level.radius
    if _is_far(loss, level):
        come_back(start, gradient, loss, center, level.center_loss, level.low, trial)
    else:
        sqp_point(x, start, gradient, hessian, goal - loss, radius, memory.step, trial)


@kernel
def _propose_from_minimum(problem: CarriedProblem, level: Level, x: Floats, memory: Memory) -> None:
    """The maximiser where the loss is its own polynomial, as for Gaussian rewards."""
    start, slope = level.center, memory.normal
    loss = model_value(model_at_minimum(problem), start, level, memory, slope, False)
    hessian = Curvature(memory.minimum_form, 1.0, level.quadratic.ridge)
    _step_from(x, start, loss, slope, hessian, level.low, level, memory)


@kernel
def _reduce_minimum(problem: CarriedProblem, memory: Memory) -> None:
    """The Hessian of the data at the carried minimum in tridiagonal form, for all looks."""
    form, d = memory.minimum_form, memory.trial.shape[0]
    place = 1 + d
    for i in range(d):
        for j in range(i, d):
            entry = problem.minimum.sums[place, 0]
            form.reflections[i, j] = form.reflections[j, i] = entry
            place += 1
    reduce(form, memory.step[0])


@kernel
def _propose_from_anchor(
    problem: CarriedProblem, arms: Arms, level: Level, arm: int, slot: int, memory: Memory
) -> None:
    """An SQP step from an anchor, with the minimum's Hessian scaled to the trace of the anchor's.

    A Hessian of its own for every anchor would need as many looks.
    """
    d, anchors, carried = memory.trial.shape[0], problem.anchors, problem.minimum
    flat = not (anchors.trace[slot] > 0.0 and carried.trace[0] > 0.0)
    scale = 1.0 if flat else anchors.trace[slot] / carried.trace[0]
    shift = level.quadratic.ridge + (1.0 if flat else 0.0)
    for i in range(d):
        memory.gradient[i] = gradient_at(anchors, level.quadratic, i, slot)
    x, loss = arms.units[arm], loss_at(anchors, level.quadratic, slot)
    if _is_far(loss, level) and _propose_anew(problem, level, x, memory.point, memory):
        return
    hessian = Curvature(memory.minimum_form, scale, shift)
    _step_from(x, memory.point, loss, memory.gradient, hessian, level.low, level, memory)
    cut = arms.cut[arm]
    for k in range(d):
        memory.normal[k] = gradient_at(anchors, level.quadratic, k, cut)
    stop_at_cut(memory.point, memory.trial, memory.normal, memory.cuts.offset[cut])


@kernel
def _is_enough(
    problem: CarriedProblem, model: Model, level: Level, wanted: float, memory: Memory
) -> bool:
    """Whether the minimum's own polynomial is certain enough of the loss at the trial point."""
    error = _model_error(model, memory.trial, level.high, memory.left)
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    if not doubt <= TRUST * (level.low - level.center_loss):
        return False
    model_value(model, memory.trial, level, memory, memory.normal, False)
    # dh/dB at the maximiser is 1/|grad F| times a cosine
    return doubt <= MODEL_SHARE * wanted * length(memory.normal)


@kernel
def _learn_from_model(
    problem: CarriedProblem, model: Model, arms: Arms, level: Level, memory: Memory, floor: float
) -> None:
    """Bounds on the arms that matter from a model at the trial point, with its errors paid for."""
    trial, gradient = memory.trial, memory.gradient
    loss = model_value(model, trial, level, memory, gradient, False)
    error = _model_error(model, trial, loss, memory.left)
    offset = level.high - loss + dot(gradient, trial)
    rounding = sum_rounding(level, loss, offset, error.trace)
    excess = error.value + rounding
    offset += excess + _dip(error.slope, problem)
    _learn(arms, level, memory, floor, loss + excess, offset, rounding)


@kernel
def _learn(
    arms: Arms,
    level: Level,
    memory: Memory,
    floor: float,
    loss: float,
    offset: float,
    rounding: float,
) -> None:
    """Bounds from a cut and a point on all arms that may still be above a floor.

    F is at most ``loss`` at ``memory.trial``.
    """
    d, gradient, point = memory.trial.shape[0], memory.gradient, memory.left
    share = feasible_share(loss, level.center_loss, level.low - rounding)
    for k in range(d):
        point[k] = level.center[k] + share * (memory.trial[k] - level.center[k])
    steep = max(length(gradient), TINY)
    for k in range(arms.upper.shape[0]):
        x, size = arms.units[k], arms.lengths[k]
        if size == 0.0 or arms.upper[k] <= floor:
            continue
        bound = cut_value(x, gradient, steep, offset, level.radius)
        if size * bound < arms.upper[k]:
            arms.upper[k] = size * bound + 4.0 * EPS * size * abs(bound)
        lower = lower_bound(dot(x, point), size, level.radius, d)
        arms.lower[k] = max(arms.lower[k], lower)


@kernel
def new_anchor(
    state: RoundState,
    problem: CarriedProblem,
    arms: Arms,
    level: Level,
    trace: float,
    floor: float,
    memory: Memory,
) -> None:
    """A pass has been made at the trial point: it becomes an anchor, and bounds the arms."""
    slot, answer = least_used(problem.notes), memory.anchor_pass
    put_point(problem.anchors, slot, memory.trial, answer.sums, answer.rest, trace)
    problem.notes.free[0] = 0.0
    arms.cut[state.arm], arms.touch[state.arm] = slot, slot
    loss, offset, rounding = _cut_of(state, problem, level, slot, memory)
    _learn(arms, level, memory, floor, loss + rounding, offset, rounding)


@kernel
def anchor_at_minimum(
    state: RoundState, problem: CarriedProblem, level: Level, memory: Memory
) -> int:
    """The carried minimum becomes an anchor of first order as it is, without a pass; which."""
    anchors, minimum, slot = problem.anchors, problem.minimum, least_used(problem.notes)
    for i in range(1 + memory.trial.shape[0]):
        anchors.sums[i, slot] = minimum.sums[i, 0]
        anchors.rest[i, slot] = minimum.rest[i, 0]
    for k in range(memory.trial.shape[0]):
        anchors.points[k, slot] = minimum.points[k, 0]
    anchors.trace[slot] = minimum.trace[0]
    _cut_of(state, problem, level, slot, memory)
    return slot


@kernel
def least_used(notes: AnchorNotes) -> int:
    """The anchor that has not bounded an arm for the longest time."""
    slot = 0
    for a in range(1, notes.used.shape[0]):
        if notes.used[a] < notes.used[slot]:
            slot = a
    return slot


@kernel
def _cut_of(
    state: RoundState, problem: CarriedProblem, level: Level, slot: int, memory: Memory
) -> tuple[float, float, float]:
    """The cut of an anchor that is new: F there, the offset, what both pay for rounding.

    The gradient goes into the memory, and what later scans of this round read of the anchor is
    brought up to date, but for the products by which they choose.
    """
    anchors, notes, cuts = problem.anchors, problem.notes, memory.cuts
    d, along = memory.gradient.shape[0], 0.0
    for k in range(d):
        notes.shift[k, slot] = 0.0
        memory.gradient[k] = gradient_at(anchors, level.quadratic, k, slot)
        along += memory.gradient[k] * anchors.points[k, slot]
    notes.excess[slot], notes.used[slot] = 0.0, float(state.number)
    loss = loss_at(anchors, level.quadratic, slot)
    offset = level.high - loss + along
    rounding = sum_rounding(level, loss, offset, anchors.trace[slot])
    cuts.offset[slot] = offset + rounding
    cuts.steep[slot] = 1.0 / max(length(memory.gradient), TINY)
    cuts.share[slot] = feasible_share(loss + rounding, level.center_loss, level.low - rounding)
    return loss, offset + rounding, rounding
