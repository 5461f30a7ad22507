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
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from torchglb.arrays import (
    Array,
    array,
    at_least,
    dot,
    length,
    library,
    limits,
    matvec,
    quiet,
    tensor,
)
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion

#: the largest number of entries kept in the tensor of highest order
LARGEST_TENSOR = 1024
#: beyond this order a further one saves fewer passes than it costs
HIGHEST_ORDER = 4


def choose_order(family: GLMFamily, dim: int, radius: float, largest: int = LARGEST_TENSOR) -> int:
    """The highest order q whose tensor is small and whose remainder can be bounded (at least 2)."""
    order = 2
    while (
        order < HIGHEST_ORDER
        and dim ** (order + 1) <= largest
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


def monomials(rows: Array, order: int) -> list[Array]:
    """The products of k entries of each row, k = 0 to q: ``(N, n, d^k)``."""
    powers = [0.0 * rows[..., :1] + 1.0, rows]
    problems, n, d = rows.shape
    for k in range(2, order + 1):
        products = powers[-1][..., :, None] * rows[..., None, :]
        powers.append(products.reshape(problems, n, d**k))
    return powers[: order + 1]


def derivative_sums(
    family: GLMFamily, point: Tensor, X: Tensor, r: Tensor, w: Tensor | None, order: int
) -> list[Tensor]:
    """Derivatives of the data's loss at ``point (N, d)``, orders 0 to q; the k-th is ``(N, d^k)``.

    Args:
        family: the GLM family.
        point: ``(N, d)``.
        X: rows ``(N, n, d)``.
        r: rewards ``(N, n)``.
        w: weights ``(N, n)`` or None.
        order: q.
    """
    rows, weights = array(X), None if w is None else array(w)
    with quiet():
        z = matvec(rows, array(point))
        columns = row_derivatives(family, z, array(r), weights, order)
    half = -(-order // 2)
    powers = monomials(rows, half if rows.shape[1] > 1 else order)
    if rows.shape[1] == 1:
        return [tensor(column * power[:, 0]) for column, power in zip(columns, powers, strict=True)]
    sums = []
    for k, column in enumerate(columns):
        left, right = powers[k // 2], powers[k - k // 2]
        outer = (left * column[..., None]).mT @ right  # the orders of both sides add up to k
        sums.append(tensor(outer.reshape(rows.shape[0], rows.shape[-1] ** k)))
    return sums


class Model(NamedTuple):
    """The Taylor model and its derivatives: ``(N)``, ``(N, d)``, ``(N, d, d)``."""

    value: Array
    gradient: Array
    hessian: Array


def evaluate_model(sums: Sequence[Array], p: Array) -> Model:
    """The polynomial ``sum_k T_k[p, ..., p] / k!`` with gradient and Hessian at ``p (N, d)``."""
    problems, d = p.shape
    column = p[..., None]
    hessian = steep = sums[2].reshape(problems, d, d)
    curve = 0.5 * hessian
    for k in range(3, len(sums)):
        matrix = sums[k]
        for _ in range(k - 2):
            matrix = matrix.reshape(problems, -1, d) @ column
        matrix = matrix.reshape(problems, d, d)  # T_k[p, ..., p, ., .]
        hessian = hessian + matrix * (1 / math.factorial(k - 2))
        steep = steep + matrix * (1 / math.factorial(k - 1))
        curve = curve + matrix * (1 / math.factorial(k))
    gradient = sums[1] + matvec(steep, p)
    value = sums[0][..., 0] + dot(sums[1] + matvec(curve, p), p)
    return Model(value, gradient, hessian)


class Bracket(NamedTuple):
    """The minimum of the loss lies in ``[low, high]``; ``high`` bounds L(theta) too."""

    low: Array
    high: Array


class Nature(NamedTuple):
    """What bounds the remainder of a Taylor model, for N problems."""

    longest: Array  # the largest |x_s| so far
    ratio: Array  # C; see remainder_ratio
    concordance: Array  # R


class Remainder(NamedTuple):
    """How far a Taylor model may be off."""

    value: Array
    slope: Array  # in the dual norm of the Hessian there


def remainder(p: Array, local: Array, nature: Nature, order: int) -> Remainder:
    """Of the model at a displacement ``p (N, d)`` from its centre.

    Args:
        p: the displacement.
        local: its square in the Hessian at the centre, ``(N)``.
        nature: R, C and the longest row.
        order: q.
    """
    xp = library(p)
    longest, ratio, concordance = nature
    reach = longest * length(p)  # D
    stretch = xp.exp((0.5 * concordance) * reach)
    growth = ratio * (stretch * stretch) * reach ** (order - 1)
    return Remainder(
        growth * local * (1 / math.factorial(order + 1)),
        growth * stretch * xp.sqrt(local) * (1 / math.factorial(order)),
    )


def certify(
    model: Model,
    eigenvalues: Array,
    basis: Array,
    theta: Array,
    p: Array,
    ridge: Array,
    radius: Array,
    nature: Nature,
    order: int,
    roundings: float,
) -> Bracket:
    """Encloses ``min L`` over the ball from the model at ``theta = c + p``; no pass.

    The lower end is self-concordance at the Lagrangian ``L + nu (|theta|^2 - S^2)/2``: with its
    Newton decrement delta and ``b`` the concordance in the local norm, the minimum is at most
    ``delta^2 / (2 (1 - b delta))`` below.

    Args:
        model: the Taylor model of the data's loss at p.
        eigenvalues: of the Hessian of the data's loss at c, ascending, ``(N, d)``.
        basis: its eigenvectors, ``(N, d, d)``.
        theta: c + p, in the ball.
        p: the displacement.
        ridge: lambda, ``(N)``.
        radius: S, ``(N)``.
        nature: R, C and the longest row.
        order: q.
        roundings: that the carried sums have seen.
    """
    xp = library(p)
    longest, _, concordance = nature
    inf = float("inf")
    eigenvalues = at_least(eigenvalues, 0.0)
    norm_squared = dot(theta, theta)
    gradient = model.gradient + ridge[..., None] * theta
    nu = at_least(-dot(gradient, theta) / (radius * radius), 0.0)
    # the multiplier belongs to the sphere: inside it would only loosen the bound
    nu = xp.where(norm_squared >= (1 - 1e-6) * radius * radius, nu, 0.0)
    residual = gradient + nu[..., None] * theta
    along, turned = matvec(basis.mT, p), matvec(basis.mT, residual)
    lost = (roundings * limits(p)[0]) * eigenvalues.sum(-1) * dot(p, p)
    local = dot(eigenvalues * along, along) + lost  # |p|^2_H
    value_error, slope_error = remainder(p, local, nature, order)

    # the Hessian at theta is at least e^(-R D) times that at c
    shrunk = xp.exp(-concordance * (longest * length(p)))
    metric = shrunk[..., None] * eigenvalues + (nu + ridge)[..., None]
    metric = at_least(metric, limits(p)[1])
    decrement = xp.sqrt(dot(turned, turned / metric)) + slope_error
    stiffness = concordance * longest / xp.sqrt(metric[..., 0])  # b
    shrink = at_least(1.0 - stiffness * decrement, 0.0)
    drop = 0.5 * decrement * decrement / shrink  # inf where the bound says nothing
    inside = 0.5 * nu * at_least(radius * radius - norm_squared, 0.0)

    value = model.value + 0.5 * ridge * norm_squared
    high = value + value_error
    low = value - value_error - inside - drop
    return Bracket(xp.where(xp.isfinite(low), low, -inf), high)


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
