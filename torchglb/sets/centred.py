"""The set of a centred prior: ``L(theta) - (lambda/2)|theta - c|^2 <= B``, where that is convex."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import wait_for_all
from torchglb.checks import as_tensor, refuse
from torchglb.choices import ProgramSolver, Relation
from torchglb.inference.tests import TestResult, anytime_p, likelihood_ratio_test
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Status, raise_unless_converged
from torchglb.radii import Refinement
from torchglb.recording import is_transformed
from torchglb.rounding import moved_up
from torchglb.sets.likelihood_ratio import LEVEL_OF_DELTA, LikelihoodRatioSet, chosen_where
from torchglb.ucb import SublevelProgram, SupportResult, support
from torchglb.ucb.solvers.settings import NativeSettings

#: share of a segment that is given up so that its end is surely feasible
STEP_BACK = 1e-9


@dataclass(frozen=True, eq=False)
class CentredSet(LikelihoodRatioSet):
    """All theta of a likelihood-ratio set that a centred prior holds too (:class:`Centred`).

    The intersection of ``{|theta| <= S, L(theta) <= level}`` with ``{L(theta) - (lambda/2)|theta -
    c|^2 <= B}``, within the region in which the latter is convex by proof: convex, therefore. Each
    element of the batch has a lambda of its own; where it is 0 the set is the likelihood-ratio set.

    ``support`` solves the program of the centred set; where its maximiser lies in the
    likelihood-ratio set too, as it nearly always does, that is the support of the intersection.
    Elsewhere the smaller of both supports is returned, a valid bound (status ``INACCURATE``, for
    which nothing is raised). ``ellipsoid`` is that of the likelihood-ratio set.

    Args:
        refinement: of :class:`torchglb.radii.Evaluation`.

    Example:
        >>> import torchglb as glb
        >>> X = torch.eye(2, dtype=torch.float64).repeat(500, 1)
        >>> widths = []
        >>> for radius in ("pac-bayes", "centred"):
        ...     sequence = glb.ConfidenceSequence(glb.Gaussian(), glb.Ball(2, 3.0), 0.05, radius)
        ...     sequence.update(X, X[:, 0])
        ...     widths.append(sequence.current().interval([1.0, 0.0]).width)
        >>> bool(widths[1] < 0.95 * widths[0])
        True
    """

    refinement: Refinement = None  # type: ignore[assignment]  # dataclasses ask for a default

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.refinement, Refinement):
            raise refuse("refinement", "a Refinement", type(self.refinement).__name__)

    def __getitem__(self, index: int | slice) -> CentredSet:
        """The sets of some elements, by an index of the first batch axis."""
        picked = Refinement.of(t[index] for t in self.refinement.tensors())
        return CentredSet(**_fields(super().__getitem__(index)) | {"refinement": picked})

    @property
    def _uniform_level(self) -> Tensor:
        return self.refinement.outer

    @property
    def scale(self) -> Tensor:
        """lambda, ``(*B)``."""
        return -self.refinement.ridge

    @cached_property
    def centred_likelihood(self) -> NegativeLogLikelihood:
        """``L(theta) - (lambda/2)|theta|^2 + lambda <c, theta>``: convex in the region."""
        loss, ridge = self.likelihood, self.refinement.ridge
        tilt = ridge[..., None] * self.refinement.center
        return NegativeLogLikelihood(
            loss.family,
            loss.X,
            loss.r,
            loss.w,
            regularization=ridge,
            tilt=tilt,
            shards=loss.shards,
        ).came_from(loss)

    @cached_property
    def centred_program(self) -> SublevelProgram:
        """The optimistic program over the centred set."""
        region = self.refinement.region
        return SublevelProgram(self.centred_likelihood, self.domain, self.refinement.level, region)

    def _slack(self, points: Tensor) -> Tensor:
        """The least slack of both losses; ``-inf`` outside the ball or the region."""
        slack, (_, level, ridge, center, region) = super()._slack(points), self.refinement
        tilt = ridge[..., None] * center
        bent = 0.5 * ridge[..., None] * points.square().sum(-1)
        bent = bent - (points @ tilt[..., None])[..., 0]
        # slack is level - L, so L is known already
        centred = (level - self.level)[..., None] + slack - bent
        inside = region.contains(points) | (ridge == 0)[..., None]
        return torch.where(inside, torch.minimum(slack, centred), -torch.inf)

    def support(
        self, arms: ArrayLike, solver: ProgramSolver = "native", **options: Unpack[NativeSettings]
    ) -> SupportResult:
        """``max <x, theta>`` over the set for every arm ``(*B, K, d)``, certified.

        Args:
            arms: ``(*B, K, d)``.
            solver: ``"native"``: the others do not know regions of convexity.
            options: of that solver; ``throw`` raises if an arm has no valid bound.
        """
        if solver != "native":
            raise refuse("solver", "'native' for a centred set", repr(solver))
        arms = as_tensor("arms", arms, dtype=self.level.dtype, device=self.level.device)
        throw = options.pop("throw", True)
        options["throw"] = False
        given: NativeSettings = {"center": self.theta_hat.detach(), **options}
        found = support(self.centred_program, arms, **given)
        outside = super()._slack(found.theta.detach()) < 0
        unsure = outside | torch.isnan(found.theta).any(-1) | (found.status != Status.CONVERGED)
        unsure = unsure | (self.scale == 0)[..., None]
        if is_transformed(unsure) or not wait_for_all(~unsure):
            outer = super().support(arms, solver, **options)
            found = self._smaller(arms, found, outer, unsure)
        if throw and not is_transformed(found.status):
            valid = found.status == Status.INACCURATE
            raise_unless_converged(
                torch.where(valid, int(Status.CONVERGED), found.status), "support"
            )
        return found

    def _smaller(
        self, arms: Tensor, found: SupportResult, outer: SupportResult, unsure: Tensor
    ) -> SupportResult:
        """Where one maximiser is not in both sets, the smaller bound."""
        use = unsure & ~(found.upper < outer.upper)
        alone = (self.scale == 0)[..., None] & unsure
        theta = outer.theta.detach()
        exact = alone | ((self._slack(theta) >= 0) & (outer.status == Status.CONVERGED))
        kept = unsure & ~use & ~alone
        lower, point = self._feasible(arms, found)
        drawn = dataclasses.replace(
            found,
            lower=torch.where(kept, lower, found.lower),
            theta=torch.where(kept[..., None], point, found.theta),
            status=torch.where(kept, int(Status.INACCURATE), found.status),
        )
        shared = dataclasses.replace(
            outer,
            lower=torch.where(exact, outer.lower, lower),
            theta=torch.where(exact[..., None], outer.theta, point),
            status=torch.where(exact, outer.status, int(Status.INACCURATE)),
        )
        smaller = chosen_where(use | alone, shared, drawn)
        return dataclasses.replace(smaller, gap=smaller.upper - smaller.lower)

    def _feasible(self, arms: Tensor, found: SupportResult) -> tuple[Tensor, Tensor]:
        """On the way from the centre to the centred maximiser, a point of both sets; its value.

        Both losses are convex along it, so L is at most linear.
        """
        center = self.theta_hat.detach()[..., None, :]
        end = torch.where(torch.isnan(found.theta), center, found.theta).detach()
        at, errors = self.likelihood.expand_with_errors(end)
        here, at_center = self.likelihood.expand_with_errors(self.theta_hat.detach())
        room = (self.level.detach() - here.loss - at_center.loss)[..., None] - errors.loss
        rise = at.loss + errors.loss - (here.loss - at_center.loss)[..., None]
        share = torch.where(rise > room, room / rise, 1.0).clamp(0.0, 1.0) * (1.0 - STEP_BACK)
        point = center + share[..., None] * (end - center)
        value = (arms.detach() * point).sum(-1)
        size = torch.linalg.vector_norm(arms.detach(), dim=-1) * self._search_radius[..., None]
        return value - 32.0 * self.dim * torch.finfo(value.dtype).eps * size, point

    def test(self, A: ArrayLike, b: ArrayLike, relation: Relation = "==") -> TestResult:
        """The e-value and the p-value of a linear hypothesis about theta*, valid at all times.

        ``log E`` is the larger of two lower bounds on the least mixture over H0: that of the
        uniform prior, and ``min(log(1/delta), min L - (lambda/2)|theta - c|^2 - K over H0 and the
        region)``. The second holds because every parameter outside of the region is outside of the
        outer set, where the mixture exceeds 1/delta. So a p-value below delta comes from the
        uniform prior alone.

        Args:
            A: ``(k, d)`` or ``(*B, k, d)``; a vector for k = 1.
            b: ``(k,)`` or ``(*B, k)``; a number for k = 1.
            relation: ``"=="``, ``"<="`` or ``">="``.
        """
        if self.log_failure is None:
            raise refuse("set", LEVEL_OF_DELTA, "one that does not say so")
        _, level, _, _, region = self.refinement
        given = (A, b, relation)
        theta = self.theta_hat
        evidence = moved_up(self.refinement.outer, -self.log_failure)
        uniform = likelihood_ratio_test(
            self.likelihood, self.domain, evidence, *given, theta_hat=theta
        )
        shifted = moved_up(level, -self.log_failure)
        centred = likelihood_ratio_test(
            self.centred_likelihood, self.domain, shifted, *given, theta_hat=theta
        )
        # a minimum that was found outside of the region proves nothing
        inside = region.contains(centred.theta[..., None, :])[..., 0]
        capped = centred.log_e.clamp_max(self.log_failure)
        better = inside & (self.scale > 0) & (capped > uniform.log_e)
        log_e = torch.where(better, capped, uniform.log_e)
        where = torch.where(better[..., None], centred.theta, uniform.theta)
        return TestResult(log_e, anytime_p(log_e), where)


def _fields(values: LikelihoodRatioSet) -> dict[str, Any]:
    """The fields of a set by name."""
    return {part.name: getattr(values, part.name) for part in dataclasses.fields(values)}
