"""GLB-OMD: GLM bandits in one pass (Zhang, Xu, Zhao and Sugiyama 2025), and two tighter radii.

Mirror descent over the S-ball (:mod:`torchglb.policies.mirror_descent`) with
``H_1 = lambda I``; index ``<x, centre> + beta |x|`` in H^-1. O(d^2) memory and time per round, no
history (O(d^3) in rounds with a projection), any GLM whose m'' is bounded on the ball.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from torchglb.checks import check_positive, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.geometry import ellipsoid_in, farthest_point, towards
from torchglb.policies.mirror_descent import MirrorDescent
from torchglb.policies.registry import register
from torchglb.policies.settings import PolicySettings
from torchglb.rounding import round_up
from torchglb.sets import EllipsoidSet, Event


class _OnePass(Policy):
    """What the three have in common.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        settings: those of :class:`Policy`.
    """

    #: the variance of the laws behind the realised radius, in units of eta x'H^-1 x
    spread: ClassVar[float] = 1.5
    #: whether rows are weighted by the least curvature of a chord, with eta = 1
    chords: ClassVar[bool] = False
    #: a sum of many in float32 loses what few of them say
    _carried_dtype = torch.float64

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self._event = Event(self.delta)
        self._like = torch.zeros(
            (*self.batch_shape, domain.dim), dtype=self._carried_dtype, device=self.device
        )
        self._S = domain.radius_like(self._like).expand(self.batch_shape)

    def _start(self, step: Tensor, regularization: Tensor) -> None:
        self._descent = MirrorDescent(
            self.family,
            self.domain,
            self._like,
            step=step,
            regularization=regularization,
            spread=self.spread,
            chords=self.chords,
        )

    @property
    def centre(self) -> Tensor:
        """The centre of the ellipsoid, ``(*B, d)`` in float64."""
        return self._descent.center

    def squared_radius(self) -> Tensor:
        """``beta^2``, ``(*B)``."""
        return self._descent.squared_radius(self.delta).clamp_min(0.0)

    def estimate(self) -> Tensor:
        return self.centre.to(self.dtype, copy=True)

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic."""
        gamma, H = self.squared_radius(), self._descent.H
        parts = ellipsoid_in(self.dtype, self.centre, H.matrix, gamma)
        return EllipsoidSet(self.family, self.domain, *parts, event=self._event)

    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        found = farthest_point(self.centre, self._descent.H.matrix, self.squared_radius())
        return towards(found.to(self.dtype))

    def _scores(self, arms: Tensor) -> Tensor:
        arms = arms.double()
        mean = (arms @ self.centre[..., None])[..., 0]
        radius = self.squared_radius().sqrt()
        return round_up(mean + radius[..., None] * self._descent.H.norms(arms), self.dtype)

    def _update(self, x: Tensor, r: Tensor) -> None:
        after, x, r = self._descent.copied(), x.double(), r.double()
        for i in range(x.shape[-2]):  # an online method: one observation after the other
            after.add(x[..., i, :], r[..., i])
        self._descent = after  # all at once, or nothing where it was interrupted

    def _state(self) -> dict[str, Any]:
        return self._descent.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        self._descent.load_state_dict(state)


@register
class GLBOMD(_OnePass):
    """GLB-OMD with the constants of the paper's theorem.

    With ``eta = 1 + R S``, ``R`` the self-concordance constant (1 for logistic and Poisson losses),
    ``R_mudot = max m''`` on the ball and n observations,

        ``lambda = max(14 d eta R^2, 6 eta R S R_mudot/g)``, 1 where R = 0 (our choice),
        ``beta^2 = 4 lambda S^2 + 2 eta log(1/delta) + d (6 eta^2 + eta) log(1 + R_mudot n/(lambda
        g))``

    around theta, in H with the weights ``m''(z+)/g``. These constants are published.

    Example:
        >>> import torchglb as glb
        >>> policy = GLBOMD(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "glb-omd"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        d, g, S = domain.dim, family.dispersion, self._S

        def concordance(radius: float) -> float:
            found = family.derivative_ratio(3, radius)
            return family.self_concordance(radius) if found is None else found

        R = self._constant(concordance)
        self._largest = self._constant(family.max_variance)
        if not bool((self._largest < math.inf).all()):
            expected = f"one with bounded m'' on the ball, which {self.name} needs"
            raise refuse("family", expected, type(family).__name__)
        eta = 1.0 + R * S
        lam = torch.maximum(14.0 * d * eta * R.square(), 6.0 * eta * R * S * self._largest / g)
        self._start(eta, torch.where(R > 0, lam, torch.ones_like(lam)))

    @property
    def centre(self) -> Tensor:
        """theta, ``(*B, d)``."""
        return self._descent.theta

    def squared_radius(self) -> Tensor:
        """``beta^2`` of the theorem, ``(*B)``."""
        eta, lam, d = self._descent.step, self._descent.regularization, self.domain.dim
        growth = torch.log1p(self._largest * self.rounds / (lam * self.family.dispersion))
        fixed = 4.0 * lam * self._S.square() + 2.0 * eta * math.log(1.0 / self.delta)
        return fixed + d * (6.0 * eta.square() + eta) * growth


class _Realised(_OnePass):
    """A radius from what the run has realised; proven in :mod:`torchglb.policies.mirror_descent`.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        regularization: lambda.
        settings: those of :class:`Policy`.
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        regularization: float | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        given = self._default(domain.dim) if regularization is None else regularization
        self.regularization = check_positive("regularization", given)
        self._start(self._step_size(), torch.full_like(self._S, self.regularization))

    def _default(self, dim: int) -> float:
        raise NotImplementedError

    def _step_size(self) -> Tensor:
        raise NotImplementedError


@register
class GLBOMDRealised(_Realised):
    """GLB-OMD's algorithm with the realised radius, for any lambda > 0 (default d).

    ``eta = 1 + R S``, R the self-concordance constant on the ball, and the weights ``m''(z+)/g``:
    ``2 D(z*, z+)/(z* - z+)^2 >= m''(z+)/(g (1 + R |z* - z+|/2))`` by self-concordance, and two
    points of the ball are at most 2S apart. Proven here.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        regularization: lambda; d if left out.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = GLBOMDRealised(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "glb-omd-realised"

    def _default(self, dim: int) -> float:
        return float(dim)

    def _step_size(self) -> Tensor:
        R = self._constant(self.family.self_concordance)
        return 1.0 + R * self._S


@register
class GLBOMDRows(_Realised):
    """Mirror descent with eta = 1 and rows weighted by the least curvature of a chord.

    The weight of a row is ``min 2 D(z, z+)/(z - z+)^2`` over ``|z| <= S |x|``, D the Bregman
    divergence of m/g: exactly what the proof of the realised radius needs, for each row instead of
    for the worst one. Proven here.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        regularization: lambda; 1 if left out.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = GLBOMDRows(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "glb-omd-rows"
    spread = 1.0
    chords = True

    def _default(self, dim: int) -> float:
        return 1.0

    def _step_size(self) -> Tensor:
        return torch.ones_like(self._S)
