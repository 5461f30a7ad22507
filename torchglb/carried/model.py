"""``F = L + (lambda/2)|theta|^2 - <tilt, theta>`` near a carried point, with what is certain of it.

Whoever searches on carried sums asks here: for F by the Taylor polynomial of a point, for what that
may be off by, and for Newton's decrement, which tells how far the minimiser is; compiled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from torchglb.backend import Floats, entry, inlined, kernel, record, record_type
from torchglb.backend.dense import (
    EPS,
    TINY,
    cholesky,
    copy_vector,
    dot,
    exponential,
    forward,
    inverse_trace,
    length,
)
from torchglb.carried.kernels import LONGEST, MAGNITUDE, ROWS, Carried, carried_in
from torchglb.carried.monomials import Monomials
from torchglb.carried.rounding import compensated, plain
from torchglb.carried.taylor import (
    remainder,
    squared_in_hessian,
    taylor_gradient,
    taylor_hessian,
    taylor_powers,
    taylor_value,
)


class Quadratic(NamedTuple):
    """What is added to the loss of the data: ``(lambda/2)|theta|^2 - <tilt, theta>``.

    lambda is at least 0.
    """

    ridge: float
    tilt: Floats


class Constants(NamedTuple):
    """What bounds the loss of one problem between its points."""

    radius: float  # S of the ball in which all points lie
    ratio: float  # C, with |m^(q+1)| <= C m'' on [-S, S]
    concordance: float  # R, with |m'''| <= R m'' there


CONSTANTS = record_type(Constants)


class Objective(NamedTuple):
    """F of one problem: the sums that are carried, and what goes with them."""

    carried: Carried  # the sums at A points
    quadratic: Quadratic  # what is added to the loss
    constants: Constants  # S, C and R
    table: Monomials  # the monomials of the sums


@kernel
def loss_concordance(objective: Objective) -> float:
    """R X, X the longest row: ``|D^3 F[v, v, u]| <= R X |u| D^2 F[v, v]``, without the ridge."""
    return objective.constants.concordance * objective.carried.totals[LONGEST]


@kernel
def loss_at(carried: Carried, quadratic: Quadratic, a: int) -> float:
    """F at a carried point."""
    squared, tilted = 0.0, 0.0
    for k in range(carried.points.shape[0]):
        squared += carried.points[k, a] * carried.points[k, a]
        tilted += quadratic.tilt[k] * carried.points[k, a]
    return carried.sums[0, a] + 0.5 * quadratic.ridge * squared - tilted


@kernel
def gradient_at(carried: Carried, quadratic: Quadratic, k: int, a: int) -> float:
    """One entry of the gradient of F at a carried point."""
    return carried.sums[1 + k, a] + quadratic.ridge * carried.points[k, a] - quadratic.tilt[k]


@kernel
def quadratic_value(quadratic: Quadratic, theta: Floats) -> float:
    """What is added to the loss at theta."""
    return 0.5 * quadratic.ridge * dot(theta, theta) - dot(quadratic.tilt, theta)


# ---- the polynomial ----------------------------------------------------------------------------


class Dense(NamedTuple):
    """Memory for small algebra."""

    hessian: Floats  # of F, (d, d)
    metric: Floats  # a lower bound M on a Hessian, (d, d)
    factor: Floats  # of a matrix, (d, d)
    shift: Floats  # from a carried point to where its polynomial was asked last, (d,)
    point: Floats  # a carried point, (d,)
    sums: Floats  # its sums, (count,)
    powers: Floats  # the monomials of shift over their factorials, (count,)
    vectors: Floats  # (5, d)


@inlined
def dense(dim: int, count: int) -> Dense:
    """For so many features and monomials."""
    return Dense(
        np.zeros((dim, dim)),
        np.zeros((dim, dim)),
        np.zeros((dim, dim)),
        np.zeros(dim),
        np.zeros(dim),
        np.zeros(count),
        np.zeros(count),
        np.zeros((5, dim)),
    )


class Model(NamedTuple):
    """F near one carried point."""

    objective: Objective
    slot: int  # which of its points
    point: Floats  # this point, (d,)
    sums: Floats  # its sums, (count,) or longer


@inlined
def only_model(objective: Objective) -> Model:
    """At the only carried point: where that moves, the model does."""
    carried, table = objective.carried, objective.table
    return Model(objective, 0, carried.points.reshape(table.dim), carried.sums.reshape(table.count))


@inlined
def model_at(objective: Objective, slot: int, memory: Dense) -> Model:
    """At one of several carried points, which is copied into the memory."""
    carried = objective.carried
    for k in range(carried.points.shape[0]):
        memory.point[k] = carried.points[k, slot]
    for i in range(carried.sums.shape[0]):
        memory.sums[i] = carried.sums[i, slot]
    return Model(objective, slot, memory.point, memory.sums)


@kernel
def expand(
    model: Model, theta: Floats, memory: Dense, gradient: Floats, with_hessian: bool
) -> float:
    """F at theta by the polynomial; its gradient, and its Hessian into the memory."""
    quadratic, table, powers = model.objective.quadratic, model.objective.table, memory.powers
    _displace(model, theta, memory)
    taylor_powers(memory.shift, table, powers)
    taylor_gradient(model.sums, powers, table, gradient)
    if with_hessian:
        taylor_hessian(model.sums, powers, table, memory.hessian)
    for k in range(theta.shape[0]):
        gradient[k] += quadratic.ridge * theta[k] - quadratic.tilt[k]
        if with_hessian:
            memory.hessian[k, k] += quadratic.ridge
    return taylor_value(model.sums, powers, table) + quadratic_value(quadratic, theta)


@kernel
def _displace(model: Model, theta: Floats, memory: Dense) -> None:
    for k in range(theta.shape[0]):
        memory.shift[k] = theta[k] - model.point[k]


# ---- what is certain of it ---------------------------------------------------------------------


class Error(NamedTuple):
    """What is certain of a Taylor polynomial as computed.

    Attributes:
        value: the loss is at most this far from it; and the loss at any point of the ball from what
            value and gradient say of it, but for ``slope``.
        slope: the gradient's remainder, in the dual norm of the Hessian there.
        hessian: the Hessian's remainder, relative to the Hessian there.
        trace: of the Hessian there, at most.
        rounding: what of ``value`` is not remainder.
    """

    value: float
    slope: float
    hessian: float
    trace: float
    rounding: float


ERROR = record_type(Error)


@kernel
def hessian_rounding(carried: Carried, trace: float) -> float:
    """What rounding may do to a carried Hessian with this trace: at most so many unit matrices."""
    return plain(carried.points.shape[0], carried.totals[ROWS]) * EPS * trace


@kernel
def squared_length(model: Model, p: Floats) -> float:
    """``|p|^2`` in the Hessian of the data at the carried point, or more."""
    carried = model.objective.carried
    paid = hessian_rounding(carried, carried.trace[model.slot]) * dot(p, p)
    return max(squared_in_hessian(model.sums, p), 0.0) + paid


@kernel
def loss_rounding(model: Model, value: float) -> float:
    """What rounding may do to the loss in the ball by loss and slope at the carried point c.

    F has some value there. The sums have seen ``compensated`` roundings of terms that add up to at
    most ``|L| + 2 S magnitude``; what errors of z do to them is ``S (magnitude + |c| tr H)``.
    """
    carried, radius = model.objective.carried, model.objective.constants.radius
    steep = carried.totals[MAGNITUDE] + length(model.point) * carried.trace[model.slot]
    size = abs(model.sums[0]) + abs(value) + 4.0 * radius * steep
    return compensated(model.point.shape[0]) * EPS * size


@kernel
def error_at(model: Model, theta: Floats, value: float, memory: Dense) -> Error:
    """Remainder and rounding of the polynomial, of order q >= 2, at theta, where F has this value.

    Rounding: what the polynomial adds to loss and slope of its point are terms of second and higher
    order, at most ``(1 + C + R) tr H e^(max(R, 1) D) |p|`` each time |p| or 2S, p the displacement.
    That takes m >= 0, and ``|m^(k)| <= (1 + C + R) m''`` for 2 <= k <= q, as for all families that
    are compiled.
    """
    carried, constants = model.objective.carried, model.objective.constants
    trace, order = carried.trace[model.slot], model.objective.table.order
    radius, p, longest = constants.radius, memory.shift, carried.totals[LONGEST]
    _displace(model, theta, memory)
    far, local = length(p), squared_length(model, p)
    off = remainder(far, local, longest, constants.ratio, constants.concordance, order)
    grown = max(trace, TINY) * exponential(max(constants.concordance, 1.0) * longest * far)
    terms = (1.0 + constants.ratio + constants.concordance) * grown * far * (far + 2.0 * radius)
    rounding = loss_rounding(model, value) + hessian_rounding(carried, terms)
    return Error(off.value + rounding, off.slope, off.hessian, grown, rounding)


class Decrement(NamedTuple):
    """Newton's decrement: the length of the gradient of F in M^-1, M at most its Hessian."""

    value: float  # as computed; infinite where M is not positive definite
    rounding: float  # what rounding may add to it
    flatness: float  # 1/sqrt(least eigenvalue of M), or more


@kernel
def decrement_of(
    model: Model, gradient: Floats, shift: float, trace: float, memory: Dense
) -> Decrement:
    """In ``M + shift``, M in the memory but for its rounding, where a polynomial was asked last.

    The factor is left in the memory.

    Args:
        model: whose rounding it is.
        gradient: as the polynomial has it.
        shift: of M.
        trace: of the Hessian there, at most.
        memory: with M and the displacement.
    """
    carried, d = model.objective.carried, gradient.shape[0]
    lost = hessian_rounding(carried, trace)
    if not cholesky(memory.metric, shift - lost, memory.factor):
        return Decrement(math.inf, 0.0, math.inf)
    y = memory.vectors[4]
    forward(memory.factor, gradient, y)
    value = length(y)
    terms = (
        2.0 * carried.totals[MAGNITUDE]
        + length(model.point) * trace
        + length(gradient)
        + 2.0 * length(model.objective.quadratic.tilt)
    )
    rounding = compensated(d) * EPS * terms + lost * length(memory.shift)
    flatness = math.sqrt(inverse_trace(memory.factor, y))
    return Decrement(value, rounding * flatness, flatness)


# ---- of many problems ---------------------------------------------------------------------------


class CarriedSums(NamedTuple):
    """What is carried of N problems, in few arrays."""

    memory: Floats  # of the sums, (N, size)
    number: int  # A, at so many points
    constants: Any  # S, C and R, (N,) records of dtype CONSTANTS
    table: Monomials  # the monomials of the sums


@inlined
def carried_of(sums: CarriedSums, b: int) -> Carried:
    """The sums of one problem."""
    return carried_in(sums.memory[b], sums.table.dim, sums.number, sums.table.count)


class Objectives(NamedTuple):
    """F of N problems: what is carried of them, lambda ``(N,)`` and tilt ``(N, d)``."""

    sums: CarriedSums
    ridge: Floats
    tilt: Floats


@inlined
def objective_of(sums: CarriedSums, b: int, ridge: float, tilt: Floats) -> Objective:
    """F of one problem."""
    constants = record(sums.constants, b)
    return Objective(
        carried_of(sums, b),
        Quadratic(ridge, tilt),
        Constants(constants.radius, constants.ratio, constants.concordance),
        sums.table,
    )


class Polynomials(NamedTuple):
    """The polynomials of N problems at one place each."""

    value: Floats  # of F, (N,)
    gradient: Floats  # (N, d)
    hessian: Floats  # (N, d, d)
    errors: Any  # one Error for each, (N,) records of dtype ERROR


@entry
def expand_all(objectives: Objectives, slot: int, theta: Floats, found: Polynomials) -> None:
    """The polynomial of one point of every problem, at one place each."""
    sums, d = objectives.sums, theta.shape[1]
    memory = dense(d, sums.table.count)
    for b in range(theta.shape[0]):
        objective = objective_of(sums, b, objectives.ridge[b], objectives.tilt[b])
        model = model_at(objective, slot, memory)
        found.value[b] = expand(model, theta[b], memory, found.gradient[b], True)
        for i in range(d):
            copy_vector(memory.hessian[i], found.hessian[b, i])
        error, kept = error_at(model, theta[b], found.value[b], memory), record(found.errors, b)
        kept.value, kept.slope, kept.hessian = error.value, error.slope, error.hessian
        kept.trace, kept.rounding = error.trace, error.rounding
