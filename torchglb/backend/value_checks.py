"""Whether numbers that come in are what they should be; compiled, for the doors of every round.

They only say yes or no: the door that got a no looks again, slowly, and names what is wrong.
"""

from __future__ import annotations

import math

from torchglb.backend.compiled import Floats, entry
from torchglb.backend.dense import length


@entry
def rows_within(rows: Floats, longest: float) -> bool:
    """Whether all rows ``(n, d)`` are finite and at most so long."""
    for s in range(rows.shape[0]):  # noqa: SIM110
        if not length(rows[s]) <= longest:
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
