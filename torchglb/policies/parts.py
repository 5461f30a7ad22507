"""Parts that several policies share: fits by the batched solvers, projections, saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from scipy import special
from torch import Tensor

from torchglb.arrays import idle, settled
from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import minimize_on_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, raise_unless_converged
from torchglb.optim.ball import minimize_model

T = TypeVar("T")


def taken(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """A copy of a saved tensor, which must have the shape and dtype of ``like``."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        expected = f"a tensor of shape {tuple(like.shape)} and dtype {like.dtype}"
        raise refuse(f"state['{name}']", expected, getattr(value, "shape", type(value).__name__))
    return value.to(like.device).clone()


#: whose constants a policy has: proven ones, or public code's
CONSTANTS = ("proven", "public")


def check_constants(state: Mapping[str, Any], constants: str) -> None:
    """Refuses a saved state of a policy with other constants."""
    if state["constants"] != constants:
        raise refuse("state['constants']", repr(constants), repr(state["constants"]))


def log_chi_square_ratio(dim: int, level: float) -> float:
    """``log(F_d(2 level)/F_d(level))``, F_d the cdf of chi^2 with d degrees of freedom."""
    whole, half = special.gammainc(0.5 * dim, (level, 0.5 * level))
    return math.log(whole / half)


def learn_or_forget(histories: Sequence[History], learn: Callable[[], T]) -> T:
    """What ``learn`` returns; if it fails or is interrupted, its rows leave the histories again."""
    marks = [history.mark() for history in histories]
    try:
        return learn()
    except BaseException:
        for history, mark in zip(histories, marks, strict=True):
            history.reset(mark)
        raise


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
    reach = _length(gradient) / lam
    ball = Ball(likelihood.dim, 1.0).resized(1.0 + _length(start) + reach)
    rough = 1e-6 if start.dtype == torch.float64 else 1e-3
    found = minimize_likelihood(likelihood, ball, start=start, tol=rough, throw=False)
    theta, loss, gradient, hessian = found.theta, found.loss, found.gradient, found.hessian
    fine, coarse = (1e-9, 1e-6) if start.dtype == torch.float64 else (1e-4, 1e-2)
    for _ in range(4):
        error = _length(gradient) / lam
        open_ = ~(error <= fine * (1.0 + _length(theta)))
        if idle(open_):
            break
        step = torch.cholesky_solve(gradient[..., None], torch.linalg.cholesky_ex(hessian)[0])
        value, slope, bend = likelihood.expand(theta - step[..., 0])
        better = open_ & (_length(slope) < _length(gradient))
        theta = torch.where(better[..., None], theta - step[..., 0], theta)
        loss = torch.where(better, value, loss)
        gradient = torch.where(better[..., None], slope, gradient)
        hessian = torch.where(better[..., None, None], bend, hessian)
    certified = _length(gradient) / lam <= coarse * (1.0 + _length(theta))
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


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _require(certified: Tensor, status: Tensor) -> None:
    if not settled(certified):
        # what the solver said counts only where its point is not certified
        unknown = torch.where(status == Status.CONVERGED, int(Status.INACCURATE), status)
        raise_unless_converged(
            torch.where(certified, int(Status.CONVERGED), unknown), "the estimate of the policy"
        )


def certain_leader(scores: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The arm with the largest score, ``(*B)``, and whether it is the largest of the true scores.

    Args:
        scores: ``(*B, K)``.
        error: each score is at most so far from the true one, ``(*B, K)``.
    """
    leader = scores.argmax(-1, keepdim=True)
    others = (scores + error).scatter(-1, leader, -torch.inf).amax(-1)
    lowest = (scores - error).gather(-1, leader)[..., 0]
    return leader[..., 0], lowest >= others


def cholesky_change(doubt: Tensor, dim: int) -> Tensor:
    """How far a Cholesky factor may be from that of a matrix between ``e^-doubt A, e^doubt A``.

    With ``A = L L'`` that matrix is ``L (I + E) L'``, ``|E|_F <= e = sqrt(d)(e^doubt - 1)``, and
    its factor ``L (I + G)``. ``G + G' = E - G G'``, and the lower half of a symmetric matrix, with
    half of its diagonal, has at most ``1/sqrt(2)`` of its Frobenius norm: ``|G| <= (e +
    |G|^2)/sqrt(2)``. Followed from E = 0 on, ``|G| <= (1 - sqrt(1 - 2 e))/sqrt(2)`` if e <= 1/2.

    Args:
        doubt: ``(*B)``.
        dim: d.

    Returns:
        The bound on ``|G|_F``, ``(*B)``; infinite if e > 1/2.
    """
    e = math.sqrt(dim) * torch.expm1(doubt)
    root = (1.0 - 2.0 * e).clamp_min(0.0).sqrt()
    change = math.sqrt(2.0) * e / (1.0 + root)
    return torch.where(e <= 0.5, change, torch.inf)


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
