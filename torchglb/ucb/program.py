"""The optimistic program, stated once for all of its solvers.

``h(x) = max <x, theta>  subject to  |theta| <= S  and  L(theta) <= B``

``L`` may be weighted (EMK) or regularised (OFULog-r); ``B`` is the level of a likelihood-ratio set.
A negative ridge (the centred radius) needs a region in which the loss is convex by proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_floats,
    as_like,
    check_same,
    check_shape,
    refuse,
    refuse_flag,
)
from torchglb.domain import Ball, check_ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.recording import at_hand


@dataclass(frozen=True)
class SupportResult:
    """What a solve of the program returns, for every arm; each is ``(*B, K)`` but ``theta``.

    Attributes:
        upper: a certified upper bound on ``h(x)``; this is the value to be optimistic with.
        lower: ``<x, theta>``, a certified lower bound.
        theta: ``(*B, K, d)``, a feasible point that attains ``lower``; NaN where none is known.
        multiplier: the multiplier of the loss constraint, ``dh/dB``.
        gap: ``upper - lower``.
        status: of :class:`torchglb.optim.Status`.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> found = glb.support(program, [[1.0, 0.0]])
        >>> bool(found.lower <= found.upper), found.theta.shape
        (True, torch.Size([1, 2]))
    """

    upper: Tensor
    lower: Tensor
    theta: Tensor
    multiplier: Tensor
    gap: Tensor
    status: Tensor


@dataclass(frozen=True)
class ConvexRegion:
    """An ellipsoid ``|theta - c|^2 in W <= gamma`` in which the rows' Hessian is at least kappa I.

    A loss ``L(theta) - (lambda/2)|theta|^2`` with ``lambda <= kappa`` is convex there (within the
    ball), and perhaps nowhere else. So solvers evaluate it at points of the region alone: their
    cuts and chords then hold for all of it. Whoever makes a region answers for kappa.

    Args:
        center: c, ``(*B, d)``.
        shape: W, symmetric and positive definite, ``(*B, d, d)``.
        size: gamma >= 0, ``(*B)``; infinite where the region is all of the space.
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
        if not center.ndim:
            check_shape("center", center, ("*B", "d"))
        batch, d = tuple(center.shape[:-1]), center.shape[-1]
        object.__setattr__(self, "center", center)
        for name, shape in (("shape", (*batch, d, d)), ("size", batch), ("curvature", batch)):
            value = as_like(name, getattr(self, name), center)
            check_shape(name, value, shape)
            object.__setattr__(self, name, value)
        if at_hand(*self.tensors()):
            self._check_values()

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> ConvexRegion:
        """From :meth:`tensors` of a region that was proven; nobody looks at them again."""
        region = object.__new__(cls)
        for field, tensor in zip(fields(cls), tensors, strict=True):
            object.__setattr__(region, field.name, tensor)
        return region

    def _check_values(self) -> None:
        """Refuses what is no ellipsoid, but for rounding."""
        center, W, size, curvature = (t.detach() for t in self.tensors())
        checks = ValueChecks()
        checks.finite("center", center)
        checks.finite("shape", W)
        checks.require("size", size >= 0, "non-negative numbers", size)
        proven = (curvature >= 0) & (curvature < math.inf)
        checks.require("curvature", proven, "non-negative finite numbers", curvature)
        checks.settle()
        lost = 64.0 * W.shape[-1] * torch.finfo(W.dtype).eps * W.abs().amax((-2, -1))
        even = (W - W.mT).abs() <= lost[..., None, None]
        checks.require("shape", even, "a symmetric matrix", W)
        least = torch.linalg.eigvalsh(W)[..., 0]
        expected = "a positive definite matrix, all of whose eigenvalues are above 0"
        checks.require("shape", least >= -lost, expected, least)
        checks.settle()

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


@dataclass(frozen=True)
class SublevelProgram:
    """The feasible set ``{theta : |theta| <= S, L(theta) <= B}`` of a batch of programs.

    Args:
        likelihood: the loss L, over rows of batch shape ``*B``.
        domain: the ball of radius S.
        level: B, of shape ``*B``; a tensor or NumPy array of any real dtype, or numbers. Held, not
            copied, as the rows of the loss are.
        region: for a loss with a negative ridge, where it is convex; then the set is the part of
            the sublevel set in that region, and bounds are bounds over that part.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> glb.support(program, [[1.0, 0.0], [0.0, 1.0]]).upper.shape
        torch.Size([2])
    """

    likelihood: NegativeLogLikelihood
    domain: Ball
    level: Tensor
    region: ConvexRegion | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.likelihood, NegativeLogLikelihood):
            raise refuse("likelihood", "a NegativeLogLikelihood", type(self.likelihood).__name__)
        check_ball(self.domain, self.likelihood.dim, self.likelihood.batch_shape)
        refuse_flag("level", self.level)
        object.__setattr__(self, "level", as_like("level", self.level, self.likelihood.X))
        check_shape("level", self.level, self.likelihood.batch_shape)
        if self.region is not None:
            if not isinstance(self.region, ConvexRegion):
                raise refuse("region", "a ConvexRegion or None", repr(self.region))
            check_same("region", self.region.center, "likelihood.X", self.likelihood.X)
            shape = (*self.likelihood.batch_shape, self.likelihood.dim)
            check_shape("region", self.region.center, shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that defines the program, with the full batch shape."""
        radius = self.domain.radius_like(self.level).expand(self.level.shape)
        region = () if self.region is None else self.region.tensors()
        return (*self.likelihood.tensors(), *region, radius, self.level)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> SublevelProgram:
        """The same program over other tensors, in the order of :meth:`tensors`.

        A radius that is a number stays one: it is not of any dtype.
        """
        *data, radius, level = tensors
        region = None
        if self.region is not None:
            count = len(self.region.tensors())
            data, region = data[:-count], ConvexRegion.of(data[-count:])
        loss = self.likelihood.rebuild(data)
        domain = self.domain
        if isinstance(domain.radius, Tensor):
            domain = domain.resized(radius)
        return SublevelProgram(loss, domain, level, region)

    def checked_arms(self, arms: ArrayLike, *, values: bool = True) -> Tensor:
        """Arms ``(*B, K, d)`` as a tensor; refused by their values, as those of the program are."""
        arms = as_like("arms", arms, self.likelihood.X)
        check_shape("arms", arms, (*self.likelihood.batch_shape, "K", self.likelihood.dim))
        if values:
            checks = ValueChecks()
            checks.finite("arms", arms)
            self.require_values(checks)
            checks.settle()
        return arms

    def require_values(self, checks: ValueChecks) -> None:
        """Adds to ``checks`` that the loss is convex, and its rewards are in the support.

        What is not finite in rows or level is not refused: it stays in its element, whose status
        says so.
        """
        least = 0.0 if self.region is None else -self.region.curvature
        self.likelihood.require_convex(checks, least_ridge=least)
        self.likelihood.require_rewards(checks)

    def refuse_region(self, solver: str) -> None:
        """Refuses a program that is convex in a region only, for solvers that know no regions."""
        if self.region is not None:
            expected = f"a program without a region for the solver {solver!r} (use 'native')"
            raise refuse("program", expected, "one that is convex in a region only")


def check_program(program: object) -> None:
    """Refuses anything but a program."""
    if not isinstance(program, SublevelProgram):
        expected = "a SublevelProgram, such as SublevelProgram(loss, ball, level)"
        raise refuse("program", expected, type(program).__name__)
