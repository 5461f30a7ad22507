"""The norm-constrained maximum-likelihood estimate, batched, certified, differentiable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    FLOATS,
    LARGEST_COUNT,
    ValueChecks,
    as_like,
    check_choice,
    check_count,
    check_flag,
    check_positive,
    check_shape,
    refuse,
)
from torchglb.choices import FIT_SOLVERS, FitSolver
from torchglb.compiled_rows import RADIUS, CompiledRows, blocks, compiled_family
from torchglb.distributed import WHOLE
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.families.compiled import CompiledFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle.fit import Estimates, fit_bound, new_estimates
from torchglb.mle.gradients import differentiable
from torchglb.optim import (
    Derivatives,
    SolveResult,
    Status,
    lbfgs,
    newton,
    raise_unless_converged,
)
from torchglb.optim.implicit import opaque, refuse_singular, withheld
from torchglb.recording import is_plain, is_transformed, wants_gradient, without_autocast
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History
from torchglb.rows.sums import RowSums

#: above this many features a Hessian costs more than the steps it saves
NEWTON_LIMIT = 200
#: steps of Newton's method at most, unless told otherwise
MAX_STEPS = 200


@dataclass(frozen=True)
class MLEResult:
    """The estimate and what is known there; shapes start with ``*B``.

    Attributes:
        theta: ``(*B, d)``, the minimiser of the loss over the ball.
        loss: ``(*B)``, its loss.
        gradient: ``(*B, d)``.
        gap: ``(*B)``, the Frank-Wolfe gap: but for rounding, the loss is at most this far above the
            minimum.
        status: ``(*B)``, of :class:`torchglb.optim.Status`.
        num_steps: ``(*B)``, evaluations of the loss after the first.
        hessian: ``(*B, d, d)``; where the solver did without it, one more pass when first asked.

    Example:
        >>> import torchglb as glb
        >>> rows = glb.Rows([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(2, 3.0))
        >>> bool(fit.gap < 1e-6), fit.status
        (True, tensor(0))
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    gap: Tensor
    status: Tensor
    num_steps: Tensor
    _curvature: _Curvature = field(repr=False, compare=False)

    @cached_property
    def hessian(self) -> Tensor:  # noqa: D102
        return self._curvature.at(self.theta)

    def estimate(self, hessian: bool = False) -> Estimate:
        """This point with its loss and gradient, as radii take it; if asked, the Hessian too."""
        known = self.hessian if hessian else None
        return Estimate(self.theta, self.loss, self.loss - self.gap, self.gradient, known)


class _Curvature:
    """The Hessian of a fit, known or still to be computed.

    Args:
        likelihood: the loss.
        known: the Hessian; empty if it is not known.
        recorded: whether derivatives of it may be asked for.
    """

    def __init__(self, likelihood: RowSums, known: Tensor, recorded: bool) -> None:
        self.likelihood, self.known, self.recorded = likelihood, known, recorded
        self.versions = [] if known.shape[-1] else self._versions()

    def at(self, theta: Tensor) -> Tensor:
        if self.known.shape[-1]:
            return self.known
        if self._versions() != self.versions:
            expected = "the rows as they were at the fit (read the Hessian before they change)"
            raise refuse("hessian", expected, "rows modified in place")
        with torch.set_grad_enabled(self.recorded and torch.is_grad_enabled()):
            return self.likelihood.hessian(theta)

    def _versions(self) -> list[int]:
        """How often each tensor of the data was written to, as far as torch counts."""
        loss = self.likelihood
        given = (loss.X, loss.r, loss.w, loss.regularization, loss.tilt)
        return [t._version for t in given if isinstance(t, Tensor) and not t.is_inference()]


def constrained_mle(
    family: GLMFamily,
    history: History | Rows,
    domain: Ball,
    *,
    solver: FitSolver | None = None,
    start: ArrayLike | None = None,
    regularization: float | Tensor = 0.0,
    tol: float | None = None,
    max_steps: int | None = None,
    throw: bool = True,
    validate: bool = True,
) -> MLEResult:
    """``argmin L(theta) + (lambda/2)|theta|^2`` over the ball of radius S.

    Theta, loss, gradient and Hessian are differentiable with respect to features, rewards, weights,
    regularisation and radius, in the interior and on an active boundary, to third order. A
    derivative needs a regular problem: where the minimiser is not unique it raises.

    Args:
        family: the GLM family.
        history: the observations, ``(*B, n, d)``.
        domain: the ball.
        solver: ``"newton"`` (O(n d^2 + d^3) per step, few steps) or ``"lbfgs"`` (O(n d) per step);
            by default Newton up to 200 features.
        start: a first guess ``(*B, d)``, projected onto the ball; zero by default.
        regularization: lambda >= 0, a number or ``(*B)``.
        tol: stop when ``gap <= tol (1 + |loss|)``; 1e-9 in float64, 1e-4 in float32.
        max_steps: limit on evaluations.
        throw: raise :class:`SolverError` if an element does not converge, or return statuses.
        validate: look at the values of the rows (unless the history has checked them on arrival).

    Returns:
        An :class:`MLEResult`.

    Example:
        >>> import torchglb as glb
        >>> history = glb.History(dim=2)
        >>> history.append([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
        >>> fit = glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(2, 3.0))
        >>> fit.theta
        tensor([ 2.1213, -2.1213], dtype=torch.float64)
    """
    throw, validate = check_flag("throw", throw), check_flag("validate", validate)
    if solver in (None, "newton") and start is None:
        # plain rows on a CPU need none of what follows
        given = (family, history, domain, regularization, tol, max_steps)
        found = _fit_plain_rows(*given, throw=throw, validate=validate)
        if found is not None:
            return found
    if not isinstance(history, History | Rows):
        raise refuse("history", "a History or Rows", type(history).__name__)
    likelihood = NegativeLogLikelihood.of(family, history, regularization=regularization)
    if validate and isinstance(domain, Ball) and not isinstance(domain.radius, Tensor):
        family.require_convex(domain.radius)
    if validate and not (likelihood.shards.is_whole or _was_checked(history, family)):
        # a refusal on one rank would leave the others waiting for it
        expected = "rewards checked on arrival (History(family=...)), or validate=False"
        raise refuse("history", f"a sharded history with {expected}", "neither")
    validate = validate and not is_transformed(*likelihood.tensors())
    if validate:
        likelihood.check_values(rows=False)
        if start is not None:
            start = as_like("start", start, likelihood.X)
            checks = ValueChecks()
            checks.finite("start", start)
            checks.settle()
    return minimize_likelihood(
        likelihood,
        domain,
        solver=solver,
        start=start,
        tol=tol,
        max_steps=max_steps,
        throw=throw,
        validate=validate and not _was_checked(history, family),
    )


def _fit_plain_rows(
    family: GLMFamily,
    history: History | Rows,
    domain: Ball,
    regularization: float | Tensor,
    tol: float | None,
    max_steps: int | None,
    *,
    throw: bool,
    validate: bool,
) -> MLEResult | None:
    """The fit where all that is given is as compiled code takes it; else None, and nobody is told.

    The checks of the long way cost more than a fit of a thousand rows.
    """
    if isinstance(history, History) and history.shards.is_whole:
        X, r, w = history.view()
    elif isinstance(history, Rows):
        X, r, w = history
    else:
        return None
    if not (is_plain(X) and is_plain(r) and (w is None or is_plain(w)) and X.dtype in FLOATS):
        return None
    numbers = type(regularization) is float and type(tol) in (float, NoneType)
    if not (numbers and type(max_steps) in (int, NoneType) and isinstance(family, GLMFamily)):
        return None
    fits = X.ndim >= 2 and r.dtype == X.dtype and r.shape == X.shape[:-1]
    fits = fits and (w is None or (w.dtype == X.dtype and w.shape == r.shape))
    if not fits or type(domain) is not Ball or type(S := domain.radius) is not float:
        return None
    loss = RowSums(family, X, r, w, regularization, None, WHOLE)
    tol = _usual_tol(X) if tol is None else tol
    max_steps = MAX_STEPS if max_steps is None else max_steps
    sound = 0.0 < tol < math.inf and 0 <= max_steps <= LARGEST_COUNT
    sound = sound and bool(0.0 <= regularization < math.inf)
    compiled = _compiled_family(loss, "newton") if sound and loss.dim == domain.dim else None
    if compiled is None:
        return None
    validate = validate and not _was_checked(history, family)
    return _fit_compiled(loss, compiled, S, None, tol, max_steps, throw=throw, validate=validate)


def _usual_tol(X: Tensor) -> float:
    return 1e-9 if X.dtype == torch.float64 else 1e-4


def _was_checked(history: History | Rows, family: GLMFamily) -> bool:
    """Whether the history has looked at its rows on arrival with this family in mind."""
    return isinstance(history, History) and history.validate and history.family is family


@without_autocast
def minimize_likelihood(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    *,
    solver: FitSolver | None = None,
    start: ArrayLike | None = None,
    tol: float | None = None,
    max_steps: int | None = None,
    throw: bool = True,
    loss_only: bool = False,
    validate: bool = False,
) -> MLEResult:
    """:func:`constrained_mle` for a loss that is already built (possibly tilted).

    With ``loss_only`` a minimiser need not be unique: the least loss has its derivatives all the
    same, and only those of theta, gradient and Hessian raise when they are asked for. (Where the
    rows contradict each other in a direction that they do not span, as repeated features with
    different rewards do, the least loss has a kink in the features: its derivative is then that
    of the loss at the minimiser that was found, one of the generalised gradients.)

    Example:
        >>> import torchglb as glb
        >>> rows = glb.Rows([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows, regularization=0.5)
        >>> fit = minimize_likelihood(loss, glb.Ball(2, 3.0))
        >>> bool(fit.gap < 1e-6), fit.hessian.shape
        (True, torch.Size([2, 2]))
    """
    throw = check_flag("throw", throw)
    _check_domain(domain, likelihood)
    X, radius = likelihood.X, domain.radius
    if solver is None:
        solver = "newton" if likelihood.dim <= NEWTON_LIMIT else "lbfgs"
    check_choice("solver", solver, FIT_SOLVERS)
    if tol is None:
        tol = _usual_tol(X)
    check_positive("tol", tol)
    if max_steps is None:
        max_steps = MAX_STEPS if solver == "newton" else 5000
    check_count("max_steps", max_steps)
    if start is not None:
        start = as_like("start", start, X)
        check_shape("start", start, (*likelihood.batch_shape, likelihood.dim))
        start = domain.project(start.detach())

    data = likelihood.tensors()
    recorded = wants_gradient(*data, *([radius] if isinstance(radius, Tensor) else ()))
    family = _compiled_family(likelihood, solver)
    if family is not None and not recorded:
        return _fit_compiled(
            likelihood, family, radius, start, tol, max_steps, throw=throw, validate=validate
        )
    if validate:
        likelihood.check_values()
    search = _Search(solver, tol, max_steps)
    if start is None:
        start = X.new_zeros((*likelihood.batch_shape, likelihood.dim))
    radius = domain.radius_like(X).expand(likelihood.batch_shape)

    def solve(start: Tensor, radius: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        loss = likelihood.rebuild(data)
        result, there = search.minimize(loss, start, radius)
        hessian = loss.hessian(result.point)
        return result.point, there.gradient, hessian, result.gap, result.status, result.num_steps

    if recorded:
        found, force, bend, gap, status, num_steps = opaque(solve, start, radius, *data)
        theta, singular = differentiable(likelihood, radius, found, force, bend)
        if not (loss_only or is_transformed(singular)):
            refuse_singular("theta", singular)
        loss, gradient, hessian = likelihood.expand(theta)
        theta, gradient, hessian = (
            withheld(part, singular, "theta") for part in (theta, gradient, hessian)
        )
    else:
        result, (loss, gradient, hessian) = search.minimize(likelihood, start, radius)
        theta, gap, status, num_steps = result.point, result.gap, result.status, result.num_steps
    if throw and not is_transformed(status):
        raise_unless_converged(status, "constrained_mle")
    curvature = _Curvature(likelihood, hessian, recorded)
    return MLEResult(theta, loss, gradient, gap, status, num_steps, curvature)


def _compiled_family(loss: RowSums, solver: str) -> CompiledFamily | None:
    """The family, where compiled code is the way to minimise this loss."""
    return compiled_family(loss) if solver == "newton" and loss.dim <= NEWTON_LIMIT else None


class _Search(NamedTuple):
    """How to minimise tensors from a start; nothing is differentiated."""

    solver: str
    tol: float
    max_steps: int

    def minimize(
        self, loss: NegativeLogLikelihood, start: Tensor, radius: Tensor
    ) -> tuple[SolveResult, Derivatives]:
        tol, max_steps = self.tol, self.max_steps
        if self.solver == "lbfgs":
            return lbfgs(loss.value_and_gradient, start, radius, tol=tol, max_steps=max_steps)
        family = _compiled_family(loss, self.solver)
        if family is not None:
            found = _estimates(loss, family, radius, start, tol, max_steps, False)
            theta, gradient, hessian, value, *rest = map(torch.from_numpy, found)
            return SolveResult(theta, value, *rest), Derivatives(value, gradient, hessian)
        return newton(loss.expand, start, radius, tol=tol, max_steps=max_steps)


def _fit_compiled(
    loss: RowSums,
    family: CompiledFamily,
    radius: float | Tensor,
    start: Tensor | None,
    tol: float,
    max_steps: int,
    *,
    throw: bool,
    validate: bool,
) -> MLEResult:
    """A fit that nobody differentiates."""
    found = _estimates(loss, family, radius, start, tol, max_steps, validate)
    if throw and np.count_nonzero(found.status):
        raise_unless_converged(torch.from_numpy(found.status), "constrained_mle")
    theta, gradient, hessian, value, gap, status, num_steps = map(torch.from_numpy, found)
    curvature = _Curvature(loss, hessian, recorded=False)
    return MLEResult(theta, value, gradient, gap, status, num_steps, curvature)


def _estimates(
    loss: RowSums,
    family: CompiledFamily,
    radius: float | Tensor,
    start: Tensor | None,
    tol: float,
    max_steps: int,
    validate: bool,
) -> Estimates:
    """Of every problem, with shapes that start with ``*B``."""
    parts = []
    for block in blocks(loss, family, radius, start, validate=validate):
        found = new_estimates(len(block.rows.X), loss.X.shape[-1])
        fit_bound(family, block.rows, block.settings, float(tol), int(max_steps), found)
        if loss.X.dtype == torch.float32:
            found = _in_single(family, found, block, tol)
        parts.append(found)
    if len(parts) > 1:
        parts = [Estimates(*map(np.concatenate, zip(*parts, strict=True)))]
    batch = tuple(loss.X.shape[:-2])
    return Estimates._make(part.reshape(batch + part.shape[1:]) for part in parts[0])


def _in_single(
    family: CompiledFamily, found: Estimates, block: CompiledRows, tol: float
) -> Estimates:
    """The same at the nearest single-precision points of the ball; their gaps, rounded up."""
    S, theta = block.settings[:, RADIUS], found.theta.astype(np.float32)
    outside = np.linalg.norm(theta.astype(np.float64), axis=-1) > S
    theta[outside] *= np.float32(1.0 - 4e-7)
    block.settings[:, -theta.shape[-1] :] = theta
    there = new_estimates(*theta.shape)
    fit_bound(family, block.rows, block.settings, float(tol), 0, there)
    lost = (found.status == Status.CONVERGED) & ~(there.gap <= tol * (1.0 + abs(there.loss)))
    with np.errstate(under="ignore"):  # next to 0 is a number that has lost digits
        gap = np.nextafter(there.gap.astype(np.float32), np.float32(np.inf))
    narrow = {
        name: getattr(there, name).astype(np.float32) for name in ("gradient", "hessian", "loss")
    }
    status = np.where(lost, int(Status.INACCURATE), found.status)
    changed: dict[str, Any] = {"theta": theta, "gap": gap, "status": status}
    return there._replace(num_steps=found.num_steps, **changed, **narrow)


def _check_domain(domain: Ball, likelihood: NegativeLogLikelihood) -> None:
    if not isinstance(domain, Ball):
        raise refuse("domain", "a Ball", type(domain).__name__)
    if domain.dim != likelihood.dim:
        raise refuse("domain", f"a ball of dimension {likelihood.dim}", f"dimension {domain.dim}")
    if isinstance(radius := domain.radius, Tensor):
        if radius.device != likelihood.X.device:
            raise refuse("radius", f"the device of X ({likelihood.X.device})", radius.device)
        batch = tuple(likelihood.batch_shape)
        fits = zip(radius.shape[::-1], batch[::-1], strict=False)
        if radius.ndim > len(batch) or not all(have in (1, want) for have, want in fits):
            raise refuse("radius", f"a shape that broadcasts to {batch}", tuple(radius.shape))
