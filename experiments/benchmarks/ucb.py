"""One round of the exact UCB program against what people use today.

The paper's time-varying logistic bandit, K = 20 arms, S = 4. SciPy's SLSQP (the paper's method:
the estimate, then one call per arm from there, with analytic gradients): once with the loss and the
tolerance of the paper's public code, and twice with the leanest loss that we could write, at
SciPy's own tolerance of 1e-6 and at 1e-9. cvxpy with Clarabel (the first solve of a round with
canonicalisation, and re-solves of the same program for the other arms). Ours for all arms to
tolerance, and ours inside a running bandit: the choice of the arm with the minimum of the loss, and
what it costs to carry all of it on to the next round; and the same in another bandit, which wants
the winner's own value to 5e-9 in every round. Peers solve one replicate; ours solve 10 at once and
are shown per replicate. Times are medians, of all methods in turn, SLSQP on one replicate after
the other.

Two gaps, the largest of all rounds. ``value``: how far the value of an arm may be from the exact
one; of all arms, or of the winner where only the winner is wanted. ``choice``: by how much
another arm may be better than the chosen one. Ours are certificates. Those of a peer are found by
our certificate at the points that it returns; infinite where a point is not even feasible to
1e-6, or where the solver gave up.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import cvxpy as cp
import numpy as np
import scipy.optimize
import scipy.special
import torch
from benchmarks._bandit import FAMILY, Bandit, radius
from torch import Tensor

import torchglb as glb

S, K, REPLICATES = 4.0, 20, 10
TIE = 1e-10  # arms whose values agree to this, relative to 1 + |h|, count as tied
VALUE = 5e-9 / (1.0 + S)  # the same for the winner's own value: 5e-9 in all, as |h| <= S
STATIC = 2.5e-9  # the same for all arms of a static problem: a gap below that of Clarabel
BLOCK = 20  # rounds of ours in a row, as in a bandit
PUBLIC, SLSQP, SHARP = "SLSQP as in the paper", "SLSQP, lean", "SLSQP, lean, ftol 1e-9"
CONIC = "Clarabel, re-solve x K"
ALL, ONE = "ours, all arms", "ours, all arms, one problem"
CERTAIN, TO_GAP = "ours, winner certain", "ours, its value to 5e-9"
CHOICE = "of that, the choice alone"
Array = np.ndarray
T = TypeVar("T")
Row = tuple[float, float, float]
Loss = Callable[[Array], float]
Slope = Callable[[Array], Array]


def lean_loss(X: Array, r: Array) -> tuple[Loss, Slope]:
    """One product with X and one transcendental function for each of value and gradient."""

    def loss(theta: Array) -> float:
        z = X @ theta
        return float(np.logaddexp(0.0, z).sum() - r @ z)

    return loss, lambda theta: np.asarray(X.T @ (scipy.special.expit(X @ theta) - r))


def paper_loss(X: Array, r: Array) -> tuple[Loss, Slope]:
    """As the paper's code has it: ``-sum r log mu(z) + (1 - r) log mu(-z)``, ``sum (mu - r) x``."""

    def mu(z: Array) -> Array:
        return np.asarray(1.0 / (1.0 + np.exp(-z)))

    def loss(theta: Array) -> float:
        up, down = np.log(mu(X @ theta)), np.log(mu(-X @ theta))
        return float(-np.sum(r * up + (1.0 - r) * down))

    return loss, lambda theta: np.sum((mu(X @ theta) - r)[:, None] * X, axis=0)


#: the loss and ftol of each
SLSQPS = {PUBLIC: (paper_loss, 1e-7), SLSQP: (lean_loss, 1e-6), SHARP: (lean_loss, 1e-9)}


def slsqp_round(X: Array, r: Array, level: float, arms: Array, start: Array, name: str) -> Array:
    """The estimate, from the last one, and the maximiser of every arm, ``(K, d)``, by SLSQP."""
    of_rows, ftol = SLSQPS[name]
    loss, slope = of_rows(X, r)
    below = {"type": "ineq", "fun": lambda v: level - loss(v), "jac": lambda v: -slope(v)}
    inside = {"type": "ineq", "fun": lambda v: S**2 - v @ v, "jac": lambda v: -2.0 * v}
    options = {"ftol": ftol, "maxiter": 500}
    theta_hat = scipy.optimize.minimize(
        loss,
        start,
        jac=slope,
        constraints=[inside],
        method="SLSQP",
        options=options,
    ).x
    found = []
    for x in arms:
        result = scipy.optimize.minimize(
            lambda v, x=x: -(x @ v),
            theta_hat,
            jac=lambda v, x=x: -x,
            constraints=[below, inside],
            method="SLSQP",
            options=options,
        )
        found.append(result.x)
    return np.stack(found)


def clarabel_round(
    X: Array, r: Array, level: float, arms: Array, count: int
) -> tuple[float, float, Array]:
    """Seconds of the first solve and of a re-solve, and the maximisers of the first arms."""
    theta, arm = cp.Variable(X.shape[1]), cp.Parameter(X.shape[1])
    loss = cp.sum(cp.logistic(X @ theta)) - (X.T @ r) @ theta
    problem = cp.Problem(cp.Maximize(arm @ theta), [loss <= level, cp.norm(theta) <= S])
    times, points = [], []
    for x in arms[:count]:
        arm.value = x
        began = time.process_time()
        try:
            problem.solve(solver=cp.CLARABEL)
            point = np.asarray(theta.value)
        except cp.SolverError:  # it gave up: the time is spent, but there is no answer
            point = np.full(X.shape[1], np.nan)
        times.append(time.process_time() - began)
        points.append(point)
    return times[0], min(times[1:]), np.stack(points)


def certified_gaps(
    program: glb.SublevelProgram, upper: Tensor, arms: Tensor, points: Array
) -> tuple[float, float]:
    """Of a peer's points: the largest error of a value, and of the choice; inf if not feasible."""
    theta = torch.as_tensor(points)
    excess = program.likelihood.value(theta) - program.level
    outside = torch.linalg.vector_norm(theta, dim=-1) - S
    if not bool(((excess <= 1e-6) & (outside <= 1e-6)).all()):
        return float("inf"), float("inf")
    value = (arms[: len(points)] * theta).sum(-1)
    upper = upper[: len(points)]
    choice = float(upper.max() - upper[value.argmax()])
    return float((upper - value).abs().max()), choice


def one(problem: glb.SublevelProgram, index: int) -> glb.SublevelProgram:
    loss = problem.likelihood
    single = glb.NegativeLogLikelihood(FAMILY, loss.X[index], loss.r[index])
    return glb.SublevelProgram(single, problem.domain, problem.level[index])


def seconds_of(run: Callable[[], T]) -> tuple[float, T]:
    """What a call takes, and what it returns."""
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def play(bandit: Bandit, rounds: int, value_tol: float | None) -> tuple[Row, Row]:
    """Seconds per round and replicate and the winner's largest gaps; the same for the choice."""
    choosing, carrying, value, choice_gap = 0.0, 0.0, 0.0, 0.0
    everyone = torch.arange(bandit.replicates)
    for _ in range(rounds):
        arms = bandit.arms()
        began = time.process_time()
        beta_squared = radius(bandit.t, bandit.d, bandit.S)
        choice = bandit.program.argmax(arms, beta_squared, tol=TIE, value_tol=value_tol)
        choosing += time.process_time() - began
        winner = choice.index[:, None]
        own = (choice.upper - choice.lower).gather(-1, winner)
        rivals = choice.upper.scatter(-1, winner, -torch.inf).amax(-1)
        ahead = rivals - choice.lower.gather(-1, winner)[:, 0]
        value = max(value, float(own.max()))
        choice_gap = max(choice_gap, float(ahead.max()))
        x = arms[everyone, choice.index]
        r = FAMILY.sample(x @ bandit.theta_star, bandit.generator)
        began = time.process_time()
        bandit.program.append(x, r)
        carrying += time.process_time() - began
        bandit.t += 1
    count = rounds * bandit.replicates
    whole = ((choosing + carrying) / count, value, choice_gap)
    return whole, (choosing / count, value, choice_gap)


def run(quick: bool) -> None:
    torch.set_num_threads(1)
    sizes = (
        ((100, 2), (1000, 2))
        if quick
        else tuple((n, d) for d in (2, 10) for n in (100, 1000, 10000))
    )
    print(__doc__)
    for n, d in sizes:
        rows = measure(n, d)
        head = f"{'n':>6} {'d':>3} {'method':<26} {'ms per round':>13} {'ratio':>9}"
        print(f"{head} {'value gap':>10} {'choice gap':>11}")
        base = rows[CERTAIN][0]
        for name, (seconds, value, choice) in rows.items():
            shown = f"{n:>6} {d:>3} {name:<26} {1e3 * seconds:>13.3f}"
            print(f"{shown} {seconds / base:>8.1f}x {value:>10.1e} {max(choice, 0.0):>11.1e}")
        if n == 1000:
            for ours in (ALL, ONE):
                ratio, gaps = rows[CONIC][0] / rows[ours][0], (rows[ours][1], rows[CONIC][1])
                verdict = "met" if ratio >= 2000 and gaps[0] <= gaps[1] else "MISSED"
                print(f"    bar: {ours} 2000 times faster than {CONIC}: {ratio:.0f}, gap", end=" ")
                print(f"{gaps[0]:.1e} against {gaps[1]:.1e}: {verdict}")
        if (n, d) == (1000, 2):
            for ours in (CERTAIN, CHOICE, TO_GAP):
                for peer, bar in ((PUBLIC, 100), (CONIC, 1000)):
                    ratio = rows[peer][0] / rows[ours][0]
                    verdict = "met" if ratio >= bar else "MISSED"
                    print(f"    bar: {ours} {bar} times faster than {peer}: {ratio:.0f}, {verdict}")
                print(f"    {ours} against {SLSQP}: {rows[SLSQP][0] / rows[ours][0]:.0f} times")


def settled_bandit(n: int, d: int, value_tol: float | None) -> Bandit:
    """After n rounds, the last of them played: what it carries on is that of a bandit."""
    bandit, played = Bandit(d, S, REPLICATES, K), min(200, n // 2)
    bandit.fill(n - played)
    play(bandit, played, value_tol)
    return bandit


def measure(n: int, d: int) -> dict[str, Row]:
    """Median seconds per round and the largest gaps of every method."""
    bandit, exact = settled_bandit(n, d, None), settled_bandit(n, d, VALUE)
    arms = bandit.arms()
    center = bandit.program.minimum().theta
    batch = bandit.program.program(radius(bandit.t, d, S))
    plain = glb.NegativeLogLikelihood(FAMILY, batch.likelihood.X, batch.likelihood.r)
    batch = glb.SublevelProgram(plain, batch.domain, batch.level)
    answer = glb.support(batch, arms, center=center, tol=1e-10, throw=False)
    everything = partial(glb.support, batch, arms, center=center, tol=STATIC, throw=False)
    alone = one(batch, 0)
    single = partial(glb.support, alone, arms[0], center=center[0], tol=STATIC, throw=False)
    given = peers_problem(batch, arms, 0)
    first, again, conic = clarabel_round(*given, 3 if n < 10000 else 2)
    gaps = certified_gaps(one(batch, 0), answer.upper[0], arms[0], conic)
    rows = {
        **dict.fromkeys(SLSQPS, (0.0, 0.0, 0.0)),  # in the order in which they are shown
        "Clarabel, first solve x K": (first * K, *gaps),
        CONIC: (first + again * (K - 1), *gaps),
    }
    timed: dict[str, list[Row]] = {
        name: [] for name in (*SLSQPS, ALL, ONE, TO_GAP, CERTAIN, CHOICE)
    }
    for index in range(7 if n < 10000 else 3):  # in turn, so that noise hits all alike
        given = peers_problem(batch, arms, index)
        start = last_estimate(given)
        for name in SLSQPS:
            seconds, points = seconds_of(partial(slsqp_round, *given, start, name))
            gaps = certified_gaps(one(batch, index), answer.upper[index], arms[index], points)
            timed[name].append((seconds, *gaps))
        seconds, all_arms = seconds_of(everything)
        timed[ALL].append((seconds / REPLICATES, float(all_arms.gap.max()), 0.0))
        for _ in range(5):
            seconds, all_arms = seconds_of(single)
            timed[ONE].append((seconds, float(all_arms.gap.max()), 0.0))
        timed[TO_GAP].append(play(exact, BLOCK, VALUE)[0])
        whole, choosing = play(bandit, BLOCK, None)
        timed[CERTAIN].append(whole)
        timed[CHOICE].append(choosing)
    for name, taken in timed.items():
        times, values, choices = np.array(taken).T
        rows[name] = (float(np.median(times)), float(values.max()), float(choices.max()))
    return rows


def peers_problem(
    batch: glb.SublevelProgram, arms: Tensor, index: int
) -> tuple[Array, Array, float, Array]:
    """Rows, rewards, level and arms of one replicate."""
    loss = one(batch, index).likelihood
    X, r = (np.ascontiguousarray(t.numpy()) for t in (loss.X, loss.r))
    return X, r, float(batch.level[index]), arms[index].numpy()


def last_estimate(given: tuple[Array, Array, float, Array]) -> Array:
    """The estimate without the last row: where a peer starts."""
    X, r, _, _ = given
    rows = glb.Rows(torch.from_numpy(X[:-1]), torch.from_numpy(r[:-1]))
    return np.asarray(glb.constrained_mle(FAMILY, rows, glb.Ball(X.shape[1], S)).theta.numpy())
