"""One step of sequential quadratic programming for the optimistic program.

At a point theta with loss L, gradient g and Hessian H, the step maximises ``<x, u>`` over the ball
and the ellipsoid ``L + g'(u - theta) + (u - theta)' H (u - theta) / 2 <= B``. For a weight
``omega >= 0`` of the ball against the model the two constraints merge into one ellipsoid, whose
maximiser is closed-form in the eigenbasis of H; the right omega puts it on the sphere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.likelihood import Expansion
from torchglb.linalg import cut_ball, idle


def propose(
    x: Tensor,
    theta: Tensor,
    gradient: Tensor,
    eigenvalues: Tensor,
    basis: Tensor,
    room: Tensor,
    radius: Tensor,
    guess: Tensor,
    iterations: int = 40,
) -> Tensor:
    """The maximiser of ``<x, u>`` over ball and model; leading axes are shared by all arguments.

    Args:
        x: the arm, ``(*, d)``.
        theta: where the model was made, in the ball.
        gradient: g there.
        eigenvalues: of H, ascending, ``(*, d)``.
        basis: its eigenvectors, ``(*, d, d)``.
        room: ``B - L``, ``(*)``.
        radius: S, ``(*)``.
        guess: a first omega, ``(*)``; 0 where nothing is known.
        iterations: limit of the root search for omega; an inexact one still gives a usable point.
    """
    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny ** 0.5
    turned = torch.stack([x, theta, gradient], dim=-2) @ basis
    x, theta, gradient = turned.unbind(-2)
    # flat directions keep a curvature that still reaches the sphere but drowns in no rounding noise
    curvature = eigenvalues.clamp_min(0.0)
    eigenvalues = torch.maximum(curvature, eps**1.5 * curvature[..., -1:] + tiny)
    inside = (radius * radius - theta.square().sum(-1)).clamp_min(0.0)

    def maximiser(omega: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u, and what its derivative in omega needs."""
        shifted = eigenvalues + omega[..., None]
        pull = gradient + omega[..., None] * theta
        ray = x / shifted
        size = (pull * pull / shifted).sum(-1) + 2.0 * room + omega * inside
        spread = (x * ray).sum(-1).clamp_min(tiny)
        reach = (size.clamp_min(0.0) / spread).sqrt()
        return theta - pull / shifted + reach[..., None] * ray, ray, reach, spread, shifted

    # the ball alone, where its maximiser satisfies the model
    length = torch.linalg.vector_norm(x, dim=-1)
    pole = x * (radius / length.clamp_min(tiny))[..., None]
    move = pole - theta
    model = (gradient * move).sum(-1) + 0.5 * (curvature * move * move).sum(-1)
    alone = model <= room

    u = maximiser(torch.zeros_like(room))[0]
    norm = torch.linalg.vector_norm(u, dim=-1)
    search = (norm > radius) & ~alone
    if not idle(search):
        low, high = torch.zeros_like(room), torch.full_like(room, torch.inf)
        omega = torch.where(guess > 0, guess, eigenvalues[..., -1])
        omega = torch.where(search, omega, 0.0)
        for _ in range(iterations):
            u, ray, reach, spread, shifted = maximiser(omega)
            norm = torch.linalg.vector_norm(u, dim=-1)
            out = norm > radius
            low, high = torch.where(out, omega, low), torch.where(out, high, omega)
            # Newton on 1/|u| = 1/S; d reach / d omega from size' = S^2 - |centre|^2
            centre = u - reach[..., None] * ray
            growth = radius * radius - centre.square().sum(-1)
            growth = growth + (reach * reach) * ray.square().sum(-1)
            bend = (u * ray).sum(-1) * growth / (2.0 * reach * spread).clamp_min(tiny)
            slope = bend - (u * u / shifted).sum(-1)
            newton = omega + norm * norm * (1.0 - norm / radius) / slope
            middle = torch.where(low > 0, (low * high).sqrt(), 0.01 * high)
            middle = torch.where(high < torch.inf, middle, 10.0 * omega)
            update = torch.where((newton > low) & (newton < high), newton, middle)
            done = ((norm / radius - 1.0).abs() < 32 * eps) | (
                (update - omega).abs() <= eps * omega
            )
            search = search & ~done
            omega = torch.where(search, update, omega)
            if idle(search):
                break
        u = maximiser(omega)[0]
        norm = torch.linalg.vector_norm(u, dim=-1)
    u = torch.where(alone[..., None], pole, u)
    norm = torch.where(alone, radius, norm)
    u = u * (radius / torch.maximum(norm, radius))[..., None]
    return (basis @ u[..., None])[..., 0]


def ball_weight(x: Tensor, normal: Tensor, offset: Tensor, radius: Tensor) -> Tensor:
    """omega as the cut ``<normal, theta> <= offset`` would have it; 0 where the cut is inactive.

    There ``x = lambda normal + nu theta`` with ``|theta| = S``, and omega is ``nu / lambda``.
    """
    multiplier = cut_ball(x, normal, offset, radius).multiplier
    rest = torch.linalg.vector_norm(x - multiplier[..., None] * normal, dim=-1)
    return torch.where(multiplier > 0, rest / (radius * multiplier), 0.0)


def stop_at_cut(start: Tensor, end: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """``end``, or where the segment from ``start`` meets a cut that all of the set obeys."""
    here, there = (normal * start).sum(-1), (normal * end).sum(-1)
    crosses = (there > offset) & (here < offset)
    share = torch.where(crosses, (offset - here) / (there - here), 1.0)
    return start + share[..., None] * (end - start)


def come_back(
    point: Tensor, at: Expansion, inner: Tensor, inner_loss: Tensor, level: Tensor
) -> Tensor:
    """From far outside the set, a point near its boundary on the segment to an inner point.

    It lies between the root of the power law through loss and slope at ``point`` (right for steep
    growth) and the root of the tangent there (right for linear growth).
    """
    rise, budget = at.loss - inner_loss, level - inner_loss
    away = point - inner
    steep = (at.gradient * away).sum(-1)
    power = (budget / rise) ** (rise / steep)
    tangent = (1.0 - (at.loss - level) / steep).clamp_min(0.0)
    share = (0.5 * (power + tangent)).nan_to_num(0.5).clamp(0.0, 1.0)
    return inner + share[..., None] * away
