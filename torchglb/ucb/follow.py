"""From a point near the maximiser of an arm to the maximiser itself, on a model of the loss.

One of three cases holds, each with its own conditions, which suffice where the multipliers have the
right sign:

- the level is idle: theta is the pole of the ball, ``S x / |x|``;
- the ball is idle: ``x = lambda grad L(theta)`` and ``L(theta) = B``;
- both are active: ``x = lambda grad L(theta) + nu theta``, ``L(theta) = B`` and ``|theta| = S``.

Nobody searches for the right one: the last two are followed side by side, by Newton's method. All
this is said by the model; what is true of the point is for others to find out. NumPy arrays only:
on a device there are no models worth following.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torchglb.arrays import Array, counting, dot, identity, idle, length, limits, solve
from torchglb.likelihood import Expansion

#: steps at most
MOST = 8
#: a step is the last one if it is at most this share of S: its square is the error that is left
SHORT = 3e-6
#: where the ball counts as active, relative to S^2: in one dimension it need not be, for both
#: constraints together have no solution
ON_SPHERE = 1e-6


class Followed(NamedTuple):
    """Where the steps have led, for N problems."""

    point: Array  # (N, d), in the ball
    weight: Array  # lambda, (N); 0 at the pole
    settled: Array  # (N), whether one of the cases holds there


def follow(
    x: Array,
    theta: Array,
    expand: Callable[[Array], Expansion],
    level: Array,
    radius: Array,
) -> Followed:
    """The maximiser of ``<x, u>`` over ball and level, by steps from theta nearby.

    Args:
        x: the arm, ``(N, d)``.
        theta: the start, ``(N, d)``.
        expand: from points ``(N, k, d)`` to loss, gradient and Hessian there.
        level: B, ``(N)``.
        radius: S, ``(N)``.
    """
    problems, d = x.shape
    edge, sphere = (1 - 4 * limits(x)[0]) * radius, radius * radius
    pole = x * (edge / length(x))[:, None]
    start = expand(np.concatenate([theta[:, None], pole[:, None]], 1))
    alone = start.loss[:, 1] <= level
    loss, gradient, hessian = (t[:, :1] for t in start)
    # two cases, without the ball and with it: multipliers by least squares
    g, weight = gradient[:, 0], np.zeros((problems, 2, 2), dtype=x.dtype)
    gg, gt, tt, xg, xt = dot(g, g), dot(g, theta), dot(theta, theta), dot(x, g), dot(x, theta)
    shared = gg * tt - gt * gt
    weight[:, 0, 0] = xg / gg
    weight[:, 1, 0], weight[:, 1, 1] = (xg * tt - xt * gt) / shared, (xt * gg - xg * gt) / shared
    eye = identity(d, x)
    system = np.zeros((problems, 2, d + 2, d + 2), dtype=x.dtype)
    target = np.zeros((problems, 2, d + 2, 1), dtype=x.dtype)
    system[:, 0, d + 1, d + 1] = 1.0
    target[..., :d, 0] = x[:, None]
    u, squared, goal = theta[:, None], tt[:, None], level[:, None]
    short = (SHORT * SHORT) * sphere[:, None]
    good, done = np.zeros_like(short, dtype=bool), alone[:, None, None]
    for k in range(MOST):
        if k:
            loss, gradient, hessian = expand(u)
        # (lambda H + nu) move + lambda' grad L + nu' u = x, and the constraints to first order
        share, outward = weight[..., :1, None], weight[..., 1:, None]
        system[..., :d, :d] = share * hessian + outward * eye
        system[..., :d, d] = system[..., d, :d] = gradient
        system[:, 1, :d, d + 1] = system[:, 1, d + 1, :d] = u[:, -1]
        target[..., d, 0] = goal - loss
        target[:, 1, d + 1, 0] = 0.5 * (sphere - squared[:, -1])
        solution = solve(system, target)[..., 0]
        move, after = solution[..., :d], solution[..., d:]
        if k > 1:  # who has arrived stays there, whatever the others still need
            move, after = np.where(done, 0.0, move), np.where(done, weight, after)
        u, weight = u + move, after
        size, squared = dot(move, move), dot(u, u)
        if k == 0:
            continue
        positive = weight > 0
        valid = positive[..., 0]
        valid[:, 0] &= squared[:, 0] <= sphere
        valid[:, 1] &= positive[:, 1, 1] & (abs(squared[:, 1] - sphere) <= ON_SPHERE * sphere)
        now = valid & (size <= short)
        good = now if k == 1 else np.where(done[..., 0], good, now)
        done = (alone | good[:, 0] | good[:, 1])[:, None, None]
        if idle(~done):
            break
    outside, everyone = good[:, 1], counting(problems, x)
    case = outside.astype(np.int64)
    point, norm = u[everyone, case], np.sqrt(squared[everyone, case])
    land = np.where(outside | (norm > edge), edge / norm, 1.0)
    return Followed(
        np.where(alone[:, None], pole, point * land[:, None]),
        np.where(alone, 0.0, weight[everyone, case, 0]),
        done[:, 0, 0],
    )
