"""Pictures: the figures of an experiment, and those of the radii. Needs matplotlib."""

from torchglb.plotting.experiment import figures, save_figures
from torchglb.plotting.leaderboard import duel_plot, leaderboard_plot
from torchglb.plotting.radii import (
    Curve,
    coverage_plot,
    intervals_plot,
    radii_plot,
    widths_plot,
)
from torchglb.plotting.style import POLICY_STYLE, Style, styles

__all__ = [
    "POLICY_STYLE",
    "Curve",
    "Style",
    "coverage_plot",
    "duel_plot",
    "figures",
    "intervals_plot",
    "leaderboard_plot",
    "radii_plot",
    "save_figures",
    "styles",
    "widths_plot",
]
