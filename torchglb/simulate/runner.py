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
from torch import Tensor

from torchglb.sets import ConfidenceSet
from torchglb.simulate.config import Configuration
from torchglb.simulate.record import UNFINISHED, write_arrays, write_bytes
from torchglb.theory import realised_certificate

#: recorded rounds at most, points of a boundary, directions in which an area is measured
RECORDED, OUTLINE, SPOKES = 1000, 200, 64
#: the certificate is made tight on the first hundred rounds and on every fifth; in between it uses
#: what is known already, which is as valid and a few per cent wider
REFINE_EVERY = 5
#: seconds between reports of progress
REPORT_EVERY = 0.2


class Task(NamedTuple):
    """One policy on one chunk.

    Attributes:
        directory: of the run.
        config: the configuration, as plain values.
        label: of the policy.
        chunk: the number of the chunk.
        save_every: seconds between checkpoints.
    """

    directory: str
    config: dict[str, Any]
    label: str
    chunk: int
    save_every: float

    @property
    def part(self) -> Path:
        """The file of the finished task."""
        return Path(self.directory) / UNFINISHED / f"{self.label}.{self.chunk}.npz"

    @property
    def checkpoint(self) -> Path:
        """The file from which the task is continued."""
        return self.part.with_suffix(".pt")

    def finish(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the results, after which no checkpoint is needed."""
        write_arrays(self.part, arrays)
        self.checkpoint.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"{self.label}, part {self.chunk}"


def recorded_rounds(horizon: int) -> np.ndarray:
    """Every round up to 1000; beyond, 1000 equally spaced ones, the last being the horizon."""
    points = min(horizon, RECORDED)
    return -(-np.arange(1, points + 1) * horizon // points)


class Play:
    """The state of a task: a policy, its world, and what has been recorded.

    Args:
        config: the experiment.
        label: of the policy.
        chunk: the number of the chunk.
    """

    def __init__(self, config: Configuration, label: str, chunk: int) -> None:
        self.config, self.elements = config, config.chunks()[chunk]
        self.world = config.make_environment(self.elements)
        self.policy = config.make_policy(label, self.world)
        self.rounds = recorded_rounds(config.horizon)
        self.t = 0  # rounds played
        N, like = len(self.elements), self.world.S
        self._rows = torch.arange(N, device=like.device)
        self._recorded = 0
        self._spent, self._since = 0.0, 0  # seconds and rounds since the last recorded one
        self._seconds = np.zeros(len(self.rounds))
        self._regret = torch.zeros(N, dtype=torch.float64, device=like.device)
        self._certificate = torch.zeros_like(self._regret)
        self._extra = torch.zeros_like(self._regret)  # passes for the certificate alone
        self._missed = torch.zeros(N, dtype=torch.bool, device=like.device)
        self._has_set = self.policy.confidence_set() is not None
        family, ends = self.world.family, torch.stack([-like, like])
        self._largest_gap = (family.mean(ends)[1] - family.mean(ends)[0]).double()
        kept = {"regret": True, "certificate": self._has_set, "passes": self._passes() is not None}
        self._curves = {
            name: torch.zeros((len(self.rounds), N), dtype=torch.float64, device=like.device)
            for name, needed in kept.items()
            if needed
        }

    @property
    def finished(self) -> bool:
        """Whether the horizon is reached."""
        return self.t == self.config.horizon

    @torch.no_grad()
    def step(self) -> None:
        """One round."""
        t, world, policy = self.t, self.world, self.policy
        record = t + 1 == self.rounds[self._recorded]
        arms = None if world.whole_ball else world.arms(t)
        begin = time.perf_counter()
        index = None if arms is None else policy.select(arms)
        x = policy.select_ball() if arms is None else arms[self._rows, index]
        chosen = time.perf_counter()
        if self._has_set:
            self._certify(x, record)
        r = world.rewards(t, x, index)
        learning = time.perf_counter()
        policy.update(x, r)
        self._spent += chosen - begin + time.perf_counter() - learning
        self._since += 1
        self._regret += world.regret(t, x, index)
        self.t += 1
        if record:
            self._record()

    def _certify(self, x: Tensor, record: bool) -> None:
        """What the set of this round says of the arm that is played, and whether it has theta*."""
        before = self.policy.passes
        bounds = self.policy.bounds(x, refine=self.t < 100 or self.t % REFINE_EVERY == 0)
        assert bounds is not None
        if before is not None and self.policy.passes is not None:
            self._extra += self.policy.passes - before
        lower, upper = (self.world.family.mean(end).double()[:, None] for end in bounds)
        self._certificate += realised_certificate(upper, lower, self._largest_gap[:, None])[:, 0]
        if record:
            self._look_for_theta()

    def _look_for_theta(self) -> None:
        region = self.policy.confidence_set()
        if region is not None and self.world.theta_star is not None:
            self._missed |= ~region.contains(self.world.theta_star)

    def _passes(self) -> Tensor | None:
        """The passes that the policy needed for itself."""
        return None if self.policy.passes is None else self.policy.passes - self._extra

    def _record(self) -> None:
        place = self._recorded
        self._curves["regret"][place] = self._regret
        if self._has_set:
            self._curves["certificate"][place] = self._certificate
        if (passes := self._passes()) is not None:
            self._curves["passes"][place] = passes
        self._seconds[place] = self._spent / self._since
        self._recorded, self._spent, self._since = place + 1, 0.0, 0

    # ---- the end -------------------------------------------------------------------------

    @torch.no_grad()
    def result(self) -> dict[str, np.ndarray]:
        """Everything recorded; arrays over the elements of the chunk start with N."""
        world = self.world
        self._look_for_theta()  # in the last set too
        found = {name: curve.mT for name, curve in self._curves.items()}
        if world.theta_star is not None:
            found["theta_star"] = world.theta_star
        if (estimate := self.policy.estimate()) is not None:
            found["theta_hat"] = estimate
        if self._has_set and world.theta_star is not None:
            found["missed"] = self._missed
        region = self.policy.confidence_set()
        if region is not None and world.dim == 2:
            found["boundary"], found["area"] = _outlines(region, self.config, self.elements)
        arrays = {name: value.cpu().numpy() for name, value in found.items()}
        return arrays | {"rounds": self.rounds, "seconds": self._seconds}

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit."""
        return {
            "t": self.t,
            "policy": self.policy.state_dict(),
            "regret": self._regret.clone(),
            "certificate": self._certificate.clone(),
            "extra": self._extra.clone(),
            "missed": self._missed.clone(),
            "curves": {name: curve.clone() for name, curve in self._curves.items()},
            "recorded": self._recorded,
            "spent": self._spent,
            "since": self._since,
            "seconds": torch.from_numpy(self._seconds.copy()),
        }

    def checkpoint(self) -> bytes:
        """The state as a file."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return buffer.getvalue()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.policy.load_state_dict(state["policy"])
        self.t, self._recorded = state["t"], state["recorded"]
        self._regret, self._certificate = state["regret"], state["certificate"]
        self._extra, self._missed, self._curves = state["extra"], state["missed"], state["curves"]
        self._spent, self._since = state["spent"], state["since"]
        self._seconds = state["seconds"].numpy()


def run_task(
    task: Task, report: Callable[[int], bool], saved: bytes | None, save: Callable[[bytes], None]
) -> dict[str, np.ndarray] | None:
    """Plays a task to its end; knows nothing of files.

    Args:
        task: what to play.
        report: is told the number of rounds played, some times a second; if it answers False, the
            task saves a checkpoint and stops.
        saved: the checkpoint to go on from.
        save: takes a checkpoint.

    Returns:
        The results, or None if it was stopped.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        play = Play(Configuration.load(task.config), task.label, task.chunk)
        if saved is not None:
            place = play.config.device
            state = torch.load(io.BytesIO(saved), map_location=place, weights_only=True)
            play.load_state_dict(state)
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
        return play.result()
    finally:
        torch.set_num_threads(threads)


def run_here(task: Task, report: Callable[[int], bool]) -> bool:
    """Plays a task with its files in the directory of the run; whether it is finished."""
    saved = task.checkpoint.read_bytes() if task.checkpoint.exists() else None
    arrays = run_task(task, report, saved, functools.partial(write_bytes, task.checkpoint))
    if arrays is None:
        return False
    task.finish(arrays)
    report(task.config["horizon"])
    return True


def _outlines(
    region: ConfidenceSet, config: Configuration, elements: range
) -> tuple[Tensor, Tensor]:
    """The boundaries ``(n0, M, 2)`` of the n0 elements of replicate 0, and all areas ``(N)``.

    Element by element: a search over the whole history for all directions of all elements would
    fill the memory.
    """
    boundaries, areas = [], []
    for place, element in enumerate(elements):
        one = region[place]
        areas.append(one.volume(SPOKES, tol=1e-4))
        if element % config.replicates == 0:
            boundaries.append(one.boundary(OUTLINE, tol=1e-4))
    empty = region.center.new_zeros((0, OUTLINE, 2))
    return torch.stack(boundaries) if boundaries else empty, torch.stack(areas)
