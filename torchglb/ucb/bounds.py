"""What one evaluated point says of the whole set: a cut from above, a feasible point from below."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.arrays import Array, dot, length, library, limits
from torchglb.families import GLMFamily
from torchglb.linalg import cut_ball


def pull_of_rows(family: GLMFamily, X: Tensor, r: Tensor, w: Tensor | None) -> Tensor:
    """``sum_s w_s |x_s| c_s / g``, with ``c_s`` the larger of ``|r_s|`` and the rewards' range.

    S times this bounds the terms ``r z`` of the loss and, for bounded rewards, those of the slope:
    the sizes that are rounded, even where they cancel in the sum.

    Args:
        family: the GLM family.
        X: rows ``(*B, n, d)``.
        r: rewards ``(*B, n)``.
        w: weights ``(*B, n)`` or None.
    """
    ends = [abs(end) for end in family.reward_range if math.isfinite(end)]
    largest = r.abs().clamp_min(max(ends, default=0.0)) / family.dispersion
    size = torch.linalg.vector_norm(X, dim=-1) * largest
    return (size if w is None else size * w).sum(-1)


def cut_offset(
    point: Array,
    loss: Array,
    gradient: Array,
    curvature: Array,
    level: Array,
    radius: Array,
    pull: Array,
    roundings: float,
) -> Array:
    """``b`` of the cut ``<grad L(point), theta> <= b``; by convexity all of ``{L <= B}`` obeys it.

    Rounding is paid for, so that b errs upwards: the terms of the loss add up to at most
    ``|L| + 2 S pull`` and those of the gradient, times S, to ``S pull + S^2 tr H``.

    Args:
        point: ``(*, d)``.
        loss: L there, ``(*)``.
        gradient: ``(*, d)``.
        curvature: the trace of the Hessian, ``(*)``.
        level: B, broadcasts with ``(*)``.
        radius: S, broadcasts with ``(*)``.
        pull: of :func:`pull_of_rows`, broadcasts with ``(*)``.
        roundings: how many roundings of these sizes the sums behind the loss have seen.
    """
    offset = level - loss + dot(gradient, point)
    size = abs(level) + abs(loss) + abs(offset) + radius * (pull + radius * curvature)
    return offset + (roundings * limits(point)[0]) * size


def trace(matrix: Array) -> Array:
    """The sum of the diagonal of ``(*, d, d)``."""
    return library(matrix).einsum("...ii->...", matrix)


def roundings_of(count: int) -> float:
    """How many roundings to pay for in a sum of so many terms, whatever order they are added in."""
    return 4.0 + math.sqrt(count)


def cut_value(x: Array, normal: Array, offset: Array, radius: Array) -> Array:
    """:func:`cut_ball`'s value, rounded up."""
    return cut_ball(x, normal, offset, radius).value + 8 * limits(x)[0] * radius * length(x)


def draw_back(point: Array, loss: Array, hub: Array, hub_loss: Array, level: Array) -> Array:
    """The point itself if it is feasible, else where its chord to a feasible hub crosses the level.

    On the segment the loss is at most linear, so the crossing is feasible too. Feasible means some
    roundings below the level, so that the loss is not above it in another order of summation.
    """
    xp = library(point)
    # an infinite level or loss has no rounding to stay clear of
    margin = 8 * limits(point)[0] * (2.0 * abs(level) + abs(hub_loss))
    safe = xp.where(abs(level) < float("inf"), level - margin, level)
    share = xp.where(loss <= safe, 1.0, (safe - hub_loss) / (loss - hub_loss))
    return hub + xp.clip(share, 0.0, 1.0)[..., None] * (point - hub)
