"""What one evaluated point says of an arm, and where to evaluate next; compiled, for one problem.

Arms are unit vectors here: ``h`` is homogeneous, so lengths multiply bounds at the end. The loss F
is that of the data with ridge and tilt. All points lie in the ball of radius S.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchglb.backend import Floats, kernel, vectorised
from torchglb.backend.dense import EPS, TINY, dot, length
from torchglb.backend.tridiagonal import (
    Tridiagonal,
    factor_shifted,
    multiply_rotated,
    rotate,
    rotate_back,
    solve_shifted,
)

#: a curvature that is more than rounding, next to the trace of the Hessian
FLAT = 1e-14
#: a search for a multiplier ends here; an inexact one still gives a usable point
MAX_MULTIPLIERS = 40
#: |u| = S counts as met to this
ON_SPHERE = 1e-11
#: and if the model is missed by at most this share of its slack
MODEL_SHARE = 0.1


# ---- what a point proves -----------------------------------------------------------------------


@kernel
def cut_rounding(
    level: float, loss: float, offset: float, trace: float, magnitude: float, radius: float
) -> float:
    """What one rounding of the sums behind a cut may do to its offset, and to the loss.

    With the magnitude m of the rows (:func:`torchglb.carried.kernels.add_totals`) the absolute
    values of the terms of the loss add up to at most ``|F| + 2 S m``, and those of the gradient,
    times S, to ``S m + S^2 tr H``.
    """
    total = abs(level) + abs(loss) + abs(offset) + 2.0 * radius * (magnitude + radius * trace)
    return EPS * total


@vectorised
def squared_distance(u: Floats, v: Floats, multiple: float) -> float:
    """``|u - multiple v|^2``."""
    total = 0.0
    for k in range(u.shape[0]):
        part = u[k] - multiple * v[k]
        total += part * part
    return total


@kernel
def cut_value(x: Floats, normal: Floats, norm: float, offset: float, radius: float) -> float:
    """``max <x, theta>`` over ``|theta| <= S`` and ``<normal, theta> <= offset``, from above.

    Args:
        x: a unit vector.
        normal: of the half-space.
        norm: |normal|, not 0.
        offset: of the half-space.
        radius: S.
    """
    distance, rounding = offset / norm, (8.0 + x.shape[0]) * EPS * radius
    if distance < -radius - rounding:
        return -math.inf
    along = dot(x, normal) / norm
    if distance >= radius or radius * along <= distance:
        return radius + rounding
    across = squared_distance(x, normal, along / norm)
    near = max(distance, -radius)
    chord = math.sqrt((radius - near) * (radius + near))
    return near * along + chord * math.sqrt(across) + rounding


@kernel
def feasible_share(loss: float, center_loss: float, level: float) -> float:
    """Up to which share of it the segment from a feasible centre to a point is feasible.

    On the segment the loss is at most linear. Feasible means some roundings below the level.
    """
    safe = level
    if abs(level) < math.inf:
        safe = level - 8.0 * EPS * (2.0 * abs(level) + abs(center_loss))
    if loss <= safe:
        return 1.0
    if not safe > center_loss:  # also where something is NaN
        return 0.0
    return min(max((safe - center_loss) / (loss - center_loss), 0.0), 1.0)


# ---- where to evaluate next --------------------------------------------------------------------


@kernel
def ball_multiplier(x: Floats, gradient: Floats, theta: Floats) -> float:
    """``nu/lambda`` in ``x = lambda grad F + nu theta`` by least squares, or 0."""
    gg, gt, tt = dot(gradient, gradient), dot(gradient, theta), dot(theta, theta)
    xg, xt = dot(x, gradient), dot(x, theta)
    along, out = xg * tt - xt * gt, xt * gg - xg * gt
    # what is left of a difference of equal numbers says nothing
    noise = 1e3 * EPS
    if along > noise * abs(xg) * tt and out > noise * abs(xt) * gg:
        return out / along
    return 0.0


class Curvature(NamedTuple):
    """The Hessian of a model, ``scale M + shift I``, with M in tridiagonal form."""

    form: Tridiagonal
    scale: float
    shift: float


class QuadraticModel(NamedTuple):
    """A model of a level set, ``g'(u - theta) + (u - theta)' H (u - theta)/2 <= slack``."""

    theta: Floats  # where it was made
    gradient: Floats  # g
    hessian: Curvature  # H
    slack: float  # B - F(theta)


@kernel
def sqp_step(
    x: Floats,
    model: QuadraticModel,
    radius: float,
    guess: float,
    accuracy: float,
    work: Floats,
    u: Floats,
) -> float:
    """One step of sequential quadratic programming: ``argmax <x, u>`` over the ball and a model.

    For a weight omega of the ball against the model the two constraints merge into one ellipsoid,
    whose maximiser is closed-form; the right omega puts it on the sphere, and is 0 where the model
    alone keeps it inside. All that is done in the basis in which H is tridiagonal.

    Args:
        x: a unit vector, ``(d,)``.
        model: of the level set.
        radius: S.
        guess: a first omega; 0 where nothing is known.
        accuracy: ``|u| = S`` counts as met to this.
        work: memory, ``STEP_ROWS`` rows of d.
        u: the point, a few roundings inside of the ball.

    Returns:
        omega.
    """
    d, hessian, form = x.shape[0], model.hessian, model.hessian.form
    turned, theta, gradient, y, bend = work[0], work[1], work[2], work[3], work[4]
    rotate(form, x, turned)
    rotate(form, model.theta, theta)
    rotate(form, model.gradient, gradient)
    value, omega = 0.0, 0.0
    for k in range(d):
        u[k] = radius * turned[k]
        y[k] = u[k] - theta[k]
    multiply_rotated(form, y, bend)
    for k in range(d):
        bent = hessian.scale * bend[k] + hessian.shift * y[k]
        value += (gradient[k] + 0.5 * bent) * y[k]
    if not value <= model.slack:  # else the ball's own maximiser satisfies the model
        rotated = QuadraticModel(theta, gradient, hessian, model.slack)
        omega = _weight_of_ball(turned, rotated, radius, guess, accuracy, work[3:], u)
    rotate_back(form, u)
    norm, edge = length(u), (1.0 - 4.0 * EPS) * radius
    if norm > edge or (omega > 0.0 and norm > (1.0 - max(1e-6, 2.0 * accuracy)) * radius):
        for k in range(d):
            u[k] *= edge / norm
    return omega


#: rows of d numbers that a step needs
STEP_ROWS = 8


@kernel
def _weight_of_ball(
    x: Floats,
    model: QuadraticModel,
    radius: float,
    guess: float,
    accuracy: float,
    work: Floats,
    u: Floats,
) -> float:
    """The weight of the ball that puts the merged ellipsoid's maximiser on the sphere, or 0.

    With ``E = H + omega I`` and ``p = g + omega theta`` that ellipsoid is ``|u - c|^2_E <=
    |p|^2_(E^-1) + 2 slack + omega (S^2 - |theta|^2)`` around ``c = theta - E^-1 p``. All vectors
    are in the basis of the tridiagonal form.
    """
    theta, hessian = model.theta, model.hessian
    d, center, pull, y, slope, pivots = x.shape[0], work[0], work[1], work[2], work[3], work[4]
    form, scale, trace = hessian.form, hessian.scale, hessian.shift * x.shape[0]
    for k in range(d):
        trace += scale * form.diagonal[k]
    inside = max(radius * radius - dot(theta, theta), 0.0)
    flat, usual = FLAT * trace + 1e-150, trace / d
    if not 1e-6 * usual < guess < 1e6 * usual:
        guess = 0.0
    low, high, omega, trial, leaves = 0.0, math.inf, 0.0, guess, False
    for _ in range(MAX_MULTIPLIERS):
        if not factor_shifted(form, scale, hessian.shift + trial + flat, pivots):
            low, trial = trial, 10.0 * max(trial, 1e-12 * trace + 1e-150)
            continue
        omega = trial
        for k in range(d):
            pull[k] = model.gradient[k] + omega * theta[k]
        solve_shifted(form, scale, pivots, pull, center)
        size = dot(pull, center) + 2.0 * model.slack + omega * inside
        solve_shifted(form, scale, pivots, x, slope)
        spread = max(dot(x, slope), 1e-150)
        reach = math.sqrt(max(size, 0.0) / spread)
        ray, along, middle = 0.0, 0.0, 0.0
        for k in range(d):
            center[k] = theta[k] - center[k]
            step = reach * slope[k]
            u[k] = center[k] + step
            ray += step * step
            along += u[k] * step
            middle += center[k] * center[k]
        norm = length(u)
        if omega == 0.0:
            if norm <= radius:
                break
            leaves = True  # without the ball the maximiser is outside of it
            trial = 0.01 * high if high < math.inf else usual + 1e-150
            continue
        missed = abs(norm / radius - 1.0)
        # off the sphere by so much the model is off by omega S^2 as much: little of its slack
        true = omega * radius * radius * missed <= MODEL_SHARE * abs(model.slack)
        if (missed < accuracy and true) or missed <= 4.0 * EPS:
            break
        if norm > radius:
            low, leaves = omega, True
        else:
            high = omega
        # Newton on 1/|u| = 1/S; the derivative of reach from size' = S^2 - |center|^2
        solve_shifted(form, scale, pivots, u, y)
        growth = radius * radius + ray - middle
        bend = along * growth / max(2.0 * reach * reach * spread, 1e-150) - dot(u, y)
        trial = omega + norm * norm * (1.0 - norm / radius) / (bend if bend != 0.0 else -TINY)
        if not low < trial < high:
            trial = _between(low, high, omega, leaves)
        if abs(trial - omega) <= EPS * omega:
            break
    return omega


@kernel
def _between(low: float, high: float, omega: float, leaves: bool) -> float:
    """A multiplier between the two that enclose the root, where Newton's method leads astray.

    Without an upper end 10 times the last one, omega; and 0 as long as the maximiser for 0 is not
    known to leave the ball.
    """
    if not high < math.inf:
        return 10.0 * omega
    if not leaves:
        return 0.0
    return math.sqrt(low * high) if low > 0.0 else 0.01 * high


@kernel
def stop_at_cut(start: Floats, end: Floats, normal: Floats, offset: float) -> None:
    """Moves ``end`` back to where its segment from ``start`` meets a cut that the set obeys."""
    here, there = dot(normal, start), dot(normal, end)
    if there > offset and here < offset:
        share = (offset - here) / (there - here)
        for k in range(start.shape[0]):
            end[k] = start[k] + share * (end[k] - start[k])


@kernel
def come_back(
    point: Floats,
    gradient: Floats,
    loss: float,
    inner: Floats,
    inner_loss: float,
    level: float,
    u: Floats,
) -> None:
    """From far outside the set, a point near its boundary on the segment to an inner point, into u.

    A share s of the segment from the inner point: the mean of the root of the power law
    ``F_inner + (F - F_inner) s^p`` through loss and slope at the point (right for steep growth) and
    of the root of the tangent there (right for linear growth).
    """
    rise, budget, slope = loss - inner_loss, level - inner_loss, 0.0
    for k in range(point.shape[0]):
        slope += gradient[k] * (point[k] - inner[k])
    share = 0.5
    if rise > 0.0 and slope > 0.0 and budget >= 0.0:
        power = (budget / rise) ** (rise / slope)
        tangent = max(1.0 - (loss - level) / slope, 0.0)
        share = min(max(0.5 * (power + tangent), 0.0), 1.0)
    for k in range(point.shape[0]):
        u[k] = inner[k] + share * (point[k] - inner[k])
