"""What a fit answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Bounds(NamedTuple):
    """Estimates and intervals of k contrasts, each ``(k,)``.

    Example:
        >>> from torchglb import Gaussian
        >>> from torchglb.estimators import LinearFit, Scale
        >>> fit = LinearFit(Scale.identity(["x"]), Gaussian(1.0), delta=0.05)
        >>> fit.append(np.ones((400, 1)), np.full(400, 3.0))
        0
        >>> bounds = fit.interval(np.eye(1))
        >>> bool(bounds.lower[0] < bounds.estimate[0] < bounds.upper[0])
        True
    """

    estimate: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


class Evidence(NamedTuple):
    """A test: the logarithm of the e-value, and the p-value that is valid at all times.

    Example:
        >>> import numpy as np
        >>> import torchglb as glb
        >>> rng = np.random.default_rng(0)
        >>> data = {"x": rng.uniform(0, 10, 400), "y": rng.integers(0, 2, 400)}
        >>> scaler = glb.estimators.Scaler(burn_in=100)
        >>> fit = glb.glm("y ~ x", data, family="bernoulli", scaler=scaler)
        >>> found = fit.test("x = 0")
        >>> found.p <= 1, found.e > 0
        (True, True)
    """

    log_e: float
    p: float

    @property
    def e(self) -> float:
        """The e-value; infinite where it overflows."""
        return math.exp(self.log_e) if self.log_e < 709.0 else math.inf


@dataclass(frozen=True)
class GLMEstimate:
    """The maximum-likelihood estimate.

    Attributes:
        phi: ``(d,)``, in the units of the scale.
        hessian: of the loss there, ``(d, d)``.
        at_boundary: whether the data alone do not hold it: with S the ball does; without, where
            the likelihood has no single maximum, phi is the mode of the posterior instead.
        radius: of that ball, in the units of phi.
    """

    phi: np.ndarray
    hessian: np.ndarray
    at_boundary: bool
    radius: float


def outward(
    lower: np.ndarray, upper: np.ndarray, size: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``size * end + shift``, rounded away from the middle."""
    with np.errstate(invalid="ignore"):
        low, high = size * lower, size * upper
        slack = 8.0 * np.finfo(float).eps
        return low + shift - slack * (abs(low) + abs(shift)), high + shift + slack * (
            abs(high) + abs(shift)
        )
