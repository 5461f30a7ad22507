"""Polynomials in d variables, stored without repetition.

A symmetric tensor of order k has d^k entries but only ``binomial(d + k - 1, k)`` different ones,
one for each monomial of degree k. All derivatives of a function at a point, orders 0 to q, are one
vector over the monomials of degree at most q, ordered by degree: the loss, its gradient, the upper
triangle of its Hessian row by row, and so on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain, combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints


class Monomials(NamedTuple):
    """The monomials of degree at most q in d variables.

    Attributes:
        dim: d.
        order: q.
        count: how many there are.
        ends: for each degree, where its monomials end.
        degree: of each monomial.
        parent: the monomial of one degree less that it is a multiple of.
        variable: the variable that makes it so.
        scale: one over the factorials of its exponents, as in a Taylor polynomial.
        gradient: where the coefficients of each partial derivative stand, ``(d, those of degree <
            q)``.
        hessian: the same for second derivatives, ``(d, d, those of degree < q - 1)``.
    """

    dim: int
    order: int
    count: int  # type: ignore[assignment]
    ends: Ints
    degree: Ints
    parent: Ints
    variable: Ints
    scale: Floats
    gradient: Ints
    hessian: Ints


@lru_cache(maxsize=64)
def monomials(dim: int, order: int) -> Monomials:
    """The tables of some dimension and order >= 1."""
    degrees = [list(combinations_with_replacement(range(dim), k)) for k in range(order + 1)]
    names = list(chain.from_iterable(degrees))
    place = {name: at for at, name in enumerate(names)}
    ends = np.cumsum([len(part) for part in degrees])

    def derivatives(number: int) -> Ints:
        lower = names[: ends[order - number]] if number <= order else []
        table = [
            place[tuple(sorted(name + directions))]
            for directions in product(range(dim), repeat=number)
            for name in lower
        ]
        return np.asarray(table, np.int64).reshape(*(dim,) * number, len(lower))

    factorials = [math.prod(math.factorial(n.count(i)) for i in set(n)) for n in names]
    return Monomials(
        dim=dim,
        order=order,
        count=len(names),
        ends=ends,
        degree=np.asarray([len(name) for name in names], np.int64),
        parent=np.asarray([place[name[:-1]] for name in names], np.int64),
        variable=np.asarray([name[-1] if name else 0 for name in names], np.int64),
        scale=1.0 / np.asarray(factorials, np.float64),
        gradient=derivatives(1),
        hessian=derivatives(2),
    )
