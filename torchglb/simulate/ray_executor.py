"""Tasks on a Ray cluster, for people who outgrow one machine.

Machines need not share a file system: checkpoints and results come back through Ray, and only this
process writes to the directory of the run. A task whose process or machine is lost begins again
from its last checkpoint. What a task prints reaches this terminal.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torchglb.checks import refuse
from torchglb.simulate import mailbox
from torchglb.simulate.executors import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    Interrupt,
    Outcomes,
    Watch,
)
from torchglb.simulate.runner import Task, run_task, save

try:
    import ray
    from ray.exceptions import RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError:
    message = "'serial' or 'processes', or Ray installed (pip install ray)"
    raise refuse("executor", message, "'ray'") from None

# travels as code, not by its name: its process is there at once, without importing torch
ray.cloudpickle.register_pickle_by_value(mailbox)

#: seconds between two looks at the mailbox
LOOK_EVERY = 0.5
#: seconds for what tasks have printed to arrive: Ray sends it along a little later
LAST_WORDS = 1.5
#: in which a task ends whose mailbox is gone
CUT_OFF = "cut off"


def _play(task: Task, number: int, saved: bytes | None, box: Any) -> tuple[str, Any]:
    """The remote function: what came of the task, and its results or its traceback."""

    def report(rounds: int) -> bool:
        return bool(ray.get(box.tell.remote(number, rounds)))

    def keep(checkpoint: bytes) -> None:
        ray.get(box.keep.remote(number, checkpoint))

    try:
        found = run_task(task, report, saved, keep)
    except RayActorError:
        return CUT_OFF, None
    except RayError:
        raise
    except Exception:
        return FAILED, traceback.format_exc()
    return (STOPPED, None) if found is None else (FINISHED, found)


def execute(
    tasks: Sequence[Task],
    watch: Watch,
    finish: Callable[[Task], None],
    *,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """Runs tasks on a cluster, at most ``workers`` at once, or on this machine without address."""
    mine = not ray.is_initialized()
    if mine:
        _connect(address, workers)
    try:
        with Interrupt() as interrupt:
            _Driver(tasks, watch, finish, interrupt, workers).drive()
    finally:
        if mine:
            time.sleep(LAST_WORDS)
            ray.shutdown()


def _connect(address: str | None, workers: int | None) -> None:
    # a cluster of this machine alone is started for the run, with the cores that were asked for
    settings: dict[str, Any] = {"num_cpus": workers} if address is None and workers else {}
    # off by default in later versions; an idle GPU is then left to others
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(
            address="local" if address is None else address,
            include_dashboard=False if address is None else None,
            logging_level=logging.WARNING,
            **settings,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise refuse(
            "address", "that of a running Ray cluster", f"{address!r} ({reason})"
        ) from None


class _Driver:
    """The loop of this process over the tasks of a cluster."""

    def __init__(
        self,
        tasks: Sequence[Task],
        watch: Watch,
        finish: Callable[[Task], None],
        interrupt: Interrupt,
        workers: int | None,
    ) -> None:
        self._tasks, self._watch = tasks, watch
        self._interrupt, self._limit = interrupt, workers or len(tasks)
        self._outcomes = Outcomes(watch, finish)
        self._mailbox = _new_mailbox()
        # retries are ours: Ray's would begin with the checkpoint of the first time
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_play)
        self._waiting = deque(range(len(tasks)))
        self._running: dict[Any, int] = {}
        self._heard: set[int] = set()  # of whom there was news: they run, and wait for no machine

    def drive(self) -> None:
        """Runs everything."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._limit:
                self._submit(self._waiting.popleft())
            begin = time.monotonic()
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_EVERY)
            self._collect()
            for handle in ready:
                self._settle(handle, self._running.pop(handle))
            if self._interrupt.wished:
                self._stop()
            time.sleep(max(0.0, 0.05 - (time.monotonic() - begin)))
        if self._interrupt.wished:
            raise KeyboardInterrupt
        self._outcomes.settle()

    def _submit(self, number: int) -> None:
        task = self._tasks[number]
        saved = task.saved(self._watch.notice)
        self._running[self._remote.remote(task, number, saved, self._mailbox)] = number

    def _stop(self) -> None:
        """Everyone saves and stops; who waits for a machine has nothing to save."""
        for handle, number in list(self._running.items()):
            if number not in self._heard:
                ray.cancel(handle)
                del self._running[handle]
                self._watch.state(self._tasks[number], STOPPED)
        self._waiting.clear()
        try:
            ray.get(self._mailbox.stop.remote())
        except RayActorError:
            self._replace_mailbox()

    def _collect(self) -> None:
        """Takes what is in the mailbox."""
        try:
            rounds, checkpoints = ray.get(self._mailbox.empty.remote())
        except RayActorError:
            self._replace_mailbox()
            return
        for number, count in rounds.items():
            if number not in self._heard:
                self._heard.add(number)
                self._watch.state(self._tasks[number], RUNNING)
            self._watch.progress(self._tasks[number], count)
        for number, checkpoint in checkpoints.items():
            save(self._tasks[number], self._watch.notice, checkpoint)

    def _replace_mailbox(self) -> None:
        """The tasks that write to the old one end, and begin again with the new one."""
        self._watch.notice("the mailbox of the Ray tasks was lost; they go on with another")
        self._mailbox = _new_mailbox()

    def _settle(self, handle: Any, number: int) -> None:
        task = self._tasks[number]
        self._heard.discard(number)
        try:
            outcome, content = ray.get(handle)
        except RayError as error:
            if self._outcomes.lost(task, f"its Ray worker was lost ({type(error).__name__})"):
                self._waiting.append(number)
            return
        self._collect()  # a checkpoint must not come after the results
        if outcome == FINISHED:
            arrays, state = content
            try:
                task.finish(arrays, state, self._watch.notice)
            except OSError:
                self._outcomes.failed(task, traceback.format_exc())
                return
            self._watch.progress(task, task.horizon)
            self._outcomes.finished(task)
        elif outcome == FAILED:
            self._outcomes.failed(task, content)
        elif outcome == CUT_OFF:  # through no fault of its own
            self._waiting.append(number)
        else:
            self._watch.state(task, outcome)


def _new_mailbox() -> Any:
    """An actor on this process's own machine: it lives as long as the run does.

    If its process dies, Ray starts it again and repeats the calls; what it held is said again.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    settings = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(mailbox.Mailbox).options(**settings, scheduling_strategy=here).remote()
