"""OFULog+ (Lee, Yun, Jun, AISTATS 2024): OFUGLB's forerunner, for logistic rewards.

``argmax_x max { <x, theta> : |theta| <= S, L(theta) - L(theta_hat) <= beta^2 }`` with theta_hat the
minimiser of the logistic loss over the ball, n observations and

``beta^2 = 10 d log(e + S n / (2 d)) + 2 (e - 2 + S) log(1/delta)``.

The constants are the paper's; we have not proven them again, but for the coverage that the tests
measure.
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
