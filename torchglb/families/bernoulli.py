"""Bernoulli and binomial rewards: the logistic model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import kernel
from torchglb.backend.elementary import exp, log1p
from torchglb.checks import check_count, check_flag
from torchglb.families.base import GLMFamily, LossTerms, sampled_at
from torchglb.families.compiled import LOGISTIC, CompiledFamily


def _softplus(z: Tensor) -> Tensor:
    """``log(1 + e^z)``; torch's own switches to z above its threshold, and 40 loses nothing."""
    return F.softplus(z, threshold=40.0)


class Binomial(GLMFamily):
    """Successes in ``trials`` independent trials: ``m(z) = N log(1 + e^z)``, g = 1.

    A confidence set rests on ``E exp(s r) <= exp(m(z + s) - m(z))`` for all s, the moment
    generating function of N independent successes. It holds for sums of N conditionally independent
    terms in [0, 1] of mean ``sigma(z)`` each: the exponential is convex, so each is dominated by a
    success of that mean. It fails for other rewards in [0, N]: one that is 0 or N has mean ``N
    sigma(z)`` and N times the variance. For those, use :class:`Bernoulli` on ``r/N``, whose loss is
    valid for every reward in [0, 1] of that mean.

    Args:
        trials: N.
        whole: refuse rewards that are not whole numbers, which counts of successes always are.
            False takes anything in [0, N], and leaves it to the caller that rewards are sums of N
            conditionally independent terms in [0, 1]. With one trial nothing is refused in [0, 1].

    Example:
        >>> Binomial(trials=10).mean(torch.tensor(0.0))
        tensor(5.)
    """

    def __init__(self, trials: int, whole: bool = True) -> None:
        super().__init__()
        self.trials = check_count("trials", trials, least=1)
        self.reward_range = (0.0, float(trials))
        self.integer_rewards = check_flag("whole", whole) and self.trials > 1

    def log_partition(self, z: Tensor) -> Tensor:  # noqa: D102
        return self._times(_softplus(z))

    def mean(self, z: Tensor) -> Tensor:  # noqa: D102
        return self._times(torch.sigmoid(z))

    def variance(self, z: Tensor) -> Tensor:  # noqa: D102
        return self._times(torch.sigmoid(z) * torch.sigmoid(-z))

    def third_derivative(self, z: Tensor) -> Tensor:  # noqa: D102
        return -self.variance(z) * torch.tanh(0.5 * z)

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """``m^(k)``, a polynomial in the mean p: differentiation maps q(p) to q'(p) p (1 - p)."""
        if order <= 3:
            return super().derivative(z, order)
        # evaluated at min(p, 1-p) with the parity of the derivative, so that tails keep precision
        tail = torch.sigmoid(-abs(z))
        value = 0.0 * tail
        for coefficient in reversed(_logistic_polynomial(order)):
            value = value * tail + coefficient
        value = self._times(value)
        # m' - 1/2 is odd, so m^(k) is even for even k and odd for odd k
        return value if order % 2 == 0 else torch.where(z > 0, -value, value)

    def nll(self, z: Tensor, r: Tensor) -> Tensor:
        """``N log(1 + e^z) - r z`` without cancellation: a success at z = 700 costs e^-700."""
        return -(r * F.logsigmoid(z) + (self.trials - r) * F.logsigmoid(-z))

    def slope_and_curvature(self, z: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        up, down = torch.sigmoid(z), torch.sigmoid(-z)
        return self._times(up) - r, self._times(up * down)

    def loss_terms(self, z: Tensor, r: Tensor) -> LossTerms:  # noqa: D102
        return LossTerms(*self.loss_derivatives(z, r, 2))

    def loss_derivatives(self, z: Tensor, r: Tensor, order: int) -> list[Tensor]:  # noqa: D102
        up, down = torch.sigmoid(z), torch.sigmoid(-z)
        failures = self.trials - r
        v = up * down
        # mu - r = (N - r) sigma(z) - r sigma(-z), also far out
        found = [self.loss(z, r), failures * up - r * down, self._times(v)]
        if order >= 3:
            # t = sigma(-z) - sigma(z) has t^2 = 1 - 4v, v' = v t and t' = -2v
            tilted = v * (down - up)
            found.append(self._times(tilted))
        if order >= 4:
            found.append(self._times(v * (1.0 - 6.0 * v)))
        if order >= 5:
            found.append(self._times(tilted * (1.0 - 12.0 * v)))
        if order >= 6:
            found.append(self._times(v * (1.0 - v * (30.0 - 120.0 * v))))
        return found + [self.derivative(z, k) for k in range(7, order + 1)]

    def loss(self, z: Tensor, r: Tensor) -> Tensor:
        """``N log(1 + e^-|z|) + (N - r) z`` or ``+ r |z|``, by the sign of z: nothing cancels.

        What rounding costs is counted from the size of the loss, which may be far below that of z.
        """
        rise = z.clamp_min(0.0)  # and |z| = 2 rise - z, differentiable at 0 too
        return self._times(_softplus(z - 2.0 * rise)) + (self.trials - r) * rise + r * (rise - z)

    def _times(self, unit: Tensor) -> Tensor:
        """N times what one trial has."""
        return unit if self.trials == 1 else self.trials * unit

    def compiled(self) -> CompiledFamily | None:  # noqa: D102
        shipped = type(self) in (Binomial, Bernoulli)
        return self._compiled_as(LOGISTIC, float(self.trials)) if shipped else None

    def sample(  # noqa: D102
        self, z: ArrayLike, generator: torch.Generator | None = None
    ) -> Tensor:
        z = sampled_at(z, generator)
        p = torch.sigmoid(z)
        draws = torch.rand(
            (self.trials, *z.shape), generator=generator, dtype=z.dtype, device=z.device
        )
        return torch.where(z.isnan(), z, (draws < p).to(z.dtype).sum(0)).detach()

    def quantile(self, z: Tensor, u: Tensor) -> Tensor:
        """How many k < N have ``P(successes <= k) < u``."""
        if self.trials == 1:
            return (u > torch.sigmoid(-z)).to(z.dtype)
        k = torch.arange(self.trials, dtype=z.dtype, device=z.device)
        N = torch.full_like(k, self.trials)
        ways = torch.lgamma(N + 1) - torch.lgamma(k + 1) - torch.lgamma(N - k + 1)
        z = z[..., None]
        log_probability = ways + k * F.logsigmoid(z) + (N - k) * F.logsigmoid(-z)
        below = log_probability.exp().cumsum(-1)
        return (below < u[..., None]).to(z.dtype).sum(-1)

    def self_concordance(self, radius: float) -> float:
        """``tanh(S/2)``: the exact constant on the ball (1 in the limit)."""
        return math.tanh(0.5 * radius)

    def max_variance(self, radius: float) -> float:  # noqa: D102
        return 0.25 * self.trials

    def min_variance(self, radius: float) -> float:  # noqa: D102
        decay = math.exp(-radius)
        return self.trials * decay / (1.0 + decay) ** 2

    def derivative_ratio(self, order: int, radius: float) -> float | None:
        """The maximum of ``|q_k(p)| / (p (1 - p))`` over p in [0, 1], for orders 3 to 8."""
        if order == 3:
            return 1.0
        return _LOGISTIC_RATIOS.get(order)


class Bernoulli(Binomial):
    """Rewards 0 or 1, or anything in [0, 1] with mean ``sigma(z)``: the logistic model.

    Example:
        >>> Bernoulli().nll(torch.tensor(0.0), torch.tensor(1.0))
        tensor(0.6931)
    """

    def __init__(self) -> None:
        super().__init__(trials=1)


# ---- the same for one row, compiled: w is a weight times the trials, y a weight times successes --


@kernel
def logistic(z: float) -> float:
    """``sigma(z) = 1/(1 + e^-z)``, with full precision in both tails.

    The reciprocal is that of ``sigma(-z)`` too: a compiler divides once for both.
    """
    e = exp(-abs(z))
    return (1.0 if z >= 0.0 else e) * (1.0 / (1.0 + e))


@kernel
def logistic_loss(z: float, w: float, y: float) -> float:
    """``w log(1 + e^z) - y z`` without cancellation."""
    return w * log1p(exp(-abs(z))) + (y * max(-z, 0.0) + (w - y) * max(z, 0.0))


@kernel
def logistic_slope(z: float, w: float, y: float) -> float:
    """``w sigma(z) - y`` without cancellation."""
    return (w - y) * logistic(z) - y * logistic(-z)


@kernel
def logistic_variance(z: float) -> float:
    """``v = sigma(z) sigma(-z)``."""
    return logistic(z) * logistic(-z)


@kernel
def logistic_least(z: float, outwards: float) -> float:
    """The least ``2 B(z + u, z)/u^2``, B the Bregman divergence of m, over some u.

    Those with ``|u| <= b`` and ``|z + u| <= a``, for ``outwards = min(b, a - |z|) >= 0.01``. It is
    twice the integral of ``(1 - t) v(z + t u)``, a mean of v between z and z + u with weights that
    fall linearly to 0, and v is even and falls to both sides. Where u has the sign of z it falls
    with |u|. An inward step beyond -z has a part on which v is at least v(z), and a rest with the
    mean of an outward step by |u| - 2|z|, which is allowed. So u is the outward end; then, as for a
    z that is not negative, ``B = u sigma(-|z|) + log(1 + e^(-|z| - u)) - log(1 + e^-|z|)``.
    """
    e = exp(-abs(z))
    divergence = (outwards * (e / (1.0 + e)) - log1p(e)) + log1p(exp(-abs(z) - outwards))
    return 2.0 * divergence / (outwards * outwards)


@kernel
def logistic_third(z: float) -> float:
    """``v t`` with ``t = sigma(-z) - sigma(z)``; then t^2 = 1 - 4v, v' = v t and t' = -2v."""
    return logistic_variance(z) * (logistic(-z) - logistic(z))


@kernel
def logistic_fourth(z: float) -> float:
    """``v (1 - 6v)``."""
    v = logistic_variance(z)
    return v * (1.0 - 6.0 * v)


@kernel
def logistic_fifth(z: float) -> float:
    """``v t (1 - 12v)``."""
    return logistic_third(z) * (1.0 - 12.0 * logistic_variance(z))


@kernel
def logistic_sixth(z: float) -> float:
    """``v (1 - 30v + 120v^2)``."""
    v = logistic_variance(z)
    return v * (1.0 - v * (30.0 - 120.0 * v))


def _logistic_polynomial(order: int) -> list[float]:
    """Coefficients in p, ascending, of the derivative of that order of ``log(1 + e^z)``."""
    coefficients = [0.0, 1.0]  # order 1: p
    for _ in range(order - 1):
        slope = [k * c for k, c in enumerate(coefficients)][1:]
        product = [0.0] * (len(slope) + 2)
        for k, c in enumerate(slope):
            product[k + 1] += c  # times p
            product[k + 2] -= c  # times -p^2
        coefficients = product
    return coefficients


def _logistic_ratio(order: int) -> float:
    """max |q_k(p)| / (p(1-p)), from the critical points of the quotient, rounded up."""
    import numpy as np

    q = np.polynomial.Polynomial(_logistic_polynomial(order))
    ratio, remainder = divmod(q, np.polynomial.Polynomial([0.0, 1.0, -1.0]))
    assert np.allclose(remainder.coef, 0.0)
    critical = ratio.deriv().roots()
    real = critical.real[np.abs(critical.imag) < 1e-9]
    points = np.concatenate([[0.0, 1.0], real[(real > 0) & (real < 1)]])
    return float(np.abs(ratio(points)).max() * (1 + 1e-9))


_LOGISTIC_RATIOS = {order: _logistic_ratio(order) for order in range(3, 9)}
