"""The likelihood-ratio level from a Gaussian prior: valid even if theta* is outside the ball."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.arrays import numbers_on
from torchglb.checks import check_choice, check_positive, check_probability, refuse
from torchglb.choices import RADIUS_INCREMENTS, RadiusIncrements
from torchglb.errors import InputError
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson, QuasiBounded
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import State, check_likelihood
from torchglb.radii.posterior.base import PosteriorRadius, Posteriors, posterior_level
from torchglb.radii.posterior.candidate_kernels import LINEAR_ALGEBRA
from torchglb.radii.posterior.centre import Anchor, Ridge, expand_at
from torchglb.radii.posterior.increments import row_increments
from torchglb.radii.posterior.laws import NormalLaw
from torchglb.radii.problem import Problem


def holds_on_line(family: GLMFamily) -> bool:
    """Whether the constants of a family, and so its increments, hold on the whole line."""
    return isinstance(family, Gaussian | Binomial | Poisson | QuasiBounded)


def check_whole_line(family: GLMFamily) -> None:
    """Refuses a family whose increments are bounded on the ball only: the prior has no edge."""
    if not holds_on_line(family):
        raise InputError(
            "family: expected Gaussian, Bernoulli, Binomial, Poisson or QuasiBounded, whose "
            f"constants hold on the whole line, got {type(family).__name__}"
        )


def gaussian_divergence(
    values: Tensor, point: Tensor, variance: Tensor, temper: Tensor
) -> tuple[Tensor, Tensor]:
    """``KL(N(c, W^-1) || N(0, s0^2 I))`` and the eigenvalues of W, for ``W = H/a + I/s0^2``.

    ``KL = (tr(W^-1)/s0^2 + |c|^2/s0^2 - d + d log s0^2 + log det W)/2``.

    Args:
        values: eigenvalues of H, ``(*B, d)``.
        point: c, ``(*B, d)``.
        variance: ``s0^2``, ``(*B)``.
        temper: a, ``(J,)``.

    Returns:
        ``(*B, J)`` and ``(*B, J, d)``.
    """
    prior = variance[..., None]  # (*B, 1)
    scale = values[..., None, :] / temper[:, None] + 1.0 / prior[..., None]
    relative = scale * prior[..., None]  # W in units of the prior's precision, at least 1
    each = (1.0 / relative - 1.0 + relative.log()).sum(-1)
    return 0.5 * (each + point.square().sum(-1)[..., None] / prior), scale


def normal_row_increments(
    likelihood: NegativeLogLikelihood, point: Tensor, cover: Tensor
) -> Tensor:
    """:func:`row_increments` for normal U and ``W^-1 = cover``: one pass, O(n d^2). ``(*B)``."""
    number = largest_variance(likelihood.family)
    largest = None if number is None else torch.full_like(point[..., 0], number)
    return row_increments(likelihood, point, cover, NormalLaw(), None, largest)


def largest_variance(family: GLMFamily) -> float | None:
    """The largest m'' on the whole line, which the radius 1 shows; None for Poisson's."""
    return None if isinstance(family, Poisson) else family.max_variance(1.0)


def normal_at(
    point: Tensor, hessian: Tensor, variance: Tensor, temper: Tensor
) -> tuple[Tensor, Tensor]:
    """Divergence ``(*B)`` and ``W^-1 (*B, d, d)`` of one posterior each, differentiable: O(d^3)."""
    eye = torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
    relative = (variance / temper)[..., None, None] * hessian + eye  # W in units of the prior's
    factor, _ = torch.linalg.cholesky_ex(relative)
    log_det = 2.0 * torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    inverse = torch.cholesky_inverse(factor)
    trace = torch.diagonal(inverse, dim1=-2, dim2=-1).sum(-1)
    square = point.square().sum(-1) / variance
    divergence = 0.5 * (trace - point.shape[-1] + log_det + square)
    return divergence + LINEAR_ALGEBRA, variance[..., None, None] * inverse


def gaussian_prior_level(
    likelihood: NegativeLogLikelihood,
    delta: float,
    centre: Tensor,
    variance: Tensor | float,
    temper: float = 1.0,
) -> Tensor:
    """``log(1/delta) + KL(P || Q) + E_P L`` for ``Q = N(0, s0^2 I)``, ``P = N(c, W^-1)``. ``(*B)``.

    ``W = H(c)/a + I/s0^2``. The set ``{theta : L_t(theta) <= level_t}`` holds theta* for all t with
    probability 1 - delta, wherever theta* lies: S enters only through the choice of the prior
    (``s0^2 = S^2/d`` is a good one). This answers the question that the paper leaves open. The
    average loss is ``L(c) + sum_s E m(z_s + s_s U) - m(z_s)`` with normal U and ``s_s = |x_s| in
    W^-1``. Two passes. Weights in [0, 1], each chosen before its reward, keep the statement.
    Differentiable in rows and centre.

    Args:
        likelihood: L, without ridge or tilt; of a family whose constants hold on the whole line.
        delta: in (0, 1).
        centre: c, best near the ridge estimate ``argmin L + |theta|^2/(2 s0^2)``, ``(*B, d)``.
        variance: ``s0^2``, fixed before the data; a number or ``(*B)``.
        temper: a > 0.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> loss = NegativeLogLikelihood(Bernoulli(), torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> round(float(gaussian_prior_level(loss, 0.05, torch.zeros(2), 8.0)), 2)
        5.48
    """
    check_probability("delta", delta)
    check_likelihood(likelihood)
    check_whole_line(likelihood.family)
    if not 0.0 < temper < math.inf:
        raise refuse("temper", "a positive number", temper)
    prior = torch.as_tensor(variance, dtype=torch.float64, device=likelihood.X.device)
    prior = prior.expand(likelihood.batch_shape)
    anchor = expand_at(likelihood, centre[..., None, :])
    point, hessian = anchor.point[..., 0, :], anchor.hessian[..., 0, :, :]
    divergence, cover = normal_at(point, hessian, prior, torch.full_like(prior, temper))
    added = normal_row_increments(likelihood, point, cover)
    return posterior_level(likelihood, -math.log(delta), anchor, divergence, added)


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

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, GaussianPrior())
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> round(float(sequence.evaluation().radius), 2)
        2.32
    """

    scale: float = 1.0
    tempers: tuple[float, ...] = (1.0, 0.7, 0.4, 0.1)
    increments: RadiusIncrements = "auto"
    tolerance: float = 0.04
    confined = False

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        check_choice("increments", self.increments, RADIUS_INCREMENTS)
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

    def curvature_bounds(self, problem: Problem) -> tuple[None, Tensor | None]:  # noqa: D102
        largest = largest_variance(problem.family)
        return None, None if largest is None else torch.full_like(problem.S, largest)

    def penalty(self, problem: Problem) -> Ridge:  # noqa: D102
        return Ridge(self.prior_variance(problem)[:, None])

    def posteriors(self, problem: Problem, anchor: Anchor, reach: Tensor) -> Posteriors:  # noqa: D102
        values = torch.linalg.eigvalsh(anchor.hessian).clamp_min(0.0)
        variance, tempers = self.prior_variance(problem)[:, None], self._tempers(problem)
        divergence, scale = gaussian_divergence(values, anchor.point, variance, tempers)
        trace = (values[..., None, :] / scale).sum(-1)
        longest = reach.square()[:, None, None] / scale.amin(-1)
        return Posteriors(NormalLaw(), divergence, trace, longest)

    def posterior_at(  # noqa: D102
        self, problem: Problem, point: Tensor, hessian: Tensor, kind: Tensor
    ) -> tuple[NormalLaw, Tensor, Tensor]:
        variance, tempers = self.prior_variance(problem), self._tempers(problem)[kind]
        return NormalLaw(), *normal_at(point, hessian, variance, tempers)

    def candidates(self, problem: Problem) -> Tensor:  # noqa: D102
        tempers = self._tempers(problem)
        zero = torch.zeros_like(tempers)
        return torch.stack([zero, tempers, zero, zero], dim=-1)

    def _tempers(self, problem: Problem) -> Tensor:
        return numbers_on(self.tempers, problem.S.device)
