"""Draws docs/intervals.png: anytime-valid intervals from adaptively collected data.

Bernoulli rewards, eight arms in the plane, each round the arm with the largest upper confidence
bound. The left panel follows the interval for the mean reward of the best arm with several radii;
all of them see the same data. The right panel shows the confidence sets at the end.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

import torchglb as glb
from torchglb.plotting import intervals_plot

DELTA = 0.05
S = 4.0
THETA = (1.6, 0.9)
RADII = ("lipschitz", "mean-loss", "pac-bayes", "mixture")
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "intervals.png"


def looks(horizon: int, per_decade: int = 14) -> list[int]:
    """Times that grow geometrically, from 1 to the horizon."""
    steps = int(per_decade * math.log10(horizon))
    return sorted({round(horizon ** (k / steps)) for k in range(steps + 1)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 rounds instead of 2000")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    horizon = 60 if options.quick else 2000

    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(options.seed)
    angle = torch.arange(8, dtype=torch.float64, device=device) * (math.pi / 4) + 0.3
    arms = torch.stack([angle.cos(), angle.sin()], dim=-1)
    family, theta = glb.Bernoulli(), torch.tensor(THETA, dtype=torch.float64, device=device)
    best = arms[(arms @ theta).argmax()]
    ball = glb.Ball(2, S)
    sequences = {
        name: glb.ConfidenceSequence(family, ball, DELTA, name, aggregate=True, device=device)
        for name in RADII
    }
    times = looks(horizon)
    bands: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in RADII}
    for t in range(1, horizon + 1):
        chosen = sequences["pac-bayes"].current().upper_bound(arms).argmax()
        reward = family.sample(arms[chosen] @ theta, generator)
        for sequence in sequences.values():
            sequence.update(arms[chosen], reward)
        if t in times:
            for name, sequence in sequences.items():
                interval = sequence.current().interval(best, scale="mean")
                bands[name][0].append(float(interval.lower))
                bands[name][1].append(float(interval.upper))
    outlines = {}
    for name, sequence in sequences.items():
        x, y = sequence.current().boundary(180).mT
        outlines[name] = (x.tolist(), y.tolist())
    truth = float(family.mean(best @ theta))
    figure = intervals_plot(times, bands, truth, outlines, THETA, S)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=90, pil_kwargs={"optimize": True})
    for name, (lower, upper) in bands.items():
        covered = all(low <= truth <= high for low, high in zip(lower, upper, strict=True))
        print(
            f"{name:12} after {horizon}: [{lower[-1]:.3f}, {upper[-1]:.3f}], truth {truth:.3f},"
            f" {'held' if covered else 'missed'} at all {len(times)} looks"
        )
    print(f"wrote {options.out.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
