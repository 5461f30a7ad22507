"""The rows of a likelihood as compiled code reads them, in blocks of problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, Reals, bound, bound_once, entry, vectorised
from torchglb.carried.kernels import LossRows, careful_add, chunk_sum, features
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, SCRATCH, TERMS, W, Y, row_terms
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.recording import is_plain
from torchglb.rows.sums import RowSums

#: numbers that the copies of one block's rows take, unless a single problem takes more
BLOCK = 1 << 22
#: a problem with more numbers than this is not copied
HUGE = 1 << 26
#: rows that are turned into columns at a time
TOGETHER = 8
#: rows of more numbers than this are read where they lie, if they do so feature by feature
IN_PLACE = 1 << 16
#: columns of the settings of a problem: lambda, S, the tilt, and behind that a point
RIDGE, RADIUS, TILT = 0, 1, 2


class CompiledRows(NamedTuple):
    """Some problems of a batch.

    Attributes:
        where: their places in the flattened batch.
        rows: copies, or the memory of the likelihood, to be read only.
        settings: lambda, S, tilt and a point, ``(problems, 2 + 2 d)``.
    """

    where: slice
    rows: LossRows
    settings: Floats


def compiled_family(likelihood: RowSums) -> CompiledFamily | None:
    """The family, if compiled code can sum these rows: whole ones, on a CPU, and not too many."""
    X = likelihood.X
    n, d = X.shape[-2:]
    if not (X.is_cpu and likelihood.shards.is_whole):
        return None
    if n * (d + 2) > HUGE and _feature_by_feature(array(X)) is None:
        return None
    return likelihood.family.compiled()


def blocks(
    likelihood: RowSums,
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
    batch, ridge, tilt = tuple(likelihood.X.shape[:-2]), likelihood.regularization, likelihood.tilt
    X, r = array(likelihood.X), np.ascontiguousarray(array(likelihood.r))
    w = r if likelihood.w is None else np.ascontiguousarray(array(likelihood.w))
    n, d = X.shape[-2:]
    if batch:
        count = math.prod(batch)
        X, r, w = X.reshape(count, n, d), r.reshape(count, n), w.reshape(count, n)
    else:
        count, X, r, w = 1, X[None], r[None], w[None]
    settings = np.zeros((count, 2 + 2 * d))
    settings[:, RIDGE] = per_problem(ridge, batch)
    settings[:, RADIUS] = per_problem(radius, batch)
    if likelihood.X.dtype == torch.float32:
        settings[:, RADIUS] = settings[:, RADIUS].astype(np.float32)
    if tilt is not None:
        settings[:, TILT : TILT + d] = array(tilt).reshape(count, d)
    if point is not None:
        settings[:, TILT + d :] = array(point).reshape(count, d)
    if n * d > IN_PLACE:
        there = _in_place(X, r, None if likelihood.w is None else w)
        if there is not None:
            if validate:
                _plain(likelihood).check_values()
            yield CompiledRows(slice(0, count), there, settings)
            return
    step = max(1, BLOCK // max(1, n * (d + 2)))
    if count <= step:
        rows = _loaded(likelihood, family, X, r, w, validate)
        yield CompiledRows(slice(0, count), rows, settings)
        return
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        rows = _loaded(likelihood, family, X[part], r[part], w[part], validate)
        yield CompiledRows(part, rows, settings[part])


def _feature_by_feature(X: Reals) -> Floats | None:
    """The memory of ``(*B, n, d)`` as ``(N, d, capacity)``, or None if it lies in another way.

    So a history keeps its rows, with room for more of them behind: nobody is to look there.
    """
    *batch, n, d = X.shape
    if X.dtype != np.float64 or n < 2 or X.strides[-2] != X.itemsize or len(batch) > 1:
        return None
    count = batch[0] if batch else 1
    apart = X.strides[-1] if d > 1 else X.strides[0] if count > 1 else n * X.itemsize
    capacity = apart // X.itemsize
    shape = (count, d, capacity)
    strides = (d * capacity * X.itemsize, capacity * X.itemsize, X.itemsize)
    if capacity < n or (count > 1 and X.strides[0] != strides[0]):
        return None
    return np.lib.stride_tricks.as_strided(X, shape, strides)


def _in_place(X: Reals, r: Reals, w: Reals | None) -> LossRows | None:
    """Rows ``(N, n, d)`` where they lie, without copies of the features; None where that fails."""
    there = _feature_by_feature(X)
    if there is None or r.dtype != np.float64:
        return None
    weights = np.empty((len(r), 0)) if w is None else w
    return LossRows(there, weights, r if w is None else w * r)


def _loaded(
    loss: RowSums, family: CompiledFamily, X: Reals, r: Reals, w: Reals, validate: bool
) -> LossRows:
    """Of some problems the rows; refused, if they are to be looked at, by their values."""
    count, n, d = X.shape
    rows = LossRows(np.empty((count, d, n)), np.empty((count, n)), np.empty((count, n)))
    usual = X.dtype == np.float64 and X.flags.c_contiguous  # rewards and weights are contiguous
    load = load_bound if usual else load_rows
    if not load(family, X, r, w, loss.w is not None, rows) and validate:
        _plain(loss).check_values()
    return rows


def _plain(loss: RowSums) -> NegativeLogLikelihood:
    """The rows without ridge and tilt."""
    return NegativeLogLikelihood(loss.family, loss.X, loss.r, loss.w)


def losses(likelihood: RowSums, points: Tensor) -> Tensor | None:
    """L at points ``(*B, P, d)``, without a graph, ``(*B, P)``; None where torch has to do it."""
    given = (points, likelihood.X, likelihood.r, *(() if likelihood.w is None else (likelihood.w,)))
    family = compiled_family(likelihood) if all(map(is_plain, given)) else None
    if family is None:
        return None
    *batch, n, d = likelihood.X.shape
    count, P = math.prod(batch), points.shape[-2]
    X = array(likelihood.X.double()).reshape(count, n, d).transpose(0, 2, 1)
    r, w = (
        np.ascontiguousarray(array(t.double())).reshape(count, n)
        for t in (likelihood.r, likelihood.r if likelihood.w is None else likelihood.w)
    )
    at = np.ascontiguousarray(array(points.double())).reshape(count, P, d)
    out = np.empty((count, P))
    _losses_bound()(family, X, r, w, likelihood.w is not None, at, out)
    found = torch.from_numpy(out).to(points.dtype).reshape(*batch, P)
    return likelihood.with_ridge(found, points)


@cache
def _losses_bound() -> Any:
    """:func:`row_losses` for features of any layout."""
    family, few = CompiledFamily(0, 1.0, 1.0, 0.0, 1.0, False, 1.0), np.empty((1, 1))
    strided = np.empty((2, 2, 4))[..., ::2]
    return bound(row_losses, family, strided, few, few, True, few[None], few)


@entry
def row_losses(
    family: CompiledFamily, X: Reals, r: Floats, w: Floats, weighted: bool, at: Floats, out: Floats
) -> None:
    """The loss of the rows of N problems at P points each.

    Args:
        family: the family.
        X: ``(N, d, n)``, of any layout.
        r: ``(N, n)``.
        w: ``(N, n)``; ignored unless ``weighted``.
        weighted: whether there are weights.
        at: the points, ``(N, P, d)``.
        out: the losses, ``(N, P)``.
    """
    scratch, total, rest, n = np.zeros(SCRATCH), np.zeros(1), np.zeros(1), r.shape[1]
    for b in range(at.shape[0]):
        for p in range(at.shape[1]):
            if math.isnan(at[b, p, 0]):  # a point that nobody asks about
                out[b, p] = math.nan
                continue
            total[0], rest[0] = 0.0, 0.0
            for start in range(0, n, CHUNK):
                count = min(CHUNK, n - start)
                features(X[b], start, count, at[b, p], scratch)
                for s in range(count):
                    weight = w[b, start + s] if weighted else 1.0
                    scratch[W + s], scratch[Y + s] = weight, weight * r[b, start + s]
                row_terms(family, scratch, count, 2)
                careful_add(total, rest, 0, chunk_sum(scratch[TERMS:], count))
            out[b, p] = total[0]


def array(values: Tensor) -> Reals:
    """The same memory in NumPy."""
    return (values.detach() if values.requires_grad else values).numpy()


def per_problem(values: float | Tensor, batch: tuple[int, ...]) -> float | Reals:
    """Values that broadcast with the batch shape, one for each problem, or one for all."""
    if not isinstance(values, Tensor):
        return values
    return np.broadcast_to(array(values), batch).reshape(-1) if values.ndim else values.item()


@vectorised
def _load_rows(
    family: CompiledFamily, X: Reals, r: Reals, w: Reals, weighted: bool, rows: LossRows
) -> bool:
    """Features, weights and weighted rewards as the passes read them.

    Args:
        family: knows the range of rewards.
        X: ``(B, n, d)``, of any layout and floating dtype.
        r: ``(B, n)``.
        w: ``(B, n)``; ignored unless ``weighted``.
        weighted: whether there are weights.
        rows: the result.

    Returns:
        Whether features and weights are finite, weights not negative, and rewards in their range.
    """
    count, n, d = X.shape
    sound, strange = True, 0
    for b in range(count):
        for start in range(0, n - n % TOGETHER, TOGETHER):
            for k in range(d):
                part = rows.X[b, k, start : start + TOGETHER]
                for s in range(TOGETHER):
                    part[s] = X[b, start + s, k]
        for s in range(n - n % TOGETHER, n):
            for k in range(d):
                rows.X[b, k, s] = X[b, s, k]
        for k in range(d):
            column = rows.X[b, k]
            for s in range(n):
                strange += 0 if abs(column[s]) < math.inf else 1
        for s in range(n):
            weight, reward = w[b, s] if weighted else 1.0, np.float64(r[b, s])
            rows.w[b, s] = weight
            rows.y[b, s] = weight * reward
            if not (0.0 <= weight < math.inf and family.low <= reward <= family.high):
                sound = False
            # the reward of merged rows is a mean
            if family.whole and not weighted and reward != math.floor(reward):
                sound = False
            strange += 0 if abs(reward) < math.inf else 1
    return sound and strange == 0


@entry
def load_rows(
    family: CompiledFamily, X: Reals, r: Reals, w: Reals, weighted: bool, rows: LossRows
) -> bool:
    """:func:`_load_rows`, from Python."""
    return _load_rows(family, X, r, w, weighted, rows)


#: the same for float64 numbers in C order, called unseen
load_bound = bound_once(load_rows)
