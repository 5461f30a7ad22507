"""Certified stopping: observations until the best arm is certain, and how often that errs.

    python experiments/stopping.py [--quick] [--runs 100]

Uniform sampling, OFUGLB and lucb-contrast, each with the exact set of the PAC-Bayes radius; all
runs of a rule advance as one batch, and the rule that stops is the same for all.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.decisions import BestArm
from torchglb.report.tables import aligned

RULES = ("random", "ofuglb-pb", "lucb-contrast")


@torch.no_grad()
def stopped(
    rule: str, runs: int, arms: int, dim: int, S: float, epsilon: float, horizon: int, every: int,
    delta: float, seed: int,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Rounds until each run stops (the horizon if never), and how many named a wrong arm."""
    family = glb.Bernoulli()
    world = environments.make(
        "fixed", family=family, S=S, replicates=runs, seed=seed, arms=arms, dim=dim,
        shared_arms=False, theta="random",
    )  # fmt: skip
    settings: dict[str, Any] = {} if rule == "random" else {"aggregate": True}
    policy = policies.make(
        rule, family=family, domain=world.domain, delta=delta, batch_shape=(runs,), **settings
    )
    log = glb.ConfidenceSequence(family, world.domain, delta, batch_shape=(runs,), aggregate=True)
    assert world.theta_star is not None
    x = world.arms(0)
    values = (x * world.theta_star[:, None, :]).sum(-1)
    best = BestArm(log if rule == "random" else policy, x, epsilon)
    when, wrong = torch.full((runs,), horizon), torch.zeros(runs, dtype=torch.bool)
    running = torch.ones(runs, dtype=torch.bool)
    for t in range(horizon):
        index = policy.select(x)
        row, r = x[torch.arange(runs), index], world.rewards(t, x, index)
        policy.update(row, r)
        if rule == "random":
            log.update(row, r)
        if (t + 1) % every == 0:
            new = best.should_stop() & running
            named = best.recommendation()
            behind = values.amax(-1) - values.gather(-1, named)[:, 0]
            when = torch.where(new, t + 1, when)
            wrong |= new & (behind > epsilon)
            running &= ~new
            if not bool(running.any()):
                break
    return when.numpy(), int(wrong.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--horizon", type=int, default=4000)
    parser.add_argument("--epsilon", type=float, default=0.3)
    parser.add_argument("--delta", type=float, default=0.1)
    given = parser.parse_args()
    runs, horizon = (5, 200) if given.quick else (given.runs, given.horizon)
    rows = [["rule", "observations (mean ± s.e.)", "against uniform", "stopped", "wrong"]]
    uniform = None
    for rule in RULES:
        when, wrong = stopped(
            rule, runs, 6, 2, 4.0, given.epsilon, horizon, 50, given.delta, seed=0
        )
        mean, error = when.mean(), when.std(ddof=1) / np.sqrt(runs)
        uniform = mean if uniform is None else uniform
        stop = f"{int((when < horizon).sum())}/{runs}"
        rows.append([rule, f"{mean:.0f} ± {error:.0f}", f"{mean / uniform:.2f}", stop,
                     f"{wrong}/{runs}"])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
