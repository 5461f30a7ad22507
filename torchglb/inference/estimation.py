"""The two estimators of a confidence sequence: ``Refit()`` and ``Incremental()``.

Each is a settings object; ``begin`` makes what runs. An estimate may be any point of the ball: a
better one makes sets smaller, none makes them wrong.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_tolerance, refuse
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.forgetting import ForgettingHistory
from torchglb.inference.estimator_base import HESSIAN_ERROR
from torchglb.inference.estimators import BallEstimator, ball_estimator
from torchglb.inference.fits import Fit
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap, raise_unless_converged
from torchglb.rows.history import History

#: the loss of the estimate may lie this far above the minimum, relative to ``1 + |loss|``
NEAR = 1e-4


class RunningEstimate(ABC):
    """The minimiser over the ball of the loss of rows that keep coming.

    Attributes:
        history: the rows.
        carries: whether a question starts from what the last one has found.
    """

    history: History
    carries: ClassVar[bool] = False

    def append(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:
        """Adds rows, as :meth:`torchglb.History.append` does."""
        self.history.append(x, r, weight)

    def append_at_once(self, x: ArrayLike, r: ArrayLike, longest: float) -> int:
        """Adds plain rows by one compiled call that checks them; how many, 0 if it has none."""
        return 0

    @abstractmethod
    def estimate(self, likelihood: NegativeLogLikelihood, loss_only: bool = False) -> Estimate:
        """The minimiser now.

        Args:
            likelihood: the loss of the rows.
            loss_only: whether a theta that is not unique will do, as long as its loss is.
        """

    def copy(self) -> Self:
        """With a state of its own, over the same rows."""
        return copy.copy(self)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the rows."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; the rows are there already."""


class EstimatorSettings(ABC):
    """How a confidence sequence estimates: settings only."""

    @abstractmethod
    def begin(self, domain: Ball, history: History) -> RunningEstimate:
        """What runs, over a history that knows its family."""


@dataclass(frozen=True)
class Refit(EstimatorSettings):
    """Fits anew when asked: certified and differentiable.

    Args:
        tol: the loss is within ``tol (1 + |loss|)`` of the minimum; 1e-9 in float64, 1e-4 in
            float32 if left out.

    Example:
        >>> Refit()
        Refit(tol=None)
    """

    tol: float | None = None

    def __post_init__(self) -> None:
        if self.tol is not None:
            check_tolerance("tol", self.tol)

    def begin(self, domain: Ball, history: History) -> RunningEstimate:  # noqa: D102
        return _Refitted(domain, history, self.tol)


class _Refitted(RunningEstimate):
    def __init__(self, domain: Ball, history: History, tol: float | None) -> None:
        self.domain, self.history, self.tol = domain, history, tol

    def append_at_once(self, x: ArrayLike, r: ArrayLike, longest: float) -> int:
        return self.history.append_at_once(x, r, longest)

    def estimate(self, likelihood: NegativeLogLikelihood, loss_only: bool = False) -> Estimate:
        history = self.history
        start = history.start() if isinstance(history, ForgettingHistory) else None
        fit = minimize_likelihood(
            likelihood,
            self.domain,
            start=start,
            tol=self.tol,
            throw=False,
            loss_only=loss_only,
        )
        near = fit.gap <= NEAR * (1.0 + fit.loss.detach().abs())
        raise_unless_converged(torch.where(near, int(Status.CONVERGED), fit.status), "the estimate")
        return fit.estimate(hessian=True)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Incremental(EstimatorSettings):
    """Carries the loss and its derivatives from row to row: most estimates need no pass.

    What is carried are numbers: rows that require grad are refused (take :class:`Refit`). On a
    device, where passes are cheap, it fits anew.

    Example:
        >>> Incremental()
        Incremental()
    """

    def begin(self, domain: Ball, history: History) -> RunningEstimate:  # noqa: D102
        if isinstance(history, ForgettingHistory):
            raise refuse("estimator", "Refit() together with forgetting", self)
        assert history.family is not None
        return CarriedEstimate(ball_estimator(history.family, domain, history))


class CarriedEstimate(RunningEstimate):
    """What runs for :class:`Incremental`.

    Args:
        estimator: over the ball, of the rows of its history.
    """

    carries = True

    def __init__(self, estimator: BallEstimator) -> None:
        self.estimator, self.history = estimator, estimator.history
        self.none = torch.zeros_like(estimator.radius)  # no ridge

    def append(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:  # noqa: D102
        if any(t is not None and t.requires_grad for t in (x, r, weight)):
            raise refuse("x, r", "rows without grad for Incremental() (Refit() has it)", "grad")
        self.estimator.append(x, r, weight)

    def estimate(  # noqa: D102
        self, likelihood: NegativeLogLikelihood, loss_only: bool = False
    ) -> Estimate:
        with torch.no_grad():
            return estimate_of(self.estimator.fit(self.none), self.estimator.radius)

    def copy(self) -> Self:  # noqa: D102
        return type(self)(self.estimator.copy())

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        loaded = self.estimator.copy()
        loaded.load_state_dict(state)
        self.estimator = loaded


def estimate_of(fit: Fit, radius: Tensor) -> Estimate:
    """What a carried fit without ridge says about the loss, over balls of radius ``(*B)``."""
    gap = frank_wolfe_gap(fit.theta, fit.gradient, radius) + 2.0 * radius * fit.gradient_error
    lower = fit.loss - gap
    return Estimate(
        fit.theta,
        fit.loss,
        lower,
        fit.gradient,
        fit.hessian,
        fit.gradient_error,
        fit.doubt + math.log1p(HESSIAN_ERROR),
    )
