"""What the conic solvers take: one problem at a time, in float64 on the CPU; and the way back."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.checks import ValueChecks, refuse
from torchglb.domain import Ball
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rounding import round_up


def kind_of(family: GLMFamily) -> str:
    """Which cones express the family: ``"logistic"``, ``"exponential"`` or ``"square"``."""
    kinds = {
        Binomial.log_partition: "logistic",
        Poisson.log_partition: "exponential",
        Gaussian.log_partition: "square",
    }
    kind = kinds.get(type(family).log_partition)
    if kind is None:
        covered = "a family with a conic form (Bernoulli, Binomial, Poisson, Gaussian)"
        raise refuse("family", covered, type(family).__name__)
    return kind


def warn_of_move(data: Tensor) -> None:
    """One warning of a public call whose data have to leave their device."""
    if data.device.type != "cpu":
        warnings.warn(
            f"the conic solvers run on the CPU: data are moved there from {data.device}, and "
            "results back; the native solver stays on the device",
            stacklevel=3,
        )


def on_host(value: Tensor | float) -> Tensor:
    """In float64 on the CPU; still part of the graph."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value.to("cpu", torch.float64)


class ProblemData(NamedTuple):
    """One problem in float64 on the CPU, still part of the graph; 0 in the rows of weight 0."""

    X: Tensor
    r: Tensor
    w: Tensor
    ridge: Tensor
    tilt: Tensor
    radius: Tensor

    def solved(self, family: GLMFamily) -> tuple[NegativeLogLikelihood, float]:
        """What a solver gets: the loss without its rows of weight 0, and the radius."""
        X, r, w, ridge, tilt, radius = (part.detach() for part in self)
        kept = w != 0
        loss = NegativeLogLikelihood(
            family, X[kept], r[kept], w[kept], regularization=ridge, tilt=tilt
        )
        return loss, float(radius)


def problems(likelihood: NegativeLogLikelihood, domain: Ball) -> list[ProblemData]:
    """Every problem of the batch by itself."""
    kind_of(likelihood.family)
    if not likelihood.shards.is_whole:
        raise refuse(
            "solver", "'native' for a sharded history", "a conic one, which needs all rows"
        )
    batch, (n, d) = likelihood.batch_shape, likelihood.X.shape[-2:]

    def flat(value: Tensor | float, *shape: int) -> Tensor:
        return on_host(value).expand((*batch, *shape)).reshape((batch.numel(), *shape))

    w, ridge = flat(1.0 if likelihood.w is None else likelihood.w, n), likelihood.regularization
    checks = ValueChecks()
    checks.require("w", ~(w < 0), "non-negative weights", w)
    checks.require("regularization", ~(flat(ridge) < 0), "non-negative numbers", flat(ridge))
    checks.settle()
    kept = w != 0
    parts = (
        torch.where(kept[..., None], flat(likelihood.X, n, d), 0.0),
        torch.where(kept, flat(likelihood.r, n), 0.0),
        torch.where(kept, w, 0.0),
        flat(ridge),
        flat(0.0 if likelihood.tilt is None else likelihood.tilt, d),
        flat(domain.radius),
    )
    return [ProblemData(*problem) for problem in zip(*parts, strict=True)]


def split(
    likelihood: NegativeLogLikelihood, domain: Ball
) -> list[tuple[NegativeLogLikelihood, float]]:
    """The loss of every problem, without its rows of weight 0, and its radius."""
    return [data.solved(likelihood.family) for data in problems(likelihood, domain)]


def is_finite(loss: NegativeLogLikelihood) -> bool:
    """Whether no NaN and no infinity is among the data."""
    parts = (loss.X, loss.r, loss.w, loss.tilt, loss.regularization)
    return all(bool(torch.isfinite(t).all()) for t in parts if isinstance(t, Tensor))


def outward(upper: Tensor, lower: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both bounds in the dtype of ``like``, rounded away from each other."""
    up, down = round_up(upper, like.dtype), -round_up(-lower, like.dtype)
    return up.to(like.device), down.to(like.device)
