"""Timing several contestants side by side."""

import time
from collections.abc import Callable, Mapping


def race(
    contestants: Mapping[str, Callable[[], object]], *, seconds: float, most: int = 200
) -> dict[str, float]:
    """The least time of each contestant, in seconds per call.

    Calls are interleaved, one of each in turn, so that noise of the machine hits all alike; rounds
    are repeated until the time is used up. The minimum is the time without disturbances.
    """
    best = {name: float("inf") for name in contestants}
    end = time.perf_counter() + seconds
    for rounds in range(most):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
        if rounds >= 2 and time.perf_counter() > end:
            break
    return best
