"""A covariate-adjusted A/B/n test under continuous monitoring; draws docs/peeking.png.

Three versions of a page, visitors who differ in age and device. The analyst looks after every
block of visitors and stops as soon as an interval excludes 0. First one test in full, then many in
which the versions do NOT differ: how often a difference is "found" by looking with the interval
that is valid at all times, and with the one for a fixed sample.

    python experiments/ab_test.py            # some minutes; writes docs/peeking.png
    python experiments/ab_test.py --quick
    python experiments/ab_test.py --real     # a real randomised trial (statsmodels' randhie)
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import torchglb as glb

FORMULA = "bought ~ age + C(device) + C(version)"
CONTRASTS = ("C(version)[B] - C(version)[A]", "C(version)[C] - C(version)[A]")
SCALER = glb.Scaler(
    ranges={"age": (18, 90), "device": ["desktop", "phone"], "version": ["A", "B", "C"]}
)
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "peeking.png"


def visitors(n: int, effects: tuple[float, float], seed: int) -> dict[str, np.ndarray]:
    """Visitors in the order in which they came; ``effects`` of B and C over A, in log-odds."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(18, 90, n)
    phone, version = rng.integers(0, 2, n), rng.integers(0, 3, n)
    z = -1.5 + 0.015 * age - 0.4 * phone + np.array([0.0, *effects])[version]
    return {
        "age": age,
        "device": np.array(["desktop", "phone"])[phone],
        "version": np.array(["A", "B", "C"])[version],
        "bought": (rng.random(n) < 1.0 / (1.0 + np.exp(-z))).astype(int),
    }


def false_alarms(runs: int, n: int, every: int) -> tuple[float, float]:
    """How often a difference between equal versions is found: anytime, and fixed-sample."""
    found = np.zeros(2)
    for seed in range(runs):
        data = visitors(n, (0.0, 0.0), seed=10_000 + seed)
        fit = glb.glm(FORMULA, data, family="bernoulli", delta=0.05, scaler=SCALER)
        seen = fit.running(CONTRASTS[0], every=every)
        found += [
            bool(((seen.lower > 0) | (seen.upper < 0)).any()),
            bool(((seen.fixed_lower > 0) | (seen.fixed_upper < 0)).any()),
        ]
    return float(found[0] / runs), float(found[1] / runs)


def real() -> int:
    """The RAND Health Insurance Experiment: does coinsurance keep people from seeing a doctor?"""
    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data
    data["visited"] = (data["mdvis"] > 0).astype(int)
    fit = glb.glm(
        "visited ~ lncoins + lpi + disea + C(idp)",
        data,
        family="bernoulli",
        scaler=glb.Scaler(burn_in=500, ranges={"idp": [0, 1]}),
        intervals="both",
    )
    print("Rows of one person depend on each other, so the promise is that of the model only.\n")
    print(fit.summary())
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small version of it")
    parser.add_argument("--real", action="store_true", help="real data")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    if options.real:
        return real()
    n, runs = (600, 4) if options.quick else (6000, 60)
    data = visitors(n, (0.5, 0.0), seed=1)
    fit = glb.glm(FORMULA, data, family="bernoulli", delta=0.05, scaler=SCALER, intervals="both")
    print(fit.summary())
    print()
    print(fit.contrast(*CONTRASTS))
    seen = fit.running(*CONTRASTS, every=n // 30)
    for at, name in enumerate(seen.names):
        first = np.flatnonzero((seen.lower[:, at] > 0) | (seen.upper[:, at] < 0))
        when = f"after {seen.n[first[0]]} visitors" if len(first) else "not yet"
        print(f"{name}: the interval excludes 0 {when}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    fit.plot_running(seen).savefig(options.out, dpi=130)
    print(options.out)
    looks = 20
    anytime, fixed = false_alarms(runs, n // 3, max(1, n // 3 // looks))
    print(
        f"equal versions, {runs} tests of {looks} looks each: a difference was found in"
        f" {anytime:.0%} with intervals that hold at all times, in {fixed:.0%} with those for a"
        " fixed sample (both at 5%)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
