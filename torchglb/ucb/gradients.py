"""Derivatives of the optimistic program, through its optimality conditions.

``x = lambda grad L(theta) + nu theta``, with ``L(theta) = B`` or lambda = 0, and ``|theta| = S`` or
nu = 0. The Lagrangian at the solution gives the value; its derivatives in theta, lambda and nu
vanish there, which is the envelope theorem. It needs no unique maximiser; an arm that has many (one
in the span of a few rows, far from the ball's edge) has a kink there in some directions, and its
derivative is that of the maximiser that was found. The maximiser itself then has none.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchglb.optim.implicit import flat_directions, newton_polish, withheld
from torchglb.recording import is_transformed
from torchglb.ucb.program import SublevelProgram, SupportResult

#: a multiplier below this share of |x| counts as zero
INACTIVE = 1e-6


def differentiable(program: SublevelProgram, arms: Tensor, result: SupportResult) -> SupportResult:
    """The same result, as a function of arms, level, radius and rows."""
    d = arms.shape[-1]
    loss = program.likelihood
    radius = program.domain.radius_like(arms).expand(arms.shape[:-2])[..., None]
    level = program.level[..., None]
    eye = torch.eye(d, dtype=arms.dtype, device=arms.device)

    # which constraints hold with equality, from the cut that certified the value
    theta, multiplier = result.theta.detach(), result.multiplier.detach()
    with torch.no_grad():
        _, gradient, hessian = loss.expand(theta)
        length = torch.linalg.vector_norm(arms, dim=-1)
        rest = arms - multiplier[..., None] * gradient
        nu = (rest * theta).sum(-1) / radius.square()
        loss_on = multiplier * torch.linalg.vector_norm(gradient, dim=-1) > INACTIVE * length
        ball_on = nu * radius > INACTIVE * length
        ball_on = ball_on & (torch.linalg.vector_norm(theta, dim=-1) > (1 - 1e-4) * radius)
        # a zero arm, or one that failed, has nothing to solve for
        idle = ~(loss_on | ball_on) | (result.status != 0)
        theta = torch.where(idle[..., None], 0.0, theta)
        on_loss, on_ball, keep = (
            mask.to(arms.dtype) for mask in (loss_on & ~idle, ball_on & ~idle, ~idle)
        )
        lam = torch.where(loss_on, multiplier, 0.0)
        nu = torch.where(ball_on, nu, 0.0)
        start = torch.cat([theta, lam[..., None], nu[..., None]], dim=-1)
        # a maximiser need not be unique: it stays where it is in the directions that do not matter
        bend = lam[..., None, None] * hessian + nu[..., None, None] * eye
        hold = flat_directions(bend, on_loss[..., None] * gradient, on_ball[..., None] * theta)
        free = (hold != 0).flatten(-2).any(-1)
        holds = is_transformed(free) or bool(free.any())
        free, found = free & ~idle, theta

    def system(y: Tensor) -> tuple[Tensor, Tensor]:
        theta, lam, nu = y[..., :d], y[..., d : d + 1], y[..., d + 1 :]
        value, gradient, hessian = loss.expand(theta)
        kkt = arms - lam * gradient - nu * theta
        excess = on_loss * (value - level) + (on_loss - 1) * lam[..., 0]
        sphere = 0.5 * (theta.square().sum(-1) - radius.square())
        sphere = on_ball * sphere + (on_ball - 1) * nu[..., 0]
        curvature = lam[..., None] * hessian + nu[..., None] * eye
        if holds:
            kkt = kkt - (hold @ (theta - found)[..., None])[..., 0]
            curvature = curvature + hold
        residual = torch.cat([kkt, excess[..., None], sphere[..., None]], dim=-1)
        zero = torch.zeros_like(lam)[..., None]
        top = torch.cat([-curvature, -gradient[..., None], -theta[..., None]], dim=-1)
        of_loss = torch.cat(
            [on_loss[..., None, None] * gradient[..., None, :], on_loss[..., None, None] - 1, zero],
            -1,
        )
        of_ball = torch.cat(
            [on_ball[..., None, None] * theta[..., None, :], zero, on_ball[..., None, None] - 1], -1
        )
        jacobian = torch.cat([top, of_loss, of_ball], dim=-2)
        # elements with nothing to solve for keep their values
        whole = torch.eye(d + 2, dtype=arms.dtype, device=arms.device)
        keep_matrix = keep[..., None, None]
        return keep[..., None] * residual, keep_matrix * jacobian + (1 - keep_matrix) * whole

    with torch.no_grad():
        start = newton_polish(system, start, 2, "theta")
    y = newton_polish(system, start, 2, "theta")
    theta, lam, nu = y[..., :d], y[..., d], y[..., d + 1]
    value = (arms * theta).sum(-1) - lam * (loss.value(theta) - level)
    value = value - 0.5 * nu * (theta.square().sum(-1) - radius.square())
    change = value - value.detach()
    return dataclasses.replace(
        result,
        upper=result.upper + change,
        lower=result.lower + change,
        theta=withheld(result.theta + (theta - theta.detach()), free, "theta"),
        multiplier=result.multiplier + (lam - lam.detach()),
    )
