"""OFUL: optimism for linear bandits (Abbasi-Yadkori, Pal and Szepesvari 2011).

``V = lambda I + sum x x'``, ``theta = V^-1 sum r x``, index ``<x, theta> + radius |x|`` in V^-1,
with

    ``radius = sigma sqrt(2 log(1/delta) + log det V - d log lambda) + sqrt(lambda) S``.

These constants are the paper's (Theorem 2), and proven there for sub-Gaussian noise.

No history is kept: O(d^2) memory and time per round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import Gaussian, GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.geometry import ellipsoid_in, farthest_point, towards
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import taken
from torchglb.policies.settings import PolicySettings
from torchglb.rounding import round_up
from torchglb.sets import EllipsoidSet, Event


@register
class OFUL(Policy):
    """OFUL.

    Args:
        family: Gaussian; sigma is that of the family.
        domain: the ball that contains theta*.
        regularization: lambda.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = OFUL(glb.Gaussian(0.5), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "oful"
    requires = Requirements(families=(Gaussian,))

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        regularization: float = 1.0,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.regularization = check_positive("regularization", regularization)
        self._event = Event(self.delta)
        shape = tuple(self.batch_shape)
        # in float64, whatever the rows are: a sum of many in float32 loses what few of them say
        self._moment = torch.zeros((*shape, domain.dim), dtype=torch.float64, device=self.device)
        self._V = RankOneInverse.scaled_identity(
            self.regularization, shape, domain.dim, self._moment
        )

    @property
    def theta(self) -> Tensor:
        """The ridge estimate, ``(*B, d)``."""
        return self._V.solve(self._moment).to(self.dtype)

    def estimate(self) -> Tensor:  # noqa: D102
        return self.theta

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic."""
        gamma, center = self._radius().square(), self._V.solve(self._moment)
        parts = ellipsoid_in(self.dtype, center, self._V.matrix, gamma)
        return EllipsoidSet(self.family, self.domain, *parts, event=self._event)

    def radius(self) -> Tensor:
        """The radius of the ellipsoid, ``(*B)``."""
        return round_up(self._radius(), self.dtype)

    def _radius(self) -> Tensor:
        lam, d = self.regularization, self.domain.dim
        growth = self._V.logdet - d * math.log(lam)
        S = self.domain.radius_like(growth)
        noise = math.sqrt(self.family.dispersion)
        return noise * (2 * math.log(1 / self.delta) + growth).sqrt() + math.sqrt(lam) * S

    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        center, gamma = self._V.solve(self._moment), self._radius().square()
        return towards(farthest_point(center, self._V.matrix, gamma).to(self.dtype))

    def _scores(self, arms: Tensor) -> Tensor:
        arms = arms.double()
        mean = (arms @ self._V.solve(self._moment)[..., None])[..., 0]
        return round_up(mean + self._radius()[..., None] * self._V.norms(arms), self.dtype)

    def _update(self, x: Tensor, r: Tensor) -> None:
        x, r = x.double(), r.double()
        V, moment = self._V.plus_rows(x), self._moment + (r[..., None] * x).sum(-2)
        self._V, self._moment = V, moment  # computed first, committed last

    def _state(self) -> dict[str, Any]:
        return {"V": self._V.state_dict(), "moment": self._moment.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        moment = taken(state, "moment", self._moment)
        self._V.load_state_dict(state["V"])
        self._moment = moment
