"""Confidence sets in the plane, with a window on those that are too small to be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

from torchglb.plotting.style import Style

#: sets less wide than this share of a panel are shown in a window too, if it magnifies them enough
SMALL, ENOUGH = 0.3, 1.5
WINDOW = 0.42


@dataclass(frozen=True)
class Sets:
    """What one panel shows.

    Attributes:
        outlines: closed curves ``(M, 2)`` by label.
        centers: theta_hat ``(2,)`` by label.
        truth: theta* ``(2,)``, or None where there is none.
        radius: S.
        style: by label.
    """

    outlines: dict[str, np.ndarray]
    centers: dict[str, np.ndarray]
    truth: np.ndarray | None
    radius: float
    style: Mapping[str, Style]


def sets_of(
    arrays: Mapping[str, Mapping[str, np.ndarray]], style: Mapping[str, Style], column: int
) -> Sets:
    """The sets of the first replicate at one S; a set without a finite end is left out."""
    outlines, centers, truth, radius = {}, {}, None, 0.0
    for label, found in arrays.items():
        radius = float(found["S"][column])
        if "theta_star" in found and np.isfinite(found["theta_star"][column, 0]).all():
            truth = found["theta_star"][column, 0]
        boundary = found.get("boundary")
        if boundary is not None and np.isfinite(boundary[column]).all():
            outlines[label] = np.vstack([boundary[column], boundary[column, :1]])
            if "theta_hat" in found:
                centers[label] = found["theta_hat"][column, 0]
    return Sets(outlines, centers, truth, radius, style)


def set_panel(axis: Axes, sets: Sets) -> None:
    """Draws the sets, the largest beneath, and the window where some are small."""
    axis.set_xlabel(r"$\theta_1$")
    if not sets.outlines:
        _draw(axis, sets, np.full(2, -sets.radius), 2 * sets.radius)
        return
    low, side = _show(axis, _box(sets, list(sets.outlines)), 0.04)
    _draw(axis, sets, low, side)
    width = {k: np.ptp(outline, axis=0).max() for k, outline in sets.outlines.items()}
    small = [label for label in width if width[label] < SMALL * side]
    if not small:
        return
    box, margin = _box(sets, small), 0.12
    if np.ptp(box, axis=0).max() * (1 + 2 * margin) * ENOUGH > WINDOW * side:
        return
    corner = _emptiest_corner(axis, sets)
    if corner is None:
        return
    inset = axis.inset_axes(corner)
    low, side = _show(inset, box, margin)
    _draw(inset, sets, low, side)
    inset.set_xticks([])
    inset.set_yticks([])
    inset.spines[:].set_visible(True)
    for spine in inset.spines.values():
        spine.set_color("0.4")
    frame: dict[str, Any] = {"fill": False, "color": "0.4", "linewidth": 0.7, "zorder": 7}
    axis.add_patch(Rectangle(tuple(low), side, side, **frame))


def _draw(axis: Axes, sets: Sets, low: np.ndarray, side: float) -> None:
    """Draws into the square of a corner and a side; a set that is larger keeps an edge along it."""
    axis.add_patch(Circle((0.0, 0.0), sets.radius, fill=False, color="0.6", linewidth=0.9))
    beyond = 0
    for label in sorted(sets.outlines, key=lambda k: -_area(sets.outlines[k])):
        style, outline = sets.style[label], sets.outlines[label]
        if ((outline < low) | (outline > low + side)).any():
            beyond += 1  # each a little further inside: edges do not hide each other
            edge = min(0.012 * beyond, 0.1) * side
            outline = np.clip(outline, low + edge, low + side - edge)
        x, y = outline.T
        axis.fill(x, y, color=style.color, alpha=0.07, linewidth=0)
        axis.plot(x, y, color=style.color, linestyle=style.linestyle, linewidth=1.3)
        if label in sets.centers:
            dot: dict[str, Any] = {"markersize": 3.4, "markeredgewidth": 0, "zorder": 5}
            axis.plot(*sets.centers[label], "o", color=style.color, **dot)
    if sets.truth is not None:
        star: dict[str, Any] = {"markersize": 9, "markeredgecolor": "white", "zorder": 6}
        axis.plot(*sets.truth, "*", color="black", markeredgewidth=0.6, **star)
    axis.set_aspect("equal", adjustable="box")


def _area(outline: np.ndarray) -> float:
    x, y = outline.T
    return 0.5 * abs(float(x[:-1] @ y[1:] - x[1:] @ y[:-1]))


def _box(sets: Sets, labels: Sequence[str]) -> np.ndarray:
    """The corners ``(2, 2)`` of the box around some sets, as far as they are near the ball."""
    clouds = [sets.outlines[label] for label in labels]
    points = np.vstack(clouds if sets.truth is None else [*clouds, sets.truth])
    return np.clip([points.min(0), points.max(0)], -1.03 * sets.radius, 1.03 * sets.radius)


def _show(axis: Axes, box: np.ndarray, margin: float) -> tuple[np.ndarray, float]:
    """Shows a square around a box, so that all panels have one shape; its corner and side."""
    side = max(float(np.ptp(box, axis=0).max()), 1e-6) * (1 + 2 * margin)
    low = box.mean(0) - side / 2
    axis.set_xlim(low[0], low[0] + side)
    axis.set_ylim(low[1], low[1] + side)
    return low, side


def _emptiest_corner(axis: Axes, sets: Sets) -> tuple[float, float, float, float] | None:
    """Of the four corners of a panel, the one in which the fewest outline points lie.

    None where a window would hide an estimate or theta* in each of them.
    """
    limits = np.array([axis.get_xlim(), axis.get_ylim()])
    edges = (0.02, 0.98 - WINDOW)
    corners = [(x, y) for y in edges for x in edges]

    def crowd(corner: tuple[float, float], points: list[np.ndarray]) -> int:
        low = np.array(corner)
        place = (np.vstack(points) - limits[:, 0]) / np.ptp(limits, axis=1)
        return int(((place >= low) & (place <= low + WINDOW)).all(-1).sum())

    marked = [*sets.centers.values(), *([] if sets.truth is None else [sets.truth])]
    free = [corner for corner in corners if not marked or not crowd(corner, marked)]
    if not free:
        return None
    outlines = list(sets.outlines.values())
    return (*min(free, key=lambda corner: crowd(corner, outlines)), WINDOW, WINDOW)
