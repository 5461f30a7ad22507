"""The running sums behind the radii: O(d^2) per observation, any number of observations at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.radii.problem import Problem


class RowStatistics(NamedTuple):
    """Sums over the rows seen, with weights w; a = S|x|, and [lo, hi] = [mu(-a), mu(a)].

    Every field but ``number`` and ``longest`` is linear in the weights. None contains 1/g.

    Attributes:
        number: ``(*B)``, rows of positive weight.
        weight: ``(*B)``, sum w.
        longest: ``(*B)``, max |x| over rows of positive weight.
        extreme: ``(*B)``, sum w |x| max(|r - lo|, |r - hi|).
        middle: ``(*B, d)``, sum w ((lo + hi)/2 - r) x.
        width: ``(*B)``, sum w (hi - lo)/2.
        width_gram: ``(*B, d, d)``, sum w (hi - lo)/2 x x'.
        residual: ``(*B, d)``, sum w (mu(0) - r) x.
        slope_gram: ``(*B, d, d)``, sum w max(m'' on [-a, a]) x x'.
        ball_loss: ``(*B)``, sum w E m(a U), from above.
        reward_length: ``(*B)``, sum w |r| |x|; scales the rounding errors.
    """

    number: Tensor
    weight: Tensor
    longest: Tensor
    extreme: Tensor
    middle: Tensor
    width: Tensor
    width_gram: Tensor
    residual: Tensor
    slope_gram: Tensor
    ball_loss: Tensor
    reward_length: Tensor


def empty_statistics(problem: Problem) -> RowStatistics:
    """The sums over no rows."""
    d = problem.dim
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(RowStatistics._fields, ())
    shapes |= {"middle": (d,), "residual": (d,), "width_gram": (d, d), "slope_gram": (d, d)}
    return RowStatistics(**{name: problem.zeros(*shape) for name, shape in shapes.items()})


def update_statistics(
    problem: Problem, statistics: RowStatistics, x: Tensor, r: Tensor, w: Tensor | None = None
) -> RowStatistics:
    """The sums with k more rows; O(k d^2) and no loop.

    Args:
        problem: family and ball.
        statistics: the sums so far.
        x: features ``(*B, k, d)``, of norm at most 1.
        r: rewards ``(*B, k)``.
        w: weights ``(*B, k)`` in [0, 1]; 1 if left out.

    Example:
        >>> from torchglb.domain import Ball
        >>> from torchglb.families import Bernoulli
        >>> problem = Problem(Bernoulli(), Ball(2, 4.0), delta=0.05)
        >>> sums = empty_statistics(problem)
        >>> sums = update_statistics(problem, sums, torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> float(sums.number)
        2.0
    """
    family = problem.family
    x, r = x.double(), r.double()
    w = torch.ones_like(r) if w is None else w.double()
    length = torch.linalg.vector_norm(x, dim=-1)  # (*B, k)
    a = problem.S[..., None] * length
    low, high = family.mean(-a), family.mean(a)
    half = 0.5 * (high - low)
    middle = 0.5 * (high + low) - r
    residual = family.mean(torch.zeros_like(a)) - r
    slope = largest_slope(family, a, problem.max_variance[..., None])
    seen = w > 0
    farthest = torch.where(seen, length, torch.zeros_like(length))

    def total(terms: Tensor) -> Tensor:  # (*B, k) -> (*B)
        return (w * terms).sum(-1)

    def vector(terms: Tensor) -> Tensor:  # (*B, k) -> (*B, d)
        return ((w * terms)[..., None] * x).sum(-2)

    def gram(terms: Tensor) -> Tensor:  # (*B, k) -> (*B, d, d)
        return (x * (w * terms)[..., None]).mT @ x

    old = statistics
    return RowStatistics(
        number=old.number + seen.sum(-1),
        weight=old.weight + w.sum(-1),
        longest=torch.cat([old.longest[..., None], farthest], dim=-1).amax(-1),
        extreme=old.extreme + total(length * torch.maximum((r - low).abs(), (r - high).abs())),
        middle=old.middle + vector(middle),
        width=old.width + total(half),
        width_gram=old.width_gram + gram(half),
        residual=old.residual + vector(residual),
        slope_gram=old.slope_gram + gram(slope),
        ball_loss=old.ball_loss + total(problem.ball_rule(family, a)),
        reward_length=old.reward_length + total(r.abs() * length),
    )


def largest_slope(family: GLMFamily, a: Tensor, on_ball: Tensor) -> Tensor:
    """The maximum of ``m''`` on [-a, a], elementwise; ``on_ball`` where no formula is known."""
    if isinstance(family, Gaussian):
        return torch.ones_like(a)
    if isinstance(family, Binomial):
        return torch.full_like(a, 0.25 * family.trials)
    if isinstance(family, Poisson):
        return family.variance(a)
    return on_ball.expand_as(a)
