"""Predictable weights of the rows: how much each says about each contrast.

``b_s = w_s <x_s, H^-1 c>/<c, H^-1 c>`` with ``H`` the information of the rows before s (plus a
ridge), at a running estimate: the least favourable direction. Sums ``sum_s b_s (r_s - mu_s)`` are
then, to first order, blind to every direction of theta but c. The weight of a row depends on
earlier rows and rewards, on x_s and on w_s, never on r_s: that is all that validity needs.

Weights of m contrasts would be m numbers for every row. They are not kept: whoever needs them walks
over the rows in their order, and each walk computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.contrasts.kernels import weigh_rows
from torchglb.families import GLMFamily
from torchglb.families.compiled import SQUARE, CompiledFamily
from torchglb.likelihood import NegativeLogLikelihood

#: a row is taken to have at least this curvature, relative to the largest at 0
FLOOR = 0.08
#: rows at a time: what is made of them beside their own memory is small
CHUNK = 1 << 13
#: where the family's own formulas are compiled
NOTHING_KNOWN = np.empty((0, 2))


class RowBlock(NamedTuple):
    """Some rows: features ``(k, d)``, rewards, weights or None ``(k)``, weights b ``(k, m)``."""

    X: Tensor
    r: Tensor
    w: Tensor | None
    b: Tensor


class Learned(NamedTuple):
    """What a family without compiled formulas was asked of N problems; replaced as a whole.

    Attributes:
        inverse: ``H^-1``, ``(N, d, d)``.
        guess: a running estimate of theta, ``(N, d)``.
        known: a buffer of mean and variance of each row at the estimate before it, ``(N, capacity,
            2)``: to ask again takes some hundred times as long as a row of the walk.
        rows: how many.
    """

    inverse: Floats
    guess: Floats
    known: Floats
    rows: int

    @classmethod
    def nothing(cls, N: int, d: int, dispersion: float) -> Learned:
        """Before the first row."""
        inverse = np.repeat(np.eye(d)[None] * dispersion, N, axis=0)
        return cls(inverse, np.zeros((N, d)), np.zeros((N, 0, 2)), 0)

    def copy(self) -> Learned:
        """Without shared memory."""
        return Learned(self.inverse.copy(), self.guess.copy(), self.known.copy(), self.rows)

    def with_rows(self, likelihoods: list[NegativeLogLikelihood], S: list[float]) -> Learned:
        """With all rows of the N likelihoods; what was held stays as it is."""
        n, known = likelihoods[0].X.shape[0], self.known
        if n <= self.rows:
            return self
        if n > known.shape[1]:
            known = np.zeros((len(known), max(n, 2 * known.shape[1], 64), 2))
            known[:, : self.rows] = self.known[:, : self.rows]
        inverse, guess = self.inverse.copy(), self.guess.copy()
        contrasts, forms, out = np.empty((0, inverse.shape[-1])), np.empty(0), np.empty((1, 0))
        for i, loss in enumerate(likelihoods):
            family, floor = _formulas(loss.family), least_curvature_of(loss.family)
            for s in range(self.rows, n):
                X, r, w = _arrays(loss, slice(s, s + 1))
                z = torch.tensor(X[0] @ guess[i])
                terms = known[i, s : s + 1]  # behind the rows in use, where nobody looks
                terms[0] = float(loss.family.mean(z)), float(loss.family.variance(z))
                parts = contrasts, inverse[i], forms, guess[i], out
                weigh_rows(family, X, r, w, terms, S[i], floor, *parts)
        return Learned(inverse, guess, known, n)


class WeighedRows:
    """The rows of one problem with their weights, to be walked over as often as one likes.

    Args:
        likelihood: the rows, in the order in which they came.
        contrasts: of length 1, ``(m, d)``.
        S: the radius of the ball.
        known: of :class:`Learned`, ``(n, 2)``, for a family without compiled formulas.

    Example:
        >>> import torchglb as glb
        >>> loss = glb.NegativeLogLikelihood(glb.Gaussian(), torch.eye(2).double(), torch.ones(2))
        >>> [block.b[:, 0].tolist() for block in WeighedRows(loss, np.eye(2)[:1], 3.0).blocks()]
        [[1.0, 0.0]]
    """

    def __init__(
        self,
        likelihood: NegativeLogLikelihood,
        contrasts: Floats,
        S: float,
        known: Floats = NOTHING_KNOWN,
    ) -> None:
        self.likelihood, self.contrasts, self.S, self.known = likelihood, contrasts, S, known

    def blocks(self) -> Iterator[RowBlock]:
        """All rows, some at a time: O(d^2 + m d) each."""
        loss, (m, d) = self.likelihood, self.contrasts.shape
        g, n = loss.family.dispersion, loss.X.shape[0]
        family, floor = _formulas(loss.family), least_curvature_of(loss.family)
        inverse, guess = np.eye(d) * g, np.zeros(d)
        forms = (self.contrasts * self.contrasts).sum(-1) * g
        for start in range(0, n, CHUNK):
            few = slice(start, start + CHUNK)
            X, r, w = _arrays(loss, few)
            b = np.empty((len(r), m))
            parts = self.contrasts, inverse, forms, guess, b
            weigh_rows(family, X, r, w, self.known[few], self.S, floor, *parts)
            weights = None if loss.w is None else torch.from_numpy(w)
            yield RowBlock(torch.from_numpy(X), torch.from_numpy(r), weights, torch.from_numpy(b))


def least_curvature_of(family: GLMFamily) -> float:
    """That a row is taken to have."""
    at_zero = float(family.variance(torch.zeros((), dtype=torch.float64)))
    return FLOOR * at_zero / family.dispersion


def _formulas(family: GLMFamily) -> CompiledFamily:
    """For the walk; of a family without, the scale alone counts."""
    plain = CompiledFamily(SQUARE, 1.0, 1.0 / float(family.dispersion), 0.0, 0.0, False, 0.0)
    return family.compiled() or plain


def _arrays(loss: NegativeLogLikelihood, few: slice) -> tuple[Floats, Floats, Floats]:
    """Copies of some rows."""
    X = np.ascontiguousarray(loss.X[few].detach().numpy())
    r = np.ascontiguousarray(loss.r[few].detach().numpy())
    return X, r, np.ones(len(r)) if loss.w is None else loss.w[few].detach().numpy().copy()
