"""Where a loss with a negative ridge is convex, by proof."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import as_floats, as_like, check_shape


@dataclass(frozen=True)
class ConvexRegion:
    """An ellipsoid ``|theta - c|^2 in W <= gamma`` in which the rows' Hessian is at least kappa I.

    A loss ``L(theta) - (lambda/2)|theta|^2`` with ``lambda <= kappa`` is convex there (within the
    ball), and perhaps nowhere else. So solvers evaluate it at points of the region alone: their
    cuts and chords then hold for all of it. Whoever makes a region answers for kappa.

    Args:
        center: c, ``(*B, d)``.
        shape: W, positive definite, ``(*B, d, d)``.
        size: gamma, ``(*B)``; infinite where the region is all of the space.
        curvature: kappa >= 0, ``(*B)``.

    Example:
        >>> region = ConvexRegion([0.0, 0.0], [[1.0, 0.0], [0.0, 4.0]], 1.0, 0.0)
        >>> region.excess(region.center)
        tensor([-1.], dtype=torch.float64)
    """

    center: Tensor
    shape: Tensor
    size: Tensor
    curvature: Tensor

    def __post_init__(self) -> None:
        center = as_floats("center", self.center)
        batch, d = tuple(center.shape[:-1]), center.shape[-1]
        object.__setattr__(self, "center", center)
        for name, shape in (("shape", (*batch, d, d)), ("size", batch), ("curvature", batch)):
            value = as_like(name, getattr(self, name), center)
            check_shape(name, value, shape)
            object.__setattr__(self, name, value)

    def tensors(self) -> tuple[Tensor, ...]:
        """The four of them; ``ConvexRegion(*tensors)`` is the same region."""
        return self.center, self.shape, self.size, self.curvature

    def excess(self, points: Tensor) -> Tensor:
        """``|theta - c|^2 in W - gamma`` of ``(*B, K, d)`` points: at most 0 in the region."""
        away = points - self.center[..., None, :]
        return ((away @ self.shape) * away).sum(-1) - self.size[..., None]

    def contains(self, points: Tensor) -> Tensor:
        """Whether ``(*B, K, d)`` points are in the region, or some roundings outside of it."""
        rounding = 32.0 * points.shape[-1] * torch.finfo(points.dtype).eps
        return ~(self.excess(points) > rounding * self.size[..., None])

    def pull_in(self, points: Tensor) -> Tensor:
        """Points ``(*B, K, d)`` that are outside, moved towards the centre up to the edge."""
        away = points - self.center[..., None, :]
        square = ((away @ self.shape) * away).sum(-1)
        outside = square > self.size[..., None]
        share = (self.size[..., None] / torch.where(outside, square, 1.0)).sqrt()
        inside = self.center[..., None, :] + share[..., None] * away
        return torch.where(outside[..., None], inside, points)
