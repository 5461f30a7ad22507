"""What every confidence set can do, from the slack of a point and the support of a direction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_same, check_shape, refuse
from torchglb.families import GLMFamily


class Interval(NamedTuple):
    """A two-sided interval, valid at all times at once with the set it comes from."""

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        """upper - lower."""
        return self.upper - self.lower


class ConfidenceSet(ABC):
    """A snapshot of a convex confidence set for theta; shapes start with the batch ``*B``."""

    family: GLMFamily

    @property
    @abstractmethod
    def center(self) -> Tensor:
        """A point of the set, ``(*B, d)``."""

    @abstractmethod
    def slack(self, theta: Tensor) -> Tensor:
        """How far inside a point is: >= 0 in the set, < 0 outside.

        ``theta`` is ``(*B, d)``, or ``(*B, P, d)`` for P points of each set.
        """

    @abstractmethod
    def upper_bound(self, arms: Tensor, **options: Any) -> Tensor:
        """A certified upper bound on ``max <x, theta>`` over the set, for ``arms (*B, K, d)``."""

    # ---- what follows --------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """d."""
        return self.center.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """``*B``."""
        return self.center.shape[:-1]

    def contains(self, theta: Tensor) -> Tensor:
        """Whether a point lies in the set."""
        return self.slack(theta) >= 0

    def interval(self, x: Tensor, scale: str = "linear", **options: Any) -> Interval:
        """Where ``<x, theta>`` (or the mean reward) can be, over the whole set.

        Args:
            x: a feature vector ``(*B, d)``, or ``(*B, K, d)``.
            scale: ``"linear"`` for ``<x, theta>``, ``"mean"`` for ``mu(<x, theta>)``.
            options: of the solver behind the bound.
        """
        check_choice("scale", scale, ("linear", "mean"))
        check_same("x", x, "the set", self.center)
        single = x.ndim == self.center.ndim
        check_shape("x", x, (*self.batch_shape, *(() if single else ("K",)), self.dim))
        arms = x[..., None, :] if single else x
        count = arms.shape[-2]
        both = self.upper_bound(torch.cat([arms, -arms], dim=-2), **options)
        upper, lower = both[..., :count], -both[..., count:]
        if single:
            upper, lower = upper[..., 0], lower[..., 0]
        if scale == "mean":
            lower, upper = self.family.mean(lower), self.family.mean(upper)
        return Interval(lower, upper)

    def contrast(self, x1: Tensor, x2: Tensor, **options: Any) -> Interval:
        """Where ``<x1, theta> - <x2, theta>`` can be: which arm is better, and by how much."""
        check_same("x2", x2, "x1", x1)
        check_shape("x2", x2, x1.shape)
        return self.interval(x1 - x2, **options)

    def intersect(self, other: ConfidenceSet) -> IntersectionSet:
        """The points of both; the running intersection of a sequence is valid at the same delta."""
        return IntersectionSet([self, other])

    # ---- the plane -----------------------------------------------------------------------

    def boundary(self, num: int = 200) -> Tensor:
        """Points of the boundary for d = 2, counter-clockwise, ``(*B, num, 2)``."""
        directions, radii = self._polar(num)
        return self.center[..., None, :] + radii[..., None] * directions

    def volume(self) -> Tensor:
        """The area for d = 2, ``(*B)``: the integral of ``radius^2 / 2`` over the angle."""
        _, radii = self._polar(2880)
        return radii.square().sum(-1) * (math.pi / 2880)

    def _polar(self, num: int) -> tuple[Tensor, Tensor]:
        """Directions ``(*B, num, 2)`` and how far the set reaches from its centre along them."""
        if self.dim != 2:
            raise refuse("dim", "2 for boundary and area of this set", self.dim)
        if isinstance(num, bool) or not isinstance(num, int) or num < 3:
            raise refuse("num", "an integer of at least 3", repr(num))
        center = self.center
        angle = torch.arange(num, dtype=center.dtype, device=center.device) * (2 * math.pi / num)
        directions = torch.stack([angle.cos(), angle.sin()], dim=-1)
        directions = directions.expand(*self.batch_shape, num, 2)
        with torch.no_grad():
            return directions, self.reach(directions)

    def reach(self, directions: Tensor) -> Tensor:
        """The largest t with ``center + t v`` in the set, for unit vectors ``(*B, num, d)``."""
        low = torch.zeros_like(directions[..., 0])
        high = self._outer_radius(directions)
        for _ in range(60):  # bisection: the slack of a convex set changes sign once along a ray
            middle = 0.5 * (low + high)
            inside = self.slack(self.center[..., None, :] + middle[..., None] * directions) >= 0
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        return low

    @abstractmethod
    def _outer_radius(self, directions: Tensor) -> Tensor:
        """A distance along each direction beyond which no point of the set lies."""


class IntersectionSet(ConfidenceSet):
    """The intersection of several confidence sets.

    Its bounds are the least of the members' bounds: valid, though the true support of the
    intersection may be smaller still.
    """

    members: list[ConfidenceSet]

    def __init__(self, members: list[ConfidenceSet]) -> None:
        flat: list[ConfidenceSet] = []
        for member in members:
            flat += member.members if isinstance(member, IntersectionSet) else [member]
        for member in flat[1:]:
            check_same("other", member.center, "the set", flat[0].center)
            check_shape("other", member.center, flat[0].center.shape)
        self.members = flat
        self.family = flat[0].family

    @property
    def center(self) -> Tensor:
        """The centre of the newest member, which may lie outside the others."""
        return self.members[-1].center

    def slack(self, theta: Tensor) -> Tensor:
        """The least slack of the members."""
        return torch.stack([member.slack(theta) for member in self.members]).amin(0)

    def upper_bound(self, arms: Tensor, **options: Any) -> Tensor:
        """The least of the members' bounds."""
        bounds = [member.upper_bound(arms, **options) for member in self.members]
        return torch.stack(bounds).amin(0)

    def _outer_radius(self, directions: Tensor) -> Tensor:
        return self.members[-1]._outer_radius(directions)
