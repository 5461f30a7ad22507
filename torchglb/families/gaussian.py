"""Gaussian rewards: the linear model."""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import kernel
from torchglb.checks import check_positive
from torchglb.families.base import GLMFamily, LossTerms, sampled_at
from torchglb.families.compiled import SQUARE, CompiledFamily


class Gaussian(GLMFamily):
    """Rewards with mean z and noise of standard deviation ``sigma``: ``m(z) = z^2/2``, g = sigma^2.

    The loss is also valid for any noise whose moment generating function is dominated by that of
    N(0, sigma^2) (MATH 1.2).

    Example:
        >>> Gaussian(sigma=0.5).dispersion
        0.25
    """

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        self.sigma = check_positive("sigma", sigma)

    @property
    def dispersion(self) -> float:  # noqa: D102
        return self.sigma**2

    def log_partition(self, z: Tensor) -> Tensor:  # noqa: D102
        return 0.5 * z * z

    def mean(self, z: Tensor) -> Tensor:  # noqa: D102
        return z

    def variance(self, z: Tensor) -> Tensor:  # noqa: D102
        return torch.ones_like(z)

    def third_derivative(self, z: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros_like(z)

    def derivative(self, z: Tensor, order: int) -> Tensor:  # noqa: D102
        return super().derivative(z, min(order, 3))

    def loss_terms(self, z: Tensor, r: Tensor) -> LossTerms:  # noqa: D102
        g = self.dispersion
        return LossTerms((0.5 * z - r) * z / g, (z - r) / g, torch.full_like(z, 1.0 / g))

    def centred_loss(self, z: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """``(r - z)^2/(2g)``, of about 1/2, and ``r^2/(2g)``, which at a small sigma is large."""
        half = 0.5 / self.dispersion
        return half * (r - z).square(), half * r.double().square()

    def compiled(self) -> CompiledFamily | None:  # noqa: D102
        return self._compiled_as(SQUARE) if type(self) is Gaussian else None

    def sample(  # noqa: D102
        self, z: ArrayLike, generator: torch.Generator | None = None
    ) -> Tensor:
        z = sampled_at(z, generator)
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return z + self.sigma * noise

    def quantile(self, z: Tensor, u: Tensor) -> Tensor:  # noqa: D102
        return z + self.sigma * torch.special.ndtri(u)

    def self_concordance(self, radius: float) -> float:  # noqa: D102
        return 0.0

    def max_variance(self, radius: float) -> float:  # noqa: D102
        return 1.0

    def min_variance(self, radius: float) -> float:  # noqa: D102
        return 1.0

    def derivative_ratio(self, order: int, radius: float) -> float | None:  # noqa: D102
        return 0.0


# ---- the same for one row, compiled: w is a weight, y a weight times a reward --------------------


@kernel
def square_loss(z: float, w: float, y: float) -> float:
    """``w z^2/2 - y z``."""
    return (0.5 * w * z - y) * z


@kernel
def square_slope(z: float, w: float, y: float) -> float:
    """``w z - y``."""
    return w * z - y
