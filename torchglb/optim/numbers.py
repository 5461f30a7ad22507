"""Bookkeeping of a solver: a few numbers per batch element.

Whether to accept a step or to stop takes some twenty operations on arrays of shape ``*B``. On a CPU
their overhead as torch operations would exceed the cost of the steps, so they work on NumPy views of
the same memory there; elsewhere they stay tensors on the device. What is written in arithmetic,
comparisons and ``abs`` serves both; the rest is here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

#: an array of shape ``*B``: a NumPy array on a CPU, a tensor elsewhere
Numbers = Any


def numbers(values: Tensor | Numbers) -> Numbers:
    """The values for bookkeeping; no copy."""
    if isinstance(values, Tensor) and values.device.type == "cpu":
        return values.numpy()
    return values


def tensor(values: Numbers) -> Tensor:
    """The values as a tensor again; no copy of an array."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values)


def surely(mask: Numbers) -> bool:
    """Whether the mask is known to hold everywhere; on an accelerator asking would be a sync."""
    return not isinstance(mask, Tensor) and bool(mask.all())


def pick(mask: Numbers, a: Any, b: Any) -> Any:
    """``a`` where the mask holds, else ``b``; trailing axes follow, empty tensors pass through."""
    if isinstance(a, Tensor):
        if a.numel() == 0:
            return a
        where = tensor(mask)
        return torch.where(where.reshape(where.shape + (1,) * (a.ndim - where.ndim)), a, b)
    if isinstance(mask, Tensor):
        return torch.where(mask, a, b)
    return np.where(mask, a, b)
