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

from torchglb.backend import Floats, Ints, allocating, entry, floats_at, inlined, kernel
from torchglb.backend.dense import copy_vector
from torchglb.carried.kernels import FACTS, Carried, LossRows, carried_in, carry_row, workspace
from torchglb.carried.monomials import Packed, unpack
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import SCRATCH
from torchglb.radii.posterior.candidate_kernels import level_of, posterior_at, screen
from torchglb.radii.posterior.centre_kernels import (
    PRIOR,
    Matrices,
    Prior,
    matrices,
    newton_step,
    prior_in,
    put,
    recentre,
)
from torchglb.radii.posterior.increment_kernels import add_increment, law_of, sum_increments
from torchglb.radii.statistics_kernels import add_statistics, rule_in, statistics_in, undispersed

#: what a problem wants of the rows
NOTHING, REFRESH, LOOK = 0, 1, 2
#: a look after so many times the rows
GROWTH = 1.25
#: of beta^2, how much may be left on the table, if that is more than the tolerance
SHARE = 0.01


class Held(NamedTuple):
    """The posterior that is held, in its problem's memory; its centre is the last carried point.

    Attributes:
        cover: ``W^-1``, ``(d, d)``.
        rest: k of its density; its ``KL(P || Q)`` with its increments ``E_P L - L(c)``; which of
            all candidates the last search preferred; the rows at the last look.
        carried: the loss at the P centres and at that of the posterior.
    """

    cover: Floats
    rest: Floats
    carried: Carried


@inlined
def held_in(memory: Floats, dim: int, points: int, count: int) -> Held:
    """From memory ``(d^2 + 4 + memory_size(d, points, count),)``, in this order."""
    square = dim * dim
    rest, carried = memory[square : square + 4], memory[square + 4 :]
    cover = memory[:square].reshape(dim, dim)
    return Held(cover, rest, carried_in(carried, dim, points, count))


@allocating
def hold_if_better(
    family: CompiledFamily,
    rows: LossRows,
    prior: Prior,
    etas: Floats,
    candidates: Floats,
    at: int,
    held: Held,
    memory: Matrices,
) -> None:
    """Sums the increments of one of the candidates (a pass) and holds it if its level is lower."""
    carried = held.carried
    d, last, slot = carried.points.shape[0], etas.shape[0], at // candidates.shape[0]
    candidate = candidates[at % candidates.shape[0]]
    point, before = memory.vectors[2], memory.vectors[3]
    for i in range(d):
        point[i], before[i] = carried.points[i, slot], carried.points[i, last]
    divergence = posterior_at(prior, point, carried, slot, candidate, memory)
    law = law_of(family, prior.normal, d, candidate[2], prior.terms)
    cost = divergence + sum_increments(
        family,
        law,
        rows.X,
        rows.w,
        rows.X.shape[1],
        point,
        memory.cover,
        prior.concordance,
        prior.top,
    )
    new = level_of(prior, point, carried.sums[0, slot], cost, carried.facts)
    if not new < level_of(prior, before, carried.sums[0, last], held.rest[1], carried.facts):
        return
    put(carried, last, point, carried.sums[:, slot].copy(), carried.rest[:, slot].copy())
    for i in range(d):
        copy_vector(memory.cover[i], held.cover[i])
    held.rest[0], held.rest[1], held.rest[2] = candidate[2], cost, at


# ---- doors -------------------------------------------------------------------------------------


@entry
def carry_posteriors(
    family: CompiledFamily,
    x_address: int,
    r_address: int,
    w_address: int,
    k: int,
    normal: bool,
    numbers: Floats,
    packed: Packed,
    statistics: Floats,
    held: Floats,
) -> None:
    """Adds k rows of every problem to all that is carried.

    Args:
        family: the family.
        x_address: of the rows, float64 numbers ``(N, k, d)`` in a row.
        r_address: of their rewards, ``(N, k)``.
        w_address: of their weights, ``(N, k)``; 0 if all are 1.
        k: how many.
        normal: whether the prior is Gaussian.
        numbers: those of :func:`prior_in`, and after them those of ``rule_in``.
        packed: the monomials of second order.
        statistics: ``(N, size)``.
        held: of :func:`held_in`, ``(N, size)``.
    """
    table, d, plain = unpack(packed), packed.dim, undispersed(family)
    x, r = floats_at(x_address, (held.shape[0], k, d)), floats_at(r_address, (held.shape[0], k))
    w = floats_at(w_address, (held.shape[0], k))
    points = (held.shape[1] - d * d - 4 - FACTS) // (2 + 2 * d + packed.count)
    scratch, monomial, point = np.zeros(SCRATCH), np.empty(packed.count), np.empty(d)
    for b in range(held.shape[0]):
        prior, rule = prior_in(normal, numbers[b]), rule_in(numbers[b, PRIOR:])
        found, seen = held_in(held[b], d, points, packed.count), statistics_in(statistics[b], d)
        law = law_of(family, normal, d, found.rest[0], prior.terms)
        for i in range(d):
            point[i] = found.carried.points[i, points - 1]
        for s in range(k):
            row, reward, weight = x[b, s], r[b, s], 1.0
            if w_address != 0:
                weight = w[b, s]
            add_statistics(plain, rule, prior.S, row, reward, weight, seen, scratch)
            carry_row(family, row, weight, weight * reward, found.carried, table, scratch, monomial)
            found.rest[1] += weight * add_increment(
                family, law, row, point, found.cover, prior.concordance, prior.top
            )


@entry
def held_levels(
    family: CompiledFamily,
    normal: bool,
    numbers: Floats,
    etas: Floats,
    kinds: int,
    packed: Packed,
    statistics: Floats,
    held: Floats,
    loss_hat: Floats,
    out: Floats,
) -> bool:
    """The levels of the held posteriors: no row is read, nothing is changed.

    Args:
        family: the family.
        normal: whether the prior is Gaussian.
        numbers: of :func:`prior_in`, ``(N, 8)`` or more.
        etas: weights of the barrier, ``(P,)``.
        kinds: J.
        packed: the monomials of second order.
        statistics: ``(N, size)``.
        held: of :func:`held_in`, ``(N, size)``.
        loss_hat: loss at a point of the ball, ``(N,)``, or nothing for that of the centre in use.
        out: for each problem the level, that of the mean loss, and what is wanted of the rows.

    Returns:
        Whether anything is wanted of the rows.
    """
    d, slots, any_wanted = packed.dim, etas.shape[0], False
    memory, point = matrices(d), np.empty(d)
    for b in range(held.shape[0]):
        prior, found = prior_in(normal, numbers[b]), held_in(held[b], d, slots + 1, packed.count)
        sums = found.carried
        level = held_level(prior, found, point)
        slot = int(found.rest[2]) // kinds
        for i in range(d):
            point[i] = sums.points[i, slot]
        mean = math.inf
        if not normal:
            loss = loss_hat[b] if loss_hat.shape[0] > 0 else sums.sums[0, slot]
            slope = statistics_in(statistics[b], d).rest[0] * family.scale - loss
            infimum = slope if slope <= d else d * math.log(slope / d) + d
            mean = level_of(prior, point, loss, infimum, sums.facts)
        behind = newton_step(prior, etas[slot], sums, slot, point, memory)
        allowed = max(prior.tolerance, SHARE * (min(level, mean) - sums.sums[0, slot]))
        rows = sums.facts[2]
        wanted = REFRESH if behind > allowed else NOTHING
        if rows >= GROWTH * found.rest[3] and rows > found.rest[3]:
            wanted = LOOK
        any_wanted = any_wanted or wanted != NOTHING
        out[b, 0], out[b, 1], out[b, 2] = level, mean, wanted
    return any_wanted


@kernel
def held_level(prior: Prior, held: Held, point: Floats) -> float:
    """The level of the held posterior; its centre goes into ``point``."""
    sums, last = held.carried, held.carried.points.shape[1] - 1
    for i in range(point.shape[0]):
        point[i] = sums.points[i, last]
    return level_of(prior, point, sums.sums[0, last], held.rest[1], sums.facts)


@entry
def search_posteriors(
    family: CompiledFamily,
    rows: Floats,
    normal: bool,
    numbers: Floats,
    etas: Floats,
    candidates: Floats,
    packed: Packed,
    held: Floats,
    offers: Floats,
    where: Ints,
    out: Floats,
) -> None:
    """Searches the rows of some problems for better posteriors.

    Args:
        family: the family.
        rows: features, weights and weighted rewards of these problems, ``(M, d + 2, n)``.
        normal: whether the prior is Gaussian.
        numbers: of :func:`prior_in`, ``(N, 8)`` or more.
        etas: weights of the barrier, ``(P,)``.
        candidates: ``(J, 4)``, of :func:`posterior_at`.
        packed: the monomials of second order.
        held: of :func:`held_in`, ``(N, size)``; changed.
        offers: of :func:`recentre`, ``(N, 0)``, ``(N, d)`` or ``(N, d + count)``.
        where: the problems, ``(M,)``.
        out: of :func:`held_levels`; the level is changed, and passes go in place of wishes.
    """
    d, slots, table = packed.dim, etas.shape[0], unpack(packed)
    memory, work, point = matrices(d), workspace(d, packed.count), np.empty(d)
    for m in range(where.shape[0]):
        b, passes = where[m], 0
        prior, found = prior_in(normal, numbers[b]), held_in(held[b], d, slots + 1, packed.count)
        sums, data = found.carried, LossRows(rows[m, :d], rows[m, d], rows[m, d + 1])
        bold = safe = int(found.rest[2])
        slot, full = bold // candidates.shape[0], out[b, 2] == LOOK
        for a in range(0 if full else slot, slots if full else slot + 1):
            passes += recentre(
                family, data, prior, etas[a], sums, a, offers[b], table, work, memory
            )
        if full:
            found.rest[3] = sums.facts[2]
            screened = screen(family, prior, etas, candidates, sums, memory)
            bold = safe = -1
            if screened.hoped < min(out[b, 0], out[b, 1]) - prior.tolerance:
                bold, safe = screened.bold, screened.safe
                found.rest[2] = bold  # which centre is to be watched
        if bold >= 0:
            hold_if_better(family, data, prior, etas, candidates, bold, found, memory)
            passes += 1
        if safe >= 0 and safe != bold:
            hold_if_better(family, data, prior, etas, candidates, safe, found, memory)
            passes += 1
        out[b, 0], out[b, 2] = held_level(prior, found, point), passes
