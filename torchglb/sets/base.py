"""What every confidence set can do, from the slack of a point and the support of a direction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_tensor, check_choice, check_shape, refuse
from torchglb.choices import SCALES, ScaleName
from torchglb.families import GLMFamily
from torchglb.recording import is_transformed, without_autocast
from torchglb.rounding import EVALUATION, round_up, two_sum
from torchglb.ucb.solvers.settings import BoundSettings

#: rounds in which the coordinates that make a set round are found, and spokes of each
LOOKS, SPOKES = 4, 24


class Interval(NamedTuple):
    """A two-sided interval, valid at all times at once with the set it comes from.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> lower, upper = sequence.current().interval([1.0, 0.0], scale="mean")
        >>> bool(0 <= lower < upper <= 1)
        True
    """

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        """upper - lower."""
        return self.upper - self.lower


def on_mean_scale(family: GLMFamily, z: Interval) -> Interval:
    """``mu`` of both ends, rounded outwards; of infinite ones, the ends of the rewards' range.

    Example:
        >>> import torchglb as glb
        >>> ends = torch.tensor([-torch.inf, 0.0])
        >>> on_mean_scale(glb.Bernoulli(), Interval(*ends))
        Interval(lower=tensor(0.), upper=tensor(0.5000))
    """
    (lower, below), (upper, above) = (_mean_and_error(family, end) for end in z)
    least, most = family.reward_range
    lower, upper = (lower - below).clamp_min(least), (upper + above).clamp_max(most)
    # on the way to underflow a mean loses its digits, and only an infinite end attains the least
    known = torch.finfo(upper.dtype)
    above_least = torch.nextafter(torch.full_like(upper, least), torch.full_like(upper, torch.inf))
    above_least = above_least.clamp_min(least + known.tiny / known.eps)
    lower = torch.where(lower <= above_least, least, lower)
    upper = torch.where((upper <= above_least) & ~torch.isinf(z.upper), above_least, upper)
    # a mean that saturates is larger than that
    upper = torch.where(upper > 0.99 * known.max, torch.inf, upper)
    # 0 - 0 is 0, not -0
    return Interval(0.0 - round_up(-lower, z.lower.dtype), round_up(upper, z.upper.dtype))


def _mean_and_error(family: GLMFamily, z: Tensor) -> tuple[Tensor, Tensor]:
    """``mu(z)``, and what evaluating it may lose: some eps of itself, and of what moves with z."""
    z = z.double() if z.is_cpu else z  # on a CPU float32 is a storage format
    infinite = torch.isinf(z)
    low, high = (torch.full_like(z, end) for end in family.reward_range)
    z = torch.where(infinite, torch.where(z > 0, 1.0, -1.0), z)
    mean = family.mean(z)
    with torch.no_grad():
        error = EVALUATION * torch.finfo(z.dtype).eps * (mean.abs() + z.abs() * family.variance(z))
    mean = torch.where(infinite, torch.where(z > 0, high, low), mean)
    return mean, torch.where(infinite, 0.0, error)


@dataclass(frozen=True, eq=False)
class Event:
    """On which sets are valid: ``theta*`` in all of them, with probability at least 1 - delta.

    Sets share an event if they carry the same object, as all sets of one confidence sequence do.

    Args:
        delta: the failure probability.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> sequence.current().event.delta
        0.05
    """

    delta: float


class ConfidenceSet(ABC):
    """A snapshot of a convex confidence set for theta; shapes start with the batch ``*B``.

    Points and directions are ``(*B, d)``, or ``(*B, K, d)`` for K of each set; lists of numbers
    are taken too. Answers have the shape of the question without its last axis.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> region = sequence.current()
        >>> isinstance(region, ConfidenceSet)
        True
        >>> region.interval([[1.0, 0.0], [0.0, 1.0]]).upper.shape
        torch.Size([2])
    """

    family: GLMFamily
    #: on which the set is valid; None where whoever built it did not say
    event: Event | None = None

    @property
    @abstractmethod
    def center(self) -> Tensor:
        """A point of the set, ``(*B, d)``."""

    @abstractmethod
    def _slack(self, points: Tensor) -> Tensor:
        """The slack of points ``(*B, P, d)``."""

    @abstractmethod
    def _upper_bound(self, arms: Tensor, **options: Unpack[BoundSettings]) -> Tensor:
        """The bound for arms ``(*B, K, d)``."""

    @abstractmethod
    def _reach(self, origin: Tensor, directions: Tensor, tol: float | None = None) -> Tensor:
        """The largest t with ``origin + t v`` in the set, for an origin in it, ``(*B, d)``.

        ``directions`` are unit vectors ``(*B, P, d)``; ``inf`` where the set never ends. It may be
        short by a share of ``tol``; by default only by what rounding leaves.
        """

    @abstractmethod
    def __getitem__(self, index: int | slice) -> ConfidenceSet:
        """The sets of some elements, by an index of the first batch axis."""

    # ---- what follows --------------------------------------------------------------------

    @property
    def _like(self) -> Tensor:
        """A tensor ``(*B, d)`` with the dtype and device of the set."""
        return self.center

    @property
    def dim(self) -> int:
        """d."""
        return self._like.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """``*B``."""
        return self._like.shape[:-1]

    @property
    def events(self) -> tuple[Event, ...] | None:
        """The different events on which the set is valid; None if one is not known."""
        return None if self.event is None else (self.event,)

    @property
    def delta(self) -> float | None:
        """The failure probability, by the union bound over :attr:`events`; None if not known."""
        return None if self.events is None else sum(event.delta for event in self.events)

    def slack(self, theta: ArrayLike) -> Tensor:
        """How far inside a point is: >= 0 in the set, < 0 outside."""
        points, single = self._as_points("theta", theta)
        slack = self._slack(points)
        return slack[..., 0] if single else slack

    def contains(self, theta: ArrayLike) -> Tensor:
        """Whether a point lies in the set."""
        return self.slack(theta) >= 0

    @without_autocast
    def upper_bound(self, arms: ArrayLike, **options: Unpack[BoundSettings]) -> Tensor:
        """A certified upper bound on ``max <x, theta>`` over the set.

        Args:
            arms: directions x.
            options: of the solver behind the bound, if there is one
                (:class:`torchglb.ucb.Native`).
        """
        points, single = self._as_points("arms", arms)
        bound = self._upper_bound(points, **options)
        return bound[..., 0] if single else bound

    @without_autocast
    def interval(
        self, x: ArrayLike, scale: ScaleName = "linear", **options: Unpack[BoundSettings]
    ) -> Interval:
        """Where ``<x, theta>`` (or the mean reward) can be, over the whole set.

        Args:
            x: feature vectors.
            scale: ``"linear"`` for ``<x, theta>``, ``"mean"`` for ``mu(<x, theta>)``.
            options: of the solver behind the bound, if there is one
                (:class:`torchglb.ucb.Native`).
        """
        check_choice("scale", scale, SCALES)
        arms, single = self._as_points("x", x)
        both = self._upper_bound(torch.cat([arms, -arms], dim=-2), **options)
        upper, minus_lower = both.chunk(2, dim=-1)
        if single:
            upper, minus_lower = upper[..., 0], minus_lower[..., 0]
        found = Interval(-minus_lower, upper)
        return on_mean_scale(self.family, found) if scale == "mean" else found

    def contrast(self, x1: ArrayLike, x2: ArrayLike, **options: Unpack[BoundSettings]) -> Interval:
        """Where ``<x1, theta> - <x2, theta>`` can be: which arm is better, and by how much."""
        first, single = self._as_points("x1", x1)
        second, also_single = self._as_points("x2", x2)
        if first.shape != second.shape or single != also_single:
            raise refuse("x2", f"the shape of x1 {tuple(first.shape)}", tuple(second.shape))
        both = torch.cat([first, second], dim=-2), torch.cat([second, first], dim=-2)
        upper, minus_lower = self.difference_bound(*both, **options).chunk(2, dim=-1)
        if single:
            upper, minus_lower = upper[..., 0], minus_lower[..., 0]
        return Interval(-minus_lower, upper)

    @without_autocast
    def difference_bound(
        self, first: Tensor, second: Tensor, **options: Unpack[BoundSettings]
    ) -> Tensor:
        """A certified upper bound on ``max <x1 - x2, theta>`` over the set, ``(*B, K)``.

        In float32 it pays for what the difference was rounded by; in float64 every bound does.

        Args:
            first: x1, ``(*B, K, d)``, in the dtype of the set.
            second: x2.
            options: as in :meth:`upper_bound`.
        """
        difference, rest = two_sum(first, -second)
        bound = self._upper_bound(difference, **options)
        if bound.dtype == torch.float64:
            return bound
        more = self._bound_of_rest(rest)
        # a set without an end in that direction has none by rounding alone
        more = torch.where((rest == 0).all(-1) | torch.isinf(more), 0.0, more)
        return round_up(bound.double() + more.double(), bound.dtype)

    def _bound_of_rest(self, rest: Tensor) -> Tensor:
        """A cheap upper bound for arms as short as roundings."""
        return self._upper_bound(rest)

    def intersect(self, other: ConfidenceSet) -> IntersectionSet:
        """The points of both; its ``delta`` says what that costs.

        Sets of one sequence, whatever their times, share their event: the running intersection is
        valid at the same delta. Sets of two events fail with probability at most the sum of both.
        """
        return IntersectionSet([self, other])

    def _as_points(self, name: str, value: ArrayLike) -> tuple[Tensor, bool]:
        """Points ``(*B, P, d)``, and whether one of each set was given, ``(*B, d)``."""
        like = self._like
        value = as_tensor(name, value, dtype=like.dtype, device=like.device)
        single = value.ndim == like.ndim
        check_shape(name, value, (*self.batch_shape, *(() if single else ("K",)), self.dim))
        if not is_transformed(value):
            checks = ValueChecks()
            checks.finite(name, value)
            checks.settle()
        return (value[..., None, :] if single else value), single

    # ---- the plane -----------------------------------------------------------------------

    def boundary(self, num: int = 200, tol: float | None = None) -> Tensor:
        """Points of the boundary for d = 2, counter-clockwise, ``(*B, num, 2)``.

        They are seen at equal angles from about the middle of the set, in coordinates in which it
        is about round, and are not finite where an unconfined set never ends.

        Args:
            num: how many.
            tol: how far inside they may be, relative to their distance from the middle; by default
                nothing but rounding, which takes up to twice the time.
        """
        view = self._polar(num, tol)
        return view.origin[..., None, :] + view.points

    def volume(self, num: int = 720, tol: float | None = None) -> Tensor:
        """The area for d = 2, ``(*B)``: the integral of ``reach^2 / 2`` over the angle.

        Angle and reach are those in coordinates in which the set is about round: of a thin set seen
        as it is, all spokes but a few would end on the two long sides.

        Args:
            num: directions in which it is measured.
            tol: as in :meth:`boundary`.
        """
        view = self._polar(num, tol)
        return torch.linalg.det(view.frame) * view.reach.square().sum(-1) * (math.pi / num)

    @torch.no_grad()
    def _polar(self, num: int, tol: float | None) -> _View:
        """The set seen from about its middle, in coordinates in which it is about round."""
        if self.dim != 2:
            raise refuse("dim", "2 for the boundary and the area of this set", self.dim)
        if isinstance(num, bool) or not isinstance(num, int) or num < 3:
            raise refuse("num", "an integer of at least 3", repr(num))
        origin, frame = self.center, self._first_frame()
        # the centre may lie on the edge, and the first frame be wrong; a rough look would not do,
        # since where it stops hangs on the last digit, and with it the frame
        for _ in range(LOOKS):
            origin, frame = self._seen(origin, frame, SPOKES, None).rounder()
        return self._seen(origin, frame, num, tol)

    def _first_frame(self) -> Tensor:
        """A first guess of coordinates ``theta = origin + T u`` that make the set round."""
        like = self._like
        eye = torch.eye(2, dtype=like.dtype, device=like.device)
        return eye.expand(*self.batch_shape, 2, 2)

    def _seen(self, origin: Tensor, frame: Tensor, num: int, tol: float | None) -> _View:
        directions = self._circle(num) @ frame.mT
        length = torch.linalg.vector_norm(directions, dim=-1)
        tiny = torch.finfo(length.dtype).tiny
        reach = self._reach(origin, directions / length.clamp_min(tiny)[..., None], tol) / length
        return _View(origin, frame, directions, reach)

    def _circle(self, num: int) -> Tensor:
        like = self._like
        angle = torch.arange(num, dtype=like.dtype, device=like.device) * (2 * math.pi / num)
        directions = torch.stack([angle.cos(), angle.sin()], dim=-1)
        return directions.expand(*self.batch_shape, num, 2)


class _View(NamedTuple):
    """The boundary of a set in the plane, seen from a point of it."""

    origin: Tensor  # (*B, 2)
    frame: Tensor  # T, (*B, 2, 2): theta = origin + T u
    directions: Tensor  # T u of unit vectors u at equal angles, (*B, num, 2)
    reach: Tensor  # how far the set reaches in these coordinates, (*B, num)

    @property
    def points(self) -> Tensor:
        """The boundary, from the origin."""
        return self.reach[..., None] * self.directions

    def rounder(self) -> tuple[Tensor, Tensor]:
        """The middle of the polygon, and coordinates in which its covariance is the identity."""
        a = self.points
        b = a.roll(-1, dims=-2)
        # triangles with the origin; their moments are those of 0, a and b
        area = 0.5 * (a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0])
        total = area.sum(-1)
        shift = (area[..., None] * (a + b)).sum(-2) / (3.0 * total)[..., None]
        parts = torch.stack([a, b, a + b], dim=-2)  # (*B, num, 3, 2)
        second = (area[..., None, None] * (parts.mT @ parts)).sum(-3) / (12.0 * total)[
            ..., None, None
        ]
        spread = second - shift[..., :, None] * shift[..., None, :]
        frame, failed = torch.linalg.cholesky_ex(torch.nan_to_num(spread))
        # an unbounded set has no middle, and a single point no shape
        known = (failed == 0) & torch.isfinite(spread).all(-1).all(-1) & (total > 0)
        known = known & torch.isfinite(frame).all(-1).all(-1)
        origin = self.origin + torch.where(known[..., None], shift, 0.0)
        return origin, torch.where(known[..., None, None], frame, self.frame)


class IntersectionSet(ConfidenceSet):
    """The intersection of several confidence sets of the same batch.

    Its bounds are the least of the members' bounds: valid, though the true support of the
    intersection may be smaller still. An intersection that is empty (which happens with
    probability at most ``delta``, the sum over the members' different events) may show as an
    interval whose lower end is above the upper one.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> region = sequence.current()
        >>> both = IntersectionSet([region, region.ellipsoid()])
        >>> bool(both.interval([1.0, 0.0]).upper <= region.interval([1.0, 0.0]).upper)
        True
    """

    members: list[ConfidenceSet]

    def __init__(self, members: list[ConfidenceSet]) -> None:
        flat: list[ConfidenceSet] = []
        for member in members:
            flat += member.members if isinstance(member, IntersectionSet) else [member]
        if not flat:
            raise refuse("members", "at least one set", "none")
        first = flat[0]._like
        for member in flat[1:]:
            as_tensor("other", member._like, dtype=first.dtype, device=first.device)
            check_shape("other", member._like, first.shape)
        self.members = flat
        self.family = flat[0].family
        self._center: Tensor | None = None

    def __getitem__(self, index: int | slice) -> IntersectionSet:
        """The intersections of some elements, by an index of the first batch axis."""
        return IntersectionSet([member[index] for member in self.members])

    @property
    def events(self) -> tuple[Event, ...] | None:
        """Those of all members, each once."""
        found: list[Event] = []
        for member in self.members:
            if member.events is None:
                return None
            found += [event for event in member.events if event not in found]
        return tuple(found)

    @property
    def _like(self) -> Tensor:
        return self.members[0]._like

    @property
    def center(self) -> Tensor:
        """Of the members' centres the one with the largest slack; outside, if none is inside."""
        if self._center is None:
            centers = torch.stack([member.center for member in self.members], dim=-2)
            best = self._slack(centers).argmax(-1)[..., None, None]
            self._center = centers.gather(-2, best.expand(*best.shape[:-1], self.dim))[..., 0, :]
        return self._center

    def _slack(self, points: Tensor) -> Tensor:
        return torch.stack([member._slack(points) for member in self.members]).amin(0)

    def _upper_bound(self, arms: Tensor, **options: Unpack[BoundSettings]) -> Tensor:
        bounds = [member._upper_bound(arms, **options) for member in self.members]
        return torch.stack(bounds).amin(0)

    def _reach(self, origin: Tensor, directions: Tensor, tol: float | None = None) -> Tensor:
        checks = ValueChecks()
        slack = self.slack(origin)
        expected = "a centre of slack >= 0 in all of them (else the intersection may be empty)"
        checks.require("members", slack >= 0, expected, slack)
        checks.settle()
        return torch.stack([m._reach(origin, directions, tol) for m in self.members]).amin(0)
