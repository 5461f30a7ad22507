"""Pictures: the figures of an experiment, and those of the radii. Needs matplotlib."""

from torchglb.plotting.estimates import forest_plot, running_plot
from torchglb.plotting.experiment import figures, save_figures
from torchglb.plotting.radii import Curve, coverage_plot, intervals_plot, radii_plot
from torchglb.plotting.style import POLICY_STYLE, Style, styles

__all__ = [
    "POLICY_STYLE",
    "Curve",
    "Style",
    "coverage_plot",
    "figures",
    "forest_plot",
    "intervals_plot",
    "radii_plot",
    "running_plot",
    "save_figures",
    "styles",
]
