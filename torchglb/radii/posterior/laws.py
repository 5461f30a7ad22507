"""The law of one coordinate of a posterior: what an average of a convex loss depends on.

If theta is drawn from an ellipsoid with centre c, then ``<x, theta> = <x, c> + s U`` with a number
``s`` and a symmetric variable U, and ``E m(<x, theta>)`` is one-dimensional. Every function here
is an upper bound, exact up to the stated remainder: a radius may err only upwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class BallLaw(NamedTuple):
    """U with density proportional to ``(1 - u^2)^(nu - 1/2)`` on [-1, 1], by the averages needed.

    A coordinate of a uniform point of the unit ball of R^d has ``nu = d/2``; of a Pearson-II point
    (density ``(1 - |u|^2)^k``) ``nu = d/2 + k``.

    Attributes:
        nu: a tensor that broadcasts with the arguments of the methods.
        terms: how many terms of each series are summed; the rest is bounded and added.
    """

    nu: Tensor
    terms: int = 16

    def second_moment(self) -> Tensor:
        """``E U^2 = 1 / (2 nu + 2)``."""
        return 1.0 / (2.0 * self.nu + 2.0)

    def mean_absolute(self) -> Tensor:
        """``E |U| = Gamma(nu + 1) / (sqrt(pi) Gamma(nu + 3/2))``."""
        return torch.exp(torch.lgamma(self.nu + 1) - torch.lgamma(self.nu + 1.5)) / math.sqrt(
            math.pi
        )

    def hyperbolic(self, s2: Tensor) -> Tensor:
        """At least ``E cosh(s U) - 1``, from ``s^2``.

        ``0F1(; nu + 1; s^2/4) - 1 = sum_j y^j / (j! (nu+1)_j)`` with ``y = s^2/4``. All terms are
        positive; from term K on they fall faster than a geometric series does, see :func:`_tail`,
        with v = y/(nu + K + 1).
        """
        y, last = 0.25 * s2, self.terms
        total = _tail(y / (self.nu + last + 1), last)
        for j in range(last, 1, -1):
            total = 1.0 + y * total / (j * (self.nu + j))
        return y * total / (self.nu + 1)

    def exponential(self, a: Tensor) -> Tensor:
        """At least ``E[e^(a|U|) - 1 - a|U|]``, for a >= 0.

        ``sum_{j >= 2} a^j E|U|^j/j!``; the tail as in :meth:`hyperbolic`, with v = a. The terms
        fall as ``a^j/j!``, not ``(a/2)^(2j)/(j!)^2``: three times as many are summed.
        """
        nu, last = self.nu, 3 * self.terms
        total = _tail(a, last)
        for j in range(last, 2, -1):
            # E|U|^j / E|U|^(j-1)
            ratio = math.exp(math.lgamma((j + 1) / 2) - math.lgamma(j / 2)) * torch.exp(
                torch.lgamma(nu + (j + 1) / 2) - torch.lgamma(nu + 1 + j / 2)
            )
            total = 1.0 + a * total * ratio / j
        return 0.5 * a * a * total / (2.0 * nu + 2.0)


def _tail(v: Tensor, last: int) -> Tensor:
    """At least ``sum_{i >= 0} v^i / (K+1)_i``, for v >= 0.

    ``(K+1)_i >= (K+1)^i`` gives ``1/(1 - v/(K+1))`` where that converges, and ``(K+1)_i >= (K+1)
    i!`` gives ``1 + (e^v - 1)/(K + 1)``.
    """
    ratio = (v / (last + 1)).clamp_max(0.999)
    always = 1.0 + torch.expm1(v) / (last + 1)
    return torch.where(v < 0.99 * (last + 1), torch.minimum(1.0 / (1.0 - ratio), always), always)


class NormalLaw:
    """A standard normal U."""

    def second_moment(self) -> float:
        """1."""
        return 1.0

    def mean_absolute(self) -> float:
        """``sqrt(2/pi)``."""
        return math.sqrt(2.0 / math.pi)

    def hyperbolic(self, s2: Tensor) -> Tensor:
        """``e^(s^2/2) - 1``, exact."""
        return torch.expm1(0.5 * s2)

    def exponential(self, a: Tensor) -> Tensor:
        """``2 e^(a^2/2) Phi(a) - 1 - a sqrt(2/pi)``, exact."""
        return 2.0 * torch.exp(0.5 * a * a) * torch.special.ndtr(a) - 1.0 - a * self.mean_absolute()


#: the symmetric law of U
Law = BallLaw | NormalLaw


class Prior(NamedTuple):
    """The prior of every problem, and what bounds its losses; tensors ``(*B)``.

    Attributes:
        normal: ``N(0, s0^2 I)``; else uniform on the ball.
        variance: s0^2; for the uniform prior the square of S.
        log_volume: of the ball.
        concordance: R_s on the support of the prior, or None: not known.
        top: the largest m'' there, or None.
        terms: of the series of a law.
    """

    normal: bool
    variance: Tensor
    log_volume: Tensor
    concordance: Tensor | None
    top: Tensor | None
    terms: int

    def law(self, nu: Tensor) -> Law:
        """Of a coordinate of a posterior of shape k, for ``nu = d/2 + k``."""
        return NormalLaw() if self.normal else BallLaw(nu, self.terms)


def series_terms(longest: float) -> int:
    """How many terms keep the bounded remainder below 1e-12 for arguments up to ``longest``.

    (Up to 70; beyond, the number is the same for all.) So the largest S of a batch may set it: what
    a smaller one is given changes by less than that.
    """
    return min(96, 8 + math.ceil(1.2 * longest))
