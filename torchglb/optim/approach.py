"""A cheap approach to the minimum: no line search, no values, no certificate on the way.

Where a Hessian costs little, every step is Newton's. Where it costs d times a gradient, one
Hessian, at the start, has to do, and that one may be rounded: its inverse P follows the curvature
by BFGS updates, from the changes y of the gradient over the steps s. The first of them scales P by
``s'y / y'Py``: the direction that was seen speaks for the others, for where the curvature of a GLM
falls, it mostly falls in every direction.

An element whose step leaves the ball or hardly closes its gap stays where it is: nothing rests on
the way that leads there. On a CPU only: the small matrices are worked on in NumPy, at a fraction of
the overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg.lapack import dposv, sposv
from torch import Tensor

from torchglb.arrays import Array
from torchglb.optim.ball import careful_gap, is_regular, regular_factor
from torchglb.optim.numbers import Numbers, anywhere, column, dot, norm, numbers, pick, surely

#: the approach ends where a step leaves more than this share of the gap
SLOWEST = 0.5
#: gaps at the start within this multiple of the tolerance are compared with it exactly
CLOSE = 1e3


class Shortcuts(NamedTuple):
    """What an objective has to say for less than the price of an evaluation."""

    #: of a tensor
    value: Callable[[Tensor], Tensor]
    #: of a NumPy array; see :func:`of_arrays`
    gradient: Callable[[Array], Array]
    #: gradient and Hessian, likewise
    derivatives: Callable[[Array], tuple[Array, Array]]
    #: whether a Hessian is so cheap that every step may ask for one
    cheap: bool = False
    #: whether that Hessian is rounded
    rough: bool = False
    #: a guess of the size of the value
    size: float = 0.0


def of_arrays(function: Callable[[Tensor], Any]) -> Callable[[Array], Any]:
    """A function of tensors (one, or a tuple of them) as one of NumPy arrays."""

    def called(theta: Array) -> Any:
        found = function(torch.from_numpy(theta))
        return found.numpy() if isinstance(found, Tensor) else tuple(t.numpy() for t in found)

    return called


class Place(NamedTuple):
    """Where an approach has come, in NumPy; the Hessian is None where it is not known exactly."""

    theta: Array  # (*B, d)
    gradient: Array  # (*B, d)
    hessian: Array | None  # (*B, d, d)
    num_steps: Numbers  # (*B)


def approach(
    objective: Shortcuts, start: Tensor, radius: Tensor, *, tol: float, max_steps: int
) -> Place:
    """Steps from ``start`` until the gap seems closed or they do not help.

    Args:
        objective: the function to minimise.
        start: a point of the ball, ``(*B, d)``.
        radius: S, ``(*B)``.
        tol: the gap to reach, relative to 1 + the size of the value.
        max_steps: limit on gradients.

    Returns:
        A point with a gap that is not larger.
    """
    theta, S = start.numpy(), numbers(radius)
    g, H = objective.derivatives(theta)
    gap = careful_gap(theta, g, S)
    target = tol * (1.0 + objective.size)
    close = gap <= CLOSE * target
    if anywhere(close):
        target = pick(close, tol * (1.0 + abs(numbers(objective.value(start)))), target)
    moving, num_steps = gap > target, 0 * close
    model = _Newton(H) if objective.cheap else _Secant(H)
    for _ in range(max_steps):
        if not anywhere(moving):
            break
        s, regular = model.step(g)
        tried = theta + s
        moving = moving & regular & (dot(tried, tried) <= S * S)
        if not anywhere(moving):
            break
        num_steps = num_steps + moving
        if objective.cheap:
            ahead, bend = objective.derivatives(tried)
        else:
            ahead, bend = objective.gradient(tried), None
        left = dot(ahead, tried) + S * norm(ahead)
        moving = moving & (left <= SLOWEST * gap)
        model.follow(moving, s, ahead - g, bend)
        if surely(moving):
            theta, g, gap = tried, ahead, left
        elif anywhere(moving):
            theta = np.where(moving[..., None], tried, theta)
            g = np.where(moving[..., None], ahead, g)
            gap = np.where(moving, left, gap)
        moving = moving & (gap > target)
    exact = not objective.rough and (objective.cheap or not anywhere(num_steps > 0))
    return Place(theta, g, model.H if exact else None, num_steps)


class _Newton:
    """The model is the Hessian, at every point anew."""

    def __init__(self, H: Array) -> None:
        self.H = H

    def step(self, g: Array) -> tuple[Array, Numbers]:
        """``-H^-1 g``, and whether that means anything."""
        return _solve(self.H, -g)

    def follow(self, moving: Numbers, s: Array, y: Array, bend: Array | None) -> None:
        if surely(moving):
            self.H = bend
        elif anywhere(moving):
            self.H = np.where(moving[..., None, None], bend, self.H)


class _Secant:
    """The model is the Hessian of the start, updated by what the gradients say."""

    def __init__(self, H: Array) -> None:
        self.H = H
        self.P: Array | None = None  # nothing is computed before it is needed
        self.pairs: list[tuple[Array, Array]] = []
        self.regular: Numbers = True

    def step(self, g: Array) -> tuple[Array, Numbers]:
        """``-P g``, and whether that means anything."""
        if self.P is None:
            self.P, self.regular = _solve(self.H, np.eye(g.shape[-1], dtype=g.dtype))
        else:
            self.P = _update(self.P, *self.pairs[-1], scaled=len(self.pairs) == 1)
        return -_times(self.P, g), self.regular

    def follow(self, moving: Numbers, s: Array, y: Array, bend: Array | None) -> None:
        self.pairs.append((s, y))


def _update(P: Array, s: Array, y: Array, scaled: bool) -> Array:
    """``P + s w' + w s'`` with ``w = ((1 + y'Py/s'y)/2 s - Py) / s'y``, of P or of P scaled."""
    Py, sy = _times(P, y), dot(s, y)
    ratio = dot(y, Py) / sy
    if scaled:
        across = column(ratio, s)
        P, Py, ratio = P / (across if s.ndim == 1 else across[..., None]), Py / across, 1.0
    w = (column(0.5 + 0.5 * ratio, s) * s - Py) / column(sy, s)
    cross = s[..., :, None] * w[..., None, :]
    return P + cross + cross.swapaxes(-1, -2)


def _solve(H: Array, right: Array) -> tuple[Array, Numbers]:
    """``H^-1 right`` for ``(*B, d)`` or ``(d, d)``, and whether H is regular enough for that."""
    if H.ndim == 2:
        factor, solution, info = (dposv if H.dtype == np.float64 else sposv)(H, right)
        pivots = factor.diagonal().tolist()
        return solution, info == 0 and is_regular(min(pivots), max(pivots), factor)
    factor, regular = regular_factor(torch.from_numpy(H))
    if right.shape[:-1] == H.shape[:-2]:
        solution = torch.cholesky_solve(torch.from_numpy(right)[..., None], factor)
        return solution[..., 0].numpy(), regular
    # an inverse that does not exist would raise for the whole batch
    factor = pick(regular, factor, torch.ones_like(factor))
    return torch.cholesky_inverse(factor).numpy(), regular


def _times(matrix: Array, v: Array) -> Array:
    if v.ndim == 1:
        return matrix @ v
    return (matrix @ v[..., :, None])[..., 0]
