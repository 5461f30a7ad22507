"""Polynomials in d variables, stored without repetition.

A symmetric tensor of order k has d^k entries but only ``binomial(d + k - 1, k)`` different ones,
one for each monomial of degree k. All derivatives of a function at a point, orders 0 to q, are one
vector over the monomials of degree at most q, ordered by degree; so the value, the gradient and the
Hessian of its Taylor polynomial are products of tables of that vector with the powers of the
displacement.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain, combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.arrays import Array, array, library, matvec, numbers_on
from torchglb.likelihood import Expansion

#: the variables of a monomial, in order
Name = tuple[int, ...]


class Monomials:
    """The monomials of degree at most q in d variables.

    Args:
        dim: d.
        order: q >= 2.
        dtype: of the numbers, NumPy's or torch's.
        device: where the tables live; None for NumPy's.

    Attributes:
        parts: for each degree, where its monomials stand.
        count: how many there are in all.

    Example:
        >>> Monomials(2, 2, np.float64).powers(np.array([2.0, 3.0]))
        array([1., 2., 3., 4., 6., 9.])
    """

    def __init__(
        self, dim: int, order: int, dtype: Any, device: torch.device | None = None
    ) -> None:
        self.dim, self.order, self._half = dim, order, -(-order // 2)
        degrees = [list(combinations_with_replacement(range(dim), k)) for k in range(order + 1)]
        names: list[Name] = list(chain.from_iterable(degrees))
        place = {name: at for at, name in enumerate(names)}
        self.count = len(names)
        ends = np.cumsum([len(part) for part in degrees])
        self.parts = [slice(int(e) - len(p), int(e)) for e, p in zip(ends, degrees, strict=True)]

        def table(values: list[Any], kind: Any = np.int64) -> Array:
            found = np.array(values, dtype=kind)
            if device is None:
                return found
            numbers = numbers_on(tuple(found.ravel().tolist()), device).reshape(found.shape)
            return numbers.to(torch.int64 if kind is np.int64 else dtype)

        def derivatives(*directions: Name) -> Array:
            """Where the coefficients of some derivatives of a polynomial stand."""
            lower = names[: self.parts[order - len(directions[0])].stop]
            return table([[place[tuple(sorted(name + v))] for name in lower] for v in directions])

        self._gradient = derivatives(*((i,) for i in range(dim)))
        self._hessian = derivatives(*((i, j) for i in range(dim) for j in range(dim)))
        self._degree = table([len(name) for name in names])
        factorials = [math.prod(math.factorial(n.count(i)) for i in set(n)) for n in names]
        self._scale = table([1.0 / f for f in factorials], dtype if device is None else float)

        def in_power(name: Name) -> int:
            """Where a monomial stands in the outer power of (1, x): its variables are digits."""
            digits = (0,) * (self._half - len(name)) + tuple(v + 1 for v in name)
            return sum(digit * (dim + 1) ** k for k, digit in enumerate(reversed(digits)))

        # a monomial is a product of two of half its degree
        halves = [_halves(name) for name in names]
        self._left = table([in_power(left) for left, _ in halves])
        self._right = table([in_power(right) for _, right in halves])
        # for moments: from one degree to the next, and where the products of two halves stand
        within = [{name: at for at, name in enumerate(part)} for part in degrees]
        self._grow = [
            (table([within[k - 1][n[:-1]] for n in part]), table([n[-1] for n in part]))
            for k, part in enumerate(degrees[: self._half + 1])
            if k >= 2
        ]
        self._pairs = []
        for k, part in enumerate(degrees):
            low, high = within[k // 2], within[k - k // 2]
            pairs = [low[a] * len(high) + high[b] for a, b in map(_halves, part)]
            self._pairs.append(table(pairs))

    def powers(self, x: Array) -> Array:
        """All monomials of ``x (*, d)``: ``(*, count)``."""
        shape = x.shape[:-1]
        one = library(x).empty((*shape, self.dim + 1), **_kind(x))
        one[..., 0], one[..., 1:] = 1.0, x
        outer = one
        for _ in range(self._half - 1):
            outer = (outer[..., :, None] * one[..., None, :]).reshape(*shape, -1)
        return _entries(outer, self._left) * _entries(outer, self._right)

    def moments(self, columns: list[Array], rows: Array) -> Array:
        """``sum_s column_k[s] x_s^name`` for every monomial, k its degree: ``(N, count)``.

        Args:
            columns: one ``(N, n)`` for each degree.
            rows: x, ``(N, n, d)``.
        """
        if rows.shape[1] == 1:
            return self.by_degree(columns) * self.powers(rows[:, 0])
        xp, x = library(rows), rows.mT  # (N, d, n), as a history keeps it
        powers = [xp.ones_like(x[:, :1]), x]
        for parent, variable in self._grow:
            powers.append(_rows(powers[-1], parent) * _rows(x, variable))
        found = []
        for k, (column, pairs) in enumerate(zip(columns, self._pairs, strict=True)):
            outer = (powers[k // 2] * column[:, None]) @ powers[k - k // 2].mT
            found.append(_entries(outer.reshape(rows.shape[0], -1), pairs))
        return xp.concatenate(found, -1)

    def by_degree(self, columns: list[Array]) -> Array:
        """For every monomial the column ``(N, 1, *)`` of its degree: ``(N, count, *)``."""
        return _rows(library(columns[0]).concatenate(columns, 1), self._degree)

    def jet(self, sums: Array) -> Jet:
        """The Taylor polynomial with the derivatives ``sums (N, count)``."""
        return Jet(self, sums, _entries(sums, self._gradient), _entries(sums, self._hessian))

    def hessian(self, sums: Array) -> Array:
        """The derivatives of second order as matrices: ``(*, d, d)`` of ``sums (*, count)``."""
        entries = _entries(sums, self._hessian[:, 0])
        return entries.reshape(*sums.shape[:-1], self.dim, self.dim)

    def scaled(self, p: Array) -> Array:
        """The powers as a Taylor polynomial has them, each over its factorials."""
        return self.powers(p) * self._scale


@lru_cache(maxsize=64)
def _cached(dim: int, order: int, dtype: Any, device: torch.device | None) -> Monomials:
    return Monomials(dim, order, dtype, device)


def monomials_for(dim: int, order: int, like: Tensor) -> Monomials:
    """Those that go with a tensor, or with what :func:`torchglb.arrays.array` makes of it."""
    kind = array(like)
    return _cached(dim, order, kind.dtype, kind.device if isinstance(kind, Tensor) else None)


class Jet(NamedTuple):
    """Taylor polynomials of N functions, ready to be evaluated."""

    monomials: Monomials
    value: Array  # (N, count)
    gradient: Array  # (N, d, those of degree < q)
    hessian: Array  # (N, d^2, those of degree < q - 1)

    def at(self, p: Array) -> Expansion:
        """The polynomials with gradients and Hessians at some points each, ``p (N, k, d)``."""
        powers = self.monomials.scaled(p)
        hessian = _product(self.hessian, powers)
        return Expansion(*self._slope(powers), hessian.reshape(*p.shape, -1))

    def slope(self, p: Array) -> tuple[Array, Array]:
        """The polynomials and their gradients."""
        return self._slope(self.monomials.scaled(p))

    def pick(self, rows: Array) -> Jet:
        """The same for some of the functions."""
        return Jet(self.monomials, *(t[rows] for t in self[1:]))

    def _slope(self, powers: Array) -> tuple[Array, Array]:
        return matvec(powers, self.value), _product(self.gradient, powers)


def _product(table: Array, powers: Array) -> Array:
    """``(N, k, m)``: a table ``(N, m, i)`` times the first i of the powers ``(N, k, count)``."""
    return powers[..., : table.shape[-1]] @ table.mT


def _halves(name: Name) -> tuple[Name, Name]:
    """A monomial as a product of two; the second has the larger degree."""
    middle = len(name) // 2
    return name[:middle], name[middle:]


def _entries(values: Array, table: Array) -> Array:
    """Entries of the last axis, in the shape of a table."""
    return values[..., table] if isinstance(values, Tensor) else values.take(table, -1)


def _rows(values: Array, table: Array) -> Array:
    """Entries of the second axis."""
    return values[:, table] if isinstance(values, Tensor) else values.take(table, 1)


def _kind(like: Array) -> dict[str, object]:
    """The dtype and the device of an array, to create another with."""
    kind = {"dtype": like.dtype}
    return kind | {"device": like.device} if isinstance(like, Tensor) else kind
