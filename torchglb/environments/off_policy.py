"""What a fixed policy would have earned, judged by the log of another one, with valid intervals.

With logging probabilities p, probabilities pi of the policy that is judged, and predictions q of
the mean reward of every arm (0 for plain inverse-propensity weights), the event (a, r) gives

    ``phi = sum_b pi(b) q(b) + pi(a)/p(a) (r - q(a))``,

of mean ``sum_b pi(b) mu(b)`` given the arms and the past, whatever q is: the doubly robust
estimate, unbiased for the policy's value v wherever pi > 0 implies p > 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_floats,
    as_indices,
    as_like,
    check_probability,
    check_shape,
    refuse,
)
from torchglb.environments.replay import Log

#: the largest bet; larger ones would be ruined by one bad event
LARGEST_BET = 0.5


@dataclass(frozen=True)
class OffPolicyValue:
    """The value of a fixed policy; shapes start with ``*B``.

    Attributes:
        value: the mean of phi, ``(*B)``: unbiased.
        error: its standard error, ``(*B)``; NaN with fewer than two events.
        lower: lower ends after 1, 2, ..., n events, ``(*B, n)``.
        upper: upper ends; ``lower <= v <= upper`` at all times at once with probability 1 - delta.

    Example:
        >>> from torchglb import environments, families
        >>> world = environments.make("fixed", family=families.Bernoulli(), S=3.0, replicates=2)
        >>> log = environments.uniform_log(world, 500)
        >>> target = torch.zeros_like(log.index)
        >>> found = off_policy_value(log, target, reward_range=(0.0, 1.0))
        >>> bool((found.lower <= found.upper).all()), found.value.shape
        (True, torch.Size([2]))
    """

    value: Tensor
    error: Tensor
    lower: Tensor
    upper: Tensor


@torch.no_grad()
def off_policy_value(
    log: Log,
    target: ArrayLike,
    *,
    reward_range: tuple[float, float],
    predictions: ArrayLike | None = None,
    delta: float = 0.05,
) -> OffPolicyValue:
    """The value of a policy that does not learn, by inverse propensities or doubly robust.

    Assumes that every event has the same expected reward v under the policy, given the past (say,
    arms that are drawn anew from one law); the propensities may depend on the past. The intervals
    assume nothing else: an empirical Bernstein confidence sequence with predictable bets
    (Waudby-Smith and Ramdas 2024), for terms that are bounded below only, so that large
    weights cost what they vary and not what they could be.

    With rewards scaled to [0, 1], ``phi_s >= -b_s`` and ``c_s = 1 + b_s``, any ``x_s`` in [0, 1]
    and ``l_s`` in [0, 1), all known before the reward of s, ``u_s = (phi_s - x_s)/c_s`` and
    ``psi(l) = -log(1 - l) - l``, for all n at once with probability 1 - delta/2

        ``v >= (sum_s [l_s phi_s/c_s - psi(l_s) u_s^2] - log(2/delta)) / sum_s l_s/c_s``.

    Proof: ``exp(l u - psi(l) u^2) <= 1 + l u`` for ``u >= -1`` (Fan, Grama and Liu 2015), and here
    ``u_s >= -(b_s + x_s)/c_s >= -1``. Its mean is at most ``1 + l (v - x_s)/c_s <= exp(l (v -
    x_s)/c_s)``; so the product of ``exp(l_s (phi_s - v)/c_s - psi(l_s) u_s^2)`` is a
    supermartingale, and exceeds 2/delta with probability at most delta/2 (Ville). Upper ends are
    lower ends of 1 - v. The best ends so far are valid too, and are those returned.

    b is 0 for inverse propensities, also for the upper end, which uses the rewards 1 - r. For the
    doubly robust terms ``phi >= pi(a) q(a) (1 - 1/p(a)) >= 1 - 1/floor``, so b = 1/floor - 1, with
    the least propensity of the event as its floor: one of later events would look ahead.

    Args:
        log: the events.
        target: the policy: probabilities of the arms, ``(*B, n, K)``, or the arms that it picks,
            ``(*B, n)``. They may depend on the arms shown, not on the rewards.
        reward_range: the least and the largest possible reward.
        predictions: q, ``(*B, n, K)``, within the range. Those of an event may be made from earlier
            events or from other data, never from its own reward or later ones.
        delta: the failure probability of the interval.

    Example:
        >>> from torchglb import environments, families
        >>> world = environments.make("fixed", family=families.Bernoulli(), S=3.0, replicates=2)
        >>> log = environments.uniform_log(world, 500)
        >>> found = off_policy_value(log, torch.zeros_like(log.index), reward_range=(0.0, 1.0))
        >>> inside = (found.lower[:, -1] < found.value) & (found.value < found.upper[:, -1])
        >>> bool(inside.all())
        True
    """
    low, high = (float(end) for end in reward_range)
    if not -math.inf < low < high < math.inf:
        raise refuse("reward_range", "two finite numbers, the smaller one first", reward_range)
    check_probability("delta", delta)
    scale = high - low
    pi = _probabilities(log, target)
    checks = ValueChecks()
    label = f"rewards in [{low:g}, {high:g}]"
    checks.require("rewards", (log.rewards >= low) & (log.rewards <= high), label, log.rewards)
    if predictions is not None:
        predictions = as_like("predictions", predictions, log.rewards)
        check_shape("predictions", predictions, log.arms.shape[:-1])
        inside = (predictions >= low) & (predictions <= high)
        checks.require("predictions", inside, f"means in [{low:g}, {high:g}]", predictions)
    checks.settle()

    r = (log.rewards.double() - low) / scale
    index = log.index[..., None]
    weight = torch.take_along_dim(pi, index, -1)[..., 0] / log.played_propensity().double()
    if predictions is None:
        success, failure, b = weight * r, weight * (1.0 - r), torch.zeros_like(r)
    else:
        q = (predictions.double() - low) / scale
        picked = torch.take_along_dim(q, index, -1)[..., 0]
        success = (pi * q).sum(-1) + weight * (r - picked)
        failure = 1.0 - success
        b = 1.0 / log.least_of_each().double() - 1.0
    n = success.shape[-1]
    spread = success.std(-1) if n > 1 else torch.full_like(success[..., 0], torch.nan)
    lower = _lower_ends(success, b, 0.5 * delta)
    upper = 1.0 - _lower_ends(failure, b, 0.5 * delta)
    return OffPolicyValue(
        low + scale * success.mean(-1), scale * spread / n**0.5, low + scale * lower,
        low + scale * upper,
    )  # fmt: skip


def _probabilities(log: Log, given: ArrayLike) -> Tensor:
    """The policy as probabilities ``(*B, n, K)``."""
    K = log.arms.shape[-2]
    checks = ValueChecks()
    target = as_floats("target", given)
    if target.ndim == log.index.ndim:
        target = as_indices("target", given, log.index.device)
        check_shape("target", target, log.index.shape)
        checks.within("target", target, 0, K - 1, lambda: f"arms from 0 to {K - 1}")
        checks.settle()
        target = torch.nn.functional.one_hot(target, K).double()
    check_shape("target", target, log.arms.shape[:-1])
    checks.require("target", (target >= 0) & (target <= 1), "numbers in [0, 1]", target)
    total = target.double().sum(-1)
    checks.require("target", (total - 1.0).abs() <= 1e-6, "K numbers that add up to 1", total)
    if log.propensity is not None and log.propensity.shape == log.arms.shape[:-1]:
        possible = (target == 0) | (log.propensity > 0)
        expected = "no probability for arms that the log could not play"
        checks.require("target", possible, expected, target)
    checks.settle()
    return target.double() / total[..., None]


def _lower_ends(phi: Tensor, b: Tensor, level: float) -> Tensor:
    """Lower ends of the mean of ``phi (*B, n)`` in [0, 1], at all times at once.

    Of each term is known, before its reward, that ``phi >= -b``, b ``(*B, n)``.

    The bets are those that would be best for n = t, if the variance were the one seen so far, with
    a logarithm that spreads the effort over all times; the guesses x are means so far.
    """
    c = 1.0 + b
    count = torch.arange(1, phi.shape[-1] + 1, dtype=phi.dtype, device=phi.device)
    mean = ((0.5 + phi.cumsum(-1)) / (count + 1.0)).clamp(0.0, 1.0)
    guess = torch.cat([torch.full_like(phi[..., :1], 0.5), mean[..., :-1]], dim=-1)
    variance = (0.25 + ((phi - mean) / c).square().cumsum(-1)) / (count + 1.0)
    variance = torch.cat([torch.full_like(phi[..., :1], 0.25), variance[..., :-1]], dim=-1)
    bet = (2.0 * math.log(1.0 / level) / (variance * count * (count + 1.0).log())).sqrt()
    bet = bet.clamp_max(LARGEST_BET)
    price = (-torch.log1p(-bet) - bet) * ((phi - guess) / c).square()
    gained = (bet * phi / c - price).cumsum(-1) - math.log(1.0 / level)
    ends = gained / (bet / c).cumsum(-1)
    return ends.clamp(0.0, 1.0).cummax(-1).values
