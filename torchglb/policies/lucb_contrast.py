"""LUCB-contrast: samples so that the best arm is certified soon (best-arm identification).

The leader i is best at the estimate, the challenger j has the largest ``h(x_j - x_i)`` over the
exact confidence set (LUCB of Kalyanakrishnan et al. 2012, on contrasts). The arm to play is the one
that shrinks what is known least about the two: the largest decrease of ``|x_i - x_j|`` in ``H^-1``
by one more row (Sherman-Morrison), as in LinGapE (Xu, Honda and Sugiyama 2018).

It explores: its regret is no concern. :class:`torchglb.decisions.BestArm` says when to stop.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_choice
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.exact import LikelihoodRatioPolicy
from torchglb.policies.registry import register
from torchglb.policies.settings import AMONG, Among, LikelihoodRatioSettings
from torchglb.radii import Radius


@register
class LUCBContrast(LikelihoodRatioPolicy):
    """The sampling rule of certified stopping, for any GLM.

    Args:
        radius: beta^2, by name or as a :class:`torchglb.radii.Radius`.
        among: play any arm (``"all"``), or only the leader or the challenger (``"pair"``).
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.
    """

    name = "lucb-contrast"
    plays_largest_bound = False
    select_ball = Policy.select_ball  # the ball has no second best arm

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = "pac-bayes",
        among: Among = "all",
        **settings: Unpack[LikelihoodRatioSettings],
    ) -> None:
        super().__init__(family, domain, delta, radius=radius, **settings)
        self.among = check_choice("among", among, AMONG)

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm that teaches most about leader and challenger."""
        return self.scores(arms).argmax(-1)

    @torch.no_grad()
    def _scores(self, arms: Tensor) -> Tensor:
        """How much one more row of each arm shrinks the contrast, ``(*B, K)``."""
        region = self.confidence_set()
        theta, K = region.center, arms.shape[-2]
        leader = (arms * theta[..., None, :]).sum(-1).argmax(-1, keepdim=True)
        first = _row(arms, leader)
        if K == 1:
            return torch.zeros_like(arms[..., 0])
        bounds = super()._scores(0.5 * (arms - first))  # differences are as long as 2
        challenger = bounds.scatter(-1, leader, -torch.inf).argmax(-1, keepdim=True)
        contrast = first - _row(arms, challenger)
        loss = region.likelihood
        curvature = self.family.variance((arms * theta[..., None, :]).sum(-1))
        eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
        scale = self.domain.radius_like(theta).expand(theta.shape[:-1])
        matrix = loss.hessian(theta) + eye / scale.square()[..., None, None]
        both = torch.cat([arms, contrast], dim=-2)
        solved = torch.linalg.solve_ex(matrix, both.mT).result.mT
        along = (arms * solved[..., K:, :]).sum(-1)
        own = (arms * solved[..., :K, :]).sum(-1)
        weight = curvature / self.family.dispersion
        gain = weight * along.square() / (1.0 + weight * own)
        if self.among == "all":
            return gain
        allowed = torch.zeros_like(gain, dtype=torch.bool)
        allowed = allowed.scatter(-1, leader, True).scatter(-1, challenger, True)
        return torch.where(allowed, gain, -1.0)


def _row(arms: Tensor, index: Tensor) -> Tensor:
    """The arm ``(*B, 1, d)`` of an index ``(*B, 1)``."""
    return arms.gather(-2, index[..., None].expand(*index.shape, arms.shape[-1]))
