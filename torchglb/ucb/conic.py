"""The optimistic program as a cone program: the oracle that the fast solvers are tested against.

``h(x) = max <x, theta>  subject to  |theta| <= S  and  L(theta) <= B``

cvxpy states it with exponential cones (logistic, Poisson) or a second-order cone (Gaussian), in
the frame ``theta = c + T v`` of the minimiser c of L: with ``T' H(c) T`` about ``(B - L(c)) I``
the loss constraint reads ``|v|^2/2 <= 1``, nearly, whatever the scale of the data. Rows are
constants; only the arm and the level are Parameters, so all arms share one canonicalisation.

An interior-point solution is neither feasible nor an upper bound, only close to both. So its point
is sharpened by Newton's method on the KKT conditions, and whatever comes out is judged by
:func:`certify`, which trusts nobody: by convexity any point gives an upper bound, and any point
with c gives a feasible one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchglb.checks import ValueChecks, refuse
from torchglb.domain import Ball
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import cut_ball
from torchglb.optim.result import Status, raise_unless_converged
from torchglb.ucb.program import SublevelProgram, SupportResult

_EPS = torch.finfo(torch.float64).eps
_PRECISION = 1e-9  # asked of the solvers; the certificates say what was reached
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
    solvers = installed(solver, fallbacks)
    program.check_arms(arms, values=throw)
    batch, K, d = program.likelihood.batch_shape, arms.shape[-2], arms.shape[-1]
    xs = on_host(arms).detach().reshape(batch.numel(), K, d)
    levels = on_host(program.level).detach().reshape(-1).tolist()
    answers: list[Answer] = []
    for (loss, radius), level, x in zip(
        split(program.likelihood, program.domain), levels, xs, strict=True
    ):
        element = Element(loss, radius, level, solvers, max_steps)
        answers += [element.support(arm, tol) for arm in x]
    status = torch.tensor([a.status for a in answers], dtype=torch.int64).reshape(*batch, K)
    if throw:
        raise_unless_converged(status, "conic_support")

    def gather(name: str) -> Tensor:
        values = torch.tensor([getattr(a, name) for a in answers], dtype=torch.float64)
        return values.reshape(*batch, K)

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
    solvers = installed(solver, fallbacks)
    shape, X = likelihood.batch_shape, likelihood.X
    found = [minimize(*problem, solvers, tol, max_steps) for problem in split(likelihood, domain)]
    status = torch.tensor([center.status for center in found], dtype=torch.int64)
    if throw:
        raise_unless_converged(status.reshape(shape), "conic_minimum")
    thetas = [center.theta for center in found]
    theta = torch.stack(thetas) if thetas else X.new_empty(0)
    loss = torch.tensor([center.loss for center in found], dtype=torch.float64)
    return ConicMinimum(theta.reshape(*shape, likelihood.dim).to(X), loss.reshape(shape).to(X))


# ---- the program in cvxpy -------------------------------------------------------------------


class ConicPoint(NamedTuple):
    """A cone solver's answer: theta ``(d)`` (None if it has none), dual values, its own status."""

    theta: Tensor | None
    multiplier: float
    ball_multiplier: float
    status: str


class ConicProgram:
    """One program in cvxpy, for any number of arms and levels after one canonicalisation.

    Args:
        loss: without batch axes, in float64 on the CPU.
        radius: S.
        center: c ``(d)``, the origin of the frame.
        scale: of the order of ``B - L(c)``; the loss constraint is divided by it.
        minimizes: state ``min L(theta)`` instead, in which arm and level do not occur.
    """

    def __init__(
        self,
        loss: NegativeLogLikelihood,
        radius: float,
        center: Tensor,
        scale: float,
        *,
        minimizes: bool = False,
    ) -> None:
        self.center, self.scale, self.radius = center, scale, radius
        self.base = float(loss.value(center))
        self.basis = frame(loss.expand(center).hessian, radius, scale)
        T = self.basis.numpy()
        self.v = cp.Variable(loss.dim)
        self.arm, self.level = cp.Parameter(loss.dim), cp.Parameter()
        change = _change_of_loss(loss, center, T, self.v) / scale
        self.sublevel = change <= self.level
        self.ball = cp.norm(center.numpy() / radius + (T / radius) @ self.v) <= 1
        if minimizes:
            self.problem = cp.Problem(cp.Minimize(change), [self.ball])
        else:
            self.problem = cp.Problem(cp.Maximize(self.arm @ self.v), [self.sublevel, self.ball])

    def solve(
        self, x: Tensor, level: float, solver: str = "CLARABEL", max_steps: int | None = None
    ) -> ConicPoint:
        """The maximiser of ``<x, theta>`` as this solver sees it: nothing here is certified."""
        arm = x @ self.basis
        length = float(torch.linalg.vector_norm(arm)) or 1.0
        self.arm.value = (arm / length).numpy()
        self.level.value = (level - self.base) / self.scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about accuracy, which is judged elsewhere
            try:
                self.problem.solve(solver=solver, warm_start=False, **settings(solver, max_steps))
            except (cp.SolverError, ArithmeticError, ValueError):
                return ConicPoint(None, float("nan"), float("nan"), cp.SOLVER_ERROR)
        v, status = self.v.value, self.problem.status
        if v is None or not np.isfinite(v).all():
            return ConicPoint(None, float("nan"), float("nan"), status)
        duals = (self.sublevel.dual_value, self.ball.dual_value)
        loss_dual, ball_dual = (
            float("nan") if y is None else np.asarray(y).item() * length for y in duals
        )
        theta = self.center + self.basis @ torch.as_tensor(v, dtype=torch.float64)
        return ConicPoint(theta, loss_dual / self.scale, ball_dual / self.radius, status)


def frame(hessian: Tensor, radius: float, scale: float) -> Tensor:
    """T with ``T' H T = scale I``, but no axis longer than the ball."""
    curvature, axes = torch.linalg.eigh(hessian)
    return axes * (scale / curvature.clamp_min(scale / (2 * radius) ** 2)).sqrt()


def _change_of_loss(
    loss: NegativeLogLikelihood, center: Tensor, T: NDArray[np.float64], v: cp.Variable
) -> cp.Expression:
    """``L(c + T v) - L(c)``, convex in v."""
    X, r, c = loss.X.numpy(), loss.r.numpy(), center.numpy()
    w = (torch.ones_like(loss.r) if loss.w is None else loss.w).numpy() / loss.family.dispersion
    ridge = float(loss.regularization)
    tilt = 0.0 if loss.tilt is None else loss.tilt.numpy()
    change = ((ridge * c - X.T @ (w * r) - tilt) @ T) @ v
    if ridge > 0:
        change += 0.5 * ridge * cp.sum_squares(T @ v)
    if len(r) == 0:
        return change
    z, Z = X @ c, X @ T  # X theta = z + Z v
    kind = kind_of(loss.family)
    if isinstance(loss.family, Binomial):
        w = w * loss.family.trials
    if kind == "logistic":
        return change + w @ (cp.logistic(z + Z @ v) - np.logaddexp(0.0, z))
    if kind == "exponential":
        return change + (w * np.exp(z)) @ (cp.exp(Z @ v) - 1)
    factor = np.linalg.qr(np.sqrt(w)[:, None] * Z, mode="r")  # at most d rows, whatever n is
    return change + ((w * z) @ Z) @ v + 0.5 * cp.sum_squares(factor @ v)


def kind_of(family: GLMFamily) -> str:
    """Which cones express the family: ``"logistic"``, ``"exponential"`` or ``"square"``."""
    kinds = {
        Binomial.log_partition: "logistic",
        Poisson.log_partition: "exponential",
        Gaussian.log_partition: "square",
    }
    kind = kinds.get(type(family).log_partition)
    if kind is None:
        covered = "a family with a conic form (Bernoulli, Binomial, Poisson, Gaussian)"
        raise refuse("family", covered, type(family).__name__)
    return kind


def installed(solver: str, fallbacks: Sequence[str]) -> list[str]:
    """The solvers to ask, in order."""
    present = cp.installed_solvers()
    if solver not in present:
        raise refuse("solver", "one of " + ", ".join(present), repr(solver))
    return [solver, *(name for name in fallbacks if name in present and name != solver)]


def settings(solver: str, max_steps: int | None) -> dict[str, Any]:
    """The precision and the iteration limit, in the words of each solver."""
    words = {
        "CLARABEL": (("tol_gap_abs", "tol_gap_rel", "tol_feas"), "max_iter", 200),
        "ECOS": (("abstol", "reltol", "feastol"), "max_iters", 200),
        "SCS": (("eps_abs", "eps_rel"), "max_iters", 5000),
    }
    if solver not in words:
        if max_steps is not None:
            raise refuse("max_steps", f"None with solver {solver!r}", max_steps)
        return {}
    precision, limit, default = words[solver]
    chosen: dict[str, Any] = dict.fromkeys(precision, _PRECISION)
    chosen[limit] = default if max_steps is None else max_steps
    return chosen


# ---- the batch, taken apart -----------------------------------------------------------------


def on_host(value: Tensor | float) -> Tensor:
    """In float64 on the CPU; still part of the graph."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    if value.device.type != "cpu":
        warnings.warn(
            f"the conic solvers run on the CPU: data are moved there from {value.device}",
            stacklevel=3,
        )
    return value.to("cpu", torch.float64)


def split(
    likelihood: NegativeLogLikelihood, domain: Ball
) -> list[tuple[NegativeLogLikelihood, float]]:
    """Every problem of the batch by itself, without its rows of weight 0, and its radius."""
    kind_of(likelihood.family)
    batch, (n, d) = likelihood.batch_shape, likelihood.X.shape[-2:]
    count = batch.numel()

    def flat(value: Tensor | float, *shape: int) -> Tensor:
        return on_host(value).detach().expand((*batch, *shape)).reshape((count, *shape))

    X, r = flat(likelihood.X, n, d), flat(likelihood.r, n)
    w = flat(1.0 if likelihood.w is None else likelihood.w, n)
    tilt = None if likelihood.tilt is None else flat(likelihood.tilt, d)
    ridge, radius = flat(likelihood.regularization), flat(domain.radius)
    checks = ValueChecks()
    checks.require("w", ~(w < 0), "non-negative weights", w)
    checks.require("regularization", ~(ridge < 0), "non-negative numbers", ridge)
    checks.settle()
    return [
        (
            NegativeLogLikelihood(
                likelihood.family,
                X[b, kept],
                r[b, kept],
                w[b, kept],
                regularization=ridge[b],
                tilt=None if tilt is None else tilt[b],
            ),
            float(radius[b]),
        )
        for b in range(count)
        for kept in [w[b] != 0]
    ]


def is_finite(loss: NegativeLogLikelihood) -> bool:
    """Whether no NaN and no infinity is among the data."""
    parts = (loss.X, loss.r, loss.w, loss.tilt, loss.regularization)
    return all(bool(torch.isfinite(t).all()) for t in parts if isinstance(t, Tensor))


def outward(upper: Tensor, lower: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both bounds in the dtype of ``like``, rounded away from each other."""
    up, down = upper.to(like.dtype), lower.to(like.dtype)
    inf = torch.full_like(up, float("inf"))
    up = torch.where(up.double() < upper, torch.nextafter(up, inf), up)
    down = torch.where(down.double() > lower, torch.nextafter(down, -inf), down)
    return up.to(like.device), down.to(like.device)


# ---- certificates ---------------------------------------------------------------------------


class Certificate(NamedTuple):
    """What P points prove about ``h(x)``.

    Attributes:
        upper: ``(P)``, upper bounds; ``-inf`` proves that the set is empty.
        multiplier: ``(P)``, alpha of the dual bound.
        ball_multiplier: ``(P)``, ``|x - alpha g|``.
        lower: ``(P)``, lower bounds.
        theta: ``(P, d)``, feasible points that attain them.
    """

    upper: Tensor
    multiplier: Tensor
    ball_multiplier: Tensor
    lower: Tensor
    theta: Tensor


def certify(
    loss: NegativeLogLikelihood,
    radius: float,
    level: float,
    center: Tensor,
    x: Tensor,
    points: Tensor,
) -> Certificate:
    """What points ``(P, d)`` prove about ``h(x)``, whoever proposed them.

    Upper: on the set ``L(p) + <g, theta - p> <= L(theta) <= B``, so by weak duality, whatever
    alpha >= 0 is, ``h(x) <= alpha (B - L(p) + <g, p>) + S |x - alpha g|``. Lower: by convexity
    ``L(c + t (p - c))`` lies below its chord, so from ``L(c) <= B`` the chord's t is feasible; a
    few chords reach the boundary. Rounding is paid for, and what proves nothing is infinite.
    """
    S, c = torch.tensor(radius, dtype=torch.float64), into_ball(center, radius)
    finite = torch.isfinite(points).all(-1)
    inner = into_ball(torch.where(finite[:, None], points, c), radius)
    end, (_, gradient) = loss.value(inner), loss.value_and_gradient(inner)
    rounding = _rounding(loss, radius, inner) + 4 * _EPS * abs(level)
    offset = level - end + (gradient * inner).sum(-1) + rounding + 1e-300
    cut = cut_ball(x, gradient, offset, S)
    alpha = cut.multiplier
    rest = torch.linalg.vector_norm(x - alpha[:, None] * gradient, dim=-1)
    dual = torch.where(alpha > 0, alpha * offset, 0.0) + S * rest
    upper = dual + 4 * _EPS * S * torch.linalg.vector_norm(x)
    upper = torch.where(cut.value == -torch.inf, cut.value, upper)
    upper = torch.where(finite & ~torch.isnan(upper), upper, torch.inf)

    start, goal = loss.value(c), level - rounding
    t = torch.where(end <= goal, 1.0, torch.where(start <= goal, 0.0, -1.0))
    there = torch.where(t == 1.0, end, start)
    for _ in range(6):
        rise = ((goal - there) / (end - there)).clamp(0.0, 1.0)
        ahead = torch.where((t >= 0) & (t < 1), t + rise * (1 - t), t)
        loss_ahead = loss.value(c + ahead.clamp_min(0.0)[:, None] * (inner - c))
        better = (ahead > t) & (loss_ahead <= level - 0.5 * rounding)
        t, there = torch.where(better, ahead, t), torch.where(better, loss_ahead, there)
    theta = torch.where((t == 1.0)[:, None], inner, c + t[:, None] * (inner - c))
    theta = torch.where((t >= 0)[:, None], theta, torch.nan)
    lower = torch.where(t >= 0, theta @ x, -torch.inf)
    return Certificate(upper, alpha, rest, lower, theta)


def _rounding(loss: NegativeLogLikelihood, radius: float, points: Tensor) -> Tensor:
    """A bound on the rounding errors of ``L(p)`` and, over the ball, of ``<g, theta - p>``."""
    family, r, z = loss.family, loss.r, points @ loss.X.mT
    if kind_of(family) == "logistic":
        sizes = family.nll(z, r)  # is a sum of positive terms
    else:
        sizes = (family.log_partition(z) + (r * z).abs()) / family.dispersion
    reach = 2 * radius * torch.linalg.vector_norm(loss.X, dim=-1)
    sizes = sizes + family.loss_terms(z, r).slope.abs() * reach
    total = (sizes if loss.w is None else sizes * loss.w).sum(-1)
    total = total + 2 * radius**2 * loss.regularization
    if loss.tilt is not None:
        total = total + 2 * radius * torch.linalg.vector_norm(loss.tilt)
    return 4 * _EPS * total


def into_ball(points: Tensor, radius: float) -> Tensor:
    """Points outside pulled to the sphere, a rounding inside of it."""
    inside = radius * (1 - 4 * _EPS)
    norm = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return torch.where(norm > inside, points * (inside / norm), points)


def sharpen(
    loss: NegativeLogLikelihood,
    radius: float,
    level: float,
    x: Tensor,
    points: Tensor,
    on_level: Tensor,
    on_sphere: Tensor,
    steps: int,
) -> Tensor:
    """Newton's method on ``x = lam grad L(theta) + nu theta`` from points ``(P, d)``.

    Each point comes with a guess of what holds at the solution: ``L(theta) = B`` (or else
    lam = 1, as for the minimum of L, where x = 0) and ``|theta| = S`` (or else nu = 0).

    Returns:
        theta ``(P, d)``: maybe wild, maybe NaN; :func:`certify` judges.
    """
    d, eye = points.shape[-1], torch.eye(points.shape[-1], dtype=points.dtype)
    a, b = on_level.to(points)[:, None], on_sphere.to(points)[:, None]
    theta = points
    value, g, hessian = loss.expand(theta)
    columns = torch.stack([a * g, b * theta], -1)  # multipliers by least squares
    target = x - (1 - a) * g
    lam, nu = _solve(columns, target).split(1, -1)
    lam = torch.where(on_level[:, None], lam, torch.ones_like(lam))
    for _ in range(steps):
        size = torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(1e-300)
        u = g / size  # lam is measured in units of 1/|g|
        residual = torch.cat(
            [
                lam * g + nu * theta - x,
                torch.where(a > 0, (value[:, None] - level) / size, (lam - 1) * size),
                torch.where(b > 0, 0.5 * (theta.square().sum(-1, True) - radius**2), nu),
            ],
            -1,
        )
        jacobian = torch.cat(
            [
                torch.cat([lam[..., None] * hessian + nu[..., None] * eye, u[..., None],
                           theta[..., None]], -1),
                torch.cat([a * u, 1 - a, torch.zeros_like(a)], -1)[:, None],
                torch.cat([b * theta, torch.zeros_like(b), 1 - b], -1)[:, None],
            ],
            -2,
        )  # fmt: skip
        step = _solve(jacobian, residual)
        theta = theta - step[:, :d]
        lam, nu = lam - step[:, d : d + 1] / size, nu - step[:, d + 1 :]
        value, g, hessian = loss.expand(theta)
    return theta


def _solve(A: Tensor, b: Tensor) -> Tensor:
    """Least-squares solutions of least norm; NaN where the system is not finite."""
    finite = torch.isfinite(A).all(-1).all(-1) & torch.isfinite(b).all(-1)
    A = torch.where(finite[:, None, None], A, torch.zeros_like(A))
    b = torch.where(finite[:, None], b, torch.zeros_like(b))
    solution = torch.linalg.lstsq(A, b[..., None], driver="gelsd").solution[..., 0]
    return torch.where(finite[:, None], solution, torch.nan)


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
        limited |= point.status == cp.USER_LIMIT
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
class Answer:
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

    def judge(self, x: Tensor, theta: Tensor | None, tol: float) -> Answer:
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
        return Answer(
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
        direction = _solve(self.curvature[None], (self.tangent @ x)[None])[0]
        return self.center.theta + (2 * room / (x @ direction)).sqrt() * direction

    def support(self, x: Tensor, tol: float) -> Answer:
        """The first solver's answer that meets ``tol``, or the one of least gap."""
        if self.failed is not None or not bool(torch.isfinite(x).all()):
            status = Status.NONFINITE if self.failed is None else self.failed
            bound = float("-inf") if status == Status.INFEASIBLE else float("nan")
            return Answer(torch.full_like(x, torch.nan), bound, bound, status=status)
        found: list[Answer] = []
        limited = False
        for solver in self.solvers:
            point = self.program(solver).solve(x, self.level, solver, self.max_steps)
            limited |= point.status == cp.USER_LIMIT
            answer = self.judge(x, point.theta, tol)
            answer.solver = "" if point.theta is None else solver
            found.append(answer)
            if answer.status == Status.CONVERGED and answer.solver:
                break
        best = min(found, key=lambda a: (a.status != Status.CONVERGED, not a.solver, a.gap))
        if best.status == Status.INACCURATE and limited:
            best.status = Status.MAX_STEPS
        return best
