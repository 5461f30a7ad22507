"""Where the rows come from: a history seen as N problems, and passes over it.

The rows of a CPU's history are read by compiled code as they lie in memory. Families without
compiled derivatives supply theirs through torch, and rows that lie in several processes are summed
in each and added up: for both, compiled code stops where it needs a pass and goes on with its sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchglb.backend import Floats, entry
from torchglb.carried.kernels import LossRows, Workspace, sum_rows, trace_of
from torchglb.carried.monomials import Monomials
from torchglb.errors import SolverError
from torchglb.families import GLMFamily
from torchglb.families.compiled import CompiledFamily
from torchglb.rows.history import History

#: stands for the family in compiled code that never looks at it
NO_FAMILY = CompiledFamily(0, 1.0, 1.0, 0.0, 0.0, False, 0.0)


class RowArrays(NamedTuple):
    """The rows of N problems as compiled code reads them."""

    X: NDArray[Any]  # features, (N, d, capacity)
    w: NDArray[Any]  # weights, (N, capacity)
    y: NDArray[Any]  # weights times rewards, (N, capacity)
    used: int  # rows that are in use


class RowSource:
    """The rows of a history on the CPU, for whoever carries sums over them.

    Args:
        family: the GLM family.
        history: the rows; ``*B`` is seen as N problems in one axis.
    """

    def __init__(self, family: GLMFamily, history: History) -> None:
        self.family, self.history = family, history
        self.compiled = family.compiled() or NO_FAMILY
        self.problems = history.batch_shape.numel()
        #: whether compiled code may read all rows by itself,
        self.is_direct = self.compiled is not NO_FAMILY and history.is_whole
        #: and write new ones
        self.is_plain = self.is_direct and not history.aggregate

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are built anew: ``compiled`` is compared by identity."""
        return type(self), (self.family, self.history)

    def arrays(self) -> RowArrays:
        """The rows as they lie in memory."""
        return RowArrays(*self.history.arrays())

    def pass_at(self, b: int, point: Floats, table: Monomials, work: Workspace) -> float:
        """One pass over the rows of problem b, into ``work.sums``; the trace of the Hessian.

        Args:
            b: which problem.
            point: where.
            table: the monomials that are wanted.
            work: memory.
        """
        rows = self.arrays()
        if self.compiled is NO_FAMILY:
            trace = self._pass_by_torch(b, point, table, rows, work)
        else:
            trace = pass_over(self.compiled, rows, b, point, table, work)
        shards = self.history.shards
        if not shards.is_whole:
            work.sums[: len(work.rest)] -= work.rest
            (total,) = shards.sum(torch.from_numpy(np.append(work.sums, trace)))
            work.sums[:], trace = total[:-1].numpy(), float(total[-1])
            work.rest[:] = 0.0
        return trace

    def _pass_by_torch(
        self, b: int, point: Floats, table: Monomials, rows: RowArrays, work: Workspace
    ) -> float:
        X, w, y = (torch.from_numpy(t[b][..., : rows.used]).double() for t in rows[:3])
        z = torch.from_numpy(point) @ X
        r = torch.where(w > 0, y / torch.where(w > 0, w, 1.0), 0.0)
        loss, slope, curvature = (w * term for term in self.family.loss_terms(z, r))
        if bool((curvature < 0).any()):
            name = type(self.family).__name__
            raise SolverError(f"{name}: m'' is negative, so that the loss is not convex")
        hessian = (X * curvature) @ X.mT
        d = table.dim
        # sums in few roundings, unlike products of matrices
        work.sums[0], work.sums[1 : 1 + d] = float(loss.sum()), (X * slope).sum(-1).numpy()
        work.rest[:] = 0.0
        if table.order == 1:
            return float(torch.trace(hessian))
        upper = torch.triu_indices(d, d)
        work.sums[1 + d :] = hessian[upper[0], upper[1]].numpy()
        return trace_of(work.sums, d)


@entry
def pass_over(
    family: CompiledFamily,
    rows: RowArrays,
    b: int,
    point: Floats,
    table: Monomials,
    work: Workspace,
) -> float:
    """:func:`sum_rows` over all rows of one problem."""
    mine = LossRows(rows.X[b], rows.w[b], rows.y[b])
    return sum_rows(family, mine, rows.used, point, table, work)
