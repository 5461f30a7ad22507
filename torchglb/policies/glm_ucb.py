"""GLM-UCB (Filippi, Cappe, Garivier and Szepesvari 2010), in its regularised form.

``V = d I + sum x x'``, theta_hat the minimiser of ``L + (d/2)|theta|^2`` over the S-ball, and the
index, on the scale of the mean,

    ``mu(<x, theta_hat>) + bonus |x|`` in V^-1,
    ``bonus = l kappa sqrt(2 log(1/delta) + log det V - d log d) + sqrt(d) S``,

with l = max m'' (1/4 for the logistic model) times the width of the range of the rewards (1 there)
and kappa = max 1/m''. The paper projects an unconstrained estimate onto the ball by a non-convex
program; the constrained minimiser takes its place and lies in the ball as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Requirements
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.registry import register


@register
class GLMUCB(FittedPolicy):
    """GLM-UCB.

    Args:
        family: a GLM of bounded rewards with m'' > 0 on the ball.
        domain: the ball that contains theta*.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy` and ``aggregate``, by name.
    """

    name = "glm-ucb"
    requires = Requirements(bounded_rewards=True)
    constrained = True
    need_hessian = False

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        low, high = family.reward_range
        steepest = self._constant(family.max_variance) * (high - low)
        self._slope = steepest / self._smallest_variance()
        self._track_design(float(domain.dim))

    def ridge(self) -> Tensor:  # noqa: D102
        return torch.full_like(self._slope, float(self.domain.dim))

    def bonus(self) -> Tensor:
        """The factor of the norm, ``(*B)``."""
        d = self.domain.dim
        growth = 2 * math.log(1 / self.delta) + self._design.logdet - d * math.log(d)
        return self._slope * growth.sqrt() + math.sqrt(d) * self.domain.radius_like(growth)

    def _scores(self, arms: Tensor) -> Tensor:
        theta = self.fit().theta
        mean = self.family.mean((arms @ theta[..., None])[..., 0])
        return mean + self.bonus()[..., None] * self._design.norms(arms)
