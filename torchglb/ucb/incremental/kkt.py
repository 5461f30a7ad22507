"""The maximiser of one arm on an anchor's Taylor polynomial, by Newton's method on its conditions.

One of three cases holds, each with its own conditions, which suffice where the multipliers have the
right sign:

- the level is inactive: theta is the pole of the ball, ``S x / |x|``;
- the ball is inactive: ``x = lambda grad F(theta)`` and ``F(theta) = B``;
- both are active: ``x = lambda grad F(theta) + nu theta``, ``F(theta) = B`` and ``|theta| = S``.

All this is said by the polynomial; what is true of the point is for others to certify.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchglb.backend import Floats, kernel
from torchglb.backend.dense import EPS, copy_vector, dot, length, solve_general
from torchglb.carried.model import Model, expand
from torchglb.ucb.incremental.round_state import Round

#: which constraints are active; the number of multipliers is one more than this
LEVEL_ONLY, LEVEL_AND_BALL = 0, 1
#: steps at most
MAX_STEPS = 8
#: a step is the last one if it is at most this share of S: its square is the error that is left
SHORT = 3e-6
#: the sphere counts as met to this, relative to S^2: for d = 1 both constraints together may have
#: no solution
ON_SPHERE = 1e-6


class Solution(NamedTuple):
    """How a search has ended."""

    multiplier: float  # lambda; 0 at the pole
    found: bool  # whether one of the cases holds


@kernel
def maximise_on_model(round_: Round, x: Floats, model: Model, level: float) -> Solution:
    """``argmax <x, u>`` over ball and polynomial, by steps from a point nearby.

    The steps begin at ``memory.start``; the point, in the ball, goes into ``memory.trial``.

    Args:
        round_: of the arm.
        x: a unit vector.
        model: the polynomial.
        level: B.
    """
    memory, out = round_.memory.dense, round_.memory.trial
    radius, gradient = model.objective.constants.radius, memory.vectors[0]
    for k in range(x.shape[0]):
        out[k] = (1.0 - 4.0 * EPS) * radius * x[k]
    if expand(model, out, memory, gradient, False) <= level:
        return Solution(0.0, True)
    for case in (LEVEL_ONLY, LEVEL_AND_BALL):
        solution = _solve_case(round_, x, model, level, case)
        if solution.found:
            return solution
    copy_vector(round_.memory.start, out)
    return Solution(1.0, False)


@kernel
def _solve_case(round_: Round, x: Floats, model: Model, level: float, case: int) -> Solution:
    """Newton's method on the conditions of one case; arguments as in :func:`maximise_on_model`."""
    memory, right, out = round_.memory.dense, round_.memory.right, round_.memory.trial
    d, gradient, u = x.shape[0], memory.vectors[0], memory.vectors[1]
    radius = model.objective.constants.radius
    edge, sphere = (1.0 - 4.0 * EPS) * radius, radius * radius
    copy_vector(round_.memory.start, u)
    multiplier, outward = 1.0, 0.0
    for step in range(MAX_STEPS):
        loss = expand(model, u, memory, gradient, True)
        if step == 0:
            multiplier, outward = _multipliers(x, gradient, u, case)
            if not multiplier < math.inf:
                break
        squared = dot(u, u)
        _equations(round_, x, multiplier, outward)
        right[d] = level - loss
        right[d + 1] = 0.5 * (sphere - squared)
        if not solve_general(round_.memory.matrix, right, d + 1 + case):
            break
        size = 0.0
        for k in range(d):
            size += right[k] * right[k]
            u[k] += right[k]
        multiplier = float(right[d])
        outward = float(right[d + 1]) if case == LEVEL_AND_BALL else 0.0
        if not size < 1e6 * sphere:
            break
        squared = dot(u, u)
        if step < 1:
            continue
        if case == LEVEL_ONLY and step > 1 and squared > 1.05 * sphere:
            break  # the ball is active
        good = multiplier > 0.0 and size <= SHORT * SHORT * sphere
        if case == LEVEL_ONLY:
            good = good and squared <= sphere
        else:
            good = good and outward > 0.0 and abs(squared - sphere) <= ON_SPHERE * sphere
        if good:
            norm = length(u)
            shrink = edge / norm if case == LEVEL_AND_BALL or norm > edge else 1.0
            for k in range(d):
                out[k] = shrink * u[k]
            return Solution(multiplier, True)
    return Solution(1.0, False)


@kernel
def _multipliers(x: Floats, gradient: Floats, u: Floats, case: int) -> tuple[float, float]:
    """lambda and nu by least squares; without the ball nu is 0. Infinite where there are none."""
    gg, gu, uu = dot(gradient, gradient), dot(gradient, u), dot(u, u)
    xg, xu = dot(x, gradient), dot(x, u)
    if case == LEVEL_ONLY:
        return (xg / gg if gg > 0.0 else math.inf), 0.0
    shared = gg * uu - gu * gu
    if not shared > 0.0:
        return math.inf, 0.0
    return (xg * uu - xu * gu) / shared, (xu * gg - xg * gu) / shared


@kernel
def _equations(round_: Round, x: Floats, multiplier: float, outward: float) -> None:
    """``(lambda H + nu) move + lambda' grad F + nu' u = x``, and the constraints to first order."""
    memory, matrix, right = round_.memory.dense, round_.memory.matrix, round_.memory.right
    gradient, u, hessian, d = memory.vectors[0], memory.vectors[1], memory.hessian, x.shape[0]
    for i in range(d):
        for j in range(d):
            matrix[i, j] = multiplier * hessian[i, j]
        matrix[i, i] += outward
        matrix[i, d] = gradient[i]
        matrix[d, i] = gradient[i]
        matrix[i, d + 1] = u[i]
        matrix[d + 1, i] = u[i]
        right[i] = x[i]
    matrix[d, d] = 0.0
    matrix[d, d + 1] = 0.0
    matrix[d + 1, d] = 0.0
    matrix[d + 1, d + 1] = 0.0
