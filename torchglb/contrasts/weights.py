"""Predictable weights of the rows: how much each says about each contrast.

``b_s = w_s <x_s, H^-1 c>/<c, H^-1 c>`` with ``H`` the information of the rows before s (plus a
ridge), at a running estimate: the least favourable direction. Sums ``sum_s b_s (r_s - mu_s)`` are
then, to first order, blind to every direction of theta but c. The weight of a row depends on
earlier rows and rewards, on x_s and on w_s, never on r_s: that is all that validity needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from torchglb.backend import Floats
from torchglb.contrasts.enclosure import CHUNK
from torchglb.contrasts.kernels import weigh_row, weigh_rows
from torchglb.families import GLMFamily

#: a row is taken to have at least this curvature, relative to the largest at 0
FLOOR = 0.08


class Weights(NamedTuple):
    """The state of N problems: replaced as a whole, in one assignment.

    Attributes:
        inverse: ``H^-1``, ``(N, d, d)``.
        forms: ``<c, H^-1 c>``, ``(N, m)``.
        guess: a running estimate of theta, ``(N, d)``.
        b: a buffer whose first rows are the weights so far, ``(N, capacity, m)``.
        rows: how many.
    """

    inverse: Floats
    forms: Floats
    guess: Floats
    b: Floats
    rows: int

    def copy(self) -> Weights:
        """Without shared memory."""
        inverse, forms, guess, b = (part.copy() for part in self[:4])
        return Weights(inverse, forms, guess, b, self.rows)


def no_weights(contrasts: Floats, ridge: Floats) -> Weights:
    """Before the first row: ``H = ridge I``, for contrasts ``(N, m, d)`` and a ridge ``(N)``."""
    N, m, d = contrasts.shape
    inverse = np.eye(d)[None] / ridge[:, None, None]
    forms = (contrasts * contrasts).sum(-1) / ridge[:, None]
    return Weights(inverse, forms, np.zeros((N, d)), np.zeros((N, 0, m)), 0)


def with_rows(
    held: Weights,
    family: GLMFamily,
    contrasts: Floats,
    S: Floats,
    X: Floats,
    r: Floats,
    w: Floats,
) -> Weights:
    """With more rows: O(d^2 + m d) each; what was held stays as it is.

    Args:
        held: the state before.
        family: gives mean and variance.
        contrasts: of length 1, ``(N, m, d)``.
        S: the radii of the balls, ``(N)``.
        X: ``(N, k, d)``, of any layout.
        r: rewards, ``(N, k)``.
        w: weights of the rows, ``(N, k)``.
    """
    b, end = held.b, held.rows + X.shape[1]
    if end > b.shape[1]:
        b = np.zeros((len(b), max(end, 2 * b.shape[1], 64), b.shape[2]))
        b[:, : held.rows] = held.b[:, : held.rows]
    inverse, forms, guess = held.inverse.copy(), held.forms.copy(), held.guess.copy()
    scale, known = 1.0 / family.dispersion, family.compiled()
    floor = FLOOR * scale * float(family.variance(torch.zeros((), dtype=torch.float64)))
    for i in range(X.shape[0]):
        out = b[i, held.rows : end]  # behind the rows in use, where nobody looks
        parts = contrasts[i], inverse[i], forms[i], guess[i]
        if known is not None:
            for start in range(0, X.shape[1], CHUNK):  # small copies
                few = slice(start, start + CHUNK)
                x, y, weight = (np.ascontiguousarray(given[i, few]) for given in (X, r, w))
                weigh_rows(known, x, y, weight, S[i], floor, *parts, out[few])
            continue
        for s in range(X.shape[1]):
            z = torch.tensor(X[i, s] @ guess[i])
            surprise = (r[i, s] - float(family.mean(z))) * scale
            curvature = max(float(family.variance(z)) * scale, floor)
            weigh_row(X[i, s], surprise, curvature, w[i, s], S[i], *parts, out[s])
    return Weights(inverse, forms, guess, b, end)
