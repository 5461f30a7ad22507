"""More of a constrained minimum than its value, compiled.

The minimiser with its Hessian, and the minimiser with a row that is only imagined.
"""

from __future__ import annotations

import math

import numpy as np

from torchglb.backend import Floats, entry, kernel, record
from torchglb.carried.imagined import add_row
from torchglb.carried.kernels import (
    Carried,
    Constants,
    Workspace,
    carried_in,
    carry_row,
    error_at,
    sum_rows,
    taylor_gradient,
    taylor_hessian,
    taylor_powers,
    workspace,
)
from torchglb.carried.minimum import (
    DONE,
    MODEL_STEPS,
    PASS,
    Dense,
    Places,
    Quadratic,
    SearchState,
    ask,
    dense,
    newton_step,
    places_in,
    resume,
    step_safely,
)
from torchglb.carried.monomials import Monomials, Packed, unpack
from torchglb.families.compiled import CompiledFamily


@kernel
def search_estimate(
    search: SearchState,
    places: Places,
    carried: Carried,
    quadratic: Quadratic,
    constants: Constants,
    tol: float,
    hessian_tol: float,
    table: Monomials,
    answer: Workspace,
    trace: float,
    memory: Dense,
) -> int:
    """Goes on until theta is near the minimiser, and the polynomial's Hessian near the true one.

    Like :func:`search_minimum`; but the minimum itself may remain unknown, since a polynomial's
    values are worse than its gradient, squared. Half of ``tol^2`` is what F(theta) may be above the
    minimum, beside rounding: theta is then, to first order, within tol in the norm of the Hessian.
    """
    before, found = math.inf, False
    if not resume(search, places, carried, quadratic, table, answer, trace):
        return PASS
    for _ in range(MODEL_STEPS):
        newton_step(search, places, carried, quadratic, constants, table, memory)
        found = search.reducible <= 0.5 * tol * tol
        # else another step on this polynomial would not help
        if found or not search.reducible < 0.5 * before:
            break
        before = search.reducible
    sums = carried.sums.reshape(table.count)
    error = error_at(
        places.shift, sums[0], sums, carried.trace[0], carried.facts, constants, table.order
    )
    if found and error.hessian <= hessian_tol:
        return DONE
    if not found:
        step_safely(search, places, carried, quadratic, constants, table, memory)
    return ask(search, places, carried)


@entry
def find_estimates(
    family: CompiledFamily,
    X: Floats,
    w: Floats,
    y: Floats,
    rows: int,
    memory: Floats,
    places: Floats,
    search: np.ndarray,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    tol: float,
    hessian_tol: float,
) -> None:
    """The estimate of every problem, with all passes that it needs."""
    table, count = unpack(packed), packed.count
    work, algebra = workspace(packed.dim, count), dense(packed.dim, count)
    for b in range(memory.shape[0]):
        state, carried = record(search, b), carried_in(memory[b], packed.dim, 1, count)
        vectors, c, trace = places_in(places[b]), constants[b], 0.0
        quadratic, known = Quadratic(ridge[b], tilt[b]), Constants(c[0], c[1], c[2])
        state.passes, state.answered = 0, 0
        while search_estimate(
            state, vectors, carried, quadratic, known, tol, hessian_tol, table, work, trace, algebra
        ):
            trace = sum_rows(family, X[b], w[b], y[b], 0, rows, vectors.trial, table, work)
            state.answered = 1


@entry
def search_estimate_on(
    b: int,
    memory: Floats,
    places: Floats,
    search: np.ndarray,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    tol: float,
    hessian_tol: float,
    work: Workspace,
    trace: float,
    algebra: Dense,
) -> int:
    """:func:`search_estimate` for one problem of a batch."""
    c = constants[b]
    return search_estimate(
        record(search, b),
        places_in(places[b]),
        carried_in(memory[b], packed.dim, 1, packed.count),
        Quadratic(ridge[b], tilt[b]),
        Constants(c[0], c[1], c[2]),
        tol,
        hessian_tol,
        unpack(packed),
        work,
        trace,
        algebra,
    )


@entry
def predict_minima(
    family: CompiledFamily,
    X: Floats,
    w: Floats,
    y: Floats,
    rows: int,
    memory: Floats,
    places: Floats,
    search: np.ndarray,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    tol: float,
    x: Floats,
    imagined_y: Floats,
    imagined_w: Floats,
) -> None:
    """The minimiser of every problem with one imagined row, which is in the sums of nobody.

    Where a pass was made the carried point moves, since the next search would need it too.
    """
    table, count = unpack(packed), packed.count
    work, algebra = workspace(packed.dim, count), dense(packed.dim, count)
    monomial, copy = np.empty(count), np.empty(memory.shape[1])
    for b in range(memory.shape[0]):
        copy[:] = memory[b]
        carried = carried_in(copy, packed.dim, 1, count)
        row, row_w, row_y = x[b], imagined_w[b], imagined_y[b]
        carry_row(family, row, row_w, row_y, carried, table, work.scratch, monomial)
        state, vectors, c, trace = record(search, b), places_in(places[b]), constants[b], 0.0
        quadratic, known = Quadratic(ridge[b], tilt[b]), Constants(c[0], c[1], c[2])
        state.passes, state.answered = 0, 0
        while search_estimate(
            state, vectors, carried, quadratic, known, tol, math.inf, table, work, trace, algebra
        ):
            at = vectors.trial
            trace = sum_rows(family, X[b], w[b], y[b], 0, rows, at, table, work)
            trace = add_row(family, row, row_w, row_y, at, trace, table, monomial, work)
            state.answered = 1
        if state.passes > 0:
            real = carried_in(memory[b], packed.dim, 1, count)
            for k in range(packed.dim):
                real.points[k, 0] = carried.points[k, 0]
                vectors.trial[k] = carried.points[k, 0]
            trace = sum_rows(family, X[b], w[b], y[b], 0, rows, vectors.trial, table, work)
            for i in range(count):
                real.sums[i, 0] = work.sums[i]
            for i in range(packed.dim + 1):
                real.rest[i, 0] = work.rest[i]
            real.trace[0] = trace


@entry
def expand_minima(
    memory: Floats,
    places: Floats,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    gradient: Floats,
    hessian: Floats,
    errors: Floats,
) -> None:
    """Gradient and Hessian of F at the minimisers that were found last, by their polynomials.

    Their errors ``(N, 2)``: of the gradient, its length at most, ``sqrt(tr H)`` times that in the
    dual norm; of the Hessian, relatively.
    """
    table, powers = unpack(packed), np.empty(packed.count)
    for b in range(memory.shape[0]):
        carried, vectors = carried_in(memory[b], packed.dim, 1, packed.count), places_in(places[b])
        sums, c = carried.sums.reshape(packed.count), constants[b]
        taylor_powers(vectors.shift, table, powers)
        taylor_gradient(sums, powers, table, gradient[b])
        taylor_hessian(sums, powers, table, hessian[b])
        for k in range(packed.dim):
            gradient[b, k] += ridge[b] * vectors.theta[k] - tilt[b, k]
            hessian[b, k, k] += ridge[b]
        error = error_at(
            vectors.shift,
            sums[0],
            sums,
            carried.trace[0],
            carried.facts,
            Constants(c[0], c[1], c[2]),
            packed.order,
        )
        errors[b, 0] = error.slope * math.sqrt(error.trace)
        errors[b, 1] = error.hessian
