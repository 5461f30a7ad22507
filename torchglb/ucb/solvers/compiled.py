"""The optimistic program on a CPU, for families with compiled derivatives: problem by problem."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, Ints, bound_once, entry, kernel, record, vectorised
from torchglb.backend.dense import EPS, copy_vector, dot, frank_wolfe_gap, length, matrix_trace
from torchglb.backend.tridiagonal import tridiagonal_form
from torchglb.carried.kernels import LossRows
from torchglb.compiled_rows import RADIUS, RIDGE, TILT, array, blocks, per_problem
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK
from torchglb.mle.newton import (
    INACCURATE,
    INFEASIBLE,
    NONFINITE,
    RUNNING,
    RowLoss,
    copy_point,
    expand,
    minimize,
    new_point,
)
from torchglb.rounding import round_up
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.search_kernels import (
    ARM,
    ESTIMATE_STEPS,
    ESTIMATE_TOL,
    ArmSearch,
    ArmState,
    Evaluated,
    LevelSet,
    SearchMemory,
    evaluated,
    learn,
    search_arm,
    search_dual,
    search_memory,
    weight_of_cut,
)

#: a centre is sought to this first, and good enough if it may lie above the minimum by this share
#: of the room that is left below the level
ROUGH_TOL, ROUGH_SHARE = 1e-4, 1e-2
#: the squares of vectors shorter than this may underflow
SHORT = 1e-77
#: the least positive number: what a product may lose to underflow
LEAST = 5e-324


class Support(NamedTuple):
    """Of B problems with K arms, ``(B, K)`` each but theta, ``(B, K, d)``."""

    upper: Floats
    lower: Floats
    theta: Floats
    multiplier: Floats
    status: Ints


def compiled_support(
    program: SublevelProgram,
    family: CompiledFamily,
    center: Tensor | None,
    arms: Tensor,
    tol: float,
    max_steps: int,
) -> tuple[Tensor, ...]:
    """The fields of a :class:`~torchglb.ucb.SupportResult`; nothing is differentiated.

    Args:
        program: the problems.
        family: their family.
        center: feasible points ``(*B, d)``; those that are NaN, or None, stand for the minimiser.
        arms: ``(*B, K, d)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.
        max_steps: limit on passes for each arm.
    """
    loss, shape, dtype = program.likelihood, tuple(arms.shape), arms.dtype
    count, K, d = math.prod(shape[:-2]), shape[-2], shape[-1]
    level = _doubles(program.level).reshape(count)
    xs = _doubles(arms).reshape(count, K, d)
    radius = per_problem(program.domain.radius, shape[:-2])
    found = Support(
        np.empty((count, K)),
        np.empty((count, K)),
        np.empty((count, K, d)),
        np.empty((count, K)),
        np.empty((count, K), np.int64),
    )
    region = _region_of(program, count, d)
    for block in blocks(loss, family, 1.0, center):
        here = block.where
        # of a number all digits, whatever the rows' dtype
        block.settings[:, RADIUS] = radius if isinstance(radius, float) else radius[here]
        part = Support._make(field[here] for field in found)
        given = (family, block.rows, block.settings, region[here], center is not None)
        support_all(*given, level[here], xs[here], float(tol), int(max_steps), part)
    upper, lower, theta, multiplier, status = [
        torch.from_numpy(field.reshape(shape[:-2] + field.shape[1:])) for field in found
    ]
    whole = (upper, lower, theta, multiplier, upper - lower, status)
    return whole if dtype == torch.float64 else narrowed(whole, dtype)


def _doubles(values: Tensor) -> Floats:
    """The same numbers in float64, not copied unless they have to be."""
    return np.ascontiguousarray(array(values), np.float64)


def narrowed(found: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The fields in a narrower dtype: bounds outwards, theta and multiplier to nearest."""
    upper, lower, theta, multiplier, _, status = found
    upper, lower = round_up(upper, dtype), -round_up(-lower, dtype)
    return upper, lower, theta.to(dtype), multiplier.to(dtype), upper - lower, status


def _region_of(program: SublevelProgram, count: int, d: int) -> Floats:
    """Of every problem c, W and gamma, ``(B, d + d^2 + 1)``; ``(B, 0)`` without a region."""
    if program.region is None:
        return np.empty((count, 0))
    parts = (program.region.center, program.region.shape, program.region.size)
    columns = [array(t).astype(np.float64).reshape(count, -1) for t in parts]
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


@bound_once
@entry
def support_all(
    family: CompiledFamily,
    rows: LossRows,
    settings: Floats,
    region: Floats,
    known: bool,
    level: Floats,
    arms: Floats,
    tol: float,
    max_steps: int,
    found: Support,
) -> None:
    """Every problem by itself, one after the other.

    Args:
        family: the family.
        rows: of B problems.
        settings: lambda, S, tilt and centre, ``(B, 2 + 2 d)``.
        region: c, W and gamma, ``(B, d + d^2 + 1)``, or ``(B, 0)``.
        known: whether centres were given.
        level: ``(B,)``.
        arms: ``(B, K, d)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.
        max_steps: limit on passes for each arm.
        found: the result.
    """
    count, d = arms.shape[0], arms.shape[2]
    memory, at_center, squares = search_memory(d), new_point(d), np.empty(rows.y.shape[1])
    x, normal, theta, states = np.zeros(d), np.zeros(d), np.zeros(d), np.zeros(1, ARM)
    arm = record(states, 0)
    for b in range(count):
        ridge, radius = settings[b, RIDGE], settings[b, RADIUS]
        tilt, center = settings[b, TILT : TILT + d], settings[b, TILT + d :]
        loss = RowLoss(family, rows.X[b], rows.w[b], rows.y[b], ridge, tilt)
        value = center_of(loss, level[b], radius, center, known, memory)
        copy_point(memory.estimate.here, at_center)
        tridiagonal_form(at_center.hessian, memory.center_form, memory.next)
        magnitude = magnitude_of_rows(loss, squares)
        trace = matrix_trace(at_center.hessian)
        there = evaluated(loss, value, trace, at_center, level[b], radius, magnitude)
        error = there.loss_error
        problem = LevelSet(loss, level[b], radius, squares, magnitude, value, error, region[b])
        search = ArmSearch(x, theta, normal, problem, at_center, memory, tol)
        search_arms(arm, search, there, arms[b], max_steps, found, b)


@kernel
def search_arms(
    arm: ArmState,
    search: ArmSearch,
    there: Evaluated,
    arms: Floats,
    max_steps: int,
    found: Support,
    b: int,
) -> None:
    """Searches one arm of a problem after the other, from what the centre says of it."""
    level, center = search.level, search.center
    value, error = level.center_loss, level.center_error
    least = value - frank_wolfe_gap(center.theta, center.gradient, level.radius)
    least -= 2.0 * there.error + 16.0 * EPS * (abs(least) + abs(value))
    # the minimisations of the dual search would leave a region
    dual = value + error <= level.level and level.region.shape[0] == 0
    for k in range(arms.shape[0]):
        begin(arm, search, arms[k])
        if math.isfinite(value) and not math.isnan(level.level):
            learn(arm, search, center, there)
            search_arm(arm, search, max_steps)
            if dual and arm.status == INACCURATE:
                search_dual(arm, search)
        finish(arm, search, least)
        copy_vector(search.theta, found.theta[b, k])
        found.upper[b, k], found.lower[b, k] = arm.upper, arm.lower
        found.multiplier[b, k], found.status[b, k] = arm.multiplier, arm.status


@kernel
def center_of(
    loss: RowLoss, level: float, radius: float, center: Floats, known: bool, memory: SearchMemory
) -> float:
    """The loss at the centre, its expansion into ``memory.estimate.here``.

    Any point well below the level will do: the minimum is sought until the room above it is known.
    """
    here, estimate = memory.estimate.here, memory.estimate
    if known and not math.isnan(dot(center, center)):
        norm, edge = length(center), (1.0 - 4.0 * EPS) * radius
        for i in range(center.shape[0]):
            here.theta[i] = center[i] * (edge / norm) if norm > edge else center[i]
        return expand(loss, memory.table, memory.work, here)
    for i in range(center.shape[0]):
        here.theta[i] = 0.0
    for tol in (ROUGH_TOL, ESTIMATE_TOL):
        found = minimize(loss, radius, tol, ESTIMATE_STEPS, memory.table, estimate, memory.work)
        if found.gap <= ROUGH_SHARE * (level - found.loss):
            break
    return found.loss


@kernel
def magnitude_of_rows(loss: RowLoss, squares: Floats) -> float:
    """``sum_s |x_s| max(|y_s|, w_s c)/g + |tilt|``: what is rounded, even where it cancels.

    c is that of :func:`torchglb.families.base.largest_reward`; ``|x_s|^2`` go into ``squares``.
    """
    total = magnitude_of_data(loss.X, loss.w, loss.y, loss.family.largest, squares)
    return total * loss.family.scale + length(loss.tilt)


@vectorised
def magnitude_of_data(X: Floats, w: Floats, y: Floats, largest: float, squares: Floats) -> float:
    """``sum_s |x_s| max(|y_s|, w_s c)``; the squares ``|x_s|^2`` into an array."""
    total, n = 0.0, y.shape[0]
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        part = squares[start:stop]
        for s in range(stop - start):
            part[s] = 0.0
        for k in range(X.shape[0]):
            x = X[k, start:stop]
            for s in range(stop - start):
                part[s] += x[s] * x[s]
        rewards = y[start:stop]
        for s in range(stop - start):
            weight = w[start + s] if w.shape[0] else 1.0
            total += math.sqrt(part[s]) * max(abs(rewards[s]), weight * largest)
    return total


@kernel
def short_scale(arm: Floats) -> float:
    """A power of two for an arm whose squares would underflow, 1 for all others."""
    largest = 0.0
    for i in range(arm.shape[0]):
        largest = max(largest, abs(arm[i]))
    if not 0.0 < largest < SHORT:
        return 1.0
    return math.ldexp(1.0, math.frexp(largest)[1])


@kernel
def begin(arm: ArmState, search: ArmSearch, given: Floats) -> None:
    """What ball and centre say of an arm."""
    x, d, radius, center = search.x, given.shape[0], search.level.radius, search.center.theta
    arm.scale = short_scale(given)
    for i in range(d):
        x[i] = given[i] / arm.scale
        search.normal[i] = 0.0
    arm.length = length(x)
    for i in range(d):
        x[i] = x[i] / arm.length if arm.length > 0.0 else 0.0
    copy_vector(center, search.theta)
    arm.upper = radius * (1.0 + (8.0 + d) * EPS)
    arm.lower = dot(x, center) - (8.0 + d) * EPS * radius
    if arm.length == 0.0:
        arm.upper, arm.lower = 0.0, 0.0
    arm.offset, arm.upper_paid, arm.lower_paid = math.inf, 0.0, 0.0
    arm.status = RUNNING


@kernel
def finish(arm: ArmState, search: ArmSearch, least: float) -> None:
    """The result of an arm, with its length; ``least`` is a lower bound of the loss over the ball.

    Without a feasible centre there is no lower bound, and perhaps no set at all; that there is none
    is proven by a loss whose least value is above the level.
    """
    level, scale, size, upper, lower = search.level, arm.scale, arm.length, arm.upper, arm.lower
    undefined = not math.isfinite(level.center_loss) or math.isnan(level.level)
    empty = not undefined and (least > level.level or upper == -math.inf)
    unsure = level.center_loss + level.center_error > level.level
    alpha = weight_of_cut(search.x, search.normal, arm.offset, level.radius)
    arm.multiplier = scale * (size * alpha)
    lost = LEAST if size > 0.0 else 0.0
    arm.upper = scale * (size * (upper + 4.0 * EPS * abs(upper))) + lost
    arm.lower = scale * (size * (lower - 4.0 * EPS * abs(lower))) - lost
    if unsure and arm.status != NONFINITE:
        arm.status = INACCURATE
    if unsure:
        arm.lower = -math.inf
    if empty:
        arm.upper, arm.lower, arm.status = -math.inf, -math.inf, INFEASIBLE
    if undefined:
        arm.upper, arm.lower, arm.status = math.nan, math.nan, NONFINITE
    if undefined or unsure or empty:
        for i in range(search.theta.shape[0]):
            search.theta[i] = math.nan
