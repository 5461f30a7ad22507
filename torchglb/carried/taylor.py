"""The Taylor polynomial that carried sums define, and how far the loss may be from it; compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, kernel, vectorised
from torchglb.backend.dense import exponential
from torchglb.carried.kernels import row_powers
from torchglb.carried.monomials import Monomials
from torchglb.families.row_terms import HIGHEST


@kernel
def taylor_powers(p: Floats, table: Monomials, out: Floats) -> None:
    """The monomials of a displacement, each over its factorials."""
    row_powers(p, table, out)
    for i in range(1, table.count):
        out[i] *= table.scale[i]


@vectorised
def taylor_value(sums: Floats, powers: Floats, table: Monomials) -> float:
    """The Taylor polynomial with these derivatives."""
    total = 0.0
    for i in range(table.count):
        total += sums[i] * powers[i]
    return total


@vectorised
def taylor_gradient(sums: Floats, powers: Floats, table: Monomials, out: Floats) -> None:
    """Its gradient."""
    lower = table.ends[table.order - 1]
    for k in range(table.dim):
        positions, total = table.gradient[k], 0.0
        for i in range(lower):
            total += sums[positions[i]] * powers[i]
        out[k] = total


@vectorised
def taylor_hessian(sums: Floats, powers: Floats, table: Monomials, out: Floats) -> None:
    """Its Hessian."""
    lowest = table.ends[table.order - 2]
    for k in range(table.dim):
        for j in range(k, table.dim):
            positions, total = table.hessian[k, j], 0.0
            for i in range(lowest):
                total += sums[positions[i]] * powers[i]
            out[k, j] = total
            out[j, k] = total


@kernel
def hessian_at(sums: Floats, scale: float, out: Floats) -> None:
    """The Hessian at the point itself, times a number."""
    d, place = out.shape[0], 1 + out.shape[0]
    for i in range(d):
        for j in range(i, d):
            out[i, j] = out[j, i] = scale * sums[place]
            place += 1


@kernel
def squared_in_hessian(sums: Floats, p: Floats) -> float:
    """``|p|^2`` in the Hessian at the point itself, or a little below 0 by rounding."""
    d = p.shape[0]
    place, total = 1 + d, 0.0
    for i in range(d):
        total += sums[place] * p[i] * p[i]
        place += 1
        for j in range(i + 1, d):
            total += 2.0 * sums[place] * p[i] * p[j]
            place += 1
    return total


# ---- how far the loss may be from it -----------------------------------------------------------

FACTORIAL = np.array([float(math.factorial(k)) for k in range(HIGHEST + 3)])


class Remainder(NamedTuple):
    """How far the loss may be from a Taylor polynomial."""

    value: float  # of the loss
    slope: float  # of the gradient, in the dual norm of the Hessian there
    hessian: float  # of the Hessian, relative to the Hessian there, and to that at the centre


@kernel
def remainder(
    distance: float, local: float, longest: float, ratio: float, concordance: float, order: int
) -> Remainder:
    """Of the Taylor polynomial of order q at a displacement p from its centre c.

    With ``D = max |x_s| |p|``, ``|m^(q+1)| <= C m''`` and ``|m'''| <= R m''``, the errors are
    ``C D^(q-1)`` times ``e^(R D) |p|^2/(q+1)!``, ``e^(R D/2) |p|/q!`` and ``e^(R D)/(q-1)!``, norms
    in the Hessian H(c).

    Proof. Let z be a row's linear predictor at c and u its change, ``|u| <= D``. The k-th
    derivative of m, k <= 2, is off by ``integral_0^1 (1-t)^(q-k)/(q-k)! m^(q+1)(z + t u) u^(q+1-k)
    dt``. By the second condition ``m''(z + t u)`` is at most ``e^(R t |u|) m''(z)`` and at most
    ``e^(R (1-t) |u|) m''(z + u)``, so the integral is at most ``C |u|^(q+1-k)/(q+1-k)!`` times
    ``e^(R D) m''(z)``, times ``e^(R D) m''(z + u)``, or times ``e^(R D/2)`` and the square root of
    ``m''(z) m''(z + u)``. k = 0: by the first, since ``sum_s w_s m''(z_s) u_s^2/g = |p|^2_H(c)``. k
    = 1: by the root and Cauchy-Schwarz, for any v at most ``|p|_H(c) |v|_H(theta)``. k = 2: by
    either of the others, relative to H(c) and H(theta).

    Args:
        distance: |p| or more.
        local: ``|p|^2`` in H(c) or more.
        longest: the largest |x_s|.
        ratio: C.
        concordance: R.
        order: q >= 2.
    """
    reach = longest * distance
    if ratio == 0.0 or reach == 0.0:
        return Remainder(0.0, 0.0, 0.0)
    half = exponential(0.5 * concordance * reach)
    known = ratio * half * reach ** (order - 1)
    growth = half * known
    if not growth < math.inf:  # also where the Hessian has underflowed, and their product is NaN
        return Remainder(math.inf, math.inf, math.inf)
    return Remainder(
        growth * local / FACTORIAL[order + 1],
        known * math.sqrt(local) / FACTORIAL[order],
        growth / FACTORIAL[order - 1],
    )
