"""The exact mixture for d <= 3: no posterior with the uniform prior can give a smaller level.

``level = log(1/delta) - log E_Q exp(-L)``, Q uniform on the ball, needs a lower bound of an
integral of a log-concave function f over R^d. Three facts give one from finitely many values of
the loss, certified by convexity alone (no derivative, no error constant):

1. K. Ball (1988): ``K = {x : int_0^oo f(c + r x) r^(d-1) dr >= 1}`` is convex, for log-concave f,
   and ``int f = d vol(K)``.
2. So the simplices spanned by c and boundary points of K in finitely many directions lie in K.
3. Along a ray L is convex and lies below its chords, so that ``exp(-chord)`` gives lower bounds
   of the radial integrals, in closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import refuse
from torchglb.domain import Ball, check_ball
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import distance_to_sphere
from torchglb.radii.base import (
    Evaluation,
    Radius,
    State,
    conclude,
    reward_length,
    rounding,
    statistics_of,
)
from torchglb.radii.posterior.centre import Anchor, Penalty, expand_at, flatten_batch
from torchglb.radii.posterior.uniform import PACBayes, check_inner, problem_around
from torchglb.radii.problem import Problem

MAX_DIM = 3
NEAR, FAR = 28, 8  # radial cells up to NEAR_END local units, and from there to the sphere
NEAR_END = 7.0
BLOCK = 1 << 23  # loss terms evaluated at once


def check_mixture_dim(dim: int) -> None:
    """Refuses d > 3: the number of directions grows exponentially."""
    if dim > MAX_DIM:
        raise refuse("dim", f"at most {MAX_DIM} for the exact mixture", dim)


@lru_cache(maxsize=8)
def _directions(dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors ``(J, d)``, simplices ``(T, d)`` of indices, and d times their volumes."""
    if dim == 1:
        vectors, cells = np.array([[1.0], [-1.0]]), np.array([[0], [1]])
    elif dim == 2:
        number = 64
        angle = 2 * np.pi * np.arange(number) / number
        vectors = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        cells = np.stack([np.arange(number), (np.arange(number) + 1) % number], axis=1)
    else:
        vectors, cells = _icosphere(3)
    volumes = np.abs(np.linalg.det(vectors[cells])) / math.factorial(dim - 1)
    parts = (torch.as_tensor(part).to(device) for part in (vectors, cells, volumes))
    return next(parts), next(parts), next(parts)


def _icosphere(halvings: int) -> tuple[np.ndarray, np.ndarray]:
    """An icosahedron whose edges are halved, several times, and pushed to the sphere."""
    from scipy.spatial import ConvexHull  # which few need, and all would wait for

    golden = (1 + math.sqrt(5)) / 2
    corners = [(a, b * golden, 0.0) for a in (1, -1) for b in (1, -1)]
    points = np.array([np.roll(corner, shift) for shift in range(3) for corner in corners])
    points = points / math.hypot(1, golden)
    for _ in range(halvings):
        sides = ConvexHull(points).simplices[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2)
        middles = points[np.unique(np.sort(sides, axis=1), axis=0)].sum(1)
        middles = middles / np.linalg.norm(middles, axis=1, keepdims=True)
        points = np.concatenate([points, middles])
    return points, ConvexHull(points).simplices.astype(np.int64)


def mixture_level(
    likelihood: NegativeLogLikelihood, domain: Ball, delta: float, centre: ArrayLike
) -> Tensor:
    """``log(1/delta) - log E_Q exp(-L)``, Q uniform on the ball, from above, for d <= 3. ``(*B)``.

    The set ``{theta : L_t(theta) <= level_t}`` holds theta* for all t with probability 1 - delta,
    if ``|theta*| <= S``; it is the smallest of all that rest on this prior. The bound errs
    upwards by about 0.01 (d = 1, 2) or 0.02 (d = 3) where the centre is near the mode, see the
    module. Cost: 74, 2400 or 24000 evaluations of the loss for d = 1, 2, 3; not for every round.
    Weights in [0, 1], each chosen before its reward, keep the statement.

    Args:
        likelihood: L, without ridge or tilt.
        domain: the ball.
        delta: in (0, 1).
        centre: a point strictly inside the ball, ``(*B, d)``; any is valid, near the mode is best.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> loss = NegativeLogLikelihood(Bernoulli(), torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> round(float(mixture_level(loss, Ball(2, 4.0), 0.05, torch.zeros(2))), 2)
        4.39
    """
    check_mixture_dim(check_ball(domain).dim)
    problem, point = problem_around(likelihood, domain, delta, centre)
    at = expand_at(likelihood, point)
    return cubature_level(problem, likelihood, at, reward_length(likelihood))


def cubature_level(
    problem: Problem, likelihood: NegativeLogLikelihood, at: Anchor, rewards: Tensor
) -> Tensor:
    """The level from rays through one point each: no further expansion. ``(*B)``."""
    d, point, loss = problem.dim, at.point, at.loss
    vectors, cells, volumes = _directions(d, point.device)
    # local units: the loss and the barrier of the ball bend by 1 along each unit direction
    barrier = Penalty(problem.S.square(), torch.ones_like(problem.S))
    factor, _ = torch.linalg.cholesky_ex(barrier.added(at).hessian)
    # theta = c + L^-T u: columns of L^-T applied to the directions
    rays = torch.linalg.solve_triangular(factor.mT, vectors.mT.expand(*point.shape, -1), upper=True)
    rays = rays.mT  # (*B, J, d)
    log_det = -torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    end = distance_to_sphere(point[..., None, :], rays, problem.S[..., None]) * (1 - 1e-12)
    r = _radial_nodes(end)  # (*B, J, M)
    points = point[..., None, None, :] + r[..., None] * rays[..., None, :]
    above = _losses(likelihood, points.flatten(-3, -2)).unflatten(-1, r.shape[-2:])
    # a loss that overflowed weighs nothing; 1e15 keeps the differences of two such finite
    above = (above - loss[..., None, None]).clamp_max(1e15)
    # off the mode, or by rounding, losses may be so far below that at the centre that e^ overflows
    lowest = above.flatten(-2).amin(-1).clamp_max(0.0)
    above = above - lowest[..., None, None]
    radial = _radial_integral(r, above, d)  # (*B, J)
    corners = radial[..., cells].clamp_min(torch.finfo(radial.dtype).tiny)
    integral = (volumes * torch.exp(corners.log().mean(-1))).sum(-1)
    norm = torch.linalg.vector_norm(point, dim=-1)
    slack = rounding(likelihood.X.dtype, loss, rewards, norm) + 1e-12
    evidence = log_det + integral.log() - problem.log_volume - loss - lowest
    return problem.log_failure - evidence + slack


def _radial_nodes(end: Tensor) -> Tensor:
    """Equal steps in the first local units, then geometric ones up to the sphere."""
    first = torch.linspace(0, 1, NEAR + 1, dtype=end.dtype, device=end.device)
    rest = torch.linspace(0, 1, FAR + 1, dtype=end.dtype, device=end.device)[1:]
    near = end.clamp_max(NEAR_END)[..., None]
    ratio = (end[..., None] / near).clamp_min(1.0)
    return torch.cat([near * first, near * ratio**rest], dim=-1)


def _losses(likelihood: NegativeLogLikelihood, points: Tensor) -> Tensor:
    """The loss at many points ``(*B, N, d)``, in blocks that fit the memory."""
    rows = max(1, likelihood.batch_shape.numel() * likelihood.num_rows)
    block = max(1, BLOCK // rows)
    points = points.to(likelihood.X.dtype)
    parts = [likelihood.value(part) for part in points.split(block, dim=-2)]
    return torch.cat(parts, dim=-1).double()


def _radial_integral(r: Tensor, above: Tensor, dim: int) -> Tensor:
    """``int r^(d-1) exp(-chord(r)) dr`` over all cells, the chords through ``above`` at ``r``."""
    start, width = r[..., :-1], r[..., 1:] - r[..., :-1]
    low = above[..., :-1]
    moments = _exponential_moments(above[..., 1:] - low, dim)
    # (start + width u)^(d-1) expanded, u in [0, 1]
    cell = sum(
        math.comb(dim - 1, k) * start ** (dim - 1 - k) * width**k * moment
        for k, moment in enumerate(moments)
    )
    return (width * torch.exp(-low) * cell).sum(-1)


def _exponential_moments(slope: Tensor, dim: int) -> list[Tensor]:
    """``int_0^1 u^k e^(-slope u) du`` for k < d."""
    slope = slope.clamp_min(-600.0)  # below, the cell counts less than it could
    small = slope.abs() < 1.0
    t = torch.where(small, slope, torch.zeros_like(slope))
    big = torch.where(small, torch.ones_like(slope), slope)
    decay = torch.exp(-big)
    closed = [-torch.expm1(-big) / big]
    for k in range(1, dim):
        closed.append((k * closed[-1] - decay) / big)
    moments = []
    for k in range(dim):
        term, series = torch.ones_like(t), torch.full_like(t, 1.0 / (k + 1))
        for j in range(1, 20):
            term = term * (-t / j)
            series = series + term / (k + 1 + j)
        moments.append(torch.where(small, series, closed[k]))
    return moments


#: the radius that a mixture begins with
INNER = PACBayes()


@dataclass(frozen=True)
class Mixture(Radius):
    """The exact mixture, d <= 3: the floor for the uniform prior; never above :class:`PACBayes`.

    The cubature of :func:`torchglb.radii.mixture_level` around the centre of ``inner``. Thousands
    of evaluations of the loss: a yardstick, not a radius for every round.

    Args:
        inner: the radius that gives the centre and the upper end.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, Mixture())
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> round(float(sequence.evaluation().radius), 2)
        7.79
    """

    inner: PACBayes = INNER

    def __post_init__(self) -> None:
        check_inner(self.inner)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_mixture_dim(problem.dim)
        return self.inner.init(problem)

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        return self.inner.update(problem, state, x, r, w)

    def evaluate(  # noqa: D102
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> Evaluation:
        loss = estimate.loss.double()
        inner, points = self.inner.evaluate_around(problem, state, likelihood, estimate)
        flat, rows = problem.flat, flatten_batch(likelihood)
        at = expand_at(rows, points[:, 0])
        rewards = statistics_of(problem, state).reward_length / problem.family.dispersion
        exact = cubature_level(flat, rows, at, rewards.reshape(-1)).reshape(loss.shape)
        level = torch.fmin(exact, inner.level.double())
        return conclude(problem, level, loss, inner.passes + 1.0, inner.state)
