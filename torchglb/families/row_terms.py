"""The loss of many observations and its derivatives in z: one switch for all compiled families.

The switch is outside of the loops over rows, so that one compilation serves every family. Rows are
worked on in chunks, in one flat scratch buffer with places known to the compiler: then it needs no
checks for overlapping memory, and fills vector registers.
"""

from __future__ import annotations

from torchglb.backend import Floats, vectorised
from torchglb.backend.elementary import exp
from torchglb.families.bernoulli import (
    logistic_fifth,
    logistic_fourth,
    logistic_least,
    logistic_loss,
    logistic_sixth,
    logistic_slope,
    logistic_third,
    logistic_variance,
)
from torchglb.families.bounded import (
    cloglog_mean,
    cloglog_partition,
    cloglog_variance,
    probit_mean,
    probit_partition,
    probit_variance,
)
from torchglb.families.compiled import (
    EXPONENTIAL,
    LOGISTIC,
    PROBIT,
    SQUARE,
    CompiledFamily,
)
from torchglb.families.gaussian import square_loss, square_slope
from torchglb.families.poisson import exponential_loss, exponential_slope

#: rows at a time
CHUNK = 128
#: the highest order of a derivative
HIGHEST = 6
#: where z, weights, weighted rewards and the derivatives of order 0, 1, ... stand in the scratch
Z, W, Y, TERMS = 0, CHUNK, 2 * CHUNK, 3 * CHUNK
FIRST, SECOND, THIRD = TERMS + CHUNK, TERMS + 2 * CHUNK, TERMS + 3 * CHUNK
FOURTH, FIFTH, SIXTH = TERMS + 4 * CHUNK, TERMS + 5 * CHUNK, TERMS + 6 * CHUNK
SCRATCH = (4 + HIGHEST) * CHUNK


@vectorised
def row_terms(family: CompiledFamily, scratch: Floats, count: int, order: int) -> None:
    """Derivatives of ``(w m(z) - y z)/g`` in z for ``count <= CHUNK`` rows.

    Reads z, w and y from the scratch and writes the derivatives of orders 0 to ``order``, and to 2
    at least, behind them.
    """
    b = scratch
    if family.code == LOGISTIC:
        _logistic_rows(b, count, order, family.trials)
    elif family.code == SQUARE:
        for s in range(count):
            z, w, y = b[Z + s], b[W + s], b[Y + s]
            b[TERMS + s] = square_loss(z, w, y)
            b[FIRST + s] = square_slope(z, w, y)
            b[SECOND + s] = w
        for i in range(THIRD, TERMS + (order + 1) * CHUNK):
            b[i] = 0.0
    elif family.code == EXPONENTIAL:
        for s in range(count):
            z, w, y = b[Z + s], b[W + s], b[Y + s]
            b[TERMS + s] = exponential_loss(z, w, y)
            b[FIRST + s] = exponential_slope(z, w, y)
            b[SECOND + s] = w * exp(z)
        for k in range(3, order + 1):
            for s in range(count):
                b[TERMS + k * CHUNK + s] = b[SECOND + s]
    elif family.code == PROBIT:
        for s in range(count):
            z, w, y = b[Z + s], b[W + s], b[Y + s]
            b[TERMS + s] = w * probit_partition(z) - y * z
            b[FIRST + s] = w * probit_mean(z) - y
            b[SECOND + s] = w * probit_variance(z)
    else:
        for s in range(count):
            z, w, y = b[Z + s], b[W + s], b[Y + s]
            b[TERMS + s] = w * cloglog_partition(z) - y * z
            b[FIRST + s] = w * cloglog_mean(z) - y
            b[SECOND + s] = w * cloglog_variance(z)
    if family.scale != 1.0:
        for i in range(TERMS, TERMS + (max(order, 2) + 1) * CHUNK):
            b[i] *= family.scale


@vectorised
def _logistic_rows(b: Floats, count: int, order: int, trials: float) -> None:
    """The logistic part of :func:`row_terms`: what the formulas share is computed once."""
    if order <= 2:
        for s in range(count):
            z, w, y = b[Z + s], trials * b[W + s], b[Y + s]
            b[TERMS + s] = logistic_loss(z, w, y)
            b[FIRST + s] = logistic_slope(z, w, y)
            b[SECOND + s] = w * logistic_variance(z)
        return
    for s in range(count):
        z, w, y = b[Z + s], trials * b[W + s], b[Y + s]
        b[TERMS + s] = logistic_loss(z, w, y)
        b[FIRST + s] = logistic_slope(z, w, y)
        b[SECOND + s] = w * logistic_variance(z)
        b[THIRD + s] = w * logistic_third(z)
        b[FOURTH + s] = w * logistic_fourth(z)
        b[FIFTH + s] = w * logistic_fifth(z)
        b[SIXTH + s] = w * logistic_sixth(z)


#: a reach below this counts as this: formulas of differences have enough digits from here on
LEAST_REACH = 0.01
#: what rounding may take from them, with much to spare
SAFE = 1.0 - 1e-9


@vectorised
def least_curvatures(
    family: CompiledFamily, scratch: Floats, count: int, concordance: float, ball: float
) -> None:
    """The least ``2 B(z + u, z)/u^2``, B the Bregman divergence of ``w m/g``, over some u.

    Those with ``|u| <= b`` and ``|z + u| <= a b``, for rows that a ball keeps that small. Any m
    with ``|m'''| <= R m''`` has ``m''(z + t u) >= e^(-R t |u|) m''(z)``, hence at least
    ``2 (e^-D - 1 + D)/D^2`` times m'', D = R |u|; the exponential with R = 1 has just that.

    Args:
        family: the family.
        scratch: z and w are read from it, and b from the places of y; the results are written to
            those of the second derivative.
        count: how many rows.
        concordance: R.
        ball: a.
    """
    b = scratch
    if family.code == LOGISTIC:
        for s in range(count):
            z, reach = b[Z + s], b[Y + s]
            least = logistic_least(z, max(min(reach, ball * reach - abs(z)), LEAST_REACH))
            b[SECOND + s] = SAFE * family.scale * family.trials * b[W + s] * least
        return
    row_terms(family, b, count, 2)
    for s in range(count):
        reach = min(b[Y + s], ball * b[Y + s] + abs(b[Z + s]))
        D = max(concordance * reach, LEAST_REACH)
        b[SECOND + s] *= SAFE * 2.0 * ((exp(-D) - 1.0) + D) / (D * D)
