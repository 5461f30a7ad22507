"""The minima of a batch, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, entry, record
from torchglb.carried.kernels import (
    FACTS,
    Carried,
    Constants,
    Workspace,
    carried_in,
    carry_row,
    put_point,
    sum_rows,
    workspace,
)
from torchglb.carried.minimum import (
    Dense,
    Goal,
    Quadratic,
    dense,
    places_in,
    search_minimum,
)
from torchglb.carried.monomials import Packed, unpack
from torchglb.families.compiled import CompiledFamily


class ImaginedRows(NamedTuple):
    """One more row of every problem, which is in the sums of nobody; or of none.

    Attributes:
        x: ``(N, d)``, or ``(0, d)``.
        y: weights times rewards, ``(N,)``.
        w: weights, ``(N,)``.
    """

    x: Floats
    y: Floats
    w: Floats


@entry
def find_minima(
    family: CompiledFamily,
    X: Floats,
    w: Floats,
    y: Floats,
    rows: int,
    memory: Floats,
    places: Floats,
    search: np.ndarray,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    goal: Goal,
    more: ImaginedRows,
) -> None:
    """The minimum of every problem, with all passes that it needs.

    With an imagined row the search is that of a copy; where it made a pass the carried point moves
    too, since the next search would need it.
    """
    table, count, d = unpack(packed), packed.count, packed.dim
    work, algebra, monomial = workspace(d, count), dense(d, count), np.empty(count)
    imagines, extra = more.x.shape[0] > 0, np.zeros(1 + FACTS)
    held = memory.copy() if imagines else memory
    for b in range(memory.shape[0]):
        state, at, trace = record(search, b), places_in(places[b]).trial, 0.0
        # the sums of a pass as those of a carried point, to which a row can be added
        passed = Carried(
            at.reshape(d, 1),
            work.sums.reshape(count, 1),
            work.rest.reshape(1 + d, 1),
            extra[:1],
            extra[1:],
        )
        carried = carried_in(held[b], d, 1, count)
        if imagines:
            x, weight, reward = more.x[b], more.w[b], more.y[b]
            carry_row(family, x, weight, reward, carried, table, work.scratch, monomial)
        state.passes, state.answered = 0, 0
        while search_on(
            b, held, places, search, constants, packed, ridge, tilt, goal, work, trace, algebra
        ):
            trace = sum_rows(family, X[b], w[b], y[b], 0, rows, at, table, work)
            if imagines:
                extra[0] = trace
                carry_row(family, x, weight, reward, passed, table, work.scratch, monomial)
                trace = extra[0]
            state.answered = 1
        if imagines and state.passes > 0:
            for k in range(d):
                at[k] = carried.points[k, 0]
            trace = sum_rows(family, X[b], w[b], y[b], 0, rows, at, table, work)
            real = carried_in(memory[b], d, 1, count)
            put_point(real, 0, at, work.sums, work.rest, trace)


@entry
def search_on(
    b: int,
    memory: Floats,
    places: Floats,
    search: np.ndarray,
    constants: Floats,
    packed: Packed,
    ridge: Floats,
    tilt: Floats,
    goal: Goal,
    work: Workspace,
    trace: float,
    algebra: Dense,
) -> int:
    """:func:`search_minimum` for one problem of a batch."""
    c = constants[b]
    return search_minimum(
        record(search, b),
        places_in(places[b]),
        carried_in(memory[b], packed.dim, 1, packed.count),
        Quadratic(ridge[b], tilt[b]),
        Constants(c[0], c[1], c[2]),
        goal,
        unpack(packed),
        work,
        trace,
        algebra,
    )
