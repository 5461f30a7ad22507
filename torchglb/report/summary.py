"""A record in numbers: one :class:`Cell` for each policy and each radius S."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchglb.checks import check_choice, refuse
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.radii import Problem, empty_statistics, theorem31
from torchglb.radii.theorems.theorem31 import lipschitz_constant
from torchglb.report.statistics import MeanError, Paired, binomial_interval, estimate, paired
from torchglb.simulate import Record
from torchglb.simulate.config import make_family
from torchglb.theory import regret_bound

#: what others are compared with, if the record has it
REFERENCE = "ofuglb"


class Share(NamedTuple):
    """A count among replicates, with the exact 95% interval of its probability."""

    hits: int
    trials: int
    interval: tuple[float, float]


class Bound(NamedTuple):
    """The regret bound of the theory as a number, and whether any algorithm has it."""

    value: float
    vacuous: bool


@dataclass(frozen=True)
class Cell:
    """One policy at one radius, at the final round.

    Attributes:
        regret: the final regret.
        versus: against the reference, replicate by replicate; None for the reference itself.
        area: of the final confidence set (d = 2).
        missed: replicates in which theta* was outside its set at any recorded round.
        certificate: what the run certified about its own regret.
        refuted: replicates whose observations refute ``|theta*| <= S`` at the end.
        passes: over the history, per round.
    """

    regret: MeanError
    versus: Paired | None = None
    area: MeanError | None = None
    missed: Share | None = None
    certificate: MeanError | None = None
    passes: float | None = None
    refuted: int = 0


@dataclass(frozen=True)
class Timing:
    """Milliseconds per round for the whole batch.

    Attributes:
        mean: over all rounds.
        early: median of the first tenth of the rounds.
        late: median of the last tenth.
        total: seconds of the whole run.
    """

    mean: float
    early: float
    late: float
    total: float


@dataclass(frozen=True)
class RunSummary:
    """A record in numbers.

    Attributes:
        labels: of the policies.
        S: the radii.
        kappa: one for each S.
        rounds: the final round.
        replicates: at each S.
        reference: the label that the others are compared with.
        cells: by ``(label, S)``.
        timing: by label.
        bound: of OFUGLB by S, where the family has one and the model is true.
        model: whether the rewards follow a GLM with a known theta*.
        shared_arms: whether all replicates see the same arms.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> summary = summarise(record)
        >>> summary.rounds, summary.cells["oracle", 3.0].regret.mean
        (20, 0.0)
    """

    labels: list[str]
    S: list[float]
    kappa: list[float]
    rounds: int
    replicates: int
    reference: str
    cells: dict[tuple[str, float], Cell]
    timing: dict[str, Timing]
    bound: dict[float, Bound]
    model: bool
    shared_arms: bool


def boundary_warnings(summary: RunSummary) -> list[str]:
    """A sentence for each policy and S whose observations say that S is too small."""
    return [
        f"{label}, S = {S:g}: the observations of {cell.refuted} of {summary.replicates}"
        " replicates refute |theta*| <= S; their sets and certificates are wrong: take a larger S"
        for (label, S), cell in summary.cells.items()
        if cell.refuted
    ]


def summarise(record: Record, reference: str | None = None) -> RunSummary:
    """Gathers what a report says.

    Args:
        record: with at least one finished policy.
        reference: the label to compare with; ``"ofuglb"`` if the record has it, else the first.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> summarise(record).labels
        ['oracle', 'random']
    """
    labels = list(record.labels)
    if not labels:
        raise refuse("record", "at least one finished policy", "none")
    if reference is None:
        reference = REFERENCE if REFERENCE in labels else labels[0]
    check_choice("reference", reference, labels)
    base = record.arrays(reference)
    S = [float(s) for s in base["S"]]
    cells: dict[tuple[str, float], Cell] = {}
    timing: dict[str, Timing] = {}
    for label in labels:
        arrays = record.arrays(label)
        other = None if label == reference else base["regret"]
        cells |= {(label, s): _cell(arrays, row, other) for row, s in enumerate(S)}
        timing[label] = _timing(arrays)
    rounds, model = int(base["rounds"][-1]), "theta_star" in base
    return RunSummary(
        labels,
        S,
        [float(k) for k in base["kappa"]],
        rounds,
        base["regret"].shape[1],
        reference,
        cells,
        timing,
        _bounds(record, S, rounds) if model else {},
        model,
        shares_arms(record.config),
    )


def shares_arms(config: Mapping[str, Any]) -> bool:
    """Whether all replicates see the same arms: by default where these are drawn at random."""
    return bool(config.get("shared_arms", config["environment"] in ("time-varying", "fixed")))


def _cell(arrays: Mapping[str, np.ndarray], row: int, other: np.ndarray | None) -> Cell:
    def final(key: str) -> MeanError | None:
        return estimate(arrays[key][row, :, -1]) if key in arrays else None

    regret = arrays["regret"][row, :, -1]
    missed = None
    if "missed" in arrays:
        count, trials = int(arrays["missed"][row].sum()), len(regret)
        missed = Share(count, trials, binomial_interval(count, trials))
    return Cell(
        estimate(regret),
        None if other is None else paired(regret, other[row, :, -1]),
        estimate(arrays["area"][row]) if "area" in arrays else None,
        missed,
        final("certificate"),
        _passes(arrays, row),
        int(arrays["on_boundary"][row].sum()) if "on_boundary" in arrays else 0,
    )


def _passes(arrays: Mapping[str, np.ndarray], row: int) -> float | None:
    """The count is cumulative: its last entry over the number of rounds."""
    if "passes" not in arrays:
        return None
    return float(arrays["passes"][row, :, -1].mean() / arrays["rounds"][-1])


def _timing(arrays: Mapping[str, np.ndarray]) -> Timing:
    seconds, rounds = arrays["seconds"], arrays["rounds"]
    total = float(seconds @ np.diff(rounds, prepend=0))  # each is an average since the one before
    early = float(np.median(seconds[rounds <= max(rounds[0], rounds[-1] / 10)]))
    late = float(np.median(seconds[rounds > 0.9 * rounds[-1]]))
    return Timing(1e3 * total / float(rounds[-1]), 1e3 * early, 1e3 * late, total)


def _bounds(record: Record, radii: list[float], rounds: int) -> dict[float, Bound]:
    config = record.config
    family = make_family(config["family"])
    found = {S: ofuglb_bound(family, S, config["dim"], rounds, config["delta"]) for S in radii}
    return {S: bound for S, bound in found.items() if bound is not None}


def ofuglb_bound(family: GLMFamily, S: float, dim: int, horizon: int, delta: float) -> Bound | None:
    """Theorem 4.1 for OFUGLB with the radius of Theorem 3.1 and Table 1; None where it has none.

    kappa_* is replaced by its least possible value, one over the largest m'' on the ball: the bound
    is then valid for every arm set.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> ofuglb_bound(Bernoulli(), 10.0, 2, 10_000, 0.05).vacuous
        True
    """
    problem = Problem(family, Ball(dim, S), delta, (), torch.float64, torch.device("cpu"))
    count = torch.tensor(float(horizon - 1), dtype=torch.float64)
    rows = empty_statistics(problem)._replace(weight=count, number=count)
    try:
        constant = lipschitz_constant(problem, rows, "table1")
        radius = theorem31(constant, S, dim, delta, "closed_form").radius
        least = torch.tensor(1.0 / family.max_variance(S), dtype=torch.float64)
        found = regret_bound(family, S, dim, horizon, radius, least)
    except InputError:  # the theory does not cover this family
        return None
    return Bound(float(found.value), bool(found.vacuous))


def settings(record: Record) -> dict[str, Any]:
    """The configuration as one flat dictionary, ``policy.emk.regularizer`` and the like."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key in value:
                walk(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            flat[prefix] = value

    walk("", record.config)
    return flat
