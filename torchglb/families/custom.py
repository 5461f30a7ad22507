"""A family from a function: give m, get the rest by differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import NUMBERS, check_positive, kind_of, refuse
from torchglb.families.base import GLMFamily, sampled_at


class CustomFamily(GLMFamily):
    """A GLM family given by its log-partition function.

    Args:
        log_partition: a differentiable elementwise function of a tensor, exact to some roundings:
            certificates are about m as it is computed. (``softplus`` of torch is z beyond its
            threshold of 20, which is 2e-9 too little for every row.)
        dispersion: g > 0.
        reward_range: the smallest and largest possible reward.
        self_concordance: R_s, as a number or a function of the radius S; without it the constant
            is searched on a grid, and whoever rests a certificate on it is warned
            (:class:`torchglb.errors.UndeclaredConstantWarning`).
        max_variance: R_mudot, likewise.
        min_variance: 1/kappa, likewise.
        sampler: draws rewards from ``(z, generator)``.

    Example:
        >>> logistic = CustomFamily(lambda z: torch.logaddexp(z, torch.zeros_like(z)))
        >>> logistic.mean(torch.tensor(0.0))
        tensor(0.5000)
    """

    def __init__(
        self,
        log_partition: Callable[[Tensor], Tensor],
        *,
        dispersion: float = 1.0,
        reward_range: tuple[float, float] = (-float("inf"), float("inf")),
        self_concordance: float | Callable[[float], float] | None = None,
        max_variance: float | Callable[[float], float] | None = None,
        min_variance: float | Callable[[float], float] | None = None,
        sampler: Callable[[Tensor, torch.Generator | None], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not callable(log_partition):
            raise refuse("log_partition", "a function of a tensor", kind_of(log_partition))
        low, high = _range(reward_range)
        self._log_partition = log_partition
        self._dispersion = check_positive("dispersion", dispersion)
        self.reward_range = (low, high)
        self._constants = {
            "self_concordance": self_concordance,
            "max_variance": max_variance,
            "min_variance": min_variance,
        }
        for name, constant in self._constants.items():
            is_size = isinstance(constant, NUMBERS) and constant >= 0.0  # an infinite one too
            if isinstance(constant, bool) or not (
                constant is None or is_size or callable(constant)
            ):
                raise refuse(name, "a number of at least 0, or a function of S", repr(constant))
        if sampler is not None and not callable(sampler):
            raise refuse("sampler", "a function of (z, generator)", kind_of(sampler))
        self._sampler = sampler
        self._convex_up_to = 0.0  # curvatures were looked at on [-S, S] for this S

    @property
    def dispersion(self) -> float:  # noqa: D102
        return self._dispersion

    def log_partition(self, z: Tensor) -> Tensor:  # noqa: D102
        return self._log_partition(z)

    def sample(  # noqa: D102
        self, z: ArrayLike, generator: torch.Generator | None = None
    ) -> Tensor:
        z = sampled_at(z, generator)
        if self._sampler is None:
            raise refuse("sampler", "a sampler given to CustomFamily", None)
        return self._sampler(z, generator)

    def self_concordance(self, radius: float) -> float:  # noqa: D102
        declared = self._declared("self_concordance", radius)
        return super().self_concordance(radius) if declared is None else declared

    def max_variance(self, radius: float) -> float:  # noqa: D102
        declared = self._declared("max_variance", radius)
        return super().max_variance(radius) if declared is None else declared

    def min_variance(self, radius: float) -> float:  # noqa: D102
        declared = self._declared("min_variance", radius)
        return super().min_variance(radius) if declared is None else declared

    def require_convex(self, radius: float) -> None:
        """Refuses a negative curvature on a grid of ``[-radius, radius]``; looks once."""
        if not radius <= self._convex_up_to:
            self._on_grid(2, radius)
            self._convex_up_to = radius

    def _declared(self, name: str, radius: float) -> float | None:
        self.require_convex(radius)
        constant = self._constants[name]
        return constant(radius) if callable(constant) else constant


def _range(given: Any) -> tuple[float, float]:
    """The smallest and the largest reward."""
    numbers = isinstance(given, tuple | list) and all(isinstance(end, NUMBERS) for end in given)
    if not (numbers and len(given) == 2 and given[0] < given[1]):
        raise refuse("reward_range", "a pair (low, high) with low < high", repr(given))
    return float(given[0]), float(given[1])
