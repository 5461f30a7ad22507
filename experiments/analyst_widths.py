"""The price of peeking: anytime-valid intervals of a fit's coefficients over Wald's.

    python experiments/analyst_widths.py [--quick]

A logistic regression with an intercept and three columns, no S, scales from 200 rows of burn-in.
"""

from __future__ import annotations

import argparse

import numpy as np
import statsmodels.api as sm

import torchglb as glb

COLUMNS = ("a", "b", "c")
BURN_IN = 200


def ratios(n: int) -> list[float]:
    """Of the intercept and the three coefficients, after n rows of evidence."""
    rng = np.random.default_rng(0)
    rows = n + BURN_IN
    data = {name: rng.uniform(-1.0, 1.0, rows) for name in COLUMNS}
    log_odds = 0.5 * data["a"] - 0.8 * data["b"] + 0.2
    data["y"] = (rng.uniform(size=rows) < 1.0 / (1.0 + np.exp(-log_odds))).astype(float)
    scaler = glb.Scaler(burn_in=BURN_IN)
    fit = glb.glm("y ~ a + b + c", data, family="bernoulli", delta=0.05, scaler=scaler)
    table = fit.summary().to_dict()["rows"]
    design = sm.add_constant(np.column_stack([data[name][BURN_IN:] for name in COLUMNS]))
    wald = sm.GLM(data["y"][BURN_IN:], design, family=sm.families.Binomial()).fit().conf_int()
    mine = [row["upper"] - row["lower"] for row in table]
    return [float(a / (high - low)) for a, (low, high) in zip(mine, wald, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="n = 1000 only")
    sizes = (1000,) if parser.parse_args().quick else (1000, 10_000, 100_000)
    print(f"{'n':>8} {'mean':>6}  intercept, a, b, c: width / Wald's 95%")
    for n in sizes:
        found = ratios(n)
        print(f"{n:>8} {np.mean(found):>6.2f}  " + ", ".join(f"{ratio:.2f}" for ratio in found))


if __name__ == "__main__":
    main()
