"""One round of optimism: which arm has the largest ``h(x)``, and how sure is that?

The anchors bound every arm from both sides without a pass. While the leader's lower bound does not
beat every other arm's upper bound, one point is evaluated over the history, for the problems where
that is so and nobody else: the SQP point of the leader or of its strongest rival.
"""

from __future__ import annotations

from typing import NamedTuple

from torchglb.arrays import (
    Array,
    array,
    counting,
    finite,
    idle,
    library,
    matvec,
    take,
    tensor,
    which,
)
from torchglb.domain import Ball
from torchglb.likelihood import Expansion
from torchglb.ucb.bounds import cut_offset, cut_value, draw_back, roundings_of, trace
from torchglb.ucb.bundle import Bundle, Round, at_anchor, insert, mark_used, scan
from torchglb.ucb.minimum import FlatHistory
from torchglb.ucb.native import search_support
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.sqp import ball_weight, come_back, propose, stop_at_cut
from torchglb.ucb.taylor import shift_by_ridge

#: up to this dimension the best single cut says as much as several together
PLANAR = 2


class Verdict(NamedTuple):
    """What a contest has found, for N problems."""

    winner: Array  # (N)
    upper: Array  # (N, K), certified
    lower: Array  # (N, K), certified
    certain: Array  # (N)
    passes: Array  # (N), over the history


class Evaluated(NamedTuple):
    """What one pass has found for each of some problems."""

    normal: Array  # the cut <normal, theta> <= offset that the set obeys
    offset: Array
    point: Array  # a feasible point
    slot: Array  # where the anchor is kept


class Contest:
    """The arms of one round against each other.

    Args:
        task: arms, levels and centres.
        bundle: the anchors; evaluated points join them.
        data: the history.
        domain: the ball.
        now: the number of this round.
    """

    def __init__(
        self, task: Round, bundle: Bundle, data: FlatHistory, domain: Ball, now: int
    ) -> None:
        self.task, self.bundle = task, bundle
        self.data, self.domain, self.now = data, domain, now
        self.observations = len(data.history)
        self.passes = library(task.level).zeros_like(task.level)

    def decide(self, tol: float, value_tol: float | None, max_steps: int) -> Verdict:
        """The winner, up to ties; see :meth:`torchglb.ucb.AnchoredProgram.argmax`."""
        task, xp = self.task, library(self.task.arms)
        everyone = counting(task.arms.shape[0], task.arms)
        columns = counting(task.arms.shape[1], task.arms)
        # a carried sum is rounded once per observation, and not at random where arms repeat
        steps = 1 if self.domain.dim <= PLANAR else 2
        found = scan(self.bundle, task, steps, roundings=4.0 + self.observations)
        mark_used(self.bundle, found, everyone, self.now)
        upper, cut, lower, base = found
        lower = xp.maximum(lower, matvec(task.arms, task.hub))

        def standing() -> tuple[Array, Array, Array, Array]:
            """The leader, its strongest rival, whether its own value is open, who must go on."""
            leader = xp.argmax(lower, -1)
            best, own = lower[everyone, leader], upper[everyone, leader]
            others = xp.where(columns == leader[:, None], -float("inf"), upper)
            rival = xp.argmax(others, -1)
            contested = others[everyone, rival] - best > tol * (1.0 + abs(best))
            if value_tol is None:
                return leader, rival, contested & False, contested
            unclosed = own - best > value_tol * (1.0 + abs(own))
            return leader, rival, unclosed, contested | unclosed

        leader, rival, unclosed, going = standing()
        index = which(going)
        for _ in range(max_steps):
            if not index.shape[0]:
                break
            # the leader if its own value is wanted, else whoever of the two is known less well
            first, second, wanted = leader[index], rival[index], unclosed[index]
            gap = (upper - lower)[index]
            vague = take(gap, first) >= take(gap, second)
            arm = xp.where(vague | wanted, first, second)
            evaluated = self._evaluate(index, arm, cut[index, arm], base[index, arm])
            base[index, arm] = evaluated.slot
            above, below = self._bounds(index, evaluated)
            cut[index] = xp.where(above < upper[index], evaluated.slot[:, None], cut[index])
            upper[index] = xp.minimum(above, upper[index])
            lower[index] = xp.maximum(below, lower[index])
            leader, rival, unclosed, going = standing()
            index = which(going)
        if index.shape[0]:
            above, below = self._solve_all(index, tol)
            upper[index] = xp.minimum(above, upper[index])
            lower[index] = xp.maximum(below, lower[index])
            leader, _, _, going = standing()
        return Verdict(leader, upper, lower, ~going, self.passes)

    def _evaluate(self, index: Array, arm: Array, cut: Array, base: Array) -> Evaluated:
        """One pass at the SQP point of one arm of each picked problem; it becomes an anchor."""
        arms, B, hub, floor, ridge, S, pull = self.task.pick(index)
        xp = library(arms)
        x = arms[counting(arms.shape[0], arms), arm]
        tangent_point, tight = at_anchor(self.bundle, index, cut, ridge)
        offset = self._offset(tangent_point, tight, B, S, pull)
        theta, at = at_anchor(self.bundle, index, base, ridge)
        eigenvalues, basis = xp.linalg.eigh(finite(at.hessian))
        guess = ball_weight(x, at.gradient, theta)
        forth = propose(x, theta, at.gradient, eigenvalues, basis, B - at.loss, S, guess)
        forth = stop_at_cut(theta, forth, tight.gradient, offset)
        # an anchor far outside is no base for a quadratic model: come back along the chord first
        far = at.loss - B > B - floor
        trial = forth
        if not idle(far):
            trial = xp.where(far[:, None], come_back(theta, at, hub, floor, B), forth)

        found = self.data.likelihood(tensor(index)).expand(tensor(trial))
        data = Expansion(*(array(t) for t in found))
        self.passes[index] += 1.0
        slot = xp.argmin(self.bundle.used[index], -1)
        insert(self.bundle, index, slot, trial, data, self.now)
        there = shift_by_ridge(data, trial, ridge)
        offset = self._offset(trial, there, B, S, pull)
        point = draw_back(trial, there.loss, hub, floor, B)
        return Evaluated(there.gradient, offset, point, slot)

    def _bounds(self, index: Array, evaluated: Evaluated) -> tuple[Array, Array]:
        """What an evaluated point says of all arms of its problem, from above and from below."""
        arms, S = self.task.arms[index], self.task.radius[index]
        normal, offset, point, _ = evaluated
        above = cut_value(arms, normal[:, None, :], offset[:, None], S[:, None])
        return above, matvec(arms, point)

    def _offset(self, point: Array, at: Expansion, B: Array, S: Array, pull: Array) -> Array:
        roundings = roundings_of(self.observations)
        return cut_offset(point, at.loss, at.gradient, trace(at.hessian), B, S, pull, roundings)

    def _solve_all(self, index: Array, tol: float) -> tuple[Array, Array]:
        """All arms of the picked problems to tolerance, where single steps did not decide."""
        arms, B, hub, _, _, S, _ = (tensor(t) for t in self.task.pick(index))
        likelihood = self.data.likelihood(tensor(index), tensor(self.task.ridge))
        program = SublevelProgram(likelihood, self.domain.resized(S), B)
        search, _, steps = search_support(
            program, hub, likelihood.expand(hub), arms, tol=tol / 4, max_steps=100
        )
        self.passes[index] += array(steps.sum(-1).to(B.dtype) + 1.0)
        return array(search.upper), array(search.lower)
