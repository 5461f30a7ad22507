"""Theorem 3.1: the likelihood-ratio confidence sequence, from a Lipschitz constant."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import inlined
from torchglb.checks import (
    as_floats,
    check_choice,
    check_count,
    check_probability,
    check_size_tensor,
    check_sizes,
    check_tolerance,
    refuse,
)
from torchglb.choices import INFIMA, LIPSCHITZ_CONSTANTS, Infimum, LipschitzConstant
from torchglb.errors import InputError
from torchglb.radii.base import LipschitzRadius, SimpleRadius, State, statistics_of
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics, empty_statistics
from torchglb.radii.theorems.lipschitz import LipschitzBound, least_lipschitz, table1

LIPSCHITZ_SHARE = 0.05  # of delta, for the constants that hold with high probability only


def shrinkage_infimum(slope: ArrayLike, dim: int, inf: Infimum = "exact") -> Tensor:
    """``inf_{0 < c <= 1} d log(1/c) + c slope``, elementwise.

    Equal to ``slope`` if ``slope <= d`` (c = 1; also where it is negative), else to
    ``d log(slope/d) + d`` (c = d/slope). The closed form of the paper, ``d log(e max(1,
    slope/d))``, says d where the slope is below d: at t = 1 it is d, and the infimum 0.

    Args:
        slope: ``2 S L_t`` in Theorem 3.1.
        dim: d.
        inf: ``"exact"`` or ``"closed_form"``.

    Example:
        >>> shrinkage_infimum(torch.tensor([0.0, 1.0, 2.0]), dim=2)
        tensor([0., 1., 2.])
    """
    check_choice("inf", inf, INFIMA)
    return least_shrinkage(as_floats("slope", slope), check_count("dim", dim, least=1), inf)


def least_shrinkage(slope: Tensor, dim: int, inf: Infimum = "exact") -> Tensor:
    """:func:`shrinkage_infimum` of what has been checked."""
    log_form = dim * torch.log(slope.clamp_min(dim) / dim) + dim
    return log_form if inf == "closed_form" else torch.where(slope <= dim, slope, log_form)


@inlined
def shrinkage(slope: float, dim: int) -> float:
    """:func:`shrinkage_infimum` of a number, exact."""
    return slope if slope <= dim else dim * math.log(slope / dim) + dim


def as_bound(lipschitz: LipschitzBound | ArrayLike) -> LipschitzBound:
    """A Lipschitz constant, checked; numbers stand for a deterministic one."""
    value, failure = lipschitz, 0.0
    if isinstance(lipschitz, LipschitzBound):
        value, failure = lipschitz.value, check_tolerance("lipschitz.failure", lipschitz.failure)
    return LipschitzBound(check_size_tensor("lipschitz", value, finite=False), failure)


def shared_delta(lipschitz: LipschitzBound, delta: float) -> float:
    """What a bound leaves of delta."""
    check_probability("delta", delta)
    left = delta - lipschitz.failure
    if left <= 0:
        expected = f"a Lipschitz bound that fails with probability below delta = {delta:g}"
        raise refuse("lipschitz", expected, f"{lipschitz.failure:g}")
    return left


def theorem31(
    lipschitz: LipschitzBound | ArrayLike,
    S: ArrayLike,
    dim: int,
    delta: float,
    inf: Infimum = "exact",
) -> LipschitzRadius:
    """Theorem 3.1: ``beta^2 = log(1/delta) + inf_{0<c<=1} d log(1/c) + 2 S L_t c``.

    With probability 1 - delta, for all t at once, ``L_t(theta*) <= L_t(theta_hat) + beta_t^2``, for
    any theta_hat in the ball (the MLE plays no part in validity; Algorithm 1 misprints its argmin
    as argmax). Assumes ``|theta*| <= S``, and that L_t holds; if L_t may fail with probability p,
    the likelihood ratio gets delta - p, so that the whole statement has probability 1 - delta.
    (The paper spends delta twice.) Row weights in [0, 1], each chosen before its reward, keep the
    statement: by Jensen ``E[ratio^w] <= (E ratio)^w <= 1``. O(1), no pass.

    Args:
        lipschitz: L_t, ``(*B)``; numbers stand for a deterministic bound.
        S: radius of the ball.
        dim: d.
        delta: in (0, 1).
        inf: ``"exact"`` or ``"closed_form"`` (see :func:`shrinkage_infimum`).

    Example:
        >>> round(float(theorem31(torch.tensor(300.0), 4.0, 2, 0.05).radius), 3)
        19.176
    """
    check_choice("inf", inf, INFIMA)
    size, dim = check_sizes("S", S), check_count("dim", dim, least=1)
    return from_lipschitz(as_bound(lipschitz), size, dim, delta, inf)


def from_lipschitz(
    lipschitz: LipschitzBound,
    S: Tensor | float,
    dim: int,
    delta: float,
    inf: Infimum = "exact",
) -> LipschitzRadius:
    """:func:`theorem31` of what has been checked."""
    left = shared_delta(lipschitz, delta)
    infimum = least_shrinkage(2.0 * S * lipschitz.value, dim, inf)
    return LipschitzRadius(infimum - math.log(left), left, lipschitz.failure)


# ---- the radius ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConstantRadius(SimpleRadius):
    """One that rests on a Lipschitz constant of the loss.

    Args:
        constant: ``"table1"`` or ``"data"``, as in :class:`Lipschitz`.
    """

    constant: LipschitzConstant = "table1"

    def __post_init__(self) -> None:
        check_choice("constant", self.constant, LIPSCHITZ_CONSTANTS)

    def init(self, problem: Problem) -> State:  # noqa: D102
        lipschitz_constant(problem, empty_statistics(problem), self.constant)
        return super().init(problem)

    @abstractmethod
    def by_constant(self, problem: Problem, statistics: RowStatistics) -> LipschitzRadius:
        """beta^2, whatever the loss at theta_hat is, and how delta was divided."""

    def above_minimum(self, problem: Problem, state: State) -> Tensor:  # noqa: D102
        return self.by_constant(problem, statistics_of(problem, state)).radius

    def squared(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, loss: Tensor
    ) -> LipschitzRadius:
        return self.by_constant(problem, statistics)


@dataclass(frozen=True)
class Lipschitz(ConstantRadius):
    """Theorem 3.1. O(1) to evaluate with Table 1, O(d^3) with the data; no pass.

    Args:
        constant: ``"table1"``, the paper's, or ``"data"``, the deterministic bounds of
            :func:`torchglb.radii.data_lipschitz`, never larger. The Gaussian and Poisson rows of
            Table 1 hold with high probability only: they get a twentieth of delta. Where the
            deterministic bound is above such a row (of Gaussian rewards, for which it is exact, the
            row's event has then failed), it replaces it.
        inf: ``"exact"`` or ``"closed_form"``, as in :func:`torchglb.radii.theorem31`.

    Example:
        >>> Lipschitz(constant="data")
        Lipschitz(constant='data', inf='exact')
    """

    inf: Infimum = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("inf", self.inf, INFIMA)

    def of_rows(self, problem: Problem, rows: int) -> float | Tensor | None:
        """Table 1 has rewards of finite range at ``(b - a + 2 S R_mudot) n/g``."""
        per_row = problem.bounded_slope if self.constant == "table1" else None
        if per_row is None:
            return None
        if isinstance(per_row, Tensor):
            return least_shrinkage(per_row * rows, problem.dim, self.inf) + problem.log_failure
        # one ball for all; the closed form takes no slope below d
        slope = per_row * rows if self.inf == "exact" else max(per_row * rows, problem.dim)
        return shrinkage(slope, problem.dim) + problem.log_failure

    def by_constant(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics
    ) -> LipschitzRadius:
        bound = lipschitz_constant(problem, statistics, self.constant)
        found = from_lipschitz(bound, problem.S, problem.dim, problem.delta, self.inf)
        if bound.failure == 0:
            return found
        exact = least_lipschitz(problem.family, statistics, problem.S)
        floor = from_lipschitz(exact, problem.S, problem.dim, problem.delta, self.inf)
        return found._replace(radius=torch.maximum(found.radius, floor.radius))


def lipschitz_constant(
    problem: Problem, statistics: RowStatistics, constant: LipschitzConstant
) -> LipschitzBound:
    """L_t by the name of the constant; refuses a family for which Table 1 has no row."""
    if constant == "data":
        return least_lipschitz(problem.family, statistics, problem.S)
    spent = LIPSCHITZ_SHARE * problem.delta
    bound = table1(problem.family, statistics, problem.S, problem.max_variance, spent)
    if bound is None:
        name = type(problem.family).__name__
        expected = "a family with a row in Table 1 (rewards of finite range, Gaussian, Poisson)"
        raise InputError(f"{refuse('family', expected, name)}; constant='data' serves any family")
    return bound
