"""Certified bounds on ``x' M^-1 x`` by plain sums, one problem after the other.

The formulas are those of :func:`torchglb.linalg.inverse_form_bounds`, which takes over where plain
sums leave too much doubt.
"""

from __future__ import annotations

import numpy as np

from torchglb.backend.compiled import Floats, entry, kernel
from torchglb.backend.dense import EPS, cholesky, inverse_trace, solve_factored

#: plain sums will do where they leave no more doubt than this, relative to the form
PLAIN = 1e-10


@entry
def plain_bounds(x: Floats, matrix: Floats, low: Floats, high: Floats) -> bool:
    """Bounds on the forms of x ``(N, K, d)`` in ``M^-1``, M ``(N, d, d)``: its symmetric part.

    Returns:
        whether plain sums will do for all; where they will not, low and high ``(N, K)`` are NaN.
    """
    d = x.shape[2]
    even, factor, y = np.empty((d, d)), np.empty((d, d)), np.empty(d)
    sure = True
    for b in range(x.shape[0]):
        for i in range(d):
            for j in range(d):
                even[i, j] = 0.5 * (matrix[b, i, j] + matrix[b, j, i])
        least = least_eigenvalue(even, factor, y)
        known = least > 0.0 and cholesky(even, 0.0, factor)
        for k in range(x.shape[1]):
            low[b, k] = high[b, k] = np.nan
            if known:
                solve_factored(factor, x[b, k], y)
                form, doubt = form_and_doubt(x[b, k], even, y, least)
                if doubt <= PLAIN * form:
                    low[b, k] = (form - doubt) * (1.0 - 4.0 * EPS)
                    high[b, k] = (form + doubt) * (1.0 + (d + 8) * EPS)
            sure = sure and low[b, k] <= high[b, k]
    return sure


@kernel
def form_and_doubt(x: Floats, matrix: Floats, y: Floats, least: float) -> tuple[float, float]:
    """``x'y + r'y`` with ``r = x - M y``, and how far ``x' M^-1 x`` may be from it."""
    d = x.shape[0]
    form, sizes, doubt, left = 0.0, 0.0, 0.0, 0.0
    for i in range(d):
        r, size = x[i], abs(x[i])
        for j in range(d):
            r -= matrix[i, j] * y[j]
            size += abs(matrix[i, j] * y[j])
        error = (d + 4) * EPS * size  # symmetrising has rounded the entries of M as well
        form += (x[i] + r) * y[i]
        sizes += (abs(x[i]) + abs(r)) * abs(y[i])
        doubt += abs(y[i]) * error
        left += (abs(r) + error) ** 2
    return form, doubt + 2 * (d + 2) * EPS * sizes + left / least


@kernel
def least_eigenvalue(matrix: Floats, factor: Floats, y: Floats) -> float:
    """A certified lower bound on the least eigenvalue; 0 if unknown (writes over factor and y).

    If the factorisation of ``M - s I`` runs to completion, the least eigenvalue is at least
    ``s - c tr(M)`` (Rump 2006), here with ``c = (d + 10) eps / 2``: :func:`cholesky` multiplies by
    reciprocals, and M is rounded. As s, 7/8 of ``1 / tr(M^-1)``, which is below that eigenvalue.
    """
    d, trace = matrix.shape[0], 0.0
    for i in range(d):
        trace += matrix[i, i]
    if not cholesky(matrix, 0.0, factor):
        return 0.0
    guess = 0.875 / inverse_trace(factor, y)
    if not cholesky(matrix, -guess, factor):
        return 0.0
    return max(guess - 0.5 * (d + 10) * EPS * trace, 0.0)
