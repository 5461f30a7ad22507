"""The oracle: knows theta* and plays the best arm, index ``<x, theta*>``. A sanity reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_tensor, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.geometry import towards
from torchglb.policies.registry import register
from torchglb.policies.settings import PolicySettings


@register
class Oracle(Policy):
    """The policy of no regret.

    Args:
        family: any GLM.
        domain: the ball that contains theta*.
        theta_star: ``(d)`` or ``(*B, d)``; required.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = Oracle(glb.Bernoulli(), glb.Ball(2, 3.0), theta_star=[1.0, 0.5])
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "oracle"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        theta_star: ArrayLike | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        if theta_star is None:
            raise refuse("theta_star", "the true parameter, which oracle needs", None)
        theta = as_tensor("theta_star", theta_star, dtype=self.dtype, device=self.device)
        shape = (*self.batch_shape, domain.dim)
        try:
            self.theta_star = theta.expand(shape).clone()
        except RuntimeError:
            raise refuse("theta_star", f"shape {shape}", f"shape {tuple(theta.shape)}") from None
        checks = ValueChecks()
        checks.finite("theta_star", theta)
        checks.settle()

    def estimate(self) -> Tensor:  # noqa: D102
        return self.theta_star.clone()

    def select_ball(self) -> Tensor:  # noqa: D102
        return towards(self.theta_star)

    def _scores(self, arms: Tensor) -> Tensor:
        return (arms @ self.theta_star[..., None])[..., 0]

    def _update(self, x: Tensor, r: Tensor) -> None:
        pass

    def _state(self) -> dict[str, Any]:
        return {"theta_star": self.theta_star.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        if not torch.equal(state["theta_star"].to(self.theta_star), self.theta_star):
            raise refuse("state['theta_star']", "the theta_star of this policy", "another one")
