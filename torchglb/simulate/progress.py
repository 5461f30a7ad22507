"""How far a run is, for a person: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from torchglb.simulate.executors import Watch
from torchglb.simulate.runner import Task

#: seconds between two lines where there is no terminal, and between two pictures where there is
LINES_EVERY, BARS_EVERY = 15.0, 0.2


class Display(Watch):
    """One bar for each policy with its rate, and the time that is left.

    Args:
        stream: where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._drawn = 0  # lines of the last picture
        self._last = 0.0

    def begin(self, tasks: Sequence[Task]) -> None:  # noqa: D102
        self._begin = time.monotonic()
        self._goal: dict[str, int] = {}
        self._done: dict[tuple[str, int], int] = {}
        self._first: dict[tuple[str, int], tuple[float, int]] = {}
        self._ended: dict[str, float] = {}
        for task in tasks:
            self._goal[task.label] = self._goal.get(task.label, 0) + task.config["horizon"]

    def progress(self, task: Task, rounds: int) -> None:  # noqa: D102
        key, now = (task.label, task.chunk), time.monotonic()
        self._first.setdefault(key, (now, rounds))
        self._done[key] = rounds
        label = task.label
        finished = self._rounds(label) == self._goal[label]
        news = finished and label not in self._ended
        if finished:
            self._ended.setdefault(label, now)
        every = BARS_EVERY if self._terminal else LINES_EVERY
        if now - self._last >= every or news:
            self._last = now
            self._show(now)

    def notice(self, text: str) -> None:  # noqa: D102
        self._erase()
        self._write(text + "\n")

    def _rounds(self, label: str) -> int:
        return sum(rounds for (name, _), rounds in self._done.items() if name == label)

    def _rate(self, label: str, now: float) -> float:
        """Rounds per second since its tasks began."""
        mine = {key: first for key, first in self._first.items() if key[0] == label}
        if not mine:
            return 0.0
        played = sum(self._done[key] - rounds for key, (_, rounds) in mine.items())
        until = self._ended.get(label, now)
        return played / max(until - min(begin for begin, _ in mine.values()), 1e-9)

    def _left(self, now: float) -> float | None:
        """Seconds left, if the rest goes as fast as what was done since this start."""
        here = sum(self._done[key] - rounds for key, (_, rounds) in self._first.items())
        missing = sum(self._goal.values()) - sum(self._done.values())
        return missing * (now - self._begin) / here if here else None

    def _show(self, now: float) -> None:
        total, whole = sum(self._done.values()), sum(self._goal.values())
        left = self._left(now)
        rest = "" if left is None or total == whole else f", about {duration(left)} left"
        summary = f"{total / whole:4.0%}  {duration(now - self._begin)}{rest}"
        if not self._terminal:
            running = [
                f"{label} {self._rounds(label)}/{goal} ({self._rate(label, now):.0f}/s)"
                for label, goal in self._goal.items()
                if label not in self._ended and self._rounds(label)
            ]
            self._write("; ".join([summary, *running]) + "\n")
            return
        self._erase()
        width = max(map(len, self._goal))
        lines = []
        for label, rounds in self._goal.items():
            done = self._rounds(label) / rounds
            bar = "█" * int(24 * done) + "·" * (24 - int(24 * done))
            rate = f"{self._rate(label, now):6.0f} rounds/s" if done else ""
            lines.append(f"{label:<{width}}  {bar} {done:4.0%} {rate}")
        lines.append(f"{'all':<{width}}  {summary}")
        self._write("\n".join(lines) + "\n")
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def duration(seconds: float) -> str:
    """A length of time as people say it.

    Example:
        >>> duration(75.0)
        '1 min 15 s'
    """
    minutes, left = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{left} s"
    if minutes < 60:
        return f"{minutes} min {left} s"
    return f"{minutes // 60} h {minutes % 60} min"
