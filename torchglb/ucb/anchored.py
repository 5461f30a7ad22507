"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round, each in O(d^2) to O(d^q) per observation: a
Taylor model of the loss near its minimum, which certifies the level ``B = min L + beta^2``, and a
bundle of anchors near the boundary of the set, whose cuts and chords bound every arm. A pass over the
history is made only when the bounds do not yet decide, and only for the problems that need it.
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
from torchglb.history import History, Rows
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import cut_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim.ball import frank_wolfe_gap, minimize_model
from torchglb.ucb.bundle import (
    Bundle,
    at_anchor,
    carry_forward,
    empty_bundle,
    insert,
    scan,
)
from torchglb.ucb.native import native_support
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.sqp import ball_weight, come_back, propose, stop_at_cut
from torchglb.ucb.taylor import (
    Bracket,
    certify,
    choose_order,
    derivative_sums,
    evaluate_model,
)


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
        passes: ``(*B)``, passes over the history that this choice took, the minimum included.
    """

    index: Tensor
    upper: Tensor
    lower: Tensor
    passes: Tensor


def which(mask: Tensor) -> Tensor:
    """The indices of the problems still open: the stopping test, and the only host sync."""
    return torch.nonzero(mask)[:, 0]


class AnchoredProgram:
    """The optimistic program over a history that grows by a few rows per round.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        anchors: A, the size of the bundle; by default it grows with d until A d^2 is 10^5.
        level_tol: the minimum of the loss is certified to this.
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
        level_tol: float = 1e-6,
        aggregate: bool = False,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.family = family
        self.domain = domain
        self.level_tol = check_positive("level_tol", level_tol)
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
            anchors = max(64, min(32 * 2 ** min(d, 10), 100_000 // d**2))
        radius = domain.max_radius
        self.order = choose_order(family, d, radius)
        ratio = family.derivative_ratio(self.order + 1, radius)
        self._ratio = float("inf") if ratio is None else ratio
        self._concordance = family.self_concordance(radius)
        self._radius = domain.radius_like(like).expand(self.batch_shape).reshape(problems)
        self._bundle = empty_bundle(problems, anchors, d, like)
        self._sums = [like.new_zeros((problems, d**k)) for k in range(self.order + 1)]
        self._point = like.new_zeros((problems, d))
        self._shift = torch.zeros_like(self._point)
        self._longest = like.new_zeros((problems,))
        self.combined_cuts = 1 if d == 1 else 4
        self._round = 0
        self.passes = like.new_zeros((problems,))

    # ---- data ----------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward."""
        before = self.history
        count = len(before)
        self.history.append(x, r, weight)
        problems, d = self._point.shape
        new = len(self.history) - count

        def rows(value: Any, *tail: int) -> Tensor:
            tensor = torch.as_tensor(value, dtype=self.history.dtype, device=self.history.device)
            return tensor.expand(*self.batch_shape, *tensor.shape[len(self.batch_shape) :]).reshape(
                problems, new, *tail
            )

        X, reward = rows(x, d), rows(r)
        w = torch.ones_like(reward) if weight is None else rows(weight)
        self._longest = torch.maximum(self._longest, torch.linalg.vector_norm(X, dim=-1).amax(-1))
        added = derivative_sums(self.family, self._point, X, reward, w, self.order)
        self._sums = [old + more for old, more in zip(self._sums, added, strict=True)]
        self._bundle = carry_forward(self._bundle, self.family, X, reward, w)

    def _flat_rows(self, index: Tensor) -> Rows:
        """The rows of the problems ``index``, with the batch axes flattened into one."""
        X, r, w = self.history.rows()
        problems = self._point.shape[0]
        X, r = X.reshape(problems, *X.shape[-2:]), r.reshape(problems, r.shape[-1])
        w = None if w is None else w.reshape(problems, w.shape[-1])
        if self._is_all(index):
            return Rows(X, r, w)
        return Rows(X[index], r[index], None if w is None else w[index])

    def _likelihood(self, index: Tensor, ridge: Tensor) -> NegativeLogLikelihood:
        return NegativeLogLikelihood.of(
            self.family, self._flat_rows(index), regularization=ridge[index]
        )

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return {
            "history": self.history.state_dict(),
            "bundle": {k: t.clone() for k, t in self._bundle._asdict().items()},
            "sums": [t.clone() for t in self._sums],
            "point": self._point.clone(),
            "shift": self._shift.clone(),
            "longest": self._longest.clone(),
            "passes": self.passes.clone(),
            "round": self._round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        bundle = Bundle(**{k: t.clone() for k, t in state["bundle"].items()})
        sums = [t.clone() for t in state["sums"]]
        for name, old, new in (
            *zip(("points", "loss"), self._bundle[:2], bundle[:2], strict=True),
            *((f"sums[{k}]", a, b) for k, (a, b) in enumerate(zip(self._sums, sums, strict=False))),
        ):
            check_shape(f"state[{name!r}]", new, old.shape)
        self.history.load_state_dict(state["history"])
        self._bundle, self._sums = bundle, sums
        self._point, self._shift, self._longest, self.passes = (
            state[k].clone() for k in ("point", "shift", "longest", "passes")
        )
        self._round = int(state["round"])

    # ---- the minimum ---------------------------------------------------------------------

    def minimum(self, regularization: float | Tensor = 0.0) -> Minimum:
        """``min L`` over the ball, certified to ``level_tol``; a pass only where the model ends."""
        theta, bracket = self._minimum(self._ridge(regularization))
        shape = self.batch_shape
        return Minimum(
            theta.reshape(*shape, -1),
            bracket.high.reshape(shape),
            (bracket.high - bracket.low).reshape(shape),
        )

    def _ridge(self, regularization: float | Tensor) -> Tensor:
        if isinstance(regularization, Tensor):
            return regularization.expand(self.batch_shape).reshape(-1)
        return torch.full_like(self._longest, regularization)

    def _minimum(self, ridge: Tensor) -> tuple[Tensor, Bracket]:
        everyone = torch.arange(ridge.shape[0], device=ridge.device)
        theta, bracket = self._step(everyone, ridge)
        open_ = which(~(bracket.high - bracket.low <= self.level_tol))
        for _ in range(2):
            if not open_.numel():
                break
            # move the model to its own minimum: one pass
            self._recenter(open_, theta[open_])
            theta, bracket = self._merge(open_, theta, bracket, *self._step(open_, ridge))
            open_ = open_[which(~((bracket.high - bracket.low)[open_] <= self.level_tol))]
        if open_.numel():
            theta, bracket = self._merge(
                open_, theta, bracket, *self._from_scratch(open_, theta[open_], ridge)
            )
        return theta, bracket

    def _step(self, index: Tensor, ridge: Tensor) -> tuple[Tensor, Bracket]:
        """One Newton step on the model, and what it certifies."""
        state = (self._point, self._shift, ridge, self._radius, self._longest, *self._sums)
        c, p, lam, S, longest, *sums = state if self._is_all(index) else [t[index] for t in state]
        d = c.shape[-1]
        eye = torch.eye(d, dtype=c.dtype, device=c.device)
        model = evaluate_model(sums, p)
        gradient = model.gradient + lam[:, None] * (c + p)
        hessian = model.hessian + lam[:, None, None] * eye
        curved, turn = torch.linalg.eigh(torch.nan_to_num(hessian))
        theta = minimize_model(curved.clamp_min(0.0), turn, c + p, gradient, S)
        p = theta - c
        model = evaluate_model(sums, p)
        eigenvalues, basis = torch.linalg.eigh(torch.nan_to_num(sums[2].unflatten(-1, (d, d))))
        bracket = certify(
            model,
            eigenvalues,
            basis,
            theta,
            p,
            lam,
            S,
            longest,
            self._ratio,
            self._concordance,
            self.order,
        )
        self._shift = p if self._is_all(index) else self._shift.index_copy(0, index, p)
        return theta, bracket

    def _is_all(self, index: Tensor) -> bool:
        return index.shape[0] == self._point.shape[0]

    def _recenter(self, index: Tensor, theta: Tensor) -> None:
        rows = self._flat_rows(index)
        sums = derivative_sums(self.family, theta, *rows, self.order)
        self._sums = [
            old.index_copy(0, index, new) for old, new in zip(self._sums, sums, strict=True)
        ]
        self._point = self._point.index_copy(0, index, theta)
        self._shift = self._shift.index_fill(0, index, 0.0)
        self.passes = self.passes.index_add(0, index, torch.ones_like(theta[:, 0]))

    def _from_scratch(self, index: Tensor, start: Tensor, ridge: Tensor) -> tuple[Tensor, Bracket]:
        """A solve over the history, for few rows or a model that moved too far."""
        likelihood = self._likelihood(index, ridge)
        S = self._radius[index]
        finite = torch.where(torch.isfinite(start), start, 0.0)
        scale = 1.0 + likelihood.value(finite).abs().amax() if index.numel() else 1.0
        fit = minimize_likelihood(
            likelihood,
            self.domain.resized(S),
            start=finite,
            tol=float(self.level_tol / (4.0 * scale)),
            throw=False,
        )
        self.passes = self.passes.index_add(0, index, fit.num_steps.to(ridge.dtype) + 1.0)
        self._recenter(index, fit.theta)
        gap = frank_wolfe_gap(fit.theta, fit.gradient, S)
        return fit.theta, Bracket(fit.loss - gap, fit.loss)

    @staticmethod
    def _merge(
        index: Tensor, theta: Tensor, bracket: Bracket, new_theta: Tensor, new: Bracket
    ) -> tuple[Tensor, Bracket]:
        theta = theta.index_copy(0, index, new_theta)
        low, high = (a.index_copy(0, index, b) for a, b in zip(bracket, new, strict=True))
        return theta, Bracket(low, high)

    # ---- the program of this round -------------------------------------------------------

    def program(
        self,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
    ) -> SublevelProgram:
        """The program as it stands now, for ``support``, ``argmax_ball`` and set plots.

        Args:
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term.
        """
        ridge = self._ridge(regularization)
        high = None if radius is None else self._minimum(ridge)[1].high
        B = self._level(radius, level, high).reshape(self.batch_shape)
        likelihood = NegativeLogLikelihood.of(
            self.family, self.history, regularization=ridge.reshape(self.batch_shape)
        )
        return SublevelProgram(likelihood, self.domain, B)

    def _level(
        self, radius: float | Tensor | None, level: Tensor | None, minimum: Tensor | None
    ) -> Tensor:
        if (radius is None) == (level is None):
            raise refuse(
                "radius, level", "exactly one of them", "none" if level is None else "both"
            )
        if level is not None:
            return level.expand(self.batch_shape).reshape(-1)
        assert minimum is not None
        beta = torch.as_tensor(radius, dtype=minimum.dtype, device=minimum.device)
        return minimum + beta.expand(self.batch_shape).reshape(-1)

    # ---- the optimistic arm --------------------------------------------------------------

    def argmax(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        tol: float = 1e-7,
        value_tol: float | None = None,
        max_steps: int = 20,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: single evaluations before all arms of a problem are solved to tolerance.
        """
        shape, d = self.batch_shape, self._point.shape[-1]
        check_shape("arms", arms, (*shape, "K", d))
        if (radius is None) == (level is None):
            raise refuse(
                "radius, level", "exactly one of them", "both" if level is not None else "none"
            )
        arms = arms.reshape(-1, *arms.shape[-2:])
        ridge = self._ridge(regularization)
        self._round += 1
        before = self.passes
        hub, bracket = self._minimum(ridge)
        B = self._level(radius, level, bracket.high)
        index, upper, lower = self._decide(
            arms, B, hub, bracket.high, ridge, tol, value_tol, max_steps
        )
        return Choice(
            index.reshape(shape),
            upper.reshape(*shape, -1),
            lower.reshape(*shape, -1),
            (self.passes - before).reshape(shape),
        )

    def _decide(
        self,
        arms: Tensor,
        level: Tensor,
        hub: Tensor,
        hub_loss: Tensor,
        ridge: Tensor,
        tol: float,
        value_tol: float | None,
        max_steps: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = scan(
            self._bundle,
            arms,
            level,
            hub,
            hub_loss,
            ridge,
            self._radius,
            self._concordance * self._longest,
            self.combined_cuts,
        )
        upper, cut, base = found.upper, found.cut, found.touch
        at_hub = (arms * hub[:, None, :]).sum(-1)
        lower = torch.maximum(found.lower, at_hub)

        def standing(upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The leader, its strongest rival, and whether the contest is open."""
            best, leader = lower.max(-1)
            others = upper.scatter(-1, leader[:, None], -torch.inf)
            threat, rival = others.max(-1)
            contested = threat - best > tol * (1.0 + best.abs())
            if value_tol is not None:
                own = upper.gather(-1, leader[:, None])[:, 0]
                contested = contested | (own - best > value_tol * (1.0 + own.abs()))
            return leader, rival, contested

        leader, rival, contested = standing(upper, lower)
        # anchors that bound some arm stay; the others make room
        deciding = torch.cat([found.cut, found.touch], dim=-1)
        used = self._bundle.used.scatter(-1, deciding, float(self._round))
        self._bundle = self._bundle._replace(used=used)
        index = which(contested)
        for _ in range(max_steps):
            if not index.numel():
                break
            # work on whichever of leader and rival is known less well
            gap = (upper - lower)[index]
            pair = torch.stack([leader[index], rival[index]], dim=-1)
            arm = pair.gather(-1, gap.gather(-1, pair).argmax(-1, keepdim=True))[:, 0]
            new_upper, new_lower, slot = self._evaluate(
                index, arm, cut, base, arms, level, hub, hub_loss, ridge
            )
            base = base.index_put((index, arm), slot)
            tighter = new_upper < upper[index]
            cut = cut.index_copy(0, index, torch.where(tighter, slot[:, None], cut[index]))
            upper = upper.index_copy(0, index, torch.minimum(new_upper, upper[index]))
            lower = lower.index_copy(0, index, torch.maximum(new_lower, lower[index]))
            leader, rival, contested = standing(upper, lower)
            index = which(contested)
        if index.numel():
            likelihood = self._likelihood(index, ridge)
            program = SublevelProgram(
                likelihood, self.domain.resized(self._radius[index]), level[index]
            )
            exact = native_support(
                program, arms[index], center=hub[index], tol=tol / 4, throw=False, validate=False
            )
            upper = upper.index_copy(0, index, torch.minimum(exact.upper, upper[index]))
            lower = lower.index_copy(0, index, torch.maximum(exact.lower, lower[index]))
            spent = torch.full_like(hub_loss[index], float(arms.shape[-2]))
            self.passes = self.passes.index_add(0, index, spent)
            leader, _, _ = standing(upper, lower)
        return leader, upper, lower

    def _evaluate(
        self,
        index: Tensor,
        arm: Tensor,
        cut: Tensor,
        base: Tensor,
        arms: Tensor,
        level: Tensor,
        hub: Tensor,
        hub_loss: Tensor,
        ridge: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass at the SQP point of one arm per problem; bounds for all arms of it."""
        rows = torch.arange(index.shape[0], device=index.device)
        candidates, B, center, floor, S = (
            t[index] for t in (arms, level, hub, hub_loss, self._radius)
        )
        x = candidates[rows, arm]
        anchors = Bundle(*(t[index] for t in self._bundle))
        tangent_point, tight = at_anchor(anchors, cut[index, arm], ridge[index])
        offset = B - tight.loss + (tight.gradient * tangent_point).sum(-1)
        theta, at = at_anchor(anchors, base[index, arm], ridge[index])
        guess = ball_weight(x, tight.gradient, offset, S)
        eigenvalues, basis = torch.linalg.eigh(torch.nan_to_num(at.hessian))
        forth = propose(x, theta, at.gradient, eigenvalues, basis, B - at.loss, S, guess)
        forth = stop_at_cut(theta, forth, tight.gradient, offset)
        # an anchor far outside is no base for a quadratic model: come back along the chord first
        back = come_back(theta, at, center, floor, B)
        far = at.loss - B > B - floor
        trial = torch.where(far[:, None], back, forth)

        likelihood = self._likelihood(index, torch.zeros_like(ridge))
        data = likelihood.expand(trial)
        self.passes = self.passes.index_add(0, index, torch.ones_like(floor))
        slot = anchors.used.argmin(-1)
        self._bundle = insert(self._bundle, index, trial, data, float(self._round))

        lam = ridge[index]
        value = data.loss + 0.5 * lam * trial.square().sum(-1)
        gradient = data.gradient + lam[:, None] * trial
        offset = B - value + (gradient * trial).sum(-1)
        eps = torch.finfo(x.dtype).eps
        offset = offset + 16 * eps * (B.abs() + value.abs() + offset.abs())
        upper = cut_ball(candidates, gradient[:, None, :], offset[:, None], S[:, None]).value
        share = torch.where(value <= B, 1.0, (B - floor) / (value - floor)).clamp(0.0, 1.0)
        point = center + share[:, None] * (trial - center)
        lower = (candidates @ point[..., None])[..., 0]
        return upper, lower, slot
