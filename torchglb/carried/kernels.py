"""Compiled sums over rows: a pass, and the next row.

A family's derivatives come from :func:`torchglb.families.row_terms.row_terms`; families without
compiled derivatives supply the same columns through torch (:mod:`torchglb.carried.carried_loss`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints, entry, inlined, kernel, vectorised
from torchglb.carried.monomials import Monomials
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, SCRATCH, TERMS, row_terms

#: totals over the rows of a problem, at the end of its memory: the longest ``|x_s|``, the magnitude
#: of what is rounded (:func:`add_totals`), the number of rows
LONGEST, MAGNITUDE, ROWS = 0, 1, 2
TOTALS = 3


class Carried(NamedTuple):
    """One problem's sums at A points, in its own memory."""

    points: Floats  # (d, A)
    sums: Floats  # one of each monomial, (count, A)
    rest: Floats  # what rounding has added to the loss and the gradient, (1 + d, A)
    trace: Floats  # of the Hessian, (A,)
    totals: Floats  # over the rows, (3,), at LONGEST, MAGNITUDE and ROWS


@entry
def memory_size(dim: int, points: int, count: int) -> int:
    """Numbers that a problem needs."""
    return points * (2 + 2 * dim + count) + TOTALS


@inlined
def carried_in(memory: Floats, dim: int, points: int, count: int) -> Carried:
    """The sums that lie in a problem's memory ``(size,)``."""
    start = dim * points
    at = memory[:start].reshape(dim, points)
    end = start + count * points
    sums = memory[start:end].reshape(count, points)
    start, end = end, end + (1 + dim) * points
    rest = memory[start:end].reshape(1 + dim, points)
    return Carried(at, sums, rest, memory[end : end + points], memory[end + points :])


@kernel
def careful_add(total: Floats, rest: Floats, place: int, added: float) -> None:
    """``total += added`` by Kahan: what is rounded off goes into the next sum."""
    step = added - rest[place]
    after = total[place] + step
    lost = (after - total[place]) - step
    total[place] = after
    rest[place] = lost if abs(lost) < math.inf else 0.0  # an infinite sum leaves nothing


# ---- a pass ------------------------------------------------------------------------------------


class LossRows(NamedTuple):
    """The rows of one problem: features ``(d, capacity)``, weights, weighted rewards ``(n,)``.

    Of N problems each array has one axis more, in front. Weights that are all 1 may be left out:
    ``(0,)``, or ``(N, 0)``.
    """

    X: Floats
    w: Floats
    y: Floats


class Workspace(NamedTuple):
    """Memory for one pass at a time."""

    scratch: Floats  # of row_terms
    powers: Floats  # monomials of a chunk of rows, (count, CHUNK)
    sums: Floats  # (count,), the result; the first 1 + d with rest
    rest: Floats  # (1 + d,)
    part: Floats  # the gradient of a chunk of rows, (d,)


@inlined
def workspace(dim: int, count: int) -> Workspace:
    """For passes of so many monomials."""
    powers = np.empty((count, CHUNK))  # large, and written before it is read
    return Workspace(np.zeros(SCRATCH), powers, np.zeros(count), np.zeros(1 + dim), np.zeros(dim))


@vectorised
def features(X: Floats, start: int, count: int, theta: Floats, z: Floats) -> None:
    """``<x_s, theta>`` of some rows of ``X (d, n)``, four features at a time."""
    last = X.shape[0] - 1
    for s in range(count):
        z[s] = 0.0
    for k in range(0, last + 1, 4):
        a, b = X[k, start:], X[min(k + 1, last), start:]
        c, e = X[min(k + 2, last), start:], X[min(k + 3, last), start:]
        ta, tb = theta[k], theta[k + 1] if k + 1 <= last else 0.0
        tc, te = theta[k + 2] if k + 2 <= last else 0.0, theta[k + 3] if k + 3 <= last else 0.0
        for s in range(count):
            z[s] += (ta * a[s] + tb * b[s]) + (tc * c[s] + te * e[s])


@vectorised
def chunk_sum(column: Floats, count: int) -> float:
    """The sum of the first entries."""
    total = 0.0
    for s in range(count):
        total += column[s]
    return total


@vectorised
def chunk_product(column: Floats, row: Floats, count: int) -> float:
    """The sum of the products of the first entries."""
    total = 0.0
    for s in range(count):
        total += column[s] * row[s]
    return total


@vectorised
def chunk_slopes(X: Floats, start: int, count: int, slope: Floats, out: Floats) -> None:
    """``sum_s slope_s x_s`` of a chunk, four features at a time."""
    last = X.shape[0] - 1
    for k in range(0, last + 1, 4):
        second, third, fourth = min(k + 1, last), min(k + 2, last), min(k + 3, last)
        a, b, c, e = X[k, start:], X[second, start:], X[third, start:], X[fourth, start:]
        ta, tb, tc, te = 0.0, 0.0, 0.0, 0.0
        for s in range(count):
            q = slope[s]
            ta += q * a[s]
            tb += q * b[s]
            tc += q * c[s]
            te += q * e[s]
        # a feature that stands in for one beyond the last has its own sum
        out[fourth], out[third], out[second], out[k] = te, tc, tb, ta


@kernel
def add_slopes(X: Floats, start: int, count: int, slope: Floats, work: Workspace) -> None:
    """Adds ``sum_s slope_s x_s`` of a chunk to the gradient, by Kahan."""
    chunk_slopes(X, start, count, slope, work.part)
    add_part(work)


@kernel
def add_part(work: Workspace) -> None:
    """Adds the gradient of a chunk to the sums, by Kahan."""
    for k in range(work.part.shape[0]):
        careful_add(work.sums, work.rest, 1 + k, work.part[k])


@vectorised
def chunk_hessian(X: Floats, start: int, count: int, curvature: Floats, work: Workspace) -> None:
    """Adds ``sum_s c_s x_s x_s'`` of a chunk, its upper triangle, to the sums of second order."""
    d, out, scaled = X.shape[0], work.sums, work.powers[0]
    place = 1 + d
    for i in range(d):
        x = X[i, start : start + count]
        for s in range(count):
            scaled[s] = curvature[s] * x[s]
        j = i
        while j + 3 < d:  # four at a time: each reads the scaled row once
            a, b = X[j, start : start + count], X[j + 1, start : start + count]
            c, e = X[j + 2, start : start + count], X[j + 3, start : start + count]
            ta, tb, tc, te = 0.0, 0.0, 0.0, 0.0
            for s in range(count):
                q = scaled[s]
                ta += q * a[s]
                tb += q * b[s]
                tc += q * c[s]
                te += q * e[s]
            out[place] += ta
            out[place + 1] += tb
            out[place + 2] += tc
            out[place + 3] += te
            place += 4
            j += 4
        while j < d:
            a, ta = X[j, start : start + count], 0.0
            for s in range(count):
                ta += scaled[s] * a[s]
            out[place] += ta
            place += 1
            j += 1


@vectorised
def chunk_moments(
    X: Floats, start: int, count: int, terms: Floats, table: Monomials, work: Workspace
) -> None:
    """Adds the moments of second and higher order of a chunk to the sums."""
    d, powers, out = X.shape[0], work.powers, work.sums
    for k in range(d):
        x, power = X[k, start : start + count], powers[1 + k]
        for s in range(count):
            power[s] = x[s]
    for i in range(1 + d, table.count):
        parent, x = powers[table.parent[i]], X[table.variable[i], start : start + count]
        power, at = powers[i], (table.degree[i]) * CHUNK
        column, total = terms[at : at + CHUNK], 0.0
        for s in range(count):
            q = parent[s] * x[s]
            power[s] = q
            total += q * column[s]
        out[i] += total


@kernel
def sum_rows(
    family: CompiledFamily,
    rows: LossRows,
    used: int,
    theta: Floats,
    table: Monomials,
    work: Workspace,
) -> float:
    """One pass: the derivatives of the loss at theta, into ``work.sums``.

    Args:
        family: the family.
        rows: of one problem.
        used: how many of them there are.
        theta: ``(d,)``.
        table: the monomials that are wanted.
        work: memory.

    Returns:
        The trace of the Hessian.
    """
    X, w, y, scratch = rows.X, rows.w, rows.y, work.scratch
    work.sums[:] = 0.0
    work.rest[:] = 0.0
    trace = 0.0
    terms = scratch[TERMS:]
    for s in range(0, used, CHUNK):
        count = min(CHUNK, used - s)
        features(X, s, count, theta, scratch)
        for i in range(count):
            scratch[CHUNK + i] = w[s + i] if w.shape[0] else 1.0
            scratch[2 * CHUNK + i] = y[s + i]
        row_terms(family, scratch, count, table.order)
        careful_add(work.sums, work.rest, 0, chunk_sum(terms, count))
        slope, curvature = terms[CHUNK:], terms[2 * CHUNK :]
        if table.order == 1:
            trace += slopes_and_trace(X, s, count, slope, curvature, work.part)
        else:
            chunk_slopes(X, s, count, slope, work.part)
        add_part(work)
        if table.order == 2:
            chunk_hessian(X, s, count, curvature, work)
        elif table.order > 2:
            chunk_moments(X, s, count, terms, table, work)
    if table.order > 1:
        trace = trace_of(work.sums, X.shape[0])
    return trace


@vectorised
def slopes_and_trace(
    X: Floats, start: int, count: int, slope: Floats, curvature: Floats, out: Floats
) -> float:
    """:func:`chunk_slopes`, and ``sum_s c_s |x_s|^2`` of the chunk from the same reading."""
    d, total = X.shape[0], 0.0
    for k in range(d % 4):
        x, ta = X[k, start : start + count], 0.0
        for s in range(count):
            ta += slope[s] * x[s]
            total += curvature[s] * (x[s] * x[s])
        out[k] = ta
    for k in range(d % 4, d, 4):
        a, b = X[k, start : start + count], X[k + 1, start : start + count]
        c, e = X[k + 2, start : start + count], X[k + 3, start : start + count]
        ta, tb, tc, te = 0.0, 0.0, 0.0, 0.0
        for s in range(count):
            q = slope[s]
            ta += q * a[s]
            tb += q * b[s]
            tc += q * c[s]
            te += q * e[s]
            total += curvature[s] * ((a[s] * a[s] + b[s] * b[s]) + (c[s] * c[s] + e[s] * e[s]))
        out[k], out[k + 1], out[k + 2], out[k + 3] = ta, tb, tc, te
    return total


@entry
def trace_of(sums: Floats, dim: int) -> float:
    """Of the Hessian whose upper triangle stands behind loss and gradient."""
    place, trace = 1 + dim, 0.0
    for k in range(dim):
        trace += sums[place]
        place += dim - k
    return trace


@kernel
def put_point(
    carried: Carried, slot: int, point: Floats, sums: Floats, rest: Floats, trace: float
) -> None:
    """Moves one carried point to where the sums of a pass are known."""
    for k in range(point.shape[0]):
        carried.points[k, slot] = point[k]
    for i in range(sums.shape[0]):
        carried.sums[i, slot] = sums[i]
    for i in range(rest.shape[0]):
        carried.rest[i, slot] = rest[i]
    carried.trace[slot] = trace


@kernel
def least_used(used: Ints | Floats) -> int:
    """The carried point that has been of no use for the longest time, by the times of its use."""
    slot = 0
    for a in range(used.shape[0]):
        if used[a] < used[slot]:
            slot = a
    return slot


# ---- the next row ------------------------------------------------------------------------------


@kernel
def carry_row(
    family: CompiledFamily,
    x: Floats,
    w: float,
    y: float,
    carried: Carried,
    table: Monomials,
    scratch: Floats,
    monomial: Floats,
) -> None:
    """Adds one observation to the sums at every point: O(A d^q).

    Args:
        family: the family.
        x: the row, ``(d,)``.
        w: its weight.
        y: its weight times its reward.
        carried: the sums.
        table: their monomials.
        scratch: of :func:`row_terms`.
        monomial: memory, ``(count,)``.
    """
    points = carried.points.shape[1]
    row_powers(x, table, monomial)
    for start in range(0, points, CHUNK):
        count = min(CHUNK, points - start)
        features(carried.points, start, count, x, scratch)
        for i in range(count):
            scratch[CHUNK + i] = w
            scratch[2 * CHUNK + i] = y
        row_terms(family, scratch, count, table.order)
        add_columns(scratch[TERMS:], start, count, monomial, carried, table)
    add_totals(x, w, y, family.largest, family.scale, carried)


@kernel
def add_columns(
    terms: Floats, start: int, count: int, monomial: Floats, carried: Carried, table: Monomials
) -> None:
    """Adds one row, whose derivatives in z at some points are known, to the sums there."""
    d = carried.points.shape[0]
    for i in range(1 + d):
        column, stop = terms[table.degree[i] * CHUNK :], start + count
        total, rest = carried.sums[i, start:stop], carried.rest[i, start:stop]
        careful_columns(column, monomial[i], total, rest)
    add_higher(terms, start, count, monomial, carried.sums, table)
    squared = 0.0
    for k in range(d):
        squared += monomial[1 + k] * monomial[1 + k]
    for a in range(count):
        carried.trace[start + a] += squared * terms[2 * CHUNK + a]


@kernel
def careful_columns(column: Floats, factor: float, total: Floats, rest: Floats) -> None:
    """:func:`careful_add` of ``factor column`` for neighbouring points, in vector registers."""
    for a in range(total.shape[0]):
        step = factor * column[a] - rest[a]
        before = total[a]
        after = before + step
        lost = (after - before) - step
        total[a] = after
        rest[a] = lost if abs(lost) < math.inf else 0.0


@vectorised
def add_higher(
    terms: Floats, start: int, count: int, monomial: Floats, sums: Floats, table: Monomials
) -> None:
    """Adds one row to the sums of second and higher order."""
    for i in range(1 + table.dim, table.count):
        factor, at = monomial[i], table.degree[i] * CHUNK
        column, total = terms[at : at + CHUNK], sums[i, start : start + count]
        for a in range(count):
            total[a] += factor * column[a]


@kernel
def add_totals(
    x: Floats, w: float, y: float, largest: float, scale: float, carried: Carried
) -> None:
    """Adds one row to the totals, which bound remainders and rounding.

    The magnitude is ``sum_s w_s |x_s| max(|r_s|, largest)/g``. Times S it is at least the sum of
    the absolute values of the terms ``r z`` of the loss, and with ``S tr H`` more at least that of
    those of the slope: what is rounded, even where it cancels. For where rewards have no end, mu is
    z or ``e^z``, and ``|mu(z)|`` at most ``|mu(0)| + |z| m''(z)``.
    """
    squared = 0.0
    for k in range(x.shape[0]):
        squared += x[k] * x[k]
    length = math.sqrt(squared)
    totals = carried.totals
    totals[LONGEST] = max(totals[LONGEST], length)
    totals[MAGNITUDE] += length * max(abs(y), w * largest) * scale
    totals[ROWS] += 1.0


@kernel
def row_powers(x: Floats, table: Monomials, out: Floats) -> None:
    """All monomials of x."""
    out[0] = 1.0
    for i in range(1, table.count):
        out[i] = out[table.parent[i]] * x[table.variable[i]]
