"""A posterior held from row to row, and the search for a better one; compiled, for one problem.

Any posterior gives a valid level, however old it is; only its average loss must be that of all
rows. The loss at the P centres and at the held posterior's centre is carried by
:mod:`torchglb.carried`; the increments of the held posterior are added row by row. Rows are read
only in a search: a *refresh* moves the centre in use and takes the same kind of posterior there,
when the centre has fallen behind; a *look* compares all kinds around all centres, each time that
the rows have grown by a quarter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints, allocating, entry, inlined, kernel
from torchglb.backend.dense import copy_vector
from torchglb.carried.kernels import (
    Carried,
    LossRows,
    carried_in,
    carry_row,
    put_point,
    trace_of,
    workspace,
)
from torchglb.carried.monomials import Monomials
from torchglb.carried.source import RowArrays
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import SCRATCH
from torchglb.radii.posterior.candidate_kernels import SHAPE, level_of, posterior_at, screen
from torchglb.radii.posterior.centre_kernels import (
    PRIOR,
    CompiledPrior,
    Matrices,
    Pass,
    matrices,
    newton_step,
    prior_in,
    recentre,
)
from torchglb.radii.posterior.increment_kernels import (
    add_increment,
    law_of,
    sum_increments,
)
from torchglb.radii.statistics_kernels import (
    BALL_LOSS,
    CompiledStatistics,
    add_statistics,
    rule_in,
    statistics_in,
    undispersed,
)
from torchglb.radii.theorems.theorem31 import shrinkage

#: what a problem wants of the rows
NOTHING, REFRESH, LOOK = 0, 1, 2
#: numbers of a held posterior: k of its density; its ``KL(P || Q)`` with its increments ``E_P L -
#: L(c)``; which of all candidates the last search preferred; the rows at the last look
DENSITY, COST, PREFERRED, LOOKED = 0, 1, 2, 3
#: rows of what comes out: the level, that of the mean loss, the smaller one, and what is wanted
#: of the rows (or, after a search, the passes over them)
LEVEL, MEAN_LOSS, LEAST, WANTED = 0, 1, 2, 3
#: a look after so many times the rows
GROWTH = 1.25
#: of beta^2, how much may be left on the table, if that is more than the tolerance
SHARE = 0.01


class Priors(NamedTuple):
    """A radius and its N problems, as compiled code knows them."""

    family: CompiledFamily
    normal: bool  # whether the priors are Gaussian
    numbers: Floats  # of prior_in, and after them those of rule_in, (N, size)
    etas: Floats  # weights of the barrier, (P,)
    candidates: Floats  # of posterior_at, (J, 4)
    table: Monomials  # the monomials of second order


class Held(NamedTuple):
    """The posterior that is held, in its problem's memory; its centre is the last carried point."""

    root: Floats  # M, lower triangular, (d, d): W^-1 = M'M
    rest: Floats  # (4,), at DENSITY, COST, PREFERRED and LOOKED
    carried: Carried  # the loss at the P centres and at that of the posterior


@inlined
def held_in(memory: Floats, dim: int, points: int, count: int) -> Held:
    """From memory ``(d^2 + 4 + memory_size(d, points, count),)``, in this order."""
    square = dim * dim
    rest, carried = memory[square : square + 4], memory[square + 4 :]
    root = memory[:square].reshape(dim, dim)
    return Held(root, rest, carried_in(carried, dim, points, count))


@allocating
def hold_if_better(
    data: Pass, prior: CompiledPrior, priors: Priors, at: int, held: Held, memory: Matrices
) -> None:
    """Sums the increments of one of the candidates (a pass) and holds it if its level is lower."""
    carried, candidates, family = held.carried, priors.candidates, data.family
    d, last, slot = carried.points.shape[0], priors.etas.shape[0], at // candidates.shape[0]
    candidate = candidates[at % candidates.shape[0]]
    point, before = memory.vectors[2], memory.vectors[3]
    copy_vector(carried.points[:, slot], point)
    copy_vector(carried.points[:, last], before)
    divergence = posterior_at(prior, point, carried, slot, candidate, memory)
    law = law_of(family, prior.normal, d, candidate[SHAPE], prior.terms)
    cost = divergence + sum_increments(family, prior, law, data.rows, point, memory.root)
    new = level_of(prior, point, carried.sums[0, slot], cost, carried.totals)
    if not new < level_of(prior, before, carried.sums[0, last], held.rest[COST], carried.totals):
        return
    sums, rest = carried.sums[:, slot].copy(), carried.rest[:, slot].copy()
    put_point(carried, last, point, sums, rest, trace_of(sums, d))
    for i in range(d):
        copy_vector(memory.root[i], held.root[i])
    held.rest[DENSITY], held.rest[COST], held.rest[PREFERRED] = candidate[SHAPE], cost, at


# ---- rows --------------------------------------------------------------------------------------


@allocating
def add_rows(
    priors: Priors,
    b: int,
    rows: RowArrays,
    known: int,
    seen: CompiledStatistics,
    held: Held,
    memory: Matrices,
    scratch: Floats,
    monomial: Floats,
) -> None:
    """Adds the rows that problem b does not know to all that is carried of it.

    ``scratch`` and ``monomial`` are memory of the terms of a row and its monomials.
    """
    family, sums, numbers = priors.family, held.carried, priors.numbers[b]
    prior, rule = prior_in(priors.normal, numbers), rule_in(numbers[PRIOR:])
    table, plain = priors.table, undispersed(family)
    law = law_of(family, prior.normal, priors.table.dim, held.rest[DENSITY], prior.terms)
    x, point = memory.vectors[0], memory.vectors[2]
    copy_vector(sums.points[:, -1], point)
    for s in range(known, rows.used):
        for i in range(x.shape[0]):
            x[i] = rows.X[b, i, s]
        w, y = rows.w[b, s], rows.y[b, s]
        reward = y / w if w > 0.0 else 0.0
        add_statistics(plain, rule, prior.S, x, reward, w, seen, scratch)
        carry_row(family, x, w, y, sums, table, scratch, monomial)
        held.rest[COST] += w * add_increment(family, prior, law, x, point, held.root)


# ---- doors -------------------------------------------------------------------------------------


@entry
def held_levels(
    priors: Priors,
    rows: RowArrays,
    known: int,
    statistics: Floats,
    held: Floats,
    loss_hat: Floats,
    out: Floats,
) -> bool:
    """The levels of the held posteriors, once they know all rows.

    Args:
        priors: the problems.
        rows: all rows.
        known: so many are known already; where these are all, no row is read and nothing changed.
        statistics: ``(N, size)``.
        held: of :func:`held_in`, ``(N, size)``.
        loss_hat: loss at a point of the ball, ``(N,)``, or nothing for that of the centre in use.
        out: ``(4, N)``, at LEVEL, MEAN_LOSS, LEAST and WANTED; or nothing, if the rows are all that
            is to be done.

    Returns:
        Whether anything is wanted of the rows.
    """
    family, normal, table, etas = priors.family, priors.normal, priors.table, priors.etas
    d, slots, kinds, any_wanted = table.dim, etas.shape[0], priors.candidates.shape[0], False
    memory, scratch, monomial = matrices(d), np.zeros(SCRATCH), np.empty(table.count)
    point = memory.vectors[2]
    for b in range(held.shape[0]):
        found = held_in(held[b], d, slots + 1, table.count)
        prior, sums = prior_in(normal, priors.numbers[b]), found.carried
        seen = statistics_in(statistics[b], d)
        if known < rows.used:
            add_rows(priors, b, rows, known, seen, found, memory, scratch, monomial)
        if out.shape[0] == 0:
            continue
        level = held_level(prior, found, point)
        slot = int(found.rest[PREFERRED]) // kinds
        copy_vector(sums.points[:, slot], point)
        mean = math.inf
        if not normal:
            loss = loss_hat[b] if loss_hat.shape[0] > 0 else sums.sums[0, slot]
            slope = seen.rest[BALL_LOSS] * family.scale - loss
            mean = level_of(prior, point, loss, shrinkage(slope, d), sums.totals)
        behind = newton_step(prior, etas[slot], sums, slot, point, memory)
        allowed = max(prior.tolerance, SHARE * (min(level, mean) - sums.sums[0, slot]))
        number = sums.totals[2]
        wanted = REFRESH if behind > allowed else NOTHING
        if number >= GROWTH * found.rest[LOOKED] and number > found.rest[LOOKED]:
            wanted = LOOK
        any_wanted = any_wanted or wanted != NOTHING
        out[LEVEL, b], out[MEAN_LOSS, b], out[LEAST, b], out[WANTED, b] = (
            level,
            mean,
            smaller(level, mean),
            wanted,
        )
    return any_wanted


@kernel
def smaller(level: float, mean: float) -> float:
    """That of the mean loss, where the arithmetic of a posterior has overflowed."""
    return level if level < mean or math.isnan(mean) else mean


@kernel
def held_level(prior: CompiledPrior, held: Held, point: Floats) -> float:
    """The level of the held posterior; its centre goes into ``point``."""
    sums = held.carried
    copy_vector(sums.points[:, -1], point)
    return level_of(prior, point, sums.sums[0, -1], held.rest[COST], sums.totals)


@entry
def search_posteriors(
    priors: Priors, rows: LossRows, held: Floats, offers: Floats, where: Ints, out: Floats
) -> None:
    """Searches the rows of some problems for better posteriors.

    Args:
        priors: the problems.
        rows: of these problems.
        held: of :func:`held_in`, ``(N, size)``; changed.
        offers: of :func:`recentre`, ``(N, 0)``, ``(N, d)`` or ``(N, d + count)``.
        where: the problems, ``(M,)``.
        out: of :func:`held_levels`; levels are changed, and passes go in place of wishes.
    """
    family, table, etas, candidates = priors.family, priors.table, priors.etas, priors.candidates
    d, slots = table.dim, etas.shape[0]
    memory, work, point = matrices(d), workspace(d, table.count), np.empty(d)
    for m in range(where.shape[0]):
        b, passes = where[m], 0
        prior = prior_in(priors.normal, priors.numbers[b])
        found = held_in(held[b], d, slots + 1, table.count)
        sums, mine = found.carried, LossRows(rows.X[m], rows.w[m], rows.y[m])
        data = Pass(family, mine, table, work)
        bold = safe = int(found.rest[PREFERRED])
        slot, full = bold // candidates.shape[0], out[WANTED, b] == LOOK
        for a in range(0 if full else slot, slots if full else slot + 1):
            passes += recentre(data, prior, etas[a], sums, a, offers[b], memory)
        if full:
            found.rest[LOOKED] = sums.totals[2]
            screened = screen(family, prior, etas, candidates, sums, memory)
            bold = safe = -1
            if screened.hoped < min(out[LEVEL, b], out[MEAN_LOSS, b]) - prior.tolerance:
                bold, safe = screened.bold, screened.safe
                found.rest[PREFERRED] = bold  # which centre is to be watched
        if bold >= 0:
            hold_if_better(data, prior, priors, bold, found, memory)
            passes += 1
        if safe >= 0 and safe != bold:
            hold_if_better(data, prior, priors, safe, found, memory)
            passes += 1
        level = held_level(prior, found, point)
        out[LEVEL, b], out[LEAST, b], out[WANTED, b] = (
            level,
            smaller(level, out[MEAN_LOSS, b]),
            passes,
        )
