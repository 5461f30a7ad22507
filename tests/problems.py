"""Random norm-constrained GLM problems, and an independent reference solver for them.

``random_problem(seed)`` walks through every kind of problem with every family; sizes, radii and data
are drawn from the seed. The reference shares no code with the library: losses and gradients are
written out in NumPy, and SciPy minimises them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.special
import torch
from torch import Tensor

import torchglb as glb

Array = np.ndarray
EULER = 0.57721566490153286061

KINDS = (
    "interior",
    "boundary",
    "separable",
    "rank_deficient",
    "duplicated",
    "zero_rows",
    "weighted",
    "empty",
)
FAMILY_NAMES = ("bernoulli", "binomial", "gaussian", "poisson", "probit", "cloglog", "custom")
CONIC_NAMES = FAMILY_NAMES[:4]  # those whose loss a cone program can state


@dataclass(frozen=True)
class Reference:
    """A family of the library with its log-partition and mean, written again in NumPy."""

    family: glb.GLMFamily
    log_partition: Callable[[Array], Array]
    mean: Callable[[Array], Array]


def pseudo_huber(z: Tensor) -> Tensor:
    """``sqrt(1 + z^2)``: a log-partition with rewards in [-1, 1] that is none of the built-in ones."""
    return torch.sqrt(1.0 + z * z)


def draw_signs(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rewards -1 and 1 with mean ``z / sqrt(1 + z^2)``."""
    p = 0.5 + 0.5 * z / pseudo_huber(z)
    return 2.0 * torch.bernoulli(p, generator=generator) - 1.0


def least_curvature(S: float) -> float:
    """The minimum of ``(1 + z^2)^(-3/2)`` on [-S, S]."""
    return (1.0 + S * S) ** -1.5


def steepest_ratio(S: float) -> float:
    """The maximum of ``3 |z| / (1 + z^2)``, third derivative over second, on [-S, S]."""
    return 3.0 * S / (1.0 + S * S) if S < 1.0 else 1.5


def custom_family() -> glb.CustomFamily:
    return glb.CustomFamily(
        pseudo_huber,
        reward_range=(-1.0, 1.0),
        self_concordance=steepest_ratio,
        max_variance=1.0,
        min_variance=least_curvature,
        sampler=draw_signs,
    )


def reference_families() -> dict[str, Reference]:
    expit, normal = scipy.special.expit, scipy.special.ndtr
    return {
        "bernoulli": Reference(glb.Bernoulli(), lambda z: np.logaddexp(0.0, z), expit),
        "binomial": Reference(
            glb.Binomial(7), lambda z: 7.0 * np.logaddexp(0.0, z), lambda z: 7.0 * expit(z)
        ),
        "gaussian": Reference(glb.Gaussian(0.3), lambda z: 0.5 * z * z, lambda z: z),
        "poisson": Reference(glb.Poisson(), np.exp, np.exp),
        "probit": Reference(
            glb.QuasiBounded("probit"),
            lambda z: z * normal(z) + np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi),
            normal,
        ),
        "cloglog": Reference(
            glb.QuasiBounded("cloglog"),
            lambda z: scipy.special.exp1(np.exp(z)) + z + EULER,
            lambda z: -np.expm1(-np.exp(z)),
        ),
        "custom": Reference(
            custom_family(),
            lambda z: np.sqrt(1.0 + z * z),
            lambda z: z / np.sqrt(1.0 + z * z),
        ),
    }


@dataclass(frozen=True)
class Problem:
    """One norm-constrained maximum-likelihood problem."""

    name: str
    reference: Reference
    rows: glb.Rows
    radius: float

    @property
    def family(self) -> glb.GLMFamily:
        return self.reference.family

    @property
    def domain(self) -> glb.Ball:
        return glb.Ball(self.rows.X.shape[-1], self.radius)

    def loss(self, theta: Array) -> tuple[float, Array]:
        """The loss and its gradient, without any code of the library."""
        X, r = self.rows.X.numpy(), self.rows.r.numpy()
        w = np.ones_like(r) if self.rows.w is None else self.rows.w.numpy()
        z = X @ theta
        w = w / self.family.dispersion
        value = float(w @ (self.reference.log_partition(z) - r * z))
        return value, X.T @ (w * (self.reference.mean(z) - r))


def uncompiled(family: glb.GLMFamily) -> glb.GLMFamily:
    """The same family as a class of its own, which compiled code knows nothing of."""
    found, kind = copy.copy(family), type(family)
    found.__class__ = type("Uncompiled", (kind,), {})
    return found


def random_problem(
    seed: int,
    dtype: torch.dtype = torch.float64,
    *,
    most_rows: int = 5000,
    most_features: int = 50,
) -> Problem:
    """The problem of this number; kinds change fastest, then families."""
    kind = KINDS[seed % len(KINDS)]
    references = reference_families()
    name = FAMILY_NAMES[seed // len(KINDS) % len(FAMILY_NAMES)]
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    def log_uniform(low: float, high: float) -> float:
        return math.exp(uniform(math.log(low), math.log(high)))

    d = int(log_uniform(1, most_features + 0.999))
    n = 0 if kind == "empty" else int(log_uniform(1, most_rows + 0.999))
    radius = log_uniform(0.1, 50.0)
    if kind == "interior":
        n = min(most_rows, max(n, 40 * d))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    X = torch.nn.functional.normalize(normal(n, d), dim=-1)
    if uniform(0, 1) < 0.5:  # lengths between 0 and 1 instead of 1
        X = X * torch.rand((n, 1), generator=generator, dtype=torch.float64)
    if kind == "rank_deficient":
        rank = max(1, d // 2) if d > 1 else 1
        basis = torch.linalg.qr(normal(d, rank))[0]
        X = torch.nn.functional.normalize(X @ basis @ basis.mT, dim=-1)
    if kind == "duplicated":
        distinct = max(1, min(n, int(uniform(1, 2 * d))))
        X = X[torch.randint(distinct, (n,), generator=generator)]
    if kind == "zero_rows":
        X = X * (torch.rand((n, 1), generator=generator) < 0.5)

    truth = torch.nn.functional.normalize(normal(d), dim=0)
    share = {"interior": 0.3, "boundary": 2.0, "separable": 20.0}.get(kind, uniform(0.2, 1.2))
    family = references[name].family
    # e^z stays a count that a float64 can hold
    z = (X @ truth) * min(share * radius, 60.0)
    if kind == "separable" and name != "gaussian":
        low, high = family.reward_range
        r = torch.where(z > 0, min(high, 3.0), low).to(torch.float64)
    else:
        r = family.sample(z, generator)
    w = None
    if kind == "weighted":
        w = torch.rand(n, generator=generator, dtype=torch.float64)
        w = torch.where(w < 0.3, 0.0, 3.0 * w)
    rows = glb.Rows(X.to(dtype), r.to(dtype), None if w is None else w.to(dtype))
    return Problem(f"{seed}-{kind}-{name}-n{n}-d{d}-S{radius:.3g}", references[name], rows, radius)


def reference_minimum(problem: Problem) -> float:
    """The smallest loss that SciPy finds in the ball, over several starts and two methods."""
    d, S = problem.rows.X.shape[-1], problem.radius
    _, slope = problem.loss(np.zeros(d))
    steepness = float(np.linalg.norm(slope))
    if steepness == 0.0:
        return problem.loss(np.zeros(d))[0]
    # u = theta / S in the unit ball, and a loss with unit slope at zero: well scaled for any solver
    scale = 1.0 / (steepness * S)

    def objective(u: Array) -> tuple[float, Array]:
        value, gradient = problem.loss(S * u)
        return scale * value, scale * S * gradient

    inside = {"type": "ineq", "fun": lambda u: 1.0 - u @ u, "jac": lambda u: -2.0 * u}
    best = math.inf
    down = -slope / steepness
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in (np.zeros(d), 0.1 * down, 0.99 * down):
            found = scipy.optimize.minimize(
                objective,
                start,
                jac=True,
                method="SLSQP",
                constraints=[inside],
                options={"ftol": 1e-15, "maxiter": 300},
            )
            u = found.x / max(1.0, float(np.linalg.norm(found.x)))
            if np.isfinite(u).all():
                best = min(best, problem.loss(S * u)[0])
    return best
