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
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.arrays import numbers_on
from torchglb.backend import Floats, StoredCalls
from torchglb.carried.kernels import memory_size
from torchglb.carried.monomials import monomials
from torchglb.carried.source import RowArrays
from torchglb.choices import RadiusIncrements
from torchglb.compiled_rows import blocks, compiled_family
from torchglb.estimate import Estimate
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    State,
    StatisticsRadius,
    check_likelihood,
    conclude,
    rounding_at,
    statistics_of,
)
from torchglb.radii.posterior.candidates import Candidates, posterior_level, screen
from torchglb.radii.posterior.centre import (
    Penalty,
    flatten_batch,
    minimisers,
    recentre,
    select,
)
from torchglb.radii.posterior.laws import Prior, series_terms
from torchglb.radii.posterior.search_kernels import (
    LEAST,
    LEVEL,
    MEAN_LOSS,
    WANTED,
    Priors,
    held_levels,
    search_posteriors,
)
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics, row_arrays
from torchglb.recording import constant, is_recorded, is_transformed, wants_gradient

EXACT = 1e-18  # of a centre that is to be differentiated, as a tolerance of its loss
NEAR = 1e-6  # a held level that is lower by this need not be compared with the fallback
#: of no point, the sums that :func:`search_posteriors` is offered
NOTHING_OFFERED = np.empty((1, 0))
NO_NUMBERS, NO_LEVELS = np.empty(0), np.empty((0, 0))
NO_ROWS = RowArrays(np.empty((1, 1, 0)), np.empty((1, 0)), np.empty((1, 0)), 0)
#: calls of :func:`held_levels` with the priors as they lie in memory
LEVELS = StoredCalls(
    (held_levels, NO_ROWS, 0, np.empty((1, 0)), np.empty((1, 0)), NO_NUMBERS, NO_LEVELS)
)


class HeldState(Mapping[str, Tensor]):
    """The state of a held posterior: arrays, of which tensors are made when somebody asks for them.

    To make them takes torch as long as a tenth of a small round.

    Args:
        shape: ``(*B)``.
        statistics: ``(N, size)``.
        posterior: of :func:`.search_kernels.held_in`, ``(N, size)``.
    """

    names = ("statistics", "posterior")

    def __init__(self, shape: tuple[int, ...], statistics: Floats, posterior: Floats) -> None:
        self.shape, self.statistics, self.posterior = shape, statistics, posterior

    @classmethod
    def of(cls, problem: Problem, state: State) -> HeldState | None:
        """The numbers of a state; None if there are none, or they are of rows that nobody shows."""
        if isinstance(state, HeldState):
            return state
        known = state.get("posterior")
        if known is None or is_transformed(known) or math.isnan(known.numpy().item(-1)):
            return None
        N = problem.S.numel()
        arrays = (state[name].detach().numpy().reshape(N, -1) for name in cls.names)
        return cls(problem.batch_shape, *arrays)

    def copy(self) -> HeldState:
        """To be changed, which a state is not."""
        return HeldState(self.shape, self.statistics.copy(), self.posterior.copy())

    def after(self, before: State) -> State:
        """This, with the graph of statistics that carry one and were asked without grad."""
        if isinstance(before, HeldState) or not before["statistics"].requires_grad:
            return self
        return {**self, "statistics": before["statistics"]}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return torch.from_numpy(getattr(self, name).reshape(*self.shape, -1))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Prepared(NamedTuple):
    """What compiled code needs of a radius and its problems, computed once.

    Attributes:
        radius: whose they are.
        priors: as compiled code knows them.
        levels: :func:`held_levels` with these priors.
    """

    radius: PosteriorRadius
    priors: Priors
    levels: Callable[..., bool]


class PosteriorRadius(StatisticsRadius):
    """A radius that rests on the best of many posteriors around P centres of each problem.

    The state beside the statistics: ``posterior``, the held one with the loss at the centres and at
    its own (:func:`.search_kernels.held_in`); or, where nothing is held, ``centres``, from which
    the next search begins.
    """

    increments: RadiusIncrements
    tolerance: float

    # ---- what a radius supplies ----------------------------------------------------------

    def centre_weights(self, problem: Problem) -> tuple[float, ...]:
        """Weights of the penalty, one centre each."""
        return (1.0,)

    @abstractmethod
    def prior(self, problem: Problem) -> Prior:
        """The prior; refuses a family whose constants it would need and are not known."""

    @abstractmethod
    def candidates(self, problem: Problem) -> Candidates:
        """The J kinds of posterior around each centre."""

    def fallback(
        self, problem: Problem, statistics: RowStatistics, theta_hat: Tensor, loss: Tensor
    ) -> Tensor:
        """A level with the same prior that needs no posterior, ``(*B)``."""
        return torch.full_like(loss, torch.inf)

    # ---- the protocol --------------------------------------------------------------------

    def init(self, problem: Problem) -> State:  # noqa: D102
        state, d, P = super().init(problem), problem.dim, len(self.centre_weights(problem))
        variance = self.prior(problem).variance
        if self.increments != "auto" or problem.compiled is None:
            return {**state, "centres": problem.zeros(P, d)}
        held = problem.zeros(d * d + 4 + memory_size(d, P + 1, monomials(d, 2).count))
        held[..., : d * d : d + 1] = variance.sqrt()[..., None]  # the prior
        return {**state, "posterior": held}

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        if "posterior" not in state:
            return super().update(problem, state, x, r, w)
        given = (x, r) if w is None else (x, r, w)
        held = None if is_transformed(*given) else HeldState.of(problem, state)
        if held is None:  # values that nobody shows: not carried
            unknown = torch.full_like(state["posterior"], torch.nan)
            return {**super().update(problem, state, x, r, w), "posterior": unknown}
        x_, r_, w_ = row_arrays(*(constant(t) for t in given))
        late = RowArrays(np.ascontiguousarray(x_.transpose(0, 2, 1)), w_, w_ * r_, r_.shape[1])
        ready = self._prepared(problem)
        new = held.copy()
        ready.levels(late, 0, new.statistics, new.posterior, NO_NUMBERS, NO_LEVELS)
        if is_recorded(state["statistics"], *given):
            return {**super().update(problem, state, x, r, w), "posterior": new["posterior"]}
        return dict(new)

    def levels(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: Callable[[], NegativeLogLikelihood],
        rows: RowArrays | None = None,
        known: int = 0,
    ) -> tuple[Floats, State] | None:
        held = HeldState.of(problem, state)
        if held is None:
            return None
        if held is not state:
            recorded = state["statistics"]
            if wants_gradient(recorded) or (rows is not None and recorded.requires_grad):
                return None
        given = (NO_NUMBERS, NOTHING_OFFERED, rows or NO_ROWS, known)
        out, new, _ = self._search(problem, held, likelihood, *given)
        return out[LEAST], new.after(state)

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
        held = None if smooth else HeldState.of(problem, state)
        if held is not None and compiled_family(likelihood) is not None:
            offers = _offered(problem, estimate)
            at = loss.detach().reshape(-1).contiguous().numpy()  # one number may stand for all
            out, kept, passes = self._search(problem, held, lambda: likelihood, at, offers)
            best = torch.from_numpy(out[LEVEL]).reshape(problem.batch_shape)
            points = self.centres(problem, kept).reshape(out.shape[1], -1, problem.dim)
            compare = not (out[LEVEL] < out[MEAN_LOSS] - NEAR).all()
            new = dict(kept.after(state))
        else:
            best, points, passes = self._refit(problem, state, likelihood, smooth)
            new = dict(state)
            if "centres" in state:
                new["centres"] = points.detach().reshape(state["centres"].shape)
            compare = True
        if compare:
            statistics = statistics_of(problem, state)
            # fmin: a posterior whose arithmetic overflowed leaves the fallback, which is valid
            best = torch.fmin(best, self.fallback(problem, statistics, estimate.theta, loss))
        return conclude(problem, best, loss, passes, new), points

    def centres(self, problem: Problem, state: State) -> Tensor:
        """Where the centres of a state are, ``(*B, P, d)``."""
        if "centres" in state:
            return state["centres"]
        d, P = problem.dim, len(self.centre_weights(problem))
        points = state["posterior"][..., d * d + 4 :][..., : d * (P + 1)]
        points = points.reshape(*problem.batch_shape, d, P + 1)
        return torch.nan_to_num(points[..., :P].mT, nan=0.0)

    # ---- held ----------------------------------------------------------------------------

    def _prepared(self, problem: Problem) -> Prepared:
        ready = problem.prepared.get(id(self))  # its hash would be that of all its settings
        if ready is None or ready.radius is not self:
            S, family = problem.S.reshape(-1), problem.compiled
            assert family is not None
            prior = self.prior(problem)
            bounds = (prior.concordance, prior.top)
            columns = (
                S,
                prior.variance,
                prior.log_volume,
                *(torch.full_like(S, torch.inf) if t is None else t for t in bounds),
                torch.full_like(S, problem.log_failure),
                torch.full_like(S, self.tolerance),
                problem.per_radius(lambda radius: float(series_terms(radius))),
            )
            known = torch.stack([t.reshape(-1) for t in columns], dim=-1).numpy()
            numbers = np.concatenate([known, problem.compiled_rules()], axis=-1)
            etas = np.asarray(self.centre_weights(problem))
            candidates = torch.stack(self.candidates(problem), dim=-1).numpy()
            table = monomials(problem.dim, 2)
            priors = Priors(family, not self.confined, numbers, etas, candidates, table)
            (levels,) = LEVELS.with_stored(priors, None)
            ready = problem.prepared[id(self)] = Prepared(self, priors, levels)
        return ready

    def _search(
        self,
        problem: Problem,
        held: HeldState,
        likelihood: Callable[[], NegativeLogLikelihood],
        loss_hat: Floats,
        offers: Floats,
        rows: RowArrays = NO_ROWS,
        known: int = 0,
    ) -> tuple[Floats, HeldState, float]:
        """What :func:`held_levels` puts out; the new state; the passes."""
        ready, N = self._prepared(problem), len(held.statistics)
        out, new = np.empty((4, N)), held.copy() if rows.used > known else held
        if not ready.levels(rows, known, new.statistics, new.posterior, loss_hat, out):
            return out, new, 0.0
        if new is held:
            new = held.copy()
        where, part = out[WANTED].nonzero()[0], likelihood()
        if len(where) < N:
            part = select(flatten_batch(part), torch.from_numpy(where))
        offered = offers if len(offers) == N else np.repeat(offers, N, axis=0)
        for block in blocks(part, ready.priors.family, 1.0, None):
            wanted = where[block.where]
            search_posteriors(ready.priors, block.rows, new.posterior, offered, wanted, out)
        return out, new, float(out[WANTED].sum()) / N

    # ---- found anew ----------------------------------------------------------------------

    def _refit(
        self, problem: Problem, state: State, likelihood: NegativeLogLikelihood, smooth: bool
    ) -> tuple[Tensor, Tensor, float]:
        """The least level ``(*B)`` over all posteriors, the centres, and the passes."""
        flat, rows, d = problem.flat, flatten_batch(likelihood), problem.dim
        prior, candidates = self.prior(flat), self.candidates(flat)
        etas = None if prior.normal else numbers_on(self.centre_weights(flat), flat.S.device)
        penalty = Penalty(prior.variance[:, None], etas)
        with torch.no_grad():
            start = self.centres(problem, state).reshape(*flat.batch_shape, -1, d)
            tolerance = EXACT if smooth else self.tolerance
            anchor, passes = recentre(penalty, rows, start, tolerance)
            sums = state["statistics"].reshape(*flat.batch_shape, -1)
            statistics = RowStatistics.of(sums, d)
            known = (anchor, statistics.longest, rows.lost_in_hessian())
            found = screen(flat.family, prior, candidates, *known)
            slack = 2.0 * rounding_at(flat, statistics, anchor.point, anchor.loss)
            start = flat.log_failure + (anchor.loss + slack)[..., None]
            certain, hoped = ((start + cost).flatten(1) for cost in found)
        points = minimisers(penalty, rows, anchor.point) if smooth else anchor.point
        certain, safest = torch.nan_to_num(certain, nan=torch.inf).min(-1)
        if self.increments == "aggregated" and not smooth:
            return certain.reshape(problem.batch_shape), points, passes
        levels, every = [], torch.arange(len(points), device=points.device)
        for chosen in (hoped.argmin(-1), safest):
            slot, kind = chosen // len(candidates.rho2), chosen % len(candidates.rho2)
            candidate, centre = Candidates(*(t[kind] for t in candidates)), points[every, slot]
            levels.append(posterior_level(rows, flat.log_failure, prior, centre, candidate))
        passes += 6.0 if smooth else 4.0  # two for exact centres, two for each posterior
        return torch.fmin(*levels).reshape(problem.batch_shape), points, passes


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
