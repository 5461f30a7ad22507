"""Small arrays: NumPy's on a CPU, torch's on a device.

A round of exact optimism is some hundred operations on some hundred numbers each. On a CPU torch
spends more time on the overhead of such an operation than on its work, and NumPy several times
less. So the functions of that path are written once, in the operations that both libraries have
under the same name (operators, ``where``, ``sqrt``, ``amax``, ``linalg.eigh``, ...), and run in
the library of what they are given. Nothing here is differentiated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import expit
from torch import Tensor

#: a ``numpy.ndarray`` or a ``torch.Tensor``
Array = Any
#: from so many numbers on, torch's faster loops make up for its overhead
TORCH_FROM = 512


def array(values: Tensor) -> Array:
    """The same memory as a NumPy array if it is on the CPU, else the tensor itself."""
    if values.requires_grad:
        values = values.detach()
    return values.numpy() if values.is_cpu else values


def tensor(values: Array) -> Tensor:
    """The same memory as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))


def library(values: Array) -> Any:
    """``numpy`` or ``torch``, whichever the values belong to."""
    return torch if isinstance(values, Tensor) else np


def quiet() -> np.errstate:
    """Lets NumPy divide by zero as torch does: without a warning, to infinity or NaN."""
    return np.errstate(all="ignore")


def idle(mask: Array) -> bool:
    """Whether a masked computation may be skipped because no element needs it.

    Only a CPU is asked: there the answer is free, elsewhere it would be a host synchronisation and
    computing what nobody needs is cheaper.
    """
    if isinstance(mask, Tensor):
        return mask.device.type == "cpu" and not bool(mask.any())
    return not np.count_nonzero(mask)


def limits(values: Array) -> tuple[float, float]:
    """eps and tiny of the values' dtype."""
    found = _LIMITS.get(values.dtype)
    if found is None:
        info = library(values).finfo(values.dtype)
        found = _LIMITS[values.dtype] = float(info.eps), float(info.tiny)
    return found


_LIMITS: dict[Any, tuple[float, float]] = {}


def at_least(values: Array, floor: float) -> Array:
    """The larger of each value and a number."""
    return values.clamp_min(floor) if isinstance(values, Tensor) else np.maximum(values, floor)


def at_most(values: Array, ceiling: float) -> Array:
    """The smaller of each value and a number."""
    return values.clamp_max(ceiling) if isinstance(values, Tensor) else np.minimum(values, ceiling)


def finite(values: Array) -> Array:
    """Zero in the place of NaN and infinity, for solvers that would fail for the whole batch.

    What they return for such an element means nothing; its status must say so.
    """
    xp = library(values)
    return xp.where(xp.isfinite(values), values, 0.0)


def dot(u: Array, v: Array, axis: int = -1) -> Array:
    """``<u, v>`` over an axis, the last one unless told."""
    if isinstance(u, Tensor):
        return torch.linalg.vecdot(u, v, dim=axis)
    return np.vecdot(u, v) if axis == -1 else (u * v).sum(axis)


def length(v: Array, axis: int = -1) -> Array:
    """``|v|`` over an axis, the last one unless told."""
    if isinstance(v, Tensor):
        return torch.linalg.vector_norm(v, dim=axis)
    return np.sqrt(dot(v, v, axis))


def matvec(matrix: Array, v: Array) -> Array:
    """``M v`` for ``(*, m, d)`` and ``(*, d)``."""
    if _MATVEC is not None and not isinstance(v, Tensor):
        return _MATVEC(matrix, v)
    return matrix @ v if v.ndim == 1 else (matrix @ v[..., None])[..., 0]


_MATVEC = getattr(np, "matvec", None)  # since NumPy 2.2


def solve(matrices: Array, columns: Array) -> Array:
    """``M^-1 b`` for ``(*, d, d)`` and ``(*, d, k)``; anything where a matrix has no inverse."""
    if not isinstance(matrices, Tensor):
        try:
            return np.linalg.solve(matrices, columns)
        except np.linalg.LinAlgError:  # one fails for all: torch goes on
            pass
    return array(torch.linalg.solve_ex(tensor(matrices), tensor(columns)).result)


def careful_sum(total: Array, rest: Array, added: Array) -> tuple[Array, Array]:
    """``total + added`` by Kahan: what is rounded off is the new rest, and goes into the next sum.

    The error does not grow with the number of such sums.
    """
    step = added - rest
    after = total + step
    rest = (after - total) - step
    lost = ~library(rest).isfinite(rest)  # an infinite sum leaves nothing
    return after, rest if idle(lost) else library(rest).where(lost, 0.0, rest)


def take(values: Array, index: Array) -> Array:
    """One entry of the last axis for each index: ``values (*, A)``, ``index (*)``."""
    if isinstance(values, Tensor):
        return values.gather(-1, index[..., None])[..., 0]
    flat = values.reshape(-1, values.shape[-1])
    return flat[np.arange(flat.shape[0]), index.reshape(-1)].reshape(index.shape)


def counting(count: int, like: Array) -> Array:
    """``0, 1, ..., count - 1``, where ``like`` lives."""
    return torch.arange(count, device=like.device) if isinstance(like, Tensor) else np.arange(count)


def which(mask: Array) -> Array:
    """The indices where a mask ``(N)`` holds: the stopping test of a loop, and its host sync."""
    return torch.nonzero(mask)[:, 0] if isinstance(mask, Tensor) else mask.nonzero()[0]


def settled(done: Tensor) -> bool:
    """Whether every element is done: the stopping test of a loop, and its host sync."""
    return bool(done.all())


@lru_cache(maxsize=256)
def numbers_on(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants as a float64 tensor on a device: copied there once, as each copy makes it wait."""
    return copied(values, device)


def copied(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The copy itself."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def sigmoid(z: Array) -> Array:
    """``1 / (1 + e^-z)``."""
    if isinstance(z, Tensor):
        return torch.sigmoid(z)
    return expit(z) if z.size < TORCH_FROM else torch.sigmoid(torch.from_numpy(z)).numpy()


def softplus(z: Array) -> Array:
    """``log(1 + e^z)``."""
    if isinstance(z, Tensor):
        # torch's softplus switches to the identity above its threshold: 40 loses nothing
        return F.softplus(z, threshold=40.0)
    return np.logaddexp(0.0, z) if z.size < TORCH_FROM else softplus(torch.from_numpy(z)).numpy()


def identity(d: int, like: Array) -> Array:
    """The identity, of the dtype and where ``like`` lives."""
    if isinstance(like, Tensor):
        return torch.eye(d, dtype=like.dtype, device=like.device)
    return _identity(d, like.dtype)


@lru_cache(maxsize=256)
def _identity(d: int, dtype: Any) -> Array:
    eye = np.eye(d, dtype=dtype)
    eye.flags.writeable = False
    return eye
