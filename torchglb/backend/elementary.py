"""exp and log1p without branches, so that loops over them fill vector registers.

Each errs by at most two units in the last place; certificates pay for that
(:data:`torchglb.carried.rounding.TERM`).
"""

from __future__ import annotations

import numpy as np

from torchglb.backend.compiled import kernel

#: exp saturates outside of these, where it would leave the normal numbers
LOWEST, HIGHEST = -708.0, 709.0
LOG2_E = 1.4426950408889634
#: log 2 in two parts, the first with so few bits that small multiples of it are exact
LOG2_HIGH, LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG_2 = 0.6931471805599453
#: 1.5 * 2^52: adding it rounds to a whole number, which is then in the last bits
WHOLE = 6755399441055744.0
SQRT_HALF = 0.41421356237309503  # sqrt(2) - 1


@kernel
def exp(a: float) -> float:
    """``e^a``, saturated at e^-708 and e^709."""
    a = min(max(a, LOWEST), HIGHEST)
    shifted = a * LOG2_E + WHOLE
    k = shifted - WHOLE
    r = (a - k * LOG2_HIGH) - k * LOG2_LOW  # |r| <= log(2)/2: thirteen terms of the series
    p = 1.6059043836821613e-10
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 1.984126984126984e-04
    p = p * r + 1.388888888888889e-03
    p = p * r + 8.333333333333333e-03
    p = p * r + 4.1666666666666664e-02
    p = p * r + 1.6666666666666666e-01
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    exponent = (np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)
    return p * np.int64(exponent).view(np.float64)


@kernel
def log1p(e: float) -> float:
    """``log(1 + e)`` for 0 <= e <= 1, by the series of ``log((1 + s)/(1 - s))``."""
    large = e > SQRT_HALF
    top = e - 1.0 if large else e
    s = top / (e + 3.0 if large else e + 2.0)
    z = s * s
    p = 1.479819860511658591e-01
    p = p * z + 1.531383769920937332e-01
    p = p * z + 1.818357216161805012e-01
    p = p * z + 2.222219843214978396e-01
    p = p * z + 2.857142874366239149e-01
    p = p * z + 3.999999999940941908e-01
    p = p * z + 6.666666666666735130e-01
    v = s * (2.0 + z * p)
    return v + LOG_2 if large else v
