"""The ellipsoid ``{theta : |theta - c|^2 in W <= gamma}`` (Theorem 3.2), cut by the ball or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_same, check_shape
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.sets.base import ConfidenceSet

#: weights of the ball against the ellipsoid that are tried for the bound over both
WEIGHTS = 24


@dataclass(frozen=True, eq=False)
class EllipsoidSet(ConfidenceSet):
    """An ellipsoid around an estimate.

    Args:
        family: the GLM family, for intervals on the mean scale.
        domain: the ball.
        theta_hat: the centre c, ``(*B, d)``.
        shape: W, positive definite, ``(*B, d, d)``.
        gamma: the squared radius, ``(*B)``.
        with_ball: whether bounds use the ball as well, which costs no probability.
    """

    family: GLMFamily
    domain: Ball
    theta_hat: Tensor
    shape: Tensor
    gamma: Tensor
    with_ball: bool = False

    def __post_init__(self) -> None:
        check_same("shape", self.shape, "theta_hat", self.theta_hat)
        check_same("gamma", self.gamma, "theta_hat", self.theta_hat)
        batch, d = self.theta_hat.shape[:-1], self.domain.dim
        check_shape("theta_hat", self.theta_hat, (*batch, d))
        check_shape("shape", self.shape, (*batch, d, d))
        check_shape("gamma", self.gamma, batch)

    @property
    def center(self) -> Tensor:
        """theta_hat."""
        return self.theta_hat

    @property
    def radius(self) -> Tensor:
        """gamma, the squared radius in the metric W."""
        return self.gamma

    @cached_property
    def _factor(self) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(self.shape)
        if bool((failed != 0).any()):
            where = [tuple(i) for i in torch.nonzero(failed).tolist()]
            raise InputError(f"shape: expected positive definite matrices, got others at {where}")
        return factor

    def slack(self, theta: Tensor) -> Tensor:
        """``gamma - |theta - c|^2 in W``; with the ball, ``-inf`` outside that."""
        many = theta.ndim > self.theta_hat.ndim
        points = theta if many else theta[..., None, :]
        away = points - self.theta_hat[..., None, :]
        slack = self.gamma[..., None] - (away @ self.shape * away).sum(-1)
        if self.with_ball:
            S = self.domain.radius_like(theta).expand(self.gamma.shape)[..., None]
            inside = torch.linalg.vector_norm(points, dim=-1) <= S * (1 + 1e-14)
            slack = torch.where(inside, slack, -torch.inf)
        return slack if many else slack[..., 0]

    def upper_bound(self, arms: Tensor, **options: Any) -> Tensor:
        """``<x, c> + sqrt(gamma) |x| in W^-1``, or the least bound over ellipsoid and ball.

        For a weight w in [0, 1] the two constraints merge into one ellipsoid that contains both:
        ``M = w W/gamma + (1 - w) I/S^2``; every weight gives a valid bound, and the best is taken.
        """
        if options:
            raise InputError(f"options: expected none for an ellipsoid, got {sorted(options)}")
        white = torch.linalg.solve_triangular(self._factor, arms.mT, upper=False)  # (*B, d, K)
        bonus = (self.gamma[..., None] * white.square().sum(-2)).sqrt()
        plain = (arms * self.theta_hat[..., None, :]).sum(-1) + bonus
        return torch.minimum(plain, self._with_ball(arms)) if self.with_ball else plain

    def _with_ball(self, arms: Tensor) -> Tensor:
        S = self.domain.radius_like(arms).expand(self.gamma.shape)
        eigenvalues, basis = torch.linalg.eigh(self.shape / self.gamma[..., None, None])
        c = (basis.mT @ self.theta_hat[..., None])[..., 0]  # (*B, d)
        x = arms @ basis  # (*B, K, d)
        # weights crowd towards the ends, where one of the two constraints rules
        angle = torch.linspace(0.0, 0.5 * math.pi, WEIGHTS, dtype=arms.dtype, device=arms.device)
        w = angle.sin().square()[:, None]  # (G, 1)
        e, c, S = eigenvalues[..., None, :], c[..., None, :], S[..., None, None]
        M = (w * e + (1.0 - w) / (S * S)).clamp_min(torch.finfo(arms.dtype).tiny)  # (*B, G, d)
        middle = w * e * c / M
        k = 1.0 - (w * e * c * c).sum(-1) + (M * middle * middle).sum(-1)  # (*B, G)
        reach = (k.clamp_min(0.0)[..., None, :] * (x.square() @ (1.0 / M).mT)).sqrt()  # (*B, K, G)
        return (x @ middle.mT + reach).amin(-1)

    def volume(self) -> Tensor:
        """``vol = vol(unit ball) gamma^(d/2) / sqrt(det W)``, of the ellipsoid without the ball."""
        half = 0.5 * self.dim
        unit = half * math.log(math.pi) - math.lgamma(half + 1.0)
        logdet = 2.0 * torch.diagonal(self._factor, dim1=-2, dim2=-1).log().sum(-1)
        return torch.exp(unit + half * self.gamma.log() - 0.5 * logdet)

    def _outer_radius(self, directions: Tensor) -> Tensor:
        """Where the ray leaves the ellipsoid."""
        squared = (directions @ self.shape * directions).sum(-1)
        return (self.gamma[..., None] / squared).sqrt() * (1.0 + 1e-12)
