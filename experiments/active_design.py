"""Chooses what to observe by gradient ascent on a differentiable interval width.

Contexts fill a square; a network turns them into features in the unit ball, and rewards are
Bernoulli with a theta* for these features. There is no list of arms: the next context is found by
ascending the width of its own interval for the mean reward, through the network, the confidence
set and the bound. What counts is the largest width on a grid over the square. Two designs that
look at no reward compete: contexts drawn at random, and the G-optimal design of the grid, which is
the best for a linear model.

Prints the largest width after equal numbers of observations and draws what was observed where.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from _neural import paired, parser_of, save
from torch import Tensor, nn

import torchglb as glb
from torchglb.plotting.neural import design_plot
from torchglb.policies.design import g_optimal

FAMILY, DIM, S, DELTA = glb.Bernoulli(), 4, 6.0, 0.05
STARTS, ASCENTS, PACE = 6, 6, 0.15  # of the search for the widest interval
TOGETHER = 5  # observations from one choice to the next
GRADIENT, RANDOM, OPTIMAL = "gradient ascent", "random", "G-optimal"


def network(seed: int, device: str) -> nn.Module:
    """A fixed network: nothing is trained here, so all guarantees hold."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(2, 12), nn.Linear(12, DIM)
        nn.init.normal_(first.weight, std=1.5)
        nn.init.normal_(last.weight, std=0.5)
    return (
        nn.Sequential(first, nn.Tanh(), last)
        .to(device=device, dtype=torch.float64)
        .requires_grad_(False)
    )


def grid_of(points: int, device: str) -> Tensor:
    side = torch.linspace(-1.0, 1.0, points, dtype=torch.float64, device=device)
    return torch.cartesian_prod(side, side)


def widest(head: glb.GLMHead, draw: torch.Generator) -> Tensor:
    """The context with the widest interval found from several starts, ``(runs, TOGETHER, 2)``."""
    runs = head.batch_shape[0]
    start = 2.0 * torch.rand((runs, STARTS, 2), generator=draw, dtype=torch.float64) - 1.0
    place = start.to(head.observations.rewards.device)
    for step in range(ASCENTS):
        place.requires_grad_()
        width = head.confidence(place, differentiable=True).width
        (slope,) = torch.autograd.grad(width.sum(), place)
        length = torch.linalg.vector_norm(slope, dim=-1, keepdim=True).clamp_min(1e-12)
        pace = PACE * (1.0 - step / ASCENTS)
        place = (place.detach() + pace * slope / length).clamp(-1.0, 1.0)
    best = head.confidence(place).width.argmax(-1)
    found = place[torch.arange(runs, device=place.device), best]
    return found[:, None, :].expand(-1, TOGETHER, -1)


def designs(
    head: glb.GLMHead, grid: Tensor, draw: torch.Generator
) -> dict[str, Callable[[glb.GLMHead], Tensor]]:
    """For each strategy the next contexts ``(runs, TOGETHER, 2)``."""
    shape = (head.batch_shape[0], TOGETHER, 2)
    weights = g_optimal(head.features(grid)).weights

    def by_chance(_: glb.GLMHead) -> Tensor:
        place = 2.0 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1.0
        return place.to(grid.device)

    def by_design(now: glb.GLMHead) -> Tensor:
        """As near to the weights as whole numbers get: the context that lags furthest behind."""
        counts = torch.zeros_like(weights)
        if len(now):
            seen = now.observations.rows()[0][0]  # the same in every run
            counts = (seen[:, None, :] == grid).all(-1).sum(0).to(weights.dtype)
        chosen = []
        for ahead in range(TOGETHER):
            place = ((len(now) + ahead + 1) * weights - counts).argmax()
            counts[place] += 1
            chosen.append(grid[place])
        return torch.stack(chosen).expand(shape)

    return {GRADIENT: lambda h: widest(h, draw), RANDOM: by_chance, OPTIMAL: by_design}


def largest_width(head: glb.GLMHead, grid: Tensor) -> list[float]:
    runs = head.batch_shape[0]
    width: Tensor = head.confidence(grid.expand(runs, -1, -1)).width
    return width.amax(-1).tolist()


def follow(
    name: str,
    choose: Callable[[glb.GLMHead], Tensor],
    head: glb.GLMHead,
    theta: Tensor,
    grid: Tensor,
    times: list[int],
    draw: torch.Generator,
) -> tuple[list[list[float]], Tensor]:
    """The largest width ``(looks, runs)`` at the given times; the contexts ``(runs, n, 2)``."""
    widths = []
    while len(head) < times[-1]:
        context = choose(head)
        z = (head.features(context).cpu() @ theta[..., None])[..., 0]
        head.update(context, FAMILY.sample(z, draw).to(grid.device))
        if len(head) in times:
            widths.append(largest_width(head, grid))
            mean = sum(widths[-1]) / len(widths[-1])
            print(f"  {name:16} n = {len(head):>4}: largest width {mean:.3f}", flush=True)
    return widths, head.observations.rows()[0]


def run(options: argparse.Namespace) -> None:
    net, grid = network(options.seed, options.device), grid_of(options.grid, options.device)
    draw = torch.Generator().manual_seed(options.seed)
    direction = torch.randn((options.runs, DIM), generator=draw, dtype=torch.float64)
    theta = 0.8 * S * nn.functional.normalize(direction, dim=-1)
    looks = min(10, options.observations // TOGETHER)
    every = options.observations // TOGETHER // looks * TOGETHER
    times = [every * look for look in range(1, looks + 1)]

    def fresh() -> glb.GLMHead:
        return glb.GLMHead(
            net, FAMILY, glb.Ball(DIM, S), delta=DELTA, batch_shape=(options.runs,),
            bound="normalize", device=options.device,
        )  # fmt: skip

    print(f"{options.runs} runs at once, d = {DIM}, S = {S:g}, delta = {DELTA:g}")
    curves: dict[str, list[list[float]]] = {}
    places: dict[str, list[list[float]]] = {}
    for name, choose in designs(fresh(), grid, draw).items():
        widths, observed = follow(name, choose, fresh(), theta, grid, times, draw)
        curves[name] = [list(row) for row in zip(*widths, strict=True)]
        places[name] = observed[0].tolist()
    final = {name: torch.tensor([row[-1] for row in rows]) for name, rows in curves.items()}
    for name, values in final.items():
        print(f"{name:16} largest width after {times[-1]} observations: {values.mean():.3f}")
    for other in (RANDOM, OPTIMAL):
        print(f"{GRADIENT} ends narrower than {other} by {paired(final[other] - final[GRADIENT])}")
    truth = FAMILY.mean(fresh().features(grid).cpu() @ theta[0])
    field = truth.reshape(options.grid, options.grid).mT.tolist()
    save(design_plot(times, curves, places, field), options.out)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "4 runs of 100 observations", "active_design.png")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--observations", type=int)
    parser.add_argument("--grid", type=int, default=11, help="points of the grid per side")
    options = parser.parse_args(arguments)
    options.runs = options.runs or (4 if options.quick else 10)
    options.observations = options.observations or (100 if options.quick else 300)
    torch.set_num_threads(1)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
