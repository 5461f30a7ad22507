"""Thompson sampling from the Laplace posterior (Abeille and Lazaric 2017; Kveton et al. 2020).

With theta_hat the minimiser over R^d of ``L(theta) + (lambda/2)|theta|^2`` and H the Hessian of L
there, draw

    ``theta ~ N(theta_hat, a^2 (lambda I + H)^-1)``,  index ``<x, theta>``:

the Laplace approximation of the posterior under the prior N(0, I/lambda), for a = 1. H carries the
dispersion, so that for Gaussian rewards this is the posterior itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import towards
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.parts import taken
from torchglb.policies.registry import register


@register
class ThompsonSampling(FittedPolicy):
    """Thompson sampling; the numbers of a choice are drawn beforehand, as in :mod:`evill`.

    Args:
        family: any GLM.
        domain: the ball that contains theta*.
        scale: a.
        regularization: lambda.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy` and ``aggregate``, by name.
    """

    name = "ts"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        *args: Any,
        scale: float = 1.0,
        regularization: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(family, domain, *args, **settings)
        self.scale = check_positive("scale", scale)
        self.regularization = check_positive("regularization", regularization)
        self._lam = self._constant(lambda radius: self.regularization)
        self._noise = self.random.normal(domain.dim, dtype=self.dtype)

    def ridge(self) -> Tensor:  # noqa: D102
        return self._lam

    def sample(self, noise: Tensor | None = None) -> Tensor:
        """The posterior sample of a standard normal ``(*B, d)``; of the next choice if left out."""
        theta, hessian = self.fit()
        factor = torch.linalg.cholesky(hessian)
        noise = self._noise if noise is None else noise
        # (L L')^-1 = L^-T L^-1, so L^-T noise has this covariance
        turned = torch.linalg.solve_triangular(factor.mT, noise[..., None], upper=True)[..., 0]
        return theta + self.scale * turned

    def _scores(self, arms: Tensor) -> Tensor:
        return (arms @ self.sample()[..., None])[..., 0]

    def select(self, arms: Tensor) -> Tensor:
        """The index ``(*B)`` of the arm to play; draws the numbers of the next choice."""
        index = super().select(arms)
        self._noise = self.random.normal(self.domain.dim, dtype=self.dtype)
        return index

    def select_ball(self) -> Tensor:
        """The direction of the sample; draws the numbers of the next choice."""
        x = towards(self.sample())
        self._noise = self.random.normal(self.domain.dim, dtype=self.dtype)
        return x

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"noise": self._noise.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        noise = taken(state, "noise", self._noise)
        super()._load(state)
        self._noise = noise
