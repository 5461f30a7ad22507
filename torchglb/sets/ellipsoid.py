"""The ellipsoid ``{theta : |theta - c|^2 in W <= gamma}`` (Theorem 3.2), cut by the ball or not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_floats, as_like, check_shape, refuse_flag
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.linalg import distance_to_sphere, exit_distance, inverse_form_bounds
from torchglb.optim import Status
from torchglb.recording import wants_gradient
from torchglb.rounding import lost_below, power_of_two, round_up
from torchglb.sets.base import ConfidenceSet, Event
from torchglb.ucb import SupportResult
from torchglb.ucb.solvers.settings import BoundSettings

#: the weight of ball against ellipsoid is searched on so many points, so many times over
GRID, ROUNDS = 16, 8


@dataclass(frozen=True, eq=False)
class EllipsoidSet(ConfidenceSet):
    """An ellipsoid around an estimate.

    Args:
        family: the GLM family, for intervals on the mean scale.
        domain: the ball.
        theta_hat: the centre c, ``(*B, d)``.
        shape: W, positive definite, ``(*B, d, d)``.
        gamma: the squared radius, ``(*B)``.
        with_ball: whether the set is the part of the ellipsoid within the ball, which costs no
            probability where ``|theta*| <= S``.
        event: on which the set is valid.

    Example:
        >>> import torchglb as glb
        >>> shape = [[4.0, 0.0], [0.0, 1.0]]
        >>> region = EllipsoidSet(glb.Bernoulli(), glb.Ball(2, 3.0), [0.5, 0.0], shape, 1.0)
        >>> region.interval([1.0, 0.0]).upper
        tensor(1.0000, dtype=torch.float64)
    """

    family: GLMFamily
    domain: Ball
    theta_hat: Tensor
    shape: Tensor
    gamma: Tensor
    with_ball: bool = False
    event: Event | None = None

    def __post_init__(self) -> None:
        refuse_flag("gamma", self.gamma)
        object.__setattr__(self, "theta_hat", as_floats("theta_hat", self.theta_hat))
        for name in ("shape", "gamma"):
            object.__setattr__(self, name, as_like(name, getattr(self, name), self.theta_hat))
        batch, d = self.theta_hat.shape[:-1], self.domain.dim
        check_shape("theta_hat", self.theta_hat, (*batch, d))
        check_shape("shape", self.shape, (*batch, d, d))
        check_shape("gamma", self.gamma, batch)

    def __getitem__(self, index: int | slice) -> EllipsoidSet:
        """The sets of some elements, by an index of the first batch axis."""
        parts = {name: getattr(self, name)[index] for name in ("theta_hat", "shape", "gamma")}
        return replace(self, domain=self.domain.resized(self._S[index]), **parts)

    @property
    def center(self) -> Tensor:
        """theta_hat."""
        return self.theta_hat

    @property
    def radius(self) -> Tensor:
        """gamma, the squared radius in the metric W."""
        return self.gamma

    @property
    def _S(self) -> Tensor:
        return self.domain.radius_like(self.gamma).expand(self.gamma.shape)

    @cached_property
    def _factor(self) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(self.shape)
        checks = ValueChecks()
        expected = "positive definite matrices, all of whose leading minors are positive"
        checks.require("shape", failed == 0, expected, failed)
        checks.require("gamma", self.gamma >= 0, "non-negative numbers", self.gamma)
        checks.settle()
        return factor

    def _slack(self, points: Tensor) -> Tensor:
        """``gamma - |theta - c|^2 in W``; with the ball, ``-inf`` outside that."""
        away = points - self.theta_hat[..., None, :]
        slack = self.gamma[..., None] - (away @ self.shape * away).sum(-1)
        if not self.with_ball:
            return slack
        return torch.where(self._in_ball(points), slack, -torch.inf)

    def _in_ball(self, points: Tensor) -> Tensor:
        limit = self._S[..., None] * (1.0 + 8 * torch.finfo(points.dtype).eps)
        return torch.linalg.vector_norm(points, dim=-1) <= limit

    # ---- the support ---------------------------------------------------------------------

    def support(self, arms: ArrayLike) -> SupportResult:
        """``max <x, theta>`` over the set for every arm ``(*B, K, d)``; O(d^2) per arm.

        Without the ball ``<x, c> + sqrt(gamma) |x| in W^-1``. With it, for any split x = a + b the
        bound of a over the ellipsoid and ``S |b|`` bound x over what is in both, and the least such
        sum is the support itself, by duality. ``multiplier`` is the derivative in gamma, NaN with
        the ball. Bounds are rounded outwards, with certified forms in ``W^-1``: they hold whatever
        the condition of W is, and are infinite where W is not provably positive definite.
        """
        arms, _ = self._as_points("arms", arms)
        upper, lower, theta, multiplier = self._plain(arms)
        status = torch.zeros_like(upper, dtype=torch.int64)
        if self.with_ball:
            less, merged = self._merged(arms)
            inner = self._draw_back(merged)
            use = (less < upper)[..., None]
            outside = ~self._in_ball(theta)  # then only the merged point will do
            theta = torch.where(use | outside[..., None], inner, self._draw_back(theta))
            multiplier = torch.full_like(multiplier, torch.nan)
            upper = torch.minimum(upper, less)
            lower = self._at_least(arms, theta)
            feasible = self._in_ball(self.theta_hat[..., None, :])
            status = torch.where(feasible, status, int(Status.INACCURATE))
            lower = torch.where(feasible, lower, -torch.inf)
        return SupportResult(upper, lower, theta, multiplier, upper - lower, status)

    def _upper_bound(self, arms: Tensor, **options: Unpack[BoundSettings]) -> Tensor:
        if options:
            raise InputError(f"options: expected none for an ellipsoid, got {sorted(options)}")
        recorded = wants_gradient(arms, self.theta_hat, self.shape, self.gamma)
        upper = self._plain(arms)[0] if recorded else self._certified(arms)
        return torch.minimum(upper, self._merged(arms)[0]) if self.with_ball else upper

    def _certified(self, arms: Tensor) -> Tensor:
        """The upper bound of :meth:`_plain` alone, without derivatives."""
        _ = self._factor  # refuses what is no ellipsoid
        scale = power_of_two(arms)
        arms, scale = arms / scale, scale[..., 0]
        eps, tiny = torch.finfo(arms.dtype).eps, torch.finfo(arms.dtype).tiny
        middle = (arms * self.theta_hat[..., None, :]).sum(-1)
        paid = (arms.shape[-1] + 4) * eps * self._sizes(arms)
        root, form = self.gamma.clamp_min(tiny).sqrt()[..., None], self._forms(arms)[1]
        width = torch.where(form == 0, 0.0, root * form.sqrt())  # gamma may be infinite
        return scale * (middle + width * (1 + 8 * eps) + paid) + lost_below(scale)

    def _plain(self, arms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both bounds, maximiser and derivative in gamma, over the ellipsoid."""
        scale = power_of_two(arms)  # the square of a short arm would underflow
        arms, scale = arms / scale, scale[..., 0]
        white = torch.linalg.solve_triangular(self._factor, arms.mT, upper=False)  # (*B, d, K)
        form = white.square().sum(-2)  # (*B, K)
        tiny = torch.finfo(arms.dtype).tiny
        root = self.gamma.clamp_min(tiny).sqrt()[..., None]
        length = form.clamp_min(tiny).sqrt()
        step = torch.linalg.solve_triangular(self._factor.mT, white, upper=True).mT
        theta = self.theta_hat[..., None, :] + (root / length)[..., None] * step
        middle = (arms * self.theta_hat[..., None, :]).sum(-1)
        low, high = self._forms(arms)
        eps = torch.finfo(arms.dtype).eps
        paid = (arms.shape[-1] + 4) * eps * self._sizes(arms).detach()
        # the bounds have the value of the certified forms, and the derivatives of the computed one
        outer = (form + (high - form).detach()).clamp_min(tiny).sqrt()
        outer = torch.where(high > 0, root * outer, 0.0)  # gamma may be infinite
        inner = torch.where(low > 0, root * low.sqrt(), 0.0)
        upper = middle + outer * (1 + 8 * eps) + paid
        lower = (middle + inner * (1 - 8 * eps) - paid).detach()
        upper, lower = scale * upper + lost_below(scale), scale * lower - lost_below(scale)
        return upper, lower, theta, scale * 0.5 * length / root

    @torch.no_grad()
    def _forms(self, arms: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on ``|x|^2 in W^-1``; those of float32 are computed in float64 on a CPU."""
        if arms.dtype == torch.float64 or not arms.is_cpu:
            return inverse_form_bounds(arms, self.shape, self._factor)
        shape = self.shape.double()
        factor, failed = torch.linalg.cholesky_ex(shape)
        factor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
        low, high = inverse_form_bounds(arms.double(), shape, factor)
        return -round_up(-low, arms.dtype), round_up(high, arms.dtype)

    def _sizes(self, arms: Tensor) -> Tensor:
        """``sum_i |x_i c_i|``, what the products with the centre round."""
        return (arms.abs() * self.theta_hat.abs()[..., None, :]).sum(-1)

    def _merged(self, arms: Tensor) -> tuple[Tensor, Tensor]:
        """The least bound over the merged ellipsoids, and the maximiser over that one.

        A weight w in [0, 1] merges ellipsoid and ball into one ellipsoid that contains what is in
        both, with the matrix ``M = w W/gamma + (1 - w) I/S^2``. The maximiser over the best one
        tells how to split x.
        """
        scale = power_of_two(arms)
        arms, scale = arms / scale, scale[..., 0]
        with torch.no_grad():
            point, b = self._split(arms)
        S = self._S[..., None]
        eps = torch.finfo(arms.dtype).eps
        rest = self._plain(arms - b)[0]
        # a = x - b is rounded, and what is left off goes to the ball as well
        slip = 2 * eps * (arms.abs() + b.abs()).sum(-1)
        ball = torch.linalg.vector_norm(b, dim=-1) * (1 + (b.shape[-1] + 4) * eps) + slip.detach()
        value = rest + S * ball + 4 * eps * (rest.abs() + S * ball).detach()
        return scale * value + lost_below(scale), point

    def _split(self, arms: Tensor) -> tuple[Tensor, Tensor]:
        """The maximiser over the best merged ellipsoid, and the part of x that the ball pays."""
        # any split is valid, and that of a single point is no matter
        gamma = self.gamma.clamp_min(torch.finfo(arms.dtype).tiny ** 0.5)
        e, basis = torch.linalg.eigh(self.shape / gamma[..., None, None])
        c = (basis.mT @ self.theta_hat[..., None])[..., 0]
        # (*B, 1, 1, d) against arms (*B, K, 1, d) and weights (*B, K, G, 1)
        e, c = (t[..., None, None, :] for t in (e.clamp_min(0.0), c))
        x, ball = (arms @ basis)[..., None, :], self._S[..., None, None, None].square().reciprocal()

        def bound(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            M = (w * e + (1.0 - w) * ball).clamp_min(torch.finfo(arms.dtype).tiny)
            share = w * e / M
            k = 1.0 - ((1.0 - w) * ball * share * c * c).sum(-1)
            norm = (x.square() / M).sum(-1)
            value = (x * share * c).sum(-1) + (k.clamp_min(0.0) * norm).sqrt()
            return value, M, share * c, (k.clamp_min(0.0) / norm.clamp_min(1e-300)).sqrt()

        # the bound falls, then rises in w, so its minimum is narrowed down by grids
        grid = torch.linspace(0.0, 1.0, GRID, dtype=arms.dtype, device=arms.device)
        low = torch.zeros_like(arms[..., :1])
        high = torch.full_like(low, 0.5 * math.pi)
        for _ in range(ROUNDS):
            angle = low + (high - low) * grid  # (*B, K, G); crowded near both ends of [0, 1]
            best = bound(angle.sin().square()[..., None])[0].argmin(-1, keepdim=True)
            low = angle.gather(-1, (best - 1).clamp_min(0))
            high = angle.gather(-1, (best + 1).clamp_max(GRID - 1))
        w = angle.gather(-1, best).sin().square()[..., None]
        _, M, middle, length = bound(w)
        point = middle + length[..., None] * x / M
        # x = M (point - middle) / length, of which (1 - w) point / S^2 is the ball's part
        tiny = torch.finfo(arms.dtype).tiny
        b = (1.0 - w) * ball * point / length.clamp_min(tiny)[..., None]
        turned = basis.mT
        point, b = point[..., 0, :] @ turned, b[..., 0, :] @ turned
        limit = torch.linalg.vector_norm(arms, dim=-1, keepdim=True)
        # a centre outside of the ball may have no maximiser: then the ball pays for all
        sane = torch.isfinite(b).all(-1, keepdim=True) & (b.abs() <= 4.0 * limit).all(-1, True)
        return point, torch.where(sane, b, arms)

    def _at_least(self, arms: Tensor, theta: Tensor) -> Tensor:
        """``<x, theta>``, rounded down; for points some roundings outside of the ball."""
        scale = power_of_two(arms)  # the square of a short arm would underflow
        arms, scale = arms / scale, scale[..., 0]
        paid = (arms.shape[-1] + 8) * torch.finfo(arms.dtype).eps * self._S[..., None]
        lower = (arms * theta).sum(-1) - paid * torch.linalg.vector_norm(arms, dim=-1)
        return scale * lower - lost_below(scale)

    def _draw_back(self, points: Tensor) -> Tensor:
        """Points brought into the set along their chord to the centre."""
        away = points - self.theta_hat[..., None, :]
        length = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        unit = away / length.clamp_min(torch.finfo(points.dtype).tiny)
        reach = self._reach(self.theta_hat, unit)[..., None]
        step = torch.minimum(length, reach) * unit
        # into the ellipsoid for certain: the form and the point itself are rounded
        sizes = step.abs() @ self.shape.abs()
        where = step.abs() + self.theta_hat.abs()[..., None, :]
        paid = (2 * self.dim + 8) * torch.finfo(points.dtype).eps * (sizes * where).sum(-1)
        form = (step @ self.shape * step).sum(-1) + 2 * paid
        share = (self.gamma[..., None] / form.clamp_min(torch.finfo(form.dtype).tiny)).sqrt()
        return self.theta_hat[..., None, :] + share.clamp_max(1.0)[..., None] * step

    # ---- size ----------------------------------------------------------------------------

    def volume(self, num: int = 720, tol: float | None = None) -> Tensor:
        """``vol(unit ball) gamma^(d/2) / sqrt(det W)``; with the ball the area, for d = 2."""
        if self.with_ball:
            return super().volume(num, tol)
        half = 0.5 * self.dim
        unit = half * math.log(math.pi) - math.lgamma(half + 1.0)
        logdet = 2.0 * torch.diagonal(self._factor, dim1=-2, dim2=-1).log().sum(-1)
        return torch.exp(unit + half * self.gamma.log() - 0.5 * logdet)

    def _first_frame(self) -> Tensor:
        """By the merged ellipsoid of ellipsoid and ball."""
        eye = torch.eye(2, dtype=self.shape.dtype, device=self.shape.device)
        tiny = torch.finfo(self.shape.dtype).tiny
        metric = self.shape / self.gamma.clamp_min(tiny)[..., None, None]
        return frame_of(metric + eye / self._S.square()[..., None, None])

    def _reach(self, origin: Tensor, directions: Tensor, tol: float | None = None) -> Tensor:
        away = (origin - self.theta_hat)[..., None, :]
        turned = directions @ self.shape
        reach = exit_distance(
            (turned * directions).sum(-1),
            (turned * away).sum(-1),
            self.gamma[..., None] - (away @ self.shape * away).sum(-1),
        )
        if not self.with_ball:
            return reach
        sphere = distance_to_sphere(origin[..., None, :], directions, self._S[..., None])
        return torch.minimum(reach, sphere)


def frame_of(metric: Tensor) -> Tensor:
    """T with ``T' M T = I`` for ``(*B, 2, 2)``; the identity where M is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(metric)
    eye = torch.eye(2, dtype=metric.dtype, device=metric.device).expand_as(metric)
    known = (failed == 0) & torch.isfinite(factor).all(-1).all(-1)
    factor = torch.where(known[..., None, None], factor, eye)
    return torch.linalg.solve_triangular(factor, eye, upper=False).mT
