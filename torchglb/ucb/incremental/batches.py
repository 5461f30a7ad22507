"""Rounds and rows of a whole batch in one call: loops over its problems; compiled.

A problem is computed by itself and in a fixed order, so that its bits are the same in any batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints, StoredCalls, entry, floats_at, inlined, kernel, record
from torchglb.backend.dense import length
from torchglb.backend.value_checks import rewards_within, rows_within
from torchglb.carried.kernels import LossRows, carry_row, sum_rows
from torchglb.carried.minimum import SearchVectors, vectors_of
from torchglb.carried.model import CarriedSums, carried_of, objective_of, only_model
from torchglb.families.compiled import CompiledFamily
from torchglb.optim import Status
from torchglb.ucb.incremental.arm_selection import choose, first_tolerance
from torchglb.ucb.incremental.minorant import minorant_in, sum_least_curvatures
from torchglb.ucb.incremental.round_state import (
    DECIDED,
    MINIMUM,
    NO_CENTER,
    PASS_FOR_MINIMUM,
    PASS_FOR_MINORANT,
    UNDECIDED,
    Arms,
    CarriedProblem,
    Memory,
    Settings,
    anchor_use_in,
    round_memory,
)

_CONVERGED, _NONFINITE = int(Status.CONVERGED), int(Status.NONFINITE)
_INFEASIBLE, _INACCURATE = int(Status.INFEASIBLE), int(Status.INACCURATE)
#: how a call ends: all is well; some problems have not converged; nothing has changed, because some
#: value is not what it should be, or because the sums do not hold the rows of the history
DONE, OPEN, REFUSED, BEHIND = 0, 1, 2, 3
#: no finite loss is higher: stands for an infinite level, with which one cannot compute
HUGE = 1e305


class Batch(NamedTuple):
    """Everything that is carried of N problems."""

    anchors: CarriedSums  # the sums at the anchors
    minimum: CarriedSums  # the sums near the minimum
    anchor_use: Floats  # memory of AnchorUse, (N, (d + 2) A + 1)
    vectors: SearchVectors  # of the search for the minimum, (N, d) each
    search: np.ndarray  # its state, (N,)
    rounds: np.ndarray  # the state of the round, (N,)
    passes: Floats  # over the history so far, (N,)
    minorants: Floats  # memory of the minorants, (N, size) or (N, 0) for none


class RoundBuffers(NamedTuple):
    """Where rounds find what they are about, beside their arms, and leave what comes out."""

    heights: Floats  # of the levels, (N,)
    ridge: Floats  # lambda, (N,)
    tilt: Floats  # zeros, (N, d)
    bounds: Floats  # on h of K arms, at least (2 N K,): all upper ones, then the lower ones
    winner: Ints  # the index of the winner, (N,)
    status: Ints  # how each problem ended, (N,) of Status
    passes: Floats  # over the history, (N,)
    memory: Memory  # for one problem at a time
    arms: int  # there may be so many


def round_buffers(batch: Batch, arms: int) -> RoundBuffers:
    """For rounds of the problems of a batch with so many arms at most."""
    N, d = len(batch.passes), batch.anchors.table.dim
    counts = batch.anchors.table.count, batch.minimum.table.count
    return RoundBuffers(
        heights=np.zeros(N),
        ridge=np.zeros(N),
        tilt=np.zeros((N, d)),
        bounds=np.empty(2 * N * arms),
        winner=np.empty(N, np.int64),
        status=np.empty(N, np.int64),
        passes=np.empty(N),
        memory=round_memory(d, batch.anchors.number, *counts, arms),
        arms=arms,
    )


class RoundCall(NamedTuple):
    """All that rounds and rows of a batch read and write, in arrays that stay where they are."""

    family: CompiledFamily
    X: Floats  # features, (N, d, capacity)
    w: Floats  # weights, (N, capacity)
    y: Floats  # weights times rewards, (N, capacity)
    batch: Batch  # what is carried
    buffers: RoundBuffers  # the rest


@inlined
def problem_of(call: RoundCall, b: int, rows: int) -> CarriedProblem:
    """One problem of a batch, with so many rows."""
    batch, ridge, tilt = call.batch, call.buffers.ridge[b], call.buffers.tilt[b]
    d, number = batch.anchors.table.dim, batch.anchors.number
    return CarriedProblem(
        objective_of(batch.anchors, b, ridge, tilt),
        anchor_use_in(batch.anchor_use[b], d, number),
        only_model(objective_of(batch.minimum, b, ridge, tilt)),
        vectors_of(batch.vectors, b),
        minorant_in(batch.minorants[b], d),
        rows,
    )


@inlined
def arms_of(every: Floats, buffers: RoundBuffers, b: int) -> Arms:
    """The arms of one problem, of ``(N, K, d)``, as unit vectors and lengths."""
    (N, K, d), bounds = every.shape, buffers.bounds
    numbers, anchors = buffers.memory.arm_numbers, buffers.memory.arm_anchors
    units = numbers[: K * d].reshape(K, d)
    lengths, multiplier = numbers[K * d : K * (d + 1)], numbers[K * (d + 1) : K * (d + 2)]
    upper, lower = bounds[b * K : (b + 1) * K], bounds[(N + b) * K : (N + b + 1) * K]
    for k in range(K):
        size = length(every[b, k])
        lengths[k] = size
        for i in range(d):
            units[k, i] = every[b, k, i] / size if size > 0.0 else 0.0
    return Arms(units, lengths, upper, lower, anchors[:K], anchors[K : 2 * K], multiplier)


@kernel
def start_round(call: RoundCall, settings: Settings, number: int, b: int) -> None:
    """The state of a round before its first step."""
    state, height = record(call.batch.rounds, b), call.buffers.heights[b]
    state.phase, state.looks, state.passes, state.minorant_passes = MINIMUM, 0, 0, 0
    state.height = HUGE if height > HUGE else height  # NaN stays NaN
    state.tolerance = first_tolerance(state, settings)
    state.number, state.leader = number, 0
    search = record(call.batch.search, b)
    state.awaited, search.answered, search.passes = 0, 0, 0


@kernel
def end_round(call: RoundCall, arms: Arms, b: int) -> None:
    """How a round has ended."""
    batch, out = call.batch, call.buffers
    state, search = record(batch.rounds, b), record(batch.search, b)
    out.winner[b] = state.leader
    out.passes[b] = state.passes + state.minorant_passes + search.passes
    batch.passes[b] += out.passes[b]
    upper, lower, unknown, status = arms.upper, arms.lower, False, _CONVERGED
    if state.supposed == 1:  # the winner is that of the centre, but no lower bound is certain
        state.ending = NO_CENTER
        lower[:] = -math.inf
    empty = search.low > state.level
    for k in range(upper.shape[0]):
        unknown = unknown or math.isnan(upper[k]) or math.isnan(lower[k])
        empty = empty or upper[k] == -math.inf
    if state.ending == UNDECIDED or state.ending == NO_CENTER:
        status = _INACCURATE
    if empty:
        status = _INFEASIBLE
    if math.isnan(search.high + state.level) or (unknown and not empty):
        status = _NONFINITE
    out.status[b] = status


@kernel
def play_one(call: RoundCall, used: int, every: Floats, settings: Settings, b: int) -> None:
    """The round of one problem, with all passes that it needs."""
    state, search = record(call.batch.rounds, b), record(call.batch.search, b)
    problem, arms = problem_of(call, b, used), arms_of(every, call.buffers, b)
    rows, family = LossRows(call.X[b], call.w[b], call.y[b]), call.family
    memory, trace = call.buffers.memory, 0.0
    while True:
        asked = choose(state, search, problem, arms, settings, trace, memory)
        if asked == DECIDED:
            end_round(call, arms, b)
            return
        if asked == PASS_FOR_MINORANT:
            work, constants = memory.minimum_pass, problem.anchors.constants
            sum_least_curvatures(family, rows, problem.rows, problem.minorant, constants, work)
            continue
        if asked == PASS_FOR_MINIMUM:
            point, work = problem.vectors.trial, memory.minimum_pass
            table = problem.minimum.objective.table
        else:
            point, table, work = memory.trial, problem.anchors.table, memory.anchor_pass
        trace = sum_rows(family, rows, problem.rows, point, table, work)


@kernel
def play_all(call: RoundCall, used: int, every: Floats, settings: Settings, number: int) -> bool:
    """The rounds of all problems; whether all of them have converged."""
    converged = True
    for b in range(every.shape[0]):
        start_round(call, settings, number, b)
        play_one(call, used, every, settings, b)
        converged = converged and call.buffers.status[b] == _CONVERGED
    return converged


@entry
def play_round(
    call: RoundCall,
    used: int,
    rows: int,
    address: int,
    arms: int,
    settings: Settings,
    number: int,
    longest: float,
) -> int:
    """The round of every problem, with all passes that it needs; how it ends, DONE to BEHIND.

    Args:
        call: what is carried, and what the round is about.
        used: rows of the arrays that are in use.
        rows: how many must be in the sums.
        address: of the arms, float64 numbers ``(N, K, d)`` in a row.
        arms: K.
        settings: what is asked of all problems.
        number: of this round.
        longest: an arm may be so long; 0 if that has been checked.
    """
    N, d = call.X.shape[0], call.X.shape[1]
    every = floats_at(address, (N, arms, d))
    for b in range(N):
        if not rows_held(call.batch, b, rows):
            return BEHIND
        if longest > 0.0 and not rows_within(every[b], longest):
            return REFUSED
    return DONE if play_all(call, used, every, settings, number) else OPEN


@entry
def go_on(
    call: RoundCall,
    rows: int,
    every: Floats,
    settings: Settings,
    number: int,
    b: int,
    begins: bool,
    trace: float,
) -> int:
    """The round of one problem up to the next pass, which is made elsewhere.

    Args:
        call: what is carried, and what the round is about, with the sums of the last pass.
        rows: of a pass.
        every: all arms, ``(N, K, d)``.
        settings: what is asked.
        number: of this round.
        b: which problem.
        begins: whether this is the start.
        trace: of the Hessian at the point of the pass that was asked for.
    """
    if begins:
        start_round(call, settings, number, b)
    state, search = record(call.batch.rounds, b), record(call.batch.search, b)
    problem, arms = problem_of(call, b, rows), arms_of(every, call.buffers, b)
    asked = choose(state, search, problem, arms, settings, trace, call.buffers.memory)
    if asked == DECIDED:
        end_round(call, arms, b)
    return asked


# ---- rows --------------------------------------------------------------------------------------


@kernel
def rows_held(batch: Batch, b: int, rows: int) -> bool:
    """Whether both sums of a problem hold so many rows: the last number of their memory."""
    return batch.anchors.memory[b, -1] == rows and batch.minimum.memory[b, -1] == rows


@kernel
def rows_fit(family: CompiledFamily, x: Floats, r: Floats, longest: float) -> bool:
    """Whether rows ``(N, k, d)`` and rewards ``(N, k)`` are what a history takes."""
    for b in range(x.shape[0]):
        if not rows_within(x[b], longest):
            return False
        if not rewards_within(r[b], family.low, family.high, family.whole):
            return False
    return True


@entry
def learn_rows(
    call: RoundCall, used: int, x_address: int, r_address: int, rows: int, longest: float
) -> int:
    """Checks k rows of weight 1 of every problem, writes them and carries them: O(A k d^q).

    Args:
        call: where they go.
        used: rows that are there already; the new ones go behind them.
        x_address: of the rows, float64 numbers ``(N, k, d)`` in a row.
        r_address: of their rewards, ``(N, k)``.
        rows: k.
        longest: they may be so long at most; 0 for no checks at all.

    Returns:
        DONE, REFUSED or BEHIND.
    """
    N, d = call.X.shape[0], call.X.shape[1]
    x, r = floats_at(x_address, (N, rows, d)), floats_at(r_address, (N, rows))
    for b in range(N):
        if not rows_held(call.batch, b, used):
            return BEHIND
    if longest > 0.0 and not rows_fit(call.family, x, r, longest):
        return REFUSED
    add_rows(call, used, x, r)
    return DONE


@kernel
def add_rows(call: RoundCall, used: int, x: Floats, r: Floats) -> None:
    """Writes and carries the rows; between rounds the memory of passes is free for that."""
    (N, rows, d), batch, family = x.shape, call.batch, call.family
    work, other = call.buffers.memory.anchor_pass, call.buffers.memory.minimum_pass
    table, least = batch.anchors.table, batch.minimum.table
    row, scratch = work.part, work.scratch
    for b in range(N):
        anchors, minimum = carried_of(batch.anchors, b), carried_of(batch.minimum, b)
        for s in range(rows):
            for k in range(d):
                row[k] = x[b, s, k]
                call.X[b, k, used + s] = x[b, s, k]
            call.w[b, used + s], call.y[b, used + s] = 1.0, r[b, s]
            carry_row(family, row, 1.0, r[b, s], anchors, table, scratch, work.sums)
            carry_row(family, row, 1.0, r[b, s], minimum, least, scratch, other.sums)


#: calls of both, for rows of some dtypes
CALLS = StoredCalls(
    (play_round, 0, 0, 0, 0, Settings(True, 0.0, 0.0, 0.0, False, 0), 0, 0.0),
    (learn_rows, 0, 0, 0, 0, 0.0),
)
