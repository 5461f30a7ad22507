"""Online mirror descent for GLMs in one pass, and an ellipsoid that its own run certifies.

At (x, r), with the loss ``l(z) = (m(z) - r z)/g``, ``z = <x, theta>`` and a step size eta:

    ``A = H + eta l''(z) x x'``,  ``u = theta - eta l'(z) A^-1 x``,
    ``theta+ = argmin |v - u|`` in A over the S-ball,  ``H+ = H + weight x x'``:

the minimiser over the ball of ``|v - theta|^2/(2 eta)`` in H plus the second-order model of l.

**Realised radius**, for every lambda > 0 in ``H_1 = lambda I``, theta_1 = 0. By the optimality of
theta+ and with ``a = l'(z+) - l'(z) - l''(z)(z+ - z)``, which is what the model of the slope lacks,

    ``<(l'(z+) - a) x + H (theta+ - theta)/eta, theta* - theta+> >= 0``.

Let ``weight <= eta 2 D(z*, z+)/(z* - z+)^2`` for every possible z*, D the Bregman divergence of
m/g. Then ``l(z*) >= l(z+) + l'(z+)(z* - z+) + weight (z* - z+)^2/(2 eta)``, and the three-point
identity for the inner product in H gives

    ``|theta* - theta+|^2`` in H+ ``<= |theta* - theta|^2`` in H ``- |theta+ - theta|^2`` in H
    ``+ 2 eta (l(z*) - l(z+)) - 2 eta a (z* - z+)``.

Summed over the rounds, l(z*) is all that is not known. For laws P_s that do not depend on r_s, the
product of ``E_{Z ~ P_s} exp(l_s(z*) - l_s(Z))`` is a supermartingale, so with probability 1 - delta

    ``sum_s l_s(z*_s) <= log(1/delta) + sum_s m_s``,  ``m_s = -log E_{Z ~ P_s} exp(-l_s(Z))``,

at all times. P_s is a discrete law, the nodes and weights of Gauss and Hermite for ``N(z_s, c eta
x'H^-1 x)``: m_s is then a finite sum, and no quadrature error is left to pay for. With ``b = sum_s
a_s x_s``, completing the square,

    ``|theta* - (theta - eta H^-1 b)|^2`` in H ``<= lambda S^2 + 2 eta log(1/delta) + excess
    - 2 eta <b, theta> + eta^2 |b|^2`` in H^-1,
    ``excess = sum_s 2 eta (m_s - l_s(z+) + a_s z+) - |theta_{s+1} - theta_s|^2`` in H_s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import (
    Binomial,
    Gaussian,
    GLMFamily,
    Poisson,
    QuasiBounded,
    has_formulas_of,
)
from torchglb.policies.geometry import project_in_norm
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.saving import taken
from torchglb.radii.theorems.theorem32 import contraction

#: nodes of the law behind the mixed loss
NODES = 20
#: families whose variance function m'' rises, then falls (or does one of both, or neither)
UNIMODAL = (Binomial, Gaussian, Poisson, QuasiBounded)


class MirrorDescent:
    """One pass of mirror descent for a batch, with its realised ellipsoid.

    Args:
        family: the GLM family.
        domain: the ball.
        like: a tensor ``(*B, d)``, for batch, dtype and device.
        step: eta, ``(*B)``.
        regularization: lambda, ``(*B)``.
        spread: c, the variance of P_s in units of ``eta x'H^-1 x``.
        chords: weight rows by the least curvature of a chord (:func:`chord_curvature`), for which
            eta = 1 will do, instead of ``l''(z+)``, which needs eta = 1 + R S.
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        like: Tensor,
        *,
        step: Tensor,
        regularization: Tensor,
        spread: float,
        chords: bool,
    ) -> None:
        self.family, self.domain, self.spread, self.chords = family, domain, spread, chords
        shape, d = tuple(like.shape[:-1]), like.shape[-1]
        self.step, self.regularization = step, regularization
        self.S = domain.radius_like(like).expand(shape)
        self.concordance = domain.constant(family.self_concordance, like[..., 0])
        self.theta = torch.zeros_like(like)
        self.offset = torch.zeros_like(like)  # b
        self.excess = torch.zeros_like(like[..., 0], dtype=torch.float64)
        self.H = RankOneInverse.scaled_identity(regularization, shape, d, like)
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        law = torch.as_tensor(np.stack([nodes, np.log(weights / weights.sum())]))
        self._nodes, self._log_weights = law.to(dtype=torch.float64, device=like.device)

    # ---- one row ---------------------------------------------------------------------------

    def add(self, x: Tensor, r: Tensor) -> None:
        """Learns from ``x (*B, d)`` and ``r (*B)``; x = 0 changes nothing."""
        family, eta = self.family, self.step
        z = (x * self.theta).sum(-1)
        slope, curvature = family.slope_and_curvature(z, r)
        turned = self.H.solve(x)
        form = (x * turned).sum(-1).clamp_min(0.0)  # x'H^-1 x
        # A^-1 x = H^-1 x / (1 + eta l'' x'H^-1 x)
        move = eta * slope / (1.0 + eta * curvature * form)
        free = self.theta - move[..., None] * turned
        A = self.H.matrix + (eta * curvature)[..., None, None] * x[..., :, None] * x[..., None, :]
        after = project_in_norm(free, A, self.domain)
        away = after - self.theta
        moved = ((self.H.matrix @ away[..., None])[..., 0] * away).sum(-1)

        wide, there, reward = z.double(), (x * after).sum(-1).double(), r.double()
        slope_there, curvature_there = family.slope_and_curvature(there, reward)
        slope_here, curvature_here = family.slope_and_curvature(wide, reward)
        lacking = slope_there - slope_here - curvature_here * (there - wide)  # a
        mixed = self._mixed_loss(wide, (self.spread * eta * form).double(), reward)
        gain = mixed - family.nll(there, reward) + lacking * there
        weight = curvature_there
        if self.chords:
            length = torch.linalg.vector_norm(x, dim=-1).double()
            end = (self.S.double() * length).expand_as(there)
            weight = chord_curvature(family, there, end, self.concordance.double())
        self.excess = self.excess + 2.0 * eta.double() * gain - moved.double()
        self.offset = self.offset + lacking.to(x.dtype)[..., None] * x
        self.H.add(x, weight.to(x.dtype))
        self.theta = after

    def _mixed_loss(self, z: Tensor, variance: Tensor, r: Tensor) -> Tensor:
        """``m_s = -log sum_k w_k exp(-l(z + sqrt(variance) t_k))``."""
        points = z[..., None] + variance.sqrt()[..., None] * self._nodes
        return -torch.logsumexp(self._log_weights - self.family.nll(points, r[..., None]), dim=-1)

    # ---- the ellipsoid -----------------------------------------------------------------------

    @property
    def center(self) -> Tensor:
        """``theta - eta H^-1 b``, ``(*B, d)``."""
        return self.theta - self.step[..., None] * self.H.solve(self.offset)

    def squared_radius(self, delta: float) -> Tensor:
        """Of the realised ellipsoid in H, ``(*B)``; negative only where it misses theta*."""
        eta, b = self.step, self.offset
        fixed = self.regularization * self.S.square() + 2.0 * eta * math.log(1.0 / delta)
        turned = eta * (b * (eta[..., None] * self.H.solve(b) - 2.0 * self.theta)).sum(-1)
        return fixed + self.excess.to(fixed.dtype) + turned

    def copied(self) -> MirrorDescent:
        """A copy whose steps leave this one as it is."""
        after = copy.copy(self)
        after.H = self.H.copy()
        return after

    # ---- saving ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt."""
        names = ("theta", "offset", "excess")
        return {"H": self.H.state_dict()} | {name: getattr(self, name).clone() for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        found = {n: taken(state, n, getattr(self, n)) for n in ("theta", "offset", "excess")}
        H = self.H.copy()
        H.load_state_dict(state["H"])
        self.__dict__.update(found, H=H)


def chord_curvature(family: GLMFamily, z: Tensor, end: Tensor, concordance: Tensor) -> Tensor:
    """A lower bound on ``min 2 D(y, z)/(y - z)^2`` over ``|y| <= end``, D of ``m/g``; ``(*B)``.

    ``2 D(y, z)/(y - z)^2`` is the mean of ``m''/g`` over the chord from z to y, with the weights
    ``2 (1 - u)``. Where m'' is unimodal, so is this mean as a function of ``|y - z|`` on either
    side of z: the kernel ``(1 - w/t)_+/t`` is totally positive of order 2, ``log(1 - e^x)`` being
    concave, so that it takes functions which cross a level at most twice, upwards first, to such.
    The minimum on a side is then at z or at the end, and since m'' falls on one side of z, at one
    of the two ends. Any family has ``m''(z)/g 2 phi(R max |y - z|)`` with
    ``phi(D) = (e^-D - 1 + D)/D^2`` as a lower bound, by self-concordance; the larger one counts.
    The ends are computed less what cancellation may have cost.
    """
    apart = concordance * (end + z.abs())
    least = 2.0 * family.curvature(z) * contraction(apart)
    if not has_formulas_of(family, *UNIMODAL):
        return least
    g, eps = family.dispersion, torch.finfo(z.dtype).eps
    m, mean = family.log_partition(z), family.mean(z)
    ends = []
    for y in (end, -end):
        there, along = family.log_partition(y), mean * (y - z)
        size = there.abs() + m.abs() + along.abs()
        tiny = torch.finfo(z.dtype).tiny
        square = (y - z).square().clamp_min(tiny)
        computed = 2.0 * (there - m - along - 32.0 * eps * size) / (square * g)
        # close to z the difference cancels, and self-concordance along this chord says more
        near = 2.0 * family.curvature(z) * contraction(concordance * (y - z).abs())
        ends.append(torch.maximum(computed, near))
    return torch.maximum(least, torch.minimum(*ends))
