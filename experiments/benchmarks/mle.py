"""The constrained maximum-likelihood estimate against what people use today.

Logistic problems of two kinds. Easy ones have their optimum well inside the ball (S = 10), so that
unconstrained peers solve the same problem. Hard ones have features of many lengths and a parameter
close to the sphere (S = 6): some optima are on it, and only SLSQP knows of constraints. Every peer
gets the loosest of its tolerances with which it reaches the gap that we ask of ourselves,
``gap <= 1e-9 (1 + |loss|)``, or else its most accurate one. Gaps are Frank-Wolfe gaps,
computed for all in the same way. SciPy's methods get values and analytic gradients in one call.
Ours compute the Hessian at the solution when it is asked for, as "with Hessian" does; statsmodels
returns the covariance, SciPy and scikit-learn neither. One thread for everybody. The peers take the
problems of a batch one by one; ours take them together.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.optimize
import scipy.special
import statsmodels.api
import torch
from benchmarks._timing import median, race
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

import torchglb as glb
from torchglb.choices import FitSolver
from torchglb.optim import frank_wolfe_gap

RADIUS = {"easy": 10.0, "hard": 6.0}
TOL = 1e-9
OURS = ("our L-BFGS", "our Newton")

Array = np.ndarray
Peer = Callable[["Problem", float], Array]


@dataclass(frozen=True)
class Problem:
    """One logistic problem in NumPy, with the loss that every peer is given."""

    X: Array
    r: Array
    S: float

    def loss(self, theta: Array) -> tuple[float, Array]:
        z = self.X @ theta
        value = np.logaddexp(0.0, z).sum() - self.r @ z
        return float(value), self.X.T @ (scipy.special.expit(z) - self.r)


def draw(kind: str, count: int, n: int, d: int, seed: int) -> glb.Rows:
    """``count`` problems.

    Easy ones have ``|theta*| = 2`` and unit features; rewards are 0 or 1; with fewer than ten rows
    per feature, where such data would often be separable and have no optimum, they are means of
    five such draws. Hard ones have ``|theta*|`` between 0.9 S and 1.1 S, and normal features that
    are clipped to the ball.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    if kind == "hard":
        X, theta = normal(count, n, d), unit(count, d)
        X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
        size = 0.9 + 0.2 * torch.rand((count, 1), generator=generator, dtype=torch.float64)
        theta = RADIUS[kind] * size * theta
    else:
        X, theta = unit(count, n, d), 2.0 * unit(count, d)
    p = torch.sigmoid((X @ theta[..., None])[..., 0])
    draws = 1 if n >= 10 * d or kind == "hard" else 5
    r = torch.bernoulli(p.expand(draws, *p.shape), generator=generator).mean(0)
    return glb.Rows(X, r)


# ---- the peers: each takes a problem and a tolerance of its own ----------------------------------


def slsqp(problem: Problem, tol: float) -> Array:
    inside = {
        "type": "ineq",
        "fun": lambda theta: problem.S**2 - theta @ theta,
        "jac": lambda theta: -2.0 * theta,
    }
    found = scipy.optimize.minimize(
        problem.loss,
        np.zeros(problem.X.shape[1]),
        jac=True,
        method="SLSQP",
        constraints=[inside],
        options={"ftol": tol, "maxiter": 1000},
    )
    return np.asarray(found.x)


def scipy_lbfgs(problem: Problem, tol: float) -> Array:
    found = scipy.optimize.minimize(
        problem.loss,
        np.zeros(problem.X.shape[1]),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 0.0, "gtol": tol, "maxiter": 1000},
    )
    return np.asarray(found.x)


def sklearn_lbfgs(problem: Problem, tol: float) -> Array:
    X, labels, weights = problem.X, problem.r, None
    mixed = (labels > 0) & (labels < 1)
    if mixed.any():  # a mean reward is two weighted rows to scikit-learn
        X = np.concatenate([X, X[mixed]])
        weights = np.concatenate([np.where(mixed, labels, 1.0), 1.0 - labels[mixed]])
        labels = np.concatenate([np.where(mixed, 1.0, labels), np.zeros(mixed.sum())])
    model = LogisticRegression(C=np.inf, fit_intercept=False, tol=tol, max_iter=10000)
    return np.asarray(model.fit(X, labels, weights).coef_[0])


def statsmodels_logit(problem: Problem, tol: float) -> Array:
    model = statsmodels.api.Logit(problem.r, problem.X)
    return np.asarray(model.fit(disp=0, tol=tol, maxiter=1000).params)


def statsmodels_glm(problem: Problem, tol: float) -> Array:
    family = statsmodels.api.families.Binomial()
    model = statsmodels.api.GLM(problem.r, problem.X, family=family)
    return np.asarray(model.fit(tol=tol, maxiter=1000).params)


#: the peers that know of the ball
CONSTRAINED = ("SciPy SLSQP",)
PEERS: dict[str, tuple[Peer, tuple[float, ...]]] = {
    "SciPy SLSQP": (slsqp, (1e-6, 1e-8, 1e-10, 1e-12, 1e-14, 1e-16)),
    "SciPy L-BFGS": (scipy_lbfgs, (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)),
    "scikit-learn L-BFGS": (sklearn_lbfgs, (1e-4, 1e-6, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12)),
    "statsmodels Logit": (statsmodels_logit, (1e-6, 1e-8, 1e-10, 1e-12)),
    "statsmodels GLM": (statsmodels_glm, (1e-6, 1e-8, 1e-10, 1e-12, 1e-14)),
}


def gaps(rows: glb.Rows, theta: torch.Tensor, S: float) -> torch.Tensor:
    """The Frank-Wolfe gap of each problem relative to ``1 + |loss|``; infinite out of the ball."""
    loss, gradient = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows).value_and_gradient(theta)
    gap = frank_wolfe_gap(theta, gradient, theta.new_full(loss.shape, S)) / (1.0 + loss.abs())
    inside = torch.linalg.vector_norm(theta, dim=-1) <= S * (1.0 + 1e-6)
    return torch.where(inside, gap, math.inf).nan_to_num(math.inf)


def solve_all(peer: Peer, problems: list[Problem], tol: float) -> list[Array]:
    return [peer(problem, tol) for problem in problems]


# ---- one size --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What one method needed: seconds per problem and its largest relative gap in the batch."""

    seconds: float
    gap: float


def peers_of(kind: str) -> list[str]:
    """Who takes part."""
    return list(PEERS) if kind == "easy" else list(CONSTRAINED)


def measure(kind: str, count: int, n: int, d: int, seconds: float) -> dict[str, Line]:
    rows, S = draw(kind, count, n, d, seed=1000 * n + d), RADIUS[kind]
    problems = [Problem(X.numpy(), r.numpy(), S) for X, r in zip(rows.X, rows.r, strict=True)]
    single = count == 1
    given = glb.Rows(rows.X[0], rows.r[0]) if single else rows
    family, ball = glb.Bernoulli(), glb.Ball(d, S)
    contestants: dict[str, Callable[[], object]] = {}
    gap: dict[str, float] = {}

    for name in peers_of(kind):
        peer, ladder = PEERS[name]
        tried = []
        for tol in ladder:
            found = torch.from_numpy(np.stack([peer(p, tol) for p in problems]))
            tried.append((float(gaps(rows, found, S).max()), tol))
            if tried[-1][0] <= TOL:
                break
        gap[name], chosen = tried[-1] if tried[-1][0] <= TOL else min(tried)
        contestants[name] = partial(solve_all, peer, problems, chosen)

    solvers: tuple[FitSolver, ...] = ("lbfgs", "newton")
    for name, solver in zip(OURS, solvers, strict=True):

        def fit(solver: FitSolver = solver) -> glb.MLEResult:
            return glb.constrained_mle(family, given, ball, solver=solver, tol=TOL)

        theta = fit().theta
        if kind == "easy":
            assert float(torch.linalg.vector_norm(theta, dim=-1).max()) < 0.99 * S, "not interior"
        gap[name] = float(gaps(given, theta, S).max())
        contestants[name] = fit

    contestants["... with Hessian"] = lambda: fit().hessian
    gap["... with Hessian"] = gap[OURS[-1]]
    likelihood = glb.NegativeLogLikelihood(family, *given)
    zero = given.X.new_zeros(given.X.shape[:-2] + given.X.shape[-1:])
    contestants["one pass in torch"] = lambda: likelihood.expand(zero)
    gap["one pass in torch"] = math.nan
    taken = race(contestants, seconds=seconds, summary=median)
    return {name: Line(taken[name] / count, gap[name]) for name in contestants}


def best_peer(lines: dict[str, Line]) -> float:
    """The seconds of the fastest of those that took part."""
    return min(line.seconds for name, line in lines.items() if name in PEERS)


def show(lines: dict[str, Line]) -> None:
    slowest, bare = lines["SciPy SLSQP"].seconds, lines["one pass in torch"].seconds
    best = best_peer(lines)
    print(f"  {'':20} {'ms/problem':>10} {'x SLSQP':>9} {'x best':>8} {'passes':>8} {'gap':>9}")
    for name, line in lines.items():
        print(
            f"  {name:20} {1e3 * line.seconds:10.3f} {slowest / line.seconds:9.2f}"
            f" {best / line.seconds:8.2f} {line.seconds / bare:8.1f} {line.gap:9.1e}"
        )


Table = dict[tuple[str, int, int, int], dict[str, Line]]


def run(quick: bool) -> None:
    sizes = [("easy", n, d) for n in (100, 1000, 10000) for d in (2, 10, 50)]
    sizes += [("hard", 1000, 2), ("hard", 1000, 10), ("hard", 10000, 10)]
    if quick:
        sizes = [("easy", 100, 2), ("easy", 1000, 10), ("hard", 1000, 10)]
    seconds = 1.0 if quick else 6.0
    print(
        "times: median CPU time of interleaved repeats; x: times faster than SLSQP, than the best"
    )
    print("passes: multiples of one evaluation of loss, gradient and Hessian; gap: over 1 + |loss|")
    torch.set_num_threads(1)
    table: Table = {}
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # peers complain about tolerances they cannot reach
        for kind, n, d in sizes:
            for count in (1, 40):
                print(f"{kind} problems, n = {n}, d = {d}, batch {count}", flush=True)
                table[kind, n, d, count] = measure(kind, count, n, d, seconds)
                show(table[kind, n, d, count])
    verdict(table)


def verdict(table: Table) -> None:
    for kind in RADIUS:
        lines = table[kind, 1000, 10, 40]
        ours, theirs = lines["our Newton"], lines["SciPy SLSQP"]
        ratio = theirs.seconds / ours.seconds
        met = ratio >= 20 and ours.gap <= max(theirs.gap, TOL)
        print(
            f"bar: {kind} problems, batch 40, n = 1000, d = 10: {ratio:.1f} times faster than SLSQP"
            f" (20 asked), gap {ours.gap:.1e} against {theirs.gap:.1e}:"
            f" {'met' if met else 'NOT met'}"
        )
    for (kind, n, d, count), lines in table.items():
        if count == 1:
            asked = 5.0 if n <= 1000 else 1.5
            ratio = best_peer(lines) / min(lines[name].seconds for name in OURS)
            print(
                f"bar: one {kind} problem, n = {n}, d = {d}: {ratio:.2f} times faster than the best"
                f" peer ({asked} asked): {'met' if ratio >= asked else 'NOT met'}"
            )
