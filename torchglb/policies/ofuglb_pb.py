"""OFUGLB with the tighter PAC-Bayes radius: the same algorithm, a half to a third of beta^2.

``C_t = {theta : |theta| <= S, L(theta) <= log(1/delta) + KL(P || Q) + E_P L}``

for Q uniform on the ball and the best of many posteriors P on ellipsoids around a centre near the
MLE (:class:`torchglb.radii.PACBayes`). P may depend on the data, so the least over all of them is
as valid as Theorem 3.1, of which it is a sharper reading. Not in the paper; proven in the docstring
of that radius.

The level is evaluated in every round: it moves its centre, with a pass over the history, only when
that has fallen behind, and sums over the rows only while that gains something. A level so much
lower leaves more arms in the race, each of which may take a pass: a round takes about one and a
half times as long as that of OFUGLB up to d = 10, and several times as long from d = 20 on
(``python experiments/bench.py radii``).
"""

from __future__ import annotations

from typing import Unpack

from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies.exact import LikelihoodRatioPolicy
from torchglb.policies.registry import register
from torchglb.policies.settings import LikelihoodRatioSettings
from torchglb.radii import Radius


@register
class OFUGLBPB(LikelihoodRatioPolicy):
    """OFUGLB with :class:`torchglb.radii.PACBayes`, for any self-concordant GLM.

    Args:
        radius: a :class:`torchglb.radii.PACBayes` with other settings, if wanted.
        settings: ``solver``, ``aggregate`` and those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = OFUGLBPB(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "ofuglb-pb"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = "pac-bayes",
        **settings: Unpack[LikelihoodRatioSettings],
    ) -> None:
        super().__init__(family, domain, delta, radius=radius, **settings)
