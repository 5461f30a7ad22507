"""The radii that rest on a posterior: on an ellipsoid, Gaussian, or the exact mixture."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.arrays import numbers_on
from torchglb.checks import check_choice, check_positive, refuse
from torchglb.estimate import Estimate
from torchglb.families import QuasiBounded
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    Radius,
    State,
    conclude,
    statistics_of,
)
from torchglb.radii.centre import Anchor, Barrier, Ridge, expand_at, flatten_batch
from torchglb.radii.gaussian_prior import (
    aggregated_normal_increment,
    check_whole_line,
    gaussian_divergence,
    largest_variance,
    normal_level,
    spectrum,
)
from torchglb.radii.mixture import check_mixture_dim, cubature_level
from torchglb.radii.pac_bayes import (
    Candidates,
    aggregated_increment,
    ellipsoid_level,
    ellipsoids,
    shape_entropy,
)
from torchglb.radii.posterior_radius import PASSES, PosteriorRadius, Screening
from torchglb.radii.problem import Problem
from torchglb.radii.simple_radii import MeanLoss, rounding_at, rounding_at_centres
from torchglb.radii.statistics import RowStatistics


@dataclass(frozen=True)
class PACBayes(PosteriorRadius):
    """Posteriors on ellipsoids inside the ball, the best of many; never above :class:`MeanLoss`.

    The ellipsoids of :func:`torchglb.radii.pac_bayes_level` around the minimisers of
    ``L(theta) - eta log(S^2 - |theta|^2)``. O(d^2) per row to carry a posterior, O(d^3) to
    evaluate. Passes are made only for the problems that need one: to move a centre whose penalised
    loss is more than ``tolerance`` above the minimum (one pass per Newton step), and to sum the
    increments of a new posterior row by row where that promises a gain of more than
    ``tolerance`` (two). Both become ever rarer: about 0.03 per round at n = 1000, d = 2.

    Args:
        posterior: ``"pearson"`` (densities ``(1 - v'Wv)^k``) or ``"uniform"`` (k = 0).
        etas: barrier weights, one centre each; ``(1, d/2)`` if left out (one, if d <= 2).
        kappas: in (0, 1), how far the ellipsoids may reach towards the sphere.
        rhos: multiples of ``d + 2k + 2`` for rho^2.
        shapes: k >= 0 of the Pearson-II densities.
        increments: ``"auto"``, ``"rows"`` (two passes at every evaluation, and nothing is held: the
            level then depends on the rows alone, up to the tolerance) or ``"aggregated"`` (none).
        tolerance: how much of the level may be left on the table to save passes.

    Example:
        >>> PACBayes(posterior="uniform").increments
        'auto'
    """

    posterior: str = "pearson"
    etas: tuple[float, ...] | None = None
    kappas: tuple[float, ...] = (0.5, 0.75, 0.95)
    rhos: tuple[float, ...] = (1.0, 4.0, 16.0)
    shapes: tuple[float, ...] = (0.0, 0.5, 2.0, 8.0, 32.0)
    increments: str = "auto"
    tolerance: float = 0.04

    def __post_init__(self) -> None:
        check_choice("posterior", self.posterior, ("pearson", "uniform"))
        check_choice("increments", self.increments, PASSES)
        check_positive("tolerance", self.tolerance)
        etas = (1.0,) if self.etas is None else self.etas
        for name, values, end in (
            ("etas", etas, math.inf),
            ("kappas", self.kappas, 1.0),
            ("rhos", self.rhos, math.inf),
        ):
            if not values or not all(0.0 < value < end for value in values):
                raise refuse(name, f"one or more numbers in (0, {end:g})", values)
        if not self.shapes or not all(0.0 <= shape < math.inf for shape in self.shapes):
            raise refuse("shapes", "one or more numbers of at least 0", self.shapes)

    def centre_weights(self, problem: Problem) -> tuple[float, ...]:  # noqa: D102
        if self.etas is not None:
            return self.etas
        return (1.0,) if problem.dim <= 2 else (1.0, 0.5 * problem.dim)

    def init(self, problem: Problem) -> State:  # noqa: D102
        _ = problem.self_concordance, problem.max_variance  # refuses a family without R_s
        return super().init(problem)

    def prior_variance(self, problem: Problem) -> Tensor:  # noqa: D102
        return problem.S.square()

    def curvature_bounds(self, problem: Problem) -> tuple[Tensor, Tensor]:  # noqa: D102
        return problem.self_concordance, problem.max_variance

    def penalty(self, problem: Problem) -> Barrier:  # noqa: D102
        eta = numbers_on(self.centre_weights(problem), problem.S.device)
        return Barrier(problem.S[:, None], eta)

    def fallback(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, theta_hat: Tensor, loss: Tensor
    ) -> Tensor:
        slack = rounding_at(problem, statistics, theta_hat, loss)
        return loss + MeanLoss().squared(problem, statistics, loss).radius + slack

    def screen(  # noqa: D102
        self, problem: Problem, anchor: Anchor, statistics: RowStatistics
    ) -> Screening:
        candidates = self._candidates(problem)
        found = ellipsoids(problem, anchor, candidates, statistics.longest)
        slack = 2.0 * rounding_at_centres(problem, statistics, anchor)
        start = problem.log_failure + (anchor.loss + slack)[..., None] + found.divergence
        concordance = problem.self_concordance[..., None, None]
        increment = aggregated_increment(
            problem, found.trace, found.longest, candidates.shape, concordance
        )
        hoped = 0.5 * found.trace / (2.0 * candidates.shape + problem.dim + 2.0)
        return Screening((start + increment).flatten(1), (start + hoped).flatten(1))

    def level_around(  # noqa: D102
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        points: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        candidates = self._candidates(problem)
        kinds, every = len(candidates.shape), torch.arange(len(chosen), device=chosen.device)
        candidate = Candidates(*(t[chosen % kinds] for t in candidates))
        return ellipsoid_level(problem, likelihood, points[every, chosen // kinds], candidate)

    def candidates(self, problem: Problem) -> Tensor:  # noqa: D102
        found = self._candidates(problem)
        return torch.stack([*found, shape_entropy(problem.dim, found.shape)], dim=-1)

    def _candidates(self, problem: Problem) -> Candidates:
        shapes = self.shapes if self.posterior == "pearson" else (0.0,)
        grid = tuple(
            number
            for kappa, rho, shape in itertools.product(self.kappas, self.rhos, shapes)
            for number in (kappa, rho * (problem.dim + 2.0 * shape + 2.0), shape)
        )
        return Candidates(*numbers_on(grid, problem.S.device).reshape(-1, 3).mT)


@dataclass(frozen=True)
class GaussianPrior(PosteriorRadius):
    """A Gaussian prior: valid wherever theta* lies, so the set is not intersected with the ball.

    The level of :func:`torchglb.radii.gaussian_prior_level` around the ridge estimate, the least
    over ``tempers``; passes are saved as in :class:`PACBayes`. A prior of its own: the least of
    this and another radius would cost log 2.

    Args:
        scale: the prior's standard deviation, in units of ``S/sqrt(d)``.
        tempers: a in ``W = H/a + I/s0^2``; 1 is best where the loss is quadratic.
        increments: ``"auto"``, ``"rows"`` (two passes at every evaluation, and nothing is held: the
            level then depends on the rows alone, up to the tolerance) or ``"aggregated"`` (none).
        tolerance: how much of the level may be left on the table to save passes.
    """

    scale: float = 1.0
    tempers: tuple[float, ...] = (1.0, 0.7, 0.4, 0.1)
    increments: str = "auto"
    tolerance: float = 0.04
    confined = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        check_choice("increments", self.increments, PASSES)
        check_positive("tolerance", self.tolerance)
        if not self.tempers or min(self.tempers) <= 0:
            raise refuse("tempers", "positive numbers, one or more", self.tempers)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_whole_line(problem.family)
        if self.increments == "aggregated" and isinstance(problem.family, QuasiBounded):
            expected = "'auto' or 'rows' for probit and cloglog, which need the rows"
            raise refuse("increments", expected, repr(self.increments))
        return super().init(problem)

    def prior_variance(self, problem: Problem) -> Tensor:
        """``s0^2 = scale^2 S^2/d``, ``(*B)``."""
        return (self.scale * problem.S).square() / problem.dim

    def curvature_bounds(self, problem: Problem) -> tuple[Tensor, Tensor]:  # noqa: D102
        largest = largest_variance(problem.family)
        unknown = torch.full_like(problem.S, math.inf)
        return unknown, unknown if largest is None else torch.full_like(unknown, largest)

    def penalty(self, problem: Problem) -> Ridge:  # noqa: D102
        return Ridge(self.prior_variance(problem)[:, None])

    def screen(  # noqa: D102
        self, problem: Problem, anchor: Anchor, statistics: RowStatistics
    ) -> Screening:
        values, point, variance = spectrum(anchor), anchor.point[:, 0], self.prior_variance(problem)
        divergence, scale = gaussian_divergence(values, point, variance, self._tempers(problem))
        slack = 2.0 * rounding_at_centres(problem, statistics, anchor)
        start = problem.log_failure + anchor.loss + slack + divergence
        increment = aggregated_normal_increment(problem.family, values, scale, statistics.longest)
        return Screening(start + increment, start + 0.5 * (values[:, None] / scale).sum(-1))

    def level_around(  # noqa: D102
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        points: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        tempers = self._tempers(problem)[chosen]
        variance = self.prior_variance(problem)
        return normal_level(likelihood, problem.delta, points[:, 0], variance, tempers)

    def candidates(self, problem: Problem) -> Tensor:  # noqa: D102
        tempers = self._tempers(problem)
        zero = torch.zeros_like(tempers)
        return torch.stack([zero, tempers, zero, zero], dim=-1)

    def _tempers(self, problem: Problem) -> Tensor:
        return numbers_on(self.tempers, problem.S.device)


@dataclass(frozen=True)
class Mixture(Radius):
    """The exact mixture, d <= 3: the floor for the uniform prior; never above :class:`PACBayes`.

    The cubature of :func:`torchglb.radii.mixture_level` around the centre of ``inner``. Thousands
    of evaluations of the loss: a yardstick, not a radius for every round.

    Args:
        inner: the radius that gives the centre and the upper end.
    """

    inner: PACBayes = PACBayes()

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_mixture_dim(problem.dim)
        return self.inner.init(problem)

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        return self.inner.update(problem, state, x, r, w)

    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        estimate: Estimate,
    ) -> Evaluation:
        loss = estimate.loss.double()
        inner, points = self.inner.evaluate_around(problem, state, likelihood, estimate)
        flat, rows = problem.flat, flatten_batch(likelihood)
        anchor = expand_at(rows, points[:, :1])
        rewards = statistics_of(problem, state).reward_length / problem.family.dispersion
        exact = cubature_level(flat, rows, anchor, rewards.reshape(-1)).reshape(loss.shape)
        level = torch.fmin(exact, inner.level.double())
        deltas = (problem.delta, 0.0)
        return conclude(level, loss, problem.dtype, deltas, inner.passes + 1.0, inner.state)
