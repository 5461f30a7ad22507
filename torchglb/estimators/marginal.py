"""Marginal intervals: each coefficient at 1 - delta, without paying for the others.

They come from a :class:`torchglb.ContrastSequence`, which needs a declared S, and whose
contrasts are named before the responses are seen: the coefficients of the formula are, and so are
sums of them that are given to :func:`torchglb.glm`. Any other sum is answered by the joint set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchglb.choices import Relation
from torchglb.contrast_sequence import ContrastSequence
from torchglb.estimators.linear_fit import LinearFit
from torchglb.estimators.results import Bounds, Evidence, outward
from torchglb.estimators.scaling import Scale
from torchglb.families import GLMFamily
from torchglb.radii import Radius


class ContrastFit(LinearFit):
    """A :class:`LinearFit` with S, whose coefficients and declared contrasts are sharper.

    Args:
        scale: of the d columns.
        family: the GLM family.
        delta: the failure probability, of each interval by itself.
        S: as in :class:`LinearFit`; must be given.
        radius: of the joint set.
        prior: not used with S.
        declared: contrasts of the coefficients beside these themselves, ``(m, d)``.
    """

    def __init__(
        self,
        scale: Scale,
        family: GLMFamily,
        delta: float,
        *,
        S: float | None,
        radius: str | Radius | None = None,
        prior: float = 2.0,
        declared: np.ndarray | None = None,
    ) -> None:
        super().__init__(scale, family, delta, S=S, radius=radius, prior=prior)
        more = np.zeros((0, self.dim)) if declared is None else declared
        self.declared = np.vstack([np.eye(self.dim), more])
        u, self._sizes, self._shifts = self._directions(self.declared)
        self._contrasts = ContrastSequence(self._inner, self.sequence.domain, u, self.delta)

    def anew(self) -> ContrastFit:  # noqa: D102
        new = ContrastFit(
            self.scale,
            self.family,
            self.delta,
            S=self.S,
            radius=self.radius,
            prior=self.prior,
            declared=self.declared[self.dim :],
        )
        new.response, new.weight_name = self.response, self.weight_name
        return new

    def contrasts(self) -> ContrastSequence:
        """The sequence of the declared contrasts, with all rows."""
        done = len(self._contrasts)
        if done < len(self):
            X, r, w = self.sequence.history.view()
            weight = None if w is None else w[done:].contiguous()
            self._contrasts.update(X[done:].contiguous(), r[done:].contiguous(), weight)
        return self._contrasts

    def _places(self, C: np.ndarray) -> np.ndarray:
        """Which declared contrast each row of C is; -1 for none."""
        same = (C[:, None, :] == self.declared[None]).all(-1)
        return np.where(same.any(1), same.argmax(1), -1)

    def marginal(self, C: np.ndarray) -> Bounds:  # noqa: D102
        C = np.atleast_2d(np.asarray(C, float))
        at = self._places(C)
        found = self.contrasts().current()
        lower, upper = outward(found.lower.numpy(), found.upper.numpy(), self._sizes, self._shifts)
        low, high = lower[at], upper[at]
        other = at < 0
        if other.any():
            joint = self.interval(C[other])
            low[other], high[other] = joint.lower, joint.upper
        return Bounds(self.value(C), low, high)

    def interval_text(self, simultaneous: bool) -> str:  # noqa: D102
        if simultaneous:
            return super().interval_text(simultaneous)
        return "valid at all times, each by itself (contrasts; sums not declared: joint set)"

    def test(self, C: np.ndarray, b: Any, relation: Relation = "==") -> Evidence:  # noqa: D102
        C = np.atleast_2d(np.asarray(C, float))
        at = self._places(C)
        if len(C) > 1 or at[0] < 0:
            return super().test(C, b, relation)
        place, (_, target, doubt) = int(at[0]), self._hypothesis(C, b)
        value = torch.zeros(len(self.declared), dtype=torch.float64)
        found = []
        for end in (target[0] - doubt[0], target[0] + doubt[0]):  # what b may be, by rounding
            value[place] = end
            found.append(self.contrasts().test(value, relation))
        log_e, p = (
            min(float(f.log_e[place]) for f in found),
            max(float(f.p[place]) for f in found),
        )
        return Evidence(log_e, p)
