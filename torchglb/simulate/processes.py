"""Local worker processes: started afresh (spawn), one thread each, as many as there are cores.

A worker that dies takes nothing with it: its task is begun again from the last checkpoint. If this
process dies, the workers notice and end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

from torchglb.simulate.executors import Failures, Interrupt, Watch
from torchglb.simulate.runner import Task, run_here

#: messages of a worker
PROGRESS, FINISHED, STOPPED, FAILED = "progress", "finished", "stopped", "failed"


@dataclass
class Worker:
    """A process, the line to it, and what it is doing."""

    process: BaseProcess
    line: Connection
    task: Task | None = None

    def give(self, task: Task) -> None:
        """Starts a task."""
        self.task = task
        self.line.send(task)


def execute(
    tasks: Sequence[Task],
    watch: Watch,
    finish: Callable[[Task], None],
    *,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """Runs tasks in worker processes."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    failures = Failures(watch)
    waiting = deque(tasks)
    crew: list[Worker] = []
    try:
        with Interrupt() as interrupt:
            while waiting or any(worker.task for worker in crew):
                if interrupt.wished:
                    stop.set()
                    waiting.clear()
                idle = [worker for worker in crew if worker.task is None]
                while waiting and len(crew) - len(idle) < (workers or cores()):
                    worker = idle.pop() if idle else _hire(context, stop, crew)
                    worker.give(waiting.popleft())
                for worker in _with_news(crew):
                    lost = _listen(worker, watch, finish, failures)
                    if lost is not None:
                        crew.remove(worker)
                        waiting.append(lost)
            if interrupt.wished:
                raise KeyboardInterrupt
    finally:
        _dismiss(crew)
    failures.settle()


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _hire(context: SpawnContext, stop: Event, crew: list[Worker]) -> Worker:
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, stop), daemon=True)
    process.start()
    theirs.close()  # else the worker would not see the line break when this process dies
    crew.append(Worker(process, mine))
    return crew[-1]


def _with_news(crew: list[Worker]) -> list[Worker]:
    """The workers that have sent something or are gone."""
    busy = [worker for worker in crew if worker.task is not None]
    ready = wait([worker.line for worker in busy], timeout=0.5)
    return [worker for worker in busy if worker.line in ready]


def _listen(
    worker: Worker, watch: Watch, finish: Callable[[Task], None], failures: Failures
) -> Task | None:
    """Takes one message; returns the task if the worker is gone and the task is to begin again."""
    task = worker.task
    assert task is not None
    try:
        kind, content = worker.line.recv()
    except (EOFError, OSError):
        worker.process.join(5.0)
        reason = f"its worker process ended with exit code {worker.process.exitcode}"
        worker.task = None
        return task if failures.lost(task, reason) else None
    if kind == PROGRESS:
        watch.progress(task, content)
        return None
    worker.task = None
    if kind == FINISHED:
        finish(task)
    elif kind == FAILED:
        failures.add(task, content)
    return None


def _dismiss(crew: list[Worker]) -> None:
    """Ends the workers; they have saved what they had to, or this process is in a hurry."""
    for worker in crew:
        worker.line.close()
        if worker.task is not None:
            worker.process.terminate()
    for worker in crew:
        worker.process.join(5.0)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(line: Connection, stop: Event) -> None:
    """What a worker does: tasks, until the line is closed."""
    # the parent decides when to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(rounds: int) -> bool:
        line.send((PROGRESS, rounds))
        return not stop.is_set()

    try:
        while True:
            task = line.recv()
            try:
                finished = run_here(task, report)
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception:
                line.send((FAILED, traceback.format_exc()))
            else:
                line.send((FINISHED if finished else STOPPED, None))
    except (EOFError, OSError):  # nobody is there any more
        return
