"""How far a run is, for a person: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchglb.simulate.executors import FAILED, RUNNING, STATES, WAITING, Watch
from torchglb.simulate.runner import Task

#: seconds between two lines where there is no terminal, and between two pictures where there is
LINES_EVERY, BARS_EVERY = 15.0, 0.2
#: letters of a bar
BAR = 16
#: seconds over which the present rate of a task is measured
PRESENT = 10.0


class Pace:
    """How fast one task advances, now and on the whole.

    Args:
        horizon: its rounds.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.state = WAITING
        self.done = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def tell(self, now: float, rounds: int) -> None:
        """So many rounds are done."""
        if rounds < self.done:  # begun again
            self._recent.clear()
            self._first = None
        self.done = rounds
        self._first = self._first or (now, rounds)
        self._recent.append((now, rounds))
        while len(self._recent) > 2 and self._recent[1][0] <= now - PRESENT:
            self._recent.popleft()

    def rate(self) -> float | None:
        """Rounds per second at present; None while it is not known."""
        return _slope(self._recent[0], self._recent[-1]) if self._recent else None

    def whole_rate(self) -> float | None:
        """Rounds per second since this task began here."""
        return _slope(self._first, self._recent[-1]) if self._first else None

    def left(self) -> float | None:
        """Seconds left at the present rate."""
        rate = self.rate()
        return None if rate is None else (self.horizon - self.done) / rate


def _slope(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    seconds, rounds = last[0] - first[0], last[1] - first[1]
    return rounds / seconds if seconds > 0 and rounds > 0 else None


class Display(Watch):
    """For each policy a bar, its rate and its tasks by state; and the time that is left.

    Args:
        stream: where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._paces: dict[tuple[str, int], Pace] = {}
        self._last = 0.0

    # ---- what it is told -----------------------------------------------------------------

    def begin(self, tasks: Sequence[Task]) -> None:  # noqa: D102
        self._begin = time.monotonic()
        self._paces = {(task.label, task.chunk): Pace(task.horizon) for task in tasks}
        self._ended: set[str] = set()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()

    def progress(self, task: Task, rounds: int) -> None:  # noqa: D102
        now = time.monotonic()
        self._paces[task.label, task.chunk].tell(now, rounds)
        done, goal = self._rounds(task.label)
        news = done == goal and task.label not in self._ended
        if news:
            self._ended.add(task.label)
        every = BARS_EVERY if self._live is not None else LINES_EVERY
        if now - self._last >= every or news:
            self._last = now
            self._show(now)

    def state(self, task: Task, state: str) -> None:  # noqa: D102
        self._paces[task.label, task.chunk].state = state

    def notice(self, text: str) -> None:  # noqa: D102
        self._print(text)

    def end(self) -> None:  # noqa: D102
        if self._live is not None:
            self._draw(time.monotonic())
            live, self._live = self._live, None
            self._quietly(live.stop)

    # ---- numbers -------------------------------------------------------------------------

    def _labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self._paces))

    def _of(self, label: str) -> list[Pace]:
        return [pace for (name, _), pace in self._paces.items() if name == label]

    def _rounds(self, label: str) -> tuple[int, int]:
        mine = self._of(label)
        return sum(pace.done for pace in mine), sum(pace.horizon for pace in mine)

    def _rate(self, label: str) -> float:
        """Rounds per second of all running tasks of a policy."""
        running = (pace for pace in self._of(label) if pace.state == RUNNING)
        return sum(pace.rate() or 0.0 for pace in running)

    def left(self) -> float | None:
        """Seconds left: those of the slowest task, or of all tasks on the workers there are.

        A task goes on at its present rate; one that waits, at the mean rate of the tasks of its
        policy so far, or of all if there was none.
        """
        paces = self._paces.values()
        running = [pace.left() for pace in paces if pace.state == RUNNING]
        known = [seconds for seconds in running if seconds is not None]
        rates = {
            label: _mean([pace.whole_rate() for pace in self._of(label)])
            for label in self._labels()
        }
        anyone = _mean(list(rates.values()))
        if not known or anyone is None:
            return None
        waiting = [
            (pace.horizon - pace.done) / (rates[label] or anyone)
            for (label, _), pace in self._paces.items()
            if pace.state == WAITING
        ]
        return max(*known, *waiting, (sum(known) + sum(waiting)) / len(running), 0.0)

    # ---- pictures ------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        if self._live is not None:
            self._draw(now)
            return
        running = []
        for label in self._labels():
            done, goal = self._rounds(label)
            if 0 < done < goal:
                running.append(f"{label} {done}/{goal} ({self._rate(label):.0f}/s)")
        self._print("; ".join([self._summary(now), *running]))

    def _summary(self, now: float) -> str:
        done = sum(pace.done for pace in self._paces.values())
        goal = sum(pace.horizon for pace in self._paces.values())
        left = self.left()
        rest = "" if left is None or done == goal else f", about {duration(left)} left"
        states = Counter(pace.state for pace in self._paces.values())
        failed = f", {states[FAILED]} failed" if states[FAILED] else ""
        return f"{done / goal:4.0%}  {duration(now - self._begin)}{rest}{failed}"

    def _draw(self, now: float) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("policy", no_wrap=True)
        table.add_column("rounds", width=BAR)
        occurring = {pace.state for pace in self._paces.values()}
        states = [state for state in STATES if state in occurring]
        for heading in ("", "rounds/s", *states):
            table.add_column(heading, justify="right", no_wrap=True)
        for label in self._labels():
            done, goal = self._rounds(label)
            found = Counter(pace.state for pace in self._of(label))
            counts = (str(found[state] or "") for state in states)
            rate = self._rate(label)
            table.add_row(
                label,
                ProgressBar(total=goal, completed=done, width=BAR),
                f"{done / goal:.0%}",
                f"{rate:.0f}" if rate else "",
                *counts,
            )
        assert self._live is not None
        live = self._live
        picture = Group(table, Text(f"all {self._summary(now)}"))
        self._quietly(lambda: live.update(picture, refresh=True))

    def _print(self, text: str) -> None:
        self._quietly(lambda: self._console.print(text, markup=False))

    def _quietly(self, write: Callable[[], None]) -> None:
        """A run does not end because nobody looks any more."""
        try:
            write()
        except (OSError, SystemExit):  # what rich makes of a broken pipe
            self._live = None
            self._console = Console(quiet=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else None


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
