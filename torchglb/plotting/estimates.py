"""Coefficients with their intervals: a forest plot, and intervals over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from torchglb.checks import refuse

ANYTIME, FIXED, ESTIMATE = "#1f3b73", "#e07b00", "#111111"
#: longer names are cut in the middle
LONGEST = 34
#: panels beside each other in the picture of intervals over time
COLUMNS = 3
#: a panel shows intervals whole from this share of the looks on: the first ones are far longer
FROM = 0.15

Numbers = Sequence[float] | np.ndarray


def short(name: str) -> str:
    """A name that fits beside a panel."""
    if len(name) <= LONGEST:
        return name
    half = (LONGEST - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def forest_plot(
    names: Sequence[str],
    estimate: Numbers,
    lower: Numbers,
    upper: Numbers,
    fixed_lower: Numbers | None = None,
    fixed_upper: Numbers | None = None,
) -> Figure:
    """A strip for each coefficient, on an axis of its own: their units differ.

    Args:
        names: of k coefficients.
        estimate: k numbers.
        lower: ends that hold at all times.
        upper: the same.
        fixed_lower: ends that hold for one look at a fixed sample.
        fixed_upper: the same.

    Example:
        >>> figure = forest_plot(["x"], [1.0], [0.5], [1.6])
        >>> len(figure.axes)
        1
    """
    k = len(names)
    if not k:
        raise refuse("names", "at least one coefficient", "none")
    figure = Figure(figsize=(7.6, 0.8 + 0.62 * k), layout="constrained")
    axes = figure.subplots(k, 1, squeeze=False)[:, 0]
    for at, axis in enumerate(axes):
        ends = [(float(lower[at]), float(upper[at]), ANYTIME, 0.18)]
        if fixed_lower is not None and fixed_upper is not None:
            ends.append((float(fixed_lower[at]), float(fixed_upper[at]), FIXED, -0.22))
        _strip(axis, short(names[at]), float(estimate[at]), ends)
    _legend(figure, with_fixed=fixed_lower is not None)
    return figure


def _strip(
    axis: Axes, name: str, estimate: float, ends: list[tuple[float, float, str, float]]
) -> None:
    finite = [v for low, high, *_ in ends for v in (low, high) if np.isfinite(v)]
    finite = [*finite, estimate, 0.0]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 1.0
    axis.set_xlim(low - room, high + room)
    axis.axvline(0.0, color="0.7", linewidth=0.9, zorder=0)
    for left, right, color, height in ends:
        shown = np.clip([left, right], low - room, high + room)
        axis.plot(shown, [height, height], color=color, linewidth=2.4, solid_capstyle="butt")
        for end, place, marker in zip((left, right), shown, "<>", strict=True):
            mark: dict[str, Any] = {"color": color, "markersize": 7, "clip_on": False}
            axis.plot(place, height, "|" if np.isfinite(end) else marker, **mark)
    axis.plot(estimate, ends[0][3], "o", color=ESTIMATE, markersize=4.5, zorder=4)
    axis.set_ylim(-0.62, 0.55)
    axis.set_yticks([])
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, parse_math=False)
    axis.tick_params(axis="x", labelsize=7.5, pad=1.5)
    axis.locator_params(axis="x", nbins=6)
    axis.spines[["top", "right", "left"]].set_visible(False)


def running_plot(
    n: Numbers,
    names: Sequence[str],
    estimate: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    fixed_lower: np.ndarray,
    fixed_upper: np.ndarray,
) -> Figure:
    """Intervals over time, a panel for each coefficient.

    Args:
        n: rows at each of T looks.
        names: of k coefficients.
        estimate: ``(T, k)``.
        lower: ``(T, k)``, ends that hold at all looks at once.
        upper: the same.
        fixed_lower: ``(T, k)``, ends that would hold at one look.
        fixed_upper: the same.

    Example:
        >>> import numpy as np
        >>> low, middle, high = (np.full((2, 1), end) for end in (0.5, 1.0, 1.5))
        >>> len(running_plot([10, 20], ["x"], middle, low, high, low, high).axes)
        1
    """
    k, looks = len(names), len(n)
    if not k or not looks:
        raise refuse("running", "at least one coefficient and one look", f"{k} and {looks}")
    columns = min(COLUMNS, k)
    lines = -(-k // columns)
    figure = Figure(figsize=(0.6 + 3.5 * columns, 0.7 + 2.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for at, axis in enumerate(axes):
        if at >= k:
            axis.set_visible(False)
            continue
        parts = [array[:, at] for array in (lower, upper, fixed_lower, fixed_upper)]
        bottom, top = _window([*parts, estimate[:, at]], looks)
        low, high, first, last = (np.clip(part, bottom, top) for part in parts)
        axis.fill_between(n, low, high, color=ANYTIME, alpha=0.18, linewidth=0)
        for curve in (low, high):
            axis.plot(n, curve, color=ANYTIME, linewidth=1.4)
        for curve in (first, last):
            axis.plot(n, curve, color=FIXED, linewidth=1.1, linestyle="--")
        axis.plot(n, np.clip(estimate[:, at], bottom, top), color=ESTIMATE, linewidth=1.0)
        axis.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
        axis.set_ylim(bottom, top)
        axis.set_title(short(names[at]), fontsize=9.5, parse_math=False)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="x", nbins=5)
        axis.spines[["top", "right"]].set_visible(False)
        if at >= k - columns:
            axis.set_xlabel("rows", fontsize=9)
    _legend(figure, with_fixed=True)
    return figure


def _window(parts: list[np.ndarray], looks: int) -> tuple[float, float]:
    """What a panel shows: everything finite but the longest intervals of the first looks."""
    start = min(int(FROM * looks), looks - 1)
    late = np.concatenate([part[start:] for part in parts] + [np.zeros(1)])
    finite = late[np.isfinite(late)]
    low, high = float(finite.min()), float(finite.max())
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def _legend(figure: Figure, *, with_fixed: bool) -> None:
    handles: list[Any] = [
        Line2D([], [], color=ESTIMATE, marker="o", markersize=4.5, label="estimate"),
        Patch(color=ANYTIME, label="valid at all times"),
    ]
    if with_fixed:
        label = "one look at a fixed sample only"
        handles.append(Line2D([], [], color=FIXED, linestyle="--", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
