"""Logistic-UCB-1 (Faury, Abeille, Calauzenes and Fercoq 2020).

``lambda = d log(2 + n)``, theta_hat the minimiser of ``F = L + (lambda/2)|theta|^2`` over the
S-ball, ``V = d I + sum x x'``, ``kappa = max 1/m''``. With w a bound on the noise
(:mod:`torchglb.policies.bernstein`, with ``log det(I + sum x x'/(4 rho))``) theta* is in the
ellipsoid

    ``|theta - theta_hat|`` in V ``<= radius = sqrt(kappa) (y + sqrt(lambda) S)``,
    ``y = min( sqrt(1 + 2S) w,  (q + sqrt(q^2 + 4 (1 + S) w^2))/2 )``,  ``q = w^2/sqrt(lambda)``,

and the index, on the scale of the mean, is ``mu(<x, theta_hat>) + (1/4) radius |x|`` in V^-1.

**Proven**: let ``D = theta* - theta_hat`` and G the mean Hessian of F between the two, at least
V/kappa in the ball and ``H(theta*)/(1 + |D|)`` by self-concordance. As theta_hat is optimal in the
ball, ``|D|^2 in G <= <lambda theta* - N, D>``, N the noise: ``|D| in G <= sqrt(1 + |D|) w +
sqrt(lambda) S``, and ``|D|`` is at most 2S and at most ``|D| in G / sqrt(lambda)``, which is a
quadratic inequality. The paper projects an unconstrained estimate onto the ball by a non-convex
program instead, and pays a factor 2 for that.

``constants="public"`` keeps what public code does, for comparison, without guarantee and without a
set: theta_hat the minimiser over all of R^d, H the Hessian there, F_d the cdf of chi^2,

    ``c = log(1/delta) + (1/2) log det H - (d/2) log lambda + log(F_d(2 lambda)/F_d(lambda))``,
    ``g = min(sqrt(lambda)/2 + (2/sqrt(lambda)) c, 1 + c)``,
    ``bonus = (1/4) sqrt(kappa) min(sqrt(1 + 2S) g, g + g^2/sqrt(lambda)) + sqrt(lambda) S``.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice
from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.inference.estimator_base import FINE, HESSIAN_ERROR
from torchglb.linalg import cholesky
from torchglb.policies.bernstein import noise_bound, ridge_of
from torchglb.policies.geometry import log_chi_square_ratio
from torchglb.policies.mean_ucb import MeanUCB
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import CONSTANTS, Constants, FittedSettings
from torchglb.sets import Event


@register
class LogUCB1(MeanUCB):
    """Logistic-UCB-1.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        constants: ``"proven"`` or ``"public"``, those of public code.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = LogUCB1(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "log-ucb-1"
    requires = Requirements(families=(Bernoulli,))

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        constants: Constants = "proven",
        **settings: Unpack[FittedSettings],
    ) -> None:
        self.constants = check_choice("constants", constants, CONSTANTS)
        self.constrained = self.constants == "proven"
        self.need_hessian = not self.constrained
        super().__init__(family, domain, delta, **settings)
        self._event = Event(self.delta)
        self._kappa = 1.0 / self._smallest_variance()
        self._track_design(float(domain.dim))

    def ridge(self) -> Tensor:  # noqa: D102
        return torch.full_like(self._kappa, self._lam(), dtype=self.dtype)

    def _lam(self) -> float:
        return ridge_of(self.domain.dim, len(self.history))

    def radius(self) -> Tensor:  # noqa: D102
        d, lam = self.domain.dim, self._lam()
        rho, root = ridge_of(d, 0), math.sqrt(lam)
        # the design has d I where 4 rho I is needed
        eye = torch.eye(d, dtype=torch.float64, device=self.device)
        scaled = self._design.matrix + (4.0 * rho - d) * eye
        growth = torch.linalg.slogdet(scaled).logabsdet - d * math.log(4.0 * rho)
        w = noise_bound(growth.clamp_min(0.0), d, self.delta, lam)
        S = self.domain.radius_like(w)
        q = w.square() / root
        small = 0.5 * (q + (q.square() + 4.0 * (1.0 + S) * w.square()).sqrt())
        y = torch.minimum((1.0 + 2.0 * S).sqrt() * w, small)
        return self._kappa.sqrt() * (y + root * S + FINE.local + self.fit().distance)

    def bonus(self) -> Tensor:  # noqa: D102
        if self.constants == "proven":
            return 0.25 * self.radius()
        d, lam = self.domain.dim, self._lam()
        factor = cholesky(self.fit().hessian)
        logdet = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
        fixed = math.log(1 / self.delta) - 0.5 * d * math.log(lam) + log_chi_square_ratio(d, lam)
        c = fixed + logdet + 0.5 * d * HESSIAN_ERROR  # H may be smaller than the true one
        g = torch.minimum(math.sqrt(lam) / 2 + 2 / math.sqrt(lam) * c, 1 + c)
        S = self.domain.radius_like(g)
        width = torch.minimum((1 + 2 * S).sqrt() * g, g + g.square() / math.sqrt(lam))
        return 0.25 * self._kappa.sqrt() * width + math.sqrt(lam) * S
