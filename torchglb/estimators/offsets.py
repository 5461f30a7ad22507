"""A known offset in the linear predictor, for families whose loss does not absorb it.

The offset is one more column o with a coefficient that is known to be 1. The confidence sequence is
one of d + 1 coefficients; what is asked is asked on the slice where the last one is 1. Along a
direction u, by weak duality, for every number v

    ``max {<u, theta> : theta in C, theta_o = t}  <=  h_C(u + v e_o) - v t``,

so that each v gives a certified bound; the best one is found by the secant method, because the
derivative of the right-hand side in v is ``theta_o(v) - t`` at the maximiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from torchglb.checks import refuse
from torchglb.choices import Relation, RowsOutside
from torchglb.domain import Ball
from torchglb.errors import SolverError
from torchglb.estimators.evidence import expand, subspace_minimum, whole_space_test
from torchglb.estimators.linear_fit import FAR, LinearFit
from torchglb.estimators.results import Bounds, Evidence, GLMEstimate, outward
from torchglb.estimators.scaling import Scale
from torchglb.families import GLMFamily
from torchglb.radii import Radius
from torchglb.ucb import SublevelProgram, support

#: evaluations of the dual
STEPS = 12
#: of ``h - v t``, which may be a small difference of large numbers
ROUNDING = 8.0 * float(np.finfo(np.float64).eps)


class OffsetFit(LinearFit):
    """A :class:`LinearFit` whose rows come with an offset; without S.

    Args:
        scale: of the d columns.
        family: the GLM family.
        delta: the failure probability.
        S: must be None.
        radius: as in :class:`LinearFit`.
        prior: as in :class:`LinearFit`; also that of the offset's coefficient, which is 1.
    """

    extra = 1

    def __init__(
        self,
        scale: Scale,
        family: GLMFamily,
        delta: float,
        *,
        S: float | None = None,
        radius: str | Radius | None = None,
        prior: float = 2.0,
    ) -> None:
        if S is not None:
            raise refuse("S", "None together with an offset", S)
        super().__init__(scale, family, delta, radius=radius, prior=prior)

    def append(  # noqa: D102
        self,
        rows: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None = None,
        places: np.ndarray | None = None,
        outside: RowsOutside = "refuse",
        offset: np.ndarray | None = None,
    ) -> int:
        if offset is None and rows.shape[1] == self.dim:
            raise refuse("offset", "a number for every row", "none")
        both = rows if offset is None else np.column_stack([rows, offset])
        return super().append(both, y, weight, places, outside)

    def _directions(self, C: np.ndarray) -> tuple[Tensor, np.ndarray, np.ndarray]:
        u, size, shift = super()._directions(C)
        return torch.cat([u, torch.zeros_like(u[:, :1])], dim=1), size, shift

    @property
    def _last(self) -> np.ndarray:
        return np.eye(self.dim + 1)[-1:]

    def _fitted(self) -> GLMEstimate:
        loss, start = self.likelihood, self.current().theta_hat
        _, theta = subspace_minimum(loss, self._last, np.array([self.length]), start)
        radius = FAR[-1] * self.prior * self.length * math.sqrt(self.dim)
        far = 0.01 * radius
        hessian = expand(loss, theta).hessian.numpy() * self.length**2
        active = float(theta.norm()) > far
        return GLMEstimate(theta.numpy() / self.length, hessian, active, radius / self.length)

    def interval(self, C: np.ndarray) -> Bounds:  # noqa: D102
        u, size, shift = self._directions(C)
        joint = self.current()

        def upper(arms: Tensor) -> tuple[Tensor, Tensor]:
            found = joint.support(arms, throw=False, tol=self.tolerance)
            return found.upper, found.theta

        low, high = self._sliced(u, upper)
        if (low > high).any():
            raise SolverError("the confidence set has no point where the offset's coefficient is 1")
        return Bounds(self.value(C), *outward(low, high, size, shift))

    def profile(self, C: np.ndarray) -> Bounds:  # noqa: D102
        u, size, shift = self._directions(C)
        loss = self.likelihood
        theta = torch.from_numpy(self.estimate.phi * self.length)
        level = loss.value(theta) + 0.5 * float(special.chdtri(1, self.delta))
        S = 30.0 * max(float(theta.norm()), FAR[0] * self.prior * self.length)
        program = SublevelProgram(loss, Ball(loss.dim, S), level)

        def upper(arms: Tensor) -> tuple[Tensor, Tensor]:
            found = support(program, arms, throw=False, tol=self.tolerance, center=theta)
            return torch.where(found.upper >= 0.9 * S, torch.inf, found.upper), found.theta

        low, high = self._sliced(u, upper)
        return Bounds(self.value(C), size * low + shift, size * high + shift)

    def _sliced(
        self, u: Tensor, upper: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ends of ``<u, theta>`` over the slice, for directions ``(k, d + 1)``."""
        arms = torch.cat([u, -u])
        e = torch.from_numpy(self._last)[0]
        hessian = torch.from_numpy(self.estimate.hessian)
        cover = torch.linalg.pinv(hessian, hermitian=True)
        v = -(arms @ cover)[:, -1] / cover[-1, -1].clamp_min(1e-300)
        best = torch.full_like(v, torch.inf)
        low, high = torch.full_like(v, -torch.inf), torch.full_like(v, torch.inf)
        step = 0.1 + 0.5 * v.abs()
        old_v, old_slope = v, torch.full_like(v, torch.nan)
        for _ in range(STEPS):
            bound, theta = upper(arms + v[:, None] * e)
            slope = theta[:, -1] - self.length
            shift = v * self.length
            lost = ROUNDING * (bound.abs() + shift.abs())
            best = torch.fmin(best, bound - shift + lost)
            low, high = torch.where(slope < 0, v, low), torch.where(slope >= 0, v, high)
            # of a maximiser without end the side is known, and nothing else
            slope = torch.where(torch.isinf(bound), torch.nan, slope)
            secant = v - slope * (v - old_v) / (slope - old_slope)
            inside = (secant > low) & (secant < high) & torch.isfinite(secant)
            middle = torch.where(
                torch.isinf(low),
                high - step,
                torch.where(torch.isinf(high), low + step, 0.5 * (low + high)),
            )
            old_v, old_slope = v, slope
            v, step = torch.where(inside, secant, middle), 2.0 * step
        first, second = best.chunk(2)
        return -second.numpy(), first.numpy()

    def test(self, C: np.ndarray, b: Any, relation: Relation = "==") -> Evidence:  # noqa: D102
        u, target, doubt = self._hypothesis(C, b)
        joint = self.current()
        assert joint.log_failure is not None
        if relation != "==":
            raise refuse("test", "an equation, together with an offset", repr(relation))
        A, targets = np.vstack([u.numpy(), self._last]), np.append(target, self.length)
        found = whole_space_test(
            joint.likelihood,
            float(joint.level) - joint.log_failure,
            A,
            targets,
            theta_hat=torch.from_numpy(self.estimate.phi * self.length),
        )
        return self._evidence(found, torch.from_numpy(A), targets, doubt)

    def wald(self, C: np.ndarray) -> Bounds:  # noqa: D102
        A, _ = self.scale.contrasts(np.atleast_2d(np.asarray(C, float)))
        hessian = self.estimate.hessian[: self.dim, : self.dim]
        spread = np.linalg.pinv(hessian, hermitian=True)
        half = special.ndtri(1.0 - self.delta / 2) * np.sqrt(np.einsum("ij,jk,ik->i", A, spread, A))
        middle = self.value(C)
        return Bounds(middle, middle - half, middle + half)
