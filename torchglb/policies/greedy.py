"""Greedy: plays the arm that looks best, index ``<x, theta_hat>``, and never explores on purpose.

theta_hat is the minimiser over R^d of ``L(theta) + (lambda/2)|theta|^2``. A sanity reference.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimators import FreeEstimator
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.geometry import towards
from torchglb.policies.registry import register
from torchglb.policies.settings import FittedSettings


@register
class Greedy(FittedPolicy):
    """The greedy reference.

    Args:
        family: any GLM.
        domain: the ball that contains theta*.
        regularization: lambda.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = Greedy(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "greedy"
    need_hessian = False
    rough = True
    _estimator: FreeEstimator

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        regularization: float = 1.0,
        **settings: Unpack[FittedSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.regularization = check_positive("regularization", regularization)
        self._lam = self._constant(lambda radius: self.regularization)

    def ridge(self) -> Tensor:  # noqa: D102
        return self._lam

    @torch.no_grad()
    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play; of theta_hat no more is found than decides."""
        arms = self._check_arms(arms)
        theta = self._rough_fit().theta
        zero = torch.zeros_like(theta)
        choice = self._estimator.choose(self._lam, zero, theta, arms, zero[..., 0], zero)
        return choice.arm

    def select_ball(self) -> Tensor:  # noqa: D102
        return towards(self.fit().theta)

    def _scores(self, arms: Tensor) -> Tensor:
        return (arms @ self.fit().theta[..., None])[..., 0]
