"""Which pairs to label next: handwritten digits, "which image shows the larger number?"

    python experiments/label_pairs.py [--quick] [--labels 120]

A fixed encoder (principal axes of images that are not compared) puts every image into the unit
ball; a pool of images is compared in pairs, and a policy chooses which pair a person is asked
about: the one whose difference is known least (widest-pair), a heuristic (laplace-pairs), or at
random. No Bradley-Terry model is true here, so the certified share promises nothing; accuracy is
counted on images that were never compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchglb.preferences import PairHead, make_pair_policy
from torchglb.report.tables import aligned

POLICIES = ("widest-pair", "laplace-pairs", "random-pairs")
#: images that the encoder is made from
FITTED = 900


class Digits(NamedTuple):
    """Images ``(n, 64)`` in [0, 1] and the numbers that they show."""

    images: Tensor
    numbers: Tensor


def load() -> tuple[Digits, Digits]:
    """Images for the encoder, and those that are compared."""
    from sklearn.datasets import load_digits

    images, numbers = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float64), torch.tensor(numbers)
    return Digits(x[:FITTED], y[:FITTED]), Digits(x[FITTED:], y[FITTED:])


def encoder(images: Tensor, dim: int) -> nn.Linear:
    """The first principal axes, scaled so that nearly all images are in the unit ball."""
    mean = images.mean(0)
    axes = torch.linalg.svd(images - mean, full_matrices=False).Vh[:dim]
    scale = torch.linalg.vector_norm((images - mean) @ axes.mT, dim=-1).quantile(0.99)
    found = nn.Linear(images.shape[-1], dim, dtype=torch.float64)
    with torch.no_grad():
        found.weight.copy_(axes / scale)
        found.bias.copy_(-(mean @ axes.mT) / scale)
    return found.requires_grad_(False)


def winner(left: Tensor, right: Tensor) -> Tensor:
    """1 where the left image shows the larger number, 1/2 where both show the same."""
    return 0.5 * (1.0 + torch.sign(left - right).double())


def labelled(
    name: str, seed: int, pool: int, labels: int, dim: int, S: float, held: int = 400
) -> tuple[float, float, float]:
    """Accuracy, certified share, and accuracy of what is certified, on pairs of new images."""
    fitted, compared = load()
    head = PairHead(encoder(fitted.images, dim), dim, S)
    order = torch.randperm(len(compared.images), generator=torch.Generator().manual_seed(seed))
    asked, new = order[:pool], order[pool:]
    items, numbers = head.embed(compared.images[asked]), compared.numbers[asked]
    policy = make_pair_policy(name, dim=dim, S=S, seed=seed)
    for _ in range(labels):
        left, right = (int(index) for index in policy.select(items))
        won = winner(numbers[left], numbers[right])
        policy.update(items[left], items[right], won)
        head.update(compared.images[asked[left]], compared.images[asked[right]], won)
    first, second = new[:held], new[held : 2 * held]
    different = compared.numbers[first] != compared.numbers[second]
    first, second = first[different], second[different]
    truth = compared.numbers[first] > compared.numbers[second]
    chance = head.probability(compared.images[first], compared.images[second])
    estimate = head.eval()(compared.images[first], compared.images[second])
    correct = (estimate > 0.5) == truth
    sure = (chance.lower > 0.5) | (chance.upper < 0.5)
    share = float(sure.double().mean())
    return float(correct.double().mean()), share, float(correct[sure].double().mean())


def mean_and_error(values: np.ndarray) -> str:
    """Over seeds; of those that have certified nothing there is nothing to say."""
    if len(values) < 2:
        return "-"
    return f"{values.mean():.3f} ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--labels", type=int, default=120)
    parser.add_argument("--pool", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--S", type=float, default=8.0)
    given = parser.parse_args(arguments)
    if given.quick:
        given.labels, given.pool, given.seeds, given.dim = 8, 10, 2, 3
    rows = [["policy", "right of all", "certified", "right of the certified"]]
    for name in POLICIES:
        settings = (given.pool, given.labels, given.dim, given.S)
        found = np.array([labelled(name, seed, *settings) for seed in range(given.seeds)])
        rows.append([name, *(mean_and_error(column[np.isfinite(column)]) for column in found.T)])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(f"{given.labels} labels, {given.seeds} seeds, pairs of new images")
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
