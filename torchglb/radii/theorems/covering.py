"""The covering theorem of the appendix, in a form that holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_count, check_sizes
from torchglb.radii.base import LipschitzRadius
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics
from torchglb.radii.theorems.lipschitz import LipschitzBound
from torchglb.radii.theorems.theorem31 import (
    ConstantRadius,
    as_bound,
    lipschitz_constant,
    shared_delta,
)

SCALES = 64  # nets down to S 2^-63: finer ones cannot be best for any finite float L_t


def covering(
    lipschitz: LipschitzBound | ArrayLike, S: ArrayLike, dim: int, delta: float
) -> LipschitzRadius:
    """The appendix's theorem by a covering argument, with a prior over the scales of the net.

    ``beta^2 = log(1/delta) + min_k log((k+1)(k+2)) + d log(1 + 2S/c_k) + c_k L_t``, ``c_k = S
    2^-k``. With probability 1 - delta for all t, ``L_t(theta*) <= L_t(theta_hat) + beta_t^2`` for
    any theta_hat in the ball. The prior gives weight ``1/((k+1)(k+2))`` to the uniform law on a
    ``c_k``-net, which has at most ``(1 + 2S/c_k)^d`` points. (As printed, the net's scale is
    chosen after seeing L_t, which the proof does not allow; and a union over t is paid that
    Ville's inequality makes needless.) Looser than Theorem 3.1: it is here to show that. O(1), no
    pass.

    Args:
        lipschitz: L_t, ``(*B)``; numbers stand for a deterministic bound.
        S: radius of the ball.
        dim: d.
        delta: in (0, 1).

    Example:
        >>> round(float(covering(torch.tensor(300.0), 4.0, 2, 0.05).radius), 3)
        23.905
    """
    size, dim = check_sizes("S", S), check_count("dim", dim, least=1)
    return from_nets(as_bound(lipschitz), size, dim, delta)


def from_nets(
    lipschitz: LipschitzBound, S: Tensor | float, dim: int, delta: float
) -> LipschitzRadius:
    """:func:`covering` of what has been checked."""
    left, value = shared_delta(lipschitz, delta), lipschitz.value
    k = torch.arange(SCALES, dtype=value.dtype, device=value.device)
    # log(1 + 2S/c_k) = log(1 + 2^(k+1))
    price = torch.log((k + 1) * (k + 2)) + dim * torch.log1p(torch.exp2(k + 1))
    scaled = (S * value)[..., None] * torch.exp2(-k)
    return LipschitzRadius((price + scaled).amin(-1) - math.log(left), left, lipschitz.failure)


@dataclass(frozen=True)
class Covering(ConstantRadius):
    """The covering theorem of the appendix in its valid form: looser than Theorem 3.1. No pass.

    Args:
        constant: of the loss, as in :class:`Lipschitz`.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, Covering())
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> round(float(sequence.evaluation().radius), 2)
        20.71
    """

    def by_constant(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics
    ) -> LipschitzRadius:
        bound = lipschitz_constant(problem, statistics, self.constant)
        return from_nets(bound, problem.S, problem.dim, problem.delta)
