"""What is carried of N growing problems from round to round, and the calls that play on it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, Reals
from torchglb.backend.dense import EPS
from torchglb.carried.carried_loss import CarriedLoss, choose_order
from torchglb.carried.carried_minimum import CarriedMinimum
from torchglb.carried.source import RowSource
from torchglb.checks import check_count, check_tensors, refuse
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status
from torchglb.ucb.incremental.batches import (
    CALLS,
    DONE,
    OPEN,
    Batch,
    RoundBuffers,
    RoundCall,
    go_on,
    round_buffers,
)
from torchglb.ucb.incremental.minorant import minorant_size
from torchglb.ucb.incremental.round_state import (
    DECIDED,
    PASS_FOR_MINIMUM,
    ROUND,
    UNDECIDED,
    Settings,
)
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.native import native_support

#: derivatives of the highest order of an anchor's polynomial; where it would be of second order an
#: anchor keeps the trace of its Hessian only
MOST_AT_ANCHORS = 7
#: and of the polynomial at the minimum, which says less about the arms than about the level
MOST_AT_MINIMUM = 100


class _Calls(NamedTuple):
    """Compiled calls that know the memory they work on, and what they were made for."""

    y: Reals
    buffers: RoundBuffers
    play: Any
    learn: Any


class CarriedRounds:
    """The minimum and the anchors of N problems, carried forward; their rounds.

    Args:
        source: the rows.
        ball: with a radius for all problems or for each.
        anchors: A.

    Attributes:
        minimum: the loss near its minimum.
        anchors: the loss at the anchors.
        number: rounds so far.
        passes: over the history so far, ``(N,)``.
        no_tilt: zeros ``(N, d)``.
    """

    def __init__(self, source: RowSource, ball: Ball, anchors: int) -> None:
        N, d = source.problems, ball.dim
        self.source = source
        self.minimum = CarriedMinimum(source, ball, MOST_AT_MINIMUM)
        order = choose_order(source.family, d, ball.max_radius, MOST_AT_ANCHORS)
        self.anchors = CarriedLoss(source.family, ball, N, anchors, order if order > 2 else 1)
        self.number = 0
        self.passes, self.no_tilt = np.zeros(N), np.zeros((N, d))
        self._anchor_use = np.zeros((N, (d + 2) * anchors + 1))
        self._anchor_use[:, :anchors] = -1.0  # never used
        # a minorant needs passes of its own kind, which only compiled code makes
        self._minorants = np.zeros((N, minorant_size(d) if source.is_direct else 0))
        self._rounds = np.zeros(N, ROUND)
        self._epoch = source.history.epoch
        self._forget_memory()

    def _forget_memory(self) -> None:
        """What knows where the memory of this object lies is made anew when it is needed."""
        self._buffers: RoundBuffers | None = None
        self._calls: _Calls | None = None

    def copy(self) -> CarriedRounds:
        """With sums of its own, over the same rows."""
        new = copy.copy(self)
        new.minimum, new.anchors = self.minimum.copy(), self.anchors.copy()
        for name in ("_minorants", "_anchor_use", "_rounds", "passes"):
            setattr(new, name, getattr(self, name).copy())
        new._forget_memory()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """As in :meth:`copy`."""
        return vars(self) | {"_buffers": None, "_calls": None}

    def over(self, source: RowSource) -> None:
        """Goes on over another history, of the same rows."""
        self.source = self.minimum.source = source
        self._epoch = source.history.epoch

    # ---- rows ----------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the rows are those that the sums have seen, or more; not: replaced by others."""
        return self._epoch == self.source.history.epoch

    def catch_up(self) -> None:
        """Brings sums up to date that are not: of a copy, or after an interruption."""
        minimum, anchors, history = self.minimum.carried, self.anchors, self.source.history
        if not self.is_current:  # other rows, maybe as many
            minimum.rebuild(self.source)
            anchors.rebuild(self.source)
            self._minorants[:] = 0.0
            self._epoch = history.epoch
        elif not minimum.rows == anchors.rows == len(history):
            minimum.catch_up(self.source)
            anchors.catch_up(self.source)

    def learn(self, x: Tensor, r: Tensor, rows: int, longest: float) -> bool:
        """Checks rows of weight 1, keeps them and carries them, in one compiled call.

        Args:
            x: float64, plain and contiguous, ``(N, k, d)`` in any shape.
            r: the same, ``(N, k)``.
            rows: k.
            longest: a row may be so long; 0 for no checks of values.

        Returns:
            False if a value does not fit, or the sums are not up to date: nothing has changed then.
        """
        history = self.source.history
        mark = history.mark()
        X, w, y, used = history.reserve(rows)
        calls = self._calls
        if calls is None or calls.y is not y:
            calls = self._made_for(X, w, y, self.buffers(1))
        if calls.learn(used, x.data_ptr(), r.data_ptr(), rows, longest) != DONE:
            history.reset(mark)  # without the room
            return False
        history.commit(rows)
        return True

    def self_check(self, anchor: int | None) -> None:
        """Compares the minimum's sums and those of one anchor with passes."""
        count = self.anchors.number
        slot = self.number % count if anchor is None else check_count("anchor", anchor)
        if slot >= count:
            raise refuse("anchor", f"None or a whole number below {count}", slot)
        self.catch_up()
        for b in range(self.source.problems):
            self.minimum.carried.check(self.source, b)
            self.anchors.check(self.source, b, slot)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, but for the rows."""
        parts = {"minimum": self.minimum.state_dict(), "anchors": self.anchors.state_dict()}
        arrays = {name: tensor.clone() for name, tensor in self._arrays().items()}
        return {**parts, **arrays, "round": self.number}

    def _arrays(self) -> dict[str, Tensor]:
        """What a state has beside the sums, where it lies."""
        arrays = {
            "anchor_use": self._anchor_use,
            "minorants": self._minorants,
            "passes": self.passes,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        self.anchors.check_state("state['anchors']", state["anchors"])
        self.minimum.check_state("state['minimum']", state["minimum"])
        check_tensors("state", state, self._arrays())
        check_count("state['round']", state["round"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was checked, over the rows that it belongs to."""
        self.minimum.load_state_dict(state["minimum"])
        self.anchors.load_state_dict(state["anchors"])
        for name, mine in self._arrays().items():
            mine.copy_(state[name])
        self.number = state["round"]
        self._epoch = self.source.history.epoch

    # ---- rounds --------------------------------------------------------------------------

    def _batch(self) -> Batch:
        return Batch(
            anchors=self.anchors.arrays(),
            minimum=self.minimum.carried.arrays(),
            anchor_use=self._anchor_use,
            vectors=self.minimum.vectors,
            search=self.minimum.search,
            rounds=self._rounds,
            passes=self.passes,
            minorants=self._minorants,
        )

    def _call(self, X: Reals, w: Reals, y: Reals, buffers: RoundBuffers) -> RoundCall:
        return RoundCall(self.source.compiled, X, w, y, self._batch(), buffers)

    def buffers(self, arms: int) -> RoundBuffers:
        """What rounds with so many arms are about, to be written to, and what comes out.

        The same for one round after the other, up to so many arms.
        """
        known = self._buffers
        if known is None or known.arms < arms:
            known = self._buffers = round_buffers(self._batch(), arms)
        return known

    def play(
        self, arms: Tensor, K: int, settings: Settings, longest: float, buffers: RoundBuffers
    ) -> bool:
        """The round of every problem, with all passes that it needs.

        Args:
            arms: float64, plain and contiguous, ``(N, K, d)`` in any shape.
            K: how many arms.
            settings: what is asked.
            longest: an arm may be so long; 0 if that has been checked.
            buffers: of :meth:`buffers`, with heights and ridge.

        Returns:
            False if an arm is too long, or the sums are not up to date: nothing has changed then.
        """
        number, rows = self.number + 1, len(self.source.history)
        if self.source.is_direct:
            X, w, y, used = self.source.history.arrays()
            calls = self._calls
            if calls is None or calls.y is not y or calls.buffers is not buffers:
                calls = self._made_for(X, w, y, buffers)
            ending = calls.play(used, rows, arms.data_ptr(), K, settings, number, longest)
        else:
            every = arms.numpy().reshape(self.source.problems, K, -1)
            ending = self._play_with_passes(every, settings, number, buffers)
        if ending > OPEN:
            return False
        self.number = number
        if ending == OPEN:  # all arms of the problems that single looks have not decided
            for b in np.nonzero(self._rounds["ending"] == UNDECIDED)[0]:
                self._solve(arms, K, settings, buffers, int(b))
        return True

    def _made_for(self, X: Reals, w: Reals, y: Reals, buffers: RoundBuffers) -> _Calls:
        """Calls on the arrays of the history and of this object."""
        both = CALLS.with_stored(self._call(X, w, y, buffers), (X.dtype, y.dtype))
        self._calls = _Calls(y, buffers, *both)
        return self._calls

    def bounds(self, buffers: RoundBuffers, arms: int) -> tuple[Floats, Floats]:
        """The upper and the lower ones of the last round, ``(N, K)`` each, where they lie."""
        N = self.source.problems
        both = buffers.bounds[: 2 * N * arms].reshape(2, N, arms)
        return both[0], both[1]

    def _play_with_passes(
        self, every: Floats, settings: Settings, number: int, buffers: RoundBuffers
    ) -> int:
        """The same where compiled code cannot read the rows: passes are made from here."""
        minimum, anchors, memory = self.minimum, self.anchors, buffers.memory
        X, w, y, _ = self.source.arrays()
        call = self._call(X, w, y, buffers)
        for b in range(len(every)):
            asked = (call, len(self.source.history), every, settings, number, b)
            wanted = go_on(*asked, True, 0.0)
            while wanted != DECIDED:
                if wanted == PASS_FOR_MINIMUM:
                    point, work = minimum.vectors.trial[b], memory.minimum_pass
                    table = minimum.carried.table
                else:
                    point, table, work = memory.trial, anchors.table, memory.anchor_pass
                trace = minimum.carried.checked_pass(self.source, b, point, table, work)
                wanted = go_on(*asked, False, trace)
        return OPEN if buffers.status.any() else DONE

    def _solve(
        self, given: Tensor, K: int, settings: Settings, buffers: RoundBuffers, b: int
    ) -> None:
        """All arms of a problem that single looks did not decide, solved to tolerance."""
        d, source, out = self.anchors.dim, self.source, buffers
        X, w, y, used = source.arrays()  # merged sums in all their digits, unlike view()
        features, weights, sums = (torch.from_numpy(t[b][..., :used]).double() for t in (X, w, y))
        loss = NegativeLogLikelihood(
            source.family,
            features.mT,
            torch.where(weights > 0, sums / torch.where(weights > 0, weights, 1.0), 0.0),
            weights,
            regularization=float(buffers.ridge[b]),
            shards=source.history.shards,
        )
        ball = Ball(d, float(self.anchors.constants["radius"][b]))
        program = SublevelProgram(loss, ball, torch.tensor(self._rounds["level"][b]))
        arms = given.reshape(source.problems, K, d)[b]
        tol = min(settings.tie, settings.value_tol) / 4
        found = native_support(program, arms, tol=tol, throw=False, validate=False)
        # h is concave in the level, of which more than ``low`` is not certain
        state, center = self._rounds[b], torch.from_numpy(self.minimum.vectors.theta[b])
        height = state["level"] - state["center_loss"]
        share = (state["low"] - state["center_loss"]) / height if height > 0.0 else 1.0
        certain = share * found.lower + (1.0 - share) * (arms @ center)
        certain -= 8.0 * (d + 2) * EPS * self.anchors.constants["radius"][b] * arms.norm(dim=-1)
        upper, lower = (bounds[b] for bounds in self.bounds(buffers, K))
        upper[:] = np.fmin(upper, found.upper.numpy())
        lower[:] = np.fmax(lower, certain.numpy())
        leader = int(lower.argmax())
        best, gap = lower[leader], (upper - lower) / (1.0 + np.abs(upper))
        clear = not (np.delete(upper, leader) > best + settings.tie * (1.0 + abs(best))).any()
        if settings.close_all:
            closed = bool(gap.max() <= settings.value_tol)
        else:
            closed = clear and bool(gap[leader] <= settings.value_tol)
        out.winner[b] = leader
        if closed and out.status[b] == Status.INACCURATE:
            out.status[b] = Status.CONVERGED
