"""Confidence sequences: honest intervals at all times, from adaptively collected data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import wait_for_all
from torchglb.checks import (
    as_device,
    as_tensor,
    check_choice,
    check_entries,
    check_flag,
    check_probability,
    kind_of,
    refuse,
)
from torchglb.choices import ELLIPSOIDS, EllipsoidKind, Relation, ScaleName
from torchglb.contrasts import DeclaredContrasts
from torchglb.domain import Ball
from torchglb.errors import SolverError
from torchglb.estimate import Estimate
from torchglb.families import GLMFamily
from torchglb.forgetting import ForgettingGiven, ForgettingHistory, as_forgetting
from torchglb.identity import check_belongs, describe, reading_state
from torchglb.inference.estimation import EstimatorSettings, Refit, RunningEstimate
from torchglb.inference.level import GrowingLevel
from torchglb.inference.tests import TestResult
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.radii import (
    NAMED,
    Evaluation,
    Problem,
    Radius,
    automatic,
    by_name,
    radius_refuted,
    warn_of_boundary,
)
from torchglb.recording import is_transformed, without_autocast
from torchglb.rows.checks import as_rows, as_weights, within_norm
from torchglb.rows.history import History
from torchglb.sets import (
    CentredSet,
    EllipsoidSet,
    Event,
    Interval,
    LikelihoodRatioSet,
    Owner,
    RunningBounds,
    RunningSet,
)
from torchglb.sets.likelihood_ratio import enlarged
from torchglb.turns import TakesTurns

#: fits anew when asked
REFIT = Refit()


class ConfidenceSequence(GrowingLevel, TakesTurns):
    """Sets ``C_t`` with ``P(theta* in C_t for all t at once) >= 1 - delta``.

    Features may be chosen in any way from the past (bandits, active learning, peeking). Rows may
    come late and out of order, as long as that does not depend on their rewards, given the feature
    and the past: where failures are reported later than successes, the rows that are in at any time
    hold too many successes, and no likelihood sees it. Wait then until all rewards of a round are
    due, and add those rows together. The guarantee holds at every time you look.

    Features and rewards that require grad keep their graph: through the history, the estimate, the
    radius and the bound, intervals are then differentiable functions of them. (The radii that rest
    on a posterior centre it exactly in that case, with a few passes in every evaluation.) From rows
    that do not span the features the estimate is not unique, and has no derivative: an ellipsoid
    around it is refused, while a likelihood-ratio set depends on its loss alone, which has one.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        delta: the failure probability.
        radius: ``"pac-bayes"`` (the default: tight, any d), ``"mixture"`` (tightest, d <= 3),
            ``"centred"`` (narrower than both from some hundred rows on, up to 7% wider before),
            ``"auto"`` (a centred radius that is at most some 4% wider), ``"mean-loss"``,
            ``"lipschitz"`` (Theorem 3.1 with Table 1), ``"gaussian-prior"`` (needs no bound on
            |theta*|), ``"covering"``, or a :class:`torchglb.radii.Radius`.
        ellipsoidal: give ellipsoids (Theorem 3.2) instead of likelihood-ratio sets.
        batch_shape: ``*B``, sequences that advance together.
        estimator: :class:`torchglb.Refit` (a certified fit when asked, differentiable) or
            :class:`torchglb.Incremental` (carried from row to row and from question to question,
            for those who ask often).
        ellipsoid: ``"fixed_point"`` (sharper) or ``"theorem"`` (as printed).
        aggregate: merge repeated feature vectors.
        running: intersect the set now with those at the times 1, 2, 4, ..., which costs no delta
            (one event holds all of them) and O(log n) times the work of a bound. Sets are kept at
            the first update after each of these times.
        forgetting: :class:`torchglb.Discount` or :class:`torchglb.Window`, for a theta* that
            changes: old rows count less or not at all. The set after t - 1 rows is then built with
            ``delta/(t (t + 1))``, and says where a theta* is that did not change within the rows
            that count (:mod:`torchglb.forgetting`); e-values are divided by ``t (t + 1)``. Not with
            ``aggregate``, ``running`` or ``contrasts``.
        queries: with ``running``, directions ``(K, d)`` or ``(*B, K, d)`` (arms, or differences of
            arms) whose best bounds so far :meth:`look` returns.
        contrasts: directions ``(m, d)`` or ``(*B, m, d)``, or a mapping from names to them, that
            are named before the rewards are seen: :meth:`contrast` has intervals for each that do
            not pay for the dimension (:class:`torchglb.ContrastSequence`).
        validate: look at the values of what comes in.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> sequence = ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([0.6, 0.8], 1.0)
        >>> sequence.current().contains(torch.zeros(2).double())
        tensor(True)
    """

    in_turn = (
        "update",
        "current",
        "look",
        "contrast",
        "test_contrasts",
        "on_boundary",
        "evaluation",
        "estimate",
        "state_dict",
        "load_state_dict",
    )

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float,
        radius: str | Radius = "pac-bayes",
        ellipsoidal: bool = False,
        batch_shape: tuple[int, ...] = (),
        *,
        estimator: EstimatorSettings | RunningEstimate = REFIT,
        ellipsoid: EllipsoidKind = "fixed_point",
        aggregate: bool = False,
        running: bool = False,
        forgetting: ForgettingGiven | None = None,
        queries: ArrayLike | None = None,
        contrasts: ArrayLike | Mapping[str, ArrayLike] | None = None,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(radius, str):
            check_choice("radius", radius, ("auto", *NAMED))
            radius = automatic(family) if radius == "auto" else by_name(radius)
        if not isinstance(radius, Radius):
            raise refuse("radius", "a name or a torchglb.radii.Radius", kind_of(radius))
        delta = check_probability("delta", delta)
        device = None if device is None else as_device(device)
        problem = Problem(family, domain, delta, batch_shape, dtype, device)
        if 0 in problem.batch_shape:
            raise refuse("batch_shape", "at least one problem", problem.batch_shape)
        check_choice("ellipsoid", ellipsoid, ELLIPSOIDS)
        self.ellipsoidal = check_flag("ellipsoidal", ellipsoidal)
        running = check_flag("running", running)
        if self.ellipsoidal:
            _ = problem.self_concordance  # refuses a family that has none
            if not radius.confined:
                raise refuse("radius", "one that keeps to the ball, for ellipsoids", radius)
        self.forgetting = as_forgetting(forgetting)
        self._estimator = describe(estimator)
        if isinstance(estimator, EstimatorSettings):
            kept: dict[str, Any] = {"validate": validate, "dtype": dtype, "device": device}
            if self.forgetting is None:
                rows = History(domain.dim, batch_shape, aggregate, family=family, **kept)
            elif aggregate or running:
                other = "aggregate" if aggregate else "running"
                raise refuse(other, "False together with forgetting", True)
            else:
                rows = ForgettingHistory(self.forgetting, family, domain, batch_shape, **kept)
            estimator = estimator.begin(domain, rows)
        if not isinstance(estimator, RunningEstimate):
            raise refuse("estimator", "Refit() or Incremental()", kind_of(estimator))
        super().__init__(problem, radius, estimator, ellipsoid)
        self.event = Event(delta)
        self._warned = False  # of a ball that is too small
        self._running = RunningBounds(self.history, queries) if running else None
        if queries is not None and not running:
            raise refuse("queries", "None without running=True", type(queries).__name__)
        self._declared = None if contrasts is None else self._declare(contrasts, running, aggregate)

    def _declare(
        self, contrasts: ArrayLike | Mapping[str, ArrayLike], running: bool, aggregate: bool
    ) -> DeclaredContrasts:
        if not self.radius.confined:
            raise refuse("radius", "one that keeps to the ball, for contrasts", self.radius)
        if self.forgetting is not None:  # its sets hold at single times, with other weights
            raise refuse("forgetting", "None with contrasts, which need every row", self.forgetting)
        for name, given in (("ellipsoidal", self.ellipsoidal), ("aggregate", aggregate)):
            if given:
                raise refuse(name, "False with contrasts, which need every row", True)
        return DeclaredContrasts(self.problem, contrasts, self.delta, running=running)

    def update(
        self,
        x: ArrayLike,
        r: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds one observation, ``x (*B, d)``, or many, ``x (*B, k, d)``.

        Args:
            x: features of norm at most 1.
            r: rewards.
            weight: in [0, 1], fixed before the reward was seen; 1 if left out.
            mask: booleans shaped like ``r``: False where there is no reward. Such a row gets weight
                0, whatever ``x`` and ``r`` are there. Whether a reward is there must not depend on
                it.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        history = self.history
        if self._running is not None and self._running.snapshots.is_due(len(self)):
            self._keep_snapshot(self._running)
        dtype, device = history.dtype, history.device
        features = as_tensor("x", x, dtype=dtype, device=device)
        r = as_tensor("r", r, dtype=dtype, device=device)
        if weight is None and mask is None and not self._forgets:
            # the radius is shown plain rows when it is asked, many at a time
            longest = history.longest_row if history.validate else 0.0
            if self.fitted.append_at_once(features, r, longest):
                return
        self._learn_any(x, features, r, weight, mask)

    @without_autocast
    def _learn_any(
        self, given: object, x: Tensor, r: Tensor, weight: ArrayLike | None, mask: ArrayLike | None
    ) -> None:
        """:meth:`update` for rows of any kind; ``given`` is what x was made of."""
        history = self.history
        batch = tuple(history.batch_shape)
        rows, rewards = as_rows(x, r, batch, history.dim)
        w = None
        if weight is not None or mask is not None:
            w = as_weights(rewards, weight, mask, batch, values=history.validate)
        if w is not None and mask is not None:
            low, high = self.family.reward_range
            rows = torch.where((w > 0)[..., None], rows, 0.0)
            rewards = torch.where(w > 0, rewards, min(max(0.0, low), high))
        if history.validate:
            rows = within_norm(rows, given, history.max_norm)
        self.learn(rows, rewards, w)

    def current(self) -> LikelihoodRatioSet | EllipsoidSet | RunningSet:
        """The set now: an immutable snapshot. Costs a fit, and the passes of the radius.

        A question leaves no trace with ``Refit()``: later answers are, bit by bit, those of a
        sequence that was not asked. With ``Incremental()`` the next question starts from what this
        one has found (two to three times as fast from 10^4 rows on), and its answer can differ by
        what the tolerances leave open; both hold.
        """
        now = self._current()[0]
        return now if self._running is None else self._running.intersect(now)

    def look(self) -> Interval:
        """The best bounds so far on ``<x, theta*>`` for the declared ``queries``, ``(*B, K)``.

        Over all calls of this method, and the times at which sets were kept. Lower above upper
        proves that theta* was missed, which has probability at most delta.
        """
        if self._running is None:
            raise refuse("look", "a sequence with running=True and queries", "running=False")
        return self._running.look(self.current())

    def contrast(
        self, name: str | None = None, *, simultaneous: bool = False, scale: ScaleName = "linear"
    ) -> Interval:
        """Intervals for the declared ``contrasts``, which do not pay for the dimension.

        Each holds at all times with probability 1 - delta, by itself: a statement beside that of
        :meth:`current`, from the same rows (nine tenths of delta are spent on the contrast, one on
        a larger joint set, so with few rows the interval of :meth:`current` can be shorter). For a
        direction that was picked after looking at the rewards, only :meth:`current` holds.

        Args:
            name: one of them, ``(*B)``; all if left out, ``(*B, m)``.
            simultaneous: all at once with probability 1 - delta, instead of each by itself.
            scale: ``"linear"``, or ``"mean"`` where every contrast is a feature vector.

        Example:
            >>> import torchglb as glb
            >>> sequence = ConfidenceSequence(
            ...     glb.Gaussian(), glb.Ball(2, 3.0), 0.05, contrasts={"B-A": [-1.0, 1.0]}
            ... )
            >>> sequence.update([[1.0, 0.0], [0.0, 1.0]] * 200, [0.5, 2.5] * 200)
            >>> lower, upper = sequence.contrast("B-A")
            >>> bool((lower > 1.5) & (upper < 2.5))
            True
        """
        declared = self._with_contrasts()
        place = ... if name is None else (..., declared.place(name))
        found = declared.current(self._contrast_region(declared), simultaneous, scale)
        return Interval(found.lower[place], found.upper[place])

    def test_contrasts(self, value: ArrayLike, relation: Relation = "==") -> TestResult:
        """E-values and anytime p-values of ``<c, theta*> = value`` for the declared contrasts.

        Args:
            value: a number, or ``(m)`` or ``(*B, m)``.
            relation: ``"=="``, ``"<="`` or ``">="``.
        """
        declared = self._with_contrasts()
        return declared.test(self._contrast_region(declared), value, relation)

    def _with_contrasts(self) -> DeclaredContrasts:
        if self._declared is None:
            raise refuse("contrast", "a sequence with contrasts={name: direction}", "none declared")
        return self._declared

    def _contrast_region(self, declared: DeclaredContrasts) -> LikelihoodRatioSet:
        region = self._current()[0]
        assert isinstance(region, LikelihoodRatioSet)
        return region.at_delta(declared.joint_delta)

    def _keep_snapshot(self, running: RunningBounds) -> None:
        """Keeps the set of the rows so far; one that cannot be had is not needed either."""
        try:
            running.keep(len(self), self._current()[0])
        except SolverError:
            running.snapshots.skip(len(self))

    def on_boundary(self) -> Tensor | None:
        """Whether the rows refute ``|theta*| <= S`` at level delta, ``(*B)``.

        Then S is too small, and the sets are wrong (:func:`torchglb.radii.radius_refuted`). None
        where S is no part of the set, or rows are forgotten.
        """
        if not self.radius.confined or self._forgets:
            return None
        likelihood = self._likelihood()
        theta = self.fitted.copy().estimate(likelihood, loss_only=True).theta
        return radius_refuted(likelihood, self.domain, theta, self.delta)

    def evaluation(self) -> Evaluation:
        """The level and radius now, with the shares of delta that were spent."""
        found = self._current()[1]
        # the others are those of the set, and of the sequence
        level, radius = found.level.clone(), found.radius.clone()
        state = {name: t.clone() for name, t in found.state.items()}
        return found._replace(level=level, radius=radius, state=state)

    @without_autocast
    def _current(self) -> tuple[LikelihoodRatioSet | EllipsoidSet, Evaluation]:
        self._catch_up()
        if self._fresh is not None:
            return self._fresh
        likelihood, estimator = self._likelihood(), self.fitted.copy()
        problem, state = self._rows_that_count(likelihood)
        # ellipsoids depend on theta_hat itself, likelihood-ratio sets on its loss alone
        fit = estimator.estimate(likelihood, loss_only=not self.ellipsoidal)
        found = self.radius.evaluate(problem, state, likelihood, fit)
        if estimator.carries:
            self.fitted, self._state = estimator, found.state
        confined = self.radius.confined
        center = fit.theta if confined else self._inside(likelihood, fit, found.level)
        # a share of delta for a Lipschitz constant is part of the level in another way; where rows
        # are forgotten, what all times share stays in the level: E_t/(t (t + 1)) adds up to 1
        log_failure = None if found.delta_lipschitz else self.problem.log_failure
        given = (likelihood, self.domain, found.level, center, confined, self.event, log_failure)
        outer = (
            LikelihoodRatioSet(*given)
            if found.refinement is None
            else CentredSet(*given, found.refinement)
        )
        if confined and likelihood.X.is_cpu and not is_transformed(fit.theta):
            self._look_at_boundary(outer)
        current = outer.ellipsoid(kind=self.ellipsoid) if self.ellipsoidal else outer
        if torch.is_grad_enabled() or not self.history.keeps_graph:
            self._fresh = current, found
        return current, found

    def _look_at_boundary(self, outer: LikelihoodRatioSet) -> None:
        """Warns, once, where the rows refute ``|theta*| <= S``."""
        if self._warned or outer.on_boundary is None or not bool(outer.on_boundary.any()):
            return
        self._warned = True
        warn_of_boundary(self.domain, self.delta, stacklevel=4)

    def _inside(self, likelihood: NegativeLogLikelihood, fit: Estimate, level: Tensor) -> Tensor:
        """The estimate; where the set has left the ball, the minimiser over a larger one."""
        outside = fit.loss > level
        if wait_for_all(~outside):
            return fit.theta
        free = minimize_likelihood(
            likelihood,
            enlarged(self.domain, level),
            start=fit.theta.detach(),
            throw=False,
            loss_only=True,
        )
        return torch.where(outside[..., None], free.theta, fit.theta)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, as plain tensors, numbers and words."""
        return {
            "history": self.history.state_dict(),
            "radius": self.sums(),
            "estimator": self.fitted.state_dict(),
            "settings": self._settings(),
            "running": None if self._running is None else self._running.state_dict(self.history),
            "contrasts": None if self._declared is None else self._declared.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape, problem or radius."""
        check_entries("state", state, ("history", "radius", "estimator", "settings"))
        check_belongs("state['settings']", state["settings"], self._settings())
        sums = self.checked_sums(state["radius"])
        running = state.get("running")
        if running is not None and self._running is None:
            raise refuse("state['running']", "None without running=True", "kept sets")
        declared, kept = self._declared, state.get("contrasts") or {}
        if (declared is None) != (not kept):
            mine = "None" if declared is None else "those of the declared contrasts"
            raise refuse("state['contrasts']", mine, f"the entries {sorted(kept)}")
        best = None if declared is None else declared.checked_state(kept)
        if declared is not None:
            declared.forget_rows()  # of the weights, whatever comes in between
        mark = self.history.mark()
        estimate, bounds = self.fitted.copy(), copy.copy(self._running)
        try:
            with reading_state("a confidence sequence"):
                self.history.load_state_dict(state["history"])
                estimate.load_state_dict(state["estimator"])
                if bounds is not None:
                    self._load_running(bounds, running)
            seen = len(self.history)
        except BaseException:
            self.history.reset(mark)
            raise
        # no call from here on: sums of other rows would make the level wrong
        self.fitted, self._running = estimate, bounds
        self._state, self._seen, self._fresh = sums, seen, None
        if declared is not None:
            declared.best = best

    def _load_running(self, bounds: RunningBounds, state: Mapping[str, Any] | None) -> None:
        """The kept sets of a state; none, if it was saved without."""
        if state is None:
            state = RunningBounds(self.history, bounds.queries).state_dict(self.history)
        owner = Owner(self.family, self.domain, self.event, self.radius.confined)
        bounds.load_state_dict(state, self.history, owner)

    def _settings(self) -> dict[str, Any]:
        """What the carried sums depend on; another would make them wrong."""
        return {
            "family": describe(self.family),
            "S": self.problem.S.tolist(),
            "radius": describe(self.radius),
            "delta": self.delta,
            "forgetting": describe(self.forgetting),
            "estimator": self._estimator,
        }
