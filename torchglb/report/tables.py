"""Plain text for a terminal: the table of a record, and two records side by side."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchglb.checks import refuse
from torchglb.report.statistics import MeanError, estimate, holm, paired, welch
from torchglb.report.summary import RunSummary, boundary_warnings, settings, shares_arms, summarise
from torchglb.simulate import Record

#: what must agree for two runs to have seen the same arms and the same random numbers
SHARED = ("family", "environment", "arms", "dim", "theta", "seed")


def table(record: Record) -> str:
    """Final regret, time per round and coverage of every policy.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> "random" in table(record)
        True
    """
    summary = summarise(record)
    counted = any(cell.missed is not None for cell in summary.cells.values())
    heads = ["policy", *(f"S = {S:g}" for S in summary.S), "ms/round"]
    rows = [[*heads, "missed"] if counted else heads]
    for label in summary.labels:
        regret = [number(summary.cells[label, S].regret) for S in summary.S]
        row = [label, *regret, f"{summary.timing[label].mean:.2f}"]
        rows.append([*row, _missed(summary, label)] if counted else row)
    runs = len(summary.S) * summary.replicates
    shared = ", which share their arms" if summary.shared_arms else ""
    lines = [
        f"{title_of(record)}: final regret at t = {summary.rounds},"
        f" mean ± standard error of {summary.replicates} replicates{shared}",
        "",
        *aligned(rows),
        "",
        f"ms/round: one round of the whole batch of {runs} runs",
    ]
    lines += [f"warning: {text}" for text in boundary_warnings(summary)]
    if counted:
        lines.append(
            "missed: runs in which theta* was outside the confidence set at any recorded round"
            f" (promised: at most a share of {record.config['delta']:g})"
        )
    return "\n".join(lines)


def _missed(summary: RunSummary, label: str) -> str:
    shares = [summary.cells[label, S].missed for S in summary.S]
    counted = [share for share in shares if share is not None]
    if not counted:
        return "-"
    return f"{sum(share.hits for share in counted)}/{sum(share.trials for share in counted)}"


def compare(record_a: Record, record_b: Record) -> str:
    """What differs in the configuration, and the final regrets side by side.

    Runs on the same arms and random numbers are compared in pairs, replicate by replicate (t-test);
    others by Welch's test; both with Holm's correction for the number of rows. Where the horizons
    differ, both are read at the last common round.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> other = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=2)
        >>> "seed" in compare(record, other)
        True
    """
    a, b = settings(record_a), settings(record_b)
    changed = [key for key in [*a, *(k for k in b if k not in a)] if a.get(key) != b.get(key)]
    lines = ["configuration:"]
    if changed:
        shown = ([key, _shown(a, key), _shown(b, key)] for key in changed)
        lines += aligned([["key", "first", "second"], *shown])
    else:
        lines.append("the same")
    common = [label for label in record_a.labels if label in record_b.labels]
    if not common:
        return "\n".join([*lines, "", "no policy is in both"])
    pairs = all(record_a.config.get(key) == record_b.config.get(key) for key in SHARED)
    pairs = pairs and shares_arms(record_a.config) == shares_arms(record_b.config)
    test = "paired t-test" if pairs else "Welch's test"
    found = [row for label in common for row in _side_by_side(label, record_a, record_b, pairs)]
    if not found:
        return "\n".join([*lines, "", "no S is in both"])
    corrected = holm([p for _, p in found])
    rows = [["policy", "S", "first", "second", "difference", f"p ({test})", "corrected (Holm)"]]
    rows += [
        [*cells, p_value(p), p_value(q)] for (cells, p), q in zip(found, corrected, strict=True)
    ]
    last = _last_common(record_a.arrays(common[0]), record_b.arrays(common[0]))[2]
    lines += ["", f"regret at t = {last}, mean ± standard error:", *aligned(rows)]
    for name, one, other in (("first", record_a, record_b), ("second", record_b, record_a)):
        alone = [label for label in one.labels if label not in other.labels]
        if alone:
            lines.append(f"only in the {name}: {', '.join(alone)}")
    return "\n".join(lines)


def _side_by_side(
    label: str, record_a: Record, record_b: Record, pairs: bool
) -> list[tuple[list[str], float]]:
    """The cells of a row for every S, and its p-value."""
    a, b = record_a.arrays(label), record_b.arrays(label)
    at_a, at_b, _ = _last_common(a, b)
    rows = []
    for S in sorted(set(a["S"].tolist()) & set(b["S"].tolist())):
        x = a["regret"][a["S"].tolist().index(S), :, at_a]
        y = b["regret"][b["S"].tolist().index(S), :, at_b]
        if pairs:
            count = min(len(x), len(y))
            found = paired(x[:count], y[:count])
            difference, p = found.difference, found.t_test
        else:
            one, two = estimate(x), estimate(y)
            difference = MeanError(one.mean - two.mean, math.hypot(one.error, two.error))
            p = welch(x, y)
        cells = [number(estimate(x)), number(estimate(y)), number(difference)]
        rows.append(([label, f"{S:g}", *cells], p))
    return rows


def _last_common(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[int, int, int]:
    """Where the last round that both have recorded stands in each, and which it is."""
    shared = np.intersect1d(a["rounds"], b["rounds"])
    if not len(shared):
        raise refuse("record_b", "a recorded round in common with record_a", "none")
    last = shared[-1]
    where_a, where_b = (int(np.searchsorted(arrays["rounds"], last)) for arrays in (a, b))
    return where_a, where_b, int(last)


def title_of(record: Record) -> str:
    """The title of the experiment, or its name."""
    return str(record.config.get("title") or record.config["name"])


# ---- text ------------------------------------------------------------------------------------


def number(value: MeanError | None) -> str:
    """``mean ± error`` with four significant digits of the mean.

    Example:
        >>> number(MeanError(12.3456, 0.789))
        '12.35 ± 0.79'
    """
    if value is None:
        return "-"
    if not math.isfinite(value.mean):
        return f"{value.mean:g}"
    places = max(0, 3 - math.floor(math.log10(max(abs(value.mean), 1e-3))))
    shown = f"{value.mean:.{places}f}"
    return shown if math.isnan(value.error) else f"{shown} ± {value.error:.{places}f}"


def p_value(p: float) -> str:
    """A p-value for a table.

    Example:
        >>> p_value(0.03141), p_value(1e-9)
        ('0.031', '1e-09')
    """
    if math.isnan(p):
        return "-"
    return f"{p:.3f}" if p >= 1e-3 else ("0" if p == 0 else f"{p:.0e}")


def aligned(
    rows: Sequence[Sequence[str]], justify: Literal["left", "right"] = "right"
) -> list[str]:
    """Lines of a table: the first row is its heading, the first column stands to the left."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(rows[0]):
        side: Literal["left", "right"] = "left" if place == 0 else justify
        table.add_column(Text(heading), justify=side, no_wrap=True)
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))
    wide = sum(max(len(row[place]) for row in rows) + 4 for place in range(len(rows[0])))
    console = Console(file=io.StringIO(), width=wide, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _shown(flat: dict[str, Any], key: str) -> str:
    return str(flat[key]) if key in flat else "-"
