"""A row that is only imagined: it is in passes over the history, and in nobody's sums."""

from __future__ import annotations

import numpy as np

from torchglb.backend import Floats, entry, kernel
from torchglb.carried.kernels import Workspace, careful_add, row_powers
from torchglb.carried.monomials import Monomials, Packed, unpack
from torchglb.carried.source import NO_FAMILY, RowArrays, RowSource
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, TERMS, row_terms


@kernel
def add_row(
    family: CompiledFamily,
    x: Floats,
    w: float,
    y: float,
    point: Floats,
    trace: float,
    table: Monomials,
    monomial: Floats,
    work: Workspace,
) -> float:
    """Adds one row to the sums of a pass at a point; the trace of the Hessian with it."""
    scratch, z, squared = work.scratch, 0.0, 0.0
    for k in range(table.dim):
        z += x[k] * point[k]
        squared += x[k] * x[k]
    scratch[0], scratch[CHUNK], scratch[2 * CHUNK] = z, w, y
    row_terms(family, scratch, 1, table.order)
    row_powers(x, table, monomial)
    for i in range(table.count):
        added = monomial[i] * scratch[TERMS + table.degree[i] * CHUNK]
        if i <= table.dim:
            careful_add(work.sums, work.rest, i, added)
        else:
            work.sums[i] += added
    return trace + squared * scratch[TERMS + 2 * CHUNK]


@entry
def add_imagined(
    family: CompiledFamily,
    x: Floats,
    w: float,
    y: float,
    point: Floats,
    trace: float,
    packed: Packed,
    work: Workspace,
) -> float:
    """:func:`add_row`, from Python."""
    return add_row(family, x, w, y, point, trace, unpack(packed), np.empty(packed.count), work)


class ImaginedSource(RowSource):
    """The rows of another source and one more of every problem.

    Args:
        source: the rows.
        x: the imagined ones, ``(N, d)``.
        y: their weights times their rewards, ``(N,)``.
        w: their weights, ``(N,)``.
    """

    def __init__(self, source: RowSource, x: Floats, y: Floats, w: Floats) -> None:
        super().__init__(source.family, source.history)
        self.x, self.y, self.w = x, y, w

    def pass_at(
        self,
        b: int,
        point: Floats,
        table: Packed,
        work: Workspace,
        rows: RowArrays | None = None,
    ) -> float:
        """One pass over the rows of problem b; its imagined row is added in every process."""
        trace, x, w, y = (
            super().pass_at(b, point, table, work, rows),
            self.x[b],
            self.w[b],
            self.y[b],
        )
        if self.compiled is not NO_FAMILY:
            return add_imagined(self.compiled, x, w, y, point, trace, table, work)
        d, reward = table.dim, np.array([y / w if w > 0 else 0.0])
        loss, slope, bend = self.terms_at(np.array([x @ point]), reward, np.array([w]))[:, 0]
        work.sums[0] += loss
        work.sums[1 : 1 + d] += slope * x
        if table.order > 1:  # families without compiled derivatives have no more than two
            work.sums[1 + d :] += bend * np.outer(x, x)[np.triu_indices(d)]
        return trace + float(bend * (x @ x))
