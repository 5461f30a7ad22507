"""The radii that rest on a posterior: on an ellipsoid, Gaussian, or the exact mixture."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_positive, refuse
from torchglb.families import QuasiBounded
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    State,
    StatisticsRadius,
    conclude,
    loss_at,
    rounding,
    statistics_of,
)
from torchglb.radii.centre import (
    Anchor,
    Barrier,
    Ridge,
    add_rows,
    flatten_batch,
    recentre,
    select,
)
from torchglb.radii.gaussian_prior import (
    aggregated_normal_increment,
    check_whole_line,
    gaussian_divergence,
    normal_row_increments,
    spectrum,
)
from torchglb.radii.laws import BallLaw, series_terms
from torchglb.radii.mixture import check_mixture_dim, cubature_level
from torchglb.radii.pac_bayes import Candidates, aggregated_increment, ellipsoids, row_increments
from torchglb.radii.problem import Problem
from torchglb.radii.simple_radii import mean_loss_level

PASSES = ("auto", "rows", "aggregated")


class CentredRadius(StatisticsRadius):
    """A radius whose state also carries P centres with the loss expanded there."""

    def centres(self, problem: Problem) -> int:
        """P."""
        return 1

    def init(self, problem: Problem) -> State:  # noqa: D102
        P, d = self.centres(problem), problem.dim
        anchor = Anchor(*(problem.zeros(P, *shape) for shape in ((d,), (), (d,), (d, d))))
        return super().init(problem) | anchor.entries()

    @torch.no_grad()
    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        anchor = add_rows(problem.family, Anchor.of(state), x, r, w)
        return super().update(problem, state, x, r, w) | anchor.entries()


def worthwhile(increments: str, gain: Tensor, tolerance: float) -> Tensor:
    """The problems whose increments are to be summed row by row, as an index ``(N',)``.

    ``"auto"`` looks at the gain that can be hoped for: one host synchronisation.
    """
    if increments == "auto":
        return (gain > tolerance).nonzero()[:, 0]
    number = len(gain) if increments == "rows" else 0
    return torch.arange(number, device=gain.device)


@dataclass(frozen=True)
class PACBayes(CentredRadius):
    """Posteriors on ellipsoids inside the ball, the best of many; never above :class:`MeanLoss`.

    The ellipsoids of :func:`torchglb.radii.pac_bayes_level` around the minimisers of
    ``L(theta) - eta log(S^2 - |theta|^2)``. O(d^3) to evaluate. Passes are made only for the
    problems that need one: to move a centre whose penalised loss is more than ``tolerance`` above
    the minimum (one pass per Newton step; ever rarer, about 0.03 per round at n = 1000, d = 2),
    and to sum the increments row by row while that may gain more than ``tolerance``, until n is
    large.

    Args:
        posterior: ``"pearson"`` (densities ``(1 - v'Wv)^k``) or ``"uniform"`` (k = 0).
        etas: barrier weights, one centre each; ``(1, d/2)`` if left out (one, if d <= 2).
        kappas: in (0, 1), how far the ellipsoids may reach towards the sphere.
        rhos: multiples of ``d + 2k + 2`` for rho^2.
        shapes: k >= 0 of the Pearson-II densities.
        increments: ``"auto"``, ``"rows"`` (a pass at every evaluation) or ``"aggregated"`` (none).
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

    def centres(self, problem: Problem) -> int:  # noqa: D102
        return len(self._etas(problem))

    def init(self, problem: Problem) -> State:  # noqa: D102
        _ = problem.self_concordance, problem.max_variance  # refuses a family without R_s
        return super().init(problem)

    @torch.no_grad()
    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        theta_hat: Tensor,
        loss_hat: Tensor | None = None,
        gradient_hat: Tensor | None = None,
        hessian_hat: Tensor | None = None,
    ) -> Evaluation:
        loss, passes = loss_at(likelihood, theta_hat, loss_hat)
        fallback = mean_loss_level(problem, statistics_of(state), theta_hat, loss)
        flat, rows = problem.flat, flatten_batch(likelihood)
        anchor = Anchor.of(state).reshape(flat.batch_shape)
        offer = None
        if gradient_hat is not None and hessian_hat is not None:
            known = (theta_hat, loss, gradient_hat, hessian_hat)
            offer = Anchor(*(t.double() for t in known)).broadcast(problem.batch_shape, anchor)
        eta = torch.tensor(self._etas(problem), dtype=torch.float64, device=loss.device)
        barrier = Barrier(flat.S[:, None], eta)
        anchor, moves = recentre(barrier, rows, anchor, self.tolerance, offer)
        level, more = self._level(flat, rows, anchor, state, fallback.reshape(-1))
        # fmin: a posterior whose arithmetic overflowed leaves the mean loss, which is valid
        best = torch.fmin(level.reshape(fallback.shape), fallback)
        state = state | anchor.reshape(problem.batch_shape).entries()
        deltas = (problem.delta, 0.0)
        return conclude(best, loss, problem.dtype, deltas, passes + moves + more, state)

    def _etas(self, problem: Problem) -> tuple[float, ...]:
        if self.etas is not None:
            return self.etas
        return (1.0,) if problem.dim <= 2 else (1.0, 0.5 * problem.dim)

    def _candidates(self, problem: Problem) -> Candidates:
        shapes = self.shapes if self.posterior == "pearson" else (0.0,)
        grid = [
            (kappa, rho * (problem.dim + 2.0 * shape + 2.0), shape)
            for kappa, rho, shape in itertools.product(self.kappas, self.rhos, shapes)
        ]
        return Candidates(*torch.tensor(grid, dtype=torch.float64, device=problem.S.device).mT)

    def _level(
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        anchor: Anchor,
        state: State,
        fallback: Tensor,
    ) -> tuple[Tensor, float]:
        """The least level over all posteriors, ``(N,)``, and the passes per problem."""
        candidates = self._candidates(problem)
        kinds = len(candidates.shape)
        longest = state["longest"].reshape(-1)
        posteriors = ellipsoids(problem, anchor, candidates, longest)
        rewards = state["reward_length"].reshape(-1, 1) / problem.family.dispersion
        norm = torch.linalg.vector_norm(anchor.point, dim=-1)
        number = state["number"].reshape(-1, 1)
        slack = 2.0 * rounding(problem.dtype, anchor.loss, rewards, norm, number)
        start = problem.log_failure + (anchor.loss + slack)[..., None] + posteriors.divergence
        certain = start + aggregated_increment(problem, posteriors, candidates)
        level, safest = torch.nan_to_num(certain, nan=torch.inf).flatten(1).min(-1)
        # to second order in the width of the posterior: what the rows can be hoped to give
        hoped = start + 0.5 * posteriors.trace / (2.0 * candidates.shape + problem.dim + 2.0)
        least, boldest = hoped.flatten(1).min(-1)
        gain = torch.fmin(level, fallback) - least
        index = worthwhile(self.increments, gain, self.tolerance)
        if index.shape[0] == 0:
            return level, 0.0
        part = select(likelihood, index)
        constants = (problem.self_concordance[index], problem.max_variance[index])
        best = level[index]
        for chosen in (boldest[index], safest[index]):
            centre, kind = chosen // kinds, chosen % kinds
            nu = 0.5 * problem.dim + candidates.shape[kind]
            law = BallLaw(nu, series_terms(problem.max_radius))
            posterior = posteriors.take(index, centre, kind)
            added = row_increments(part, anchor.point[index, centre], posterior, law, *constants)
            best = torch.fmin(best, start[index, centre, kind] + added)
        return level.index_copy(0, index, best), index.shape[0] / level.shape[0]


@dataclass(frozen=True)
class GaussianPrior(CentredRadius):
    """A Gaussian prior: valid wherever theta* lies, so the set is not intersected with the ball.

    The level of :func:`torchglb.radii.gaussian_prior_level` around the ridge estimate, the least
    over ``tempers``; passes are saved as in :class:`PACBayes`. A prior of its own: the least of
    this and another radius would cost log 2.

    Args:
        scale: the prior's standard deviation, in units of ``S/sqrt(d)``.
        tempers: a in ``W = H/a + I/s0^2``; 1 is best where the loss is quadratic.
        increments: ``"auto"``, ``"rows"`` (a pass at every evaluation) or ``"aggregated"`` (none).
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

    @torch.no_grad()
    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        theta_hat: Tensor,
        loss_hat: Tensor | None = None,
        gradient_hat: Tensor | None = None,
        hessian_hat: Tensor | None = None,
    ) -> Evaluation:
        loss, passes = loss_at(likelihood, theta_hat, loss_hat)
        flat, rows = problem.flat, flatten_batch(likelihood)
        variance = (self.scale * flat.S).square() / problem.dim
        anchor = Anchor.of(state).reshape(flat.batch_shape)
        anchor, moves = recentre(Ridge(variance[:, None]), rows, anchor, self.tolerance)
        values, basis = spectrum(anchor)
        point, centre_loss = anchor.point[:, 0], anchor.loss[:, 0]
        tempers = torch.tensor(self.tempers, dtype=torch.float64, device=loss.device)
        divergence, scale = gaussian_divergence(values, point, variance, tempers)
        rewards = state["reward_length"].reshape(-1) / problem.family.dispersion
        norm = torch.linalg.vector_norm(point, dim=-1)
        number = state["number"].reshape(-1)
        slack = 2.0 * rounding(problem.dtype, centre_loss, rewards, norm, number)
        start = problem.log_failure + (centre_loss + slack)[:, None] + divergence  # (N, J)
        longest = state["longest"].reshape(-1)
        added = aggregated_normal_increment(problem.family, values, scale, longest)
        level, safest = torch.nan_to_num(start + added, nan=torch.inf).min(-1)
        least, boldest = (start + 0.5 * (values[:, None] / scale).sum(-1)).min(-1)
        index = worthwhile(self.increments, level - least, self.tolerance)
        if index.shape[0] > 0:
            part, best = select(rows, index), level[index]
            for kind in (boldest[index], safest[index]):
                chosen = scale[index, kind]
                more = normal_row_increments(part, point[index], basis[index], chosen)
                best = torch.fmin(best, start[index, kind] + more)
            level = level.index_copy(0, index, best)
            passes += index.shape[0] / level.shape[0]
        state = state | anchor.reshape(problem.batch_shape).entries()
        level = level.reshape(loss.shape)
        return conclude(level, loss, problem.dtype, (problem.delta, 0.0), passes + moves, state)


@dataclass(frozen=True)
class Mixture(CentredRadius):
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

    @torch.no_grad()
    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        return self.inner.update(problem, state, x, r, w)

    @torch.no_grad()
    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        theta_hat: Tensor,
        loss_hat: Tensor | None = None,
        gradient_hat: Tensor | None = None,
        hessian_hat: Tensor | None = None,
    ) -> Evaluation:
        loss, passes = loss_at(likelihood, theta_hat, loss_hat)
        known = (loss, gradient_hat, hessian_hat)
        inner = self.inner.evaluate(problem, state, likelihood, theta_hat, *known)
        rewards = state["reward_length"] / problem.family.dispersion
        exact = cubature_level(problem, likelihood, Anchor.of(inner.state), rewards)
        level = torch.fmin(exact, inner.level.double())
        passes += inner.passes + 1
        return conclude(level, loss, problem.dtype, (problem.delta, 0.0), passes, inner.state)
