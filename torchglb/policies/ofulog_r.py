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
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.families import Bernoulli
from torchglb.policies.base import Requirements
from torchglb.policies.estimator_base import HESSIAN_ERROR
from torchglb.policies.estimators import FreeEstimator, free_estimator
from torchglb.policies.exact import ExactPolicy, Height
from torchglb.policies.parts import learn_or_forget, log_chi_square_ratio, taken
from torchglb.policies.registry import register


@register
class OFULogR(ExactPolicy):
    """OFULog-r, for logistic rewards.

    Args:
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.
    """

    name = "ofulog-r"
    requires = Requirements(families=(Bernoulli,))

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._free = free_estimator(self.family, self.domain, self._program.history)
        shape, d, lam = tuple(self.batch_shape), self.domain.dim, self._ridge()
        zero = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._level_now = self._level_of(zero, torch.full_like(zero, d * math.log(lam)))

    def _ridge(self) -> float:
        return self.domain.dim * math.log(2.0 + len(self._program.history))

    def _height(self) -> Height:
        return Height(level=self._level_now)

    def _level_of(self, least: Tensor, logdet: Tensor) -> Tensor:
        """B of ``min L_reg`` over R^d and ``log det H``, ``(*B)`` each."""
        d, lam = self.domain.dim, self._ridge()
        mass = log_chi_square_ratio(d, lam)
        c = 0.5 * logdet - 0.5 * d * math.log(lam) - math.log(self.delta) + mass
        S, root = self.domain.radius_like(c), math.sqrt(lam)
        g = torch.minimum(root * (0.5 + S) + 2.0 * c / root, root * S + c)
        return least + (g + g.square() / lam).square()

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[FreeEstimator, Tensor]:
            free = self._free.copy()
            with torch.no_grad():
                self._append(x, r)
                free.follow(x, r)
                fit = free.fit(torch.full_like(self._level_now, self._ridge()))
                # H may be smaller than the true one
                missing = self.domain.dim * HESSIAN_ERROR
                logdet = torch.linalg.slogdet(fit.hessian).logabsdet + missing
                return free, self._level_of(fit.loss, logdet)

        self._free, self._level_now = learn_or_forget([self._program.history], learn)

    def _state(self) -> dict[str, Any]:
        mine = {"free": self._free.state_dict(), "level": self._level_now.clone()}
        return super()._state() | mine

    def _load(self, state: Mapping[str, Any]) -> None:
        level, free = taken(state, "level", self._level_now), self._free.copy()
        free.load_state_dict(state["free"])
        super()._load(state)
        self._free, self._level_now = free, level
