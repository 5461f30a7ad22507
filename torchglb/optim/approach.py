"""A cheap approach to the minimum, by gradients alone.

A Hessian costs d times a gradient. So one Hessian, at the start, has to do: its inverse P follows
the curvature by BFGS updates, from the changes y of the gradient over the steps s. The first of
them scales P by ``s'y / y'Py``: the direction that was seen speaks for the others, for where the
curvature of a GLM falls, it mostly falls in every direction.

Nothing rests on what comes out but the time that the next solver saves: there is no line search,
an element whose step leaves the ball or hardly closes its gap stays where it is, and no value of
the objective is asked for. On a CPU only: the small matrices are updated in NumPy, at a fraction of
the overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.optim.ball import Evaluation, regular_factor
from torchglb.optim.numbers import pick

Array = np.ndarray[Any, Any]

#: the approach ends where a step leaves more than this share of the gap
SLOWEST = 0.5


def approach(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    at: Evaluation,
    radius: Tensor,
    *,
    tol: float,
    max_steps: int,
) -> tuple[Tensor, Tensor]:
    """Quasi-Newton steps from ``start``, where everything is known, until the gap seems closed.

    Args:
        gradient: the gradient at ``theta (*B, d)``.
        start: a point of the ball, ``(*B, d)``.
        at: the evaluation there.
        radius: S, ``(*B)``.
        tol: relative tolerance on the Frank-Wolfe gap.
        max_steps: limit on gradients.

    Returns:
        A point ``(*B, d)`` with a gap that is not larger, and the number of steps ``(*B)``.
    """
    theta, g, value, S = start.numpy(), at.gradient.numpy(), at.value.numpy(), radius.numpy()
    gap = _dot(g, theta) + S * np.sqrt(_dot(g, g))
    num_steps = np.zeros(gap.shape, dtype=np.int64)
    moving = gap > tol * (1.0 + abs(value))
    if moving.any():
        factor, regular = regular_factor(at.hessian)
        moving = moving & regular
        # an inverse that does not exist would raise for the whole batch
        P = torch.cholesky_inverse(pick(regular, factor, torch.ones_like(factor))).numpy()
    for k in range(max_steps):
        if not moving.any():
            break
        num_steps = num_steps + moving
        s = -_times(P, g)
        tried = theta + s
        ahead = gradient(torch.from_numpy(tried)).numpy()
        left = _dot(ahead, tried) + S * np.sqrt(_dot(ahead, ahead))
        # the trapezoidal rule knows the value as well as the stopping test needs it
        reached, y = value + 0.5 * _dot(g + ahead, s), ahead - g
        moving = moving & (left <= SLOWEST * gap) & (_dot(tried, tried) <= S * S)
        if moving.all():
            theta, g, gap, value = tried, ahead, left, reached
        else:
            theta, g = (np.where(moving[..., None], *p) for p in ((tried, theta), (ahead, g)))
            gap, value = (np.where(moving, *p) for p in ((left, gap), (reached, value)))
        moving = moving & (gap > 0.9 * tol * (1.0 + abs(value)))
        P = _update(P, s, y, scaled=k == 0)
    return torch.from_numpy(theta), torch.as_tensor(num_steps)


def _update(P: Array, s: Array, y: Array, scaled: bool) -> Array:
    """``P + s w' + w s'`` with ``w = ((1 + y'Py/s'y)/2 s - Py) / s'y``, of P or of P scaled."""
    Py, sy = _times(P, y), _dot(s, y)
    ratio = _dot(y, Py) / sy
    if scaled:
        P, Py, ratio = P / ratio[..., None, None], Py / ratio[..., None], ratio / ratio
    w = ((0.5 + 0.5 * ratio)[..., None] * s - Py) / sy[..., None]
    cross = s[..., :, None] * w[..., None, :]
    return P + cross + np.swapaxes(cross, -1, -2)


def _dot(u: Array, v: Array) -> Array:
    if u.ndim == 1:
        return u @ v
    return (u[..., None, :] @ v[..., :, None])[..., 0, 0]


def _times(matrix: Array, v: Array) -> Array:
    if v.ndim == 1:
        return matrix @ v
    return (matrix @ v[..., :, None])[..., 0]
