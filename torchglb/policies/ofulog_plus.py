"""OFULog+ (Lee, Yun, Jun, AISTATS 2024): OFUGLB's forerunner, for logistic rewards.

``argmax_x max { <x, theta> : |theta| <= S, L(theta) - L(theta_hat) <= beta^2 }`` with theta_hat the
minimiser of the logistic loss over the ball, n observations and

``beta^2 = 10 d log(e + S n / (2 d)) + 2 (e - 2 + S) log(1/delta)``.

The constants are those of the authors' code. That the set holds theta* at all times with
probability 1 - delta is **proven here**, by comparison with Theorem 3.1 of
:mod:`torchglb.policies.ofuglb`: rewards and means are in [0, 1], so the loss is Lipschitz with
``L_t = n``, and with ``y = 2 S n/d`` that theorem's ``log(1/delta) + d log(e max(1, y))`` is never
larger, since ``10 log(e + y/4) >= 1 + log max(1, y)`` and ``2 (e - 2 + S) >= 1``.
"""

from __future__ import annotations

import math

from torch import Tensor

from torchglb.families import Bernoulli
from torchglb.inference.level import Height
from torchglb.policies.exact import ExactPolicy
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements


@register
class OFULogPlus(ExactPolicy):
    """OFULog+, for logistic rewards.

    Args:
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = OFULogPlus(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "ofulog+"
    requires = Requirements(families=(Bernoulli,))

    def _height(self) -> Height:
        d = self.domain.dim

        def radius(S: float) -> float:
            spread = 10.0 * d * math.log(math.e + S * len(self._program.history) / (2.0 * d))
            return spread - 2.0 * (math.e - 2.0 + S) * math.log(self.delta)

        S = self.domain.radius
        return Height(radius=radius(S) if isinstance(S, float) else self._constant(radius))

    def _update(self, x: Tensor, r: Tensor) -> None:
        self._append(x, r)
