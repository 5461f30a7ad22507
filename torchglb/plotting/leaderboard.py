"""Pictures of comparisons in pairs: a leaderboard, and the curves of duels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from torchglb.checks import refuse
from torchglb.preferences import Leaderboard

#: competitors in a picture at most
SHOWN = 40
DECIDED, OPEN = "#1f3b73", "#9fb2d6"


def leaderboard_plot(board: Leaderboard, shown: int = SHOWN) -> Figure:
    """Intervals of the scores, and beside them the ranks that each competitor may have.

    Args:
        board: the leaderboard.
        shown: so many of the best are drawn.

    Example:
        >>> from torchglb.preferences import battles_of, leaderboard
        >>> battles = battles_of(["x"] * 9, ["y"] * 9, [1, 0, 1, 1, 1, 0, 1, 1, 1])
        >>> len(leaderboard_plot(leaderboard(battles)).axes)
        2
    """
    count = min(shown, len(board.names))
    if count < 1:
        raise refuse("shown", "at least one competitor", shown)
    place = np.arange(count)
    figure = Figure(figsize=(8.6, 1.5 + 0.24 * count), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1.0])
    scores, low, high = (v[:count] for v in (board.scores, board.lower, board.upper))
    left.hlines(place, low, high, color=OPEN, linewidth=2.4)
    left.plot(scores, place, "o", color=DECIDED, markersize=4)
    left.axvline(0.0, color="0.6", linewidth=0.8)
    left.set_yticks(place, [_short(name) for name in board.names[:count]], fontsize=8)
    left.set_ylim(count - 0.4, -0.6)
    left.set_xlabel("score minus the mean of all (log-odds)")
    best, worst = board.best_rank[:count], board.worst_rank[:count]
    right.hlines(place, best - 0.25, worst + 0.25, color=DECIDED, linewidth=5)
    right.set_xlim(0.4, len(board.names) + 0.6)
    right.set_xlabel("ranks that are possible")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axis in (left, right):
        axis.grid(axis="x", color="0.92", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    more = f", the first {count} of {len(board.names)}" if count < len(board.names) else ""
    title = f"{1.0 - board.delta:.4g} for all at once, at every look{more}"
    figure.suptitle(title, fontsize=10)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"


def duel_plot(curves: Mapping[str, Any], label: str = "regret of both arms") -> Figure:
    """Mean curves ``(R, T)`` by policy, with one standard error.

    Example:
        >>> len(duel_plot({"random-pairs": np.ones((2, 5)).cumsum(-1)}).axes)
        1
    """
    if not curves:
        raise refuse("curves", "at least one policy", "none")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    for name, values in curves.items():
        found = np.asarray(values)
        time, mean = np.arange(1, found.shape[-1] + 1), found.mean(0)
        error = found.std(0, ddof=1) / np.sqrt(len(found)) if len(found) > 1 else 0.0 * mean
        (line,) = axis.plot(time, mean, label=name)
        axis.fill_between(time, mean - error, mean + error, color=line.get_color(), alpha=0.2)
    axis.set_xlabel("rounds")
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0.0)
    axis.grid(color="0.92", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
