"""The negative log-likelihood of a history, as a torch module of theta.

``L(theta) = sum_s w_s (m(<x_s, theta>) - r_s <x_s, theta>) / g + (lambda/2)|theta|^2 - <tilt,
theta>``

One evaluation of loss, gradient and Hessian is one *pass* over the history: O(n d^2) per point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchglb.arrays import array, tensor
from torchglb.checks import ValueChecks, check_float, check_same, check_shape, refuse
from torchglb.distributed import WHOLE, Shards
from torchglb.families import GLMFamily
from torchglb.history import History, Rows

#: from so many entries on, NumPy's faster products make up for the change of library
NUMPY_FROM = 4096


class Expansion(NamedTuple):
    """The loss at a point and its derivatives: ``(*B)``, ``(*B, d)``, ``(*B, d, d)``."""

    loss: Tensor
    gradient: Tensor
    hessian: Tensor


class NegativeLogLikelihood(nn.Module):
    """The weighted GLM loss of fixed rows, evaluated at parameters ``theta``.

    Args:
        family: the GLM family.
        X: features ``(*B, n, d)``.
        r: rewards ``(*B, n)``.
        w: row weights ``(*B, n)``; 1 if left out.
        regularization: lambda >= 0 of the ridge term ``(lambda/2)|theta|^2``; a number or ``(*B)``.
        tilt: a vector ``(*B, d)`` subtracted as ``<tilt, theta>`` (perturbed losses), or None.
        shards: completes the sums over these rows where others are on other ranks.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> X, r = torch.eye(2), torch.tensor([1.0, 0.0])
        >>> NegativeLogLikelihood(Bernoulli(), X, r)(torch.zeros(2))
        tensor(1.3863)
    """

    def __init__(
        self,
        family: GLMFamily,
        X: Tensor,
        r: Tensor,
        w: Tensor | None = None,
        *,
        regularization: float | Tensor = 0.0,
        tilt: Tensor | None = None,
        shards: Shards = WHOLE,
    ) -> None:
        super().__init__()
        if not isinstance(family, GLMFamily):
            raise refuse("family", "a GLMFamily", type(family).__name__)
        check_float("X", X)
        if X.ndim < 2:
            check_shape("X", X, ("*B", "n", "d"))
        check_same("r", r, "X", X)
        check_shape("r", r, X.shape[:-1])
        if w is not None:
            check_same("w", w, "X", X)
            check_shape("w", w, X.shape[:-1])
        if isinstance(regularization, Tensor):
            check_same("regularization", regularization, "X", X)
            if regularization.ndim:
                check_shape("regularization", regularization, X.shape[:-2])
        elif not isinstance(regularization, int | float) or not 0.0 <= regularization < math.inf:
            raise refuse("regularization", "a non-negative number", repr(regularization))
        if tilt is not None:
            check_same("tilt", tilt, "X", X)
            check_shape("tilt", tilt, (*X.shape[:-2], X.shape[-1]))
        self.family = family
        self.X, self.r, self.w = X, r, w
        self.regularization, self.tilt = regularization, tilt
        self.shards = shards

    @classmethod
    def of(
        cls,
        family: GLMFamily,
        history: History | Rows,
        *,
        regularization: float | Tensor = 0.0,
        tilt: Tensor | None = None,
    ) -> NegativeLogLikelihood:
        """The loss of a history as it stands now."""
        if isinstance(history, History):
            rows, shards = history.rows(), history.shards
        else:
            rows, shards = history, WHOLE
        return cls(family, *rows, regularization=regularization, tilt=tilt, shards=shards)

    @property
    def dim(self) -> int:
        """d."""
        return self.X.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """``*B``."""
        return self.X.shape[:-2]

    @property
    def num_rows(self) -> int:
        """n, of all ranks."""
        return self.shards.total(self.X.shape[-2])

    @property
    def is_ridged(self) -> bool:
        """Whether a ridge term is present."""
        return isinstance(self.regularization, Tensor) or self.regularization > 0

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were given, each with the full batch shape; see :meth:`rebuild`."""
        ridge = self.regularization
        full = ridge.expand(self.batch_shape) if isinstance(ridge, Tensor) else None
        return tuple(t for t in (self.X, self.r, self.w, full, self.tilt) if t is not None)

    def rebuild(self, tensors: Sequence[Tensor]) -> NegativeLogLikelihood:
        """The same loss over other tensors, in the order of :meth:`tensors`."""
        left = list(tensors)
        X, r = left.pop(0), left.pop(0)
        w = None if self.w is None else left.pop(0)
        ridge = left.pop(0) if isinstance(self.regularization, Tensor) else self.regularization
        tilt = None if self.tilt is None else left.pop(0)
        return NegativeLogLikelihood(
            self.family, X, r, w, regularization=ridge, tilt=tilt, shards=self.shards
        )

    def over(self, X: Tensor, r: Tensor, w: Tensor | None) -> NegativeLogLikelihood:
        """The likelihood without ridge and tilt, of other rows (problems picked or reshaped)."""
        return NegativeLogLikelihood(self.family, X, r, w, shards=self.shards)

    def check_values(self, *, rows: bool = True) -> None:
        """Raises :class:`InputError` unless the rows are finite, in support, with weights >= 0.

        Args:
            rows: look at the rows too, not only at the regularisation.
        """
        checks = ValueChecks()
        if rows:
            checks.finite("X", self.X)
            self.family.require_rewards(checks, self.r)
            if self.w is not None:
                checks.finite("w", self.w)
                checks.within("w", self.w, 0.0, math.inf, "non-negative weights")
        if isinstance(ridge := self.regularization, Tensor):
            checks.finite("regularization", ridge)
            checks.require("regularization", ridge >= 0, "non-negative numbers", ridge)
        checks.settle()

    # ---- evaluation: theta is (*B, d), or (*B, P, d) for P points of each problem -----------

    def forward(self, theta: Tensor) -> Tensor:
        """L(theta), of shape ``theta.shape[:-1]``."""
        check_same("theta", theta, "X", self.X)
        points = () if self._single(theta) else ("P",)
        check_shape("theta", theta, (*self.batch_shape, *points, self.dim))
        return self.value(theta)

    def value(self, theta: Tensor) -> Tensor:
        """L(theta)."""
        loss = self._weighted(self.family.nll(self._features(theta), self._rewards(theta)))
        (loss,) = self.shards.sum(loss.sum(-1))
        return self._add_loss(loss, theta)

    def value_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """L(theta) and its gradient: O(n d) per point."""
        terms = self.family.loss_terms(self._features(theta), self._rewards(theta))
        loss = self._weighted(terms.loss).sum(-1)
        gradient = self._combined(self._weighted(terms.slope))
        loss, gradient = self.shards.sum(loss, gradient)
        return self._add_loss(loss, theta), self._add_gradient(gradient, theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """The gradient alone: O(n d) per point, and no logarithm."""
        slope = self.family.slope(self._features(theta), self._rewards(theta))
        (gradient,) = self.shards.sum(self._combined(self._weighted(slope)))
        return self._add_gradient(gradient, theta)

    def hessian(self, theta: Tensor) -> Tensor:
        """The Hessian alone: O(n d^2) per point."""
        curvature = self._weighted(self.family.curvature(self._features(theta)))
        (hessian,) = self.shards.sum(self._gram(curvature))
        return self._add_hessian(hessian, theta)

    def derivatives(self, theta: Tensor, *, rough: bool = False) -> tuple[Tensor, Tensor]:
        """The gradient and the Hessian: O(n d^2) per point, and no logarithm.

        Args:
            theta: the points, one for each problem.
            rough: a Hessian in single precision will do, as a model for a solver.
        """
        z, gram = self._features(theta), self._rough_gram if rough else self._gram
        gradient = self._combined(self._weighted(self.family.slope(z, self._rewards(theta))))
        hessian = gram(self._weighted(self.family.curvature(z)))
        gradient, hessian = self.shards.sum(gradient, hessian)
        return self._add_gradient(gradient, theta), self._add_hessian(hessian, theta)

    def expand(self, theta: Tensor) -> Expansion:
        """L(theta), its gradient and its Hessian: one pass, O(n d^2) per point."""
        terms = self.family.loss_terms(self._features(theta), self._rewards(theta))
        loss = self._weighted(terms.loss).sum(-1)
        gradient = self._combined(self._weighted(terms.slope))
        hessian = self._gram(self._weighted(terms.curvature))
        loss, gradient, hessian = self.shards.sum(loss, gradient, hessian)
        return Expansion(
            self._add_loss(loss, theta),
            self._add_gradient(gradient, theta),
            self._add_hessian(hessian, theta),
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

    def _gram(self, v: Tensor) -> Tensor:
        """``sum_s v_s x_s x_s'``."""
        d, X = self.dim, self.X
        if self._single(v):
            return _product(X.mT * v.unsqueeze(-2), X)
        if d <= 4:
            # few features: the products of features serve all points in one matrix product
            products = (X[..., :, None] * X[..., None, :]).flatten(-2)
            return (v @ products).unflatten(-1, (d, d))
        return (X.mT[..., None, :, :] * v[..., None, :]) @ X[..., None, :, :]

    def _rough_gram(self, v: Tensor) -> Tensor:
        """The same in single precision, as the square of ``sqrt(v_s) x_s``."""
        rows = self.X.float() * v.sqrt().float()[..., None]
        return _product(rows.mT, rows).to(v.dtype)

    def _rewards(self, theta: Tensor) -> Tensor:
        return self.r if self._single(theta) else self.r[..., None, :]

    def _weighted(self, v: Tensor) -> Tensor:
        if self.w is None:
            return v
        return v * (self.w if self._single(v) else self.w[..., None, :])

    def _ridge(self, theta: Tensor, axes: int) -> float | Tensor:
        """lambda, as it multiplies a quantity of each point with so many axes."""
        ridge = self.regularization
        if not isinstance(ridge, Tensor):
            return ridge
        axes = axes if self._single(theta) else axes + 1
        return ridge.reshape(ridge.shape + (1,) * axes)

    def _add_loss(self, loss: Tensor, theta: Tensor) -> Tensor:
        if self.is_ridged:
            loss = loss + 0.5 * self._ridge(theta, 0) * theta.square().sum(-1)
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
        return tensor(array(a) @ array(b))
    return a @ b
