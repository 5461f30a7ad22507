"""The settings of policies, as types: what ``**settings`` of a class takes, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.choices import EllipsoidKind
from torchglb.forgetting import ForgettingGiven
from torchglb.radii import Radius

#: how the program of an exact policy is solved
SolverName = Literal["native", "conic"]
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)
#: whose constants a policy has: proven ones, or public code's
Constants = Literal["proven", "public"]
CONSTANTS: tuple[Constants, ...] = get_args(Constants)
#: the bonus of :class:`torchglb.policies.EMK`
Regularizer = Literal["vaw", "ftrl"]
REGULARIZERS: tuple[Regularizer, ...] = get_args(Regularizer)
#: which arms :class:`torchglb.policies.lucb_contrast.LUCBContrast` chooses from
Among = Literal["all", "pair"]
AMONG: tuple[Among, ...] = get_args(Among)


class PolicySettings(TypedDict, total=False):
    """Those of every policy; :class:`torchglb.policies.Policy` says what they mean."""

    horizon: int | None
    batch_shape: tuple[int, ...]
    seed: int
    replicates: ArrayLike | None
    validate: bool
    dtype: torch.dtype
    device: torch.device | str | None


class FittedSettings(PolicySettings, total=False):
    """Those of policies that fit their history."""

    aggregate: bool


class ExactSettings(FittedSettings, total=False):
    """Those of :class:`torchglb.policies.exact.ExactPolicy`."""

    solver: SolverName


class LikelihoodRatioSettings(ExactSettings, total=False):
    """Those of :class:`torchglb.policies.exact.LikelihoodRatioPolicy`."""

    forgetting: ForgettingGiven | None


class PolicyOptions(LikelihoodRatioSettings, total=False):
    """Those of :func:`torchglb.policies.make`: of every policy that the package has.

    Which of them a policy takes, :func:`torchglb.policies.options_of` says. A policy of your own
    with options of its own is better built by its class, whose arguments a type checker sees.
    """

    delta: float
    radius: str | Radius
    regularization: float | None
    constants: Constants
    scale: float
    conservative: tuple[int | Tensor, float] | Mapping[str, float | Tensor] | None

    among: Among
    ellipsoid: EllipsoidKind
    joint_share: float
    level: float | None
    regularizer: Regularizer
    theta_star: ArrayLike
