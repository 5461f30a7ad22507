"""Confidence radii: one theorem, one function; and objects that carry their sums along.

With probability 1 - delta, for all t at once, theta* lies in ``{theta : L_t(theta) <= level_t}``,
and ``beta_t^2 = level_t - L_t(theta_hat)`` is the radius.
"""

from __future__ import annotations

from torchglb.checks import check_choice
from torchglb.families import GLMFamily
from torchglb.radii.base import (
    Evaluation,
    LipschitzRadius,
    Radius,
    Refinement,
    State,
    require_weights,
)
from torchglb.radii.boundary import radius_refuted, warn_of_boundary
from torchglb.radii.posterior.centred import Centred, centred_level
from torchglb.radii.posterior.gaussian import GaussianPrior, gaussian_prior_level, holds_on_line
from torchglb.radii.posterior.mixture import Mixture, mixture_level
from torchglb.radii.posterior.uniform import PACBayes, pac_bayes_level
from torchglb.radii.problem import Problem, self_concordance_of
from torchglb.radii.statistics import RowStatistics, empty_statistics, update_statistics
from torchglb.radii.theorems.covering import Covering, covering
from torchglb.radii.theorems.lipschitz import (
    LipschitzBound,
    data_lipschitz,
    gaussian_lipschitz,
    poisson_martingale,
    table1_bounded,
    table1_poisson,
    table1_subgaussian,
)
from torchglb.radii.theorems.mean_loss import MeanLoss, mean_loss_radius
from torchglb.radii.theorems.theorem31 import Lipschitz, shrinkage_infimum, theorem31
from torchglb.radii.theorems.theorem32 import (
    regularization_for,
    theorem32,
    theorem32_fixed_point,
)

#: What the names stand for; ``"lipschitz"`` and ``"covering"`` are the paper's, with Table 1.
NAMED: dict[str, Radius] = {
    "lipschitz": Lipschitz(constant="table1", inf="exact"),
    "mean-loss": MeanLoss(),
    "pac-bayes": PACBayes(),
    "gaussian-prior": GaussianPrior(),
    "mixture": Mixture(),
    "covering": Covering(constant="table1"),
    "centred": Centred(),
}


def by_name(name: str) -> Radius:
    """The radius that a name stands for.

    Example:
        >>> by_name("lipschitz")
        Lipschitz(constant='table1', inf='exact')
    """
    return NAMED[check_choice("radius", name, tuple(NAMED))]


def automatic(family: GLMFamily) -> Radius:
    """What ``radius="auto"`` stands for: the centred radius with most weight on the uniform prior.

    The centred prior has a quarter of delta. Then intervals are at most some 4% wider than those of
    ``"pac-bayes"`` in the first few hundred rows, and narrower later (experiments/widths.py).
    Families whose constants are known on the ball only have no centred prior: ``"pac-bayes"``.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> automatic(Bernoulli()).uniform
        0.75
    """
    return Centred(uniform=0.75) if holds_on_line(family) else PACBayes()


__all__ = [
    "NAMED",
    "Centred",
    "Covering",
    "Evaluation",
    "GaussianPrior",
    "Lipschitz",
    "LipschitzBound",
    "LipschitzRadius",
    "MeanLoss",
    "Mixture",
    "PACBayes",
    "Problem",
    "Radius",
    "Refinement",
    "RowStatistics",
    "State",
    "automatic",
    "by_name",
    "centred_level",
    "covering",
    "data_lipschitz",
    "empty_statistics",
    "gaussian_lipschitz",
    "gaussian_prior_level",
    "mean_loss_radius",
    "mixture_level",
    "pac_bayes_level",
    "poisson_martingale",
    "radius_refuted",
    "regularization_for",
    "require_weights",
    "self_concordance_of",
    "shrinkage_infimum",
    "table1_bounded",
    "table1_poisson",
    "table1_subgaussian",
    "theorem31",
    "theorem32",
    "theorem32_fixed_point",
    "update_statistics",
    "warn_of_boundary",
]
