"""Confidence sequences: honest intervals at all times, from adaptively collected data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import settled
from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_choice,
    check_same,
    check_shape,
    refuse,
    within_norm,
)
from torchglb.contrasts import DeclaredContrasts
from torchglb.domain import Ball
from torchglb.errors import BoundaryWarning, SolverError
from torchglb.families import GLMFamily
from torchglb.forgetting import ForgettingHistory, as_forgetting
from torchglb.history import History
from torchglb.identity import check_belongs, describe
from torchglb.inference.tests import TestResult
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import MLEResult, minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap, raise_unless_converged
from torchglb.radii import (
    Evaluation,
    Problem,
    Radius,
    automatic,
    by_name,
    regularization_for,
    require_weights,
    theorem32,
)
from torchglb.recording import is_transformed, without_autocast
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

#: the loss of the estimate may lie this far above the minimum, relative to ``1 + |loss|``
NEAR = 1e-4


class ConfidenceSequence:
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
        ellipsoid: ``"fixed_point"`` (sharper) or ``"theorem"`` (as printed).
        aggregate: merge repeated feature vectors.
        running: intersect the set now with those at the times 1, 2, 4, ..., which costs no delta
            (one event holds all of them) and O(log n) times the work of a bound. Sets are kept at
            the first update after each of these times.
        forgetting: :class:`torchglb.Discount` or :class:`torchglb.Window`, for a theta* that
            changes: old rows count less or not at all. The set after t - 1 rows is then built with
            ``delta/(t (t + 1))``, and says where a theta* is that did not change within the rows
            that count (:mod:`torchglb.forgetting`). Not together with ``aggregate`` or ``running``.
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

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float,
        radius: str | Radius = "pac-bayes",
        ellipsoidal: bool = False,
        batch_shape: tuple[int, ...] = (),
        *,
        ellipsoid: str = "fixed_point",
        aggregate: bool = False,
        running: bool = False,
        forgetting: Any = None,
        queries: Any = None,
        contrasts: Any = None,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if radius == "auto":
            self.radius: Radius = automatic(family)
        else:
            self.radius = by_name(radius) if isinstance(radius, str) else radius
        if not isinstance(self.radius, Radius):
            raise refuse("radius", "a name or a torchglb.radii.Radius", type(radius).__name__)
        self.problem = Problem(family, domain, delta, batch_shape, dtype, device)
        self.family, self.domain, self.delta = family, domain, delta
        self.event = Event(delta)
        self.ellipsoidal = bool(ellipsoidal)
        self.ellipsoid = check_choice("ellipsoid", ellipsoid, ("fixed_point", "theorem"))
        if self.ellipsoidal:
            _ = self.problem.self_concordance  # refuses a family that has none
            if not self.radius.confined:
                raise refuse("radius", "one that keeps to the ball, for ellipsoids", self.radius)
        self.forgetting = as_forgetting(forgetting)
        kept: dict[str, Any] = {"validate": validate, "dtype": dtype, "device": device}
        if self.forgetting is None:
            self.history = History(domain.dim, batch_shape, aggregate, family=family, **kept)
        elif aggregate or running:
            other = "aggregate" if aggregate else "running"
            raise refuse(other, "False together with forgetting", True)
        else:
            self.history = ForgettingHistory(self.forgetting, family, domain, batch_shape, **kept)
        self._state = self.radius.init(self.problem)
        self._start: Tensor | None = None  # the last estimate, where the next fit begins
        self._warned = False  # of a ball that is too small
        self._fresh: tuple[LikelihoodRatioSet | EllipsoidSet, Evaluation] | None = None
        self._running = RunningBounds(self.history, queries) if running else None
        if queries is not None and not running:
            raise refuse("queries", "None without running=True", type(queries).__name__)
        self._declared = None if contrasts is None else self._declare(contrasts, running)

    def _declare(self, contrasts: Any, running: bool) -> DeclaredContrasts:
        if not self.radius.confined:
            raise refuse("radius", "one that keeps to the ball, for contrasts", self.radius)
        for name in ("ellipsoidal", "aggregate"):
            if self.ellipsoidal if name == "ellipsoidal" else self.history.aggregate:
                raise refuse(name, "False with contrasts, which need every row", True)
        return DeclaredContrasts(self.problem, contrasts, self.delta, running=running)

    def __len__(self) -> int:
        """The number of observations so far."""
        return len(self.history)

    @without_autocast
    def update(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds one observation, ``x (*B, d)``, or many, ``x (*B, k, d)``.

        Args:
            x: features of norm at most 1.
            r: rewards.
            weight: in [0, 1], fixed before the reward was seen; 1 if left out.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        history = self.history
        if self._running is not None and self._running.snapshots.is_due(len(self)):
            self._keep_snapshot(self._running)
        given, x = x, as_tensor("x", x, dtype=history.dtype, device=history.device)
        if history.validate:
            x = within_norm(x, given, history.max_norm)
        r = as_tensor("r", r, dtype=history.dtype, device=history.device)
        if weight is not None:
            weight = as_tensor("weight", weight, dtype=history.dtype, device=history.device)
            if history.validate:
                checks = ValueChecks()
                require_weights(checks, weight)
                checks.settle()
        mark = history.mark()
        try:
            history.append(x, r, weight)
            batch = tuple(history.batch_shape)
            if x.ndim == len(batch) + 1:
                x, r = x[..., None, :], r[..., None]
                weight = None if weight is None else weight.expand(batch)[..., None]
            elif weight is not None:
                weight = weight.expand(r.shape)
            state = self._state
            if self.forgetting is None:
                state = self.radius.update(self.problem, state, x, r, weight)
        except BaseException:  # rows that the radius has not seen would make its level wrong
            history.reset(mark)
            raise
        self._state, self._fresh = state, None

    def current(self) -> LikelihoodRatioSet | EllipsoidSet | RunningSet:
        """The set now: an immutable snapshot. Costs a fit, and the passes of the radius."""
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
        self, name: str | None = None, *, simultaneous: bool = False, scale: str = "linear"
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

    def test_contrasts(self, value: Any, relation: str = "==") -> TestResult:
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

    def evaluation(self) -> Evaluation:
        """The level and radius now, with the shares of delta that were spent."""
        return self._current()[1]

    @without_autocast
    def _current(self) -> tuple[LikelihoodRatioSet | EllipsoidSet, Evaluation]:
        if self._fresh is not None:
            return self._fresh
        likelihood = NegativeLogLikelihood.of(self.family, self.history)
        problem, state, start = self._rows_that_count(likelihood)
        # ellipsoids depend on theta_hat itself, likelihood-ratio sets on its loss alone
        loss_only = not self.ellipsoidal
        fit = minimize_likelihood(
            likelihood, self.domain, start=start, throw=False, loss_only=loss_only
        )
        # an estimate short of the tolerance makes the set a little larger, never wrong
        near = fit.gap <= NEAR * (1.0 + fit.loss.detach().abs())
        raise_unless_converged(torch.where(near, int(Status.CONVERGED), fit.status), "the estimate")
        known = fit.estimate(hessian=True)
        found = self.radius.evaluate(problem, state, likelihood, known)
        if self.forgetting is None:
            self._start, self._state = fit.theta.detach(), found.state
        confined = self.radius.confined
        center = fit.theta if confined else self._inside(likelihood, fit, found.level)
        # a share of delta for a Lipschitz constant is part of the level in another way
        log_failure = None if found.delta_lipschitz else problem.log_failure
        given = (likelihood, self.domain, found.level, center, confined, self.event, log_failure)
        outer = (
            LikelihoodRatioSet(*given)
            if found.refinement is None
            else CentredSet(*given, found.refinement)
        )
        if confined and likelihood.X.is_cpu and not is_transformed(fit.theta):
            self._look_at_boundary(outer)
        current = self._as_ellipsoid(outer, fit, found.radius) if self.ellipsoidal else outer
        self._fresh = current, found
        return self._fresh

    def _rows_that_count(
        self, likelihood: NegativeLogLikelihood
    ) -> tuple[Problem, dict[str, Tensor], Tensor | None]:
        """The problem, what the radius knows of the rows, and where a fit may start.

        Where rows are forgotten: as if those that count had come alone, at the delta of now.
        """
        if not isinstance(self.history, ForgettingHistory):
            return self.problem, self._state, self._start
        problem = self.problem.at_time(len(self) + 1)
        rows = (likelihood.X, likelihood.r, likelihood.w)
        state = self.radius.update(problem, self.radius.init(problem), *rows)
        return problem, state, self.history.start()

    def _look_at_boundary(self, outer: LikelihoodRatioSet) -> None:
        """Warns, once, where the rows refute ``|theta*| <= S``."""
        if self._warned or outer.on_boundary is None or not bool(outer.on_boundary.any()):
            return
        self._warned = True
        warnings.warn(
            f"the observations refute |theta*| <= S = {describe(self.domain.radius)} at level "
            f"{self.delta:g}: intervals within this ball are wrong. Take a larger S, or "
            'radius="gaussian-prior", which needs none.',
            BoundaryWarning,
            stacklevel=4,
        )

    def _inside(self, likelihood: NegativeLogLikelihood, fit: MLEResult, level: Tensor) -> Tensor:
        """The estimate; where the set has left the ball, the minimiser over a larger one."""
        outside = fit.loss > level
        if settled(~outside):
            return fit.theta
        free = minimize_likelihood(
            likelihood,
            enlarged(self.domain, level),
            start=fit.theta.detach(),
            throw=False,
            loss_only=True,
        )
        return torch.where(outside[..., None], free.theta, fit.theta)

    def _as_ellipsoid(
        self, outer: LikelihoodRatioSet, fit: MLEResult, radius: Tensor
    ) -> EllipsoidSet:
        if self.ellipsoid == "fixed_point":
            return outer.ellipsoid()
        S = self.domain.radius_like(radius).expand(radius.shape)
        concordance = self.problem.self_concordance.to(radius.dtype)
        lam = torch.as_tensor(regularization_for(S, concordance))
        gap = frank_wolfe_gap(fit.theta, fit.gradient, S)
        gamma = theorem32(radius, S, concordance, lam, gap)
        eye = torch.eye(self.domain.dim, dtype=radius.dtype, device=radius.device)
        shape = fit.hessian + lam[..., None, None] * eye
        return EllipsoidSet(self.family, self.domain, fit.theta, shape, gamma, event=self.event)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, as plain tensors, numbers and words."""
        return {
            "history": self.history.state_dict(),
            "radius": {name: t.detach().clone() for name, t in self._state.items()},
            "start": None if self._start is None else self._start.clone(),
            "settings": self._settings(),
            "running": None if self._running is None else self._running.state_dict(self.history),
            "contrasts": None if self._declared is None else self._declared.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape, problem or radius."""
        missing = {"history", "radius", "start", "settings"} - set(state)
        if missing:
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        check_belongs("state['settings']", state["settings"], self._settings())
        if set(state["radius"]) != set(self._state):
            expected = f"the entries {sorted(self._state)}"
            raise refuse("state['radius']", expected, sorted(state["radius"]))
        for name, old in self._state.items():
            label = f"state['radius'][{name!r}]"
            check_same(label, state["radius"][name], "the sequence", old)
            check_shape(label, state["radius"][name], old.shape)
        start = state["start"]
        if start is not None:
            history = self.history
            as_tensor("state['start']", start, dtype=history.dtype, device=history.device)
            check_shape("state['start']", start, (*history.batch_shape, self.domain.dim))
            start = start.clone()
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
        self.history.load_state_dict(state["history"])
        if self._running is not None:
            try:
                self._load_running(self._running, running)
            except BaseException:
                self.history.reset(mark)
                raise
        self._state = {name: t.clone() for name, t in state["radius"].items()}
        self._start, self._fresh = start, None
        if declared is not None:
            declared.load(best)

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
        }
