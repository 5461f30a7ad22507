"""Parts that several policies share: fits with a ridge, projections, saved tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from scipy import special
from torch import Tensor

from torchglb.arrays import idle, settled
from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import minimize_on_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, raise_unless_converged
from torchglb.optim.ball import minimize_model


def taken(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """A copy of a saved tensor, which must have the shape and dtype of ``like``."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        expected = f"a tensor of shape {tuple(like.shape)} and dtype {like.dtype}"
        raise refuse(f"state['{name}']", expected, getattr(value, "shape", type(value).__name__))
    return value.to(like.device).clone()


def log_chi_square_ratio(dim: int, level: float) -> float:
    """``log(F_d(2 level)/F_d(level))``, F_d the cdf of chi^2 with d degrees of freedom."""
    whole, half = special.gammainc(0.5 * dim, (level, 0.5 * level))
    return math.log(whole / half)


class RidgeFit(NamedTuple):
    """A minimiser ``(*B, d)`` and the Hessian there, ridge included, ``(*B, d, d)``."""

    theta: Tensor
    hessian: Tensor


def ridge_minimum(likelihood: NegativeLogLikelihood, start: Tensor) -> RidgeFit:
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
    reach = _length(gradient) / lam
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
    if not settled(certified):
        # what the solver said counts only where its point is not certified
        unknown = torch.where(status == Status.CONVERGED, int(Status.INACCURATE), status)
        raise_unless_converged(
            torch.where(certified, int(Status.CONVERGED), unknown), "the estimate of the policy"
        )


def farthest_point(center: Tensor, matrix: Tensor, gamma: Tensor) -> Tensor:
    """The longest theta with ``|theta - c|^2`` in W at most gamma; it gives the best arm of a ball.

    ``max over |x| <= 1 of <x, c> + sqrt(gamma) |x|`` in W^-1 is ``max |theta|`` over the ellipsoid,
    at ``x = theta/|theta|``. In the eigenvectors of W, with ``y_i = sqrt(e_i)(theta_i - c_i)``, on
    the sphere ``|y|^2 = gamma``, ``|theta|^2`` is up to a constant

    ``2 sum_i y_i c_i/sqrt(e_i) - sum_i a_i y_i^2``,  ``a_i = 1/e_min - 1/e_i >= 0``:

    a convex problem over the ball, whose solution is moved to the sphere along the axis of e_min,
    where a = 0.

    Args:
        center: c, ``(*B, d)``.
        matrix: W, positive definite, ``(*B, d, d)``.
        gamma: the squared radius, ``(*B)``.
    """
    e, basis = torch.linalg.eigh(matrix)  # ascending: the first axis is the longest
    c = (basis.mT @ center[..., None])[..., 0]
    flatness = 1.0 / e
    y, _ = minimize_on_ball(flatness[..., :1] - flatness, c * flatness.sqrt(), gamma.sqrt())
    first = y[..., 0]
    left = (gamma - y[..., 1:].square().sum(-1)).clamp_min(0.0).sqrt()
    y = torch.cat([torch.where(first < 0, -left, left)[..., None], y[..., 1:]], dim=-1)
    return (basis @ (c + y * flatness.sqrt())[..., None])[..., 0]


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
