"""A symmetric matrix as ``Q T Q'`` with T tridiagonal: many shifts of it are then solved cheaply.

A search for a multiplier asks for ``(M + shift I)^-1 b`` again and again. By Householder's
reduction, ``2 d^3/3`` products once, each of these takes O(d).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend.compiled import Floats, inlined, kernel, vectorised


class Tridiagonal(NamedTuple):
    """``M = Q T Q'``.

    Attributes:
        reflections: ``(d, d)``; row k has, behind the diagonal, the vector v of the k-th reflection
            ``I - v v'``, whose product Q is.
        diagonal: of T, ``(d,)``.
        beside: the entries of T next to it, ``(d,)``; the last is 0.
    """

    reflections: Floats
    diagonal: Floats
    beside: Floats


@inlined
def tridiagonal_memory(dim: int) -> Tridiagonal:
    """For matrices of so many rows."""
    return Tridiagonal(np.zeros((dim, dim)), np.zeros(dim), np.zeros(dim))


@kernel
def tridiagonal_form(matrix: Floats, out: Tridiagonal, work: Floats) -> None:
    """Writes a symmetric matrix as ``Q T Q'``; ``work`` has d places."""
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            out.reflections[i, j] = matrix[i, j]
    reduce(out, work)


@vectorised
def reduce(out: Tridiagonal, work: Floats) -> None:
    """The same for the matrix that is in ``out.reflections``, in place."""
    M, d = out.reflections, out.reflections.shape[0]
    for k in range(d - 2):
        out.diagonal[k] = M[k, k]
        v, size = M[k, k + 1 :], 0.0
        for j in range(d - k - 1):
            v[j] = M[k + 1 + j, k]
            size += v[j] * v[j]
        size = math.sqrt(size)
        first = v[0]
        out.beside[k] = -size if first > 0.0 else size
        # v becomes v -+ |v| e_1, of squared length 2
        scale = size * (size + abs(first))
        if not scale > 0.0:
            for j in range(d - k - 1):
                v[j] = 0.0
            continue
        scale = 1.0 / math.sqrt(scale)
        v[0] = (first - out.beside[k]) * scale
        for j in range(1, d - k - 1):
            v[j] *= scale
        # M - v w' - w v', with w = M v - (v'M v/2) v
        w, along = work[: d - k - 1], 0.0
        for i in range(d - k - 1):
            row, total = M[k + 1 + i, k + 1 :], 0.0
            for j in range(d - k - 1):
                total += row[j] * v[j]
            w[i] = total
            along += total * v[i]
        for i in range(d - k - 1):
            w[i] -= 0.5 * along * v[i]
        for i in range(d - k - 1):
            row, a, b = M[k + 1 + i, k + 1 :], v[i], w[i]
            for j in range(d - k - 1):
                row[j] -= a * w[j] + b * v[j]
    for k in range(max(d - 2, 0), d):
        out.diagonal[k] = M[k, k]
        out.beside[k] = M[k, k + 1] if k + 1 < d else 0.0


@vectorised
def rotate(form: Tridiagonal, x: Floats, out: Floats) -> None:
    """``Q' x``; both may be the same."""
    d = x.shape[0]
    for j in range(d):
        out[j] = x[j]
    for k in range(d - 2):
        _reflect(form.reflections[k, k + 1 :], out[k + 1 :])


@vectorised
def rotate_back(form: Tridiagonal, x: Floats) -> None:
    """``Q x``, in place."""
    for k in range(x.shape[0] - 3, -1, -1):
        _reflect(form.reflections[k, k + 1 :], x[k + 1 :])


@vectorised
def _reflect(v: Floats, x: Floats) -> None:
    total = 0.0
    for j in range(v.shape[0]):
        total += v[j] * x[j]
    for j in range(v.shape[0]):
        x[j] -= total * v[j]


@kernel
def multiply_rotated(form: Tridiagonal, x: Floats, out: Floats) -> None:
    """``T x``."""
    d = x.shape[0]
    for k in range(d):
        total = form.diagonal[k] * x[k]
        if k > 0:
            total += form.beside[k - 1] * x[k - 1]
        if k + 1 < d:
            total += form.beside[k] * x[k + 1]
        out[k] = total


@kernel
def factor_shifted(form: Tridiagonal, scale: float, shift: float, inverse: Floats) -> bool:
    """One over the pivots of ``scale T + shift I``; False where it is not positive definite."""
    before = 0.0
    for k in range(inverse.shape[0]):
        pivot = scale * form.diagonal[k] + shift
        if k > 0:
            beside = scale * form.beside[k - 1]
            pivot -= beside * beside * before
        if not pivot > 0.0:
            return False
        before = 1.0 / pivot
        inverse[k] = before
    return True


@kernel
def solve_shifted(form: Tridiagonal, scale: float, inverse: Floats, b: Floats, x: Floats) -> None:
    """``(scale T + shift I) x = b`` with the pivots of :func:`factor_shifted`."""
    d = b.shape[0]
    x[0] = b[0]
    for k in range(1, d):
        x[k] = b[k] - scale * form.beside[k - 1] * inverse[k - 1] * x[k - 1]
    x[d - 1] *= inverse[d - 1]
    for k in range(d - 2, -1, -1):
        x[k] = inverse[k] * (x[k] - scale * form.beside[k] * x[k + 1])
