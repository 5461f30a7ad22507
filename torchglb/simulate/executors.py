"""Where tasks run: here, one after the other; in worker processes; on a Ray cluster.

Whoever runs a task, its numbers are the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchglb.simulate.runner import Task, run_task


class Watch:
    """Is told what happens; does nothing itself."""

    def begin(self, tasks: Sequence[Task]) -> None:
        """These tasks are about to run."""

    def progress(self, task: Task, rounds: int) -> None:
        """So many rounds of a task are done."""

    def notice(self, text: str) -> None:
        """Something that a person should know."""


class Executor(Protocol):
    """Runs tasks; ``finish`` is called in this process after each."""

    def __call__(  # noqa: D102
        self,
        tasks: Sequence[Task],
        watch: Watch,
        finish: Callable[[Task], None],
        *,
        workers: int | None,
        address: str | None,
    ) -> None: ...


class Interrupt:
    """Turns the first Ctrl-C into a wish to stop; the second one interrupts at once.

    A policy is then never left in the middle of a round, and its state can be saved.
    """

    def __init__(self) -> None:
        self.wished = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._wish)
        return self

    def _wish(self, number: int, frame: Any) -> None:
        if self.wished:
            raise KeyboardInterrupt
        self.wished = True

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def serial(
    tasks: Sequence[Task],
    watch: Watch,
    finish: Callable[[Task], None],
    *,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """One task after the other, in this process."""
    with Interrupt() as interrupt:
        for task in tasks:

            def report(rounds: int, task: Task = task) -> bool:
                watch.progress(task, rounds)
                return not interrupt.wished

            if not run_task(task, report):
                raise KeyboardInterrupt
            finish(task)


EXECUTORS: dict[str, Executor] = {"serial": serial}
