"""The norm-constrained estimate in compiled code: Newton's method on the ball, problem by problem.

Every step minimises the quadratic model on the ball, then searches the segment towards that
minimiser, which stays feasible. It stops by the Frank-Wolfe gap. The mathematics is that of
:mod:`torchglb.optim.newton`, the torch version for devices and for families without compiled
derivatives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, inlined, kernel
from torchglb.backend.dense import (
    EPS,
    TINY,
    cholesky,
    copy_vector,
    dot,
    frank_wolfe_gap,
    length,
    matrix_trace,
    minimize_on_ball,
    solve_factored,
)
from torchglb.carried.kernels import LossRows, Workspace, sum_rows
from torchglb.carried.monomials import Monomials
from torchglb.carried.taylor import hessian_at
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, SCRATCH

#: the statuses of :class:`torchglb.optim.Status`
CONVERGED, MAX_STEPS, NONFINITE, INFEASIBLE, INACCURATE = range(5)
RUNNING = -1
#: sufficient decrease, as a share of the decrease that the slope predicts
ARMIJO = 1e-4
#: a segment shorter than this share of the full step counts as stuck
SHORTEST = 1e-10
#: steps without effect, in a row, that count as stuck
PATIENCE = 3
#: a squared pivot of this share of the largest is rounding
PIVOT = 256.0 * EPS
#: curvature that a singular Hessian is given, next to its trace: steps stay short where it is flat
PROXIMAL = 1e-12


# ---- the loss of one problem -------------------------------------------------------------------


class RowLoss(NamedTuple):
    """``sum_s (w_s m(<x_s, theta>) - y_s <x_s, theta>)/g + (lambda/2)|theta|^2 - <tilt, theta>``.

    Attributes:
        family: m and g.
        X: features, ``(d, capacity)``.
        w: weights, ``(n,)``; ``(0,)`` if all are 1.
        y: weights times rewards, ``(n,)``.
        ridge: lambda.
        tilt: ``(d,)``.
    """

    family: CompiledFamily
    X: Floats
    w: Floats
    y: Floats
    ridge: float
    tilt: Floats


class PointExpansion(NamedTuple):
    """Where a loss is evaluated, and its derivatives there: ``(d,)``, ``(d,)``, ``(d, d)``."""

    theta: Floats
    gradient: Floats
    hessian: Floats


@inlined
def new_point(dim: int) -> PointExpansion:
    """Memory for a point."""
    return PointExpansion(np.zeros(dim), np.zeros(dim), np.zeros((dim, dim)))


@kernel
def copy_point(source: PointExpansion, target: PointExpansion) -> None:
    """Writes one point over another."""
    copy_vector(source.theta, target.theta)
    copy_vector(source.gradient, target.gradient)
    for i in range(source.theta.shape[0]):
        copy_vector(source.hessian[i], target.hessian[i])


@inlined
def pass_table(dim: int) -> Monomials:
    """What a pass with the Hessian reads of a table of monomials."""
    count = 1 + dim + dim * (dim + 1) // 2
    none, empty = np.empty(0, np.int64), np.empty((0, 0), np.int64)
    cube = np.empty((0, 0, 0), np.int64)
    return Monomials(dim, 2, count, none, none, none, none, np.empty(0), empty, cube)


@inlined
def pass_memory(dim: int) -> Workspace:
    """For passes with the Hessian or without."""
    count = 1 + dim + dim * (dim + 1) // 2
    one, sums, rest = np.zeros((1, CHUNK)), np.zeros(count), np.zeros(1 + dim)
    return Workspace(np.zeros(SCRATCH), one, sums, rest, np.zeros(dim))


@kernel
def expand(loss: RowLoss, table: Monomials, work: Workspace, at: PointExpansion) -> float:
    """The loss at ``at.theta``, with its derivatives there: one pass."""
    rows, theta = LossRows(loss.X, loss.w, loss.y), at.theta
    sum_rows(loss.family, rows, loss.y.shape[0], theta, table, work)
    sums = work.sums
    hessian_at(sums, 1.0, at.hessian)
    for i in range(theta.shape[0]):
        at.gradient[i] = sums[1 + i] + loss.ridge * theta[i] - loss.tilt[i]
        at.hessian[i, i] += loss.ridge
    return sums[0] + 0.5 * loss.ridge * dot(theta, theta) - dot(loss.tilt, theta)


# ---- Newton's method on the ball ---------------------------------------------------------------


class NewtonMemory(NamedTuple):
    """Of a minimisation.

    Attributes:
        here: where it stands.
        trial: the point to try.
        target: the minimiser of the model on the ball.
        step: the last step.
        change: of the gradient over it.
        model: a Hessian with more curvature.
        factor: of Cholesky.
        b: a vector.
        u: a vector.
    """

    here: PointExpansion
    trial: PointExpansion
    target: Floats
    step: Floats
    change: Floats
    model: Floats
    factor: Floats
    b: Floats
    u: Floats


class Outcome(NamedTuple):
    """Of a minimisation: the loss, its gap, a status, evaluations after the first."""

    loss: float
    gap: float
    status: int
    num_steps: int


@inlined
def new_memory(dim: int) -> NewtonMemory:
    """For minimisations of this dimension."""
    return NewtonMemory(
        new_point(dim),
        new_point(dim),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros((dim, dim)),
        np.zeros((dim, dim)),
        np.zeros(dim),
        np.zeros(dim),
    )


@kernel
def minimize(
    loss: RowLoss,
    radius: float,
    tol: float,
    max_steps: int,
    table: Monomials,
    memory: NewtonMemory,
    work: Workspace,
) -> Outcome:
    """Minimises over the ball from ``memory.here.theta``, and leaves the last point there.

    Args:
        loss: the problem.
        radius: S.
        tol: stop when ``gap <= tol (1 + |loss|)``.
        max_steps: limit on evaluations after the first.
        table: of :func:`pass_table`.
        memory: of :func:`new_memory`.
        work: of :func:`pass_memory`.
    """
    here, trial = memory.here, memory.trial
    d = here.theta.shape[0]
    copy_vector(here.theta, trial.theta)
    value, gap, least = math.nan, math.inf, math.inf
    slope, share, stalled, steps = 0.0, 1.0, 0, -1
    while True:
        found = expand(loss, table, work, trial)
        steps += 1
        noise = 8.0 * EPS * (1.0 + abs(value))
        if steps == 0 or found <= value + ARMIJO * slope + noise:
            value, share = found, 1.0
            gap = frank_wolfe_gap(trial.theta, trial.gradient, radius)
            # at the limit of the arithmetic a step lowers neither the value nor the gap
            stalled = stalled + 1 if abs(slope) <= noise and gap > 0.8 * least else 0
            least = min(least, gap)
            if steps == 0:
                copy_vector(trial.gradient, here.gradient)
            for i in range(d):
                memory.step[i] = trial.theta[i] - here.theta[i]
                memory.change[i] = trial.gradient[i] - here.gradient[i]
            copy_point(trial, here)
            status = status_at(value, gap, tol, stalled)
            if status == RUNNING:
                model_minimum(here, radius, memory)
        else:
            share *= _shorter(found - value - slope, slope)
            status = INACCURATE if share < SHORTEST else RUNNING
        if status == RUNNING and steps >= max_steps:
            status = MAX_STEPS
        if status != RUNNING:
            return Outcome(value, gap, status, steps)
        slope = _towards(here, memory.target, share, trial.theta)


@kernel
def status_at(value: float, gap: float, tol: float, stalled: int) -> int:
    """Of a point that a minimisation has come to."""
    if not abs(value + gap) < math.inf:
        return NONFINITE
    if gap <= tol * (1.0 + abs(value)):
        return CONVERGED
    return INACCURATE if stalled >= PATIENCE else RUNNING


@kernel
def _towards(here: PointExpansion, target: Floats, share: float, trial: Floats) -> float:
    """Writes the point at a share of the segment to the target; its slope times its length."""
    slope = 0.0
    for i in range(trial.shape[0]):
        step = target[i] - here.theta[i]
        slope += here.gradient[i] * step
        trial[i] = target[i] if share == 1.0 else here.theta[i] + share * step
    return share * slope


@kernel
def _shorter(excess: float, slope: float) -> float:
    """After a refusal: the minimum of the parabola through what is known, within [.1, .5]."""
    if not 0.0 < excess < math.inf:
        return 0.1
    return min(max(-0.5 * slope / excess, 0.1), 0.5)


@kernel
def model_minimum(here: PointExpansion, radius: float, memory: NewtonMemory) -> None:
    """The minimiser of the quadratic model on the ball, into ``memory.target``.

    Inside the ball the step looks back: ``-H^-1 (g - t^2 y) - t^2 s`` with the last step s and the
    change y of the gradient over it, Chebyshev's step (:mod:`torchglb.optim.newton`).
    """
    model, target, b, u = here.hessian, memory.target, memory.b, memory.u
    solvable = regular_cholesky(model, memory.factor)
    if not solvable:
        model = memory.model
        lift(here.hessian, model)
        solvable = cholesky(model, 0.0, memory.factor)
    if solvable:
        back = look_back(here, memory.step)
        for i in range(b.shape[0]):
            b[i] = back * memory.change[i] - here.gradient[i]
        solve_factored(memory.factor, b, u)
        slope = 0.0
        for i in range(b.shape[0]):
            target[i] = here.theta[i] + u[i] - back * memory.step[i]
            slope += here.gradient[i] * (target[i] - here.theta[i])
        # what a long last step has shown may lead upwards: then Newton's own step is taken
        if length(target) <= radius and (back == 0.0 or slope < 0.0):
            return
    minimize_on_ball(model, here.gradient, here.theta, radius, memory.factor, b, u, target)


@kernel
def lift(matrix: Floats, lifted: Floats) -> None:
    """The matrix with a little more curvature: steps stay short in directions that have none."""
    trace = matrix_trace(matrix)
    for i in range(matrix.shape[0]):
        copy_vector(matrix[i], lifted[i])
        lifted[i, i] += PROXIMAL * trace + TINY


@kernel
def regular_cholesky(matrix: Floats, factor: Floats) -> bool:
    """The lower factor; False where its least pivot is not more than rounding of the largest."""
    if not cholesky(matrix, 0.0, factor):
        return False
    low, high = math.inf, 0.0
    for i in range(matrix.shape[0]):
        low, high = min(low, factor[i, i]), max(high, factor[i, i])
    return low * low > PIVOT * high * high


@kernel
def look_back(here: PointExpansion, step: Floats) -> float:
    """``t^2`` for the share ``t = <g, s>/<s, H s>`` of the last step s; 0 unless steps shrink."""
    d, along, bend = step.shape[0], 0.0, 0.0
    for i in range(d):
        along += here.gradient[i] * step[i]
        for j in range(d):
            bend += step[i] * here.hessian[i, j] * step[j]
    if not bend > 0.0:
        return 0.0
    square = (along / bend) * (along / bend)
    return square if square <= 0.25 else 0.0
