"""Parts that several policies share: fits with a ridge, kept histories, saved tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import MLEResult, minimize_likelihood
from torchglb.optim.ball import minimize_model
from torchglb.policies.base import Policy


def taken(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """A copy of a saved tensor, which must have the shape and dtype of ``like``."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        expected = f"a tensor of shape {tuple(like.shape)} and dtype {like.dtype}"
        raise refuse(f"state['{name}']", expected, getattr(value, "shape", type(value).__name__))
    return value.to(like.device).clone()


def smallest_variance(family: GLMFamily, domain: Ball, name: str) -> float:
    """``min m''`` = 1/kappa over the (largest) ball; refuses a family for which it is 0."""
    least = family.min_variance(domain.max_radius)
    if not 0.0 < least < float("inf"):
        expected = f"one whose m'' is bounded away from 0 on the ball, which {name} needs"
        raise refuse("family", expected, f"{type(family).__name__} with min m'' = {least:g}")
    return least


def tight_tolerance(dtype: torch.dtype) -> float:
    """A tolerance for fits on which indices rest, well above rounding."""
    return 1e-12 if dtype == torch.float64 else 1e-4


def ridge_minimum(likelihood: NegativeLogLikelihood, start: Tensor) -> MLEResult:
    """The unconstrained minimiser of a loss F with a ridge lambda > 0.

    F is lambda-strongly convex, so its minimiser is within ``|grad F(start)| / lambda`` of any
    start: the ball of radius ``1 + |start| + |grad F(start)| / lambda`` holds it in its interior
    and the constrained solver finds it.

    Args:
        likelihood: the loss, with a ridge.
        start: a first guess ``(*B, d)``.
    """
    _, gradient = likelihood.value_and_gradient(start)
    reach = torch.linalg.vector_norm(gradient, dim=-1) / likelihood.regularization
    radius = 1.0 + torch.linalg.vector_norm(start, dim=-1) + reach
    ball = Ball(likelihood.dim, 1.0).resized(radius)
    tol = 1e-10 if start.dtype == torch.float64 else 1e-4
    return minimize_likelihood(likelihood, ball, start=start, tol=tol)


def project_in_norm(theta: Tensor, matrix: Tensor, domain: Ball) -> Tensor:
    """The point of the ball nearest to ``theta (*B, d)`` in the norm of ``matrix (*B, d, d)``.

    A point inside stays as it is, bit by bit.
    """
    radius = domain.radius_like(theta).expand(theta.shape[:-1])
    outside = torch.linalg.vector_norm(theta, dim=-1) > radius
    if theta.device.type == "cpu" and not bool(outside.any()):
        return theta
    eigenvalues, basis = torch.linalg.eigh(matrix)
    nearest = minimize_model(eigenvalues, basis, theta, torch.zeros_like(theta), radius)
    return torch.where(outside[..., None], nearest, theta)


class FittedPolicy(Policy):
    """A policy that keeps its history and the minimiser of ``L + (lambda/2)|theta|^2``.

    The fit is made when it is first needed after new observations, from the last one.

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

    @abstractmethod
    def ridge(self) -> float:
        """lambda > 0 now."""

    def likelihood(self, tilt: Tensor | None = None) -> NegativeLogLikelihood:
        """The regularised loss of the history, possibly tilted."""
        return NegativeLogLikelihood.of(
            self.family, self.history, regularization=self.ridge(), tilt=tilt
        )

    def fit(self) -> tuple[Tensor, Tensor]:
        """The minimiser ``(*B, d)`` and the Hessian there, ridge included, ``(*B, d, d)``."""
        if not self._fresh:
            if self.constrained:
                found = minimize_likelihood(
                    self.likelihood(),
                    self.domain,
                    start=self._theta,
                    tol=tight_tolerance(self.dtype),
                )
            else:
                found = ridge_minimum(self.likelihood(), self._theta)
            self._theta, self._hessian, self._fresh = found.theta, found.hessian, True
        return self._theta, self._hessian

    def _update(self, x: Tensor, r: Tensor) -> None:
        self.history.append(x, r)
        self._fresh = False

    def _state(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "theta": self._theta.clone(),
            "hessian": self._hessian.clone(),
            "fresh": self._fresh,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        theta = taken(state, "theta", self._theta)
        hessian = taken(state, "hessian", self._hessian)
        fresh = state["fresh"]
        if not isinstance(fresh, bool):
            raise InputError(f"state['fresh']: expected a truth value, got {fresh!r}")
        self.history.load_state_dict(state["history"])
        self._theta, self._hessian, self._fresh = theta, hessian, fresh
