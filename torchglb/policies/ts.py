"""Thompson sampling from the Laplace posterior (Abeille and Lazaric 2017; Kveton et al. 2020).

With theta_hat the minimiser over R^d of ``L(theta) + (lambda/2)|theta|^2`` and H the Hessian of L
there, draw

    ``theta ~ N(theta_hat, a^2 (lambda I + H)^-1)``,  index ``<x, theta>``:

the Laplace approximation of the posterior under the prior N(0, I/lambda), for a = 1. H carries the
dispersion, so that for Gaussian rewards this is the posterior itself.

A heuristic: proofs of its regret inflate the posterior by a factor of order sqrt(d log T) or more,
which a = 1 does not, and they do not cover a Laplace approximation far from its centre. It often
plays well; nothing is guaranteed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import known_none
from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.fits import Fit
from torchglb.linalg import cholesky, inverse_forms
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.geometry import certain_leader, cholesky_change, towards
from torchglb.policies.registry import register
from torchglb.policies.saving import taken
from torchglb.policies.settings import FittedSettings


@register
class ThompsonSampling(FittedPolicy):
    """Thompson sampling, a heuristic without guarantee.

    The numbers of a choice are drawn beforehand, as in :mod:`evill`.

    Args:
        family: any GLM.
        domain: the ball that contains theta*.
        scale: a.
        regularization: lambda.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = ThompsonSampling(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "ts"
    rough = True

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        scale: float = 1.0,
        regularization: float = 1.0,
        **settings: Unpack[FittedSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.scale = check_positive("scale", scale)
        self.regularization = check_positive("regularization", regularization)
        self._lam = self._constant(lambda radius: self.regularization)
        self._noise = self.random.normal(domain.dim, dtype=self.dtype)

    def ridge(self) -> Tensor:  # noqa: D102
        return self._lam

    def sample(self, noise: Tensor | None = None) -> Tensor:
        """The posterior sample of a standard normal ``(*B, d)``; of the next choice if left out."""
        return self._sample(self.fit(), self._noise if noise is None else noise)

    def _sample(self, fit: Fit, noise: Tensor) -> Tensor:
        factor = cholesky(fit.hessian)
        # (L L')^-1 = L^-T L^-1, so L^-T noise has this covariance
        turned = torch.linalg.solve_triangular(factor.mT, noise[..., None], upper=True)[..., 0]
        return fit.theta + self.scale * turned

    def _scores(self, arms: Tensor) -> Tensor:
        return (arms @ self.sample()[..., None])[..., 0]

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play; draws the numbers of the next choice."""
        arms = self._check_arms(arms)
        index = self._winner(arms)
        self._noise = self.random.normal(self.domain.dim, dtype=self.dtype)
        return index

    @torch.no_grad()
    def _winner(self, arms: Tensor) -> Tensor:
        """The arm with the largest score, certain for every theta_hat and H within their errors.

        The sample is off by ``u + a L^-T ((I + G)^-T - I) z``, with the distance of u and the G of
        :func:`torchglb.policies.geometry.cholesky_change`.
        """
        fit = self._rough_fit()
        scores = (arms @ self._sample(fit, self._noise)[..., None])[..., 0]
        change = cholesky_change(fit.doubt, self.domain.dim)
        turned = torch.where(change < 1.0, change / (1.0 - change), torch.inf)
        size = torch.linalg.vector_norm(self._noise, dim=-1)
        off = fit.distance + self.scale * turned * size
        error = off[..., None] * inverse_forms(arms, fit.hessian).sqrt()
        index, certain = certain_leader(scores, error)
        undecided = ~certain & (fit.doubt > 0.0)
        if known_none(undecided):
            return index
        fine = self._sample(self._estimator.refined(fit, self._lam, undecided), self._noise)
        return torch.where(undecided, (arms @ fine[..., None])[..., 0].argmax(-1), index)

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
