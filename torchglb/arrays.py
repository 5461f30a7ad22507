"""Small operations on tensors, and where they wait for a device.

What compiled code does not cover (custom families, devices, gradients) runs in torch, batched; on a
CPU some answers are free that elsewhere would make the host wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def array(values: Tensor) -> Any:
    """The same memory as a NumPy array if it is on the CPU, else the tensor itself."""
    if values.requires_grad:
        values = values.detach()
    return values.numpy() if values.is_cpu else values


def known_none(mask: Tensor) -> bool:
    """Whether a mask is known to hold nowhere, so that what it masks may be skipped.

    Only a CPU is asked: there the answer is free, elsewhere the host would wait for it, and
    computing what nobody needs is cheaper.
    """
    return mask.is_cpu and not bool(mask.any())


def limits(values: Tensor) -> tuple[float, float]:
    """eps and tiny of the values' dtype."""
    found = _LIMITS.get(values.dtype)
    if found is None:
        info = torch.finfo(values.dtype)
        found = _LIMITS[values.dtype] = info.eps, info.tiny
    return found


_LIMITS: dict[torch.dtype, tuple[float, float]] = {}


def finite(values: Tensor) -> Tensor:
    """Zero in the place of NaN and infinity, for solvers that would fail for the whole batch.

    What they return for such an element means nothing; its status must say so.
    """
    return torch.where(torch.isfinite(values), values, 0.0)


def dot(u: Tensor, v: Tensor) -> Tensor:
    """``<u, v>`` over the last axis."""
    return torch.linalg.vecdot(u, v)


def length(v: Tensor) -> Tensor:
    """``|v|`` over the last axis."""
    return torch.linalg.vector_norm(v, dim=-1)


def matvec(matrix: Tensor, v: Tensor) -> Tensor:
    """``M v`` for ``(*, m, d)`` and ``(*, d)``."""
    return matrix @ v if v.ndim == 1 else (matrix @ v[..., None])[..., 0]


def wait_for_indices(mask: Tensor) -> Tensor:
    """The indices where a mask ``(N)`` holds: a stopping test, for which the host waits."""
    return torch.nonzero(mask)[:, 0]


def wait_for_all(done: Tensor) -> bool:
    """Whether every element is done: a stopping test, for which the host waits."""
    return bool(done.all())


@lru_cache(maxsize=256)
def numbers_on(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants as a float64 tensor on a device: copied there once, as each copy makes it wait."""
    return copied(values, device)


def copied(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The copy itself."""
    return torch.tensor(values, dtype=torch.float64, device=device)
