"""The settings of policies, as types: what ``**settings`` of a class takes, and nothing else."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from torchglb.forgetting import ForgettingGiven

#: how the program of an exact policy is solved
SolverName = Literal["native", "conic"]
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)
#: whose constants a policy has: proven ones, or public code's
Constants = Literal["proven", "public"]
CONSTANTS: tuple[Constants, ...] = get_args(Constants)


class PolicySettings(TypedDict, total=False):
    """Those of every policy; :class:`torchglb.policies.Policy` says what they mean."""

    horizon: int | None
    batch_shape: tuple[int, ...]
    seed: int
    replicates: Tensor | None
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
