"""The optimistic program of a growing history: most rounds need no pass at all.

Two things are carried forward from round to round, each in O(d^2) to O(d^q) per observation: a
Taylor model of the loss near its minimum, which certifies the level ``B = min L + beta^2``, and a
bundle of anchors near the boundary of the set, whose cuts and chords bound every arm. A pass over
the history is made only when the bounds do not yet decide, and only for the problems that need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import Array, array, library, quiet, tensor
from torchglb.checks import check_positive, check_shape, check_tensors, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status
from torchglb.optim.numbers import surely
from torchglb.ucb.bounds import pull_of_rows
from torchglb.ucb.bundle import Bundle
from torchglb.ucb.contest import Contest, Verdict
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.scan import Round
from torchglb.ucb.taylor import Nature, remainder_ratio

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
        level_tol: the minimum of the loss is certified to this; 1e-6, and 1e-2 in float32.
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
        self._ratio = ratio.expand(self.batch_shape).reshape(problems)
        self._pull = torch.zeros_like(self._radius)
        self._last_ridge = 0.0, torch.zeros_like(self._radius)
        self._round = 0
        self._passes = torch.zeros_like(self._radius)

    @property
    def passes(self) -> Tensor:
        """Passes over the history so far, ``(*B)``; one pass evaluates one point."""
        return (self._passes + self._minimum.passes).reshape(self.batch_shape)

    # ---- data ----------------------------------------------------------------------------

    def append(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds observations, as :meth:`History.append` does, and carries everything forward."""
        count = len(self.history)
        self.history.append(x, r, weight)
        added = len(self.history) - count
        if not added:
            return
        shape = (*self.batch_shape, added)

        def rows(value: Any, *tail: int) -> Tensor:
            if not isinstance(value, Tensor):
                value = torch.as_tensor(value, dtype=self._pull.dtype, device=self._pull.device)
            if value.ndim:
                return value.detach().reshape(self._data.problems, -1, *tail)
            return value.expand(shape).reshape(self._data.problems, -1)

        X, reward = rows(x, self.domain.dim), rows(r)
        w = None if weight is None else rows(weight)
        self._minimum.observe(X, reward, w)
        observed = (array(X), array(reward), None if w is None else array(w))
        self._bundle.observe(*observed)
        with quiet():
            self._pull = self._pull + tensor(pull_of_rows(self.family, *observed))

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors and numbers."""
        return {
            "history": self.history.state_dict(),
            "minimum": self._minimum.state_dict(),
            "bundle": self._bundle.state_dict(),
            "pull": self._pull.clone(),
            "passes": self._passes.clone(),
            "round": self._round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another kind."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        self._bundle.check_state(state["bundle"])
        self._minimum.check_state(state["minimum"])
        check_tensors("state", state, {"pull": self._pull, "passes": self._passes})
        self.history.load_state_dict(state["history"])
        self._minimum.load_state_dict(state["minimum"])
        self._bundle.load_state_dict(state["bundle"])
        self._pull, self._passes = state["pull"].clone(), state["passes"].clone()
        self._round = int(state["round"])

    # ---- the minimum ---------------------------------------------------------------------

    @torch.no_grad()
    def minimum(self, regularization: float | Tensor = 0.0) -> Minimum:
        """``min L`` over the ball, certified to ``level_tol``; a pass only where the model ends."""
        theta, bracket = self._minimum.find(self._ridge(regularization))
        shape = self.batch_shape
        return Minimum(
            theta.reshape(*shape, -1),
            bracket.high.reshape(shape),
            (bracket.high - bracket.low).reshape(shape),
        )

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
        shape = self.batch_shape
        ridge = self._ridge(regularization)
        B = self._level(radius, level, array(self.minimum(regularization).loss.reshape(-1)))
        likelihood = NegativeLogLikelihood.of(
            self.family, self.history, regularization=ridge.reshape(shape)
        )
        return SublevelProgram(likelihood, self.domain, tensor(B).reshape(shape))

    def _level(self, radius: float | Tensor | None, level: Tensor | None, least: Array) -> Array:
        """B, for a loss whose minimum is at most ``least``."""
        given: Any = radius if level is None else level
        if isinstance(given, Tensor):
            given = array(given.to(self._radius).expand(self.batch_shape).reshape(-1))
        else:  # filled in place: a copy from the host would wait for the device
            given = library(least).full_like(least, given)
        return least + given if level is None else given

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
        check_shape("arms", arms, (*shape, "K", self.domain.dim))
        if arms.shape[-2] == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(arms.shape)}")
        _check_one(radius, level)
        before = self._minimum.passes
        ridge = self._ridge(regularization)
        if minimum is None:
            hub, (low, high) = self._minimum.find(ridge)
        else:
            hub, high = minimum.theta.reshape(-1, self.domain.dim), minimum.loss.reshape(-1)
            low = high - minimum.slack.reshape(-1)
        flat = arms.reshape(-1, *arms.shape[-2:])
        given = (flat, hub, high, ridge, self._radius, self._pull)
        X, centre, least, lam, S, pull = (array(t) for t in given)
        task = Round(X, self._level(radius, level, least), centre, least, lam, S, pull)
        self._round += 1
        longest, concordance = self._minimum.longest, self._minimum.concordance
        nature = Nature(array(longest), array(self._ratio), array(concordance))
        contest = Contest(task, self._bundle, self._data, nature, self.domain, self._round)
        with quiet():
            found = contest.decide(self._tie if tol is None else tol, value_tol, max_steps)
            status = _status(found, task.level, array(low), task.hub_loss)
        passes = tensor(found.passes)
        self._passes = self._passes + passes
        return Choice(
            tensor(found.winner).reshape(shape),
            tensor(found.upper).reshape(*shape, -1),
            tensor(found.lower).reshape(*shape, -1),
            tensor(status).reshape(shape),
            (passes + self._minimum.passes - before).reshape(shape),
        )


def _check_one(radius: float | Tensor | None, level: Tensor | None) -> None:
    if (radius is None) == (level is None):
        got = "none" if level is None else "both"
        raise refuse("radius, level", "exactly one of them", got)


def _status(found: Verdict, level: Array, low: Array, high: Array) -> Array:
    """How each problem ended; its minimum is enclosed by ``low`` and ``high``."""
    xp = library(level)
    # what is infinite or NaN anywhere is so in this sum
    sound = abs(high + found.upper.sum(-1)) < float("inf")
    if surely(found.certain & (low <= level) & sound):
        return xp.full_like(level, int(Status.CONVERGED), dtype=xp.int64)
    empty = (low > level) | (found.upper == -float("inf")).any(-1)
    undefined = xp.isnan(high + level) | (xp.isnan(found.upper.sum(-1)) & ~empty)
    status = xp.where(found.certain, int(Status.CONVERGED), int(Status.INACCURATE))
    status = xp.where(empty, int(Status.INFEASIBLE), status)
    return xp.where(undefined, int(Status.NONFINITE), status)
