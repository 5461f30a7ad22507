"""The running sums behind the radii: O(d^2) per observation, any number of observations at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson, has_formulas_of
from torchglb.radii.problem import Problem
from torchglb.radii.statistics_kernels import carry_statistics
from torchglb.recording import is_recorded


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

    Example:
        >>> from torchglb.domain import Ball
        >>> from torchglb.families import Bernoulli
        >>> problem = Problem(Bernoulli(), Ball(2, 4.0), delta=0.05)
        >>> rows = torch.eye(2), torch.tensor([1.0, 0.0])
        >>> float(update_statistics(problem, empty_statistics(problem), *rows).reward_length)
        1.0
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

    def packed(self) -> Tensor:
        """All of them in one tensor, ``(*B, size)``, as compiled code carries them."""
        batch = self.number.shape
        return torch.cat([part.reshape(*batch, -1) for part in self], dim=-1)

    @classmethod
    def of(cls, packed: Tensor, dim: int) -> RowStatistics:
        """Views of the fields of :meth:`packed`."""
        shapes = _shapes(dim)
        parts = packed.split([math.prod(shape) for shape in shapes], dim=-1)
        batch = packed.shape[:-1]
        return cls(*(t.reshape(batch + shape) for t, shape in zip(parts, shapes, strict=True)))


def _shapes(dim: int) -> list[tuple[int, ...]]:
    named = {"middle": (dim,), "residual": (dim,), "width_gram": (dim, dim)}
    named["slope_gram"] = (dim, dim)
    return [named.get(name, ()) for name in RowStatistics._fields]


def empty_statistics(problem: Problem) -> RowStatistics:
    """The sums over no rows.

    Example:
        >>> from torchglb.domain import Ball
        >>> from torchglb.families import Bernoulli
        >>> problem = Problem(Bernoulli(), Ball(2, 4.0), delta=0.05)
        >>> float(empty_statistics(problem).number)
        0.0
    """
    return RowStatistics(*(problem.zeros(*shape) for shape in _shapes(problem.dim)))


def carried_statistics(
    problem: Problem, packed: Tensor, x: Tensor, r: Tensor, w: Tensor | None = None
) -> Tensor:
    """:func:`update_statistics` of packed sums: compiled, where the rows allow it."""
    given = (packed, x, r) if w is None else (packed, x, r, w)
    if problem.compiled is None or is_recorded(*given):
        old = RowStatistics.of(packed, problem.dim)
        return update_statistics(problem, old, x, r, w).packed()
    new = packed.clone(memory_format=torch.contiguous_format)
    memory = new.reshape(problem.S.numel(), -1).numpy()
    S = problem.S.reshape(-1).numpy()
    carry_statistics(problem.compiled, *row_arrays(x, r, w), S, problem.compiled_rules(), memory)
    return new


def row_arrays(x: Tensor, r: Tensor, w: Tensor | None = None) -> tuple[Floats, Floats, Floats]:
    """k rows of N problems as compiled code reads them: ``(N, k, d)`` and ``(N, k)`` twice."""
    N, k, d = r.shape[:-1].numel(), *x.shape[-2:]

    def array(t: Tensor, *shape: int) -> Floats:
        return np.ascontiguousarray(t.numpy(), np.float64).reshape(N, *shape)

    weights = np.ones((N, k)) if w is None else array(w.expand(r.shape), k)
    return array(x, k, d), array(r, k), weights


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
    if has_formulas_of(family, Gaussian):
        return torch.ones_like(a)
    if has_formulas_of(family, Binomial):
        return torch.full_like(a, 0.25 * family.trials)
    if has_formulas_of(family, Poisson):
        return family.variance(a)
    return on_ball.expand_as(a)
