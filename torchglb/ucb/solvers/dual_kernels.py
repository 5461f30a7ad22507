"""The dual search of one arm in compiled code, for arms that quadratic models mislead."""

from __future__ import annotations

import math

from torchglb.backend import kernel
from torchglb.backend.dense import copy_vector, dot
from torchglb.mle_kernels import INACCURATE, MAX_STEPS, RowLoss, minimize
from torchglb.ucb.solvers.search_kernels import (
    ArmBounds,
    LevelSet,
    SearchMemory,
    arm_status,
    evaluate,
    raise_lower,
    segment,
    tighten_upper,
)

#: a search that has not narrowed its gap for so many multipliers is given up
DUAL_PATIENCE = 12
#: how many are tried at all
MAX_MULTIPLIERS = 80
#: until a maximiser lies outside the set, multipliers fall by this factor
FALL = 8.0
#: of the estimates, as of any
ESTIMATE_TOL, ESTIMATE_STEPS = 1e-9, 200


@kernel
def search_dual(arms: ArmBounds, k: int, level: LevelSet, tol: float, memory: SearchMemory) -> None:
    """Closes the gap of one arm by its dual (:mod:`torchglb.ucb.solvers.dual_search`).

    For a multiplier ``lambda > 0`` of the loss ``lambda B + max <x, theta> - lambda F(theta)`` over
    the ball is at least h(x), with equality at the best one; the maximiser is an estimate with a
    tilt of ``x/lambda``. The chord between one inside the set and one outside tells the next.
    """
    x, loss, here = arms.units[k], level.loss, memory.estimate.here
    inner, outer, d = memory.inner, memory.outer, arms.units.shape[1]
    copy_vector(level.center, inner)
    copy_vector(level.center, outer)
    copy_vector(level.center, here.theta)
    inner_loss, outer_loss = level.center_loss, math.inf
    errors, stalled = level.center_error, 0
    room = level.level - inner_loss
    multiplier = (arms.upper[k] - dot(x, inner)) / room if room > 0.0 else 1.0
    if not 0.0 < multiplier < math.inf:
        multiplier = 1.0
    arms.status[k] = MAX_STEPS
    for _ in range(MAX_MULTIPLIERS):
        for i in range(d):
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
        gap = arms.upper[k] - arms.lower[k]
        found = evaluate(level, memory, False)
        value = found.loss
        tighten_upper(arms, k, memory.at, found, level)
        errors = max(errors, found.loss_error)
        if value + 2.0 * errors <= level.level:
            copy_vector(here.theta, inner)
            inner_loss = value
        else:
            copy_vector(here.theta, outer)
            outer_loss = value
        line = segment(inner, inner_loss, outer, outer_loss, 2.0 * errors, level.level)
        if inner_loss + 2.0 * errors <= level.level:
            raise_lower(arms, k, line, level.radius)
        stalled = 0 if arms.upper[k] - arms.lower[k] < 0.9 * gap else stalled + 1
        status = arm_status(arms, k, tol, stalled, True)
        if status == MAX_STEPS and stalled > DUAL_PATIENCE:
            status = INACCURATE
        arms.status[k] = status
        if status != MAX_STEPS:
            return
        slope = (dot(x, outer) - dot(x, inner)) / (outer_loss - inner_loss)
        multiplier = slope if slope > 0.0 else multiplier / FALL
