"""One task: one policy on one chunk of the batch, round after round, with checkpoints.

What a task computes is determined by the configuration alone. It runs on one thread, so that sums
are taken in the same order wherever it runs; a machine's cores are used by running several tasks.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchglb.random_streams import GENERATOR
from torchglb.simulate.config import Configuration
from torchglb.simulate.files import (
    Arrays,
    UnsoundError,
    pack,
    read_sealed,
    table_digest,
    unpack,
    write_sealed,
)
from torchglb.simulate.observer import Observer
from torchglb.simulate.record import STATES, UNFINISHED

#: seconds between reports of progress
REPORT_EVERY = 0.2

Notice = Callable[[str], None]


class Task(NamedTuple):
    """One policy on one chunk.

    Attributes:
        directory: of the run.
        config: the configuration, as plain values.
        label: of the policy.
        chunk: the number of the chunk.
        save_every: seconds between checkpoints.
        identity: the SHA-256 of all that its numbers depend on; its files carry it.
    """

    directory: str
    config: dict[str, Any]
    label: str
    chunk: int
    save_every: float
    identity: str = ""

    @property
    def horizon(self) -> int:
        """T."""
        return int(self.config["horizon"])

    @property
    def part(self) -> Path:
        """The file of the finished task."""
        return Path(self.directory) / UNFINISHED / f"{self.label}.{self.chunk}.npz"

    @property
    def checkpoint(self) -> Path:
        """The file from which the task is continued."""
        return self.part.with_suffix(".pt")

    @property
    def previous(self) -> Path:
        """The checkpoint before, for the case that the last one is damaged."""
        return self.part.with_suffix(".previous.pt")

    @property
    def last_state(self) -> Path:
        """The state at the end, from which the run is extended to more rounds."""
        return Path(self.directory) / STATES / f"{self.label}.{self.chunk}.pt"

    def save(self, state: bytes) -> None:
        """Writes a checkpoint; the one before is kept."""
        if self.checkpoint.exists():
            self.checkpoint.replace(self.previous)
        write_sealed(self.checkpoint, state, self.identity)

    def saved(self, notice: Notice) -> bytes | None:
        """The newest sound state to go on from."""
        for path in (self.checkpoint, self.previous, self.last_state):
            if path.exists():
                try:
                    return read_sealed(path, self.identity)
                except UnsoundError as error:
                    notice(f"{self}: not continued from there: {error}")
        return None

    def finish(self, arrays: Mapping[str, np.ndarray], state: bytes, notice: Notice) -> None:
        """Writes the results, after which no checkpoint is needed, and the last state."""
        write_sealed(self.part, pack(arrays), self.part_identity)
        for path in (self.checkpoint, self.previous):
            path.unlink(missing_ok=True)
        try:
            write_sealed(self.last_state, state, self.identity)
        except OSError as error:
            notice(f"{self}: no last state ({error}); to extend it to more rounds takes longer")

    @property
    def part_identity(self) -> str:
        """That of the results, which depend on the recorded rounds too."""
        sizes = {key: self.config[key] for key in ("horizon", "stages")}
        return table_digest(sizes | {"task": self.identity})

    def finished(self, notice: Notice) -> Arrays | None:
        """The results, if they are there and sound."""
        if not self.part.exists():
            return None
        try:
            return unpack(read_sealed(self.part, self.part_identity), self.part)
        except UnsoundError as error:
            notice(f"{self}: computed again: {error}")
            self.part.unlink(missing_ok=True)
            return None

    def __str__(self) -> str:
        return f"{self.label}, part {self.chunk}"


def identity_of(
    config: Configuration, label: str, elements: list[int], made_by: Mapping[str, str]
) -> str:
    """The SHA-256 of everything that the rounds of a task depend on."""
    found = config.what_determines(label, elements)
    return table_digest(found | {"made by": dict(made_by), "generator": GENERATOR})


class Play:
    """The state of a task: a policy, its world, and who looks on.

    Args:
        config: the experiment.
        label: of the policy.
        chunk: the number of the chunk.
    """

    def __init__(self, config: Configuration, label: str, chunk: int) -> None:
        self.config, self.elements = config, config.chunks()[chunk]
        self.world = config.make_environment(self.elements)
        self.policy = config.make_policy(label, self.world)
        self.observer = Observer(self.policy, self.world, config.recorded_rounds())
        self.t = 0  # rounds played
        self._rows = torch.arange(len(self.elements), device=self.world.device)

    @property
    def finished(self) -> bool:
        """Whether the horizon is reached."""
        return self.t == self.config.horizon

    @torch.no_grad()
    def step(self) -> None:
        """One round: choose, look, learn, look."""
        t, world, policy = self.t, self.world, self.policy
        arms = None if world.whole_ball else world.arms(t)
        begin = time.perf_counter()
        index = None if arms is None else policy.select(arms)
        x = policy.select_ball() if arms is None else arms[self._rows, index]
        seconds = time.perf_counter() - begin
        self.observer.before_learning(t, arms, x)
        r = world.rewards(t, x, index)
        begin = time.perf_counter()
        policy.update(x, r)
        seconds += time.perf_counter() - begin
        self.observer.after_learning(t, x, index, seconds)
        self.t += 1

    @torch.no_grad()
    def result(self) -> Arrays:
        """Everything recorded; arrays over the elements of the chunk start with N."""
        first = [
            place
            for place, element in enumerate(self.elements)
            if element % self.config.replicates == 0
        ]
        return self.observer.result(first)

    def checkpoint(self) -> bytes:
        """Everything needed to continue bit by bit, as a file."""
        state = {
            "t": self.t,
            "policy": self.policy.state_dict(),
            "observer": self.observer.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, checkpoint: bytes) -> None:
        """Continues from a checkpoint."""
        place = self.config.device
        state = torch.load(io.BytesIO(checkpoint), map_location=place, weights_only=True)
        self.policy.load_state_dict(state["policy"])
        self.observer.load_state_dict(state["observer"])
        self.t = state["t"]


def run_task(
    task: Task, report: Callable[[int], bool], saved: bytes | None, save: Callable[[bytes], None]
) -> tuple[Arrays, bytes] | None:
    """Plays a task to its end; knows nothing of files.

    Args:
        task: what to play.
        report: is told the number of rounds played, some times a second; if it answers False, the
            task saves a checkpoint and stops.
        saved: the checkpoint to go on from.
        save: takes a checkpoint.

    Returns:
        The results and the last state, or None if it was stopped.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        play = Play(Configuration.load(task.config), task.label, task.chunk)
        if saved is not None:
            play.load(saved)
        told = kept = time.monotonic()
        go_on = report(play.t)
        while go_on and not play.finished:
            play.step()
            now = time.monotonic()
            if now - told >= REPORT_EVERY:
                told, go_on = now, report(play.t)
            if now - kept >= task.save_every:
                kept = now
                save(play.checkpoint())
        if not play.finished:
            save(play.checkpoint())
            return None
        last = play.checkpoint()
        return play.result(), last
    finally:
        torch.set_num_threads(threads)


def run_here(task: Task, report: Callable[[int], bool], notice: Notice) -> bool:
    """Plays a task with its files in the directory of the run; whether it is finished."""
    found = run_task(task, report, task.saved(notice), functools.partial(save, task, notice))
    if found is None:
        return False
    arrays, last = found
    task.finish(arrays, last, notice)
    report(task.horizon)
    return True


def save(task: Task, notice: Notice, checkpoint: bytes) -> None:
    """Writes a checkpoint if that is possible: without it the task only has more to lose."""
    try:
        task.save(checkpoint)
    except OSError as error:
        notice(f"{task}: no checkpoint ({error}); going on without")
