"""Poisson rewards: counts with log-linear mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import known_none
from torchglb.backend import kernel
from torchglb.backend.elementary import exp
from torchglb.families.base import GLMFamily, LossTerms, exponential, sampled_at
from torchglb.families.compiled import EXPONENTIAL, CompiledFamily


class Poisson(GLMFamily):
    """Counts with mean ``e^z``: ``m(z) = e^z``, g = 1.

    The loss is also valid for non-negative rewards whose moment generating function is dominated
    by that of a Poisson law (MATH 1.2), so rewards need not be whole numbers.
    Beyond the largest finite exponent of the dtype (709.7 in float64, 88.7 in float32) values
    saturate at the largest finite number instead of overflowing.

    Example:
        >>> Poisson().mean(torch.tensor(0.0))
        tensor(1.)
    """

    reward_range = (0.0, float("inf"))

    def log_partition(self, z: Tensor) -> Tensor:  # noqa: D102
        return torch.exp(z.clamp_max(math.log(torch.finfo(z.dtype).max) * (1 - 1e-7)))

    def mean(self, z: Tensor) -> Tensor:  # noqa: D102
        return self.log_partition(z)

    def variance(self, z: Tensor) -> Tensor:  # noqa: D102
        return self.log_partition(z)

    def third_derivative(self, z: Tensor) -> Tensor:  # noqa: D102
        return self.log_partition(z)

    def derivative(self, z: Tensor, order: int) -> Tensor:  # noqa: D102
        return self.log_partition(z)

    def loss_terms(self, z: Tensor, r: Tensor) -> LossTerms:  # noqa: D102
        rate = self.log_partition(z)
        return LossTerms(rate - r * z, rate - r, rate)

    def compiled(self) -> CompiledFamily | None:  # noqa: D102
        return self._compiled_as(EXPONENTIAL, at_zero=1.0) if type(self) is Poisson else None

    def sample(  # noqa: D102
        self, z: ArrayLike, generator: torch.Generator | None = None
    ) -> Tensor:
        z = sampled_at(z, generator)
        return torch.poisson(self.mean(z), generator=generator)

    def quantile(self, z: Tensor, u: Tensor) -> Tensor:
        """By bisection of ``P(reward <= k) = Q(k + 1, rate)``, the incomplete gamma function."""
        rate, u = torch.broadcast_tensors(self.mean(z), u)
        low = torch.full_like(rate, -1.0)  # P(reward <= low) < u <= P(reward <= high)
        # twelve deviations and sixty: beyond, less is left than the last bit of u
        high = torch.ceil(rate + 12.0 * rate.sqrt() + 60.0)
        for _ in range(1100):  # a float64 has fewer halvings
            middle = torch.floor(0.5 * (low + high))
            open_ = (middle > low) & (middle < high)
            if known_none(open_):
                break
            reached = torch.special.gammaincc(middle.clamp_min(0.0) + 1.0, rate) >= u
            low = torch.where(open_ & ~reached, middle, low)
            high = torch.where(open_ & reached, middle, high)
        return high

    def self_concordance(self, radius: float) -> float:  # noqa: D102
        return 1.0

    def max_variance(self, radius: float) -> float:  # noqa: D102
        return exponential(radius)

    def min_variance(self, radius: float) -> float:  # noqa: D102
        return math.exp(-radius)

    def derivative_ratio(self, order: int, radius: float) -> float | None:  # noqa: D102
        return 1.0


# ---- the same for one row, compiled: w is a weight, y a weight times a reward --------------------


@kernel
def exponential_loss(z: float, w: float, y: float) -> float:
    """``w e^z - y z``."""
    return w * exp(z) - y * z


@kernel
def exponential_slope(z: float, w: float, y: float) -> float:
    """``w e^z - y``; all further derivatives are ``w e^z``."""
    return w * exp(z) - y
