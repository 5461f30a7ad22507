"""How often is theta* ever outside its confidence set?

``python experiments/coverage.py [--quick] [--delta 0.05] [--radii centred ...] [--data weights]``

Seeded Monte Carlo of P(exists t <= T: theta* not in C_t) for data, radii, arms and dimensions.
All replicates of a cell advance in one batch. The check ``L_t(theta*) <= level_t`` is made with the
level of that very time (for the centred radius also that theta* is in its smaller set): where the
arms depend on the level at every t, else at the times 1..9 and then at times that grow by a tenth
(for the mixture, whose level costs thousands of evaluations of the loss, by a quarter). A miss at
any of them counts, so this is the coverage of the running intersection too. ``centred-alone`` is
the centred prior without the uniform one. Every finished cell is a file of its own, so an
interrupted run continues where it stopped.

Arms, twenty unit vectors for each replicate:
  random          one of them, drawn uniformly;
  adaptive        the optimistic one, by the exact program over the set of that radius (OFUGLB);
  adversarial     the one whose reward moves the likelihood ratio of the estimate against theta*
                  most: the largest standard deviation of its logarithm, given the past;
  boundary        as adversarial, and |theta*| = S (in the settings above it is S/2);
  near-duplicate  drawn uniformly from twenty of which half are one and the same, and the others
                  differ from it by 1e-3;
  outside         as random, and |theta*| = 3S/2: for the Gaussian prior only, which needs no bound.
All are played for the first three kinds of data, adversarial and boundary for all.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import scipy.stats
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii

DELTA = 0.05
NUM_ARMS = 20
LEVEL = 0.05  # of the binomial test
TIE = 1e-3  # arms whose optimistic values agree to this count as tied
ALONE = "centred-alone"
SCALES = tuple(4.0**k for k in range(8))  # of the centred prior alone, in units of d/S^2


@dataclass(frozen=True)
class Data:
    """What rows and rewards are like."""

    family: glb.GLMFamily
    S: float
    parts: bool = False  # rewards in [0, 1] that are not binary, of the same mean
    weights: bool = False  # uniform on [0, 1], independent of the rewards
    dtype: torch.dtype = torch.float64


DATA = {
    "bernoulli": Data(glb.Bernoulli(), 4.0),
    "gaussian": Data(glb.Gaussian(1.0), 4.0),
    "poisson": Data(glb.Poisson(), 3.0),
    "bernoulli, S = 0.2": Data(glb.Bernoulli(), 0.2),
    "bernoulli, S = 30": Data(glb.Bernoulli(), 30.0),
    "bernoulli, parts of 1": Data(glb.Bernoulli(), 4.0, parts=True),
    "bernoulli, weights": Data(glb.Bernoulli(), 4.0, weights=True),
    "bernoulli, float32": Data(glb.Bernoulli(), 4.0, dtype=torch.float32),
    "gaussian, sigma 0.1": Data(glb.Gaussian(0.1), 4.0),
    "probit": Data(glb.QuasiBounded("probit"), 3.0),
}
PLAIN = ("bernoulli", "gaussian", "poisson")
RADII: dict[str, radii.Radius | None] = {
    **radii.NAMED,
    "lipschitz-data": radii.Lipschitz(constant="data"),
    "auto": radii.automatic(glb.Bernoulli()),
    ALONE: None,
}
SIZE = {"boundary": 1.0, "outside": 1.5}  # |theta*| / S; one half elsewhere
HARD = ("adversarial", "boundary")
SETTINGS = ("random", "adaptive", "near-duplicate", *HARD, "outside")
DIMENSIONS = (1, 2, 8, 20)


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    data: str
    radius: str
    arms: str
    dim: int

    @property
    def name(self) -> str:
        data = self.data.replace(", ", "-").replace(" = ", "").replace(" ", "")
        return f"{data}-{self.arms}-d{self.dim}-{self.radius}"

    @property
    def optimistic(self) -> bool:
        return self.arms == "adaptive"


def all_cells(
    dimensions: tuple[int, ...] = DIMENSIONS,
    names: tuple[str, ...] = tuple(RADII),
    data: tuple[str, ...] = tuple(DATA),
    designs: tuple[str, ...] = SETTINGS,
) -> list[Cell]:
    cells = []
    for kind, arms, dim, name in itertools.product(data, designs, dimensions, names):
        radius = RADII[name]
        if arms not in HARD and kind not in PLAIN:
            continue
        if (name == "mixture" and dim > 3) or (name == ALONE and arms == "adaptive"):
            continue
        if arms == "outside" and (radius is None or radius.confined):
            continue
        cells.append(Cell(kind, name, arms, dim))
    return cells


def grouped(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that can share their data: all radii of a setting whose arms do not depend on them."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.data, cell.arms, cell.dim, cell.radius if cell.optimistic else None)
        groups.setdefault(key, []).append(cell)
    # small dimensions and shared data first: they are cheap
    return sorted(groups.values(), key=lambda group: (group[0].dim, group[0].optimistic))


@dataclass(frozen=True)
class Settings:
    """What a result depends on besides its cell."""

    replicates: int
    horizon: int
    seed: int
    delta: float = DELTA
    num_arms: int = NUM_ARMS


# ---- one batch of replicates ---------------------------------------------------------------------


def unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return torch.nn.functional.normalize(x, dim=-1)


def draw_arms(cell: Cell, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Arms ``(R, K, d)`` and theta* ``(R, d)``."""
    R, K, d = settings.replicates, settings.num_arms, cell.dim
    data = DATA[cell.data]
    arms = unit((R, K, d), generator)
    if cell.arms == "near-duplicate":
        arms = torch.nn.functional.normalize(arms[:, :1] + 1e-3 * arms, dim=-1)
        arms[:, ::2] = arms[:, :1]
    truth = SIZE.get(cell.arms, 0.5) * data.S * unit((R, d), generator)
    if data.dtype == torch.float32:  # not longer than 1 and S by a rounding
        arms, truth = 0.9999 * arms, 0.9999 * truth
    return arms.to(data.dtype), truth.to(data.dtype)


def draw_rewards(data: Data, z: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rewards at ``z (R)``, and their weights."""
    r, w = data.family.sample(z, generator), torch.ones_like(z)
    if data.parts:
        mean = data.family.mean(z)
        u = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        r = mean + torch.minimum(mean, 1 - mean) * (2 * u - 1)
    if data.weights:
        w = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
    return r.to(data.dtype), w.to(data.dtype)


def choose(cell: Cell, arms: Tensor, truth: Tensor, estimate: Tensor) -> Tensor:
    """The adversary's arm, ``(R)``: see the head of this file."""
    family = DATA[cell.data].family
    z, away = arms @ truth[..., None], arms @ (estimate - truth)[..., None]
    return (family.variance(z.double()).sqrt() * away.double().abs())[..., 0].argmax(-1)


def is_checked(cell: Cell, t: int) -> bool:
    """Whether the level of this radius is computed at time t."""
    if t < 10 or (cell.optimistic and cell.radius != "mixture"):
        return True
    growth = 1.25 if cell.radius == "mixture" else 1.1
    return math.floor(math.log(t, growth)) > math.floor(math.log(t - 1, growth))


def is_refined_away(smaller: radii.Refinement, loss: Tensor, theta: Tensor) -> Tensor:
    """Whether theta, of a known loss, is outside of the smaller set of a centred radius."""
    ridge, center, theta = smaller.ridge.double(), smaller.center.double(), theta.double()
    bent = loss + 0.5 * ridge * theta.square().sum(-1) - ridge * (center * theta).sum(-1)
    away = smaller.region.excess(theta.to(smaller.center.dtype)[:, None])[:, 0] > 0
    return (ridge < 0) & ((bent > smaller.level.double()) | away)


def is_excluded_by_scales(
    problem: radii.Problem,
    likelihood: glb.NegativeLogLikelihood,
    center: Tensor,
    loss: Tensor,
    theta: Tensor,
) -> Tensor:
    """Whether one of eight scales of the centred prior, each of weight 1/8, excludes theta."""
    away = (theta - center).double().square().sum(-1)
    found = torch.zeros_like(away, dtype=torch.bool)
    for scale in SCALES:
        lam = scale * problem.dim / problem.S.double().square()
        level = radii.centred_level(likelihood, problem.delta, center, lam, 1 / len(SCALES))
        found |= loss - 0.5 * lam * away > level
    return found


def simulate(cells: list[Cell], settings: Settings, device: str) -> Iterator[dict[str, Tensor]]:
    """Yields after every round, for every radius, the time of the first miss; ``inf`` if none."""
    first = cells[0]
    data = DATA[first.data]
    family = data.family
    keys = (list(DATA).index(first.data), SETTINGS.index(first.arms), first.dim)
    number = settings.seed * 1_000_003 + keys[0] * 10_007 + keys[1] * 1_009 + keys[2]
    generator = torch.Generator(device).manual_seed(number)
    arms, truth = draw_arms(first, settings, generator)
    R = settings.replicates
    every = torch.arange(R, device=device)
    ball = glb.Ball(first.dim, data.S)
    # a handful of anchors: with merged rows a pass is cheaper than a scan of many
    program = glb.AnchoredProgram(
        family, ball, (R,), anchors=16, aggregate=not data.weights, validate=False,
        dtype=data.dtype, device=device,
    )  # fmt: skip
    problem = radii.Problem(
        family, ball, settings.delta, (R,), data.dtype, device=torch.device(device)
    )
    kinds = {cell.radius: RADII[cell.radius] for cell in cells}
    states = {name: kind.init(problem) for name, kind in kinds.items() if kind is not None}
    missed = {name: torch.full((R,), math.inf, device=device) for name in kinds}
    true_loss = torch.zeros(R, dtype=torch.float64, device=device)  # L_t(theta*), carried forward
    beta2 = torch.zeros_like(true_loss)

    for t in range(settings.horizon + 1):
        likelihood = glb.NegativeLogLikelihood.of(family, program.history)
        minimum = program.minimum()  # its loss may lie above L(theta_hat) by 1e-6: so may the level
        for cell in cells:
            if not is_checked(cell, t):
                continue
            name, kind = cell.radius, kinds[cell.radius]
            if kind is None:
                outside = is_excluded_by_scales(
                    problem, likelihood, minimum.theta, true_loss, truth
                )
            else:
                found = kind.evaluate(problem, states[name], likelihood, minimum)
                states[name], beta2 = found.state, found.radius
                outside = true_loss > found.level.double()
                if found.refinement is not None:
                    outside = outside | is_refined_away(found.refinement, true_loss, truth)
            missed[name] = torch.where(outside, missed[name].clamp_max(t), missed[name])
        yield missed
        if t == settings.horizon:
            return
        if first.optimistic:
            chosen = program.argmax(arms, beta2.clamp_min(0.0), tol=TIE, throw=False).index
        elif first.arms in HARD:
            chosen = choose(first, arms, truth, minimum.theta)
        else:
            chosen = torch.randint(settings.num_arms, (R,), generator=generator, device=device)
        x = arms[every, chosen]
        z = (x.double() * truth.double()).sum(-1)
        r, w = draw_rewards(data, z, generator)
        true_loss = true_loss + w.double() * family.nll(z, r.double())
        weight = w if data.weights else None
        program.append(x, r, weight)
        rows = (x[:, None], r[:, None], None if weight is None else weight[:, None])
        for name, kind in kinds.items():
            if kind is not None:
                states[name] = kind.update(problem, states[name], *rows)


# ---- results on disk -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The misses of one cell, with the exact binomial interval and test."""

    cell: Cell
    misses: int
    replicates: int
    delta: float

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson, 95%."""
        test = scipy.stats.binomtest(self.misses, self.replicates)
        low, high = test.proportion_ci(0.95, method="exact")
        return float(low), float(high)

    @property
    def p_value(self) -> float:
        """Of "misses with probability at most delta" against "more often"."""
        count = (self.misses, self.replicates)
        return float(scipy.stats.binomtest(*count, self.delta, alternative="greater").pvalue)

    @property
    def passes(self) -> bool:
        return self.p_value >= LEVEL


def configuration(cell: Cell, settings: Settings) -> dict[str, Any]:
    data = DATA[cell.data]
    return {
        "cell": asdict(cell),
        "settings": asdict(settings),
        "radius": repr(RADII[cell.radius]),
        "data": {**asdict(data), "family": repr(data.family), "dtype": str(data.dtype)},
        "versions": {"torchglb": glb.__version__, "torch": torch.__version__},
    }


def load(path: Path, cell: Cell, settings: Settings) -> Result | None:
    """The result of an earlier run with the same configuration, if there is one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["configuration"] != configuration(cell, settings):
            return None
        misses = len(stored["first_misses"])
    except (OSError, ValueError, KeyError):
        return None
    return Result(cell, misses, settings.replicates, settings.delta)


def save(path: Path, cell: Cell, settings: Settings, missed: Tensor, seconds: float) -> Result:
    """Writes a result so that a reader sees the whole file or none."""
    times = [int(t) for t in missed.tolist() if math.isfinite(t)]
    content = {
        "configuration": configuration(cell, settings),
        "first_misses": times,
        "seconds": round(seconds, 2),
    }
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return Result(cell, len(times), settings.replicates, settings.delta)


# ---- progress and tables -------------------------------------------------------------------------


class Progress:
    """A line on stderr: share done, rounds per second, time left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began, self.shown = total, 0, time.monotonic(), 0.0

    def step(self, label: str) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.shown < 0.5 and self.done < self.total:
            return
        self.shown, rate = now, self.done / max(now - self.began, 1e-9)
        left = (self.total - self.done) / rate / 60
        text = f"{self.done}/{self.total} rounds, {rate:.1f}/s, {left:.1f} min left"
        print(f"\r{text}  {label:45.45}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)


def table(results: list[Result]) -> str:
    lines = [
        "| data | arms | d | radius | misses | rate | 95% interval | p | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        low, high = result.interval
        cell = result.cell
        lines.append(
            f"| {cell.data} | {cell.arms} | {cell.dim} | {cell.radius}"
            f" | {result.misses}/{result.replicates} | {result.misses / result.replicates:.3f}"
            f" | [{low:.3f}, {high:.3f}] | {result.p_value:.3f}"
            f" | {'PASS' if result.passes else 'FAIL'} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="40 replicates, 30 rounds, d = 2")
    parser.add_argument("--report", action="store_true", help="only show the finished cells")
    parser.add_argument("--replicates", type=int, help="200, or 40 with --quick")
    parser.add_argument("--horizon", type=int, help="200, or 30 with --quick")
    parser.add_argument("--dims", type=int, nargs="+", help="1 2 8 20, or 2 with --quick")
    parser.add_argument("--delta", type=float, default=DELTA, help="the failure probability")
    parser.add_argument("--radii", nargs="+", choices=RADII, default=list(RADII))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--arms", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/coverage"))
    options = parser.parse_args(arguments)
    options.replicates = options.replicates or (40 if options.quick else 200)
    options.horizon = options.horizon or (30 if options.quick else 200)
    options.dims = options.dims or ([2] if options.quick else list(DIMENSIONS))
    if min(options.replicates, options.horizon, *options.dims) < 1:
        parser.error("--replicates, --horizon and --dims must be at least 1")
    if not 0.0 < options.delta < 1.0:
        parser.error("--delta must be in (0, 1)")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    settings = Settings(options.replicates, options.horizon, options.seed, options.delta)
    options.out.mkdir(parents=True, exist_ok=True)
    cells = all_cells(*map(tuple, (options.dims, options.radii, options.data, options.arms)))
    paths = {cell: options.out / f"{cell.name}.json" for cell in cells}
    results = {cell: load(paths[cell], cell, settings) for cell in cells}
    done = sum(result is not None for result in results.values())
    if done:
        print(f"{done} of {len(cells)} cells are there already", file=sys.stderr)
    if options.report and not done:
        print(f"no finished cell of these settings in {options.out}", file=sys.stderr)
        return 1
    missing = [] if options.report else grouped([cell for cell in cells if results[cell] is None])
    progress = Progress(len(missing) * (settings.horizon + 1))
    for group in missing:
        began = time.monotonic()
        missed: dict[str, Tensor] = {}
        label = group[0].name if len(group) == 1 else f"{group[0].name} and others"
        for so_far in simulate(group, settings, options.device):
            missed = so_far
            progress.step(label)
        seconds = time.monotonic() - began
        for cell in group:
            results[cell] = save(paths[cell], cell, settings, missed[cell.radius], seconds)
    if missing:
        progress.close()
    finished = [result for result in results.values() if result is not None]
    text = table(finished)
    print(text)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    draw(finished, options.out / "coverage.png")
    failed = [result.cell.name for result in finished if not result.passes]
    worst = max(finished, key=lambda result: result.misses)
    print(
        f"{len(finished)} cells, {settings.replicates} replicates, T = {settings.horizon}, delta ="
        f" {settings.delta}: {len(failed)} fail; most misses {worst.misses} ({worst.cell.name})"
    )
    return 1 if failed else 0


def draw(results: list[Result], path: Path) -> None:
    from torchglb.plotting import coverage_plot

    places = [f"{r.cell.data}, {r.cell.arms}, d = {r.cell.dim}" for r in results]
    names = [r.cell.radius for r in results]
    rates = [r.misses / r.replicates for r in results]
    intervals = [r.interval for r in results]
    coverage_plot(places, names, rates, intervals, results[0].delta).savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
