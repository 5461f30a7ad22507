"""GLOC: online-to-confidence-set conversion for GLM bandits (Jun et al. 2017).

An online Newton step predicts, and its predictions give the data of a linear regression. With
``k = min m''`` on the ball, ``V = d I + sum x x'`` (x_s included), and
``grad = (mu(<x_s, theta_s>) - r_s) x_s``:

    ``theta_{s+1} = project(theta_s - V^-1 grad / k)``,
    ``B += |grad|^2`` in V^-1 ``/ (2k)``,  ``B_0 = 2 k S^2 d``,
    centre ``V^-1 sum_s <x_s, theta_s> x_s``,
    ``radius^2 = 1 + (4/k) B + 8 (R/k)^2 log(2 sqrt(1 + 2B/k + 4 (R/k)^4 / delta^2) / delta)``,

index ``<x, centre> + radius |x|`` in V^-1. The projection is the paper's: onto the S-ball, in the
norm of V, and a point inside the ball stays where it is. R scales the noise: S for bounded rewards,
sigma for Gaussian ones, and ``R_mudot(S) = max m''`` for unbounded others (Poisson), which the
paper's sub-Gaussian theory does not cover.

Public code differs: it moves every iterate onto the sphere, inside or not, and adds the bonus of
<x, centre> to mu(<x, theta>) of the online iterate.

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds with a projection).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.families import Gaussian, GLMFamily
from torchglb.policies.online import OnlinePolicy
from torchglb.policies.parts import project_in_norm
from torchglb.policies.registry import register


@register
class GLOC(OnlinePolicy):
    """GLOC.

    Args:
        family: a GLM with 0 < m'' < infinity on the ball.
        domain: the ball that contains theta*.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy`, by name.
    """

    name = "gloc"
    carried = ("moment", "regret")

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        d, S = domain.dim, self._S
        self._least = self._smallest_variance()
        largest = self._constant(family.max_variance)
        if not bool((largest < math.inf).all()):
            raise refuse("family", "one with bounded m'' on the ball, which gloc needs", largest)
        low, high = family.reward_range
        if isinstance(family, Gaussian):
            self._noise = torch.full_like(S, family.sigma)
        elif high - low < math.inf:
            self._noise = S.clone()
        else:
            self._noise = largest
        self._moment = torch.zeros_like(self._theta)
        self._regret = 2 * self._least * S.square() * d
        self._V = self._begin(float(d))

    @property
    def centre(self) -> Tensor:  # noqa: D102
        return self._V.solve(self._moment)

    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``."""
        k, B, ratio = self._least, self._regret, self._noise / self._least
        inside = 1 + 2 * B / k + 4 * ratio**4 / self.delta**2
        return 1 + 4 / k * B + 8 * ratio.square() * (2 * inside.sqrt() / self.delta).log()

    def _step(self, x: Tensor, r: Tensor) -> None:
        z = (x * self._theta).sum(-1)
        slope = self.family.mean(z) - r
        self._V.add(x)
        turned = self._V.solve(x)
        self._moment = self._moment + z[..., None] * x
        length = (turned * x).sum(-1)
        self._regret = self._regret + slope.square() * length / (2 * self._least)
        moved = self._theta - (slope / self._least)[..., None] * turned
        self._theta = project_in_norm(moved, self._V.matrix, self.domain)
