"""Bounded rewards under a non-canonical mean function, as quasi-likelihood (MATH section 6).

For a reward in [0, 1] with mean ``mu(z)``, take ``m`` with ``m' = mu`` and the dispersion
``g = sup mu (1 - mu) / mu-dot``. Then ``exp`` of the log-likelihood ratio is a supermartingale, so
every confidence set built on the loss is valid although the loss is not a true likelihood.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import kernel
from torchglb.checks import check_choice
from torchglb.families.base import GLMFamily, exponential, sampled_at
from torchglb.families.compiled import CLOGLOG, PROBIT, CompiledFamily

_LINKS = ("probit", "cloglog")
_EULER = 0.57721566490153286061


class QuasiBounded(GLMFamily):
    """Rewards in [0, 1] with mean ``Phi(z)`` (probit) or ``1 - exp(-e^z)`` (cloglog).

    Args:
        link: ``"probit"`` (g = sqrt(pi/8) = 0.6267) or ``"cloglog"`` (g = 1).

    Example:
        >>> QuasiBounded("probit").mean(torch.tensor(0.0))
        tensor(0.5000)
    """

    reward_range = (0.0, 1.0)

    def __init__(self, link: str) -> None:
        super().__init__()
        self.link = check_choice("link", link, _LINKS)

    @property
    def dispersion(self) -> float:
        """``sup mu (1 - mu) / mu-dot``; attained at z = 0 for probit, as z -> -inf for cloglog."""
        return math.sqrt(math.pi / 8.0) if self.link == "probit" else 1.0

    def log_partition(self, z: Tensor) -> Tensor:
        """The integral of the mean from minus infinity."""
        return _integrated_normal_cdf(z) if self.link == "probit" else _integrated_cloglog(z)

    def mean(self, z: Tensor) -> Tensor:  # noqa: D102
        if self.link == "probit":
            return _normal_cdf(z)
        return -torch.expm1(-torch.exp(_capped(z)))

    def variance(self, z: Tensor) -> Tensor:  # noqa: D102
        if self.link == "probit":
            return torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return torch.exp(_capped(z) - torch.exp(_capped(z)))

    def third_derivative(self, z: Tensor) -> Tensor:  # noqa: D102
        if self.link == "probit":
            return -z * self.variance(z)
        return -torch.expm1(_capped(z)) * self.variance(z)

    def compiled(self) -> CompiledFamily | None:  # noqa: D102
        if type(self) is not QuasiBounded:
            return None
        return self._compiled_as(PROBIT if self.link == "probit" else CLOGLOG)

    def sample(  # noqa: D102
        self, z: ArrayLike, generator: torch.Generator | None = None
    ) -> Tensor:
        z = sampled_at(z, generator)
        draws = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return torch.where(z.isnan(), z, (draws < self.mean(z)).to(z.dtype)).detach()

    def quantile(self, z: Tensor, u: Tensor) -> Tensor:
        """Of the Bernoulli law, as :meth:`sample`."""
        return (u > 1.0 - self.mean(z)).to(z.dtype)

    def self_concordance(self, radius: float) -> float:
        """``S`` for probit; ``max(1, e^S - 1)`` for cloglog."""
        if self.link == "probit":
            return float(radius)
        return max(1.0, exponential(radius) - 1.0)

    def max_variance(self, radius: float) -> float:  # noqa: D102
        return 1.0 / math.sqrt(2.0 * math.pi) if self.link == "probit" else math.exp(-1.0)

    def min_variance(self, radius: float) -> float:  # noqa: D102
        if self.link == "probit":
            return math.exp(-0.5 * radius * radius) / math.sqrt(2.0 * math.pi)
        # log mu-dot = z - e^z is unimodal: the minimum is at an end
        return min(math.exp(radius - exponential(radius)), math.exp(-radius - math.exp(-radius)))


def _capped(z: Tensor) -> Tensor:
    """z, below the overflow of exp."""
    return z.clamp_max(math.log(torch.finfo(z.dtype).max) * (1 - 1e-7))


def _normal_cdf(z: Tensor) -> Tensor:
    """Phi(z) with full relative precision in the lower tail."""
    return 0.5 * torch.special.erfc(-z / math.sqrt(2.0))


def _integrated_normal_cdf(z: Tensor) -> Tensor:
    """``z Phi(z) + phi(z)``, without cancellation for negative z.

    For z < 0, ``phi(z) (1 - |z| M(|z|))`` with Mills' ratio M; far out, ``1 - a M(a)`` comes from
    its continued fraction ``1/(a^2 + 3 - ...)`` expressed by an asymptotic series in 1/a^2.
    """
    rise = z.clamp_min(0.0)
    a = 2.0 * rise - z  # |z|, with the derivative of the branch z >= 0 where both meet
    density = torch.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
    mills = math.sqrt(math.pi / 2.0) * torch.special.erfcx(a / math.sqrt(2.0))
    near = 1.0 - a * mills
    far = _mills_complement(a.clamp_min(3.0))
    lower = density * torch.where(a < 3.0, near, far)  # m(-a)
    return lower + rise  # m(a) = a + m(-a)


def _mills_complement(a: Tensor) -> Tensor:
    """``1 - a M(a)`` for a >= 3, from the continued fraction M = 1/(a + 1/(a + 2/(a + ...)))."""
    tail = torch.zeros_like(a)
    for k in range(80, 0, -1):
        tail = k / (a + tail)
    # M = 1/(a + tail), so 1 - a M = tail / (a + tail)
    return tail / (a + tail)


def _integrated_cloglog(z: Tensor) -> Tensor:
    """``Ein(v) = integral_0^v (1 - e^-u)/u du`` at ``v = e^z``."""
    v = torch.exp(_capped(z))
    small = v.clamp_max(4.0)
    term = torch.ones_like(small)
    series = torch.zeros_like(small)
    for k in range(1, 33):  # v^k / (k k!), alternating; v <= 4
        term = term * (-small / k)
        series = series - term / k
    large = v.clamp_min(4.0)
    # E1(v) = e^-v / (v + 1/(1 + 1/(v + 2/(1 + 2/(v + ...)))))
    tail = torch.zeros_like(large)
    for k in range(80, 0, -1):
        tail = k / (1.0 + k / (large + tail))
    exponential_integral = torch.exp(-large) / (large + tail)
    return torch.where(v <= 4.0, series, z.clamp_min(1.0) + _EULER + exponential_integral)


# ---- the same for one row, compiled --------------------------------------------------------------


@kernel
def probit_partition(z: float) -> float:
    """``z Phi(z) + phi(z)``."""
    a = abs(z)
    density = probit_variance(z)
    if a < 3.0:
        lower = density - a * 0.5 * math.erfc(a / math.sqrt(2.0))
    else:  # phi(a) (1 - a M(a)) with Mills' ratio M, by its continued fraction
        fraction = 0.0
        for k in range(80, 0, -1):
            fraction = k / (a + fraction)
        lower = density * fraction / (a + fraction)
    return lower + max(z, 0.0)


@kernel
def probit_mean(z: float) -> float:
    """``Phi(z)``."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@kernel
def probit_variance(z: float) -> float:
    """``phi(z)``."""
    return math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


@kernel
def cloglog_partition(z: float) -> float:
    """``Ein(e^z)``."""
    rate = math.exp(min(z, 709.0))  # v
    if rate <= 4.0:
        term, integral = 1.0, 0.0
        for k in range(1, 33):  # v^k / (k k!), alternating
            term *= -rate / k
            integral -= term / k
        return integral
    fraction = 0.0  # log v + gamma + E1(v), E1 by its continued fraction
    for k in range(80, 0, -1):
        fraction = k / (1.0 + k / (rate + fraction))
    return z + _EULER + math.exp(-rate) / (rate + fraction)


@kernel
def cloglog_mean(z: float) -> float:
    """``1 - exp(-e^z)``."""
    return -math.expm1(-math.exp(min(z, 709.0)))


@kernel
def cloglog_variance(z: float) -> float:
    """``exp(z - e^z)``."""
    return math.exp(z - math.exp(min(z, 709.0)))
