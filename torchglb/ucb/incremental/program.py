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

from torchglb.array_like import ArrayLike
from torchglb.backend import Floats
from torchglb.carried.source import RowSource
from torchglb.checks import (
    as_like,
    check_count,
    check_positive,
    check_shape,
    check_tolerance,
    refuse,
)
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import raise_unless_converged
from torchglb.recording import is_plain
from torchglb.ucb.incremental.batches import RoundInput, RoundOutput, new_output
from torchglb.ucb.incremental.round_state import Settings
from torchglb.ucb.incremental.rounds import CarriedRounds
from torchglb.ucb.program import SublevelProgram

#: anchors for each corner of a cube, but no more than MOST, nor than ENTRIES/d or MANY: more would
#: spare passes, but cost more in every round than those do
PER_CORNER, MOST, MANY, ENTRIES = 4, 256, 128, 2560
#: looks with a pass before all arms are solved to tolerance: so many, and so many for each arm
FIRST_STEPS, STEPS_PER_ARM = 20, 10


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

    Example:
        >>> import torchglb as glb
        >>> program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> choice = program.argmax([[1.0, 0.0], [0.0, 1.0]], radius=1.0)
        >>> choice.index.shape, choice.upper.shape
        (torch.Size([]), torch.Size([2]))
    """

    index: Tensor
    upper: Tensor
    lower: Tensor
    status: Tensor
    passes: Tensor

    def checked(self, throw: bool) -> Choice:
        """Itself; raises SolverError, if ``throw``, where a problem's choice is not certain."""
        if throw:
            raise_unless_converged(self.status, "the choice of an arm")
        return self


class _PlainRound(NamedTuple):
    """What :meth:`AnchoredProgram.decide` is given and writes to, for arms of one shape."""

    shape: torch.Size  # (*B, K, d)
    settings: Settings  # for heights above the minimum
    absolute: Settings  # for levels
    heights: Floats
    out: RoundOutput
    winner: Tensor  # (*B), the memory of ``out.winner``


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
        radii = domain.radius_like(torch.zeros(1, dtype=torch.float64))
        ball = Ball(d, radii.expand(self.batch_shape).reshape(-1))
        self._rounds = CarriedRounds(RowSource(family, self.history), ball, anchors)
        self._no_tilt, self._no_ridge = np.zeros((N, d)), np.zeros(N)
        self._plain: _PlainRound | None = None

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""
        found = torch.from_numpy(self._rounds.passes.copy()).reshape(self.batch_shape)
        return found.to(self.history.dtype)

    def fork(self) -> AnchoredProgram:
        """A copy with sums of its own over the same rows, which it then follows by itself.

        Questions to the copy leave this program as it is; rows are appended to this program only.
        """
        new = copy.copy(self)
        new._rounds = self._rounds.copy()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without what shares memory that a copy does not."""
        return vars(self) | {"_plain": None}

    def beside(self, anchors: int) -> AnchoredProgram:
        """Another program over the same rows, which it follows, with so many anchors at most."""
        history = self.history
        new = AnchoredProgram(
            self.family,
            self.domain,
            tuple(self.batch_shape),
            anchors=min(anchors, self._rounds.anchors.number),
            level_tol=self.level_tol,
            aggregate=history.aggregate,
            dtype=history.dtype,
        )
        return new.over(history)

    def over(self, history: History) -> AnchoredProgram:
        """The same sums over another history, of the same rows."""
        self.history = history
        self._rounds.over(RowSource(self.family, history))
        return self

    # ---- rows ----------------------------------------------------------------------------

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward.

        All or nothing: whatever interrupts it, the next call finds sums and rows to agree.
        """
        longest = self.history.longest_row if self.history.validate else 0.0
        if weight is not None or not self.append_at_once(x, r, longest):
            self._rounds.catch_up()  # what an interruption left in the sums is not of this row
            self.history.append(x, r, weight)
            self._rounds.catch_up()

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
        rounds = self._rounds
        if not (rounds.source.is_plain and rounds.is_current):
            return 0
        rows = self.history.plain_rows(x, r)
        return rows[2] if rows is not None and rounds.learn(*rows, longest) else 0

    def self_check(self, anchor: int | None = None) -> None:
        """Compares what is carried with passes: the minimum's sums and those of one anchor.

        Args:
            anchor: which; by default another one in every round, the same in all problems.

        Raises:
            SolverError: if something is off by more than rounding explains. It never should be.
        """
        self._rounds.self_check(anchor)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        self._rounds.catch_up()
        return {"history": self.history.state_dict(), **self._rounds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, history: bool = True) -> None:
        """Continues from a saved state; refuses one of another kind.

        Args:
            state: of :meth:`state_dict`.
            history: whether the rows are loaded too; else they are there already, those of a
                program beside this one.
        """
        wanted = set(self._rounds.state_dict()) | ({"history"} if history else set())
        if missing := wanted - set(state):
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        self._rounds.check_state(state)
        if history:
            self.history.load_state_dict(state["history"])
        self._rounds.load_state_dict(state)

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: ArrayLike = 0.0) -> Estimate:
        """``min L`` over the ball, certified to ``level_tol``; changes nothing."""
        ridge = self._numbers("regularization", regularization)
        if not self._rounds.is_current:
            self._rounds.catch_up()
        found = self._rounds.minimum.look(ridge, self._no_tilt, self.level_tol)
        d, shape = self.domain.dim, tuple(self.batch_shape)
        theta = torch.from_numpy(found.theta).reshape((*shape, d)).to(self.history.dtype)
        loss = self._rounded(found.high, up=True).reshape(shape)
        low = self._rounded(found.low, up=False).reshape(shape)
        return Estimate(theta, loss, low)

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
        numbers = np.empty(len(self._no_ridge))
        if type(given) is float or (isinstance(given, Real) and given is not True):
            least = float(given)
            numbers.fill(least)
        elif isinstance(given, Tensor | np.ndarray | list):
            given = as_like(name, given, self.history)
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
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
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
        arms: ArrayLike,
        radius: ArrayLike | None = None,
        *,
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int | None = None,
        throw: bool = True,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``. No ``upper`` is
                below h and no ``lower`` above it, whatever of ``min L`` is not known (but where
                beta^2 is below what rounding leaves of that, the centre counts as feasible).
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied; 1e-7, and 1e-4 in
                float32.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: passes before all arms of a problem are solved to tolerance; 20 and 10 for
                each arm if left out.
            throw: raise where the choice of a problem is not certain; else see ``status``.

        Raises:
            SolverError: names the problems, such as those whose set is empty, unless ``throw`` is
                False.
        """
        tie = self.tie_tol if tol is None else check_tolerance("tol", tol)
        own = np.inf if value_tol is None else check_tolerance("value_tol", value_tol)
        limits = (tie, own, False, max_steps)
        choice = self._round(arms, _one_of(radius, level), regularization, *limits)
        return choice.checked(throw)

    def decide(
        self,
        arms: Any,
        radius: float | Tensor | None,
        longest: float,
        levels: Floats | None = None,
    ) -> Tensor | None:
        """The index of :meth:`argmax` alone, in one compiled call that checks the arms too.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2; or
            longest: an arm may be so long; 0 for no checks of values.
            levels: B, ``(N,)``.

        Returns:
            ``(*B)``; or None for arms that are not plain or do not fit, and where the set of some
            problem may be empty: :meth:`argmax` says more.
        """
        rounds, plain = self._rounds, self._plain
        if not (rounds.source.is_direct and rounds.is_current and is_plain(arms)):
            return None
        if plain is None or arms.shape != plain.shape:
            plain = self._plain_round(arms.shape)
            if plain is None:
                return None
        if arms.dtype is not torch.float64 or not self._is_double or not arms.is_contiguous():
            return None
        _, settings, absolute, heights, out, winner = plain
        if levels is not None:
            heights[:] = levels
            settings = absolute
        else:
            heights[:] = radius if type(radius) is float else self._numbers("radius", radius)
        count, rows = rounds.number + 1, len(self.history)
        ridge, tilt = self._no_ridge, self._no_tilt
        asked = RoundInput(heights, ridge, tilt, settings, count, longest, rows)
        if not rounds.play(arms, asked, out) or (
            levels is not None and np.count_nonzero(out.status)
        ):
            return None
        return winner.clone()

    def _plain_round(self, shape: torch.Size) -> _PlainRound | None:
        """Memory for rounds with arms of this shape; None if it is not one of arms."""
        K = shape[-2] if len(shape) > 1 else 0
        if K == 0 or shape != (*self.batch_shape, K, self.domain.dim) or self.check_every:
            return None
        settings = self._settings("radius", K, self.tie_tol, np.inf, False, None)
        N = len(self._no_ridge)
        out = new_output(N, K)
        winner = torch.from_numpy(out.winner).reshape(self.batch_shape)
        absolute = settings._replace(relative=False)
        self._plain = _PlainRound(shape, settings, absolute, np.empty(N), out, winner)
        return self._plain

    def bound(
        self,
        arms: ArrayLike,
        radius: ArrayLike | None = None,
        *,
        level: ArrayLike | None = None,
        regularization: ArrayLike = 0.0,
        tol: float = 1e-7,
        max_steps: int | None = None,
        throw: bool = True,
    ) -> Choice:
        """Bounds on ``h(x)`` of all arms, each closed to ``tol (1 + |h|)``.

        Args:
            arms: ``(*B, K, d)``.
            radius: as in :meth:`argmax`.
            level: the same.
            regularization: the same.
            tol: of every gap.
            max_steps: as in :meth:`argmax`.
            throw: the same.
        """
        closed = check_tolerance("tol", tol)
        limits = (self.tie_tol, closed, True, max_steps)
        choice = self._round(arms, _one_of(radius, level), regularization, *limits)
        return choice.checked(throw)

    def _round(
        self,
        arms: ArrayLike,
        height: tuple[str, Any],
        regularization: ArrayLike,
        tie: float,
        value_tol: float,
        every: bool,
        max_steps: int | None,
    ) -> Choice:
        shape = self.batch_shape
        given = as_like("arms", arms, self.history)
        check_shape("arms", given, (*shape, "K", self.domain.dim))
        K = given.shape[-2]
        if K == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(given.shape)}")
        settings = self._settings(height[0], K, tie, value_tol, every, max_steps)
        out = new_output(len(self._no_ridge), K)
        heights, ridge = self._numbers(*height), self._numbers("regularization", regularization)
        if self.check_every is not None and (self._rounds.number + 1) % self.check_every == 0:
            self.self_check()
        self._rounds.catch_up()
        count, rows = self._rounds.number + 1, len(self.history)
        asked = RoundInput(heights, ridge, self._no_tilt, settings, count, 0.0, rows)
        self._rounds.play(given.detach().double().contiguous(), asked, out)
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


def _one_of(radius: ArrayLike | None, level: ArrayLike | None) -> tuple[str, Any]:
    """What was given of the two, by name."""
    if (radius is None) == (level is None):
        raise refuse("radius, level", "exactly one of them", "none" if level is None else "both")
    return ("radius", radius) if level is None else ("level", level)
