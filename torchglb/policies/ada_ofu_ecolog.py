"""ada-OFU-ECOLog: efficient online logistic bandits (Faury, Abeille, Jun and Calauzenes 2022).

Online, with ``W_1 = lambda I``, lambda = S, and D = S the diameter of the admissible log-odds. At
(x, r), over the S-ball and with l(x, r; theta) the logistic loss:

    ``theta' = argmin l(x, r; theta) + |theta - theta_t|^2`` in W_t ``/ (2 + D)``,
    ``theta_bar`` = the same with two imaginary losses, l(x, 0; .) + l(x, 1; .), for the real one,
    ``W_{t+1} = W_t + mu-dot(<x, theta'>) x x'``,  ``theta_{t+1} = theta'``,
    ``sigma = 4 S^2 + 2 (2 + D) (u + sum_s (l_s(theta_bar_s) - l_s(theta'_s))) + 4 log(1 + t)``,
    ``u = (2 + D) nu/4 + D^2/(2 + D)``, ``nu = 1/2 + 2 log(2 sqrt(1 + t/(4 lambda))/delta)``,

t = n + 1 the present round; index ``<x, theta> + sqrt(sigma) |x|`` in W^-1. The paper solves each
step to accuracy 1/t; ours is exact. Where the ball is inactive the gradient moves theta along W^-1
x alone, so the step is a scalar equation for z = <x, theta>:

    ``z = <x, theta_t> - (2 + D)/2 q l'(z)``,  ``q = |x|^2`` in W^-1,

whose right side decreases in z. Where its solution leaves the ball, a d-dimensional Newton method
on the ball takes over. Public code adds sqrt(sigma) |x|, which belongs to the scale of
<x, theta>, to the mean mu(<x, theta>).

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds in which the ball is active).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import idle, which
from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.optim import Evaluation, Status, newton, raise_unless_converged
from torchglb.policies.base import Requirements
from torchglb.policies.online import OnlinePolicy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register


@register
class AdaOFUECOLog(OnlinePolicy):
    """ada-OFU-ECOLog.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        args: further settings of :class:`Policy`, by position.
        settings: those of :class:`Policy`, by name.
    """

    name = "ada-ofu-ecolog"
    requires = Requirements(families=(Bernoulli,))
    carried = ("excess",)

    def __init__(self, family: GLMFamily, domain: Ball, *args: Any, **settings: Any) -> None:
        super().__init__(family, domain, *args, **settings)
        self._V = self._begin(self._S)  # W
        self._excess = torch.zeros_like(self._S)  # sum of l_s(theta_bar) - l_s(theta')

    def squared_radius(self) -> Tensor:
        """sigma, ``(*B)``."""
        t, S = self.rounds + 1, self._S
        stiffness = 2 + S
        nu = 0.5 + 2 * (2 * (1 + t / (4 * S)).sqrt() / self.delta).log()
        u = stiffness * nu / 4 + S.square() / stiffness
        return 4 * S.square() + 2 * stiffness * (u + self._excess) + 4 * math.log(1 + t)

    def _step(self, x: Tensor, r: Tensor) -> None:
        # the real loss and the imaginary pair, side by side: failures and successes of each
        failures = torch.stack([1 - r, torch.ones_like(r)])
        successes = torch.stack([r, torch.ones_like(r)])
        theta = _proximal(x, failures, successes, self._theta, self._V, self._S)
        z, z_bar = (x * theta).sum(-1)
        self._excess = self._excess + self.family.nll(z_bar, r) - self.family.nll(z, r)
        self._theta = theta[0]
        self._V.add(x, self.family.variance(z))


def _proximal(
    x: Tensor, failures: Tensor, successes: Tensor, centre: Tensor, W: RankOneInverse, S: Tensor
) -> Tensor:
    """``argmin f l(x, 0; theta) + s l(x, 1; theta) + |theta - centre|^2`` in W ``/ (2 + S)``.

    Over the S-ball. ``failures`` f and ``successes`` s are ``(P, *B)``, everything else starts with
    ``*B``; the minimisers are ``(P, *B, d)``.
    """
    turned = W.solve(x)
    pull = 0.5 * (2 + S) * (x * turned).sum(-1)
    z0 = (x * centre).sum(-1).expand_as(failures)
    z = _scalar_root(z0, pull, failures, successes)
    slope = failures * torch.sigmoid(z) - successes * torch.sigmoid(-z)
    theta = centre - (0.5 * (2 + S) * slope)[..., None] * turned
    outside = torch.linalg.vector_norm(theta, dim=-1) > S
    if idle(outside):
        return theta
    # the rare ones, picked out: a Newton method on the ball
    index = which(outside.reshape(-1))
    if not index.numel():
        return theta

    def picked(values: Tensor, *tail: int) -> Tensor:
        return values.expand(*outside.shape, *tail).reshape(-1, *tail)[index]

    d = x.shape[-1]
    f, s, radius = picked(failures), picked(successes), picked(S)
    feature, origin, matrix = picked(x, d), picked(centre, d), picked(W.matrix, d, d)
    curvature = 2 / (2 + radius)

    def evaluate(point: Tensor) -> Evaluation:
        z, away = (feature * point).sum(-1), point - origin
        force = (matrix @ away[..., None])[..., 0]
        up, down = torch.sigmoid(z), torch.sigmoid(-z)
        log_up = torch.nn.functional.logsigmoid(z)
        value = f * z - (f + s) * log_up + 0.5 * curvature * (away * force).sum(-1)
        gradient = (f * up - s * down)[..., None] * feature + curvature[..., None] * force
        bend = ((f + s) * up * down)[..., None] * feature
        hessian = curvature[..., None, None] * matrix + bend[..., :, None] * feature[..., None, :]
        return Evaluation(value, gradient, hessian)

    # to the limit of the arithmetic: the status then says so, and the gap is the certificate
    tol = 4 * torch.finfo(x.dtype).eps
    found, _ = newton(evaluate, origin, radius, tol=tol)
    accurate = found.gap <= tol**0.5 * (1 + found.value.abs())
    verdict = torch.where(accurate, int(Status.CONVERGED), int(Status.INACCURATE))
    raise_unless_converged(verdict, "the step of ada-ofu-ecolog")
    return theta.reshape(-1, d).index_copy(0, index, found.point).reshape(theta.shape)


def _scalar_root(z0: Tensor, pull: Tensor, failures: Tensor, successes: Tensor) -> Tensor:
    """The root of ``z - z0 + pull (f sigma(z) - s sigma(-z))``, which increases in z.

    Newton's method, kept inside a bracket that bisection would keep as well.
    """
    low, high = z0 - pull * failures, z0 + pull * successes
    z = z0
    eps = torch.finfo(z0.dtype).eps
    moving = torch.ones_like(z0, dtype=torch.bool)
    for _ in range(100):
        up, down = torch.sigmoid(z), torch.sigmoid(-z)
        residual = z - z0 + pull * (failures * up - successes * down)
        low, high = torch.where(residual < 0, z, low), torch.where(residual > 0, z, high)
        step = residual / (1 + pull * (failures + successes) * up * down)
        proposed = z - step
        inside = (proposed >= low) & (proposed <= high)
        proposed = torch.where(inside, proposed, 0.5 * (low + high))
        settled = (proposed - z).abs() <= 2 * eps * (1 + z.abs())
        z = torch.where(moving, proposed, z)
        moving = moving & ~settled
        if idle(moving):
            break
    return z
