"""One round of optimism: which arm has the largest ``h(x)``, and how sure is that?

The anchors bound every arm from both sides without a pass. While the leader's lower bound does not
beat every other arm's upper bound, one point is looked at, for the problems where that is so and
nobody else: the SQP point of the leader or of its strongest rival. Where an anchor nearby knows the
loss there well enough, that is all; else it takes a pass over the history, and the point becomes an
anchor itself.
"""

from __future__ import annotations

from typing import NamedTuple

from torchglb.arrays import (
    Array,
    array,
    counting,
    finite,
    idle,
    length,
    library,
    limits,
    matvec,
    take,
    tensor,
    which,
)
from torchglb.domain import Ball
from torchglb.likelihood import Expansion
from torchglb.ucb.bounds import Tangent, cut_value, draw_back, roundings_of, tangent, trace
from torchglb.ucb.bundle import Anchor, Bundle
from torchglb.ucb.minimum import FlatHistory
from torchglb.ucb.native import search_support
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.scan import Round, Scan, scan
from torchglb.ucb.sqp import come_back, multipliers, propose, stop_at_cut
from torchglb.ucb.taylor import Nature, derivative_sums, remainder

#: up to this dimension the best single cut says as much as several together
PLANAR = 2
#: how closely a step is made to end on the sphere, if its own value is not what is asked for
ROUGH = 1e-10
#: a look may be free of a pass: then there may be so many times as many
LOOKS = 4
#: a model may err by this share of what is still to be found out
SHARE = 0.25


class Verdict(NamedTuple):
    """What a contest has found, for N problems."""

    winner: Array  # (N)
    upper: Array  # (N, K), certified
    lower: Array  # (N, K), certified
    certain: Array  # (N)
    passes: Array  # (N), over the history


class Seen(NamedTuple):
    """What is known of the loss at a point, for each of some problems."""

    loss: Array  # at most this
    normal: Array  # the cut <normal, theta> <= offset that the set obeys
    offset: Array
    excess: Array  # what a model's loss was raised by, for its errors
    doubt: Array  # by how much loss and offset together may be too large


class Contest:
    """The arms of one round against each other.

    Args:
        task: arms, levels and centres.
        bundle: the anchors; evaluated points join them.
        data: the history.
        nature: the constants of the family and the rows.
        domain: the ball.
        now: the number of this round.
    """

    def __init__(
        self,
        task: Round,
        bundle: Bundle,
        data: FlatHistory,
        nature: Nature,
        domain: Ball,
        now: int,
    ) -> None:
        self.task, self.bundle = task, bundle
        self.data, self.nature, self.domain, self.now = data, nature, domain, now
        self.observations = len(data.history)
        self.passes = library(task.level).zeros_like(task.level)
        self.precisions: tuple[float | None, ...] = (None,)  # of the SQP steps of a look

    def decide(self, tol: float, value_tol: float | None, max_steps: int) -> Verdict:
        """The winner, up to ties; see :meth:`torchglb.ucb.AnchoredProgram.argmax`."""
        task, xp = self.task, library(self.task.arms)
        if self.bundle.order > 2:  # steps are free of passes: a value takes two, a choice one
            self.precisions = (ROUGH,) if value_tol is None else (ROUGH, None)
        everyone = counting(task.arms.shape[0], task.arms)
        columns = counting(task.arms.shape[1], task.arms)
        steps = 1 if self.domain.dim <= PLANAR else 2
        found = scan(self.bundle, task, steps, self._carried)
        for slots in (found.tight, found.touch):
            self.bundle.mark_used(slots, everyone, self.now)
        upper, lower = found.upper, xp.maximum(found.lower, matvec(task.arms, task.hub))
        # a centre above the level is no feasible point, and then nothing is one for certain
        centred = task.hub_loss <= task.level

        def standing() -> tuple[Array, Array, Array, Array, Array]:
            """Leader, strongest rival, whose own value is open, who goes on, and for how much."""
            leader = xp.argmax(lower, -1)
            best, own = lower[everyone, leader], upper[everyone, leader]
            others = xp.where(columns == leader[:, None], -float("inf"), upper)
            rival = xp.argmax(others, -1)
            overlap = others[everyone, rival] - best
            contested = centred & (overlap > tol * (1.0 + abs(best)))
            if value_tol is None:
                return leader, rival, contested & False, contested, overlap
            small = value_tol * (1.0 + abs(own))
            unclosed = centred & (own - best > small)
            return leader, rival, unclosed, contested | unclosed, xp.where(unclosed, small, overlap)

        leader, rival, unclosed, going, wanted = standing()
        index = which(going)
        for _ in range(max_steps if self.bundle.order == 2 else LOOKS * max_steps):
            if not index.shape[0]:
                break
            # the leader if its own value is wanted, else whoever of the two is known less well
            first, second = leader[index], rival[index]
            gap = (upper - lower)[index]
            vague = take(gap, first) >= take(gap, second)
            arm = xp.where(vague | unclosed[index], first, second)
            above, below = self._look(index, arm, found, wanted[index])
            upper[index] = xp.minimum(above, upper[index])
            lower[index] = xp.maximum(below, lower[index])
            leader, rival, unclosed, going, wanted = standing()
            index = which(going)
        if index.shape[0]:
            above, below = self._solve_all(index, tol if value_tol is None else min(tol, value_tol))
            upper[index] = xp.minimum(above, upper[index])
            lower[index] = xp.maximum(below, lower[index])
            leader, _, _, going, _ = standing()
        lower = xp.where(centred[:, None], lower, -float("inf"))
        return Verdict(leader, upper, lower, centred & ~going, self.passes)

    @property
    def _carried(self) -> float:
        """Roundings of a carried sum: one per observation, and not at random where arms repeat."""
        return 4.0 + self.observations

    def _look(self, index: Array, arm: Array, found: Scan, wanted: Array) -> tuple[Array, Array]:
        """Bounds on all arms of the picked problems, from the SQP point of one arm of each."""
        task = self.task.pick(index)
        arms, B, hub, floor, _, S, _ = task
        xp = library(arms)
        x = arms[counting(index.shape[0], arms), arm]
        slot, tight = found.touch[index, arm], found.tight[index, arm]
        before = anchor = self.bundle.at(index, slot)
        normal, offset = (t[index, tight] for t in found.cuts)
        for precision in self.precisions:
            trial, weight = self._propose(task, x, anchor, normal, offset, precision)
            anchor = anchor._replace(shift=trial - anchor.point)
        if self.bundle.order == 2:
            seen = self._by_pass(task, trial, index, arm, found)
        else:
            seen = self._by_model(task, trial, index, anchor)
            enough = weight * seen.doubt <= SHARE * wanted
            # the next look starts from here, if the model can be trusted here
            shift = xp.where(enough[:, None], anchor.shift, before.shift)
            self.bundle.shift[index, slot] = shift
            self.bundle.excess[index, slot] = xp.where(enough, seen.excess, before.excess)
            rest = which(~enough)
            if rest.shape[0]:
                part = index[rest]
                exact = self._by_pass(task.pick(rest), trial[rest], part, arm[rest], found)
                for old, new in zip(seen, exact, strict=True):
                    old[rest] = new
        point = draw_back(trial, seen.loss, hub, floor, B)
        normal, offset = seen.normal[:, None, :], seen.offset[:, None]
        return cut_value(arms, normal, offset, S[:, None]), matvec(arms, point)

    def _propose(
        self,
        task: Round,
        x: Array,
        anchor: Anchor,
        normal: Array,
        offset: Array,
        precision: float | None,
    ) -> tuple[Array, Array]:
        """A point near the maximiser of ``x``, and what the level weighs there."""
        _, B, hub, floor, ridge, S, _ = task
        xp = library(x)
        theta, at = anchor.point + anchor.shift, anchor.model(anchor.shift, ridge)
        weight, outward = multipliers(x, at.gradient, theta)
        eigenvalues, basis = xp.linalg.eigh(finite(at.hessian))
        # aim so far below the level that the point can be proven feasible
        room, guess = B - at.loss - 2.0 * anchor.excess, outward / weight
        forth = propose(x, theta, at.gradient, eigenvalues, basis, room, S, guess, precision)
        forth = stop_at_cut(theta, forth, normal, offset)
        # a point far outside is no base for a quadratic model: come back along the chord first
        far = at.loss - B > B - floor
        if not idle(far):
            forth = xp.where(far[:, None], come_back(theta, at, hub, floor, B), forth)
        return forth, weight

    def _by_model(self, task: Round, trial: Array, index: Array, anchor: Anchor) -> Seen:
        """What the Taylor model of an anchor says, its remainder and all roundings paid for.

        With a slope that errs by e in the dual norm of the Hessian there, a point at a distance
        delta in its norm may lie e delta lower than the tangent says, but it lies
        ``delta^2 / (2 + 2 R S D)`` higher by the curvature, D the longest row: never lower than by
        ``e^2 (1 + R S D) / 2``.
        """
        nature = Nature(*(t[index] for t in self.nature))
        longest, ratio, concordance = nature
        p, xp = trial - anchor.point, library(trial)
        at = anchor.model(p, task.ridge)
        error = remainder(p, anchor.local(p, self._carried), nature, self.bundle.order)
        far = length(p)
        grown = anchor.curvature * xp.exp(longest * far)
        cut = self._tangent(task, trial, at, grown)
        # what the model adds to the terms at the anchor: to the loss, and to the slope times 2S
        terms = (1.0 + ratio + concordance) * grown * far * (far + 2.0 * task.radius)
        rounding = cut.rounding + limits(p)[0] * (abs(anchor.sums[0][..., 0]) + terms)
        dip = 0.5 * error.slope * error.slope * (1.0 + concordance * longest * task.radius)
        excess = error.value + self._carried * rounding
        doubt = 4.0 * excess + dip
        return Seen(at.loss + excess, at.gradient, cut.offset + excess + dip, excess, doubt)

    def _by_pass(self, task: Round, trial: Array, index: Array, arm: Array, found: Scan) -> Seen:
        """One pass over the history; the point becomes an anchor."""
        rows, order = self.data.rows(tensor(index)), self.bundle.order
        sums = derivative_sums(self.data.family, tensor(trial), *rows, order)
        sums = [array(t) for t in self.data.shards.sum(*sums)]
        self.passes[index] += 1.0
        slot = library(trial).argmin(self.bundle.used[index], -1)
        self.bundle.insert(index, slot, trial, sums, self.now)
        at = self.bundle.at(index, slot).expansion(task.ridge)
        cut = self._tangent(task, trial, at, trace(at.hessian))
        rounding = roundings_of(self.observations) * cut.rounding
        offset = cut.offset + rounding
        found.cuts.replace(index, slot, at.gradient, offset)
        found.touch[index, arm] = found.tight[index, arm] = slot
        return Seen(at.loss + rounding, at.gradient, offset, 0.0 * offset, 0.0 * offset)

    def _tangent(self, task: Round, point: Array, at: Expansion, curvature: Array) -> Tangent:
        _, B, _, _, _, S, pull = task
        return tangent(point, at.loss, at.gradient, curvature, B, S, pull)

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
