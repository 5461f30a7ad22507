"""The observations seen so far: weighted rows in growing buffers, or merged by distinct arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array
from torchglb.checks import (
    FLOATS,
    ValueChecks,
    as_tensor,
    check_count,
    check_float,
    check_positive,
    check_shape,
    refuse,
)
from torchglb.distributed import Shards, current
from torchglb.families import GLMFamily
from torchglb.recording import is_recorded, is_transformed


class Rows(NamedTuple):
    """Features ``(*B, n, d)``, rewards and weights ``(*B, n)``; no weights mean weights of 1."""

    X: Tensor
    r: Tensor
    w: Tensor | None = None


class History:
    """Weighted observations of a batch of problems that advance together.

    All problems of the batch append the same number of rows; a row that one problem should not
    see gets weight 0. Appending is amortised O(1) per row. Rows that require grad keep their
    graph (appending then copies, O(n)).

    A history that is built inside :func:`torchglb.distributed.sharded` keeps its share of the rows
    only: every rank appends the same rows, ``len`` counts them all, and ``X``, ``r``, ``w`` and
    :meth:`rows` are those that stayed here.

    Args:
        dim: d, the number of features.
        batch_shape: ``*B``.
        aggregate: merge repeated feature vectors into one row with the summed weight and the
            weighted mean reward, so that a fixed arm set costs O(distinct arms) whatever t is.
        family: if given, rewards are checked against its support on arrival.
        max_norm: features longer than this are refused (None allows any).
        validate: look at values at all; one host synchronisation per call.
        dtype: float64 or float32.
        device: where the rows live.

    Example:
        >>> history = History(dim=2)
        >>> history.append([0.6, 0.8], 1.0)
        >>> history.X.shape, len(history)
        (torch.Size([1, 2]), 1)
    """

    def __init__(
        self,
        dim: int,
        batch_shape: tuple[int, ...] = (),
        aggregate: bool = False,
        *,
        family: GLMFamily | None = None,
        max_norm: float | None = 1.0,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("dim", dim, least=1)
        if dtype not in FLOATS:
            raise refuse("dtype", "torch.float32 or torch.float64", dtype)
        if not isinstance(batch_shape, Sequence) or not all(
            isinstance(size, int) and size >= 0 for size in batch_shape
        ):
            raise refuse("batch_shape", "a tuple of non-negative integers", repr(batch_shape))
        if family is not None and not isinstance(family, GLMFamily):
            raise refuse("family", "a GLMFamily or None", type(family).__name__)
        if max_norm is not None:
            max_norm = check_positive("max_norm", max_norm)
        self.dim = dim
        self.batch_shape = torch.Size(batch_shape)
        self.aggregate = bool(aggregate)
        self.family = family
        self.max_norm = max_norm
        self.validate = validate
        self._X = torch.zeros((*self.batch_shape, 0, dim), dtype=dtype, device=device)
        # _y holds weight times reward: sums of it merge, means do not
        self._w = torch.zeros((*self.batch_shape, 0), dtype=dtype, device=self._X.device)
        self._y = torch.zeros_like(self._w)
        self._used = 0  # rows in use; with aggregation an upper bound on them
        self._distinct = torch.zeros(self.batch_shape, dtype=torch.int64, device=self._X.device)
        self._observations = 0
        self._shards = current()
        self._unit_weights = not self.aggregate  # every weight so far is 1

    # ---- reading -------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of observations appended, per problem."""
        return self._observations

    @property
    def shards(self) -> Shards:
        """Where the rows are; completes sums over those that are here."""
        return self._shards.at(self._observations)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self._X.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._X.device

    @property
    def X(self) -> Tensor:
        """Features ``(*B, n, d)``; with aggregation n counts distinct rows."""
        self._tighten()
        return self._X[..., : self._used, :]

    @property
    def r(self) -> Tensor:
        """Rewards ``(*B, n)``; with aggregation the weighted mean reward of each row."""
        self._tighten()
        return self._rewards()

    @property
    def w(self) -> Tensor:
        """Weights ``(*B, n)``; with aggregation the summed weight of each row."""
        self._tighten()
        return self._w[..., : self._used]

    def rows(self) -> Rows:
        """A snapshot that later appends do not change.

        With aggregation it may end in unused rows of weight 0: asking how many are in use would
        be a host synchronisation.
        """
        X, w = self._X[..., : self._used, :], self._w[..., : self._used]
        if self.aggregate:
            return Rows(X.clone(), self._rewards(), w.clone())
        # appending writes behind these rows only, so a view is a snapshot; .data gives it a
        # version counter of its own, or autograd would take every append for a modification
        X, r, w = (t if is_recorded(t) else t.data for t in (X, self._rewards(), w))
        return Rows(X, r, None if self._unit_weights else w)

    def whole(self) -> Rows:
        """The rows of all ranks in the order in which they came: for few rows."""
        rows, shards = self.rows(), self.shards
        if shards.is_whole:
            return rows
        if self.aggregate:
            raise refuse("history", "one that is not both sharded and aggregated", "both")
        X, r, w = rows
        w = None if w is None else shards.gather(w, -1)
        return Rows(shards.gather(X, -2), shards.gather(r, -1), w)

    def _rewards(self) -> Tensor:
        w, y = self._w[..., : self._used], self._y[..., : self._used]
        if self._unit_weights:
            return y
        return torch.where(
            w > 0, y / torch.where(w > 0, w, torch.ones_like(w)), torch.zeros_like(y)
        )

    # ---- writing -------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds one row, ``x (*B, d)`` and ``r (*B)``, or k, ``x (*B, k, d)`` and ``r (*B, k)``.

        Args:
            x: features.
            r: rewards.
            weight: non-negative weights, shaped like ``r``, or one number for all; 1 if left out.

        Raises:
            InputError: on any argument that does not fit; the history is then unchanged.
        """
        x = as_tensor("x", x, dtype=self.dtype, device=self.device)
        r = as_tensor("r", r, dtype=self.dtype, device=self.device)
        batch = tuple(self.batch_shape)
        if x.ndim == len(batch) + 1:
            check_shape("x", x, (*batch, self.dim))
            check_shape("r", r, batch)
            x, r = x.unsqueeze(-2), r.unsqueeze(-1)
            one = True
        else:
            check_shape("x", x, (*batch, "k", self.dim))
            check_shape("r", r, (*batch, x.shape[-2]))
            one = False
        if weight is None:
            w = torch.ones_like(r, requires_grad=False)
        else:
            w = as_tensor("weight", weight, dtype=self.dtype, device=self.device)
            if w.ndim == 0:
                w = w.expand(batch if one else (*batch, x.shape[-2]))
            check_shape("weight", w, batch if one else (*batch, x.shape[-2]))
            w = w[..., None] if one else w
        if self.validate and not is_transformed(x, r, w):  # vmap shows nobody its values
            self._check_values(x, r, w)
        keeps_graph = is_recorded(x, r, w, self._X, self._w, self._y)
        if keeps_graph and (self.aggregate or not self._shards.is_whole):
            raise refuse("x, r, weight", "tensors without derivatives", "one that is recorded")
        count = x.shape[-2]
        if not self._shards.is_whole:
            mine = self._shards.mine(self._observations)
            x, r, w = x[..., mine, :], r[..., mine], w[..., mine]
        if self.aggregate:
            on_cpu = self._X.device.type == "cpu"  # there it costs nothing to count the rows
            if not on_cpu:
                self._make_room(x.shape[-2])
            for start in range(0, x.shape[-2], 256):  # bounds the memory of the comparison
                part = slice(start, start + 256)
                if on_cpu:
                    self._make_room(x[..., part, :].shape[-2])
                self._merge(x[..., part, :], r[..., part], w[..., part])
        else:
            self._extend(x, w, r if weight is None else w * r, copy=keeps_graph)
        self._observations += count
        self._unit_weights = self._unit_weights and weight is None

    def _check_values(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        checks = ValueChecks()
        checks.finite("x", x)
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(x, dim=-1)
            slack = 64 * torch.finfo(self.dtype).eps
            limit = self.max_norm * (1 + slack)
            checks.within("x", norm, 0.0, limit, lambda: f"rows of norm at most {self.max_norm:g}")
        if self.family is not None:
            self.family.require_rewards(checks, r)
        else:
            checks.finite("r", r)
        checks.finite("weight", w)
        checks.within("weight", w, 0.0, math.inf, lambda: "non-negative weights")
        checks.settle()

    def _extend(self, x: Tensor, w: Tensor, y: Tensor, *, copy: bool) -> None:
        end = self._used + x.shape[-2]
        if copy:  # a fresh tensor keeps every graph intact
            old = slice(0, self._used)
            self._X = torch.cat([self._X[..., old, :], x], dim=-2)
            self._w = torch.cat([self._w[..., old], w], dim=-1)
            self._y = torch.cat([self._y[..., old], y], dim=-1)
        else:
            self._reserve(end)
            new = slice(self._used, end)
            array(self._X)[..., new, :] = array(x)
            array(self._w)[..., new], array(self._y)[..., new] = array(w), array(y)
        self._used = end

    def _reserve(self, rows: int) -> None:
        capacity = self._X.shape[-2]
        if rows <= capacity:
            return
        self._enlarge(max(rows, 2 * capacity, 64))

    def _enlarge(self, capacity: int) -> None:
        """Buffers of exactly this size."""

        def grow(old: Tensor, dim: int) -> Tensor:
            shape = list(old.shape)
            shape[dim] = capacity - shape[dim]
            return torch.cat([old, old.new_zeros(shape)], dim=dim)

        # feature by feature in memory: a pass is then several times faster for small d
        self._X, self._w, self._y = grow(self._X.mT, -1).mT, grow(self._w, -1), grow(self._y, -1)

    # ---- aggregation ---------------------------------------------------------------------

    def _merge(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        """Adds each row to the earlier equal one, of the history or of ``x`` itself."""
        k, m = x.shape[-2], self._used
        rows = torch.cat([self._X[..., :m, :], x], dim=-2)
        equal = (x[..., :, None, :] == rows[..., None, :, :]).all(-1)  # (*B, k, m + k)
        place = torch.arange(m + k, device=x.device)
        known = (place >= m) | (place < self._distinct[..., None])
        first = torch.where(equal & known[..., None, :], place, m + k).amin(-1)  # (*B, k)
        new = first == m + torch.arange(k, device=x.device)
        rank = self._distinct[..., None] + new.long().cumsum(-1) - 1
        slot = torch.where(first < m, first, rank.gather(-1, (first - m).clamp_min(0)))
        self._X.scatter_(-2, slot[..., None].expand_as(x), x)
        self._w.scatter_add_(-1, slot, w)
        self._y.scatter_add_(-1, slot, w * r)
        self._distinct += new.sum(-1)
        self._used = m + k

    def _make_room(self, rows: int) -> None:
        """Room for so many more rows; how many are in use is asked only when buffers are full."""
        if self._used > 0 and self._used + rows > self._X.shape[-2]:
            self._tighten()
        self._reserve(self._used + rows)

    def _tighten(self) -> None:
        """Lowers the bound on the rows in use to their number (a host synchronisation)."""
        if self.aggregate:
            self._used = int(self._distinct.max()) if self._distinct.numel() else 0

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers.

        Unused rows and the size of the buffers belong to it: sums are rounded in their order.
        """
        return self._place() | {
            "capacity": self._X.shape[-2],
            "X": self._X[..., : self._used, :].detach().clone(),
            "w": self._w[..., : self._used].detach().clone(),
            "y": self._y[..., : self._used].detach().clone(),
            "distinct": self._distinct.clone(),
            "observations": self._observations,
            "aggregate": self.aggregate,
            "unit_weights": self._unit_weights,
        }

    def _place(self) -> dict[str, list[int]]:
        """Which share of the rows this is; nothing for all of them."""
        shards = self._shards
        return {} if shards.is_whole else {"shard": [shards.rank, shards.ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape, dtype or kind."""
        entries = set(self.state_dict())
        if entries != set(state):
            raise refuse("state", f"the entries {sorted(entries)}", sorted(state))
        if bool(state["aggregate"]) != self.aggregate:
            raise refuse("state", f"aggregate={self.aggregate}", f"aggregate={state['aggregate']}")
        for name, mine in self._place().items():
            if state[name] != mine:
                raise refuse(f"state['{name}']", f"the share {mine} (rank, ranks)", state[name])
        X, w, y, distinct = (state[name] for name in ("X", "w", "y", "distinct"))
        batch = tuple(self.batch_shape)
        checks = ValueChecks()
        for name, value in {"X": X, "w": w, "y": y}.items():
            label = f"state['{name}']"
            check_float(label, value)
            tail = ("n", self.dim) if value is X else (X.shape[-2],)
            check_shape(label, value, (*batch, *tail))
            if value.dtype != self.dtype:
                raise refuse(label, f"dtype {self.dtype}", value.dtype)
            checks.finite(label, value)
        checks.require("state['w']", w >= 0, "non-negative weights", w)
        check_shape("state['distinct']", distinct, batch)
        capacity = check_count("state['capacity']", state["capacity"], least=X.shape[-2])
        if self.validate:
            checks.settle()
        X, self._w, self._y = (t.to(self.device).clone() for t in (X, w, y))
        self._X = X.mT.contiguous().mT  # laid out as before, so that sums are rounded as before
        self._enlarge(capacity)
        self._distinct = distinct.to(self.device).clone()
        self._used = X.shape[-2]
        self._observations = int(state["observations"])
        self._unit_weights = bool(state["unit_weights"])
