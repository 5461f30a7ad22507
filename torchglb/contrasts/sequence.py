"""Confidence sequences for declared contrasts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_choice,
    check_probability,
    check_shape,
    refuse,
)
from torchglb.contrasts.evidence import joint_log_e_values, log_e_values, nearest_points
from torchglb.contrasts.inputs import lossless
from torchglb.contrasts.look import Joint, Look, look
from torchglb.contrasts.parts import ContrastParts, parts_table
from torchglb.contrasts.weights import Weights, no_weights, with_rows
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import Rows
from torchglb.inference.tests import RELATIONS, TestResult, anytime_p
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii import Radius, self_concordance_of
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import Interval, LikelihoodRatioSet


class ContrastSequence:
    """Intervals for ``<c, theta*>`` at all times, for contrasts c named beforehand.

    A joint set pays for all d directions of theta, a contrast for one: in units of a fixed sample's
    95% interval about 2 instead of 5 or 6 at d = 20. Each interval is valid at all times at once,
    for features chosen in any way from the past:

        ``P(<c_j, theta*> in I_{j,t} for all t) >= 1 - delta``  for every j (marginal), or
        ``P(<c_j, theta*> in I_{j,t} for all t and j) >= 1 - delta``  (``simultaneous``).

    **The contrasts must be chosen before the rewards are seen.** For one that was picked because
    of its interval nothing is promised: ask for ``simultaneous`` intervals of all that might be
    picked, or use the joint set, which covers every direction.

    How: the share ``joint_share`` of delta goes to a joint set (half of that to the likelihood
    ratio with the prior of ``radius``, half to a centred prior), the rest to the martingale of
    weighted rewards (:mod:`torchglb.contrasts.lines`), whose value at theta* is bounded over the
    joint set. Both hold with probability 1 - delta, so the interval is what they have in common: it
    is never wider than that of the joint set ``joint``.

    A row costs O(d^2 + m d), a look O(n d^2) for the joint set and for each contrast. Late rows are
    in order as in :class:`torchglb.ConfidenceSequence`: a delay must not depend on the reward.

    Args:
        family: the GLM family; its self-concordance must be declared.
        domain: the ball that contains theta*.
        contrasts: ``(m, d)`` or ``(*B, m, d)``, none of length 0; or a mapping from names to them.
        delta: the failure probability.
        joint_share: the part of delta that the joint set gets.
        batch_shape: ``*B``, problems that advance together.
        radius: of the joint set, one that keeps to the ball.
        centred: whether half of the joint set's share goes to the centred prior
            (:func:`torchglb.contrasts.enclosure.centred_budgets`).
        running: intersect with the intervals of all earlier looks.
        validate: look at the values of what comes in.

    Example:
        >>> import torchglb as glb
        >>> sequence = ContrastSequence(
        ...     glb.Gaussian(), glb.Ball(2, 3.0), {"B-A": [-1.0, 1.0]}, delta=0.05
        ... )
        >>> sequence.update([[1.0, 0.0], [0.0, 1.0]] * 200, [0.5, 2.5] * 200)
        >>> lower, upper = sequence.current()
        >>> bool((lower > 1.5) & (upper < 2.5))
        True
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        contrasts: Any,
        delta: float,
        joint_share: float = 0.1,
        batch_shape: tuple[int, ...] = (),
        *,
        radius: str | Radius = "pac-bayes",
        centred: bool = True,
        running: bool = False,
        validate: bool = True,
    ) -> None:
        self.delta = check_probability("delta", delta)
        self.joint_share = check_probability("joint_share", joint_share)
        self.centred, self.running = bool(centred), bool(running)
        share = self.joint_share * (0.5 if self.centred else 1.0)
        #: the likelihood-ratio sets under it
        self.joint = ConfidenceSequence(
            family, domain, delta * share, radius, batch_shape=batch_shape, validate=validate
        )
        if self.joint.history.device.type != "cpu":
            raise refuse("device", "a CPU as the default, for compiled code", "another")
        if not self.joint.radius.confined:
            raise refuse("radius", "one that keeps to the ball", self.joint.radius)
        self.family, self.domain = family, domain
        self.batch_shape = torch.Size(batch_shape)
        self.names: tuple[str, ...] | None = None
        if isinstance(contrasts, Mapping):
            self.names = tuple(str(name) for name in contrasts)
            contrasts = torch.stack([lossless(name, c) for name, c in contrasts.items()], dim=-2)
        self.contrasts = self._checked(contrasts)
        N, m, d = self.batch_shape.numel(), self.contrasts.shape[-2], domain.dim
        whole = self.contrasts.expand(*self.batch_shape, m, d).reshape(N, m, d)
        self._lengths = torch.linalg.vector_norm(whole, dim=-1)  # (N, m)
        self._units = (whole / self._lengths[..., None]).contiguous()
        self._S = self.joint.problem.S.reshape(N).tolist()
        self._concordance = [self_concordance_of(family, S) for S in self._S]
        ridge = np.array([1.0 / family.dispersion] * N)
        self._held = no_weights(self._units.numpy(), ridge)
        self._best: Tensor | None = None  # lower and upper ends, marginal and simultaneous
        self._seen: tuple[int, list[Look]] | None = None  # a cache of the last look

    def _checked(self, contrasts: Any) -> Tensor:
        found = lossless("contrasts", contrasts).clone()
        batch, d = tuple(self.batch_shape), self.domain.dim
        check_shape("contrasts", found, ((*batch, "m", d) if found.ndim > 2 else ("m", d)))
        if not found.shape[-2]:
            raise refuse("contrasts", "at least one", "none")
        checks = ValueChecks()
        checks.finite("contrasts", found)
        length = torch.linalg.vector_norm(found, dim=-1)
        checks.require("contrasts", length > 1e-100, "vectors of positive length", length)
        checks.settle()
        return found

    def __len__(self) -> int:
        """The number of observations so far."""
        return len(self.joint)

    # ---- learning ------------------------------------------------------------------------

    def update(self, x: Any, r: Any, weight: Any = None) -> None:
        """Adds one observation, ``x (*B, d)``, or many in their order, ``x (*B, k, d)``.

        Args:
            x: features of norm at most 1.
            r: rewards.
            weight: in [0, 1], fixed before the reward was seen; 1 if left out.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        x, r = lossless("x", x), lossless("r", r)
        batch, d = tuple(self.batch_shape), self.domain.dim
        one = x.ndim == len(batch) + 1
        check_shape("x", x, (*batch, d) if one else (*batch, "k", d))
        check_shape("r", r, batch if one else (*batch, x.shape[-2]))
        if weight is not None:
            weight = lossless("weight", weight)
            weight = weight.expand(r.shape) if weight.ndim == 0 else weight
            check_shape("weight", weight, r.shape)
        held, history = self._weights(), self.joint.history
        N, mark = self.batch_shape.numel(), history.mark()
        w = torch.ones_like(r) if weight is None else weight
        X, rewards, w = x.reshape(N, -1, d), r.reshape(N, -1), w.reshape(N, -1)
        new = self._with_rows(held, X, rewards, w)
        try:
            self.joint.update(x, r, weight)
        except BaseException:
            history.reset(mark)
            raise
        self._held = new  # a row that an interrupt leaves in the history is caught up with below

    def _with_rows(self, held: Weights, X: Tensor, r: Tensor, w: Tensor) -> Weights:
        parts = [t.detach().contiguous().numpy() for t in (X, r, w)]
        return with_rows(held, self.family, self._units.numpy(), np.array(self._S), *parts)

    def _weights(self) -> Weights:
        """The weights of all rows of the history."""
        held, history = self._held, self.joint.history
        if held.rows < len(history):
            X, r, w = self._rows()
            self._held = held = self._with_rows(
                held,
                X[:, held.rows :],
                r[:, held.rows :],
                (torch.ones_like(r) if w is None else w)[:, held.rows :],
            )
        return held

    def _rows(self) -> Rows:
        X, r, w = self.joint.history.view()
        N, (n, d) = self.batch_shape.numel(), X.shape[-2:]
        return Rows(X.reshape(N, n, d), r.reshape(N, n), None if w is None else w.reshape(N, n))

    # ---- looking -------------------------------------------------------------------------

    def current(self, simultaneous: bool = False, scale: str = "linear") -> Interval:
        """The intervals now, ``(*B, m)``, and with ``running`` of all looks so far.

        Args:
            simultaneous: all m at once with probability 1 - delta, instead of each by itself.
            scale: ``"linear"`` for ``<c, theta>``; ``"mean"`` for ``mu(<c, theta>)``, where every
                contrast is a feature vector of norm at most 1.
        """
        check_choice("scale", scale, ("linear", "mean"))
        if scale == "mean" and bool((self._lengths > 1.0 + 1e-12).any()):
            longest = f"one of norm {float(self._lengths.max()):g}"
            raise refuse("scale", "'linear' for contrasts that are no feature vectors", longest)
        found = self._ends(bool(simultaneous))
        if self.running:
            # both kinds are remembered at each look, whichever is asked for
            other = self._ends(not simultaneous)
            ends = torch.stack([*found, *other] if not simultaneous else [*other, *found])
            if self._best is not None:
                lower = torch.maximum(ends[0::2], self._best[0::2])
                upper = torch.minimum(ends[1::2], self._best[1::2])
                ends = torch.stack([lower[0], upper[0], lower[1], upper[1]])
            self._best = ends
            found = Interval(ends[2], ends[3]) if simultaneous else Interval(ends[0], ends[1])
        if scale == "mean":
            return Interval(self.family.mean(found.lower), self.family.mean(found.upper))
        return found

    def estimate(self) -> Tensor:
        """``<c, theta_hat>`` at the constrained maximum-likelihood estimate, ``(*B, m)``."""
        center = self.joint.current().center
        return (self.contrasts @ center[..., None])[..., 0]

    def parts(self) -> ContrastParts:
        """Of what the upper ends consist: for tables and pictures."""
        table = parts_table(self._look(), self._log_level(False)) * self._lengths
        return ContrastParts(*table.reshape(4, *self.batch_shape, -1))

    def _log_level(self, simultaneous: bool) -> float:
        m = self._lengths.shape[-1] if simultaneous else 1
        return math.log(m / (self.delta * (1.0 - self.joint_share)))

    def _ends(self, simultaneous: bool) -> Interval:
        """The intervals of this moment."""
        level, looks = self._log_level(simultaneous), self._look()
        N, m = self._lengths.shape
        ends = torch.tensor(
            [[seen.ends(j, level) for j in range(m)] for seen in looks], dtype=torch.float64
        ).reshape(N, m, 2)
        ends = self._within_joint(ends)
        lower, upper = (ends * self._lengths[..., None]).unbind(-1)
        slip = 1e-12 * (1.0 + torch.maximum(lower.abs(), upper.abs()))
        shape = (*self.batch_shape, m)
        return Interval((lower - slip).reshape(shape), (upper + slip).reshape(shape))

    def _within_joint(self, ends: Tensor) -> Tensor:
        """No wider than the likelihood-ratio set's: ``(N, m, 2)``, for contrasts of length 1.

        An end needs no optimisation if a point of the set is known whose contrast is beyond it:
        tried are those that are nearest to theta_hat in the metric of the ellipsoid.
        """
        region, looks = self._region(), self._look()
        N, m = self._lengths.shape
        center = region.center.reshape(N, -1)
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

    def _region(self) -> LikelihoodRatioSet:
        region = self.joint.current()
        assert isinstance(region, LikelihoodRatioSet)
        return region

    def _joints(self) -> list[Joint]:
        """The joint sets of the problems, one by one."""
        region, (X, r, w) = self._region(), self._rows()
        center, height = region.center.reshape(len(X), -1), region.radius.reshape(-1)
        log_level = math.log(1.0 / (self.delta * self.joint_share))
        return [
            Joint(
                NegativeLogLikelihood(self.family, X[i], r[i], None if w is None else w[i]),
                center[i],
                float(height[i]),
                log_level,
                self._S[i],
                self._concordance[i],
                self.centred,
            )
            for i in range(len(X))
        ]

    def _look(self) -> list[Look]:
        """What is known now of every problem."""
        n = len(self)
        if self._seen is None or self._seen[0] != n:
            b = torch.from_numpy(self._weights().b[:, :n])
            wanted = [self._log_level(False) + 3.0] * self._lengths.shape[-1]
            looks = [
                look(joint, self._units[i], b[i], wanted) for i, joint in enumerate(self._joints())
            ]
            self._seen = n, looks
        return self._seen[1]

    # ---- testing -------------------------------------------------------------------------

    @torch.no_grad()
    def test(self, value: Any, relation: str = "==") -> TestResult:
        """E-values and p-values of ``<c_j, theta*> = value``, or ``<=``, or ``>=``; ``(*B, m)``.

        ``P(E_t >= 1/alpha for some t) <= alpha`` under the null hypothesis, for each contrast
        (:mod:`torchglb.contrasts.evidence`); for several at once, :func:`torchglb.inference.e_bh`.

        Args:
            value: a number, or ``(m)`` or ``(*B, m)``.
            relation: ``"=="``, ``"<="`` or ``">="``.

        Returns:
            ``theta``, ``(*B, m, d)``, is the point of ``<c, theta> = value`` that is nearest to the
            estimate in the metric of the joint set; NaN where that is not known.
        """
        check_choice("relation", relation, RELATIONS)
        N, (m, d) = len(self._S), self.contrasts.shape[-2:]
        value = lossless("value", value)
        try:
            value = value.expand(*self.batch_shape, m)
        except RuntimeError:
            raise refuse("value", f"shape ({m},) or fewer axes", tuple(value.shape)) from None
        checks = ValueChecks()
        checks.finite("value", value)
        checks.settle()
        scaled = value.reshape(N, m) / self._lengths
        b, share = torch.from_numpy(self._weights().b[:, : len(self)]), self.joint_share
        log_e = torch.full((N, m), -math.inf, dtype=torch.float64)
        theta = torch.full((N, m, d), math.nan, dtype=torch.float64)
        for i, (joint, seen) in enumerate(zip(self._joints(), self._look(), strict=True)):
            if seen.enclosure is not None:
                found = log_e_values(
                    joint, self._units[i], b[i], scaled[i].tolist(), relation, share
                )
                log_e[i] = torch.tensor(found, dtype=torch.float64)
                theta[i] = nearest_points(seen, self._units[i], joint.center, scaled[i])
        own = log_e.reshape(*self.batch_shape, m)
        share *= 0.5 if self.centred else 1.0
        other = joint_log_e_values(self._region(), self.contrasts, value, relation, share)
        best = torch.maximum(own, other)
        return TestResult(best, anytime_p(best), theta.reshape(*self.batch_shape, m, d))

    # ---- saving --------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ContrastSequence:
        new = object.__new__(type(self))
        memo[id(self)] = new
        rest = {name: value for name, value in vars(self).items() if name not in ("_held", "_seen")}
        vars(new).update(copy.deepcopy(rest, memo), _held=self._held.copy(), _seen=self._seen)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache."""
        return vars(self) | {"_seen": None}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors, numbers and words."""
        held = self._weights()
        arrays = {
            name: torch.from_numpy(getattr(held, name).copy())
            for name in ("inverse", "forms", "guess")
        }
        b = torch.from_numpy(held.b[:, : held.rows].copy())
        return {
            "joint": self.joint.state_dict(),
            "weights": arrays | {"b": b},
            "best": None if self._best is None else self._best.clone(),
            "settings": self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of other contrasts or settings."""
        if missing := {"joint", "weights", "best", "settings"} - set(state):
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        for name, mine in self._settings().items():
            got = state["settings"].get(name)
            same = torch.equal(got, mine) if isinstance(mine, Tensor) else got == mine
            if not same:
                raise refuse(f"state['settings'][{name!r}]", repr(mine), repr(got))
        weights, parts = state["weights"], []
        for name in ("inverse", "forms", "guess", "b"):
            label, mine = f"state['weights'][{name!r}]", getattr(self._held, name)
            value = as_tensor(label, weights[name], dtype=torch.float64, device=torch.device("cpu"))
            shape = (mine.shape[0], "n", mine.shape[2]) if name == "b" else mine.shape
            check_shape(label, value, shape)
            parts.append(value.numpy().copy())
        rows = int(state["joint"]["history"]["observations"])
        check_shape("state['weights']['b']", weights["b"], (len(self._S), rows, "m"))
        if state["best"] is not None:
            m = self._lengths.shape[-1]
            check_shape("state['best']", state["best"], (4, *self.batch_shape, m))
        self.joint.load_state_dict(state["joint"])
        inverse, forms, guess, b = parts
        self._held, self._seen = Weights(inverse, forms, guess, b, rows), None
        self._best = None if state["best"] is None else state["best"].clone()

    def _settings(self) -> dict[str, Any]:
        return {
            "contrasts": self.contrasts,
            "delta": self.delta,
            "joint_share": self.joint_share,
            "centred": self.centred,
            "running": self.running,
        }
