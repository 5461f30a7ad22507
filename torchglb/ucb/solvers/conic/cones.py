"""The optimistic program in the words of cvxpy: the one place, with the layer, that speaks to it.

Exponential cones state the logistic and the Poisson loss, a second-order cone the Gaussian one, in
the frame ``theta = c + T v`` of the minimiser c of L: with ``T' H(c) T`` about ``(B - L(c)) I``
the loss constraint reads ``|v|^2/2 <= 1``, nearly, whatever the scale of the data. Rows are
constants; only the arm and the level are Parameters, so all arms share one canonicalisation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchglb.checks import refuse
from torchglb.families import Binomial
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.ucb.solvers.conic.problems import kind_of

_PRECISION = 1e-9  # asked of the solvers; the certificates say what was reached


class ConicPoint(NamedTuple):
    """A cone solver's answer: theta ``(d)`` (None if it has none), dual values, its own status."""

    theta: Tensor | None
    multiplier: float
    ball_multiplier: float
    status: str

    @property
    def is_limited(self) -> bool:
        """Whether the solver stopped at its limit on iterations."""
        return bool(self.status == cp.USER_LIMIT)


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
