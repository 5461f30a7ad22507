"""OFUL with a bound for each arm of its own: optimism that does not pay for the dimension.

For a fixed arm set every arm c is a contrast that was named beforehand. Weights of the rows that
are known before their rewards, ``a_s = <c, V^-1 x_s>/<c, V^-1 c>`` with V before row s, make

    ``exp( u sum_s a_s (r_s - <x_s, theta*>)/sigma - u^2 sum_s a_s^2/2 )``

a martingale for every u (a supermartingale for sub-Gaussian noise). With fixed scales u_k of both
signs and weights w_k, for all t at once with probability ``1 - delta'``,

    ``|G*| <= slab = sigma min_k ( log(1/(w_k delta')) + u_k^2 sum a_s^2/2 )/u_k``

where ``G* = sum_s a_s (r_s - <x_s, theta*>)``. With ``w = sum_s a_s x_s``, ``alpha = <c, V^-1
w>/<c, V^-1 c>``, ``e = w - alpha c`` and OFUL's ridge estimate and ellipsoid ``|theta* - theta| <=
beta`` in V, on both events,

    ``alpha <c, theta* - theta> = sum_s a_s r_s - <w, theta> - G* - <e, theta* - theta>``,

so ``<c, theta*>`` is within ``(slab + beta |e| in V^-1)/alpha`` of ``<c, theta> + (sum a_s r_s -
<w, theta>)/alpha``: exact, nothing is linearised. The index of an arm is the smaller of this bound
and OFUL's. The ellipsoid gets the share ``joint_share`` of delta, each of the K arms a K-th of the
rest. For unit arms slab/alpha is about ``sigma |c|_{V^-1} sqrt(2 log(K/delta))``, where OFUL has
``sqrt(d log n)``.

O(K d^2) per round, no history; compiled on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import numbers_on
from torchglb.checks import check_positive, check_probability
from torchglb.contrasts.arm_kernels import SHORTEST
from torchglb.contrasts.arms import unit_rows
from torchglb.contrasts.linear_kernels import (
    LEAST_ALPHA,
    LOST,
    linear_bounds,
    weigh_linear_row,
)
from torchglb.contrasts.lines import SCALES, scale_weights
from torchglb.domain import Ball
from torchglb.families import Gaussian, GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.fixed_arms import DeclaredArms
from torchglb.policies.geometry import ellipsoid_in
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import taken
from torchglb.policies.settings import PolicySettings
from torchglb.rounding import round_up
from torchglb.sets import EllipsoidSet, Event, Interval


@register
class OFULContrast(Policy):
    """OFUL for a fixed arm set, with contrast bounds.

    Args:
        family: Gaussian; sigma is that of the family.
        domain: the ball that contains theta*.
        delta: the failure level.
        regularization: lambda.
        joint_share: the part of delta that the ellipsoid gets.
        settings: those of :class:`Policy`; the sums of the contrasts are float64.
    """

    name = "oful-contrast"
    requires = Requirements(families=(Gaussian,), fixed_arms=True)

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        regularization: float = 1.0,
        joint_share: float = 0.1,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.regularization = check_positive("regularization", regularization)
        self.joint_share = check_probability("joint_share", joint_share)
        self._event = Event(self.delta)
        shape = tuple(self.batch_shape)
        # in float64, whatever the rows are: a sum of many in float32 loses what few of them say
        self._moment = torch.zeros((*shape, domain.dim), dtype=torch.float64, device=self.device)
        self._V = RankOneInverse.scaled_identity(
            self.regularization, shape, domain.dim, self._moment
        )
        self._declared = DeclaredArms(self)
        self._units: tuple[Tensor, Tensor] | None = None  # arms of length 1, and their lengths
        #: for each arm: sum a_s x_s in the first d places, sum a_s r_s, sum a_s^2; ``(*B, K, d+2)``
        self._sums = torch.zeros((*shape, 0, domain.dim + 2), device=self.device).double()

    # ---- OFUL's part ---------------------------------------------------------------------

    @property
    def theta(self) -> Tensor:
        """The ridge estimate, ``(*B, d)``."""
        return self._V.solve(self._moment).to(self.dtype)

    def estimate(self) -> Tensor:  # noqa: D102
        return self.theta

    def radius(self) -> Tensor:
        """The radius of OFUL's ellipsoid at its share of delta, ``(*B)``."""
        return round_up(self._radius(), self.dtype)

    def _radius(self) -> Tensor:
        lam, d = self.regularization, self.domain.dim
        growth = self._V.logdet - d * math.log(lam)
        S = self.domain.radius_like(growth)
        noise = math.sqrt(self.family.dispersion)
        level = 2 * math.log(1 / (self.delta * self.joint_share))
        return noise * (level + growth).sqrt() + math.sqrt(lam) * S

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid; it does not show what the arms' own bounds know."""
        gamma, center = self._radius().square(), self._V.solve(self._moment)
        parts = ellipsoid_in(self.dtype, center, self._V.matrix, gamma)
        return EllipsoidSet(self.family, self.domain, *parts, event=self._event)

    # ---- the bounds of the arms ----------------------------------------------------------

    def contrast_bounds(self) -> Interval:
        """Ends of ``<c, theta*>`` for the declared arms, ``(*B, K)``, by their own sums alone.

        Infinite where the sums say nothing, as before the first reward.
        """
        assert self._units is not None
        units, lengths = self._units
        inverse, theta, radius = self._V.inverse, self._V.solve(self._moment), self._radius()
        if self.device.type != "cpu":
            return self._bounds_on_device(units, lengths, inverse, theta, radius)
        lower, upper = torch.empty_like(lengths), torch.empty_like(lengths)
        N, (K, d) = self.batch_shape.numel(), units.shape[-2:]
        scales, levels = (np.array(part) for part in self._scales(K))
        linear_bounds(
            units.reshape(N, K, d).numpy(),
            lengths.reshape(N, K).numpy(),
            inverse.reshape(N, d, d).numpy(),
            theta.reshape(N, d).numpy(),
            radius.reshape(N).numpy(),
            self._sums.reshape(N, K, d + 2).numpy(),
            scales,
            levels,
            math.sqrt(self.family.dispersion),
            lower.view(N, K).numpy(),
            upper.view(N, K).numpy(),
        )
        return Interval(lower, upper)

    def _scales(self, K: int) -> tuple[list[float], list[float]]:
        """The scales u, and ``log(1/(w delta'))`` of each."""
        share = self.delta * (1.0 - self.joint_share) / max(K, 1)
        levels = [math.log(1.0 / (weight * share)) for weight in scale_weights()]
        return [2.0 ** (1 - k) for k in range(SCALES)], levels

    def _bounds_on_device(
        self, units: Tensor, lengths: Tensor, inverse: Tensor, theta: Tensor, radius: Tensor
    ) -> Interval:
        """:func:`torchglb.contrasts.linear_kernels.linear_bounds` where there is no Numba."""
        d = self.domain.dim
        w, rewards, squares = self._sums[..., :d], self._sums[..., d], self._sums[..., d + 1]
        toward, turned = units @ inverse, w @ inverse
        forms, whole = (toward * units).sum(-1), (turned * w).sum(-1).clamp_min(0.0)
        alpha = (toward * w).sum(-1) / forms
        leak = (whole - alpha.square() * forms).clamp_min(0.0).sqrt() + LOST * whole.sqrt()
        scales, levels = self._scales(units.shape[-2])
        u, level = (numbers_on(tuple(values), self.device) for values in (scales, levels))
        slab = (level / u + 0.5 * u * squares[..., None]).amin(-1) * (1.0 + 1e-9)
        half = math.sqrt(self.family.dispersion) * slab + radius[..., None] * leak
        middle = (units @ theta[..., None])[..., 0]
        shift = rewards - (w @ theta[..., None])[..., 0]
        # alpha is 0 before the first reward, and for the zero arm
        known = alpha > LEAST_ALPHA * forms.reciprocal().clamp_max(1.0)
        known = known & (lengths >= SHORTEST)
        safe = torch.where(known, alpha, 1.0)
        lower = lengths * torch.where(known, middle + (shift - half) / safe, -torch.inf)
        upper = lengths * torch.where(known, middle + (shift + half) / safe, torch.inf)
        zero = lengths == 0
        return Interval(torch.where(zero, 0.0, lower), torch.where(zero, 0.0, upper))

    def _joint_scores(self, arms: Tensor) -> Tensor:
        arms = arms.double()
        mean = (arms @ self._V.solve(self._moment)[..., None])[..., 0]
        return mean + self._radius()[..., None] * self._V.norms(arms)

    def _scores(self, arms: Tensor) -> Tensor:
        scores, same = self._joint_scores(arms), self._declared.same(arms)
        if same is not None:
            upper = self.contrast_bounds().upper
            scores = torch.where(same, torch.minimum(scores, upper), scores)
        return round_up(scores, self.dtype)

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play; the first call declares the arms."""
        arms = self._check_arms(arms)
        new = self._declared.are_new(arms)
        index = self._scores(arms).argmax(-1)
        if new:
            shape = (*arms.shape[:-1], self.domain.dim + 2)
            sums = torch.zeros(shape, dtype=torch.float64, device=self.device)
            units, arms = unit_rows(arms), arms.clone()
            self._declared.arms, self._units, self._sums = arms, units, sums
        return index

    def bounds(self, x: ArrayLike, refine: bool = True) -> Interval:
        """Ends of ``<x, theta*>``: by the ellipsoid, and for a declared arm by its own sums."""
        x = self._check_point(x)
        region = self.confidence_set().interval(x)
        if self._declared.arms is None:
            return region
        own, match = self.contrast_bounds(), self._declared.matches(x)
        lower = -round_up(torch.where(match, -own.lower, torch.inf).amin(-1), x.dtype)
        upper = round_up(torch.where(match, own.upper, torch.inf).amin(-1), x.dtype)
        return Interval(torch.maximum(region.lower, lower), torch.minimum(region.upper, upper))

    # ---- learning and saving -------------------------------------------------------------

    def _update(self, x: Tensor, r: Tensor) -> None:
        x, r = x.double(), r.double()
        V, moment = self._V.copy(), self._moment + (r[..., None] * x).sum(-2)
        sums = self._sums
        for s in range(r.shape[-1]):  # a weight rests on the rows before its own
            if self._units is not None:
                past = self._units[0], V.inverse
                sums = self._weighed(*past, x[..., s, :], r[..., s], sums)
            V.add(x[..., s, :])
        self._V, self._moment, self._sums = V, moment, sums  # computed first, committed last

    def _weighed(
        self, units: Tensor, inverse: Tensor, x: Tensor, r: Tensor, sums: Tensor
    ) -> Tensor:
        """The sums with one row ``(*B, d)``, for ``V^-1`` of the rows before."""
        if self.device.type == "cpu":
            N, (K, d) = self.batch_shape.numel(), units.shape[-2:]
            sums = sums.clone()
            weigh_linear_row(
                units.reshape(N, K, d).numpy(),
                inverse.detach().reshape(N, d, d).numpy(),
                x.reshape(N, d).contiguous().numpy(),
                r.reshape(N).contiguous().numpy(),
                sums.view(N, K, d + 2).numpy(),
            )
            return sums
        toward = units @ inverse
        forms = (toward * units).sum(-1)
        a = (toward * x[..., None, :]).sum(-1) / forms
        a = torch.where(forms > 0, a, 0.0)[..., None]
        wide = x[..., None, :].expand(*a.shape[:-1], x.shape[-1])
        return sums + torch.cat([a * wide, a * r[..., None, None], a * a], dim=-1)

    def _state(self) -> dict[str, Any]:
        return {
            "V": self._V.state_dict(),
            "moment": self._moment.clone(),
            "arms": self._declared.state_dict(),
            "sums": self._sums.clone(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        moment, arms = (
            taken(state, "moment", self._moment),
            self._declared.loaded(state, self._V.inverse),
        )
        shape = (*self.batch_shape, 0 if arms is None else arms.shape[-2], self.domain.dim + 2)
        sums = taken(state, "sums", torch.zeros(shape, dtype=torch.float64, device=self.device))
        self._V.load_state_dict(state["V"])
        self._moment, self._declared.arms, self._sums = moment, arms, sums
        self._units = None if arms is None else unit_rows(arms)
