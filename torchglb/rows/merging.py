"""Equal rows merged into one, with the sums of their weights and of their weighted rewards.

Each sum is kept in two numbers, so that any number of rows lose nothing. On a CPU rows are added
one by one in compiled code: the bits do not depend on how many come at a time. On a device all rows
of a call are compared and added together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Ints, Reals, entry, kernel
from torchglb.recording import is_transformed
from torchglb.rounding import scatter_exactly, two_product


class MergedRows(NamedTuple):
    """Distinct rows, in buffers that may have room for more.

    Attributes:
        X: ``(*B, capacity, d)``.
        w: sums of weights, ``(*B, capacity)``,
        w_rest: and what they were rounded by.
        y: sums of weights times rewards,
        y_rest: and what they were rounded by.
        distinct: rows in use, ``(*B)``.
        used: an upper bound on them; on a CPU the largest.
    """

    X: Tensor
    w: Tensor
    w_rest: Tensor
    y: Tensor
    y_rest: Tensor
    distinct: Tensor
    used: int


def merge(held: MergedRows, x: Tensor, r: Tensor, w: Tensor) -> MergedRows:
    """With each row added to the earlier equal one; the old tensors stay as they are.

    Args:
        held: with room for k more rows.
        x: ``(*B, k, d)``.
        r: ``(*B, k)``.
        w: ``(*B, k)``.
    """
    if held.X.is_cpu and not is_transformed(held.w, x, r, w):
        return merge_by_row(held, x, r, w)
    return merge_at_once(held, x, r, w)


def merge_by_row(held: MergedRows, x: Tensor, r: Tensor, w: Tensor) -> MergedRows:
    """:func:`merge` on a CPU: O(k m d) for m distinct rows."""
    N, (capacity, d), k = held.distinct.numel(), held.X.shape[-2:], r.shape[-1]
    # feature by feature in memory, as History lays them out
    X = held.X.mT.clone(memory_format=torch.contiguous_format)
    sums = torch.stack([held.w, held.w_rest, held.y, held.y_rest], dim=-2)
    distinct = held.distinct.clone(memory_format=torch.contiguous_format)
    new = (x.reshape(N, k, d), r.reshape(N, k), w.reshape(N, k))
    arrays = [t.detach().contiguous().numpy() for t in new]
    views = (X.view(N, d, capacity), sums.view(N, 4, capacity), distinct.view(N))
    add_rows_in_turn(*arrays, *(t.numpy() for t in views))
    total_w, w_rest, total_y, y_rest = (t.contiguous() for t in sums.unbind(-2))
    used = int(distinct.max()) if N else 0
    return MergedRows(X.mT, total_w, w_rest, total_y, y_rest, distinct, used)


def merge_at_once(held: MergedRows, x: Tensor, r: Tensor, w: Tensor) -> MergedRows:
    """:func:`merge` by operators on all rows, as a device wants it: k (m + k) comparisons."""
    k, m = x.shape[-2], held.used
    rows = torch.cat([held.X[..., :m, :], x], dim=-2)
    equal = (x[..., :, None, :] == rows[..., None, :, :]).all(-1)  # (*B, k, m + k)
    place = torch.arange(m + k, device=x.device)
    known = (place >= m) | (place < held.distinct[..., None])
    first = torch.where(equal & known[..., None, :], place, m + k).amin(-1)  # (*B, k)
    new = first == m + torch.arange(k, device=x.device)
    rank = held.distinct[..., None] + new.long().cumsum(-1) - 1
    slot = torch.where(first < m, first, rank.gather(-1, (first - m).clamp_min(0)))
    y, lost = two_product(w, r)
    weights = scatter_exactly(held.w, held.w_rest, slot, w)
    rewards = scatter_exactly(held.y, held.y_rest, slot, y, lost)
    X = held.X.scatter(-2, slot[..., None].expand_as(x), x)
    return MergedRows(X, *weights, *rewards, held.distinct + new.sum(-1), m + k)


# ---- row by row --------------------------------------------------------------------------------


@entry
def add_rows_in_turn(x: Reals, r: Reals, w: Reals, X: Reals, sums: Reals, distinct: Ints) -> None:
    """Adds k rows to each of N problems.

    Args:
        x: ``(N, k, d)``.
        r: ``(N, k)``.
        w: ``(N, k)``.
        X: distinct rows, ``(N, d, capacity)``; new ones are written behind those in use.
        sums: weights and their rest, weighted rewards and their rest, ``(N, 4, capacity)``.
        distinct: rows in use, ``(N,)``.
    """
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            slot = place_of(x[b, s], X[b], distinct[b])
            if slot == distinct[b]:
                for i in range(x.shape[2]):
                    X[b, i, slot] = x[b, s, i]
                distinct[b] += 1
            product = w[b, s] * r[b, s]
            lost = product_error(w[b, s], r[b, s], product)
            add_exactly(sums[b, 0], sums[b, 1], slot, w[b, s], 0.0)
            add_exactly(sums[b, 2], sums[b, 3], slot, product, lost)


@kernel
def place_of(x: Reals, X: Reals, distinct: int) -> int:
    """Where the first of the distinct rows is that equals x; behind them if none does."""
    for place in range(distinct):
        i = 0
        while i < x.shape[0] and X[i, place] == x[i]:
            i += 1
        if i == x.shape[0]:
            return place
    return distinct


@kernel
def product_error(a: float, b: float, product: float) -> float:
    """By what ``a b`` was rounded, exactly but for a rounding of its own; 0 where not finite.

    The upper parts have 24 digits, so that their products have no error.
    """
    a1, b1 = np.float64(np.float32(a)), np.float64(np.float32(b))
    a2, b2 = a - a1, b - b1
    rest = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    return rest if math.isfinite(rest) else 0.0


@kernel
def add_exactly(total: Reals, rest: Reals, place: int, term: float, more: float) -> None:
    """Adds a term, and a small correction of it, to a sum in two numbers."""
    after, left = total[place] + term, rest[place] + more
    other = after - total[place]
    error = (total[place] - (after - other)) + (term - other)
    left += error if math.isfinite(error) else 0.0
    total[place] = after + left
    other = total[place] - after
    error = (after - (total[place] - other)) + (left - other)
    rest[place] = error if math.isfinite(error) else 0.0
