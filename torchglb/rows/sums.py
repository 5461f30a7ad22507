"""Sums over the rows: the loss at points, its derivatives, and what rounding may have done to them.

``L(theta) = sum_s w_s (m(<x_s, theta>) - r_s <x_s, theta>) / g + (lambda/2)|theta|^2 - <tilt,
theta>``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import array
from torchglb.distributed import Shards
from torchglb.families import GLMFamily
from torchglb.rounding import EVALUATION, combine_rows, lost_in_sum

#: a ridge that all problems share
NUMBER = (int, float)
#: from so many entries on, NumPy's faster products make up for the change of library
NUMPY_FROM = 4096
#: of more numbers than this in the rows, sums are made in parts
MANY = 1 << 20


class Expansion(NamedTuple):
    """The loss at a point and its derivatives: ``(*B)``, ``(*B, d)``, ``(*B, d, d)``."""

    loss: Tensor
    gradient: Tensor
    hessian: Tensor


class Errors(NamedTuple):
    """What rounding may have done to an expansion, ``(*B)`` each.

    Attributes:
        loss: a bound on the error of the loss.
        gradient: a bound on the length of the error of the gradient.
        steepness: ``sum_s w_s |slope_s| |x_s|`` and the like of ridge and tilt: without
            cancellation, how fast the loss may change.
    """

    loss: Tensor
    gradient: Tensor
    steepness: Tensor


class RowSums:
    """The sums over the rows, in the library of the arrays that it is given."""

    def __init__(
        self,
        family: GLMFamily,
        X: Tensor,
        r: Tensor,
        w: Tensor | None,
        regularization: float | Tensor,
        tilt: Tensor | None,
        shards: Shards,
    ) -> None:
        self.family, self.X, self.r, self.w = family, X, r, w
        self.regularization, self.tilt, self.shards = regularization, tilt, shards

    @property
    def dim(self) -> int:
        """d."""
        return self.X.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """``*B``."""
        return torch.Size(self.X.shape[:-2])

    @property
    def is_ridged(self) -> bool:
        """Whether a ridge term is present."""
        return not isinstance(self.regularization, NUMBER) or self.regularization > 0

    def parts(self) -> Iterator[RowSums]:
        """All rows; many of them some at a time: what is made of those stays in the cache."""
        n, d = self.X.shape[-2:]
        if n * d <= MANY:
            yield self
            return
        step = max(1, MANY // (4 * d))
        for start in range(0, n, step):
            some = slice(start, start + step)
            w = None if self.w is None else self.w[..., some]
            rows = (self.X[..., some, :], self.r[..., some], w)
            yield RowSums(self.family, *rows, self.regularization, self.tilt, self.shards)

    def _added(self, sums: Callable[[RowSums], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sums over some rows, over those of all parts."""
        total: tuple[Tensor, ...] = ()
        for part in self.parts():
            found = sums(part)
            total = tuple(a + b for a, b in zip(total, found, strict=True)) if total else found
        return total

    def _summed(self, sums: Callable[[RowSums], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """And over those of all ranks."""
        return self.shards.sum(*self._added(sums))

    # ---- evaluation: theta is (*B, d), or (*B, P, d) for P points of each problem -----------

    def value(self, theta: Tensor) -> Tensor:
        """L(theta)."""

        def sums(rows: RowSums) -> tuple[Tensor]:
            loss = rows.family.nll(rows._features(theta), rows._rewards(theta))
            return (rows._weighted(loss).sum(-1),)

        (loss,) = self._summed(sums)
        return self.with_ridge(loss, theta)

    def value_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """L(theta) and its gradient: O(n d) per point."""

        def sums(rows: RowSums) -> tuple[Tensor, Tensor]:
            terms = rows.family.loss_terms(rows._features(theta), rows._rewards(theta))
            loss = rows._weighted(terms.loss).sum(-1)
            return loss, rows._combined(rows._weighted(terms.slope))

        loss, gradient = self._summed(sums)
        return self.with_ridge(loss, theta), self._add_gradient(gradient, theta)

    def hessian(self, theta: Tensor) -> Tensor:
        """The Hessian alone, summed in blocks: O(n d^2) per point."""

        def sums(rows: RowSums) -> tuple[Tensor]:
            curvatures = rows._weighted(rows.family.curvature(rows._features(theta)))
            return (rows._gram(curvatures, True),)

        (hessian,) = self._summed(sums)
        return self._add_hessian(hessian, theta)

    def expand(self, theta: Tensor, *, in_blocks: bool = False) -> Expansion:
        """L(theta), its gradient and its Hessian: one pass, O(n d^2) per point.

        Args:
            theta: the points.
            in_blocks: sums the Hessian so that it loses :meth:`lost_in_hessian`, and no more.
        """

        def sums(rows: RowSums) -> tuple[Tensor, ...]:
            terms = rows.family.loss_terms(rows._features(theta), rows._rewards(theta))
            loss = rows._weighted(terms.loss).sum(-1)
            gradient = rows._combined(rows._weighted(terms.slope))
            return loss, gradient, rows._gram(rows._weighted(terms.curvature), in_blocks)

        loss, gradient, hessian = self._summed(sums)
        return Expansion(
            self.with_ridge(loss, theta),
            self._add_gradient(gradient, theta),
            self._add_hessian(hessian, theta),
        )

    def lost_in_hessian(self) -> float:
        """What a Hessian that is summed in blocks may have lost, relative to its trace.

        A plain product of matrices adds up row after row: for a million equal rows it was seen to
        lose 66000 roundings.
        """
        parts = sum(1 for _ in self.parts())  # one after the other
        lost = lost_in_sum(self.shards.total(self.X.shape[-2])) + 0.5 * parts + EVALUATION
        return torch.finfo(self.X.dtype).eps * lost

    def expand_with_errors(
        self, theta: Tensor, *, in_blocks: bool = False
    ) -> tuple[Expansion, Errors]:
        """:meth:`expand`, with bounds on what rounding has done to loss and gradient.

        A product ``z = <x, theta>`` of d terms errs by ``lost(d) eps |x| |theta|``, which moves the
        loss of a row by its slope and the slope by its curvature. Evaluating ``m(z) - r z`` loses
        some eps of ``|m| + |r z|``, at most those of ``|m - r z| + 2 |r z|``, even where the two
        cancel; likewise ``mu(z) - r``. Adding n rows loses ``lost(n) eps`` of their sizes
        (:func:`torchglb.rounding.lost_in_sum`; the gradient is summed in blocks for it).

        In single precision a loss with a centred form, ``c(z, r) - k(r)``, is the sum of c less
        that of k, which is made in double precision: then only c is rounded as above, nothing
        cancels, and the difference is rounded once.
        """
        d, parts = self.dim, sum(1 for _ in self.parts())
        sums = self._added(lambda rows: rows._sizes(theta, in_blocks))
        loss, gradient, hessian, size, steepness, cancelled, pulled = self.shards.sum(*sums[:7])
        centred = len(sums) > 7
        if centred:
            (known,) = self.shards.sum(sums[7])
            loss, cancelled = (loss.double() - known).to(theta.dtype), torch.zeros_like(cancelled)
        bend = torch.diagonal(hessian, dim1=-2, dim2=-1).sum(-1)
        at = Expansion(
            self.with_ridge(loss, theta),
            self._add_gradient(gradient, theta),
            self._add_hessian(hessian, theta),
        )
        norm = torch.linalg.vector_norm(theta, dim=-1)
        eps, added = torch.finfo(theta.dtype).eps, lost_in_sum(self.shards.total(self.X.shape[-2]))
        added += 0.5 * parts  # one after the other
        product = 1.0 + 0.5 * d
        of_loss = (added + EVALUATION) * size + 2.0 * EVALUATION * cancelled
        of_gradient = (added + EVALUATION) * steepness + 2.0 * EVALUATION * pulled
        # the last additions: each is rounded once, at most to the sizes of what is added
        last = loss.abs() + at.loss.abs() if centred else EVALUATION * at.loss.abs()
        of_loss = of_loss + product * norm * steepness + last
        of_gradient = of_gradient + product * norm * bend
        outer = 0.0 * norm  # the steepness of ridge and tilt
        if self.is_ridged:
            outer = outer + abs(self._ridge(theta, 0)) * norm
        if self.tilt is not None:
            tilt = torch.linalg.vector_norm(self.tilt, dim=-1)
            outer = outer + (tilt if self._single(theta) else tilt[..., None])
        of_loss = of_loss + (product + EVALUATION) * norm * outer
        of_gradient = of_gradient + EVALUATION * outer
        return at, Errors(eps * of_loss, eps * of_gradient, steepness + outer)

    def _sizes(self, theta: Tensor, in_blocks: bool) -> tuple[Tensor, ...]:
        """What :meth:`expand_with_errors` sums over the rows; k in double precision comes last."""
        z, r = self._features(theta), self._rewards(theta)
        losses, slopes, curvatures = map(self._weighted, self.family.loss_terms(z, r))
        centred = None if theta.dtype == torch.float64 else self.family.centred_loss(z, r)
        if centred is not None:
            losses = self._weighted(centred[0])
        rows = torch.linalg.vector_norm(self.X, dim=-1)  # |x|
        rows = rows if self._single(theta) else rows[..., None, :]
        rewards = self._weighted(r.abs() / self.family.dispersion)
        gradient = combine_rows(slopes[..., None, :] if self._single(theta) else slopes, self.X)
        return (
            losses.sum(-1),
            gradient[..., 0, :] if self._single(theta) else gradient,
            self._gram(curvatures, in_blocks),
            losses.abs().sum(-1),
            (slopes.abs() * rows).sum(-1),
            (rewards * z.abs()).sum(-1),
            (rewards * rows).sum(-1).expand(losses.shape[:-1]).contiguous(),
            *(() if centred is None else (self._weighted(centred[1]).sum(-1),)),
        )

    # a vector v of one entry per row is (*B, n), or (*B, P, n) for P points

    def _single(self, v: Tensor) -> bool:
        return v.ndim == self.X.ndim - 1

    def _features(self, theta: Tensor) -> Tensor:
        """``<x_s, theta>`` of every row."""
        if not self._single(theta):
            return theta @ self.X.mT
        if theta.ndim == 1:
            return _product(self.X, theta)
        return _product(theta[..., None, :], self.X.mT)[..., 0, :]

    def _combined(self, v: Tensor) -> Tensor:
        """``sum_s v_s x_s``."""
        if v.ndim == 1 or not self._single(v):
            return _product(v, self.X)
        return _product(v[..., None, :], self.X)[..., 0, :]

    def _gram(self, v: Tensor, in_blocks: bool) -> Tensor:
        """``sum_s v_s x_s x_s'``."""
        X, d = self.X, self.dim
        if self._single(v):
            return (combine_rows if in_blocks else _product)(X.mT * v[..., None, :], X)
        product = combine_rows if in_blocks else torch.matmul
        if d <= 4:
            # few features: the products of features serve all points in one matrix product
            products = (X[..., :, None] * X[..., None, :]).flatten(-2)
            return product(v, products).unflatten(-1, (d, d))
        return product(X.mT[..., None, :, :] * v[..., None, :], X[..., None, :, :])

    def _rewards(self, theta: Tensor) -> Tensor:
        return self.r if self._single(theta) else self.r[..., None, :]

    def _weighted(self, v: Tensor) -> Tensor:
        if self.w is None:
            return v
        return v * (self.w if self._single(v) else self.w[..., None, :])

    def _ridge(self, theta: Tensor, axes: int) -> float | Tensor:
        """lambda, as it multiplies a quantity of each point with so many axes."""
        ridge = self.regularization
        if isinstance(ridge, NUMBER):
            return ridge
        axes = axes if self._single(theta) else axes + 1
        return ridge.reshape(ridge.shape + (1,) * axes)

    def with_ridge(self, loss: Tensor, theta: Tensor) -> Tensor:
        """The loss of the rows at theta, with ridge term and tilt added."""
        if self.is_ridged:
            loss = loss + 0.5 * self._ridge(theta, 0) * (theta * theta).sum(-1)
        if self.tilt is not None:
            tilt = self.tilt if self._single(theta) else self.tilt[..., None, :]
            loss = loss - (theta * tilt).sum(-1)
        return loss

    def _add_gradient(self, gradient: Tensor, theta: Tensor) -> Tensor:
        if self.is_ridged:
            gradient = gradient + self._ridge(theta, 1) * theta
        if self.tilt is not None:
            gradient = gradient - (self.tilt if self._single(theta) else self.tilt[..., None, :])
        return gradient

    def _add_hessian(self, hessian: Tensor, theta: Tensor) -> Tensor:
        if self.is_ridged:
            eye = torch.eye(self.dim, dtype=theta.dtype, device=theta.device)
            hessian = hessian + self._ridge(theta, 2) * eye
        return hessian


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; by NumPy where it is faster: batches, few columns, and nothing recorded."""
    if torch.is_inference_mode_enabled() and a.device.type == "cpu" and a.numel() >= NUMPY_FROM:
        return torch.from_numpy(array(a) @ array(b))
    return a @ b
