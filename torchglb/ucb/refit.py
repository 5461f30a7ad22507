"""The optimistic program of a growing history on a device: every round is solved anew.

A device is fast at passes over the history and slow at everything that the host has to wait for.
So nothing is carried there but the last estimate, from which the next one starts: a round is one
fit and one solve of all arms by the batched native solver, a few passes each. (To start from the
last round's maximisers instead of the estimate was measured once, over 40 rounds: at d = 2 it
saves up to 17% of the operator calls, at d = 5 and 10 it costs 12 to 21% more.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import length
from torchglb.checks import check_count, check_tensors, refuse
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.forgetting import ForgettingGiven, ForgettingHistory, as_forgetting
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import MLEResult, minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap
from torchglb.rounding import round_up
from torchglb.rows.history import History
from torchglb.ucb.growing import EPS, Choice, GrowingProgram, raised
from torchglb.ucb.incremental.round_state import Settings
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.native import native_support


class RefitProgram(GrowingProgram):
    """What :class:`torchglb.ucb.AnchoredProgram` is on a CPU, with the same questions.

    A level above the minimum is as uncertain as that, and both bounds pay for it: where beta^2 is
    below what an estimate leaves open (some 1e-2 in float32), ``lower`` is minus infinity and the
    status INACCURATE. The winner is the arm with the largest upper bound; in float32 other arms may
    have bounds that overlap with its own.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        level_tol: what policies take for the error of the minimum of the loss, which is found to
            ``1e-9 (1 + |loss|)`` (1e-4 in float32) whatever this is.
        aggregate: merge repeated arms in the history.
        forgetting: ``Discount(gamma)`` or ``Window(n)`` for rows that are forgotten; fits then
            start from what the history carries.
        validate: check the values of what is appended.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> program = RefitProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> program.argmax([[1.0, 0.0], [0.0, 1.0]], radius=1.0).upper.shape
        torch.Size([2])
    """

    first_steps, steps_per_arm = 100, 0

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        level_tol: float = 1e-6,
        aggregate: bool = False,
        forgetting: ForgettingGiven | None = None,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.check_problem(family, domain, batch_shape)
        kept: dict[str, Any] = {"validate": validate, "dtype": dtype, "device": device}
        history: History
        if (forgotten := as_forgetting(forgetting)) is None:
            history = History(domain.dim, batch_shape, aggregate, family=family, **kept)
        elif aggregate:
            raise refuse("aggregate", "False for rows that are forgotten", aggregate)
        else:
            history = ForgettingHistory(forgotten, family, domain, batch_shape, **kept)
        super().__init__(family, domain, history, level_tol)
        like = history.exact_view().X
        self._start = like.new_zeros((*self.batch_shape, domain.dim))
        self._passes = like.new_zeros(self.batch_shape)

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._passes.clone()

    def beside(self, anchors: int) -> RefitProgram:
        """The same; there are no anchors on a device."""
        check_count("anchors", anchors, least=1)
        return self.fork()

    def _state(self) -> dict[str, Any]:
        return {"start": self._start.clone(), "passes": self._passes.clone()}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_tensors("state", state, self._state())

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._start, self._passes = state["start"].clone(), state["passes"].clone()

    @torch.no_grad()
    def minimum(self, regularization: ArrayLike = 0.0) -> Estimate:
        """``min L`` over the ball, and an upper bound on it that pays for rounding."""
        loss = self._loss(self._numbers("regularization", regularization))
        return self._certified(loss, self._fit(loss), self.history.dtype)

    def _fit(self, loss: NegativeLogLikelihood) -> MLEResult:
        history = self.history
        start = history.start() if isinstance(history, ForgettingHistory) else self._start
        return minimize_likelihood(loss, self.domain, start=start, throw=False)

    def _certified(
        self, loss: NegativeLogLikelihood, fit: MLEResult, dtype: torch.dtype
    ) -> Estimate:
        """A fit with bounds on its loss and on the least one that rounding cannot break."""
        inside = self._inside(fit.theta.to(dtype))
        theta = inside.to(loss.X.dtype)
        if theta.is_cpu and theta.dtype != torch.float64:  # there float32 is a storage format
            loss, theta = loss.rebuild(tuple(t.double() for t in loss.tensors())), theta.double()
        at, errors = loss.expand_with_errors(theta)
        value, off = at.loss.double(), errors.loss.double()
        gradient, S = at.gradient.double(), self.domain.radius_like(value).expand(self.batch_shape)
        gap = frank_wolfe_gap(theta.double(), gradient, S) + 2.0 * S * errors.gradient.double()
        gap = gap + (8.0 + theta.shape[-1]) * EPS * S * length(gradient)
        low = -round_up(raised(gap + off - value), dtype)
        high = round_up(raised(value + off), dtype)
        return Estimate(inside, high, low, at.gradient.to(dtype))

    def _inside(self, theta: Tensor) -> Tensor:
        """An estimate in the ball for certain: beyond it the loss may be below the minimum."""
        x, eps = theta.double(), torch.finfo(theta.dtype).eps
        S = self.domain.radius_like(x).expand(self.batch_shape)
        share = (1.0 - (4.0 + x.shape[-1]) * eps) * S / length(x)
        return (share.clamp_max(1.0)[..., None] * x).to(theta.dtype)

    @torch.no_grad()
    def _round(
        self, arms: Tensor, height: float | Tensor, ridge: float | Tensor, settings: Settings
    ) -> Choice:
        loss = self._loss(ridge)
        fit = self._fit(loss)
        level, least = torch.zeros_like(fit.loss) + height, None
        if settings.relative:
            known = self._certified(loss, fit, loss.X.dtype)
            level = round_up(raised(known.loss.double() + height), loss.X.dtype)
            least = -raised(-known.lower_bound.double() - height)
        x, dtype = arms.to(loss.X.dtype), arms.dtype
        found = native_support(
            SublevelProgram(loss, self.domain, level),
            x,
            center=fit.theta,
            tol=min(settings.tie, settings.value_tol) / 4,
            max_steps=settings.max_steps,
            throw=False,
            validate=False,
        )
        index, lower = found.upper.argmax(-1), found.lower
        status = found.status.gather(-1, index[..., None])[..., 0]
        if least is not None:
            lower = self._lowered(lower, x, known.theta, known.loss.double(), least, level)
            hidden = (status == Status.CONVERGED) & lower.isneginf().all(-1)
            status = torch.where(hidden, int(Status.INACCURATE), status)
        strange = ~torch.isfinite(arms).flatten(-2).all(-1)
        status = torch.where(strange, int(Status.NONFINITE), status)
        start = torch.where(torch.isfinite(fit.theta), fit.theta, self._start)
        passes = fit.num_steps.to(self._passes.dtype) + 1.0
        # all or nothing
        self._start, self._passes = start, self._passes + passes
        if x.dtype == dtype:
            return Choice(index, found.upper, lower, status, passes)
        # merged rows have more digits than the arms, and so has what was computed from them
        upper, lower = round_up(found.upper, dtype), -round_up(-lower, dtype)
        return Choice(upper.argmax(-1), upper, lower, status, passes.to(dtype))

    def _lowered(
        self,
        lower: Tensor,
        arms: Tensor,
        center: Tensor,
        loss: Tensor,
        least: Tensor,
        level: Tensor,
    ) -> Tensor:
        """Lower bounds for the lowest level that ``min L + beta^2`` may be, by convexity.

        Args:
            lower: those for the level that was solved, ``(*B, K)``.
            arms: ``(*B, K, d)``.
            center: the estimate, ``(*B, d)``.
            loss: there, from above.
            least: the lowest level.
            level: that was solved.
        """
        share = ((least - loss) / (level.double() - loss)).clamp_max(1.0)
        share = torch.where(level.isinf(), 1.0, share)[..., None]  # the whole ball, either way
        x, theta = arms.double(), center.double()
        inner = (x @ theta[..., None])[..., 0]
        found = inner + share * (lower.double() - inner)
        size = length(x) * length(theta)[..., None] + found.abs()
        found = found - (16.0 + x.shape[-1]) * EPS * size
        found = torch.where(share > 0.0, torch.minimum(found, lower.double()), -torch.inf)
        return -round_up(-found, lower.dtype)
