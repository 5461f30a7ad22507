"""What the conic solvers take: one problem at a time, in float64 on the CPU; and the way back."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torchglb.checks import ValueChecks, refuse
from torchglb.domain import Ball
from torchglb.families import Binomial, Gaussian, GLMFamily, Poisson
from torchglb.likelihood import NegativeLogLikelihood


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


def split(
    likelihood: NegativeLogLikelihood, domain: Ball
) -> list[tuple[NegativeLogLikelihood, float]]:
    """Every problem of the batch by itself, without its rows of weight 0, and its radius."""
    kind_of(likelihood.family)
    if not likelihood.shards.is_whole:
        raise refuse(
            "solver", "'native' for a sharded history", "a conic one, which needs all rows"
        )
    batch, (n, d) = likelihood.batch_shape, likelihood.X.shape[-2:]
    count = batch.numel()

    def flat(value: Tensor | float, *shape: int) -> Tensor:
        return on_host(value).detach().expand((*batch, *shape)).reshape((count, *shape))

    X, r = flat(likelihood.X, n, d), flat(likelihood.r, n)
    w = flat(1.0 if likelihood.w is None else likelihood.w, n)
    tilt = None if likelihood.tilt is None else flat(likelihood.tilt, d)
    ridge, radius = flat(likelihood.regularization), flat(domain.radius)
    checks = ValueChecks()
    checks.require("w", ~(w < 0), "non-negative weights", w)
    checks.require("regularization", ~(ridge < 0), "non-negative numbers", ridge)
    checks.settle()
    return [
        (
            NegativeLogLikelihood(
                likelihood.family,
                X[b, kept],
                r[b, kept],
                w[b, kept],
                regularization=ridge[b],
                tilt=None if tilt is None else tilt[b],
            ),
            float(radius[b]),
        )
        for b in range(count)
        for kept in [w[b] != 0]
    ]


def is_finite(loss: NegativeLogLikelihood) -> bool:
    """Whether no NaN and no infinity is among the data."""
    parts = (loss.X, loss.r, loss.w, loss.tilt, loss.regularization)
    return all(bool(torch.isfinite(t).all()) for t in parts if isinstance(t, Tensor))


def outward(upper: Tensor, lower: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both bounds in the dtype of ``like``, rounded away from each other."""
    up, down = upper.to(like.dtype), lower.to(like.dtype)
    inf = torch.full_like(up, float("inf"))
    up = torch.where(up.double() < upper, torch.nextafter(up, inf), up)
    down = torch.where(down.double() > lower, torch.nextafter(down, -inf), down)
    return up.to(like.device), down.to(like.device)
