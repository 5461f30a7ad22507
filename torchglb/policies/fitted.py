"""The base of the policies that refit ``L + (lambda/2)|theta|^2`` after every observation.

The minimiser and the Hessian there are found when an observation arrives, so that questions change
nothing: on a CPU from sums that are carried from round to round, with a certified error
(:mod:`torchglb.inference.estimators`). In more than seven dimensions the digits that carried sums
do not have cost a pass over the history: policies that can choose without them do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimators import Estimator, ball_estimator, free_estimator
from torchglb.inference.fits import Fit
from torchglb.policies.base import Policy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.saving import learn_or_forget, taken
from torchglb.policies.settings import PolicySettings
from torchglb.rows.history import History


class FittedPolicy(Policy):
    """A policy that keeps its history and the minimiser of ``L + (lambda/2)|theta|^2``.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        aggregate: merge repeated arms, so that a fixed arm set costs the same at every time.
        settings: those of :class:`Policy`.
    """

    #: whether the minimiser is sought over the S-ball or over the whole space
    constrained: bool = False
    #: whether more is used than theta
    need_hessian: bool = True
    #: whether ``select`` asks for no more of an estimate than decides
    rough: ClassVar[bool] = False
    #: points at which the loss is carried
    points: int = 1

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        aggregate: bool = False,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.history = History(
            domain.dim,
            tuple(self.batch_shape),
            aggregate,
            validate=False,
            dtype=self.dtype,
            device=self.device,
        )
        problem = (family, domain, self.history, self.need_hessian, self.rough)
        self._estimator: Estimator = (
            ball_estimator(*problem) if self.constrained else free_estimator(*problem, self.points)
        )
        self._fit: Fit | None = None  # rough, if it may be; without observations it is known
        self._refined: Fit | None = None  # the same, fine: a cache
        self._V: RankOneInverse | None = None  # ``V = c I + sum x x'``, where a policy needs it

    def _track_design(self, scale: Tensor | float) -> RankOneInverse:
        """Makes V, which is ``scale I`` without observations.

        In float64: a sum of many rows in float32 loses what few of them say.
        """
        like = torch.zeros((), dtype=torch.float64, device=self.device)
        shape = tuple(self.batch_shape)
        self._V = RankOneInverse.scaled_identity(scale, shape, self.domain.dim, like)
        return self._V

    @property
    def _design(self) -> RankOneInverse:
        """V."""
        assert self._V is not None
        return self._V

    @abstractmethod
    def ridge(self) -> Tensor:
        """lambda > 0 now, ``(*B)``."""

    @torch.no_grad()
    def fit(self) -> Fit:
        """The minimiser with the Hessian there, ridge included, to eight digits."""
        if self._refined is None:
            self._refined = self._estimator.refined(self._rough_fit(), self.ridge())
        return self._refined

    def _rough_fit(self) -> Fit:
        """The minimiser as far as it is known without further passes."""
        if self._fit is None:
            ridge = self.ridge()
            zero = torch.zeros(
                (*ridge.shape, self.domain.dim), dtype=self.dtype, device=self.device
            )
            eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
            return Fit.exact(zero, torch.zeros_like(ridge), zero, ridge[..., None, None] * eye)
        return self._fit

    def _observed(self) -> History:
        return self.history

    def estimate(self) -> Tensor:  # noqa: D102
        return self.fit().theta.clone()

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._estimator.passes.clone()

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[Estimator, Fit, RankOneInverse | None]:
            estimator, V = self._estimator.copy(), self._V
            with torch.no_grad():
                estimator.append(x, r)
                V = None if V is None else V.plus_rows(x.double())
                return estimator, estimator.fit(self.ridge()), V

        # computed first, committed last
        self._estimator, self._fit, self._V = learn_or_forget([self.history], learn)
        self._refined = None

    def _state(self) -> dict[str, Any]:
        fit, V = self._fit, self._V
        return {
            "history": self.history.state_dict(),
            "estimator": self._estimator.state_dict(),
            "fit": None if fit is None else {name: t.clone() for name, t in fit._asdict().items()},
            "V": None if V is None else V.state_dict(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        kept, V = state["fit"], state["V"]
        fit = None
        if kept is not None:
            like = self._rough_fit()
            fit = Fit(*(taken(kept, name, getattr(like, name)) for name in Fit._fields))
        estimator = self._estimator.copy()
        estimator.load_state_dict(state["estimator"])
        design = None if self._V is None else self._V.loaded(V)
        self.history.load_state_dict(state["history"])
        self._estimator, self._fit, self._V, self._refined = estimator, fit, design, None
