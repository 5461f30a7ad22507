"""The optimistic program on a CPU, for families with compiled derivatives: problem by problem."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, Ints, entry, kernel, vectorised
from torchglb.backend.dense import EPS, dot, frank_wolfe_gap, length
from torchglb.compiled_rows import array, blocks, per_problem
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK
from torchglb.mle_kernels import (
    INACCURATE,
    INFEASIBLE,
    NONFINITE,
    RUNNING,
    RowLoss,
    copy_point,
    copy_vector,
    expand,
    minimize,
    new_point,
)
from torchglb.rounding import round_up
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.search_kernels import (
    ESTIMATE_STEPS,
    ESTIMATE_TOL,
    ArmBounds,
    LevelSet,
    SearchMemory,
    evaluated,
    learn,
    rounded_trace,
    search_arm,
    search_dual,
    search_memory,
    trace_of,
    weight_of_cut,
)

#: the squares of vectors shorter than this may underflow
SHORT = 1e-77


class Support(NamedTuple):
    """Of B problems with K arms.

    Attributes:
        values: upper, lower and multiplier, ``(3, B, K)``.
        theta: ``(B, K, d)``.
        status: ``(B, K)``.
    """

    values: Floats
    theta: Floats
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
    loss, shape, dtype = program.likelihood, arms.shape, arms.dtype
    count, K, d = math.prod(shape[:-2]), shape[-2], shape[-1]
    level = array(program.level).astype(np.float64).reshape(count)
    xs = array(arms).astype(np.float64).reshape(count, K, d)
    scale, radius = _power_of_two(xs), np.empty(count)
    radius[:] = per_problem(program.domain.radius, tuple(shape[:-2]))
    values, theta = np.empty((3, count, K)), np.empty((count, K, d))
    found = Support(values, theta, np.empty((count, K), np.int64))
    region = _region_of(program, count, d)
    for block in blocks(loss, family, program.domain.radius, center):
        here = block.where
        block.settings[:, 1] = radius[here]  # of a number all digits, whatever the rows' dtype
        part = Support(values[:, here], theta[here], found.status[here])
        known, x = center is not None, xs[here] if scale is None else xs[here] / scale[here]
        given = (family, block.rows, block.settings, region[here], known, level[here], x)
        support_all(*given, tol, max_steps, part)
    if scale is not None:
        values *= scale[..., 0]
    upper, lower, multiplier = torch.from_numpy(values.reshape(3, *shape[:-1]))
    points = torch.from_numpy(theta.reshape(shape))
    status = torch.from_numpy(found.status.reshape(shape[:-1]))
    whole = (upper, lower, points, multiplier, upper - lower, status)
    return whole if dtype == torch.float64 else narrowed(whole, dtype)


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
    return np.concatenate(columns, axis=1)


def _power_of_two(arms: Floats) -> Floats | None:
    """For arms ``(B, K, d)`` whose squares would underflow, ``(B, K, 1)``; None without such."""
    largest = np.abs(arms).max(-1, keepdims=True, initial=0.0)
    short = (largest > 0.0) & (largest < SHORT)
    return np.where(short, 2.0 ** np.frexp(largest)[1], 1.0) if short.any() else None


@entry
def support_all(
    family: CompiledFamily,
    rows: Floats,
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
        rows: features, weights, weighted rewards, ``(B, d + 2, n)``.
        settings: lambda, S, tilt and centre, ``(B, 2 + 2 d)``.
        region: c, W and gamma, ``(B, d + d^2 + 1)``, or ``(B, 0)``.
        known: whether centres were given.
        level: ``(B,)``.
        arms: ``(B, K, d)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.
        max_steps: limit on passes for each arm.
        found: the result.
    """
    count, K, d = arms.shape
    memory, at_center = search_memory(d), new_point(d)
    bounds = ArmBounds(
        np.zeros((K, d)),
        np.zeros(K),
        np.zeros(K),
        np.zeros(K),
        np.zeros((K, d)),
        np.zeros((K, d)),
        np.zeros(K),
        np.zeros(K),
        np.zeros(K),
        np.zeros(K, np.int64),
    )
    for b in range(count):
        ridge, radius = settings[b, 0], settings[b, 1]
        tilt, center = settings[b, 2 : 2 + d], settings[b, 2 + d :]
        loss = RowLoss(family, rows[b, :d], rows[b, d], rows[b, d + 1], ridge, tilt)
        value = center_of(loss, radius, center, known, memory)
        copy_point(memory.estimate.here, at_center)
        size = size_of_rows(loss, memory.work.scratch)
        trace = rounded_trace(trace_of(at_center.hessian), ridge, d)
        there = evaluated(value, trace, at_center, rows.shape[2], level[b], radius, size)
        problem = LevelSet(
            loss, level[b], radius, size, at_center.theta, value, there.loss_error, region[b]
        )
        begin(bounds, arms[b], at_center.theta, radius)
        if math.isfinite(value) and not math.isnan(level[b]):
            feasible = value + there.loss_error <= level[b]
            for k in range(K):
                learn(bounds, k, at_center, there, problem)
                search_arm(bounds, k, at_center, problem, tol, max_steps, memory)
                # the minimisations of the dual search would leave a region
                if feasible and bounds.status[k] == INACCURATE and region.shape[1] == 0:
                    search_dual(bounds, k, problem, tol, memory)
        least = value - frank_wolfe_gap(at_center.theta, at_center.gradient, radius)
        least -= 2.0 * there.error + 16.0 * EPS * (abs(least) + abs(value))
        for k in range(K):
            found.status[b, k] = status_of(bounds, k, problem, least)
            write(bounds, k, problem, found.status[b, k], found, b)


@kernel
def center_of(
    loss: RowLoss, radius: float, center: Floats, known: bool, memory: SearchMemory
) -> float:
    """The loss at the centre, its expansion into ``memory.estimate.here``."""
    here, estimate = memory.estimate.here, memory.estimate
    if known and not math.isnan(dot(center, center)):
        norm, edge = length(center), (1.0 - 4.0 * EPS) * radius
        for i in range(center.shape[0]):
            here.theta[i] = center[i] * (edge / norm) if norm > edge else center[i]
        return expand(loss, memory.table, memory.work, here)
    for i in range(center.shape[0]):
        here.theta[i] = 0.0
    minimize(loss, radius, ESTIMATE_TOL, ESTIMATE_STEPS, memory.table, estimate, memory.work)
    return expand(loss, memory.table, memory.work, here)


@kernel
def size_of_rows(loss: RowLoss, scratch: Floats) -> float:
    """What is rounded, even where it cancels: ``sum_s |x_s| max(|y_s|, w_s c)/g + |tilt|``.

    c is the largest reward that the family knows of.
    """
    n, total = loss.X.shape[1], 0.0
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        total += _size_of_chunk(loss.X, loss.w, loss.y, start, stop, loss.family.largest, scratch)
    return total * loss.family.scale + length(loss.tilt)


@vectorised
def _size_of_chunk(
    X: Floats, w: Floats, y: Floats, start: int, stop: int, largest: float, scratch: Floats
) -> float:
    squared, total = scratch[: stop - start], 0.0
    for s in range(stop - start):
        squared[s] = 0.0
    for k in range(X.shape[0]):
        x = X[k, start:stop]
        for s in range(stop - start):
            squared[s] += x[s] * x[s]
    weights, rewards = w[start:stop], y[start:stop]
    for s in range(stop - start):
        total += math.sqrt(squared[s]) * max(abs(rewards[s]), weights[s] * largest)
    return total


@kernel
def begin(bounds: ArmBounds, arms: Floats, center: Floats, radius: float) -> None:
    """What ball and centre say of the arms."""
    d = arms.shape[1]
    for k in range(arms.shape[0]):
        size = length(arms[k])
        bounds.lengths[k] = size
        for i in range(d):
            bounds.units[k, i] = arms[k, i] / size if size > 0.0 else 0.0
            bounds.normal[k, i] = 0.0
        copy_vector(center, bounds.theta[k])
        bounds.upper[k] = radius * (1.0 + (8.0 + d) * EPS)
        bounds.lower[k] = dot(bounds.units[k], center) - (8.0 + d) * EPS * radius
        if size == 0.0:
            bounds.upper[k], bounds.lower[k] = 0.0, 0.0
        bounds.offset[k] = math.inf
        bounds.upper_paid[k], bounds.lower_paid[k] = 0.0, 0.0
        bounds.status[k] = RUNNING


@kernel
def status_of(bounds: ArmBounds, k: int, problem: LevelSet, least: float) -> int:
    """Of one arm; ``least`` is a lower bound of the loss over the ball.

    Without a feasible centre there is no lower bound, and perhaps no set at all; that there is none
    is proven by a loss whose least value is above the level.
    """
    value, level = problem.center_loss, problem.level
    if not math.isfinite(value) or math.isnan(level):
        return NONFINITE
    if least > level or bounds.upper[k] == -math.inf:
        return INFEASIBLE
    if value + problem.center_error > level and bounds.status[k] != NONFINITE:
        return INACCURATE
    return bounds.status[k]


@kernel
def write(
    bounds: ArmBounds, k: int, problem: LevelSet, status: int, found: Support, b: int
) -> None:
    """The result of one arm, with its length."""
    size, upper, lower = bounds.lengths[k], bounds.upper[k], bounds.lower[k]
    unsure = problem.center_loss + problem.center_error > problem.level
    alpha = weight_of_cut(bounds.units[k], bounds.normal[k], bounds.offset[k], problem.radius)
    found.values[2, b, k] = size * alpha
    copy_vector(bounds.theta[k], found.theta[b, k])
    found.values[0, b, k] = size * (upper + 4.0 * EPS * abs(upper))
    found.values[1, b, k] = size * (lower - 4.0 * EPS * abs(lower))
    if status == INFEASIBLE:
        found.values[0, b, k], found.values[1, b, k] = -math.inf, -math.inf
    elif unsure:
        found.values[1, b, k] = -math.inf
    undefined = not math.isfinite(problem.center_loss) or math.isnan(problem.level)
    if undefined:
        found.values[0, b, k], found.values[1, b, k] = math.nan, math.nan
    if undefined or unsure or status == INFEASIBLE:
        for i in range(bounds.theta.shape[1]):
            found.theta[b, k, i] = math.nan
