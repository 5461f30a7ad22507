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

RULES = ("uniform", "ofuglb", "lucb-contrast")


class Stopped(NamedTuple):
    """What a sampling rule did in each run: rounds until it stopped, whether, and wrongly."""

    when: np.ndarray
    done: np.ndarray
    wrong: np.ndarray

    def pvalue(self, delta: float) -> float:
        """Of so many wrong answers or more, if each run errs with probability delta."""
        wrong, runs = int(self.wrong.sum()), len(self.wrong)
        return float(scipy.stats.binomtest(wrong, runs, delta, alternative="greater").pvalue)


class Runs:
    """Runs that advance together on arms and luck of their own; some of them may be dropped.

    Args:
        rule: of RULES.
        names: of the runs, which determine all that is random.
        settings: of the environment.
        delta: of the sets.
    """

    def __init__(
        self, rule: str, names: torch.Tensor, settings: dict[str, Any], delta: float
    ) -> None:
        family, runs = glb.Bernoulli(), len(names)
        self.rule, self.names, self._given = rule, names, (settings, delta)
        self.world: Any = environments.make(
            "fixed", family=family, replicates=names, shared_arms=False, theta="random", **settings
        )
        self.x = self.world.arms(0)
        theta_star = self.world.theta_star
        assert theta_star is not None
        self.values = (self.x * theta_star[:, None, :]).sum(-1)
        self.policy = policies.make(
            "ofuglb" if rule == "uniform" else rule, family=family, domain=self.world.domain,
            delta=delta, batch_shape=(runs,), radius="pac-bayes", aggregate=True,
        )  # fmt: skip
        self._draws = self.world.streams("uniform sampling")
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # arms and rewards, (runs)

    def play(self, t: int) -> None:
        """One round of all runs."""
        if self.rule == "uniform":
            u = self._draws.uniform_at(t, 1, dtype=torch.float64)[:, 0]
            index = (u * self.x.shape[-2]).long()
        else:
            index = self.policy.select(self.x)
        row = self.x[torch.arange(len(self.names)), index]
        r = self.world.rewards(t, row, index)
        self.policy.update(row, r)
        self._seen.append((index, r))

    def only(self, kept: torch.Tensor) -> Runs:
        """Some of the runs, which go on as they would have gone on among the others."""
        new = Runs(self.rule, self.names[kept], *self._given)
        new._seen = [(index[kept], r[kept]) for index, r in self._seen]
        index, r = (torch.stack(column, -1) for column in zip(*new._seen, strict=True))
        rows = new.x.gather(-2, index[..., None].expand(*index.shape, new.x.shape[-1]))
        new.policy.update(rows, r)
        return new


@torch.no_grad()
def stopped(
    rule: str, runs: int, *, arms: int = 6, dim: int = 2, S: float = 4.0, epsilon: float = 0.3,
    horizon: int = 4000, every: int = 50, delta: float = 0.1, seed: int = 0,
) -> Stopped:  # fmt: skip
    """Plays a rule until the best arm is certain, looking every so many rounds."""
    settings = {"S": S, "seed": seed, "arms": arms, "dim": dim}
    playing = Runs(rule, torch.arange(runs), settings, delta)
    when, wrong = torch.full((runs,), horizon), torch.zeros(runs, dtype=torch.bool)
    done = torch.zeros(runs, dtype=torch.bool)
    for t in range(horizon):
        playing.play(t)
        if (t + 1) % every:
            continue
        best, names = BestArm(playing.policy, playing.x, epsilon), playing.names
        new = best.should_stop() & ~done[names]
        best_value = playing.values.amax(-1)
        behind = best_value - playing.values.gather(-1, best.recommendation())[:, 0]
        when[names[new]], done[names[new]] = t + 1, True
        wrong[names[new]] = behind[new] > epsilon
        left = ~done[names]
        if not bool(left.any()):
            break
        if int(left.sum()) <= 0.7 * len(names):  # the others have stopped
            playing = playing.only(left.nonzero()[:, 0])
    return Stopped(when.numpy(), done.numpy(), wrong.numpy())


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
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
