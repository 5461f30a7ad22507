"""Duels: regret of both items, and how many pairs until the best item is certified.

    python experiments/duels.py [--quick] [--out results/duels]

Every policy meets the same items and the same luck. `laplace-pairs` is the usual heuristic (the
largest uncertainty in the inverse Hessian); its confidence sets are the same exact ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchglb.preferences import PAIR_POLICIES, DuelResult, compare_duels
from torchglb.report.tables import aligned


def mean_and_error(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}"


def row(name: str, found: DuelResult) -> list[str]:
    horizon = found.regret.shape[-1]
    done = found.certified <= horizon
    share = f"{done.sum()}/{len(done)}"
    wrong = f"{int((~found.right).sum())}/{len(done)}"
    missed = f"{int(found.missed.sum())}/{len(done)}"
    pairs = mean_and_error(np.minimum(found.certified, horizon).astype(float))
    return [name, mean_and_error(found.regret[:, -1]), pairs, share, wrong, missed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--items", type=int, default=10)
    parser.add_argument("--dim", type=int, default=3)
    parser.add_argument("--S", type=float, default=4.0)
    parser.add_argument("--replicates", type=int, default=20)
    parser.add_argument("--horizon", type=int, default=1000)
    parser.add_argument("--policies", default=",".join(PAIR_POLICIES))
    parser.add_argument("--out", default="results/duels")
    given = parser.parse_args(arguments)
    replicates, horizon = (3, 60) if given.quick else (given.replicates, given.horizon)
    found = compare_duels(
        given.policies.split(","),
        items=given.items,
        dim=given.dim,
        S=given.S,
        replicates=replicates,
        horizon=horizon,
        look_every=20,
    )
    heads = ["policy", "regret", f"pairs until certain (at most {horizon})", "certified", "wrong",
             "theta* missed"]  # fmt: skip
    print("\n".join(aligned([heads, *(row(name, result) for name, result in found.items())])))
    from torchglb.plotting import duel_plot

    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    duel_plot({name: result.regret for name, result in found.items()}).savefig(
        out / "duels.png", dpi=150
    )
    print(out / "duels.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
