"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round, each in O(d^2) to O(d^q) per observation: a
Taylor model of the loss near its minimum, which certifies the level ``B = min L + beta^2``, and a
bundle of anchors near the boundary of the set, whose cuts and chords bound every arm. A pass over
the history is made only when the bounds do not yet decide, and only for the problems that need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_positive, check_shape, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.optim import Status
from torchglb.ucb.bounds import (
    cut_offset,
    cut_value,
    draw_back,
    pull_of_rows,
    roundings_of,
    trace,
)
from torchglb.ucb.bundle import (
    Bundle,
    Round,
    at_anchor,
    carry_forward,
    empty_bundle,
    insert,
    mark_used,
    scan,
)
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory, which
from torchglb.ucb.native import search_support
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.sqp import ball_weight, come_back, propose, stop_at_cut
from torchglb.ucb.taylor import Bracket, shift_by_ridge

#: up to this dimension the best single cut says as much as several together
PLANAR = 2


@dataclass(frozen=True)
class Minimum:
    """The constrained minimum of the loss, enclosed.

    Attributes:
        theta: ``(*B, d)``, a point of the ball.
        loss: ``(*B)``, an upper bound on L(theta), at most ``slack`` above the minimum.
        slack: ``(*B)``.
    """

    theta: Tensor
    loss: Tensor
    slack: Tensor


@dataclass(frozen=True)
class Choice:
    """The optimistic arm of every problem, with what is known of all arms.

    Attributes:
        index: ``(*B)``, the arm with the largest ``h(x)``, up to ``tol`` where arms tie.
        upper: ``(*B, K)``, certified upper bounds (the winner's beats all others' lower bounds).
        lower: ``(*B, K)``, certified lower bounds.
        status: ``(*B)``, of :class:`torchglb.optim.Status`: INFEASIBLE where the level is below the
            minimum, NONFINITE where a NaN came in, INACCURATE where rounding hides the winner.
        passes: ``(*B)``, passes over the history that this choice took, the minimum included.
    """

    index: Tensor
    upper: Tensor
    lower: Tensor
    status: Tensor
    passes: Tensor


class AnchoredProgram:
    """The optimistic program over a history that grows by a few rows per round.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        anchors: A, the size of the bundle; by default it grows with d until A d^2 is 10^5.
        level_tol: the minimum of the loss is certified to this; 1e-6, and 1e-2 in float32.
        aggregate: merge repeated arms in the history.
        validate: check the values of what is appended.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([1.0, 0.0], 1.0)
        >>> program.argmax(torch.eye(2).double(), radius=1.0).index
        tensor(0)
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        anchors: int | None = None,
        level_tol: float | None = None,
        aggregate: bool = False,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.family = family
        self.domain = domain
        exact = dtype == torch.float64
        if level_tol is None:
            level_tol = 1e-6 if exact else 1e-2
        self.level_tol = check_positive("level_tol", level_tol)
        self._tie = 1e-7 if exact else 1e-4
        self.history = History(
            domain.dim,
            batch_shape,
            aggregate,
            family=family,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        self.batch_shape = self.history.batch_shape
        d, problems = domain.dim, self.batch_shape.numel()
        like = torch.zeros((), dtype=dtype, device=self.history.device)
        if anchors is None:
            anchors = max(64, min(16 * 2 ** min(d, 10), 100_000 // d**2))
        self._radius = domain.radius_like(like).expand(self.batch_shape).reshape(problems)
        self._data = FlatHistory(family, self.history)
        self._minimum = CarriedMinimum(self._data, domain, self._radius, self.level_tol)
        self._bundle = empty_bundle(problems, anchors, d, like)
        self._pull = torch.zeros_like(self._radius)
        self._round = 0
        self._passes = torch.zeros_like(self._radius)

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""
        return (self._passes + self._minimum.passes).reshape(self.batch_shape)

    # ---- data ----------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward."""
        count = len(self.history)
        self.history.append(x, r, weight)
        shape = (*self.batch_shape, len(self.history) - count)

        def rows(value: Any, *tail: int) -> Tensor:
            tensor = torch.as_tensor(value, dtype=self.history.dtype, device=self.history.device)
            if tensor.ndim:
                return tensor.detach().reshape(self._data.problems, -1, *tail)
            return tensor.expand(shape).reshape(self._data.problems, -1)

        X, reward = rows(x, self.domain.dim), rows(r)
        w = torch.ones_like(reward) if weight is None else rows(weight)
        self._minimum.observe(X, reward, w)
        carry_forward(self._bundle, self.family, X, reward, w)
        self._pull = self._pull + pull_of_rows(self.family, X, reward, w)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return {
            "history": self.history.state_dict(),
            "minimum": self._minimum.state_dict(),
            "bundle": {name: t.clone() for name, t in self._bundle._asdict().items()},
            "pull": self._pull.clone(),
            "passes": self._passes.clone(),
            "round": self._round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        for name, old in self._bundle._asdict().items():
            check_shape(f"state['bundle'][{name!r}]", state["bundle"][name], old.shape)
        self.history.load_state_dict(state["history"])
        self._minimum.load_state_dict(state["minimum"])
        self._bundle = Bundle(**{name: t.clone() for name, t in state["bundle"].items()})
        self._pull, self._passes = state["pull"].clone(), state["passes"].clone()
        self._round = int(state["round"])

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: float | Tensor = 0.0) -> Minimum:
        """``min L`` over the ball, certified to ``level_tol``; a pass only where the model ends."""
        theta, bracket = self._minimum.find(self._ridge(regularization))
        shape = self.batch_shape
        return Minimum(
            theta.reshape(*shape, -1),
            bracket.high.reshape(shape),
            (bracket.high - bracket.low).reshape(shape),
        )

    def _ridge(self, regularization: float | Tensor) -> Tensor:
        if isinstance(regularization, Tensor):
            return regularization.expand(self.batch_shape).reshape(-1)
        return torch.full_like(self._radius, regularization)

    # ---- the program of this round -------------------------------------------------------

    def program(
        self,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
    ) -> SublevelProgram:
        """The program as it stands now, for ``support``, ``argmax_ball`` and pictures of the set.

        Args:
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term.
        """
        shape = self.batch_shape
        ridge = self._ridge(regularization)
        B, _, _ = self._level(radius, level, ridge, self.minimum(regularization))
        likelihood = NegativeLogLikelihood.of(
            self.family, self.history, regularization=ridge.reshape(shape)
        )
        return SublevelProgram(likelihood, self.domain, B.reshape(shape))

    def _level(
        self,
        radius: float | Tensor | None,
        level: Tensor | None,
        ridge: Tensor,
        known: Minimum | None = None,
    ) -> tuple[Tensor, Tensor, Bracket]:
        """B, the minimiser and the enclosure of the minimum."""
        if (radius is None) == (level is None):
            got = "none" if level is None else "both"
            raise refuse("radius, level", "exactly one of them", got)
        if known is None:
            hub, minimum = self._minimum.find(ridge)
        else:
            hub, high = known.theta.reshape(-1, self.domain.dim), known.loss.reshape(-1)
            minimum = Bracket(high - known.slack.reshape(-1), high)
        given = radius if level is None else level
        assert given is not None
        if isinstance(given, Tensor):
            given = given.to(hub).expand(self.batch_shape).reshape(-1)
        else:  # filled in place: a copy from the host would wait for the device
            given = torch.full_like(minimum.high, given)
        return (minimum.high + given if level is None else given), hub, minimum

    # ---- the optimistic arm --------------------------------------------------------------

    @torch.no_grad()
    def argmax(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        minimum: Minimum | None = None,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int = 20,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            minimum: what :meth:`minimum` has said of this loss since the last row, if it was asked.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied; 1e-7, and 1e-4 in
                float32.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: single evaluations before all arms of a problem are solved to tolerance.
        """
        shape = self.batch_shape
        check_shape("arms", arms, (*shape, "K", self.domain.dim))
        if arms.shape[-2] == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(arms.shape)}")
        before = self.passes
        ridge = self._ridge(regularization)
        B, hub, bracket = self._level(radius, level, ridge, minimum)
        self._round += 1
        flat = arms.reshape(-1, *arms.shape[-2:])
        task = Round(flat, B, hub, bracket.high, ridge, self._radius, self._pull)
        tol = self._tie if tol is None else tol
        index, upper, lower, decided = self._decide(task, tol, value_tol, max_steps)
        empty = (bracket.low > B) | (upper == -torch.inf).any(-1)
        undefined = torch.isnan(bracket.high + B) | (torch.isnan(upper.sum(-1)) & ~empty)
        status = torch.where(decided, int(Status.CONVERGED), int(Status.INACCURATE))
        status = torch.where(empty, int(Status.INFEASIBLE), status)
        status = torch.where(undefined, int(Status.NONFINITE), status)
        return Choice(
            index.reshape(shape),
            upper.reshape(*shape, -1),
            lower.reshape(*shape, -1),
            status.reshape(shape),
            self.passes - before,
        )

    def _decide(
        self, task: Round, tol: float, value_tol: float | None, max_steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The winner ``(N)``, bounds on all arms ``(N, K)``, and whether the winner is certain."""
        # a carried sum is rounded once per observation, and not at random where arms repeat
        roundings = 4.0 + len(self.history)
        steps = 1 if self.domain.dim <= PLANAR else 2
        found = scan(self._bundle, task, steps, roundings)
        mark_used(self._bundle, found, self._round)
        upper, cut, base = found.upper, found.cut, found.touch
        lower = torch.maximum(found.lower, (task.arms @ task.hub[..., None])[..., 0])

        def standing() -> tuple[Tensor, Tensor, Tensor]:
            """The leader, its strongest rival, and the problems where the contest is open."""
            best, leader = lower.max(-1)
            threat, rival = upper.scatter(-1, leader[:, None], -torch.inf).max(-1)
            contested = threat - best > tol * (1.0 + best.abs())
            if value_tol is not None:
                own = upper.gather(-1, leader[:, None])[:, 0]
                contested = contested | (own - best > value_tol * (1.0 + own.abs()))
            return leader, rival, which(contested)

        decided = torch.ones_like(task.level, dtype=torch.bool)
        leader, rival, index = standing()
        for _ in range(max_steps):
            if not index.numel():
                break
            # work on whichever of leader and rival is known less well
            pair = torch.stack([leader, rival], dim=-1)[index]
            unknown = (upper - lower)[index].gather(-1, pair)
            arm = pair.gather(-1, unknown.argmax(-1, keepdim=True))[:, 0]
            above, below, slot = self._evaluate(
                task.pick(index), index, arm, cut[index, arm], base[index, arm]
            )
            base = base.index_put((index, arm), slot)
            cut = cut.index_copy(
                0, index, torch.where(above < upper[index], slot[:, None], cut[index])
            )
            upper = upper.index_copy(0, index, torch.minimum(above, upper[index]))
            lower = lower.index_copy(0, index, torch.maximum(below, lower[index]))
            leader, rival, index = standing()
        if index.numel():
            above, below = self._solve_all(task.pick(index), index, tol)
            upper = upper.index_copy(0, index, torch.minimum(above, upper[index]))
            lower = lower.index_copy(0, index, torch.maximum(below, lower[index]))
            leader, _, index = standing()
            decided = decided.index_fill(0, index, False)
        return leader, upper, lower, decided

    def _evaluate(
        self, task: Round, index: Tensor, arm: Tensor, cut: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass at the SQP point of one arm of each picked problem.

        Returns:
            Bounds on all arms of the picked problems, from above and from below, and the slot of
            the new anchor.
        """
        arms, B, hub, floor, ridge, S, pull = task
        roundings = roundings_of(len(self.history))
        x = arms[torch.arange(index.shape[0], device=index.device), arm]

        def offset_at(point: Tensor, at: Expansion) -> Tensor:
            bend = trace(at.hessian)
            return cut_offset(point, at.loss, at.gradient, bend, B, S, pull, roundings)

        tangent_point, tight = at_anchor(self._bundle, index, cut, ridge)
        offset = offset_at(tangent_point, tight)
        theta, at = at_anchor(self._bundle, index, base, ridge)
        eigenvalues, basis = torch.linalg.eigh(torch.nan_to_num(at.hessian))
        guess = ball_weight(x, tight.gradient, offset, S)
        forth = propose(x, theta, at.gradient, eigenvalues, basis, B - at.loss, S, guess)
        forth = stop_at_cut(theta, forth, tight.gradient, offset)
        # an anchor far outside is no base for a quadratic model: come back along the chord first
        far = at.loss - B > B - floor
        trial = torch.where(far[:, None], come_back(theta, at, hub, floor, B), forth)

        data = self._data.likelihood(index).expand(trial)
        self._passes = self._passes.index_add(0, index, torch.ones_like(floor))
        slot = self._bundle.used[index].argmin(-1)
        insert(self._bundle, index, slot, trial, data, self._round)
        there = shift_by_ridge(data, trial, ridge)
        offset = offset_at(trial, there)
        above = cut_value(arms, there.gradient[:, None, :], offset[:, None], S[:, None])
        point = draw_back(trial, there.loss, hub, floor, B)
        return above, (arms @ point[..., None])[..., 0], slot

    def _solve_all(self, task: Round, index: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """All arms of the picked problems to tolerance, where single steps did not decide."""
        arms, B, hub, _, ridge, S, _ = task
        likelihood = NegativeLogLikelihood(
            self.family, *self._data.rows(index), regularization=ridge, shards=self._data.shards
        )
        program = SublevelProgram(likelihood, self.domain.resized(S), B)
        search, _, steps = search_support(
            program, hub, likelihood.expand(hub), arms, tol=tol / 4, max_steps=100
        )
        self._passes = self._passes.index_add(0, index, steps.sum(-1).to(B.dtype) + 1.0)
        return search.upper, search.lower
