"""The optimistic program as a cone program: the oracle that the fast solvers are tested against.

``h(x) = max <x, theta>  subject to  |theta| <= S  and  L(theta) <= B``

A cone solver proposes (:mod:`torchglb.ucb.solvers.conic.cones` states the program). An
interior-point solution is neither feasible nor an upper bound, only close to both: so its point is
sharpened by Newton's method on the KKT conditions, and whatever comes out is judged by
:func:`torchglb.ucb.solvers.conic.verification.certify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchglb.checks import check_flag, check_tolerance
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim.result import Status, raise_unless_converged
from torchglb.rounding import short_scale
from torchglb.ucb.program import SublevelProgram, SupportResult, check_program
from torchglb.ucb.solvers.conic.cones import ConicProgram, installed
from torchglb.ucb.solvers.conic.problems import is_finite, on_host, outward, split, warn_of_move
from torchglb.ucb.solvers.conic.verification import certify, into_ball, least_squares, sharpen

_NEWTON_STEPS = 10


@dataclass(frozen=True)
class ConicResult(SupportResult):
    """A :class:`SupportResult` that also shows what the cone solver said.

    Attributes:
        value: ``(*B, K)``, the solver's own primal value, uncertified; NaN where it had none.
        ball_multiplier: ``(*B, K)``, the multiplier of ``|theta| <= S``, ``dh/dS``.
        solver_used: an array of names of shape ``(*B, K)``; empty where no solver gave a point.
    """

    value: Tensor
    ball_multiplier: Tensor
    solver_used: NDArray[np.str_]


class ConicMinimum(NamedTuple):
    """The constrained minimiser ``(*B, d)`` of a loss, and its loss ``(*B)``."""

    theta: Tensor
    loss: Tensor


def conic_support(
    program: SublevelProgram,
    arms: Tensor,
    *,
    solver: str = "CLARABEL",
    fallbacks: Sequence[str] = ("ECOS", "SCS"),
    tol: float = 1e-7,
    max_steps: int | None = None,
    throw: bool = True,
) -> ConicResult:
    """``max <x, theta>`` over the set, for every arm, by a cone solver; certified.

    Everything is computed in float64 on the CPU, one arm after the other. An element that holds a
    NaN is NONFINITE and returns NaN; one whose level is below the minimum is INFEASIBLE and returns
    ``-inf``. Where the tolerance is missed (MAX_STEPS, INACCURATE) the bounds still hold.

    Args:
        program: the set; Bernoulli, Binomial, Poisson or Gaussian.
        arms: ``(*B, K, d)``.
        solver: the cvxpy solver asked first.
        fallbacks: asked in this order while ``tol`` is missed; those not installed are skipped.
        tol: CONVERGED means ``upper - lower <= tol (1 + |upper|)``.
        max_steps: a limit on the iterations of every solve.
        throw: raise :class:`SolverError` if an element does not converge, or return statuses.

    Returns:
        A :class:`ConicResult`.

    Example:
        >>> import torchglb as glb
        >>> X, r = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double()
        >>> loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)  # |theta - r|^2/2 - 1/2
        >>> level = torch.tensor(-0.375).double()  # so a disc of radius 1/2 around (1, 0)
        >>> conic_support(SublevelProgram(loss, glb.Ball(2, 2.0), level), X).lower
        tensor([1.5000, 0.5000], dtype=torch.float64)
    """
    check_program(program)
    throw, solvers = check_flag("throw", throw), installed(solver, fallbacks)
    check_tolerance("tol", tol)
    program.refuse_region("conic")
    arms = program.checked_arms(arms, values=throw)
    warn_of_move(arms)
    batch, K, d = program.likelihood.batch_shape, arms.shape[-2], arms.shape[-1]
    xs = on_host(arms).detach().reshape(batch.numel(), K, d)
    scale = short_scale(xs)
    levels = on_host(program.level).detach().reshape(-1).tolist()
    answers: list[ConicAnswer] = []
    for (loss, radius), level, x in zip(
        split(program.likelihood, program.domain), levels, xs / scale[..., None], strict=True
    ):
        element = Element(loss, radius, level, solvers, max_steps)
        answers += [element.support(arm, tol) for arm in x]
    status = torch.tensor([a.status for a in answers], dtype=torch.int64).reshape(*batch, K)
    if throw:
        raise_unless_converged(status, "conic_support")

    def gather(name: str) -> Tensor:
        values = torch.tensor([getattr(a, name) for a in answers], dtype=torch.float64)
        return values.reshape(*batch, K) * scale.reshape(*batch, K)

    theta = torch.stack([a.theta for a in answers]) if answers else xs
    upper, lower = outward(gather("upper"), gather("lower"), arms)
    return ConicResult(
        upper=upper,
        lower=lower,
        theta=theta.reshape(*batch, K, d).to(arms),
        multiplier=gather("multiplier").to(arms),
        gap=upper - lower,
        status=status.to(arms.device),
        value=gather("value").to(arms),
        ball_multiplier=gather("ball_multiplier").to(arms),
        solver_used=np.array([a.solver for a in answers], dtype=np.str_).reshape(*batch, K),
    )


def conic_minimum(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    *,
    solver: str = "CLARABEL",
    fallbacks: Sequence[str] = ("ECOS", "SCS"),
    tol: float = 1e-7,
    max_steps: int | None = None,
    throw: bool = True,
) -> ConicMinimum:
    """The norm-constrained maximum-likelihood estimate by a cone solver, one element at a time.

    Args:
        likelihood: the loss, ``(*B)``; Bernoulli, Binomial, Poisson or Gaussian.
        domain: the ball.
        solver: the cvxpy solver asked first.
        fallbacks: asked in this order while ``tol`` is missed.
        tol: of the Frank-Wolfe gap ``<g, theta> + S|g| <= tol (1 + |loss|)``, which bounds how far
            the loss is above the minimum.
        max_steps: a limit on the iterations of every solve.
        throw: raise :class:`SolverError` if an element misses ``tol``; otherwise return the best
            feasible point found (NaN where the data hold a NaN).

    Returns:
        theta ``(*B, d)`` with ``|theta| <= S``, and its loss ``(*B)``.

    Example:
        >>> import torchglb as glb
        >>> X, r = torch.eye(2).double(), torch.tensor([3.0, 4.0]).double()
        >>> conic_minimum(glb.NegativeLogLikelihood(glb.Gaussian(), X, r), glb.Ball(2, 1.0)).theta
        tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    throw, solvers = check_flag("throw", throw), installed(solver, fallbacks)
    shape, X = likelihood.batch_shape, likelihood.X
    warn_of_move(X)
    found = [minimize(*problem, solvers, tol, max_steps) for problem in split(likelihood, domain)]
    status = torch.tensor([center.status for center in found], dtype=torch.int64)
    if throw:
        raise_unless_converged(status.reshape(shape), "conic_minimum")
    thetas = [center.theta for center in found]
    theta = torch.stack(thetas) if thetas else X.new_empty(0)
    loss = torch.tensor([center.loss for center in found], dtype=torch.float64)
    return ConicMinimum(theta.reshape(*shape, likelihood.dim).to(X), loss.reshape(shape).to(X))


# ---- one problem of the batch ---------------------------------------------------------------


class Center(NamedTuple):
    """Where a loss is least on the ball, and by how much at most it is not."""

    theta: Tensor
    loss: float
    gap: float
    status: Status


def minimize(
    loss: NegativeLogLikelihood,
    radius: float,
    solvers: Sequence[str],
    tol: float,
    max_steps: int | None,
) -> Center:
    """The minimiser of one loss over the ball: of the first solver that meets ``tol``."""
    origin = torch.zeros(loss.dim, dtype=torch.float64)
    if not is_finite(loss):
        nan = float("nan")
        return Center(torch.full_like(origin, nan), nan, nan, Status.NONFINITE)
    weight = float(len(loss.r) if loss.w is None else loss.w.sum())
    scale = max(1.0, weight / loss.family.dispersion)
    program = ConicProgram(loss, radius, origin, scale, minimizes=True)
    found: list[Center] = []
    limited = False
    for solver in solvers:
        point = program.solve(origin, 0.0, solver, max_steps)
        limited |= point.is_limited
        start = origin if point.theta is None else point.theta
        found.append(_least_near(loss, radius, start, tol, _steps(max_steps)))
        if found[-1].status == Status.CONVERGED:
            return found[-1]
    best = min(found, key=lambda center: center.gap)
    return best._replace(status=Status.MAX_STEPS) if limited else best


def _least_near(
    loss: NegativeLogLikelihood, radius: float, start: Tensor, tol: float, steps: int
) -> Center:
    """The best of ``start`` and the critical points nearby, inside and on the sphere."""
    never, sphere = torch.zeros(2, dtype=torch.bool), torch.tensor([False, True])
    starts = torch.stack([start, start])
    sharp = sharpen(loss, radius, 0.0, 0 * start, starts, never, sphere, steps)
    points = into_ball(torch.cat([start[None], sharp]), radius)
    value, (_, g) = loss.value(points), loss.value_and_gradient(points)
    gaps = (points * g).sum(-1) + radius * torch.linalg.vector_norm(g, dim=-1)  # Frank-Wolfe
    k = int(torch.where(torch.isfinite(gaps), gaps, torch.inf).argmin())
    least, gap = float(value[k]), float(gaps[k])
    status = Status.CONVERGED if gap <= tol * (1 + abs(least)) else Status.INACCURATE
    return Center(points[k], least, gap, status)


def _steps(max_steps: int | None) -> int:
    return _NEWTON_STEPS if max_steps is None else min(_NEWTON_STEPS, max_steps)


@dataclass
class ConicAnswer:
    """One arm's entries of a :class:`ConicResult`."""

    theta: Tensor
    upper: float = float("nan")
    lower: float = float("nan")
    multiplier: float = float("nan")
    ball_multiplier: float = float("nan")
    value: float = float("nan")
    status: Status = Status.NONFINITE
    solver: str = ""

    @property
    def gap(self) -> float:
        """``upper - lower``."""
        return self.upper - self.lower


class Element:
    """One program of the batch, for any number of arms.

    Args:
        loss: without batch axes, in float64 on the CPU.
        radius: S.
        level: B.
        solvers: in the order in which they are asked.
        max_steps: a limit on the iterations of every solve.
    """

    def __init__(
        self,
        loss: NegativeLogLikelihood,
        radius: float,
        level: float,
        solvers: Sequence[str],
        max_steps: int | None,
    ) -> None:
        self.loss, self.radius, self.level = loss, radius, level
        self.solvers, self.max_steps = solvers, max_steps
        self.failed: Status | None = None
        self._programs: dict[str, ConicProgram] = {}
        if not (is_finite(loss) and abs(level) < float("inf")):
            self.failed = Status.NONFINITE
            return
        self.center = minimize(loss, radius, solvers, 1e-7, max_steps)
        c = self.center.theta
        proof = certify(loss, radius, level, c, torch.zeros_like(c), c[None])
        if bool(proof.upper == -torch.inf):  # even the half-space of the loss at c misses the ball
            self.failed = Status.INFEASIBLE
        _, gradient, self.hessian = loss.expand(c)
        if not bool(torch.isfinite(self.hessian).all()):
            self.failed = Status.NONFINITE
        # the curvature of the loss along the ball: along the sphere if c is a minimiser there
        eye = torch.eye(loss.dim, dtype=torch.float64)
        nu = float(-(gradient @ c)) / radius**2
        on_sphere = float(torch.linalg.vector_norm(c)) > radius * (1 - 1e-9) and nu > 0
        self.tangent = eye - torch.outer(c, c) / radius**2 if on_sphere else eye
        self.curvature = (
            self.tangent @ (self.hessian + (nu if on_sphere else 0.0) * eye) @ self.tangent
        )

    def program(self, solver: str) -> ConicProgram:
        """The cvxpy program for this solver: canonicalised once, for all arms."""
        if solver not in self._programs:
            self._programs[solver] = ConicProgram(
                self.loss, self.radius, self.center.theta, self.scale
            )
        return self._programs[solver]

    @property
    def scale(self) -> float:
        """``B - L(c)``, or little if there is none."""
        return max(self.level - self.center.loss, 1e-9 * (1 + abs(self.level)))

    def judge(self, x: Tensor, theta: Tensor | None, tol: float) -> ConicAnswer:
        """The certified answer for one arm, given a proposed maximiser."""
        pole = self.radius * x / torch.linalg.vector_norm(x).clamp_min(1e-300)  # of the ball alone
        guess = self._quadratic_guess(x)
        starts = torch.stack([guess] if theta is None else [theta, guess])
        sphere = torch.tensor([False, True]).repeat_interleave(len(starts))
        where = (self.loss, self.radius, self.level)
        sharp = sharpen(
            *where, x, starts.repeat(2, 1), sphere | True, sphere, _steps(self.max_steps)
        )
        points = torch.cat([pole[None], sharp, starts])
        proof = certify(*where, self.center.theta, x, points)
        upper, primal = float(proof.upper.min()), int(proof.lower.argmax())
        lower = float(proof.lower[primal])
        # of equal bounds the first: a sharpened point has the better multipliers
        dual = int((proof.upper <= upper + 1e-13 * (1 + abs(upper))).to(torch.int8).argmax())
        enough = upper - lower <= tol * (1 + abs(upper))
        short = Status.INFEASIBLE if upper == -float("inf") else Status.INACCURATE
        return ConicAnswer(
            theta=proof.theta[primal],
            upper=upper,
            lower=lower,
            multiplier=float(proof.multiplier[dual]),
            ball_multiplier=float(proof.ball_multiplier[dual]),
            value=float("nan") if theta is None else float(theta @ x),
            status=Status.CONVERGED if enough else short,
        )

    def _quadratic_guess(self, x: Tensor) -> Tensor:
        """The maximiser of the quadratic model of the loss at c, in the ball or on the sphere."""
        room = max(self.level - self.center.loss, 0.0)
        direction = least_squares(self.curvature[None], (self.tangent @ x)[None])[0]
        return self.center.theta + (2 * room / (x @ direction)).sqrt() * direction

    def support(self, x: Tensor, tol: float) -> ConicAnswer:
        """The first solver's answer that meets ``tol``, or the one of least gap."""
        if self.failed is not None or not bool(torch.isfinite(x).all()):
            status = Status.NONFINITE if self.failed is None else self.failed
            bound = float("-inf") if status == Status.INFEASIBLE else float("nan")
            return ConicAnswer(torch.full_like(x, torch.nan), bound, bound, status=status)
        found: list[ConicAnswer] = []
        limited = False
        for solver in self.solvers:
            point = self.program(solver).solve(x, self.level, solver, self.max_steps)
            limited |= point.is_limited
            answer = self.judge(x, point.theta, tol)
            answer.solver = "" if point.theta is None else solver
            found.append(answer)
            if answer.status == Status.CONVERGED and answer.solver:
                break
        best = min(found, key=lambda a: (a.status != Status.CONVERGED, not a.solver, a.gap))
        if best.status == Status.INACCURATE and limited:
            best.status = Status.MAX_STEPS
        return best
