"""Contrasts that were named beforehand: their weights, and what a joint set and they say now."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    check_choice,
    check_entries,
    check_flag,
    check_probability,
    check_shape,
    check_tensors,
    refuse,
)
from torchglb.choices import RELATIONS, SCALES, Relation, ScaleName
from torchglb.contrasts.evidence import joint_log_e_values, log_e_values, nearest_points
from torchglb.contrasts.inputs import lossless
from torchglb.contrasts.look import Joint, Look, look
from torchglb.contrasts.parts import ContrastParts, parts_table
from torchglb.contrasts.weights import NOTHING_KNOWN, Learned, WeighedRows
from torchglb.identity import check_belongs
from torchglb.inference.tests import TestResult, anytime_p
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii import Problem, self_concordance_of
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.sets.base import on_mean_scale


class DeclaredContrasts:
    """Answers about ``<c_j, theta*>``, from joint sets that are passed in.

    The rows are those of the joint set's likelihood, in the order in which they came. Their weights
    follow from them, and are computed at every look: nothing is kept that grows with the rows (but
    for a family without compiled formulas, two numbers per row).

    Args:
        problem: family, ball and batch; must be on a CPU and in float64.
        contrasts: ``(m, d)`` or ``(*B, m, d)``, none of length 0; or a mapping from names to them.
        delta: the failure probability.
        joint_share: the part of delta that the joint set gets.
        centred: whether half of the joint set's share goes to the centred prior
            (:func:`torchglb.contrasts.enclosure.centred_budgets`).
        running: intersect with the intervals of all earlier looks.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Gaussian(), glb.Ball(2, 3.0), {"B-A": [-1.0, 1.0]})
        >>> sequence = glb.ContrastSequence(*given, delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.0, 1.0]] * 200, [0.5, 2.5] * 200)
        >>> sequence.declared.names, sequence.declared.contrasts.tolist()
        (('B-A',), [[-1.0, 1.0]])
    """

    def __init__(
        self,
        problem: Problem,
        contrasts: Any,
        delta: float,
        joint_share: float = 0.1,
        *,
        centred: bool = True,
        running: bool = False,
    ) -> None:
        self.delta = check_probability("delta", delta)
        self.joint_share = check_probability("joint_share", joint_share)
        self.centred = check_flag("centred", centred)
        self.running = check_flag("running", running)
        if problem.dtype != torch.float64:
            raise refuse("dtype", "torch.float64, for contrasts", problem.dtype)
        if torch.empty((), device=problem.device).device.type != "cpu":
            raise refuse("device", "a CPU, for the compiled code of contrasts", problem.device)
        self.family, self.batch_shape = problem.family, torch.Size(problem.batch_shape)
        self.names: tuple[str, ...] | None = None
        if isinstance(contrasts, Mapping):
            self.names = tuple(str(name) for name in contrasts)
            contrasts = [lossless(f"contrasts[{name!r}]", c) for name, c in contrasts.items()]
            contrasts = torch.stack(contrasts, dim=-2) if contrasts else torch.empty(0, 0)
        self.contrasts = self._checked(contrasts, problem.domain.dim)
        N, (m, d) = self.batch_shape.numel(), self.contrasts.shape[-2:]
        whole = self.contrasts.expand(*self.batch_shape, m, d).reshape(N, m, d)
        self.lengths = torch.linalg.vector_norm(whole, dim=-1)  # (N, m)
        self._units = (whole / self.lengths[..., None]).contiguous()
        self._S = problem.S.reshape(N).tolist()
        self._concordance = [self_concordance_of(self.family, S) for S in self._S]
        #: lower and upper ends so far, marginal and simultaneous
        self.best: Tensor | None = None
        self.forget_rows()

    def _checked(self, contrasts: Any, d: int) -> Tensor:
        found = lossless("contrasts", contrasts).clone()
        if found.ndim and not found.shape[0]:
            raise refuse("contrasts", "at least one", "none")
        batch = tuple(self.batch_shape)
        check_shape("contrasts", found, ((*batch, "m", d) if found.ndim > 2 else ("m", d)))
        checks = ValueChecks()
        checks.finite("contrasts", found)
        length = torch.linalg.vector_norm(found, dim=-1)
        checks.require("contrasts", length > 1e-100, "vectors of positive length", length)
        checks.settle()
        return found

    @property
    def joint_delta(self) -> float:
        """Of the likelihood-ratio sets that the methods take."""
        return self.delta * self.joint_share * (0.5 if self.centred else 1.0)

    def place(self, name: str) -> int:
        """Which contrast has that name."""
        if self.names is None or name not in self.names:
            known = "a mapping from names" if self.names is None else f"one of {list(self.names)}"
            raise refuse("name", known, repr(name))
        return self.names.index(name)

    # ---- the weights of the rows ---------------------------------------------------------

    def forget_rows(self) -> None:
        """Other rows will come: what is known of those before is not true of them."""
        N, _, d = self._units.shape
        self._learned: Learned | None = None
        if self.family.compiled() is None:
            self._learned = Learned.nothing(N, d, self.family.dispersion)
        self._seen: tuple[int, list[Look]] | None = None  # a cache of the last look

    def weighed(self, likelihood: NegativeLogLikelihood) -> list[WeighedRows]:
        """The rows of every problem with their weights."""
        N, _, d = self._units.shape
        X, r = likelihood.X.detach().reshape(N, -1, d), likelihood.r.detach().reshape(N, -1)
        w = [None] * N if likelihood.w is None else likelihood.w.detach().reshape(N, -1)
        losses = [NegativeLogLikelihood(self.family, *rows) for rows in zip(X, r, w, strict=True)]
        known = [NOTHING_KNOWN] * N
        if self._learned is not None:
            self._learned = self._learned.with_rows(losses, self._S)
            known = list(self._learned.known[:, : X.shape[1]])
        given = zip(losses, self._units.numpy(), self._S, known, strict=True)
        return [WeighedRows(*each) for each in given]

    # ---- looking -------------------------------------------------------------------------

    @torch.no_grad()
    def current(
        self, region: LikelihoodRatioSet, simultaneous: bool = False, scale: ScaleName = "linear"
    ) -> Interval:
        """The intervals now, ``(*B, m)``, and with ``running`` of all looks so far.

        Args:
            region: the joint set at :attr:`joint_delta`.
            simultaneous: all m at once with probability 1 - delta, instead of each by itself.
            scale: ``"linear"`` for ``<c, theta>``; ``"mean"`` for ``mu(<c, theta>)``, where every
                contrast is a feature vector of norm at most 1.
        """
        check_choice("scale", scale, SCALES)
        simultaneous = check_flag("simultaneous", simultaneous)
        if scale == "mean" and bool((self.lengths > 1.0 + 1e-12).any()):
            longest = f"one of norm {float(self.lengths.max()):g}"
            raise refuse("scale", "'linear' for contrasts that are no feature vectors", longest)
        found = self._ends(region, simultaneous)
        if self.running:
            # both kinds are remembered at each look, whichever is asked for
            other = self._ends(region, not simultaneous)
            ends = torch.stack([*found, *other] if not simultaneous else [*other, *found])
            if self.best is not None:
                lower = torch.maximum(ends[0::2], self.best[0::2])
                upper = torch.minimum(ends[1::2], self.best[1::2])
                ends = torch.stack([lower[0], upper[0], lower[1], upper[1]])
            self.best = ends.clone()  # the others are whoever asks'
            found = Interval(ends[2], ends[3]) if simultaneous else Interval(ends[0], ends[1])
        if scale == "mean":
            return on_mean_scale(self.family, found)
        return found

    @torch.no_grad()
    def parts(self, region: LikelihoodRatioSet) -> ContrastParts:
        """Of what the upper ends consist."""
        table = parts_table(self._look(region), self._log_level(False)) * self.lengths
        return ContrastParts(*table.reshape(4, *self.batch_shape, -1))

    def _log_level(self, simultaneous: bool) -> float:
        m = self.lengths.shape[-1] if simultaneous else 1
        return math.log(m / (self.delta * (1.0 - self.joint_share)))

    def _ends(self, region: LikelihoodRatioSet, simultaneous: bool) -> Interval:
        """The intervals of this moment."""
        level, looks = self._log_level(simultaneous), self._look(region)
        N, m = self.lengths.shape
        ends = torch.tensor(
            [[seen.ends(j, level) for j in range(m)] for seen in looks], dtype=torch.float64
        ).reshape(N, m, 2)
        ends = self._within_joint(region, ends)
        lower, upper = (ends * self.lengths[..., None]).unbind(-1)
        slip = 1e-12 * (1.0 + torch.maximum(lower.abs(), upper.abs()))
        shape = (*self.batch_shape, m)
        return Interval((lower - slip).reshape(shape), (upper + slip).reshape(shape))

    def _within_joint(self, region: LikelihoodRatioSet, ends: Tensor) -> Tensor:
        """No wider than the likelihood-ratio set's: ``(N, m, 2)``, for contrasts of length 1.

        An end needs no optimisation if a point of the set is known whose contrast is beyond it:
        tried are those that are nearest to theta_hat in the metric of the ellipsoid.
        """
        looks, (N, m) = self._look(region), self.lengths.shape
        center = region.center.detach().reshape(N, -1)
        known = torch.isfinite(ends)
        points = center[:, None, None, :].expand(N, m, 2, -1).clone()
        for i, seen in enumerate(looks):
            if seen.enclosure is None:
                known[i] = False
                continue
            ahead = nearest_points(seen, self._units[i], center[i], ends[i])
            points[i] = torch.where(known[i][..., None], ahead, points[i])
        inside = region.contains(points.reshape(*self.batch_shape, 2 * m, -1))
        inside = known & inside.reshape(N, m, 2)
        if bool(inside.all()):
            return ends
        units = self._units.reshape(*self.batch_shape, m, -1)
        lower, upper = (end.reshape(N, m) for end in region.interval(units))
        low = torch.where(inside[..., 0], ends[..., 0], torch.maximum(ends[..., 0], lower))
        high = torch.where(inside[..., 1], ends[..., 1], torch.minimum(ends[..., 1], upper))
        return torch.stack([low, high], dim=-1)

    def _joints(self, region: LikelihoodRatioSet) -> list[Joint]:
        """The joint sets of the problems, one by one."""
        N, _, d = self._units.shape
        center, height = region.center.detach().reshape(N, d), region.radius.reshape(N)
        log_level = math.log(1.0 / (self.delta * self.joint_share))
        return [
            Joint(
                rows,
                center[i],
                float(height[i]),
                log_level,
                self._S[i],
                self._concordance[i],
                self.centred,
            )
            for i, rows in enumerate(self.weighed(region.likelihood))
        ]

    def _look(self, region: LikelihoodRatioSet) -> list[Look]:
        """What is known now of every problem."""
        n = region.likelihood.X.shape[-2]
        if self._seen is None or self._seen[0] != n:
            wanted = [self._log_level(False) + 3.0] * self.lengths.shape[-1]
            self._seen = n, [look(joint, wanted) for joint in self._joints(region)]
        return self._seen[1]

    # ---- testing -------------------------------------------------------------------------

    @torch.no_grad()
    def test(
        self, region: LikelihoodRatioSet, value: ArrayLike, relation: Relation = "=="
    ) -> TestResult:
        """E-values and p-values of ``<c_j, theta*> = value``, or ``<=``, or ``>=``; ``(*B, m)``.

        ``P(E_t >= 1/alpha for some t) <= alpha`` under the null hypothesis, for each contrast
        (:mod:`torchglb.contrasts.evidence`); for several at once, :func:`torchglb.inference.e_bh`.

        Args:
            region: the joint set at :attr:`joint_delta`.
            value: a number, or ``(m)`` or ``(*B, m)``.
            relation: ``"=="``, ``"<="`` or ``">="``.

        Returns:
            ``theta``, ``(*B, m, d)``, is the point of ``<c, theta> = value`` that is nearest to the
            estimate in the metric of the joint set; NaN where that is not known.
        """
        check_choice("relation", relation, RELATIONS)
        if region.log_failure is None:
            expected = "one whose level is log(1/delta) plus what does not depend on delta, to test"
            raise refuse("radius", expected, "one that spends delta in another way")
        N, m, d = self._units.shape
        value = lossless("value", value)
        try:
            value = value.expand(*self.batch_shape, m)
        except RuntimeError:
            raise refuse("value", f"shape ({m},) or fewer axes", tuple(value.shape)) from None
        checks = ValueChecks()
        checks.finite("value", value)
        checks.settle()
        scaled = value.reshape(N, m) / self.lengths
        looks, share = self._look(region), self.joint_share
        joints = self._joints(region.at_delta(self.joint_delta))  # whose level may be raised
        log_e = torch.full((N, m), -math.inf, dtype=torch.float64)
        theta = torch.full((N, m, d), math.nan, dtype=torch.float64)
        for i, (joint, seen) in enumerate(zip(joints, looks, strict=True)):
            if seen.enclosure is not None:
                found = log_e_values(joint, scaled[i].tolist(), relation, share)
                log_e[i] = torch.tensor(found, dtype=torch.float64)
                theta[i] = nearest_points(seen, self._units[i], joint.center, scaled[i])
        own = log_e.reshape(*self.batch_shape, m)
        share *= 0.5 if self.centred else 1.0
        other = joint_log_e_values(region, self.contrasts, value, relation, share)
        best = torch.maximum(own, other)
        return TestResult(best, anytime_p(best), theta.reshape(*self.batch_shape, m, d))

    # ---- saving --------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DeclaredContrasts:
        new = object.__new__(type(self))
        memo[id(self)] = new
        rest = {
            name: value for name, value in vars(self).items() if name not in ("_learned", "_seen")
        }
        learned = None if self._learned is None else self._learned.copy()
        vars(new).update(copy.deepcopy(rest, memo), _learned=learned, _seen=self._seen)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache."""
        return vars(self) | {"_seen": None}

    def state_dict(self) -> dict[str, Any]:
        """What cannot be had from the rows."""
        best = None if self.best is None else self.best.clone()
        return {"best": best, "settings": self._settings()}

    def checked_state(self, state: Mapping[str, Any]) -> Tensor | None:
        """The best ends of a state; refuses one of other contrasts or settings."""
        check_entries("state['contrasts']", state, ("best", "settings"))
        check_belongs("state['contrasts']['settings']", state["settings"], self._settings())
        best = state["best"]
        if best is None:
            return None
        like = torch.zeros((4, *self.batch_shape, self.lengths.shape[-1]), dtype=torch.float64)
        check_tensors("state['contrasts']", {"best": best}, {"best": like})
        return best.clone()

    def _settings(self) -> dict[str, Any]:
        return {
            "contrasts": self.contrasts.tolist(),
            "names": None if self.names is None else list(self.names),
            "delta": self.delta,
            "joint_share": self.joint_share,
            "centred": self.centred,
            "running": self.running,
        }
