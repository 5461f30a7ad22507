"""E-values of hypotheses about one contrast.

With the joint martingale ``M(theta)`` and the contrast's martingale ``N(theta)``, the mean ``share
M(theta) + (1 - share) N(theta)`` is at most a martingale of mean 1 if theta* = theta. Its infimum
over the parameters of a null hypothesis is an e-value at every stopping time: ``P(E_t >= 1/alpha
for some t) <= alpha`` under the null. For any A, a theta of the null is either outside the joint
set of level A, where ``M >= A``, or inside, where N is at least the sum of its lines:

    ``E >= min( share A, (1 - share) sum_k w_k e^(line_k) )``.

Several A are tried: each gives a lower bound of the same infimum, so the best costs nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.choices import Relation
from torchglb.contrasts.look import Joint, Look, look
from torchglb.sets import LikelihoodRatioSet

#: steps by which ``log A`` of the joint set is raised
RAISES = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


def log_e_values(
    joint: Joint,
    values: list[float],
    relation: Relation,
    share: float,
) -> list[float]:
    """``log E`` of each contrast's hypothesis, rounded down.

    Args:
        joint: the set at its usual level.
        values: of the contrasts under the null, ``(m)``.
        relation: ``"=="``, ``"<="`` or ``">="``.
        share: of the joint martingale.
    """
    best = [-math.inf] * len(values)
    for more in RAISES:
        raised = joint.raised(more)
        most = math.log(share) + raised.log_level
        seen = look(raised, [max(raised.log_level, 3.0)] * len(values))
        limited = False
        for j, value in enumerate(values):
            other = math.log(1.0 - share) + seen.log_evidence(j, value, relation)
            limited = limited or most < other
            best[j] = max(best[j], min(most, other))
        if not limited:  # a higher joint level helps only where it is what limits an e-value
            break
    return [value - 1e-9 * (1.0 + abs(value)) if value > -math.inf else value for value in best]


def joint_log_e_values(
    region: LikelihoodRatioSet, contrasts: Tensor, values: Tensor, relation: Relation, share: float
) -> Tensor:
    """``log E`` by the likelihood-ratio sets' martingale alone, of weight share, ``(*B, m)``."""
    if region.log_failure is None:
        return torch.full_like(values, -torch.inf)
    whole = contrasts.expand(*values.shape, contrasts.shape[-1])
    each = [
        region.test(whole[..., j : j + 1, :], values[..., j : j + 1], relation).log_e
        for j in range(values.shape[-1])
    ]
    return torch.stack(each, dim=-1) + math.log(share)


def nearest_points(seen: Look, contrasts: Tensor, center: Tensor, values: Tensor) -> Tensor:
    """The points of ``<c_j, theta> = value`` nearest to theta_hat in the ellipsoid's metric.

    Args:
        seen: a look with an ellipsoid.
        contrasts: of length 1, ``(m, d)``.
        center: theta_hat, ``(d)``.
        values: ``(m, *)``.

    Returns:
        ``(m, *, d)``.
    """
    assert seen.enclosure is not None
    toward = torch.cholesky_solve(contrasts.mT, seen.enclosure.factor).mT  # (m, d)
    forms, middle = (toward * contrasts).sum(-1), contrasts @ center
    shape = (len(contrasts), *[1] * (values.ndim - 1))
    steps = (values - middle.reshape(shape)) / forms.reshape(shape)
    return center + steps[..., None] * toward.reshape(*shape, -1)
