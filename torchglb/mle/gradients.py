"""Derivatives of the estimate, through its optimality conditions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim.implicit import flat_directions, newton_polish


def differentiable(
    likelihood: NegativeLogLikelihood,
    radius: Tensor,
    theta: Tensor,
    gradient: Tensor,
    hessian: Tensor,
) -> tuple[Tensor, Tensor]:
    """theta as a function of the data, and where it is none, ``(*B)``.

    Newton steps on ``grad L + nu theta = 0, |theta| = S``. In directions without curvature theta
    stays where it is: among several minimisers the one on that slice is followed, so that
    ``L(theta)`` is still the least loss.
    """
    d, S = likelihood.dim, radius.detach()
    nu = -(gradient * theta).sum(-1) / S.square()
    # the ball holds theta back if the force outward exceeds what the curvature does over the room
    room = (1.0 - torch.linalg.vector_norm(theta, dim=-1) / S).clamp_min(0.0)
    active = nu > room * torch.diagonal(hessian, dim1=-2, dim2=-1).mean(-1)
    on = active.to(theta.dtype)[..., None]
    nu = torch.where(active, nu, torch.zeros_like(nu))
    eye = torch.eye(d, dtype=theta.dtype, device=theta.device)
    found, hold = theta, flat_directions(hessian + nu[..., None, None] * eye, on * theta)

    def system(y: Tensor) -> tuple[Tensor, Tensor]:
        theta, nu = y[..., :d], y[..., d:]
        _, gradient, hessian = likelihood.expand(theta)
        sphere = 0.5 * (theta.square().sum(-1) - radius.square())[..., None]
        held = (hold @ (theta - found)[..., None])[..., 0]
        residual = torch.cat([gradient + nu * theta + held, on * sphere - (1 - on) * nu], dim=-1)
        column = (on * theta)[..., None]
        top = torch.cat([hessian + nu[..., None] * eye + hold, column], dim=-1)
        corner = (on - 1)[..., None]
        bottom = torch.cat([column.mT, corner], dim=-1)
        return residual, torch.cat([top, bottom], dim=-2)

    y = newton_polish(system, torch.cat([theta, nu[..., None]], dim=-1), 2, "theta")
    theta = y[..., :d]
    ratio = torch.linalg.vector_norm(theta.detach(), dim=-1) / S
    # a step far out of a ball that is not active: the curvature is too weak for the solver to see
    astray = ~active & (ratio > 1.0 + torch.finfo(theta.dtype).eps ** 0.25)
    theta = theta - ((1.0 - 1.0 / ratio.clamp_min(1.0))[..., None] * theta).detach()
    return torch.where(astray[..., None], found, theta), astray | (hold != 0).flatten(-2).any(-1)
