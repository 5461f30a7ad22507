"""OFULog-r (Abeille, Faury, Calauzenes, AISTATS 2021): optimism over a regularised log-loss set.

With n observations, ``lambda = d log(2 + n)``, ``F = L + (lambda/2)|theta|^2``, theta_hat its
minimiser over all of R^d and H its Hessian:

    ``argmax_x max <x, theta>`` over ``|theta| <= S``, ``F(theta) - F(theta_hat) <= beta^2``,
    ``beta = g + g^2/sqrt(lambda)``,  ``g = sqrt(lambda) S + noise``,

where noise bounds that of the rewards, ``|sum_s (r_s - mu(<x_s, theta*>)) x_s|`` in
``H(theta*)^-1`` (:mod:`torchglb.policies.bernstein`, with ``log det(I + sum x x'/(4 rho))``).

**Proven** (the form of the set and of g is the paper's; the noise is derived again): the gradient
of F at theta* is lambda theta* minus that sum, so its norm in ``H(theta*)^-1`` is at most g. With
``D = theta* - theta_hat`` and G the mean of H over the segment between them, it is G D. Self-
concordance gives ``G >= H(theta*)/(1 + |D|)``, so ``y = |D| in G`` has ``y^2 <= (1 + |D|) g^2``;
``|D| <= y/sqrt(lambda)`` then gives ``y <= beta``, and ``F(theta*) - F(theta_hat) <= y^2``.

``constants="public"`` keeps what public code does, for comparison, without guarantee: ``beta = g +
g^2/lambda``, the determinant of H at theta_hat (for that at theta*), and

    ``c = log(1/delta) + log det(H)/2 - (d/2) log lambda + log(F_d(2 lambda)/F_d(lambda))``,
    ``g = min( sqrt(lambda)(1/2 + S) + 2 c/sqrt(lambda), sqrt(lambda) S + c )``,

F_d the distribution function of chi^2 with d degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice
from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.inference.estimator_base import HESSIAN_ERROR
from torchglb.inference.estimators import FreeEstimator, free_estimator
from torchglb.inference.level import Height
from torchglb.policies.bernstein import noise_bound, ridge_of
from torchglb.policies.exact import ExactPolicy
from torchglb.policies.geometry import log_chi_square_ratio
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import check_constants, learn_or_forget, taken
from torchglb.policies.settings import CONSTANTS, Constants, ExactSettings
from torchglb.rounding import round_up

#: pays for the rounding of ``log det V > 0``, carried over at most 512 steps
LOGDET_ERROR = 1.0 + 1e-12


@register
class OFULogR(ExactPolicy):
    """OFULog-r, for logistic rewards.

    Args:
        constants: ``"proven"`` or ``"public"``, those of public code.
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = OFULogR(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "ofulog-r"
    requires = Requirements(families=(Bernoulli,))

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        constants: Constants = "proven",
        **settings: Unpack[ExactSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.constants = check_choice("constants", constants, CONSTANTS)
        self.guaranteed = self.constants == "proven"
        self._free = free_estimator(
            self.family, self.domain, self._program.history, need_hessian=constants == "public"
        )
        shape, d = tuple(self.batch_shape), self.domain.dim
        zero = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._rho = ridge_of(d, 0)
        # in float64, whatever the rows are: its log-determinant is part of the level
        self._V = RankOneInverse.scaled_identity(4.0 * self._rho, shape, d, zero.double())
        self._level_now = self._level_of(
            zero, torch.full_like(zero, d * math.log(self._ridge())), self._V
        )

    def _ridge(self) -> float:
        return ridge_of(self.domain.dim, len(self._program.history))

    def _height(self) -> Height:
        return Height(level=self._level_now)

    def _level_of(self, least: Tensor, logdet: Tensor, V: RankOneInverse) -> Tensor:
        """B of ``min F`` over R^d, ``log det H``, ``(*B)`` each, and ``V = 4 rho I + sum x x'``."""
        d, lam = self.domain.dim, self._ridge()
        root, S = math.sqrt(lam), self.domain.radius_like(least).double()
        if self.constants == "public":
            mass = log_chi_square_ratio(d, lam)
            c = 0.5 * logdet.double() - 0.5 * d * math.log(lam) - math.log(self.delta) + mass
            g = torch.minimum(root * (0.5 + S) + 2.0 * c / root, root * S + c)
            beta = g + g.square() / lam
        else:
            growth = LOGDET_ERROR * V.logdet - d * math.log(4.0 * self._rho)
            g = root * S + noise_bound(growth.clamp_min(0.0), d, self.delta, lam)
            beta = g + g.square() / root
        return round_up(least.double() + beta.square(), self.dtype)

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[FreeEstimator, RankOneInverse, Tensor]:
            free, V = self._free.copy(), self._V.plus_rows(x.double())
            with torch.no_grad():
                self._append(x, r)
                free.carry(x, r)
                fit = free.fit(torch.full_like(self._level_now, self._ridge()))
                logdet = torch.zeros_like(fit.loss)
                if self.constants == "public":
                    # H may be smaller than the true one
                    missing = self.domain.dim * HESSIAN_ERROR
                    logdet = torch.linalg.slogdet(fit.hessian).logabsdet + missing
                return free, V, self._level_of(fit.loss, logdet, V)

        self._free, self._V, self._level_now = learn_or_forget([self._program.history], learn)

    def _state(self) -> dict[str, Any]:
        mine: dict[str, Any] = {"constants": self.constants, "V": self._V.state_dict()}
        mine |= {"free": self._free.state_dict(), "level": self._level_now.clone()}
        return super()._state() | mine

    def _load(self, state: Mapping[str, Any]) -> None:
        check_constants(state, self.constants)
        level, free = taken(state, "level", self._level_now), self._free.copy()
        free.load_state_dict(state["free"])
        V = self._V.loaded(state["V"])
        super()._load(state)
        self._free, self._V, self._level_now = free, V, level
