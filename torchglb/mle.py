"""The norm-constrained maximum-likelihood estimate, batched, certified, differentiable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_same, check_shape, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History, Rows
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Evaluation, lbfgs, newton, raise_unless_converged
from torchglb.optim.implicit import is_transformed, newton_polish, opaque, wants_gradient

#: above this many features a Hessian costs more than the steps it saves
NEWTON_LIMIT = 200


@dataclass(frozen=True)
class MLEResult:
    """The estimate and what is known there; shapes start with ``*B``.

    Attributes:
        theta: ``(*B, d)``, the minimiser of the loss over the ball.
        loss: ``(*B)``, its loss.
        gradient: ``(*B, d)``.
        hessian: ``(*B, d, d)``.
        gap: ``(*B)``, the Frank-Wolfe gap: the loss is at most this far above the minimum.
        status: ``(*B)``, of :class:`torchglb.optim.Status`.
        num_steps: ``(*B)``, evaluations of the loss after the first.
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    hessian: Tensor
    gap: Tensor
    status: Tensor
    num_steps: Tensor


def constrained_mle(
    family: GLMFamily,
    history: History | Rows,
    domain: Ball,
    *,
    solver: str | None = None,
    start: Tensor | None = None,
    regularization: float | Tensor = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    throw: bool = True,
    validate: bool = True,
) -> MLEResult:
    """``argmin L(theta) + (lambda/2)|theta|^2`` over the ball of radius S.

    Theta, loss, gradient and Hessian are differentiable with respect to features, rewards, weights,
    regularisation and radius, in the interior and on an active boundary, to third order. A
    derivative needs a regular problem: where the minimiser is not unique it raises.

    Args:
        family: the GLM family.
        history: the observations, ``(*B, n, d)``.
        domain: the ball.
        solver: ``"newton"`` (O(n d^2 + d^3) per step, few steps) or ``"lbfgs"`` (O(n d) per step);
            by default Newton up to 200 features.
        start: a first guess ``(*B, d)``, projected onto the ball; zero by default.
        regularization: lambda >= 0, a number or ``(*B)``.
        tol: stop when ``gap <= tol (1 + |loss|)``; 1e-9 in float64, 1e-4 in float32.
        max_steps: limit on evaluations.
        throw: raise :class:`SolverError` if an element does not converge, or return statuses.
        validate: look at the values of the rows (unless the history has checked them on arrival).

    Returns:
        An :class:`MLEResult`.

    Example:
        >>> import torchglb as glb
        >>> history = glb.History(dim=2)
        >>> history.append([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
        >>> fit = glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(2, 3.0))
        >>> fit.theta
        tensor([ 2.1213, -2.1213], dtype=torch.float64)
    """
    likelihood = NegativeLogLikelihood.of(family, history, regularization=regularization)
    checked = isinstance(history, History) and history.validate and history.family is family
    if validate and not checked and not is_transformed(*likelihood.tensors()):
        likelihood.check_values()
    return minimize_likelihood(
        likelihood, domain, solver=solver, start=start, tol=tol, max_steps=max_steps, throw=throw
    )


def minimize_likelihood(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    *,
    solver: str | None = None,
    start: Tensor | None = None,
    tol: float | None = None,
    max_steps: int | None = None,
    throw: bool = True,
) -> MLEResult:
    """:func:`constrained_mle` for a loss that is already built (possibly tilted)."""
    X = likelihood.X
    if domain.dim != likelihood.dim:
        raise refuse("domain", f"a ball of dimension {likelihood.dim}", f"dimension {domain.dim}")
    if solver is None:
        solver = "newton" if likelihood.dim <= NEWTON_LIMIT else "lbfgs"
    check_choice("solver", solver, ("newton", "lbfgs"))
    if tol is None:
        tol = 1e-9 if X.dtype == torch.float64 else 1e-4
    if max_steps is None:
        max_steps = 200 if solver == "newton" else 5000
    batch = likelihood.batch_shape
    if start is not None:
        check_same("start", start, "X", X)
        check_shape("start", start, (*batch, likelihood.dim))
        start = domain.project(start)
    else:
        start = X.new_zeros((*batch, likelihood.dim))
    radius = domain.radius_like(X).expand(batch)

    def minimize(loss: NegativeLogLikelihood, start: Tensor, radius: Tensor) -> tuple[Tensor, ...]:
        if solver == "newton":
            result, there = newton(loss.expand, start, radius, tol=tol, max_steps=max_steps)
        else:
            result, _ = lbfgs(loss.value_and_gradient, start, radius, tol=tol, max_steps=max_steps)
            there = Evaluation(*loss.expand(result.point))
        return (result.point, *there, result.gap, result.status, result.num_steps)

    def solve(start: Tensor, radius: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        return minimize(likelihood.rebuild(data), start, radius)

    data = likelihood.tensors()
    if wants_gradient(radius, *data):
        theta, loss, gradient, hessian, gap, status, num_steps = opaque(solve, start, radius, *data)
        theta = _differentiable(likelihood, radius, theta, gradient)
        loss, gradient, hessian = likelihood.expand(theta)
    else:
        with torch.no_grad():
            theta, loss, gradient, hessian, gap, status, num_steps = minimize(
                likelihood, start, radius
            )
    if throw and not is_transformed(status):
        raise_unless_converged(status, "constrained_mle")
    return MLEResult(theta, loss, gradient, hessian, gap, status, num_steps)


def _differentiable(
    likelihood: NegativeLogLikelihood, radius: Tensor, theta: Tensor, gradient: Tensor
) -> Tensor:
    """theta as a function of the data: Newton steps on ``grad L + nu theta = 0, |theta| = S``."""
    d = likelihood.dim
    nu = -(gradient * theta).sum(-1) / radius.detach().square()
    norm = torch.linalg.vector_norm(theta, dim=-1)
    active = (norm >= radius.detach() * (1 - 1e-9)) & (nu > 0)
    on = active.to(theta.dtype)[..., None]
    nu = torch.where(active, nu, torch.zeros_like(nu))
    eye = torch.eye(d, dtype=theta.dtype, device=theta.device)

    def system(y: Tensor) -> tuple[Tensor, Tensor]:
        theta, nu = y[..., :d], y[..., d:]
        _, gradient, hessian = likelihood.expand(theta)
        sphere = 0.5 * (theta.square().sum(-1) - radius.square())[..., None]
        residual = torch.cat([gradient + nu * theta, on * sphere - (1 - on) * nu], dim=-1)
        column = (on * theta)[..., None]
        top = torch.cat([hessian + nu[..., None] * eye, column], dim=-1)
        corner = (on - 1)[..., None]
        bottom = torch.cat([column.mT, corner], dim=-1)
        return residual, torch.cat([top, bottom], dim=-2)

    y = newton_polish(system, torch.cat([theta, nu[..., None]], dim=-1), 2, "theta")
    return y[..., :d]
