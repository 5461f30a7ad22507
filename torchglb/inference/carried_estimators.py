"""Estimates from sums that are carried from round to round (:mod:`torchglb.carried`).

They come with a certificate, mostly without a pass over the history.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.carried.carried_loss import choose_order
from torchglb.carried.carried_minimum import CarriedMinimum, Enclosed
from torchglb.carried.free_certificate import TRUST
from torchglb.carried.free_minimum import Free, FreeMinimum
from torchglb.carried.model import Polynomials
from torchglb.carried.source import RowSource
from torchglb.checks import check_tensors
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimator_base import (
    FINE,
    Accuracy,
    BallEstimator,
    Estimator,
    FreeEstimator,
    TiltedChoice,
)
from torchglb.inference.fits import Fit
from torchglb.rows.buffers import Rows

#: derivatives of the highest order of a carried polynomial
MOST_DERIVATIVES = 1600
#: for policies whose choice is certain before theta and H are, by the order of the polynomial,
#: which falls with d (6 up to d = 7, 3 at d = 20): as much as keeps passes rare at t = 10^4, where
#: an observation moves the estimate by some d/t
ROUGH = {
    6: Accuracy(1e-8, 1e-8, 1e-6),
    5: Accuracy(1e-8, 1e-8, 1e-5),
    4: Accuracy(1e-4, 1e-4, 3e-3),
    3: Accuracy(3e-4, 1e-4, 3e-3),
}
#: and of theta where H is of no use
ROUGHEST = 0.1
#: polynomials of these orders are of no use if estimates are fine: passes in every round are better
TOO_LOW = (3, 4)


class _CarriedEstimator(Estimator):
    """What both carried estimators share: arrays of N problems, and saving."""

    _minimum: Any  # a CarriedMinimum or a FreeMinimum

    @property
    def accuracy(self) -> Accuracy:
        """What is certified of a fit."""
        found = ROUGH.get(self._minimum.carried.table.order, FINE) if self.rough else FINE
        if self.need_hessian:
            return found
        return Accuracy(found.local, ROUGHEST if self.rough else found.theta, np.inf)

    def _largest(self, ball: Ball, always: bool) -> int:
        """Derivatives of the highest order of a polynomial; 0 for the lowest order.

        Decides on roughness: where fine estimates are cheap they are not rough, unless ``always``.
        """
        order = choose_order(self.family, ball.dim, ball.max_radius, MOST_DERIVATIVES)
        self.rough = self.rough and order in (ROUGH if always else TOO_LOW)
        return 0 if order in TOO_LOW and not self.rough else MOST_DERIVATIVES

    def _steepness(self) -> Floats:
        """R X of every problem, ``(N,)``; X the length of the longest row."""
        carried = self._minimum.carried
        return carried.constants["concordance"] * carried.longest

    def carry(self, x: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        carried, (N, k) = self._minimum.carried, (self.passes.numel(), r.shape[-1])
        if carried.rows + k != len(self.history):
            return  # others came to the history by another way: the next fit adds them in order
        weights = np.ones((N, k)) if w is None else self._array(w, N, k)
        rewards = weights * self._array(r, N, k)
        carried.append(self._minimum.source, self._array(x, N, k, x.shape[-1]), rewards, weights)

    def copy(self) -> Self:
        new = copy.copy(self)
        new._minimum = self._minimum.copy()
        return new

    def state_dict(self) -> dict[str, Any]:
        return {"minimum": self._minimum.state_dict(), "passes": self.passes.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_tensors("state", state, {"passes": self.passes})
        self._minimum.load_state_dict(state["minimum"])
        self.passes = state["passes"].clone()

    def _array(self, values: Tensor, *shape: int) -> Floats:
        held = values.detach().reshape(shape).numpy()
        return np.ascontiguousarray(held, np.float64)

    def _tensor(self, values: Any, *tail: int) -> Tensor:
        shape = (*self.history.batch_shape, *tail)
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape).to(self.history.dtype)

    def _problem(self, ridge: Tensor, tilt: Tensor | None = None) -> tuple[Floats, Floats]:
        """lambda ``(N,)`` and tilt ``(N, d)``."""
        N, d = self.passes.numel(), self.domain.dim
        lam = self._array(ridge.expand(self.history.batch_shape), N)
        return lam, np.zeros((N, d)) if tilt is None else self._array(tilt, N, d)


class CarriedBall(_CarriedEstimator, BallEstimator):
    """:class:`torchglb.carried.carried_minimum.CarriedMinimum`."""

    def _prepare(self) -> None:
        ball = Ball(self.domain.dim, self.radius.double().reshape(-1))
        source = RowSource(self.family, self.history)
        self._minimum: CarriedMinimum = CarriedMinimum(
            source, ball, self._largest(ball, always=False)
        )

    def fit(self, ridge: Tensor) -> Fit:  # noqa: D102
        d, wish = self.domain.dim, self.accuracy
        found, at = self._minimum.estimate(*self._problem(ridge), wish.local, wish.hessian)
        self.passes = self.passes + self._tensor(found.passes)
        slope, trace = at.errors["slope"], at.errors["trace"]
        nothing = np.zeros((2, len(slope)))
        distance, doubt = self._distances(found, at) if self.rough else nothing
        return Fit(
            self._tensor(found.theta, d),
            self._tensor(found.high),
            self._tensor(at.gradient, d),
            self._tensor(at.hessian, d, d),
            self._tensor(distance),
            self._tensor(doubt),
            # the Euclidean length is at most sqrt(tr H) times that in the dual norm
            self._tensor(slope * np.sqrt(trace)),
        )

    def _distances(self, found: Enclosed, at: Polynomials) -> tuple[Floats, Floats]:
        """``distance`` and ``doubt`` of a :class:`Fit`.

        From theta to the minimiser theta + u, with ``D = R X |u|``, F falls by at least ``phi(D)
        |u|^2`` in the Hessian at the minimiser, ``phi(D) = (D - 1 + e^-D)/D^2``, which is at least
        ``e^-D`` times that at theta: ``|u|_H <= sqrt(excess e^D/phi(D))``. That bounds D again,
        ``D <= R X |u|_H/sqrt(least eigenvalue of H)``, starting at ``2 R X S``.
        """
        hessian_error = at.errors["hessian"]
        off = np.minimum(hessian_error, 1.0 - 1e-12)
        least = np.linalg.eigvalsh(at.hessian)[:, 0] / (1.0 + off)
        steepness, S = self._steepness(), self._minimum.carried.constants["radius"]
        reach, distance = 2.0 * steepness * S, np.full(len(off), np.inf)
        with np.errstate(all="ignore"):
            for _ in range(4):
                D = np.maximum(reach, 1e-3)  # below, phi is at least as large
                phi = (D - 1.0 + np.exp(-D)) / (D * D)
                distance = np.sqrt(found.excess * np.exp(D) / phi)
                nearer = steepness * distance / np.sqrt(np.maximum(least, 0.0))
                reach = np.fmin(reach, nearer)
        # nothing is known where the polynomial's Hessian may be anything
        known, doubt = (hessian_error < 1.0) & (distance < np.inf), reach - np.log1p(-off)
        distance = np.where(known, distance * np.sqrt(1.0 + off), np.inf)
        return distance, np.where(known, doubt, np.inf)

    def predict(self, ridge: Tensor, imagined: Rows | None) -> Tensor:  # noqa: D102
        problem, N = self._problem(ridge), self.passes.numel()
        if imagined is None:
            found, _ = self._minimum.estimate(*problem, self.accuracy.local, np.inf)
        else:
            assert imagined.w is not None
            x, w = self._array(imagined.X, N, self.domain.dim), self._array(imagined.w, N)
            y = w * self._array(imagined.r, N)
            found = self._minimum.predict(x, y, w, *problem, self.accuracy.local)
        self.passes = self.passes + self._tensor(found.passes)
        return self._tensor(found.theta, self.domain.dim)


class CarriedFree(_CarriedEstimator, FreeEstimator):
    """:class:`torchglb.carried.free_minimum.FreeMinimum`."""

    def _prepare(self) -> None:
        reach = self.domain.constant(lambda S: _reach(self.family, S), self.radius.double())
        ball = Ball(self.domain.dim, reach.expand(self.history.batch_shape).reshape(-1))
        source = RowSource(self.family, self.history)
        largest = self._largest(ball, always=self.need_hessian)
        self._minimum: FreeMinimum = FreeMinimum(source, ball, self.points, largest)

    def fit(self, ridge: Tensor) -> Fit:  # noqa: D102
        wish = self.accuracy
        found = self._minimum.find(*self._problem(ridge), wish.theta, wish.hessian)
        return self._mended(found, ridge, None)

    def tilted(self, ridge: Tensor, tilt: Tensor, start: Tensor) -> Tensor:  # noqa: D102
        found = self._minimum.find(*self._problem(ridge, tilt), FINE.theta)
        return self._mended(found, ridge, tilt).theta

    def choose(  # noqa: D102
        self, ridge: Tensor, tilt: Tensor, start: Tensor, arms: Tensor, doubt: Tensor, other: Tensor
    ) -> TiltedChoice:
        N, d = self.passes.numel(), self.domain.dim
        flat = self._array(arms, N, arms.shape[-2], d)
        wide = self._array(doubt.expand(self.history.batch_shape), N)
        around = self._array(other, N, d)
        problem = self._problem(ridge, tilt)
        found = self._minimum.find(*problem, FINE.theta, np.inf, flat, wide, around)
        point = self._mended(found, ridge, tilt).theta
        shape = self.history.batch_shape
        leader = torch.from_numpy(found.leader).reshape(shape)
        unknown = torch.from_numpy(~np.isfinite(found.length)).reshape(shape)
        last = (arms @ point[..., None])[..., 0].argmax(-1) if bool(unknown.any()) else leader
        certain = torch.from_numpy(found.certain == 1).reshape(shape)
        return TiltedChoice(torch.where(unknown, last, leader), certain)

    def _distances(self, found: Free) -> tuple[Floats, Floats]:
        """``distance`` and ``doubt`` of a :class:`Fit`; nothing where no Hessian was asked for."""
        off = np.minimum(found.hessian_error, TRUST)
        distance = found.distance * np.sqrt(1.0 + off)
        doubt = self._steepness() * found.length - np.log1p(-off)
        known = found.hessian_error <= TRUST
        return np.where(known, distance, np.inf), np.where(known, doubt, np.inf)

    def _mended(self, found: Free, ridge: Tensor, tilt: Tensor | None) -> Fit:
        """Where nothing is certain, from the rows: minimisers outside of the ball of constants."""
        d = self.domain.dim
        self.passes = self.passes + self._tensor(found.passes)
        distance, doubt = self._distances(found) if self.rough else np.zeros((2, len(found.high)))
        theta = self._tensor(found.theta, d)
        fit = Fit(
            theta,
            self._tensor(found.high),
            torch.zeros_like(theta),
            self._tensor(found.hessian, d, d),
            self._tensor(distance),
            self._tensor(doubt),
            torch.zeros_like(theta[..., 0]),
        )
        unknown = torch.from_numpy(~np.isfinite(found.length)).reshape(self.history.batch_shape)
        return self._replaced(fit, unknown, ridge, tilt)


def _reach(family: GLMFamily, radius: float) -> float:
    """The radius of a ball that holds all but odd minimisers; a wide one where it costs nothing."""
    near, wide = 2.0 * radius + 5.0, 100.0 * radius + 1000.0
    same = all(
        family.derivative_ratio(order, near) == family.derivative_ratio(order, wide)
        for order in range(3, 9)
    )
    return wide if same else near
