"""What one evaluated point says of the whole set: a cut from above, a feasible point from below."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import Array, at_least, at_most, library, limits
from torchglb.families import GLMFamily
from torchglb.linalg import cut_ball


def largest_reward(family: GLMFamily) -> float:
    """The largest |r| that the family knows of."""
    return max((abs(end) for end in family.reward_range if math.isfinite(end)), default=0.0)


def pull_of_rows(family: GLMFamily, lengths: Array, r: Array, w: Array | None) -> Array:
    """``sum_s w_s |x_s| c_s / g``, with ``c_s`` the larger of ``|r_s|`` and the rewards' range.

    S times this bounds the terms ``r z`` of the loss and, for bounded rewards, those of the slope:
    the sizes that are rounded, even where they cancel in the sum.

    Args:
        family: the GLM family.
        lengths: of the rows, ``(*B, n)``.
        r: rewards ``(*B, n)``.
        w: weights ``(*B, n)`` or None.
    """
    size = lengths * at_least(abs(r), largest_reward(family))
    size = size if w is None else size * w
    return size.sum(-1) / family.dispersion


class Tangent(NamedTuple):
    """The cut ``<grad L(point), theta> <= offset``; by convexity all of ``{L <= B}`` obeys it.

    As computed, the offset may be too small by some times ``rounding``.
    """

    offset: Array
    rounding: Array


def tangent(
    along: Array, loss: Array, curvature: Array, level: Array, radius: Array, pull: Array
) -> Tangent:
    """The cut of an evaluated point, and what one rounding of the sums behind it may do to it.

    The terms of the loss add up to at most ``|L| + 2 S pull`` and those of the gradient, times S,
    to ``S pull + S^2 tr H``. All arguments broadcast.

    Args:
        along: ``<grad L, point>``.
        loss: L there.
        curvature: the trace of the Hessian.
        level: B.
        radius: S.
        pull: of :func:`pull_of_rows`.
    """
    offset = level - loss + along
    size = abs(level) + abs(loss) + abs(offset) + radius * (pull + radius * curvature)
    return Tangent(offset, limits(loss)[0] * size)


def trace(matrix: Array) -> Array:
    """The sum of the diagonal of ``(*, d, d)``."""
    d = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], d * d)[..., :: d + 1].sum(-1)


def roundings_of(count: int) -> float:
    """How many roundings to pay for in a sum of so many terms, whatever order they are added in."""
    return 4.0 + math.sqrt(count)


def cut_value(x: Array, normal: Array, offset: Array, radius: Array) -> Array:
    """``max <x, theta>`` over the ball and the half-space, rounded up."""
    cut = cut_ball(x, normal, offset, radius)
    return cut.value + (8 * limits(x)[0]) * radius * cut.whole


def draw_back(point: Array, loss: Array, hub: Array, hub_loss: Array, level: Array) -> Array:
    """The point itself if it is feasible, else where its chord to a feasible hub crosses the level.

    On the segment the loss is at most linear, so the crossing is feasible too.
    """
    return hub + feasible_share(loss, hub_loss, level)[..., None] * (point - hub)


def feasible_share(loss: Array, hub_loss: Array, level: Array) -> Array:
    """Up to which share of it a segment from a feasible hub stays feasible, by convexity.

    Feasible means some roundings below the level, so that the loss is not above it in another order
    of summation.
    """
    xp = library(loss)
    # an infinite level or loss has no rounding to stay clear of
    margin = 8 * limits(loss)[0] * (2.0 * abs(level) + abs(hub_loss))
    safe = xp.where(abs(level) < float("inf"), level - margin, level)
    share = xp.where(loss <= safe, 1.0, (safe - hub_loss) / (loss - hub_loss))
    return at_least(at_most(share, 1.0), 0.0)


class Known(NamedTuple):
    """What a search for a support value knows of every arm, and how long it has learnt nothing."""

    upper: Tensor  # (*)
    lower: Tensor  # (*)
    best: Tensor  # (*, d), a feasible point that attains lower
    normal: Tensor  # (*, d), the cut that gave upper: <normal, theta> <= offset
    offset: Tensor  # (*)
    stalled: Tensor  # (*), steps in a row that hardly narrowed the gap

    @classmethod
    def of(cls, state: Any) -> Known:
        """The part of a larger state that has these names."""
        return cls(*(getattr(state, name) for name in cls._fields))

    def after(
        self, bound: Tensor, normal: Tensor, offset: Tensor, reached: Tensor, point: Tensor
    ) -> Known:
        """With one more cut, which gives the value ``bound``, and one more feasible point."""
        tighter, better = bound < self.upper, reached > self.lower
        upper = torch.where(tighter, bound, self.upper)
        lower = torch.where(better, reached, self.lower)
        narrowed = upper - lower < 0.9 * (self.upper - self.lower)
        return Known(
            upper,
            lower,
            torch.where(better[..., None], point, self.best),
            torch.where(tighter[..., None], normal, self.normal),
            torch.where(tighter, offset, self.offset),
            torch.where(narrowed, 0.0, self.stalled + 1.0),
        )
