"""The Bradley-Terry loss of battles, row by row: two competitors and a few controls; compiled.

A row is ``z = s_a - s_b + <f, u>``: scores s of the competitors, coefficients u of the controls f.
Only a handful of entries of its feature vector are not 0, so that a pass costs O(n), not O(n d).
"""

from __future__ import annotations

import math

import numpy as np

from torchglb.backend import Floats, Ints, entry, kernel
from torchglb.backend.dense import EPS


@kernel
def _add(total: Floats, rest: Floats, place: int, term: float) -> None:
    """Adds a term to a sum in two numbers (Neumaier): n additions lose about one rounding."""
    old = total[place]
    new = old + term
    if abs(old) >= abs(term):
        rest[place] += (old - new) + term
    else:
        rest[place] += (term - new) + old
    total[place] = new


@kernel
def _add_square(matrix: Floats, a: int, b: int, controls: Floats, w: float) -> None:
    """Adds ``w x x'`` of one row: 1 at a, -1 at b, the controls behind all competitors."""
    C = controls.shape[0]
    K = matrix.shape[0] - C
    matrix[a, a] += w
    matrix[b, b] += w
    matrix[a, b] -= w
    matrix[b, a] -= w
    for j in range(C):
        f = w * controls[j]
        matrix[a, K + j] += f
        matrix[K + j, a] += f
        matrix[b, K + j] -= f
        matrix[K + j, b] -= f
        for k in range(C):
            matrix[K + j, K + k] += f * controls[k]


@entry
def expand(
    left: Ints,
    right: Ints,
    controls: Floats,
    weight: Floats,
    wins: Floats,
    theta: Floats,
    gradient: Floats,
    hessian: Floats,
    sums: Floats,
) -> None:
    """``L = sum_p w_p softplus(z_p) - y_p z_p`` with its derivatives at theta.

    Args:
        left: competitor a of each row, ``(n,)``.
        right: competitor b.
        controls: f, ``(n, C)``.
        weight: w, how often the row was seen.
        wins: y, how often a has won; a tie counts half.
        theta: scores, then coefficients, ``(K + C,)``.
        gradient: filled with the gradient, ``(K + C,)``.
        hessian: filled with the Hessian, ``(K + C, K + C)``; left alone if it has no rows.
        sums: filled with the loss, the sum of the sizes of its terms, and the sum of the lengths
            of the terms of the gradient.
    """
    n, C, d = left.shape[0], controls.shape[1], theta.shape[0]
    K = d - C
    curved = hessian.shape[0] > 0
    loss = np.zeros(2)
    rest = np.zeros(d)
    gradient[:] = 0.0
    if curved:
        hessian[:, :] = 0.0
    size, steep = 0.0, 0.0
    for p in range(n):
        a, b = left[p], right[p]
        z, square = theta[a] - theta[b], 2.0
        for j in range(C):
            z += controls[p, j] * theta[K + j]
            square += controls[p, j] * controls[p, j]
        e = math.exp(-abs(z))
        mean = 1.0 / (1.0 + e) if z >= 0.0 else e / (1.0 + e)
        bend = weight[p] * e / ((1.0 + e) * (1.0 + e))
        convex = weight[p] * (max(z, 0.0) + math.log1p(e))
        _add(loss, loss[1:], 0, convex)
        _add(loss, loss[1:], 0, -wins[p] * z)
        size += convex + wins[p] * abs(z)
        slope = weight[p] * mean - wins[p]
        steep += (weight[p] * mean + wins[p]) * math.sqrt(square)
        _add(gradient, rest, a, slope)
        _add(gradient, rest, b, -slope)
        for j in range(C):
            _add(gradient, rest, K + j, slope * controls[p, j])
        if curved:
            _add_square(hessian, a, b, controls[p], bend)
    for i in range(d):
        gradient[i] += rest[i]
    sums[0], sums[1], sums[2] = loss[0] + loss[1], size, steep


@entry
def squared_lengths(
    left: Ints, right: Ints, controls: Floats, cover: Floats, found: Floats
) -> None:
    """``x_p' M x_p`` of every row, from above, for a symmetric M ``(d, d)``: O(n C^2).

    Where M is wide and narrow along a row, its terms cancel: d roundings of their sizes are paid.
    """
    n, C = left.shape[0], controls.shape[1]
    K = cover.shape[0] - C
    lost = (cover.shape[0] + C * C + 8.0) * EPS
    for p in range(n):
        a, b = left[p], right[p]
        total = cover[a, a] + cover[b, b] - 2.0 * cover[a, b]
        size = abs(cover[a, a]) + abs(cover[b, b]) + 2.0 * abs(cover[a, b])
        for j in range(C):
            f = controls[p, j]
            total += 2.0 * f * (cover[a, K + j] - cover[b, K + j])
            size += 2.0 * abs(f) * (abs(cover[a, K + j]) + abs(cover[b, K + j]))
            for k in range(C):
                product = f * controls[p, k] * cover[K + j, K + k]
                total += product
                size += abs(product)
        found[p] = max(total, 0.0) + lost * size


@entry
def gram(left: Ints, right: Ints, controls: Floats, weight: Floats, found: Floats) -> None:
    """``sum_p w_p x_p x_p'`` into ``found (d, d)``: O(n C^2)."""
    found[:, :] = 0.0
    for p in range(left.shape[0]):
        _add_square(found, left[p], right[p], controls[p], weight[p])
