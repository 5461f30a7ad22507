"""Polynomials in d variables, stored without repetition.

A symmetric tensor of order k has d^k entries but only ``binomial(d + k - 1, k)`` different ones,
one for each monomial of degree k. All derivatives of a function at a point, orders 0 to q, are one
vector over the monomials of degree at most q, ordered by degree: the loss, its gradient, the upper
triangle of its Hessian row by row, and so on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain, combinations_with_replacement
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints, inlined


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


class Packed(NamedTuple):
    """The same in two arrays: every array that compiled code is called with costs time."""

    dim: int
    order: int
    count: int  # type: ignore[assignment]
    positions: Ints
    scale: Floats


@lru_cache(maxsize=64)
def monomials(dim: int, order: int) -> Packed:
    """The tables of some dimension and order >= 1, packed."""
    degrees = [list(combinations_with_replacement(range(dim), k)) for k in range(order + 1)]
    names = list(chain.from_iterable(degrees))
    place = {name: at for at, name in enumerate(names)}
    ends = np.cumsum([len(part) for part in degrees])

    def derivative(*directions: int) -> list[int]:
        lower = names[: ends[order - len(directions)]]
        return [place[tuple(sorted(name + directions))] for name in lower]

    first = [derivative(i) for i in range(dim)]
    second = [derivative(i, j) for i in range(dim) for j in range(dim)] if order > 1 else []
    tables = (
        ends,
        [len(name) for name in names],
        [place[name[:-1]] for name in names],
        [name[-1] if name else 0 for name in names],
        *first,
        *second,
    )
    factorials = [math.prod(math.factorial(n.count(i)) for i in set(n)) for n in names]
    positions = np.concatenate([np.asarray(table, np.int64) for table in tables])
    return Packed(dim, order, len(names), positions, 1.0 / np.asarray(factorials, np.float64))


@inlined
def unpack(packed: Packed) -> Monomials:
    """The tables as they are read."""
    d, q, count, positions = packed.dim, packed.order, packed.count, packed.positions
    ends = positions[: q + 1]
    start = q + 1
    degree = positions[start : start + count]
    parent = positions[start + count : start + 2 * count]
    variable = positions[start + 2 * count : start + 3 * count]
    start += 3 * count
    lower = ends[q - 1]
    gradient = positions[start : start + d * lower].reshape(d, lower)
    start += d * lower
    lowest = ends[q - 2] if q > 1 else 0
    hessian = positions[start : start + d * d * lowest].reshape(d, d, lowest)
    return Monomials(d, q, count, ends, degree, parent, variable, packed.scale, gradient, hessian)
