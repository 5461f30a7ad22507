"""Minimisers of ``L + (lambda/2)|theta|^2`` by the batched solvers, with what is certified."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import known_none, length, wait_for_all
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, raise_unless_converged


class Fit(NamedTuple):
    """A minimiser of ``F = L + (lambda/2)|theta|^2``.

    Attributes:
        theta: ``(*B, d)``.
        loss: F there, or a certified upper bound on it, ``(*B)``.
        gradient: of F, ``(*B, d)``.
        hessian: H of F, ``(*B, d, d)``.
        distance: the minimiser is theta + u with ``<x, u>`` at most this times the length of x in
            H^-1, ``(*B)``.
        doubt: the Hessian at the minimiser lies between ``e^-doubt H`` and ``e^doubt H``, ``(*B)``.
        gradient_error: the length of the gradient's error is at most this, ``(*B)``.
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    hessian: Tensor
    distance: Tensor
    doubt: Tensor
    gradient_error: Tensor

    @classmethod
    def exact(cls, theta: Tensor, loss: Tensor, gradient: Tensor, hessian: Tensor) -> Fit:
        """As good as the arithmetic."""
        zero = torch.zeros_like(loss)
        return cls(theta, loss, gradient, hessian, zero, zero, zero)


def ridge_minimum(likelihood: NegativeLogLikelihood, start: Tensor) -> Fit:
    """The unconstrained minimiser of a loss F with a ridge lambda > 0.

    F is lambda-strongly convex, so a point is within ``|grad F| / lambda`` of the minimiser. At the
    start this gives a ball, of radius ``1 + |start| + |grad F(start)| / lambda``, that holds it in
    its interior, where the constrained solver finds it; at the end it certifies the distance. The
    last digits come from Newton steps that compare gradients, since values of F may cancel.

    Args:
        likelihood: the loss, with a ridge.
        start: a first guess ``(*B, d)``.

    Raises:
        SolverError: if an estimate is not certified.
    """
    lam = likelihood.regularization
    _, gradient = likelihood.value_and_gradient(start)
    reach = length(gradient) / lam
    ball = Ball(likelihood.dim, 1.0).resized(1.0 + length(start) + reach)
    rough = 1e-6 if start.dtype == torch.float64 else 1e-3
    found = minimize_likelihood(likelihood, ball, start=start, tol=rough, throw=False)
    theta, loss, gradient, hessian = found.theta, found.loss, found.gradient, found.hessian
    fine, coarse = (1e-9, 1e-6) if start.dtype == torch.float64 else (1e-4, 1e-2)
    for _ in range(4):
        error = length(gradient) / lam
        open_ = ~(error <= fine * (1.0 + length(theta)))
        if known_none(open_):
            break
        step = torch.cholesky_solve(gradient[..., None], torch.linalg.cholesky_ex(hessian)[0])
        value, slope, bend = likelihood.expand(theta - step[..., 0])
        better = open_ & (length(slope) < length(gradient))
        theta = torch.where(better[..., None], theta - step[..., 0], theta)
        loss = torch.where(better, value, loss)
        gradient = torch.where(better[..., None], slope, gradient)
        hessian = torch.where(better[..., None, None], bend, hessian)
    certified = length(gradient) / lam <= coarse * (1.0 + length(theta))
    _require(certified, found.status)
    return Fit.exact(theta, loss, gradient, hessian)


def minimum_in_ball(likelihood: NegativeLogLikelihood, domain: Ball, start: Tensor) -> Fit:
    """A minimiser over the S-ball, as accurate as the arithmetic allows.

    Raises:
        SolverError: if the Frank-Wolfe gap does not certify it.
    """
    tol, coarse = (1e-12, 1e-9) if start.dtype == torch.float64 else (1e-5, 1e-3)
    found = minimize_likelihood(likelihood, domain, start=start, tol=tol, throw=False)
    _require(found.gap <= coarse * (1.0 + found.loss.abs()), found.status)
    return Fit.exact(found.theta, found.loss, found.gradient, found.hessian)


def _require(certified: Tensor, status: Tensor) -> None:
    if not wait_for_all(certified):
        # what the solver said counts only where its point is not certified
        unknown = torch.where(status == Status.CONVERGED, int(Status.INACCURATE), status)
        raise_unless_converged(
            torch.where(certified, int(Status.CONVERGED), unknown), "the estimate of the policy"
        )
