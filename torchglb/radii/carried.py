"""The radii that rest on a posterior: what is carried from row to row, and when a pass is made.

Any posterior gives a valid level, however old it is; only its average loss must be that of all
rows. So the posterior of an earlier time is held, and its loss and increments are brought up to
date in O(d^2) per row. New ones are looked at in every evaluation as far as no row is needed, and
summed row by row only when one of them promises to be better by more than a tolerance.

Rows that require grad make the level a smooth function of them: the centres are then exact
minimisers, at the price of a few passes in every evaluation, and the best posterior around them is
differentiated with its centre.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import which
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    State,
    StatisticsRadius,
    conclude,
    loss_at,
    rounding,
)
from torchglb.radii.centre import (
    Anchor,
    Penalty,
    add_rows,
    flatten_batch,
    minimisers,
    recentre,
    select,
)
from torchglb.radii.problem import Problem
from torchglb.recording import wants_gradient

PASSES = ("auto", "rows", "aggregated")
EXACT = 1e-18  # of a centre that is to be differentiated, as a tolerance of its loss
FEW = 64  # so few rows are summed as quickly as one
GROWTH = 1.2  # after so many times the rows a posterior that promised too much is tried again


class Posterior(NamedTuple):
    """One posterior of each problem with its average loss over all rows; all float64.

    Attributes:
        point: the centre c, ``(*B, d)``.
        cover: ``W^-1``, ``(*B, d, d)``.
        shape: k of the Pearson-II density, ``(*B)``; 0 for others.
        loss: ``L(c)``, ``(*B)``.
        cost: ``KL(P || Q)`` and the increments ``E_P L - L(c)``, from above, ``(*B)``.
        surplus: ``(*B)``, what the level exceeded the hope for it, when it was last summed.
        number: rows at that time, ``(*B)``.
    """

    point: Tensor
    cover: Tensor
    shape: Tensor
    loss: Tensor
    cost: Tensor
    surplus: Tensor
    number: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Posterior:
        """From the entries ``held_point``, ... of a state."""
        return cls(*(state[f"held_{name}"] for name in cls._fields))

    def entries(self) -> dict[str, Tensor]:
        """The entries of a state."""
        return {f"held_{name}": value for name, value in self._asdict().items()}

    def reshape(self, old: Sequence[int], new: Sequence[int]) -> Posterior:
        """The same with another batch shape of as many problems."""
        return Posterior(*(t.reshape((*new, *t.shape[len(old) :])) for t in self))

    def put(self, index: Tensor, part: Posterior) -> Posterior:
        """The same with the problems of an index (of the one batch axis) replaced."""
        return Posterior(*(a.index_copy(0, index, b) for a, b in zip(self, part, strict=True)))

    def where(self, condition: Tensor, other: Posterior) -> Posterior:
        """This where ``condition (N,)`` holds, else the other."""

        def choose(mine: Tensor, others: Tensor) -> Tensor:
            return torch.where(condition.reshape(-1, *(1,) * (mine.ndim - 1)), mine, others)

        return Posterior(*(choose(a, b) for a, b in zip(self, other, strict=True)))

    def select(self, index: Tensor) -> Posterior:
        """The posteriors of some problems of the one batch axis."""
        return Posterior(*(t[index] for t in self))


class Screening(NamedTuple):
    """What is known of Q posteriors of each problem without a pass; each ``(N, Q)``.

    Attributes:
        certain: a valid level, from ``tr(W^-1 H)``.
        hoped: the level to second order in the width, below which the rows hardly ever lead.
    """

    certain: Tensor
    hoped: Tensor


class PosteriorRadius(StatisticsRadius):
    """A radius whose state carries P centres, with the loss expanded there, and a posterior."""

    increments: str
    tolerance: float

    # ---- what a radius supplies ----------------------------------------------------------

    def centres(self, problem: Problem) -> int:
        """P."""
        return 1

    @abstractmethod
    def prior(self, problem: Problem) -> Posterior:
        """The prior, which is the first posterior: without rows, and of no divergence."""

    @abstractmethod
    def penalty(self, problem: Problem) -> Penalty:
        """Whose minimisers together with the loss are the centres."""

    @abstractmethod
    def screen(self, problem: Problem, anchor: Anchor, state: State) -> Screening:
        """All posteriors around the centres: O(d^3), no pass."""

    @abstractmethod
    def posterior_of(self, problem: Problem, anchor: Anchor, chosen: Tensor) -> Posterior:
        """One of the Q posteriors of each problem, ``chosen (N,)``, still without increments."""

    @abstractmethod
    def added(
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        posterior: Posterior,
        index: Tensor | None = None,
    ) -> Tensor:
        """The increments ``E_P L - L(c)`` over some rows, ``(*B)``: one pass over them.

        ``index`` says which problems of the one batch axis these are; None for all.
        """

    @abstractmethod
    def smooth_level(
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        points: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """The level of chosen posteriors around ``points (N, P, d)``, differentiable. ``(N,)``."""

    def fallback(self, problem: Problem, state: State, theta_hat: Tensor, loss: Tensor) -> Tensor:
        """A level with the same prior that needs no posterior, ``(*B)``."""
        return torch.full_like(loss, torch.inf)

    # ---- the protocol --------------------------------------------------------------------

    def init(self, problem: Problem) -> State:  # noqa: D102
        P, d = self.centres(problem), problem.dim
        anchor = Anchor(*(problem.zeros(P, *shape) for shape in ((d,), (), (d,), (d, d))))
        return super().init(problem) | anchor.entries() | self.prior(problem).entries()

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        sums = super().update(problem, state, x, r, w)
        with torch.no_grad():  # centres and posteriors are starting points only
            anchor = add_rows(problem.family, Anchor.of(state), x, r, w)
            if self.increments != "auto":
                return sums | anchor.entries()
            held = Posterior.of(state)
            weights = None if w is None else w.double()
            rows = NegativeLogLikelihood(problem.family, x.double(), r.double(), weights)
            held = held._replace(
                loss=held.loss + rows.value(held.point),
                cost=held.cost + self.added(problem, rows, held),
            )
        return sums | anchor.entries() | held.entries()

    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        theta_hat: Tensor,
        loss_hat: Tensor | None = None,
        gradient_hat: Tensor | None = None,
        hessian_hat: Tensor | None = None,
    ) -> Evaluation:
        loss, passes = loss_at(likelihood, theta_hat, loss_hat)
        fallback = self.fallback(problem, state, theta_hat, loss)
        flat, rows = problem.flat, flatten_batch(likelihood)
        smooth = wants_gradient(*rows.tensors())
        with torch.no_grad():
            anchor = Anchor.of(state).reshape(flat.batch_shape)
            offer = None
            if gradient_hat is not None and hessian_hat is not None:
                known = (theta_hat, loss, gradient_hat, hessian_hat)
                offer = Anchor(*(t.double() for t in known)).broadcast(problem.batch_shape, anchor)
            tolerance = EXACT if smooth else self.tolerance
            anchor, moves = recentre(self.penalty(flat), rows, anchor, tolerance, offer)
            screening = self.screen(flat, anchor, state)
        if smooth:
            level, more = self._smooth(flat, rows, anchor, screening)
        else:
            held = Posterior.of(state).reshape(problem.batch_shape, flat.batch_shape)
            limit = fallback.reshape(-1)
            level, held, more = self._carried(flat, rows, anchor, state, screening, held, limit)
            if self.increments == "auto":
                state = state | held.reshape(flat.batch_shape, problem.batch_shape).entries()
        # fmin: a posterior whose arithmetic overflowed leaves the fallback, which is valid
        best = torch.fmin(level.reshape(fallback.shape), fallback)
        state = state | anchor.reshape(problem.batch_shape).entries()
        deltas = (problem.delta, 0.0)
        return conclude(best, loss, problem.dtype, deltas, passes + moves + more, state)

    def _carried(
        self,
        problem: Problem,
        rows: NegativeLogLikelihood,
        anchor: Anchor,
        state: State,
        screening: Screening,
        held: Posterior,
        fallback: Tensor,
    ) -> tuple[Tensor, Posterior, float]:
        """The least level over all posteriors, ``(N,)``, the one to hold, and the passes."""
        number = state["number"].reshape(-1)
        rewards = state["reward_length"].reshape(-1) / problem.family.dispersion

        def level_of(posterior: Posterior, index: Tensor | slice = slice(None)) -> Tensor:
            norm = torch.linalg.vector_norm(posterior.point, dim=-1)
            size = posterior.loss.abs() + posterior.cost
            slack = rounding(problem.dtype, size, rewards[index], norm, number[index])
            return problem.log_failure + posterior.loss + posterior.cost + 2.0 * slack

        if self.increments != "auto":
            held = held._replace(cost=torch.full_like(held.cost, torch.inf))  # nothing is held
        certain, safest = torch.nan_to_num(screening.certain, nan=torch.inf).min(-1)
        hoped, boldest = screening.hoped.min(-1)
        level = torch.fmin(certain, level_of(held))
        index = self._worthwhile(torch.fmin(level, fallback) - hoped, held, number)
        if index.shape[0] == 0:
            return level, held, 0.0
        part, now = select(rows, index), number[index]
        best = held.select(index)._replace(surplus=torch.full_like(now, torch.inf), number=now)
        for chosen in (boldest, safest):
            new = self.posterior_of(problem, anchor, chosen).select(index)
            new = new._replace(cost=new.cost + self.added(problem, part, new, index), number=now)
            found = level_of(new, index)
            surplus = torch.fmin(best.surplus, found - hoped[index])
            best = new.where(found < level_of(best, index), best)._replace(surplus=surplus)
        held = held.put(index, best)
        level = torch.fmin(level, level_of(held))
        return level, held, 2.0 * index.shape[0] / level.shape[0]

    def _worthwhile(self, gain: Tensor, held: Posterior, number: Tensor) -> Tensor:
        """The problems whose increments are to be summed row by row, as an index ``(N',)``.

        ``"auto"`` looks at the gain that can be hoped for, less what the last hope exceeded the
        truth by, unless that is long ago or the rows are few: one host synchronisation.
        """
        if self.increments != "auto":
            count = len(gain) if self.increments == "rows" else 0
            return torch.arange(count, device=gain.device)
        late = (number >= GROWTH * held.number) | (number < FEW)
        likely = (gain - held.surplus > self.tolerance) | late
        return which((gain > self.tolerance) & likely)

    def _smooth(
        self,
        problem: Problem,
        rows: NegativeLogLikelihood,
        anchor: Anchor,
        screening: Screening,
    ) -> tuple[Tensor, float]:
        """The least level of the posteriors around the exact centres, differentiable; passes."""
        points = minimisers(self.penalty(problem), rows, anchor.point)
        safest = torch.nan_to_num(screening.certain, nan=torch.inf).argmin(-1)
        boldest = screening.hoped.argmin(-1)
        levels = [self.smooth_level(problem, rows, points, kind) for kind in (boldest, safest)]
        return torch.fmin(*levels), 6.0  # two for the centres, two for each posterior
