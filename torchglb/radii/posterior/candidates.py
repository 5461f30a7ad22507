"""Posteriors around a centre, in torch: what each one costs, and what all of them promise.

Whatever the prior, the precision of a posterior is a sum of multiples of the Hessian, of the unit
matrix and of ``c c'`` (:func:`precision_of`). The formulas are those of :mod:`.candidate_kernels`,
for devices, custom families, rows in several processes and rows that require grad.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.choices import Increments
from torchglb.families import GLMFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.radii.base import reward_length, rounding
from torchglb.radii.posterior.candidate_kernels import LINEAR_ALGEBRA, hessian_rounding
from torchglb.radii.posterior.centre import Anchor, expand_at
from torchglb.radii.posterior.increments import aggregated_increment, row_increments
from torchglb.radii.posterior.laws import Prior
from torchglb.radii.theorems.theorem32 import largest


class Candidates(NamedTuple):
    """Kinds of posterior around a centre, tensors ``(J,)``; or one for every problem.

    Attributes:
        kappa: how far towards the sphere the ellipsoid may reach, in (0, 1); none if it is normal.
        rho2: ``rho^2``, the scale against the Hessian; a for normal ones.
        shape: k >= 0 of the Pearson-II density; 0 is uniform.
        entropy: ``E log p(U)`` of that density on the unit ball.
    """

    kappa: Tensor
    rho2: Tensor
    shape: Tensor
    entropy: Tensor


def precision_of(prior: Prior, point: Tensor, candidate: Candidates) -> tuple[Tensor, ...]:
    """temper, unit, tilt and scale of ``W = (H/temper + unit I + tilt c c')/scale``.

    Uniform prior: ``W = H/rho^2 + (I + c c'/((1 - kappa) q))/(kappa q)``, ``q = S^2 - |c|^2``, a
    little less than there is: that the ellipsoid lies in the ball then survives rounding. Normal
    prior: ``W = H/a + I/s0^2``, in units of the prior's precision.
    """
    kappa, rho2, variance = candidate.kappa, candidate.rho2, prior.variance
    if prior.normal:
        one = torch.ones_like(variance)
        return rho2 / variance, one, torch.zeros_like(one), variance
    room = variance * (1 - 1e-12) - point.square().sum(-1)
    room = kappa * room.clamp_min(torch.finfo(room.dtype).tiny)
    return rho2, 1.0 / room, kappa / (1.0 - kappa) / room.square(), torch.ones_like(room)


def divergence_of(
    prior: Prior, point: Tensor, candidate: Candidates, log_det: Tensor, inverse_trace: Tensor
) -> Tensor:
    """``KL(P || Q)`` from the determinant and the inverse of ``scale W``.

    Uniform prior: ``log vol B(S) + log det(W)/2 + E log p(U)``. Normal prior: ``(tr(W^-1)/s0^2 +
    |c|^2/s0^2 - d + d log s0^2 + log det W)/2``.
    """
    if not prior.normal:
        return prior.log_volume + 0.5 * log_det + candidate.entropy + LINEAR_ALGEBRA
    square = point.square().sum(-1) / prior.variance
    return 0.5 * (inverse_trace - point.shape[-1] + log_det + square) + LINEAR_ALGEBRA


def posterior_at(
    prior: Prior, point: Tensor, hessian: Tensor, candidate: Candidates, doubt: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Divergence ``(*B)`` and M ``(*B, d, d)`` of one posterior each, differentiable: O(d^3).

    The posterior is the one with the covariance ``M'M``, M the inverse of a Cholesky factor as
    computed: its divergence and its widths err by some roundings, whatever the condition of W.
    Where it has to lie in the ball, W gets as much curvature more as rounding may have taken.

    Args:
        prior: of the problems.
        point: c, ``(*B, d)``.
        hessian: H(c), ``(*B, d, d)``.
        candidate: one for each.
        doubt: what the Hessian may have lost as a sum, relative to its trace.
    """
    numbers, d = precision_of(prior, point, candidate), point.shape[-1]
    temper, unit, tilt, scale = (t[..., None, None] for t in numbers)
    eye = torch.eye(d, dtype=point.dtype, device=point.device)
    outer = point[..., :, None] * point[..., None, :]
    W = hessian / temper + unit * eye + tilt * outer
    size = torch.diagonal(W.detach(), dim1=-2, dim2=-1).sum(-1)
    if not prior.normal:
        W = W + ((hessian_rounding(d, 0.0) + doubt) * size)[..., None, None] * eye
    factor, _ = torch.linalg.cholesky_ex(W)
    log_det = 2.0 * torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    trace = root.square().sum((-2, -1))
    paid = d * d * torch.finfo(point.dtype).eps * (size * trace.detach()).sqrt()
    return divergence_of(prior, point, candidate, log_det, trace) + paid, scale.sqrt() * root


def posterior_level(
    likelihood: NegativeLogLikelihood,
    log_failure: float,
    prior: Prior,
    centre: Tensor,
    candidate: Candidates,
    increments: Increments = "rows",
) -> Tensor:
    """``log(1/delta) + KL(P || Q) + E_P L`` of one posterior each, from above: ``(*B)``.

    Differentiable. Two passes, or one where the increments are aggregated.
    """
    at, doubt = expand_at(likelihood, centre), likelihood.lost_in_hessian()
    divergence, root = posterior_at(prior, at.point, at.hessian, candidate, doubt)
    nu = 0.5 * at.point.shape[-1] + candidate.shape
    if increments == "rows":
        added = row_increments(likelihood, at.point, root, prior, nu)
    else:
        reach = largest(torch.linalg.vector_norm(likelihood.X, dim=-1).double())
        widest = torch.linalg.eigvalsh(root.mT @ root)[..., -1]
        longest = likelihood.shards.maximum(reach).square() * widest
        sizes = torch.diagonal(at.hessian, dim1=-2, dim2=-1).sum(-1) * root.square().sum((-2, -1))
        doubt = doubt + hessian_rounding(root.shape[-1], 0.0)
        trace = (root @ at.hessian * root).sum((-2, -1)) + doubt * sizes.detach()
        family, law = likelihood.family, prior.law(nu)
        added = aggregated_increment(family, law, trace, longest, prior.concordance)
    norm = torch.linalg.vector_norm(at.point, dim=-1)
    slack = rounding(likelihood.X.dtype, at.loss.abs() + added, reward_length(likelihood), norm)
    return log_failure + divergence + at.loss + added + slack


def screen(
    family: GLMFamily,
    prior: Prior,
    candidates: Candidates,
    anchor: Anchor,
    reach: Tensor,
    doubt: float,
) -> tuple[Tensor, Tensor]:
    """``KL(P || Q) + E_P L - L(c)`` of J posteriors around each of P centres: no pass.

    W is diagonal plus rank one in the eigenvectors of the Hessian, so that one decomposition of
    H(c) serves all J of them in O(d) each.

    Args:
        family: gives m.
        prior: of N problems.
        candidates: J of them.
        anchor: P centres of every problem.
        reach: the length of the longest row, ``(N,)``.
        doubt: of the Hessians, as in :func:`posterior_at`.

    Returns:
        An upper bound, from ``tr(W^-1 H)``; and the value to second order in the width, below which
        the rows hardly ever lead. ``(N, P, J)`` each.
    """
    point, d, rate = anchor.point[..., None, :], anchor.point.shape[-1], prior.concordance
    variance, log_volume = (t[:, None, None] for t in (prior.variance, prior.log_volume))
    rate = None if rate is None else rate[:, None, None]
    prior = prior._replace(variance=variance, log_volume=log_volume)
    eigen, basis = torch.linalg.eigh(anchor.hessian)
    eigen = eigen.clamp_min(0.0)[..., None, :]
    square = (basis.mT @ anchor.point[..., None]).mT.square()  # both (N, P, 1, d)
    temper, unit, tilt, scale = precision_of(prior, point, candidates)
    diagonal = eigen / temper[..., None] + unit[..., None]
    inflation = 1.0 + tilt * (square / diagonal).sum(-1)
    share = square / diagonal.square() * (tilt / inflation)[..., None]
    inverse = 1.0 / diagonal - share
    log_det = diagonal.log().sum(-1) + inflation.log()
    divergence = divergence_of(prior, point, candidates, log_det, inverse.sum(-1))
    trace, widest = scale * (eigen * inverse).sum(-1), scale / diagonal.amin(-1)
    lost = d * (hessian_rounding(d, 0.0) + doubt) * eigen.sum(-1) * widest
    law, longest = prior.law(0.5 * d + candidates.shape), reach.square()[:, None, None] * widest
    added = aggregated_increment(family, law, trace + lost, longest, rate)
    return divergence + added, divergence + 0.5 * trace * law.second_moment()
