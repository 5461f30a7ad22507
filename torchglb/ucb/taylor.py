"""The loss near a fixed point, carried forward: a Taylor model whose remainder is certified.

At a fixed point c every derivative of the loss is a sum over observations, so a new observation
adds one term to each: O(d^q) for derivatives up to order q, and no pass over the history. If
``|m^(q+1)| <= C m''`` and ``|m'''| <= R m''``, then for ``theta = c + p`` and ``D = max |x_s| |p|``

``|L(theta) - T(p)| <= C e^(R D) D^(q-1) |p|^2_H / (q+1)!``  with H the Hessian at c,

and likewise for the gradient. So the minimum of the loss is known to a tolerance for many rounds
after the last pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torchglb.arrays import (
    Array,
    array,
    at_least,
    dot,
    idle,
    library,
    limits,
    matvec,
    quiet,
    tensor,
)
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion
from torchglb.ucb.monomials import Monomials

#: the largest number of derivatives of the highest order
LARGEST_ORDER = 256
#: beyond this order a further one saves fewer passes than it costs
HIGHEST_ORDER = 6


def choose_order(
    family: GLMFamily,
    dim: int,
    radius: float,
    largest: int = LARGEST_ORDER,
    highest: int = HIGHEST_ORDER,
) -> int:
    """The highest order q with few derivatives whose remainder can be bounded (at least 2)."""
    order = 2
    while (
        order < highest
        and math.comb(dim + order, order + 1) <= largest
        and family.derivative_ratio(order + 2, radius) is not None
    ):
        order += 1
    return order


def remainder_ratio(family: GLMFamily, order: int) -> Callable[[float], float]:
    """C of a model of that order, as a function of S; infinite where it is not known."""

    def ratio(radius: float) -> float:
        known = family.derivative_ratio(order + 1, radius)
        return math.inf if known is None else known

    return ratio


def row_derivatives(
    family: GLMFamily, z: Array, r: Array, w: Array | None, order: int
) -> list[Array]:
    """The weighted loss of every row and its derivatives in z, orders 0 to q."""
    if family.takes_arrays or isinstance(z, Tensor):
        found = family.loss_derivatives(z, r, order)
    else:
        found = [array(t) for t in family.loss_derivatives(tensor(z), tensor(r), order)]
    return found if w is None else [column * w for column in found]


def derivative_sums(
    family: GLMFamily, point: Tensor, X: Tensor, r: Tensor, w: Tensor | None, monomials: Monomials
) -> Tensor:
    """Derivatives of the data's loss at ``point (N, d)``, one for each monomial: ``(N, count)``.

    Args:
        family: the GLM family.
        point: ``(N, d)``.
        X: rows ``(N, n, d)``.
        r: rewards ``(N, n)``.
        w: weights ``(N, n)`` or None.
        monomials: of the orders that are wanted.
    """
    rows, weights = array(X), None if w is None else array(w)
    with quiet():
        z = matvec(rows, array(point))
        columns = row_derivatives(family, z, array(r), weights, monomials.order)
        return tensor(monomials.moments(columns, rows))


class Bracket(NamedTuple):
    """The minimum of the loss lies in ``[low, high]``; ``high`` bounds L(theta) too."""

    low: Array
    high: Array


class Nature(NamedTuple):
    """What bounds the remainder of a Taylor model, for N problems."""

    longest: Array  # the largest |x_s| so far
    ratio: Array  # C; see remainder_ratio
    concordance: Array  # R

    def pick(self, index: Array) -> Nature:
        """The same for some of the problems."""
        if index.shape[0] == self.longest.shape[0]:  # all of them
            return self
        return Nature(*(t[index] for t in self))


class Remainder(NamedTuple):
    """How far a Taylor model may be off."""

    value: Array
    slope: Array  # in the dual norm of the Hessian there
    hessian: Array  # relative to the Hessian there


def local_square(p: Array, hessian: Array, curvature: Array, roundings: float) -> Array:
    """At least ``|p|^2`` in a Hessian, whatever the rounding of its sums has lost.

    Args:
        p: displacements, ``(N, d)``.
        hessian: ``(N, d, d)``.
        curvature: its trace, ``(N)``.
        roundings: that the sums have seen.
    """
    lost = (roundings * limits(p)[0]) * curvature * dot(p, p)
    return at_least(dot(p, matvec(hessian, p)), 0.0) + lost


def remainder(distance: Array, local: Array, nature: Nature, order: int) -> Remainder:
    """Of the model at a displacement p from its centre.

    Args:
        distance: |p| or more, ``(N)``.
        local: the square of p in the Hessian at the centre, ``(N)``.
        nature: R, C and the longest row.
        order: q.
    """
    xp = library(local)
    longest, ratio, concordance = nature
    reach = longest * distance  # D
    stretch = xp.exp((0.5 * concordance) * reach)
    growth = ratio * (stretch * stretch) * reach ** (order - 1)
    return Remainder(
        growth * local * (1 / math.factorial(order + 1)),
        growth * stretch * xp.sqrt(local) * (1 / math.factorial(order)),
        growth * (stretch * stretch) * (1 / math.factorial(order - 1)),
    )


def certify(
    value: Array,
    gradient: Array,
    eigenvalues: Array,
    basis: Array,
    theta: Array,
    moved: Array,
    error: Remainder,
    radius: Array,
    nature: Nature,
) -> Bracket:
    """Encloses ``min L`` over the ball from the model at theta; no pass.

    The lower end is self-concordance at the Lagrangian ``L + nu (|theta|^2 - S^2)/2``: with its
    Newton decrement delta and ``b`` the concordance in the local norm, the minimum is at most
    ``delta^2 / (2 (1 - b delta))`` below. The Hessian is known from a point nearby: there it is at
    least the model's over 1 + its relative error, and it shrinks by ``e^(-R D)`` on the way.

    Args:
        value: of the model at theta, with a ridge if there is one.
        gradient: of the same.
        eigenvalues: of the model's Hessian at a point nearby, ascending, ``(N, d)``.
        basis: its eigenvectors, ``(N, d, d)``.
        theta: in the ball.
        moved: how far it is from that point, ``(N)``.
        error: of the model at either point.
        radius: S, ``(N)``.
        nature: R, C and the longest row.
    """
    xp = library(theta)
    longest, _, concordance = nature
    sphere, squared = radius * radius, dot(theta, theta)
    known = xp.exp(-concordance * (longest * moved)) / (1.0 + error.hessian)
    known = xp.where(error.hessian < 1.0, known, 0.0)  # else it may be indefinite
    metric = known[..., None] * at_least(eigenvalues, 0.0)
    low = value - error.value
    # the multiplier belongs to the sphere: inside it would only loosen the bound
    edge = squared >= (1 - 1e-6) * sphere
    if not idle(edge):
        nu = xp.where(edge, at_least(-dot(gradient, theta) / sphere, 0.0), 0.0)
        gradient = gradient + nu[..., None] * theta
        metric = metric + nu[..., None]
        low = low - 0.5 * nu * at_least(sphere - squared, 0.0)
    metric = at_least(metric, limits(theta)[1])
    turned = matvec(basis.mT, gradient)
    decrement = xp.sqrt(dot(turned, turned / metric)) + error.slope
    stiffness = concordance * longest / xp.sqrt(metric[..., 0])  # b
    shrink = at_least(1.0 - stiffness * decrement, 0.0)
    low = low - 0.5 * decrement * decrement / shrink  # -inf where the bound says nothing
    return Bracket(xp.where(xp.isfinite(low), low, -float("inf")), value + error.value)


def shift_by_ridge(model: Expansion, theta: Array, ridge: Array) -> Expansion:
    """Adds ``(lambda/2)|theta|^2`` to the loss at points ``(..., d)``; ``ridge`` broadcasts."""
    return Expansion(
        model.loss + 0.5 * ridge * dot(theta, theta),
        model.gradient + ridge[..., None] * theta,
        add_to_diagonal(model.hessian, ridge),
    )


def add_to_diagonal(matrix: Array, ridge: Array) -> Array:
    """``M + lambda I`` for matrices ``(*, d, d)`` and numbers ``(*)``."""
    kind = {"device": matrix.device} if isinstance(matrix, Tensor) else {}
    eye = library(matrix).eye(matrix.shape[-1], dtype=matrix.dtype, **kind)
    return matrix + ridge[..., None, None] * eye
