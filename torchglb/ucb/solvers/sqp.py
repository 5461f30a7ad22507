"""One step of sequential quadratic programming for the optimistic program.

At a point theta with loss L, gradient g and Hessian H, the step maximises ``<x, u>`` over the ball
and the ellipsoid ``L + g'(u - theta) + (u - theta)' H (u - theta) / 2 <= B``. For a weight
``omega >= 0`` of the ball against the model the two constraints merge into one ellipsoid, whose
maximiser is closed-form in the eigenbasis of H; the right omega puts it on the sphere.
"""

from __future__ import annotations

from torchglb.arrays import Array, at_least, dot, idle, length, library, limits, matvec
from torchglb.likelihood import Expansion


def propose(
    x: Array,
    theta: Array,
    gradient: Array,
    eigenvalues: Array,
    basis: Array,
    room: Array,
    radius: Array,
    guess: Array,
    iterations: int = 40,
) -> Array:
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
    xp = library(x)
    eps, tiny = limits(x)
    tiny = tiny**0.5
    close = eps**0.75
    turned = basis.mT
    x, theta, gradient = matvec(turned, x), matvec(turned, theta), matvec(turned, gradient)
    # flat directions keep a curvature that still reaches the sphere but drowns in no rounding noise
    curvature = at_least(eigenvalues, 0.0)
    eigenvalues = xp.maximum(curvature, eps**1.5 * curvature[..., -1:] + tiny)
    inside = at_least(radius * radius - dot(theta, theta), 0.0)
    squared = x * x

    def maximiser(omega: Array) -> tuple[Array, Array, Array, Array, Array]:
        """u, and what its derivative in omega needs."""
        weight = omega[..., None]
        spring = 1.0 / (eigenvalues + weight)
        pull = gradient + weight * theta
        size = dot(pull, pull * spring) + 2.0 * room + omega * inside
        spread = at_least(dot(squared, spring), tiny)
        reach = xp.sqrt(at_least(size, 0.0) / spread)
        centre = theta - pull * spring
        return centre + reach[..., None] * (x * spring), centre, reach, spread, spring

    # the ball alone, where its maximiser satisfies the model
    pole = x * (radius / at_least(length(x), tiny))[..., None]
    move = pole - theta
    alone = dot(gradient + 0.5 * curvature * move, move) <= room

    omega = 0.0 * radius
    u = maximiser(omega)[0]
    norm = length(u)
    search = (norm > radius) & ~alone
    if not idle(search):
        low, high = omega, omega + float("inf")
        # a guess far from the curvature is none, and would cost more steps than it saves
        stiff = eigenvalues[..., -1]
        sensible = (guess > 1e-6 * stiff) & (guess < 1e6 * stiff)
        omega = xp.where(sensible, guess, stiff)
        omega = xp.where(search, omega, 0.0)
        for _ in range(iterations):
            u, centre, reach, spread, spring = maximiser(omega)
            norm = length(u)
            out = norm > radius
            low, high = xp.where(out, omega, low), xp.where(out, high, omega)
            # Newton on 1/|u| = 1/S; d reach / d omega from size' = S^2 - |centre|^2
            ray = u - centre
            growth = radius * radius + dot(ray, ray) - dot(centre, centre)
            bend = dot(u, ray) * growth / at_least(2.0 * reach * reach * spread, tiny)
            slope = bend - dot(u, u * spring)
            newton = omega + norm * norm * (1.0 - norm / radius) / slope
            update, lost = newton, ~((newton > low) & (newton < high))
            if not idle(lost):
                middle = xp.where(low > 0, xp.sqrt(low * high), 0.01 * high)
                middle = xp.where(high < float("inf"), middle, 10.0 * omega)
                update = xp.where(lost, middle, newton)
            done = (abs(norm / radius - 1.0) < close) | (abs(update - omega) <= eps * omega)
            search = search & ~done
            if idle(search):
                break
            omega = xp.where(search, update, omega)
        else:
            u = maximiser(omega)[0]
    u = xp.where(alone[..., None], pole, u)
    u = matvec(basis, u)
    # land a few roundings inside the sphere: from outside, from the sphere itself, and from just
    # inside where the search was for it
    norm, edge = length(u), (1 - 4 * eps) * radius
    onto = (norm > edge) | ((omega > 0) & (norm > (1 - 1e-6) * radius))
    return u * xp.where(onto, edge / norm, 1.0)[..., None]


def multipliers(x: Array, gradient: Array, theta: Array) -> tuple[Array, Array]:
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
    where, shared = library(x).where, gg * tt - gt * gt
    return where(both, along / shared, abs(xg) / gg), where(both, out / shared, 0.0)


def stop_at_cut(start: Array, end: Array, normal: Array, offset: Array) -> Array:
    """``end``, or where the segment from ``start`` meets a cut that all of the set obeys."""
    here, there = dot(normal, start), dot(normal, end)
    crosses = (there > offset) & (here < offset)
    share = library(start).where(crosses, (offset - here) / (there - here), 1.0)
    return start + share[..., None] * (end - start)


def come_back(point: Array, at: Expansion, inner: Array, inner_loss: Array, level: Array) -> Array:
    """From far outside the set, a point near its boundary on the segment to an inner point.

    It lies between the root of the power law through loss and slope at ``point`` (right for steep
    growth) and the root of the tangent there (right for linear growth).
    """
    xp = library(point)
    rise, budget = at.loss - inner_loss, level - inner_loss
    away = point - inner
    steep = dot(at.gradient, away)
    power = (budget / rise) ** (rise / steep)
    tangent = at_least(1.0 - (at.loss - level) / steep, 0.0)
    share = 0.5 * (power + tangent)
    share = xp.where(xp.isnan(share), 0.5, xp.clip(share, 0.0, 1.0))
    return inner + share[..., None] * away
