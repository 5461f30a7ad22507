"""Centres of posteriors in torch: minimisers of the loss plus a penalty, by damped Newton steps.

For devices, custom families, rows in several processes and rows that require grad; elsewhere
centres are carried by :mod:`.search_kernels`. A centre need not be exact: any point gives a valid
level.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchglb.arrays import which
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import distance_to_sphere
from torchglb.optim.implicit import newton_polish

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

    def where(self, condition: Tensor, other: Anchor) -> Anchor:
        """This anchor where ``condition (*B, P)`` holds, else the other."""

        def choose(mine: Tensor, others: Tensor) -> Tensor:
            extra = mine.ndim - condition.ndim
            return torch.where(condition.reshape(condition.shape + (1,) * extra), mine, others)

        return Anchor(*(choose(a, b) for a, b in zip(self, other, strict=True)))

    def put(self, index: Tensor, part: Anchor) -> Anchor:
        """This anchor with the problems of an index (of the one batch axis) replaced."""
        return Anchor(*(a.index_copy(0, index, b) for a, b in zip(self, part, strict=True)))


def expand_at(likelihood: NegativeLogLikelihood, point: Tensor) -> Anchor:
    """The loss expanded at ``point (*B, P, d)``: one pass, in the dtype of the rows."""
    rounded = point.to(likelihood.X.dtype)
    return Anchor(rounded.double(), *(t.double() for t in likelihood.expand(rounded)))


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


class PenaltyTerms(NamedTuple):
    """A penalty at points: value ``(*B, P)``, gradient and Hessian."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class Penalty(Protocol):
    """A convex penalty that makes the minimiser unique."""

    def __call__(self, point: Tensor) -> PenaltyTerms:
        """The penalty at ``point (*B, P, d)``; its value is infinite outside its domain."""

    def longest(self, point: Tensor, step: Tensor) -> Tensor:
        """The largest multiple of ``step`` worth trying, ``(*B, P)``."""


class Barrier(NamedTuple):
    """``-eta log(S^2 - |theta|^2)``: keeps the centre inside the ball.

    Attributes:
        S: ``(*B, 1)``, or ``(*B)`` for one point each.
        eta: ``(P,)``, or ``(*B)``.
    """

    S: Tensor
    eta: Tensor

    def __call__(self, point: Tensor) -> PenaltyTerms:
        """The barrier at ``point (*B, P, d)``."""
        room = self.S.square() - point.square().sum(-1)
        inside = room > 0
        room = torch.where(inside, room, torch.ones_like(room))
        value = torch.where(inside, -self.eta * torch.log(room), torch.full_like(room, math.inf))
        pull = 2.0 * self.eta / room
        eye = torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
        outer = point[..., :, None] * point[..., None, :]
        hessian = pull[..., None, None] * (eye + 2.0 * outer / room[..., None, None])
        return PenaltyTerms(value, pull[..., None] * point, hessian)

    def longest(self, point: Tensor, step: Tensor) -> Tensor:
        """Four fifths of the way to the sphere."""
        return 0.8 * distance_to_sphere(point, step, self.S)


class Ridge(NamedTuple):
    """``|theta|^2 / (2 s0^2)``: the centre of a Gaussian posterior.

    Attributes:
        variance: ``s0^2``, ``(*B, 1)``.
    """

    variance: Tensor

    def __call__(self, point: Tensor) -> PenaltyTerms:
        """The ridge at ``point (*B, P, d)``."""
        eye = torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
        precision = 1.0 / self.variance
        value = 0.5 * precision * point.square().sum(-1)
        hessian = (precision[..., None, None] * eye).expand(*point.shape, point.shape[-1])
        return PenaltyTerms(value, precision[..., None] * point, hessian)

    def longest(self, point: Tensor, step: Tensor) -> Tensor:
        """No limit but the full step."""
        return torch.ones_like(step[..., 0])


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
    terms = penalty(anchor.point)
    step, behind = _newton(anchor, terms)
    damping = torch.ones_like(behind)
    rounding = 16 * torch.finfo(likelihood.X.dtype).eps
    passes = 1.0
    for _ in range(MAX_STEPS):
        active = behind > tolerance
        index = which(active.any(-1))
        if index.shape[0] == 0:
            break
        length = damping * _safe_length(penalty, anchor.point, step)
        trial = anchor.point + length[..., None] * step
        moved = anchor.put(index, expand_at(select(likelihood, index), trial[index]))
        passes += index.shape[0] / active.shape[0]
        limit = anchor.loss + terms.value + rounding * anchor.loss.abs()
        falls = moved.loss + penalty(moved.point).value <= limit
        damping = torch.where(active & ~falls, 0.25 * damping, torch.ones_like(damping))
        anchor = moved.where(active & falls, anchor)
        terms = penalty(anchor.point)
        step, decrement = _newton(anchor, terms)
        # a centre whose steps have become too short to matter stays where it is
        behind = torch.where(damping > 1e-6, decrement, torch.zeros_like(decrement))
    return anchor, passes


def minimisers(penalty: Penalty, likelihood: NegativeLogLikelihood, point: Tensor) -> Tensor:
    """Exact centres ``(N, P, d)`` as differentiable functions of the rows, for a start near them.

    Newton steps on ``grad L + grad penalty = 0``, see :func:`newton_polish`.
    """

    def system(y: Tensor) -> tuple[Tensor, Tensor]:
        at, terms = expand_at(likelihood, y), penalty(y)
        return at.gradient + terms.gradient, at.hessian + terms.hessian

    return newton_polish(system, point, 2, "the centre of the posterior")


def _newton(anchor: Anchor, terms: PenaltyTerms) -> tuple[Tensor, Tensor]:
    """The Newton step ``(*B, P, d)``, and half the squared decrement ``(*B, P)``."""
    gradient = anchor.gradient + terms.gradient
    factor, _ = torch.linalg.cholesky_ex(anchor.hessian + terms.hessian)
    step = -torch.cholesky_solve(gradient[..., None], factor)[..., 0]
    return step, -0.5 * (step * gradient).sum(-1)


def _safe_length(penalty: Penalty, point: Tensor, step: Tensor) -> Tensor:
    """A step length at which Newton's model is still good; a bad guess costs a pass, no more.

    ``log(1 + l)/l`` with l the length of the step is safe for a loss with ``|m'''| <= m''`` and
    ``|x| <= 1``; full steps are taken where they are short.
    """
    euclidean = torch.linalg.vector_norm(step, dim=-1)
    short = torch.log1p(euclidean) / euclidean.clamp_min(0.5)
    loss = torch.where(euclidean > 0.5, short, torch.ones_like(short))
    return torch.minimum(loss, penalty.longest(point, step))
