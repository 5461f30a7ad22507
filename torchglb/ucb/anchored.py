"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round, each in O(d^2) to O(d^q) per observation: a
Taylor model of the loss near its minimum, which certifies the level ``B = min L + beta^2``, and a
bundle of anchors near the boundary of the set, whose cuts and chords bound every arm. A pass over
the history is made only when the bounds do not yet decide, and only for the problems that need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import Array, array, length, library, limits, quiet, tensor
from torchglb.checks import check_positive, check_same, check_shape, check_tensors, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status
from torchglb.optim.numbers import surely
from torchglb.ucb.bounds import pull_of_rows, roundings_of
from torchglb.ucb.bundle import Bundle
from torchglb.ucb.contest import Contest, Verdict
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.scan import Round
from torchglb.ucb.taylor import Bracket, Nature, remainder_ratio

#: anchors for each corner of a cube, up to as many as have this many entries in their Hessians
PER_CORNER, LARGEST_HESSIANS = 8, 100_000


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


class AnchoredProgram:
    """The optimistic program over a history that grows by a few rows per round.

    Args:
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        anchors: A, the size of the bundle; by default it grows with d until A d^2 is 10^5.
        level_tol: the minimum of the loss is certified to this, and to what rounding allows; 1e-6,
            and 1e-2 in float32.
        aggregate: merge repeated arms in the history.
        validate: check the values of what is appended; without that it is upon the caller that no
            row is longer than 1, for the bounds rest on it.
        dtype: float64 or float32.
        device: where everything lives.

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
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.family = family
        self.domain = domain
        exact = dtype == torch.float64
        if level_tol is None:
            level_tol = 1e-6 if exact else 1e-2
        self.level_tol = check_positive("level_tol", level_tol)
        self._tie = 1e-7 if exact else 1e-4
        self.history = History(
            domain.dim,
            batch_shape,
            aggregate,
            family=family,
            validate=validate,
            dtype=dtype,
            device=device,
        )
        self.batch_shape = self.history.batch_shape
        d, problems = domain.dim, self.batch_shape.numel()
        if not problems:
            raise refuse("batch_shape", "at least one problem", tuple(self.batch_shape))
        like = torch.zeros((), dtype=dtype, device=self.history.device)
        if anchors is None:
            anchors = max(32, min(PER_CORNER * 2 ** min(d, 10), LARGEST_HESSIANS // d**2))
        self._radius = domain.radius_like(like).expand(self.batch_shape).reshape(problems)
        self._data = FlatHistory(family, self.history)
        self._minimum = CarriedMinimum(self._data, domain, self._radius, self.level_tol)
        self._bundle = Bundle(family, problems, anchors, d, domain.max_radius, like)
        ratio = domain.constant(remainder_ratio(family, self._bundle.order), like)
        self._constants = (
            array(ratio.expand(self.batch_shape).reshape(problems)),
            array(self._minimum.concordance),
        )
        self._pull = array(torch.zeros_like(self._radius))
        self._last_ridge = 0.0, torch.zeros_like(self._radius)
        self._round = 0
        self._passes = array(torch.zeros_like(self._radius))

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""
        return (tensor(self._passes) + self._minimum.passes).reshape(self.batch_shape)

    # ---- data ----------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward."""
        count = len(self.history)
        self.history.append(x, r, weight)
        added = len(self.history) - count
        if not added:
            return
        problems, shape = self._data.problems, (*self.batch_shape, added)

        def rows(value: Any, *tail: int) -> Array:
            if not isinstance(value, Tensor):
                value = torch.as_tensor(value, dtype=self._radius.dtype, device=self._radius.device)
            value = value.detach() if value.ndim else value.detach().expand(shape)
            return array(value).reshape(problems, -1, *tail)

        X, reward = rows(x, self.domain.dim), rows(r)
        w = None if weight is None else rows(weight)
        with quiet():
            lengths = length(X)
            self._pull = self._pull + pull_of_rows(self.family, lengths, reward, w)
        minimum, bundle = self._minimum, self._bundle
        if minimum.order > bundle.order:
            minimum.observe(tensor(X), tensor(reward), None if w is None else tensor(w))
            bundle.observe(X, reward, w)
        else:  # one more point in the bundle costs nothing
            minimum.add(bundle.observe(X, reward, w, array(minimum.point)), lengths)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return {
            "history": self.history.state_dict(),
            "minimum": self._minimum.state_dict(),
            "bundle": self._bundle.state_dict(),
            "pull": tensor(self._pull).clone(),
            "passes": tensor(self._passes).clone(),
            "round": self._round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another kind."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        self._bundle.check_state(state["bundle"])
        self._minimum.check_state(state["minimum"])
        mine = {"pull": tensor(self._pull), "passes": tensor(self._passes)}
        check_tensors("state", state, mine)
        self.history.load_state_dict(state["history"])
        self._minimum.load_state_dict(state["minimum"])
        self._bundle.load_state_dict(state["bundle"])
        self._pull, self._passes = (array(state[name].clone()) for name in mine)
        self._round = int(state["round"])

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: float | Tensor = 0.0) -> Minimum:
        """``min L`` over the ball, certified to ``level_tol``; a pass only where the model ends."""
        theta, (low, high) = self._find(self._ridge(regularization))
        shape = self.batch_shape
        found = theta.reshape(*shape, -1), high.reshape(shape), (high - low).reshape(shape)
        return Minimum(*(tensor(t) for t in found))

    def _find(self, ridge: Tensor) -> tuple[Array, Bracket]:
        """The carried minimum, its enclosure widened by what rounding may have done to the loss."""
        theta, (low, high) = self._minimum.find(ridge)
        roundings = (2.0 + roundings_of(len(self.history))) * limits(high)[0]
        with quiet():
            paid = roundings * (abs(high) + 2.0 * array(self._radius) * self._pull)
        return theta, Bracket(low - paid, high + paid)

    def _ridge(self, regularization: float | Tensor) -> Tensor:
        if isinstance(regularization, Tensor):
            return regularization.expand(self.batch_shape).reshape(-1)
        if regularization != self._last_ridge[0]:
            self._last_ridge = regularization, torch.full_like(self._radius, regularization)
        return self._last_ridge[1]

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
        _check_one(radius, level)
        shape, B = self.batch_shape, tensor(self._height(radius, level)).reshape(self.batch_shape)
        ridge = self._ridge(regularization)
        if level is None:
            B = self.minimum(regularization).loss + B
        likelihood = NegativeLogLikelihood.of(
            self.family, self.history, regularization=ridge.reshape(shape)
        )
        return SublevelProgram(likelihood, self.domain, B)

    def _height(self, radius: float | Tensor | None, level: float | Tensor | None) -> Array:
        """The level, or how far it is above the minimum, whichever is given: ``(N)``."""
        given: Any = radius if level is None else level
        name = "radius" if level is None else "level"
        if isinstance(given, Tensor):
            try:
                return array(given.to(self._radius).expand(self.batch_shape).reshape(-1))
            except RuntimeError:
                wanted = f"shape {tuple(self.batch_shape)} or one that broadcasts to it"
                raise refuse(name, wanted, f"shape {tuple(given.shape)}") from None
        if isinstance(given, bool) or not isinstance(given, Real):
            raise refuse(name, "a number or a tensor", repr(given))
        # filled in place: a copy from the host would wait for the device
        like = array(self._radius)
        return library(like).full_like(like, float(given))

    # ---- the optimistic arm --------------------------------------------------------------

    @torch.no_grad()
    def argmax(
        self,
        arms: Tensor,
        radius: float | Tensor | None = None,
        *,
        level: Tensor | None = None,
        regularization: float | Tensor = 0.0,
        minimum: Minimum | None = None,
        tol: float | None = None,
        value_tol: float | None = None,
        max_steps: int = 20,
    ) -> Choice:
        """The arm with the largest ``h(x)``; stops as soon as the winner is certain.

        Args:
            arms: ``(*B, K, d)``.
            radius: beta^2, a number or ``(*B)``: the level is ``min L + beta^2``.
            level: the level itself, ``(*B)``, instead of a radius.
            regularization: lambda of a ridge term, a number or ``(*B)``; may change between rounds.
            minimum: what :meth:`minimum` has said of this loss since the last row, if it was asked.
            tol: arms whose values agree to ``tol (1 + |h|)`` count as tied; 1e-7, and 1e-4 in
                float32.
            value_tol: if given, the winner's own gap is closed to ``value_tol (1 + |h|)`` too.
            max_steps: single evaluations before all arms of a problem are solved to tolerance.
        """
        shape = self.batch_shape
        check_same("arms", arms, "the history", self._radius)
        check_shape("arms", arms, (*shape, "K", self.domain.dim))
        if arms.shape[-2] == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(arms.shape)}")
        _check_one(radius, level)
        height, earlier = self._height(radius, level), self._minimum.passes
        ridge = self._ridge(regularization)
        if minimum is None:
            centre, (low, least) = self._find(ridge)
        else:
            centre = array(minimum.theta.reshape(-1, self.domain.dim))
            least, slack = array(minimum.loss.reshape(-1)), array(minimum.slack.reshape(-1))
            low = least - slack
        carried = self._minimum
        X, lam, S = array(arms), array(ridge), array(self._radius)
        X, B = X.reshape(-1, *X.shape[-2:]), height if level is not None else least + height
        task = Round(X, B, centre, least, lam, S, self._pull)
        self._round += 1
        nature = Nature(array(carried.longest), *self._constants)
        contest = Contest(task, self._bundle, self._data, nature, self.domain, self._round)
        with quiet():
            found = contest.decide(self._tie if tol is None else tol, value_tol, max_steps)
            status = _status(found, task.level, low, least)
        self._passes = self._passes + found.passes
        passes = found.passes
        if carried.passes is not earlier:
            passes = passes + array(carried.passes - earlier)
        return Choice(
            tensor(found.winner.reshape(shape)),
            tensor(found.upper.reshape(*shape, -1)),
            tensor(found.lower.reshape(*shape, -1)),
            tensor(status.reshape(shape)),
            tensor(passes.reshape(shape)),
        )


def _check_one(radius: float | Tensor | None, level: Tensor | None) -> None:
    if (radius is None) == (level is None):
        got = "none" if level is None else "both"
        raise refuse("radius, level", "exactly one of them", got)


def _status(found: Verdict, level: Array, low: Array, high: Array) -> Array:
    """How each problem ended; its minimum is enclosed by ``low`` and ``high``."""
    xp = library(level)
    if surely(found.certain & (low <= level) & xp.isfinite(high + found.upper.sum(-1))):
        return xp.full_like(level, int(Status.CONVERGED), dtype=xp.int64)
    empty = (low > level) | (found.upper == -float("inf")).any(-1)
    undefined = xp.isnan(high + level) | (xp.isnan(found.upper.sum(-1)) & ~empty)
    status = xp.where(found.certain, int(Status.CONVERGED), int(Status.INACCURATE))
    status = xp.where(empty, int(Status.INFEASIBLE), status)
    return xp.where(undefined, int(Status.NONFINITE), status)
