"""Theorem 3.1 without a Lipschitz constant: the average loss over the ball takes its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import as_floats, check_count, check_probability
from torchglb.radii.base import LipschitzRadius, SimpleRadius
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics
from torchglb.radii.theorems.theorem31 import least_shrinkage


def mean_loss_radius(ball_loss: ArrayLike, loss_hat: ArrayLike, dim: int, delta: float) -> Tensor:
    """``beta^2 = log(1/delta) + inf_{0<c<=1} d log(1/c) + c (E_Q L - L(theta_hat))``.

    Q is uniform on the ball, and ``E_Q L = sum_s w_s E m(S|x_s|U)/g`` (the rewards drop out by
    symmetry). The posterior of Theorem 3.1, uniform on ``(1-c) theta_hat + c B(S)``, has by
    convexity an average loss of at most ``(1-c) L(theta_hat) + c E_Q L``: the Lipschitz constant,
    which bounds the same difference by ``2 S L_t c``, is not needed, and never gives less. On the
    event of Theorem 3.1 with the prior Unif(B(S)); same assumptions. O(1), no pass.

    Args:
        ball_loss: ``E_Q L``, from above, ``(*B)``.
        loss_hat: ``L(theta_hat)`` for any point of the ball, ``(*B)``.
        dim: d.
        delta: in (0, 1).

    Example:
        >>> import torch
        >>> zero = torch.zeros(())
        >>> round(float(mean_loss_radius(zero, zero, dim=2, delta=0.05)), 4)
        2.9957
    """
    check_probability("delta", delta)
    gain = as_floats("ball_loss", ball_loss) - as_floats("loss_hat", loss_hat)
    return least_shrinkage(gain, check_count("dim", dim, least=1)) - math.log(delta)


@dataclass(frozen=True)
class MeanLoss(SimpleRadius):
    """Theorem 3.1 with the mean loss in place of a Lipschitz constant; O(1) to evaluate, no pass.

    Never larger than :class:`Lipschitz` with either constant.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, MeanLoss())
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> round(float(sequence.evaluation().radius), 2)
        10.28
    """

    def squared(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, loss: Tensor
    ) -> LipschitzRadius:
        ball_loss = statistics.ball_loss / problem.family.dispersion
        radius = least_shrinkage(ball_loss - loss, problem.dim) + problem.log_failure
        return LipschitzRadius(radius, problem.delta, 0.0)
