"""ada-OFU-ECOLog: efficient online logistic bandits (Faury, Abeille, Jun and Calauzenes 2022).

Let l(r; z) be the logistic loss and ``W_1 = lambda I``, lambda = S. Before round s it is known that
``z* = <x, theta*>`` is in an interval of length D, at first ``|z*| <= S |x|``. Over the theta whose
z is in that interval, with ``q = |x|^2`` in W^-1,

    ``theta' = argmin l(r; <x, theta>) + |theta - theta_s|^2`` in W ``/ (2 + D)``,
    ``z_bar`` = its z with two imaginary losses, l(0; .) + l(1; .), for the real one.

Theta moves along ``W^-1 x`` alone, so z' solves ``z = z_s - (2 + D)/2 q l'(z)``, whose right side
falls in z, or is an end of the interval: O(d^2). What makes the method adaptive: let z^0 and z^1 be
what z' would be for r = 0 and r = 1. If ``mu-dot(z_bar) > 2 mu-dot(z^u)`` for one of them, the
interval is too long for this x, and the round is spent on it: (x, r) goes to a second estimate,
with an ellipsoid of its own that cuts down the intervals of later rounds. Else ``W += mu-dot(z') x
x'``, and theta_{s+1} is the point of the S-ball nearest to theta' in the new W: theta' itself, if
it is inside. The index is ``<x, theta> + radius |x|`` in W^-1.

**The radius, proven here** (the paper's is of the same form, with larger constants):

    ``radius^2 = lambda S^2 + (2 + 2S) log(2/delta)
                 + sum_s [(2 + D_s)(l_s(z_bar) - l_s(z')) - |theta' - theta_s|^2`` in W_s ``]``.

Since ``(e^-u - 1 + u)/u^2 >= 1/(2 + u)``, self-concordance gives ``l(z*) >= l(z') + l'(z')(z* - z')
+ mu-dot(z') (z* - z')^2/(2 + D)`` for two points of the interval; with the optimality of theta' and
the three-point identity,

    ``|theta* - theta'|^2`` in W_{s+1} ``<= |theta* - theta_s|^2`` in W_s ``+ (2 + D)(l(z*) - l(z'))
    - |theta' - theta_s|^2`` in W_s,

and a projection onto the ball brings it no farther from theta*. z_bar does not depend on r, so
``exp(l(z*) - l(z_bar))`` has mean at most 1, as a likelihood ratio, and so has its power ``(2 +
D_s)/(2 + 2S) <= 1``. The product of these is a supermartingale, so that ``sum_s (2 + D_s)(l_s(z*) -
l_s(z_bar)) <= (2 + 2S) log(2/delta)`` at all times with probability 1 - delta/2. The other half
pays for the intervals. Their ellipsoid is that of mirror descent with chords
(:mod:`torchglb.policies.mirror_descent`) instead of the paper's ridge estimate, which would need
the rows again; and the paper minimises over the set instead of over the interval of z, which is all
that the proof needs.

``constants="public"`` keeps what public code does, for comparison, without guarantee: no test and
no second estimate, D = S (for which the quadratic bound is not proven), steps over the S-ball, and

    ``radius^2 = 4 S^2 + 2 (2 + D) (u + sum_s (l_s(z_bar) - l_s(z'))) + 4 log(1 + t)``,
    ``u = (2 + D) nu/4 + D^2/(2 + D)``, ``nu = 1/2 + 2 log(2 sqrt(1 + t/(4 lambda))/delta)``,

t = n + 1 the present round. (Public code also fits the imaginary losses from theta_{s+1} instead of
theta_s, so that z_bar depends on r, and adds the bonus, which belongs to <x, theta>, to the mean
mu(<x, theta>); we do neither.)

No history is kept: O(d^2) memory and time per round (O(d^3) in rounds with a projection).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from torchglb.arrays import known_none, wait_for_indices
from torchglb.checks import check_choice
from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.optim import Derivatives, Status, newton, raise_unless_converged
from torchglb.policies.geometry import project_in_norm
from torchglb.policies.mirror_descent import MirrorDescent
from torchglb.policies.online import OnlinePolicy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import taken
from torchglb.policies.settings import CONSTANTS, Constants, PolicySettings


@register
class AdaOFUECOLog(OnlinePolicy):
    """ada-OFU-ECOLog.

    Args:
        family: Bernoulli.
        domain: the ball that contains theta*.
        constants: ``"proven"`` or ``"public"``, those of public code.
        settings: those of :class:`Policy`.

    Example:
        >>> import torchglb as glb
        >>> policy = AdaOFUECOLog(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "ada-ofu-ecolog"
    requires = Requirements(families=(Bernoulli,))
    carried = ("excess",)

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
        self.guaranteed = self.constants == "proven"
        self._V = self._begin(self._S)  # W
        self._excess = torch.zeros_like(self._S)  # what the sum over the rounds has come to
        one = torch.ones_like(self._S)
        self._second = MirrorDescent(
            family, domain, self._theta, step=one, regularization=one, spread=1.0, chords=True
        )
        self._spent = torch.zeros_like(self._S, dtype=torch.int64)

    @property
    def spent(self) -> Tensor:
        """Rounds that went to the second estimate so far, ``(*B)``."""
        return self._spent

    def squared_radius(self) -> Tensor:
        """``radius^2``, ``(*B)``."""
        t, S = self.rounds + 1, self._S
        if self.constants == "proven":
            return S**3 + (2 + 2 * S) * math.log(2 / self.delta) + self._excess
        stiffness = 2 + S
        nu = 0.5 + 2 * (2 * (1 + t / (4 * S)).sqrt() / self.delta).log()
        u = stiffness * nu / 4 + S.square() / stiffness
        return 4 * S.square() + 2 * stiffness * (u + self._excess) + 4 * math.log(1 + t)

    def _step(self, x: Tensor, r: Tensor) -> None:
        if self.constants == "public":
            self._public_step(x, r)
            return
        low, high = self.interval_of(x)
        stiffness = 2 + (high - low)
        turned = self._V.solve(x)
        q = (x * turned).sum(-1).clamp_min(0.0)
        z = (x * self._theta).sum(-1)
        # the real reward, the imaginary pair, a failure and a success, side by side
        one, none = torch.ones_like(r), torch.zeros_like(r)
        failures, successes = torch.stack([1 - r, one, one, none]), torch.stack([r, one, none, one])
        found = _scalar_root(z.expand_as(failures), 0.5 * stiffness * q, failures, successes)
        after, imagined, failed, succeeded = found.clamp(low, high)
        variance = self.family.variance
        least = torch.minimum(variance(failed), variance(succeeded))
        spend = variance(imagined) > 2 * least
        moved = after - z
        tiny = torch.finfo(q.dtype).tiny
        gain = self.family.nll(imagined, r) - self.family.nll(after, r)
        gain = stiffness * gain - moved.square() / q.clamp_min(tiny)
        keep = ~spend & (q > 0)
        self._excess = self._excess + torch.where(keep, gain, none)
        along = torch.where(keep, moved / q.clamp_min(tiny), none)
        self._V.add(x, torch.where(keep, variance(after), none))
        free = self._theta + along[..., None] * turned
        self._theta = project_in_norm(free, self._V.matrix, self.domain)
        other = spend.to(x.dtype)
        self._second.add(other[..., None] * x, other * r)
        self._spent = self._spent + spend

    def interval_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``<x, theta*>`` is known to be before the reward of ``x (*B, d)`` is seen."""
        whole = self._S * torch.linalg.vector_norm(x, dim=-1)
        second = self._second
        half = second.squared_radius(0.5 * self.delta).clamp_min(0.0).sqrt()
        half = half * second.H.norms(x[..., None, :])[..., 0]
        middle = (x * second.center).sum(-1)
        low, high = torch.maximum(middle - half, -whole), torch.minimum(middle + half, whole)
        empty = low > high  # the second estimate has lost theta*, which happens with delta/2
        return torch.where(empty, -whole, low), torch.where(empty, whole, high)

    def _public_step(self, x: Tensor, r: Tensor) -> None:
        # the real loss and the imaginary pair, side by side: failures and successes of each
        failures = torch.stack([1 - r, torch.ones_like(r)])
        successes = torch.stack([r, torch.ones_like(r)])
        theta = _proximal(x, failures, successes, self._theta, self._V, self._S)
        z, z_bar = (x * theta).sum(-1)
        self._excess = self._excess + self.family.nll(z_bar, r) - self.family.nll(z, r)
        self._theta = theta[0]
        self._V.add(x, self.family.variance(z))

    def _copied(self) -> Self:
        after = super()._copied()
        after._second = self._second.copied()
        return after

    def _state(self) -> dict[str, Any]:
        return super()._state() | {
            "second": self._second.state_dict(),
            "spent": self._spent.clone(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        spent, second = taken(state, "spent", self._spent), copy.copy(self._second)
        second.load_state_dict(state["second"])
        super()._load(state)
        self._second, self._spent = second, spent


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
    if known_none(outside):
        return theta
    # the rare ones, picked out: a Newton method on the ball
    index = wait_for_indices(outside.reshape(-1))
    if not index.numel():
        return theta

    def picked(values: Tensor, *tail: int) -> Tensor:
        return values.expand(*outside.shape, *tail).reshape(-1, *tail)[index]

    d = x.shape[-1]
    f, s, radius = picked(failures), picked(successes), picked(S)
    feature, origin, matrix = picked(x, d), picked(centre, d), picked(W.matrix, d, d)
    curvature = 2 / (2 + radius)

    def evaluate(point: Tensor) -> Derivatives:
        z, away = (feature * point).sum(-1), point - origin
        force = (matrix @ away[..., None])[..., 0]
        up, down = torch.sigmoid(z), torch.sigmoid(-z)
        log_up = torch.nn.functional.logsigmoid(z)
        value = f * z - (f + s) * log_up + 0.5 * curvature * (away * force).sum(-1)
        gradient = (f * up - s * down)[..., None] * feature + curvature[..., None] * force
        bend = ((f + s) * up * down)[..., None] * feature
        hessian = curvature[..., None, None] * matrix + bend[..., :, None] * feature[..., None, :]
        return Derivatives(value, gradient, hessian)

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
        if known_none(moving):
            break
    return z
