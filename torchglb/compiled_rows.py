"""The rows of a likelihood as compiled code reads them, in blocks of problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchglb.backend import Floats
from torchglb.families.compiled import CompiledFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle_kernels import load_rows

#: numbers that the copies of one block's rows take, unless a single problem takes more
BLOCK = 1 << 22
#: a problem with more numbers than this is not copied
HUGE = 1 << 26

Array = NDArray[Any]


class CompiledRows(NamedTuple):
    """Some problems of a batch.

    Attributes:
        where: their places in the flattened batch.
        rows: features, weights, weighted rewards, ``(problems, d + 2, n)``.
        settings: lambda, S, tilt and a point, ``(problems, 2 + 2 d)``.
    """

    where: slice
    rows: Floats
    settings: Floats


def compiled_family(likelihood: NegativeLogLikelihood) -> CompiledFamily | None:
    """The family, if compiled code can sum these rows: whole ones, on a CPU, and not too many."""
    X = likelihood.X
    n, d = X.shape[-2:]
    if not (X.is_cpu and likelihood.shards.is_whole and n * (d + 2) <= HUGE):
        return None
    return likelihood.family.compiled()


def blocks(
    likelihood: NegativeLogLikelihood,
    family: CompiledFamily,
    radius: float | Tensor,
    point: Tensor | None,
    *,
    validate: bool = False,
) -> Iterator[CompiledRows]:
    """All problems of the batch, some at a time.

    Args:
        likelihood: the rows.
        family: their family.
        radius: S, broadcasts with the batch shape.
        point: ``(*B, d)``, or None for zero.
        validate: refuse rows by their values.
    """
    X, r, w, weighted = _given(likelihood)
    count, n, d = X.shape
    batch, ridge, tilt = likelihood.batch_shape, likelihood.regularization, likelihood.tilt
    settings = np.zeros((count, 2 + 2 * d))
    settings[:, 0] = per_problem(ridge, batch)
    settings[:, 1] = X.dtype.type(per_problem(radius, batch))
    if tilt is not None:
        settings[:, 2 : 2 + d] = array(tilt).reshape(count, d)
    if point is not None:
        settings[:, 2 + d :] = array(point).reshape(count, d)
    step = max(1, BLOCK // max(1, n * (d + 2)))
    for start in range(0, max(count, 1), step):
        where = slice(start, min(start + step, count))
        rows = np.empty((where.stop - start, d + 2, n))
        sound = load_rows(family, X[where], r[where], w[where], weighted, rows)
        if validate and not sound:
            likelihood.check_values()
        yield CompiledRows(where, rows, settings[where])


def _given(likelihood: NegativeLogLikelihood) -> tuple[Array, Array, Array, bool]:
    """Features ``(B, n, d)``, rewards, weights ``(B, n)``, and whether there are such."""
    (n, d), w = likelihood.X.shape[-2:], likelihood.w
    count = math.prod(likelihood.batch_shape)
    r = np.ascontiguousarray(array(likelihood.r)).reshape(count, n)
    if w is None:
        return array(likelihood.X).reshape(count, n, d), r, r, False
    weights = np.ascontiguousarray(array(w)).reshape(count, n)
    return array(likelihood.X).reshape(count, n, d), r, weights, True


def array(values: Tensor) -> Array:
    """The same memory in NumPy."""
    return (values.detach() if values.requires_grad else values).numpy()


def per_problem(values: float | Tensor, batch: tuple[int, ...]) -> float | Array:
    """Values that broadcast with the batch shape, one for each problem, or one for all."""
    if not isinstance(values, Tensor):
        return values
    return np.broadcast_to(array(values), batch).reshape(-1) if values.ndim else values.item()
