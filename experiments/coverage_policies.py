"""How often is theta* ever outside the set of a policy, or a true null rejected?

``python experiments/coverage_policies.py [--quick]``

The companion of coverage.py for what is not a radius: the sets of all policies that have one,
checked as they play (ellipsoids at every round, likelihood-ratio sets at every fifth), and the
e-values of true null hypotheses, looked at every fifth round while arms are chosen where the
estimate is farthest from theta*. Twenty arms for each replicate, theta* on the boundary of the
ball; misses against delta (or rejections against alpha = delta) by the exact binomial test.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import scipy.stats
import torch
from torch import Tensor

import torchglb as glb
from torchglb import policies
from torchglb.choices import Relation
from torchglb.inference import RunningTest

NUM_ARMS = 20
LOOK_EVERY = 5  # rounds between two looks of a test, or at a likelihood-ratio set
LEVEL = 0.05  # of the binomial test
FAMILIES: dict[str, tuple[glb.GLMFamily, tuple[float, ...]]] = {  # with S
    "bernoulli": (glb.Bernoulli(), (0.2, 4.0, 30.0)),
    "gaussian": (glb.Gaussian(1.0), (0.2, 4.0, 30.0)),
    "gaussian, sigma 0.1": (glb.Gaussian(0.1), (1.0,)),
    "poisson": (glb.Poisson(), (0.2, 3.0)),
    "probit": (glb.QuasiBounded("probit"), (0.2, 3.0)),
    "binomial, 4 trials": (glb.Binomial(4), (4.0,)),
}
#: whose sets are ellipsoids
POLICIES = (
    "glb-omd", "glb-omd-realised", "glb-omd-rows", "gloc", "ada-ofu-ecolog", "oful", "glm-ucb",
    "log-ucb-1", "ofuglb-e",
)  # fmt: skip
#: and sublevel sets of the loss
EXACT = ("ofuglb", "ofuglb-pb", "emk", "ofulog+", "ofulog-r")
NULLS = ("point", "coefficient", "half-space")
DIMENSIONS = (1, 2, 8, 20)
DELTAS = (0.05, 0.5)


@dataclass(frozen=True)
class Cell:
    """One line of the table: a policy's set, or the e-values of a null hypothesis."""

    subject: str
    family: str
    S: float
    dim: int
    delta: float

    @property
    def seed(self) -> int:
        subject = (*POLICIES, *EXACT, *NULLS).index(self.subject)
        family = list(FAMILIES).index(self.family)
        return ((subject * 31 + family) * 31 + self.dim) * 1009 + int(10 * self.S)


def all_cells(dimensions: tuple[int, ...]) -> Iterator[Cell]:
    for name, (family, radii) in FAMILIES.items():
        subjects = (*(p for p in (*POLICIES, *EXACT) if promises(p, family)), *NULLS)
        for subject, S, dim, delta in itertools.product(subjects, radii, dimensions, DELTAS):
            yield Cell(subject, name, S, dim, delta)


def promises(policy: str, family: glb.GLMFamily) -> bool:
    """Whether the policy claims that its set holds theta* for this family."""
    if policy not in policies.available(family):
        return False
    try:
        made = policies.make(policy, family=family, domain=glb.Ball(2, 1.0))
    except glb.InputError:  # a constant of the theory is missing
        return False
    region = made.confidence_set()
    return region is not None and getattr(made, "guaranteed", True)


def unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


class World:
    """The arms, parameters and rewards of a cell's replicates."""

    def __init__(self, cell: Cell, replicates: int) -> None:
        self.family, _ = FAMILIES[cell.family]
        self.generator = torch.Generator().manual_seed(cell.seed)
        self.arms = unit((replicates, NUM_ARMS, cell.dim), self.generator)
        self.theta = cell.S * (1 - 1e-9) * unit((replicates, cell.dim), self.generator)
        self.ball = glb.Ball(cell.dim, cell.S)

    def observe(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the chosen arms, and their rewards."""
        x = torch.take_along_dim(self.arms, chosen[:, None, None], 1)[:, 0]
        return x, self.family.sample((x * self.theta).sum(-1), self.generator)


@torch.no_grad()
def misses(cell: Cell, replicates: int, horizon: int) -> int:
    """Replicates in which theta* was outside at one round or another."""
    world = World(cell, replicates)
    if cell.subject in NULLS:
        return rejections(cell, world, horizon)
    policy = policies.make(
        cell.subject,
        family=world.family,
        domain=world.ball,
        delta=cell.delta,
        batch_shape=(replicates,),
    )
    missed = torch.zeros(replicates, dtype=torch.bool)
    for t in range(horizon):
        if cell.subject not in EXACT or t % LOOK_EVERY == 0:
            region = policy.confidence_set()
            assert region is not None
            missed |= ~region.contains(world.theta)
        policy.update(*world.observe(policy.select(world.arms)))
    return int(missed.sum())


def rejections(cell: Cell, world: World, horizon: int) -> int:
    """Replicates in which the true null hypothesis was rejected at one look or another."""
    theta, eye = world.theta, torch.eye(cell.dim, dtype=torch.float64)
    sequence = glb.ConfidenceSequence(
        world.family, world.ball, 0.05, batch_shape=tuple(theta.shape[:1]), aggregate=True
    )
    nulls: dict[str, tuple[Tensor, Tensor, Relation]] = {
        "point": (eye, theta, "=="),
        "coefficient": (eye[:1], theta[:, :1], "=="),
        "half-space": (eye[:1], theta[:, :1], ">="),
    }
    running = RunningTest(sequence, *nulls[cell.subject])
    for _ in range(0, horizon, LOOK_EVERY):
        running.look()
        away = sequence.current().center - theta
        chosen = (world.arms @ away[..., None])[..., 0].abs().argmax(-1)
        for _ in range(LOOK_EVERY):
            sequence.update(*world.observe(chosen))
    return int((running.look().p <= cell.delta).sum())


def line(cell: Cell, count: int, replicates: int) -> tuple[str, bool]:
    test = scipy.stats.binomtest(count, replicates, cell.delta, alternative="greater")
    low, high = scipy.stats.binomtest(count, replicates).proportion_ci(0.95, method="exact")
    passes = bool(test.pvalue >= LEVEL)
    text = (
        f"| {cell.subject} | {cell.family} | {cell.S:g} | {cell.dim} | {cell.delta:g}"
        f" | {count}/{replicates} | [{low:.3f}, {high:.3f}] | {test.pvalue:.3f}"
        f" | {'PASS' if passes else 'FAIL'} |"
    )
    return text, passes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="40 replicates, 30 rounds, d = 2")
    parser.add_argument("--replicates", type=int)
    parser.add_argument("--horizon", type=int)
    parser.add_argument("--dims", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("results/coverage"))
    options = parser.parse_args(arguments)
    replicates = options.replicates or (40 if options.quick else 200)
    horizon = options.horizon or (30 if options.quick else 200)
    dims = tuple(options.dims or ((2,) if options.quick else DIMENSIONS))
    lines = [
        "| set or null | family | S | d | delta | misses | 95% interval | p | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    failed, cells, began = 0, list(all_cells(dims)), time.monotonic()
    for number, cell in enumerate(cells, start=1):
        try:
            text, passes = line(cell, misses(cell, replicates, horizon), replicates)
        except glb.SolverError as error:  # a cell without an answer has failed
            text, passes = f"| {cell.subject} | {cell.family} | {cell.S:g} | {cell.dim} |", False
            text += f" {cell.delta:g} | | | | FAIL: {error} |"
        lines.append(text)
        failed += not passes
        spent = time.monotonic() - began
        print(f"\r{number}/{len(cells)} cells, {spent:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    print(f"{len(cells)} cells, {replicates} replicates, T = {horizon}: {failed} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
