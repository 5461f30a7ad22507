"""How a family tells compiled code what it is: which formulas, and its constants."""

from __future__ import annotations

from typing import NamedTuple

#: which formulas of :func:`torchglb.families.row_terms.row_terms`
LOGISTIC, SQUARE, EXPONENTIAL, PROBIT, CLOGLOG = range(5)


class CompiledFamily(NamedTuple):
    """What compiled code knows of a family.

    Attributes:
        code: which of the switch.
        trials: N of a binomial; else 1.
        scale: 1/g.
        low: the least reward.
        high: the largest reward.
        whole: whether rewards are whole numbers.
        largest: c of :func:`torchglb.families.base.largest_reward`.
    """

    code: int
    trials: float
    scale: float
    low: float
    high: float
    whole: bool
    largest: float
