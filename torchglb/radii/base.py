"""The protocol of a radius: settings, the problem's constants and the carried state are apart.

A radius object holds settings only. :class:`Problem` holds what follows from family, ball and
delta. The state is a flat dictionary of tensors, made by ``init``, advanced by ``update`` and
``evaluate``, never changed in place: it can be saved and loaded as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import Floats
from torchglb.carried.source import RowArrays
from torchglb.checks import ValueChecks, as_floats, refuse
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics, carried_statistics, empty_statistics
from torchglb.recording import at_hand
from torchglb.rounding import round_up
from torchglb.ucb.program import ConvexRegion

State = Mapping[str, Tensor]


class Refinement(NamedTuple):
    """What a likelihood-ratio set can be intersected with, on the same event.

    ``L(theta) + (ridge/2)|theta|^2 - ridge <c, theta> <= level``, within a region. All tensors
    start with ``*B``.

    Attributes:
        outer: the level of the uniform prior, ``log(1/delta)`` plus what is free of delta.
        level: of the loss with ridge and tilt; in the same way free of delta but for that.
        ridge: not positive; 0 where there is no smaller set.
        center: c, ``(*B, d)``; the tilt is ``ridge c``.
        region: where the loss with ridge and tilt is convex; it contains the set.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, "centred")
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 50, [1.0, 0.0] * 50)
        >>> found = sequence.evaluation().refinement
        >>> bool(found.ridge <= 0), found.center.shape
        (True, torch.Size([2]))
    """

    outer: Tensor
    level: Tensor
    ridge: Tensor
    center: Tensor
    region: ConvexRegion

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, those of the region last."""
        return self.outer, self.level, self.ridge, self.center, *self.region.tensors()

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Refinement:
        """From what :meth:`tensors` gives."""
        outer, level, ridge, center, *region = tensors
        return cls(outer, level, ridge, center, ConvexRegion.of(region))


class Evaluation(NamedTuple):
    """A radius at one time.

    Attributes:
        level: ``(*B)``; the confidence set is ``{theta : L(theta) <= level}``. This is what is
            valid.
        radius: ``(*B)``, ``beta^2 = level - loss_hat``. Negative only if theta_hat itself is
            outside the set, which a minimiser over the ball never is for radii with ``confined``.
        delta_likelihood: the share of delta spent on the likelihood ratio.
        delta_lipschitz: the share spent on a Lipschitz constant that may fail; mostly 0.
        passes: over the history, on average over the problems of the batch; a pass is made only
            over the rows of the problems that need it.
        state: to be carried on.
        refinement: a part of that set that holds theta* too, if the radius has one.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([1.0, 0.0], 1.0)
        >>> found = sequence.evaluation()
        >>> bool(found.radius > 0), found.delta_likelihood
        (True, 0.05)
    """

    level: Tensor
    radius: Tensor
    delta_likelihood: float
    delta_lipschitz: float
    passes: float
    state: State
    refinement: Refinement | None = None


class Radius(ABC):
    """Settings of a confidence radius.

    Rows have norm at most 1 and weights in [0, 1], each fixed before its reward is seen; check them
    at the door (:func:`require_weights`), since ``update`` never looks at values.

    Attributes:
        confined: whether the statement assumes ``|theta*| <= S``, so that the set may be
            intersected with the ball.

    Example:
        >>> import torchglb as glb
        >>> radius = glb.radii.PACBayes()
        >>> isinstance(radius, Radius), radius.confined
        (True, True)
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> glb.ConfidenceSequence(*given, radius).radius is radius
        True
    """

    confined: bool = True

    @abstractmethod
    def init(self, problem: Problem) -> State:
        """The state before the first row. Raises InputError for a family that does not fit."""

    @abstractmethod
    def update(
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        """The state with k more rows, ``x (*B, k, d)``, ``r`` and ``w (*B, k)``; O(d^2) per row."""

    def of_rows(self, problem: Problem, rows: int) -> float | Tensor | None:
        """beta^2 where it depends on the number of rows alone, all of weight 1; else None."""
        return None

    def above_minimum(self, problem: Problem, state: State) -> Tensor | None:
        """beta^2 ``(*B)`` where it needs no estimate, and holds for any; else None."""
        return None

    def levels(
        self,
        problem: Problem,
        state: State,
        likelihood: Callable[[], NegativeLogLikelihood],
        rows: RowArrays | None = None,
        known: int = 0,
    ) -> tuple[Floats, State] | None:
        """The levels of N problems without an estimate, ``(N,)``, and the state to carry on.

        As valid as those of :meth:`evaluate`; None if it takes an estimate. The likelihood is asked
        for only if rows are needed.

        Args:
            problem: as in ``init``.
            state: with all rows of the likelihood.
            likelihood: makes it.
            rows: where they lie in memory, if the state has the first of them only.
            known: how many of them the state has.
        """
        return None

    @abstractmethod
    def evaluate(
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> Evaluation:
        """The level and the radius now.

        Args:
            problem: as in ``init``.
            state: with all rows of ``likelihood``.
            likelihood: the loss of the history, without ridge or tilt. The same rows may be merged
                (:class:`torchglb.rows.history.History` with ``aggregate``).
            estimate: any point of the ball with its loss; the better, the smaller the level.
        """


def as_level(problem: Problem, levels: Floats) -> Tensor:
    """``(*B)`` in the dtype of a problem, from ``(N,)``; not below what it was."""
    return round_up(torch.from_numpy(levels.reshape(problem.batch_shape)), problem.dtype)


class StatisticsRadius(Radius):
    """A radius whose state contains the running sums of :class:`RowStatistics`, packed."""

    def init(self, problem: Problem) -> State:  # noqa: D102
        return {"statistics": empty_statistics(problem).packed()}

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        sums = carried_statistics(problem, state["statistics"], x, r, w)
        return {**state, "statistics": sums}


class LipschitzRadius(NamedTuple):
    """A radius that rests on a Lipschitz constant, and how delta was divided between the two.

    Attributes:
        radius: beta^2, ``(*B)``.
        delta_likelihood: spent on the likelihood ratio.
        delta_lipschitz: spent on the constant; 0 if that is deterministic.

    Example:
        >>> import torchglb as glb
        >>> found = glb.radii.theorem31(torch.tensor(300.0), 4.0, dim=2, delta=0.05)
        >>> found.delta_likelihood, found.delta_lipschitz
        (0.05, 0.0)
    """

    radius: Tensor
    delta_likelihood: float
    delta_lipschitz: float


class SimpleRadius(StatisticsRadius):
    """A radius that needs the running sums and the loss at theta_hat, and no pass of its own."""

    @abstractmethod
    def squared(self, problem: Problem, statistics: RowStatistics, loss: Tensor) -> LipschitzRadius:
        """beta^2, for ``L(theta_hat)``, and how delta was divided."""

    def evaluate(  # noqa: D102
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> Evaluation:
        check_likelihood(likelihood)
        loss, statistics = estimate.loss.double(), statistics_of(problem, state)
        found = self.squared(problem, statistics, loss)
        level = loss + found.radius + rounding_at(problem, statistics, estimate.theta, loss)
        whole = conclude(problem, level, loss, 0.0, state)
        deltas = found.delta_likelihood, found.delta_lipschitz
        return whole._replace(delta_likelihood=deltas[0], delta_lipschitz=deltas[1])


def statistics_of(problem: Problem, state: State) -> RowStatistics:
    """The running sums in a state."""
    return RowStatistics.of(state["statistics"], problem.dim)


def check_likelihood(likelihood: NegativeLogLikelihood) -> None:
    """Refuses a loss that is more than the likelihood: the statements are about that alone."""
    if likelihood.is_ridged or likelihood.tilt is not None:
        raise refuse("likelihood", "a loss without ridge and tilt", "a regularised or tilted loss")


def checked_centre(likelihood: NegativeLogLikelihood, centre: ArrayLike) -> Tensor:
    """The centre ``(*B, d)`` of a posterior; refuses it, and rows that no statement is about."""
    if not isinstance(likelihood, NegativeLogLikelihood):
        raise refuse("likelihood", "a NegativeLogLikelihood", type(likelihood).__name__)
    check_likelihood(likelihood)
    point = as_floats("centre", centre)
    shape = (*likelihood.batch_shape, likelihood.dim)
    try:
        point = point.expand(shape)
    except RuntimeError:
        raise refuse("centre", f"shape {shape}", f"shape {tuple(point.shape)}") from None
    if likelihood.shards.is_whole and at_hand(point, *likelihood.tensors()):
        likelihood.check_values()
        checks = ValueChecks()
        checks.finite("centre", point)
        if (w := likelihood.w) is not None and not likelihood.merged:
            expected = "weights in [0, 1] (of merged rows: those of a History with aggregate=True)"
            checks.require("w", (w >= 0) & (w <= 1), expected, w)
        checks.settle()
    return point


def require_weights(checks: ValueChecks, w: Tensor) -> None:
    """Adds to ``checks`` that weights lie in [0, 1].

    Then ``E[ratio^w] <= (E ratio)^w <= 1`` by Jensen, and weighted likelihood ratios are still
    supermartingales; above 1 they are not.

    Example:
        >>> checks = ValueChecks()
        >>> require_weights(checks, torch.tensor([0.0, 0.5, 1.0]))
        >>> checks.settle()
    """
    checks.require("weight", (w >= 0) & (w <= 1), "weights in [0, 1]", w)


def row_sum(likelihood: NegativeLogLikelihood, each: Tensor) -> Tensor:
    """``sum_s w_s each_s / g`` over the rows of all processes, ``(*B)`` in float64."""
    weighted = each if likelihood.w is None else each * likelihood.w
    (total,) = likelihood.shards.sum(weighted.sum(-1))
    return total.double() / likelihood.family.dispersion


def reward_length(likelihood: NegativeLogLikelihood) -> Tensor:
    """``sum_s w_s |r_s| |x_s| / g``, ``(*B)``: one light pass."""
    length = torch.linalg.vector_norm(likelihood.X, dim=-1)
    return row_sum(likelihood, likelihood.r.abs() * length)


def rounding(
    dtype: torch.dtype, loss: Tensor, rewards: Tensor, norm: Tensor, carried: Tensor | float = 0.0
) -> Tensor:
    """A bound on the rounding error of a loss summed in ``dtype``, ``(*B)``; 0 without rows.

    ``(48 eps + n eps64) (|L| + 2 |theta| sum w |r| |x|/g)``: the second sum, ``rewards``, covers
    what cancels between ``m(z)`` and ``r z``; n, ``carried``, counts the terms that were added one
    by one to a running sum in float64. A term loses 8 eps (:data:`torchglb.rounding.EVALUATION`)
    and the sum of a tree 32 (:func:`torchglb.rounding.lost_in_sum`); 8 are left for products.
    """
    scale = loss.abs() + 2.0 * norm * rewards
    return (48.0 * torch.finfo(dtype).eps + carried * torch.finfo(torch.float64).eps) * scale


def conclude(
    problem: Problem, level: Tensor, loss_hat: Tensor, passes: float, state: State
) -> Evaluation:
    """An evaluation in the caller's dtype, rounded upwards; all of delta is the likelihood's."""
    level, radius = (round_up(value, problem.dtype) for value in (level, level - loss_hat))
    return Evaluation(level, radius, problem.delta, 0.0, passes, state)


def rounding_at(problem: Problem, statistics: RowStatistics, theta: Tensor, loss: Tensor) -> Tensor:
    """What rounding may have taken from a loss at theta, ``(*B)``; or at P of them, ``(*B, P)``."""
    norm = torch.linalg.vector_norm(theta.detach(), dim=-1)  # which need not have a derivative
    rewards, number = statistics.reward_length / problem.family.dispersion, statistics.number
    if loss.ndim > number.ndim:
        rewards, number = rewards[..., None], number[..., None]
    return rounding(problem.dtype, loss, rewards, norm, number)
