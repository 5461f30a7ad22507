"""Estimates that are carried from round to round, for the policies that need more than the minimum.

:class:`torchglb.ucb.minimum.CarriedMinimum` follows the minimiser of a growing loss through a
Taylor model. The same model gives the Hessian there, with a certified error; and an imagined row
can be added to it and taken out again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array, tensor, which
from torchglb.history import Rows
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory


class Fit(NamedTuple):
    """The minimiser of the loss over the ball, for N problems.

    Attributes:
        theta: ``(N, d)``.
        loss: an upper bound on its loss, with the ridge, ``(N)``.
        gradient: with the ridge, ``(N, d)``.
        hessian: of the data alone, ``(N, d, d)``, to the relative error asked for.
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    hessian: Tensor


def fit(minimum: CarriedMinimum, ridge: Tensor, tol: float) -> Fit:
    """The minimiser with gradient and Hessian; a pass only where the model is not good enough.

    Args:
        minimum: the carried minimum.
        ridge: lambda of every problem, ``(N)``.
        tol: relative error of the Hessian, in the order of positive semidefinite matrices.
    """
    minimum.find(ridge)
    # the loss is known to the tolerance, but where it is flat theta is not: one more Newton step
    everyone = torch.arange(ridge.shape[0], device=ridge.device)
    found, bracket = minimum._step(everyone, ridge)
    late = which(array(~(hessian_error(minimum, minimum._shift) <= tol)))
    if late.shape[0]:
        # one pass, then a Newton step that is short enough for the Hessian to hold
        index = tensor(late)
        minimum._recenter(index, tensor(found[late]))
        minimum._put(late, found, bracket, *minimum._step(index, ridge))
    model, theta = minimum.model(), tensor(found)
    gradient = model.gradient + ridge[:, None] * theta
    return Fit(theta, tensor(bracket.high), gradient, model.hessian)


def hessian_error(minimum: CarriedMinimum, shift: Tensor) -> Tensor:
    """``C e^(R D) D^(q-1) / (q-1)!``: how far m'' is from its polynomial, relative to m''.

    Args:
        minimum: whose Taylor model is meant.
        shift: how far from its point, ``(N, d)``.
    """
    reach = minimum.longest * torch.linalg.vector_norm(shift, dim=-1)
    power = minimum.order - 1
    growth = minimum._ratio * torch.exp(minimum.concordance * reach) * reach**power
    # a ratio of 0 is an exact model; infinity times no distance is no error either
    return torch.where(reach > 0, growth / math.factorial(power), 0.0)


class ImaginedHistory(FlatHistory):
    """A history, and perhaps an imagined row behind it.

    Attributes:
        imagined: a row ``(N, 1, d)`` with reward and weight ``(N, 1)``, or None.
    """

    imagined: Rows | None = None

    def rows(self, index: Tensor) -> Rows:
        """The rows of the problems ``index``."""
        seen = super().rows(index)
        if self.imagined is None or not self.shards.is_first:  # it is to be counted once
            return seen
        weights = torch.ones_like(seen.r) if seen.w is None else seen.w
        x, y, w = self.imagined
        assert w is not None
        return Rows(
            torch.cat([seen.X, x[index]], dim=-2),
            torch.cat([seen.r, y[index]], dim=-1),
            torch.cat([weights, w[index]], dim=-1),
        )


class PredictableMinimum(CarriedMinimum):
    """The carried minimum of a loss that may contain one imagined row."""

    data: ImaginedHistory

    def learn(self, x: Tensor, r: Tensor) -> None:
        """One more row, ``x (N, 1, d)`` and ``r (N, 1)``."""
        self.data.history.append(x, r)
        self.observe(x, r, torch.ones_like(r))

    def predict(self, ridge: Tensor, imagined: Rows | None = None) -> Tensor:
        """The minimiser, ``(N, d)``, with an imagined row that is forgotten afterwards."""
        if imagined is None:
            return tensor(self.find(ridge)[0])
        sums, rest, point, longest = self._sums, self._rest, self._point, self.longest
        x, y, w = imagined
        assert w is not None
        self.data.imagined = imagined
        self.observe(x, y, w)
        theta = tensor(self.find(ridge)[0])
        # where the model has moved, its sums hold the imagined row at the new point
        moved = (self._point != point).any(-1)[:, None]
        extra = self.sums_at(self._point, imagined)
        self._sums = torch.where(moved, self._sums - extra, sums)
        self._rest = torch.where(moved, self._rest, rest)
        self.longest = longest
        self.data.imagined = None
        return theta
