"""GLM-UCB (Filippi, Cappe, Garivier and Szepesvari 2010), in its regularised form.

``V = d I + sum x x'``, theta_hat the minimiser of ``L + (d/2)|theta|^2`` over the S-ball, g the
dispersion (1 for the logistic model), R the sub-Gaussian constant of the rewards, (b - a)/2 on
[a, b], and ``kappa = max(1, g / min m'')``. Then theta* is in the ellipsoid

    ``|theta - theta_hat|`` in V ``<= radius``,
    ``radius = kappa [(R/g) sqrt(2 log(1/delta) + log det V - d log d) + sqrt(d) S]``,

and the index, on the scale of the mean, is ``mu(<x, theta_hat>) + (max m'') radius |x|`` in V^-1.

**Proven**, with the constants of the paper, but for its factor 2: it projects an unconstrained
estimate onto the ball by a non-convex program, and pays for that; we take the constrained
minimiser. Let ``D = theta* - theta_hat``, G the mean Hessian between the two, which is at least
V/kappa in the ball, and ``N = sum (r - mu(<x, theta*>)) x``. As theta_hat is optimal in the ball,
``|D|^2 in G <= <d theta* - N/g, D> <= (|N/g| in V^-1 + sqrt(d) S) |D| in V``, and the
self-normalised bound for sub-Gaussian noise (Abbasi-Yadkori and others 2011) has the rest.

``constants="public"`` keeps the bonus of public code, for comparison, without guarantee and without
a set: ``(max m'')/(min m'') (b - a) sqrt(...) + sqrt(d) S``. Its noise is twice as large as need
be, and its bias lacks both factors.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimator_base import FINE
from torchglb.policies.mean_ucb import MeanUCB
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import CONSTANTS, Constants, FittedSettings
from torchglb.sets import Event


@register
class GLMUCB(MeanUCB):
    """GLM-UCB.

    Args:
        family: a GLM of bounded rewards with m'' > 0 on the ball.
        domain: the ball that contains theta*.
        constants: ``"proven"`` or ``"public"``, those of public code.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = GLMUCB(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "glm-ucb"
    requires = Requirements(bounded_rewards=True)
    constrained = True
    need_hessian = False

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        constants: Constants = "proven",
        **settings: Unpack[FittedSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.constants = check_choice("constants", constants, CONSTANTS)
        self._event = Event(self.delta)
        self._least = self._smallest_variance()
        self._steepest = self._constant(family.max_variance)
        low, high = family.reward_range
        self._width = high - low
        self._kappa = (family.dispersion / self._least).clamp_min(1.0)
        self._track_design(float(domain.dim))

    def ridge(self) -> Tensor:  # noqa: D102
        return torch.full_like(self._kappa, float(self.domain.dim), dtype=self.dtype)

    def _noise(self) -> Tensor:
        """``sqrt(2 log(1/delta) + log det V - d log d)``, ``(*B)``."""
        d = self.domain.dim
        growth = (self._design.logdet - d * math.log(d)).clamp_min(0.0)
        return (2 * math.log(1 / self.delta) + growth).sqrt()

    def radius(self) -> Tensor:  # noqa: D102
        noise = 0.5 * self._width / self.family.dispersion * self._noise()
        bias = math.sqrt(self.domain.dim) * self.domain.radius_like(noise)
        inexact = FINE.local + self.fit().distance
        return self._kappa * (noise + bias) + self._kappa.sqrt() * inexact

    def bonus(self) -> Tensor:  # noqa: D102
        if self.constants == "proven":
            return self._steepest * self.radius()
        noise = self._steepest / self._least * self._width * self._noise()
        return noise + math.sqrt(self.domain.dim) * self.domain.radius_like(noise)
