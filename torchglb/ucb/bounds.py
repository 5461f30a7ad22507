"""What one evaluated point says of the whole set: a cut from above, a feasible point from below."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import dot, length, limits
from torchglb.linalg import Cut, cut_ball
from torchglb.optim.loop import Progress
from torchglb.rows.sums import Errors, Expansion


def certified_cut(
    point: Tensor, at: Expansion, errors: Errors, level: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    """The offset of the cut ``<g, theta> <= offset`` of an evaluated point, and what it pays.

    With errors dL and dg of the computed loss and gradient, ``L(point) + <grad L, theta - point>
    <= B`` gives ``<g, theta> <= B - L + <g, point> + |dL| + |dg| (|point| + S)`` for all theta of
    the ball. The rest pays for the sum itself, and for the products in :func:`cut_ball`.

    Args:
        point: ``(*, d)``, in the ball.
        at: the expansion there, as computed.
        errors: its errors.
        level: B, ``(*)``.
        radius: S, ``(*)``.

    Returns:
        The offset, which pays for all of it, and how much that is; both ``(*)``.
    """
    eps, d = limits(point)[0], point.shape[-1]
    along = dot(at.gradient, point)
    offset = level - at.loss + along
    paid = errors.loss + 2.0 * radius * errors.gradient
    sizes = abs(level) + abs(at.loss) + abs(offset)
    steep = torch.linalg.vector_norm(at.gradient, dim=-1)
    paid = paid + eps * (4.0 * sizes + (12.0 + 2.0 * d) * radius * steep)
    return offset + paid, paid


def rounded_off(steepness: Tensor, radius: Tensor) -> Tensor:
    """How much the loss may change where a point on a segment is rounded.

    That moves the point by some ``eps S``, and the loss by so much of its steepness (the sum of the
    sizes of all rows' slopes), which between two points is at most the sum of theirs: the slope of
    each row grows along a segment.
    """
    return 12.0 * limits(steepness)[0] * radius * steepness


def value_at_least(x: Tensor, point: Tensor, radius: Tensor) -> Tensor:
    """``<x, point>``, rounded down; for a point that may be some roundings outside of the ball."""
    paid = (8.0 + 0.5 * x.shape[-1]) * limits(x)[0]
    return (x * point).sum(-1) - paid * radius * length(x)


def value_of(cut: Cut, x: Tensor) -> Tensor:
    """The value of a cut, rounded up: its lengths and products are sums of d terms."""
    return cut.value + ((8 + x.shape[-1]) * limits(x)[0]) * cut.radius * cut.whole


def draw_back(
    point: Tensor, loss: Tensor, center: Tensor, center_loss: Tensor, level: Tensor
) -> Tensor:
    """The point itself if it is feasible, else where its chord to the centre crosses the level.

    The centre is feasible; on the segment the loss is at most linear, so the crossing is, too.
    """
    return center + feasible_share(loss, center_loss, level)[..., None] * (point - center)


def feasible_share(loss: Tensor, center_loss: Tensor, level: Tensor) -> Tensor:
    """Up to which share of it a segment from a feasible center stays feasible, by convexity.

    Feasible means some roundings below the level, so that the loss is not above it in another order
    of summation.
    """
    # an infinite level or loss has no rounding to stay clear of
    margin = 8 * limits(loss)[0] * (2.0 * abs(level) + abs(center_loss))
    safe = torch.where(abs(level) < float("inf"), level - margin, level)
    share = torch.where(loss <= safe, 1.0, (safe - center_loss) / (loss - center_loss))
    return share.clamp_max(1.0).clamp_min(0.0)


class Feasibility(NamedTuple):
    """A point, its loss as computed, and the most that it can be."""

    point: Tensor
    loss: Tensor
    at_most: Tensor


class TwoSidedBounds(NamedTuple):
    """What a search for a support value knows of every arm, and how long it has learnt nothing."""

    upper: Tensor  # (*)
    lower: Tensor  # (*)
    best: Tensor  # (*, d), a feasible point that attains lower
    normal: Tensor  # (*, d), the cut that gave upper: <normal, theta> <= offset
    offset: Tensor  # (*)
    upper_paid: Tensor  # (*), how much of upper pays for rounding
    lower_paid: Tensor  # (*), and of lower
    stalled: Tensor  # (*), steps in a row that hardly narrowed the gap

    def after(
        self,
        x: Tensor,
        point: Tensor,
        at: Expansion,
        errors: Errors,
        end: Feasibility,
        start: Feasibility,
        level: Tensor,
        radius: Tensor,
    ) -> TwoSidedBounds:
        """With one more cut and one more feasible point.

        Args:
            x: the arms, ``(*, d)``.
            point: an evaluated one, in the ball.
            at: the loss and its derivatives there, whose cut it is.
            errors: what rounding did to them.
            end: any point of the ball.
            start: a feasible one: so is some of the segment between the two.
            level: B.
            radius: S.
        """
        offset, paid = certified_cut(point, at, errors, level, radius)
        cut = cut_ball(x, at.gradient, offset, radius)
        bound, price = value_of(cut, x), cut.multiplier
        feasible = draw_back(end.point, end.at_most, start.point, start.at_most, level)
        ideal = draw_back(end.point, end.loss, start.point, start.loss, level)
        value = value_at_least(x, feasible, radius)
        # an infinite level pays infinitely much, but not where it costs nothing
        upper_paid = torch.where(price > 0, price * paid, 0.0)
        lower_paid = ((x * ideal).sum(-1) - value).clamp_min(0.0)
        tighter, better = bound < self.upper, value > self.lower
        upper = torch.where(tighter, bound, self.upper)
        lower = torch.where(better, value, self.lower)
        narrowed = upper - lower < 0.9 * (self.upper - self.lower)
        return TwoSidedBounds(
            upper,
            lower,
            torch.where(better[..., None], feasible, self.best),
            torch.where(tighter[..., None], at.gradient, self.normal),
            torch.where(tighter, offset, self.offset),
            torch.where(tighter, upper_paid, self.upper_paid),
            torch.where(better, lower_paid, self.lower_paid),
            torch.where(narrowed, 0.0, self.stalled + 1.0),
        )

    def progress(self, tol: float, patience: int) -> Progress:
        """Whether ``upper - lower <= tol (1 + |upper|)``, up to what rounding explains.

        What both bounds pay for rounding is not theirs to narrow, and what they would be without it
        is uncertain by as much again. A search that has stalled for more than ``patience`` steps is
        given up.
        """
        gap = self.upper - self.lower
        explained = 2.0 * (self.upper_paid + self.lower_paid)
        close = gap <= tol * (1.0 + self.upper.abs()) + explained
        return Progress(close, self.stalled > patience, torch.isfinite(gap))
