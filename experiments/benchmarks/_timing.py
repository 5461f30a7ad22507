"""Timing several contestants side by side."""

import time
from collections.abc import Callable, Mapping


def race(
    contestants: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    most: int = 100,
    in_a_row: int = 3,
) -> dict[str, float]:
    """The least time of each contestant, in seconds per call.

    Turns are interleaved, so that noise of the machine hits all alike; in its turn a contestant
    runs a few times in a row, so that all are measured warm. Rounds are repeated until the time is
    used up. The minimum is the time without disturbances.
    """
    best = {name: float("inf") for name in contestants}
    end = time.perf_counter() + seconds
    for rounds in range(most):
        for name, run in contestants.items():
            for _ in range(in_a_row):
                began = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - began)
        if rounds >= 1 and time.perf_counter() > end:
            break
    return best
