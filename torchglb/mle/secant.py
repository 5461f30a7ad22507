"""An approach to the estimate where Hessians are dear: one of them, then gradients alone.

With d features a Hessian costs d/2 times a gradient. One, at the start and in single precision, has
to do: its inverse follows the curvature by BFGS updates, from the changes y of the gradient over
the steps s. The first of them scales it by ``s'y / y'H^-1 y``: the direction that was seen speaks
for the others, for where the curvature of a GLM falls, it mostly falls in every direction.

Nothing rests on the way: the approach ends where its gap says so, and where a step leaves the ball
or hardly closes the gap, Newton's method takes over.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from torchglb.backend import Floats, inlined, kernel, vectorised
from torchglb.backend.dense import copy_vector, dot, frank_wolfe_gap, length
from torchglb.carried.kernels import (
    Workspace,
    add_slopes,
    careful_add,
    chunk_product,
    chunk_sum,
    features,
)
from torchglb.families.row_terms import CHUNK, FIRST, SECOND, TERMS, W, Y, row_terms
from torchglb.mle.newton import RUNNING, NewtonMemory, Outcome, RowLoss, status_at

#: steps of an approach at most
PAIRS = 16
#: an approach ends where a step leaves more than this share of the gap
SLOWEST = 0.5
#: a squared pivot of this share of the largest is rounding, in single precision
PIVOT = 1e-5


class SecantMemory(NamedTuple):
    """What the steps of an approach have shown, and memory.

    Attributes:
        steps: s, ``(PAIRS, d)``.
        changes: y, ``(PAIRS, d)``.
        products: ``<s, y>``, ``(PAIRS,)``.
        shares: of :func:`secant_step`, ``(PAIRS,)``.
        single: features of a chunk of rows in single precision, ``(d + 2, CHUNK)``.
    """

    steps: Floats
    changes: Floats
    products: Floats
    shares: Floats
    single: Any


@inlined
def secant_memory(dim: int) -> SecantMemory:
    """For approaches of this dimension."""
    steps, changes = np.empty((PAIRS, dim)), np.empty((PAIRS, dim))
    single = np.empty((dim + 2, CHUNK), np.float32)
    return SecantMemory(steps, changes, np.empty(PAIRS), np.empty(PAIRS), single)


# ---- passes ------------------------------------------------------------------------------------


@kernel
def slope_pass(
    loss: RowLoss,
    theta: Floats,
    work: Workspace,
    pairs: SecantMemory,
    squares: Floats,
    gradient: Floats,
    hessian: Floats,
) -> tuple[float, float]:
    """The loss at a point, and its gradient: O(n d).

    Args:
        loss: the problem.
        theta: the point.
        work: memory.
        pairs: memory.
        squares: ``|x_s|^2``, for the trace; or empty.
        gradient: is written.
        hessian: its lower triangle is written, in single precision; or empty.

    Returns:
        The loss, and the trace of its Hessian if squares were given.
    """
    X, d, scratch, trace = loss.X, theta.shape[0], work.scratch, 0.0
    n, weighted = loss.y.shape[0], loss.w.shape[0] > 0
    for i in range(1 + d):
        work.sums[i], work.rest[i] = 0.0, 0.0
    for i in range(hessian.shape[0]):
        for j in range(d):
            hessian[i, j] = loss.ridge if i == j else 0.0
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        features(X, start, count, theta, scratch)
        for s in range(count):
            scratch[W + s] = loss.w[start + s] if weighted else 1.0
            scratch[Y + s] = loss.y[start + s]
        row_terms(loss.family, scratch, count, 1)
        careful_add(work.sums, work.rest, 0, chunk_sum(scratch[TERMS:], count))
        add_slopes(X, start, count, scratch[FIRST:], work)
        if squares.shape[0] > 0:
            trace += chunk_product(scratch[SECOND:], squares[start:], count)
        if hessian.shape[0] > 0:
            add_hessian(X, start, count, scratch[SECOND:], pairs.single, hessian)
    for i in range(d):
        gradient[i] = work.sums[1 + i] + loss.ridge * theta[i] - loss.tilt[i]
    value = work.sums[0] + 0.5 * loss.ridge * dot(theta, theta) - dot(loss.tilt, theta)
    return value, trace + d * loss.ridge


@vectorised
def add_hessian(
    X: Floats, start: int, count: int, curvature: Floats, single: Any, hessian: Floats
) -> None:
    """Adds ``sum_s c_s x_s x_s'`` of a chunk, its lower triangle, in single precision.

    Four features at a time with two weighted ones: registers hold all eight sums.
    """
    d = X.shape[0]
    for k in range(d):
        row, x = single[k], X[k, start : start + count]
        for s in range(count):
            row[s] = x[s]
        for s in range(count, CHUNK):
            row[s] = 0.0
    p, q = single[d], single[d + 1]
    for i in range(0, d, 2):
        other = min(i + 1, d - 1)
        u, v = single[i], single[other]
        for s in range(count):
            c = np.float32(curvature[s])
            p[s] = c * u[s]
            q[s] = c * v[s]
        for s in range(count, CHUNK):
            p[s], q[s] = 0.0, 0.0
        for j in range(0, other + 1, 4):
            a, b = single[j], single[min(j + 1, other)]
            c, e = single[min(j + 2, other)], single[min(j + 3, other)]
            zero = np.float32(0.0)
            pa, pb, pc, pe = zero, zero, zero, zero
            qa, qb, qc, qe = zero, zero, zero, zero
            for s in range(CHUNK):
                pa += p[s] * a[s]
                pb += p[s] * b[s]
                pc += p[s] * c[s]
                pe += p[s] * e[s]
                qa += q[s] * a[s]
                qb += q[s] * b[s]
                qc += q[s] * c[s]
                qe += q[s] * e[s]
            for m, up, uq in ((0, pa, qa), (1, pb, qb), (2, pc, qc), (3, pe, qe)):
                if j + m <= i:
                    hessian[i, j + m] += up
                if j + m <= other and other > i:
                    hessian[other, j + m] += uq


@vectorised
def rough_cholesky(matrix: Floats, factor: Floats) -> bool:
    """The lower factor of a lower triangle; False where a pivot may be rounding."""
    d, high = matrix.shape[0], 0.0
    for i in range(d):
        for j in range(i + 1):
            entry = matrix[i, j]
            for k in range(j):
                entry -= factor[i, k] * factor[j, k]
            if j < i:
                factor[i, j] = entry / factor[j, j]
            else:
                high = max(high, entry)
                if not entry > PIVOT * high:
                    return False
                factor[i, i] = math.sqrt(entry)
    return True


@vectorised
def solve_by(factor: Floats, x: Floats) -> None:
    """``L L' x = b`` in the place of b."""
    d = factor.shape[0]
    for i in range(d):
        rest = x[i]
        for k in range(i):
            rest -= factor[i, k] * x[k]
        x[i] = rest / factor[i, i]
    for i in range(d - 1, -1, -1):
        found = x[i] / factor[i, i]
        x[i] = found
        for k in range(i):
            x[k] -= factor[i, k] * found


# ---- the approach ------------------------------------------------------------------------------


@kernel
def approach(
    loss: RowLoss,
    radius: float,
    tol: float,
    max_steps: int,
    memory: NewtonMemory,
    pairs: SecantMemory,
    work: Workspace,
) -> Outcome:
    """Steps from ``memory.here.theta`` with one Hessian; arguments are those of `minimize`.

    The status is RUNNING where they do not reach the tolerance.
    """
    here, trial = memory.here, memory.trial
    model, none, no_squares = memory.model, memory.model[:0], memory.b[:0]
    value, _ = slope_pass(loss, here.theta, work, pairs, no_squares, here.gradient, model)
    gap = frank_wolfe_gap(here.theta, here.gradient, radius)
    status, kept, steps = status_at(value, gap, tol, 0), 0, 0
    if status != RUNNING or not rough_cholesky(model, memory.factor):
        return Outcome(value, gap, status, 0)
    scale = 1.0
    while status == RUNNING and steps < min(PAIRS, max_steps):
        secant_step(pairs, kept, scale, here.gradient, memory.factor, memory.b)
        for i in range(here.theta.shape[0]):
            pairs.steps[kept, i] = -memory.b[i]
            trial.theta[i] = here.theta[i] - memory.b[i]
        if not length(trial.theta) <= radius:
            break
        found, _ = slope_pass(loss, trial.theta, work, pairs, no_squares, trial.gradient, none)
        steps += 1
        left = frank_wolfe_gap(trial.theta, trial.gradient, radius)
        for i in range(here.theta.shape[0]):
            pairs.changes[kept, i] = trial.gradient[i] - here.gradient[i]
        pairs.products[kept] = dot(pairs.steps[kept], pairs.changes[kept])
        if not (left <= SLOWEST * gap and pairs.products[kept] > 0.0):
            break
        if kept == 0:
            copy_vector(pairs.changes[0], memory.u)
            solve_by(memory.factor, memory.u)
            scale = pairs.products[0] / dot(pairs.changes[0], memory.u)
        kept += 1
        value, gap = found, left
        copy_vector(trial.theta, here.theta)
        copy_vector(trial.gradient, here.gradient)
        status = status_at(value, gap, tol, 0)
    return Outcome(value, gap, status, steps)


@kernel
def secant_step(
    pairs: SecantMemory, kept: int, scale: float, gradient: Floats, factor: Floats, b: Floats
) -> None:
    """The gradient times the inverse Hessian as the pairs have changed it, into b.

    ``P' = (I - s y'/s'y) P (I - y s'/s'y) + s s'/s'y``, pair by pair, is never formed.
    """
    copy_vector(gradient, b)
    for k in range(kept - 1, -1, -1):
        share = dot(pairs.steps[k], b) / pairs.products[k]
        pairs.shares[k] = share
        for i in range(b.shape[0]):
            b[i] -= share * pairs.changes[k, i]
    solve_by(factor, b)
    for i in range(b.shape[0]):
        b[i] *= scale
    for k in range(kept):
        share = pairs.shares[k] - dot(pairs.changes[k], b) / pairs.products[k]
        for i in range(b.shape[0]):
            b[i] += share * pairs.steps[k, i]
