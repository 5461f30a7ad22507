"""One look at the maximiser of an arm: where it is, and what it proves of all arms; compiled.

Where a polynomial of the loss is certain enough at the maximiser, its tangent there, with all of
its errors paid for, is a cut, and the point drawn back to the level is feasible. Else a pass over
the history is asked for, and the point becomes an anchor.
"""

from __future__ import annotations

from torchglb.backend import Floats, kernel
from torchglb.backend.dense import EPS, TINY, dot, length
from torchglb.backend.tridiagonal import reduce, tridiagonal_form
from torchglb.carried.kernels import put_point
from torchglb.carried.rounding import compensated
from torchglb.carried.taylor import error_at
from torchglb.ucb.growing import Settings
from torchglb.ucb.incremental.cutting_planes import (
    BLOCK,
    Arms,
    Level,
    gradient_at,
    loss_at,
    lower_bound,
    scan,
)
from torchglb.ucb.incremental.kkt import expand, maximise_on_model
from torchglb.ucb.incremental.round_state import (
    AnchorNotes,
    CarriedProblem,
    Memory,
    RoundState,
)
from torchglb.ucb.kernels import (
    Curvature,
    come_back,
    cut_rounding,
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
    arm, d = state.arm, memory.trial.shape[0]
    if arms.touch[arm] < 0:
        memory.chosen[0], memory.chosen[BLOCK] = arm, 1
        scan(arms, memory.chosen, problem.anchors, level, memory.cuts, memory.left)
    x, slot = arms.units[arm], arms.touch[arm]
    wanted = wanted / max(arms.lengths[arm], TINY)
    trial, point = memory.trial, memory.point
    before = arms.upper[arm] - arms.lower[arm]
    for k in range(d):
        point[k] = problem.anchors.points[k, slot]
    known = -1
    if problem.table.order > 2:
        if _look_by_anchor(problem, level, x, slot, wanted, memory):
            known = slot
    elif problem.minimum_constants.ratio == 0.0:
        _propose_from_minimum(problem, level, x, memory)
    else:
        if state.reduced == 0:
            _reduce_minimum(problem, memory)
            state.reduced = 1
        _propose_from_anchor(problem, arms, level, arm, slot, memory)
    if known < 0:
        if not _enough(problem, level, x, wanted, trial, memory):
            return True
        for k in range(d):
            point[k] = problem.minimum.points[k, 0]
    free = problem.notes.free
    if settings.value_tol >= COARSE and free[0] * ROWS_PER_LOOK >= problem.rows:
        return True
    free[0] += 1.0
    _learn_from_model(problem, arms, level, memory, floor, point, known)
    # the next look would start from the same anchor: what did not help now never will
    return not arms.upper[arm] - arms.lower[arm] <= ENOUGH * before


@kernel
def _look_by_anchor(
    problem: CarriedProblem,
    level: Level,
    x: Floats,
    slot: int,
    wanted: float,
    memory: Memory,
) -> bool:
    """The maximiser by the polynomial of an anchor, into ``memory.trial``; whether it is enough.

    Where the polynomial might be far from the truth, the point is that of a safer quadratic one.
    """
    d, table, anchors, notes = x.shape[0], problem.table, problem.anchors, problem.notes
    local, start, point, trial = memory.local, memory.start, memory.point, memory.trial
    for i in range(table.count):
        local[i] = anchors.sums[i, slot]
    for k in range(d):
        start[k] = point[k] + notes.shift[k, slot]
    goal = level.low - 2.0 * notes.excess[slot]  # a point can be proven feasible there
    solution = maximise_on_model(
        x,
        start,
        point,
        local,
        level.quadratic,
        goal,
        level.radius,
        table,
        memory.dense,
        memory.system,
        trial,
    )
    loss = expand(trial, point, local, level.quadratic, table, memory.dense, memory.gradient, False)
    p = memory.left
    for k in range(d):
        p[k] = trial[k] - point[k]
    error = error_at(
        p, loss, local, anchors.trace[slot], anchors.facts, problem.constants, table.order
    )
    sound = solution.found and error.value <= TRUST * (level.low - level.center_loss)
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    enough = sound and solution.multiplier * doubt <= MODEL_SHARE * wanted
    if solution.multiplier == 0.0:  # a pole must be feasible
        enough = enough and loss + error.value <= level.low
    if enough:
        if solution.multiplier > 0.0:  # the next look starts from here
            for k in range(d):
                notes.shift[k, slot] = p[k]
            notes.excess[slot] = error.value
        return True
    if not sound:
        loss = expand(
            start, point, local, level.quadratic, table, memory.dense, memory.gradient, True
        )
        if not (_is_far(loss, level) and _propose_anew(problem, level, x, start, memory)):
            loss = expand(
                start, point, local, level.quadratic, table, memory.dense, memory.gradient, True
            )
            tridiagonal_form(memory.dense.hessian, memory.form, memory.step[0])
            _step_from(x, start, loss, Curvature(memory.form, 1.0, 0.0), goal, level, memory)
    return False


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
    hessian: Curvature,
    goal: float,
    level: Level,
    memory: Memory,
) -> None:
    """An SQP step from a point whose gradient is in the memory; back from far outside."""
    trial = memory.trial
    if _is_far(loss, level):
        come_back(start, memory.gradient, loss, level.center, level.center_loss, level.low, trial)
        return
    room = goal - loss
    sqp_point(x, start, memory.gradient, hessian, room, level.radius, memory.step, trial)


@kernel
def _propose_from_minimum(problem: CarriedProblem, level: Level, x: Floats, memory: Memory) -> None:
    """The maximiser where the loss is its own polynomial, as for Gaussian rewards."""
    carried, table, point = problem.minimum, problem.minimum_table, memory.normal
    sums, start = carried.sums.reshape(table.count), memory.left
    for k in range(x.shape[0]):
        point[k] = carried.points[k, 0]
        start[k] = level.center[k]
    loss = expand(start, point, sums, level.quadratic, table, memory.dense, memory.gradient, True)
    tridiagonal_form(memory.dense.hessian, memory.form, memory.step[0])
    _step_from(x, start, loss, Curvature(memory.form, 1.0, 0.0), level.low, level, memory)


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
    loss = loss_at(anchors, level.quadratic, slot)
    if _is_far(loss, level):
        if _propose_anew(problem, level, arms.units[arm], memory.point, memory):
            return
        for i in range(d):
            memory.gradient[i] = gradient_at(anchors, level.quadratic, i, slot)
    hessian = Curvature(memory.minimum_form, scale, shift)
    _step_from(arms.units[arm], memory.point, loss, hessian, level.low, level, memory)
    cut = arms.cut[arm]
    for k in range(d):
        memory.normal[k] = gradient_at(anchors, level.quadratic, k, cut)
    stop_at_cut(memory.point, memory.trial, memory.normal, memory.cuts.offset[cut])


@kernel
def _enough(
    problem: CarriedProblem, level: Level, x: Floats, wanted: float, trial: Floats, memory: Memory
) -> bool:
    """Whether the minimum's own polynomial is certain enough of the loss at the trial point."""
    carried, table, p = problem.minimum, problem.minimum_table, memory.left
    for k in range(p.shape[0]):
        p[k] = trial[k] - carried.points[k, 0]
    sums = carried.sums.reshape(table.count)
    error = error_at(
        p,
        level.high,
        sums,
        carried.trace[0],
        carried.facts,
        problem.minimum_constants,
        table.order,
    )
    doubt = 4.0 * error.value + _dip(error.slope, problem)
    if not doubt <= TRUST * (level.low - level.center_loss):
        return False
    for k in range(p.shape[0]):
        memory.start[k] = carried.points[k, 0]
    expand(trial, memory.start, sums, level.quadratic, table, memory.dense, memory.normal, False)
    steep = length(memory.normal)
    # dh/dB at the maximiser is 1/|grad F| times a cosine
    return doubt <= MODEL_SHARE * wanted * steep


@kernel
def _learn_from_model(
    problem: CarriedProblem,
    arms: Arms,
    level: Level,
    memory: Memory,
    floor: float,
    point: Floats,
    slot: int,
) -> None:
    """Bounds on the arms that matter from the polynomial at a point, with its errors paid for.

    The polynomial is that of an anchor, or of the minimum if ``slot`` is negative.
    """
    trial, p, gradient = memory.trial, memory.left, memory.gradient
    for k in range(p.shape[0]):
        p[k] = trial[k] - point[k]
    if slot >= 0:
        carried, table, constants = problem.anchors, problem.table, problem.constants
        sums, trace = memory.local, carried.trace[slot]
        loss = expand(trial, point, sums, level.quadratic, table, memory.dense, gradient, False)
        error = error_at(p, loss, sums, trace, carried.facts, constants, table.order)
    else:
        least, order = problem.minimum, problem.minimum_table
        totals = least.sums.reshape(order.count)
        loss = expand(trial, point, totals, level.quadratic, order, memory.dense, gradient, False)
        error = error_at(
            p,
            loss,
            totals,
            least.trace[0],
            least.facts,
            problem.minimum_constants,
            order.order,
        )
    offset = level.high - loss + dot(gradient, trial)
    trace = error.trace + p.shape[0] * abs(level.quadratic.ridge)
    rounding = compensated(p.shape[0]) * cut_rounding(
        level.high, loss, offset, trace, level.size, level.radius
    )
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
    bend = anchors.trace[slot] + d * abs(level.quadratic.ridge)
    rounding = compensated(d) * cut_rounding(
        level.high, loss, offset, bend, level.size, level.radius
    )
    cuts.offset[slot] = offset + rounding
    cuts.steep[slot] = 1.0 / max(length(memory.gradient), TINY)
    cuts.share[slot] = feasible_share(loss + rounding, level.center_loss, level.low - rounding)
    return loss, offset + rounding, rounding
