"""Arms from the whole unit ball: ``max <x, theta>`` over x and theta is the largest ``|theta|``.

The norm is convex, so this is a maximisation of the wrong curvature: local maxima are possible. In
the plane it is solved globally. If directions ``x_i`` leave no angle wider than delta to the
nearest one, then ``max |theta| <= max_i h(x_i) / cos(delta)``: sectors whose bound falls below the
best point found are dropped, the others are split, and the gap shrinks with delta squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchglb.arrays import numbers_on, wait_for_all
from torchglb.checks import ValueChecks, check_count, check_flag, check_tolerance
from torchglb.optim import Status, raise_unless_converged
from torchglb.recording import is_transformed
from torchglb.rounding import round_up
from torchglb.ucb.program import SublevelProgram, check_program
from torchglb.ucb.solvers.native import native_support

#: directions of the first round, and parts into which a surviving sector is split
FIRST, SPLIT = 32, 4
#: sectors kept per problem and round
KEPT = 32


@dataclass(frozen=True)
class BallChoice:
    """The best arm of the unit ball.

    Attributes:
        arm: ``(*B, d)``, a unit vector.
        theta: ``(*B, d)``, its multiple that is feasible, but for the rounding of its dtype; NaN
            where none is known.
        lower: ``(*B)``, its norm, rounded down: a certified lower bound on the maximum.
        upper: ``(*B)``, a certified upper bound.
        is_global: whether upper and lower agree to the tolerance, ``(*B)``.
        status: ``(*B)``, of :class:`torchglb.optim.Status`.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> choice = glb.argmax_ball(glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0))
        >>> bool(choice.lower <= choice.upper), choice.theta.shape
        (True, torch.Size([2]))
    """

    arm: Tensor
    theta: Tensor
    lower: Tensor
    upper: Tensor
    is_global: Tensor
    status: Tensor


def argmax_ball(
    program: SublevelProgram,
    *,
    tol: float = 1e-6,
    max_rounds: int = 12,
    throw: bool = True,
    validate: bool = True,
) -> BallChoice:
    """The arm of the unit ball with the largest ``h(x)``.

    For d = 1 and d = 2 the answer is global, certified to ``tol (1 + upper)``. For d > 2 it is a
    local maximum from 4 d + 1 starts, with the upper bound ``min(S, |widest box|)``: over any
    orthonormal axes, ``|theta|^2`` is at most the sum of the squared largest coordinates.

    Args:
        program: the batch of programs.
        tol: relative tolerance of the global answer.
        max_rounds: rounds of splitting (d = 2) or of ascent (d > 2).
        throw: raise if a support problem fails; a gap that stays open for d > 2 does not raise.
        validate: look at the values of rewards, weights and regularisation.

    Example:
        >>> import torchglb as glb
        >>> rows = [[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0]
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows)
        >>> choice = argmax_ball(glb.SublevelProgram(loss, glb.Ball(2, 3.0), 2.0))
        >>> choice.arm.shape, choice.is_global
        (torch.Size([2]), tensor(True))
    """
    check_program(program)
    tol, max_rounds = check_tolerance("tol", tol), check_count("max_rounds", max_rounds, least=1)
    throw = check_flag("throw", throw)
    if check_flag("validate", validate) and not is_transformed(*program.tensors()):
        checks = ValueChecks()
        program.require_values(checks)
        checks.settle()
    X = program.likelihood.X
    if X.is_cpu and X.dtype != torch.float64:  # a storage format
        program = program.rebuild(tuple(t.double() for t in program.tensors()))
    if program.likelihood.dim <= 2:
        choice = _plane(program, tol, max_rounds)
    else:
        choice = _ascend(program, tol, max_rounds)
    if throw:
        raise_unless_converged(choice.status, "argmax_ball")
    return _narrowed(choice, X.dtype)


def _narrowed(choice: BallChoice, dtype: torch.dtype) -> BallChoice:
    """The same in a dtype, bounds rounded away from each other."""
    return replace(
        choice,
        arm=choice.arm.to(dtype),
        theta=choice.theta.to(dtype),
        lower=-round_up(-choice.lower, dtype),
        upper=round_up(choice.upper, dtype),
    )


def _solve(program: SublevelProgram, directions: Tensor, tol: float) -> tuple[Tensor, ...]:
    """Upper bounds, feasible points and statuses for unit directions ``(*B, K, d)``."""
    result = native_support(program, directions, tol=tol, throw=False, validate=False)
    return result.upper, result.theta, result.status


def _best(theta: Tensor) -> tuple[Tensor, Tensor]:
    """The longest of the points ``(*B, K, d)``, and its length; ``-inf`` where all are NaN."""
    length = torch.linalg.vector_norm(theta, dim=-1).nan_to_num(nan=-torch.inf)
    lower, place = length.max(-1)
    index = place[..., None, None].expand(*place.shape, 1, theta.shape[-1])
    return theta.gather(-2, index)[..., 0, :], lower


def _finish(
    program: SublevelProgram, theta: Tensor, upper: Tensor, status: Tensor, tol: float
) -> BallChoice:
    radius, limits = program.domain.radius_like(theta), torch.finfo(theta.dtype)
    length = torch.linalg.vector_norm(theta, dim=-1)
    lower = length * (1 - (theta.shape[-1] + 2) * limits.eps)
    upper = torch.minimum(upper, radius * (1 + 4 * limits.eps))
    upper = torch.maximum(upper, lower)
    # without a feasible point nothing is attained; if there is none at all, the maximum is -inf
    unknown = torch.isnan(lower)
    lower = lower.masked_fill(unknown, -torch.inf)
    upper = upper.masked_fill(status == Status.INFEASIBLE, -torch.inf)
    arm = theta / length.clamp_min(limits.tiny)[..., None]
    closed = (upper - lower <= tol * (1.0 + upper.abs())) & ~unknown
    return BallChoice(arm, theta, lower, upper, closed, status)


def _plane(program: SublevelProgram, tol: float, max_rounds: int) -> BallChoice:
    X = program.likelihood.X
    batch, d = program.likelihood.batch_shape, program.likelihood.dim
    if d == 1:
        directions = numbers_on((1.0, -1.0), X.device).to(X.dtype)[:, None].expand(*batch, 2, 1)
        upper, theta, status = _solve(program, directions, tol / 4)
        best, _ = _best(theta)
        return _finish(program, best, upper.amax(-1), _worst(status), tol)
    half = math.pi / FIRST  # half the angle of a sector
    rounded = 1.0 + 6 * torch.finfo(X.dtype).eps  # angles, unit vectors, quotients
    first = torch.arange(FIRST, dtype=X.dtype, device=X.device) * (2.0 * half)
    angle = first.expand(*batch, FIRST)
    retired = X.new_full(batch, -torch.inf)  # the largest bound of the sectors dropped
    status = torch.zeros(batch, dtype=torch.int64, device=X.device)
    best, lower = X.new_full((*batch, 2), torch.nan), X.new_full(batch, -torch.inf)
    bound = retired
    for _ in range(max_rounds):
        directions = torch.stack([angle.cos(), angle.sin()], dim=-1)
        support, theta, solved = _solve(program, directions, tol / 4)
        status = torch.maximum(status, _worst(solved))
        found, length = _best(theta)
        better = length > lower
        best = torch.where(better[..., None], found, best)
        lower = torch.where(better, length, lower)
        # h(x_i) >= |theta*| cos(delta) for the sector that holds theta*
        sector = support.clamp_min(0.0) / math.cos(half) * rounded
        kept, place = sector.topk(min(KEPT, sector.shape[-1]), dim=-1)
        rest = sector.scatter(-1, place, -torch.inf).amax(-1)
        retired = torch.maximum(retired, rest)
        bound = torch.maximum(kept.amax(-1), retired)
        closed = bound - lower <= tol * (1.0 + bound.abs())
        hopeless = (status == Status.INFEASIBLE) | (status == Status.NONFINITE)
        if wait_for_all(closed | hopeless):  # further rounds would find nothing
            break
        # split the sectors that remain into narrower ones
        centre = angle.gather(-1, place)
        step = 2.0 * half / SPLIT
        parts = torch.arange(SPLIT, dtype=X.dtype, device=X.device) - 0.5 * (SPLIT - 1)
        angle = (centre[..., None] + step * parts).flatten(-2)
        half = half / SPLIT
    return _finish(program, best, bound, status, tol)


def _ascend(program: SublevelProgram, tol: float, max_rounds: int) -> BallChoice:
    X = program.likelihood.X
    batch, d = program.likelihood.batch_shape, program.likelihood.dim
    eye = torch.eye(d, dtype=X.dtype, device=X.device)
    spread = torch.nn.functional.normalize(eye + 0.5 * eye.roll(1, 0), dim=-1)
    (pull,) = program.likelihood.shards.sum((X.mT @ program.likelihood.r[..., None])[..., 0])
    tiny = torch.finfo(X.dtype).tiny
    pull = pull / torch.linalg.vector_norm(pull, dim=-1, keepdim=True).clamp_min(tiny)
    frame = torch.cat([eye, -eye, spread, -spread]).expand(*batch, 4 * d, d)
    directions = torch.cat([frame, pull[..., None, :]], dim=-2)
    box = None
    for _ in range(max_rounds):
        upper, theta, solved = _solve(program, directions, tol / 4)
        if box is None:  # from the axes: the largest coordinate in either direction
            axes = torch.maximum(upper[..., :d], upper[..., d : 2 * d]).clamp_min(0.0)
            box, status = torch.linalg.vector_norm(axes, dim=-1), _worst(solved)
            box = box * (1.0 + (d + 2) * torch.finfo(X.dtype).eps)
        # h is convex: moving x to theta(x)/|theta(x)| never lowers it
        length = torch.linalg.vector_norm(theta, dim=-1, keepdim=True).clamp_min(tiny)
        moved = theta / length
        shift = (moved - directions).nan_to_num(0.0).abs().amax()
        directions = moved
        if wait_for_all(shift < tol):
            break
    assert box is not None
    best, _ = _best(theta)
    return _finish(program, best, box, status, tol)


def _worst(status: Tensor) -> Tensor:
    """The status of a problem from those of its arms: converged only if all are."""
    failed = torch.where(status == Status.CONVERGED, -1, status).amax(-1)
    return failed.clamp_min(0)
