"""Anchors: points at which the loss and its derivatives are carried forward exactly.

At a fixed point the loss changes by one term per observation, so the cut of every anchor is exact
again in the next round at a cost of O(d^2), without a pass over the history. In few dimensions the
anchors carry further derivatives, so that the loss is known near them as well: then an arm whose
maximiser moves a little from round to round is followed for many rounds without a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchglb.arrays import Array, array, at_least, dot, limits, matvec, quiet, tensor
from torchglb.checks import check_tensors
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion
from torchglb.ucb.bounds import trace
from torchglb.ucb.taylor import (
    choose_order,
    evaluate_model,
    monomials,
    row_derivatives,
    shift_by_ridge,
)

#: the largest number of entries of a derivative beyond the Hessian: up to d = 4 it saves more
#: passes than it costs
LARGEST_CARRIED = 64


class Anchor(NamedTuple):
    """One anchor for each of some problems."""

    point: Array  # (N, d)
    sums: list[Array]  # derivatives of the data's loss (no ridge), orders 0 to q: (N, d^k)
    shift: Array  # (N, d): from the point to where the anchor was asked last
    excess: Array  # (N): how much the loss may be above the model there

    def expansion(self, ridge: Array) -> Expansion:
        """Loss, gradient and Hessian at the point itself."""
        data = Expansion(self.sums[0][..., 0], self.sums[1], self._hessian)
        return shift_by_ridge(data, self.point, ridge)

    def model(self, p: Array, ridge: Array) -> Expansion:
        """The same at ``point + p``, as the Taylor model has it."""
        return shift_by_ridge(Expansion(*evaluate_model(self.sums, p)), self.point + p, ridge)

    def local(self, p: Array, roundings: float) -> Array:
        """At least ``|p|^2`` in the Hessian of the data's loss, whatever its rounding has lost."""
        lost = (roundings * limits(p)[0]) * self.curvature * dot(p, p)
        return at_least(dot(p, matvec(self._hessian, p)), 0.0) + lost

    @property
    def curvature(self) -> Array:
        """The trace of the Hessian of the data's loss, ``(N)``."""
        return trace(self._hessian)

    @property
    def _hessian(self) -> Array:
        return self.sums[2].reshape(*self.point.shape, -1)


class Bundle:
    """A anchors for each of N problems, at first all at the origin.

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
        self.order = choose_order(family, dim, radius, largest)
        shape = (problems, anchors)
        self._tensors = {
            "points": like.new_zeros((*shape, dim)),
            "shift": like.new_zeros((*shape, dim)),
            "excess": like.new_zeros(shape),
            "curvature": like.new_zeros((*shape, 1)),
            # the last round in which the anchor decided something
            "used": like.new_full(shape, -1.0),
        }
        self._totals = [like.new_zeros((*shape, dim**k)) for k in range(self.order + 1)]
        self._tensors |= {f"order {k}": total for k, total in enumerate(self._totals)}
        # one memory, seen by torch and by NumPy
        views = {name: array(t) for name, t in self._tensors.items()}
        self.points, self.shift, self.excess = views["points"], views["shift"], views["excess"]
        self.used, self._curvature = views["used"], views["curvature"]
        self.sums = [array(total) for total in self._totals]

    @property
    def loss(self) -> Array:
        """Of the data, ``(N, A)``."""
        return self.sums[0][..., 0]

    @property
    def gradient(self) -> Array:
        """Of the data's loss, ``(N, A, d)``."""
        return self.sums[1]

    @property
    def curvature(self) -> Array:
        """The trace of the Hessian, ``(N, A)``: carried too, since its terms lie far apart."""
        return self._curvature[..., 0]

    def observe(self, x: Array, r: Array, w: Array | None) -> None:
        """Adds observations ``x (N, k, d)``, ``r`` and ``w (N, k)`` to every anchor: O(A k d^q)."""
        weights = None if w is None else w[:, None, :]
        with quiet():
            z = self.points @ x.mT  # (N, A, k)
            columns = row_derivatives(self.family, z, r[:, None, :], weights, self.order)
        powers = monomials(x, self.order)
        for total, column, power in zip(self._totals, columns, powers, strict=True):
            total.baddbmm_(tensor(column), tensor(power))
        self._tensors["curvature"].baddbmm_(tensor(columns[2]), tensor((x * x).sum(-1)[..., None]))

    def insert(self, rows: Array, slot: Array, point: Array, sums: list[Array], now: int) -> None:
        """Puts one new anchor into the given slot of each of the problems ``rows``."""
        self.points[rows, slot] = point
        self._curvature[rows, slot] = sums[2][..., :: self.dim + 1].sum(-1)[..., None]
        self.shift[rows, slot] = 0.0
        self.excess[rows, slot] = 0.0
        self.used[rows, slot] = float(now)
        for old, new in zip(self.sums, sums, strict=True):
            old[rows, slot] = new

    def mark_used(self, slots: Array, everyone: Array, now: int) -> None:
        """Stamps the anchors ``(N, K)`` that bound some arm: they stay, the others make room."""
        self.used[everyone[:, None], slots] = float(now)

    def at(self, rows: Array, slot: Array) -> Anchor:
        """One anchor of each of the problems ``rows``."""
        kept = (self.points, self.shift, self.excess, *self.sums)
        point, shift, excess, *sums = (t[rows, slot] for t in kept)
        return Anchor(point, sums, shift, excess)

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
