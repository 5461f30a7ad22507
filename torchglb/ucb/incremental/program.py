"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round: the loss near its minimum, which gives the level
``B = min L + beta^2``, and the loss at anchors near the boundary of the set, whose cuts and chords
bound every arm. A pass over the history is made only where the bounds do not yet decide.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats
from torchglb.carried.carried_loss import CarriedLoss, choose_order
from torchglb.carried.carried_minimum import CarriedMinimum
from torchglb.carried.source import RowSource, new_workspace
from torchglb.checks import (
    check_count,
    check_positive,
    check_same,
    check_shape,
    check_tensors,
    check_tolerance,
    refuse,
)
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status
from torchglb.recording import is_plain
from torchglb.ucb.incremental.arm_selection import choose
from torchglb.ucb.incremental.batches import (
    DONE,
    OPEN,
    Batch,
    RoundInput,
    RoundOutput,
    Sums,
    arms_of,
    end_round,
    learn_rows,
    new_output,
    play_round,
    problem_of,
    settings_of,
    start_round,
)
from torchglb.ucb.incremental.round_state import (
    DECIDED,
    PASS_FOR_MINIMUM,
    ROUND,
    UNDECIDED,
    Settings,
    round_memory,
)
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.native import native_support

#: anchors for each corner of a cube, but no more than MOST, nor than ENTRIES/d or MANY: more would
#: spare passes, but cost more in every round than those do
PER_CORNER, MOST, MANY, ENTRIES = 4, 256, 128, 2560
#: looks with a pass before all arms are solved to tolerance: so many, and so many for each arm
FIRST_STEPS, STEPS_PER_ARM = 20, 10
#: derivatives of the highest order of an anchor's polynomial; where it would be of second order an
#: anchor keeps the trace of its Hessian only
LARGEST_ANCHOR_ORDER = 7
#: and of the polynomial at the minimum, which says less about the arms than about the level
LARGEST_MINIMUM_ORDER = 100


@dataclass(frozen=True)
class Minimum:
    """The constrained minimum of the loss, enclosed.

    Attributes:
        theta: ``(*B, d)``, a point of the ball.
        loss: ``(*B)``, an upper bound on L(theta), at most ``slack`` above the minimum.
        slack: ``(*B)``.
    """

    theta: Tensor
    loss: Tensor
    slack: Tensor


@dataclass(frozen=True)
class Choice:
    """The optimistic arm of every problem, with what is known of all arms.

    Attributes:
        index: ``(*B)``, the arm with the largest ``h(x)``, up to ``tol`` where arms tie.
        upper: ``(*B, K)``, certified upper bounds.
        lower: ``(*B, K)``, certified lower bounds (the winner's beats all others' upper bounds).
        status: ``(*B)``, of :class:`torchglb.optim.Status`: INFEASIBLE where the level is below the
            minimum, NONFINITE where a NaN came in, INACCURATE where rounding hides the winner, or
            where the level is so close to the minimum that no point is feasible for certain.
        passes: ``(*B)``, passes over the history that this choice took, the minimum included.
    """

    index: Tensor
    upper: Tensor
    lower: Tensor
    status: Tensor
    passes: Tensor


class _QuickRound(NamedTuple):
    """What :meth:`AnchoredProgram.decide` writes to in every round with so many arms."""

    K: int
    settings: Settings
    heights: Floats
    out: RoundOutput


class AnchoredProgram:
    """The optimistic program over a history that grows by a few rows per round.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        anchors: A; by default 32 up to d = 3, 256 from d = 6 to 10 and 128 from d = 20 on.
        level_tol: the minimum of the loss is certified to this, and to what rounding allows; 1e-6,
            and 1e-2 in float32.
        aggregate: merge repeated arms in the history.
        validate: check the values of what is appended; without that it is upon the caller that no
            row is longer than 1, for the bounds rest on it.
        check_every: run :meth:`self_check` before every so many rounds; by default never.
        dtype: float64 or float32; arithmetic is float64 either way, and results are rounded
            outwards.

    Example:
        >>> import torchglb as glb
        >>> program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([1.0, 0.0], 1.0)
        >>> program.argmax(torch.eye(2).double(), radius=1.0).index
        tensor(0)
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        anchors: int | None = None,
        level_tol: float | None = None,
        aggregate: bool = False,
        validate: bool = True,
        check_every: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.family, self.domain = family, domain
        if check_every is not None:
            check_count("check_every", check_every, least=1)
        self.check_every = check_every
        exact = dtype == torch.float64
        if level_tol is None:
            level_tol = 1e-6 if exact else 1e-2
        self.level_tol = check_positive("level_tol", level_tol)
        self.tie_tol = 1e-7 if exact else 1e-4
        self._is_double = exact
        self.history = History(
            domain.dim,
            batch_shape,
            aggregate,
            family=family,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        if self.history.device.type != "cpu":
            expected = "the CPU (on a device: torchglb.ucb.RefitProgram)"
            raise refuse("device", expected, self.history.device)
        self.batch_shape = self.history.batch_shape
        d, N = domain.dim, self.batch_shape.numel()
        if not N:
            raise refuse("batch_shape", "at least one problem", tuple(self.batch_shape))
        if anchors is None:
            anchors = max(32, min(PER_CORNER * 2 ** min(d, 10), MOST, max(MANY, ENTRIES // d)))
        anchors = check_count("anchors", anchors, least=1)
        self._source = RowSource(family, self.history)
        radii = domain.radius_like(torch.zeros(1, dtype=torch.float64))
        ball = Ball(d, radii.expand(self.batch_shape).reshape(-1))
        self._minimum = CarriedMinimum(self._source, ball, LARGEST_MINIMUM_ORDER)
        order = choose_order(family, d, domain.max_radius, LARGEST_ANCHOR_ORDER)
        self._anchors = CarriedLoss(family, ball, N, anchors, order if order > 2 else 1)
        self._notes = np.zeros((N, (d + 2) * anchors + 1))
        self._notes[:, :anchors] = -1.0  # never used
        self._rounds = np.zeros(N, ROUND)
        self._number = 0  # of rounds so far
        self._epoch = self.history.epoch
        self._passes = np.zeros(N)
        self._no_tilt = np.zeros((N, d))
        self._no_ridge = np.zeros(N)
        self._quick: _QuickRound | None = None

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""
        found = torch.from_numpy(self._passes.copy()).reshape(self.batch_shape)
        return found.to(self.history.dtype)

    def fork(self) -> AnchoredProgram:
        """A copy with sums of its own over the same rows, which it then follows by itself.

        Questions to the copy leave this program as it is; rows are appended to this program only.
        """
        new = copy.copy(self)
        new._minimum, new._anchors = self._minimum.copy(), self._anchors.copy()
        for name in ("_notes", "_rounds", "_passes"):
            setattr(new, name, getattr(self, name).copy())
        new._quick = None
        return new

    def beside(self, anchors: int) -> AnchoredProgram:
        """Another program over the same rows, which it follows, with so many anchors at most."""
        history = self.history
        new = AnchoredProgram(
            self.family,
            self.domain,
            tuple(self.batch_shape),
            anchors=min(anchors, self._anchors.number),
            level_tol=self.level_tol,
            aggregate=history.aggregate,
            dtype=history.dtype,
        )
        return new.over(history)

    def over(self, history: History) -> AnchoredProgram:
        """The same sums over another history, of the same rows."""
        self.history, self._epoch = history, history.epoch
        self._source = self._minimum.source = RowSource(self.family, history)
        return self

    # ---- rows ----------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward.

        All or nothing: whatever interrupts it, the next call finds sums and rows to agree.
        """
        longest = self.history.longest_row if self.history.validate else 0.0
        if weight is not None or not self.append_at_once(x, r, longest):
            self._catch_up()  # what an interruption left in the sums must not stand for this row
            self.history.append(x, r, weight)
            if self.history.aggregate and self._source.is_direct:
                self._carry(x, r, weight)
            self._catch_up()

    def _carry(self, x: Any, r: Any, weight: Any) -> None:
        """Adds rows to the sums that merged rows no longer show; many are left to a pass."""
        N, d = self._source.problems, self.domain.dim
        rows = torch.as_tensor(x).numpy().reshape(N, -1, d).astype(np.float64)
        k = rows.shape[1]
        if k > self._source.arrays().used:
            return
        w = np.ones((N, k)) if weight is None else np.empty((N, k))
        if weight is not None:
            given = torch.as_tensor(weight).double()
            w[:] = given.reshape(N, k).numpy() if given.ndim else given.item()
        y = w * torch.as_tensor(r).double().numpy().reshape(N, k)
        for carried in (self._minimum.carried, self._anchors):
            carried.append(self._source, rows, y, w)

    def append_at_once(self, x: Any, r: Any, longest: float) -> int:
        """Plain rows of weight 1, checked, kept and carried by one compiled call.

        Args:
            x: as in :meth:`append`.
            r: as in :meth:`append`.
            longest: a row may be so long; 0 for no checks of values.

        Returns:
            How many rows each problem got; 0 for anything that is not plain or does not fit, which
            has changed nothing: :meth:`append` takes it, or says what is wrong with it.
        """
        history, source, d = self.history, self._source, self.domain.dim
        if not (source.is_plain and is_plain(x) and is_plain(r)) or history.keeps_graph:
            return 0
        if not x.dtype is r.dtype is history.dtype or self._epoch != history.epoch:
            return 0
        one = r.shape == self.batch_shape
        if x.shape != (*r.shape, d) or not (one or r.shape[:-1] == self.batch_shape):
            return 0
        k, N = 1 if one else r.shape[-1], source.problems
        rows, rewards = x.numpy().reshape(N, k, d), r.numpy().reshape(N, k)
        minimum, anchors = self._minimum.carried, self._anchors
        sums = Sums(anchors.memory, minimum.memory, anchors.table, minimum.table, anchors.number)
        if learn_rows(source.compiled, rows, rewards, longest, *history.reserve(k), sums) != DONE:
            return 0
        history.commit(k)
        return k

    def _catch_up(self) -> None:
        """Brings sums up to date that are not: of a fork, or after an interruption."""
        minimum, anchors, history = self._minimum.carried, self._anchors, self.history
        if self._epoch != history.epoch:  # other rows, maybe as many
            minimum.rebuild(self._source)
            anchors.rebuild(self._source)
            self._epoch = history.epoch
        elif not minimum.rows == anchors.rows == len(history):
            minimum.catch_up(self._source)
            anchors.catch_up(self._source)

    def self_check(self, anchor: int | None = None) -> None:
        """Compares what is carried with passes: the minimum's sums and those of one anchor.

        Args:
            anchor: which; by default another one in every round, the same in all problems.

        Raises:
            SolverError: if something is off by more than rounding explains. It never should be.
        """
        self._catch_up()
        slot = self._number % self._anchors.number if anchor is None else anchor
        for b in range(self._source.problems):
            self._minimum.carried.check(self._source, b)
            self._anchors.check(self._source, b, slot)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return {"history": self.history.state_dict(), **self._tensors(), "round": self._number}

    def _tensors(self) -> dict[str, Any]:
        return {
            "minimum": self._minimum.state_dict(),
            "anchors": self._anchors.state_dict(),
            "notes": torch.from_numpy(self._notes.copy()),
            "passes": torch.from_numpy(self._passes.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, history: bool = True) -> None:
        """Continues from a saved state; refuses one of another kind.

        Args:
            state: of :meth:`state_dict`.
            history: whether the rows are loaded too; else they are there already, those of a
                program beside this one.
        """
        wanted = set(self.state_dict()) - (set() if history else {"history"})
        if missing := wanted - set(state):
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        self._anchors.check_state("state['anchors']", state["anchors"])
        self._minimum.check_state("state['minimum']", state["minimum"])
        mine = self._tensors()
        check_tensors("state", state, {name: mine[name] for name in ("notes", "passes")})
        number = check_count("state['round']", state["round"])
        if history:
            self.history.load_state_dict(state["history"])
        self._minimum.load_state_dict(state["minimum"])
        self._anchors.load_state_dict(state["anchors"])
        self._notes = state["notes"].numpy().copy()
        self._passes = state["passes"].numpy().copy()
        self._number = number
        self._epoch = self.history.epoch

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: float | Tensor = 0.0) -> Minimum:
        """``min L`` over the ball, certified to ``level_tol``; changes nothing."""
        ridge = self._numbers("regularization", regularization)
        if self._epoch != self.history.epoch:
            self._catch_up()
        found = self._minimum.look(ridge, self._no_tilt, self.level_tol)
        d, shape = self.domain.dim, tuple(self.batch_shape)
        theta = torch.from_numpy(found.theta).reshape((*shape, d)).to(self.history.dtype)
        loss = self._rounded(found.high, up=True).reshape(shape)
        low = self._rounded(found.low, up=False).reshape(shape)
        return Minimum(theta, loss, loss - low)

    def _rounded(self, values: Floats, *, up: bool) -> Tensor:
        """In the dtype of the history, rounded up or down."""
        exact = torch.from_numpy(values)
        if self._is_double:
            return exact
        near = exact.to(self.history.dtype)
        end = torch.full_like(near, torch.inf if up else -torch.inf)
        off = near.double() < exact if up else near.double() > exact
        return torch.where(off, torch.nextafter(near, end), near)

    def _numbers(self, name: str, given: Any) -> Floats:
        """A number or a tensor that broadcasts to ``*B``, as ``(N,)``; never NaN or negative."""
        numbers = np.empty(self._source.problems)
        if type(given) is float or (isinstance(given, Real) and given is not True):
            least = float(given)
            numbers.fill(least)
        elif isinstance(given, Tensor):
            try:
                found = given.detach().double().expand(self.batch_shape).reshape(-1)
            except RuntimeError:
                wanted = f"shape {tuple(self.batch_shape)} or one that broadcasts to it"
                raise refuse(name, wanted, f"shape {tuple(given.shape)}") from None
            numbers[:] = found.numpy()
            least = float(numbers.min())
        else:
            raise refuse(name, "a number or a tensor", repr(given))
        if name != "level" and not least >= 0.0:
            raise refuse(name, "numbers of at least 0", given)
        return numbers

    # ---- the program of this round -------------------------------------------------------

    def program(
        self,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
    ) -> SublevelProgram:
        """The program as it stands now, for ``support``, ``argmax_ball`` and pictures of the set.

        Args:
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term.
        """
        name, given = _one_of(radius, level)
        shape, dtype = self.batch_shape, self.history.dtype
        B = torch.from_numpy(self._numbers(name, given)).reshape(shape).to(dtype)
        if level is None:
            B = self.minimum(regularization).loss + B
        ridge = torch.from_numpy(self._numbers("regularization", regularization))
        loss = NegativeLogLikelihood.of(
            self.family, self.history, regularization=ridge.reshape(shape).to(dtype)
        )
        return SublevelProgram(loss, self.domain, B)

    # ---- arms ----------------------------------------------------------------------------

    def argmax(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int | None = None,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``, with ``min L`` as
                :meth:`minimum` has it, from above and at most ``level_tol`` too high; both bounds
                are those of that level.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied; 1e-7, and 1e-4 in
                float32.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: passes before all arms of a problem are solved to tolerance; 20 and 10 for
                each arm if left out.
        """
        tie = self.tie_tol if tol is None else check_tolerance("tol", tol)
        own = np.inf if value_tol is None else check_tolerance("value_tol", value_tol)
        limits = (tie, own, False, max_steps)
        return self._round(arms, _one_of(radius, level), regularization, *limits)

    def decide(self, arms: Any, radius: float | Tensor, longest: float) -> Tensor | None:
        """The index of :meth:`argmax` alone, in one compiled call that checks the arms too.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2.
            longest: an arm may be so long; 0 for no checks of values.

        Returns:
            ``(*B)``; or None for arms that are not plain or do not fit, which has changed nothing.
        """
        source, history, shape = self._source, self.history, self.batch_shape
        if not (source.is_direct and is_plain(arms)) or self.check_every is not None:
            return None
        if not arms.dtype is history.dtype is torch.float64 or self._epoch != history.epoch:
            return None
        N, K, d = source.problems, arms.shape[-2] if arms.ndim > 1 else 0, self.domain.dim
        if K == 0 or arms.shape != (*shape, K, d) or not arms.is_contiguous():
            return None
        if self._quick is None or self._quick.K != K:
            self._quick = self._quick_round(K)
        _, settings, heights, out = self._quick
        heights[:] = radius if type(radius) is float else self._numbers("radius", radius)
        asked = RoundInput(
            arms.numpy().reshape(N, K, d),
            heights,
            self._no_ridge,
            self._no_tilt,
            settings,
            self._number + 1,
            longest,
            len(history),
        )
        ending = play_round(source.compiled, *history.arrays(), self._batch(), asked, out)
        if ending > OPEN:
            return None
        self._number += 1
        if ending == OPEN:
            self._solve_open(asked, out)
        return torch.from_numpy(out.winner.reshape(shape).copy())

    def _quick_round(self, K: int) -> _QuickRound:
        settings = self._settings("radius", K, self.tie_tol, np.inf, False, None)
        N = self._source.problems
        return _QuickRound(K, settings, np.empty(N), new_output(N, K))

    def bound(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        tol: float = 1e-7,
        max_steps: int | None = None,
    ) -> Choice:
        """Bounds on ``h(x)`` of all arms, each closed to ``tol (1 + |h|)``.

        Args:
            arms: ``(*B, K, d)``.
            radius: as in :meth:`argmax`.
            level: the same.
            regularization: the same.
            tol: of every gap.
            max_steps: as in :meth:`argmax`.
        """
        closed = check_tolerance("tol", tol)
        limits = (self.tie_tol, closed, True, max_steps)
        return self._round(arms, _one_of(radius, level), regularization, *limits)

    def _round(
        self,
        arms: Tensor,
        height: tuple[str, Any],
        regularization: float | Tensor,
        tie: float,
        value_tol: float,
        every: bool,
        max_steps: int | None,
    ) -> Choice:
        shape = self.batch_shape
        check_same("arms", arms, "the history", self.history)
        check_shape("arms", arms, (*shape, "K", self.domain.dim))
        K = arms.shape[-2]
        if K == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(arms.shape)}")
        settings = self._settings(height[0], K, tie, value_tol, every, max_steps)
        out = new_output(self._source.problems, K)
        self._play(self._asked(arms, height, regularization, settings), out)
        return Choice(
            torch.from_numpy(out.winner.reshape(shape)),
            self._rounded(out.upper.reshape((*shape, K)), up=True),
            self._rounded(out.lower.reshape((*shape, K)), up=False),
            torch.from_numpy(out.status.reshape(shape)),
            torch.from_numpy(out.passes.reshape(shape)),
        )

    def _settings(
        self, name: str, K: int, tie: float, value_tol: float, every: bool, max_steps: int | None
    ) -> Settings:
        if max_steps is None:
            max_steps = FIRST_STEPS + STEPS_PER_ARM * K
        steps = check_count("max_steps", max_steps)
        return Settings(0.0, name == "radius", self.level_tol, tie, value_tol, every, steps)

    def _asked(
        self,
        arms: Tensor,
        height: tuple[str, Any],
        regularization: float | Tensor,
        settings: Settings,
    ) -> RoundInput:
        entries = arms.detach().numpy().reshape(self._source.problems, -1, self.domain.dim)
        return RoundInput(
            np.ascontiguousarray(entries, np.float64),
            self._numbers(*height),
            self._numbers("regularization", regularization),
            self._no_tilt,
            settings,
            self._number + 1,
            0.0,
            len(self.history),
        )

    def _batch(self) -> Batch:
        minimum, anchors = self._minimum, self._anchors
        return Batch(
            anchors.memory,
            self._notes,
            minimum.carried.memory,
            minimum.places,
            minimum.search,
            self._rounds,
            self._passes,
            anchors.constants,
            minimum.carried.constants,
            anchors.table,
            minimum.carried.table,
            anchors.number,
        )

    def _play(self, asked: RoundInput, out: RoundOutput) -> None:
        """The round of every problem."""
        if self.check_every is not None and asked.number % self.check_every == 0:
            self.self_check()
        self._catch_up()
        batch, source = self._batch(), self._source
        if source.is_direct:
            ending = play_round(source.compiled, *source.arrays(), batch, asked, out)
        else:
            ending = self._play_with_passes(batch, asked, out)
        self._number += 1
        if ending == OPEN:
            self._solve_open(asked, out)

    def _solve_open(self, asked: RoundInput, out: RoundOutput) -> None:
        """All arms of the problems that single looks have not decided."""
        for b in np.nonzero(self._rounds["ending"] == UNDECIDED)[0]:
            self._solve(asked, out, int(b))

    def _play_with_passes(self, batch: Batch, asked: RoundInput, out: RoundOutput) -> int:
        """The same where compiled code cannot read the rows: passes are made from here."""
        K, d = asked.arms.shape[1:]
        table, least = batch.table, batch.minimum_table
        memory = round_memory(d, batch.number, table.count, least.count)
        anchor_work, minimum_work = new_workspace(table), new_workspace(least)
        rows = len(self.history)  # those of all ranks: they must decide alike
        ints, numbers = np.empty(2 * K, np.int64), np.empty(K * (d + 2))
        rounds, searches = batch.rounds.view(np.recarray), batch.search.view(np.recarray)
        for b in range(self._source.problems):
            start_round(batch, asked, b)
            state, search = rounds[b], searches[b]
            problem = problem_of(batch, b, asked.ridge[b], asked.tilt[b], rows)
            arms, settings = arms_of(asked, out, b, ints, numbers), settings_of(asked, b)
            work, trace = anchor_work, 0.0
            while (
                wanted := choose(state, search, problem, arms, settings, work, trace, memory)
            ) != DECIDED:
                if wanted == PASS_FOR_MINIMUM:
                    point, monomials, work = batch.places[b, 2], least, minimum_work
                    search.answered = 1
                else:
                    point, monomials, work = memory.trial, table, anchor_work
                    state.answered = 1
                trace = self._minimum.carried.checked_pass(self._source, b, point, monomials, work)
            end_round(batch, out, b)
        return OPEN if out.status.any() else DONE

    def _solve(self, asked: RoundInput, out: RoundOutput, b: int) -> None:
        """All arms of a problem that single looks did not decide, solved to tolerance."""
        settings, d = asked.settings, self.domain.dim
        X, w, y, used = self._source.arrays()  # merged sums in all their digits, unlike view()
        features, weights, sums = (torch.from_numpy(t[b][..., :used]).double() for t in (X, w, y))
        loss = NegativeLogLikelihood(
            self.family,
            features.mT,
            torch.where(weights > 0, sums / torch.where(weights > 0, weights, 1.0), 0.0),
            weights,
            regularization=float(asked.ridge[b]),
            shards=self.history.shards,
        )
        ball = Ball(d, float(self._anchors.constants[b, 0]))
        program = SublevelProgram(loss, ball, torch.tensor(self._rounds["level"][b]))
        arms, tol = torch.from_numpy(asked.arms[b]), min(settings.tie, settings.value_tol) / 4
        found = native_support(program, arms, tol=tol, throw=False, validate=False)
        upper = out.upper[b] = np.fmin(out.upper[b], found.upper.numpy())
        lower = out.lower[b] = np.fmax(out.lower[b], found.lower.numpy())
        leader = int(lower.argmax())
        best, gap = lower[leader], (upper - lower) / (1.0 + np.abs(upper))
        clear = not (np.delete(upper, leader) > best + settings.tie * (1.0 + abs(best))).any()
        if settings.every:
            closed = bool(gap.max() <= settings.value_tol)
        else:
            closed = clear and bool(gap[leader] <= settings.value_tol)
        out.winner[b] = leader
        if closed and out.status[b] == Status.INACCURATE:
            out.status[b] = Status.CONVERGED


def _one_of(radius: float | Tensor | None, level: Tensor | None) -> tuple[str, Any]:
    """What was given of the two, by name."""
    if (radius is None) == (level is None):
        raise refuse("radius, level", "exactly one of them", "none" if level is None else "both")
    return ("radius", radius) if level is None else ("level", level)
