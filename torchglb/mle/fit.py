"""Many estimates in compiled code, problem by problem.

With few features every step is Newton's (:mod:`torchglb.mle.newton`); with many, cheaper steps
lead close to the minimum first (:mod:`torchglb.mle.secant`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints, bound_once, entry, kernel
from torchglb.backend.dense import copy_vector
from torchglb.carried.kernels import LossRows, Workspace
from torchglb.carried.monomials import Monomials
from torchglb.compiled_rows import RADIUS, RIDGE, TILT
from torchglb.families.compiled import CompiledFamily
from torchglb.mle.newton import (
    INACCURATE,
    MAX_STEPS,
    RUNNING,
    NewtonMemory,
    Outcome,
    RowLoss,
    minimize,
    new_memory,
    pass_memory,
    pass_table,
)
from torchglb.mle.secant import SecantMemory, approach, secant_memory

#: up to so many features every step has a Hessian of its own
NEWTON_UP_TO = 16
#: an estimate that stalls with a larger gap, relative to 1 + |loss|, is sought again from zero
COLD = 1e-6


@kernel
def fit(
    loss: RowLoss,
    radius: float,
    tol: float,
    max_steps: int,
    table: Monomials,
    memory: NewtonMemory,
    pairs: SecantMemory,
    work: Workspace,
) -> Outcome:
    """Minimises over the ball from ``memory.here.theta``; arguments are those of `minimize`."""
    before = 0
    if table.dim > NEWTON_UP_TO:
        found = approach(loss, radius, tol, max_steps, memory, pairs, work)
        if found.status != RUNNING:
            return found
        if found.num_steps + 1 >= max_steps:
            return Outcome(found.loss, found.gap, MAX_STEPS, found.num_steps)
        before = found.num_steps + 1  # the last point is evaluated again, with a Hessian
    found = minimize(loss, radius, tol, max_steps - before, table, memory, work)
    return Outcome(found.loss, found.gap, found.status, before + found.num_steps)


class Estimates(NamedTuple):
    """Of B problems: what :class:`PointExpansion` and :class:`Outcome` say of each.

    With many features the Hessian is not known everywhere, and empty.
    """

    theta: Floats
    gradient: Floats
    hessian: Floats
    loss: Floats
    gap: Floats
    status: Ints
    num_steps: Ints


def new_estimates(count: int, d: int) -> Estimates:
    """To be written by :func:`fit_all`."""
    bends = np.empty((count, d, d) if d <= NEWTON_UP_TO else (count, 0, 0))
    theta, gradient = np.empty((count, d)), np.empty((count, d))
    loss, gap = np.empty(count), np.empty(count)
    status, num_steps = np.empty(count, np.int64), np.empty(count, np.int64)
    return Estimates(theta, gradient, bends, loss, gap, status, num_steps)


@entry
def fit_all(
    family: CompiledFamily,
    rows: LossRows,
    settings: Floats,
    tol: float,
    max_steps: int,
    found: Estimates,
) -> None:
    """Every problem by itself, one after the other.

    Args:
        family: the family.
        rows: of B problems.
        settings: lambda, S, tilt and start, ``(B, 2 + 2 d)``.
        tol: stop when ``gap <= tol (1 + |loss|)``.
        max_steps: limit on evaluations.
        found: the result, of :func:`new_estimates`.
    """
    count, d = rows.X.shape[0], rows.X.shape[1]
    table, work, memory, pairs = pass_table(d), pass_memory(d), new_memory(d), secant_memory(d)
    here = memory.here
    for b in range(count):
        ridge, radius = settings[b, RIDGE], settings[b, RADIUS]
        tilt = settings[b, TILT : TILT + d]
        loss = RowLoss(family, rows.X[b], rows.w[b], rows.y[b], ridge, tilt)
        copy_vector(settings[b, TILT + d :], here.theta)
        end = fit(loss, radius, tol, max_steps, table, memory, pairs, work)
        if end.status == INACCURATE and end.gap > COLD * (1.0 + abs(end.loss)):
            # a start far out, in a direction that rows do not span, may end short of the minimum;
            # zero is in their span
            before = end.num_steps + 1
            here.theta[:] = 0.0
            end = fit(loss, radius, tol, max_steps, table, memory, pairs, work)
            end = Outcome(end.loss, end.gap, end.status, before + end.num_steps)
        copy_vector(here.theta, found.theta[b])
        copy_vector(here.gradient, found.gradient[b])
        for i in range(found.hessian.shape[1]):
            copy_vector(here.hessian[i], found.hessian[b, i])
        found.loss[b], found.gap[b] = end.loss, end.gap
        found.status[b], found.num_steps[b] = end.status, end.num_steps


#: the same, called unseen
fit_bound = bound_once(fit_all)
