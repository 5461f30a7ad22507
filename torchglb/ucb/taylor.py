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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion

#: the largest number of entries kept in the tensor of highest order
LARGEST_TENSOR = 1024
#: beyond this order a further one saves fewer passes than it costs
HIGHEST_ORDER = 4


def choose_order(family: GLMFamily, dim: int, radius: float) -> int:
    """The highest order q whose tensor is small and whose remainder can be bounded (at least 2)."""
    order = 2
    while (
        order < HIGHEST_ORDER
        and dim ** (order + 1) <= LARGEST_TENSOR
        and family.derivative_ratio(order + 2, radius) is not None
    ):
        order += 1
    return order


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
    z = (X @ point[..., None])[..., 0]
    terms = family.loss_terms(z, r)
    columns = [terms.loss, terms.slope, terms.curvature]
    columns += [family.derivative(z, k) / family.dispersion for k in range(3, order + 1)]
    powers = [torch.ones_like(X[..., :1]), X]
    sums = []
    for k, column in enumerate(columns):
        if w is not None:
            column = column * w
        left, right = k // 2, k - k // 2
        while len(powers) <= right:
            powers.append((powers[-1][..., :, None] * X[..., None, :]).flatten(-2))
        outer = (powers[left] * column[..., None]).mT @ powers[right]  # (N, d^left, d^right)
        sums.append(outer.flatten(1))
    return sums


class Model(NamedTuple):
    """The Taylor model and its derivatives: ``(N)``, ``(N, d)``, ``(N, d, d)``."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


def evaluate_model(sums: Sequence[Tensor], p: Tensor) -> Model:
    """The polynomial ``sum_k T_k[p, ..., p] / k!`` with gradient and Hessian at ``p (N, d)``."""
    d, problems = p.shape[-1], p.shape[0]
    column = p[..., None]
    hessian = sums[2].view(problems, d, d)
    vector = (hessian @ column)[..., 0]
    gradient, curve = sums[1] + vector, 0.5 * vector
    for k in range(3, len(sums)):
        partial = sums[k]
        for _ in range(k - 2):
            partial = partial.view(problems, -1, d) @ column
        matrix = partial.view(problems, d, d)
        vector = (matrix @ column)[..., 0]
        hessian = torch.add(hessian, matrix, alpha=1 / math.factorial(k - 2))
        gradient = torch.add(gradient, vector, alpha=1 / math.factorial(k - 1))
        curve = torch.add(curve, vector, alpha=1 / math.factorial(k))
    value = sums[0][..., 0] + ((sums[1] + curve) * p).sum(-1)
    return Model(value, gradient, hessian)


class Bracket(NamedTuple):
    """The minimum of the loss lies in ``[low, high]``; ``high`` bounds L(theta) too."""

    low: Tensor
    high: Tensor


def certify(
    model: Model,
    eigenvalues: Tensor,
    basis: Tensor,
    theta: Tensor,
    p: Tensor,
    ridge: Tensor,
    radius: Tensor,
    longest: Tensor,
    ratio: float,
    concordance: float,
    order: int,
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
        longest: the largest |x_s| so far, ``(N)``.
        ratio: C.
        concordance: R.
        order: q.
    """
    tiny = torch.finfo(p.dtype).tiny
    reach = longest * torch.linalg.vector_norm(p, dim=-1)  # D
    eigenvalues = eigenvalues.clamp_min(0.0)
    local = (eigenvalues * (basis.mT @ p[..., None])[..., 0].square()).sum(-1)  # |p|^2_H
    growth = ratio * torch.exp(concordance * reach) * reach ** (order - 1)
    value_error = growth * local / math.factorial(order + 1)
    slope_error = growth * torch.exp(0.5 * concordance * reach) * local.sqrt()
    slope_error = slope_error / math.factorial(order)

    norm_squared = theta.square().sum(-1)
    gradient = model.gradient + ridge[..., None] * theta
    nu = (-(gradient * theta).sum(-1) / (radius * radius)).clamp_min(0.0)
    # the multiplier belongs to the sphere: inside it would only loosen the bound
    nu = torch.where(norm_squared >= (1 - 1e-6) * radius * radius, nu, 0.0)
    residual = gradient + nu[..., None] * theta
    # the Hessian at theta is at least e^(-R D) times that at c
    metric = torch.exp(-concordance * reach)[..., None] * eigenvalues + (nu + ridge)[..., None]
    metric = metric.clamp_min(tiny)
    turned = (basis.mT @ residual[..., None])[..., 0]
    decrement = (turned.square() / metric).sum(-1).sqrt() + slope_error
    stiffness = concordance * longest / metric[..., 0].sqrt()  # b
    shrink = (1.0 - stiffness * decrement).clamp_min(0.0)
    drop = 0.5 * decrement.square() / shrink  # inf where the bound says nothing
    inside = 0.5 * nu * (radius * radius - norm_squared).clamp_min(0.0)

    value = model.value + 0.5 * ridge * norm_squared
    high = value + value_error
    low = value - value_error - inside - drop
    return Bracket(torch.where(torch.isfinite(low), low, -torch.inf), high)


def shift_by_ridge(model: Expansion, theta: Tensor, ridge: Tensor) -> Expansion:
    """Adds ``(lambda/2)|theta|^2`` to the loss at points ``(..., d)``; ``ridge`` broadcasts."""
    eye = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device)
    return Expansion(
        model.loss + 0.5 * ridge * theta.square().sum(-1),
        model.gradient + ridge[..., None] * theta,
        model.hessian + ridge[..., None, None] * eye,
    )
