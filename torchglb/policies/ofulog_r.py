"""OFULog-r (Abeille, Faury, Calauzenes, AISTATS 2021): optimism over a regularised log-loss set.

With n observations, ``lambda = d log(2 + n)``, ``L_reg = L + (lambda/2)|theta|^2``, theta_hat its
minimiser over all of R^d and H its Hessian there:

``argmax_x max <x, theta>`` over ``|theta| <= S``, ``L_reg(theta) - L_reg(theta_hat) <= (g +
g^2/lambda)^2``;
``c = log(1/delta) + log det(H)/2 - (d/2) log lambda + log(F_d(2 lambda)/F_d(lambda))``, F_d the
distribution function of chi^2 with d degrees of freedom;
``g = min( sqrt(lambda)(1/2 + S) + 2 c/sqrt(lambda), sqrt(lambda) S + c )``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.arrays import which
from torchglb.families import Bernoulli
from torchglb.mle import minimize_likelihood
from torchglb.policies.base import Requirements
from torchglb.policies.carried import fit
from torchglb.policies.exact import ExactPolicy
from torchglb.policies.parts import log_chi_square_ratio
from torchglb.policies.registry import register
from torchglb.ucb import Minimum

#: relative error of the Hessian in the radius
HESSIAN_TOLERANCE = 1e-8


@register
class OFULogR(ExactPolicy):
    """OFULog-r, for logistic rewards.

    Args:
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.
    """

    name = "ofulog-r"
    requires = Requirements(families=(Bernoulli,))

    def _ridge(self) -> float:
        return self.domain.dim * math.log(2.0 + self.rounds)

    @torch.no_grad()
    def _level(self, minimum: Minimum) -> Tensor:
        d, lam = self.domain.dim, self._ridge()
        least, hessian = self._unconstrained(lam)
        eye = torch.eye(d, dtype=self.dtype, device=self.device)
        logdet = torch.linalg.slogdet(hessian + lam * eye).logabsdet
        mass = log_chi_square_ratio(d, lam)
        c = 0.5 * logdet - 0.5 * d * math.log(lam) - math.log(self.delta) + mass
        S, root = self.domain.radius_like(c), math.sqrt(lam)
        g = torch.minimum(root * (0.5 + S) + 2.0 * c / root, root * S + c)
        return least + (g + g.square() / lam).square()

    def _unconstrained(self, lam: float) -> tuple[Tensor, Tensor]:
        """``min L_reg`` over R^d, ``(*B)``, and the Hessian of L there.

        Inside the ball it is the constrained one, which is carried from round to round.
        """
        carried = self._program._minimum
        ridge = torch.full_like(carried._radius, lam)
        found = fit(carried, ridge, HESSIAN_TOLERANCE)
        loss, hessian = found.loss, found.hessian
        norm = torch.linalg.vector_norm(found.theta, dim=-1)
        outside = which(norm >= carried._radius * (1.0 - 1e-9))
        if outside.numel():
            likelihood = self._program._data.likelihood(outside, ridge)
            # (lambda/2)|theta|^2 <= L_reg(0) = n log 2 at the minimiser
            farthest = 1.0 + math.sqrt(2.0 * self.rounds * math.log(2.0) / lam)
            ball = self.domain.resized(torch.full_like(norm[outside], farthest))
            free = minimize_likelihood(likelihood, ball, start=found.theta[outside], throw=False)
            eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
            loss = loss.index_copy(0, outside, free.loss)
            hessian = hessian.index_copy(0, outside, free.hessian - lam * eye)
        d = self.domain.dim
        return loss.reshape(self.batch_shape), hessian.reshape(*self.batch_shape, d, d)

    def _update(self, x: Tensor, r: Tensor) -> None:
        self._append(x, r)
