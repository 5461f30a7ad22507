"""Widths of contrast intervals in units of Wald's 95%, beside the joint sets; and peeking.

Prints, for rows drawn at random and rows that an optimistic bandit chose, the half width of one
coefficient's interval with its parts; and draws docs/contrast_widths.png (widths over n) and
docs/contrast_peeking.png (who has missed, over time). Wald's interval is for a fixed sample: under
peeking it misses far more than 5%. `contrast_speed.py` has the time per row.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

import torchglb as glb
from torchglb import ContrastSequence

DELTA, S = 0.05, 4.0
OUTPUT = Path(__file__).resolve().parent.parent / "docs"
#: family, design, d, n and the bar that the width has to keep
CASES = (
    ("gaussian", "random", 20, 10_000, 2.4),
    ("bernoulli", "random", 5, 10_000, 2.4),
    ("bernoulli", "bandit", 5, 10_000, 2.6),
    ("bernoulli", "random", 20, 10_000, 3.4),
    ("bernoulli", "bandit", 20, 10_000, 4.3),
    ("bernoulli", "random", 20, 40_000, 2.3),
    ("bernoulli", "bandit", 20, 40_000, 2.7),
)
LARGE = ("bernoulli", "random", 20, 1_000_000, 2.1)
QUICK = (("gaussian", "random", 3, 300, math.inf), ("bernoulli", "bandit", 3, 300, math.inf))
FAMILIES = {"gaussian": glb.Gaussian(1.0), "bernoulli": glb.Bernoulli()}


def in_ball(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
    """Uniform points of the unit ball."""
    points = rng.normal(size=(count, d))
    return points * (
        rng.uniform(size=(count, 1)) ** (1 / d) / np.linalg.norm(points, axis=1, keepdims=True)
    )


def reward(family: str, rng: np.random.Generator, z: np.ndarray | float) -> np.ndarray:
    """Rewards at z."""
    if family == "gaussian":
        return np.asarray(z + rng.normal(size=np.shape(z)))
    return np.asarray(rng.uniform(size=np.shape(z)) < 1.0 / (1.0 + np.exp(-z)), dtype=float)


def collect(
    family: str, design: str, d: int, n: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, rewards and theta*; the bandit chooses among 20 fresh arms by an optimistic index."""
    rng = np.random.default_rng(seed)
    star = np.full(d, (S - 1) / math.sqrt(d))
    if design == "random":
        X = in_ball(rng, n, d)
        return X, reward(family, rng, X @ star), star
    X, r = np.zeros((n, d)), np.zeros(n)
    inverse, guess = np.eye(d), np.zeros(d)
    for s in range(n):
        arms = in_ball(rng, 20, d)
        width = np.sqrt(np.maximum(((arms @ inverse) * arms).sum(1), 0.0))
        x = X[s] = arms[np.argmax(arms @ guess + 1.5 * width)]
        r[s] = reward(family, rng, float(x @ star))
        mean = x @ guess if family == "gaussian" else 1.0 / (1.0 + math.exp(-(x @ guess)))
        bend = 1.0 if family == "gaussian" else max(mean * (1.0 - mean), 0.02)
        step = inverse @ x
        inverse -= np.outer(step, step) * bend / (1.0 + bend * (x @ step))
        guess += inverse @ x * (r[s] - mean)
        guess *= min(1.0, S / max(float(np.linalg.norm(guess)), 1e-9))
    return X, r, star


def wald(family: glb.GLMFamily, X: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """The first coefficient's estimate and 1.96 standard errors."""
    fit = glb.constrained_mle(family, glb.Rows(X, r), glb.Ball(X.shape[1], 10.0 * S))
    covariance = torch.linalg.pinv(fit.hessian)
    return float(fit.theta[0]), 1.96 * math.sqrt(float(covariance[0, 0]))


def measure(
    family: glb.GLMFamily, X: np.ndarray, r: np.ndarray, joint: bool = True
) -> dict[str, float]:
    """Half widths of the first coefficient's intervals in units of Wald's, and their parts."""
    x, rewards = torch.from_numpy(X), torch.from_numpy(r)
    d = X.shape[1]
    first = torch.eye(d, dtype=torch.float64)[:1]
    sequence = ContrastSequence(family, glb.Ball(d, S), first, DELTA)
    sequence.update(x, rewards)
    start = time.perf_counter()
    lower, upper = sequence.current()
    seconds = time.perf_counter() - start
    _, unit = wald(family, x, rewards)
    found = {"contrast": 0.5 * float(upper - lower) / unit}
    found |= {name: float(v) / unit for name, v in sequence.parts()._asdict().items()}
    found["centred"] = found.pop("joint")
    if joint:
        for label, radius in (("uniform", "pac-bayes"), ("paper", "lipschitz")):
            other = glb.ConfidenceSequence(family, glb.Ball(d, S), DELTA, radius)
            other.update(x, rewards)
            found[label] = 0.5 * float(other.current().interval(first).width) / unit
    return found | {"seconds": seconds, "lower": float(lower), "upper": float(upper)}


def widths(cases: tuple[tuple[str, str, int, int, float], ...]) -> bool:
    """One line per case; whether all keep their bars."""
    print("half width of one coefficient in units of Wald's 95% (S = 4, delta = 0.05)")
    head = ("contrast", "bar", "slab", "leak", "bend", "centred", "uniform", "paper")
    print(f"{'':34}" + "".join(f"{name:>9}" for name in head))
    good = True
    for name, design, d, n, bar in cases:
        X, r, star = collect(name, design, d, n, seed=0)
        found = measure(FAMILIES[name], X, r, joint=n <= 100_000)
        covers = found["lower"] <= star[0] <= found["upper"]
        good = good and found["contrast"] <= bar
        found["bar"] = bar
        numbers = "".join(f"{found[k]:9.2f}" if k in found else f"{'-':>9}" for k in head)
        place = f"{name} {design} d={d} n={n}"
        print(
            f"{place:34}{numbers}   {found['seconds']:.2f} s per look"
            + ("" if covers else ", theta* outside")
        )
    return good


def grow(quick: bool) -> dict[str, tuple[list[int], list[float]]]:
    """Widths over n: Bernoulli rows of a bandit at d = 20 (3 if quick)."""
    d, times = (3, [100, 300]) if quick else (20, [1000, 2000, 4000, 10_000, 20_000, 40_000])
    X, r, _ = collect("bernoulli", "bandit", d, times[-1], seed=2)
    names = ("contrast", "centred", "uniform", "paper")
    curves: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in names}
    for n in times:
        found = measure(FAMILIES["bernoulli"], X[:n], r[:n])
        for name in names:
            if math.isfinite(found[name]):
                curves[name][0].append(n)
                curves[name][1].append(found[name])
    return curves


def peek(quick: bool) -> tuple[list[int], list[float], list[float]]:
    """The share of runs whose interval has missed by time n: Wald's, and ours."""
    runs, d = (4, 2) if quick else (100, 3)
    times = (
        [40, 80]
        if quick
        else [30, 40, 55, 75, 100, 130, 180, 240, 320, 430, 570, 750, 1000, 1400, 2000]
    )
    family = FAMILIES["bernoulli"]
    data = [collect("bernoulli", "bandit", d, times[-1], seed=100 + k) for k in range(runs)]
    X = torch.from_numpy(np.stack([rows for rows, _, _ in data]))
    r = torch.from_numpy(np.stack([rewards for _, rewards, _ in data]))
    star = float(data[0][2][0])
    first = torch.eye(d, dtype=torch.float64)[:1]
    sequence = ContrastSequence(family, glb.Ball(d, S), first, DELTA, batch_shape=(runs,))
    missed = {"wald": torch.zeros(runs, dtype=torch.bool), "ours": torch.zeros(runs).bool()}
    shares: dict[str, list[float]] = {"wald": [], "ours": []}
    start = 0
    for n in times:
        sequence.update(X[:, start:n], r[:, start:n])
        lower, upper = (end[:, 0] for end in sequence.current())
        missed["ours"] |= (lower > star) | (upper < star)
        for k in range(runs):
            center, half = wald(family, X[k, :n], r[k, :n])
            missed["wald"][k] |= abs(center - star) > half
        for name, who in missed.items():
            shares[name].append(float(who.double().mean()))
        start = n
    return times, shares["wald"], shares["ours"]


def draw(
    curves: dict[str, tuple[list[int], list[float]]],
    peeking: tuple[list[int], list[float], list[float]],
    out: Path,
) -> None:
    """The two pictures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = {
        "paper": ("joint set, the paper's radius", "#7f7f7f", ":"),
        "uniform": ("joint set, uniform prior", "#1fa8d8", "--"),
        "centred": ("joint set, centred prior", "#0b5563", "-."),
        "contrast": ("contrast", "#d7191c", "-"),
    }
    figure, axis = plt.subplots(figsize=(5.2, 3.4), dpi=110, layout="constrained")
    for name, (label, color, style) in names.items():
        axis.plot(*curves[name], color=color, linestyle=style, label=label, marker=".")
    axis.axhline(1.0, color="black", linewidth=0.8, label="Wald's 95%, for one fixed n")
    axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="half width / Wald's")
    axis.set_yticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0.0, 0.06))  # above Wald's line
    axis.set_title("One coefficient of 20, rows of a logistic bandit", fontsize=9)
    figure.savefig(out / "contrast_widths.png")
    times, theirs, ours = peeking
    figure, axis = plt.subplots(figsize=(5.2, 3.0), dpi=110, layout="constrained")
    axis.plot(times, theirs, color="#7f7f7f", label="Wald's 95%", marker=".")
    axis.plot(times, ours, color="#d7191c", label="contrast sequence", marker=".")
    axis.axhline(DELTA, color="black", linewidth=0.8, linestyle=":", label="delta = 0.05")
    axis.set(
        xscale="log", xlabel="rows", ylabel="runs that have missed by then", ylim=(-0.01, None)
    )
    axis.legend(fontsize=8)
    figure.savefig(out / "contrast_peeking.png")
    plt.close("all")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems, for a test")
    parser.add_argument("--large", action="store_true", help="also a million rows")
    parser.add_argument("--no-pictures", action="store_true", help="only the tables")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    good = widths(QUICK if options.quick else CASES + ((LARGE,) if options.large else ()))
    if not options.no_pictures:
        options.out.mkdir(parents=True, exist_ok=True)
        peeking = peek(options.quick)
        print(
            f"missed by n = {peeking[0][-1]}: Wald {peeking[1][-1]:.2f}, ours {peeking[2][-1]:.2f}"
        )
        draw(grow(options.quick), peeking, options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
