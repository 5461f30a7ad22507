"""Regret of optimism by contrasts on `fixed-high-dim`, paired by replicate, with standard errors.

Plays the preset's own worlds (`torchglb run fixed-high-dim` draws the curves and the certificates)
without the certificate of every round, so that ten thousand rounds take minutes. The first policy
is what the others are divided by. `outside`: runs in which theta* had left the confidence set, or
an arm's value its own bounds, at one of a hundred looks.
"""

import argparse
import sys
import time
import tomllib

import torch

from torchglb.policies import Policy
from torchglb.simulate import Configuration
from torchglb.simulate.presets import find_preset

PRESETS = {"gaussian": "fixed-high-dim", "bernoulli": "fixed-high-dim-logistic"}


def outside(policy: Policy, arms: torch.Tensor, star: torch.Tensor | None) -> torch.Tensor:
    """Where theta*, or the value of an arm, is outside of what the policy believes, ``(R)``."""
    assert star is not None  # these worlds have one
    region = policy.confidence_set()
    found = torch.zeros(len(star)).bool() if region is None else ~region.contains(star)
    bounds = getattr(policy, "contrast_bounds", lambda: None)()
    if bounds is not None:
        values = (arms @ star[..., None])[..., 0]
        found = found | ((values < bounds.lower) | (values > bounds.upper)).any(-1)
    return found


@torch.no_grad()
def play(config: Configuration, label: str) -> tuple[torch.Tensor, int, float]:
    """The regret of each replicate, how many were outside, and milliseconds per round."""
    world = config.make_environment(range(config.replicates))
    policy, everyone = config.make_policy(label, world), torch.arange(config.replicates)
    regret, missed, seconds = (
        torch.zeros(config.replicates).double(),
        torch.zeros(config.replicates).bool(),
        0.0,
    )
    for t in range(config.horizon):
        arms = world.arms(t)
        start = time.process_time()
        index = policy.select(arms)
        seconds += time.process_time() - start
        x = arms[everyone, index]
        regret += world.regret(t, x, index)
        r = world.rewards(t, x, index)
        start = time.process_time()
        policy.update(x, r)
        seconds += time.process_time() - start
        if (t + 1) % max(config.horizon // 100, 1) == 0:
            missed = missed | outside(policy, arms, world.theta_star)
    return regret, int(missed.sum()), 1e3 * seconds / config.horizon


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=PRESETS, default="gaussian")
    parser.add_argument("--dim", type=int, default=20)
    parser.add_argument("--arms", type=int, default=20)
    parser.add_argument("--horizon", type=int, default=10_000)
    parser.add_argument("--replicates", type=int, default=24)
    parser.add_argument("--policies", default="oful,oful-contrast", help="the first is the measure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = tomllib.loads(find_preset(PRESETS[options.family]).read_text(encoding="utf-8"))
    table.pop("quick")
    names = ("dim", "arms", "horizon", "replicates")
    config = Configuration.load(table | {name: getattr(options, name) for name in names})
    sizes = f"{options.family} d={options.dim} K={options.arms} T={options.horizon}"
    print(f"{sizes}, {options.replicates} replicates", flush=True)
    first: torch.Tensor | None = None
    for label in options.policies.split(","):
        regret, missed, each = play(config, label)
        first = regret if first is None else first
        count = options.replicates**0.5
        ratio = float(regret.mean() / first.mean())
        error = float((regret - ratio * first).std() / first.mean()) / count
        print(
            f"  {label:16} regret {float(regret.mean()):8.1f} +- {float(regret.std()) / count:5.1f}"
            f"   ratio {ratio:.3f} +- {error:.3f}   outside {missed}"
            f"   {each:.2f} ms per round of all",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
