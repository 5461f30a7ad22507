"""The base of the policies that refit ``L + (lambda/2)|theta|^2`` after every observation.

The minimiser and the Hessian there come from a Taylor model of the loss that is carried from round
to round, with a certified error (:mod:`torchglb.policies.free` over R^d,
:mod:`torchglb.policies.carried` over the ball); a pass over the history is made only for the
replicates whose model is no longer good enough.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.policies.base import Policy
from torchglb.policies.carried import fit
from torchglb.policies.free import FreeMinimum
from torchglb.policies.parts import taken
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory

#: certified: the distance of the estimate and the error of the Hessian, relatively
PRECISION, HESSIAN_TOLERANCE = 1e-9, 1e-8


class FittedPolicy(Policy):
    """A policy that keeps its history and the minimiser of ``L + (lambda/2)|theta|^2``.

    The fit is made when it is first needed after new observations.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        aggregate: merge repeated arms, so that a fixed arm set costs the same at every time.
        args: further settings of :class:`Policy`.
        settings: the same, by name.
    """

    #: whether the minimiser is sought over the S-ball or over the whole space
    constrained = False

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        *args: Any,
        aggregate: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(family, domain, *args, **settings)
        d, batch = domain.dim, self.batch_shape
        self.history = History(
            d, tuple(batch), aggregate, validate=False, dtype=self.dtype, device=self.device
        )
        self._theta = torch.zeros((*batch, d), dtype=self.dtype, device=self.device)
        self._hessian = torch.zeros((*batch, d, d), dtype=self.dtype, device=self.device)
        self._fresh = False
        data = FlatHistory(family, self.history)
        exact = self.dtype == torch.float64
        self._tolerances = (PRECISION, HESSIAN_TOLERANCE) if exact else (1e-4, 1e-4)
        if self.constrained:
            S = self._constant(float).reshape(-1)
            self._minimum = CarriedMinimum(data, domain, S, 0.1 * self._tolerances[0])
        else:
            # the constants of the family are taken on a ball that holds all but odd estimates
            reach = self._constant(lambda radius: 2.0 * radius + 5.0)
            tolerance = self._tolerances[0]
            self._minimum = FreeMinimum(data, Ball(d, reach), reach.reshape(-1), tolerance)

    @abstractmethod
    def ridge(self) -> Tensor:
        """lambda > 0 now, ``(*B)``."""

    def fit(self) -> tuple[Tensor, Tensor]:
        """The minimiser ``(*B, d)`` and the Hessian there, ridge included, ``(*B, d, d)``."""
        if not self._fresh:
            theta, hessian = self._fit(self.ridge().reshape(-1))
            self._theta = theta.reshape(self._theta.shape)
            self._hessian = hessian.reshape(self._hessian.shape)
            self._fresh = True
        return self._theta, self._hessian

    @torch.no_grad()
    def _fit(self, ridge: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self._minimum, FreeMinimum):
            return self._minimum.settle(ridge, *self._tolerances)
        found = fit(self._minimum, ridge, self._tolerances[1])
        eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
        return found.theta, found.hessian + ridge[:, None, None] * eye

    def estimate(self) -> Tensor:  # noqa: D102
        return self.fit()[0]

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._minimum.passes.reshape(self.batch_shape)

    @torch.no_grad()
    def _update(self, x: Tensor, r: Tensor) -> None:
        self.history.append(x, r)
        flat_r = r.reshape(-1, r.shape[-1])
        self._minimum.observe(x.reshape(-1, *x.shape[-2:]), flat_r, torch.ones_like(flat_r))
        self._fresh = False

    def _state(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "minimum": self._minimum.state_dict(),
            "theta": self._theta.clone(),
            "hessian": self._hessian.clone(),
            "fresh": self._fresh,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        theta = taken(state, "theta", self._theta)
        hessian = taken(state, "hessian", self._hessian)
        fresh, minimum = state["fresh"], state["minimum"]
        if not isinstance(fresh, bool):
            raise InputError(f"state['fresh']: expected a truth value, got {fresh!r}")
        self.history.load_state_dict(state["history"])
        self._minimum.load_state_dict(minimum)
        self._theta, self._hessian, self._fresh = theta, hessian, fresh
