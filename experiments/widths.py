"""How wide are intervals that may be looked at at any time?

``python experiments/widths.py [--quick] [--out results/widths] [--seed 0]``

Bernoulli rewards, S = 4, arms uniform in the unit ball, |theta*| = S - 1, delta = 0.05; the mean
width of the intervals of the coordinates, over some replicates. Beside the likelihood-ratio sets
(uniform prior, centred, and ``"auto"``) stand two that are not for use: the exact mixture over the
uniform prior in more than three dimensions, whose integral is sampled here and has no certificate,
and the profile-likelihood interval of a fixed sample (chi^2 with one degree of freedom, and with d
for all directions at once), which is not valid for data that are looked at more than once. Writes
widths.csv, widths.png and table.md, and says whether the bars of the centred radius are met.
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import torchglb as glb
from torchglb.inference import profile_interval
from torchglb.plotting import Curve, widths_plot

DELTA, S = 0.05, 4.0
DIMENSIONS = (2, 5, 20)
TIMES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000)
#: the certified mixture costs thousands of passes: up to so many rows, in up to three dimensions
CUBATURE = 10_000
#: draws for the others, and the largest standard error of the logarithm that is good enough
DRAWS, ENOUGH = 4000, 0.05
#: at n = 10^4, the largest share of the uniform prior's width that the centred radius may have
BARS = {2: 0.92, 5: 0.81, 20: 0.74}
#: at most so much wider than pac-bayes up to n = 200
EARLY = 1.05
AXES = 4  # so many coordinates are asked for
COLUMNS = ("mixture", "pac-bayes", "centred", "auto", "chi2-joint", "chi2")


def draw(d: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features ``(n, d)`` uniform in the unit ball, and Bernoulli rewards ``(n,)``."""
    X = torch.randn(n, d, dtype=torch.float64, generator=generator)
    length = torch.rand(n, 1, dtype=torch.float64, generator=generator) ** (1 / d)
    X = X * length / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    theta = torch.randn(d, dtype=torch.float64, generator=generator)
    theta = (S - 1) * theta / torch.linalg.vector_norm(theta)
    return X, glb.Bernoulli().sample(X @ theta, generator)


def sampled_level(likelihood: glb.NegativeLogLikelihood, theta: Tensor) -> float | None:
    """``log(1/delta) - log E exp(-L)`` over the uniform prior, by importance sampling.

    Draws are from the normal law at theta whose precision is that of L and of the ball, inflated by
    a fifth. None where they do not tell: the standard error of the logarithm is above ENOUGH.
    """
    d, generator = likelihood.dim, torch.Generator().manual_seed(0)
    eye = torch.eye(d, dtype=torch.float64)
    precision = (likelihood.hessian(theta) + (d + 2) / S**2 * eye) / 1.2
    factor = torch.linalg.cholesky(precision)
    u = torch.randn(DRAWS, d, dtype=torch.float64, generator=generator)
    points = theta + torch.linalg.solve_triangular(factor.mT, u.mT, upper=True).mT
    log_density = -0.5 * u.square().sum(-1) + factor.diagonal().log().sum()
    log_density -= 0.5 * d * math.log(2 * math.pi)
    log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1) + d * math.log(S)
    loss = torch.cat([likelihood(part) for part in points.split(50)])
    logs = torch.where(points.norm(dim=-1) <= S, -loss - log_density - log_ball, -math.inf)
    scaled = (logs - logs.max()).exp()
    if not float(scaled.std() / scaled.mean()) <= ENOUGH * DRAWS**0.5:  # or nothing in the ball
        return None
    return float(-math.log(DELTA) - logs.max() - scaled.mean().log())


def sampled_width(X: Tensor, r: Tensor, arms: Tensor) -> float | None:
    """The mean width of the intervals of the exact mixture, as far as it is known."""
    family, ball = glb.Bernoulli(), glb.Ball(X.shape[-1], S)
    likelihood = glb.NegativeLogLikelihood(family, X, r)
    theta = glb.constrained_mle(family, glb.Rows(X, r), ball).theta
    level = sampled_level(likelihood, theta)
    if level is None:
        return None
    program = glb.SublevelProgram(likelihood, ball, torch.tensor(level, dtype=torch.float64))
    ends = glb.support(program, torch.cat([arms, -arms]), center=theta).upper
    return float(ends.sum() / len(arms))


def widths(X: Tensor, r: Tensor) -> dict[str, float]:
    """The mean width of every kind of interval."""
    (n, d), family = X.shape, glb.Bernoulli()
    ball, arms = glb.Ball(d, S), torch.eye(d, dtype=torch.float64)[:AXES]
    found: dict[str, float] = {}
    for name in ("mixture", "pac-bayes", "centred", "auto"):
        if name == "mixture" and (d > 3 or n > CUBATURE):
            sampled = sampled_width(X, r, arms)
            found |= {} if sampled is None else {name: sampled}
            continue
        sequence = glb.ConfidenceSequence(family, ball, DELTA, name)
        sequence.update(X, r)
        found[name] = float(sequence.current().interval(arms).width.mean())
    for name, joint in (("chi2-joint", True), ("chi2", False)):
        rows = glb.Rows(X, r)
        interval = profile_interval(family, rows, arms, domain=ball, alpha=DELTA, joint=joint)
        found[name] = float((interval.upper - interval.lower).mean())
    return found


def measure(
    dimensions: tuple[int, ...], times: tuple[int, ...], replicates: int, seed: int
) -> dict[tuple[int, int], dict[str, float]]:
    """Mean widths by ``(d, n)``."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    began = time.perf_counter()
    for d in dimensions:
        for n in times:
            generator = torch.Generator().manual_seed(1000 * seed + d)
            each = [widths(*draw(d, n, generator)) for _ in range(replicates)]
            names = [name for name in COLUMNS if all(name in one for one in each)]
            found[d, n] = {name: sum(one[name] for one in each) / replicates for name in names}
            spent = time.perf_counter() - began
            print(f"\rd = {d}, n = {n}, {spent:.0f} s   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def floor_of(widths: dict[str, float]) -> float:
    """The width of the uniform prior: exact where that is known."""
    return widths.get("mixture", widths["pac-bayes"])


def table(found: dict[tuple[int, int], dict[str, float]]) -> str:
    lines = [
        f"| d | n | {' | '.join(COLUMNS)} | centred / uniform | centred / chi2 |",
        "|" + "---|" * (len(COLUMNS) + 4),
    ]
    for (d, n), each in found.items():
        cells = [f"{each[name]:.4f}" if name in each else "" for name in COLUMNS]
        shares = (each["centred"] / floor_of(each), each["centred"] / each["chi2"])
        lines.append(f"| {d} | {n} | {' | '.join(cells)} | {shares[0]:.3f} | {shares[1]:.2f} |")
    return "\n".join(lines) + "\n"


def verdicts(found: dict[tuple[int, int], dict[str, float]]) -> list[tuple[str, bool]]:
    """What was asked of the centred radius, and whether it is so."""
    answers = []
    for d, bar in BARS.items():
        if (d, 10_000) in found:
            share = found[d, 10_000]["centred"] / floor_of(found[d, 10_000])
            answers.append((f"d = {d}, n = 10000: {share:.3f} <= {bar}", share <= bar))
            if (d, 100_000) in found:
                later = found[d, 100_000]["centred"] / floor_of(found[d, 100_000])
                answers.append((f"d = {d}, n = 100000: {later:.3f} < {share:.3f}", later < share))
    for name in ("centred", "auto"):
        shares = {key: each[name] / each["pac-bayes"] for key, each in found.items()}
        for text, times in (("n <= 200", range(201)), ("n > 200", range(201, 10**9))):
            part = {key: share for key, share in shares.items() if key[1] in times}
            if part:
                worst, bar = max(part, key=lambda key: part[key]), EARLY if 200 in times else 1.0
                place = f"d = {worst[0]}, n = {worst[1]}"
                sentence = f"{name}, {text}: at most {part[worst]:.3f} of pac-bayes ({place})"
                answers.append((f"{sentence} <= {bar}", part[worst] <= bar))
    return answers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="d = 2 and 5, up to 1000 rows, once")
    parser.add_argument("--replicates", type=int, help="3, or 1 with --quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/widths"))
    options = parser.parse_args(arguments)
    replicates = options.replicates or (1 if options.quick else 3)
    if replicates < 1:
        parser.error("--replicates must be at least 1")
    dimensions = (2, 5) if options.quick else DIMENSIONS
    times = tuple(n for n in TIMES if n in (10, 100, 1000)) if options.quick else TIMES
    found = measure(dimensions, times, replicates, options.seed)

    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "widths.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["d", "n", "interval", "width"])
        for (d, n), each in found.items():
            writer.writerows([d, n, name, f"{width:.6f}"] for name, width in each.items())
    text = table(found)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    panels: dict[int, dict[str, Curve]] = {}
    for (d, n), each in found.items():
        for name, width in each.items():
            x, y = panels.setdefault(d, {}).setdefault(name, ([], []))
            x.append(n)  # type: ignore[attr-defined]
            y.append(width)  # type: ignore[attr-defined]
    widths_plot(panels).savefig(options.out / "widths.png", dpi=110)
    print(text)
    answers = verdicts(found)
    for sentence, holds in answers:
        print(f"{'met    ' if holds else 'NOT MET'}  {sentence}")
    return 0 if all(holds for _, holds in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
