"""A quadratic below the loss, which bounds most arms without a pass; compiled, for one problem.

Around a point c, for all theta with ``|theta - c| <= D``,

    L(theta) >= L(c) + <grad L(c), theta - c> + |theta - c|^2_M / 2,   M = sum_s c_s x_s x_s',

where c_s is the least ``2 B_s(z_s + u, z_s)/u^2`` over ``|u| <= D |x_s|``, with B_s the Bregman
divergence of ``w_s m/g`` and ``z_s = <x_s, c>``. The point is one of the anchors, so L(c) and
grad L(c) are carried. Rows that come later are convex, and their tangents are in both: the bound
stays true with the old M.

**The set is within D of c.** Let E be where the right-hand side, with ridge and tilt, is at most B,
and let c be in the set. If E lies within less than D of c, so does the set: on the way from c to a
point of it that does not, the point at the distance D would be in the set, which is convex, hence
in E. So the set is a part of E.

Anchors bound an arm well if one of them is near its maximiser. For fresh arms in ten dimensions
none is, but the ellipsoid E bounds all arms alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchglb.backend import Floats, inlined, kernel, vectorised
from torchglb.backend.dense import EPS, cholesky, length
from torchglb.carried.kernels import Carried, LossRows, Workspace, chunk_hessian, features
from torchglb.carried.model import Dense, gradient_at, loss_at
from torchglb.carried.rounding import compensated, plain
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, SECOND, W, Y, least_curvatures
from torchglb.ucb.incremental.cutting_planes import Level, OuterEllipsoid, ellipsoid
from torchglb.ucb.kernels import cut_rounding

#: what a problem's memory has beside point and matrix
FACTS = 5
#: a minorant is old when there are so many times as many rows, or when its point is higher above
#: the minimum than this share of the level's height
OLD, HIGH = 1.1, 0.03
#: D is this much larger than it need be: the set changes until M is made anew
MARGIN = 1.03
#: and M is made anew with a smaller D where it is so much larger
LOOSE = 1.04
#: halvings in the search for the least D
HALVINGS = 10


class Minorant(NamedTuple):
    """In a problem's memory.

    Attributes:
        point: c, ``(d,)``.
        matrix: the upper triangle of M, row by row, ``(d (d + 1)/2,)``.
        facts: D; the number of rows when M was made, 0 if there is none; the round before which it
            is not worth trying; which anchor c is; the last round in which many rivals were left.
    """

    point: Floats
    matrix: Floats
    facts: Floats


def minorant_size(dim: int) -> int:
    """Numbers that a problem needs."""
    return dim + dim * (dim + 1) // 2 + FACTS


@inlined
def minorant_in(memory: Floats, dim: int) -> Minorant:
    """In memory of that size, or empty in empty memory."""
    end = memory.shape[0] - FACTS
    return Minorant(memory[:dim], memory[dim : max(end, 0)], memory[max(end, 0) :])


@kernel
def sum_least_curvatures(
    family: CompiledFamily,
    rows: LossRows,
    count: int,
    minorant: Minorant,
    concordance: float,
    work: Workspace,
) -> None:
    """A pass: M, into the sums of second order."""
    scratch, reach = work.scratch, minorant.facts[0]
    work.sums[:] = 0.0
    for s in range(0, count, CHUNK):
        chunk = min(CHUNK, count - s)
        features(rows.X, s, chunk, minorant.point, scratch)
        row_reaches(rows.X, s, chunk, reach, scratch)
        for i in range(chunk):
            scratch[W + i] = rows.w[s + i]
        least_curvatures(family, scratch, chunk, concordance)
        chunk_hessian(rows.X, s, chunk, scratch[SECOND:], work)


@vectorised
def row_reaches(X: Floats, start: int, count: int, reach: float, scratch: Floats) -> None:
    """``D |x_s|`` of some rows, into the places of the rewards, which are not needed."""
    for s in range(count):
        scratch[Y + s] = 0.0
    for k in range(X.shape[0]):
        x = X[k, start : start + count]
        for s in range(count):
            scratch[Y + s] += x[s] * x[s]
    for s in range(count):
        scratch[Y + s] = (1.0 + 1e-12) * reach * math.sqrt(scratch[Y + s])


@kernel
def is_carried(minorant: Minorant, anchors: Carried) -> bool:
    """Whether there is one, and its point is still among the anchors."""
    slot, same = int(minorant.facts[3]), 0.0 < minorant.facts[1] <= anchors.facts[2]
    for k in range(minorant.point.shape[0]):
        same = same and minorant.point[k] == anchors.points[k, slot]
    return same


@kernel
def is_old(minorant: Minorant, anchors: Carried, level: Level) -> bool:
    """Whether many rows have come since it was made, or the minimum is elsewhere."""
    above = loss_at(anchors, level.quadratic, int(minorant.facts[3])) - level.center_loss
    far = above > HIGH * (level.high - level.center_loss)
    return far or anchors.facts[2] > OLD * minorant.facts[1]


@kernel
def move_to(minorant: Minorant, anchors: Carried, slot: int, radius: float) -> None:
    """The point is an anchor from now on; D is the old one unless the ball's is smaller."""
    for k in range(minorant.point.shape[0]):
        minorant.point[k] = anchors.points[k, slot]
    whole = ball_reach(minorant, radius)
    if minorant.facts[0] == 0.0 or minorant.facts[0] > whole:
        minorant.facts[0] = whole
    minorant.facts[1], minorant.facts[3] = 0.0, float(slot)


@kernel
def ball_reach(minorant: Minorant, radius: float) -> float:
    """No point of the ball is farther from c."""
    return (radius + length(minorant.point)) * (1.0 + 1e-12)


@kernel
def store(minorant: Minorant, rows: int, answer: Workspace) -> None:
    """Keeps the matrix that a pass has found."""
    start = 1 + minorant.point.shape[0]
    for i in range(minorant.matrix.shape[0]):
        minorant.matrix[i] = answer.sums[start + i]
    minorant.facts[1] = float(rows)


@kernel
def outer_ellipsoid(
    minorant: Minorant, anchors: Carried, level: Level, memory: Dense, spare: Floats
) -> OuterEllipsoid:
    """E, if it is certain that the set is a part of it; else one without end.

    Rounding: the carried sums at c as those of any cut; the entries of M are plain sums.

    Args:
        minorant: c, M and D.
        anchors: with the loss at c.
        level: the set.
        memory: for E, as in :func:`torchglb.ucb.incremental.cutting_planes.ellipsoid`.
        spare: memory, ``(d, d)``.
    """
    d, reach, ridge = minorant.point.shape[0], minorant.facts[0], level.quadratic.ridge
    matrix, slope, place, trace = memory.hessian, memory.vectors[2], 0, 0.0
    slot = int(minorant.facts[3])
    loss = loss_at(anchors, level.quadratic, slot)
    for i in range(d):
        slope[i] = gradient_at(anchors, level.quadratic, i, slot)
        trace += minorant.matrix[place]
        for j in range(i, d):
            matrix[i, j] = matrix[j, i] = minorant.matrix[place]
            place += 1
        matrix[i, i] += ridge
    total = anchors.trace[slot] + trace + d * ridge
    paid = compensated(d) * cut_rounding(level.high, loss, loss, total, level.size, level.radius)
    paid += plain(d, minorant.facts[1]) * EPS * trace * reach * reach
    room = level.high - loss + paid
    found = ellipsoid(minorant.point, slope, room, 0.0, level.radius, memory)
    whole = reach >= ball_reach(minorant, level.radius)
    inside = room >= 2.0 * paid  # c is in the set for certain
    if inside and (whole or _is_within(matrix, found, reach, spare)):
        return found
    return OuterEllipsoid(math.inf, found.offset)


@kernel
def _is_within(matrix: Floats, outer: OuterEllipsoid, reach: float, spare: Floats) -> bool:
    """Whether ``|v|_M <= w`` implies ``|v| < D``: whether ``M - (w/D)^2 I`` has a factor."""
    share = (outer.width + outer.offset) / reach
    return cholesky(matrix, -share * share * (1.0 + 1e-6), spare)


@kernel
def least_reach(
    minorant: Minorant, outer: OuterEllipsoid, radius: float, matrix: Floats, spare: Floats
) -> float:
    """The least D that E is within, up to some percent; that of the ball if there is none."""
    high = ball_reach(minorant, radius)
    low = 1e-3 * high
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if _is_within(matrix, outer, middle, spare):
            high = middle
        else:
            low = middle
    return high
