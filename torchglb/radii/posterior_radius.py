"""The radii that rest on a posterior: one that is held from row to row, or one found anew.

On a CPU, for families with compiled derivatives, a posterior is held: its loss and increments are
brought up to date with every row, and the rows are searched for a better one only where that
promises something (:mod:`torchglb.radii.posterior_kernels`). Elsewhere (devices, custom families,
rows in several processes) every evaluation finds the centres and the best posterior anew, in torch.

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

from torchglb.backend import Floats
from torchglb.carried.kernels import memory_size
from torchglb.carried.monomials import Packed, monomials
from torchglb.compiled_rows import blocks, compiled_family
from torchglb.estimate import Estimate
from torchglb.families.compiled import CompiledFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import (
    Evaluation,
    State,
    StatisticsRadius,
    check_likelihood,
    conclude,
    statistics_of,
)
from torchglb.radii.centre import Anchor, Penalty, flatten_batch, minimisers, recentre, select
from torchglb.radii.laws import series_terms
from torchglb.radii.posterior_kernels import carry_posteriors, held_levels, search_posteriors
from torchglb.radii.problem import Problem
from torchglb.radii.statistics import RowStatistics, row_arrays
from torchglb.recording import constant, is_recorded, is_transformed, wants_gradient
from torchglb.rounding import round_up

PASSES = ("auto", "rows", "aggregated")
EXACT = 1e-18  # of a centre that is to be differentiated, as a tolerance of its loss
HELD = ("statistics", "carried", "posterior")  # the parts of a state that holds a posterior
NEAR = 1e-6  # a held level that is lower by this need not be compared with the fallback


class Screening(NamedTuple):
    """What is known of Q posteriors of each problem without a pass; each ``(N, Q)``.

    Attributes:
        certain: a valid level, from ``tr(W^-1 H)``.
        hoped: the level to second order in the width, below which the rows hardly ever lead.
    """

    certain: Tensor
    hoped: Tensor


class Prepared(NamedTuple):
    """What compiled code needs of a radius and its problems, computed once.

    Attributes:
        family: as compiled code knows it.
        plain: the same of dispersion 1.
        rules: of :meth:`torchglb.radii.Problem.compiled_rules`.
        normal: whether the prior is Gaussian.
        numbers: of :func:`torchglb.radii.centre_kernels.prior_in`, ``(N, 8)``.
        etas: weights of the barrier, ``(P,)``.
        candidates: ``(J, 4)``, of :func:`torchglb.radii.candidate_kernels.posterior_at`.
        table: the monomials of second order.
    """

    family: CompiledFamily
    plain: CompiledFamily
    rules: Floats
    normal: bool
    numbers: Floats
    etas: Floats
    candidates: Floats
    table: Packed


class PosteriorRadius(StatisticsRadius):
    """A radius that rests on the best of many posteriors around P centres of each problem.

    The state beside the statistics: ``carried``, the loss at the centres and at the centre of the
    held posterior, as :class:`torchglb.carried.CarriedLoss` keeps it, and ``posterior``, that
    posterior; or, where nothing is held, ``centres``, from which the next search begins.
    """

    increments: str
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
    def curvature_bounds(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """R_s and the largest m'' on the support of the prior, ``(*B)``; infinite if unknown."""

    @abstractmethod
    def penalty(self, problem: Problem) -> Penalty:
        """Whose minimisers together with the loss are the centres."""

    @abstractmethod
    def screen(self, problem: Problem, anchor: Anchor, statistics: RowStatistics) -> Screening:
        """All posteriors around the centres: O(d^3), no pass."""

    @abstractmethod
    def level_around(
        self,
        problem: Problem,
        likelihood: NegativeLogLikelihood,
        points: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """The level of chosen posteriors around ``points (N, P, d)``, differentiable. ``(N,)``."""

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
        count = monomials(d, 2).count
        posterior = problem.zeros(d * d + 4)
        posterior[..., : d * d : d + 1] = self.prior_variance(problem)[..., None]  # the prior
        return state | {
            "carried": problem.zeros(memory_size(d, P + 1, count)),
            "posterior": posterior,
        }

    def update(  # noqa: D102
        self, problem: Problem, state: State, x: Tensor, r: Tensor, w: Tensor | None = None
    ) -> State:
        if "carried" not in state:
            return super().update(problem, state, x, r, w)
        given = (x, r) if w is None else (x, r, w)
        recorded = is_recorded(state["statistics"], *given)
        new = _copied(state, HELD)
        if is_transformed(*given):
            new["carried"].fill_(torch.nan)  # values that nobody shows cannot be carried
        else:
            rows = row_arrays(*(map(constant, given) if recorded else given))
            ready = self._prepared(problem)
            carry_posteriors(
                ready.family,
                ready.plain,
                *rows,
                ready.normal,
                ready.numbers,
                ready.rules,
                ready.table,
                *_arrays(new),
            )
        if recorded:
            new |= super().update(problem, {"statistics": state["statistics"]}, x, r, w)
        return state | new

    def level(  # noqa: D102
        self, problem: Problem, state: State, likelihood: Callable[[], NegativeLogLikelihood]
    ) -> tuple[Tensor, State] | None:
        if not _is_held(state) or wants_gradient(state["statistics"]):
            return None
        out, new, _ = self._search(problem, state, likelihood, None, NOTHING_OFFERED)
        best = torch.from_numpy(np.fmin(out[:, 0], out[:, 1])).reshape(problem.batch_shape)
        return best if problem.dtype == torch.float64 else round_up(best, problem.dtype), new

    def evaluate(  # noqa: D102
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        estimate: Estimate,
    ) -> Evaluation:
        return self.evaluate_around(problem, state, likelihood, estimate)[0]

    def evaluate_around(
        self,
        problem: Problem,
        state: State,
        likelihood: NegativeLogLikelihood,
        estimate: Estimate,
    ) -> tuple[Evaluation, Tensor]:
        """:meth:`evaluate`, and the centres, ``(N, P, d)``: differentiable where the level is."""
        check_likelihood(likelihood)
        loss = estimate.loss.double()
        smooth = wants_gradient(*likelihood.tensors(), loss, state["statistics"])
        if not smooth and _is_held(state) and compiled_family(likelihood) is not None:
            offers = _offered(problem, estimate)
            level, new, passes = self._search(problem, state, lambda: likelihood, loss, offers)
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
        points = state["carried"][..., : d * (P + 1)].reshape(*problem.batch_shape, d, P + 1)
        return torch.nan_to_num(points[..., :P].mT, nan=0.0)

    # ---- held ----------------------------------------------------------------------------

    def _prepared(self, problem: Problem) -> Prepared:
        if self not in problem.prepared:
            S = problem.S.reshape(-1)
            terms = problem.per_radius(lambda radius: float(series_terms(radius)))
            columns = (
                S,
                self.prior_variance(problem),
                problem.log_volume,
                *self.curvature_bounds(problem),
                torch.full_like(S, problem.log_failure),
                torch.full_like(S, self.tolerance),
                terms,
            )
            family = problem.compiled
            assert family is not None
            problem.prepared[self] = Prepared(
                family,
                family._replace(scale=1.0),
                problem.compiled_rules(),
                not self.confined,
                torch.stack([t.reshape(-1) for t in columns], dim=-1).numpy(),
                np.asarray(self.centre_weights(problem)),
                np.ascontiguousarray(self.candidates(problem).numpy()),
                monomials(problem.dim, 2),
            )
        return problem.prepared[self]

    def _search(
        self,
        problem: Problem,
        state: State,
        likelihood: Callable[[], NegativeLogLikelihood],
        loss: Tensor | None,
        offers: Floats,
    ) -> tuple[Floats, State, float]:
        """``(N, 3)``: the levels and those of the mean loss; the new state; the passes."""
        ready = self._prepared(problem)
        N = len(ready.numbers)
        out = np.empty((N, 3))
        # without an estimate, the loss at the centre takes its place
        known = np.full(N, np.nan) if loss is None else loss.detach().reshape(N).numpy()
        family, normal, numbers, etas = ready.family, ready.normal, ready.numbers, ready.etas
        kinds = len(ready.candidates)
        held_levels(family, normal, numbers, etas, kinds, ready.table, *_arrays(state), known, out)
        where = out[:, 2].nonzero()[0]
        if not len(where):
            return out, state, 0.0
        part = select(flatten_batch(likelihood()), torch.from_numpy(where))
        copies = [block.rows for block in blocks(part, family, 1.0, None)]
        rows = copies[0] if len(copies) == 1 else np.concatenate(copies)
        new = state | _copied(state, HELD[1:])
        search_posteriors(
            family,
            rows,
            normal,
            numbers,
            etas,
            ready.candidates,
            ready.table,
            *_arrays(new)[1:],
            np.broadcast_to(offers, (N, offers.shape[-1])),
            where,
            out,
        )
        return out, new, float(out[:, 2].sum()) / N

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
            screening = self.screen(flat, anchor, RowStatistics.of(sums, d))
        points = minimisers(self.penalty(flat), rows, anchor.point) if smooth else anchor.point
        certain, safest = torch.nan_to_num(screening.certain, nan=torch.inf).min(-1)
        if self.increments == "aggregated" and not smooth:
            return certain.reshape(problem.batch_shape), points, passes
        kinds = (screening.hoped.argmin(-1), safest)
        levels = [self.level_around(flat, rows, points, kind) for kind in kinds]
        passes += 6.0 if smooth else 4.0  # two for exact centres, two for each posterior
        return torch.fmin(*levels).reshape(problem.batch_shape), points, passes


#: of no point, the sums that :func:`search_posteriors` is offered
NOTHING_OFFERED = np.empty((1, 0))


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


def _is_held(state: State) -> bool:
    """Whether the state holds a posterior, with sums that are known."""
    return "carried" in state and not math.isnan(state["carried"].view(-1)[-1])


def _arrays(state: State) -> tuple[Floats, Floats, Floats]:
    """The memory of N problems, as compiled code reads it."""
    parts = (state[name].detach() for name in HELD)
    sums, carried, held = (part.reshape(-1, part.shape[-1]).numpy() for part in parts)
    return sums, carried, held


def _copied(state: State, names: tuple[str, ...]) -> State:
    """Copies to write into, problem after problem in memory."""
    layout = torch.contiguous_format
    return {name: state[name].detach().clone(memory_format=layout) for name in names}
