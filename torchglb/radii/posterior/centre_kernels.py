"""Centres of posteriors, compiled: minimisers of the loss plus a penalty, one problem at a time.

A centre need not be exact: any point gives a valid level. So each is a carried point
(:mod:`torchglb.carried`), and it moves, by damped Newton steps of one pass each, only when it has
fallen too far behind the minimiser.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, inlined, kernel
from torchglb.backend.dense import EPS, cholesky, copy_vector, dot, length, solve_factored
from torchglb.carried.kernels import Carried, LossRows, Workspace, put_point, sum_rows, trace_of
from torchglb.carried.monomials import Monomials
from torchglb.carried.taylor import hessian_at
from torchglb.families.compiled import CompiledFamily

MAX_STEPS = 40
#: numbers of a prior
PRIOR = 8


class CompiledPrior(NamedTuple):
    """The prior of one problem, and what bounds its losses."""

    normal: bool  # N(0, s0^2 I); else uniform on the ball
    S: float  # of the ball
    variance: float  # s0^2
    log_volume: float  # of the ball
    concordance: float  # R_s on the support of the prior
    top: float  # the largest m'' there
    log_failure: float  # log(1/delta)
    tolerance: float  # what may be left on the table to save passes
    terms: int  # of the series


@inlined
def prior_in(normal: bool, numbers: Floats) -> CompiledPrior:
    """From the eight numbers of a problem."""
    n = numbers
    return CompiledPrior(normal, n[0], n[1], n[2], n[3], n[4], n[5], n[6], int(n[7]))


class Matrices(NamedTuple):
    """Memory: matrices ``(d, d)`` and vectors ``(4, d)``."""

    hessian: Floats
    factor: Floats
    root: Floats
    vectors: Floats


@inlined
def matrices(dim: int) -> Matrices:
    """For so many features."""
    return Matrices(
        np.zeros((dim, dim)), np.zeros((dim, dim)), np.zeros((dim, dim)), np.zeros((4, dim))
    )


# ---- centres -----------------------------------------------------------------------------------


@kernel
def penalty_at(prior: CompiledPrior, eta: float, point: Floats) -> float:
    """``-eta log(S^2 - |theta|^2)``, or ``|theta|^2/(2 s0^2)``; infinite outside the ball."""
    square = dot(point, point)
    if prior.normal:
        return 0.5 * square / prior.variance
    room = prior.S * prior.S - square
    return -eta * math.log(room) if room > 0.0 else math.inf


@kernel
def newton_step(
    prior: CompiledPrior, eta: float, carried: Carried, slot: int, point: Floats, memory: Matrices
) -> float:
    """The Newton step of loss plus penalty at a centre, into ``vectors[1]``.

    Returns:
        Half the squared Newton decrement: to second order, how far the penalised loss is above its
        minimum. 0 where the Hessian is not positive definite by rounding.
    """
    d, hessian = point.shape[0], memory.hessian
    gradient, step = memory.vectors[0], memory.vectors[1]
    pull, bend = 1.0 / prior.variance, 0.0
    if not prior.normal:
        room = prior.S * prior.S - dot(point, point)
        pull, bend = 2.0 * eta / room, 4.0 * eta / (room * room)
    hessian_at(carried.sums[:, slot], 1.0, hessian)
    for i in range(d):
        gradient[i] = carried.sums[1 + i, slot] + pull * point[i]
        for j in range(d):
            hessian[i, j] += bend * point[i] * point[j]
        hessian[i, i] += pull
    if not cholesky(hessian, 0.0, memory.factor):
        return 0.0
    solve_factored(memory.factor, gradient, step)
    half = 0.5 * dot(step, gradient)
    for i in range(d):
        step[i] = -step[i]
    return half


@kernel
def distance_to_sphere(point: Floats, direction: Floats, S: float) -> float:
    """The largest t with ``|point + t direction| <= S``, for a point of the ball."""
    room = max(S * S - dot(point, point), 0.0)
    along, square = dot(point, direction), dot(direction, direction)
    if not square > 0.0:
        return math.inf
    root = math.sqrt(along * along + square * room)
    # of the two forms of the root, the one without cancellation
    return room / (along + root) if along > 0.0 else (root - along) / square


class Pass(NamedTuple):
    """What a pass over all rows of a problem needs."""

    family: CompiledFamily
    rows: LossRows
    table: Monomials  # of second order
    work: Workspace


@kernel
def pass_at(data: Pass, point: Floats) -> None:
    """The sums at a point, into the workspace."""
    sum_rows(data.family, data.rows, data.rows.y.shape[0], point, data.table, data.work)


@kernel
def recentre(
    data: Pass,
    prior: CompiledPrior,
    eta: float,
    carried: Carried,
    slot: int,
    offer: Floats,
    memory: Matrices,
) -> int:
    """Moves a centre until half its squared Newton decrement is at most the tolerance.

    A step of length ``log(1 + l)/l`` times a Newton step of length l is safe for a loss with
    ``|m'''| <= m''`` and ``|x| <= 1``, and so is one of four fifths of the way to the sphere; a bad
    guess costs a pass, no more.

    Args:
        data: the rows.
        prior: of the problem.
        eta: weight of the barrier.
        carried: the sums.
        slot: which point.
        offer: a point that is taken if it is better, alone or with its derivatives; or nothing.
        memory: for algebra.

    Returns:
        The number of passes.
    """
    d, work, passes, damping = carried.points.shape[0], data.work, 0, 1.0
    point, trial = memory.vectors[2], memory.vectors[3]
    copy_vector(carried.points[:, slot], point)
    value = carried.sums[0, slot] + penalty_at(prior, eta, point)
    behind = newton_step(prior, eta, carried, slot, point, memory)
    if offer.shape[0] > 0 and behind > prior.tolerance:
        place = offer[:d]
        # next to the sphere a Newton step no more than doubles the room
        if prior.normal or dot(place, place) <= (1.0 - 1.0 / 64.0) * prior.S * prior.S:
            if offer.shape[0] > d:
                copy_vector(offer[d:], work.sums)
                work.rest[:] = 0.0
            else:
                pass_at(data, place)
                passes += 1
            after = work.sums[0] + penalty_at(prior, eta, place)
            if after < value:
                put_point(carried, slot, place, work.sums, work.rest, trace_of(work.sums, d))
                copy_vector(place, point)
                value = after
            behind = newton_step(prior, eta, carried, slot, point, memory)
    for _ in range(MAX_STEPS):
        if not behind > prior.tolerance or damping < 1e-6:
            break
        step = memory.vectors[1]
        far, share = length(step), damping
        if far > 0.5:
            share *= math.log1p(far) / far
        if not prior.normal:
            share = min(share, 0.8 * damping * distance_to_sphere(point, step, prior.S))
        for i in range(d):
            trial[i] = point[i] + share * step[i]
        pass_at(data, trial)
        passes += 1
        after = work.sums[0] + penalty_at(prior, eta, trial)
        if after <= value + 64.0 * EPS * abs(value):
            put_point(carried, slot, trial, work.sums, work.rest, trace_of(work.sums, d))
            value, damping = after, 1.0
            copy_vector(trial, point)
            behind = newton_step(prior, eta, carried, slot, point, memory)
        else:
            damping *= 0.25
    return passes
