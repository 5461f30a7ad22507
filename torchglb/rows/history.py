"""The observations seen so far: weighted rows in growing buffers, or merged by distinct arm."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import array
from torchglb.backend import Floats, Reals, bound_once
from torchglb.backend.value_checks import write_rows
from torchglb.checks import (
    ValueChecks,
    as_device,
    as_tensor,
    check_batch_shape,
    check_count,
    check_dtype,
    check_entries,
    check_flag,
    check_positive,
    check_shape,
    refuse,
)
from torchglb.distributed import Shards, current
from torchglb.families import GLMFamily, check_family
from torchglb.families.compiled import CompiledFamily
from torchglb.recording import is_plain, is_recorded, is_transformed
from torchglb.rows.buffers import (
    RowBuffers,
    Rows,
    RowViews,
    cloned,
    copied_on,
    copies,
    enlarged,
    extended,
    merged_with,
    reserved,
    trimmed,
)
from torchglb.rows.checks import TOO_LONG, within_norm
from torchglb.rows.states import restored_rows, saved_rows

_write_rows = bound_once(write_rows)


class History:
    """Weighted observations of a batch of problems that advance together.

    All problems of the batch append the same number of rows; a row that one problem should not
    see gets weight 0. Appending is amortised O(1) per row, and all or nothing: whatever interrupts
    it leaves the history as it was. Rows that require grad keep their graph (appending then copies,
    O(n)). Nothing is shared with the outside: tensors may be changed after they were appended, and
    what is read is a copy (but for :meth:`view`).

    A history that is built inside :func:`torchglb.distributed.sharded` keeps its share of the rows
    only: every rank appends the same rows, ``len`` counts them all, and ``X``, ``r``, ``w`` and
    :meth:`rows` are those that stayed here.

    Args:
        dim: d, the number of features.
        batch_shape: ``*B``.
        aggregate: merge repeated feature vectors into one row with the summed weight and the
            weighted mean reward, so that a fixed arm set costs O(distinct arms) whatever t is. Both
            sums are kept in two numbers each, and lose nothing with t.
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
        dim = check_count("dim", dim, least=1)
        check_dtype(dtype)
        batch_shape = check_batch_shape(batch_shape)
        if family is not None:
            check_family(family, " or None")
        if max_norm is not None:
            max_norm = check_positive("max_norm", max_norm)
        self.dim = dim
        self.batch_shape = torch.Size(batch_shape)
        self.aggregate = check_flag("aggregate", aggregate)
        self.family = family
        self.max_norm = max_norm
        #: a row may be as long as this, a few roundings beyond ``max_norm``
        self.longest_row = (
            math.inf if max_norm is None else max_norm * (1 + 64 * torch.finfo(dtype).eps)
        )
        self.validate = check_flag("validate", validate)
        X = torch.zeros((*self.batch_shape, 0, dim), dtype=dtype, device=as_device(device))
        w, y, *rests = (torch.zeros_like(X[..., 0]) for _ in range(4))
        w_rest, y_rest = rests if self.aggregate else (None, None)
        distinct = torch.zeros(self.batch_shape, dtype=torch.int64, device=X.device)
        self._held = RowBuffers(
            0, 0, X, w, y, w_rest, y_rest, distinct, not self.aggregate, False, None
        )
        known = (-math.inf, math.inf, False) if family is None else family.compiled()
        # the least reward, the largest, whether they are whole; None if compiled code cannot tell
        self._rewards = known[3:6] if isinstance(known, CompiledFamily) else known
        self.epoch = 0  # how often its rows were replaced by others
        self._shards = current()
        self._arrays: RowViews | None = None  # a cache of arrays()

    def __copy__(self) -> History:
        """A copy of its own: two histories that shared buffers would write over each other."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        new = object.__new__(type(self))
        memo[id(self)] = new
        shared = {"_held": self._held, "_shards": self._shards, "_arrays": None}
        rest = {name: value for name, value in vars(self).items() if name not in shared}
        vars(new).update(copy.deepcopy(rest, memo), **shared)
        new._held = cloned(self._held)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache, whose arrays share memory that a copy does not, and without room."""
        held = self._held
        short = held if held.recorded else enlarged(trimmed(held), held.used)
        return vars(self) | {"_arrays": None, "_held": short, "_capacity": held.X.shape[-2]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        capacity = state.pop("_capacity")
        vars(self).update(state)
        if capacity > self._held.X.shape[-2]:
            self._held = enlarged(self._held, capacity)

    # ---- reading -------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of observations appended, per problem."""
        return self._held.observations

    @property
    def shards(self) -> Shards:
        """Where the rows are; completes sums over those that are here."""
        return self._shards.at(len(self))

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return self._shards.is_whole

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self._held.X.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._held.X.device

    @property
    def X(self) -> Tensor:
        """Features ``(*B, n, d)``; with aggregation n counts distinct rows."""
        return self._tight().X.clone()

    @property
    def r(self) -> Tensor:
        """Rewards ``(*B, n)``; with aggregation the weighted mean reward of each row."""
        return self._tight().r.clone()

    @property
    def w(self) -> Tensor:
        """Weights ``(*B, n)``; with aggregation the summed weight of each row."""
        held = self._held
        return held.w[..., : held.in_use()].clone()

    def rows(self) -> Rows:
        """A copy of the rows, which is yours.

        With aggregation it may end in unused rows of weight 0: asking how many are in use would
        be a host synchronisation.
        """
        X, r, w = self.view()
        return Rows(X.clone(), r.clone(), None if w is None else w.clone())

    def view(self) -> Rows:
        """The same without a copy, to be read only: writing to it would change the history.

        Later appends do not change it.
        """
        return self._held.view(self._held.used)

    def exact_view(self) -> Rows:
        """The same with all digits: in float64 where sums of merged rows have more than float32."""
        return self._held.exact_view(self._held.used) if self.aggregate else self.view()

    def arrays(self) -> tuple[Reals, Reals, Reals, int]:
        """X ``(N, d, capacity)``, w and w r ``(N, capacity)`` and the number of rows in use.

        For compiled code: NumPy's views of the memory of a CPU, to be read only. Where w r has more
        digits than X (sums of merged rows, weighted rows in float32), they are copies in float64.
        """
        return self._arrays_of(self._held)

    def _arrays_of(self, held: RowBuffers) -> tuple[Reals, Reals, Reals, int]:
        known = self._arrays
        if known is None or known.key is not (held if self.aggregate else held.y):
            known = self._arrays = self._views(held) if self._is_narrow(held) else copies(held)
        elif known.copied is not None and known.copied < held.used:
            known = self._arrays = copied_on(known, held)
        return known.X, known.w, known.y, held.used

    def _is_narrow(self, held: RowBuffers) -> bool:
        """Whether all there is to a row is in X, w and y, in the dtype of the history."""
        return not self.aggregate and held.y.dtype == held.X.dtype

    def _views(self, held: RowBuffers) -> RowViews:
        N, capacity = self.batch_shape.numel(), held.X.shape[-2]
        X = array(held.X.detach()).swapaxes(-1, -2).reshape(N, self.dim, capacity)
        w, y = (array(t.detach()).reshape(N, capacity) for t in (held.w, held.y))
        return RowViews(held.y, None, np.ascontiguousarray(X), w, y)

    # ---- writing by compiled code: reserve, write behind the rows in use, commit -----------

    @property
    def keeps_graph(self) -> bool:
        """Whether rows are only to be appended: they carry derivatives, or w r in more digits."""
        held = self._held
        return held.recorded or held.y.dtype != held.X.dtype

    def last_arrays(self, rows: int) -> tuple[Floats, Floats, Floats] | None:
        """The last rows as they were given: x ``(N, rows, d)``, w r and w ``(N, rows)``; float64.

        None where merged rows no longer show them: if they are not those of the last append, or
        came before what was loaded.
        """
        held, N = self._held, self.batch_shape.numel()
        if not self.aggregate:
            new = slice(held.used - rows, held.used)
            X, w, y, _ = self.arrays()
            found = X[:, :, new].transpose(0, 2, 1), y[:, new], w[:, new]
        elif held.last is None or held.last.r.shape[-1] != rows:
            return None
        else:
            # merged rows have weights
            x, r, weights = (t.detach().double().numpy() for t in held.last if t is not None)
            found = x.reshape(N, rows, -1), (weights * r).reshape(N, rows), weights.reshape(N, rows)
        x, y, w = (np.ascontiguousarray(t, np.float64) for t in found)
        return x, y, w

    def reserve(self, rows: int) -> tuple[Reals, Reals, Reals, int]:
        """:meth:`arrays` with room for so many plain rows more, which :meth:`commit` adds."""
        if not self._is_narrow(self._held) or not self._shards.is_whole:
            raise refuse("history", "one of plain rows", "another kind")
        self._held = reserved(self._held, self._held.used + rows)  # the same rows
        return self.arrays()

    def commit(self, rows: int) -> None:
        """The rows of weight 1 behind those in use are there from now on."""
        self._held = self._held.with_plain(rows)

    def plain_rows(self, x: ArrayLike, r: ArrayLike) -> tuple[Tensor, Tensor, int] | None:
        """Rows and rewards as they come, if compiled code may read and keep them, and how many.

        None for anything else: :meth:`append` takes it, or says what is wrong with it.
        """
        held, dtype = self._held, self.dtype
        if self.aggregate or held.recorded or not (is_plain(x) and is_plain(r)):
            return None
        if not (x.dtype is r.dtype is dtype is held.y.dtype and self._shards.is_whole):
            return None
        shape, batch = r.shape, self.batch_shape
        one = shape == batch
        if x.shape != (*shape, self.dim) or not (one or shape[:-1] == batch):
            return None
        if dtype is not torch.float64 or not (x.is_contiguous() and r.is_contiguous()):
            x, r = x.double().contiguous(), r.double().contiguous()
        return x, r, 1 if one else shape[-1]

    def append_at_once(self, x: ArrayLike, r: ArrayLike, longest: float) -> int:
        """:meth:`append` of plain rows in float64, checked and written by one compiled call.

        Args:
            x: as in :meth:`append`.
            r: as in :meth:`append`.
            longest: a row may be so long; 0 for no checks of values.

        Returns:
            How many rows; 0 for anything that is not plain or does not fit, which has changed
            nothing: :meth:`append` takes it, or says what is wrong with it.
        """
        before, held = self._held, self._with_plain_rows(x, r, longest)
        self._held = before if held is None else held
        return self._held.used - before.used

    def _with_plain_rows(self, x: ArrayLike, r: ArrayLike, longest: float) -> RowBuffers | None:
        if self._rewards is None or self.dtype is not torch.float64:
            return None
        found = self.plain_rows(x, r)
        if found is None:
            return None
        x, r, rows = found
        held = reserved(self._held, self._held.used + rows)
        given = (x.data_ptr(), r.data_ptr(), rows, longest, *self._rewards)
        if not _write_rows(*given, *self._arrays_of(held)):
            return None
        return held.with_plain(rows)

    def _tight(self) -> Rows:
        """:meth:`view` of the rows in use (a host synchronisation with aggregation)."""
        return self._held.view(self._held.in_use())

    def whole(self) -> Rows:
        """The rows of all ranks in the order in which they came: for few rows."""
        rows, shards = self.view(), self.shards
        if shards.is_whole:
            return self.rows()
        if self.aggregate:
            raise refuse("history", "one that is not both sharded and aggregated", "both")
        X, r, w = rows
        w = None if w is None else shards.gather(w, -1)
        return Rows(shards.gather(X, -2), shards.gather(r, -1), w)

    # ---- writing -------------------------------------------------------------------------

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds one row, ``x (*B, d)`` and ``r (*B)``, or k, ``x (*B, k, d)`` and ``r (*B, k)``.

        Args:
            x: features.
            r: rewards.
            weight: non-negative weights, shaped like ``r``, or one number for all; 1 if left out.

        Raises:
            InputError: on any argument that does not fit; the history is then unchanged.
        """
        longest = self.longest_row if self.validate else 0.0
        held = self._with_plain_rows(x, r, longest) if weight is None else None
        # the one assignment by which the rows are there
        self._held = self._with_rows(x, r, weight) if held is None else held

    def _with_rows(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None) -> RowBuffers:
        given, x = x, as_tensor("x", x, dtype=self.dtype, device=self.device)
        if self.validate:
            x = within_norm(x, given, self.max_norm)
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
        held = self._held
        keeps_graph = held.recorded or is_recorded(x, r, w)
        if keeps_graph and (self.aggregate or not self._shards.is_whole):
            raise refuse("x, r, weight", "tensors without derivatives", "one that is recorded")
        observations = held.observations + x.shape[-2]
        if not self._shards.is_whole:
            self._shards.compare("rows", x, r, w)
            mine = self._shards.mine(held.observations)
            x, r, w = x[..., mine, :], r[..., mine], w[..., mine]
        if self.aggregate:
            held = merged_with(held, x, r, w)
        elif held.y.dtype != self.dtype or (weight is not None and self.dtype == torch.float32):
            held = held._replace(y=held.y.double())
            held = extended(held, x, w, w.double() * r.double(), copy=keeps_graph)
        else:
            held = extended(held, x, w, r if weight is None else w * r, copy=keeps_graph)
        unit = held.unit_weights and weight is None
        last = Rows(x.clone(), r.clone(), w.clone()) if self.aggregate else None
        return held._replace(
            observations=observations, unit_weights=unit, recorded=keeps_graph, last=last
        )

    def _check_values(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        checks = ValueChecks()
        checks.finite("x", x)
        if self.max_norm is not None:
            norm, limit = torch.linalg.vector_norm(x, dim=-1), self.longest_row
            checks.within("x", norm, 0.0, limit, self._short_rows)
        if self.family is not None:
            self.family.require_rewards(checks, r)
        else:
            checks.finite("r", r)
        checks.finite("weight", w)
        checks.within("weight", w, 0.0, math.inf, lambda: "non-negative weights")
        checks.settle()

    def _short_rows(self) -> str:
        return f"rows of norm at most {self.max_norm:g} ({TOO_LONG})"

    def mark(self) -> RowBuffers:
        """Where the history stands, for :meth:`reset`; costs nothing."""
        return self._held

    def reset(self, mark: RowBuffers) -> None:
        """Forgets all rows that came after a mark: what undoes a step that failed half-way.

        For whoever owns the history: a sequence or a program that has read the rows in between
        carries sums of them, and takes as many others for the same.
        """
        self._arrays = None  # others may take the place of those that were copied
        self._held = mark

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return self._place() | saved_rows(self._held)

    def _place(self) -> dict[str, list[int]]:
        """Which share of the rows this is; nothing for all of them."""
        shards = self._shards
        return {} if shards.is_whole else {"shard": [shards.rank, shards.ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape, dtype or kind."""
        entries = set(self.state_dict())
        check_entries("state", state, ())
        if entries != set(state):
            raise refuse("state", f"the entries {sorted(entries)}", sorted(state))
        for name, mine in self._place().items():
            if state[name] != mine:
                raise refuse(f"state['{name}']", f"the share {mine} (rank, ranks)", state[name])
        held = restored_rows(self._held, state)
        self.epoch += 1  # first, so that nobody takes the new rows for the old ones
        self._held = held
