"""Exact optimism: the arm of ``max <x, theta>`` over ``{theta : |theta| <= S, L(theta) <= B}``.

The base of the policies that differ only in the loss L and the level B. On a CPU the program is
carried from round to round (:class:`torchglb.ucb.AnchoredProgram`): the winner is certified, and
most rounds need no pass over the history. On a device it is solved anew
(:class:`torchglb.ucb.RefitProgram`). Public code maximises by a general-purpose solver from one
start and takes whatever point it stops at, which is no upper bound.

A set that has become empty (theta* has then left it: an event of probability at most delta) is
widened to the nearest set that is not, around the minimiser of L.

Questions (``bounds``, ``confidence_set``, ``scores``, ``estimate``) change nothing. Whoever wants
bounds in every round asks a tracker, which has anchors of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import wait_for_all
from torchglb.checks import check_choice, kind_of, refuse
from torchglb.domain import Ball
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.forgetting import ForgettingGiven, as_forgetting
from torchglb.inference.estimation import RunningEstimate
from torchglb.inference.level import Height
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status, raise_unless_converged
from torchglb.policies.base import BoundTracker, Policy
from torchglb.policies.geometry import towards
from torchglb.policies.settings import SOLVERS, ExactSettings, PolicySettings, SolverName
from torchglb.radii import Lipschitz, Radius, by_name
from torchglb.recording import is_plain
from torchglb.rounding import round_up
from torchglb.rows.history import History
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.ucb import (
    AnchoredProgram,
    Choice,
    RefitProgram,
    SublevelProgram,
    argmax_ball,
    support,
)

#: the paper's radius: Theorem 3.1 as printed, with Table 1
PAPER = Lipschitz(constant="table1", inf="closed_form")
#: the minimum of the loss is certified to this: the level is so much above its value at most
LEVEL_TOLERANCE = 1e-8
#: bounds on an arm are closed to this, relative to 1 + their size
BOUND_TOLERANCE = 0.01
#: anchors of a tracker at most: its bounds need not be as close as those that decide
TRACKED = 64
#: wide enough for what is carried, without a pass
UNREFINED = 1e300
#: of a height, what a state has
SAVED = ("radius", "level")


class ProgramEstimate(RunningEstimate):
    """The minimum that a program of exact rounds keeps beside its cuts."""

    def __init__(self, program: AnchoredProgram | RefitProgram) -> None:
        self.program, self.history = program, program.history

    def append(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:  # noqa: D102
        self.program.append(x, r, weight)

    def append_at_once(self, x: ArrayLike, r: ArrayLike, longest: float) -> int:  # noqa: D102
        program = self.program
        return program.append_at_once(x, r, longest) if isinstance(program, AnchoredProgram) else 0

    def estimate(  # noqa: D102
        self, likelihood: NegativeLogLikelihood, loss_only: bool = False
    ) -> Estimate:
        return self.program.minimum()

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {}  # the program's own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        pass


class ExactPolicy(Policy):
    """Optimism over a sublevel set of the loss, solved to certainty.

    Args:
        solver: ``"native"``, batched and certified, or ``"conic"``, the slow oracle.
        aggregate: merge repeated arms, so that a fixed arm set costs the same at every time.
        settings: of :class:`torchglb.policies.Policy`.
    """

    #: whether the arm that is played is the one with the largest bound of the set
    plays_largest_bound: ClassVar[bool] = True

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        solver: SolverName = "native",
        aggregate: bool = False,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.solver = check_choice("solver", solver, SOLVERS)
        program = AnchoredProgram if self.device.type == "cpu" else RefitProgram
        self._program = self._new_program(program, aggregate)
        self._decided: Height | None = None  # the level of this round, once a choice rests on it

    def _new_program(
        self, kind: type[AnchoredProgram] | type[RefitProgram], aggregate: bool
    ) -> AnchoredProgram | RefitProgram:
        return kind(
            self.family,
            self.domain,
            tuple(self.batch_shape),
            level_tol=LEVEL_TOLERANCE if self.dtype == torch.float64 else 1e-4,
            aggregate=aggregate,
            validate=False,  # the public doors have looked already
            dtype=self.dtype,
            device=self.device,
        )

    # ---- what a policy supplies ----------------------------------------------------------

    def _ridge(self) -> float:
        """lambda of the ridge term in L; it may change with the number of observations."""
        return 0.0

    @abstractmethod
    def _height(self) -> Height:
        """Where the level is; called once per round, before the choice."""

    def _asked_height(self) -> Height:
        """The same without a trace, for questions."""
        return self._height()

    # ---- the set of this round -----------------------------------------------------------

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set over which the policy is optimistic: an immutable snapshot."""
        self._look_at_boundary()
        minimum = self._program.minimum(self._ridge())
        level = self._level(minimum)
        return LikelihoodRatioSet(self._likelihood(), self.domain, level, minimum.theta)

    def _observed(self) -> History | None:
        return self._program.history

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._program.passes

    def _likelihood(self) -> NegativeLogLikelihood:
        return NegativeLogLikelihood.of(
            self.family, self._program.history, regularization=self._ridge()
        )

    def _known_height(self) -> Height:
        """That of this round's choice, if there was one."""
        return self._asked_height() if self._decided is None else self._decided

    def _level(self, minimum: Estimate) -> Tensor:
        """B, ``(*B)``, and never below the minimum."""
        height = self._known_height()
        level = height.level
        if level is None:
            assert height.radius is not None
            level = round_up(minimum.loss.double() + height.radius, self.dtype)
        return torch.maximum(level, self._least(minimum))

    def _least(self, minimum: Estimate) -> Tensor:
        """The lowest level whose set is certainly not empty."""
        return minimum.loss + self._program.level_tol * (1.0 + minimum.loss.abs())

    # ---- choosing ------------------------------------------------------------------------

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm with the largest ``h(x)``, certified."""
        arms = self._check_arms(arms)
        if self.solver != "native":
            return self._scores(arms).argmax(-1)
        self._decided = self._height()
        return self._ask(self._program.argmax, arms).index

    def _ask(self, question: Callable[..., Choice], arms: Tensor, **options: Any) -> Choice:
        """What a program's ``argmax`` or ``bound`` says; an empty set is widened first."""
        height, ridge = self._known_height(), self._ridge()
        radius, level = height.radius, height.level
        options |= {"regularization": ridge, "throw": False}  # bounds hold wherever a solve stopped
        choice = question(arms, radius, level=level, **options)
        if level is not None and not wait_for_all(choice.status == Status.CONVERGED):
            wider = torch.maximum(level, self._least(self._program.minimum(ridge)))
            if not wait_for_all(wider <= level):
                choice = question(arms, level=wider, **options)
        return choice

    @torch.no_grad()
    def select_ball(self) -> Tensor:
        """``theta/|theta|`` for the longest theta of the set.

        Certified for d <= 2; beyond, the best local maximum from 4 d + 1 starts
        (:func:`torchglb.ucb.argmax_ball`).
        """
        choice = argmax_ball(self._sublevel(), throw=False, validate=False)
        unknown = torch.isnan(choice.theta).any(-1)  # no point of the set was found
        raise_unless_converged(torch.where(unknown, choice.status, 0), f"the arm of {self.name}")
        return towards(choice.theta)

    def _sublevel(self) -> SublevelProgram:
        level = self._level(self._program.minimum(self._ridge()))
        return SublevelProgram(self._likelihood(), self.domain, level)

    @torch.no_grad()
    def bounds(self, x: ArrayLike, refine: bool = True) -> Interval:
        """Certified ends of ``<x, theta>`` over the set; from a copy of what is carried."""
        return self._ends(self._program.fork(), self._check_point(x), refine)

    def _ends(self, program: AnchoredProgram | RefitProgram, x: Tensor, refine: bool) -> Interval:
        both = torch.stack([x, -x], dim=-2)
        tol = BOUND_TOLERANCE if refine else UNREFINED
        upper = self._ask(program.bound, both, tol=tol).upper
        return Interval(-upper[..., 1], upper[..., 0])

    def tracker(self) -> BoundTracker:
        """Bounds in every round, from anchors that follow the arms that are asked about."""
        return _ExactTracker(self)

    @torch.no_grad()
    def _scores(self, arms: Tensor) -> Tensor:
        """Certified upper bounds on ``h(x)``, closed to the solver's tolerance."""
        minimum = self._program.minimum(self._ridge())
        program = SublevelProgram(self._likelihood(), self.domain, self._level(minimum))
        options: dict[str, Any] = {"throw": False}  # the bounds hold wherever a solver stopped
        if self.solver == "native":
            options |= {"center": minimum.theta, "validate": False}
        return support(program, arms, self.solver, **options).upper

    # ---- learning and saving -------------------------------------------------------------

    def _append(self, x: Tensor, r: Tensor, weight: Tensor | None = None) -> None:
        self._program.append(x, r, weight)
        self._decided = None

    def _state(self) -> dict[str, Any]:
        decided = self._decided
        kept = None if decided is None else {k: _copied(getattr(decided, k)) for k in SAVED}
        return {"program": self._program.state_dict(), "decided": kept}

    def _load(self, state: Mapping[str, Any]) -> None:
        program, decided = state["program"], state["decided"]
        kept = None if decided is None else Height(*(_copied(decided[k]) for k in SAVED))
        self._program.load_state_dict(program)
        self._decided = kept


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class _ExactTracker(BoundTracker):
    """Follows both ends of the arms that come back, beside the policy."""

    def __init__(self, policy: ExactPolicy) -> None:
        super().__init__(policy)
        program = policy._program
        self._exact, self._program = policy, program.beside(TRACKED)

    @torch.no_grad()
    def bounds(self, x: ArrayLike, refine: bool = True) -> Interval:
        return self._exact._ends(self._program, self._exact._check_point(x), refine)

    def state_dict(self) -> dict[str, Any]:
        state = self._program.state_dict()
        del state["history"]  # the policy has it
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._program.load_state_dict(state, history=False)


class LikelihoodRatioPolicy(ExactPolicy):
    """Optimism over ``{L(theta) - L(theta_hat) <= beta^2}`` for any radius of the library.

    Args:
        radius: a name of :func:`torchglb.radii.by_name` or a :class:`torchglb.radii.Radius`.
        forgetting: :class:`torchglb.Discount`, :class:`torchglb.Window` or a table such as
            ``{"window": 200}``, for a theta* that changes (:mod:`torchglb.forgetting`: the set of
            each time is built with ``delta/(t (t + 1))``). Each round then costs passes over the
            rows that count. Repeated arms are not merged.
        settings: of :class:`ExactPolicy`.
    """

    takes_weights = True

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius,
        forgetting: ForgettingGiven | None = None,
        **settings: Unpack[ExactSettings],
    ) -> None:
        self.forgetting = as_forgetting(forgetting)
        super().__init__(family, domain, delta, **settings)
        self._sequence = ConfidenceSequence(
            self.family,
            self.domain,
            self.delta,
            radius,
            batch_shape=tuple(self.batch_shape),
            estimator=ProgramEstimate(self._program),
            dtype=self.dtype,
            device=self.device,
        )
        self.radius = self._sequence.radius
        self._counts = self._sequence.counts_rows
        exact = self.solver == "native" and self.dtype is torch.float64
        #: whether a choice may be one compiled call
        self._decides = exact and isinstance(self._program, AnchoredProgram)

    def _new_program(
        self, kind: type[AnchoredProgram] | type[RefitProgram], aggregate: bool
    ) -> AnchoredProgram | RefitProgram:
        program = super()._new_program(kind, aggregate)
        if self.forgetting is None:
            return program
        return RefitProgram(
            self.family,
            self.domain,
            tuple(self.batch_shape),
            level_tol=program.level_tol,
            forgetting=self.forgetting,
            validate=False,
            dtype=self.dtype,
            device=self.device,
        )

    def _observed(self) -> History | None:
        confined = self.radius.confined and self.forgetting is None
        return super()._observed() if confined else None

    def _height(self) -> Height:
        return self._sequence.height(advance=True)

    def _asked_height(self) -> Height:
        return self._sequence.height()

    def select(self, arms: ArrayLike) -> Tensor:  # noqa: D102
        if self._decides:
            assert isinstance(self._program, AnchoredProgram)
            longest = self._longest if self.validate else 0.0
            if self._counts:  # whoever asks for this height later finds it again
                index = self._program.decide(arms, self._sequence.radius_of_rows(), longest)
                return super().select(arms) if index is None else index
            mark, height = self._sequence.mark(), self._height()
            index, levels = None, height.levels
            if levels is None and is_plain(height.level):
                levels = height.level.numpy().reshape(-1)
            if levels is not None or height.radius is not None:
                index = self._program.decide(arms, height.radius, longest, levels)
            if index is not None:
                self._decided = height
                return index
            self._sequence.reset(mark)  # arms that are going to be refused leave no trace
        return super().select(arms)

    def _learn_at_once(self, x: ArrayLike, r: ArrayLike) -> int:
        longest = self._longest if self.validate else 0.0
        if self._counts and isinstance(self._program, AnchoredProgram):
            rows = self._program.append_at_once(x, r, longest)
        else:
            rows = self._sequence.learn_at_once(x, r, longest)
        if rows:
            self._decided = None
        return rows

    def _update(self, x: Tensor, r: Tensor) -> None:
        self._update_weighted(x, r, None)

    def _update_weighted(self, x: Tensor, r: Tensor, w: Tensor | None) -> None:
        """A radius that counts rows counts each as one, which is valid for weights in [0, 1]."""
        if self._counts or self.forgetting is not None:
            self._append(x, r, w)
        else:
            self._sequence.learn(x, r, w)
            self._decided = None

    def _state(self) -> dict[str, Any]:
        # a radius that counts rows has none
        return super()._state() | {"sums": {} if self._counts else self._sequence.sums()}

    def _load(self, state: Mapping[str, Any]) -> None:
        sums = None if self._counts else self._sequence.checked_sums(state["sums"])
        super()._load(state)
        if sums is not None:
            self._sequence.resume(sums)


def named_radius(radius: str | Radius) -> Radius:
    """The radius itself, or the one that a name stands for."""
    found = by_name(radius) if isinstance(radius, str) else radius
    if not isinstance(found, Radius):
        raise refuse("radius", "a name or a torchglb.radii.Radius", kind_of(radius))
    return found
