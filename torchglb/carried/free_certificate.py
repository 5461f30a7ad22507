"""What a carried polynomial says of the minimiser over R^d, and how far that is certain; compiled.

The distance. With gradient g and Hessian H of F at theta, ``|m'''| <= R m''`` and X the length of
the longest row, the Hessian is at least ``e^(-R X |u| s)`` H after a share s of the segment to the
minimiser theta + u. Integrated along it, and with ``<grad F(theta + u), u> <= 0``,

    ``|u|_H (1 - e^(-R X |u|)) / (R X |u|) <= delta``,  ``delta = |g|`` in H^-1, so that

    ``|u|_H <= -log(1 - k delta) / k``,  ``k = R X / sqrt(least eigenvalue of H)``, if k delta < 1.

A lower bound M on H serves as well. Where R holds on a ball only, u leads to the minimiser over
that ball; if it cannot reach the sphere, this is the minimiser over R^d.

The polynomial's Hessian over 1 + its relative error (:func:`torchglb.carried.taylor.remainder`) is
a lower bound, however large that error is.

The correction. Where the gradient at theta_0 is known, the polynomial's error there is known, too,
and at theta_0 + v it has changed by the integral of the Hessian's error along v: by at most
``r |v|_H(c) e^(R D/2)`` in the dual norm of the Hessian there, r the Hessian's remainder relative
to that at the centre c, and D = X times the distance from it.

The tilt's error. A tilt that is off by w has another minimiser: delta grows by ``|w|`` in H^-1.
Where ``|w| <= eta`` in the norm of G^-1, and G is the Hessian at a reference point, that is at most
``eta e^(R X |theta - reference|/2)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from torchglb.backend import Floats, Ints, kernel, record_type
from torchglb.backend.dense import cholesky, distance, dot, exponential, forward, length
from torchglb.carried.kernels import LONGEST
from torchglb.carried.model import (
    Decrement,
    Dense,
    Model,
    Objective,
    decrement_of,
    error_at,
    expand,
    hessian_rounding,
    loss_concordance,
    squared_length,
)
from torchglb.carried.taylor import hessian_at, remainder

#: a polynomial's Hessian that may be wrong by more than this share bounds nothing
TRUST = 0.5


class FreeState(Protocol):
    """What is known of the minimiser of one problem."""

    high: float  # F(theta) is at most this
    distance: float  # of the minimiser at most, in the norm of M; infinity: not known
    length: float  # the same in the Euclidean norm
    hessian_error: float  # of the Hessian at theta, relative to the true one
    leader: int  # the arm with the largest <x, theta>
    certain: int  # whether it is the minimiser's, for every tilt within its error
    passes: int  # so far; whoever begins anew sets it to 0
    answered: int  # the pass that was asked for and has been made
    corrected: int  # 1 + the carried point whose polynomial is corrected, or 0
    leapt: int  # whether a long step has led upwards
    clock: int  # of searches


FREE = record_type(FreeState)


class FreeSearch(NamedTuple):
    """What a search works on, beside its state: a record in a tuple would be a copy."""

    theta: Floats  # (d,), where it is
    correction: Floats  # (d,), the true gradient less that of a polynomial
    corrected_at: Floats  # (d,), at this point
    used: Ints  # the time when each carried point was last of use, (A,)
    objective: Objective  # F
    memory: Dense  # for algebra; its Hessian, and the first of its vectors, the gradient, are F's
    tol: float  # the distance is at most this times 1 + |theta|, but for rounding
    hessian_tol: float  # relative error of the Hessian; infinite where it is not needed
    arms: Floats  # (K, d); or the largest <x, theta> of these is certain; none if K = 0
    tilt_error: float  # eta, of the tilt in the dual norm of the Hessian at the reference
    reference: Floats  # (d,), a point
    used_once: bool  # whether nobody comes back to the minimiser, or to its neighbourhood


class View(NamedTuple):
    """What the polynomial of a carried point says at theta."""

    decrement: Decrement  # of Newton, in M
    slope: float  # how far the gradient may be from it, in the same norm
    hessian_error: float  # relative; infinite beyond TRUST, where another one may stand for it
    reach: float  # R X times the distance from the carried point


@kernel
def look(state: FreeState, search: FreeSearch, model: Model, bold: bool) -> View:
    """Gradient and Hessian of F at theta by the polynomial of one point, and their errors.

    M: the polynomial's Hessian is at most 1 + its relative error times the true one. Where that is
    large and the Hessian at the carried point times ``e^(-R D)`` says more, M is that. In the place
    of a Hessian that may be wrong stands the upper bound, ``e^(R D)`` times that at the carried
    point; unless a search is bold and the polynomial convex there. The factor of M is left in the
    memory.
    """
    theta, memory, gradient = search.theta, search.memory, search.memory.vectors[0]
    d, ridge = theta.shape[0], model.objective.quadratic.ridge
    hessian, metric = memory.hessian, memory.metric
    value = expand(model, theta, memory, gradient, True)
    error = error_at(model, theta, value, memory)
    state.high = value + error.value
    reach = loss_concordance(model.objective) * length(memory.shift)
    slope = _correct(search, model) if state.corrected == 1 + model.slot else error.slope
    lost = hessian_rounding(model.objective.carried, error.trace)
    grown, scale = math.exp(min(reach, 300.0)), 1.0 + error.hessian
    good = error.hessian <= TRUST
    convex = good or (bold and cholesky(hessian, -ridge - lost, memory.factor))
    if good or (convex and scale <= grown):
        shift = ridge - ridge / scale  # nothing is uncertain about the ridge
        for i in range(d):
            for j in range(d):
                metric[i, j] = hessian[i, j] / scale
    else:
        shift = ridge
        hessian_at(model.sums, math.exp(-reach), metric)
    if not convex:
        hessian_at(model.sums, grown, hessian)
        for i in range(d):
            hessian[i, i] += ridge
    decrement = decrement_of(model, gradient, shift, error.trace, memory)
    if decrement.value == math.inf:
        return View(decrement, math.inf, math.inf, reach)
    return View(decrement, slope, error.hessian if good else math.inf, reach)


@kernel
def _correct(search: FreeSearch, model: Model) -> float:
    """Adds the correction to the gradient; what may be wrong with it then."""
    theta, gradient, v = search.theta, search.memory.vectors[0], search.memory.vectors[1]
    constants = model.objective.constants
    for k in range(theta.shape[0]):
        gradient[k] += search.correction[k]
        v[k] = theta[k] - search.corrected_at[k]
    near = length(search.memory.shift)
    far = max(near, distance(search.corrected_at, model.point))  # of all points between the two
    longest, order = model.objective.carried.totals[LONGEST], model.objective.table.order
    off = remainder(far, 0.0, longest, constants.ratio, constants.concordance, order)
    grown = exponential(0.5 * constants.concordance * longest * near)
    return off.hessian * math.sqrt(squared_length(model, v)) * grown


@kernel
def is_enough(state: FreeState, search: FreeSearch, view: View) -> bool:
    """Certifies the distance of the minimiser, and says whether the goal is reached.

    Or whether it would be if the tilt were certain: then a better tilt is needed, not a pass.
    """
    size, constants = length(search.theta), search.objective.constants
    state.distance, state.length, state.hessian_error = math.inf, math.inf, view.hessian_error
    state.certain = 0
    if not view.decrement.value < math.inf:
        return False
    flat = view.decrement.flatness
    concordance = loss_concordance(search.objective)
    k, delta = concordance * flat, view.decrement.value + view.slope
    known, delta = _distance(delta, k), delta + view.decrement.rounding
    distance = _distance(delta, k)
    fine = view.hessian_error <= search.hessian_tol
    done = fine and known * flat <= search.tol * (1.0 + size)
    if not size + distance * flat < constants.radius:
        return done  # and nothing is certain
    state.distance, state.length = distance, distance * flat
    if search.arms.shape[0] > 0:
        wider = _distance(delta + _tilt_error(search, concordance), k)
        if size + wider * flat < constants.radius:
            state.certain = int(_is_clear(state, search, wider))
        done = done or state.certain == 1
        if not done and search.tilt_error > 0.0:
            done = _is_clear(state, search, distance)
    return done


@kernel
def _tilt_error(search: FreeSearch, concordance: float) -> float:
    """By how much the tilt may be off, in the dual norm of the Hessian at theta."""
    away = distance(search.theta, search.reference)
    return search.tilt_error * exponential(0.5 * concordance * away)


@kernel
def _distance(delta: float, k: float) -> float:
    """``-log(1 - k delta)/k``, and a little more: how far the minimiser may be."""
    share = k * delta
    if not share < 1.0:
        return math.inf
    return (1.0 + 1e-12) * (-math.log1p(-share) / k if share > 1e-8 else (1.0 + share) * delta)


@kernel
def _is_clear(state: FreeState, search: FreeSearch, distance: float) -> bool:
    """Whether the arm that leads at theta leads wherever the minimiser may be.

    ``<x - x', u>`` is at most the distance times the length of x - x' in M^-1.
    """
    theta, arms, memory = search.theta, search.arms, search.memory
    best, state.leader, difference = -math.inf, 0, memory.vectors[2]
    for k in range(arms.shape[0]):
        score = dot(arms[k], theta)
        if score > best:
            best, state.leader = score, k
    leader = arms[state.leader]
    for k in range(arms.shape[0]):
        for i in range(theta.shape[0]):
            difference[i] = leader[i] - arms[k, i]
        ahead = dot(difference, theta)
        forward(memory.factor, difference, difference)
        if ahead < distance * length(difference):
            return False
    return True
