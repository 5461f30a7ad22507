"""The average of a convex log-partition over the ball: ``E m(s U)``, from above.

U is a coordinate of a uniform point of the unit ball of R^d: density proportional to
``(1 - u^2)^((d-1)/2)``. The average is ``sum_j weight_j (m(s u_j) + m(-s u_j))/2 + error``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson, has_formulas_of


class BallRule(NamedTuple):
    """Nodes and weights for ``E m(s U)``, certified from above for ``0 <= s <= longest``.

    Attributes:
        nodes: ``(*B, N)`` in [0, 1].
        weights: ``(*B, N)``, not negative, of sum 1.
        error: a bound on what the rule may lack, for every s up to ``longest``, ``(*B)``.
    """

    nodes: Tensor
    weights: Tensor
    error: Tensor

    def __call__(self, family: GLMFamily, s: Tensor) -> Tensor:
        """At least ``E m(s U)``, elementwise in ``s (*B, k)``; O(N) per entry."""
        z = s[..., None] * self.nodes[..., None, :]
        even = 0.5 * (family.log_partition(z) + family.log_partition(-z))
        return (even * self.weights[..., None, :]).sum(-1) + self.error[..., None]


def ball_rule(family: GLMFamily, dim: int, longest: float) -> BallRule:
    """The rule for a family, on the host.

    Gauss-Gegenbauer where the growth of m off the real axis is known (Gaussian: exact; Poisson,
    binomial), with the error bound of analytic functions; else chords, which lie above any
    convex function and need no constant at all.

    Args:
        family: gives m.
        dim: d.
        longest: the largest s, which is S for features of norm at most 1.
    """
    for pairs in (16, 32, 64, 128, 256, 512):
        error = _gauss_error(family, longest, 2 * pairs)
        # relative to the scale of m over the ball
        if error <= 1e-12 * (1.0 + longest):
            nodes, weights = special.roots_gegenbauer(2 * pairs, 0.5 * dim)
            half = weights[pairs:] / weights[pairs:].sum()
            return _rule(nodes[pairs:], half, error)
    return _chord_rule(dim)


def _gauss_error(family: GLMFamily, s: float, points: int) -> float:
    """A bound on the error of Gauss's rule for ``u -> m(s u)`` on [-1, 1].

    If f is analytic and at most M in modulus within the Bernstein ellipse of parameter rho, its
    Chebyshev series cut at degree n = 2 points - 1 errs by at most 2 M rho^-n/(rho - 1), and
    Gauss's rule, exact up to degree n with positive weights, by at most twice that.
    """
    if has_formulas_of(family, Gaussian):
        return 0.0  # a polynomial of degree 2
    best = math.inf
    for growth in np.geomspace(1.001, 16.0, 200):
        rho = float(growth)
        real, imaginary = 0.5 * s * (rho + 1 / rho), 0.5 * s * (rho - 1 / rho)
        log_size = _log_modulus(family, real, imaginary)
        log_error = math.log(4.0) + log_size - (2 * points - 1) * math.log(rho) - math.log(rho - 1)
        best = min(best, log_error)
    return math.exp(best) if best < 700 else math.inf


def _log_modulus(family: GLMFamily, real: float, imaginary: float) -> float:
    """Log of a bound on the even part of m(w), ``|Re w| <= real`` and ``|Im w| <= imaginary``."""
    if has_formulas_of(family, Poisson):  # |cosh w| <= cosh(Re w)
        return real
    if has_formulas_of(family, Binomial) and imaginary < math.pi:
        # log(2 cosh(w/2)) = w/2 + log(1 + e^-w) for Re w >= 0, and |1 + e^-w| >= |sin Im w| where
        # |Im w| > pi/2, else >= 1
        nearest = math.sin(imaginary) if imaginary > 0.5 * math.pi else 1.0
        size = 0.5 * real + max(math.log(2.0), -math.log(nearest)) + math.pi
        return math.log(family.trials * size)
    return math.inf


def _chord_rule(dim: int, cells: int = 128) -> BallRule:
    """The exact average of the chords of ``u -> (m(su) + m(-su))/2``, convex on [0, 1].

    The nodes are quantiles of the density to the power 1/3, which is best for constant curvature;
    the relative error is then about ``0.1 d / cells^2``.
    """
    power = 0.5 * (dim - 1)
    levels = np.arange(1, cells) / cells
    inner = np.sqrt(special.betaincinv(0.5, power / 3 + 1, levels))
    u = np.concatenate([[0.0], inner, [1.0]])
    mass = np.diff(special.betainc(0.5, power + 1, u**2))  # P(|U| in the cell)
    density_at_0 = 2.0 / special.beta(0.5, power + 1)  # of |U|
    moment = -np.diff((1 - u**2) ** (power + 1)) * density_at_0 / (2 * power + 2)  # E[|U| in cell]
    width = np.diff(u)
    right = np.clip((moment - u[:-1] * mass) / width, 0.0, mass)  # weight of the right end
    weights = np.zeros(cells + 1)
    weights[1:] += right
    weights[:-1] += mass - right
    return _rule(u, weights / weights.sum(), 0.0)


def _rule(nodes: np.ndarray, weights: np.ndarray, error: float) -> BallRule:
    return BallRule(
        *(torch.as_tensor(part, dtype=torch.float64) for part in (nodes, weights, error))
    )
