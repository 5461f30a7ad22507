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
    at_least,
    counting,
    dot,
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
from torchglb.optim.numbers import surely
from torchglb.ucb.bounds import Tangent, cut_value, draw_back, roundings_of, tangent, trace
from torchglb.ucb.bundle import Anchor, Bundle
from torchglb.ucb.follow import follow
from torchglb.ucb.minimum import FlatHistory
from torchglb.ucb.native import search_support
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.scan import Round, Scan, scan
from torchglb.ucb.sqp import come_back, multipliers, propose, stop_at_cut
from torchglb.ucb.taylor import (
    Nature,
    derivative_sums,
    local_square,
    remainder,
    shift_by_ridge,
)

#: up to this dimension the best single cut says as much as several together
PLANAR = 2
#: a look may be free of a pass: then there may be so many times as many
LOOKS = 4
#: a model may err by this share of what is still to be found out
SHARE = 0.25
#: a model may err by this share of the level's height over the minimum, where it leads the way
TRUST = 0.1
#: how far from its anchor a point may be that decides a choice, relative to the size of the set: a
#: new anchor there spares later rounds their looks
ROAM = 0.2


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


class Question(NamedTuple):
    """One arm of each of some problems: where is its maximiser?"""

    task: Round  # of these problems
    index: Array  # which they are, (n)
    arm: Array  # (n)
    slot: Array  # of the anchor, (n)
    x: Array  # the arm itself, (n, d)
    anchor: Anchor  # near the maximiser
    normal: Array  # the cut <normal, theta> <= offset that says most of the arm so far
    offset: Array

    @property
    def start(self) -> Array:
        """Where the anchor was asked last, ``(n, d)``."""
        return self.anchor.point + self.anchor.shift

    @property
    def goal(self) -> Array:
        """So far below the level that a point can be proven feasible, ``(n)``."""
        return self.task.level - 2.0 * self.anchor.excess

    def pick(self, rows: Array) -> Question:
        """The same for some of the problems."""
        task, *own = self
        return Question(
            task.pick(rows), *(t.pick(rows) if isinstance(t, Anchor) else t[rows] for t in own)
        )


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
        self._plain = idle(task.ridge)

    def decide(self, tol: float, value_tol: float | None, max_steps: int) -> Verdict:
        """The winner, up to ties; see :meth:`torchglb.ucb.AnchoredProgram.argmax`."""
        task, xp = self.task, library(self.task.arms)
        self._roam = ROAM if value_tol is None else float("inf")
        everyone = counting(task.arms.shape[0], task.arms)
        steps = 1 if self.domain.dim <= PLANAR else 2
        found = scan(self.bundle, task, steps, self._carried)
        for slots in (found.tight, found.touch):
            self.bundle.mark_used(slots, everyone, self.now)
        upper, lower = found.upper, xp.maximum(found.lower, matvec(task.arms, task.hub))
        # a centre above the level is no feasible point, and then nothing is one for certain
        centred = task.hub_loss <= task.level

        def standing() -> tuple[Array, Array, Array, Array]:
            """Leader, strongest rival, who goes on, and what is to be found out."""
            leader = lower.argmax(-1)
            best, own = lower[everyone, leader], upper[everyone, leader]
            others = upper + 0.0
            others[everyone, leader] = -float("inf")
            rival = others.argmax(-1)
            overlap = others[everyone, rival] - best
            contested = centred & (overlap > tol * (1.0 + abs(best)))
            if value_tol is None:
                return leader, rival, contested, overlap
            small = value_tol * (1.0 + abs(own))
            unclosed = centred & (own - best > small)
            return leader, rival, contested | unclosed, xp.where(unclosed, small, overlap)

        def learn(index: Array, above: Array, below: Array) -> None:
            upper[index] = xp.minimum(above, upper[index])
            lower[index] = xp.maximum(below, lower[index])

        if value_tol is not None:  # all need a look, and there is no doubt at whom
            top = upper.argmax(-1)
            most = upper[everyone, top]
            wanted = value_tol * (1.0 + abs(most))
            index = which(centred & (most - lower[everyone, top] > wanted))
            if index.shape[0]:
                learn(index, *self._look(index, top[index], found, wanted[index]))
        leader, rival, going, wanted = standing()
        index = which(going)
        for _ in range(max_steps if self.bundle.order == 2 else LOOKS * max_steps):
            if not index.shape[0]:
                break
            gap, first, second = (upper - lower)[index], leader[index], rival[index]
            arm = xp.where(take(gap, first) >= take(gap, second), first, second)
            if value_tol is not None:
                # whoever may have the largest value: it wins, or has to be looked at in any case
                top = upper[index].argmax(-1)
                arm = xp.where(take(gap, top) > wanted[index], top, arm)
            learn(index, *self._look(index, arm, found, wanted[index]))
            leader, rival, going, wanted = standing()
            index = which(going)
        if index.shape[0]:
            precision = tol if value_tol is None else min(tol, value_tol)
            learn(index, *self._solve_all(index, precision))
            leader, _, going, _ = standing()
        if not surely(centred):
            lower = xp.where(centred[:, None], lower, -float("inf"))
        return Verdict(leader, upper, lower, centred & ~going, self.passes)

    @property
    def _carried(self) -> float:
        """Roundings of a carried loss or gradient: as in a pass, and two of a careful sum."""
        return 2.0 + roundings_of(self.observations)

    @property
    def _rough(self) -> float:
        """Of other carried sums: one per observation, and not at random where arms repeat."""
        return 4.0 + self.observations

    def _look(self, index: Array, arm: Array, found: Scan, wanted: Array) -> tuple[Array, Array]:
        """Bounds on all arms of the picked problems, from a point near the maximiser of one arm."""
        task, slot = self.task.pick(index), found.touch[index, arm]
        x, cut = task.arms[counting(index.shape[0], arm), arm], found.tight[index, arm]
        ask = Question(
            task, index, arm, slot, x, self.bundle.at(index, slot), *found.cuts.at(index, cut)
        )
        if self.bundle.order == 2:
            trial = self._propose(ask)
            seen = self._by_pass(ask, trial, found)
        else:
            trial, seen = self._nearby(ask, found, wanted)
        arms, B, hub, floor, _, S, _ = task
        point = draw_back(trial, seen.loss, hub, floor, B)
        normal, offset = seen.normal[:, None, :], seen.offset[:, None]
        return cut_value(arms, normal, offset, S[:, None]), matvec(arms, point)

    def _nearby(self, ask: Question, found: Scan, wanted: Array) -> tuple[Array, Seen]:
        """The maximiser of an arm as the model of an anchor has it: a pass only if that is vague.

        Where the model might be far from the truth, the point is that of a safer quadratic one.
        """
        task, anchor, bundle = ask.task, ask.anchor, self.bundle

        def expand(points: Array) -> Expansion:
            return self._model(ask, points)

        trial, weight, settled = follow(ask.x, ask.start, expand, ask.goal, task.radius)
        seen = self._by_model(ask, trial)
        sound = settled & (seen.excess <= TRUST * (task.level - task.hub_loss))
        enough = sound & (weight * seen.doubt <= SHARE * wanted)
        enough = enough & ((weight > 0.0) | (seen.loss <= task.level))  # a pole must be feasible
        shift = trial - anchor.point
        if self._roam < float("inf"):
            enough = enough & (length(shift) <= self._roam * length(trial - task.hub))
        # the next look starts from here; not from a pole, which is known anyway
        near = enough & (weight > 0.0)
        rows, slots = ask.index[near], ask.slot[near]
        bundle.shift[rows, :, slots], bundle.excess[rows, slots] = shift[near], seen.excess[near]
        rest = which(~enough)
        if rest.shape[0]:
            lost = which(~sound)
            if lost.shape[0]:
                trial[lost] = self._propose(ask.pick(lost))
            exact = self._by_pass(ask.pick(rest), trial[rest], found)
            for old, new in zip(seen, exact, strict=True):
                old[rest] = new
        return trial, seen

    def _propose(self, ask: Question) -> Array:
        """A point near the maximiser of an arm, from any distance, by one step of SQP."""
        _, B, hub, floor, _, S, _ = ask.task
        x, theta = ask.x, ask.start
        xp, at = library(x), Expansion(*(t[:, 0] for t in self._model(ask, theta[:, None])))
        weight, outward = multipliers(x, at.gradient, theta)
        eigenvalues, basis = xp.linalg.eigh(finite(at.hessian))
        room, guess = ask.goal - at.loss, outward / weight
        forth = propose(x, theta, at.gradient, eigenvalues, basis, room, S, guess)
        forth = stop_at_cut(theta, forth, ask.normal, ask.offset)
        # a point far outside is no base for a quadratic model: come back along the chord first
        far = at.loss - B > B - floor
        if not idle(far):
            forth = xp.where(far[:, None], come_back(theta, at, hub, floor, B), forth)
        return forth

    def _model(self, ask: Question, points: Array) -> Expansion:
        """Loss, gradient and Hessian at points ``(n, k, d)``, as the anchor's model has them."""
        at = ask.anchor.jet.at(points - ask.anchor.point[:, None])
        return at if self._plain else shift_by_ridge(at, points, ask.task.ridge[:, None])

    def _slope(self, ask: Question, points: Array) -> tuple[Array, Array]:
        """Loss and gradient there."""
        loss, gradient = ask.anchor.jet.slope(points - ask.anchor.point[:, None])
        if self._plain:
            return loss, gradient
        ridge = ask.task.ridge[:, None]
        return loss + 0.5 * ridge * dot(points, points), gradient + ridge[..., None] * points

    def _by_model(self, ask: Question, trial: Array) -> Seen:
        """What the Taylor model of an anchor says, its remainder and all roundings paid for.

        With a slope that errs by e in the dual norm of the Hessian there, a point at a distance
        delta in its norm may lie e delta lower than the tangent says, but it lies
        ``delta^2 / (2 + 2 R S D)`` higher by the curvature, D the longest row: never lower than by
        ``e^2 (1 + R S D) / 2``.
        """
        nature, anchor = self.nature.pick(ask.index), ask.anchor
        longest, ratio, concordance = nature
        S, p, xp = ask.task.radius, trial - anchor.point, library(trial)
        loss, gradient = (t[:, 0] for t in self._slope(ask, trial[:, None]))
        curvature, far = anchor.curvature, length(p)
        local = local_square(p, anchor.hessian, curvature, self._rough)
        error = remainder(far, local, nature, self.bundle.order)
        grown = curvature * xp.exp(at_least(concordance, 1.0) * (longest * far))
        cut = self._tangent(ask.task, trial, loss, gradient, grown)
        # what the model adds to the terms at the anchor: to the loss, and to the slope times 2S
        terms = (1.0 + ratio + concordance) * grown * far * (far + 2.0 * S)
        eps = limits(p)[0]
        rounding = self._carried * (cut.rounding + eps * abs(anchor.loss))
        rounding = rounding + self._rough * eps * terms
        dip = 0.5 * error.slope * error.slope * (1.0 + concordance * longest * S)
        excess = error.value + rounding
        doubt = 4.0 * excess + dip
        return Seen(loss + excess, gradient, cut.offset + excess + dip, excess, doubt)

    def _by_pass(self, ask: Question, trial: Array, found: Scan) -> Seen:
        """One pass over the history; the point becomes an anchor."""
        rows, monomials, index = self.data.rows(tensor(ask.index)), self.bundle.monomials, ask.index
        sums = derivative_sums(self.data.family, tensor(trial), *rows, monomials)
        sums = array(self.data.shards.sum(sums)[0])
        self.passes[index] += 1.0
        slot = self.bundle.used[index].argmin(-1)
        self.bundle.insert(index, slot, trial, sums, self.now)
        at = Expansion(sums[:, 0], sums[:, 1 : 1 + self.bundle.dim], monomials.hessian(sums))
        at = shift_by_ridge(at, trial, ask.task.ridge)
        cut = self._tangent(ask.task, trial, at.loss, at.gradient, trace(at.hessian))
        rounding = roundings_of(self.observations) * cut.rounding
        offset = cut.offset + rounding
        found.cuts.replace(index, slot, at.gradient, offset)
        found.touch[index, ask.arm] = found.tight[index, ask.arm] = slot
        return Seen(at.loss + rounding, at.gradient, offset, 0.0 * offset, 0.0 * offset)

    def _tangent(
        self, task: Round, point: Array, loss: Array, gradient: Array, curvature: Array
    ) -> Tangent:
        _, B, _, _, _, S, pull = task
        return tangent(dot(gradient, point), loss, curvature, B, S, pull)

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
