"""What a radius costs: time per update and per evaluation, and passes over the history.

Bernoulli data, arms drawn at random, S = 4. At each n the radius has seen n rows and has been
evaluated once; then one row at a time is added and the radius evaluated, ten times over. "update"
carries one row forward, "evaluate" gives the level after it, both for the whole batch; "passes" is
what ``Evaluation.passes`` says, per evaluation; the last column compares an evaluation with a bare
pass: loss, gradient and Hessian at one point. The estimate is given: every policy has it anyway.
Times are those of the processor, of one thread, so that a busy machine does not count.

Then whole rounds (``select`` and ``update``) of ofuglb-pb beside those of ofuglb, which differ in
the radius alone: medians, their ratio, and what of a round of ofuglb-pb is the radius's own.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.policies import make

S = 4.0
ROUNDS = 10
RADII = {
    **radii.NAMED,
    "lipschitz-data": radii.Lipschitz(constant="data"),
}
#: entries of the history times evaluations of the mixture that are still worth waiting for
MIXTURE_LIMIT = 2_000


def draw(batch: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * n + d)
    X = torch.randn((batch, n, d), generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    return X, glb.Bernoulli().sample(2.0 * X[..., 0], generator)


def median_time(action: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


Line = tuple[float, float, float, float]


def measure(batch: int, n: int, d: int) -> dict[str, Line]:
    """Seconds per update and per evaluation, passes, and evaluations in bare passes."""
    family, ball = glb.Bernoulli(), glb.Ball(d, S)
    X, r = draw(batch, n + ROUNDS, d)
    fits: dict[int, tuple[glb.NegativeLogLikelihood, glb.MLEResult]] = {}
    for k in range(n, n + ROUNDS + 1):
        start = fits[k - 1][1].theta if k > n else None
        rows = glb.Rows(X[:, :k], r[:, :k])
        fit = glb.constrained_mle(family, rows, ball, start=start, validate=False)
        fits[k] = (glb.NegativeLogLikelihood(family, *rows), fit)
    loss, fit = fits[n]
    bare = median_time(lambda: loss.expand(fit.theta), 5)
    problem = radii.Problem(family, ball, 0.05, (batch,))
    lines = {}
    for name, radius in RADII.items():
        if name == "mixture" and (d > 3 or batch * n > MIXTURE_LIMIT):
            continue
        state = radius.update(problem, radius.init(problem), X[:, :n], r[:, :n])
        state = radius.evaluate(problem, state, loss, fit.estimate()).state
        updates, evaluations, passes = [], [], 0.0
        rounds = 2 if name == "mixture" else ROUNDS
        for k in range(n, n + rounds):
            began = time.process_time()
            state = radius.update(problem, state, X[:, k : k + 1], r[:, k : k + 1])
            updates.append(time.process_time() - began)
            likelihood, at = fits[k + 1]
            known = at.estimate(hessian=True)
            began = time.process_time()
            found = radius.evaluate(problem, state, likelihood, known)
            evaluations.append(time.process_time() - began)
            state, passes = found.state, passes + found.passes / rounds
        update, evaluate = statistics.median(updates), statistics.mean(evaluations)
        lines[name] = (update, evaluate, passes, evaluate / bare)
    return lines


def run(quick: bool) -> None:
    sizes = (100, 1000) if quick else (100, 1000, 10000)
    dimensions = (2, 5) if quick else (2, 5, 20)
    batches = (1, 20) if quick else (1, 200)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for d in dimensions:
            for batch in batches:
                table = {n: measure(batch, n, d) for n in sizes if batch * n * d <= 5_000_000}
                show(d, batch, table)
        print("rounds of ofuglb and ofuglb-pb")
        for d in (2, 5, 10, 20):
            for batch in (1, 40):
                compare_rounds(batch, d, 200, 20, 30 if quick else 200)
        compare_rounds(1, 50, 500 if quick else 2000, 100, 30 if quick else 100)
    finally:
        torch.set_num_threads(threads)


def compare_rounds(B: int, d: int, n: int, K: int, rounds: int) -> None:
    """Prints the median round of both policies after n rows, in alternation."""
    family, ball = glb.Bernoulli(), glb.Ball(d, S)
    X, r = draw(B, n, d)
    generator = torch.Generator().manual_seed(d)
    names = ("ofuglb", "ofuglb-pb")
    policies = {name: make(name, family=family, domain=ball, batch_shape=(B,)) for name in names}
    for policy in policies.values():
        policy.update(X, r)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        arms = torch.randn((B, K, d), generator=generator, dtype=torch.float64)
        arms = torch.nn.functional.normalize(arms, dim=-1)
        for name, policy in policies.items():
            began = time.process_time()
            index = policy.select(arms)
            chosen = time.process_time() - began
            x = arms[torch.arange(B), index]
            reward = family.sample(2.0 * x[:, 0], generator)
            began = time.process_time()
            policy.update(x, reward)
            taken[name].append(chosen + time.process_time() - began)
    paper, ours = (1e3 * statistics.median(taken[name][rounds // 5 :]) for name in names)
    own = 1e3 * radius_share(B, d, X, r, rounds)
    line = f"  d = {d:2}, batch {B:2}, n = {n:4}, K = {K:3}: {paper:8.3f} {ours:8.3f} ms"
    share = f"the radius {own:6.3f} ms, {own / paper:5.2f} of ofuglb"
    print(f"{line}, ratio {ours / paper:5.2f}; {share}")


def radius_share(B: int, d: int, X: Tensor, r: Tensor, rounds: int) -> float:
    """Seconds per round that PAC-Bayes takes by itself, searches included: a mean."""
    radius, family = radii.by_name("pac-bayes"), glb.Bernoulli()
    problem = radii.Problem(family, glb.Ball(d, S), 0.05, (B,))
    n = X.shape[1]
    start = n - min(rounds, n // 2)
    state, spent = radius.update(problem, radius.init(problem), X[:, :start], r[:, :start]), 0.0
    for k in range(start, n):
        rows = glb.NegativeLogLikelihood(family, X[:, :k], r[:, :k])
        began = time.process_time()
        found = radius.levels(problem, state, lambda rows=rows: rows)  # type: ignore[misc]
        assert found is not None
        state = radius.update(problem, found[1], X[:, k : k + 1], r[:, k : k + 1])
        spent += (time.process_time() - began) * (k > start)  # the first search is a cold one
    return spent / max(n - start - 1, 1)


def show(d: int, batch: int, table: dict[int, dict[str, Line]]) -> None:
    print(f"d = {d}, batch {batch}")
    header = f"  {'radius':15} {'n':>6} {'update ms':>10} {'evaluate ms':>12}"
    print(f"{header} {'passes':>7} {'in bare passes':>15}")
    sizes = sorted(table)
    for name in table[sizes[0]]:
        for n in sizes:
            if name not in table[n]:
                continue
            update, evaluate, passes, ratio = table[n][name]
            line = f"  {name:15} {n:6} {1e3 * update:10.3f} {1e3 * evaluate:12.3f}"
            print(f"{line} {passes:7.2f} {ratio:15.1f}")
        seen = [n for n in sizes if name in table[n]]
        if len(seen) > 1:
            low, high = (sum(table[n][name][:2]) for n in (seen[0], seen[-1]))
            power = math.log(high / low) / math.log(seen[-1] / seen[0])
            print(f"  {name:15} grows like n^{power:.2f}")
