"""The figures of an experiment, in the paper's layout: one column for each radius S.

- regret: mean and one standard deviation over the replicates; the leading policies magnified, where
  these are not all; for d = 2 the confidence sets of the first replicate at the final time.
- certificate: what each run certified about its own regret, beside the regret.
- time: of one round, for the whole batch.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from torchglb.checks import refuse
from torchglb.plotting.confidence import set_panel, sets_of
from torchglb.plotting.style import REFERENCES, Style, styles
from torchglb.simulate import Record

Arrays = Mapping[str, np.ndarray]

#: a policy leads if its final mean regret is at most this many times the smallest
LEADING = 3.0
#: a policy goes off the scale if its final mean regret exceeds the next smaller one this many times
APART = 8.0
#: curves that nowhere differ by more than this share of the panel are marked, each in its colour
COINCIDING = 0.004
#: points of a curve: enough for print, and the PDF stays small
POINTS = 400
LOOK: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "mathtext.fontset": "cm",
    "savefig.dpi": 200,
}


class Policies(NamedTuple):
    """What is drawn: the arrays and the style of each label."""

    arrays: Mapping[str, Arrays]
    style: dict[str, Style]
    reference: frozenset[str]


def save_figures(record: Record, directory: Path | str) -> list[Path]:
    """Writes the figures of a record, each as PNG and as PDF.

    Args:
        record: with at least one finished policy.
        directory: created if missing.

    Returns:
        The files, the regret figure first.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> [path.suffix for path in save_figures(record, "figures")[:2]]
        ['.png', '.pdf']
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for kind, figure in figures(record).items():
        stem = record.config["name"] if kind == "regret" else f"{record.config['name']}-{kind}"
        for ending, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
            paths.append(directory / f"{stem}.{ending}")
            with rc_context(LOOK):
                figure.savefig(paths[-1], metadata=metadata)
    return paths


def figures(record: Record) -> dict[str, Figure]:
    """The figures of a record: ``"regret"``, ``"certificate"`` where there is one, ``"time"``.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> sorted(figures(record))
        ['regret', 'time']
    """
    policies = _policies(record)
    with rc_context(LOOK):
        drawn = {"regret": regret_figure(record.config, policies)}
        if any("certificate" in arrays for arrays in policies.arrays.values()):
            drawn["certificate"] = certificate_figure(record.config, policies)
        return drawn | {"time": time_figure(policies)}


def _policies(record: Record) -> Policies:
    labels = list(record.labels)
    if not labels:
        raise refuse("record", "at least one finished policy", "none")
    settings = record.config.get("policy", {})
    base = {label: settings.get(label, {}).get("policy", label) for label in labels}
    arrays = {label: record.arrays(label) for label in labels}
    reference = frozenset(label for label in labels if base[label] in REFERENCES)
    return Policies(arrays, styles(labels, base), reference)


# ---- regret and confidence sets --------------------------------------------------------------


def regret_figure(config: Mapping[str, Any], policies: Policies) -> Figure:
    """The paper's figure: regret, magnified regret and, for d = 2, the sets at the end."""
    first = next(iter(policies.arrays.values()))
    with_sets = any("boundary" in arrays for arrays in policies.arrays.values())
    columns = range(len(first["S"]))
    finals = [
        {
            label: float(arrays["regret"][column, :, -1].mean())
            for label, arrays in policies.arrays.items()
        }
        for column in columns
    ]
    lead = [leading(found, policies.reference) for found in finals]
    magnified = any(len(lead[column]) < len(finals[column]) for column in columns)
    ratios = [1.0, *([1.0] if magnified else []), *([1.25] if with_sets else [])]
    figure, axes = _grid(first["S"], ratios)
    marks: list[str] = []
    for column in columns:
        off = far_off(finals[column])
        _regret_panel(axes[0][column], policies, column, list(finals[column]), off)
        if magnified:
            _regret_panel(axes[1][column], policies, column, lead[column])
        if with_sets:
            sets = sets_of(policies.arrays, policies.style, column)
            set_panel(axes[-1][column], sets)
            marks = ["*", "o"] if "*" in marks or sets.truth is not None else ["o"]
    axes[0][0].set_ylabel("regret")
    if magnified:
        axes[1][0].set_ylabel("regret (magnified)")
    if with_sets:
        axes[-1][0].set_ylabel(r"$\theta_2$")
    _headline(figure, config)
    _legend(figure, policies.style.values(), marks)
    return figure


def leading(finals: Mapping[str, float], reference: Iterable[str] = ()) -> list[str]:
    """The policies worth magnifying: within ``LEADING`` of the best, and at least three.

    Example:
        >>> leading({"a": 1.0, "b": 2.5, "c": 9.0, "d": 20.0, "oracle": 0.0}, ["oracle"])
        ['a', 'b', 'c']
    """
    rivals = sorted((label for label in finals if label not in set(reference)), key=finals.get)  # type: ignore[arg-type]
    rivals = rivals or list(finals)
    close = [label for label in rivals if finals[label] <= LEADING * finals[rivals[0]]]
    kept = set(close if len(close) >= 3 else rivals[:3])
    return [label for label in finals if label in kept]


def far_off(finals: Mapping[str, float]) -> list[str]:
    """The policies whose regret is so large that no other curve would be seen beside theirs.

    All of them are above the median: at least half of the curves are seen to their ends.

    Example:
        >>> far_off({"a": 10.0, "b": 30.0, "random": 4000.0})
        ['random']
    """
    ranked = sorted(finals, key=finals.get)  # type: ignore[arg-type]
    for place in range(max(2, (len(ranked) + 1) // 2), len(ranked)):
        if finals[ranked[place]] > APART * finals[ranked[place - 1]] > 0:
            return ranked[place:]
    return []


def _regret_panel(
    axis: Axes,
    policies: Policies,
    column: int,
    labels: Sequence[str],
    off_scale: Sequence[str] = (),
) -> None:
    """Curves with bands; those off the scale leave the panel at its top, and are named above."""
    top = 0.0
    drawn: dict[str, np.ndarray] = {}
    for order, label in enumerate(_worst_first(policies, column, labels)):
        arrays, style = policies.arrays[label], policies.style[label]
        keep = _thin(len(arrays["rounds"]))
        rounds, regret = arrays["rounds"][keep], arrays["regret"][column][:, keep]
        mean, spread = regret.mean(0), regret.std(0, ddof=min(1, len(regret) - 1))
        look: dict[str, Any] = {"color": style.color, "zorder": 3 + order}
        axis.fill_between(rounds, mean - spread, mean + spread, alpha=0.16, linewidth=0, **look)
        axis.plot(rounds, mean, linestyle=style.linestyle, **look)
        drawn[label] = np.stack([rounds, mean])
        top = max(top, 0.0 if label in off_scale else float((mean + spread).max()))
        axis.set_xlim(0, rounds[-1])
    axis.set_ylim(0, 1.04 * top if top > 0 else 1.0)
    axis.set_xlabel("round $t$")
    for group in coinciding(drawn, COINCIDING * axis.get_ylim()[1]):
        _mark(axis, policies, drawn, group)
    if off_scale:
        named = []
        for label in off_scale:
            final = policies.arrays[label]["regret"][column, :, -1].mean()
            named.append(f"{policies.style[label].name} ends at {final:.0f}")
        # above the panel, where no curve is, and beneath the title
        axis.set_title(axis.get_title(), pad=7 + 8.5 * len(named))
        place: dict[str, Any] = {"transform": axis.transAxes, "va": "bottom", "fontsize": 7}
        axis.text(0.0, 1.01, "\n".join(named), parse_math=False, **place)


def coinciding(curves: Mapping[str, np.ndarray], distance: float) -> list[list[str]]:
    """Groups of curves ``(2, n)`` on the same rounds that nowhere are further apart than this.

    Example:
        >>> line = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> coinciding({"a": line, "b": line + [[0.0], [0.1]], "c": 2 * line}, 0.2)
        [['a', 'b']]
    """
    groups: list[list[str]] = []
    for label, curve in curves.items():
        for group in groups:
            other = curves[group[0]]
            if curve.shape == other.shape and np.abs(curve - other).max() <= distance:
                group.append(label)
                break
        else:
            groups.append([label])
    return [group for group in groups if len(group) > 1]


def _mark(
    axis: Axes, policies: Policies, drawn: Mapping[str, np.ndarray], group: Sequence[str]
) -> None:
    """Marks on curves that hide each other, taking turns."""
    for turn, label in enumerate(group):
        rounds, mean = drawn[label]
        shares = (np.arange(4) + (turn + 1) / (len(group) + 1)) / 4
        places = np.unique((shares * (len(rounds) - 1)).round().astype(int))
        mark: dict[str, Any] = {"markersize": 4.5, "markeredgecolor": "white", "zorder": 40}
        color, shape = policies.style[label].color, "os^Dv"[turn % 5]
        axis.plot(rounds[places], mean[places], shape, color=color, markeredgewidth=0.5, **mark)


def _worst_first(policies: Policies, column: int, labels: Sequence[str]) -> list[str]:
    """The best policy is drawn last, on top of the others."""
    return sorted(labels, key=lambda k: -policies.arrays[k]["regret"][column, :, -1].mean())


# ---- certificate and time --------------------------------------------------------------------


def certificate_figure(config: Mapping[str, Any], policies: Policies) -> Figure:
    """Mean regret below the mean certificate: what a run knows about itself."""
    chosen = {k: a for k, a in policies.arrays.items() if "certificate" in a}
    figure, axes = _grid(next(iter(chosen.values()))["S"], [1.0])
    for column, axis in enumerate(axes[0]):
        for label, arrays in chosen.items():
            color = policies.style[label].color
            keep = _thin(len(arrays["rounds"]), log=True)
            keep = keep[arrays["rounds"][keep] >= min(10, arrays["rounds"][-1])]  # settled a little
            for key, line in (("regret", "-"), ("certificate", ":")):
                mean = arrays[key][column][:, keep].mean(0)
                axis.plot(arrays["rounds"][keep], mean, color=color, linestyle=line)
        axis.set_xscale("log")
        axis.set_yscale("log")
        _plain_numbers(axis.xaxis)
        _plain_numbers(axis.yaxis)
        axis.set_xlabel("round $t$")
    axes[0][0].set_ylabel("regret, certificate")
    shown = [Style(policies.style[label].name, policies.style[label].color) for label in chosen]
    _headline(figure, config)
    _legend(figure, [*shown, Style("regret", "#606060"), Style("certificate", "#606060", ":")])
    return figure


def time_figure(policies: Policies) -> Figure:
    """Milliseconds of a round for the whole batch, as the history grows."""
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axis = figure.subplots()
    problems = 0
    for label, arrays in policies.arrays.items():
        style = policies.style[label]
        edges = np.unique(np.linspace(0, len(arrays["rounds"]), 26).astype(int))
        spans = list(itertools.pairwise(edges))
        middle = [float(np.median(arrays["rounds"][a:b])) for a, b in spans]
        typical = [1e3 * float(np.median(arrays["seconds"][a:b])) for a, b in spans]
        axis.plot(middle, typical, color=style.color, linestyle=style.linestyle)
        problems = arrays["regret"].shape[0] * arrays["regret"].shape[1]
    axis.set_yscale("log")
    _plain_numbers(axis.yaxis)
    axis.set_xlim(left=0)
    axis.set_xlabel("round $t$")
    axis.set_ylabel("milliseconds per round")
    axis.set_title(wrapped(f"Time of one round, {problems} runs in one batch (medians)", 3.6, 10))
    _legend(figure, policies.style.values(), where="outside right upper")
    return figure


# ---- shared ----------------------------------------------------------------------------------


def _grid(sizes: np.ndarray, ratios: Sequence[float]) -> tuple[Figure, np.ndarray]:
    """A row of panels for each ratio, a column for each S."""
    width = 1.0 + 2.75 * max(len(sizes), 2)
    figure = Figure(figsize=(width, 1.0 + 2.1 * sum(ratios)), layout="constrained")
    axes = figure.subplots(len(ratios), len(sizes), squeeze=False, height_ratios=list(ratios))
    for axis, S in zip(axes[0], sizes, strict=True):
        axis.set_title(f"$S = {S:g}$")
    return figure, axes


def _plain_numbers(scale: Axis) -> None:
    """Labels a logarithmic axis: 1, 10, 100, and 2 and 5 between them where there is space."""
    low, high = scale.get_view_interval()
    between = "25" if high < 30 * low else ""
    scale.set_major_formatter("{x:g}")
    scale.set_minor_formatter(lambda x, _: f"{x:g}" if between and f"{x:e}"[0] in between else "")


def _headline(figure: Figure, config: Mapping[str, Any]) -> None:
    """The title as it was written: a dollar sign in it is no mathematics."""
    arms = f"K = {config['arms']}, " if config.get("arms") else ""
    dim = f"d = {config['dim']}, " if config.get("dim") else ""
    title = config.get("title") or config["name"]
    text = f"{title}  ({dim}{arms}{config['replicates']} replicates)"
    lines = wrapped(text, 0.96 * figure.get_figwidth(), 11)
    figure.suptitle(lines, fontsize=11, parse_math=False)


def wrapped(text: str, inches: float, size: float) -> str:
    """A text in lines of at most this width.

    Example:
        >>> wrapped("a title that is too long", 1.0, 11).splitlines()
        ['a title that is', 'too long']
    """
    letters = len(text)
    while True:
        lines = textwrap.wrap(text, max(letters, 1)) or [""]
        widest = max(_width(line, size) for line in lines)
        if widest <= 72.0 * inches or letters <= 1:
            return "\n".join(lines)
        letters = min(letters - 1, int(letters * 72.0 * inches / widest) + 1)


def _width(line: str, size: float) -> float:
    """In points, as it is written: a dollar sign is measured as one."""
    return float(TextPath((0, 0), line.replace("$", r"\$"), size=size).get_extents().width)


#: what a mark stands for, its colour and size
MARKS = {"*": (r"$\theta_\star$", "black", 8), "o": (r"$\hat\theta$", "0.3", 4)}


def _legend(
    figure: Figure,
    shown: Iterable[Style],
    marks: Sequence[str] = (),
    where: Any = "outside lower center",
) -> None:
    """Outside the panels: it never hides a curve."""
    shown = list(shown)
    handles = [
        Line2D([], [], color=style.color, linestyle=style.linestyle, linewidth=2.0)
        for style in shown
    ]
    names = [style.name for style in shown]
    for mark in marks:  # of theta* and of estimates
        name, color, size = MARKS[mark]
        handles.append(Line2D([], [], color=color, marker=mark, linestyle="", markersize=size))
        names.append(name)
    wide = max(3, int(figure.get_figwidth() / 1.5))
    rows = len(names) if "right" in where else -(-len(names) // wide)
    columns = -(-len(names) // rows)
    figure.legend(handles, names, loc=where, ncols=columns)


def _thin(count: int, log: bool = False) -> np.ndarray:
    """Indices of at most ``POINTS`` points of a curve, with both ends."""
    if count <= POINTS:
        return np.arange(count)
    spaced = np.geomspace(1, count, POINTS) - 1 if log else np.linspace(0, count - 1, POINTS)
    return np.unique(spaced.round().astype(int))
