"""Parts that several policies share: fits with a ridge, kept histories, saved tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import idle
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, raise_unless_converged
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


class RidgeFit(NamedTuple):
    """A minimiser ``(*B, d)`` and the Hessian there, ridge included, ``(*B, d, d)``."""

    theta: Tensor
    hessian: Tensor


def ridge_minimum(
    likelihood: NegativeLogLikelihood, start: Tensor, reach: Tensor | None = None
) -> RidgeFit:
    """The unconstrained minimiser of a loss F with a ridge lambda > 0.

    F is lambda-strongly convex, so a point is within ``|grad F| / lambda`` of the minimiser. At the
    start this gives a ball, of radius ``1 + |start| + |grad F(start)| / lambda``, that holds it in
    its interior, where the constrained solver finds it; at the end it certifies the distance. The
    last digits come from Newton steps that compare gradients, since values of F may cancel.

    Args:
        likelihood: the loss, with a ridge.
        start: a first guess ``(*B, d)``.
        reach: a bound on the distance from the start, ``(*B)``, if one is known.

    Raises:
        SolverError: if an estimate is not certified.
    """
    lam = likelihood.regularization
    if reach is None:
        _, gradient = likelihood.value_and_gradient(start)
        reach = torch.linalg.vector_norm(gradient, dim=-1) / lam
    ball = Ball(likelihood.dim, 1.0).resized(1.0 + _length(start) + reach)
    rough = 1e-6 if start.dtype == torch.float64 else 1e-3
    found = minimize_likelihood(likelihood, ball, start=start, tol=rough, throw=False)
    theta, gradient, hessian = found.theta, found.gradient, found.hessian
    fine, coarse = (1e-9, 1e-6) if start.dtype == torch.float64 else (1e-4, 1e-2)
    for _ in range(4):
        error = _length(gradient) / lam
        open_ = ~(error <= fine * (1.0 + _length(theta)))
        if idle(open_):
            break
        step = torch.cholesky_solve(gradient[..., None], torch.linalg.cholesky_ex(hessian)[0])
        _, slope, bend = likelihood.expand(theta - step[..., 0])
        better = open_ & (_length(slope) < _length(gradient))
        theta = torch.where(better[..., None], theta - step[..., 0], theta)
        gradient = torch.where(better[..., None], slope, gradient)
        hessian = torch.where(better[..., None, None], bend, hessian)
    certified = _length(gradient) / lam <= coarse * (1.0 + _length(theta))
    _require(certified, found.status)
    return RidgeFit(theta, hessian)


def ridge_minimum_in_ball(
    likelihood: NegativeLogLikelihood, domain: Ball, start: Tensor
) -> RidgeFit:
    """The minimiser over the S-ball of a loss with a ridge: the free one, where that is inside."""
    free = ridge_minimum(likelihood, start)
    radius = domain.radius_like(start).expand(start.shape[:-1])
    outside = _length(free.theta) > radius
    if idle(outside):
        return free
    found = minimum_in_ball(likelihood, domain, start)
    return RidgeFit(
        torch.where(outside[..., None], found.theta, free.theta),
        torch.where(outside[..., None, None], found.hessian, free.hessian),
    )


def minimum_in_ball(likelihood: NegativeLogLikelihood, domain: Ball, start: Tensor) -> RidgeFit:
    """A minimiser over the S-ball, as accurate as the arithmetic allows.

    Raises:
        SolverError: if the Frank-Wolfe gap does not certify it.
    """
    tol, coarse = (1e-12, 1e-9) if start.dtype == torch.float64 else (1e-5, 1e-3)
    found = minimize_likelihood(likelihood, domain, start=start, tol=tol, throw=False)
    _require(found.gap <= coarse * (1.0 + found.loss.abs()), found.status)
    return RidgeFit(found.theta, found.hessian)


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _require(certified: Tensor, status: Tensor) -> None:
    if not bool(certified.all()):
        # what the solver said counts only where its point is not certified
        unknown = torch.where(status == Status.CONVERGED, int(Status.INACCURATE), status)
        raise_unless_converged(
            torch.where(certified, int(Status.CONVERGED), unknown), "the estimate of the policy"
        )


def project_in_norm(theta: Tensor, matrix: Tensor, domain: Ball) -> Tensor:
    """The point of the ball nearest to ``theta (*B, d)`` in the norm of ``matrix (*B, d, d)``.

    A point inside stays as it is, bit by bit.
    """
    radius = domain.radius_like(theta).expand(theta.shape[:-1])
    outside = _length(theta) > radius
    if idle(outside):
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
            loss = self.likelihood()
            if self.constrained:
                found = ridge_minimum_in_ball(loss, self.domain, self._theta)
            else:
                found = ridge_minimum(loss, self._theta)
            self._theta, self._hessian, self._fresh = found.theta, found.hessian, True
        return self._theta, self._hessian

    def estimate(self) -> Tensor:  # noqa: D102
        return self.fit()[0]

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
