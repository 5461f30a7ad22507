"""GLOC: online-to-confidence-set conversion for GLM bandits (Jun et al. 2017).

An online Newton step predicts, and its predictions give the data of a linear regression. With
``k = min m''`` on the ball, ``V = lambda I + sum x x'`` (x_s included), lambda = d, and
``grad = (mu(<x_s, theta_s>) - r_s) x_s``:

    ``theta_{s+1} = project(theta_s - V^-1 grad / k)``,
    ``B += |grad|^2`` in V^-1 ``/ (2k)``,  ``B_0 = 2 k S^2 lambda``,
    centre ``c = V^-1 b``,  ``b = sum_s z_s x_s``,  ``z_s = <x_s, theta_s>``,
    ``radius^2 = 1 + (4/k) B + 8 (R/k)^2 log(2 sqrt(1 + 2B/k + 4 (R/k)^4 / delta^2) / delta)
                 + lambda S^2 - (sum_s z_s^2 - <c, b>)``,

index ``<x, c> + radius |x|`` in V^-1. R is the sub-Gaussian constant of the rewards: (b - a)/2 on
[a, b], sigma for Gaussian ones. The projection is onto the S-ball, in the norm of V, and a point
inside the ball stays where it is.

These constants are the paper's (Theorems 1 and 2), and proven: strong convexity gives ``(k/2) sum_s
(z_s - z*_s)^2 <= B + sum_s (r_s - mu(z*_s))(z_s - z*_s)``, B being the regret bound of the Newton
steps; the self-normalised bound for the scalar martingale on the right turns it into the first line
of the radius, and completing the square of ``lambda |theta|^2 + sum_s (z_s - <x_s, theta>)^2`` adds
the second. (From theta_1 = 0 a quarter of B_0 would do.)

Rewards without a bound that are not Gaussian (Poisson) are not sub-Gaussian: R is then
``sqrt(R_mudot)``, which is their largest standard deviation on the ball, and nothing is guaranteed.

Public code differs, and ``constants="public"`` keeps its radius for comparison: R = S for bounded
rewards and ``R_mudot`` for unbounded ones, without the second line. (It also moves every iterate
onto the sphere, inside or not, and adds the bonus of <x, centre> to mu(<x, theta>) of the online
iterate, which we do not.)

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds with a projection).
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice, refuse
from torchglb.domain import Ball
from torchglb.families import Gaussian, GLMFamily, has_formulas_of
from torchglb.policies.geometry import project_in_norm
from torchglb.policies.online import OnlinePolicy
from torchglb.policies.registry import register
from torchglb.policies.settings import CONSTANTS, Constants, PolicySettings


@register
class GLOC(OnlinePolicy):
    """GLOC.

    Args:
        family: a GLM with 0 < m'' < infinity on the ball.
        domain: the ball that contains theta*.
        constants: ``"proven"``, the paper's, or ``"public"``, those of public code.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = GLOC(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "gloc"
    carried = ("moment", "regret", "squares")

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        constants: Constants = "proven",
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.constants = check_choice("constants", constants, CONSTANTS)
        d, S = domain.dim, self._S
        self._least = self._smallest_variance()
        largest = self._constant(family.max_variance)
        if not bool((largest < math.inf).all()):
            raise refuse("family", "one with bounded m'' on the ball, which gloc needs", largest)
        low, high = family.reward_range
        bounded, public = high - low < math.inf, self.constants == "public"
        if has_formulas_of(family, Gaussian):
            self._noise = torch.full_like(S, family.sigma)
        elif bounded:
            self._noise = S.clone() if public else torch.full_like(S, 0.5 * (high - low))
        else:
            self._noise = largest if public else (family.dispersion * largest).sqrt()
        self.guaranteed = not public and (bounded or has_formulas_of(family, Gaussian))
        self._moment = torch.zeros_like(self._theta)  # b
        self._regret = 2 * self._least * S.square() * d  # B
        self._squares = torch.zeros_like(S)  # sum of z^2
        self._V = self._begin(float(d))

    @property
    def centre(self) -> Tensor:  # noqa: D102
        return self._V.solve(self._moment)

    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``."""
        k, B, ratio = self._least, self._regret, self._noise / self._least
        inside = 1 + 2 * B / k + 4 * ratio**4 / self.delta**2
        found = 1 + 4 / k * B + 8 * ratio.square() * (2 * inside.sqrt() / self.delta).log()
        if self.constants == "public":
            return found
        left = self._squares - (self.centre * self._moment).sum(-1)
        return found + self.domain.dim * self._S.square() - left

    def _step(self, x: Tensor, r: Tensor) -> None:
        z = (x * self._theta).sum(-1)
        slope = self.family.mean(z) - r
        self._V.add(x)
        turned = self._V.solve(x)
        self._moment = self._moment + z[..., None] * x
        self._squares = self._squares + z.square()
        length = (turned * x).sum(-1)
        self._regret = self._regret + slope.square() * length / (2 * self._least)
        moved = self._theta - (slope / self._least)[..., None] * turned
        self._theta = project_in_norm(moved, self._V.matrix, self.domain)
