"""The likelihood-ratio set ``{theta : |theta| <= S, L(theta) <= B}`` (Theorem 3.1 and its kin)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_same, check_shape
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.optim import frank_wolfe_gap
from torchglb.radii import self_concordance_of, theorem32_fixed_point
from torchglb.radii.theorem32 import regularization_for
from torchglb.sets.base import ConfidenceSet
from torchglb.sets.ellipsoid import EllipsoidSet
from torchglb.ucb import SublevelProgram, SupportResult, support

#: an unconfined set is searched in a ball this many times larger; a bound that reaches it is inf
OUTER = 100.0


@dataclass(frozen=True, eq=False)
class LikelihoodRatioSet(ConfidenceSet):
    """All theta whose loss is at most a level, within the ball.

    Args:
        likelihood: the loss L of the history.
        domain: the ball.
        level: B, ``(*B)``.
        theta_hat: the centre, a point of the ball with ``L(theta_hat) <= B``; ``(*B, d)``.
        confined: whether the ball is part of the set. Without it (a prior that covers all of R^d)
            bounds that would reach 100 S are infinite.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 50, [1.0] * 40 + [0.0] * 10)
        >>> interval = sequence.current().interval(torch.eye(2).double()[0], scale="mean")
        >>> bool((interval.lower > 0.5) & (interval.upper < 0.95))
        True
    """

    likelihood: NegativeLogLikelihood
    domain: Ball
    level: Tensor
    theta_hat: Tensor
    confined: bool = True

    def __post_init__(self) -> None:
        shape = self.likelihood.batch_shape
        check_same("level", self.level, "likelihood.X", self.likelihood.X)
        check_shape("level", self.level, shape)
        check_same("theta_hat", self.theta_hat, "likelihood.X", self.likelihood.X)
        check_shape("theta_hat", self.theta_hat, (*shape, self.domain.dim))

    @property
    def family(self) -> GLMFamily:  # type: ignore[override]
        """The GLM family."""
        return self.likelihood.family

    @property
    def center(self) -> Tensor:
        """theta_hat."""
        return self.theta_hat

    @cached_property
    def _at_center(self) -> Expansion:
        return self.likelihood.expand(self.theta_hat)

    @property
    def radius(self) -> Tensor:
        """``beta^2 = B - L(theta_hat)``."""
        return self.level - self._at_center.loss

    @cached_property
    def program(self) -> SublevelProgram:
        """The optimistic program over this set."""
        domain = self.domain
        if not self.confined:
            domain = domain.resized(OUTER * domain.radius_like(self.level).expand(self.level.shape))
        return SublevelProgram(self.likelihood, domain, self.level)

    def slack(self, theta: Tensor) -> Tensor:
        """``B - L(theta)`` in the ball, ``-inf`` outside it."""
        slack = self._per_point(self.level, theta) - self.likelihood.value(theta)
        if not self.confined:
            return slack
        radius = self._per_point(self.domain.radius_like(theta).expand(self.level.shape), theta)
        eps = torch.finfo(theta.dtype).eps
        inside = torch.linalg.vector_norm(theta, dim=-1) <= radius * (1 + 8 * eps)
        return torch.where(inside, slack, -torch.inf)

    def _per_point(self, value: Tensor, theta: Tensor) -> Tensor:
        return value if theta.ndim == self.theta_hat.ndim else value[..., None]

    def support(self, arms: Tensor, solver: str = "native", **options: Any) -> SupportResult:
        """``max <x, theta>`` over the set for every arm ``(*B, K, d)``; see ``torchglb.support``"""
        if solver == "native":
            feasible = self._at_center.loss <= self.level
            center = torch.where(feasible[..., None], self.theta_hat, torch.nan).detach()
            options = {"center": center} | options
        return support(self.program, arms, solver, **options)

    def upper_bound(self, arms: Tensor, **options: Any) -> Tensor:  # noqa: D102
        result = self.support(arms, **options)
        if self.confined:
            return result.upper
        limit = self.program.domain.radius_like(arms).expand(self.level.shape)[..., None]
        reached = torch.linalg.vector_norm(result.theta, dim=-1) >= 0.99 * limit
        return torch.where(reached, torch.inf, result.upper)

    def ellipsoid(self, regularization: Tensor | float | None = None) -> EllipsoidSet:
        """An ellipsoid around the set, by the fixed point of Theorem 3.2; no more delta is spent.

        Args:
            regularization: lam of ``H + lam I``; by default ``1/(8 S^2 (1 + S R_s))``.
        """
        S = self.domain.radius_like(self.level).expand(self.level.shape)
        concordance = self_concordance_of(self.family, self.domain.max_radius)
        if regularization is None:
            regularization = regularization_for(S, concordance)
        loss, gradient, hessian = self._at_center
        eye = torch.eye(self.dim, dtype=loss.dtype, device=loss.device)
        lam = torch.as_tensor(regularization, dtype=loss.dtype, device=loss.device)
        gamma = theorem32_fixed_point(
            self.level - loss,
            S,
            concordance,
            lam,
            torch.linalg.vector_norm(self.theta_hat, dim=-1),
            self.likelihood.X,
            hessian,
            self.likelihood.w,
            frank_wolfe_gap(self.theta_hat, gradient, S),
        )
        shape = hessian + lam[..., None, None] * eye
        return EllipsoidSet(self.family, self.domain, self.theta_hat, shape, gamma)

    def _outer_radius(self, directions: Tensor) -> Tensor:
        S = self.program.domain.radius_like(directions).expand(self.level.shape)[..., None]
        along = (directions * self.theta_hat[..., None, :]).sum(-1)
        inside = (S * S - self.theta_hat.square().sum(-1)[..., None]).clamp_min(0.0)
        return (along * along + inside).sqrt() - along
