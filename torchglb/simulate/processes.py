"""Local worker processes: one thread each, as many as there are cores.

A worker that dies takes nothing with it: its task is begun again from the last checkpoint, and an
idle one is replaced. If this process dies, the workers notice and end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

from torchglb.simulate.executors import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    Interrupt,
    Outcomes,
    Watch,
)
from torchglb.simulate.runner import Task, run_here

#: messages of a worker, besides the states in which it leaves a task
PROGRESS, NOTICE = "progress", "notice"


@dataclass
class Worker:
    """A process, the line to it, and what it is doing."""

    process: BaseProcess
    line: Connection
    task: Task | None = None

    def give(self, task: Task) -> bool:
        """Starts a task; False if the worker is gone."""
        try:
            self.line.send(task)
        except OSError:
            return False
        self.task = task
        return True


def execute(
    tasks: Sequence[Task],
    watch: Watch,
    finish: Callable[[Task], None],
    *,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """Runs tasks in worker processes."""
    context = starting_context()
    stop = context.Event()
    outcomes = Outcomes(watch, finish)
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
                    if worker.give(waiting[0]):
                        watch.state(waiting.popleft(), RUNNING)
                    else:
                        _forget(worker, crew, watch)
                for worker in _with_news(crew):
                    lost = _listen(worker, crew, watch, outcomes)
                    if lost is not None:
                        waiting.append(lost)
            if interrupt.wished:
                raise KeyboardInterrupt
    finally:
        _dismiss(crew)
    outcomes.settle()


def starting_context() -> ForkServerContext | SpawnContext:
    """How processes are started: forked from a server on Linux, afresh (spawn) elsewhere.

    The server is a process of its own that has imported this package and has no other thread, so
    that forking it is safe: importing torch takes seconds, and is done once for all workers and
    for those that replace them.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torchglb.simulate.before_forking"])
    return context


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _hire(context: ForkServerContext | SpawnContext, stop: Event, crew: list[Worker]) -> Worker:
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, stop), daemon=True)
    process.start()
    theirs.close()  # else the worker would not see the line break when this process dies
    crew.append(Worker(process, mine))
    return crew[-1]


def _with_news(crew: list[Worker]) -> list[Worker]:
    """The workers that have sent something or are gone, idle ones too."""
    ready = wait([worker.line for worker in crew], timeout=0.5)
    return [worker for worker in crew if worker.line in ready]


def _listen(worker: Worker, crew: list[Worker], watch: Watch, outcomes: Outcomes) -> Task | None:
    """Takes one message; returns the task if the worker is gone and the task is to begin again."""
    task = worker.task
    try:
        kind, content = worker.line.recv()
    except (EOFError, OSError):
        reason = _forget(worker, crew, watch)
        return task if task is not None and outcomes.lost(task, reason) else None
    assert task is not None  # an idle worker has nothing to say
    if kind == PROGRESS:
        watch.progress(task, content)
        return None
    if kind == NOTICE:
        watch.notice(content)
        return None
    worker.task = None
    if kind == FINISHED:
        outcomes.finished(task)
    elif kind == FAILED:
        outcomes.failed(task, content)
    else:
        watch.state(task, kind)
    return None


def _forget(worker: Worker, crew: list[Worker], watch: Watch) -> str:
    """A worker is gone; what there is to say about it."""
    crew.remove(worker)
    worker.line.close()
    worker.process.join(5.0)
    code = worker.process.exitcode
    if worker.task is None:
        watch.notice(f"an idle worker process ended with exit code {code}; it is replaced")
    return f"its worker process ended with exit code {code}"


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
        _tell(line, PROGRESS, rounds)
        return not stop.is_set()

    def notice(text: str) -> None:
        _tell(line, NOTICE, text)

    try:
        while True:
            task = line.recv()
            try:
                finished = run_here(task, report, notice)
            except _GoneError:
                raise
            except Exception:
                _tell(line, FAILED, traceback.format_exc())
            else:
                _tell(line, FINISHED if finished else STOPPED, None)
    except (EOFError, OSError, _GoneError):  # nobody is there any more
        return


class _GoneError(Exception):
    """The process that gave the tasks is gone. Not an OSError, of which a disk has its own."""


def _tell(line: Connection, kind: str, content: object) -> None:
    try:
        line.send((kind, content))
    except OSError:
        raise _GoneError from None
