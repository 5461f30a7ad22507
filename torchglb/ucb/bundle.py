"""Anchors: points at which the loss and its derivatives are carried forward exactly.

At a fixed point the loss changes by one term per observation, so the cut of every anchor is exact
again in the next round at a cost of O(d^2), without a pass over the history. In few dimensions the
anchors carry further derivatives, so that the loss is known near them as well: then an arm whose
maximiser moves a little from round to round is followed for many rounds without a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchglb.arrays import Array, array, careful_sum, dot, library, quiet, tensor
from torchglb.checks import check_tensors
from torchglb.families import GLMFamily
from torchglb.ucb.bounds import trace
from torchglb.ucb.monomials import Jet, monomials_for
from torchglb.ucb.taylor import choose_order, row_derivatives

#: the largest number of derivatives of an order beyond the second, and the highest order: further
#: ones cost more than the passes that they save
LARGEST_CARRIED, HIGHEST_CARRIED = 20, 6
#: up to so many numbers, one operation on all of them is faster than one for each order
SMALL = 50_000


class Anchor(NamedTuple):
    """One anchor for each of some problems."""

    point: Array  # (N, d)
    shift: Array  # (N, d): from the point to where the anchor was asked last
    excess: Array  # (N): how much the loss may be above the model there
    loss: Array  # (N), of the data at the point (no ridge)
    hessian: Array  # (N, d, d), of the data's loss at the point
    curvature: Array  # its trace, (N)
    jet: Jet  # the Taylor polynomial of the data's loss

    def pick(self, rows: Array) -> Anchor:
        """The same for some of the problems."""
        point, shift, excess, loss, hessian, curvature = (t[rows] for t in self[:-1])
        return Anchor(point, shift, excess, loss, hessian, curvature, self.jet.pick(rows))


class Bundle:
    """A anchors for each of N problems, at first all at the origin.

    In memory the anchors lie side by side: what is done to all of them is done in long runs.

    Args:
        family: the GLM family.
        problems: N.
        anchors: A.
        dim: d.
        radius: the largest S.
        like: a tensor with the dtype and device to use.
    """

    def __init__(
        self,
        family: GLMFamily,
        problems: int,
        anchors: int,
        dim: int,
        radius: float,
        like: Tensor,
    ) -> None:
        self.family, self.dim = family, dim
        # on a device a pass is cheap next to the host's wait for what it might save
        largest = LARGEST_CARRIED if like.device.type == "cpu" else 0
        self.order = choose_order(family, dim, radius, largest, HIGHEST_CARRIED)
        self.monomials = monomials_for(dim, self.order, like)
        self._tensors = {
            "points": like.new_zeros((problems, dim, anchors)),
            "shift": like.new_zeros((problems, dim, anchors)),
            "excess": like.new_zeros((problems, anchors)),
            "curvature": like.new_zeros((problems, 1, anchors)),
            # the last round in which the anchor decided something
            "used": like.new_full((problems, anchors), -1.0),
            "sums": like.new_zeros((problems, self.monomials.count, anchors)),
            # what rounding has added to the loss and its gradient
            "rest": like.new_zeros((problems, 1 + dim, anchors)),
        }
        # one memory, seen by torch and by NumPy
        views = {name: array(t) for name, t in self._tensors.items()}
        self.points, self.shift, self.excess = views["points"], views["shift"], views["excess"]
        self._small = self._tensors["sums"].is_cpu and self._tensors["sums"].numel() < SMALL
        self.used, self._curvature, self.sums = views["used"], views["curvature"], views["sums"]
        self._first, self._rest = self.sums[:, : 1 + dim], views["rest"]

    @property
    def loss(self) -> Array:
        """Of the data, ``(N, A)``."""
        return self.sums[:, 0]

    @property
    def gradient(self) -> Array:
        """Of the data's loss, ``(N, d, A)``."""
        return self.sums[:, 1 : 1 + self.dim]

    @property
    def curvature(self) -> Array:
        """The trace of the Hessian, ``(N, A)``: carried too, since its terms lie far apart."""
        return self._curvature[:, 0]

    def observe(
        self, x: Array, r: Array, w: Array | None, extra: Array | None = None
    ) -> Array | None:
        """Adds observations ``x (N, k, d)``, ``r`` and ``w (N, k)`` to every anchor: O(A k d^q).

        Args:
            x: rows.
            r: rewards.
            w: weights, or None for 1.
            extra: one more point for each problem, ``(N, d)``.

        Returns:
            The derivatives of the new rows' loss at the extra point, ``(N, count)``.
        """
        size = max(1, math.isqrt(x.shape[1]))
        if size == x.shape[1]:
            return self._observe(x, r, w, extra)
        # a sum of so few rows errs by no more roundings than are paid for; see roundings_of
        total: Any = 0.0
        for at in range(0, x.shape[1], size):
            part = slice(at, at + size)
            some = None if w is None else w[:, part]
            added = self._observe(x[:, part], r[:, part], some, extra)
            total = total + added if extra is not None else None
        return total

    def _observe(self, x: Array, r: Array, w: Array | None, extra: Array | None) -> Array | None:
        points, here, first = self.points, self.points.shape[-1], 1 + self.dim
        if extra is not None:
            points = library(x).concatenate([points, extra[..., None]], -1)
        weights = None if w is None else w[..., None]
        powers = self.monomials.powers(x).mT  # (N, count, k)
        squares = dot(x, x)[:, None]
        with quiet():
            z = x @ points  # (N, k, A)
            columns = row_derivatives(self.family, z, r[..., None], weights, self.order)
            if x.shape[1] == 1 and self._small:
                added = self.monomials.by_degree(columns) * powers
                self._add_first(added[:, :first, :here])
                self.sums[:, first:] += added[:, first:, :here]
                self._curvature += columns[2][..., :here] * squares
                return None if extra is None else added[..., here]
            low = [powers[:, part] @ columns[k] for k, part in enumerate(self.monomials.parts[:2])]
            self._add_first(library(x).concatenate(low, 1)[..., :here])
        sums = self._tensors["sums"]
        for part, column in zip(self.monomials.parts[2:], columns[2:], strict=True):
            sums[:, part].baddbmm_(tensor(powers[:, part]), tensor(column[..., :here]))
        self._tensors["curvature"].baddbmm_(tensor(squares), tensor(columns[2][..., :here]))
        if extra is None:
            return None
        return self.monomials.moments([column[..., here] for column in columns], x)

    def _add_first(self, added: Array) -> None:
        """To loss and gradient: bounds rest on them."""
        self._first[...], self._rest[...] = careful_sum(self._first, self._rest, added)

    def insert(self, rows: Array, slot: Array, point: Array, sums: Array, now: int) -> None:
        """Puts one new anchor into the given slot of each of the problems ``rows``."""
        self.points[rows, :, slot] = point
        self._curvature[rows, 0, slot] = trace(self.monomials.hessian(sums))
        self.shift[rows, :, slot] = 0.0
        self.excess[rows, slot] = 0.0
        self.used[rows, slot] = float(now)
        self.sums[rows, :, slot] = sums
        self._rest[rows, :, slot] = 0.0

    def mark_used(self, slots: Array, everyone: Array, now: int) -> None:
        """Stamps the anchors ``(N, K)`` that bound some arm: they stay, the others make room."""
        self.used[everyone[:, None], slots] = float(now)

    def at(self, rows: Array, slot: Array) -> Anchor:
        """One anchor of each of the problems ``rows``."""
        point, shift, sums = (t[rows, :, slot] for t in (self.points, self.shift, self.sums))
        jet, hessian = self.monomials.jet(sums), self.monomials.hessian(sums)
        excess, curvature = self.excess[rows, slot], self._curvature[rows, 0, slot]
        return Anchor(point, shift, excess, sums[:, 0], hessian, curvature, jet)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit by bit."""
        return {name: t.clone() for name, t in self._tensors.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors("state['bundle']", state, self._tensors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        for name, old in self._tensors.items():
            old.copy_(state[name])
