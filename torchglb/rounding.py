"""One rounding policy: what sums may have lost, and sums that lose next to nothing.

All bounds are counted in units of ``eps`` of the dtype, the distance from 1 to the next number;
one operation loses at most half of it, relative to its result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: longer matrix products are summed in blocks of so many rows
BLOCK = 256
#: what evaluating one term of a loss may lose: exp, log and some products, a few units each
EVALUATION = 8.0


def lost_in_sum(count: int) -> float:
    """What a sum of so many terms may have lost: so many ``eps`` times the sum of their sizes.

    Added one after the other, n terms pass through at most n - 1 additions, each of which loses
    half an ``eps`` of its result: at most ``(n - 1)/2`` in all, whatever the order (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2). That is no pessimism for a matrix product,
    which does add one after the other: for a million equal terms BLAS was seen to lose 84000. So
    matrix products behind a certificate are made in blocks (:func:`combine_rows`), and what a block
    gives goes into torch's own sum, a tree of at most four levels, each of at most
    ``2^max(4, log2(n)/4)`` terms in a row. Both together, for any n:

    ``1 + (min(n, 256) + 4 * 2^max(4, log2(n)/4)) / 2``, the 1 for the products themselves.

    The sizes are those of the terms, which do not cancel; nor does their own rounding matter here.

    Example:
        >>> lost_in_sum(2), round(lost_in_sum(10**6))
        (2.0, 192)
    """
    if count <= BLOCK:
        return 1.0 + 0.5 * count
    tree = 4.0 * 2.0 ** max(4.0, math.log2(count) / 4.0)
    return 1.0 + 0.5 * (BLOCK + tree)


def combine_rows(v: Tensor, rows: Tensor) -> Tensor:
    """``v @ rows`` for ``(*, P, n)`` and ``(*, n, d)``, summed as :func:`lost_in_sum` assumes."""
    n = rows.shape[-2]
    if n <= BLOCK:
        return v @ rows
    blocks, left = divmod(n, BLOCK)
    whole = n - left
    # (*, P, b, m) -> (*, b, P, m): a matrix product for every block
    parts = v[..., :whole].unflatten(-1, (blocks, BLOCK)).transpose(-2, -3)
    sums = (parts @ rows[..., :whole, :].unflatten(-2, (blocks, BLOCK))).sum(-3)
    return sums + v[..., whole:] @ rows[..., whole:, :] if left else sums


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in another dtype, not below what it was; differentiable."""
    if value.dtype == dtype:
        return value
    nearest = value.to(dtype)
    # a number below the range of the dtype is above the least of them
    nearest = torch.where(nearest == value, nearest, nearest.clamp_min(torch.finfo(dtype).min))
    with torch.no_grad():
        above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
        short = torch.where(nearest.double() < value, above - nearest, torch.zeros_like(nearest))
    return nearest + short


def moved_up(value: Tensor, by: float) -> Tensor:
    """``value + by`` in the dtype of the value, not below the exact sum; differentiable.

    Example:
        >>> moved_up(torch.tensor(3.0), -math.log(20.0)) >= 3.0 - math.log(20.0)
        tensor(True)
    """
    if by == 0.0:
        return value
    exact = value.double()
    size = torch.where(torch.isfinite(exact), exact.abs() + abs(by), 0.0).detach()
    return round_up(exact + by + 2.0 * torch.finfo(torch.float64).eps * size, value.dtype)


def power_of_two(x: Tensor) -> Tensor:
    """A power of two just above the entries of each vector ``(*, d)``; 1 for zeros. ``(*, 1)``.

    Dividing by it is exact; the entries are then at most 1, and squares do not underflow.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    power = largest / torch.frexp(largest).mantissa
    return torch.where((largest > 0) & torch.isfinite(power), power, 1.0)


def short_scale(arms: Tensor) -> Tensor:
    """A power of two for arms whose squares would underflow, 1 for all others, ``(*B, K)``."""
    short = arms.abs().amax(-1) < torch.finfo(arms.dtype).tiny ** 0.25
    return torch.where(short, power_of_two(arms)[..., 0], 1.0)


def lost_below(scale: Tensor) -> Tensor:
    """What a product with a power of two below 1 loses at most where it underflows; else 0."""
    known = torch.finfo(scale.dtype)
    return (scale < 1.0).to(scale) * (known.tiny * known.eps)


# ---- sums in two numbers ----------------------------------------------------------------------


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b`` and exactly what it was rounded by (Knuth); nothing where it is not finite."""
    total = a + b
    other = total - a
    rest = (a - (total - other)) + (b - other)
    return total, torch.where(torch.isfinite(rest), rest, 0.0)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a b`` and exactly what it was rounded by (Dekker); nothing where it is not finite."""
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    rest = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    return product, torch.where(torch.isfinite(rest), rest, 0.0)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of half the digits (Veltkamp)."""
    digits = 27 if a.dtype == torch.float64 else 12
    scaled = (2.0**digits + 1.0) * a
    high = scaled - (scaled - a)
    return high, a - high


def scatter_exactly(
    total: Tensor, rest: Tensor, slot: Tensor, terms: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Adds terms ``(*, k)`` to the slots of a sum in two numbers, ``(*, m)`` each.

    ``total`` is the sum rounded once and ``rest`` what that left off. The terms are split at a
    common bit, so that sums of the upper parts are exact in any order (Rump and others, 2008); the
    lower parts are smaller by ``k eps``. An addition loses about ``eps^2`` of the sum: as good as
    nothing, over any number of additions that a float can count.

    Args:
        total: the sums so far.
        rest: what they were rounded by.
        slot: where each term goes, ``(*, k)`` of int64.
        terms: what is added.
        more: small corrections of the terms.
    """
    if not terms.shape[-1]:
        return total, rest
    # a power of two above all partial sums: what (edge + t) - edge keeps is a multiple of its ulp
    edge = power_of_two(terms) * 2.0 ** math.ceil(math.log2(terms.shape[-1] + 2))
    upper = (edge + terms) - edge
    lower = terms - upper
    lower = torch.where(torch.isfinite(lower), lower, 0.0)
    upper = torch.where(torch.isfinite(upper), upper, terms)
    lower = lower if more is None else lower + more
    added = torch.zeros_like(total).scatter_add(-1, slot, upper)
    after, left = two_sum(total, added)
    return two_sum(after, rest.scatter_add(-1, slot, lower) + left)
