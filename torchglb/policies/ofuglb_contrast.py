"""OFUGLB with a bound for each arm of its own, for a fixed arm set (Gaussian, binomial, Poisson).

The index of an arm is the smaller of two bounds: that over the likelihood-ratio set of
:mod:`torchglb.policies.ofuglb_pb`, at the share ``joint_share`` of delta, and that of the arm as a
contrast named beforehand, at a K-th of the rest (:mod:`torchglb.contrasts.arm_kernels`). With
probability 1 - delta all of them hold at all times. Rows may have weights and masks: both kinds of
bounds know them.

The contrasts are compiled code on a CPU. On another device only the joint set is used: valid, and
then no better than ofuglb-pb.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_probability
from torchglb.contrasts.arms import ArmContrasts, as_interval
from torchglb.domain import Ball
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.optim import frank_wolfe_gap
from torchglb.policies.base import Policy
from torchglb.policies.exact import LikelihoodRatioPolicy
from torchglb.policies.fixed_arms import DeclaredArms
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import PolicySettings, SolverName
from torchglb.radii import Radius
from torchglb.sets import Interval
from torchglb.ucb import AnchoredProgram, RefitProgram


@register
class OFUGLBContrast(LikelihoodRatioPolicy):
    """OFUGLB-PB for a fixed arm set, with contrast bounds.

    Args:
        family: Gaussian, Bernoulli, binomial or Poisson.
        domain: the ball that contains theta*.
        delta: the failure level.
        radius: of the joint set.
        joint_share: the part of delta that the joint set gets; with a half, neither bound pays more
            than log 2 for the other.
        solver: ``"native"`` or ``"conic"``, of the joint bounds.
        aggregate: merge repeated arms.
        settings: those of :class:`torchglb.policies.Policy`; the contrasts' sums are float64.
    """

    name = "ofuglb-contrast"
    requires = Requirements(families=(Gaussian, Binomial, Poisson), fixed_arms=True)

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = "pac-bayes",
        joint_share: float = 0.5,
        solver: SolverName = "native",
        aggregate: bool = True,
        **settings: Unpack[PolicySettings],
    ) -> None:
        delta = check_probability("delta", delta)
        self.joint_share = check_probability("joint_share", joint_share)
        super().__init__(
            family,
            domain,
            delta * self.joint_share,
            radius=radius,
            forgetting=None,  # contrasts need every row
            solver=solver,
            aggregate=aggregate,
            **settings,
        )
        self.delta = delta
        self._declared = DeclaredArms(self)
        self._contrasts: ArmContrasts | None = None

    def _new_program(
        self, kind: type[AnchoredProgram] | type[RefitProgram], aggregate: bool
    ) -> AnchoredProgram | RefitProgram:
        # bounds of all arms are needed in every round, from K merged rows: solved anew, which is
        # faster than anchors that would have to follow them
        return super()._new_program(RefitProgram, aggregate)

    # ---- the bounds of the arms ----------------------------------------------------------

    def _new_contrasts(self, arms: Tensor) -> ArmContrasts | None:
        """Of declared arms ``(*B, K, d)``; None where there is no compiled code."""
        if self.device.type != "cpu" or self.family.compiled() is None:
            return None
        N, (K, d) = self.batch_shape.numel(), arms.shape[-2:]
        S = self._sequence.problem.S.reshape(N).double().numpy()
        each = self.delta * (1.0 - self.joint_share) / K
        return ArmContrasts(self.family, S, arms.double().reshape(N, K, d).numpy().copy(), each)

    @torch.no_grad()
    def contrast_bounds(self) -> Interval | None:
        """Ends of ``<c, theta*>`` for the declared arms, ``(*B, K)``; None without any."""
        if self._contrasts is None:
            return None
        minimum, N = self._program.minimum(), self.batch_shape.numel()
        theta, level = minimum.theta, self._level(minimum)
        at, errors = self._likelihood().expand_with_errors(theta)
        S = self.domain.radius_like(level).expand(level.shape)
        gap = frank_wolfe_gap(theta, at.gradient, S) * (1.0 + 1e-6)
        height = level - at.loss + gap + 2.0 * (errors.loss + S * errors.gradient)
        ends = self._contrasts.bounds(
            theta.double().reshape(N, -1).numpy(),
            height.double().clamp_min(0.0).reshape(N).numpy(),
        )
        return as_interval(ends, (*self.batch_shape, -1), self.dtype)

    def _scores(self, arms: Tensor) -> Tensor:
        scores, same = super()._scores(arms), self._declared.same(arms)
        own = None if same is None else self.contrast_bounds()
        if same is None or own is None:
            return scores
        return torch.where(same, torch.minimum(scores, own.upper), scores)

    def select(self, arms: ArrayLike) -> Tensor:
        """Which arm ``(*B)`` has the largest index; the first call declares the arms."""
        arms = self._check_arms(arms)
        new = self._declared.are_new(arms)
        self._decided = self._height()
        index = self._scores(arms).argmax(-1)
        if new:
            contrasts, arms = self._new_contrasts(arms), arms.clone()
            self._declared.arms, self._contrasts = arms, contrasts
        return index

    def select_ball(self) -> Tensor:
        """Refused: contrasts are named one by one."""
        return Policy.select_ball(self)

    def _ends(self, program: AnchoredProgram | RefitProgram, x: Tensor, refine: bool) -> Interval:
        region, own = super()._ends(program, x, refine), self.contrast_bounds()
        if own is None:
            return region
        match = self._declared.matches(x)
        lower = torch.where(match, own.lower, -torch.inf).amax(-1)
        upper = torch.where(match, own.upper, torch.inf).amin(-1)
        return Interval(torch.maximum(region.lower, lower), torch.minimum(region.upper, upper))

    # ---- learning and saving -------------------------------------------------------------

    def _update_weighted(self, x: Tensor, r: Tensor, w: Tensor | None) -> None:
        contrasts = self._contrasts
        if contrasts is not None:
            N, (k, d) = self.batch_shape.numel(), x.shape[-2:]
            given = [x.reshape(N, k, d), *(t.reshape(N, k) for t in (r, w) if t is not None)]
            rows = [np.ascontiguousarray(t.detach().double().numpy()) for t in given]
            contrasts = contrasts.with_rows(*rows)
        super()._update_weighted(x, r, w)
        self._contrasts = contrasts  # computed first, committed last

    def _state(self) -> dict[str, Any]:
        contrasts = None if self._contrasts is None else self._contrasts.state_dict()
        return super()._state() | {"arms": self._declared.state_dict(), "contrasts": contrasts}

    def _load(self, state: Mapping[str, Any]) -> None:
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        arms, contrasts = self._declared.loaded(state, like), None
        if arms is not None and state["contrasts"] is not None:
            contrasts = self._new_contrasts(arms)
            contrasts = None if contrasts is None else contrasts.loaded(state["contrasts"])
        super()._load(state)
        self._declared.arms, self._contrasts = arms, contrasts
