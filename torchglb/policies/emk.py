"""EMK (Emmenegger, Mutny, Krause, NeurIPS 2023): optimism over a weighted likelihood-ratio set.

``argmax_x max <x, theta>`` over ``|theta| <= S``, ``sum_s w_s (l_s(theta) - l_s(theta_s)) <=
log(1/delta)``, where ``l_s(theta) = (m(z) - r_s z)/g`` at ``z = <x_s, theta>``.

Each theta_s is predictable: chosen before r_s is seen. Only then is the product of the likelihood
ratios a martingale, and the set valid:

- ``regularizer="ftrl"``: ``theta_s = argmin sum_{i<s} l_i + (lambda/2)|theta|^2`` over the ball;
- ``regularizer="vaw"`` (Vovk-Azoury-Warmuth, as AIOLI does): the same plus two imagined losses of
  x_s. For logistic rewards these are ``l(x_s, 1) + l(x_s, 0)``, twice the loss of the reward
  mu(0) = 1/2; and twice the loss of mu(0) it is for every family.

Weights ``w_s = 1/(1 + L b_s)``, ``b_s = 2 lambda S^2 |x_s|^2 in V_s^-1``, ``V_s = lambda I + a
sum_{i<s} x_i x_i'``, with L and a the largest and the least curvature of a loss, ``m''/g``.

The set is the paper's, and proven there: weights of at most 1 that are known before the reward keep
the product of the likelihood ratios a supermartingale.

Public code fits theta_s with r_s already in the data. That is not the published method, and its
sets are not valid. It also scores an arm by (sum of x)(sum of theta), which is <x, theta> only by
accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_positive, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimators import BallEstimator, ball_estimator
from torchglb.inference.level import Height
from torchglb.policies.exact import ExactPolicy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.saving import learn_or_forget, taken
from torchglb.policies.settings import REGULARIZERS, ExactSettings, Regularizer
from torchglb.radii import Problem
from torchglb.rounding import EVALUATION, round_up
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History


@register
class EMK(ExactPolicy):
    """EMK with predictable estimates, for any GLM.

    Args:
        regularizer: ``"vaw"`` (what the paper compares with) or ``"ftrl"``.
        regularization: lambda.
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = EMK(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "emk"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        regularizer: Regularizer = "vaw",
        regularization: float = 1.0,
        **settings: Unpack[ExactSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.regularizer = check_choice("regularizer", regularizer, REGULARIZERS)
        self.regularization = check_positive("regularization", regularization)
        family, d, batch = self.family, self.domain.dim, tuple(self.batch_shape)
        problem = Problem(family, self.domain, self.delta, batch, self.dtype, self.device)
        constants = (problem.S, problem.max_variance, problem.per_radius(family.min_variance))
        self._radius, most, least = (t.to(self.dtype).expand(batch) for t in constants)
        self._steepest, self._flattest = (v / family.dispersion for v in (most, least))
        if not bool(torch.isfinite(self._steepest).all()):
            raise refuse("family", "one with bounded m'' on the ball", type(family).__name__)
        self._lam = torch.full_like(self._radius, self.regularization)
        self._gram = RankOneInverse.scaled_identity(
            self.regularization, batch, d, self._radius
        )  # V
        # sum_s w_s l_s(theta_s), or a little more: in float64, whatever the rows are
        self._paid = torch.zeros_like(self._radius, dtype=torch.float64)
        # the loss of the estimates has no weights, so their rows are kept apart
        self._rows = History(
            d,
            batch,
            self._program.history.aggregate,
            validate=False,
            dtype=self.dtype,
            device=self.device,
        )
        self._estimator = ball_estimator(
            family, self.domain, self._rows, need_hessian=False, rough=True
        )

    def _height(self) -> Height:
        return Height(level=round_up(self._paid - math.log(self.delta), self.dtype))

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[RankOneInverse, Tensor, BallEstimator]:
            gram, paid, estimator = self._gram.copy(), self._paid, self._estimator.copy()
            weights = []
            with torch.no_grad():
                # one after the other: each estimate rests on the rewards before its own
                for s in range(r.shape[-1]):
                    row, reward = x[..., s : s + 1, :], r[..., s : s + 1]
                    weights.append(self._weigh(gram, row[..., 0, :]))
                    theta = estimator.predict(self._lam, self._imagined(row))
                    paid = self._pay(paid, weights[-1], row[..., 0, :], reward[..., 0], theta)
                    estimator.append(row, reward)
                if weights:
                    self._append(x, r, torch.stack(weights, dim=-1))
            return gram, paid, estimator

        rows = [self._rows, self._program.history]
        self._gram, self._paid, self._estimator = learn_or_forget(rows, learn)

    def _weigh(self, gram: RankOneInverse, x: Tensor) -> Tensor:
        """``w_s`` of the rows ``x (*B, d)``, which then enter V."""
        length = gram.squared_norms(x[..., None, :])[..., 0]
        bias = 2.0 * self._lam * self._radius.square() * length
        gram.add(x, self._flattest)
        return 1.0 / (1.0 + self._steepest * bias)

    def _pay(self, paid: Tensor, w: Tensor, x: Tensor, r: Tensor, theta: Tensor) -> Tensor:
        """``paid + w l(theta)`` of one row, and what its arithmetic may have lost."""
        w, x, r, theta = (t.double() for t in (w, x, r, theta))
        family, z = self.family, (x * theta).sum(-1)
        loss = family.nll(z, r)
        # an error of z counts by the slope of the loss, the terms of the loss by their size
        size = (family.mean(z).abs() + r.abs()) * self._radius.double() * self.domain.dim
        size = loss.abs() + (2.0 * (r * z).abs() + size) / family.dispersion
        eps = torch.finfo(torch.float64).eps
        return paid + w * (loss + 2.0 * EVALUATION * eps * size) + eps * paid.abs()

    def _imagined(self, x: Tensor) -> Rows | None:
        """What theta_s of the rows ``x (*B, 1, d)`` takes into account beside the past."""
        if self.regularizer != "vaw":
            return None
        middle = self.family.mean(torch.zeros_like(x[..., 0]))
        return Rows(x, middle, torch.full_like(middle, 2.0))

    def _observed(self) -> History:
        return self._rows  # those of the program are weighted

    def _state(self) -> dict[str, Any]:
        mine = {"gram": self._gram.state_dict(), "paid": self._paid.clone()}
        mine |= {"rows": self._rows.state_dict(), "estimator": self._estimator.state_dict()}
        return super()._state() | mine

    def _load(self, state: Mapping[str, Any]) -> None:
        gram, paid = self._gram.loaded(state["gram"]), taken(state, "paid", self._paid)
        estimator = self._estimator.copy()
        estimator.load_state_dict(state["estimator"])
        rows = state["rows"]
        super()._load(state)
        self._rows.load_state_dict(rows)
        self._gram, self._paid, self._estimator = gram, paid, estimator
