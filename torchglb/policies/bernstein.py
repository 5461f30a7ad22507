"""A self-normalised Bernstein bound for the noise of logistic rewards, with every constant.

Let ``e_s = r_s - mu(<x_s, theta*>)`` for rewards in [0, 1], ``N = sum_s e_s x_s``, ``H = sum_s
mu-dot(<x_s, theta*>) x_s x_s'`` and |x_s| <= 1. Since ``e^u <= 1 + u + u^2`` for u <= 1, and the
variance of r_s is at most mu-dot,

    ``exp(<xi, N> - |xi|^2 in H)``  is a supermartingale for every |xi| <= 1,

and so is its mean over the law of density proportional to ``exp(-rho |xi|^2)`` on the unit ball,
for a rho > 0 that is fixed beforehand. At a point of length at most a < 1 the exponent, with ``H +
rho I`` for H, is reached on average over the ball of radius 1 - a around it (the linear terms
cancel by symmetry). With F_d the distribution function of chi^2 with d degrees of freedom that mean
is therefore at least

    ``exp(<xi, N> - |xi|^2 in H + rho I) det(I + H/rho)^(-1/2) F_d(2 rho (1 - a)^2) / F_d(2 rho)``.

For any ``lambda >= rho`` and ``0 < b < sqrt(lambda)`` take ``xi = b (H + lambda I)^-1 N``, divided
by the norm of N in ``(H + lambda I)^-1``, whose length is at most ``a = b/sqrt(lambda)``. By
Ville's inequality, with probability 1 - delta, for all times, all such lambda and all b at once:

    ``|N| in (H + lambda I)^-1 <= b + c(b)/b``,
    ``c(b) = log(1/delta) + (1/2) log det(I + H/rho) + log(F_d(2 rho)/F_d(2 rho (1 - a)^2))``.

H is that of theta*, which nobody knows; but ``mu-dot <= 1/4``.

Faury and others (2020) prove this for a fixed lambda = rho and ``b = sqrt(lambda)/2``, with ``2^d``
for the ratio of the F. There, and in Abeille and others (2021), lambda grows with time as ``d log
n``, for which one martingale is not enough; here rho stays where lambda began.
"""

from __future__ import annotations

import math

import torch
from scipy import special
from torch import Tensor


def ridge_of(dim: int, observations: int) -> float:
    """``lambda = d log(2 + n)``; its first value is the rho of :func:`noise_bound`."""
    return dim * math.log(2.0 + observations)


def noise_bound(growth: Tensor, dim: int, delta: float, ridge: float) -> Tensor:
    """The lesser ``b + c(b)/b``, ``(*B)``, of ``b = sqrt(lambda)/2`` and, if lambda > 1, b = 1.

    Args:
        growth: ``log det(I + H/rho)`` or more, ``(*B)``.
        dim: d.
        delta: the failure level.
        ridge: lambda, at least ``rho = d log 2``.

    Example:
        >>> noise_bound(torch.tensor([0.0, 4.0]), 2, 0.05, 10.0)
        tensor([4.0705, 5.3354])
    """
    rho, root = ridge_of(dim, 0), math.sqrt(ridge)
    bounds = []
    for b in (0.5 * root, 1.0):
        if b < root:
            tails = special.gammainc(0.5 * dim, (rho, rho * (1.0 - b / root) ** 2))
            if tails[1] > 0.0:
                c = 0.5 * growth + math.log(tails[0] / tails[1] / delta)
                bounds.append(b + c / b)
    return torch.stack(bounds).amin(0)
