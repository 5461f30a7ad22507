"""Centres of posteriors in torch: minimisers of the loss plus a penalty, by damped Newton steps.

For devices, custom families, rows in several processes and rows that require grad; elsewhere
centres are carried by :mod:`.search_kernels`. A centre need not be exact: any point gives a valid
level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import wait_for_indices
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import exit_distance
from torchglb.optim import loop
from torchglb.optim.implicit import newton_polish
from torchglb.rows.sums import Expansion

MAX_STEPS = 40


class Anchor(NamedTuple):
    """P points of each problem with the loss, gradient and Hessian there, all float64.

    Attributes:
        point: ``(*B, P, d)``.
        loss: ``(*B, P)``.
        gradient: ``(*B, P, d)``.
        hessian: ``(*B, P, d, d)``.
    """

    point: Tensor
    loss: Tensor
    gradient: Tensor
    hessian: Tensor


def expand_at(likelihood: NegativeLogLikelihood, point: Tensor) -> Anchor:
    """The loss expanded at ``point (*B, P, d)``: one pass, in the dtype of the rows."""
    rounded = point.to(likelihood.X.dtype)
    found = likelihood.expand(rounded, in_blocks=True)
    return Anchor(rounded.double(), *(t.double() for t in found))


def flatten_batch(likelihood: NegativeLogLikelihood) -> NegativeLogLikelihood:
    """The same rows with one batch axis ``(N, n, d)``: views, no copies."""
    axes, N = len(likelihood.batch_shape), likelihood.batch_shape.numel()
    if axes == 1:
        return likelihood
    return likelihood.rebuild([t.reshape(N, *t.shape[axes:]) for t in likelihood.tensors()])


def select(likelihood: NegativeLogLikelihood, index: Tensor) -> NegativeLogLikelihood:
    """The rows of some problems of the one batch axis; the whole if they are all."""
    if index.shape[0] == likelihood.X.shape[0]:
        return likelihood
    return likelihood.rebuild([t[index] for t in likelihood.tensors()])


# ---- penalties ---------------------------------------------------------------------------------


class Penalty(NamedTuple):
    """What is added to the loss, convex, so that its minimiser is unique.

    ``-eta log(S^2 - |theta|^2)``, which keeps the centre inside the ball; or ``|theta|^2/(2
    s0^2)``, for the centre of a Gaussian posterior.

    Attributes:
        variance: S^2 or s0^2, ``(*B, 1)``, or ``(*B)`` for one point each.
        eta: weight of the barrier, ``(P,)``, or ``(*B)``; None for the ridge.
    """

    variance: Tensor
    eta: Tensor | None

    def added(self, anchor: Anchor) -> Expansion:
        """The penalised loss at the points, and its derivatives; infinite outside its domain."""
        point = anchor.point
        square = point.square().sum(-1)
        shape = torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
        if self.eta is None:
            pull = 1.0 / self.variance
            value = 0.5 * pull * square
        else:
            room = self.variance - square
            inside = room > 0
            room = torch.where(inside, room, torch.ones_like(room))
            value = torch.where(inside, -self.eta * torch.log(room), torch.inf)
            pull = 2.0 * self.eta / room
            outer = point[..., :, None] * point[..., None, :]
            shape = shape + 2.0 * outer / room[..., None, None]
        gradient = anchor.gradient + pull[..., None] * point
        hessian = anchor.hessian + pull[..., None, None] * shape
        return Expansion(anchor.loss + value, gradient, hessian)


# ---- moving ------------------------------------------------------------------------------------


def recentre(
    penalty: Penalty, likelihood: NegativeLogLikelihood, point: Tensor, tolerance: float
) -> tuple[Anchor, float]:
    """Moves every centre until half its squared Newton decrement is at most ``tolerance``.

    That half is, to second order, how far the penalised loss lies above its minimum. A step is one
    pass over the rows of the problems that have fallen behind, and of no other.

    Args:
        penalty: added to the loss.
        likelihood: the loss, with one batch axis (N problems).
        point: where the centres are, ``(N, P, d)``.
        tolerance: in units of the loss.

    Returns:
        The centres, and the passes per problem, on average.
    """
    anchor = expand_at(likelihood, point)
    total = penalty.added(anchor)
    step, behind = _newton(total)
    damping = torch.ones_like(behind)
    rounding = 16 * torch.finfo(likelihood.X.dtype).eps
    passes = 1.0
    for _ in range(MAX_STEPS):
        active = behind > tolerance
        index = wait_for_indices(active.any(-1))
        if index.shape[0] == 0:
            break
        length = damping * _safe_length(penalty, anchor.point, step)
        trial = anchor.point + length[..., None] * step
        found = expand_at(select(likelihood, index), trial[index])
        moved = Anchor(*(a.index_copy(0, index, b) for a, b in zip(anchor, found, strict=True)))
        passes += index.shape[0] / active.shape[0]
        falls = penalty.added(moved).loss <= total.loss + rounding * anchor.loss.abs()
        damping = torch.where(active, torch.where(falls, 1.0, 0.25 * damping), damping)
        anchor = loop.select(active & falls, moved, anchor)
        total = penalty.added(anchor)
        step, decrement = _newton(total)
        # a centre whose steps have become too short to matter stays where it is
        behind = torch.where(damping > 1e-6, decrement, torch.zeros_like(decrement))
    return anchor, passes


def minimisers(penalty: Penalty, likelihood: NegativeLogLikelihood, point: Tensor) -> Tensor:
    """Exact centres ``(N, P, d)`` as differentiable functions of the rows, for a start near them.

    Newton steps on ``grad L + grad penalty = 0``, see :func:`newton_polish`.
    """

    def system(y: Tensor) -> tuple[Tensor, Tensor]:
        total = penalty.added(expand_at(likelihood, y))
        return total.gradient, total.hessian

    return newton_polish(system, point, 2, "the centre of the posterior")


def _newton(total: Expansion) -> tuple[Tensor, Tensor]:
    """The Newton step ``(*B, P, d)``, and half the squared decrement ``(*B, P)``."""
    factor, _ = torch.linalg.cholesky_ex(total.hessian)
    step = -torch.cholesky_solve(total.gradient[..., None], factor)[..., 0]
    return step, -0.5 * (step * total.gradient).sum(-1)


def _safe_length(penalty: Penalty, point: Tensor, step: Tensor) -> Tensor:
    """A step length at which Newton's model is still good; a bad guess costs a pass, no more.

    ``log(1 + l)/l`` with l the length of the step is safe for a loss with ``|m'''| <= m''`` and
    ``|x| <= 1``, and so is four fifths of the way to the sphere; full steps are taken where they
    are short.
    """
    euclidean = torch.linalg.vector_norm(step, dim=-1)
    short = torch.log1p(euclidean) / euclidean.clamp_min(0.5)
    safe = torch.where(euclidean > 0.5, short, torch.ones_like(short))
    if penalty.eta is None:
        return safe
    room, along = penalty.variance - point.square().sum(-1), (point * step).sum(-1)
    return torch.minimum(safe, 0.8 * exit_distance(step.square().sum(-1), along, room))
