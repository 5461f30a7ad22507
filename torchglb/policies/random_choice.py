"""Random choice: every arm with the same probability. A sanity reference.

One uniform number u per choice whatever K is: the scores ``(u + k/K) mod 1`` differ by 1/K, and which of
them is largest is uniform over the arms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.parts import taken
from torchglb.policies.registry import register


@register
class RandomChoice(Policy):
    """Plays at random; the number of a choice is drawn beforehand, so ``scores`` shows it."""

    name = "random"

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        self._uniform = self.random.uniform(dtype=self.dtype)

    def _scores(self, arms: Tensor) -> Tensor:
        K = arms.shape[-2]
        place = torch.arange(K, dtype=self.dtype, device=self.device) / K
        return (self._uniform[..., None] + place) % 1.0

    def select(self, arms: Tensor) -> Tensor:
        """The index ``(*B)`` of the arm to play; draws the number of the next choice."""
        index = super().select(arms)
        self._uniform = self.random.uniform(dtype=self.dtype)
        return index

    def _update(self, x: Tensor, r: Tensor) -> None:
        pass

    def _state(self) -> dict[str, Any]:
        return {"uniform": self._uniform.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._uniform = taken(state, "uniform", self._uniform)
