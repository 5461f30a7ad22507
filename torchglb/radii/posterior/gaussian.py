"""The likelihood-ratio level from a Gaussian prior: valid even if theta* is outside the ball."""

from __future__ import annotations

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
    check_sizes,
    refuse,
)
from torchglb.choices import RADIUS_INCREMENTS, RadiusIncrements
from torchglb.errors import InputError
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson, QuasiBounded, has_formulas_of
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import State, checked_centre
from torchglb.radii.posterior.base import PosteriorRadius
from torchglb.radii.posterior.candidates import Candidates, posterior_level
from torchglb.radii.posterior.increments import row_increments
from torchglb.radii.posterior.laws import Prior
from torchglb.radii.problem import Problem


def holds_on_line(family: GLMFamily) -> bool:
    """Whether the constants of a family, and so its increments, hold on the whole line."""
    return any(
        has_formulas_of(family, kind) for kind in (Gaussian, Binomial, Poisson, QuasiBounded)
    )


def check_whole_line(family: GLMFamily) -> None:
    """Refuses a family whose increments are bounded on the ball only: the prior has no edge."""
    if not holds_on_line(family):
        raise InputError(
            "family: expected Gaussian, Bernoulli, Binomial, Poisson or QuasiBounded, whose "
            f"constants hold on the whole line, got {type(family).__name__}"
        )


def normal_prior(family: GLMFamily, variance: Tensor) -> Prior:
    """``N(0, s0^2 I)`` for ``s0^2 (*B)``, of a family whose constants hold on the whole line."""
    volume, top = torch.full_like(variance, math.inf), None
    if not has_formulas_of(family, Poisson):  # the largest m'' of all others is that on [-1, 1]
        top = torch.full_like(variance, family.max_variance(1.0))
    return Prior(True, variance, volume, None, top, 0)


def tempered(temper: Tensor) -> Candidates:
    """Posteriors with ``W = H/a + I/s0^2``."""
    zero = torch.zeros_like(temper)
    return Candidates(zero, temper, zero, zero)


def normal_row_increments(likelihood: NegativeLogLikelihood, point: Tensor, root: Tensor) -> Tensor:
    """:func:`row_increments` for normal U and ``W^-1 = M'M``: one pass, O(n d^2). ``(*B)``."""
    one = torch.ones_like(point[..., 0])
    return row_increments(likelihood, point, root, normal_prior(likelihood.family, one), one)


def gaussian_prior_level(
    likelihood: NegativeLogLikelihood,
    delta: float,
    centre: ArrayLike,
    variance: ArrayLike,
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
    point = checked_centre(likelihood, centre)
    check_whole_line(likelihood.family)
    scale = scale_of_problems("variance", variance, likelihood)
    candidate = tempered(torch.full_like(scale, check_positive("temper", temper)))
    prior = normal_prior(likelihood.family, scale)
    return posterior_level(likelihood, -math.log(delta), prior, point, candidate)


def scale_of_problems(name: str, given: ArrayLike, likelihood: NegativeLogLikelihood) -> Tensor:
    """Positive numbers, one for each problem or one for all, ``(*B)`` in float64."""
    sizes = check_sizes(name, given, positive=True)
    scale = torch.as_tensor(sizes, dtype=torch.float64, device=likelihood.X.device)
    batch = tuple(likelihood.batch_shape)
    try:
        return scale.expand(batch)
    except RuntimeError:
        expected = f"a number, or shape {batch}"
        raise refuse(name, expected, f"shape {tuple(scale.shape)}") from None


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
        tempers = check_numbers("tempers", self.tempers, 0.0, math.inf)
        object.__setattr__(self, "tempers", tempers)

    def init(self, problem: Problem) -> State:  # noqa: D102
        check_whole_line(problem.family)
        if self.increments == "aggregated" and has_formulas_of(problem.family, QuasiBounded):
            expected = "'auto' or 'rows' for probit and cloglog, which need the rows"
            raise refuse("increments", expected, repr(self.increments))
        return super().init(problem)

    def prior(self, problem: Problem) -> Prior:
        """``s0^2 = scale^2 S^2/d``."""
        return normal_prior(problem.family, (self.scale * problem.S).square() / problem.dim)

    def candidates(self, problem: Problem) -> Candidates:  # noqa: D102
        return tempered(numbers_on(self.tempers, problem.S.device))
