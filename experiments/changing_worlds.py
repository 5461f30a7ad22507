"""A world that changes, and a baseline that must not be lost.

    python experiments/changing_worlds.py [--quick] [--out results/changing]

First: theta* jumps in the middle (and, in a second world, turns slowly); regret of OFUGLB-PB that
remembers everything beside OFUGLB that forgets. Second: a world that does not change, to show what
forgetting costs. Third: conservative play, its constraint and its price.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.decisions import Discount, Window
from torchglb.report.tables import aligned

KINDS: dict[str, Discount | Window] = {
    "discount 0.98": Discount(0.98),
    "discount 0.995": Discount(0.995),
    "window 200": Window(200),
}


def mean_and_error(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}"


@torch.no_grad()
def regret(policy: Any, world: Any, horizon: int) -> np.ndarray:
    """Cumulated regret ``(R, T)``."""
    rows, found = torch.arange(len(world.S)), []
    for t in range(horizon):
        arms = world.arms(t)
        index = policy.select(arms)
        x = arms[rows, index]
        policy.update(x, world.rewards(t, x, index))
        found.append(world.regret(t, x, index))
    return torch.stack(found, -1).cumsum(-1).numpy()


def drifting(replicates: int, horizon: int) -> dict[str, dict[str, np.ndarray]]:
    worlds: dict[str, dict[str, Any]] = {
        "one jump": {"period": horizon // 2},
        "turning": {"period": 0, "speed": 2.0 * np.pi / horizon},
        "at rest": {"period": 0},
    }
    family = glb.Bernoulli()
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, options in worlds.items():
        found[name] = {}
        for label in ("remembers", *KINDS):
            kind = KINDS.get(label)
            world = environments.make(
                "drifting", family=family, S=4.0, replicates=replicates, arms=10, dim=2, seed=1,
                shared_arms=False, theta="random", **options,
            )  # fmt: skip
            settings: dict[str, Any] = {
                "family": family,
                "domain": world.domain,
                "batch_shape": (replicates,),
            }
            policy = policies.make("ofuglb-pb", forgetting=kind, **settings)
            found[name][label] = regret(policy, world, horizon)
            print(name, label, mean_and_error(found[name][label][:, -1]), file=sys.stderr)
    return found


@torch.no_grad()
def conservative(runs: int, horizon: int, alpha: float | None) -> tuple[np.ndarray, int]:
    """Final regret, and in how many runs the constraint (at 0.1) was ever broken."""
    family = glb.Bernoulli()
    world = environments.make(
        "fixed", family=family, S=3.0, replicates=runs, seed=2, arms=6, shared_arms=False,
        theta="random",
    )  # fmt: skip
    assert world.theta_star is not None
    x = world.arms(0)
    means = torch.sigmoid((x * world.theta_star[:, None, :]).sum(-1))
    baseline = means.argsort(-1)[:, -2]  # the second best
    share = 0.9 if alpha is None else 1.0 - alpha
    policy = policies.make(
        "ofuglb-pb", family=family, domain=world.domain, batch_shape=(runs,), aggregate=True,
        conservative=None if alpha is None else (baseline, alpha),
    )  # fmt: skip
    mean = means.gather(-1, baseline[:, None])[:, 0]
    surplus, broken = torch.zeros(runs, dtype=torch.float64), torch.zeros(runs, dtype=torch.bool)
    total = torch.zeros(runs, dtype=torch.float64)
    for t in range(horizon):
        index = policy.select(x)
        policy.update(x[torch.arange(runs), index], world.rewards(t, x, index))
        surplus += means.gather(-1, index[:, None])[:, 0] - share * mean
        broken |= surplus < 0
        total += world.regret(t, x, index)
    return total.numpy(), int(broken.sum())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--replicates", type=int, default=5)
    parser.add_argument("--horizon", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=200, help="of conservative play")
    parser.add_argument("--rounds", type=int, default=150, help="of conservative play")
    parser.add_argument("--out", default="results/changing")
    given = parser.parse_args(arguments)
    if given.quick:
        given.replicates, given.horizon, given.runs, given.rounds = 2, 40, 4, 20
    found = drifting(given.replicates, given.horizon)
    rows = [["regret", *found]]
    for label in ("remembers", *KINDS):
        rows.append([label, *(mean_and_error(found[name][label][:, -1]) for name in found)])
    print("\n".join(aligned(rows)))
    rows = [["conservative play", "regret", "constraint broken"]]
    for label, alpha in {"free (counted at 0.1)": None, "alpha 0.1": 0.1, "alpha 0.3": 0.3}.items():
        total, broken = conservative(given.runs, given.rounds, alpha)
        rows.append([label, mean_and_error(total), f"{broken}/{given.runs}"])
    print("\n".join(aligned(rows)))
    from torchglb.plotting import duel_plot

    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, curves in found.items():
        place = out / f"{name.replace(' ', '-')}.png"
        duel_plot(curves, "regret").savefig(place, dpi=150)
        print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
