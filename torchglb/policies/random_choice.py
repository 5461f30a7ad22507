"""Random choice: every arm with the same probability. A sanity reference.

All scores are 0; the choice is ``floor(u K)`` for a uniform number u, one per choice whatever K is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.policies.base import Policy
from torchglb.policies.geometry import towards
from torchglb.policies.registry import register


@register
class RandomChoice(Policy):
    """Plays at random.

    Example:
        >>> import torchglb as glb
        >>> policy = RandomChoice(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "random"

    def _scores(self, arms: Tensor) -> Tensor:
        return torch.zeros(arms.shape[:-1], dtype=self.dtype, device=self.device)

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play."""
        arms = self._check_arms(arms)
        K = arms.shape[-2]
        uniform = self.random.uniform(dtype=torch.float64)
        return (uniform * K).long().clamp_max(K - 1)

    def select_ball(self) -> Tensor:
        """A point of the sphere, uniform."""
        return towards(self.random.normal(self.domain.dim, dtype=self.dtype))

    def _update(self, x: Tensor, r: Tensor) -> None:
        pass

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: Mapping[str, Any]) -> None:
        pass
