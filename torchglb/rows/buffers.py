"""The memory of a history: buffers that grow, and how compiled code reads them.

Nothing here changes a row that is in use: new rows are written behind them, and a history then
takes the new :class:`RowBuffers` in one assignment.

Room for rows to come costs nothing on a CPU: the operating system gives memory out when it is first
written to. So what takes memory are the rows, and for a moment twice as many when buffers grow.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array
from torchglb.backend import Reals
from torchglb.recording import is_recorded
from torchglb.rows.merging import MergedRows, merge

#: from so many rows on buffers grow eightfold, so that few rows are ever there twice; 2 MB for each
#: feature, the largest pages of the usual systems: of them at most one is there in vain
MANY = 1 << 18
#: there is room for so many numbers at once, a megabyte: one bandit then never waits for buffers to
#: grow, which takes as long as thirty of its rounds
ROOM = 1 << 17
#: features that lie a power of two apart have to share a few places of a cache, and a pass over
#: twenty of them then takes half as long again: from CYCLE rows on they are SPREAD numbers further
CYCLE, SPREAD = 512, 136
#: rows that are merged in one go: there has to be room for them all
MERGED_AT_ONCE = 256


class Rows(NamedTuple):
    """Features ``(*B, n, d)``, rewards and weights ``(*B, n)``; no weights mean weights of 1.

    Example:
        >>> import torchglb as glb
        >>> rows = Rows([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(2, 3.0)).theta.shape
        torch.Size([2])
    """

    X: Tensor
    r: Tensor
    w: Tensor | None = None


class RowBuffers(NamedTuple):
    """All that a history has: replaced as a whole, in one assignment, or not at all."""

    used: int  # rows in use; with aggregation an upper bound on them
    observations: int
    X: Tensor  # (*B, capacity, d)
    w: Tensor  # (*B, capacity)
    # weight times reward: sums of it merge, means do not; of weighted rows in float32 that are not
    # merged it is in float64, which has all its digits
    y: Tensor
    w_rest: Tensor | None  # with aggregation, what the sums w and y were rounded by
    y_rest: Tensor | None
    distinct: Tensor  # (*B), rows in use with aggregation
    unit_weights: bool  # every weight so far is 1
    recorded: bool  # whether a row carries derivatives
    last: Rows | None  # with aggregation, what was appended last, which merged rows do not show

    @property
    def merges(self) -> bool:
        """Whether equal rows are merged."""
        return self.w_rest is not None

    def in_use(self) -> int:
        """How many rows are in use (a host synchronisation with aggregation)."""
        if not self.merges:
            return self.used
        return int(self.distinct.max()) if self.distinct.numel() else 0

    def view(self, count: int) -> Rows:
        """The first rows, not copied. Later appends do not change them."""
        X, w, y = self.X[..., :count, :], self.w[..., :count], self.y[..., :count]
        if self.unit_weights:
            r = y
        else:
            r = torch.where(w > 0, y / torch.where(w > 0, w, 1.0), 0.0)
            r = r.to(X.dtype)  # exact where y has all digits
        # appending writes behind these rows only, so a view is a snapshot; .data gives it a
        # version counter of its own, or autograd would take every append for a modification
        X, r, w = (t if is_recorded(t) else t.data for t in (X, r, w))
        return Rows(X, r, None if self.unit_weights else w)

    def exact_view(self, count: int) -> Rows:
        """The first rows with all their digits: in float64 where sums of merged ones have more."""
        if self.w_rest is None or self.y_rest is None or self.X.dtype == torch.float64:
            return self.view(count)
        w, y = self.w.double() + self.w_rest, self.y.double() + self.y_rest
        return self._replace(X=self.X.double(), w=w, y=y).view(count)

    def with_plain(self, rows: int) -> RowBuffers:
        """With so many rows of weight 1, which are written behind those in use."""
        return RowBuffers(self.used + rows, self.observations + rows, *self[2:])


class RowViews(NamedTuple):
    """The rows for compiled code."""

    key: object  # the y they are of, which rows are appended to; the buffers, if rows are merged
    copied: int | None  # rows in use that were copied; None for views, which show all rows
    X: Reals  # (N, d, capacity)
    w: Reals  # (N, capacity)
    y: Reals


def cloned(held: RowBuffers) -> RowBuffers:
    """A copy with the same memory layout: sums are rounded in its order."""
    if not held.recorded:
        copied = enlarged(trimmed(held), held.X.shape[-2])
        return copied._replace(distinct=held.distinct.clone())
    # torch's own deepcopy refuses tensors that keep a graph
    X, w, y, distinct = (t.clone() for t in (held.X, held.w, held.y, held.distinct))
    return held._replace(X=X, w=w, y=y, distinct=distinct)


def trimmed(held: RowBuffers) -> RowBuffers:
    """The rows in use, without room for more: views."""
    X, w, y = held.X[..., : held.used, :], held.w[..., : held.used], held.y[..., : held.used]
    held = held._replace(X=X, w=w, y=y)
    if held.w_rest is None or held.y_rest is None:
        return held
    w_rest, y_rest = held.w_rest[..., : held.used], held.y_rest[..., : held.used]
    return held._replace(w_rest=w_rest, y_rest=y_rest)


def copies(held: RowBuffers) -> RowViews:
    """The rows in float64, with all digits of w and y."""
    N, (capacity, d) = held.distinct.numel(), held.X.shape[-2:]
    w, y = held.w.detach().double(), held.y.detach().double()
    if held.w_rest is not None and held.y_rest is not None:
        w, y = w + held.w_rest.double(), y + held.y_rest.double()
    X = held.X.detach().mT.double().reshape(N, d, capacity).contiguous().numpy()
    flat = (t.reshape(N, capacity).clone().numpy() for t in (w, y))
    if held.merges:
        return RowViews(held, None, X, *flat)
    return RowViews(held.y, held.used, X, *flat)


def copied_on(known: RowViews, held: RowBuffers) -> RowViews:
    """With the rows that came since; rows are not merged."""
    N, (capacity, d) = held.distinct.numel(), held.X.shape[-2:]
    new = slice(known.copied, held.used)
    X = held.X.detach().mT.reshape(N, d, capacity)
    known.X[..., new] = X[..., new].numpy()
    for copy_, value in ((known.w, held.w), (known.y, held.y)):
        copy_[:, new] = value.detach().reshape(N, capacity)[:, new].numpy()
    return known._replace(copied=held.used)


def extended(held: RowBuffers, x: Tensor, w: Tensor, y: Tensor, *, copy: bool) -> RowBuffers:
    """With more rows; they are written behind those that are in use, where nobody looks."""
    used, end = held.used, held.used + x.shape[-2]
    if copy:  # a fresh tensor keeps every graph intact
        X = torch.cat([held.X[..., :used, :], x], dim=-2)
        w, y = torch.cat([held.w[..., :used], w], dim=-1), torch.cat([held.y[..., :used], y], -1)
        return held._replace(X=X, w=w, y=y, used=end)
    held = reserved(held, end)
    array(held.X)[..., used:end, :] = array(x)
    array(held.w)[..., used:end], array(held.y)[..., used:end] = array(w), array(y)
    return held._replace(used=end)


def reserved(held: RowBuffers, rows: int) -> RowBuffers:
    """With buffers for so many rows."""
    capacity, d = held.X.shape[-2:]
    if rows <= capacity:
        return held
    wanted = max(rows, 2 * capacity, 64)
    # copies of other rows, in float64, are made with all their room, and merged ones are filled
    if held.X.is_cpu and held.X.dtype == held.y.dtype == torch.float64 and not held.merges:
        wanted = max(wanted, ROOM // (held.distinct.numel() * d or 1))
        if capacity >= MANY:
            with contextlib.suppress(RuntimeError):  # where so much memory is not even promised
                return enlarged(held, _spread(max(rows, 8 * capacity)))
    return enlarged(held, _spread(wanted))


def _spread(rows: int) -> int:
    """A capacity for so many rows, next to a multiple of CYCLE where it is large."""
    return rows if rows < CYCLE else -(-rows // CYCLE) * CYCLE + SPREAD


def enlarged(held: RowBuffers, capacity: int) -> RowBuffers:
    """With buffers of exactly this size: copies."""

    def grow(old: Tensor) -> Tensor:
        shape = (*old.shape[:-1], capacity)
        # merged rows are read as far as one that may be in use, and those that are not weigh 0
        filled = held.w_rest is not None
        new = old.new_zeros(shape) if filled else old.new_empty(shape)
        new[..., : old.shape[-1]] = old  # the only copy, for rows may be many
        return new

    # feature by feature in memory: a pass is then several times faster for small d
    held = held._replace(X=grow(held.X.mT).mT, w=grow(held.w), y=grow(held.y))
    if held.w_rest is None or held.y_rest is None:
        return held
    return held._replace(w_rest=grow(held.w_rest), y_rest=grow(held.y_rest))


def merged_with(held: RowBuffers, x: Tensor, r: Tensor, w: Tensor) -> RowBuffers:
    """With rows added to the earlier equal ones, of the buffers or of ``x`` itself."""
    if held.X.device.type != "cpu":  # where it would be a wait to count the rows in between
        held = _with_room(held, x.shape[-2])
    for start in range(0, x.shape[-2], MERGED_AT_ONCE):
        part = slice(start, start + MERGED_AT_ONCE)
        held = _with_room(held, r[..., part].shape[-1])
        assert held.w_rest is not None
        assert held.y_rest is not None
        sums = (held.w, held.w_rest, held.y, held.y_rest)
        before = MergedRows(held.X, *sums, held.distinct, held.used)
        after = merge(before, x[..., part, :], r[..., part], w[..., part])
        held = held._replace(**after._asdict())
    return held


def _with_room(held: RowBuffers, rows: int) -> RowBuffers:
    """Room for so many more rows; how many are in use is asked only when buffers are full."""
    if held.used > 0 and held.used + rows > held.X.shape[-2]:
        held = held._replace(used=held.in_use())
    return reserved(held, held.used + rows)
