"""OFUGLB (Lee, Yun, Jun, NeurIPS 2024, Algorithm 1): optimism over the likelihood-ratio set.

With n observations, ``L(theta) = (1/g) sum_s m(<x_s, theta>) - r_s <x_s, theta>`` and theta_hat its
minimiser over ``|theta| <= S``, play

``argmax_x max { <x, theta> : |theta| <= S, L(theta) - L(theta_hat) <= beta^2 }``,
``beta^2 = log(1/delta) + d log(e max(1, 2 S L_t / d))``

with the Lipschitz constants L_t of the paper's Table 1 (Theorem 3.1). Algorithm 1 misprints the
argmin of theta_hat as an argmax, and Table 1's Gaussian and Poisson rows spend a delta of their
own, which is here taken out of delta: a twentieth. The constants are the paper's, and proven there,
but for the Poisson row, whose statement holds by another proof
(:func:`torchglb.radii.table1_poisson`). Any other radius of the library may be given.
"""

from __future__ import annotations

from typing import Unpack

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.exact import PAPER, LikelihoodRatioPolicy
from torchglb.policies.registry import register
from torchglb.policies.settings import LikelihoodRatioSettings
from torchglb.radii import Radius


@register
class OFUGLB(LikelihoodRatioPolicy):
    """The paper's algorithm, for any GLM.

    Args:
        radius: beta^2; the paper's by default, or any name or :class:`torchglb.radii.Radius`.
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torch, torchglb as glb
        >>> policy = OFUGLB(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> policy.update([1.0, 0.0], 1.0)
        >>> policy.select(torch.eye(2).double())
        tensor(0)
    """

    name = "ofuglb"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = PAPER,
        **settings: Unpack[LikelihoodRatioSettings],
    ) -> None:
        super().__init__(family, domain, delta, radius=radius, **settings)
