"""The arms of a fixed arm set as contrasts: sums that grow by rows and give bounds for all arms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.checks import check_tensors
from torchglb.contrasts.arm_kernels import add_rows, arm_bounds
from torchglb.contrasts.lines import scale_weights
from torchglb.contrasts.weights import FLOOR
from torchglb.families import GLMFamily
from torchglb.rounding import power_of_two
from torchglb.sets import Interval

#: of the scales of :mod:`torchglb.contrasts.lines`, so many are carried
SCALES = 11


class ArmSums(NamedTuple):
    """What is carried for N problems; replaced as a whole.

    Attributes:
        inverse: ``H^-1`` of the rows, ``(N, d, d)``.
        forms: ``<c, H^-1 c>``, ``(N, K)``.
        guess: a running estimate, ``(N, d)``.
        counts: sum of the weights of each arm's rows, ``(N, K)``.
        B: ``(N, K, K)``.
        P: ``(N, K, K, U)``.
        Y: ``(N, K)``.
    """

    inverse: Floats
    forms: Floats
    guess: Floats
    counts: Floats
    B: Floats
    P: Floats
    Y: Floats


class ArmContrasts:
    """Bounds for every arm of a fixed set, each valid at ``1 - delta`` at all times.

    The derivation is in :mod:`torchglb.contrasts.arm_kernels`. Immutable: :meth:`with_rows` gives a
    new one. Rewards are Gaussian, binomial or Poisson.

    Args:
        family: the GLM family.
        S: the radii of the balls, ``(N)``.
        arms: ``(N, K, d)``.
        delta: of each arm's bound.
        sums: to continue from.
    """

    def __init__(
        self,
        family: GLMFamily,
        S: Floats,
        arms: Floats,
        delta: float,
        sums: ArmSums | None = None,
    ) -> None:
        known = family.compiled()
        assert known is not None
        self._family, self._S, self.arms, self.delta = known, S, arms, delta
        self._dispersion = family.dispersion
        units, lengths = unit_rows(torch.from_numpy(arms))
        self._units, self._lengths = units.numpy(), lengths.numpy()
        self._scales: Floats = np.exp2(1.0 - np.arange(SCALES)) * math.sqrt(family.dispersion)
        weights = np.array(scale_weights()[:SCALES])
        self._levels = -family.dispersion * np.log(weights * delta)
        variance = float(family.variance(torch.zeros((), dtype=torch.float64)))
        self._floor = FLOOR * variance / family.dispersion
        self.sums = self._empty() if sums is None else sums

    def _empty(self) -> ArmSums:
        N, K, d = self.arms.shape
        inverse = np.repeat(np.eye(d)[None] * self._dispersion, N, axis=0)
        forms = (self._units**2).sum(-1) * self._dispersion
        return ArmSums(
            inverse,
            forms,
            np.zeros((N, d)),
            np.zeros((N, K)),
            np.zeros((N, K, K)),
            np.zeros((N, K, K, SCALES)),
            np.zeros((N, K)),
        )

    def with_rows(self, X: Floats, r: Floats, w: Floats | None = None) -> ArmContrasts:
        """With rows ``(N, k, d)``, rewards and weights ``(N, k)``; one that is no arm counts 0."""
        sums = ArmSums(*(part.copy() for part in self.sums))
        equal = (X[:, :, None, :] == self.arms[:, None, :, :]).all(-1)  # (N, k, K)
        place = np.where(equal.any(-1), equal.argmax(-1), -1)
        weights = np.ones(r.shape) if w is None else w
        for i in range(len(X)):
            parts = (self._units[i], self._scales, *(part[i] for part in sums))
            rows = X[i], r[i], weights[i], place[i]
            add_rows(self._family, *rows, self._S[i], self._floor, *parts)
        new = object.__new__(ArmContrasts)
        vars(new).update(vars(self), sums=sums)
        return new

    def bounds(self, center: Floats, height: Floats) -> tuple[Floats, Floats]:
        """Ends of ``<x, theta*>`` of all arms, ``(N, K)`` each, on the joint set.

        Args:
            center: theta_hat, ``(N, d)``.
            height: ``L(theta*) - L(theta_hat)`` at most there, plus the Frank-Wolfe gap of
                theta_hat over the ball, ``(N)``.
        """
        lower, upper = np.empty_like(self._lengths), np.empty_like(self._lengths)
        for i in range(len(center)):
            wide = self._S[i] + float(np.linalg.norm(center[i]))
            _, _, _, counts, B, P, Y = (part[i] for part in self.sums)
            arm_bounds(
                self._family, self.arms[i], self._lengths[i], center[i], height[i], wide,
                counts, B, P, Y, self._scales, self._levels, lower[i], upper[i],
            )  # fmt: skip
        return lower, upper

    def state_dict(self) -> dict[str, Tensor]:
        """The sums."""
        return {name: torch.from_numpy(part.copy()) for name, part in self.sums._asdict().items()}

    def loaded(self, state: Mapping[str, Any]) -> ArmContrasts:
        """With the sums of a saved state."""
        check_tensors("state['contrasts']", state, self.state_dict())
        sums = ArmSums(*(state[name].numpy().copy() for name in ArmSums._fields))
        new = object.__new__(ArmContrasts)
        vars(new).update(vars(self), sums=sums)
        return new


def unit_rows(arms: Tensor) -> tuple[Tensor, Tensor]:
    """Arms divided by their lengths, in float64, and the lengths; the zero arm stays."""
    double = arms.double()
    scale = power_of_two(double)  # only the zero arm has length 0: squares would underflow
    rows = double / scale
    lengths = torch.linalg.vector_norm(rows, dim=-1)
    return rows / lengths.clamp_min(0.5)[..., None], scale[..., 0] * lengths


def as_interval(
    ends: tuple[Floats, Floats], shape: tuple[int, ...], dtype: torch.dtype
) -> Interval:
    """The ends as tensors of a batch shape, rounded outwards."""
    lower, upper = (torch.from_numpy(end).reshape(shape) for end in ends)
    if dtype == torch.float32:
        slip = 1e-6 * (1.0 + torch.maximum(lower.abs(), upper.abs()).clamp_max(1e30))
        lower, upper = lower - slip, upper + slip
    return Interval(lower.to(dtype), upper.to(dtype))
