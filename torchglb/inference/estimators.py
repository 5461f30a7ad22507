"""Estimates of a growing history, for the policies that refit after every observation.

On a CPU the loss is carried from round to round. On a device it is fitted anew, from the last
estimate on, by the batched solvers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from torchglb.checks import check_tensors
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.carried_estimators import CarriedBall, CarriedFree
from torchglb.inference.estimator_base import BallEstimator, Estimator, FreeEstimator, TiltedChoice
from torchglb.inference.fits import Fit, minimum_in_ball, ridge_minimum
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History

__all__ = ["BallEstimator", "Estimator", "FreeEstimator", "ball_estimator", "free_estimator"]


def ball_estimator(
    family: GLMFamily,
    domain: Ball,
    history: History,
    need_hessian: bool = True,
    rough: bool = False,
) -> BallEstimator:
    """For a history where it lies."""
    kind = CarriedBall if history.device.type == "cpu" else RefitBall
    return kind(family, domain, history, need_hessian, rough)


def free_estimator(
    family: GLMFamily,
    domain: Ball,
    history: History,
    need_hessian: bool = True,
    rough: bool = False,
    points: int = 1,
) -> FreeEstimator:
    """For a history where it lies."""
    kind = CarriedFree if history.device.type == "cpu" else RefitFree
    return kind(family, domain, history, need_hessian, rough, points)


class _Refit(Estimator):
    """What both refitting estimators share: the last estimate, from which the next one starts."""

    def _prepare(self) -> None:
        self.rough = False  # a fit is as good as the arithmetic
        self.start = self.passes[..., None].expand(*self.passes.shape, self.domain.dim)

    def carry(self, x: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        pass

    def copy(self) -> Self:
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_tensors("state", state, {"start": self.start})
        self.start = state["start"].clone()


class RefitBall(_Refit, BallEstimator):
    """By :func:`torchglb.mle.minimize_likelihood`."""

    def fit(self, ridge: Tensor) -> Fit:
        found = minimum_in_ball(self._loss(ridge), self.domain, self.start)
        self.start = found.theta
        return found

    def predict(self, ridge: Tensor, imagined: Rows | None) -> Tensor:
        found = minimum_in_ball(self._loss(ridge, None, imagined), self.domain, self.start)
        self.start = found.theta
        return found.theta


class RefitFree(_Refit, FreeEstimator):
    """By :func:`torchglb.inference.fits.ridge_minimum`."""

    def fit(self, ridge: Tensor) -> Fit:
        found = ridge_minimum(self._loss(ridge), self.start)
        self.start = found.theta
        return found

    def tilted(self, ridge: Tensor, tilt: Tensor, start: Tensor) -> Tensor:
        return ridge_minimum(self._loss(ridge, tilt), start).theta

    def choose(
        self, ridge: Tensor, tilt: Tensor, start: Tensor, arms: Tensor, doubt: Tensor, other: Tensor
    ) -> TiltedChoice:
        theta = self.tilted(ridge, tilt, start)
        arm = (arms @ theta[..., None])[..., 0].argmax(-1)
        return TiltedChoice(arm, torch.ones_like(arm, dtype=torch.bool))
