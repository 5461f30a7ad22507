"""How curved the loss is, at least, all over a confidence set.

On ``U = {|theta| <= S, L(theta) <= B}`` every ``<x_s, theta>`` stays within D_s of ``<x_s, c>``, by
the ellipsoid of Theorem 3.2 around U and by the ball. The second derivatives ``m''`` of all shipped
families are log-concave (``sigma'``, ``e^z``, the normal density, ``e^(z - e^z)``, a constant), so
that on an interval they are least at an end of it:

    ``H(theta) >= sum_s w_s min(m''(z_s - D_s), m''(z_s + D_s)) x_s x_s' / g``,

whose least eigenvalue is a curvature that the loss has everywhere in the ellipsoid and the ball.
That is sharper than ``e^(-R D) H(c)``, which self-concordance alone would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import least_eigenvalue
from torchglb.radii.theorems.theorem32 import (
    balanced_ridge,
    fixed_point_around,
    gap_of_rounding,
    lengths_in_inverse,
)
from torchglb.rounding import round_up
from torchglb.rows.sums import Expansion
from torchglb.ucb import ConvexRegion

#: relative roundings of norms and sums in float64 that the ellipsoid and the curvature pay for
SLACK = 1e-9


def kept_ellipsoid(
    matrix: Tensor, gamma: Tensor, farthest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """An ellipsoid ``|v|^2_W <= gamma`` for ways v of some length at most, in another dtype.

    Args:
        matrix: W, ``(*B, d, d)``.
        gamma: ``(*B)``.
        farthest: the length, ``(*B)``.
        dtype: in which W and gamma will be kept.

    Returns:
        W and a gamma that pays for its rounding to the dtype.
    """
    shape = matrix.to(dtype)
    change = torch.linalg.matrix_norm((shape - matrix).detach())
    return shape, round_up((gamma + change * farthest.square()) * (1.0 + SLACK), dtype)


def curved_region(
    likelihood: NegativeLogLikelihood,
    point: Tensor,
    at: Expansion,
    height: Tensor,
    gap: Tensor,
    S: Tensor,
    self_concordance: Tensor,
    dtype: torch.dtype,
) -> ConvexRegion:
    """An ellipsoid around ``{|theta| <= S, L <= L(c) + height}`` and the least curvature in it.

    Two passes, O(n d^2). The curvature is 0 where nothing is proven. Of a family whose m'' is
    log-concave.

    Args:
        likelihood: L in float64.
        point: c, a point of the ball, ``(*B, d)``.
        at: the expansion there, in blocks.
        height: ``(*B)``, how far the level is above L(c), roundings included.
        gap: at least ``max <grad L(c), c - theta>`` over the ball, ``(*B)``.
        S: radius of the ball, ``(*B)``.
        self_concordance: R_s on the ball, ``(*B)``.
        dtype: in which the ellipsoid will be kept.

    Returns:
        In float64; shape and size are exact in the dtype.
    """
    X, w, family = likelihood.X, likelihood.w, likelihood.family
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    lam = torch.as_tensor(balanced_ridge(S, self_concordance))
    norm = torch.linalg.vector_norm(point, dim=-1)
    gap = gap + gap_of_rounding(at.hessian, S + norm, likelihood.lost_in_hessian())
    gamma = fixed_point_around(likelihood, point, at.hessian, height, S, self_concordance, lam, gap)
    exact = at.hessian + lam[..., None, None] * eye
    shape, gamma = (t.double() for t in kept_ellipsoid(exact, gamma, S + norm, dtype))
    reach = torch.linalg.vector_norm(X, dim=-1) * (S + norm)[..., None]
    local = gamma.sqrt()[..., None] * lengths_in_inverse(X, shape)
    # points drawn to the edge of the ellipsoid or of the ball may be some roundings outside
    outside = max(SLACK, 64.0 * X.shape[-1] * torch.finfo(dtype).eps)
    D = torch.minimum(local, reach) * (1.0 + outside)
    z = (X @ point[..., None])[..., 0]
    least = torch.minimum(family.curvature(z - D), family.curvature(z + D))
    least = least if w is None else least * w
    (hessian,) = likelihood.shards.sum((X.mT * least[..., None, :]) @ X)
    trace = torch.diagonal(hessian, dim1=-2, dim2=-1).sum(-1)
    curvature = (least_eigenvalue(hessian) - SLACK * trace).clamp_min(0.0)
    return ConvexRegion.of((point, shape, gamma, curvature))
