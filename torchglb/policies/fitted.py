"""The base of the policies that refit ``L + (lambda/2)|theta|^2`` after every observation.

The minimiser and the Hessian there come from a Taylor model of the loss that is carried from round
to round, with a certified error (:mod:`torchglb.policies.free`); a pass over the history is made
only for the replicates whose model is no longer good enough.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.policies.base import Policy
from torchglb.policies.free import FreeMinimum
from torchglb.policies.parts import minimum_in_ball, taken
from torchglb.ucb.minimum import FlatHistory, which

#: the distance of the estimate is certified to this, relative to 1 + |theta|
PRECISION = 1e-8


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
    constrained: ClassVar[bool] = False
    #: the Hessian is certified to this, relatively; infinite where only theta is used
    hessian_tolerance: ClassVar[float] = 1e-7

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
        exact = self.dtype == torch.float64
        self._tol = PRECISION if exact else 1e-4
        self._hessian_tol = self.hessian_tolerance if exact else max(1e-4, self.hessian_tolerance)
        # the constants of the family are taken on a ball that holds all but odd estimates
        reach = self._constant(lambda radius: 2.0 * radius + 5.0)
        data = FlatHistory(family, self.history)
        self._minimum = FreeMinimum(data, Ball(d, reach), reach.reshape(-1), self._tol)

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
        theta, hessian = self._minimum.settle(ridge, self._tol, self._hessian_tol)
        if not self.constrained:
            return theta, hessian
        S = self.domain.radius_like(theta).expand(self.batch_shape).reshape(-1)
        outside = which(torch.linalg.vector_norm(theta, dim=-1) > S)
        if outside.numel():  # few, with a ridge: from the rows
            loss = self._minimum.data.likelihood(outside, ridge)
            ball = self.domain.resized(S[outside])
            found = minimum_in_ball(loss, ball, ball.project(theta[outside]))
            theta = theta.index_copy(0, outside, found.theta)
            hessian = hessian.index_copy(0, outside, found.hessian)
        return theta, hessian

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
