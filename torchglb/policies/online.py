"""The base of the policies that keep no history: an ellipsoid and one step for each observation.

    index ``<x, centre> + radius |x|`` in V^-1

with V a matrix that grows by one outer product at a time: O(d^2) memory and time per round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.geometry import ellipsoid_in, farthest_point, towards
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.saving import check_constants, taken
from torchglb.policies.settings import PolicySettings
from torchglb.rounding import round_up
from torchglb.sets import EllipsoidSet, Event


class OnlinePolicy(Policy):
    """A policy with an online estimate in the ball and an ellipsoid.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        settings: those of :class:`Policy`.
    """

    #: what is carried besides theta and V, as the names of attributes without their underscore
    carried: ClassVar[tuple[str, ...]] = ()
    #: V, whatever its name in the paper; made by :meth:`_begin`
    _V: RankOneInverse
    #: whose constants: "proven" or "public" code's
    constants: str = "proven"
    #: a sum of many in float32 loses what few of them say
    _carried_dtype = torch.float64

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        shape = tuple(self.batch_shape)
        self._theta = torch.zeros(
            (*shape, domain.dim), dtype=self._carried_dtype, device=self.device
        )
        self._S = domain.radius_like(self._theta).expand(shape)
        self._event = Event(self.delta)

    def _begin(self, scale: Tensor | float) -> RankOneInverse:
        """V before the first observation, ``scale I``."""
        shape, d = tuple(self.batch_shape), self.domain.dim
        return RankOneInverse.scaled_identity(scale, shape, d, self._theta)

    @abstractmethod
    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``; negative only where the ellipsoid has lost theta*."""

    @abstractmethod
    def _step(self, x: Tensor, r: Tensor) -> None:
        """Adds one observation, ``x (*B, d)`` and ``r (*B)``."""

    @property
    def theta(self) -> Tensor:
        """The online estimate, in the ball, ``(*B, d)``."""
        return self._theta.to(self.dtype)

    @property
    def centre(self) -> Tensor:
        """The centre of the ellipsoid, ``(*B, d)`` in float64."""
        return self._theta

    def estimate(self) -> Tensor:  # noqa: D102
        return self.centre.to(self.dtype, copy=True)

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic.

        It has an event, and so a delta, only where the constants are proven.
        """
        event = self._event if self.guaranteed else None
        gamma = self.squared_radius().clamp_min(0.0)
        parts = ellipsoid_in(self.dtype, self.centre, self._V.matrix, gamma)
        return EllipsoidSet(self.family, self.domain, *parts, event=event)

    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        gamma = self.squared_radius().clamp_min(0.0)
        return towards(farthest_point(self.centre, self._V.matrix, gamma).to(self.dtype))

    def _scores(self, arms: Tensor) -> Tensor:
        arms = arms.double()
        mean = (arms @ self.centre[..., None])[..., 0]
        radius, norms = self.squared_radius().clamp_min(0.0).sqrt(), self._V.norms(arms)
        scores = mean + torch.where(norms > 0, radius[..., None] * norms, 0.0)  # may be infinite
        return round_up(scores, self.dtype)

    def _update(self, x: Tensor, r: Tensor) -> None:
        after, x, r = self._copied(), x.double(), r.double()
        for i in range(x.shape[-2]):  # an online method: one observation after the other
            after._step(x[..., i, :], r[..., i])
        self.__dict__ = vars(after)  # computed first, committed last

    def _copied(self) -> Self:
        """A copy whose steps leave this one as it is."""
        after = self._alias()
        after._V = self._V.copy()
        return after

    def _state(self) -> dict[str, Any]:
        names = ("theta", *self.carried)
        kept = {n: getattr(self, f"_{n}").clone() for n in names}
        return {"constants": self.constants, "V": self._V.state_dict()} | kept

    def _load(self, state: Mapping[str, Any]) -> None:
        check_constants(state, self.constants)
        names = ("theta", *self.carried)
        found = {f"_{n}": taken(state, n, getattr(self, f"_{n}")) for n in names}
        self._V.load_state_dict(state["V"])
        self.__dict__.update(found)
