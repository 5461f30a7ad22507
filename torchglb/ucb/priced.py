"""Arms for which the quadratic model misleads: the dual of the program, a search for one price.

For a price ``lambda > 0`` of the loss,

``D(lambda) = lambda B + max_{|theta| <= S} <x, theta> - lambda L(theta) >= h(x)``,

with equality at the best one. The maximiser is an estimate tilted by ``x / lambda``, which Newton's
method finds from anywhere: also in a large ball, where the loss is made of planes with sharp edges
that a quadratic model of any one point knows nothing of. Of two maximisers, one inside the set and
one outside, the chord of value against loss tells the next price, and the gap falls about fourfold
in each step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import dot
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim.loop import Progress, iterate
from torchglb.ucb.bounds import Known, cut_value, draw_back, tangent, trace

#: a search that has not narrowed its gap for so many prices is given up
PATIENCE = 12
#: until a maximiser lies outside the set, prices fall by this factor
FALL = 8.0
MAX_PRICES = 80


class Bracket(NamedTuple):
    """The state of every search; all start with ``(N)``."""

    price: Tensor  # the next to try
    start: Tensor  # where its estimate begins
    inner: Tensor  # a point of the set, and its loss
    inner_loss: Tensor
    outer: Tensor  # one outside, and its loss; infinite as long as there is none
    outer_loss: Tensor
    upper: Tensor
    lower: Tensor
    best: Tensor  # a feasible point that attains lower
    normal: Tensor  # the cut that gave upper: <normal, theta> <= offset
    offset: Tensor
    stalled: Tensor
    passes: Tensor  # over the rows so far


def search_prices(
    loss: NegativeLogLikelihood,
    domain: Ball,
    level: Tensor,
    arms: Tensor,
    bracket: Bracket,
    pull: Tensor,
    roundings: float,
    tol: float,
) -> tuple[Bracket, Tensor]:
    """Closes the gap of N programs with one arm each, from a point inside the set.

    Args:
        loss: L, with one batch axis.
        domain: the balls, of radii S ``(N)``.
        level: B, ``(N)``.
        arms: x, ``(N, d)``.
        bracket: what is known.
        pull: the sizes that are rounded, of :func:`~torchglb.ucb.bounds.pull_of_rows`, ``(N)``.
        roundings: their number.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.

    Returns:
        The last state, and the status of each, ``(N)``.
    """
    radius = domain.radius_like(level)

    def value(point: Tensor) -> Tensor:
        return (arms * point).sum(-1)

    def report(state: Bracket) -> Progress:
        gap = state.upper - state.lower
        close = gap <= tol * (1.0 + state.upper.abs())
        return Progress(close, state.stalled > PATIENCE, torch.isfinite(gap))

    def step(state: Bracket) -> tuple[Bracket, Progress]:
        tilt = arms / state.price[..., None]
        tilt = tilt if loss.tilt is None else tilt + loss.tilt
        tilted = NegativeLogLikelihood(
            loss.family,
            loss.X,
            loss.r,
            loss.w,
            regularization=loss.regularization,
            tilt=tilt,
            shards=loss.shards,
        )
        fit = minimize_likelihood(tilted, domain, start=state.start, throw=False)
        point = fit.theta
        at = loss.expand(point)
        cut = tangent(dot(at.gradient, point), at.loss, trace(at.hessian), level, radius, pull)
        offset = cut.offset + roundings * cut.rounding
        bound = cut_value(arms, at.gradient, offset, radius)

        feasible = at.loss <= level
        inner = torch.where(feasible[..., None], point, state.inner)
        inner_loss = torch.where(feasible, at.loss, state.inner_loss)
        outer = torch.where(feasible[..., None], state.outer, point)
        outer_loss = torch.where(feasible, state.outer_loss, at.loss)
        there = draw_back(outer, outer_loss, inner, inner_loss, level)
        known = Known.of(state).after(bound, at.gradient, offset, value(there), there)

        # the chord's slope; between its ends lies a maximiser for it
        chord = (value(outer) - value(inner)) / (outer_loss - inner_loss)
        price = torch.where(chord > 0, chord, state.price / FALL)
        new = Bracket(
            price=price,
            start=point,
            inner=inner,
            inner_loss=inner_loss,
            outer=outer,
            outer_loss=outer_loss,
            **known._asdict(),
            passes=state.passes + fit.num_steps + 2,
        )
        return new, report(new)

    last, status, _ = iterate(step, bracket, report(bracket), MAX_PRICES)
    return last, status
