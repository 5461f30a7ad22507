"""The parameter domain: the centred Euclidean ball of radius S."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    NUMBERS,
    as_floats,
    check_count,
    check_positive,
    check_shape,
    check_tolerance,
    refuse,
)
from torchglb.rounding import power_of_two


@dataclass(frozen=True, init=False)
class Ball:
    """The ball ``{theta in R^d : |theta| <= S}``.

    Args:
        dim: d, at least 1.
        radius: S > 0; a number, or a tensor, NumPy array or list that
            broadcasts with the batch shape ``*B`` (one radius per problem).

    Example:
        >>> ball = Ball(2, 4.0)
        >>> ball.project(torch.tensor([3.0, 4.0]))
        tensor([2.4000, 3.2000])
    """

    dim: int
    radius: float | Tensor

    def __init__(self, dim: int, radius: ArrayLike) -> None:
        object.__setattr__(self, "dim", check_count("dim", dim, least=1))
        object.__setattr__(self, "radius", _checked_radius(radius))

    def radius_like(self, other: Tensor) -> Tensor:
        """S with the dtype and device of ``other``; broadcasts with the batch shape."""
        if isinstance(self.radius, Tensor):
            return self.radius.to(dtype=other.dtype, device=other.device)
        return torch.full((), self.radius, dtype=other.dtype, device=other.device)

    def resized(self, radius: Tensor) -> Ball:
        """The ball of another radius, taken as it is (it may be under a transform)."""
        ball = object.__new__(Ball)
        object.__setattr__(ball, "dim", self.dim)
        object.__setattr__(ball, "radius", radius)
        return ball

    def constant(self, of_radius: Callable[[float], float], like: Tensor) -> Tensor:
        """A constant of the theory for the S of every problem; broadcasts with the batch shape.

        A constant of the largest S would be valid too, but then what one problem returns would
        depend on its companions.

        Args:
            of_radius: the constant as a function of S, for example ``family.max_variance``.
            like: gives dtype and device.
        """
        if not isinstance(self.radius, Tensor):
            return torch.full((), of_radius(self.radius), dtype=like.dtype, device=like.device)
        sizes = self.radius.reshape(-1).tolist()
        values = {S: of_radius(S) for S in set(sizes)}
        found = torch.tensor([values[S] for S in sizes], dtype=like.dtype, device=like.device)
        return found.reshape(self.radius.shape)

    @property
    def max_radius(self) -> float:
        """The largest S of the batch, as a number."""
        if isinstance(self.radius, Tensor):
            return float(self.radius.max())
        return self.radius

    def project(self, theta: ArrayLike) -> Tensor:
        """The nearest point of the ball; ``theta`` is ``(*B, d)``."""
        theta = self._vectors("theta", theta)
        radius = self.radius_like(theta)
        norm = torch.linalg.vector_norm(theta, dim=-1)
        # norm is 0 only where no scaling is needed, so the division is never by zero there
        scale = torch.where(
            norm > radius,
            radius / norm.clamp_min(torch.finfo(norm.dtype).tiny),
            torch.ones_like(norm),
        )
        return theta * scale[..., None]

    def contains(self, theta: ArrayLike, tolerance: float | None = None) -> Tensor:
        """Whether ``|theta| <= S``, up to a relative tolerance (default: a few roundings)."""
        theta = self._vectors("theta", theta)
        if tolerance is None:
            tolerance = 8 * torch.finfo(theta.dtype).eps
        check_tolerance("tolerance", tolerance)
        norm = torch.linalg.vector_norm(theta, dim=-1)
        return norm <= self.radius_like(theta) * (1 + tolerance)

    def support(self, x: ArrayLike) -> Tensor:
        """``max <x, theta>`` over the ball, which is ``S |x|``; ``x`` is ``(*B, d)``."""
        x = self._vectors("x", x)
        scale = power_of_two(x)  # squares of short vectors would underflow
        return self.radius_like(x) * scale[..., 0] * torch.linalg.vector_norm(x / scale, dim=-1)

    def log_volume(self) -> float | Tensor:
        """``log vol B(S) = (d/2) log pi - log Gamma(d/2 + 1) + d log S``."""
        half = 0.5 * self.dim
        unit = half * math.log(math.pi) - math.lgamma(half + 1)
        if isinstance(self.radius, Tensor):
            return unit + self.dim * torch.log(self.radius)
        return unit + self.dim * math.log(self.radius)

    def _vectors(self, name: str, given: ArrayLike) -> Tensor:
        """Vectors ``(*B, d)`` as a tensor."""
        value = as_floats(name, given)
        if value.ndim == 0 or value.shape[-1] != self.dim:
            check_shape(name, value, (*value.shape[:-1], self.dim))
        return value


def check_ball(
    domain: object, dim: int | None = None, batch_shape: Sequence[int] | None = None
) -> Ball:
    """A ball of dimension ``dim``, with a radius that broadcasts to a batch shape."""
    if not isinstance(domain, Ball):
        raise refuse("domain", "a Ball, such as Ball(dim, S)", repr(domain))
    if dim is not None and domain.dim != dim:
        raise refuse("domain", f"dim {dim}", f"dim {domain.dim}")
    if batch_shape is not None and isinstance(domain.radius, Tensor):
        shape, batch = tuple(domain.radius.shape), tuple(batch_shape)
        fits = zip(shape[::-1], batch[::-1], strict=False)
        if len(shape) > len(batch) or not all(have in (1, want) for have, want in fits):
            expected = f"a radius that broadcasts to the batch shape {batch}"
            raise refuse("domain", expected, f"radius of shape {shape}")
    return domain


def _checked_radius(given: ArrayLike) -> float | Tensor:
    """S as a number, or as a tensor of its own: later changes of what was given are not seen."""
    if isinstance(given, (*NUMBERS, np.bool_)):
        return check_positive("radius", given)
    radius = as_floats("radius", given)
    radius = radius.clone() if radius is given else radius
    if not bool((torch.isfinite(radius) & (radius > 0)).all()):
        raise refuse("radius", "positive finite numbers", radius.tolist())
    return radius
