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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_choice, refuse
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import check_likelihood, reward_length, rounding
from torchglb.radii.centre import Anchor, expand_at, flatten_batch
from torchglb.radii.increments import growth, increment
from torchglb.radii.laws import BallLaw, series_terms
from torchglb.radii.problem import Problem

INCREMENTS = ("rows", "aggregated")
LINEAR_ALGEBRA = 1e-10  # above the rounding errors of log det W and tr(W^-1 H)


class Candidates(NamedTuple):
    """J kinds of posterior around a centre, as tensors ``(J,)``.

    Attributes:
        kappa: how far towards the sphere the ellipsoid may reach, in (0, 1).
        rho2: ``rho^2``, the scale against the Hessian.
        shape: k >= 0 of the Pearson-II density; 0 is uniform.
    """

    kappa: Tensor
    rho2: Tensor
    shape: Tensor


def shape_entropy(dim: int, shape: Tensor) -> Tensor:
    """``E log p(U)`` for the density p proportional to ``(1 - |u|^2)^k`` on the unit ball of R^d.

    ``lgamma(d/2+k+1) - (d/2) log pi - lgamma(k+1) + k (psi(k+1) - psi(d/2+k+1))``; for k = 0 minus
    the log-volume of the ball.
    """
    half = 0.5 * dim
    whole, part = half + shape + 1, shape + 1
    entropy = torch.lgamma(whole) - half * math.log(math.pi) - torch.lgamma(part)
    return entropy + shape * (torch.digamma(part) - torch.digamma(whole))


class Ellipsoids(NamedTuple):
    """The posteriors around P centres, J for each, as far as no row is needed.

    W is diagonal plus rank one in the eigenvectors of the Hessian, so that one decomposition of
    H(c) serves all J of them in O(d) each: ``W = diag(scale) + alpha c c'`` there.

    Attributes:
        basis: eigenvectors Q of H(c), ``(*B, P, d, d)``.
        centre: ``Q'c``, ``(*B, P, d)``.
        scale: ``lambda/rho^2 + 1/(kappa q)``, ``(*B, P, J, d)``.
        tilt: ``alpha/(1 + alpha c' diag(scale)^-1 c)``, ``(*B, P, J)``.
        divergence: ``KL(P || Q)``, ``(*B, P, J)``.
        trace: ``tr(W^-1 H)``, ``(*B, P, J)``.
        longest: ``max |x|^2 in W^-1`` over rows of norm at most ``reach``, ``(*B, P, J)``.
    """

    basis: Tensor
    centre: Tensor
    scale: Tensor
    tilt: Tensor
    divergence: Tensor
    trace: Tensor
    longest: Tensor

    def take(self, problem: Tensor, centre: Tensor, kind: Tensor) -> Ellipsoids:
        """One posterior for each of some problems, by its three indices ``(N',)``; P and J go."""
        rest = (self.scale, self.tilt, self.divergence, self.trace, self.longest)
        return Ellipsoids(
            self.basis[problem, centre],
            self.centre[problem, centre],
            *(values[problem, centre, kind] for values in rest),
        )


def ellipsoids(
    problem: Problem, anchor: Anchor, candidates: Candidates, reach: Tensor
) -> Ellipsoids:
    """Divergence, trace and longest row of every candidate: O(P (d^3 + J d)), no pass."""
    values, basis = torch.linalg.eigh(anchor.hessian)
    values = values.clamp_min(0.0)
    centre = (basis.mT @ anchor.point[..., None])[..., 0]
    # a little less room than there is: the containment then survives rounding
    room = problem.S[..., None].square() * (1 - 1e-12) - anchor.point.square().sum(-1)
    room = room.clamp_min(torch.finfo(room.dtype).tiny)[..., None]  # (*B, P, 1)
    kappa, rho2, shape = candidates
    scale = values[..., None, :] / rho2[:, None] + (1.0 / (kappa * room))[..., None]
    alpha = 1.0 / (kappa * (1.0 - kappa) * room.square())
    eigen, square = values[..., None, :], centre.square()[..., None, :]
    inflation = 1.0 + alpha * (square / scale).sum(-1)
    tilt = alpha / inflation
    log_det = scale.log().sum(-1) + inflation.log()
    divergence = problem.log_volume[..., None, None] + 0.5 * log_det
    divergence = divergence + shape_entropy(problem.dim, shape) + LINEAR_ALGEBRA
    trace = (eigen / scale).sum(-1) - tilt * (eigen * square / scale.square()).sum(-1)
    longest = reach.square()[..., None, None] / scale.amin(-1)
    return Ellipsoids(basis, centre, scale, tilt, divergence, trace, longest)


def aggregated_increment(
    problem: Problem, posteriors: Ellipsoids, candidates: Candidates
) -> Tensor:
    """``sum_s E m(z_s + s_s U) - m(z_s)`` over g, from the trace alone: no pass. ``(*B, P, J)``.

    ``m''(z) G(s) <= m''(z) s^2 G(s_max)/s_max^2`` since G(s)/s^2 increases, and the sum of
    ``m''(z_s) s_s^2/g`` is ``tr(W^-1 H)``.
    """
    law = BallLaw(0.5 * problem.dim + candidates.shape, series_terms(problem.max_radius))
    longest = posteriors.longest.clamp_min(1e-12)
    concordance = problem.self_concordance[..., None, None]
    ratio = growth(problem.family, law, longest, concordance) / longest
    # no rows, no increment, even where the ratio has overflowed
    return torch.where(posteriors.trace > 0, posteriors.trace * ratio, torch.zeros_like(ratio))


def row_increments(
    likelihood: NegativeLogLikelihood,
    point: Tensor,
    posterior: Ellipsoids,
    law: BallLaw,
    self_concordance: Tensor,
    max_variance: Tensor,
) -> Tensor:
    """The same sum, row by row: one pass, O(n d^2). ``(*B)``.

    Args:
        likelihood: the rows.
        point: the centre c, ``(*B, d)``.
        posterior: one per problem (no axes P and J).
        law: of U, with nu ``(*B)``.
        self_concordance: R_s on the ball, ``(*B)``.
        max_variance: of m'' on the ball, ``(*B)``.
    """
    X, w = likelihood.X, likelihood.w

    def column(values: Tensor) -> Tensor:  # (*B) -> (*B, 1), in the dtype of the rows
        return values.to(X.dtype)[..., None]

    rotated = X @ posterior.basis.to(X.dtype)  # (*B, n, d)
    s2 = (rotated.square() @ column(1.0 / posterior.scale))[..., 0]
    along = (rotated @ column(posterior.centre / posterior.scale))[..., 0]
    s2 = (s2 - column(posterior.tilt) * along.square()).clamp_min(0.0)
    z = (X @ column(point))[..., 0]
    law = law._replace(nu=column(law.nu))
    family = likelihood.family
    each = increment(family, law, z, s2, column(self_concordance), column(max_variance))
    (total,) = likelihood.shards.sum((each if w is None else each * w).sum(-1))
    return total.double() / family.dispersion


def pac_bayes_level(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    delta: float,
    centre: Tensor,
    *,
    kappa: float = 0.5,
    rho2: float | None = None,
    shape: float = 0.0,
    increments: str = "rows",
) -> Tensor:
    """``log(1/delta) + KL(P || Q) + E_P L``, bounded from above, for one posterior. ``(*B)``.

    The set ``{theta : L_t(theta) <= level_t}`` holds theta* for all t with probability 1 - delta,
    if ``|theta*| <= S``. Q is uniform on the ball, P uniform or Pearson II on the ellipsoid of the
    module's formula. ``KL = log vol B(S) + log det(W)/2 + E log p(U)``. The average loss is
    ``L(c) + sum_s E m(z_s + s_s U) - m(z_s)``, ``s_s = |x_s| in W^-1``, bounded row by row (one
    pass) or through ``tr(W^-1 H)`` (none). Two passes in all, or one. Row weights in [0, 1], each
    chosen before its reward, keep the statement (by Jensen).

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
    check_likelihood(likelihood)
    if not 0.0 < kappa < 1.0:
        raise refuse("kappa", "a number in (0, 1)", kappa)
    if shape < 0.0:
        raise refuse("shape", "a number of at least 0", shape)
    rho2 = domain.dim + 2.0 * shape + 2.0 if rho2 is None else rho2
    if not 0.0 < rho2 < math.inf:
        raise refuse("rho2", "a positive number", rho2)
    X, batch = likelihood.X, likelihood.batch_shape
    norm = torch.linalg.vector_norm(centre, dim=-1)
    if not bool((norm < (1 - 1e-6) * domain.radius_like(X)).all()):
        raise refuse("centre", "a point strictly inside the ball", centre.tolist())
    problem = Problem(likelihood.family, domain, delta, tuple(batch), X.dtype, X.device).flat
    rows = flatten_batch(likelihood)
    numbers = torch.tensor([kappa, rho2, shape], dtype=torch.float64, device=X.device)
    candidates = Candidates(*numbers[:, None])
    anchor = expand_at(rows, centre.reshape(-1, 1, domain.dim))
    point, loss = anchor.point[:, 0], anchor.loss[:, 0]
    lengths = torch.linalg.vector_norm(rows.X, dim=-1).double()
    farthest = torch.cat([lengths, lengths.new_zeros(len(lengths), 1)], dim=-1).amax(-1)
    farthest = rows.shards.maximum(farthest)
    posteriors = ellipsoids(problem, anchor, candidates, farthest)
    if increments == "rows":
        every = torch.arange(len(loss), device=X.device)
        one = posteriors.take(every, torch.zeros_like(every), torch.zeros_like(every))
        nu = torch.full_like(problem.S, 0.5 * problem.dim + shape)
        law = BallLaw(nu, series_terms(problem.max_radius))
        constants = (problem.self_concordance, problem.max_variance)
        added = row_increments(rows, point, one, law, *constants)
    else:
        added = aggregated_increment(problem, posteriors, candidates)[:, 0, 0]
    slack = rounding(
        X.dtype, loss.abs() + added, reward_length(rows), torch.linalg.vector_norm(point, dim=-1)
    )
    level = problem.log_failure + posteriors.divergence[:, 0, 0] + loss + added + slack
    return level.reshape(batch)
