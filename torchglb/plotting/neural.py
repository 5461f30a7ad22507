"""Pictures of the experiments around neural encoders; plain numbers in, a matplotlib figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchglb.checks import refuse

COLORS = ("#1f3b73", "#e09f3e", "#c1121f", "#2a9d8f", "#6c757d")
Rows = Sequence[Sequence[float]]


def _curves(axis: Axes, x: Sequence[float], runs: Mapping[str, Rows]) -> None:
    """The mean of every contestant's runs as a thick line, each run as a thin one."""
    for (name, rows), color in zip(runs.items(), COLORS, strict=False):
        for row in rows:
            axis.plot(x, row, color=color, alpha=0.3, linewidth=0.7)
        mean = [fmean(column) for column in zip(*rows, strict=True)]
        axis.plot(x, mean, color=color, linewidth=2.2, label=name)


def _plain(axis: Axes) -> None:
    axis.grid(color="0.92", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def regret_curves_plot(regret: Mapping[str, Rows], guess: float | None = None) -> Figure:
    """Summed regret against rounds, and the share of wrong choices in a moving window.

    Args:
        regret: for every contestant the summed regret of each seed, round by round.
        guess: the regret per round of guessing, drawn as a dashed line.

    Example:
        >>> figure = regret_curves_plot({"a": [[1.0, 1.0, 2.0]]}, guess=0.9)
        >>> len(figure.axes)
        2
    """
    if not regret:
        raise refuse("regret", "at least one contestant", regret)
    rounds = len(next(iter(regret.values()))[0])
    times = list(range(1, rounds + 1))
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, times, regret)
    window = max(1, rounds // 8)
    later = times[window:]
    recent = {
        name: [[(row[t - 1] - row[t - 1 - window]) / window for t in later] for row in rows]
        for name, rows in regret.items()
    }
    _curves(right, later, recent)
    if guess is not None:
        style = {"color": "black", "linestyle": "--", "linewidth": 1.0, "label": "guessing"}
        left.plot(times, [guess * t for t in times], **style)
        right.axhline(guess, **style)
    left.set_ylabel("wrong choices so far")
    left.set_title("thin: one seed; thick: the mean", fontsize=10)
    right.set_ylabel(f"share of wrong choices, last {window} rounds")
    right.set_ylim(0.0, 1.02)
    right.set_title("how often it is wrong now", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    for axis in (left, right):
        axis.set_xlabel("rounds")
        _plain(axis)
    return figure


def race_plot(times: Sequence[float], losses: Mapping[str, Rows]) -> Figure:
    """Held-out loss against processor time: the whole race, and its last half from near by.

    Args:
        times: when the loss was measured, in seconds.
        losses: for every method the losses of each seed at those times.

    Example:
        >>> len(race_plot([0.0, 1.0, 2.0], {"a": [[0.7, 0.5, 0.4]]}).axes)
        2
    """
    if not losses:
        raise refuse("losses", "at least one method", losses)
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    half = len(times) // 2
    _curves(left, times, losses)
    _curves(right, times[half:], {name: [row[half:] for row in v] for name, v in losses.items()})
    left.set_title("thin: one seed; thick: the mean", fontsize=10)
    left.set_ylabel("held-out loss on new tasks")
    left.legend(frameon=False, fontsize=8)
    right.set_title("the second half", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("processor time, seconds")
        _plain(axis)
    return figure


def design_plot(
    times: Sequence[int],
    widths: Mapping[str, Rows],
    places: Mapping[str, Rows],
    field: Rows,
) -> Figure:
    """How the largest interval shrinks under several designs, and where they observe.

    Args:
        times: numbers of observations.
        widths: for every design the largest width of each run at those times.
        places: for every design the points of the square ``[-1, 1]^2`` that one run observed.
        field: the true mean reward on a grid over the square, by rows.

    Example:
        >>> points = [[0.0, 0.5], [0.5, 0.0]]
        >>> plot = design_plot([5, 10], {"a": [[0.9, 0.5]]}, {"a": points}, [[0.1, 0.9]] * 2)
        >>> plot.axes[1].get_title()
        'a'
    """
    if not widths:
        raise refuse("widths", "at least one design", widths)
    count = len(places)
    figure = Figure(figsize=(4.4 + 2.9 * count, 3.8), layout="constrained")
    axes = figure.subplots(1, 1 + count, width_ratios=[1.4] + [1.0] * count)
    _curves(axes[0], times, widths)
    axes[0].set_xlabel("observations")
    axes[0].set_ylabel("largest width of a 95% interval, mean scale")
    axes[0].set_title("thin: one run; thick: the mean", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    _plain(axes[0])
    for axis, (name, points), color in zip(axes[1:], places.items(), COLORS, strict=False):
        shown = axis.imshow(
            field, origin="lower", extent=(-1, 1, -1, 1), cmap="Greys", vmin=0, vmax=1, alpha=0.6
        )
        x, y = zip(*points, strict=True)
        axis.plot(x, y, "o", color=color, markersize=4, alpha=0.6, clip_on=False)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("context, first coordinate", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[1].set_ylabel("second coordinate", fontsize=8)
    bar = figure.colorbar(shown, ax=axes[-1], shrink=0.7)
    bar.set_label("true mean reward", fontsize=8)
    return figure
