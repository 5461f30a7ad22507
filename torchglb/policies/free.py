"""Minimisers over all of R^d of a ridged, perhaps tilted loss, with a certified distance.

``F(theta) = L(theta) + (lambda/2)|theta|^2 - <tilt, theta>``, with gradient g and Hessian H at
theta, ``|m'''| <= R m''`` and X the length of the longest row. Along the segment to the minimiser
theta + u the Hessian is at least ``e^(-R X |u| s)`` H after a share s of it, so

    ``|u|_H (1 - e^(-R X |u|)) / (R X |u|) <= delta``,  ``delta = |g|`` in H^-1, and

    ``|u|_H <= -log(1 - k delta) / k``,  ``k = R X / sqrt(least eigenvalue of H)``, if k delta < 1.

Any lower bound on H serves as well. delta comes from the Taylor model that is carried from round to
round, whose slope has a certified error; or, after a Newton step v from a point where g and H are
known from a pass, from ``delta <= e^(D/2) |v|_H (e^D - 1 - D)/D`` with ``D = R X |v|``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array, tensor, which
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.policies.carried import hessian_error
from torchglb.policies.parts import ridge_minimum
from torchglb.ucb.minimum import CarriedMinimum

#: Newton steps on the Taylor model, and passes before the solver with a line search takes over
MODEL_STEPS, PASSES = 3, 4


class Near(NamedTuple):
    """A point near the minimiser, for N problems.

    Attributes:
        theta: ``(N, d)``.
        metric: a lower bound on the Hessian of F there, ``(N, d, d)``.
        distance: of the minimiser at most, in the norm of the metric, ``(N)``; infinite where
            nothing is known.
        length: the same in the Euclidean norm.
    """

    theta: Tensor
    metric: Tensor
    distance: Tensor
    length: Tensor

    def put(self, index: Tensor, new: Near) -> Near:
        """With the problems ``index`` replaced."""
        if index.shape[0] == self.theta.shape[0]:
            return new
        return Near(*(a.index_copy(0, index, b) for a, b in zip(self, new, strict=True)))


class FreeMinimum(CarriedMinimum):
    """The minimiser of F over R^d, followed through time for N problems.

    The constants R hold on a ball, of radius ``radius``; a minimiser that is not certified to lie
    inside it is found by passes over the history.
    """

    def settle(self, ridge: Tensor, tol: float, hessian_tol: float) -> tuple[Tensor, Tensor]:
        """The minimiser without a tilt and the Hessian of F there.

        Args:
            ridge: lambda > 0 of every problem, ``(N)``.
            tol: of the Euclidean distance, relative to 1 + |theta|.
            hessian_tol: relative error of the Hessian, as positive semidefinite matrices go.

        Returns:
            ``(N, d)`` and ``(N, d, d)``; the Taylor model is displaced to this point.
        """
        tilt = torch.zeros_like(self._point)
        near = self.by_model(self._everyone, ridge, tilt, self._shift)

        def late() -> Tensor:
            sharp = hessian_error(self, near.theta - self._point) <= hessian_tol
            return which(~(sharp & (near.length <= tol * (1.0 + _length(near.theta)))))

        open_ = late()
        for _ in range(PASSES):
            if not open_.numel():
                break
            self._recenter(open_, self._inside(near.theta)[open_])
            start = torch.zeros_like(self._point[open_])
            near = near.put(open_, self.by_model(open_, ridge, tilt, start))
            open_ = late()
        if open_.numel():
            found = ridge_minimum(self.data.likelihood(open_, ridge), self._point[open_])
            self._recenter(open_, found.theta)
            near = near._replace(theta=near.theta.index_copy(0, open_, found.theta))
        self._shift = near.theta - self._point
        return near.theta, self.model().hessian + ridge[:, None, None] * _eye(self._point)

    def tilted(
        self,
        ridge: Tensor,
        tilt: Tensor,
        start: Tensor,
        enough: Callable[[Near], Tensor],
    ) -> Tensor:
        """A point ``(N, d)`` near the minimiser of F with a tilt: passes only where needed.

        Args:
            ridge: lambda > 0 of every problem, ``(N)``.
            tilt: ``(N, d)``.
            start: a first guess, ``(N, d)``.
            enough: which problems need no more accuracy, ``(N)``.
        """
        near = self.by_model(self._everyone, ridge, tilt, start - self._point)
        open_ = which(~enough(near))
        for _ in range(PASSES):
            if not open_.numel():
                return near.theta
            guess = torch.where(torch.isfinite(near.length)[:, None], near.theta, start)[open_]
            near = near.put(open_, self.by_pass(open_, ridge, tilt, guess))
            open_ = which(~enough(near))
        if not open_.numel():
            return near.theta
        found = ridge_minimum(self._tilted_loss(open_, ridge, tilt), start[open_])
        return near.theta.index_copy(0, open_, found.theta)

    def by_model(self, index: Tensor, ridge: Tensor, tilt: Tensor, shift: Tensor) -> Near:
        """Newton steps on the Taylor model, from ``shift (N', d)``: no pass."""
        known = (self.longest, self._radius, self._ratio, self.concordance)
        state = (self._sums, self._point, ridge, tilt, *known)
        sums, c, lam, W, longest, S, ratio, concordance = (
            state if self.data.is_all(index) else [t[index] for t in state]
        )
        jet = self.monomials.jet(array(sums))
        bend = lam[:, None, None] * _eye(c)
        p = shift
        for _ in range(MODEL_STEPS):
            _, gradient, hessian = (tensor(t)[:, 0] for t in jet.at(array(p)[:, None]))
            gradient = gradient + lam[:, None] * (c + p) - W
            p = p - _solve(hessian + bend, gradient)
        gradient = tensor(jet.slope(array(p)[:, None])[1])[:, 0] + lam[:, None] * (c + p) - W
        reach = longest * _length(p)  # D
        around = tensor(self.monomials.hessian(array(sums)))
        local = (p * (around @ p[..., None])[..., 0]).sum(-1).clamp_min(0.0)  # |p|^2 in H(c)
        growth = ratio * torch.exp(1.5 * concordance * reach) * reach ** (self.order - 1)
        slope_error = growth * local.sqrt() / math.factorial(self.order)
        slope_error = torch.where(reach > 0, slope_error, 0.0)
        metric = torch.exp(-concordance * reach)[:, None, None] * around + bend
        return self._certified(c + p, gradient, metric, slope_error, lam, concordance * longest, S)

    def by_pass(self, index: Tensor, ridge: Tensor, tilt: Tensor, theta: Tensor) -> Near:
        """One pass at ``theta (N', d)`` and a Newton step from there."""
        _, gradient, hessian = self._tilted_loss(index, ridge, tilt).expand(theta)
        self.passes = self.passes.index_add(0, index, torch.ones_like(theta[:, 0]))
        lam, S = ridge[index], self._radius[index]
        step = -_solve(hessian, gradient)
        local = -(gradient * step).sum(-1)
        steepness = (self.concordance * self.longest)[index]
        reach = steepness * _length(step)  # D
        # (e^D - 1 - D)/D, whose first term alone is D/2
        share = torch.where(reach > 1e-4, torch.expm1(reach) / reach - 1.0, 0.51 * reach)
        left = torch.exp(0.5 * reach) * local.clamp_min(0.0).sqrt() * share
        metric = torch.exp(-reach)[:, None, None] * hessian
        zero = torch.zeros_like(gradient)
        return self._certified(theta + step, zero, metric, left, lam, steepness, S)

    def _certified(
        self,
        theta: Tensor,
        gradient: Tensor,
        metric: Tensor,
        error: Tensor,
        ridge: Tensor,
        steepness: Tensor,
        radius: Tensor,
    ) -> Near:
        """The distance that a gradient known to ``error``, in metric^-1, allows.

        ``steepness`` is R X; the minimiser must lie in the ball on which R holds.
        """
        least = torch.linalg.eigvalsh(torch.nan_to_num(metric))[..., 0]
        delta = (gradient * _solve(metric, gradient)).sum(-1).clamp_min(0.0).sqrt() + error
        k = steepness / least.sqrt()
        share = (k * delta).clamp_max(1.0)
        distance = torch.where(share > 1e-8, -torch.log1p(-share) / k, 1.01 * delta)
        length = distance / least.sqrt()
        known = (least > 0) & (_length(theta) + length < radius)  # false for NaN
        infinite = torch.full_like(distance, torch.inf)
        return Near(
            theta,
            torch.where(known[:, None, None], metric, ridge[:, None, None] * _eye(theta)),
            torch.where(known, distance, infinite),
            torch.where(known, length, infinite),
        )

    def _inside(self, theta: Tensor) -> Tensor:
        """The point itself, but no farther out than the ball; the origin for NaN."""
        theta = torch.where(torch.isfinite(theta).all(-1, keepdim=True), theta, 0.0)
        return self.domain.resized(self._radius).project(theta)

    def _tilted_loss(self, index: Tensor, ridge: Tensor, tilt: Tensor) -> NegativeLogLikelihood:
        return NegativeLogLikelihood(
            self.data.family,
            *self.data.rows(index),
            regularization=ridge[index],
            tilt=tilt[index],
            shards=self.data.shards,
        )


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """``matrix^-1 vector``; whatever comes out where the matrix is not positive definite."""
    factor = torch.linalg.cholesky_ex(matrix).L
    return torch.cholesky_solve(vector[..., None], factor)[..., 0]
