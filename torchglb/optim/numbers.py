"""Bookkeeping of a solver: a few numbers per batch element.

Whether to accept a step or to stop takes some twenty operations on arrays of shape ``*B``. On a CPU
their overhead as torch operations would exceed the cost of the steps. So a single problem keeps its
books in Python numbers, a batch in NumPy views of the same memory, and only elsewhere do they stay
tensors on the device. Arithmetic, comparisons, ``abs``, ``&`` and ``|`` serve all three; the rest
is here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

#: values of shape ``*B``: a Python number, a NumPy array, or a tensor on an accelerator
Numbers = Any


def numbers(values: Tensor | Numbers) -> Numbers:
    """The values for bookkeeping."""
    if isinstance(values, Tensor):
        if not values.is_cpu:
            return values
        return values.numpy() if values.ndim else values.item()
    return values.item() if isinstance(values, np.generic) else values


def norm(v: Tensor) -> Numbers:
    """``|v|`` over the last axis."""
    return numbers(torch.linalg.vector_norm(v, dim=-1))


def dot(u: Tensor, v: Tensor) -> Numbers:
    """``<u, v>`` over the last axis."""
    return numbers(torch.linalg.vecdot(u, v))


def tensor(values: Numbers, like: Tensor) -> Tensor:
    """The values as a tensor again, with the dtype and device of another."""
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)


def column(values: Numbers, like: Tensor) -> float | Tensor:
    """The values as factors of vectors ``(*B, d)``."""
    if isinstance(values, float):
        return values
    return tensor(values, like)[..., None]


def wait_for_any(mask: Numbers) -> bool:
    """Whether the mask holds somewhere; on an accelerator the host waits for it."""
    return mask if isinstance(mask, bool) else bool(mask.any())


def known_all(mask: Numbers) -> bool:
    """Whether the mask is known to hold everywhere: an accelerator is not asked."""
    if isinstance(mask, bool):
        return mask
    return not isinstance(mask, Tensor) and np.count_nonzero(mask) == mask.size


def pick(mask: Numbers, a: Any, b: Any) -> Any:
    """``a`` where the mask holds, else ``b``; trailing axes follow, empty tensors pass through."""
    if isinstance(mask, bool):
        return a if mask else b
    if not isinstance(a, Tensor) and not isinstance(mask, Tensor):
        return np.where(mask.reshape(mask.shape + (1,) * (np.ndim(a) - mask.ndim)), a, b)
    if not isinstance(a, Tensor):
        return torch.where(mask, a, b)
    if a.numel() == 0:
        return a
    mask = torch.as_tensor(mask, device=a.device)
    return torch.where(mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim)), a, b)
