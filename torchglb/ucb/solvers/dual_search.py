"""Arms for which the quadratic model misleads: the dual of the program, a search for one number.

For a multiplier ``lambda > 0`` of the loss,

``D(lambda) = lambda B + max_{|theta| <= S} <x, theta> - lambda L(theta) >= h(x)``,

with equality at the best one. The maximiser is an estimate tilted by ``x / lambda``, which Newton's
method finds from anywhere: also in a large ball, where the loss is made of planes with sharp edges
that a quadratic model of any one point knows nothing of. Of two maximisers, one inside the set and
one outside, the chord of value against loss tells the next multiplier, and the gap falls about
fourfold in each step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim.loop import Progress, iterate
from torchglb.ucb.bounds import Above, Below, Feasibility, TwoSidedBounds, rounded_off

#: a search that has not narrowed its gap for so many multipliers is given up
PATIENCE = 12
#: until a maximiser lies outside the set, multipliers fall by this factor
FALL = 8.0
MAX_MULTIPLIERS = 80


class DualState(NamedTuple):
    """The state of every search; all start with ``(N)``."""

    multiplier: Tensor  # the next to try
    start: Tensor  # where its estimate begins
    inner: Tensor  # a point of the set, and the most that its loss can be
    inner_loss: Tensor
    outer: Tensor  # one outside, and likewise; infinite as long as there is none
    outer_loss: Tensor
    steepest: Tensor  # the largest steepness so far; see Errors
    known: TwoSidedBounds


def search_multipliers(
    loss: NegativeLogLikelihood,
    domain: Ball,
    level: Tensor,
    arms: Tensor,
    bracket: DualState,
    tol: float,
) -> tuple[TwoSidedBounds, Tensor]:
    """Closes the gap of N programs with one arm each, from a point inside the set.

    Args:
        loss: L, with one batch axis.
        domain: the balls, of radii S ``(N)``.
        level: B, ``(N)``.
        arms: x, ``(N, d)``.
        bracket: what is known.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.

    Returns:
        What is known at the end, and the status of each, ``(N)``.
    """
    radius = domain.radius_like(level)

    def value(point: Tensor) -> Tensor:
        return (arms * point).sum(-1)

    def step(state: DualState) -> tuple[DualState, Progress]:
        tilt = arms / state.multiplier[..., None]
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
        point = minimize_likelihood(tilted, domain, start=state.start, throw=False).theta
        at, errors = loss.expand_with_errors(point)
        above = Above.by(arms, point, at, errors, level, radius)
        steepest = torch.maximum(state.steepest, errors.steepness)
        moved, most = rounded_off(2.0 * steepest, radius), at.loss + errors.loss

        feasible = most + moved <= level
        inner = torch.where(feasible[..., None], point, state.inner)
        inner_loss = torch.where(feasible, most, state.inner_loss)
        outer = torch.where(feasible[..., None], state.outer, point)
        outer_loss = torch.where(feasible, state.outer_loss, most)
        end = Feasibility(outer, outer_loss, outer_loss + moved)
        start = Feasibility(inner, inner_loss, inner_loss + moved)
        known = state.known.after(above, Below.by(arms, end, start, level, radius))

        # the chord's slope; between its ends lies a maximiser for it
        chord = (value(outer) - value(inner)) / (outer_loss - inner_loss)
        multiplier = torch.where(chord > 0, chord, state.multiplier / FALL)
        new = DualState(
            multiplier=multiplier,
            start=point,
            inner=inner,
            inner_loss=inner_loss,
            outer=outer,
            outer_loss=outer_loss,
            steepest=steepest,
            known=known,
        )
        return new, known.progress(tol, PATIENCE)

    last, status, _ = iterate(step, bracket, bracket.known.progress(tol, PATIENCE), MAX_MULTIPLIERS)
    return last.known, status
