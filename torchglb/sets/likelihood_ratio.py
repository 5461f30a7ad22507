"""The likelihood-ratio set ``{theta : |theta| <= S, L(theta) <= B}`` (Theorem 3.1 and its kin)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import wait_for_all
from torchglb.checks import (
    as_like,
    as_tensor,
    check_choice,
    check_probability,
    check_shape,
    check_sizes,
    refuse,
    refuse_flag,
)
from torchglb.choices import ELLIPSOIDS, EllipsoidKind, ProgramSolver, Relation
from torchglb.compiled_rows import losses
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.tests import TestResult, likelihood_ratio_test
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import distance_to_sphere, exit_distance
from torchglb.optim import Status, frank_wolfe_gap, raise_unless_converged
from torchglb.radii import radius_refuted, self_concordance_of
from torchglb.radii.posterior.centred import in_double
from torchglb.radii.posterior.curvature import kept_ellipsoid
from torchglb.radii.posterior.gaussian import holds_on_line
from torchglb.radii.theorems.theorem32 import (
    balanced_ridge,
    contraction,
    fixed_point_around,
    gap_of_rounding,
    largest,
    printed_gamma,
)
from torchglb.recording import is_transformed
from torchglb.rounding import lost_below, moved_up, power_of_two
from torchglb.rows.sums import Expansion
from torchglb.sets.base import ConfidenceSet, Event
from torchglb.sets.ellipsoid import EllipsoidSet, frame_of
from torchglb.ucb import SublevelProgram, SupportResult
from torchglb.ucb.solvers import solver_of
from torchglb.ucb.solvers.settings import BoundSettings, NativeSettings

#: unconfined sets are searched in a ball this many times larger; a bound at its edge is infinite
SEARCHED = 100.0
#: a gap relative to 1 + the bound with which an unconfined search has ended, in float64
CLOSED = 1e-6
#: the second trial of a search along a ray is so far beside the guess, for an end on either side
BESIDE = 0.02
LEVEL_OF_DELTA = "one whose level is log(1/delta) plus what does not depend on delta"


@dataclass(frozen=True, eq=False)
class LikelihoodRatioSet(ConfidenceSet):
    """All theta whose loss is at most a level, within the ball.

    Args:
        likelihood: the loss L of the history.
        domain: the ball.
        level: B, ``(*B)``.
        theta_hat: the centre, a point of the ball with ``L(theta_hat) <= B``; ``(*B, d)``.
        confined: whether the ball is part of the set. Without it (a prior that covers all of R^d)
            the set is searched within 100 S: a bound that is attained out there is infinite, as are
            areas that reach so far. What moves an arm by less than the tolerance on the way there,
            as a feature of 1e-10 that no row has, counts as nothing, also beyond. Where rounding
            leaves more open, a bound is finite only if all of the set is in there for certain.
        event: on which the set is valid.
        log_failure: ``log(1/delta)``, where the level is that plus something free of delta.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 50, [1.0] * 40 + [0.0] * 10)
        >>> interval = sequence.current().interval([1.0, 0.0], scale="mean")
        >>> bool((interval.lower > 0.5) & (interval.upper < 0.95))
        True
    """

    likelihood: NegativeLogLikelihood
    domain: Ball
    level: Tensor
    theta_hat: Tensor
    confined: bool = True
    event: Event | None = None
    log_failure: float | None = None

    def __post_init__(self) -> None:
        shape = self.likelihood.batch_shape
        refuse_flag("level", self.level)
        object.__setattr__(self, "level", as_like("level", self.level, self.likelihood.X))
        check_shape("level", self.level, shape)
        theta = as_like("theta_hat", self.theta_hat, self.likelihood.X)
        object.__setattr__(self, "theta_hat", theta)
        check_shape("theta_hat", self.theta_hat, (*shape, self.domain.dim))

    @property
    def family(self) -> GLMFamily:  # type: ignore[override]
        """The GLM family."""
        return self.likelihood.family

    @property
    def center(self) -> Tensor:
        """theta_hat."""
        return self.theta_hat

    def __getitem__(self, index: int | slice) -> LikelihoodRatioSet:
        """The sets of some elements, by an index of the first batch axis."""
        loss = self.likelihood.rebuild([t[index] for t in self.likelihood.tensors()])
        domain = self.domain.resized(
            self.domain.radius_like(self.level).expand_as(self.level)[index]
        )
        return replace(
            self,
            likelihood=loss,
            domain=domain,
            level=self.level[index],
            theta_hat=self.theta_hat[index],
        )

    @property
    def _uniform_level(self) -> Tensor:
        """``log(1/delta)`` plus what does not depend on delta."""
        return self.level

    def at_delta(self, delta: float) -> LikelihoodRatioSet:
        """The likelihood-ratio set of another failure probability, on an event of its own.

        The level is ``log(1/delta)`` plus what does not depend on delta; refused where it is not.

        Example:
            >>> import torchglb as glb
            >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
            >>> wider = sequence.current().at_delta(0.01)
            >>> round(float(wider.level - sequence.current().level), 6)  # log 5
            1.609438
        """
        if self.log_failure is None:
            raise refuse("set", LEVEL_OF_DELTA, "one that does not say so")
        log_failure = -math.log(check_probability("delta", delta))
        return LikelihoodRatioSet(
            self.likelihood,
            self.domain,
            moved_up(self._uniform_level, log_failure - self.log_failure),
            self.theta_hat,
            self.confined,
            Event(delta),
            log_failure,
        )

    @cached_property
    def _at_center(self) -> Expansion:
        return self.likelihood.expand(self.theta_hat)

    @cached_property
    def on_boundary(self) -> Tensor | None:
        """Whether the rows refute ``|theta*| <= S`` at level delta, ``(*B)``.

        Then the ball is too small and the set within it wrong (:mod:`torchglb.radii.boundary`).
        None where delta is not known, or the ball is not part of the set.
        """
        if self.delta is None or not self.confined or is_transformed(self.theta_hat):
            return None
        return radius_refuted(self.likelihood, self.domain, self.theta_hat, self.delta)

    @property
    def radius(self) -> Tensor:
        """``beta^2 = B - L(theta_hat)``."""
        return self.level - self._at_center.loss

    @cached_property
    def program(self) -> SublevelProgram:
        """The optimistic program over this set."""
        domain = self.domain if self.confined else enlarged(self.domain, self.level)
        return SublevelProgram(self.likelihood, domain, self.level)

    @property
    def _search_radius(self) -> Tensor:
        return self.program.domain.radius_like(self.level).expand(self.level.shape)

    def _slack(self, points: Tensor) -> Tensor:
        """``B - L(theta)`` in the ball, ``-inf`` outside it."""
        known = losses(self.likelihood, points)
        value = self.likelihood.value(points) if known is None else known
        slack = self.level[..., None] - value
        if not self.confined:
            return slack
        limit = self._search_radius[..., None] * (1.0 + 8 * torch.finfo(points.dtype).eps)
        inside = torch.linalg.vector_norm(points, dim=-1) <= limit
        return torch.where(inside, slack, -torch.inf)

    def support(
        self, arms: ArrayLike, solver: ProgramSolver = "native", **options: Unpack[NativeSettings]
    ) -> SupportResult:
        """``max <x, theta>`` over the set for every arm ``(*B, K, d)``.

        Args:
            arms: ``(*B, K, d)``.
            solver: ``"native"``, ``"conic"`` or ``"layer"``, as in :func:`torchglb.support`.
            options: of that solver.
        """
        arms = as_tensor("arms", arms, dtype=self.level.dtype, device=self.level.device)
        if solver == "native":
            feasible = self._at_center.loss <= self.level
            center = torch.where(feasible[..., None], self.theta_hat, torch.nan).detach()
            options.setdefault("center", center)
        if self.confined:
            return solver_of(solver, options).support(self.program, arms)
        return self._search(arms, solver, options)

    def _search(
        self, arms: Tensor, solver: ProgramSolver, options: NativeSettings
    ) -> SupportResult:
        """The support of an unconfined set: a maximiser inside a ball is one over all of R^d."""
        S = self.domain.radius_like(self.level).expand(self.level.shape)
        limit = SEARCHED * torch.maximum(S, torch.linalg.vector_norm(self.theta_hat, dim=-1))
        program = SublevelProgram(self.likelihood, self.domain.resized(limit.detach()), self.level)
        # of short arms every point has the right value, to a tolerance: where would say nothing
        scale = power_of_two(arms)
        found = solver_of(solver, options | {"throw": False}).support(program, arms / scale)
        scale, norm = scale[..., 0], torch.linalg.vector_norm(found.theta, dim=-1)
        beyond = ~(norm < 0.99 * limit[..., None]) & torch.isfinite(found.upper)
        # what is left open in the ball may be any amount beyond it
        least = CLOSED if limit.dtype == torch.float64 else CLOSED**0.5
        closed = found.gap <= max(options.get("tol") or 0.0, least) * (1.0 + found.upper.abs())
        left = ~closed & torch.isfinite(found.upper)
        if is_transformed(left) or not wait_for_all(~left):
            beyond = beyond | (left & ~self._lies_within(limit)[..., None])
        lost = lost_below(scale)
        upper = torch.where(beyond, torch.inf, scale * found.upper + lost)
        status = torch.where(beyond, int(Status.CONVERGED), found.status)
        if options.get("throw", True):
            raise_unless_converged(status, "support")
        lower, multiplier = scale * found.lower - lost, scale * found.multiplier
        return SupportResult(upper, lower, found.theta, multiplier, upper - lower, status)

    @torch.no_grad()
    def _lies_within(self, limit: Tensor) -> Tensor:
        """Whether all of ``{L <= B}`` is in the ball of some radius for certain, ``(*B)``.

        ``L(theta_hat + v) - L(theta_hat) >= -|g| |v| + lam |v|^2 phi(R |x| |v|)``, lam the least
        eigenvalue of the Hessian there (Theorem 3.2's inequality), is convex in ``|v|``: where it
        is above ``B - L(theta_hat)`` and 0 on a sphere, it is beyond.
        """
        if not holds_on_line(self.family):  # constants of the others hold on a ball only
            return torch.zeros_like(limit, dtype=torch.bool)
        rows, center = self.likelihood, self.theta_hat.detach()
        at, errors = rows.expand_with_errors(center, in_blocks=True)
        trace = torch.diagonal(at.hessian, dim1=-2, dim2=-1).sum(-1)
        lost = rows.lost_in_hessian() + 8.0 * self.dim * torch.finfo(limit.dtype).eps
        least = torch.linalg.eigvalsh(at.hessian)[..., 0] - lost * trace
        reach = limit - torch.linalg.vector_norm(center, dim=-1)
        longest = rows.shards.maximum(largest(torch.linalg.vector_norm(rows.X, dim=-1)))
        rate = self.family.self_concordance(math.inf)
        slope = torch.linalg.vector_norm(at.gradient, dim=-1) + errors.gradient
        rise = least * reach * contraction(rate * longest * reach) - slope
        room = (self.level - at.loss + errors.loss).clamp_min(0.0)
        return (least > 0) & (rise * reach > (1.0 + 1e-6) * room)

    def _upper_bound(self, arms: Tensor, **options: Unpack[BoundSettings]) -> Tensor:
        throw = options.pop("throw", True)
        options["throw"] = False
        found = self.support(arms, **options)
        if throw and not is_transformed(found.status):
            # at the limit of the arithmetic a bound is wider than its tolerance, and valid
            limit = found.status == Status.INACCURATE
            status = torch.where(limit, int(Status.CONVERGED), found.status)
            raise_unless_converged(status, "support")
        return found.upper

    def _bound_of_rest(self, rest: Tensor) -> Tensor:
        if not self.confined:
            return super()._bound_of_rest(rest)
        # roundings pay for themselves: a millionth is more than they are
        length = torch.linalg.vector_norm(rest.double(), dim=-1) * (1.0 + 1e-6)
        return length * self._search_radius[..., None]

    def test(self, A: ArrayLike, b: ArrayLike, relation: Relation = "==") -> TestResult:
        """The e-value and the p-value of a linear hypothesis about theta*, valid at all times.

        Against ``A theta* = b``; with one row also against ``<a, theta*> <= b`` or ``>= b``.
        ``P(E_t >= 1/alpha for some t) <= alpha`` under the null hypothesis
        (:mod:`torchglb.inference.tests`). To count all looks, use
        :class:`torchglb.inference.RunningTest`.

        Args:
            A: ``(k, d)`` or ``(*B, k, d)``; a vector for k = 1.
            b: ``(k,)`` or ``(*B, k)``; a number for k = 1.
            relation: ``"=="``, ``"<="`` or ``">="``.

        Example:
            >>> import torchglb as glb
            >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
            >>> sequence.update([[1.0, 0.0]] * 40, [1.0] * 36 + [0.0] * 4)
            >>> bool(sequence.current().test([1.0, 0.0], 0.0).p < 0.01)
            True
        """
        if self.log_failure is None:
            raise refuse("set", LEVEL_OF_DELTA, "one that does not say so")
        if not self.confined:
            raise refuse("set", "one that keeps to the ball, for a test", "an unconfined one")
        return likelihood_ratio_test(
            self.likelihood,
            self.domain,
            moved_up(self.level, -self.log_failure),
            A,
            b,
            relation,
            theta_hat=self.theta_hat,
        )

    def ellipsoid(
        self,
        regularization: Tensor | float | None = None,
        with_ball: bool = False,
        kind: EllipsoidKind = "fixed_point",
    ) -> EllipsoidSet:
        """An ellipsoid around the set, by Theorem 3.2; no more delta is spent.

        It pays for the rounding of loss, gradient and Hessian, in float64 on a CPU.

        Args:
            regularization: lam of ``H + lam I``; by default ``1/(8 S^2 (1 + S R_s))``.
            with_ball: whether to keep to the ball as well.
            kind: ``"fixed_point"`` (sharper) or ``"theorem"`` (as printed).
        """
        check_choice("kind", kind, ELLIPSOIDS)
        if not self.confined:
            raise refuse("set", "one that keeps to the ball, for an ellipsoid", "an unconfined one")
        rows = in_double(self.likelihood) if self.level.is_cpu else self.likelihood
        level, center = self.level.to(rows.X.dtype), self.theta_hat.to(rows.X.dtype)
        S = self.program.domain.radius_like(level).expand(level.shape)
        concordance = self.domain.constant(partial(self_concordance_of, self.family), S)
        if regularization is None:
            regularization = balanced_ridge(S, concordance)
        else:
            regularization = check_sizes("regularization", regularization)
        at, errors = rows.expand_with_errors(center, in_blocks=True)
        eye = torch.eye(self.dim, dtype=level.dtype, device=level.device)
        lam = torch.as_tensor(regularization, dtype=level.dtype, device=level.device)
        height = level - at.loss + errors.loss.detach()
        gap = frank_wolfe_gap(center, at.gradient, S) + 2.0 * S * errors.gradient.detach()
        farthest = S + torch.linalg.vector_norm(center, dim=-1)
        gap = gap + gap_of_rounding(at.hessian, farthest, rows.lost_in_hessian())
        if kind == "theorem":
            gamma = printed_gamma(height, S, concordance, lam, gap)
        else:
            gamma = fixed_point_around(rows, center, at.hessian, height, S, concordance, lam, gap)
        exact = at.hessian + lam[..., None, None] * eye
        shape, gamma = kept_ellipsoid(exact, gamma, farthest, self.level.dtype)
        return EllipsoidSet(
            self.family, self.domain, self.theta_hat, shape, gamma, with_ball, self.event
        )

    def _first_frame(self) -> Tensor:
        """By the Hessian, and the ball where that says nothing."""
        eye = torch.eye(2, dtype=self.level.dtype, device=self.level.device)
        tiny = torch.finfo(self.level.dtype).tiny ** 0.5
        room = 2.0 * self.radius.detach().clamp_min(tiny)
        metric = self._at_center.hessian.detach() / room[..., None, None]
        return frame_of(metric + eye / self._search_radius.square()[..., None, None])

    def _reach(self, origin: Tensor, directions: Tensor, tol: float | None = None) -> Tensor:
        """A bracketed secant search along each ray, on which the slack is concave.

        The slack is about quadratic, so that secants are drawn in t^2, and the first two trials are
        where a quadratic would end: the model at the centre, then the one through the first trial.
        """

        def slack_at(t: Tensor) -> Tensor:
            return self._slack(origin[..., None, :] + t[..., None] * directions)

        S = self._search_radius[..., None]
        sphere = distance_to_sphere(origin[..., None, :], directions, S)
        low, high = torch.zeros_like(sphere), sphere
        at_low, at_high = slack_at(low), slack_at(high)
        whole = at_high >= 0
        low = torch.where(whole, high, low)
        was_inside = torch.full_like(whole, False)
        at_origin, guess = at_low, self._quadratic_reach(origin, directions)
        tol = torch.finfo(low.dtype).eps ** 0.75 if tol is None else tol
        for step in range(100):
            searched = high - low > tol * high  # the others stay: nobody waits for companions
            if wait_for_all(~searched):
                break
            square = low.square() + (high - low) * (high + low) * (at_low / (at_low - at_high))
            # never so close to an end that the other one would not move to the tolerance next
            near = 0.5 * tol * high
            secant = torch.maximum(torch.minimum(square.sqrt(), high - near), low + near)
            # far outside the loss may be exponentially large: halve until it is of the same order;
            # but an inner end may also have met the level to the last digit
            use = -at_high <= 16.0 * torch.maximum(at_low, 0.01 * at_origin)
            t = torch.where(use, secant, 0.5 * (low + high))
            if step < 2:
                t = torch.where((guess > low) & (guess < high), guess, t)
            value = slack_at(torch.where(searched, t, torch.nan))
            inside = value >= 0
            if step == 0:
                end = t * (at_origin / (at_origin - value)).sqrt()
                guess = torch.where(inside, 1.0 + BESIDE, 1.0 - BESIDE) * end
            # an end that stays for a second time counts half (Illinois), so that it moves soon
            at_low = torch.where(inside, value, torch.where(was_inside, at_low, 0.5 * at_low))
            at_high = torch.where(inside, torch.where(was_inside, 0.5 * at_high, at_high), value)
            low = torch.where(inside & searched, t, low)
            high = torch.where(inside | ~searched, high, t)
            was_inside = inside
        return low if self.confined else torch.where(whole, torch.inf, low)

    def _quadratic_reach(self, origin: Tensor, directions: Tensor) -> Tensor:
        """Where the rays would end if the loss were its quadratic model at the centre."""
        loss, gradient, hessian = (part.detach() for part in self._at_center)
        away = (origin - self.theta_hat)[..., None, :]
        turned = directions @ hessian
        slope = gradient[..., None, :]
        room = (self.level - loss)[..., None] - (slope * away).sum(-1)
        return exit_distance(
            0.5 * (turned * directions).sum(-1),
            0.5 * ((turned * away).sum(-1) + (slope * directions).sum(-1)),
            room - 0.5 * (away @ hessian * away).sum(-1),
        )


def chosen_where(condition: Tensor, one: SupportResult, other: SupportResult) -> SupportResult:
    """The fields of one result where the condition ``(*B, K)`` holds, else of the other."""
    chosen = {}
    for part in fields(SupportResult):
        first, second = getattr(one, part.name), getattr(other, part.name)
        mask = condition[..., None] if first.ndim > condition.ndim else condition
        chosen[part.name] = torch.where(mask, first, second)
    return SupportResult(**chosen)


def enlarged(domain: Ball, like: Tensor) -> Ball:
    """The ball of 100 S in which sets that are not confined to the domain are searched."""
    return domain.resized(SEARCHED * domain.radius_like(like).expand(like.shape))
