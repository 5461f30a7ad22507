"""Anchors: points at which loss, gradient and Hessian are carried forward exactly.

At a fixed point the loss changes by one term per observation, so the cut of every anchor is exact
again in the next round at a cost of O(d^2), without a pass over the history. Each cut bounds every
arm from above; each anchor, drawn back to the level along the chord to the centre, bounds every arm
from below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion
from torchglb.ucb.bounds import cut_offset, draw_back, trace
from torchglb.ucb.taylor import shift_by_ridge


class Bundle(NamedTuple):
    """A anchors for each of N problems, with the data's loss there (no ridge)."""

    points: Tensor  # (N, A, d)
    loss: Tensor  # (N, A)
    gradient: Tensor  # (N, A, d)
    hessian: Tensor  # (N, A, d, d)
    used: Tensor  # (N, A): the last round in which the anchor decided something


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


def carry_forward(bundle: Bundle, family: GLMFamily, x: Tensor, r: Tensor, w: Tensor) -> None:
    """Adds observations ``x (N, k, d)``, ``r`` and ``w (N, k)`` to every anchor: O(A k d^2)."""
    terms = family.loss_terms(bundle.points @ x.mT, r[..., None, :])  # (N, A, k)
    loss, slope, curvature = (t * w[..., None, :] for t in terms)
    products = (x[..., :, None] * x[..., None, :]).flatten(-2)  # (N, k, d^2)
    bundle.loss.add_(loss.sum(-1))
    bundle.gradient.baddbmm_(slope, x)
    bundle.hessian.flatten(-2).baddbmm_(curvature, products)


def insert(
    bundle: Bundle, rows: Tensor, slot: Tensor, point: Tensor, at: Expansion, now: int
) -> None:
    """Puts one new anchor into the given slot of each of the problems ``rows``, in place."""
    stamp = torch.full_like(at.loss, float(now))
    for old, new in zip(bundle, (point, *at, stamp), strict=True):
        old.index_put_((rows, slot), new)


class Round(NamedTuple):
    """The programs of one round, N at once."""

    arms: Tensor  # (N, K, d)
    level: Tensor  # B, (N)
    hub: Tensor  # a feasible centre, (N, d)
    hub_loss: Tensor  # an upper bound on its loss, (N)
    ridge: Tensor  # lambda, (N)
    radius: Tensor  # S, (N)
    pull: Tensor  # the size of what is rounded, (N); see bounds.pull_of_rows

    def pick(self, index: Tensor) -> Round:
        """The same for some of the problems."""
        return Round(*(t[index] for t in self))


class Scan(NamedTuple):
    """What the anchors say of every arm."""

    upper: Tensor  # (N, K)
    cut: Tensor  # (N, K), the anchor behind upper
    lower: Tensor  # (N, K)
    touch: Tensor  # (N, K), the anchor behind lower


def scan(bundle: Bundle, task: Round, steps: int, roundings: float) -> Scan:
    """Bounds on every arm from all anchors, O(K A d), no pass.

    Args:
        bundle: the anchors.
        task: arms, levels and centres.
        steps: how many cuts may be combined.
        roundings: that the carried sums have seen.
    """
    arms, level, hub, hub_loss, ridge, radius, pull = task
    B, S, size, lam = (t[..., None] for t in (level, radius, pull, ridge))
    points = bundle.points
    loss = torch.addcmul(bundle.loss, lam, points.square().sum(-1), value=0.5)
    gradient = torch.addcmul(bundle.gradient, lam[..., None], points)
    curvature = trace(bundle.hessian) + points.shape[-1] * lam
    offset = cut_offset(points, loss, gradient, curvature, B, S, size, roundings)
    length = torch.linalg.vector_norm(gradient, dim=-1).clamp_min(torch.finfo(arms.dtype).tiny)
    units = gradient / length[..., None]
    upper, cut = combine_cuts(arms, units, offset / length, radius, steps)
    drawn = draw_back(points, loss, hub[..., None, :], hub_loss[..., None], B)
    lower, touch = (arms @ drawn.mT).max(-1)
    return Scan(upper, cut, lower, touch)


def mark_used(bundle: Bundle, found: Scan, now: int) -> None:
    """Stamps the anchors that bound some arm: they stay, the others make room."""
    bundle.used.scatter_(-1, found.cut, float(now)).scatter_(-1, found.touch, float(now))


def combine_cuts(
    arms: Tensor, units: Tensor, reach: Tensor, radius: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
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
    eps = torch.finfo(arms.dtype).eps
    S = radius[..., None, None]
    near = torch.minimum(torch.maximum(reach[..., None, :], -S), S)  # (N, 1, A)
    chord = ((S - near) * (S + near)).sqrt()
    slack = near / chord.clamp_min(torch.finfo(arms.dtype).tiny)
    left, paid = arms, torch.zeros_like(arms[..., 0])
    weights = paid
    first = None
    for step in range(steps):
        along = left @ units.mT  # (N, K, A)
        squared = left.square().sum(-1, keepdim=True)
        across = (squared - along * along).clamp_min(0.0).sqrt()
        weight = (along - slack * across).clamp_min(0.0)
        value = torch.where(weight > 0, near * along + chord * across, S * squared.sqrt())
        choice = value.argmin(-1, keepdim=True)
        alpha = weight.gather(-1, choice)
        at_reach = reach[..., None, :].expand_as(value).gather(-1, choice)
        normal = units.gather(-2, choice.expand(*choice.shape[:-1], units.shape[-1]))
        left = left - alpha * normal
        # a cut without a slope reaches to infinity and has no weight: it pays nothing
        paid = paid + torch.where(alpha > 0, alpha * at_reach, 0.0)[..., 0]
        weights = weights + alpha[..., 0]
        first = choice[..., 0] if step == 0 else first
    assert first is not None
    # whatever was chosen, and however it was rounded, the weights certify this value
    length = torch.linalg.vector_norm(left, dim=-1)
    sizes = length + weights + torch.linalg.vector_norm(arms, dim=-1)
    scale = paid.abs() + radius[..., None] * sizes
    return paid + radius[..., None] * length + 8 * eps * scale, first


def at_anchor(
    bundle: Bundle, rows: Tensor, slot: Tensor, ridge: Tensor
) -> tuple[Tensor, Expansion]:
    """The point and expansion of one anchor of each of the problems ``rows``."""
    point, *data = (t[rows, slot] for t in bundle[:4])
    return point, shift_by_ridge(Expansion(*data), point, ridge)
