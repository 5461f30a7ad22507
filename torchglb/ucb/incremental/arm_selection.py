"""One round of exact optimism: which arm has the largest ``h(x)``; compiled, for one problem.

The anchors bound every arm from both sides without a pass. While the leader's lower bound does not
beat every other arm's upper bound, one point is looked at: the maximiser of the leader or of its
strongest rival, as a model of the loss has it. Where the model is certain enough there, that is
all; else a pass over the history is asked for, and the point becomes an anchor. The round stops
where it needs a pass and goes on with its sums, wherever they come from.
"""

from __future__ import annotations

import math

from torchglb.backend import inlined, kernel
from torchglb.backend.dense import EPS, dot, length
from torchglb.carried.kernels import MAGNITUDE
from torchglb.carried.minimum import DONE as FOUND
from torchglb.carried.minimum import BallSearch, Goal, SearchState, search_minimum
from torchglb.ucb.incremental.cutting_planes import (
    PLANAR,
    WIDE,
    lower_bound,
    prepare,
    scan,
    second_cut,
)
from torchglb.ucb.incremental.looks import look, new_anchor
from torchglb.ucb.incremental.minorant import (
    FEW_RIVALS,
    LAST_NEEDED,
    MANY_RIVALS,
    begin_minorant,
    bound_by_minorant,
    bound_cheaply,
    end_minorant,
    may_use_minorant,
    was_needed,
)
from torchglb.ucb.incremental.round_state import (
    BLOCK,
    CERTAIN,
    DECIDED,
    LOOKS,
    MINIMUM,
    NO_CENTER,
    PASS_FOR_ANCHOR,
    PASS_FOR_MINIMUM,
    PASS_FOR_MINORANT,
    SCAN,
    SHARPEN,
    UNDECIDED,
    Arms,
    CarriedProblem,
    Level,
    Memory,
    Round,
    RoundState,
    Settings,
)

#: at first the minimum is found to this, and to a hundredth of the level's height above it
LOOSE, LOOSE_SHARE = 1e-2, 1e-2
#: the level may be uncertain by this share of what is still to be found out
LEVEL_SHARE = 0.1
#: and is then made more certain than that by this factor: the next arm will want more
AHEAD = 0.01
#: after so many looks, more than there usually are rivals, the level is made certain in any case
SHARP_AFTER = 30
#: looks without a pass, at most, for each one with a pass that there may be
FREE_LOOKS = 4
#: from so many arms on, those that an ellipsoid excludes are not looked up among the anchors
MANY_ARMS = 64
#: a set whose level is so little above the minimum is almost that ellipsoid; of a single point
#: there is no other cut, since the gradient vanishes there
THIN = 1e-2


@kernel
def choose(
    state: RoundState,
    search: SearchState,
    problem: CarriedProblem,
    arms: Arms,
    settings: Settings,
    trace: float,
    memory: Memory,
) -> int:
    """Goes on with a round until the winner is certain or a pass is needed.

    Args:
        state: of dtype ``ROUND``; at the start of a round its phase is MINIMUM.
        search: the state of the search for the minimum.
        problem: what is carried.
        arms: the arms; bounds come out in them.
        settings: what is asked.
        trace: of the Hessian where the pass was made that was asked for.
        memory: for one problem at a time; with the sums of that pass.
    """
    if state.awaited == PASS_FOR_MINIMUM:
        search.answered, state.awaited = 1, 0
    while True:
        if state.phase == MINIMUM:
            ball = BallSearch(problem.vectors, problem.minimum, memory.dense)
            goal = Goal(state.tolerance, math.inf, math.inf)
            if search_minimum(search, ball, goal, memory.minimum_pass, trace) != FOUND:
                state.awaited = PASS_FOR_MINIMUM
                return PASS_FOR_MINIMUM
            if not _set_level(state, search, settings):
                continue
            state.phase, state.reduced, state.with_minorant = SCAN, 0, 0
        round_ = Round(problem, arms, _level_of(state, problem), settings, memory)
        if state.phase == SCAN:
            _scan_all(state, round_)
            state.phase = LOOKS
        asked = _looks(state, round_, trace)
        if asked != SHARPEN:
            state.awaited = asked
            return asked
        state.phase = MINIMUM


@kernel
def first_tolerance(state: RoundState, settings: Settings) -> float:
    """How well the minimum has to be known for a start."""
    share = LOOSE_SHARE * state.height if settings.relative else LOOSE
    return max(min(LOOSE, share), settings.level_tol)


@kernel
def _set_level(state: RoundState, search: SearchState, settings: Settings) -> bool:
    """Where B is, as the minimum says; False if that has to be known better.

    The centre must be feasible for certain: F(center) at most the lowest level that B may be, or
    F(center) - min F at most the height, which rounding hides less. Where the set is smaller than
    arithmetic can tell, the round goes on as if the centre were feasible, to no certain end; not
    where the search for the minimum was given up, and F(center) may be anything below a bound.
    """
    state.center_loss, state.ending, state.supposed = search.high, CERTAIN, 0
    state.level, state.low = state.height, state.height
    least, width = settings.level_tol, search.high - search.low
    if settings.relative:
        state.level, state.low = search.high + state.height, search.low + state.height
        least = min(least, LEVEL_SHARE * state.height)
    improvable = settings.relative and search.rounding < width <= state.tolerance
    state.exhausted = 0 if improvable else 1
    if state.center_loss <= state.low:
        return True
    if state.tolerance > least and (settings.relative or search.low <= state.height):
        state.tolerance = least
        return False
    if settings.relative and search.excess <= state.height:
        state.center_loss = state.low  # all that is known of F(center), beside feasibility
    elif settings.relative and width <= max(state.tolerance, search.rounding):
        state.low, state.supposed = state.center_loss, 1
    else:
        state.ending = NO_CENTER
    return True


@inlined
def _level_of(state: RoundState, problem: CarriedProblem) -> Level:
    magnitude = problem.anchors.carried.totals[MAGNITUDE] + length(problem.anchors.quadratic.tilt)
    return Level(
        state.level,
        state.low,
        problem.vectors.theta,
        state.center_loss,
        problem.anchors.constants.radius,
        magnitude,
        problem.anchors.quadratic,
    )


@kernel
def _scan_all(state: RoundState, round_: Round) -> None:
    """Bounds on all arms from what is carried: no pass."""
    problem, arms, level = round_.problem, round_.arms, round_.level
    count, d = arms.upper.shape[0], level.center.shape[0]
    radius, used, now = level.radius, problem.use.last, float(state.number)
    for k in range(count):
        x, size = arms.units[k], arms.lengths[k]
        arms.upper[k], arms.lower[k] = size * radius * (1.0 + (8.0 + d) * EPS), -math.inf
        if state.ending != NO_CENTER:
            arms.lower[k] = lower_bound(dot(x, level.center), size, radius, d)
        arms.multiplier[k], arms.cut[k], arms.feasible[k] = 0.0, -1, -1
    prepare(round_)
    many = count >= MANY_ARMS and not round_.settings.close_all
    if may_use_minorant(state, round_) and (many or was_needed(state, problem.minorant)):
        state.with_minorant = int(bound_by_minorant(state, round_))
    if state.with_minorant == 0 and (many or level.high - level.center_loss <= THIN):
        bound_cheaply(round_)
    if many:
        _scan_the_best(round_)
    best = _scan_contenders(round_)
    if state.ending == NO_CENTER:
        for k in range(count):
            arms.lower[k] = -math.inf
    for k in range(count):
        if arms.upper[k] <= best or arms.feasible[k] < 0:
            continue
        used[arms.cut[k]] = now
        used[arms.feasible[k]] = now
        if PLANAR < d < WIDE:
            other = second_cut(round_, k)
            if other >= 0:
                used[other] = now


@kernel
def _scan_the_best(round_: Round) -> None:
    """Bounds from all anchors for the block of arms with the largest upper bounds so far."""
    arms, chosen = round_.arms, round_.memory.chosen
    for j in range(BLOCK):
        best = -1
        for k in range(arms.upper.shape[0]):
            if arms.cut[k] == -1 and (best < 0 or arms.upper[k] > arms.upper[best]):
                best = k
        chosen[j] = best
        arms.cut[best] = 0  # taken
    chosen[BLOCK] = BLOCK
    scan(round_)


@kernel
def _scan_contenders(round_: Round) -> float:
    """Bounds from all anchors for the other arms whose upper bounds are above the result."""
    arms, chosen, close_all = round_.arms, round_.memory.chosen, round_.settings.close_all
    best, count = -math.inf, 0
    if not close_all:
        for k in range(arms.lower.shape[0]):
            best = max(best, arms.lower[k])
    for k in range(arms.lower.shape[0] + 1):
        last = k == arms.lower.shape[0]
        if not last and arms.cut[k] == -1 and arms.upper[k] > best:
            chosen[count] = k
            count += 1
        if count == BLOCK or (last and count > 0):
            chosen[BLOCK] = count
            scan(round_)
            if not close_all:
                for j in range(count):
                    best = max(best, arms.lower[chosen[j]])
            count = 0
    return best


# ---- looks -------------------------------------------------------------------------------------


@kernel
def _looks(state: RoundState, round_: Round, trace: float) -> int:
    """Looks at one maximiser after the other until the winner is certain."""
    arms, settings = round_.arms, round_.settings
    answered, state.awaited = state.awaited, 0
    if answered == PASS_FOR_MINORANT:
        if end_minorant(state, round_):
            return PASS_FOR_MINORANT
    elif answered == PASS_FOR_ANCHOR:
        new_anchor(state, round_, trace)
    while True:
        leader, rival = _standing(arms)
        state.leader = leader
        overlap = arms.upper[rival] - arms.lower[leader] if rival >= 0 else -math.inf
        if state.ending == NO_CENTER:  # no lower bounds: the largest upper one is all there is
            if rival >= 0 and arms.upper[rival] > arms.upper[leader]:
                state.leader = rival
            return DECIDED
        open_, arm, wanted = _next_arm(arms, leader, rival, overlap, settings)
        if not open_:
            state.ending = CERTAIN
            return DECIDED
        ended = state.passes >= settings.max_steps or state.looks >= FREE_LOOKS * settings.max_steps
        multiplier = max(arms.multiplier[arm], arms.multiplier[leader])
        if _sharpen(state, settings, multiplier, wanted, ended):
            return SHARPEN
        if ended:
            state.ending = UNDECIDED
            return DECIDED
        # a leader that has been looked at is what rivals have to be told from
        if state.looks > 0 and state.with_minorant == 0:
            state.with_minorant = 1
            rivals = _rivals(arms, leader, settings)
            if rivals >= FEW_RIVALS and may_use_minorant(state, round_):
                round_.problem.minorant.state[LAST_NEEDED] = float(state.number)
                new_enough = bound_by_minorant(state, round_)
                if not new_enough and rivals >= MANY_RIVALS:
                    begin_minorant(state, round_)
                    return PASS_FOR_MINORANT
                continue
        state.looks += 1
        state.arm = arm
        if look(state, round_, wanted):
            state.passes += 1
            return PASS_FOR_ANCHOR


@kernel
def _rivals(arms: Arms, leader: int, settings: Settings) -> int:
    """How many arms are not yet told from the leader."""
    rivals, best = 0, arms.lower[leader]
    for k in range(arms.upper.shape[0]):
        if k != leader and arms.upper[k] > best + settings.tie * (1.0 + abs(best)):
            rivals += 1
    return rivals


@kernel
def _sharpen(
    state: RoundState, settings: Settings, multiplier: float, wanted: float, ended: bool
) -> bool:
    """Whether the level is too uncertain for what is wanted, with dh/dB about the multiplier.

    Then the minimum is to be found to a tolerance that is enough; to that of the level after some
    looks; and as well as can be where all arms are going to be solved.
    """
    width, tolerance = state.level - state.low, state.tolerance
    if state.exhausted == 1 or not width > 0.0:
        return False
    if multiplier * width > LEVEL_SHARE * wanted:
        enough = AHEAD * LEVEL_SHARE * wanted / multiplier
        state.tolerance = min(enough, AHEAD * width)
    elif ended:
        state.tolerance = AHEAD * width
    elif state.looks > SHARP_AFTER:
        state.tolerance = min(tolerance, settings.level_tol)
    return state.tolerance < tolerance


@kernel
def _next_arm(
    arms: Arms, leader: int, rival: int, overlap: float, settings: Settings
) -> tuple[bool, int, float]:
    """Whether there is an arm to look at, which, and to what its gap has to shrink."""
    if settings.close_all:
        arm, most = 0, -math.inf
        for k in range(arms.upper.shape[0]):
            gap = (arms.upper[k] - arms.lower[k]) / (1.0 + abs(arms.upper[k]))
            if gap > most:
                arm, most = k, gap
        small = settings.value_tol * (1.0 + abs(arms.upper[arm]))
        return most > settings.value_tol, arm, small
    best = arms.lower[leader]
    if settings.value_tol < math.inf:
        # the largest upper bound of all is that of one of the two
        top = leader if rival < 0 or arms.upper[leader] >= arms.upper[rival] else rival
        small = settings.value_tol * (1.0 + abs(arms.upper[top]))
        if arms.upper[top] - arms.lower[top] > small:  # whichever wins, this has to be looked at
            return True, top, small
    wider = arms.upper[leader] - best >= arms.upper[rival] - arms.lower[rival]
    return overlap > settings.tie * (1.0 + abs(best)), leader if wider else rival, overlap


@kernel
def _standing(arms: Arms) -> tuple[int, int]:
    """The arm with the largest lower bound, and of the others that with the largest upper one."""
    leader, rival = 0, -1
    for k in range(1, arms.lower.shape[0]):
        if arms.lower[k] > arms.lower[leader]:
            leader = k
    for k in range(arms.upper.shape[0]):
        if k != leader and (rival < 0 or arms.upper[k] > arms.upper[rival]):
            rival = k
    return leader, rival
