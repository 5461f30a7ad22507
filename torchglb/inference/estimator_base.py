"""What an estimate of a growing history is, for the policies that refit after every observation.

An estimator is changed by what it is asked; whoever asks without leaving a trace asks a copy. The
rows lie in a history that copies share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchglb.arrays import wait_for_indices
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.fits import Fit, minimum_in_ball, ridge_minimum
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History


class Accuracy(NamedTuple):
    """What is certified.

    Attributes:
        local: of a minimiser in a ball, in the norm of the Hessian there.
        theta: of a minimiser over R^d, relative to 1 + |theta|.
        hessian: relatively, in the order of positive semidefinite matrices.
    """

    local: float
    theta: float
    hessian: float


FINE = Accuracy(1e-8, 1e-8, 1e-9)
#: ``log H`` of a fine estimate is off by less
HESSIAN_ERROR = 2.0 * FINE.hessian


class Estimator(ABC):
    """The minimiser of ``L + (lambda/2)|theta|^2`` over the rows of a history.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        history: the rows.
        need_hessian: whether Hessians are asked for.
        rough: whether a fit may be as rough as its certificate says; else it is fine.
        points: of :class:`torchglb.carried.free_minimum.FreeMinimum`.
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        history: History,
        need_hessian: bool = True,
        rough: bool = False,
        points: int = 1,
    ) -> None:
        self.family, self.domain, self.history = family, domain, history
        self.need_hessian, self.rough, self.points = need_hessian, rough, points
        like = torch.zeros(history.batch_shape, dtype=history.dtype, device=history.device)
        #: passes over the history so far, ``(*B)``; 0 where they are not counted
        self.passes = like
        self.radius = domain.radius_like(like).expand(history.batch_shape)
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Makes what an estimator has of its own."""

    def append(self, x: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        """Adds rows ``x (*B, k, d)``, ``r``, ``w (*B, k)`` to history and to what is carried."""
        self.history.append(x, r, w)
        self.carry(x, r, w)

    @abstractmethod
    def carry(self, x: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        """Adds rows that the history has already to what is carried."""

    @abstractmethod
    def fit(self, ridge: Tensor) -> Fit:
        """The minimiser for lambda ``(*B)``."""

    @abstractmethod
    def _from_rows(self, likelihood: NegativeLogLikelihood, ball: Ball, start: Tensor) -> Fit:
        """The minimiser of any loss, by a batched solver."""

    def refined(self, fit: Fit, ridge: Tensor, where: Tensor | None = None) -> Fit:
        """A fit made fine, from the rows, where it is rough (and ``where (*B)`` holds)."""
        if not self.rough:
            return fit
        off = fit.doubt > FINE.hessian if self.need_hessian else fit.distance > FINE.theta
        return self._replaced(fit, off if where is None else off & where, ridge, None)

    def _replaced(self, fit: Fit, mask: Tensor, ridge: Tensor, tilt: Tensor | None) -> Fit:
        """Where the mask holds, the minimiser from the rows, searched from the fit on."""
        index = wait_for_indices(mask.reshape(-1))
        if not index.numel():
            return fit
        N = mask.numel()
        X, r, w = self.history.view()
        n, d = X.shape[-2:]

        def picked(values: Tensor) -> Tensor:
            return values.reshape(N, *values.shape[mask.ndim :])[index]

        likelihood = NegativeLogLikelihood(
            self.family,
            X.mT.reshape(N, d, n)[index].mT,  # picked as they lie in memory, feature by feature
            picked(r),
            None if w is None else picked(w),
            regularization=picked(ridge.expand(mask.shape)),
            tilt=None if tilt is None else picked(tilt),
            shards=self.history.shards,
        )
        start = torch.where(torch.isfinite(fit.theta), fit.theta, 0.0)
        ball = self.domain.resized(picked(self.radius))
        found = self._from_rows(likelihood, ball, picked(start))
        return Fit(
            *(
                old.reshape(N, *old.shape[mask.ndim :]).index_copy(0, index, new).reshape(old.shape)
                for old, new in zip(fit, found, strict=True)
            )
        )

    @abstractmethod
    def copy(self) -> Self:
        """With a state of its own, over the same history."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the rows."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues bit by bit from a saved state; the history has its rows already."""

    def _loss(
        self, ridge: Tensor, tilt: Tensor | None = None, imagined: Rows | None = None
    ) -> NegativeLogLikelihood:
        """F of all rows, and perhaps of one more."""
        rows, shards = self.history.view(), self.history.shards
        if imagined is not None and shards.is_first:  # it is to be counted once
            w = torch.ones_like(rows.r) if rows.w is None else rows.w
            assert imagined.w is not None
            rows = Rows(
                torch.cat([rows.X, imagined.X], dim=-2),
                torch.cat([rows.r, imagined.r], dim=-1),
                torch.cat([w, imagined.w], dim=-1),
            )
        return NegativeLogLikelihood(
            self.family, *rows, regularization=ridge, tilt=tilt, shards=shards
        )


class BallEstimator(Estimator):
    """The minimiser over the ball."""

    def _from_rows(self, likelihood: NegativeLogLikelihood, ball: Ball, start: Tensor) -> Fit:
        return minimum_in_ball(likelihood, ball, start)

    @abstractmethod
    def predict(self, ridge: Tensor, imagined: Rows | None) -> Tensor:
        """The minimiser ``(*B, d)`` with one more row, ``(*B, 1, d)``, that is only imagined."""


class TiltedChoice(NamedTuple):
    """The best arm of a tilted minimiser.

    Attributes:
        arm: with the largest product with it, ``(*B)``: certain, or to eight digits.
        certain: whether every tilt within the doubt has the same, ``(*B)``.
    """

    arm: Tensor
    certain: Tensor


class FreeEstimator(Estimator):
    """The minimiser over R^d; lambda > 0."""

    def _from_rows(self, likelihood: NegativeLogLikelihood, ball: Ball, start: Tensor) -> Fit:
        return ridge_minimum(likelihood, start)

    @abstractmethod
    def tilted(self, ridge: Tensor, tilt: Tensor, start: Tensor) -> Tensor:
        """``argmin F(theta) - <tilt, theta>``, ``(*B, d)``, to eight digits.

        Args:
            ridge: lambda, ``(*B)``.
            tilt: ``(*B, d)``.
            start: a first guess ``(*B, d)``, where nothing is carried.
        """

    @abstractmethod
    def choose(
        self, ridge: Tensor, tilt: Tensor, start: Tensor, arms: Tensor, doubt: Tensor, other: Tensor
    ) -> TiltedChoice:
        """The arm with the largest product with :meth:`tilted`: as much of it as decides.

        Args:
            ridge: lambda, ``(*B)``.
            tilt: ``(*B, d)``.
            start: a first guess ``(*B, d)``, where nothing is carried.
            arms: ``(*B, K, d)``.
            doubt: by how much the tilt may be off, ``(*B)``, in the dual norm of the Hessian at
                ``other``.
            other: the points where that norm is taken, ``(*B, d)``.
        """
