"""Bandits whose parameter changes: by jumps, by a steady rotation, or both."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from torchglb.checks import check_count, check_tolerance, refuse
from torchglb.environments.bandits import Block, FiniteArms, uniform_in_ball
from torchglb.environments.base import register
from torchglb.environments.settings import FiniteArmsSettings
from torchglb.families import GLMFamily


@register
class Drifting(FiniteArms):
    """K new arms in every round, and a theta* that jumps or drifts.

    The direction of theta* is drawn anew every ``period`` rounds and turns by ``speed`` radians per
    round in the plane of the first two coordinates; its length stays S - 1. There is no single
    theta*, so coverage is not counted, and nobody's regret is certified.

    Args:
        period: rounds between jumps; 0 for none.
        speed: radians per round.
        settings: of :class:`FiniteArms`.
    """

    name = "drifting"
    changes = True

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        period: int = 1000,
        speed: float = 0.0,
        **settings: Unpack[FiniteArmsSettings],
    ) -> None:
        super().__init__(family, S, replicates, **settings)
        self.period = check_count("period", period)
        self.speed = check_tolerance("speed", speed)
        if self.dim < 2:
            raise refuse("dim", "at least 2, for a direction to change", self.dim)
        self._first = self.theta_star
        self._directions = self.streams("jumps")
        self.theta_star = None  # type: ignore[assignment]

    def theta_at(self, t: int) -> Tensor:
        """The parameter of round t, ``(N, d)``."""
        epoch = t // self.period if self.period else 0
        theta = self._first
        if epoch:
            d, length = self.dim, torch.linalg.vector_norm(theta, dim=-1, keepdim=True)
            u = self._directions.uniform_at(epoch * d, d, dtype=torch.float64)
            direction = torch.special.ndtri(u).to(self.dtype)
            norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
            theta = length * direction / norm
        angle = math.fmod(self.speed * t, 2.0 * math.pi)
        c, s = math.cos(angle), math.sin(angle)
        first, second = theta[:, 0], theta[:, 1]
        turned = torch.stack([c * first - s * second, s * first + c * second], -1)
        return torch.cat([turned, theta[:, 2:]], -1)

    def _draw(self, first: int, rounds: int) -> Block:
        x = uniform_in_ball(self._source, first, rounds, self.count, self.dim, self.dtype)
        arms = x.transpose(0, 1).expand(rounds, len(self.replicates), self.count, self.dim)
        theta = torch.stack([self.theta_at(t) for t in range(first, first + rounds)])
        z = (arms * theta[:, :, None, :]).sum(-1)
        mean = self.family.mean(z)
        return Block(arms, z, mean, mean.amax(-1))
