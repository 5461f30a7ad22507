"""The optimistic program solved in torch: batched, with a certificate for every arm.

Every evaluated point bounds every arm from above (its half-space cut, intersected with the ball,
has a closed-form support) and, drawn back towards the centre, is feasible and so bounds it from
below. New points come from sequential quadratic programming, which converges quadratically; both
bounds then close quadratically too. The gap that is returned is a duality gap, not an estimate.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.arrays import finite, length, wait_for_indices
from torchglb.backend.value_checks import rewards_within
from torchglb.checks import (
    ValueChecks,
    as_like,
    check_count,
    check_flag,
    check_shape,
    check_tolerance,
)
from torchglb.compiled_rows import compiled_family
from torchglb.families.compiled import CompiledFamily
from torchglb.linalg import cut_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap, raise_unless_converged
from torchglb.optim.implicit import opaque
from torchglb.optim.loop import Progress, iterate
from torchglb.recording import is_plain, is_transformed, wants_gradient, without_autocast
from torchglb.rounding import lost_below, short_scale
from torchglb.rows.sums import Errors, Expansion
from torchglb.ucb.bounds import Feasibility, TwoSidedBounds, rounded_off, value_at_least
from torchglb.ucb.gradients import differentiable
from torchglb.ucb.program import SublevelProgram, SupportResult, check_program
from torchglb.ucb.solvers.compiled import compiled_support, narrowed
from torchglb.ucb.solvers.dual_search import search_multipliers
from torchglb.ucb.solvers.sqp import come_back, multipliers, propose, stop_at_cut

#: a search that has not narrowed its gap for this many steps is given up
PATIENCE = 25
#: up to this many features compiled code is faster than a linear algebra library
COMPILED_LIMIT = 32


@without_autocast
def native_support(
    program: SublevelProgram,
    arms: Any,
    *,
    center: Any = None,
    tol: float | None = None,
    max_steps: int = 100,
    throw: bool = True,
    validate: bool = True,
) -> SupportResult:
    """``h(x)`` of every arm to tolerance, with a certified gap; one pass per step for all arms.

    The bounds and ``theta`` are differentiable with respect to arms, level, radius and the rows of
    the loss: the value by the envelope theorem, theta and multiplier through their optimality
    conditions, to third order.

    Both bounds pay for rounding, and a gap that rounding explains counts as closed. On a CPU
    float32 is a storage format: the program is solved in float64, and the bounds are rounded
    outwards.

    Args:
        program: the batch of programs.
        arms: ``(*B, K, d)``.
        center: a feasible point ``(*B, d)``; by default the minimiser of the loss is computed (of
            a program with a region, its centre is taken).
        tol: stop when ``upper - lower <= tol (1 + |upper|)``; 3e-8 in float64; in float32
            1e-6 on a CPU, which solves in float64, and 1e-3 elsewhere.
        max_steps: limit on passes over the history.
        throw: raise :class:`SolverError` if an arm does not converge, or return statuses.
        validate: look at the values of arms, rewards, weights, regularisation and centre.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0)
        >>> bool(native_support(program, [[1.0, 0.0]], tol=1e-8).gap < 1e-7)
        True
    """
    check_program(program)
    throw, validate = check_flag("throw", throw), check_flag("validate", validate)
    arms = as_like("arms", arms, program.likelihood.X)
    if tol is None:
        tol = 3e-8 if arms.dtype == torch.float64 else 1e-6 if arms.is_cpu else 1e-3
    check_tolerance("tol", tol)
    check_count("max_steps", max_steps)
    if validate and (family := _family_of_plain(program, arms, center)) is not None:
        # there is nothing that the checks below would refuse, and nothing to be differentiated
        found = compiled_support(program, family, center, arms, tol, max_steps)
        if throw:
            raise_unless_converged(found[-1], "support")
        return SupportResult(*found)
    transformed = is_transformed(*program.tensors(), arms)
    program.checked_arms(arms, values=validate and not transformed)
    if validate and not isinstance(program.domain.radius, Tensor):
        program.likelihood.family.require_convex(program.domain.radius)
    if center is not None:
        center = as_like("center", center, arms)
        check_shape("center", center, (*program.likelihood.batch_shape, program.likelihood.dim))
        if validate and not is_transformed(*program.tensors(), center):
            checks = ValueChecks()
            norm = torch.linalg.vector_norm(center.detach(), dim=-1)
            limit = program.domain.radius_like(center) * (1 + 64 * torch.finfo(center.dtype).eps)
            # NaN stands for a centre that is not known
            checks.require("center", ~(norm > limit), "points of the ball, |center| <= S", norm)
            checks.settle()
    if center is None and program.region is not None:
        center = program.region.center.detach()
    given = (*program.tensors(), arms) if center is None else (*program.tensors(), arms, center)
    if is_transformed(*given) or wants_gradient(*given):
        center = _unknown(program) if center is None else center

        def solve(center: Tensor, arms: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
            return _solve(program.rebuild(data), center, arms, tol, max_steps)

        result = SupportResult(*opaque(solve, center, arms, *program.tensors()))
    else:
        with torch.no_grad():
            result = SupportResult(*_solve(program, center, arms, tol, max_steps))
    if throw and not is_transformed(result.status):
        raise_unless_converged(result.status, "support")
    if wants_gradient(arms, *program.tensors()):
        result = differentiable(program, arms, result)
    return result


def _family_of_plain(
    program: SublevelProgram, arms: Tensor, center: Tensor | None
) -> CompiledFamily | None:
    """The compiled family, if all that is given is surely what it should be, by quick checks.

    They are for unweighted rows in double precision on a CPU; whatever else comes goes the long
    way, where it is looked at with care.
    """
    loss, S = program.likelihood, program.domain.radius
    X, ridge, shape = loss.X, loss.regularization, arms.shape
    if not (is_plain(X) and is_plain(loss.r) and is_plain(program.level) and is_plain(arms)):
        return None
    if not (isinstance(S, float) and isinstance(ridge, float) and X.dtype == torch.float64):
        return None
    if not (loss.w is None and loss.tilt is None and program.region is None):
        return None
    fits = len(shape) == X.ndim and shape[-1] == X.shape[-1]
    if not (fits and shape[:-2] == X.shape[:-2] and math.isfinite(arms.numpy().sum())):
        return None
    if center is not None:
        if not (is_plain(center) and center.dtype == torch.float64):
            return None
        if center.shape != shape[:-2] + shape[-1:]:
            return None
        points = center.numpy()
        if not ((points * points).sum(-1) <= S * S).all():
            return None
    family = compiled_family(loss) if shape[-1] <= COMPILED_LIMIT else None
    if family is None or loss.arrived:
        return family
    r = np.ascontiguousarray(loss.r.numpy()).reshape(-1)
    return family if rewards_within(r, family.low, family.high, family.whole) else None


def _solve(
    program: SublevelProgram, center: Tensor | None, arms: Tensor, tol: float, max_steps: int
) -> tuple[Tensor, ...]:
    """The fields of a :class:`SupportResult`; a centre of None or NaN stands for the minimiser."""
    family = compiled_family(program.likelihood) if arms.shape[-1] <= COMPILED_LIMIT else None
    if family is not None:
        return compiled_support(program, family, center, arms, tol, max_steps)
    center = _unknown(program) if center is None else center
    scale = short_scale(arms)
    arms = arms / scale[..., None]
    if arms.dtype == torch.float64 or not arms.is_cpu:
        found = _solve_batched(program, center, arms, tol, max_steps)
    else:
        wide = program.rebuild(tuple(t.double() for t in program.tensors()))
        found = _solve_batched(wide, center.double(), arms.double(), tol, max_steps)
        found = narrowed(found, arms.dtype)
    upper, lower, theta, multiplier, _, status = found
    lost = lost_below(scale)
    upper, lower = upper * scale + lost, lower * scale - lost
    return upper, lower, theta, multiplier * scale, upper - lower, status


def _unknown(program: SublevelProgram) -> Tensor:
    """NaN in the place of the centres ``(*B, d)``."""
    return torch.full_like(program.likelihood.X[..., :1, :].sum(-2), torch.nan)


def _solve_batched(
    program: SublevelProgram, center: Tensor, arms: Tensor, tol: float, max_steps: int
) -> tuple[Tensor, ...]:
    """The fields of a :class:`SupportResult`; a centre of NaN stands for the minimiser."""
    unknown = bool(torch.isnan(center).any()) if center.device.type == "cpu" else True
    if unknown:
        center = minimize_likelihood(program.likelihood, program.domain, throw=False).theta
    at_center, errors = program.likelihood.expand_with_errors(center)
    known, status = search_support(program, center, at_center, errors, arms, tol, max_steps)

    # without a feasible centre there is no lower bound, and perhaps no set at all; that there is
    # none is proven by a loss whose least value over the ball is above the level
    radius = program.domain.radius_like(arms).expand(program.level.shape)
    least = at_center.loss - frank_wolfe_gap(center, at_center.gradient, radius)
    rounding = errors.loss + 2.0 * radius * errors.gradient
    size = 16 * (least.abs() + at_center.loss.abs())
    size = size + (8 + arms.shape[-1]) * radius * length(at_center.gradient)
    rounding = rounding + torch.finfo(arms.dtype).eps * size
    undefined = ~torch.isfinite(at_center.loss) | torch.isnan(program.level)
    empty = (least - rounding > program.level) | (known.upper == -torch.inf).any(-1)
    unsure = at_center.loss + errors.loss > program.level
    undefined, empty, unsure = (
        mask[..., None].expand_as(status) for mask in (undefined, empty, unsure)
    )
    status = torch.where(unsure & (status != Status.NONFINITE), int(Status.INACCURATE), status)
    status = torch.where(empty, int(Status.INFEASIBLE), status)
    status = torch.where(undefined, int(Status.NONFINITE), status)
    upper = torch.where(empty, -torch.inf, known.upper).masked_fill(undefined, torch.nan)
    lower = torch.where(empty | unsure, -torch.inf, known.lower).masked_fill(undefined, torch.nan)
    theta = known.best.masked_fill((undefined | empty | unsure)[..., None], torch.nan)
    multiplier = cut_ball(arms, known.normal, known.offset, radius[..., None]).multiplier
    return upper, lower, theta, multiplier, upper - lower, status


class Search(NamedTuple):
    """The state of every arm's search; all start with ``(*B, K)``."""

    trial: Tensor  # the next point to evaluate
    inner: Tensor  # an evaluated feasible point, and its loss
    inner_loss: Tensor
    known: TwoSidedBounds


def search_support(
    program: SublevelProgram,
    center: Tensor,
    at_center: Expansion,
    errors: Errors,
    arms: Tensor,
    tol: float,
    max_steps: int,
) -> tuple[TwoSidedBounds, Tensor]:
    """Closes the gap of every arm from a feasible centre; one pass per step for all arms.

    Args:
        program: the batch of programs.
        center: a feasible point ``(*B, d)``, best the minimiser of the loss.
        at_center: the loss and its derivatives there.
        errors: what rounding did to them.
        arms: ``(*B, K, d)``.
        tol: stop when ``upper - lower <= tol (1 + |upper|)``.
        max_steps: limit on passes.

    Returns:
        What is known of every arm, and its status, ``(*B, K)``.
    """
    shape = arms.shape[:-1]
    eps = torch.finfo(arms.dtype).eps
    radius = program.domain.radius_like(arms).expand(shape[:-1])[..., None].expand(shape)
    level = program.level[..., None].expand(shape)
    floor = at_center.loss[..., None].expand(shape)
    centers = center[..., None, :].expand(arms.shape)
    center_error, center_steepness = errors.loss[..., None], errors.steepness[..., None]
    # what draw_back takes for feasible
    aim = level - 24 * eps * torch.where(torch.isinf(level), 0.0, level.abs() + floor.abs())
    sound = torch.isfinite(floor) & ~torch.isnan(level)

    def allowed(points: Tensor) -> Tensor:
        return points if program.region is None else program.region.pull_in(points)

    def sqp_point(theta: Tensor, at: Expansion, most: Tensor, guess: Tensor) -> Tensor:
        eigenvalues, basis = torch.linalg.eigh(finite(at.hessian))
        return propose(arms, theta, at.gradient, eigenvalues, basis, aim - most, radius, guess)

    def report(known: TwoSidedBounds) -> Progress:
        converged, stuck, is_finite = known.progress(tol, PATIENCE)
        return Progress(converged, stuck, sound & is_finite)

    def step(search: Search) -> tuple[Search, Progress]:
        trial = search.trial
        at, errors = program.likelihood.expand_with_errors(trial)
        value = at.loss
        moved = rounded_off(errors.steepness + center_steepness, radius)
        most = value + (errors.loss + moved)
        end, start = (
            Feasibility(trial, value, most),
            Feasibility(centers, floor, floor + (center_error + moved)),
        )
        known = search.known.after(arms, trial, at, errors, end, start, level, radius)
        further = (most <= level) & (known.lower > search.known.lower)

        # near the boundary: an SQP step from here, drawn back to the best cut if it crosses that
        level_weight, ball_weight = multipliers(arms, at.gradient, trial)
        forth = sqp_point(trial, at, most, ball_weight / level_weight)
        forth = stop_at_cut(trial, forth, known.normal, known.offset)
        back = come_back(trial, at, search.inner, search.inner_loss, level)
        far = value - level > level - floor
        new = Search(
            trial=allowed(torch.where(far[..., None], back, forth)),
            inner=torch.where(further[..., None], trial, search.inner),
            inner_loss=torch.where(further, value, search.inner_loss),
            known=known,
        )
        return new, report(known)

    shared = Expansion(*(t.unsqueeze(level.ndim - 1) for t in at_center))  # by all arms
    zero = torch.zeros_like(level)
    known = TwoSidedBounds(
        upper=radius * length(arms) * (1.0 + (8 + arms.shape[-1]) * eps),
        lower=value_at_least(arms, centers, radius),
        best=centers,
        normal=torch.zeros_like(arms),
        offset=torch.full_like(level, torch.inf),
        upper_paid=zero,
        lower_paid=zero,
        stalled=zero,
    )
    first = allowed(sqp_point(centers, shared, floor + center_error, zero))
    start = Search(trial=first, inner=centers, inner_loss=floor, known=known)
    last, status, _ = iterate(step, start, report(known), max_steps)
    known = last.known
    if program.region is not None:  # the minimisations of the dual search would leave the region
        return known, status
    most = floor + center_error
    stuck = wait_for_indices(((status == Status.INACCURATE) & (most <= level)).flatten())
    if not stuck.shape[0]:
        return known, status
    inside = (centers, most, center_steepness.expand(shape))
    return search_multipliers(program, inside, arms, known, status, stuck, tol)
