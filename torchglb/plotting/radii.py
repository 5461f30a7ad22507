"""Pictures: every function takes plain numbers and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from torchglb.checks import refuse

Curve = tuple[Sequence[float], Sequence[float]]

#: One look for each radius, so that pictures can be compared.
RADIUS_STYLE: dict[str, dict[str, object]] = {
    "covering": {"color": "#9e9e9e", "linestyle": "-"},
    "lipschitz": {"color": "#1f3b73", "linestyle": "-"},
    "lipschitz-data": {"color": "#1f3b73", "linestyle": "--"},
    "mean-loss": {"color": "#2a9d8f", "linestyle": "-"},
    "gaussian-prior": {"color": "#e09f3e", "linestyle": "-"},
    "pac-bayes": {"color": "#c1121f", "linestyle": "-", "linewidth": 2.2},
    "mixture": {"color": "black", "linestyle": ":", "linewidth": 2.2},
    "centred": {"color": "#6a1b9a", "linestyle": "-", "linewidth": 2.2},
    "chi2-joint": {"color": "#78909c", "linestyle": "--"},
    "chi2": {"color": "#78909c", "linestyle": "-"},
}


def radii_plot(panels: Mapping[tuple[int, float], Mapping[str, Curve]]) -> Figure:
    """beta^2 against t, one panel for each dimension (row) and radius S of the ball (column).

    Args:
        panels: for each ``(d, S)`` the curves ``(times, values)`` by the name of the radius.

    Example:
        >>> figure = radii_plot({(2, 4.0): {"lipschitz": ([1, 10, 100], [3.0, 14.6, 19.2])}})
        >>> len(figure.axes)
        1
    """
    if not panels:
        raise refuse("panels", "at least one panel", panels)
    dims, sizes = (sorted(set(axis)) for axis in zip(*panels, strict=True))
    shape = (len(dims), len(sizes))
    figure = Figure(figsize=(1.2 + 4.4 * shape[1], 0.9 + 2.9 * shape[0]), layout="constrained")
    axes = figure.subplots(*shape, squeeze=False, sharex=True, sharey="row")
    shown: dict[str, Line2D] = {}
    for (d, S), curves in panels.items():
        axis = axes[dims.index(d)][sizes.index(S)]
        for name in [*RADIUS_STYLE, *(set(curves) - set(RADIUS_STYLE))]:
            if name in curves:
                (line,) = axis.plot(*curves[name], label=name, **RADIUS_STYLE.get(name, {}))
                shown.setdefault(name, line)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"d = {d}, S = {S:g}", fontsize=10)
        axis.grid(which="both", color="0.92", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("observations")
    for row in axes:
        row[0].set_ylabel(r"radius $\beta_t^2$")
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if str(f"{x:g}")[0] in "25" else "")
        for axis in row:
            axis.tick_params(which="both", labelsize=8)
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", frameon=False)
    return figure


def widths_plot(panels: Mapping[int, Mapping[str, Curve]]) -> Figure:
    """Widths of intervals against the number of observations, in units of the chi^2 interval's.

    Args:
        panels: for each dimension the curves ``(times, widths)`` by name; one of them, ``"chi2"``,
            is the unit.

    Example:
        >>> lines = {"chi2": ([10, 100], [2.0, 0.6]), "centred": ([10, 100], [4.0, 1.3])}
        >>> len(widths_plot({2: lines}).axes)
        1
    """
    if not panels or not all("chi2" in curves for curves in panels.values()):
        raise refuse("panels", "at least one panel, each with the curve 'chi2'", panels)
    figure = Figure(figsize=(1.6 + 3.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    shown: dict[str, Line2D] = {}
    for axis, (d, curves) in zip(axes, panels.items(), strict=True):
        unit = dict(zip(*curves["chi2"], strict=True))
        for name in [*RADIUS_STYLE, *(set(curves) - set(RADIUS_STYLE))]:
            if name in curves:
                times, widths = curves[name]
                ratio = [width / unit[n] for n, width in zip(times, widths, strict=True)]
                (line,) = axis.plot(times, ratio, label=name, **RADIUS_STYLE.get(name, {}))
                shown.setdefault(name, line)
        axis.set_xscale("log")
        axis.set_title(f"d = {d}", fontsize=10)
        axis.set_xlabel("observations")
        axis.grid(color="0.92", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("width / width of a fixed-sample interval")
    axes[0].set_ylim(bottom=0.0)
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", frameon=False)
    return figure


def coverage_plot(
    places: Sequence[str],
    names: Sequence[str],
    rates: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    delta: float,
) -> Figure:
    """How often theta* was ever missed, with exact intervals, against the delta that was promised.

    Args:
        places: the setting of each cell; cells of one setting share a row.
        names: the radius of each cell.
        rates: the share of replicates with a miss.
        intervals: its confidence interval.
        delta: what was promised.

    Example:
        >>> figure = coverage_plot(["random"], ["lipschitz"], [0.0], [(0.0, 0.02)], 0.05)
        >>> len(figure.axes)
        1
    """
    rows = list(dict.fromkeys(places))
    kinds = [name for name in RADIUS_STYLE if name in names]
    kinds += sorted(set(names) - set(kinds))
    figure = Figure(figsize=(7.5, 1.4 + 0.42 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for kind, name in enumerate(kinds):
        cells = [i for i, other in enumerate(names) if other == name]
        height = [rows.index(places[i]) + 0.7 * (kind + 0.5) / len(kinds) - 0.35 for i in cells]
        centre = [rates[i] for i in cells]
        below = [rates[i] - intervals[i][0] for i in cells]
        above = [intervals[i][1] - rates[i] for i in cells]
        color = RADIUS_STYLE.get(name, {}).get("color")
        shown = {"xerr": [below, above], "color": color, "label": name, "linewidth": 0.9}
        shape = "s" if name == "lipschitz-data" else "o"
        axis.errorbar(centre, height, fmt=shape, markersize=3.0, **shown)  # type: ignore[arg-type]
    axis.axvline(delta, color="black", linewidth=1.0, linestyle="--", label=f"delta = {delta:g}")
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(left=-0.002)
    axis.set_xlabel("share of replicates in which theta* was ever outside")
    axis.grid(axis="x", color="0.92", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def intervals_plot(
    times: Sequence[int],
    bands: Mapping[str, Curve],
    truth: float,
    outlines: Mapping[str, Curve],
    theta: tuple[float, float],
    radius: float,
) -> Figure:
    """Intervals for a mean reward as data come in, and the sets in the plane at the end.

    Args:
        times: when we looked.
        bands: lower and upper ends by the name of the radius.
        truth: the mean reward.
        outlines: closed curves ``(x, y)`` by the name of the radius.
        theta: theta*.
        radius: S, drawn as far as it is in view.

    Example:
        >>> band, outline = ([0.0, 0.2], [1.0, 0.8]), ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
        >>> plot = intervals_plot([1, 10], {"a": band}, 0.5, {"a": outline}, (0.2, 0.2), 3.0)
        >>> len(plot.axes)
        2
    """
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1.0])
    for name, (lower, upper) in bands.items():
        style = RADIUS_STYLE.get(name, {})
        left.plot(times, lower, label=name, **style)
        left.plot(times, upper, **style)
    left.axhline(truth, color="black", linewidth=0.9, linestyle="--", label="true mean")
    left.set_xscale("log")
    left.set_ylim(-0.02, 1.02)
    left.set_xlabel("observations, adaptively collected")
    left.set_ylabel("mean reward of one arm")
    left.set_title("95% intervals, valid at all times at once", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    for name, (x, y) in outlines.items():
        right.plot([*x, x[0]], [*y, y[0]], **RADIUS_STYLE.get(name, {}))
    right.plot(*theta, "k+", markersize=10, markeredgewidth=1.6)
    right.annotate(r"$\theta_*$", theta, xytext=(5, 5), textcoords="offset points")
    limits = right.axis()
    right.add_patch(Circle((0.0, 0.0), radius, fill=False, color="0.6", linewidth=0.9))
    right.axis(limits)
    right.set_aspect("equal")
    right.set_xlabel(r"$\theta_1$")
    right.set_ylabel(r"$\theta_2$")
    right.set_title(f"the sets after {times[-1]} observations", fontsize=10)
    for axis in (left, right):
        axis.grid(color="0.92", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure
