"""A head as it stands now, for serving: plain tensors and no fit, so that it can be exported."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchglb.checks import refuse
from torchglb.families import GLMFamily
from torchglb.sets import EllipsoidSet

#: what intervals are widened by, relative to their ends: more than float64 rounds here
OUTWARDS = 1e-9


class Served(NamedTuple):
    """What a frozen head says about N contexts; every tensor is ``(N,)``.

    Attributes:
        mean: the predicted mean reward.
        lower: the lower end of the interval of the mean reward.
        upper: its upper end.
        score: the upper bound on ``<phi(c), theta>``, whose argmax is the optimistic choice.

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> head = glb.GLMHead(torch.nn.Linear(5, 2), glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> head.update(torch.randn(20, 5), torch.ones(20))
        >>> mean, lower, upper, score = head.freeze()(torch.randn(4, 5))
        >>> bool((lower <= mean).all() and (mean <= upper).all())
        True
    """

    mean: Tensor
    lower: Tensor
    upper: Tensor
    score: Tensor


class FrozenHead(nn.Module):
    """``mu(<phi(c), theta>)`` with the intervals of an ellipsoid: ``(N, *E)`` to :class:`Served`.

    With ``phi = phi(c)`` the interval of ``<phi, theta>`` is ``<phi, theta_hat> -+ sqrt(gamma phi'
    W^-1 phi)``, cut at ``S |phi|``. Take ``torch.export.export(head.freeze().eval(), (example,))``.

    Args:
        features: from contexts ``(N, *E)`` to features ``(N, d)`` in the unit ball.
        family: the GLM family.
        region: the confidence set, of batch shape ``()``.

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> head = glb.GLMHead(torch.nn.Linear(5, 2), glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> head.update(torch.randn(20, 5), torch.ones(20))
        >>> frozen = head.freeze()
        >>> isinstance(frozen, FrozenHead), frozen(torch.randn(4, 5)).mean.shape
        (True, torch.Size([4]))
    """

    theta: Tensor
    covariance: Tensor
    radius: Tensor
    S: Tensor

    def __init__(self, features: nn.Module, family: GLMFamily, region: EllipsoidSet) -> None:
        super().__init__()
        if region.batch_shape:
            shape = f"batch shape {tuple(region.batch_shape)}"
            raise refuse("head", "one without batch axes, to be frozen", shape)
        self.features, self.family = features, family
        self.register_buffer("theta", region.theta_hat.detach().clone())
        inverse = torch.linalg.inv(region.shape.detach())
        self.register_buffer("covariance", 0.5 * (inverse + inverse.mT))
        self.register_buffer("radius", region.gamma.detach().clone())
        self.register_buffer("S", region.domain.radius_like(region.gamma).clone())

    def forward(self, contexts: Tensor) -> Served:
        """Means, intervals and scores of contexts ``(N, *E)``."""
        phi = self.features(contexts).to(self.theta.dtype)
        middle = phi @ self.theta
        form = ((phi @ self.covariance) * phi).sum(-1).clamp_min(0.0)
        width = (self.radius * form).sqrt() + OUTWARDS * (1.0 + middle.abs())
        edge = self.S * torch.linalg.vector_norm(phi, dim=-1) * (1.0 + OUTWARDS)
        upper = torch.minimum(middle + width, edge)
        lower = torch.maximum(middle - width, -edge)
        mean = self.family.mean
        return Served(mean(middle), mean(lower), mean(upper), upper)


class Embedding(nn.Module):
    """A network and what maps its features into the unit ball, in the dtype of the head."""

    def __init__(self, module: nn.Module, ball: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.ball, self.dtype = module, ball, dtype
        self.takes = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def forward(self, contexts: Tensor) -> Tensor:
        """Features ``(N, d)`` of contexts ``(N, *E)``."""
        if self.takes is not None and contexts.is_floating_point():
            contexts = contexts.to(self.takes)
        features: Tensor = self.ball(self.module(contexts).to(self.dtype))
        return features
