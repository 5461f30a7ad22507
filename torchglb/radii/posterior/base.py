"""The radii that rest on a posterior: one that is held from row to row, or one found anew.

On a CPU, for families with compiled derivatives, a posterior is held: its loss and increments are
brought up to date with every row, and the rows are searched for a better one only where that
promises something (:mod:`.search_kernels`). Elsewhere (devices, custom families, rows in several
processes) every evaluation finds the centres and the best posterior anew, in torch.

Rows that require grad make the level a smooth function of them: the centres are then exact
minimisers, and the best posterior around them is differentiated with its centre.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, bound_once
from torchglb.carried.kernels import ProblemRows, memory_size
from torchglb.carried.monomials import monomials
from torchglb.choices import RadiusIncrements
from torchglb.compiled_rows import blocks, compiled_family
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    LateRows,
    State,
    StatisticsRadius,
    check_likelihood,
    conclude,
    reward_length,
    rounding,
    statistics_of,
)
from torchglb.radii.posterior.centre import (
    Anchor,
    Penalty,
    expand_at,
    flatten_batch,
    minimisers,
    recentre,
    rounding_at_centres,
    select,
)
from torchglb.radii.posterior.increments import aggregated_increment, row_increments
from torchglb.radii.posterior.laws import Law, series_terms
from torchglb.radii.posterior.search_kernels import (
    Priors,
    carry_posteriors,
    held_levels,
    search_posteriors,
)
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics
from torchglb.recording import constant, is_recorded, is_transformed, wants_gradient
from torchglb.row_checks import as_rows

EXACT = 1e-18  # of a centre that is to be differentiated, as a tolerance of its loss
NEAR = 1e-6  # a held level that is lower by this need not be compared with the fallback


class Posteriors(NamedTuple):
    """J posteriors around each of P centres, as far as no row is needed; each ``(N, P, J)``.

    Attributes:
        law: of a coordinate.
        divergence: ``KL(P || Q)``.
        trace: ``tr(W^-1 H)``.
        longest: at least ``max_s x_s' W^-1 x_s``.
    """

    law: Law
    divergence: Tensor
    trace: Tensor
    longest: Tensor


def posterior_level(
    likelihood: NegativeLogLikelihood,
    log_failure: float,
    anchor: Anchor,
    divergence: Tensor,
    added: Tensor,
) -> Tensor:
    """``log(1/delta) + KL(P || Q) + L(c) + added`` at one centre each, from above, ``(*B)``."""
    loss, norm = anchor.loss[..., 0], torch.linalg.vector_norm(anchor.point[..., 0, :], dim=-1)
    slack = rounding(likelihood.X.dtype, loss.abs() + added, reward_length(likelihood), norm)
    return log_failure + divergence + loss + added + slack


class _Memory(NamedTuple):
    """A state and the arrays of its tensors, for which torch takes as long as a small round."""

    tensors: State
    statistics: Floats
    held: Floats


class Prepared(NamedTuple):
    """What compiled code needs of a radius and its problems, computed once.

    Attributes:
        radius: whose they are.
        priors: as compiled code knows them.
        last: the state that was made last, and the arrays that it was made of.
    """

    radius: PosteriorRadius
    priors: Priors
    last: list[_Memory]

    def arrays(self, state: State) -> tuple[Floats, Floats]:
        """Statistics and held numbers of a state, each ``(N, size)``, to be read only."""
        memory = self.last[0] if self.last else None  # once: other threads may put theirs there
        if memory is not None and memory.tensors is state:
            return memory.statistics, memory.held
        N = len(self.priors.numbers)
        statistics, held = state["statistics"].detach().numpy(), state["held"].numpy()
        return statistics.reshape(N, -1), held.reshape(N, -1)

    def made(self, state: State) -> bool:
        """Whether a state is the last one that :meth:`state` has made, of known numbers."""
        return any(m.tensors is state and not math.isnan(m.held.item(-1)) for m in self.last)

    def state(self, problem: Problem, statistics: Floats, held: Floats) -> State:
        """A state of new arrays, ``(N, size)``."""
        shape = (*problem.batch_shape, -1)
        tensors = {
            "statistics": torch.from_numpy(statistics.reshape(shape)),
            "held": torch.from_numpy(held.reshape(shape)),
        }
        self.last[:] = [_Memory(tensors, statistics, held)]
        return tensors


class PosteriorRadius(StatisticsRadius):
    """A radius that rests on the best of many posteriors around P centres of each problem.

    The state beside the statistics: ``held``, the posterior with the loss at the centres and at its
    own (:func:`.search_kernels.held_in`); or, where nothing is held, ``centres``, from which the
    next search begins.
    """

    increments: RadiusIncrements
    tolerance: float

    # ---- what a radius supplies ----------------------------------------------------------

    def centre_weights(self, problem: Problem) -> tuple[float, ...]:
        """Weights of the penalty, one centre each."""
        return (1.0,)

    @abstractmethod
    def candidates(self, problem: Problem) -> Tensor:
        """The J kinds of posterior: kappa, rho^2 (or a), k and the entropy of the shape."""

    @abstractmethod
    def prior_variance(self, problem: Problem) -> Tensor:
        """s0^2 of a Gaussian prior; the square of S for the uniform one, ``(*B)``."""

    @abstractmethod
    def curvature_bounds(self, problem: Problem) -> tuple[Tensor | None, Tensor | None]:
        """R_s and the largest m'' on the support of the prior, ``(*B)``, or None: not known."""

    @abstractmethod
    def penalty(self, problem: Problem) -> Penalty:
        """Whose minimisers together with the loss are the centres."""

    @abstractmethod
    def posteriors(self, problem: Problem, anchor: Anchor, reach: Tensor) -> Posteriors:
        """All of them around the centres, for rows of norm at most ``reach (N,)``: no pass."""

    @abstractmethod
    def posterior_at(
        self, problem: Problem, point: Tensor, hessian: Tensor, kind: Tensor
    ) -> tuple[Law, Tensor, Tensor]:
        """Law, divergence ``(N,)`` and ``W^-1`` of one posterior each, differentiable: O(d^3)."""

    def fallback(
        self, problem: Problem, statistics: RowStatistics, theta_hat: Tensor, loss: Tensor
    ) -> Tensor:
        """A level with the same prior that needs no posterior, ``(*B)``."""
        return torch.full_like(loss, torch.inf)

    # ---- the protocol --------------------------------------------------------------------

    def init(self, problem: Problem) -> State:  # noqa: D102
        state, d, P = super().init(problem), problem.dim, len(self.centre_weights(problem))
        if self.increments != "auto" or problem.compiled is None:
            return state | {"centres": problem.zeros(P, d)}
        held = problem.zeros(d * d + 4 + memory_size(d, P + 1, monomials(d, 2).count))
        held[..., : d * d : d + 1] = self.prior_variance(problem)[..., None]  # the prior
        return state | {"held": held}

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        if "held" not in state:
            return super().update(problem, state, x, r, w)
        given = (x, r) if w is None else (x, r, w)
        recorded = is_recorded(state["statistics"], *given)
        if is_transformed(state["statistics"], *given):  # values that nobody shows: not carried
            unknown = torch.full_like(state["held"], torch.nan)
            return super().update(problem, state, x, r, w) | {"held": unknown}
        plain = [constant(t) if recorded else t for t in given]
        plain[1:] = [t.expand(r.shape) for t in plain[1:]]
        new = self.update_plain(problem, state, *(t.double().contiguous() for t in plain))
        if recorded:
            return super().update(problem, state, x, r, w) | {"held": new["held"]}
        return new

    def update_plain(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        if "held" not in state:
            return self.update(problem, state, *as_rows(x, r, problem.batch_shape, problem.dim), w)
        ready = self._prepared(problem)
        sums, held = (memory.copy() for memory in ready.arrays(state))
        weights = 0 if w is None else w.data_ptr()
        rows = (x.data_ptr(), r.data_ptr(), weights, r.numel() // len(sums))
        _carry_posteriors(ready.priors, *rows, sums, held)
        return ready.state(problem, sums, held)

    def levels(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: Callable[[], NegativeLogLikelihood],
        late: LateRows | None = None,
    ) -> tuple[Floats, State] | None:
        if "held" not in state:
            return None
        ready = problem.prepared.get(id(self))
        if (ready is None or not ready.made(state)) and (
            wants_gradient(state["statistics"]) or not _is_known(state)
        ):
            return None
        out, new, _ = self._search(problem, state, likelihood, NO_NUMBERS, NOTHING_OFFERED, late)
        return out[:, 2].copy(), new

    def evaluate(  # noqa: D102
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> Evaluation:
        return self.evaluate_around(problem, state, likelihood, estimate)[0]

    def evaluate_around(
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, estimate: Estimate
    ) -> tuple[Evaluation, Tensor]:
        """:meth:`evaluate`, and the centres, ``(N, P, d)``: differentiable where the level is."""
        check_likelihood(likelihood)
        loss = estimate.loss.double()
        smooth = wants_gradient(*likelihood.tensors(), loss, state["statistics"])
        held = not smooth and "held" in state and _is_known(state)
        if held and compiled_family(likelihood) is not None:
            offers = _offered(problem, estimate)
            at = loss.detach().reshape(-1).contiguous().numpy()  # one number may stand for all
            level, new, passes = self._search(problem, state, lambda: likelihood, at, offers)
            best = torch.from_numpy(level[:, 0].copy()).reshape(problem.batch_shape)
            points = self.centres(problem, new).reshape(len(level), -1, problem.dim)
            compare = not (level[:, 0] < level[:, 1] - NEAR).all()
        else:
            best, points, passes = self._refit(problem, state, likelihood, smooth)
            new = state
            if "centres" in state:
                new = state | {"centres": points.detach().reshape(state["centres"].shape)}
            compare = True
        if compare:
            statistics = statistics_of(problem, state)
            # fmin: a posterior whose arithmetic overflowed leaves the fallback, which is valid
            best = torch.fmin(best, self.fallback(problem, statistics, estimate.theta, loss))
        deltas = (problem.delta, 0.0)
        return conclude(best, loss, problem.dtype, deltas, passes, new), points

    def centres(self, problem: Problem, state: State) -> Tensor:
        """Where the centres of a state are, ``(*B, P, d)``."""
        if "centres" in state:
            return state["centres"]
        d, P = problem.dim, len(self.centre_weights(problem))
        points = state["held"][..., d * d + 4 :][..., : d * (P + 1)]
        points = points.reshape(*problem.batch_shape, d, P + 1)
        return torch.nan_to_num(points[..., :P].mT, nan=0.0)

    # ---- held ----------------------------------------------------------------------------

    def _prepared(self, problem: Problem) -> Prepared:
        ready = problem.prepared.get(id(self))  # its hash would be that of all its settings
        if ready is None or ready.radius is not self:
            S, family = problem.S.reshape(-1), problem.compiled
            assert family is not None
            bounds = self.curvature_bounds(problem)
            columns = (
                S,
                self.prior_variance(problem),
                problem.log_volume,
                *(torch.full_like(S, torch.inf) if t is None else t for t in bounds),
                torch.full_like(S, problem.log_failure),
                torch.full_like(S, self.tolerance),
                problem.per_radius(lambda radius: float(series_terms(radius))),
            )
            prior = torch.stack([t.reshape(-1) for t in columns], dim=-1).numpy()
            numbers = np.concatenate([prior, problem.compiled_rules()], axis=-1)
            etas = np.asarray(self.centre_weights(problem))
            candidates = np.ascontiguousarray(self.candidates(problem).numpy())
            table = monomials(problem.dim, 2)
            priors = Priors(family, not self.confined, numbers, etas, candidates, table)
            ready = problem.prepared[id(self)] = Prepared(self, priors, [])
        return ready

    def _search(
        self,
        problem: Problem,
        state: State,
        likelihood: Callable[[], NegativeLogLikelihood],
        loss_hat: Floats,
        offers: Floats,
        late: LateRows | None = None,
    ) -> tuple[Floats, State, float]:
        """What :func:`held_levels` puts out; the new state; the passes."""
        ready = self._prepared(problem)
        sums, held = ready.arrays(state)
        N = len(sums)
        out = np.empty((N, 4))
        if late is not None:
            sums, held = sums.copy(), held.copy()
        if not _held_levels(ready.priors, *(late or NO_ROWS), sums, held, loss_hat, out):
            return out, state if late is None else ready.state(problem, sums, held), 0.0
        where, held = out[:, 3].nonzero()[0], held.copy()
        part = flatten_batch(likelihood())
        if len(where) < N:
            part = select(part, torch.from_numpy(where))
        copies = [block.rows for block in blocks(part, ready.priors.family, 1.0, None)]
        rows = copies[0] if len(copies) == 1 else _joined(copies)
        offered = offers if len(offers) == N else np.repeat(offers, N, axis=0)
        search_posteriors(ready.priors, rows, held, offered, where, out)
        new = ready.state(problem, sums, held)
        if late is None and state["statistics"].requires_grad:  # asked without grad: keep the graph
            new = new | {"statistics": state["statistics"]}
        return out, new, float(out[:, 3].sum()) / N

    # ---- found anew ----------------------------------------------------------------------

    def _refit(
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, smooth: bool
    ) -> tuple[Tensor, Tensor, float]:
        """The least level ``(*B)`` over all posteriors, the centres, and the passes."""
        flat, rows, d = problem.flat, flatten_batch(likelihood), problem.dim
        with torch.no_grad():
            start = self.centres(problem, state).reshape(*flat.batch_shape, -1, d)
            tolerance = EXACT if smooth else self.tolerance
            anchor, passes = recentre(self.penalty(flat), rows, start, tolerance)
            sums = state["statistics"].reshape(*flat.batch_shape, -1)
            certain, hoped = self._screen(flat, anchor, RowStatistics.of(sums, d))
        points = minimisers(self.penalty(flat), rows, anchor.point) if smooth else anchor.point
        certain, safest = torch.nan_to_num(certain, nan=torch.inf).min(-1)
        if self.increments == "aggregated" and not smooth:
            return certain.reshape(problem.batch_shape), points, passes
        kinds = (hoped.argmin(-1), safest)
        levels = [self._level_around(flat, rows, points, kind) for kind in kinds]
        passes += 6.0 if smooth else 4.0  # two for exact centres, two for each posterior
        return torch.fmin(*levels).reshape(problem.batch_shape), points, passes

    def _screen(
        self, problem: Problem, anchor: Anchor, statistics: RowStatistics
    ) -> tuple[Tensor, Tensor]:
        """What is known of all Q = P J posteriors of each problem without a pass, ``(N, Q)`` twice.

        A valid level, from ``tr(W^-1 H)``; and the level to second order in the width, below which
        the rows hardly ever lead.
        """
        found = self.posteriors(problem, anchor, statistics.longest)
        concordance, _ = self.curvature_bounds(problem)
        rate = None if concordance is None else concordance[:, None, None]
        slack = 2.0 * rounding_at_centres(problem, statistics, anchor)
        start = problem.log_failure + (anchor.loss + slack)[..., None] + found.divergence
        added = aggregated_increment(problem.family, found.law, found.trace, found.longest, rate)
        hoped = 0.5 * found.trace * found.law.second_moment()
        return (start + added).flatten(1), (start + hoped).flatten(1)

    def _level_around(
        self, problem: Problem, likelihood: NegativeLogLikelihood, points: Tensor, chosen: Tensor
    ) -> Tensor:
        """The level of chosen posteriors around ``points (N, P, d)``, differentiable. ``(N,)``."""
        kinds, every = (
            len(self.candidates(problem)),
            torch.arange(len(chosen), device=chosen.device),
        )
        anchor = expand_at(likelihood, points[every, chosen // kinds][:, None])
        point = anchor.point[:, 0]
        kind, hessian = chosen % kinds, anchor.hessian[:, 0]
        law, divergence, cover = self.posterior_at(problem, point, hessian, kind)
        added = row_increments(likelihood, point, cover, law, *self.curvature_bounds(problem))
        return posterior_level(likelihood, problem.log_failure, anchor, divergence, added)


def _joined(parts: list[ProblemRows]) -> ProblemRows:
    """Of some problems and some more, those of all."""
    return ProblemRows(*map(np.concatenate, zip(*parts, strict=True)))


#: called unseen
_carry_posteriors, _held_levels = bound_once(carry_posteriors), bound_once(held_levels)
#: of no point, the sums that :func:`search_posteriors` is offered
NOTHING_OFFERED = np.empty((1, 0))
NO_NUMBERS = np.empty(0)
NO_ROWS = LateRows(np.empty((1, 1, 0)), np.empty((1, 0)), np.empty((1, 0)), 0, 0)


def _offered(problem: Problem, estimate: Estimate) -> Floats:
    """An estimate with loss, gradient and upper triangle of the Hessian, ``(N, d + count)``.

    In float32, where these are too inexact to carry on from, the estimate alone; and nothing where
    they are not known, or not exact.
    """
    if not estimate.is_exact:
        return NOTHING_OFFERED
    assert estimate.gradient is not None and estimate.hessian is not None  # noqa: PT018
    parts = [estimate.theta]
    if problem.dtype == torch.float64:
        upper = torch.triu_indices(problem.dim, problem.dim)
        parts += [estimate.loss, estimate.gradient, estimate.hessian[..., upper[0], upper[1]]]
    N = problem.S.numel()
    return np.concatenate([t.detach().numpy().reshape(N, -1) for t in parts], axis=-1, dtype=float)


def _is_known(state: State) -> bool:
    """Whether the numbers of the held posterior are: not those of rows that nobody shows."""
    return not math.isnan(state["held"].numpy().item(-1))
