"""Tasks on a Ray cluster, for people who outgrow one machine.

Machines need not share a file system: checkpoints and results come back through Ray, and only this
process writes to the directory of the run. A task whose process or machine is lost begins again
from its last checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torchglb.checks import refuse
from torchglb.simulate.executors import Failures, Interrupt, Watch
from torchglb.simulate.record import write_bytes
from torchglb.simulate.runner import Task, run_task

try:
    import ray
except ModuleNotFoundError:
    message = "'serial' or 'processes', or Ray installed (pip install 'torchglb[ray]')"
    raise refuse("executor", message, "'ray'") from None

#: seconds between two looks at the mailbox
LOOK_EVERY = 0.5


class Mailbox:
    """An actor between the tasks and this process: progress and checkpoints one way, stop back."""

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._checkpoints: dict[int, bytes] = {}
        self._stop = False

    def tell(self, number: int, rounds: int) -> bool:
        """A task says how far it is; whether it should go on."""
        self._rounds[number] = rounds
        return not self._stop

    def keep(self, number: int, checkpoint: bytes) -> None:
        """A task leaves a checkpoint."""
        self._checkpoints[number] = checkpoint

    def stop(self) -> None:
        """All tasks should save and stop."""
        self._stop = True

    def empty(self) -> tuple[dict[int, int], dict[int, bytes]]:
        """What has come in since the last time."""
        found = self._rounds, self._checkpoints
        self._rounds, self._checkpoints = {}, {}
        return found


def _play(task: Task, number: int, saved: bytes | None, mailbox: Any) -> tuple[str, Any]:
    """The remote function: what came of the task, and its results or its traceback."""

    def report(rounds: int) -> bool:
        return bool(ray.get(mailbox.tell.remote(number, rounds)))

    def save(checkpoint: bytes) -> None:
        ray.get(mailbox.keep.remote(number, checkpoint))

    try:
        arrays = run_task(task, report, saved, save)
    except ray.exceptions.RayError:
        raise
    except Exception:
        return "failed", traceback.format_exc()
    return ("stopped", None) if arrays is None else ("finished", arrays)


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
            ray.shutdown()


def _connect(address: str | None, workers: int | None) -> None:
    # a cluster of this machine alone is started for the run, with the cores that were asked for
    settings = {"num_cpus": workers} if address is None and workers else {}
    # off by default in later versions; an idle GPU is then left to others
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(
            address="local" if address is None else address,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
            logging_level="warning",
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
        self._tasks, self._watch, self._finish = tasks, watch, finish
        self._interrupt, self._limit = interrupt, workers or len(tasks)
        self._failures = Failures(watch)
        self._mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        # retries are ours: Ray's would begin with the checkpoint of the first time
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_play)
        self._waiting = deque(range(len(tasks)))
        self._running: dict[Any, int] = {}

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
                ray.get(self._mailbox.stop.remote())
                self._waiting.clear()
            time.sleep(max(0.0, 0.05 - (time.monotonic() - begin)))
        if self._interrupt.wished:
            raise KeyboardInterrupt
        self._failures.settle()

    def _submit(self, number: int) -> None:
        task = self._tasks[number]
        saved = task.checkpoint.read_bytes() if task.checkpoint.exists() else None
        self._running[self._remote.remote(task, number, saved, self._mailbox)] = number

    def _collect(self) -> None:
        rounds, checkpoints = ray.get(self._mailbox.empty.remote())
        for number, count in rounds.items():
            self._watch.progress(self._tasks[number], count)
        for number, checkpoint in checkpoints.items():
            write_bytes(self._tasks[number].checkpoint, checkpoint)

    def _settle(self, handle: Any, number: int) -> None:
        task = self._tasks[number]
        try:
            outcome, content = ray.get(handle)
        except ray.exceptions.RayError as error:
            reason = f"its Ray worker was lost ({type(error).__name__})"
            if self._failures.lost(task, reason):
                self._waiting.append(number)
            return
        self._collect()  # a checkpoint must not come after the results
        if outcome == "finished":
            task.finish(content)
            self._watch.progress(task, task.config["horizon"])
            self._finish(task)
        elif outcome == "failed":
            self._failures.add(task, content)
