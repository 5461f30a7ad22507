"""Pictures: every function takes plain numbers and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
        row[0].tick_params(which="both", labelsize=8)
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", frameon=False)
    return figure
