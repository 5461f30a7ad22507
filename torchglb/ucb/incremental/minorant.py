"""A quadratic below the loss, which bounds most arms without a pass; compiled, for one problem.

Around a point c, for all theta of the ball with ``|theta - c| <= D``,

    L(theta) >= L(c) + <grad L(c), theta - c> + |theta - c|^2_M / 2,   M = sum_s c_s x_s x_s',

where c_s is the least ``2 B_s(z_s + u, z_s)/u^2`` over ``|u| <= D |x_s|`` with ``|z_s + u| <= S
|x_s|``, B_s the Bregman divergence of ``w_s m/g`` and ``z_s = <x_s, c>``. The point is one of the
anchors, so L(c) and grad L(c) are carried. Rows that come later are convex, and their tangents are
in both: the bound stays true with the old M.

**The set is within D of c.** Let E be where the right-hand side, with ridge and tilt, is at most B,
and let c be in the set. If E lies within less than D of c, so does the set: on the way from c to a
point of it that does not, the point at the distance D would be in the set, which is convex, hence
in E. So the set is a part of E.

Anchors bound an arm well if one of them is near its maximiser. For fresh arms in ten dimensions
none is, but the ellipsoid E bounds all arms alike. Another one, around the carried minimum by
self-concordance, says less and costs no pass: M takes one now and then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchglb.backend import Floats, inlined, kernel, vectorised
from torchglb.backend.dense import (
    EPS,
    cholesky,
    dot,
    forward,
    inverse_trace,
    length,
    solve_factored,
)
from torchglb.carried.kernels import ROWS, LossRows, Workspace, chunk_hessian, features
from torchglb.carried.model import (
    Constants,
    Dense,
    expand,
    gradient_at,
    hessian_rounding,
    loss_at,
    loss_concordance,
)
from torchglb.carried.rounding import compensated, plain
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, SECOND, W, Y, least_curvatures
from torchglb.ucb.incremental.cutting_planes import lower_upper_bound, sum_rounding
from torchglb.ucb.incremental.looks import anchor_at_minimum
from torchglb.ucb.incremental.round_state import CarriedProblem, Minorant, Round, RoundState
from torchglb.ucb.kernels import cut_rounding

#: a problem's memory beside point and matrix: D; how many rows M was made of, 0 if there is none;
#: the round before which it is not worth trying; which anchor c is; the last round in which many
#: rivals were left
REACH, ROWS_THEN, PAUSED_UNTIL, SLOT, LAST_NEEDED = 0, 1, 2, 3, 4
STATE = 5
#: a minorant is old when there are so many times as many rows, or when its point is higher above
#: the minimum than this share of the level's height
OLD_ROWS, HIGH_POINT = 1.1, 0.03
#: D is this much larger than it need be: the set changes until M is made anew
MARGIN = 1.03
#: and M is made anew with a smaller D where it is so much larger
TOO_LARGE = 1.04
#: halvings in the search for the least D
HALVINGS = 10
#: a Hessian whose condition is below this is inverted with an error below 1e-6, also for d = 50
WELL_CONDITIONED = 1e5
#: a minorant is asked where so many rivals are left, and made where so many are, by so many passes
FEW_RIVALS, MANY_RIVALS, MOST_PASSES = 3, 4, 5
#: it is asked at once for so many rounds after it was needed, and not for so many after it said
#: nothing
LATELY, PAUSE = 8.0, 20


def minorant_size(dim: int) -> int:
    """Numbers that a problem needs."""
    return dim + dim * (dim + 1) // 2 + STATE


@inlined
def minorant_in(memory: Floats, dim: int) -> Minorant:
    """In memory of that size, or empty in empty memory."""
    end = memory.shape[0] - STATE
    return Minorant(memory[:dim], memory[dim : max(end, 0)], memory[max(end, 0) :])


@kernel
def sum_least_curvatures(
    family: CompiledFamily,
    rows: LossRows,
    count: int,
    minorant: Minorant,
    constants: Constants,
    work: Workspace,
) -> None:
    """A pass: M, into the sums of second order."""
    scratch, reach = work.scratch, minorant.state[REACH]
    ball = constants.radius / reach * (1.0 + 1e-12)
    work.sums[:] = 0.0
    for s in range(0, count, CHUNK):
        chunk = min(CHUNK, count - s)
        features(rows.X, s, chunk, minorant.point, scratch)
        row_reaches(rows.X, s, chunk, reach, scratch)
        for i in range(chunk):
            scratch[W + i] = rows.w[s + i]
        least_curvatures(family, scratch, chunk, constants.concordance, ball)
        chunk_hessian(rows.X, s, chunk, scratch[SECOND:], work)


@vectorised
def row_reaches(X: Floats, start: int, count: int, reach: float, scratch: Floats) -> None:
    """``D |x_s|`` of some rows, into the memory of the rewards, which are not needed."""
    for s in range(count):
        scratch[Y + s] = 0.0
    for k in range(X.shape[0]):
        x = X[k, start : start + count]
        for s in range(count):
            scratch[Y + s] += x[s] * x[s]
    for s in range(count):
        scratch[Y + s] = (1.0 + 1e-12) * reach * math.sqrt(scratch[Y + s])


@kernel
def is_carried(problem: CarriedProblem) -> bool:
    """Whether there is a minorant whose point is still among the anchors."""
    minorant, anchors = problem.minorant, problem.anchors.carried
    slot, same = int(minorant.state[SLOT]), 0.0 < minorant.state[ROWS_THEN] <= anchors.totals[ROWS]
    for k in range(minorant.point.shape[0]):
        same = same and minorant.point[k] == anchors.points[k, slot]
    return same


@kernel
def is_old(round_: Round) -> bool:
    """Whether many rows have come since the minorant was made, or the minimum is elsewhere."""
    minorant, level = round_.problem.minorant, round_.level
    anchors = round_.problem.anchors.carried
    above = loss_at(anchors, level.quadratic, int(minorant.state[SLOT])) - level.center_loss
    far = above > HIGH_POINT * (level.high - level.center_loss)
    return far or anchors.totals[ROWS] > OLD_ROWS * minorant.state[ROWS_THEN]


@kernel
def ball_reach(round_: Round) -> float:
    """No point of the ball is farther from c."""
    return (round_.level.radius + length(round_.problem.minorant.point)) * (1.0 + 1e-12)


@kernel
def outer_ellipsoid(round_: Round) -> OuterEllipsoid:
    """E, if it is certain that the set is a part of it; else one without end.

    Rounding: the carried sums at c as those of any cut; the entries of M are plain sums.
    """
    minorant, anchors = round_.problem.minorant, round_.problem.anchors.carried
    level, memory = round_.level, round_.memory.dense
    d, reach, ridge = minorant.point.shape[0], minorant.state[REACH], level.quadratic.ridge
    matrix, slope, place, trace = memory.hessian, memory.vectors[2], 0, 0.0
    slot = int(minorant.state[SLOT])
    loss = loss_at(anchors, level.quadratic, slot)
    for i in range(d):
        slope[i] = gradient_at(anchors, level.quadratic, i, slot)
        trace += minorant.matrix[place]
        for j in range(i, d):
            matrix[i, j] = matrix[j, i] = minorant.matrix[place]
            place += 1
        matrix[i, i] += ridge
    paid = sum_rounding(level, loss, loss, anchors.trace[slot] + trace)
    paid += plain(d, minorant.state[ROWS_THEN]) * EPS * trace * reach * reach
    slack = level.high - loss + paid
    found = ellipsoid(minorant.point, slope, slack, 0.0, level.radius, memory)
    whole = reach >= ball_reach(round_)
    inside = slack >= 2.0 * paid  # c is in the set for certain
    if inside and (whole or _is_within(round_, found, reach)):
        return found
    return OuterEllipsoid(math.inf, found.offset)


@kernel
def _is_within(round_: Round, outer: OuterEllipsoid, reach: float) -> bool:
    """Whether ``|v|_M <= w`` implies ``|v| < D``: whether ``M - (w/D)^2 I`` has a factor."""
    share, memory = (outer.width + outer.offset) / reach, round_.memory
    return cholesky(memory.dense.hessian, -share * share * (1.0 + 1e-6), memory.form.reflections)


@kernel
def least_reach(round_: Round, outer: OuterEllipsoid) -> float:
    """The least D that E is within, up to some percent; that of the ball if there is none."""
    high = ball_reach(round_)
    low = 1e-3 * high
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if _is_within(round_, outer, middle):
            high = middle
        else:
            low = middle
    return high


# ---- its ellipsoid -----------------------------------------------------------------------------


class OuterEllipsoid(NamedTuple):
    """An ellipsoid that holds the set; its centre and the factor of its matrix are in memory."""

    width: float  # half of it, in the norm of its matrix; infinite where there is no bound
    offset: float  # how far its centre is from where the matrix was made, in that norm


@kernel
def ellipsoid(
    point: Floats, gradient: Floats, slack: float, concordance: float, radius: float, memory: Dense
) -> OuterEllipsoid:
    """Where ``g'u + f |u|^2_H / 2 <= slack`` for the way u from a point.

    With ``D >= R max|x_s| |u|`` over the set, self-concordance gives ``F(theta) >= F + g'u + f
    |u|^2_H / 2``, ``f = 2 (e^-D - 1 + D)/D^2``. The set is then in the ellipsoid around ``point -
    H^-1 g/f`` of half-width w in the norm of H, ``w^2 = 2 slack/f + |g|^2_(H^-1)/f^2``. A smaller
    ellipsoid has a smaller D: the second round is the better one. Where H is too ill-conditioned
    for plain rounding there is no bound.

    Args:
        point: ``(d,)``.
        gradient: g.
        slack: B - F(point).
        concordance: of F, R times the longest row; 0 if the quadratic itself is below F.
        radius: S.
        memory: with H; the centre goes into ``vectors[0]``, the factor of H into ``factor``.
    """
    factor, work = memory.factor, memory.vectors
    if not cholesky(memory.hessian, 0.0, factor):
        return OuterEllipsoid(math.inf, math.inf)
    inverse, trace = inverse_trace(factor, work[1]), 0.0
    for k in range(point.shape[0]):
        trace += memory.hessian[k, k]
    if not trace * inverse <= WELL_CONDITIONED:
        return OuterEllipsoid(math.inf, math.inf)
    solve_factored(factor, gradient, work[1])
    squared = max(dot(gradient, work[1]), 0.0)
    reach, f, width = radius + length(point), 1.0, math.inf
    for _ in range(3):
        D = concordance * reach
        f = 2.0 * (math.exp(-D) - 1.0 + D) / (D * D) if D > 1e-3 else 1.0 - D / 3.0
        total = 2.0 * slack / f + squared / (f * f)
        if not total >= 0.0:
            return OuterEllipsoid(math.inf, math.inf)
        width = math.sqrt(total) * (1.0 + 1e-6)
        reach = min(reach, math.sqrt(squared * inverse) / f + width * math.sqrt(inverse))
    for k in range(point.shape[0]):
        work[0, k] = point[k] - work[1, k] / f
    return OuterEllipsoid(width, math.sqrt(squared) / f)


@kernel
def bound_by_ellipsoid(round_: Round, outer: OuterEllipsoid) -> int:
    """Lowers the bounds of all arms to those of an ellipsoid, O(K d^2); of how many."""
    arms, radius, memory = round_.arms, round_.level.radius, round_.memory.dense
    center, y, lowered = memory.vectors[0], memory.vectors[1], 0
    if not outer.width < math.inf:
        return 0
    for k in range(arms.upper.shape[0]):
        x, before = arms.units[k], arms.upper[k]
        forward(memory.factor, x, y)
        across = outer.width * length(y)
        lower_upper_bound(arms, k, dot(x, center) + across + 1e-9 * (radius + across))
        lowered += 1 if arms.upper[k] < before else 0
    return lowered


# ---- in a round --------------------------------------------------------------------------------


@kernel
def bound_cheaply(round_: Round) -> None:
    """Upper bounds on all arms from one ellipsoid around the carried minimum: O(K d^2).

    Rounding: loss and gradient as those of any cut, but for the ridge, whose slope is known: at the
    origin it is 0, and costs nothing; the entries of the Hessian are plain sums.
    """
    level, model = round_.level, round_.problem.minimum
    gradient, dense = round_.memory.gradient, round_.memory.dense
    loss = expand(model, model.point, dense, gradient, True)
    carried, reach = model.objective.carried, 2.0 * level.radius
    steep = level.magnitude + level.quadratic.ridge * length(model.point)
    paid = compensated(gradient.shape[0]) * cut_rounding(
        level.high, loss, loss, carried.trace[0], steep, level.radius
    )
    paid += hessian_rounding(carried, carried.trace[0]) * reach * reach
    concordance, room = loss_concordance(model.objective), level.high - loss + paid
    outer = ellipsoid(model.point, gradient, room, concordance, level.radius, dense)
    bound_by_ellipsoid(round_, outer)


@kernel
def begin_minorant(state: RoundState, round_: Round) -> None:
    """A minorant is to be made at the carried minimum, which becomes an anchor; by a pass.

    D is the old one unless the ball's is smaller.
    """
    slot, minorant = anchor_at_minimum(state, round_), round_.problem.minorant
    for k in range(minorant.point.shape[0]):
        minorant.point[k] = round_.problem.anchors.carried.points[k, slot]
    whole = ball_reach(round_)
    if minorant.state[REACH] == 0.0 or minorant.state[REACH] > whole:
        minorant.state[REACH] = whole
    minorant.state[ROWS_THEN], minorant.state[SLOT] = 0.0, float(slot)
    state.minorant_passes += 1


@kernel
def end_minorant(state: RoundState, round_: Round) -> bool:
    """A pass for a minorant has been made: whether another one is needed, with a better D.

    That is where the least D turns out to be much smaller than the one that it was made with, or
    larger. Else it bounds the arms.
    """
    minorant, answer = round_.problem.minorant, round_.memory.minimum_pass
    start = 1 + minorant.point.shape[0]
    for i in range(minorant.matrix.shape[0]):
        minorant.matrix[i] = answer.sums[start + i]
    minorant.state[ROWS_THEN] = float(round_.problem.rows)
    outer = outer_ellipsoid(round_)
    least, reach = least_reach(round_, outer), minorant.state[REACH]
    better = min(MARGIN * least, ball_reach(round_))
    poor = not outer.width < math.inf or TOO_LARGE * better < reach
    if poor and better != reach and state.minorant_passes < MOST_PASSES:
        minorant.state[REACH], minorant.state[ROWS_THEN] = better, 0.0
        state.minorant_passes += 1
        return True
    if not outer.width < math.inf:  # as for rows that leave a direction out
        minorant.state[PAUSED_UNTIL] = float(state.number + PAUSE)
    bound_by_minorant(state, round_)
    return False


@kernel
def bound_by_minorant(state: RoundState, round_: Round) -> bool:
    """Bounds all arms by the ellipsoid of the minorant, if there is one; whether it is new enough.

    Where it lowers no bound it is to rest for some rounds.
    """
    problem, minorant = round_.problem, round_.problem.minorant
    if not is_carried(problem):
        return False
    outer = outer_ellipsoid(round_)
    if not outer.width < math.inf:
        return False
    problem.use.last[int(minorant.state[SLOT])] = float(state.number)
    if bound_by_ellipsoid(round_, outer) == 0:
        minorant.state[PAUSED_UNTIL] = float(state.number + PAUSE)
    return not is_old(round_)


@kernel
def may_use_minorant(state: RoundState, round_: Round) -> bool:
    """Whether there may be one that says more than the anchors, for a choice.

    Not where an anchor has a polynomial of its own, or the minimum's is the loss itself.
    """
    problem, order = round_.problem, round_.problem.anchors.table.order
    if round_.settings.close_all or problem.minorant.state.shape[0] == 0 or order > 2:
        return False
    if problem.minimum.objective.constants.ratio == 0.0:
        return False
    return float(state.number) >= problem.minorant.state[PAUSED_UNTIL]


@kernel
def was_needed(state: RoundState, minorant: Minorant) -> bool:
    """Whether looks have lately left many rivals: then the minorant is asked before the first."""
    return float(state.number) <= minorant.state[LAST_NEEDED] + LATELY
