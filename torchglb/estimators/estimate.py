"""The estimate to the last digit, and what stands in for it where there is none."""

from __future__ import annotations

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from torchglb.domain import Ball
from torchglb.estimators.evidence import expand
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood

#: a mean variance of the rows in some direction below this is none: the data are separated
FLAT = 1e-11


def is_flat(gram: np.ndarray, hessian: Tensor, dispersion: float) -> bool:
    """Whether no row has curvature left in some direction: the maximum is at infinity.

    Args:
        gram: ``sum x x'``, regular, ``(d, d)``.
        hessian: of the loss, ``(d, d)``.
        dispersion: g.
    """
    size = np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    least = linalg.eigh(hessian.numpy() / size, gram / size, eigvals_only=True)[0]
    return bool(least < FLAT / dispersion)


def posterior_mode(loss: NegativeLogLikelihood, deviation: float, radius: float) -> Tensor:
    """``argmin L(theta) + |theta|^2/(2 s^2)``, ``(d,)``: unique whatever the rows are.

    Args:
        loss: L.
        deviation: s, of the Gaussian prior.
        radius: of a ball that holds it.
    """
    ridged = NegativeLogLikelihood(
        loss.family, loss.X, loss.r, loss.w, regularization=1.0 / deviation**2
    )
    found = minimize_likelihood(ridged, Ball(loss.dim, radius), tol=1e-13, throw=False)
    return polished(ridged, found.theta)[0]


def polished(loss: NegativeLogLikelihood, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Newton steps until the gradient is rounding: the loss alone shows half of the digits."""
    _, gradient, hessian = expand(loss, theta)
    for _ in range(4):
        step = torch.linalg.lstsq(hessian, gradient[:, None], driver="gelsd").solution[:, 0]
        moved = theta - step
        _, slope, curve = expand(loss, moved)
        if not bool(slope.norm() < 0.5 * gradient.norm()):
            break
        theta, gradient, hessian = moved, slope, curve
    return theta, hessian
