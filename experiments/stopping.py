"""Certified stopping: observations until the best arm is certain, and how often that errs.

    python experiments/stopping.py [--quick] [--runs 500]

Uniform sampling, OFUGLB and lucb-contrast, each with the exact set of the PAC-Bayes radius; all
runs of a rule advance as one batch on the same arms and luck, and the rule that stops is the same.
A run that has not stopped at the horizon counts with the horizon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.decisions import BestArm
from torchglb.report.tables import aligned

RULES = {"uniform": "random", "ofuglb": "ofuglb", "lucb-contrast": "lucb-contrast"}


class Stopped(NamedTuple):
    """What a sampling rule did in each run: rounds until it stopped, whether, and wrongly."""

    when: np.ndarray
    done: np.ndarray
    wrong: np.ndarray

    def pvalue(self, delta: float) -> float:
        """Of so many wrong answers or more, if each run errs with probability delta."""
        wrong, runs = int(self.wrong.sum()), len(self.wrong)
        return float(scipy.stats.binomtest(wrong, runs, delta, alternative="greater").pvalue)


@torch.no_grad()
def stopped(
    rule: str, runs: int, *, arms: int = 6, dim: int = 2, S: float = 4.0, epsilon: float = 0.3,
    horizon: int = 4000, every: int = 50, delta: float = 0.1, seed: int = 0,
) -> Stopped:  # fmt: skip
    """Plays a rule of RULES until the best arm is certain, looking every so many rounds."""
    family = glb.Bernoulli()
    world = environments.make(
        "fixed", family=family, S=S, replicates=runs, seed=seed, arms=arms, dim=dim,
        shared_arms=False, theta="random",
    )  # fmt: skip
    learns = rule != "uniform"
    settings: dict[str, Any] = {"aggregate": True, "radius": "pac-bayes"} if learns else {}
    policy = policies.make(
        RULES[rule], family=family, domain=world.domain, delta=delta, batch_shape=(runs,),
        **settings,
    )  # fmt: skip
    log = glb.ConfidenceSequence(family, world.domain, delta, batch_shape=(runs,), aggregate=True)
    assert world.theta_star is not None
    x = world.arms(0)
    values = (x * world.theta_star[:, None, :]).sum(-1)
    best = BestArm(policy if learns else log, x, epsilon)
    when, wrong = torch.full((runs,), horizon), torch.zeros(runs, dtype=torch.bool)
    running = torch.ones(runs, dtype=torch.bool)
    for t in range(horizon):
        index = policy.select(x)
        row, r = x[torch.arange(runs), index], world.rewards(t, x, index)
        policy.update(row, r)
        if not learns:
            log.update(row, r)
        if (t + 1) % every == 0:
            new = best.should_stop() & running
            behind = values.amax(-1) - values.gather(-1, best.recommendation())[:, 0]
            when = torch.where(new, t + 1, when)
            wrong |= new & (behind > epsilon)
            running &= ~new
            if not bool(running.any()):
                break
    return Stopped(when.numpy(), ~running.numpy(), wrong.numpy())


def ratio(found: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The ratio of two means over the same runs, and its standard error (delta method)."""
    value = found.mean() / other.mean()
    spread = (found - value * other).std(ddof=1) / np.sqrt(len(found))
    return float(value), float(spread / other.mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--horizon", type=int, default=4000)
    parser.add_argument("--epsilon", type=float, default=0.3)
    parser.add_argument("--delta", type=float, default=0.1)
    given = parser.parse_args(arguments)
    runs, horizon = (5, 200) if given.quick else (given.runs, given.horizon)
    rows = [
        ["rule", "observations", "against uniform", "stopped", "wrong", f"p of > {given.delta:g}"]
    ]
    uniform = None
    for rule in RULES:
        found = stopped(rule, runs, epsilon=given.epsilon, horizon=horizon, delta=given.delta)
        when = found.when
        uniform = when if uniform is None else uniform
        value, error = ratio(when, uniform)
        rows.append([
            rule,
            f"{when.mean():.0f} ± {when.std(ddof=1) / np.sqrt(runs):.0f}",
            "1" if when is uniform else f"{value:.3f} ± {error:.3f}",
            f"{int(found.done.sum())}/{runs}",
            f"{int(found.wrong.sum())}/{runs}",
            f"{found.pvalue(given.delta):.2g}",
        ])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
