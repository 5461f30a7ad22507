"""The pair that is known least: the widest certified interval among K^2/2 differences.

The width of a pair is ``h(z) + h(-z)``, z = (x_i - x_j)/2. An ellipsoid around the set bounds all
widths from above in O(K^2 d); exact programs are solved from the widest on, in blocks, until what
is left cannot be wider than what was found. So K = 1000 items cost a few hundred programs instead
of a million.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_count, check_tolerance, refuse
from torchglb.optim import frank_wolfe_gap
from torchglb.radii import Refinement
from torchglb.radii.posterior import centred
from torchglb.rounding import combine_rows, lost_in_sum
from torchglb.sets import CentredSet, LikelihoodRatioSet

#: pairs whose programs are solved together
BLOCK = 32
#: pairs that are solved at most; the bound that is returned says what that leaves open
BUDGET = 4096
#: steps of the fixed point of the ellipsoid
STEPS = 12
#: what the arithmetic with its matrix may change of a length, relative to it
LOST = 1e-3


class WidestPair(NamedTuple):
    """A pair of items, and how wide the interval of their difference is.

    Attributes:
        left: i.
        right: j.
        width: of ``<x_i - x_j, theta>``, certified from above.
        bound: no pair is wider than this.
        solved: for how many pairs programs were solved.

    Example:
        >>> from torchglb.preferences import PreferenceSequence
        >>> sequence = PreferenceSequence(2, S=3.0, delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 20, [[0.0, 1.0]] * 20, [1.0, 0.0] * 10)
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).double()
        >>> found = widest_pair(sequence.current().region, items, tol=0.01)
        >>> found.width <= found.bound <= 1.01 * found.width * (1 + 1e-9)
        True
    """

    left: int
    right: int
    width: float
    bound: float
    solved: int


@torch.no_grad()
def widest_pair(
    region: LikelihoodRatioSet,
    items: Tensor,
    allowed: Tensor | None = None,
    *,
    tol: float = 0.01,
    budget: int = BUDGET,
) -> WidestPair:
    """The widest pair, up to a factor ``1 + tol``.

    Args:
        region: the set of ``2 theta``, of one problem.
        items: ``(K, d)``.
        allowed: which items may be part of the pair, ``(K)``; all if left out.
        tol: relative tolerance.
        budget: pairs whose programs are solved at most.

    Example:
        >>> from torchglb.preferences import PreferenceSequence
        >>> sequence = PreferenceSequence(2, S=3.0, delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 20, [[0.0, 1.0]] * 20, [1.0, 0.0] * 10)
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).double()
        >>> found = widest_pair(sequence.current().region, items)
        >>> found.left, found.right
        (0, 2)
    """
    check_tolerance("tol", tol)
    check_count("budget", budget, least=1)
    places = torch.arange(len(items)) if allowed is None else allowed.nonzero()[:, 0]
    if len(places) < 2:
        raise refuse("items", "at least two items to choose from", f"{len(places)}")
    region, chosen = in_double(region, items[places])
    rough = rough_supports(region, chosen)
    first, second = torch.triu_indices(len(places), len(places), 1)
    widths = rough[first, second] + rough[second, first]
    order = widths.argsort(descending=True, stable=True)
    best, pair, solved = -1.0, 0, 0
    for start in range(0, min(budget, len(order)), BLOCK):
        block = order[start : start + BLOCK]
        if float(widths[block[0]]) <= (1.0 + tol) * best:
            break
        exact = torch.minimum(
            exact_widths(region, 0.5 * (chosen[first[block]] - chosen[second[block]])),
            widths[block],
        )
        solved += len(block)
        place = int(exact.argmax())
        if float(exact[place]) > best:
            best, pair = float(exact[place]), int(block[place])
    left_over = float(widths[order[solved]]) if solved < len(order) else 0.0
    i, j = int(places[first[pair]]), int(places[second[pair]])
    return WidestPair(i, j, best, max(best, left_over), solved)


def in_double(region: LikelihoodRatioSet, items: Tensor) -> tuple[LikelihoodRatioSet, Tensor]:
    """Both in float64, in which float32 items have exact differences; on a CPU."""
    if region.level.dtype == torch.float64 or not region.level.is_cpu:
        return region, items
    given: dict[str, Any] = {
        "likelihood": centred.in_double(region.likelihood),
        "level": region.level.double(),
        "theta_hat": region.theta_hat.double(),
    }
    if isinstance(region, CentredSet):
        given["refinement"] = Refinement.of(t.double() for t in region.refinement.tensors())
    return replace(region, **given), items.double()


def rough_supports(region: LikelihoodRatioSet, items: Tensor) -> Tensor:
    """Upper bounds on ``h((x_i - x_j)/2)``, ``(K, K)``, by an ellipsoid and the ball."""
    z = 0.5 * items
    S = region.domain.radius_like(items)
    factor = _ellipsoid(region)
    local = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    values = z @ region.center
    middle = values[:, None] - values[None, :]
    reach = _distances(local) * (1.0 + LOST)
    bound = torch.minimum(middle + reach, S * _distances(z))
    # above the rounding of all that
    return bound + max(1e-10, 64.0 * region.dim * torch.finfo(z.dtype).eps) * (1.0 + S)


def _ellipsoid(region: LikelihoodRatioSet) -> Tensor:
    """A Cholesky factor of M, ``|theta - theta_hat|^2 <= 1`` in M all over the set.

    As the fixed point of Theorem 3.2, with a rate for each row: ``L(theta) - L(theta_hat) >= sum_s
    w_s m''_s phi(D_s) <x_s, theta - theta_hat>^2 - gap`` where ``|<x_s, theta - theta_hat>| <=
    D_s``, for Bernoulli rewards. A row that is hardly known spoils its own rate only.
    """
    loss, center = region.likelihood, region.center
    S, eye = region.domain.radius_like(center), torch.eye(region.dim, dtype=center.dtype)
    at, errors = loss.expand_with_errors(center)
    reach = S + torch.linalg.vector_norm(center)
    length = torch.linalg.vector_norm(loss.X, dim=-1)
    rate = region.family.curvature(loss.X @ center)
    rate = rate if loss.w is None else rate * loss.w
    # sums of n rows, and solving with them: so far from a singular matrix, no length suffers
    lost = (lost_in_sum(loss.num_rows) + 16.0 * region.dim) * torch.finfo(center.dtype).eps
    ridge = lost / LOST * (rate * length.square()).sum()
    ridge = torch.maximum(ridge, 1.0 / (8.0 * S * S * (1.0 + S)))
    gap = frank_wolfe_gap(center, at.gradient, S) + errors.loss + 2.0 * S * errors.gradient
    height = (region.level - at.loss + gap + ridge * reach.square()) * (1.0 + 1e-9)
    D = reach * length
    for _ in range(STEPS):
        matrix = combine_rows(loss.X.mT * (rate * _contraction(D)), loss.X) + ridge * eye
        factor = torch.linalg.cholesky(matrix / height)
        local = torch.linalg.solve_triangular(factor, loss.X.mT, upper=False)
        D = torch.minimum(D, torch.linalg.vector_norm(local, dim=0) * (1.0 + LOST))
    return factor


def _contraction(D: Tensor) -> Tensor:
    """``(D - 1 + e^-D)/D^2``, rounded down; 1/2 at D = 0."""
    safe = D.clamp_min(1e-2)
    return torch.where(
        D > 1e-2, (safe + torch.expm1(-safe)) / safe.square() * (1.0 - 1e-12), 0.5 - D / 6.0
    )


def exact_widths(region: LikelihoodRatioSet, z: Tensor) -> Tensor:
    """``h(z) + h(-z)`` of rows ``(P, d)``, certified from above."""
    bounds = region.upper_bound(torch.cat([z, -z]), tol=1e-4)
    # z was rounded once, as is the sum; z has length 1 at most
    paid = 4.0 * torch.finfo(z.dtype).eps * region.domain.radius_like(z)
    return bounds[: len(z)] + bounds[len(z) :] + paid


def _distances(x: Tensor) -> Tensor:
    """``|x_i - x_j|``, without the cancellation of the fast formula."""
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
