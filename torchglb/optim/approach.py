"""A cheap approach to the minimum: no line search, no values, no certificate on the way.

Where a Hessian costs little, every step is Newton's and looks back (:mod:`torchglb.optim.newton`).
Where it costs d times a gradient, one Hessian, at the start, has to do, and that one may be
rounded: its inverse P follows the curvature by BFGS updates, from the changes y of the gradient
over the steps s. The first of them scales P by ``s'y / y'Py``: the direction that was seen speaks
for the others, for where the curvature of a GLM falls, it mostly falls in every direction.

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

from torchglb.arrays import Array, matvec
from torchglb.optim.ball import careful_gap, is_regular, look_back, regular_factor
from torchglb.optim.numbers import Numbers, anywhere, column, dot, norm, numbers, pick, surely

#: the approach ends where a step leaves more than this share of the gap
SLOWEST = 0.5


class Shortcuts(NamedTuple):
    """What an objective has to say of NumPy arrays, for less than the price of an evaluation."""

    value: Callable[[Array], Numbers]
    gradient: Callable[[Array], Array]
    #: gradient and Hessian
    derivatives: Callable[[Array], tuple[Array, Array]]
    #: whether a Hessian is so cheap that every step may ask for one
    cheap: bool = False
    #: whether that Hessian is rounded
    rough: bool = False
    #: a guess of the size of the value
    size: float = 0.0

    def taking_arrays(self) -> Shortcuts:
        """The same, if the functions so far take tensors."""
        return self._replace(
            value=_of_arrays(self.value),
            gradient=_of_arrays(self.gradient),
            derivatives=_of_arrays(self.derivatives),
        )


def _of_arrays(function: Callable[[Tensor], Any]) -> Callable[[Array], Any]:
    """A function of tensors (one, or a tuple of them) as one of NumPy arrays."""

    def called(theta: Array) -> Any:
        with torch.inference_mode():
            found = function(torch.from_numpy(theta))
        return numbers(found) if isinstance(found, Tensor) else tuple(t.numpy() for t in found)

    return called


class Place(NamedTuple):
    """Where an approach has come, in NumPy; the Hessian is empty where it is not known exactly."""

    theta: Array  # (*B, d)
    value: Array  # (*B)
    gap: Array  # (*B)
    gradient: Array  # (*B, d)
    hessian: Array  # (*B, d, d) or (*B, 0)
    num_steps: Array  # (*B)


def approach(
    objective: Shortcuts, start: Tensor, S: Numbers, *, tol: float, max_steps: int
) -> Place:
    """Steps from ``start`` until the gap is closed or they do not help.

    Args:
        objective: the function to minimise.
        start: a point of the ball, ``(*B, d)``.
        S: the radius, ``(*B)``.
        tol: the gap to reach, relative to 1 + the size of the value.
        max_steps: limit on gradients.

    Returns:
        A point with a gap that is not larger.
    """
    theta = start.numpy()
    g, H = objective.derivatives(theta)
    gap, target = dot(g, theta) + S * norm(g), tol * (1.0 + objective.size)
    moving, num_steps = (gap > target) & (max_steps > 0), 0 * (gap > target)
    model = _Newton(H) if objective.cheap else _Secant(H)
    while True:
        if not anywhere(moving):
            value = numbers(objective.value(theta))
            guessed, target = target, tol * (1.0 + abs(value))
            # where the guess of the size was too large there is still some way to go
            moving = (gap <= guessed) & (gap > target) & (num_steps < max_steps)
            if not anywhere(moving):
                break
        s, regular = model.step(g)
        tried = theta + s
        moving = moving & regular & (dot(tried, tried) <= S * S)
        if not anywhere(moving):
            continue
        num_steps = num_steps + moving
        if objective.cheap:
            ahead, bend = objective.derivatives(tried)
        else:
            ahead, bend = objective.gradient(tried), None
        left = dot(ahead, tried) + S * norm(ahead)
        moving = moving & (left <= SLOWEST * gap)
        model.follow(moving, num_steps == 1, s, ahead - g, bend)
        theta, g, gap = _choose(moving, (tried, ahead, left), (theta, g, gap))
        moving = moving & (gap > target) & (num_steps < max_steps)
    exact = not objective.rough and (objective.cheap or not anywhere(num_steps > 0))
    return Place(
        theta,
        np.asarray(value, theta.dtype),
        np.asarray(careful_gap(theta, g, S), theta.dtype),
        g,
        model.H if exact else theta[..., :0],
        np.asarray(num_steps),
    )


class _Newton:
    """The model is the Hessian, at every point anew, and what the last step has shown."""

    def __init__(self, H: Array) -> None:
        self.H = H
        self.s = self.y = np.zeros(H.shape[:-1], H.dtype)

    def step(self, g: Array) -> tuple[Array, Numbers]:
        """``-H^-1 (g - t^2 y) - t^2 s``, and whether that means anything."""
        share = look_back(g, self.H, self.s)
        if surely(share == 0.0):
            return _solve(self.H, -g)
        share = column(share, g)
        p, regular = _solve(self.H, share * self.y - g)
        return p - share * self.s, regular

    def follow(self, moving: Numbers, first: Numbers, s: Array, y: Array, bend: Array) -> None:
        self.H, self.s, self.y = _choose(moving, (bend, s, y), (self.H, self.s, self.y))


class _Secant:
    """The model is the Hessian of the start, updated by what the gradients say."""

    def __init__(self, H: Array) -> None:
        self.H = H
        self.P: Array | None = None  # nothing is computed before it is needed
        self.seen: tuple[Numbers, Numbers, Array, Array] | None = None
        self.regular: Numbers = True

    def step(self, g: Array) -> tuple[Array, Numbers]:
        """``-P g``, and whether that means anything."""
        if self.P is None:
            self.P, self.regular = _solve(self.H, np.eye(g.shape[-1], dtype=g.dtype))
        if self.seen is not None:
            moved, *pair = self.seen
            (self.P,) = _choose(moved, (_update(self.P, *pair),), (self.P,))
        return -matvec(self.P, g), self.regular

    def follow(self, moving: Numbers, first: Numbers, s: Array, y: Array, bend: None) -> None:
        self.seen = moving, first, s, y


def _choose(mask: Numbers, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
    """What is new where the mask holds."""
    if surely(mask):
        return new
    return tuple(pick(mask, a, b) for a, b in zip(new, old, strict=True))


def _update(P: Array, first: Numbers, s: Array, y: Array) -> Array:
    """``P + s w' + w s'`` with ``w = ((1 + y'Py/s'y)/2 s - Py) / s'y``; P is scaled at first."""
    Py, sy = matvec(P, y), dot(s, y)
    ratio = dot(y, Py) / sy
    if anywhere(first):
        scale = pick(first, ratio, 1.0)
        across = column(scale, s)
        P, Py, ratio = (
            P / (across if s.ndim == 1 else across[..., None]),
            Py / across,
            ratio / scale,
        )
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
