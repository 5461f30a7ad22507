"""One step of sequential quadratic programming for the optimistic program.

At a point theta with loss L, gradient g and Hessian H, the step maximises ``<x, u>`` over the ball
and the ellipsoid ``L + g'(u - theta) + (u - theta)' H (u - theta) / 2 <= B``. For a weight
``omega >= 0`` of the ball against the model the two constraints merge into one ellipsoid, whose
maximiser is closed-form in the eigenbasis of H; the right omega puts it on the sphere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.arrays import dot, known_none, length, limits, matvec
from torchglb.rows.sums import Expansion

#: limit of the root search for omega; an inexact root still gives a usable point
ROOT_STEPS = 40
#: a root may miss the model by this share of its room
MODEL_SHARE = 0.1


def propose(
    x: Tensor,
    theta: Tensor,
    gradient: Tensor,
    eigenvalues: Tensor,
    basis: Tensor,
    room: Tensor,
    radius: Tensor,
    guess: Tensor,
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
    """
    eps, tiny = limits(x)
    tiny = tiny**0.5
    close = eps**0.75
    turned = basis.mT
    x, theta, gradient = matvec(turned, x), matvec(turned, theta), matvec(turned, gradient)
    # flat directions keep a curvature that still reaches the sphere but drowns in no rounding noise
    curvature = eigenvalues.clamp_min(0.0)
    eigenvalues = torch.maximum(curvature, eps**1.5 * curvature[..., -1:] + tiny)
    inside = (radius * radius - dot(theta, theta)).clamp_min(0.0)
    squared = x * x

    def maximiser(omega: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u, and what its derivative in omega needs."""
        weight = omega[..., None]
        spring = 1.0 / (eigenvalues + weight)
        pull = gradient + weight * theta
        size = dot(pull, pull * spring) + 2.0 * room + omega * inside
        spread = dot(squared, spring).clamp_min(tiny)
        reach = torch.sqrt(size.clamp_min(0.0) / spread)
        centre = theta - pull * spring
        return centre + reach[..., None] * (x * spring), centre, reach, spread, spring

    # the ball alone, where its maximiser satisfies the model
    pole = x * (radius / length(x).clamp_min(tiny))[..., None]
    move = pole - theta
    alone = dot(gradient + 0.5 * curvature * move, move) <= room

    omega = 0.0 * radius
    u = maximiser(omega)[0]
    norm = length(u)
    search = (norm > radius) & ~alone
    if not known_none(search):
        low, high = omega, omega + float("inf")
        # a guess far from the curvature is none, and would cost more steps than it saves
        stiff = eigenvalues[..., -1]
        sensible = (guess > 1e-6 * stiff) & (guess < 1e6 * stiff)
        omega = torch.where(sensible, guess, stiff)
        omega = torch.where(search, omega, 0.0)
        for _ in range(ROOT_STEPS):
            u, centre, reach, spread, spring = maximiser(omega)
            norm = length(u)
            out = norm > radius
            low, high = torch.where(out, omega, low), torch.where(out, high, omega)
            # Newton on 1/|u| = 1/S; d reach / d omega from size' = S^2 - |centre|^2
            ray = u - centre
            growth = radius * radius + dot(ray, ray) - dot(centre, centre)
            bend = dot(u, ray) * growth / (2.0 * reach * reach * spread).clamp_min(tiny)
            slope = bend - dot(u, u * spring)
            newton = omega + norm * norm * (1.0 - norm / radius) / slope
            update, lost = newton, ~((newton > low) & (newton < high))
            if not known_none(lost):
                middle = torch.where(low > 0, torch.sqrt(low * high), 0.01 * high)
                middle = torch.where(high < float("inf"), middle, 10.0 * omega)
                update = torch.where(lost, middle, newton)
            # off the sphere by so much the model is off by omega S^2 as much: little of its room
            missed = abs(norm / radius - 1.0)
            true = omega * radius * radius * missed <= MODEL_SHARE * abs(room)
            done = ((missed < close) & true) | (missed <= 4.0 * eps)
            done = done | (abs(update - omega) <= eps * omega)
            search = search & ~done
            if known_none(search):
                break
            omega = torch.where(search, update, omega)
        else:
            u = maximiser(omega)[0]
    u = torch.where(alone[..., None], pole, u)
    u = matvec(basis, u)
    # land a few roundings inside the sphere: from outside, from the sphere itself, and from just
    # inside where the search was for it
    norm, edge = length(u), (1 - 4 * eps) * radius
    onto = (norm > edge) | ((omega > 0) & (norm > (1 - 1e-6) * radius))
    return u * torch.where(onto, edge / norm, 1.0)[..., None]


def multipliers(x: Tensor, gradient: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Of the level and of the ball, as a point near the solution has them.

    At the solution ``x = lambda grad L(theta) + nu theta``: here both are fitted by least squares.
    Where that makes no sense the level is alone.
    """
    gg, gt, tt = dot(gradient, gradient), dot(gradient, theta), dot(theta, theta)
    xg, xt = dot(x, gradient), dot(x, theta)
    along, out = xg * tt - xt * gt, xt * gg - xg * gt  # both times the same positive number
    # what is left of a difference of equal numbers says nothing
    noise = 1e3 * limits(x)[0]
    both = (along > noise * abs(xg) * tt) & (out > noise * abs(xt) * gg)
    shared = gg * tt - gt * gt
    level = torch.where(both, along / shared, abs(xg) / gg)
    return level, torch.where(both, out / shared, 0.0)


def stop_at_cut(start: Tensor, end: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """``end``, or where the segment from ``start`` meets a cut that all of the set obeys."""
    here, there = dot(normal, start), dot(normal, end)
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
    steep = dot(at.gradient, away)
    power = (budget / rise) ** (rise / steep)
    tangent = (1.0 - (at.loss - level) / steep).clamp_min(0.0)
    share = 0.5 * (power + tangent)
    share = torch.where(torch.isnan(share), 0.5, torch.clip(share, 0.0, 1.0))
    return inner + share[..., None] * away
