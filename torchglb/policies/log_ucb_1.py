"""Logistic-UCB-1 (Faury, Abeille, Calauzenes and Fercoq 2020).

``lambda = d log(2 + n)``, theta_hat the minimiser of ``L + (lambda/2)|theta|^2`` over R^d, H the
Hessian there, lambda I included, F_d the cdf of chi^2 with d degrees of freedom:

    ``c = log(1/delta) + (1/2) log det H - (d/2) log lambda + log(F_d(2 lambda)/F_d(lambda))``,
    ``g = min(sqrt(lambda)/2 + (2/sqrt(lambda)) c, 1 + c)``,
    ``bonus = (1/4) sqrt(kappa) min(sqrt(1 + 2S) g, g + g^2/sqrt(lambda)) + sqrt(lambda) S``,

index on the scale of the mean: ``mu(<x, theta_hat>) + bonus |x|`` in (d I + sum x x')^-1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.policies.base import Requirements
from torchglb.policies.estimator_base import HESSIAN_ERROR
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.parts import log_chi_square_ratio
from torchglb.policies.registry import register


@register
class LogUCB1(FittedPolicy):
    """Logistic-UCB-1.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy` and ``aggregate``, by name.
    """

    name = "log-ucb-1"
    requires = Requirements(families=(Bernoulli,))

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        self._kappa = 1.0 / self._smallest_variance()
        self._track_design(float(domain.dim))

    def ridge(self) -> Tensor:  # noqa: D102
        return torch.full_like(self._kappa, self._lam())

    def _lam(self) -> float:
        return self.domain.dim * math.log(2 + len(self.history))

    def bonus(self) -> Tensor:
        """The factor of the norm, ``(*B)``."""
        d, lam = self.domain.dim, self._lam()
        factor = torch.linalg.cholesky(self.fit().hessian)
        logdet = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
        fixed = math.log(1 / self.delta) - 0.5 * d * math.log(lam) + log_chi_square_ratio(d, lam)
        c = fixed + logdet + 0.5 * d * HESSIAN_ERROR  # H may be smaller than the true one
        g = torch.minimum(math.sqrt(lam) / 2 + 2 / math.sqrt(lam) * c, 1 + c)
        S = self.domain.radius_like(g)
        width = torch.minimum((1 + 2 * S).sqrt() * g, g + g.square() / math.sqrt(lam))
        return 0.25 * self._kappa.sqrt() * width + math.sqrt(lam) * S

    def _scores(self, arms: Tensor) -> Tensor:
        theta = self.fit().theta
        mean = self.family.mean((arms @ theta[..., None])[..., 0])
        return mean + self.bonus()[..., None] * self._design.norms(arms)
