"""Ellipsoids that hold the set: what they say of all arms at once, and when they are worth asking.

One comes from self-concordance around the carried minimum and costs nothing; the better one is that
of a minorant (:mod:`torchglb.ucb.incremental.minorant`), whose matrix takes passes now and then.
"""

from __future__ import annotations

import math

from torchglb.backend import kernel
from torchglb.carried.model import expand, loss_concordance
from torchglb.carried.rounding import compensated
from torchglb.ucb.incremental.looks import anchor_at_minimum
from torchglb.ucb.incremental.minorant import (
    LAST_NEEDED,
    LOOSE,
    MARGIN,
    PAUSED_UNTIL,
    REACH,
    ROWS_THEN,
    SLOT,
    Minorant,
    ball_reach,
    bound_by_ellipsoid,
    ellipsoid,
    is_carried,
    is_old,
    least_reach,
    move_to,
    outer_ellipsoid,
    store,
)
from torchglb.ucb.incremental.round_state import Round, RoundState
from torchglb.ucb.kernels import cut_rounding

#: a minorant is asked where so many rivals are left, and made where so many are, by so many passes
FEW, MANY, MOST_PASSES = 3, 4, 5
#: it is asked at once for so many rounds after it was needed, and not for so many after it said
#: nothing
LATELY, PAUSE = 8.0, 20


@kernel
def bound_cheaply(round_: Round) -> None:
    """Upper bounds on all arms from one ellipsoid around the carried minimum: O(K d^2)."""
    level, model = round_.level, round_.problem.minimum
    gradient, dense = round_.memory.gradient, round_.memory.dense
    loss = expand(model, model.point, dense, gradient, True)
    # no payment for the ridge: near the minimum its slope is no larger than that of the rows
    paid = compensated(gradient.shape[0]) * cut_rounding(
        level.high, loss, loss, model.objective.carried.trace[0], level.magnitude, level.radius
    )
    concordance = loss_concordance(model.objective)
    slack = level.high - loss + paid
    outer = ellipsoid(model.point, gradient, slack, concordance, level.radius, dense)
    bound_by_ellipsoid(round_.arms, outer, level.radius, dense)


@kernel
def begin_minorant(state: RoundState, round_: Round) -> None:
    """A minorant is to be made at the carried minimum, which becomes an anchor; by a pass."""
    slot, problem = anchor_at_minimum(state, round_), round_.problem
    move_to(problem.minorant, problem.anchors.carried, slot, round_.level.radius)
    state.minorant_passes += 1


@kernel
def end_minorant(state: RoundState, round_: Round) -> bool:
    """A pass for a minorant has been made: whether another one is needed, with a better D.

    That is where the least D turns out to be much smaller than the one that it was made with, or
    larger. Else it bounds the arms.
    """
    problem, level, memory = round_.problem, round_.level, round_.memory
    minorant, anchors, spare = problem.minorant, problem.anchors.carried, memory.form.reflections
    store(minorant, problem.rows, memory.minimum_pass)
    outer = outer_ellipsoid(minorant, anchors, level, memory.dense, spare)
    least = least_reach(minorant, outer, level.radius, memory.dense.hessian, spare)
    better, reach = min(MARGIN * least, ball_reach(minorant, level.radius)), minorant.state[REACH]
    poor = not outer.width < math.inf or LOOSE * better < reach
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

    Where it says nothing it is to rest for some rounds.
    """
    problem, level, memory = round_.problem, round_.level, round_.memory
    minorant, anchors, spare = problem.minorant, problem.anchors.carried, memory.form.reflections
    if not is_carried(minorant, anchors):
        return False
    outer = outer_ellipsoid(minorant, anchors, level, memory.dense, spare)
    if not outer.width < math.inf:
        return False
    problem.use.last[int(minorant.state[SLOT])] = float(state.number)
    if bound_by_ellipsoid(round_.arms, outer, level.radius, memory.dense) == 0:
        minorant.state[PAUSED_UNTIL] = float(state.number + PAUSE)
    return not is_old(minorant, anchors, level)


@kernel
def may_use_minorant(state: RoundState, round_: Round) -> bool:
    """Whether there may be one that says more than the anchors, for a choice.

    Not where an anchor has a polynomial of its own or the minimum's is the loss itself, nor where a
    negative ridge makes a quadratic of doubtful convexity.
    """
    problem, order = round_.problem, round_.problem.anchors.table.order
    if round_.settings.every or problem.minorant.state.shape[0] == 0 or order > 2:
        return False
    if problem.minimum.objective.constants.ratio == 0.0 or problem.anchors.quadratic.ridge < 0.0:
        return False
    return float(state.number) >= problem.minorant.state[PAUSED_UNTIL]


@kernel
def was_needed(state: RoundState, minorant: Minorant) -> bool:
    """Whether looks have lately left many rivals: then the minorant is asked before the first."""
    return float(state.number) <= minorant.state[LAST_NEEDED] + LATELY
