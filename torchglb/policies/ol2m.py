"""OL2M: online logistic regression for bandits (Zhang, Yang, Jin, Xiao and Zhou 2016).

With ``b = 1/(2 (1 + e^S))``, ``Z = d I + (b/2) sum x x'`` (the present x included) and ``grad =
(mu(<x, theta>) - r) x``:

    ``theta <- project(theta - Z^-1 grad)``, index ``<x, theta> + radius |x|`` in Z^-1,
    ``radius^2 = 8S + d S^2 + (8/b + 16S/3) log(4 log(t+1) t^2/delta)
                 + (2/b)(log det Z - d log d)``,

t = n + 1 the present round. The paper's step is ``argmin |theta' - theta|^2/2`` in Z ``+ <grad,
theta'>`` over the S-ball, so the projection is in the norm of Z and leaves points inside alone.
Public code adds the bonus, which belongs to <x, theta>, to the mean mu(<x, theta>).

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds with a projection).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.policies.base import Policy, Requirements, towards
from torchglb.policies.parts import farthest_point, project_in_norm, taken
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register


@register
class OL2M(Policy):
    """OL2M.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy`, by name.
    """

    name = "ol2m"
    requires = Requirements(families=(Bernoulli,))

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        d, shape = domain.dim, tuple(self.batch_shape)
        self._theta = torch.zeros((*shape, d), dtype=self.dtype, device=self.device)
        self._S = domain.radius_like(self._theta).expand(shape)
        self._b = 0.5 * torch.sigmoid(-self._S)  # 1/(2(1 + e^S))
        self._Z = RankOneInverse.scaled_identity(float(d), shape, d, self._theta)

    @property
    def theta(self) -> Tensor:
        """The online estimate, in the ball, ``(*B, d)``."""
        return self._theta

    def estimate(self) -> Tensor:  # noqa: D102
        return self.theta

    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``."""
        d, t, S, b = self.domain.dim, self.rounds + 1, self._S, self._b
        failure = math.log(4 * math.log(t + 1) * t * t / self.delta)
        growth = self._Z.logdet - d * math.log(d)
        return 8 * S + d * S.square() + (8 / b + 16 * S / 3) * failure + 2 / b * growth

    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        return towards(farthest_point(self._theta, self._Z.matrix, self.squared_radius()))

    def _scores(self, arms: Tensor) -> Tensor:
        mean = (arms @ self._theta[..., None])[..., 0]
        return mean + self.squared_radius().sqrt()[..., None] * self._Z.norms(arms)

    def _update(self, x: Tensor, r: Tensor) -> None:
        for i in range(x.shape[-2]):  # an online method: one observation after the other
            self._step(x[..., i, :], r[..., i])

    def _step(self, x: Tensor, r: Tensor) -> None:
        slope = self.family.mean((x * self._theta).sum(-1)) - r
        self._Z.add(x, 0.5 * self._b)
        moved = self._theta - slope[..., None] * self._Z.solve(x)
        self._theta = project_in_norm(moved, self._Z.matrix, self.domain)

    def _state(self) -> dict[str, Any]:
        return {"Z": self._Z.state_dict(), "theta": self._theta.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        theta = taken(state, "theta", self._theta)
        self._Z.load_state_dict(state["Z"])
        self._theta = theta
