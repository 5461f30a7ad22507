"""Candidates for a posterior around a centre, compiled: their divergence, and what they promise.

The formulas of :mod:`.uniform` and :mod:`.gaussian`, one problem at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, allocating, entry, kernel
from torchglb.backend.dense import EPS, cholesky, copy_vector, dot, forward, length
from torchglb.carried.kernels import ROWS, Carried
from torchglb.carried.rounding import compensated, plain
from torchglb.carried.taylor import hessian_at
from torchglb.families.compiled import CompiledFamily
from torchglb.radii.posterior.centre_kernels import CompiledPrior, Matrices
from torchglb.radii.posterior.increment_kernels import growth, law_of

#: numbers of a candidate: kappa, rho^2 (or a), k and the entropy of the shape
KAPPA, RHO2, SHAPE, ENTROPY = 0, 1, 2, 3
#: above the rounding errors of log det W and tr(W^-1 H)
LINEAR_ALGEBRA = 1e-10
TINY = 2.3e-308


@kernel
def level_of(
    prior: CompiledPrior, point: Floats, loss: float, cost: float, totals: Floats
) -> float:
    """``log(1/delta) + L(c) + cost``, and what rounding may have taken from it."""
    lost = (compensated(point.shape[0]) + totals[2]) * EPS
    slack = lost * (abs(loss) + cost + 2.0 * length(point) * totals[1])
    return prior.log_failure + loss + cost + 2.0 * slack


@kernel
def precision_of(
    prior: CompiledPrior, point: Floats, candidate: Floats
) -> tuple[float, float, float, float]:
    """temper, unit, tilt and scale of W: :func:`torchglb.radii.posterior.candidates.precision_of`.

    Args:
        prior: of the problem.
        point: c.
        candidate: its four numbers.
    """
    kappa, rho2 = candidate[KAPPA], candidate[RHO2]
    if prior.normal:
        return rho2 / prior.variance, 1.0, 0.0, prior.variance
    room = kappa * max(prior.variance * (1.0 - 1e-12) - dot(point, point), TINY)
    return rho2, 1.0 / room, kappa / (1.0 - kappa) / (room * room), 1.0


@kernel
def divergence_of(
    prior: CompiledPrior, point: Floats, candidate: Floats, log_det: float, inverse_trace: float
) -> float:
    """``KL(P || Q)``: :func:`torchglb.radii.posterior.candidates.divergence_of`."""
    if not prior.normal:
        return prior.log_volume + 0.5 * log_det + candidate[ENTROPY] + LINEAR_ALGEBRA
    square = dot(point, point) / prior.variance
    return 0.5 * (inverse_trace - point.shape[0] + log_det + square) + LINEAR_ALGEBRA


@kernel
def posterior_at(
    prior: CompiledPrior,
    point: Floats,
    carried: Carried,
    slot: int,
    candidate: Floats,
    memory: Matrices,
) -> float:
    """M of one posterior around a carried point, into ``memory.root``, and ``KL(P || Q)``.

    The posterior is the one with the covariance ``M'M``, M the inverse of a Cholesky factor as
    computed: its divergence and its widths err by some roundings, whatever the condition of W.
    Where it has to lie in the ball, W gets as much curvature more as rounding may have taken.
    """
    d, W, root, column = point.shape[0], memory.hessian, memory.root, memory.vectors[0]
    temper, unit, tilt, scale = precision_of(prior, point, candidate)
    hessian_at(carried.sums[:, slot], 1.0, W)
    size = 0.0
    for i in range(d):
        for j in range(d):
            W[i, j] = W[i, j] / temper + tilt * point[i] * point[j]
        W[i, i] += unit
        size += W[i, i]
    lost = 0.0 if prior.normal else hessian_rounding(d, carried.totals[ROWS]) * size
    if not cholesky(W, lost, memory.factor):
        return math.inf
    log_det, trace = 0.0, 0.0
    for i in range(d):
        log_det += 2.0 * math.log(memory.factor[i, i])
        column[:] = 0.0
        column[i] = 1.0
        forward(memory.factor, column, column)
        trace += dot(column, column)
        for j in range(d):
            root[j, i] = math.sqrt(scale) * column[j]
    doubt = d * d * EPS * math.sqrt(size * trace)
    return divergence_of(prior, point, candidate, log_det, trace) + doubt


@entry
def hessian_rounding(dim: int, rows: float) -> float:
    """What a carried Hessian and a Cholesky factor of it may have lost, in units of the trace."""
    return (plain(dim, rows) + 8.0 * (dim + 1.0)) * EPS


class BestCandidates(NamedTuple):
    """The best of all candidates, as far as no row is needed, and the levels that they promise."""

    bold: int  # the least level to second order in the width, below which the rows hardly ever lead
    hoped: float
    safe: int  # the least level that is certain, from tr(W^-1 H)
    certain: float


@allocating
def screen(
    family: CompiledFamily,
    prior: CompiledPrior,
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
    point, turned = memory.vectors[2], memory.vectors[0]
    best = BestCandidates(0, math.inf, 0, math.inf)
    for slot in range(etas.shape[0]):
        copy_vector(carried.points[:, slot], point)
        hessian_at(carried.sums[:, slot], 1.0, memory.hessian)
        values, basis = np.linalg.eigh(memory.hessian)
        size = 0.0
        for i in range(d):
            turned[i] = 0.0
            size += abs(values[i])
            for j in range(d):
                turned[i] += basis[j, i] * point[j]
        lost = d * hessian_rounding(d, carried.totals[ROWS]) * size
        start = level_of(prior, point, carried.sums[0, slot], 0.0, carried.totals)
        for kind in range(kinds):
            candidate = candidates[kind]
            temper, unit, tilt, scale = precision_of(prior, point, candidate)
            log_det, trace, inverse_trace, inflation, tilted, widest = 0.0, 0.0, 0.0, 1.0, 0.0, 0.0
            for i in range(d):
                eigen = max(values[i], 0.0)
                inverse = 1.0 / (eigen / temper + unit)
                log_det -= math.log(inverse)
                trace += eigen * inverse
                inverse_trace += inverse
                share = turned[i] * turned[i] * inverse
                inflation += tilt * share
                tilted += eigen * share * inverse
                widest = max(widest, inverse)
            log_det += math.log(inflation)
            trace = scale * (trace - tilt / inflation * tilted)
            law = law_of(family, prior.normal, d, candidate[SHAPE], prior.terms)
            reach = max(carried.totals[0] * carried.totals[0] * scale * widest, 1e-12)
            begun = start + divergence_of(prior, point, candidate, log_det, inverse_trace)
            hoped = begun + 0.5 * trace * law.second
            certain, trace = begun, trace + lost * scale * widest
            if trace > 0.0:
                certain += trace * growth(family, law, reach, prior.concordance) / reach
            at = slot * kinds + kind
            if hoped < best.hoped:
                best = BestCandidates(at, hoped, best.safe, best.certain)
            if certain < best.certain:
                best = BestCandidates(best.bold, best.hoped, at, certain)
    return best
