"""What the anchors say of every arm, without a pass; compiled, for one problem.

An anchor is a point whose loss is carried. By convexity its tangent is a cut that the whole set
obeys, and bounds every arm from above; the anchor itself, drawn back along the chord to the centre
until the loss is below the level, is a point of the set, and bounds every arm from below.

Which cut and which point are best for an arm is chosen in single precision, over all anchors; what
they prove is then computed in double precision, so that a bad choice only costs tightness.
"""

from __future__ import annotations

import math

import numpy as np

from torchglb.backend import Floats, Ints, kernel, vectorised
from torchglb.backend.dense import EPS, TINY, copy_vector, dot, length
from torchglb.carried.kernels import Carried
from torchglb.carried.model import Quadratic, gradient_at
from torchglb.carried.rounding import compensated
from torchglb.ucb.incremental.round_state import BLOCK, Arms, Cuts, Level, Round, Singles
from torchglb.ucb.kernels import cut_rounding, feasible_share

#: anchors whose products are formed together
STRIP = 512
#: up to this dimension the best single cut says as much as two, and from this one on again: then no
#: anchor is near, and an ellipsoid says more
PLANAR, WIDE = 2, 8


@kernel
def sum_rounding(level: Level, loss: float, offset: float, trace: float) -> float:
    """What rounding of carried sums may do to the offset of a cut, and to the loss.

    The trace is that of the Hessian of the data there.
    """
    d = level.center.shape[0]
    trace += d * level.quadratic.ridge
    return compensated(d) * cut_rounding(
        level.high, loss, offset, trace, level.magnitude, level.radius
    )


@kernel
def prepare(round_: Round) -> None:
    """The cuts and the feasible points of all anchors: O(A d)."""
    anchors, level, cuts = round_.problem.anchors.carried, round_.level, round_.memory.cuts
    d, count = anchors.points.shape
    radius, quadratic = level.radius, level.quadratic
    _tangents(anchors, quadratic, cuts)
    # :func:`sum_rounding`, written out: this is the longest loop of most rounds
    roundings, bend = compensated(d), d * quadratic.ridge
    for a in range(count):
        loss, along, square = cuts.share[a], cuts.offset[a], cuts.inverse_norm[a]
        offset = level.high - loss + along
        trace = anchors.trace[a] + bend
        paid = roundings * cut_rounding(level.high, loss, offset, trace, level.magnitude, radius)
        offset += paid
        inverse = 1.0 / math.sqrt(max(square, TINY))
        near = min(max(offset * inverse, -radius), radius)
        disc = math.sqrt((radius - near) * (radius + near))
        cuts.offset[a], cuts.inverse_norm[a] = offset, inverse
        cuts.share[a] = feasible_share(loss + paid, level.center_loss, level.low - paid)
        cuts.distance[a], cuts.disc[a] = near, disc
        cuts.ratio[a] = near / max(disc, 1e-15)
    _normals_and_points(anchors, level, cuts)


@vectorised
def _tangents(anchors: Carried, quadratic: Quadratic, cuts: Cuts) -> None:
    """F, <grad F, point> and |grad F|^2 of all anchors."""
    d, count = anchors.points.shape
    ridge = quadratic.ridge
    loss, along, square = cuts.share, cuts.offset, cuts.inverse_norm
    for a in range(count):
        loss[a] = anchors.sums[0, a]
        along[a] = 0.0
        square[a] = 0.0
    for k in range(d):
        points, slopes, tilt = anchors.points[k], anchors.sums[1 + k], quadratic.tilt[k]
        for a in range(count):
            gradient = slopes[a] + ridge * points[a] - tilt
            along[a] += gradient * points[a]
            square[a] += gradient * gradient
            loss[a] += (0.5 * ridge * points[a] - tilt) * points[a]


@vectorised
def _normals_and_points(anchors: Carried, level: Level, cuts: Cuts) -> None:
    """Unit normals and feasible points, in single precision."""
    d, count = anchors.points.shape
    ridge = level.quadratic.ridge
    for k in range(d):
        points, slopes, tilt = anchors.points[k], anchors.sums[1 + k], level.quadratic.tilt[k]
        normal, feasible = cuts.vectors[k, :count], cuts.vectors[k, count:]
        center = level.center[k]
        for a in range(count):
            normal[a] = (slopes[a] + ridge * points[a] - tilt) * cuts.inverse_norm[a]
        for a in range(count):
            feasible[a] = center + cuts.share[a] * (points[a] - center)


@vectorised
def multiply(units: Floats, chosen: Ints, cuts: Cuts) -> None:
    """Products of some arms with the vectors of all anchors; four arms share what they read."""
    d, width = cuts.vectors.shape
    count = chosen[BLOCK]
    for left in range(0, width, STRIP):
        right = min(left + STRIP, width)
        for j in range(0, count, 4):  # rows behind the last arm are filled with its products too
            first, second = cuts.products[j, left:right], cuts.products[j + 1, left:right]
            third, fourth = cuts.products[j + 2, left:right], cuts.products[j + 3, left:right]
            for k in range(d):
                entry = cuts.vectors[k, left:right]
                a = np.float32(units[chosen[j], k])
                b = np.float32(units[chosen[min(j + 1, count - 1)], k])
                c = np.float32(units[chosen[min(j + 2, count - 1)], k])
                e = np.float32(units[chosen[min(j + 3, count - 1)], k])
                if k == 0:
                    for i in range(right - left):
                        first[i] = a * entry[i]
                        second[i] = b * entry[i]
                        third[i] = c * entry[i]
                        fourth[i] = e * entry[i]
                else:
                    for i in range(right - left):
                        first[i] += a * entry[i]
                        second[i] += b * entry[i]
                        third[i] += c * entry[i]
                        fourth[i] += e * entry[i]


@vectorised
def best_cut(along: Singles, squared: float, radius: float, cuts: Cuts) -> int:
    """The anchor whose cut lowers the bound of a vector most, from its products with the normals.

    With its component along a normal and its length across it, the bound is ``distance along + disc
    across``; a cut whose multiplier would be negative gains nothing.
    """
    gain, near, disc, ratio = cuts.gain, cuts.distance, cuts.disc, cuts.ratio
    whole, square = np.float32(radius * math.sqrt(squared)), np.float32(squared)
    zero, nothing = np.float32(0.0), np.float32(-1.0)
    for a in range(gain.shape[0]):
        product = along[a]
        across = np.sqrt(abs(product * product - square))
        better = whole - (product * near[a] + across * disc[a])
        gain[a] = better if product - ratio[a] * across > zero else nothing
    return largest(gain)


@vectorised
def largest(values: Singles) -> int:
    """Where the largest of some numbers stands first."""
    best = values[0]
    for a in range(values.shape[0]):
        best = values[a] if values[a] > best else best
    for a in range(values.shape[0]):
        if values[a] == best:
            return a
    return 0


@kernel
def apply_cut(round_: Round, a: int) -> float:
    """Takes the best multiple alpha of the unit normal of a cut off the residual of an arm; alpha.

    For any weights ``alpha >= 0``, ``h(x) <= sum alpha distance + S |x - sum alpha u|``.
    """
    anchors, level = round_.problem.anchors.carried, round_.level
    cuts, residual = round_.memory.cuts, round_.memory.residual
    inverse, radius = cuts.inverse_norm[a], level.radius
    distance = cuts.offset[a] * inverse
    if not distance < radius:
        return 0.0
    along = 0.0
    for k in range(residual.shape[0]):
        along += residual[k] * (gradient_at(anchors, level.quadratic, k, a) * inverse)
    across = 0.0
    for k in range(residual.shape[0]):
        part = residual[k] - along * (gradient_at(anchors, level.quadratic, k, a) * inverse)
        across += part * part
    near = max(distance, -radius)
    chord = math.sqrt((radius - near) * (radius + near))
    alpha = max(along - near / max(chord, 1e-150) * math.sqrt(across), 0.0)
    for k in range(residual.shape[0]):
        residual[k] -= alpha * (gradient_at(anchors, level.quadratic, k, a) * inverse)
    return alpha


@kernel
def scan(round_: Round) -> None:
    """Bounds on the arms of ``memory.chosen`` from the best cut and the best feasible point."""
    arms, anchors, level = round_.arms, round_.problem.anchors.carried, round_.level
    cuts, chosen, residual = round_.memory.cuts, round_.memory.chosen, round_.memory.residual
    radius, number, d = level.radius, anchors.points.shape[1], residual.shape[0]
    count = chosen[BLOCK]
    multiply(arms.units, chosen, cuts)
    for j in range(count):
        k = chosen[j]
        if arms.lengths[k] == 0.0:
            arms.upper[k], arms.lower[k] = 0.0, 0.0
            continue
        x = arms.units[k]
        a = best_cut(cuts.products[j, :number], 1.0, radius, cuts)
        copy_vector(x, residual)
        alpha = apply_cut(round_, a)
        value = alpha * (cuts.offset[a] * cuts.inverse_norm[a]) if alpha > 0.0 else 0.0
        lower_upper_bound(arms, k, dual_value(value, abs(value), alpha, residual, radius))
        arms.cut[k], arms.multiplier[k] = a, arms.lengths[k] * alpha * cuts.inverse_norm[a]
        a = largest(cuts.products[j, number:])
        arms.feasible[k] = a
        reached, middle = 0.0, 0.0
        for i in range(d):
            center = level.center[i]
            middle += x[i] * center
            reached += x[i] * (center + cuts.share[a] * (anchors.points[i, a] - center))
        arms.lower[k] = lower_bound(max(reached, middle), arms.lengths[k], radius, d)


@kernel
def dual_value(value: float, size: float, weights: float, rest: Floats, radius: float) -> float:
    """``value + S |rest|``, rounded up; value is ``sum alpha distance``, of terms of this size."""
    left, roundings = length(rest), 8.0 + rest.shape[0]
    return value + radius * left + roundings * EPS * (size + radius * (left + weights + 1.0))


@kernel
def lower_upper_bound(arms: Arms, k: int, bound: float) -> None:
    """``h(x) <= |x| bound`` for the direction of x; rounded up."""
    if bound > -math.inf:  # which is that of an empty set
        bound += 4.0 * EPS * abs(bound)
    arms.upper[k] = min(arms.upper[k], arms.lengths[k] * bound)


@kernel
def lower_bound(reached: float, arm_length: float, radius: float, dim: int) -> float:
    """``|x| <u, theta>`` of a feasible point, from below."""
    return arm_length * (reached - (dim + 6.0) * EPS * radius)


@kernel
def second_cut(round_: Round, k: int) -> int:
    """Lowers the bound of an arm by a second cut beside its best one; its anchor, or -1."""
    arms, cuts, residual = round_.arms, round_.memory.cuts, round_.memory.residual
    radius, a = round_.level.radius, arms.cut[k]
    copy_vector(arms.units[k], residual)
    alpha = apply_cut(round_, a)
    if not alpha > 0.0:
        return -1
    along = cuts.products[0, : cuts.offset.shape[0]]
    _multiply_one(residual, cuts, along)
    b = best_cut(along, dot(residual, residual), radius, cuts)
    beta = apply_cut(round_, b)
    if not beta > 0.0:
        return -1
    value = alpha * (cuts.offset[a] * cuts.inverse_norm[a])
    more = beta * (cuts.offset[b] * cuts.inverse_norm[b])
    size = abs(value) + abs(more)
    lower_upper_bound(arms, k, dual_value(value + more, size, alpha + beta, residual, radius))
    return b


@vectorised
def _multiply_one(residual: Floats, cuts: Cuts, along: Singles) -> None:
    """Products of one vector with the unit normals."""
    count = along.shape[0]
    for a in range(count):
        along[a] = np.float32(0.0)
    for k in range(residual.shape[0]):
        normal, x = cuts.vectors[k, :count], np.float32(residual[k])
        for a in range(count):
            along[a] += x * normal[a]
