"""Classification of digits as a bandit: raw pixels, frozen random features, learnt features.

Each round shows an image; the ten classes are the arms, and the reward is 1 for the right one, 0
otherwise: nobody says which would have been right. All contestants run OFUGLB-e of the paper with
the same settings, on the same images, and differ in the features of (image, class) only:

- raw pixels: disjoint blocks, d = 640. The normalised image stands in the block of the class, so
  every class has weights of its own: the usual linear model of this problem, with nothing shared
  and nothing left out.
- random network: a network with ReLU whose weights stay as they were drawn, d = 2.
- learnt linear map: d = 2 linear functions of the pixels for every class, trained on the
  likelihood of what was played. It separates what learning few features does from what the hidden
  layer does.
- learnt network: the network of before, trained in the same way.

The raw pixels explore for long: their confidence set has 640 directions. Prints the regret of each
seed and the paired differences, and draws the curves.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _neural import digits, paired, parser_of, save
from torch import Tensor, nn

import torchglb as glb
from torchglb.plotting.neural import regret_curves_plot

PIXELS, CLASSES = 64, 10
S, DELTA = 5.0, 0.05
RAW, FROZEN = "raw pixels", "random network"
LINEAR, LEARNT = "learnt linear map", "learnt network"


class Blocks(nn.Module):
    """The normalised image in the block of its class: ``(N, 74)`` to ``(N, 640)``."""

    def forward(self, contexts: Tensor) -> Tensor:
        image, arm = contexts[:, :PIXELS], contexts[:, PIXELS:]
        image = nn.functional.normalize(image, dim=-1)
        return (arm[:, :, None] * image[:, None, :]).flatten(1)


class ArmNetwork(nn.Module):
    """A network from the image to d numbers for every class; the arm picks its own."""

    def __init__(self, hidden: int | None, dim: int) -> None:
        super().__init__()
        self.dim = dim
        last = nn.Linear(hidden or PIXELS, CLASSES * dim)
        self.body = nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU(), last) if hidden else last

    def forward(self, contexts: Tensor) -> Tensor:
        image, arm = contexts[:, :PIXELS], contexts[:, PIXELS:]
        every = self.body(image).unflatten(-1, (CLASSES, self.dim))
        return (arm[:, :, None] * every).sum(-2)


def contestants(
    seeds: int, seed: int, device: str, steps: int
) -> dict[str, Callable[[], glb.NeuralPolicy]]:
    settings: dict[str, Any] = {
        "delta": DELTA,
        "batch_shape": (seeds,),
        "seed": seed,
        "device": device,
    }

    def network(hidden: int | None = 64) -> nn.Module:
        return ArmNetwork(hidden, dim=2).to(device=device, dtype=torch.float64)

    def build(encoder: Any, dim: int, **more: Any) -> glb.NeuralPolicy:
        return glb.NeuralPolicy(
            encoder, "ofuglb-e", glb.Bernoulli(), glb.Ball(dim, S), **more, **settings
        )

    adam = partial(torch.optim.Adam, lr=0.01)
    learning = {"train_every": 25, "growth": 1.1, "steps": steps, "optimizer": adam}
    return {
        RAW: lambda: build(Blocks(), CLASSES * PIXELS, train_every=None, bound="clip"),
        FROZEN: lambda: build(network, 2, train_every=None),
        LINEAR: lambda: build(partial(network, None), 2, **learning),
        LEARNT: lambda: build(network, 2, **learning),
    }


def play(
    name: str, policy: glb.NeuralPolicy, images: Tensor, classes: Tensor, shown: Tensor
) -> Tensor:
    """The regret ``(seeds, rounds)`` summed up, for images ``shown (seeds, rounds)``."""
    seeds, rounds = shown.shape
    everyone = torch.arange(seeds, device=images.device)
    arms = torch.eye(CLASSES, dtype=images.dtype, device=images.device).expand(seeds, -1, -1)
    lost, began = torch.zeros(seeds, rounds, device=images.device), time.process_time()
    for t in range(rounds):
        image = images[shown[:, t]][:, None, :].expand(-1, CLASSES, -1)
        contexts = torch.cat([image, arms], dim=-1)
        choice = policy.select(contexts)
        reward = (choice == classes[shown[:, t]]).to(images.dtype)
        policy.update(contexts[everyone, choice], reward)
        lost[:, t] = 1.0 - reward
        if (t + 1) % max(1, rounds // 5) == 0:
            recent = lost[:, max(0, t - 99) : t + 1].mean()
            spent = time.process_time() - began
            print(
                f"  {name:17} round {t + 1:>5}: wrong in {recent:5.1%} of the last 100,"
                f" {spent:6.1f} s of processor time",
                flush=True,
            )
    return lost.cumsum(-1).cpu()


def run(options: argparse.Namespace) -> dict[str, Tensor]:
    rounds = options.rounds or (400 if options.quick else 1000)
    images, classes = digits(options.device)
    draw = torch.Generator().manual_seed(options.seed)
    shown = torch.randint(len(images), (options.seeds, rounds), generator=draw)
    shown = shown.to(options.device)
    print(f"{rounds} rounds, {options.seeds} seeds at once, S = {S:g}, delta = {DELTA:g}")
    regret = {}
    for name, make in contestants(
        options.seeds, options.seed, options.device, options.steps
    ).items():
        regret[name] = play(name, make(), images, classes, shown)
    return regret


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "400 rounds instead of 1000", "neural_digits.png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="another number of rounds")
    parser.add_argument("--steps", type=int, default=200, help="gradient steps per training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.process_time()
    regret = run(options)
    for name, curves in regret.items():
        final = curves[:, -1]
        print(f"{name:17} final regret {final.mean():6.1f}, by seed {final.tolist()}")
    for other in (RAW, FROZEN, LINEAR):
        gains = (regret[other] - regret[LEARNT])[:, -1]
        print(f"{LEARNT} saves against {other}: {paired(gains)}; by seed {gains.tolist()}")
    print(f"processor time in all: {time.process_time() - began:.0f} s")
    drawn = {name: values.tolist() for name, values in regret.items()}
    save(regret_curves_plot(drawn, guess=1 - 1 / CLASSES), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
