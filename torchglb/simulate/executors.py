"""Where tasks run: here, one after the other; in worker processes; on a Ray cluster.

Whoever runs a task, its numbers are the same. A task that fails does not stop the others.
"""

from __future__ import annotations

import importlib
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchglb.errors import RunError
from torchglb.simulate.files import write_bytes
from torchglb.simulate.runner import Task, run_here

#: how often a task is begun again after the process or the machine that ran it was lost
RETRIES = 3
#: the states of a task
WAITING, RUNNING, STOPPED, FINISHED, FAILED = STATES = (
    "waiting",
    "running",
    "stopped",
    "finished",
    "failed",
)


class Watch:
    """Is told what happens; does nothing itself.

    Example:
        >>> class Printer(Watch):
        ...     def state(self, task, state):
        ...         print(state)
        >>> from torchglb.simulate import Configuration, run
        >>> config = Configuration.load(
        ...     {
        ...         "family": "bernoulli", "environment": "fixed", "arms": 5, "S": 3.0,
        ...         "horizon": 10, "replicates": 2, "policies": ["random"],
        ...     }
        ... )
        >>> record = run(config, "results/watched", watch=Printer())
        running
        finished
    """

    def begin(self, tasks: Sequence[Task]) -> None:
        """These tasks are about to run."""

    def progress(self, task: Task, rounds: int) -> None:
        """So many rounds of a task are done."""

    def state(self, task: Task, state: str) -> None:
        """A task has passed into one of ``STATES``; at first it is waiting."""

    def notice(self, text: str) -> None:
        """Something that a person should know."""

    def end(self) -> None:
        """No task runs any more."""


class Executor(Protocol):
    """Runs tasks; ``finish`` is called in this process after each that has finished.

    Raises:
        RunError: at the end, if a task failed.
        KeyboardInterrupt: when interrupted, after all tasks have saved their states.
    """

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
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._wish)
        return self

    def _wish(self, number: int, frame: Any) -> None:
        if self.wished:
            raise KeyboardInterrupt
        self.wished = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Outcomes:
    """What became of the tasks: those that finished are handed on, those that failed are kept.

    Args:
        watch: is told of everything.
        finish: takes a finished task.
    """

    def __init__(self, watch: Watch, finish: Callable[[Task], None]) -> None:
        self._watch, self._finish = watch, finish
        self._found: list[str] = []
        self._lost: dict[tuple[str, int], int] = {}

    def finished(self, task: Task) -> None:
        """A task has written its results. If they cannot be put together, it failed after all."""
        try:
            self._finish(task)
        except Exception:
            self.failed(task, traceback.format_exc())
        else:
            self._watch.state(task, FINISHED)

    def failed(self, task: Task, reason: str) -> None:
        """A task raised an exception, of which ``reason`` is the traceback."""
        path = task.part.with_suffix(".error.txt")
        try:
            write_bytes(path, reason.encode())
            see = f" (see {path})"
        except OSError:  # a full disk, most likely the very reason
            see = ""
        self._found.append(f"{task}: {reason.strip().splitlines()[-1]}{see}")
        self._watch.state(task, FAILED)
        self._watch.notice(f"failed: {self._found[-1]}")

    def lost(self, task: Task, reason: str) -> bool:
        """The process of a task is gone; whether to begin again from its checkpoint."""
        key = (task.label, task.chunk)
        self._lost[key] = self._lost.get(key, 0) + 1
        again = self._lost[key] <= RETRIES
        if again:
            self._watch.state(task, WAITING)
            self._watch.notice(f"{task}: {reason}; going on from its last checkpoint")
        else:
            self._found.append(f"{task}: {reason}, {RETRIES + 1} times")
            self._watch.state(task, FAILED)
            self._watch.notice(f"failed: {self._found[-1]}")
        return again

    def settle(self) -> None:
        """Raises what was found, if anything."""
        if self._found:
            tasks = "1 task" if len(self._found) == 1 else f"{len(self._found)} tasks"
            raise RunError(f"{tasks} failed:\n  " + "\n  ".join(self._found))


def serial(
    tasks: Sequence[Task],
    watch: Watch,
    finish: Callable[[Task], None],
    *,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """One task after the other, in this process."""
    outcomes = Outcomes(watch, finish)
    with Interrupt() as interrupt:
        for task in tasks:

            def report(rounds: int, task: Task = task) -> bool:
                watch.progress(task, rounds)
                return not interrupt.wished

            watch.state(task, RUNNING)
            try:
                finished = run_here(task, report, watch.notice)
            except Exception:
                outcomes.failed(task, traceback.format_exc())
                continue
            if not finished:
                watch.state(task, STOPPED)
                raise KeyboardInterrupt
            outcomes.finished(task)
    outcomes.settle()


def _in(module: str) -> Executor:
    """The executor of a module that is imported when it is used."""

    def execute(*args: Any, **settings: Any) -> None:
        importlib.import_module(module).execute(*args, **settings)

    return execute


EXECUTORS: dict[str, Executor] = {
    "serial": serial,
    "processes": _in("torchglb.simulate.processes"),
    "ray": _in("torchglb.simulate.ray_executor"),
}
