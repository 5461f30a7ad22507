"""Anchors: points at which loss, gradient and Hessian are carried forward exactly.

At a fixed point the loss changes by one term per observation, so the cut of every anchor is exact
again in the next round at a cost of O(d^2), without a pass over the history. Each cut bounds every
arm from above; each anchor, drawn back to the level along the chord to the centre, bounds every arm
from below.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchglb.arrays import Array, array, at_least, counting, dot, length, library, limits, take
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion
from torchglb.ucb.bounds import cut_offset, draw_back, trace
from torchglb.ucb.taylor import shift_by_ridge


class Bundle(NamedTuple):
    """A anchors for each of N problems, with the data's loss there (no ridge)."""

    points: Array  # (N, A, d)
    loss: Array  # (N, A)
    gradient: Array  # (N, A, d)
    hessian: Array  # (N, A, d, d)
    used: Array  # (N, A): the last round in which the anchor decided something

    def arrays(self) -> Bundle:
        """The same memory as arrays of :mod:`torchglb.arrays`."""
        return Bundle(*(array(t) for t in self))


def empty_bundle(problems: int, anchors: int, dim: int, like: Tensor) -> Bundle:
    """All anchors at the origin, where the loss of no data is zero with all its derivatives."""
    shape = (problems, anchors)
    return Bundle(
        like.new_zeros((*shape, dim)),
        like.new_zeros(shape),
        like.new_zeros((*shape, dim)),
        like.new_zeros((*shape, dim, dim)),
        like.new_full(shape, -1.0),
    )


def carry_forward(
    bundle: Bundle, family: GLMFamily, x: Tensor, r: Tensor, w: Tensor | None
) -> None:
    """Adds observations ``x (N, k, d)``, ``r`` and ``w (N, k)`` to every anchor: O(A k d^2)."""
    loss, slope, curvature = family.loss_terms(bundle.points @ x.mT, r[..., None, :])  # (N, A, k)
    if w is not None:
        loss, slope, curvature = (t * w[..., None, :] for t in (loss, slope, curvature))
    products = (x[..., :, None] * x[..., None, :]).flatten(-2)  # (N, k, d^2)
    bundle.loss.add_(loss.sum(-1))
    bundle.gradient.baddbmm_(slope, x)
    bundle.hessian.flatten(-2).baddbmm_(curvature, products)


def insert(bundle: Bundle, rows: Array, slot: Array, point: Array, at: Expansion, now: int) -> None:
    """Puts one new anchor into the given slot of each of the problems ``rows``, in place."""
    for old, new in zip(bundle, (point, *at, float(now)), strict=True):
        old[rows, slot] = new


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
        return Round(*(t[index] for t in self))


class Scan(NamedTuple):
    """What the anchors say of every arm."""

    upper: Array  # (N, K)
    cut: Array  # (N, K), the anchor behind upper
    lower: Array  # (N, K)
    touch: Array  # (N, K), the anchor behind lower


def scan(bundle: Bundle, task: Round, steps: int, roundings: float) -> Scan:
    """Bounds on every arm from all anchors, O(K A d), no pass.

    Args:
        bundle: the anchors.
        task: arms, levels and centres.
        steps: how many cuts may be combined.
        roundings: that the carried sums have seen.
    """
    arms, level, hub, hub_loss, ridge, radius, pull = task
    xp = library(arms)
    B, S, size, lam = level[:, None], radius[:, None], pull[:, None], ridge[:, None]
    points = bundle.points
    loss = bundle.loss + 0.5 * lam * dot(points, points)
    gradient = bundle.gradient + lam[..., None] * points
    curvature = trace(bundle.hessian) + points.shape[-1] * lam
    offset = cut_offset(points, loss, gradient, curvature, B, S, size, roundings)
    steep = at_least(length(gradient), limits(arms)[1])
    units = gradient / steep[..., None]
    upper, cut = combine_cuts(arms, units, offset / steep, radius, steps)
    drawn = draw_back(points, loss, hub[:, None, :], hub_loss[:, None], B)
    reached = arms @ drawn.mT
    touch = xp.argmax(reached, -1)
    return Scan(upper, cut, take(reached, touch), touch)


def mark_used(bundle: Bundle, found: Scan, everyone: Array, now: int) -> None:
    """Stamps the anchors that bound some arm: they stay, the others make room."""
    for slots in (found.cut, found.touch):
        bundle.used[everyone[:, None], slots] = float(now)


def combine_cuts(
    arms: Array, units: Array, reach: Array, radius: Array, steps: int
) -> tuple[Array, Array]:
    """Upper bounds from several cuts at once, and the first cut taken for each arm.

    For any weights ``alpha >= 0``, ``h(x) <= sum_a alpha_a reach_a + S |x - sum_a alpha_a u_a|``,
    by duality over the ball. Each step gives the one cut that lowers the bound most its best
    weight.

    Args:
        arms: ``(N, K, d)``.
        units: unit normals ``(N, A, d)``.
        reach: ``(N, A)``: the set obeys ``<u_a, theta> <= reach_a``.
        radius: S, ``(N)``.
        steps: cuts to combine, at least 1.
    """
    xp = library(arms)
    eps, tiny = limits(arms)
    S = radius[:, None, None]
    near = xp.minimum(xp.maximum(reach[:, None, :], -S), S)  # (N, 1, A)
    chord = xp.sqrt((S - near) * (S + near))
    slack = near / at_least(chord, tiny**0.5)  # finite: it may be multiplied by zero
    left, paid = arms, xp.zeros_like(arms[..., 0])
    weights = paid
    every = counting(arms.shape[0], arms)[:, None]
    first = None
    for _ in range(steps):
        along = left @ units.mT  # (N, K, A)
        squared = dot(left, left)[..., None]
        across = xp.sqrt(at_least(squared - along * along, 0.0))
        # where a cut has no weight it leaves the whole ball
        value = xp.where(
            along > slack * across, near * along + chord * across, S * xp.sqrt(squared)
        )
        choice = xp.argmin(value, -1)
        first = choice if first is None else first
        alpha = take(along, choice) - slack[every, 0, choice] * take(across, choice)
        normal, at_reach = units[every, choice], reach[every, choice]
        # a cut beyond the sphere has no weight, nor has one without a slope: it pays nothing
        alpha = xp.where(at_reach < radius[:, None], at_least(alpha, 0.0), 0.0)
        left = left - alpha[..., None] * normal
        paid = paid + xp.where(alpha > 0, alpha * at_reach, 0.0)
        weights = weights + alpha
    assert first is not None
    # whatever was chosen, and however it was rounded, the weights certify this value
    rest = length(left)
    scale = abs(paid) + radius[:, None] * (rest + weights + length(arms))
    return paid + radius[:, None] * rest + 8 * eps * scale, first


def at_anchor(bundle: Bundle, rows: Array, slot: Array, ridge: Array) -> tuple[Array, Expansion]:
    """The point and expansion of one anchor of each of the problems ``rows``."""
    point, *data = (t[rows, slot] for t in bundle[:4])
    return point, shift_by_ridge(Expansion(*data), point, ridge)
