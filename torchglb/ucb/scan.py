"""What the anchors say of every arm, without a pass.

Each anchor's cut bounds every arm from above; each anchor, drawn back to the level along the chord
to the centre, bounds every arm from below.
"""

from __future__ import annotations

from typing import NamedTuple

from torchglb.arrays import (
    Array,
    at_least,
    counting,
    dot,
    idle,
    length,
    library,
    limits,
    single,
    take,
)
from torchglb.ucb.bounds import feasible_share, tangent
from torchglb.ucb.bundle import Bundle

#: a chord to divide by where there is none, in single precision
ROUGHLY_NOTHING = 1e-15


class Round(NamedTuple):
    """The programs of one round, N at once."""

    arms: Array  # (N, K, d)
    level: Array  # B, (N)
    hub: Array  # a feasible centre, (N, d)
    hub_loss: Array  # an upper bound on its loss, (N)
    ridge: Array  # lambda, (N)
    radius: Array  # S, (N)
    pull: Array  # the size of what is rounded, (N); see bounds.pull_of_rows

    def pick(self, index: Array) -> Round:
        """The same for some of the problems."""
        if index.shape[0] == self.level.shape[0]:  # all of them
            return self
        return Round(*(t[index] for t in self))


class Cuts(NamedTuple):
    """The cuts ``<normal, theta> <= offset`` of all anchors."""

    normal: Array  # (N, d, A)
    offset: Array  # (N, A)

    def replace(self, rows: Array, slot: Array, normal: Array, offset: Array) -> None:
        """Other cuts in the place of some."""
        self.normal[rows, :, slot], self.offset[rows, slot] = normal, offset

    def at(self, rows: Array, slot: Array) -> tuple[Array, Array]:
        """Normal ``(n, d)`` and offset ``(n)`` of one cut of each of some problems."""
        return self.normal[rows, :, slot], self.offset[rows, slot]


class Scan(NamedTuple):
    """What the anchors say of every arm."""

    upper: Array  # (N, K)
    tight: Array  # (N, K), the anchor behind upper
    lower: Array  # (N, K)
    touch: Array  # (N, K), the anchor behind lower
    cuts: Cuts


def scan(bundle: Bundle, task: Round, steps: int, roundings: float) -> Scan:
    """Bounds on every arm from all anchors, O(K A d), no pass.

    Args:
        bundle: the anchors.
        task: arms, levels and centres.
        steps: how many cuts may be combined.
        roundings: that the carried sums have seen.
    """
    arms, level, hub, hub_loss, ridge, radius, pull = task
    B, S, centre = level[:, None], radius[:, None], hub[..., None]
    points, loss = bundle.points, bundle.loss
    gradient, curvature = bundle.gradient, bundle.curvature
    if not idle(ridge):
        lam = ridge[:, None]
        loss = loss + 0.5 * lam * dot(points, points, 1)
        gradient = gradient + lam[..., None] * points
        curvature = curvature + bundle.dim * lam
    cut = tangent(dot(gradient, points, 1), loss, curvature, B, S, pull[:, None])
    paid = roundings * cut.rounding
    offset = cut.offset + paid
    steep = at_least(length(gradient, 1), limits(arms)[1])
    upper, tight = combine_cuts(arms, gradient / steep[:, None], offset / steep, radius, steps)
    share = feasible_share(loss + paid, hub_loss[:, None], B)
    reached = arms @ (centre + share[:, None] * (points - centre))
    touch = reached.argmax(-1)
    # without a ridge these normals are the bundle's gradients: a new anchor writes its own there
    return Scan(upper, tight, take(reached, touch), touch, Cuts(gradient, offset))


def combine_cuts(
    arms: Array, units: Array, reach: Array, radius: Array, steps: int
) -> tuple[Array, Array]:
    """Upper bounds from several cuts at once, and the first cut taken for each arm.

    For any weights ``alpha >= 0``, ``h(x) <= sum_a alpha_a reach_a + S |x - sum_a alpha_a u_a|``,
    by duality over the ball. Each step gives the one cut that lowers the bound most its best
    weight.

    Args:
        arms: ``(N, K, d)``.
        units: unit normals ``(N, d, A)``.
        reach: ``(N, A)``: the set obeys ``<u_a, theta> <= reach_a``.
        radius: S, ``(N)``.
        steps: cuts to combine, at least 1.
    """
    xp, S = library(arms), radius[:, None]
    eps, tiny = limits(arms)
    near = xp.minimum(xp.maximum(reach, -S), S)  # (N, A)
    chord = xp.sqrt((S - near) * (S + near))
    slack = near / at_least(chord, tiny**0.5)  # finite: it may be multiplied by zero
    left, paid = arms, xp.zeros_like(arms[..., 0])
    weights = paid
    every = counting(arms.shape[0], arms)[:, None]
    first = None
    for _ in range(steps):
        choice = best_cut(left, units, near, chord, radius)
        first = choice if first is None else first
        normal, at_reach = units[every, :, choice], reach[every, choice]
        along = dot(left, normal)
        alpha = along - slack[every, choice] * length(left - along[..., None] * normal)
        # a cut beyond the sphere has no weight, nor has one without a slope: it pays nothing
        alpha = xp.where(at_reach < S, at_least(alpha, 0.0), 0.0)
        left = left - alpha[..., None] * normal
        paid = paid + xp.where(alpha > 0, alpha * at_reach, 0.0)
        weights = weights + alpha
    assert first is not None
    # whatever was chosen, and however it was rounded, the weights certify this value
    rest = length(left)
    scale = abs(paid) + S * (rest + weights + length(arms))
    return paid + S * rest + 8 * eps * scale, first


def best_cut(x: Array, units: Array, near: Array, chord: Array, radius: Array) -> Array:
    """For each arm the cut of the ball that lowers its bound most, ``(N, K)``.

    The arrays ``(N, K, A)`` are the largest of a round, and a choice needs no precision: they are
    in single precision, and only three.

    Args:
        x: ``(N, K, d)``.
        units: unit normals ``(N, d, A)``.
        near: how far the cuts are from the centre, at most S, ``(N, A)``.
        chord: the radii of the discs that they cut out, ``(N, A)``.
        radius: S, ``(N)``.
    """
    xp = library(x)
    x, units, near, chord, S = (single(t) for t in (x, units, near, chord, radius))
    near, chord = near[:, None], chord[:, None]
    squared = dot(x, x)[..., None]
    along = x @ units
    across = along * along
    across -= squared
    xp.sqrt(xp.abs(across, out=across), out=across)
    weight = (near / at_least(chord, ROUGHLY_NOTHING)) * across
    xp.subtract(along, weight, out=weight)
    along *= near
    across *= chord
    along += across
    xp.subtract(S[:, None, None] * xp.sqrt(squared), along, out=along)
    # a cut whose weight would be negative leaves the whole ball: it gains nothing
    return xp.copysign(along, weight, out=along).argmax(-1)
