"""Exact optimism: the arm of ``max <x, theta>`` over ``{theta : |theta| <= S, L(theta) <= B}``.

The base of the policies that differ only in the loss L and the level B. The program is carried
from round to round (:class:`torchglb.ucb.AnchoredProgram`): the winner is certified, and most
rounds need no pass over the history. Public code maximises by a general-purpose solver from one
start and takes whatever point it stops at, which is no upper bound.

A set that has become empty (theta* has then left it: an event of probability at most delta) is
widened to the nearest set that is not, around the minimiser of L.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_shape, refuse
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import raise_unless_converged
from torchglb.policies.base import Policy, towards
from torchglb.radii import Lipschitz, Problem, Radius, by_name
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.ucb import (
    AnchoredProgram,
    Choice,
    Minimum,
    SublevelProgram,
    argmax_ball,
    support,
)

SOLVERS = ("native", "conic")
#: the paper's radius: Theorem 3.1 as printed, with Table 1
PAPER = Lipschitz(constant="table1", inf="closed_form")
#: rows carried into all anchors at once: bounds the memory
TOGETHER = 512
#: the minimum of the loss is certified to this: the level is so much above its value at most
LEVEL_TOLERANCE = 1e-8
#: bounds on an arm are closed to this, relative to 1 + their size
BOUND_TOLERANCE = 0.01


class Target(NamedTuple):
    """The set of this round.

    Attributes:
        level: B, ``(*B)``.
        theta: a point of the set, the minimiser of the loss, ``(*B, d)``.
        loss: an upper bound on its loss, ``(*B)``.
        slack: how far this may lie above the minimum, ``(*B)``.
    """

    level: Tensor
    theta: Tensor
    loss: Tensor
    slack: Tensor


class ExactPolicy(Policy):
    """Optimism over a sublevel set of the loss, solved to certainty.

    Args:
        solver: ``"native"``, batched and certified, or ``"conic"``, the slow oracle.
        aggregate: merge repeated arms, so that a fixed arm set costs the same at every time.
        settings: of :class:`torchglb.policies.Policy`.
    """

    def __init__(
        self, *args: Any, solver: str = "native", aggregate: bool = False, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.solver = check_choice("solver", solver, SOLVERS)
        tolerance = LEVEL_TOLERANCE if self.dtype == torch.float64 else 1e-4
        self._program = AnchoredProgram(
            self.family,
            self.domain,
            tuple(self.batch_shape),
            level_tol=tolerance,
            aggregate=aggregate,
            validate=False,  # the public doors have looked already
            dtype=self.dtype,
            device=self.device,
        )
        self._target: Target | None = None
        self._winner: tuple[Tensor, Tensor] | None = None  # the arm just chosen, its upper bound

    # ---- what a policy supplies ----------------------------------------------------------

    def _ridge(self) -> float:
        """lambda of the ridge term in L; it may change with the number of observations."""
        return 0.0

    @abstractmethod
    def _level(self, minimum: Minimum) -> Tensor:
        """The level B, ``(*B)``, given the minimum of L over the ball."""

    # ---- the set of this round -----------------------------------------------------------

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set over which the policy is optimistic: an immutable snapshot."""
        target = self._current()
        return LikelihoodRatioSet(self._likelihood(), self.domain, target.level, target.theta)

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._program.passes

    def _likelihood(self) -> NegativeLogLikelihood:
        return NegativeLogLikelihood.of(
            self.family, self._program.history, regularization=self._ridge()
        )

    def _current(self) -> Target:
        if self._target is None:
            minimum = self._program.minimum(self._ridge())
            least = minimum.loss + self._program.level_tol * (1.0 + minimum.loss.abs())
            level = torch.maximum(self._level(minimum), least)
            self._target = Target(level, minimum.theta, minimum.loss, minimum.slack)
        return self._target

    # ---- choosing ------------------------------------------------------------------------

    @torch.no_grad()
    def select(self, arms: Tensor) -> Tensor:
        """The index ``(*B)`` of the arm with the largest ``h(x)``, certified."""
        self._check_arms(arms)
        if self.solver != "native":
            return self._scores(arms).argmax(-1)
        choice = self._argmax(arms)
        place = choice.index[..., None]
        winner = arms.gather(-2, place[..., None].expand(*place.shape, arms.shape[-1]))[..., 0, :]
        self._winner = winner, choice.upper.gather(-1, place)[..., 0]
        return choice.index

    @torch.no_grad()
    def select_ball(self) -> Tensor:
        """``theta/|theta|`` for the longest theta of the set.

        Certified for d <= 2; beyond, the best local maximum from 4 d + 1 starts
        (:func:`torchglb.ucb.argmax_ball`).
        """
        choice = argmax_ball(self._sublevel(), throw=False)
        unknown = torch.isnan(choice.theta).any(-1)  # no point of the set was found
        raise_unless_converged(torch.where(unknown, choice.status, 0), f"the arm of {self.name}")
        return towards(choice.theta)

    def _sublevel(self) -> SublevelProgram:
        return SublevelProgram(self._likelihood(), self.domain, self._current().level)

    def _argmax(self, arms: Tensor, value_tol: float | None = None) -> Choice:
        level, *minimum = self._current()
        return self._program.argmax(
            arms,
            level=level,
            regularization=self._ridge(),
            minimum=Minimum(*minimum),
            value_tol=value_tol,
        )

    @torch.no_grad()
    def bounds(self, x: Tensor, refine: bool = True) -> Interval:
        """Certified ends of ``<x, theta>`` over the set, from the carried program.

        The upper end of the arm that was just chosen is known already.
        """
        tol = BOUND_TOLERANCE if refine else None
        if self._winner is not None and torch.equal(x, self._winner[0]):
            upper = self._winner[1]
        else:
            upper = self._argmax(x[..., None, :], tol).upper[..., 0]
        return Interval(-self._argmax(-x[..., None, :], tol).upper[..., 0], upper)

    @torch.no_grad()
    def _scores(self, arms: Tensor) -> Tensor:
        """Certified upper bounds on ``h(x)``, closed to the solver's tolerance."""
        target, program = self._current(), self._sublevel()
        options: dict[str, Any] = {"throw": False}  # the bounds hold wherever a solver stopped
        if self.solver == "native":
            options |= {"center": target.theta, "validate": False}
        return support(program, arms, self.solver, **options).upper

    # ---- learning and saving -------------------------------------------------------------

    def _append(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:
        for start in range(0, x.shape[-2], TOGETHER):
            part = slice(start, start + TOGETHER)
            w = None if weight is None else weight[..., part]
            self._program.append(x[..., part, :], r[..., part], w)
        self._target = self._winner = None

    def _state(self) -> dict[str, Any]:
        target = self._target
        kept = None if target is None else {k: t.clone() for k, t in target._asdict().items()}
        return {"program": self._program.state_dict(), "target": kept}

    def _load(self, state: Mapping[str, Any]) -> None:
        program, target = state["program"], state["target"]
        self._program.load_state_dict(program)
        kept = (
            None if target is None else Target(*(target[name].clone() for name in Target._fields))
        )
        self._target, self._winner = kept, None


class LikelihoodRatioPolicy(ExactPolicy):
    """Optimism over ``{L(theta) - L(theta_hat) <= beta^2}`` for any radius of the library.

    Args:
        radius: a name of :func:`torchglb.radii.by_name` or a :class:`torchglb.radii.Radius`.
        settings: of :class:`ExactPolicy`.
    """

    def __init__(self, *args: Any, radius: str | Radius, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.radius = named_radius(radius)
        self._problem = Problem(
            self.family,
            self.domain,
            self.delta,
            tuple(self.batch_shape),
            self.dtype,
            self.device,
        )
        self._sums = self.radius.init(self._problem)

    def _level(self, minimum: Minimum) -> Tensor:
        found = self.radius.evaluate(
            self._problem, self._sums, self._likelihood(), minimum.theta, minimum.loss
        )
        self._sums = found.state
        return found.level

    def _update(self, x: Tensor, r: Tensor) -> None:
        self._append(x, r)
        self._sums = self.radius.update(self._problem, self._sums, x, r)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"sums": {name: t.clone() for name, t in self._sums.items()}}

    def _load(self, state: Mapping[str, Any]) -> None:
        sums = {name: state["sums"][name].clone() for name in self._sums}
        for name, old in self._sums.items():
            check_shape(f"state['sums'][{name!r}]", sums[name], old.shape)
        super()._load(state)
        self._sums = sums


def named_radius(radius: str | Radius) -> Radius:
    """The radius itself, or the one that a name stands for."""
    found = by_name(radius) if isinstance(radius, str) else radius
    if not isinstance(found, Radius):
        raise refuse("radius", "a name or a torchglb.radii.Radius", type(radius).__name__)
    return found
