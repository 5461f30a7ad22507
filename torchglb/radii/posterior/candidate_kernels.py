"""Candidates for a posterior around a centre, compiled: their divergence, and what they promise.

The formulas of :mod:`.uniform` and :mod:`.gaussian`, one problem at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, allocating, kernel
from torchglb.backend.dense import EPS, cholesky, dot, length, solve_factored
from torchglb.carried.kernels import Carried
from torchglb.carried.rounding import compensated
from torchglb.families.compiled import CompiledFamily
from torchglb.radii.posterior.centre_kernels import Matrices, Prior
from torchglb.radii.posterior.increment_kernels import growth, law_of

#: above the rounding errors of log det W and tr(W^-1 H)
LINEAR_ALGEBRA = 1e-10
TINY = 2.3e-308


@kernel
def level_of(prior: Prior, point: Floats, loss: float, cost: float, facts: Floats) -> float:
    """``log(1/delta) + L(c) + cost``, and what rounding may have taken from it."""
    lost = (compensated(point.shape[0]) + facts[2]) * EPS
    slack = lost * (abs(loss) + cost + 2.0 * length(point) * facts[1])
    return prior.log_failure + loss + cost + 2.0 * slack


@kernel
def room_around(prior: Prior, point: Floats) -> float:
    """``S^2 - |c|^2``, a little less than there is: the containment then survives rounding."""
    return max(prior.S * prior.S * (1.0 - 1e-12) - dot(point, point), TINY)


@kernel
def posterior_at(
    prior: Prior, point: Floats, carried: Carried, slot: int, candidate: Floats, memory: Matrices
) -> float:
    """W^-1 of one posterior around a centre, into ``memory.cover``, and ``KL(P || Q)``.

    Uniform prior: ``W = H/rho^2 + (I + c c'/((1 - kappa) q))/(kappa q)``, ``q = S^2 - |c|^2``.
    Gaussian prior: ``W = H/a + I/s0^2``, computed in units of the prior's precision.

    Args:
        prior: of the problem.
        point: c.
        carried: has the Hessian there,
        slot: at this point.
        candidate: kappa, rho^2 (or a), k and the entropy of the shape.
        memory: for algebra.
    """
    d, W, cover = point.shape[0], memory.hessian, memory.cover
    kappa, rho2 = candidate[0], candidate[1]
    unit, tilt = 1.0, 0.0
    if prior.normal:
        rho2 = rho2 / prior.variance
    else:
        room = kappa * room_around(prior, point)
        unit, tilt = 1.0 / room, kappa / (1.0 - kappa) / (room * room)
    place = 1 + d
    for i in range(d):
        for j in range(i, d):
            entry_ = carried.sums[place, slot] / rho2 + tilt * point[i] * point[j]
            W[i, j] = entry_
            W[j, i] = entry_
            place += 1
        W[i, i] += unit
    if not cholesky(W, 0.0, memory.factor):
        return math.inf
    half_log_det, trace = 0.0, 0.0
    column = memory.vectors[0]
    for i in range(d):
        half_log_det += math.log(memory.factor[i, i])
        column[:] = 0.0
        column[i] = 1.0
        solve_factored(memory.factor, column, column)
        for j in range(d):
            cover[j, i] = column[j]
        trace += column[i]
    if not prior.normal:
        return prior.log_volume + half_log_det + candidate[3] + LINEAR_ALGEBRA
    for i in range(d):
        for j in range(d):
            cover[i, j] *= prior.variance
    square = dot(point, point) / prior.variance
    return half_log_det + 0.5 * (trace - d + square) + LINEAR_ALGEBRA


class BestCandidates(NamedTuple):
    """The best of all candidates, as far as no row is needed, and the levels that they promise."""

    bold: int  # the least level to second order in the width, below which the rows hardly ever lead
    hoped: float
    safe: int  # the least level that is certain, from tr(W^-1 H)
    certain: float


@allocating
def screen(
    family: CompiledFamily,
    prior: Prior,
    etas: Floats,
    candidates: Floats,
    carried: Carried,
    memory: Matrices,
) -> BestCandidates:
    """All J posteriors around all P centres: O(P (d^3 + J d)).

    W is diagonal plus rank one in the eigenvectors of the Hessian, so that one decomposition of
    H(c) serves all J of them: ``W = diag(scale) + alpha c c'`` there.
    """
    d, kinds = carried.points.shape[0], candidates.shape[0]
    point, turned, scale = memory.vectors[2], memory.vectors[0], memory.vectors[1]
    best = BestCandidates(0, math.inf, 0, math.inf)
    for slot in range(etas.shape[0]):
        place = 1 + d
        for i in range(d):
            point[i] = carried.points[i, slot]
            for j in range(i, d):
                memory.hessian[i, j] = carried.sums[place, slot]
                memory.hessian[j, i] = carried.sums[place, slot]
                place += 1
        values, basis = np.linalg.eigh(memory.hessian)
        for i in range(d):
            turned[i] = 0.0
            for j in range(d):
                turned[i] += basis[j, i] * point[j]
        start = level_of(prior, point, carried.sums[0, slot], 0.0, carried.facts)
        for kind in range(kinds):
            kappa, rho2, shape = candidates[kind, 0], candidates[kind, 1], candidates[kind, 2]
            unit, alpha = 1.0 / prior.variance, 0.0
            if not prior.normal:
                room = room_around(prior, point)
                unit, alpha = 1.0 / (kappa * room), 1.0 / (kappa * (1.0 - kappa) * room * room)
            log_det, trace, inflation, tilted = 0.0, 0.0, 1.0, 0.0
            widest, inverse_trace = 0.0, 0.0
            for i in range(d):
                eigen = max(values[i], 0.0)
                scale[i] = eigen / rho2 + unit
                log_det += math.log(scale[i])
                trace += eigen / scale[i]
                inverse_trace += 1.0 / scale[i]
                share = turned[i] * turned[i] / scale[i]
                inflation += alpha * share
                tilted += eigen * share / scale[i]
                widest = max(widest, 1.0 / scale[i])
            trace -= alpha / inflation * tilted
            if prior.normal:
                log_det += d * math.log(prior.variance)
                square = dot(point, point)
                cost = 0.5 * (log_det - d + (inverse_trace + square) / prior.variance)
            else:
                cost = prior.log_volume + 0.5 * (log_det + math.log(inflation))
                cost += candidates[kind, 3]
            law = law_of(family, prior.normal, d, shape, prior.terms)
            reach = max(carried.facts[0] * carried.facts[0] * widest, 1e-12)
            begun = start + cost + LINEAR_ALGEBRA
            hoped = begun + 0.5 * trace * law.second
            certain = begun
            if trace > 0.0:
                certain += trace * growth(family, law, reach, prior.concordance) / reach
            at = slot * kinds + kind
            if hoped < best.hoped:
                best = BestCandidates(at, hoped, best.safe, best.certain)
            if certain < best.certain:
                best = BestCandidates(best.bold, best.hoped, at, certain)
    return best
