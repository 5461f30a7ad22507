"""Timing several contestants side by side."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping


def race(
    contestants: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    most: int = 100,
    in_a_row: int = 3,
    summary: Callable[[Iterable[float]], float] = min,
) -> dict[str, float]:
    """The least CPU time of each contestant, or its median, in seconds per call.

    Turns are interleaved, so that noise of the machine hits all alike; in its turn a contestant
    runs a few times in a row, so that all are measured warm. Rounds are repeated until the time is
    used up. The minimum is the time without disturbances; CPU time leaves out what other processes
    take. It counts every thread, so contestants are compared with one thread each.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    for rounds in range(most):
        for name, run in contestants.items():
            for _ in range(in_a_row):
                began = time.process_time()
                run()
                taken[name].append(time.process_time() - began)
        if rounds >= 1 and time.perf_counter() > end:
            break
    return {name: summary(times) for name, times in taken.items()}


median = statistics.median
