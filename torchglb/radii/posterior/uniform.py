"""The likelihood-ratio level from a posterior on an ellipsoid inside the ball.

For the prior Q = Unif(B(S)) and any posterior P, with probability 1 - delta for all t at once:
``L_t(theta*) <= log(1/delta) + KL(P || Q) + E_P L_t``. P may depend on the data, so the least over
many posteriors is free. Here P lives on ``{c + v : v'Wv <= 1}``, where E_P L is one-dimensional in
every row, and

``W = H(c)/rho^2 + (I + c c'/((1 - kappa) q)) / (kappa q)``, ``q = S^2 - |c|^2``

keeps it inside the ball for any |c| < S, any 0 < kappa < 1 and any rho. The density on it is
uniform (shape k = 0), or Pearson II, proportional to ``(1 - v'Wv)^k``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import numbers_on
from torchglb.checks import (
    check_choice,
    check_numbers,
    check_positive,
    check_probability,
    check_tolerance,
    refuse,
)
from torchglb.choices import (
    INCREMENTS,
    POSTERIORS,
    RADIUS_INCREMENTS,
    Increments,
    PosteriorShape,
    RadiusIncrements,
)
from torchglb.domain import Ball, check_ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import checked_centre, rounding_at
from torchglb.radii.posterior.base import PosteriorRadius
from torchglb.radii.posterior.candidates import Candidates, posterior_level
from torchglb.radii.posterior.laws import Prior, series_terms
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics
from torchglb.radii.theorems.mean_loss import MeanLoss


def shape_entropy(dim: int, shape: Tensor) -> Tensor:
    """``E log p(U)`` for the density p proportional to ``(1 - |u|^2)^k`` on the unit ball of R^d.

    ``lgamma(d/2+k+1) - (d/2) log pi - lgamma(k+1) + k (psi(k+1) - psi(d/2+k+1))``; for k = 0 minus
    the log-volume of the ball.
    """
    half = 0.5 * dim
    whole, part = half + shape + 1, shape + 1
    entropy = torch.lgamma(whole) - half * math.log(math.pi) - torch.lgamma(part)
    return entropy + shape * (torch.digamma(part) - torch.digamma(whole))


def problem_around(
    likelihood: NegativeLogLikelihood, domain: Ball, delta: float, centre: ArrayLike
) -> tuple[Problem, Tensor]:
    """The problem whose rows these are, and a centre that is strictly inside the ball."""
    point = checked_centre(likelihood, centre)
    X, batch = likelihood.X, tuple(likelihood.batch_shape)
    check_ball(domain, likelihood.dim)
    problem = Problem(likelihood.family, domain, delta, batch, X.dtype, X.device)
    norm = torch.linalg.vector_norm(point, dim=-1)
    if not bool((norm < (1 - 1e-6) * domain.radius_like(X)).all()):
        raise refuse("centre", "a point strictly inside the ball", point.tolist())
    return problem, point


def uniform_prior(problem: Problem) -> Prior:
    """The uniform law on the ball; refuses a family without a finite self-concordance constant."""
    known = (problem.log_volume, problem.self_concordance, problem.max_variance)
    return Prior(False, problem.S.square(), *known, series_terms(problem.max_radius))


def on_ellipsoids(dim: int, kappa: Tensor, rho2: Tensor, shape: Tensor) -> Candidates:
    """Posteriors of shape k on the ellipsoids of the module's formula."""
    return Candidates(kappa, rho2, shape, shape_entropy(dim, shape))


def pac_bayes_level(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    delta: float,
    centre: ArrayLike,
    *,
    kappa: float = 0.5,
    rho2: float | None = None,
    shape: float = 0.0,
    increments: Increments = "rows",
) -> Tensor:
    """``log(1/delta) + KL(P || Q) + E_P L``, bounded from above, for one posterior. ``(*B)``.

    The set ``{theta : L_t(theta) <= level_t}`` holds theta* for all t with probability 1 - delta,
    if ``|theta*| <= S``. Q is uniform on the ball, P uniform or Pearson II on the ellipsoid of the
    module's formula. ``KL = log vol B(S) + log det(W)/2 + E log p(U)``. The average loss is
    ``L(c) + sum_s E m(z_s + s_s U) - m(z_s)``, ``s_s = |x_s| in W^-1``, bounded row by row (one
    pass) or through ``tr(W^-1 H)`` (none). Two passes in all, or one. Row weights in [0, 1], each
    chosen before its reward, keep the statement (by Jensen). Differentiable in rows and centre.

    Args:
        likelihood: L, without ridge or tilt.
        domain: the ball.
        delta: in (0, 1).
        centre: c, strictly inside the ball, ``(*B, d)``.
        kappa: in (0, 1).
        rho2: ``rho^2 > 0``; ``d + 2k + 2`` if left out, the best where L is quadratic.
        shape: k >= 0.
        increments: ``"rows"`` or ``"aggregated"``.

    Raises:
        InputError: also for a family without a finite self-concordance constant.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> X, r = torch.eye(2), torch.tensor([1.0, 0.0])
        >>> loss = NegativeLogLikelihood(Bernoulli(), X, r)
        >>> level = pac_bayes_level(loss, Ball(2, 4.0), 0.05, torch.zeros(2))
        >>> round(float(level), 2)
        5.81
    """
    check_choice("increments", increments, INCREMENTS)
    kappa, shape = check_probability("kappa", kappa), check_tolerance("shape", shape)
    problem, point = problem_around(likelihood, domain, delta, centre)
    rho2 = domain.dim + 2.0 * shape + 2.0 if rho2 is None else check_positive("rho2", rho2)
    numbers = torch.tensor([kappa, rho2, shape], dtype=torch.float64, device=problem.device)
    candidate = on_ellipsoids(domain.dim, *(t.expand(problem.batch_shape) for t in numbers))
    prior = uniform_prior(problem)
    return posterior_level(likelihood, problem.log_failure, prior, point, candidate, increments)


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

    posterior: PosteriorShape = "pearson"
    etas: tuple[float, ...] | None = None
    kappas: tuple[float, ...] = (0.5, 0.75, 0.95)
    rhos: tuple[float, ...] = (1.0, 4.0, 16.0)
    shapes: tuple[float, ...] = (0.0, 0.5, 2.0, 8.0, 32.0)
    increments: RadiusIncrements = "auto"
    tolerance: float = 0.04

    def __post_init__(self) -> None:
        check_choice("posterior", self.posterior, POSTERIORS)
        check_choice("increments", self.increments, RADIUS_INCREMENTS)
        check_positive("tolerance", self.tolerance)
        ends = {"kappas": 1.0, "rhos": math.inf, "shapes": math.inf}
        if self.etas is not None:
            ends["etas"] = math.inf
        for name, end in ends.items():
            found = check_numbers(name, getattr(self, name), 0.0, end, closed=name == "shapes")
            object.__setattr__(self, name, found)

    def centre_weights(self, problem: Problem) -> tuple[float, ...]:  # noqa: D102
        if self.etas is not None:
            return self.etas
        return (1.0,) if problem.dim <= 2 else (1.0, 0.5 * problem.dim)

    def prior(self, problem: Problem) -> Prior:  # noqa: D102
        return uniform_prior(problem)

    def candidates(self, problem: Problem) -> Candidates:  # noqa: D102
        shapes = self.shapes if self.posterior == "pearson" else (0.0,)
        grid = tuple(
            number
            for kappa, rho, shape in itertools.product(self.kappas, self.rhos, shapes)
            for number in (kappa, rho * (problem.dim + 2.0 * shape + 2.0), shape)
        )
        return on_ellipsoids(problem.dim, *numbers_on(grid, problem.S.device).reshape(-1, 3).mT)

    def fallback(  # noqa: D102
        self, problem: Problem, statistics: RowStatistics, theta_hat: Tensor, loss: Tensor
    ) -> Tensor:
        slack = rounding_at(problem, statistics, theta_hat, loss)
        return loss + MeanLoss().squared(problem, statistics, loss).radius + slack


def check_inner(inner: PACBayes) -> None:
    """Refuses any other radius as that of the uniform prior."""
    if not isinstance(inner, PACBayes):
        raise refuse("inner", "a PACBayes radius", type(inner).__name__)
