"""An estimate and what is known there: the one thing that radii and sets ask of an estimator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchglb.checks import check_shape
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import frank_wolfe_gap


@dataclass(frozen=True)
class Estimate:
    """A point of the ball, with bounds on its loss L and on the least loss over the ball.

    Any point will do: a better one makes a radius smaller, none makes it wrong. Where rows require
    grad, so may all of these.

    Attributes:
        theta: ``(*B, d)``, a point of the ball.
        loss: ``(*B)``, L(theta) or an upper bound on it; never a lower one.
        lower_bound: ``(*B)``, of the minimum of L over the ball.
        gradient: that of L at theta, ``(*B, d)``, if known.
        hessian: that of L at theta, ``(*B, d, d)``, if known. Unless errors are given, loss,
            gradient and Hessian are exact: a posterior may then be centred at theta without a pass.
        gradient_error: ``(*B)``, of carried sums: the length of the gradient's error at most.
        hessian_error: ``(*B)``, of carried sums: the Hessian at the minimiser lies between
            ``e^-error`` and ``e^error`` times ``hessian``.

    Example:
        >>> import torch
        >>> from torchglb.families import Bernoulli
        >>> rows = NegativeLogLikelihood(Bernoulli(), torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> known = Estimate.at(rows, Ball(2, 4.0), torch.zeros(2))
        >>> round(float(known.loss), 4), known.gradient
        (1.3863, tensor([-0.5000,  0.5000]))
    """

    theta: Tensor
    loss: Tensor
    lower_bound: Tensor
    gradient: Tensor | None = None
    hessian: Tensor | None = None
    gradient_error: Tensor | None = None
    hessian_error: Tensor | None = None

    def __post_init__(self) -> None:
        *batch, d = self.theta.shape
        check_shape("loss", self.loss, (*batch,))
        check_shape("lower_bound", self.lower_bound, (*batch,))
        if self.gradient is not None:
            check_shape("gradient", self.gradient, (*batch, d))
        if self.hessian is not None:
            check_shape("hessian", self.hessian, (*batch, d, d))

    @property
    def is_exact(self) -> bool:
        """Whether gradient and Hessian are known, and exact."""
        known = self.gradient is not None and self.hessian is not None
        return known and self.gradient_error is None

    def gap(self, S: Tensor) -> Tensor:
        """``max <gradient, theta - v>`` over ``|v| <= S``, its error included, ``(*B)``."""
        assert self.gradient is not None
        gap = frank_wolfe_gap(self.theta, self.gradient, S)
        return gap if self.gradient_error is None else gap + 2.0 * S * self.gradient_error

    @classmethod
    def at(
        cls, likelihood: NegativeLogLikelihood, domain: Ball, theta: Tensor, hessian: bool = False
    ) -> Estimate:
        """What one pass over the rows tells of a point of the ball, ``(*B, d)``.

        By convexity the minimum is at least ``L(theta) - max <grad L(theta), theta - v>`` over v in
        the ball.

        Args:
            likelihood: the loss L.
            domain: the ball.
            theta: the point.
            hessian: whether to compute the Hessian too, O(n d^2) instead of O(n d).
        """
        second = None
        if hessian:
            loss, gradient, second = likelihood.expand(theta)
        else:
            loss, gradient = likelihood.value_and_gradient(theta)
        gap = frank_wolfe_gap(theta, gradient, domain.radius_like(loss).expand(loss.shape))
        return cls(theta, loss, loss - gap, gradient, second)
