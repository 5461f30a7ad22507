"""How large is beta^2? Every radius against t, for d in {2, 5, 20} and S in {4, 10}.

``python experiments/radii.py [--quick] [--out results/radii] [--seed 0] [--device cpu]``

Bernoulli rewards, arms uniform in the unit ball, |theta*| = S - 1, delta = 0.05; the mean over
replicates that advance in one batch. Writes radii.csv, radii.png and the configuration, and
prints a table. The exact mixture is shown where it can be computed, for d = 2.
"""

import argparse
import csv
import itertools
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.mle import minimize_likelihood
from torchglb.plotting import Curve, radii_plot

DELTA = 0.05
RADII: dict[str, radii.Radius] = {**radii.NAMED, "lipschitz-data": radii.Lipschitz(constant="data")}
TABLE = (
    "covering",
    "lipschitz",
    "lipschitz-data",
    "mean-loss",
    "gaussian-prior",
    "pac-bayes",
    "mixture",
)


def times_up_to(horizon: int, per_decade: int = 6) -> list[int]:
    """0, then growing by equal factors up to the horizon."""
    steps = round(per_decade * math.log10(horizon))
    return sorted({0, *(round(10 ** (i / per_decade)) for i in range(steps + 1)), horizon})


def draw(
    d: int, S: float, n: int, replicates: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Features ``(R, n, d)`` uniform in the unit ball, and Bernoulli rewards ``(R, n)``."""
    X = torch.randn(replicates, n, d, dtype=torch.float64, generator=generator)
    length = torch.rand(replicates, n, 1, dtype=torch.float64, generator=generator) ** (1 / d)
    X = X * length / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    theta = torch.randn(replicates, d, 1, dtype=torch.float64, generator=generator)
    theta = (S - 1) * theta / torch.linalg.vector_norm(theta, dim=-2, keepdim=True)
    return X, glb.Bernoulli().sample((X @ theta)[..., 0], generator)


class Progress:
    """One line on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.perf_counter()

    def step(self, label: str) -> None:
        self.done += 1
        full = round(30 * self.done / self.total)
        spent = time.perf_counter() - self.begin
        bar = "#" * full + "." * (30 - full)
        end = "\n" if self.done == self.total else ""
        line = f"\r[{bar}] {self.done}/{self.total} {spent:5.0f} s  {label:24}"
        print(line, end=end, file=sys.stderr, flush=True)


def curves(
    d: int, S: float, times: list[int], X: Tensor, r: Tensor, progress: Progress
) -> dict[str, Curve]:
    """beta^2 of every radius at every time, the mean over the replicates."""
    family, ball = glb.Bernoulli(), glb.Ball(d, S)
    problem = radii.Problem(family, ball, DELTA, tuple(X.shape[:1]), device=X.device)
    used = {name: radius for name, radius in RADII.items() if name != "mixture" or d == 2}
    states = {name: radius.init(problem) for name, radius in used.items()}
    values: dict[str, list[float]] = {name: [] for name in used}
    start = None
    for before, now in zip([0, *times], times, strict=False):
        loss = glb.NegativeLogLikelihood(family, X[:, :now], r[:, :now])
        fit = minimize_likelihood(loss, ball, start=start)
        start = fit.theta
        known = fit.estimate(hessian=True)
        for name, radius in used.items():
            state = radius.update(problem, states[name], X[:, before:now], r[:, before:now])
            result = radius.evaluate(problem, state, loss, known)
            states[name] = result.state
            values[name].append(float(result.radius.mean()))
        progress.step(f"d = {d}, S = {S:g}, n = {now}")
    return {name: (times, line) for name, line in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="300 observations, 2 replicates")
    parser.add_argument("--out", type=Path, default=Path("results/radii"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    horizon, replicates = (300, 2) if arguments.quick else (10_000, 5)
    times = times_up_to(horizon, per_decade=3 if arguments.quick else 6)
    problems = list(itertools.product((2, 5, 20), (4.0, 10.0)))
    progress = Progress(len(problems) * len(times))
    panels: dict[tuple[int, float], dict[str, Curve]] = {}
    for d, S in problems:
        generator = torch.Generator().manual_seed(arguments.seed)
        X, r = (t.to(arguments.device) for t in draw(d, S, horizon, replicates, generator))
        panels[d, S] = curves(d, S, times, X, r, progress)

    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "radii.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["d", "S", "n", "radius", "beta2"])
        for (d, S), lines in panels.items():
            for name, (when, beta2) in lines.items():
                writer.writerows(
                    [d, S, n, name, f"{b:.6f}"] for n, b in zip(when, beta2, strict=True)
                )
    configuration = {
        "seed": arguments.seed,
        "delta": DELTA,
        "horizon": horizon,
        "replicates": replicates,
        "device": arguments.device,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchglb": glb.__version__,
        },
    }
    (arguments.out / "configuration.json").write_text(json.dumps(configuration, indent=2) + "\n")
    shown = {
        key: {name: (when[1:], beta2[1:]) for name, (when, beta2) in lines.items()}
        for key, lines in panels.items()
    }
    radii_plot(shown).savefig(arguments.out / "radii.png", dpi=150)

    print(f"| d | S | n | {' | '.join(TABLE)} | pac-bayes / lipschitz |")
    print("|" + "---|" * (len(TABLE) + 4))
    for (d, S), lines in panels.items():
        for n in (n for n in times if n in (0, 1, 10, 100, 1000, 10_000, horizon)):
            at = times.index(n)
            row = [f"{lines[name][1][at]:.2f}" if name in lines else "" for name in TABLE]
            share = lines["pac-bayes"][1][at] / lines["lipschitz"][1][at]
            print(f"| {d} | {S:g} | {n} | {' | '.join(row)} | {share:.2f} |")


if __name__ == "__main__":
    main()
