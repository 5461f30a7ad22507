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

Public code fits theta_s with r_s already in the data. That is not the published method, and its
sets are not valid. It also scores an arm by (sum of x)(sum of theta), which is <x, theta> only by
accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_positive, check_shape, refuse
from torchglb.domain import Ball
from torchglb.history import History, Rows
from torchglb.policies.carried import ImaginedHistory, PredictableMinimum
from torchglb.policies.exact import ExactPolicy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.radii import Problem
from torchglb.ucb import Minimum

REGULARIZERS = ("vaw", "ftrl")
#: theta_s is certified to this in its loss; any predictable point is valid
PRECISION = 1e-10


@register
class EMK(ExactPolicy):
    """EMK with predictable estimates, for any GLM.

    Args:
        regularizer: ``"vaw"`` (what the paper compares with) or ``"ftrl"``.
        regularization: lambda.
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.
    """

    name = "emk"

    def __init__(
        self,
        *args: Any,
        regularizer: str = "vaw",
        regularization: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.regularizer = check_choice("regularizer", regularizer, REGULARIZERS)
        self.regularization = check_positive("regularization", regularization)
        family, d, batch = self.family, self.domain.dim, tuple(self.batch_shape)
        problem = Problem(family, self.domain, self.delta, batch, self.dtype, self.device)
        constants = (problem.S, problem.max_variance, problem.per_radius(family.min_variance))
        self._radius, most, least = (t.reshape(-1).to(self.dtype) for t in constants)
        self._steepest, self._flattest = (v / family.dispersion for v in (most, least))
        if not bool(torch.isfinite(self._steepest).all()):
            raise refuse("family", "one with bounded m'' on the ball", type(family).__name__)
        like, problems = self._radius, self._radius.shape[0]
        self._lam = torch.full_like(self._radius, self.regularization)
        self._gram = RankOneInverse.scaled_identity(self.regularization, (problems,), d, like)  # V
        self._paid = torch.zeros_like(self._radius)  # sum_s w_s l_s(theta_s)
        precision = PRECISION if self.dtype == torch.float64 else 1e-4
        # the loss of the estimates has no weights, so their rows are kept apart
        history = History(
            d,
            (problems,),
            self._program.history.aggregate,
            validate=False,
            dtype=self.dtype,
            device=self.device,
        )
        ball = Ball(d, self._radius)
        rows = ImaginedHistory(family, history)
        self._estimate = PredictableMinimum(rows, ball, self._radius, precision)

    def _level(self, minimum: Minimum) -> Tensor:
        return self._paid.reshape(self.batch_shape) - math.log(self.delta)

    @torch.no_grad()
    def _update(self, x: Tensor, r: Tensor) -> None:
        flat_x = x.reshape(-1, *x.shape[-2:])
        flat_r = r.reshape(-1, r.shape[-1])
        weight = torch.stack([self._weigh(row) for row in flat_x.unbind(-2)], dim=-1)
        self._append(x, r, weight.reshape(r.shape))
        # one after the other: each estimate rests on the rewards before its own
        for s in range(r.shape[-1]):
            row, reward = flat_x[:, s : s + 1], flat_r[:, s : s + 1]
            theta = self._predict(row)
            loss = self.family.nll((row[:, 0] * theta).sum(-1), reward[:, 0])
            self._paid = self._paid + weight[:, s] * loss
            self._estimate.learn(row, reward)

    def _weigh(self, x: Tensor) -> Tensor:
        """``w_s`` of the rows ``x (N, d)``, which then enter V."""
        length = self._gram.squared_norms(x[..., None, :])[..., 0]
        bias = 2.0 * self._lam * self._radius.square() * length
        self._gram.add(x, self._flattest)
        return 1.0 / (1.0 + self._steepest * bias)

    def _predict(self, x: Tensor) -> Tensor:
        """theta_s for the rows ``x (N, 1, d)``, before their rewards are seen."""
        imagined = None
        if self.regularizer == "vaw":
            middle = self.family.mean(torch.zeros_like(x[..., 0]))
            imagined = Rows(x, middle, torch.full_like(middle, 2.0))
        return self._estimate.predict(self._lam, imagined)

    def _state(self) -> dict[str, Any]:
        mine = {"gram": self._gram.state_dict(), "paid": self._paid.clone()}
        mine["rows"] = self._estimate.data.history.state_dict()
        return super()._state() | mine | {"estimate": self._estimate.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        gram, paid = state["gram"], state["paid"]
        estimate, rows = state["estimate"], state["rows"]
        check_shape("state['gram']['matrix']", gram["matrix"], self._gram.matrix.shape)
        check_shape("state['paid']", paid, self._paid.shape)
        super()._load(state)
        self._estimate.load_state_dict(estimate)
        self._estimate.data.history.load_state_dict(rows)
        self._gram.load_state_dict(gram)
        self._paid = paid.clone()
