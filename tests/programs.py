"""Random optimistic programs, and references for them that share no code with the solvers.

``random_program(seed)`` walks through every kind of data with every family; sizes, radii, levels
and arms are drawn from the seed. ``exact_value`` is ``h(x)`` to fifty digits: Newton's method on
the optimality conditions in mpmath, accepted only if all of them hold; the program is convex, so
they suffice. The losses are written out again in mpmath.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import mpmath
import torch
from torch import Tensor

import torchglb as glb

KINDS = (
    "plain",
    "weighted",
    "ridged",
    "separable",
    "rank_deficient",
    "nearly_equal",
    "zero_rows",
    "empty",
)
FAMILIES = ("bernoulli", "gaussian", "poisson")
#: how the level lies above the minimum: tiny, moderate, about the whole ball, far beyond it
LEVELS = ("tiny", "moderate", "large", "huge")


@dataclass(frozen=True)
class Case:
    """A program without batch axes, its arms ``(K, d)`` and its minimiser."""

    name: str
    program: glb.SublevelProgram
    arms: Tensor
    minimum: float

    @property
    def radius(self) -> float:
        return self.program.domain.max_radius


def family_of(name: str) -> glb.GLMFamily:
    return {"bernoulli": glb.Bernoulli(), "gaussian": glb.Gaussian(0.5), "poisson": glb.Poisson()}[
        name
    ]


def random_program(
    seed: int, *, max_n: int = 2000, max_d: int = 20, num_arms: int = 3, zero_arm: bool = True
) -> Case:
    """The program of this number; kinds change fastest, then families, then levels."""
    kind = KINDS[seed % 8]
    name = FAMILIES[seed // 8 % 3]
    place = LEVELS[seed // 24 % 4]
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    def log_uniform(low: float, high: float) -> float:
        return math.exp(uniform(math.log(low), math.log(high)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    d = min(max_d, int(log_uniform(1, max_d + 1)))
    n = 0 if kind == "empty" else min(max_n, int(log_uniform(1, max_n + 1)))
    S = log_uniform(0.5, 20.0)
    X = torch.nn.functional.normalize(normal(n, d), dim=-1)
    if uniform(0, 1) < 0.5:  # lengths between 0 and 1 instead of 1
        X = X * torch.rand((n, 1), generator=generator, dtype=torch.float64)
    if kind == "rank_deficient":
        basis = torch.linalg.qr(normal(d, max(1, d // 2)))[0]
        X = X @ basis @ basis.mT
    if kind == "nearly_equal":
        distinct = max(1, min(n, int(uniform(1, 2 * d))))
        X = X[torch.randint(distinct, (n,), generator=generator)]
        X = 0.999 * X + 1e-7 * normal(n, d)
    if kind == "zero_rows":
        X = X * (torch.rand((n, 1), generator=generator) < 0.5)
    family = family_of(name)
    truth = torch.nn.functional.normalize(normal(d), dim=0) * S * uniform(0.2, 1.1)
    z = X @ truth
    if kind == "separable" and name != "gaussian":
        r = torch.where(z > 0, 1.0 if name == "bernoulli" else 3.0, 0.0).double()
    else:
        r = family.sample(z, generator)
    w = None
    if kind == "weighted":
        w = torch.rand(n, generator=generator, dtype=torch.float64)
        w = torch.where(w < 0.2, 0.0, 3.0 * w)
    ridge = log_uniform(1e-2, 1e2) if kind == "ridged" else 0.0
    loss = glb.NegativeLogLikelihood(family, X, r, w, regularization=ridge)
    domain = glb.Ball(d, S)
    rows = glb.Rows(X, r, w)
    fit = glb.constrained_mle(family, rows, domain, regularization=ridge, tol=1e-14, throw=False)
    beta2 = {
        "tiny": log_uniform(1e-6, 1e-3) * max(1.0, abs(float(fit.loss)) / 100),
        "moderate": log_uniform(1e-1, 1e2),
        # the loss on the sphere, somewhere: ball and loss contend
        "large": uniform(0.2, 1.0) * max(float(loss(truth * (S / truth.norm())) - fit.loss), 0.5),
        "huge": 1e6 + n * math.exp(S if name == "poisson" else 0.0) * 4 * (1 + S) ** 2,
    }[place]
    arms = torch.nn.functional.normalize(normal(num_arms, d), dim=-1)
    arms = arms * torch.rand((num_arms, 1), generator=generator, dtype=torch.float64) ** 0.5
    if num_arms > 1:
        arms[1] = truth / truth.norm()
    if num_arms > 2 and n:
        arms[2] = X[0] * uniform(0.5, 1.0)
    if zero_arm and seed % 5 == 0:
        arms[-1] = 0.0
    program = glb.SublevelProgram(loss, domain, fit.loss + beta2)
    label = f"{seed}-{kind}-{name}-{place}-n{n}-d{d}-S{S:.3g}"
    return Case(label, program, arms, float(fit.loss))


def stack_programs(programs: list[glb.SublevelProgram]) -> glb.SublevelProgram:
    """Programs of equal shapes as one batch."""
    data = [torch.stack(parts) for parts in zip(*(p.tensors() for p in programs), strict=True)]
    return programs[0].rebuild(tuple(data))


# ---- fifty digits ---------------------------------------------------------------------------


class ExactLoss:
    """The loss of a program without batch axes, in mpmath."""

    def __init__(self, program: glb.SublevelProgram) -> None:
        loss = program.likelihood
        self.kind = type(loss.family).__name__
        self.scale = mpmath.mpf(loss.family.dispersion)
        self.X = [[mpmath.mpf(v) for v in row] for row in loss.X.tolist()]
        self.r = [mpmath.mpf(v) for v in loss.r.tolist()]
        w = [1.0] * len(self.r) if loss.w is None else loss.w.tolist()
        self.w = [mpmath.mpf(v) / self.scale for v in w]
        self.ridge = mpmath.mpf(float(loss.regularization))
        self.d = loss.dim
        self.S = mpmath.mpf(program.domain.max_radius)
        self.level = mpmath.mpf(float(program.level))

    def _terms(self, z: Any, r: Any) -> tuple[Any, Any, Any]:
        if self.kind == "Bernoulli":
            e = mpmath.exp(-abs(z))
            p = 1 / (1 + e) if z > 0 else e / (1 + e)
            return mpmath.log1p(e) + max(z, 0) - r * z, p - r, e / (1 + e) ** 2
        if self.kind == "Poisson":
            e = mpmath.exp(z)
            return e - r * z, e - r, e
        return (z / 2 - r) * z, z - r, mpmath.mpf(1)

    def expand(self, theta: list[Any]) -> tuple[Any, list[Any], list[list[Any]]]:
        d = self.d
        value = self.ridge / 2 * mpmath.fdot(theta, theta)
        gradient = [self.ridge * t for t in theta]
        hessian = [[self.ridge if i == j else mpmath.mpf(0) for j in range(d)] for i in range(d)]
        for x, r, w in zip(self.X, self.r, self.w, strict=True):
            loss, slope, curvature = self._terms(mpmath.fdot(x, theta), r)
            value += w * loss
            for i in range(d):
                gradient[i] += w * slope * x[i]
                for j in range(d):
                    hessian[i][j] += w * curvature * x[i] * x[j]
        return value, gradient, hessian

    def value(self, theta: list[Any]) -> Any:
        return self.expand(theta)[0]

    def excess(self, theta: Tensor) -> tuple[float, float]:
        """By how much theta violates the level, relative to it, and the ball, relative to S."""
        with mpmath.workdps(50):
            point = [mpmath.mpf(t) for t in theta.tolist()]
            size = 1 + abs(self.level)
            over = (self.value(point) - self.level) / size
            out = mpmath.sqrt(mpmath.fdot(point, point)) / self.S - 1
            return float(over), float(out)


def exact_value(program: glb.SublevelProgram, x: Tensor, theta: Tensor) -> Any:
    """``h(x)`` to fifty digits, or None if Newton's method does not reach it from ``theta``."""
    with mpmath.workdps(60):
        loss = ExactLoss(program)
        arm = [mpmath.mpf(v) for v in x.tolist()]
        start = [mpmath.mpf(v) for v in theta.tolist()]
        for on_loss, on_ball in itertools.product((True, False), repeat=2):
            found = _newton(loss, arm, start, on_loss, on_ball)
            if found is not None:
                return found
    return None


def _newton(loss: ExactLoss, arm: list[Any], theta: list[Any], on_loss: bool, on_ball: bool) -> Any:
    """The value if the optimality conditions hold with exactly these constraints active."""
    d, S = loss.d, loss.S
    length = mpmath.sqrt(mpmath.fdot(arm, arm))
    if not on_loss and not on_ball:
        return mpmath.mpf(0) if length == 0 else None
    if length == 0:
        return None
    if not on_loss:
        pole = [S * a / length for a in arm]
        return S * length if loss.value(pole) <= loss.level else None
    value, gradient, hessian = loss.expand(theta)
    # multipliers by least squares, as a start
    columns = [gradient, theta] if on_ball else [gradient]
    gram = mpmath.matrix([[mpmath.fdot(a, b) for b in columns] for a in columns])
    try:
        fit = mpmath.lu_solve(gram, mpmath.matrix([mpmath.fdot(a, arm) for a in columns]))
    except ZeroDivisionError:
        return None
    lam, nu = fit[0], fit[1] if on_ball else mpmath.mpf(0)
    q = d + 1 + on_ball
    for _ in range(12):
        residual = [arm[i] - lam * gradient[i] - nu * theta[i] for i in range(d)]
        residual.append(value - loss.level)
        if on_ball:
            residual.append((mpmath.fdot(theta, theta) - S * S) / 2)
        size = max(abs(v) for v in residual)
        if size < mpmath.mpf(10) ** -50:
            break
        J = mpmath.zeros(q, q)
        for i in range(d):
            for j in range(d):
                J[i, j] = -lam * hessian[i][j] - (nu if i == j else 0)
            J[i, d], J[d, i] = -gradient[i], gradient[i]
            if on_ball:
                J[i, d + 1], J[d + 1, i] = -theta[i], theta[i]
        try:
            step = mpmath.lu_solve(J, mpmath.matrix(residual))
        except ZeroDivisionError:  # the maximiser is not unique
            return None
        theta = [t - step[i] for i, t in enumerate(theta)]
        lam = lam - step[d]
        nu = nu - step[d + 1] if on_ball else nu
        if not mpmath.isfinite(mpmath.fsum(theta)) or max(abs(t) for t in theta) > 10 * S:
            return None
        value, gradient, hessian = loss.expand(theta)
    tiny = mpmath.mpf(10) ** -40
    stationary = max(abs(arm[i] - lam * gradient[i] - nu * theta[i]) for i in range(d)) < tiny
    on_level = abs(value - loss.level) < tiny * (1 + abs(loss.level))
    inside = mpmath.fdot(theta, theta) <= S * S * (1 + tiny)
    if stationary and on_level and inside and lam >= 0 and nu >= 0:
        return mpmath.fdot(arm, theta)
    return None
