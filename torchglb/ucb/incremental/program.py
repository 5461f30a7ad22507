"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round: the loss near its minimum, which gives the level
``B = min L + beta^2``, and the loss at anchors near the boundary of the set, whose cuts and chords
bound every arm. A pass over the history is made only where the bounds do not yet decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import Floats
from torchglb.carried.source import RowSource
from torchglb.checks import check_count, refuse
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.recording import is_plain
from torchglb.rounding import round_up
from torchglb.rows.history import History
from torchglb.ucb.growing import Choice, GrowingProgram
from torchglb.ucb.incremental.batches import RoundBuffers
from torchglb.ucb.incremental.round_state import Settings
from torchglb.ucb.incremental.rounds import CarriedRounds

#: anchors: PER_CORNER for each corner of a cube, but not above MOST, nor above the larger of MANY
#: and ENTRIES/d. More of them would spare passes, and cost more in every round than those do
PER_CORNER, MOST, MANY, ENTRIES = 4, 256, 128, 2560


class _PlainRound(NamedTuple):
    """What :meth:`AnchoredProgram.decide` is given and writes to, for arms of one shape."""

    shape: torch.Size  # (*B, K, d)
    settings: Settings  # for heights above the minimum
    absolute: Settings  # for levels
    buffers: RoundBuffers
    winner: Tensor  # (*B), the memory of ``out.winner``


class AnchoredProgram(GrowingProgram):
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
        self.check_problem(family, domain, batch_shape)
        if check_every is not None:
            check_count("check_every", check_every, least=1)
        self.check_every = check_every
        self._is_double = dtype == torch.float64
        if level_tol is None:
            level_tol = 1e-6 if self._is_double else 1e-2
        history = History(
            domain.dim,
            batch_shape,
            aggregate,
            family=family,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        if history.device.type != "cpu":
            expected = "the CPU (on a device: torchglb.ucb.RefitProgram)"
            raise refuse("device", expected, history.device)
        super().__init__(family, domain, history, level_tol)
        d, N = domain.dim, self.batch_shape.numel()
        if not N:
            raise refuse("batch_shape", "at least one problem", tuple(self.batch_shape))
        if anchors is None:
            anchors = max(32, min(PER_CORNER * 2 ** min(d, 10), MOST, max(MANY, ENTRIES // d)))
        anchors = check_count("anchors", anchors, least=1)
        radii = domain.radius_like(torch.zeros(1, dtype=torch.float64))
        ball = Ball(d, radii.expand(self.batch_shape).reshape(-1))
        self._rounds = CarriedRounds(RowSource(family, history), ball, anchors)
        self._plain: _PlainRound | None = None

    @property
    def passes(self) -> Tensor:  # noqa: D102
        found = torch.from_numpy(self._rounds.passes.copy()).reshape(self.batch_shape)
        return found.to(self.history.dtype)

    def fork(self) -> Self:
        """A copy with sums of its own over the same rows, which it then follows by itself.

        Questions to the copy leave this program as it is; rows are appended to this program only.
        """
        new = super().fork()
        new._rounds = self._rounds.copy()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without what shares memory that a copy does not."""
        return vars(self) | {"_plain": None}

    def beside(self, anchors: int) -> AnchoredProgram:
        """Another program over the same rows, which it follows, with so many anchors at most."""
        history, anchors = self.history, check_count("anchors", anchors, least=1)
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

    def over(self, history: History) -> Self:
        """The same sums over another history, of the same rows."""
        self._rounds.over(RowSource(self.family, history))
        return super().over(history)

    # ---- rows ----------------------------------------------------------------------------

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward.

        All or nothing: whatever interrupts it, the next call finds sums and rows to agree.
        """
        longest = self.history.longest_row if self.history.validate else 0.0
        if weight is None and self.append_at_once(x, r, longest):
            return
        self._rounds.catch_up()  # what an interruption left in the sums is not of this row
        mark = self.history.mark()
        try:
            self.history.append(x, r, weight)
            self._rounds.catch_up()
        except BaseException:  # whoever counts rows has not counted this one
            self.history.reset(mark)
            raise

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

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        self._rounds.catch_up()
        return super().state_dict()

    def _state(self) -> dict[str, Any]:
        return self._rounds.state_dict()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        self._rounds.check_state(state)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._rounds.load_state_dict(state)

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: ArrayLike = 0.0) -> Estimate:  # noqa: D102
        ridge = self._each(self._numbers("regularization", regularization))
        if not self._rounds.is_current:
            self._rounds.catch_up()
        found = self._rounds.minimum.look(ridge, self._rounds.no_tilt, self.level_tol)
        d, shape = self.domain.dim, tuple(self.batch_shape)
        theta = torch.from_numpy(found.theta).reshape((*shape, d)).to(self.history.dtype)
        high, low = self._upwards(found.high), -self._upwards(-found.low)
        return Estimate(theta, high.reshape(shape), low.reshape(shape))

    def _upwards(self, values: Floats) -> Tensor:
        """In the dtype of the history, not below what they were."""
        exact = torch.from_numpy(values)
        return exact if self._is_double else round_up(exact, self.history.dtype)

    def _each(self, given: float | Tensor) -> Floats:
        """A number for each problem, ``(N,)``."""
        numbers = np.empty(self.batch_shape.numel())
        if isinstance(given, Tensor):
            numbers[:] = given.detach().double().reshape(-1).numpy()
        else:
            numbers.fill(given)
        return numbers

    # ---- arms ----------------------------------------------------------------------------

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
            radius: beta^2, or None where levels are given.
            longest: an arm may be so long; 0 for no checks of values.
            levels: B, ``(N,)``, instead of a radius.

        Returns:
            ``(*B)``; or None for arms that are not plain or do not fit, and where a choice is not
            certain or a set may be empty: :meth:`argmax` says more.
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
        _, settings, absolute, buffers, winner = plain
        heights = buffers.heights
        buffers.ridge.fill(0.0)
        if levels is not None:
            heights[:] = levels
            settings = absolute
        elif type(radius) is float:
            heights.fill(radius)
        else:
            heights[:] = self._each(self._numbers("radius", radius))
        played = rounds.play(arms, plain.shape[-2], settings, longest, buffers)
        if not played or np.count_nonzero(buffers.status):
            return None
        return winner.clone()

    def _plain_round(self, shape: torch.Size) -> _PlainRound | None:
        """Memory for rounds with arms of this shape; None if it is not one of arms."""
        K = shape[-2] if len(shape) > 1 else 0
        if K == 0 or shape != (*self.batch_shape, K, self.domain.dim) or self.check_every:
            return None
        settings = Settings(True, self.level_tol, self.tie_tol, np.inf, False, self._steps(K))
        buffers = self._rounds.buffers(K)
        winner = torch.from_numpy(buffers.winner).reshape(self.batch_shape)
        absolute = settings._replace(relative=False)
        self._plain = _PlainRound(shape, settings, absolute, buffers, winner)
        return self._plain

    def _round(
        self, arms: Tensor, height: float | Tensor, ridge: float | Tensor, settings: Settings
    ) -> Choice:
        shape, K = self.batch_shape, arms.shape[-2]
        if self.check_every is not None and (self._rounds.number + 1) % self.check_every == 0:
            self.self_check()
        self._rounds.catch_up()
        buffers = self._rounds.buffers(K)
        buffers.heights[:], buffers.ridge[:] = self._each(height), self._each(ridge)
        self._rounds.play(arms.double().contiguous(), K, settings, 0.0, buffers)
        upper, lower = self._rounds.bounds(buffers, K)
        rest = (buffers.winner, buffers.status, buffers.passes)
        index, status, passes = (torch.from_numpy(part.copy()).reshape(shape) for part in rest)
        return Choice(
            index,
            self._upwards(upper.reshape((*shape, K)).copy()),
            -self._upwards(-lower.reshape((*shape, K))),
            status,
            passes,
        )
