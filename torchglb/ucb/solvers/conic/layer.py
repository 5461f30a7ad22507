"""The optimistic program as a differentiable layer: cvxpylayers, with its faults kept inside.

``h(x) = max <x, theta>  subject to  |theta| <= S  and  L(theta) <= B``

Features are Parameters here, so products such as ``w' m(X theta)`` would break the rules that make
a program differentiable (DPP); an epigraph variable repairs it: ``m(X theta) <= u`` and
``w'u - <b, theta> <= B``, where ``b = sum_s w_s r_s x_s`` is computed outside, in torch. Histories
are padded to a fixed capacity by rows of weight 0, so that one canonicalisation serves them all.

What the layer underneath returns is never trusted: :func:`certify` proves the bounds, and a
solution that does not agree with them is not returned. It is meant as a reference
for gradients on small problems; for speed there is the native solver.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import cvxpy as cp
import torch
from cvxpylayers.torch import CvxpyLayer
from torch import Tensor, nn

from torchglb.checks import check_choice, check_flag, check_tolerance, refuse
from torchglb.domain import Ball
from torchglb.families import Binomial, GLMFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim.result import Status, raise_unless_converged
from torchglb.ucb.program import SublevelProgram, SupportResult, check_program
from torchglb.ucb.solvers.conic.cones import frame, installed, settings
from torchglb.ucb.solvers.conic.oracle import ConicAnswer, Element
from torchglb.ucb.solvers.conic.problems import (
    ProblemData,
    kind_of,
    on_host,
    outward,
    problems,
    warn_of_move,
)

#: X as a Parameter is costly: at these limits 2 s and 0.9 GB to canonicalise, and it grows with n^2
MAX_ROWS = 1024
MAX_ENTRIES = 4096
_SOLVERS = ("CLARABEL", "ECOS", "SCS")


class UCBLayer(nn.Module):
    """``h(x)`` and its maximiser, differentiable in arms, features, rewards, weights and level.

    One program after the other is solved on the CPU in float64; dtype and device of the results
    are those of the arguments. First derivatives only.

    Args:
        family: Bernoulli, Binomial, Poisson or Gaussian.
        domain: the ball; its radius may have the batch shape ``*B``, and is differentiated too.
        capacity: the number of rows to which histories are padded; at most 1024, and 4096 / d.
        regularization: lambda of the ridge term.
        solver: the first solver asked: ``"CLARABEL"``, ``"ECOS"`` or ``"SCS"``.
        fallbacks: asked in this order while the answer fails its certificate.
        mode: how derivatives are solved for: ``"lsqr"``, or ``"dense"``, more accurate and slower.
        tol: the solution must agree with its certified bounds to ``tol (1 + |upper|)``.
        max_steps: a limit on the iterations of every solve.

    Example:
        >>> from torchglb.families import Gaussian
        >>> layer = UCBLayer(Gaussian(), Ball(2, 2.0), capacity=8)
        >>> X, r = torch.eye(2), torch.tensor([1.0, 0.0])  # the loss is |theta - r|^2/2 - 1/2
        >>> level = torch.tensor(-0.375, requires_grad=True)  # a disc of radius 1/2 around r
        >>> bound = layer(X, r, torch.ones(2), level, torch.tensor([[0.0, 1.0]])).upper
        >>> bound.sum().backward()
        >>> bound.detach(), level.grad  # sqrt(2 (B + 1/2)) and its derivative
        (tensor([0.5000]), tensor(2.0000))
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        capacity: int,
        *,
        regularization: float | Tensor = 0.0,
        solver: str = "CLARABEL",
        fallbacks: Sequence[str] = ("ECOS", "SCS"),
        mode: str = "lsqr",
        tol: float = 1e-6,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        kind_of(family)
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise refuse("capacity", "an integer of at least 1", repr(capacity))
        if capacity > max_capacity(domain.dim):
            raise refuse(
                "capacity",
                f"at most {max_capacity(domain.dim)} rows at dimension {domain.dim}, as features "
                "are Parameters here (the native solver has no such limit)",
                capacity,
            )
        self.family, self.domain, self.capacity = family, domain, capacity
        self.regularization = regularization
        self.solvers = installed(check_choice("solver", solver, _SOLVERS), fallbacks)
        self.mode = check_choice("mode", mode, ("lsqr", "lsmr", "dense"))
        self.tol, self.max_steps = check_tolerance("tol", tol), max_steps

    def forward(
        self,
        X: Tensor,
        r: Tensor,
        w: Tensor | None,
        level: Tensor,
        arms: Tensor,
        *,
        throw: bool = True,
    ) -> SupportResult:
        """Solves for every arm.

        Args:
            X: features ``(*B, n, d)``, n up to the capacity.
            r: rewards ``(*B, n)``.
            w: weights ``(*B, n)``, or None for 1. A row of weight 0 is padding: it receives
                exactly zero gradient.
            level: B, of shape ``*B``.
            arms: ``(*B, K, d)``.
            throw: raise :class:`SolverError` if an element does not converge; otherwise such an
                element has a status, NaN for an answer (bounds of ``-inf`` if INFEASIBLE) and no
                gradient, and the others are unharmed.

        Returns:
            A :class:`SupportResult`: ``upper`` and ``lower`` are certified numbers with the
            gradient of h; ``theta`` and ``multiplier`` are differentiable.
        """
        loss = NegativeLogLikelihood(self.family, X, r, w, regularization=self.regularization)
        return self.support(SublevelProgram(loss, self.domain, level), arms, throw=throw)

    def support(self, program: SublevelProgram, arms: Any, *, throw: bool = True) -> SupportResult:
        """:meth:`forward` for a program that is already built (possibly tilted)."""
        check_program(program)
        throw = check_flag("throw", throw)
        program.refuse_region("layer")
        arms = program.checked_arms(arms, values=throw)
        batch, n = program.likelihood.batch_shape, program.likelihood.X.shape[-2]
        K, d = arms.shape[-2:]
        if n > self.capacity:
            raise refuse("X", f"at most {self.capacity} rows, the capacity", f"{n} rows")
        warn_of_move(arms)
        xs = on_host(arms).reshape(batch.numel(), K, d)
        solutions: list[_Solution] = []
        levels = on_host(program.level).reshape(-1)
        for data, level, x in zip(
            problems(program.likelihood, program.domain), levels, xs, strict=True
        ):
            loss, radius = data.solved(self.family)
            element = Element(loss, radius, float(level.detach()), self.solvers, self.max_steps)
            solutions += [self._solve(element, data, level, arm) for arm in x]
        status = torch.tensor([s.status for s in solutions], dtype=torch.int64).reshape(*batch, K)
        if throw:
            raise_unless_converged(status, "UCBLayer")

        def gather(name: str, *shape: int) -> Tensor:
            parts = [getattr(s, name) for s in solutions]
            return (torch.stack(parts) if parts else xs).reshape(*batch, K, *shape)

        value = gather("value").to(arms)
        upper, lower = outward(gather("upper"), gather("lower"), arms)
        return SupportResult(
            upper=_carry(value, upper),
            lower=_carry(value, lower),
            theta=gather("theta", d).to(arms),
            multiplier=gather("multiplier").to(arms),
            gap=upper - lower,
            status=status.to(arms.device),
        )

    def _solve(self, element: Element, data: ProblemData, level: Tensor, x: Tensor) -> _Solution:
        """One arm: the first solver's solution that agrees with its certificate."""
        status = Status.INACCURATE if self.max_steps is None else Status.MAX_STEPS
        if element.failed is not None or not bool(torch.isfinite(x).all()):
            status = Status.NONFINITE if element.failed is None else element.failed
            return _Solution.missing(x, status)
        for solver in self.solvers:
            proposed = self._propose(element, data, level, x, solver)
            if proposed is None or not bool(torch.isfinite(proposed[0]).all()):
                continue
            theta, multiplier = proposed
            answer = element.judge(x.detach(), theta.detach(), self.tol)
            if self._agrees(element, answer, theta.detach()):
                return _Solution(
                    value=x @ theta,
                    upper=x.new_tensor(answer.upper),
                    lower=x.new_tensor(answer.lower),
                    theta=_carry(theta, answer.theta),
                    multiplier=_carry(multiplier, x.new_tensor(answer.multiplier)),
                    status=answer.status,
                )
        return _Solution.missing(x, status)

    def _agrees(self, element: Element, answer: ConicAnswer, theta: Tensor) -> bool:
        """Whether theta is feasible and optimal up to ``tol``, measured by what is certified."""
        near = self.tol * (1 + abs(answer.upper))
        excess = float(element.loss.value(theta)) - element.level
        return (
            answer.status == Status.CONVERGED
            and abs(answer.value - answer.upper) <= near
            and float(torch.linalg.vector_norm(theta)) <= element.radius * (1 + self.tol)
            and excess <= self.tol * (1 + element.scale)
        )

    def _propose(
        self, element: Element, data: ProblemData, level: Tensor, x: Tensor, solver: str
    ) -> tuple[Tensor, Tensor] | None:
        """theta and the multiplier of the loss, differentiable, from the frame ``c + T v``."""
        c, S, scale = element.center.theta, element.radius, element.scale
        T = frame(element.hessian, S, scale)
        kind, family = kind_of(self.family), self.family
        X, z = data.X @ T, data.X @ c
        w = data.w / (family.dispersion * scale)
        linear = (data.ridge * c - data.tilt) / scale - (w * data.r) @ data.X
        budget = level / scale - linear @ c + 0.5 * data.ridge / scale * (c @ c)
        if isinstance(family, Binomial):
            w = w * family.trials
        if kind == "exponential":
            w = w * z.exp()
        if kind == "square":
            budget = budget - 0.5 * (w * z) @ z
            linear = linear + (w * z) @ data.X
        arm = x @ T
        length = float(torch.linalg.vector_norm(arm.detach())) or 1.0
        rows = (0, self.capacity - len(z))
        pad = nn.functional.pad
        parameters = [
            arm / length,
            pad((data.w == 0).to(x), rows, value=1.0),
            pad(X, (0, 0, *rows)),
            pad(w, rows),
            linear @ T,
            budget,
            c / data.radius,
            T / data.radius,
        ]
        if kind == "logistic":
            parameters.append(pad(z, rows))
        ridged = bool(data.ridge > 0)
        if ridged:
            parameters.append((data.ridge / scale).sqrt() * T)
        options = {"solve_method": solver, "n_jobs_forward": 1, **settings(solver, self.max_steps)}
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            options |= {"mode": self.mode, "n_jobs_backward": 1}
        layer = _compiled(kind, self.capacity, len(c), ridged)
        try:
            v, dual = _Quiet.apply(partial(layer, solver_args=options), *parameters)
        except Exception:  # each package below has errors of its own
            return None
        return c + T @ v, dual * (length / scale)


def layer_support(
    program: SublevelProgram,
    arms: Tensor,
    *,
    solver: str = "CLARABEL",
    fallbacks: Sequence[str] = ("ECOS", "SCS"),
    mode: str = "lsqr",
    tol: float = 1e-6,
    max_steps: int | None = None,
    throw: bool = True,
) -> SupportResult:
    """``max <x, theta>`` over the set, for every arm, by a :class:`UCBLayer` of fitting capacity.

    The capacity is the next power of two, so that growing histories share a canonicalisation.

    Args:
        program: the set; at most 1024 rows, and 4096 / d.
        arms: ``(*B, K, d)``.
        solver: see :class:`UCBLayer`, as for the other options.
        fallbacks: see there.
        mode: see there.
        tol: see there.
        max_steps: see there.
        throw: raise :class:`SolverError` if an element does not converge, or return statuses.

    Example:
        >>> import torchglb as glb
        >>> X, r = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double()
        >>> loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)
        >>> program = SublevelProgram(loss, glb.Ball(2, 2.0), torch.tensor(-0.375).double())
        >>> layer_support(program, X).upper
        tensor([1.5000, 0.5000], dtype=torch.float64)
    """
    check_program(program)
    n, d = program.likelihood.X.shape[-2:]
    capacity = max(n, min(1 << max(3, (n - 1).bit_length()), max_capacity(d)))
    layer = UCBLayer(
        program.likelihood.family,
        program.domain,
        capacity,
        solver=solver,
        fallbacks=fallbacks,
        mode=mode,
        tol=tol,
        max_steps=max_steps,
    )
    return layer.support(program, arms, throw=throw)


def max_capacity(dim: int) -> int:
    """The largest number of rows that a layer takes at this dimension."""
    return min(MAX_ROWS, MAX_ENTRIES // dim)


class _Solution(NamedTuple):
    """One arm's entries of the result; ``value``, theta and multiplier carry the gradient."""

    value: Tensor
    upper: Tensor
    lower: Tensor
    theta: Tensor
    multiplier: Tensor
    status: Status

    @classmethod
    def missing(cls, x: Tensor, status: Status) -> _Solution:
        """No answer: NaN (for the empty set its supremum), without a gradient."""
        nan, none = x.new_tensor(torch.nan), x.new_tensor(0.0)
        bound = x.new_tensor(-torch.inf) if status == Status.INFEASIBLE else nan
        return cls(none, bound, bound, nan.expand(x.shape), nan, status)


def _carry(carrier: Tensor, number: Tensor) -> Tensor:
    """The numbers of the second argument with the gradient of the first."""
    return number + (carrier - carrier.detach())


class _Quiet(torch.autograd.Function):
    """A call without the warnings of the packages below, forward and backward.

    They are about accuracy, which the certificate judges, and about the packages' own age.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Sequence[Tensor]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        needed = ctx.needs_input_grad[1:]
        ctx.save_for_backward(*inputs)
        ctx.leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
        with warnings.catch_warnings(), torch.set_grad_enabled(any(needed)):
            warnings.simplefilter("ignore")
            ctx.outputs = call(*ctx.leaves)
        return tuple(t.detach() for t in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        needed = [t for t in ctx.leaves if t.requires_grad]
        seeds = [t.detach() for t in cotangents]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.autograd.grad(ctx.outputs, needed, seeds, retain_graph=True)
        if torch.is_grad_enabled():
            found = _Once.apply(len(found), *found, *cotangents, *ctx.saved_tensors)
        gradients = iter(found)
        return (None, *(next(gradients) if t.requires_grad else None for t in ctx.leaves))


class _Once(torch.autograd.Function):
    """The first of its arguments, as a function of all of them that has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in inputs[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "UCBLayer has first derivatives only; the native solver can be differentiated again"
        )


@lru_cache(maxsize=8)
def _compiled(kind: str, capacity: int, d: int, ridged: bool) -> CvxpyLayer:
    """The parametrised program, canonicalised.

    Rows of weight 0 leave their epigraph variable free upwards; ``pin`` charges for it in the
    objective, so that the solution is unique. Such rows have no features: theta is not affected.
    """
    v, u = cp.Variable(d), cp.Variable(capacity)
    arm, pin, X = cp.Parameter(d), cp.Parameter(capacity, nonneg=True), cp.Parameter((capacity, d))
    w, linear, budget = cp.Parameter(capacity, nonneg=True), cp.Parameter(d), cp.Parameter()
    c, T = cp.Parameter(d), cp.Parameter((d, d))
    parameters = [arm, pin, X, w, linear, budget, c, T]
    loss = w @ u + linear @ v
    if kind == "logistic":
        z = cp.Parameter(capacity)
        parameters.append(z)
        epigraph = cp.logistic(z + X @ v) <= u
    elif kind == "exponential":
        epigraph = cp.exp(X @ v) <= u
    else:
        epigraph = 0.5 * cp.square(X @ v) <= u
    if ridged:
        R = cp.Parameter((d, d))
        parameters.append(R)
        loss = loss + 0.5 * cp.sum_squares(R @ v)
    sublevel = loss <= budget
    constraints = [sublevel, epigraph, cp.norm(c + T @ v) <= 1]
    problem = cp.Problem(cp.Maximize(arm @ v - pin @ u), constraints)
    return CvxpyLayer(problem, parameters, [v, sublevel.dual_variables[0]])
