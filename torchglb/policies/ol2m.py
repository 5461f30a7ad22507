"""OL2M: online logistic regression for bandits (Zhang, Yang, Jin, Xiao and Zhou 2016).

With ``b = 1/(2 (1 + e^S))``, ``Z = d I + (b/2) sum x x'`` (the present x included) and ``grad =
(mu(<x, theta>) - r) x``:

    ``theta <- project(theta - Z^-1 grad)``, index ``<x, theta> + radius |x|`` in Z^-1,
    ``radius^2 = 8S + d S^2 + (8/b + 16S/3) log(4 log(t+1) t^2/delta)
                 + (2/b)(log det Z - d log d)``,

t = n + 1 the present round. The paper's step is ``argmin |theta' - theta|^2/2`` in Z ``+ <grad,
theta'>`` over the S-ball, so the projection is in the norm of Z and leaves points inside alone. The
constants are those of public code for the paper's theorem; we have not proven them again, but for
the coverage that the tests measure. Public code adds the bonus, which belongs to <x, theta>, to the
mean mu(<x, theta>).

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds with a projection).
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.policies.geometry import project_in_norm
from torchglb.policies.online import OnlinePolicy
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import PolicySettings


@register
class OL2M(OnlinePolicy):
    """OL2M.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = OL2M(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "ol2m"
    guaranteed = False
    constants = "public"
    requires = Requirements(families=(Bernoulli,))

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self._b = 0.5 * torch.sigmoid(-self._S)  # 1/(2(1 + e^S))
        self._V = self._begin(float(domain.dim))  # Z

    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``."""
        d, t, S, b = self.domain.dim, self.rounds + 1, self._S, self._b
        failure = math.log(4 * math.log(t + 1) * t * t / self.delta)
        growth = self._V.logdet - d * math.log(d)
        return 8 * S + d * S.square() + (8 / b + 16 * S / 3) * failure + 2 / b * growth

    def _step(self, x: Tensor, r: Tensor) -> None:
        slope = self.family.mean((x * self._theta).sum(-1)) - r
        self._V.add(x, 0.5 * self._b)
        moved = self._theta - slope[..., None] * self._V.solve(x)
        self._theta = project_in_norm(moved, self._V.matrix, self.domain)
