"""Contrast bounds of a fixed arm set in a linear model, compiled: O(K d^2) per row and per look.

The formulas are those of :mod:`torchglb.policies.oful_contrast`.
"""

from __future__ import annotations

import math

from torchglb.backend import Floats, entry, kernel
from torchglb.backend.dense import dot
from torchglb.contrasts.arm_kernels import SHORTEST

#: alpha below this share of its scale says nothing
LEAST_ALPHA = 1e-6
#: ``w'V^-1 w`` and ``alpha^2 c'V^-1 c`` cancel: what is left may have lost some roundings of them
LOST = 1e-7


@kernel
def _times(matrix: Floats, v: Floats, out: Floats) -> None:
    """``M v``."""
    for a in range(v.shape[0]):
        out[a] = dot(matrix[a], v)


@entry
def weigh_linear_row(units: Floats, inverse: Floats, x: Floats, r: Floats, sums: Floats) -> None:
    """Adds one row of each problem to the sums, in place.

    Args:
        units: the arms, of length 1, ``(N, K, d)``.
        inverse: ``V^-1`` of the rows before, ``(N, d, d)``.
        x: the row, ``(N, d)``.
        r: its reward, ``(N)``.
        sums: for each arm ``sum a_s x_s`` in the first d places, ``sum a_s r_s`` and ``sum
            a_s^2``, ``(N, K, d + 2)``.
    """
    N, K, d = units.shape
    for i in range(N):
        step, toward = x[i].copy(), x[i].copy()
        _times(inverse[i], x[i], step)
        for k in range(K):
            _times(inverse[i], units[i, k], toward)
            form = dot(toward, units[i, k])
            if not form > 0.0:  # the zero arm
                continue
            a = dot(units[i, k], step) / form
            for j in range(d):
                sums[i, k, j] += a * x[i, j]
            sums[i, k, d] += a * r[i]
            sums[i, k, d + 1] += a * a


@entry
def linear_bounds(
    units: Floats,
    lengths: Floats,
    inverse: Floats,
    theta: Floats,
    radius: Floats,
    sums: Floats,
    scales: Floats,
    levels: Floats,
    noise: float,
    lower: Floats,
    upper: Floats,
) -> None:
    """Ends of ``<c, theta*>`` for all arms; infinite where their sums say nothing.

    Args:
        units: the arms, of length 1, ``(N, K, d)``.
        lengths: of the arms, ``(N, K)``.
        inverse: ``V^-1``, ``(N, d, d)``.
        theta: the ridge estimate, ``(N, d)``.
        radius: of the ellipsoid, ``(N)``.
        sums: of :func:`weigh_linear_row`.
        scales: u, ``(U)``.
        levels: ``log(1/(w_u delta'))``, ``(U)``.
        noise: sigma.
        lower: receives the lower ends, ``(N, K)``.
        upper: receives the upper ends, ``(N, K)``.
    """
    N, K, d = units.shape
    for i in range(N):
        toward, turned = theta[i].copy(), theta[i].copy()
        for k in range(K):
            c, w = units[i, k], sums[i, k, :d]
            lower[i, k], upper[i, k] = -math.inf, math.inf
            if not lengths[i, k] > 0.0:
                lower[i, k], upper[i, k] = 0.0, 0.0
                continue
            if lengths[i, k] < SHORTEST:
                continue
            _times(inverse[i], c, toward)
            _times(inverse[i], w, turned)
            form, whole = dot(toward, c), max(dot(turned, w), 0.0)
            alpha = dot(toward, w) / form
            if not alpha > LEAST_ALPHA * min(1.0 / form, 1.0):
                continue
            leak = math.sqrt(max(whole - alpha * alpha * form, 0.0)) + LOST * math.sqrt(whole)
            slab = math.inf
            for u in range(scales.shape[0]):
                slab = min(slab, levels[u] / scales[u] + 0.5 * scales[u] * sums[i, k, d + 1])
            half = noise * slab * (1.0 + 1e-9) + radius[i] * leak
            shift = sums[i, k, d] - dot(w, theta[i])
            middle = dot(c, theta[i])
            lower[i, k] = lengths[i, k] * (middle + (shift - half) / alpha)
            upper[i, k] = lengths[i, k] * (middle + (shift + half) / alpha)
