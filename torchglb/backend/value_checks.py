"""Whether numbers that come in are what they should be; compiled, for the doors of every round.

They only say yes or no: the door that got a no looks again, slowly, and names what is wrong.
"""

from __future__ import annotations

import math

from torchglb.backend.compiled import Floats, entry, floats_at
from torchglb.backend.dense import length


@entry
def rows_within(rows: Floats, longest: float) -> bool:
    """Whether all rows ``(n, d)`` are finite and at most so long."""
    for s in range(rows.shape[0]):
        size = length(rows[s])
        if not (size <= longest and size < math.inf):
            return False
    return True


@entry
def rewards_within(rewards: Floats, low: float, high: float, whole: bool) -> bool:
    """Whether all rewards ``(n,)`` are finite, in [low, high] and, if asked for, whole numbers."""
    for s in range(rewards.shape[0]):
        reward = rewards[s]
        if not (low <= reward <= high and abs(reward) < math.inf):
            return False
        if whole and reward != math.floor(reward):
            return False
    return True


@entry
def write_rows(
    x_address: int,
    r_address: int,
    rows: int,
    longest: float,
    low: float,
    high: float,
    whole: bool,
    X: Floats,
    w: Floats,
    y: Floats,
    used: int,
) -> bool:
    """Checks k rows of weight 1 of every problem and writes them behind those that are in use.

    Args:
        x_address: of the rows, float64 numbers ``(N, k, d)`` in a row.
        r_address: of their rewards, ``(N, k)``.
        rows: k.
        longest: they may be so long at most; 0 for no checks at all.
        low: the least reward that there is.
        high: the largest one.
        whole: whether rewards are whole numbers.
        X: where features go, ``(N, d, capacity)``,
        w: weights, ``(N, capacity)``,
        y: and weighted rewards, ``(N, capacity)``.
        used: rows that are there.

    Returns:
        Whether they are what they should be; if not, nothing was written.
    """
    N, d = X.shape[0], X.shape[1]
    x, r = floats_at(x_address, (N, rows, d)), floats_at(r_address, (N, rows))
    for b in range(N):
        if longest > 0.0 and not (
            rows_within(x[b], longest) and rewards_within(r[b], low, high, whole)
        ):
            return False
    for b in range(N):
        for s in range(rows):
            for k in range(d):
                X[b, k, used + s] = x[b, s, k]
            w[b, used + s], y[b, used + s] = 1.0, r[b, s]
    return True
