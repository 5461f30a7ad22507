"""The optimistic program solved in torch: batched, with a certificate for every arm.

Every evaluated point bounds every arm from above (its half-space cut, intersected with the ball,
has a closed-form support) and, drawn back towards the centre, is feasible and so bounds it from
below. New points come from sequential quadratic programming, which converges quadratically; both
bounds then close quadratically too. The gap that is returned is a duality gap, not an estimate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array, dot, finite, length, library, quiet, tensor, which
from torchglb.checks import check_same, check_shape
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.linalg import cut_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap, raise_unless_converged
from torchglb.optim.implicit import opaque
from torchglb.optim.loop import Progress, iterate
from torchglb.recording import is_transformed, wants_gradient
from torchglb.ucb.bounds import (
    Known,
    cut_value,
    draw_back,
    pull_of_rows,
    roundings_of,
    tangent,
    trace,
)
from torchglb.ucb.differentiate import differentiable
from torchglb.ucb.priced import Bracket, search_prices
from torchglb.ucb.program import SublevelProgram, SupportResult
from torchglb.ucb.sqp import come_back, multipliers, propose, stop_at_cut

#: a search that has not narrowed its gap for this many steps is given up
PATIENCE = 25
#: what the search by models and the search by prices know of an arm
SHARED = ("upper", "lower", "best", "normal", "offset")


def native_support(
    program: SublevelProgram,
    arms: Tensor,
    *,
    center: Tensor | None = None,
    tol: float | None = None,
    max_steps: int = 100,
    throw: bool = True,
    validate: bool = True,
) -> SupportResult:
    """``h(x)`` of every arm to tolerance, with a certified gap; one pass per step for all arms.

    The bounds and ``theta`` are differentiable with respect to arms, level, radius and the rows of
    the loss: the value by the envelope theorem, theta and multiplier through their optimality
    conditions, to third order.

    Args:
        program: the batch of programs.
        arms: ``(*B, K, d)``.
        center: a feasible point ``(*B, d)``; by default the minimiser of the loss is computed.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``; 3e-8 in float64, 1e-3 in float32.
        max_steps: limit on passes over the history.
        throw: raise :class:`SolverError` if an arm does not converge, or return statuses.
        validate: look at the values of the arms.
    """
    transformed = is_transformed(*program.tensors(), arms)
    program.check_arms(arms, values=validate and not transformed)
    if tol is None:
        tol = 3e-8 if arms.dtype == torch.float64 else 1e-3
    if center is None:
        center = torch.full_like(program.likelihood.X[..., :1, :].sum(-2), torch.nan)
    else:
        check_same("center", center, "arms", arms)
        check_shape("center", center, (*program.likelihood.batch_shape, program.likelihood.dim))

    def solve(center: Tensor, arms: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        return _solve(program.rebuild(data), center, arms, tol, max_steps)

    outputs = opaque(solve, center, arms, *program.tensors())
    result = SupportResult(*outputs)
    if throw and not is_transformed(result.status):
        raise_unless_converged(result.status, "support")
    if wants_gradient(arms, *program.tensors()):
        result = differentiable(program, arms, result)
    return result


def _solve(
    program: SublevelProgram, center: Tensor, arms: Tensor, tol: float, max_steps: int
) -> tuple[Tensor, ...]:
    """The fields of a :class:`SupportResult`; a centre of NaN stands for the minimiser."""
    unknown = bool(torch.isnan(center).any()) if center.device.type == "cpu" else True
    if unknown:
        fit = minimize_likelihood(program.likelihood, program.domain, throw=False)
        center, at_center, slack = (
            fit.theta,
            Expansion(fit.loss, fit.gradient, fit.hessian),
            fit.gap,
        )
    else:
        at_center = program.likelihood.expand(center)
        radius = program.domain.radius_like(arms).expand(program.level.shape)
        slack = frank_wolfe_gap(center, at_center.gradient, radius)
    search, status, _ = search_support(program, center, at_center, arms, tol, max_steps)

    # without a feasible centre there is no lower bound, and perhaps no set at all
    undefined = ~torch.isfinite(at_center.loss) | torch.isnan(program.level)
    empty = (at_center.loss - slack > program.level) | (search.upper == -torch.inf).any(-1)
    unsure = at_center.loss > program.level
    undefined, empty, unsure = (
        mask[..., None].expand_as(status) for mask in (undefined, empty, unsure)
    )
    status = torch.where(unsure & (status != Status.NONFINITE), int(Status.INACCURATE), status)
    status = torch.where(empty, int(Status.INFEASIBLE), status)
    status = torch.where(undefined, int(Status.NONFINITE), status)
    upper = torch.where(empty, -torch.inf, search.upper).masked_fill(undefined, torch.nan)
    lower = torch.where(empty | unsure, -torch.inf, search.lower).masked_fill(undefined, torch.nan)
    theta = search.best.masked_fill((undefined | empty | unsure)[..., None], torch.nan)
    radius = program.domain.radius_like(arms)
    if radius.ndim:
        radius = radius[..., None]
    multiplier = cut_ball(arms, search.normal, search.offset, radius).multiplier
    return upper, lower, theta, multiplier, upper - lower, status


class Search(NamedTuple):
    """The state of every arm's search; all start with ``(*B, K)``."""

    trial: Tensor  # the next point to evaluate
    upper: Tensor
    lower: Tensor
    best: Tensor  # a feasible point that attains lower
    normal: Tensor  # the cut that gave upper: <normal, theta> <= offset
    offset: Tensor
    inner: Tensor  # an evaluated feasible point, and its loss
    inner_loss: Tensor
    stalled: Tensor


def search_support(
    program: SublevelProgram,
    center: Tensor,
    at_center: Expansion,
    arms: Tensor,
    tol: float,
    max_steps: int,
) -> tuple[Search, Tensor, Tensor]:
    """Closes the gap of every arm from a feasible centre; one pass per step for all arms.

    Args:
        program: the batch of programs.
        center: a feasible point ``(*B, d)``, best the minimiser of the loss.
        at_center: the loss and its derivatives there.
        arms: ``(*B, K, d)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.
        max_steps: limit on passes.

    Returns:
        The last state, the status and the number of steps of every arm, ``(*B, K)``.
    """
    shape = arms.shape[:-1]
    eps = torch.finfo(arms.dtype).eps
    radius = program.domain.radius_like(arms).expand(shape[:-1])[..., None].expand(shape)
    level = program.level[..., None].expand(shape)
    floor = at_center.loss[..., None].expand(shape)
    # what draw_back takes for feasible
    aim = level - 24 * eps * torch.where(torch.isinf(level), 0.0, level.abs() + floor.abs())
    hub = center[..., None, :].expand(arms.shape)
    pull, roundings = _rounding(program.likelihood)
    sound = torch.isfinite(floor) & ~torch.isnan(level)

    def sqp_point(theta: Tensor, at: Expansion, guess: Tensor) -> Tensor:
        # some hundred operations on small arrays
        given = (arms, theta, at.gradient, at.hessian, aim - at.loss, radius, guess)
        x, point, gradient, hessian, room, S, omega = (array(t) for t in given)
        with quiet():
            eigenvalues, basis = library(x).linalg.eigh(finite(hessian))
            return tensor(propose(x, point, gradient, eigenvalues, basis, room, S, omega))

    def report(search: Search) -> Progress:
        gap = search.upper - search.lower
        close = gap <= tol * (1.0 + search.upper.abs())
        return Progress(close, search.stalled > PATIENCE, sound & torch.isfinite(gap))

    def step(search: Search) -> tuple[Search, Progress]:
        trial = search.trial
        at = program.likelihood.expand(trial)
        value, gradient, hessian = at
        cut = tangent(dot(gradient, trial), value, trace(hessian), level, radius, pull)
        offset = cut.offset + roundings * cut.rounding
        bound = cut_value(arms, gradient, offset, radius)
        point = draw_back(trial, value, hub, floor, level)
        reached = (arms * point).sum(-1)
        known = Known.of(search).after(bound, gradient, offset, reached, point)
        further = (value <= level) & (reached > search.lower)

        # near the boundary: an SQP step from here, drawn back to the best cut if it crosses that
        level_weight, ball_weight = multipliers(arms, gradient, trial)
        forth = sqp_point(trial, at, ball_weight / level_weight)
        forth = stop_at_cut(trial, forth, known.normal, known.offset)
        back = come_back(trial, at, search.inner, search.inner_loss, level)
        far = value - level > level - floor
        new = Search(
            trial=torch.where(far[..., None], back, forth),
            inner=torch.where(further[..., None], trial, search.inner),
            inner_loss=torch.where(further, value, search.inner_loss),
            **known._asdict(),
        )
        return new, report(new)

    copies = Expansion(*(_per_arm(t, level) for t in at_center))
    zero = torch.zeros_like(level)
    start = Search(
        trial=sqp_point(hub, copies, zero),
        upper=radius * torch.linalg.vector_norm(arms, dim=-1) * (1.0 + 8 * eps),
        lower=(arms * hub).sum(-1),
        best=hub,
        normal=torch.zeros_like(arms),
        offset=torch.full_like(level, torch.inf),
        inner=hub,
        inner_loss=floor,
        stalled=zero,
    )
    search, status, num_steps = iterate(step, start, report(start), max_steps)
    stuck = which(((status == Status.INACCURATE) & (floor <= level)).flatten())
    if stuck.shape[0]:
        search, status, passes = _by_prices(program, hub, floor, arms, search, status, stuck, tol)
        num_steps = num_steps + passes
    return search, status, num_steps


def _by_prices(
    program: SublevelProgram,
    hub: Tensor,
    floor: Tensor,
    arms: Tensor,
    search: Search,
    status: Tensor,
    stuck: Tensor,
    tol: float,
) -> tuple[Search, Tensor, Tensor]:
    """The search of some arms, an index of all ``*B x K``, carried on by :mod:`priced`.

    Returns:
        The state, the status, and the passes that it took.
    """
    axes = status.ndim - 1

    def of_problems(t: Tensor) -> Tensor:
        problems = math.prod(t.shape[:axes])  # there may be no rows to infer it from
        return t.reshape(problems, *t.shape[axes:])[stuck // status.shape[-1]]

    def of_arms(t: Tensor) -> Tensor:
        return t.flatten(0, axes)[stuck]

    def put(whole: Tensor, part: Tensor) -> Tensor:
        return whole.flatten(0, axes).index_copy(0, stuck, part).reshape(whole.shape)

    *rows, radius, level = (of_problems(t) for t in program.tensors())
    loss = program.likelihood.rebuild(rows)
    pull, roundings = _rounding(loss)
    x, inner, inner_loss = of_arms(arms), of_arms(hub), of_arms(floor)
    known = {name: of_arms(getattr(search, name)) for name in SHARED}
    price = (known["upper"] - (x * inner).sum(-1)) / (level - inner_loss)
    first = Bracket(
        # by concavity at least as dear as the best price
        price=torch.where(torch.isfinite(price) & (price > 0), price, 1.0),
        start=inner,
        inner=inner,
        inner_loss=inner_loss,
        outer=inner,
        outer_loss=torch.full_like(level, torch.inf),
        stalled=torch.zeros_like(level),
        passes=torch.zeros_like(stuck),
        **known,
    )
    domain = program.domain.resized(radius)
    found, verdict = search_prices(loss, domain, level, x, first, pull[:, 0], roundings, tol)
    new = {name: put(getattr(search, name), getattr(found, name)) for name in SHARED}
    return search._replace(**new), put(status, verdict), put(0 * status, found.passes)


def _rounding(likelihood: NegativeLogLikelihood) -> tuple[Tensor, float]:
    """What a cut pays for rounding: sizes ``(*B, 1)`` and their number."""
    X, tilt = likelihood.X, likelihood.tilt
    pull = pull_of_rows(likelihood.family, length(X), likelihood.r, likelihood.w)
    (pull,) = likelihood.shards.sum(pull)
    if tilt is not None:
        pull = pull + torch.linalg.vector_norm(tilt, dim=-1)
    return pull[..., None], roundings_of(likelihood.num_rows)


def _per_arm(value: Tensor, like: Tensor) -> Tensor:
    """A tensor ``(*B, ...)`` repeated along the arm axis of ``like (*B, K)``."""
    batch = like.ndim - 1
    repeated = value.unsqueeze(batch)
    return repeated.expand(*like.shape, *value.shape[batch:])
