"""The radii that rest on running sums alone: Theorem 3.1, mean loss, covering."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import check_choice, refuse
from torchglb.errors import InputError
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    State,
    StatisticsRadius,
    check_likelihood,
    conclude,
    rounding,
    statistics_of,
)
from torchglb.radii.centre import Anchor
from torchglb.radii.covering import covering
from torchglb.radii.lipschitz import LipschitzBound, data_lipschitz, table1
from torchglb.radii.mean_loss import mean_loss_radius
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics, empty_statistics
from torchglb.radii.theorem31 import (
    INFIMA,
    LipschitzRadius,
    shrinkage,
    shrinkage_infimum,
    theorem31,
)

CONSTANTS = ("table1", "data")
LIPSCHITZ_SHARE = 0.05  # of delta, for the constants that hold with high probability only


class SimpleRadius(StatisticsRadius):
    """A radius that needs the running sums and the loss at theta_hat, and no pass of its own."""

    @abstractmethod
    def squared(self, problem: Problem, statistics: RowStatistics, loss: Tensor) -> LipschitzRadius:
        """beta^2, for ``L(theta_hat)``, and how delta was divided."""

    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        estimate: Estimate,
    ) -> Evaluation:
        check_likelihood(likelihood)
        loss, statistics = estimate.loss.double(), statistics_of(problem, state)
        found = self.squared(problem, statistics, loss)
        level = loss + found.radius + rounding_at(problem, statistics, estimate.theta, loss)
        deltas = (found.delta_likelihood, found.delta_lipschitz)
        return conclude(level, loss, problem.dtype, deltas, 0.0, state)


@dataclass(frozen=True)
class ConstantRadius(SimpleRadius):
    """One that rests on a Lipschitz constant of the loss.

    Args:
        constant: ``"table1"`` or ``"data"``, as in :class:`Lipschitz`.
    """

    constant: str = "table1"

    def __post_init__(self) -> None:
        check_choice("constant", self.constant, CONSTANTS)

    def init(self, problem: Problem) -> State:  # noqa: D102
        lipschitz_constant(problem, empty_statistics(problem), self.constant)
        return super().init(problem)


@dataclass(frozen=True)
class Lipschitz(ConstantRadius):
    """Theorem 3.1. O(1) to evaluate with Table 1, O(d^3) with the data; no pass.

    Args:
        constant: ``"table1"``, the paper's, or ``"data"``, the deterministic bounds of
            :func:`torchglb.radii.data_lipschitz`, never larger. The Gaussian and Poisson rows of
            Table 1 hold with high probability only: they get a twentieth of delta. Should the data
            refute such a row (its event has then failed), the deterministic bound replaces it.
        inf: ``"exact"`` or ``"closed_form"``, as in :func:`torchglb.radii.theorem31`.

    Example:
        >>> Lipschitz(constant="data")
        Lipschitz(constant='data', inf='exact')
    """

    inf: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("inf", self.inf, INFIMA)

    def of_rows(self, problem: Problem, rows: int) -> float | Tensor | None:
        """Table 1 has rewards of finite range at ``(b - a + 2 S R_mudot) n/g``."""
        if self.constant != "table1" or not problem.has_bounded_rewards:
            return None
        per_row = problem.bounded_slope
        if isinstance(per_row, float):  # one ball for all
            slope = 2.0 * problem.max_radius * per_row * rows
            return shrinkage(slope, problem.dim, self.inf) + problem.log_failure
        slopes = 2.0 * problem.S * per_row * rows
        return shrinkage_infimum(slopes, problem.dim, self.inf) + problem.log_failure

    def squared(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, loss: Tensor
    ) -> LipschitzRadius:
        bound = lipschitz_constant(problem, statistics, self.constant)
        found = theorem31(bound, problem.S, problem.dim, problem.delta, self.inf)
        if bound.failure == 0:
            return found
        exact = data_lipschitz(problem.family, statistics, problem.S)
        floor = theorem31(exact, problem.S, problem.dim, problem.delta, self.inf)
        return found._replace(radius=torch.maximum(found.radius, floor.radius))


@dataclass(frozen=True)
class MeanLoss(SimpleRadius):
    """Theorem 3.1 with the mean loss in place of a Lipschitz constant; O(1) to evaluate, no pass.

    Never larger than :class:`Lipschitz` with either constant.
    """

    def squared(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, loss: Tensor
    ) -> LipschitzRadius:
        ball_loss = statistics.ball_loss / problem.family.dispersion
        radius = mean_loss_radius(ball_loss, loss, problem.dim, problem.delta)
        return LipschitzRadius(radius, problem.delta, 0.0)


@dataclass(frozen=True)
class Covering(ConstantRadius):
    """The covering theorem of the appendix in its valid form: looser than Theorem 3.1. No pass.

    Args:
        constant: of the loss, as in :class:`Lipschitz`.
    """

    def squared(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, loss: Tensor
    ) -> LipschitzRadius:
        bound = lipschitz_constant(problem, statistics, self.constant)
        return covering(bound, problem.S, problem.dim, problem.delta)


def lipschitz_constant(
    problem: Problem, statistics: RowStatistics, constant: str
) -> LipschitzBound:
    """L_t by the name of the constant; refuses a family for which Table 1 has no row."""
    if constant == "data":
        return data_lipschitz(problem.family, statistics, problem.S)
    spent = LIPSCHITZ_SHARE * problem.delta
    bound = table1(problem.family, statistics, problem.S, problem.max_variance, spent)
    if bound is None:
        name = type(problem.family).__name__
        expected = "a family with a row in Table 1 (rewards of finite range, Gaussian, Poisson)"
        raise InputError(f"{refuse('family', expected, name)}; constant='data' serves any family")
    return bound


def rounding_at(problem: Problem, statistics: RowStatistics, theta: Tensor, loss: Tensor) -> Tensor:
    """What rounding may have taken from a loss at theta, ``(*B)``."""
    norm = torch.linalg.vector_norm(theta.detach(), dim=-1)  # which need not have a derivative
    rewards = statistics.reward_length / problem.family.dispersion
    return rounding(problem.dtype, loss, rewards, norm, statistics.number)


def rounding_at_centres(problem: Problem, statistics: RowStatistics, anchor: Anchor) -> Tensor:
    """The same at P centres of each problem, ``(N, P)``."""
    rewards = (statistics.reward_length / problem.family.dispersion)[:, None]
    norm = torch.linalg.vector_norm(anchor.point, dim=-1)
    return rounding(problem.dtype, anchor.loss, rewards, norm, statistics.number[:, None])
