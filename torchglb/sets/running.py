"""The running intersection of a confidence sequence, of sets kept at times 1, 2, 4, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_count,
    check_entries,
    check_same,
    check_shape,
    refuse,
)
from torchglb.choices import Relation
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.tests import TestResult
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii import Refinement
from torchglb.rows.history import History
from torchglb.sets.base import ConfidenceSet, Event, IntersectionSet, Interval
from torchglb.sets.centred import CentredSet
from torchglb.sets.ellipsoid import EllipsoidSet
from torchglb.sets.likelihood_ratio import LikelihoodRatioSet

Snapshot = LikelihoodRatioSet | EllipsoidSet


class RunningSet(IntersectionSet):
    """The set of a sequence now, and those that it kept: valid on one event, at one delta.

    As every set holds theta* at all times at once, so does the intersection of all that were ever
    seen. Bounds are the least of the members' bounds, tests are those of the latest set (to count
    all looks, :class:`torchglb.inference.RunningTest`).

    Args:
        members: sets of one sequence, the latest last.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> sequence = glb.ConfidenceSequence(*given, running=True)
        >>> for _ in range(5):
        ...     sequence.update([1.0, 0.0], 1.0)
        >>> region = sequence.current()
        >>> isinstance(region, RunningSet), len(region.members)
        (True, 4)
    """

    @property
    def latest(self) -> ConfidenceSet:
        """The set now."""
        return self.members[-1]

    def __getitem__(self, index: int | slice) -> RunningSet:
        """The intersections of some elements, by an index of the first batch axis."""
        return RunningSet([member[index] for member in self.members])

    def test(self, A: ArrayLike, b: ArrayLike, relation: Relation = "==") -> TestResult:
        """That of the latest set, see :meth:`LikelihoodRatioSet.test`."""
        latest = self.latest
        if not isinstance(latest, LikelihoodRatioSet):
            raise refuse("set", "a likelihood-ratio set, for a test", type(latest).__name__)
        return latest.test(A, b, relation)


class SnapshotList:
    """Sets at times that double: O(log n) of them, whose rows are at most twice the history's."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.sets: list[Snapshot] = []
        self._next = 1

    def is_due(self, time: int) -> bool:
        """Whether the set at this time is to be kept."""
        return time >= self._next

    def skip(self, time: int) -> None:
        """Waits for the next power of two."""
        self._next = 1 << time.bit_length()

    def keep(self, time: int, current: Snapshot) -> None:
        """Adds the set at this time."""
        self.times, self.sets = [*self.times, time], [*self.sets, current]
        self.skip(time)

    def state_dict(self, history: History) -> dict[str, Any]:
        """Everything needed to continue; the rows only where the history does not have them."""
        packed = [_packed(kept, with_rows=history.aggregate) for kept in self.sets]
        return {"times": list(self.times), "next": self._next, "sets": packed}

    @classmethod
    def of(cls, state: Mapping[str, Any], history: History, owner: Owner) -> SnapshotList:
        """That of a saved state, whose rows are the first ones of the history."""
        check_entries("state['running']", state, {"times", "next", "sets"})
        new = cls()
        new.times = [check_count("state['running']['times']", t, least=1) for t in state["times"]]
        if len(new.times) != len(state["sets"]):
            raise refuse("state['running']['sets']", f"{len(new.times)} sets", len(state["sets"]))
        pairs = zip(state["sets"], new.times, strict=True)
        new.sets = [_unpacked(part, time, history, owner) for part, time in pairs]
        new._next = check_count("state['running']['next']", state["next"], least=1)
        return new


class RunningBounds:
    """What a sequence remembers of its earlier sets: snapshots, and the best bounds of queries.

    Args:
        history: of the sequence.
        queries: directions ``(K, d)`` or ``(*B, K, d)``, or None.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(
        ...     glb.Bernoulli(), glb.Ball(2, 3.0), 0.05, running=True, queries=[[1.0, 0.0]]
        ... )
        >>> sequence.update([1.0, 0.0], 1.0)
        >>> sequence.look().upper.shape
        torch.Size([1])
    """

    def __init__(self, history: History, queries: ArrayLike | None = None) -> None:
        if not history.is_whole:
            raise refuse("running", "False for rows that are shared between ranks", "True")
        self.snapshots = SnapshotList()
        self.queries: Tensor | None = None
        self.best: Interval | None = None
        self._latest: tuple[Snapshot, RunningSet] | None = None
        if queries is None:
            return
        queries = as_tensor("queries", queries, dtype=history.dtype, device=history.device)
        batch = tuple(history.batch_shape)
        axes: tuple[int, ...] = batch if queries.ndim > 2 else ()
        check_shape("queries", queries, (*axes, "K", history.dim))
        checks = ValueChecks()
        checks.finite("queries", queries)
        checks.settle()
        self.queries = queries.expand(*batch, *queries.shape[-2:]).clone()

    def intersect(self, now: Snapshot) -> RunningSet:
        """The set now with all that were kept."""
        if self._latest is None or self._latest[0] is not now:
            earlier = [kept for kept in self.snapshots.sets if kept is not now]
            self._latest = now, RunningSet([*earlier, now])
        return self._latest[1]

    def keep(self, time: int, now: Snapshot) -> None:
        """Keeps the set at this time, and looks at the queries."""
        if self.queries is not None:
            self.look(now)
        self.snapshots.keep(time, now)
        self._latest = None

    def look(self, now: ConfidenceSet) -> Interval:
        """The best bounds so far, with those of the set now."""
        if self.queries is None:
            raise refuse("queries", "directions, given to the sequence", "None")
        lower, upper = now.interval(self.queries)
        if self.best is not None:
            lower = torch.maximum(lower, self.best.lower)
            upper = torch.minimum(upper, self.best.upper)
        self.best = Interval(lower.detach().clone(), upper.detach().clone())
        return Interval(lower, upper)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self, history: History) -> dict[str, Any]:
        """Everything needed to continue."""
        best = None if self.best is None else [end.clone() for end in self.best]
        queries = None if self.queries is None else self.queries.clone()
        return self.snapshots.state_dict(history) | {"queries": queries, "best": best}

    def load_state_dict(self, state: Mapping[str, Any], history: History, owner: Owner) -> None:
        """Continues from a saved state; refuses one of other queries."""
        check_entries("state['running']", state, {"queries", "best"})
        queries, best = state["queries"], state["best"]
        mine = None if self.queries is None else self.queries.tolist()
        if mine != (None if queries is None else queries.tolist()):
            raise refuse("state['running']['queries']", "those of the sequence", "others")
        found = None
        if best is not None and self.queries is not None:
            for end in best:
                check_same("state['running']['best']", end, "queries", self.queries)
                check_shape("state['running']['best']", end, self.queries.shape[:-1])
            found = Interval(*(end.clone() for end in best))
        snapshots = SnapshotList.of(state, history, owner)
        self.snapshots, self.best, self._latest = snapshots, found, None


class Owner(NamedTuple):
    """The sequence of a set: what all its sets share.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> Owner(sequence.family, sequence.domain, sequence.event, confined=True).domain
        Ball(dim=2, radius=3.0)
    """

    family: GLMFamily
    domain: Ball
    event: Event
    confined: bool


def _packed(kept: Snapshot, with_rows: bool) -> dict[str, Any]:
    """The tensors and numbers of a set."""
    if isinstance(kept, EllipsoidSet):
        parts = {"theta_hat": kept.theta_hat, "shape": kept.shape, "gamma": kept.gamma}
        return {name: t.detach().clone() for name, t in parts.items()}
    loss, found = kept.likelihood, {"theta_hat": [kept.theta_hat], "level": [kept.level]}
    if isinstance(kept, CentredSet):
        found["refinement"] = list(kept.refinement.tensors())
    if with_rows:
        found["rows"] = [t for t in (loss.X, loss.r, loss.w) if t is not None]
    copies = {name: [t.detach().clone() for t in parts] for name, parts in found.items()}
    return copies | {"log_failure": kept.log_failure}


def _unpacked(state: Mapping[str, Any], time: int, history: History, owner: Owner) -> Snapshot:
    """The set that :func:`_packed` saved."""
    label, (family, domain, event, confined) = "state['running']['sets']", owner
    if "gamma" in state:
        check_entries(label, state, {"theta_hat", "shape"})
        theta_hat, shape, gamma = (state[name].clone() for name in ("theta_hat", "shape", "gamma"))
        return EllipsoidSet(family, domain, theta_hat, shape, gamma, event=event)
    check_entries(label, state, {"theta_hat", "level", "log_failure"})
    loss = _loss_of(state, time, history, family)
    given = {
        "likelihood": loss,
        "domain": domain,
        "level": state["level"][0].clone(),
        "theta_hat": state["theta_hat"][0].clone(),
        "confined": confined,
        "event": event,
        "log_failure": state["log_failure"],
    }
    if "refinement" not in state:
        return LikelihoodRatioSet(**given)
    refinement = Refinement.of(t.clone() for t in state["refinement"])
    return CentredSet(**given, refinement=refinement)


def _loss_of(
    state: Mapping[str, Any], time: int, history: History, family: GLMFamily
) -> NegativeLogLikelihood:
    """Of the rows at that time: saved with the set, or the first ones of the history."""
    if "rows" in state:
        return NegativeLogLikelihood(family, *(t.clone() for t in state["rows"]))
    X, r, w = history.view()
    if history.aggregate or X.shape[-2] < time:
        raise refuse("state['running']['sets']", f"the rows at time {time}", "fewer rows")
    w = None if w is None else w[..., :time]
    return NegativeLogLikelihood(family, X[..., :time, :], r[..., :time], w).came_from(history)
