"""The radii that rest on a posterior: on an ellipsoid, Gaussian, or the exact mixture."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_positive, refuse
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import Evaluation, State, StatisticsRadius, conclude, loss_at, statistics_of
from torchglb.radii.centre import Anchor, Barrier, Ridge, add_rows, recentre
from torchglb.radii.gaussian_prior import (
    aggregated_normal_increment,
    check_whole_line,
    gaussian_divergence,
    normal_row_increments,
    spectrum,
)
from torchglb.radii.mixture import check_mixture_dim, cubature_level
from torchglb.radii.pac_bayes import (
    Candidates,
    Ellipsoids,
    aggregated_increment,
    ellipsoids,
    row_increments,
)
from torchglb.radii.problem import Problem
from torchglb.radii.simple_radii import mean_loss_level, rounding_at
from torchglb.radii.statistics import RowStatistics

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


@dataclass(frozen=True)
class PACBayes(CentredRadius):
    """Posteriors on ellipsoids inside the ball, the best of many; never above :class:`MeanLoss`.

    The ellipsoids of :func:`torchglb.radii.pac_bayes_level` around the minimisers of
    ``L(theta) - eta log(S^2 - |theta|^2)``. O(d^3) to evaluate. A centre moves, at one pass per
    Newton step, only when its penalised loss is more than ``tolerance`` above the minimum (fewer
    than one pass in ten rounds once n is some hundreds); the row-by-row increments, one pass for
    two posteriors, are computed only while they may gain more than ``tolerance``, which ends when n
    is large.

    Args:
        posterior: ``"pearson"`` (densities ``(1 - v'Wv)^k``, k in ``shapes``) or ``"uniform"`` (k = 0).
        etas: barrier weights, one centre each; ``(1, d/2)`` if left out (one, if d <= 2).
        kappas: in (0, 1), how far the ellipsoids may reach towards the sphere.
        rhos: multiples of ``d + 2k + 2`` for rho^2.
        shapes: k >= 0.
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
    shapes: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    increments: str = "auto"
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        check_choice("posterior", self.posterior, ("pearson", "uniform"))
        check_choice("increments", self.increments, PASSES)
        check_positive("tolerance", self.tolerance)
        for name in ("etas", "kappas", "rhos", "shapes"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 0):
                raise refuse(name, "numbers of at least 0, one or more", values)
        if min(self.kappas) == 0 or max(self.kappas) >= 1:
            raise refuse("kappas", "numbers in (0, 1)", self.kappas)
        if min(self.rhos) == 0 or (self.etas is not None and min(self.etas) == 0):
            raise refuse("rhos, etas", "positive numbers", (self.rhos, self.etas))

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
        statistics = statistics_of(state)
        fallback = mean_loss_level(problem, statistics, theta_hat, loss)
        anchor = Anchor.of(state)
        offer = None
        if gradient_hat is not None and hessian_hat is not None:
            known = (theta_hat, loss, gradient_hat, hessian_hat)
            axis = likelihood.X.ndim - 2
            offer = Anchor(
                *(t.double().unsqueeze(axis).expand_as(a) for t, a in zip(known, anchor, strict=True))
            )
        eta = torch.tensor(self._etas(problem), dtype=torch.float64, device=loss.device)
        barrier = Barrier(problem.S[..., None], eta)
        anchor, moves = recentre(barrier, likelihood, anchor, self.tolerance, offer)
        level, more = self._level(problem, likelihood, anchor, statistics, fallback)
        state = state | anchor.entries()
        # fmin: a posterior whose arithmetic overflowed leaves the mean loss, which is valid
        best = torch.fmin(level, fallback)
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
        columns = torch.tensor(grid, dtype=torch.float64, device=problem.S.device).mT
        return Candidates(*columns)

    def _level(
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        anchor: Anchor,
        statistics: RowStatistics,
        fallback: Tensor,
    ) -> tuple[Tensor, int]:
        """The least level over all posteriors, ``(*B)``, and the passes that it took."""
        candidates = self._candidates(problem)
        posteriors = ellipsoids(problem, anchor, candidates, statistics.longest)
        slack = torch.stack(
            [
                rounding_at(problem, statistics, anchor.point[..., p, :], anchor.loss[..., p])
                for p in range(anchor.loss.shape[-1])
            ],
            dim=-1,
        )
        start = problem.log_failure + (anchor.loss + 2.0 * slack)[..., None] + posteriors.divergence
        certain = start + aggregated_increment(problem, posteriors, candidates)
        flat = certain.flatten(-2)
        level, safest = flat.min(-1)
        if self.increments == "aggregated":
            return level, 0
        # to second order in the width of the posterior: what the rows can be hoped to give
        hoped = start + 0.5 * posteriors.trace / (2.0 * candidates.shape + problem.dim + 2.0)
        least, boldest = hoped.flatten(-2).min(-1)
        if self.increments == "auto":
            gain = torch.fmin(level, fallback) - least
            if not bool((gain > self.tolerance).any()):
                return level, 0
        for index in (boldest, safest):
            rows = self._row_level(problem, likelihood, anchor, posteriors, start, candidates, index)
            level = torch.fmin(level, rows)
        return level, 1

    @staticmethod
    def _row_level(
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        anchor: Anchor,
        posteriors: Ellipsoids,
        start: Tensor,
        candidates: Candidates,
        index: Tensor,
    ) -> Tensor:
        """The level with the increments row by row, of the posterior with a flat index ``(*B)``."""
        kinds = candidates.shape.shape[0]
        centre, kind = index // kinds, index % kinds
        axis = index.ndim
        where = centre[..., None, None].expand(*centre.shape, 1, problem.dim)
        point = anchor.point.gather(axis, where).squeeze(axis)
        shape = candidates.shape[kind]
        chosen = posteriors.take(centre, kind)
        added = row_increments(problem, likelihood, point, chosen, shape)
        return start.flatten(-2).gather(-1, index[..., None])[..., 0] + added


@dataclass(frozen=True)
class GaussianPrior(CentredRadius):
    """A Gaussian prior: valid wherever theta* lies, so the set is not intersected with the ball.

    The level of :func:`torchglb.radii.gaussian_prior_level` around the ridge estimate, the least over
    ``tempers``; passes are saved as in :class:`PACBayes`. A prior of its own: the least of this and
    another radius would cost log 2.

    Args:
        scale: the prior's standard deviation, in units of ``S/sqrt(d)``.
        tempers: a in ``W = H/a + I/s0^2``; 1 is best where the loss is quadratic.
        increments: ``"auto"``, ``"rows"`` (a pass at every evaluation) or ``"aggregated"`` (none).
        tolerance: how much of the level may be left on the table to save passes.
    """

    scale: float = 1.0
    tempers: tuple[float, ...] = (1.0, 0.7, 0.4, 0.1)
    increments: str = "auto"
    tolerance: float = 0.01
    confined = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        check_choice("increments", self.increments, PASSES)
        check_positive("tolerance", self.tolerance)
        if not self.tempers or min(self.tempers) <= 0:
            raise refuse("tempers", "positive numbers, one or more", self.tempers)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_whole_line(problem.family)
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
        statistics = statistics_of(state)
        variance = (self.scale * problem.S).square() / problem.dim
        ridge = Ridge(variance[..., None])
        anchor, moves = recentre(ridge, likelihood, Anchor.of(state), self.tolerance)
        values, basis = spectrum(anchor)
        point, centre_loss = anchor.point[..., 0, :], anchor.loss[..., 0]
        tempers = torch.tensor(self.tempers, dtype=torch.float64, device=loss.device)
        divergence, scale = gaussian_divergence(values, point, variance, tempers)
        slack = 2.0 * rounding_at(problem, statistics, point, centre_loss)
        start = problem.log_failure + (centre_loss + slack)[..., None] + divergence  # (*B, J)
        added = aggregated_normal_increment(problem.family, values, scale, statistics.longest)
        level, safest = torch.nan_to_num(start + added, nan=torch.inf).min(-1)
        more = 0
        if self.increments != "aggregated":
            hoped = start + 0.5 * (values[..., None, :] / scale).sum(-1)
            least, boldest = hoped.min(-1)
            if self.increments == "rows" or bool((level - least > self.tolerance).any()):
                more = 1
                for index in (boldest, safest):
                    where = index[..., None, None].expand(*index.shape, 1, problem.dim)
                    chosen = scale.gather(-2, where)[..., 0, :]
                    rows = normal_row_increments(likelihood, point, basis, chosen)
                    base = start.gather(-1, index[..., None])[..., 0]
                    level = torch.fmin(level, base + rows)
        state = state | anchor.entries()
        deltas = (problem.delta, 0.0)
        return conclude(level, loss, problem.dtype, deltas, passes + moves + more, state)


@dataclass(frozen=True)
class Mixture(CentredRadius):
    """The exact mixture, d <= 3: the floor for the uniform prior; never above :class:`PACBayes`.

    The cubature of :func:`torchglb.radii.mixture_level` around the centre of ``inner``. Thousands of
    evaluations of the loss: a yardstick, not a radius for every round.

    Args:
        inner: the radius that gives the centre and the upper end.
    """

    inner: PACBayes = PACBayes(etas=(1.0,))

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_mixture_dim(problem.dim)
        return self.inner.init(problem)

    def centres(self, problem: Problem) -> int:  # noqa: D102
        return self.inner.centres(problem)

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
        anchor = Anchor.of(inner.state)
        rewards = statistics_of(state).reward_length / problem.family.dispersion
        level = torch.fmin(
            cubature_level(problem, likelihood, anchor, rewards), inner.level.double()
        )
        passes += inner.passes + 1
        return conclude(level, loss, problem.dtype, (problem.delta, 0.0), passes, inner.state)
