"""Optimism on the scale of the mean: ``mu(<x, theta_hat>) + bonus |x|`` in V^-1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.geometry import ellipsoid_in
from torchglb.policies.saving import check_constants
from torchglb.policies.settings import Constants
from torchglb.rounding import round_up
from torchglb.sets import EllipsoidSet, Event


class MeanUCB(FittedPolicy):
    """An ellipsoid around theta_hat in the norm of the design V, and its index.

    A subclass calls ``_track_design`` and sets both attributes when it is made.
    """

    constants: Constants
    _event: Event
    #: a constant in float32 may be rounded down, and the set with it
    _carried_dtype = torch.float64

    @abstractmethod
    def radius(self) -> Tensor:
        """The radius of the ellipsoid around theta_hat, in V, ``(*B)``; of proven constants."""

    @abstractmethod
    def bonus(self) -> Tensor:
        """The factor of the norm, ``(*B)``."""

    def confidence_set(self) -> EllipsoidSet | None:
        """The ellipsoid around theta_hat; None with public constants, which have none."""
        if self.constants == "public":
            return None
        center, gamma = self.fit().theta.double(), self.radius().double().square()
        parts = ellipsoid_in(self.dtype, center, self._design.matrix, gamma)
        return EllipsoidSet(self.family, self.domain, *parts, event=self._event)

    def _scores(self, arms: Tensor) -> Tensor:
        arms, theta = arms.double(), self.fit().theta.double()
        mean = self.family.mean((arms @ theta[..., None])[..., 0])
        return round_up(mean + self.bonus()[..., None] * self._design.norms(arms), self.dtype)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"constants": self.constants}

    def _load(self, state: Mapping[str, Any]) -> None:
        check_constants(state, self.constants)
        super()._load(state)
