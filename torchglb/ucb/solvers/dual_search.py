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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim.loop import Progress, iterate
from torchglb.ucb.bounds import Feasibility, TwoSidedBounds, rounded_off
from torchglb.ucb.program import SublevelProgram

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
    program: SublevelProgram,
    inside: tuple[Tensor, Tensor, Tensor],
    arms: Tensor,
    known: TwoSidedBounds,
    status: Tensor,
    stuck: Tensor,
    tol: float,
) -> tuple[TwoSidedBounds, Tensor]:
    """Carries on the search of some arms from a point inside the set, as N programs of one arm.

    Args:
        program: the batch of programs.
        inside: a point of the set ``(*B, K, d)``, the most that its loss can be, its steepness.
        arms: ``(*B, K, d)``.
        known: of every arm, ``(*B, K)``.
        status: likewise.
        stuck: the arms, an index of all ``*B x K``, ``(N)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.

    Returns:
        What is known of every arm at the end, and its status.
    """
    axes = status.ndim - 1

    def of_problems(t: Tensor) -> Tensor:
        problems = math.prod(t.shape[:axes])  # there may be no rows to infer it from
        return t.reshape(problems, *t.shape[axes:])[stuck // status.shape[-1]]

    def of_arms(t: Tensor) -> Tensor:
        return t.flatten(0, axes)[stuck]

    def put(whole: Tensor, part: Tensor) -> Tensor:
        return whole.flatten(0, axes).index_copy(0, stuck, part).reshape(whole.shape)

    def value(point: Tensor) -> Tensor:
        return (x * point).sum(-1)

    def step(state: DualState) -> tuple[DualState, Progress]:
        tilt = x / state.multiplier[..., None]
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
        steepest = torch.maximum(state.steepest, errors.steepness)
        moved, most = rounded_off(2.0 * steepest, radius), at.loss + errors.loss

        feasible = most + moved <= level
        inner = torch.where(feasible[..., None], point, state.inner)
        inner_loss = torch.where(feasible, most, state.inner_loss)
        outer = torch.where(feasible[..., None], state.outer, point)
        outer_loss = torch.where(feasible, state.outer_loss, most)
        end = Feasibility(outer, outer_loss, outer_loss + moved)
        start = Feasibility(inner, inner_loss, inner_loss + moved)
        known = state.known.after(x, point, at, errors, end, start, level, radius)

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

    *rows, radius, level = (of_problems(t) for t in program.tensors())
    loss, domain = program.likelihood.rebuild(rows), program.domain.resized(radius)
    x = of_arms(arms)
    inner, inner_loss, steepness = (of_arms(t) for t in inside)
    before = TwoSidedBounds._make(of_arms(t) for t in known)
    before = before._replace(stalled=torch.zeros_like(level))
    multiplier = (before.upper - value(inner)) / (level - inner_loss)
    first = DualState(
        # by concavity at least as large as the best multiplier
        multiplier=torch.where(torch.isfinite(multiplier) & (multiplier > 0), multiplier, 1.0),
        start=inner,
        inner=inner,
        inner_loss=inner_loss,
        outer=inner,
        outer_loss=torch.full_like(level, torch.inf),
        steepest=steepness,
        known=before,
    )
    last, verdict, _ = iterate(step, first, before.progress(tol, PATIENCE), MAX_MULTIPLIERS)
    return TwoSidedBounds._make(map(put, known, last.known)), put(status, verdict)
