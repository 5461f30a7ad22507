"""The negative log-likelihood of a history, as a torch module of theta.

``L(theta) = sum_s w_s (m(<x_s, theta>) - r_s <x_s, theta>) / g + (lambda/2)|theta|^2 - <tilt,
theta>``

One evaluation of loss, gradient and Hessian is one *pass* over the history: O(n d^2) per point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.arrays import array
from torchglb.checks import ValueChecks, as_floats, as_like, check_shape, check_tensors, refuse
from torchglb.distributed import WHOLE, Shards
from torchglb.families import GLMFamily
from torchglb.history import History
from torchglb.rounding import EVALUATION, combine_rows, lost_in_sum
from torchglb.row_buffers import Rows

#: a ridge that all problems share
NUMBER = (int, float)
#: from so many entries on, NumPy's faster products make up for the change of library
NUMPY_FROM = 4096
#: a Hessian of more numbers than this in the rows is summed in parts
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

    # ---- evaluation: theta is (*B, d), or (*B, P, d) for P points of each problem -----------

    def value(self, theta: Tensor) -> Tensor:
        """L(theta)."""
        loss = self._weighted(self.family.nll(self._features(theta), self._rewards(theta)))
        (loss,) = self.shards.sum(loss.sum(-1))
        return self.with_ridge(loss, theta)

    def value_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """L(theta) and its gradient: O(n d) per point."""
        terms = self.family.loss_terms(self._features(theta), self._rewards(theta))
        loss = self._weighted(terms.loss).sum(-1)
        gradient = self._combined(self._weighted(terms.slope))
        loss, gradient = self.shards.sum(loss, gradient)
        return self.with_ridge(loss, theta), self._add_gradient(gradient, theta)

    def hessian(self, theta: Tensor) -> Tensor:
        """The Hessian alone: O(n d^2) per point."""
        curvature = self._weighted(self.family.curvature(self._features(theta)))
        (hessian,) = self.shards.sum(self._gram(curvature))
        return self._add_hessian(hessian, theta)

    def expand(self, theta: Tensor) -> Expansion:
        """L(theta), its gradient and its Hessian: one pass, O(n d^2) per point."""
        terms = self.family.loss_terms(self._features(theta), self._rewards(theta))
        loss = self._weighted(terms.loss).sum(-1)
        gradient = self._combined(self._weighted(terms.slope))
        hessian = self._gram(self._weighted(terms.curvature))
        loss, gradient, hessian = self.shards.sum(loss, gradient, hessian)
        return Expansion(
            self.with_ridge(loss, theta),
            self._add_gradient(gradient, theta),
            self._add_hessian(hessian, theta),
        )

    def expand_with_errors(self, theta: Tensor) -> tuple[Expansion, Errors]:
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
        z, r, d = self._features(theta), self._rewards(theta), self.dim
        terms = self.family.loss_terms(z, r)
        losses, slopes, curvatures = (self._weighted(t) for t in terms)
        centred = None if theta.dtype == torch.float64 else self.family.centred_loss(z, r)
        if centred is not None:
            losses = self._weighted(centred[0])
        rows = torch.linalg.vector_norm(self.X, dim=-1)  # |x|
        rows = rows if self._single(theta) else rows[..., None, :]
        rewards = self._weighted(r.abs() / self.family.dispersion)
        gradient = combine_rows(slopes[..., None, :] if self._single(theta) else slopes, self.X)
        sums = self.shards.sum(
            losses.sum(-1),
            gradient[..., 0, :] if self._single(theta) else gradient,
            self._gram(curvatures),
            losses.abs().sum(-1),
            (slopes.abs() * rows).sum(-1),
            (rewards * z.abs()).sum(-1),
            (rewards * rows).sum(-1).expand(losses.shape[:-1]).contiguous(),
        )
        loss, gradient, hessian, size, steepness, cancelled, pulled = sums
        if centred is not None:
            (known,) = self.shards.sum(self._weighted(centred[1]).sum(-1))
            loss, cancelled = (loss.double() - known).to(theta.dtype), torch.zeros_like(cancelled)
        bend = torch.diagonal(hessian, dim1=-2, dim2=-1).sum(-1)
        at = Expansion(
            self.with_ridge(loss, theta),
            self._add_gradient(gradient, theta),
            self._add_hessian(hessian, theta),
        )
        norm = torch.linalg.vector_norm(theta, dim=-1)
        eps, added = torch.finfo(theta.dtype).eps, lost_in_sum(self.shards.total(self.X.shape[-2]))
        product = 1.0 + 0.5 * d
        of_loss = (added + EVALUATION) * size + 2.0 * EVALUATION * cancelled
        of_gradient = (added + EVALUATION) * steepness + 2.0 * EVALUATION * pulled
        # the last additions: each is rounded once, at most to the sizes of what is added
        last = EVALUATION * at.loss.abs() if centred is None else loss.abs() + at.loss.abs()
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
        """``sum_s v_s x_s x_s'``; many rows in parts, whose weighted copies stay in the cache."""
        d, X = self.dim, self.X
        n = X.shape[-2]
        if n * d <= MANY:
            return self._gram_of(X, v)
        step = max(1, MANY // (4 * d))
        first = self._gram_of(X[..., :step, :], v[..., :step])
        for start in range(step, n, step):
            part = slice(start, start + step)
            first = first + self._gram_of(X[..., part, :], v[..., part])
        return first

    def _gram_of(self, X: Tensor, v: Tensor) -> Tensor:
        d = self.dim
        if self._single(v):
            return _product(X.mT * v[..., None, :], X)
        if d <= 4:
            # few features: the products of features serve all points in one matrix product
            products = (X[..., :, None] * X[..., None, :]).flatten(-2)
            return (v @ products).unflatten(-1, (d, d))
        return (X.mT[..., None, :, :] * v[..., None, :]) @ X[..., None, :, :]

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


#: what a likelihood holds of its rows
ROW_TENSORS = ("X", "r", "w", "regularization", "tilt")


class NegativeLogLikelihood(RowSums, nn.Module):
    """The weighted GLM loss of fixed rows, evaluated at parameters ``theta``.

    Numbers may be tensors or NumPy arrays of any real dtype, or lists: X as float32 or float64 is
    taken as it is, everything else is widened without loss, to the dtype of X.

    Args:
        family: the GLM family.
        X: features ``(*B, n, d)``.
        r: rewards ``(*B, n)``.
        w: row weights ``(*B, n)``; 1 if left out.
        regularization: lambda >= 0 of the ridge term ``(lambda/2)|theta|^2``; a number or ``(*B)``.
            A tensor may be negative where a :class:`torchglb.ucb.ConvexRegion` says where the loss
            is convex nonetheless; everybody else refuses it.
        tilt: a vector ``(*B, d)`` subtracted as ``<tilt, theta>`` (perturbed losses), or None.
        shards: completes the sums over these rows where others are on other ranks.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> X, r = torch.eye(2), torch.tensor([1.0, 0.0])
        >>> NegativeLogLikelihood(Bernoulli(), X, r)(torch.zeros(2))
        tensor(1.3863)
    """

    X: Tensor
    r: Tensor
    w: Tensor | None
    regularization: float | Tensor
    tilt: Tensor | None

    def __init__(
        self,
        family: GLMFamily,
        X: ArrayLike,
        r: ArrayLike,
        w: ArrayLike | None = None,
        *,
        regularization: ArrayLike = 0.0,
        tilt: ArrayLike | None = None,
        shards: Shards = WHOLE,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(family, GLMFamily):
            raise refuse("family", "a GLMFamily such as Bernoulli()", type(family).__name__)
        X = as_floats("X", X)
        if X.ndim < 2:
            check_shape("X", X, ("*B", "n", "d"))
        r = as_like("r", r, X)
        check_shape("r", r, X.shape[:-1])
        if w is not None:
            w = as_like("w", w, X)
            check_shape("w", w, X.shape[:-1])
        if isinstance(regularization, NUMBER):
            if not 0.0 <= regularization < math.inf:
                raise refuse("regularization", "a non-negative number", repr(regularization))
        else:
            regularization = as_like("regularization", regularization, X)
            if regularization.ndim:
                check_shape("regularization", regularization, X.shape[:-2])
        if tilt is not None:
            tilt = as_like("tilt", tilt, X)
            check_shape("tilt", tilt, (*X.shape[:-2], X.shape[-1]))
        self.family = family
        given = {"X": X, "r": r, "w": w, "regularization": regularization, "tilt": tilt}
        # a module looks twice at every attribute, so it is shown only what it has to register
        vars(self).update(given, shards=shards)
        for name, value in given.items():
            if type(value) is not Tensor and isinstance(value, nn.Parameter):
                del vars(self)[name]
                setattr(self, name, value)

    # the rows are no buffers, whose names a module would look up at every access: what a module
    # does with its buffers, moving and saving, is said here

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NegativeLogLikelihood:
        super()._apply(fn, recurse)
        for name in ROW_TENSORS:
            if isinstance(value := vars(self).get(name), Tensor):
                vars(self)[name] = fn(value)
        return self

    def get_extra_state(self) -> dict[str, Tensor]:
        """The rows, for ``state_dict``."""
        kept = {name: getattr(self, name) for name in ROW_TENSORS}
        return {name: t.detach().clone() for name, t in kept.items() if isinstance(t, Tensor)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Takes over saved rows of the same shape and dtype."""
        mine = self.get_extra_state()
        check_tensors("state", state, mine)
        for name in set(mine) & set(vars(self)):
            vars(self)[name] = state[name].to(self.X.device).clone()

    @classmethod
    def of(
        cls,
        family: GLMFamily,
        history: History | Rows,
        *,
        regularization: ArrayLike = 0.0,
        tilt: ArrayLike | None = None,
    ) -> NegativeLogLikelihood:
        """The loss of a history as it stands now."""
        if isinstance(history, History):
            rows, shards = history.view(), history.shards
        else:
            rows, shards = history, WHOLE
        return cls(family, *rows, regularization=regularization, tilt=tilt, shards=shards)

    @property
    def num_rows(self) -> int:
        """n, of all ranks."""
        return self.shards.total(self.X.shape[-2])

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were given, each with the full batch shape; see :meth:`rebuild`."""
        ridge, given = self.regularization, [self.X, self.r]
        if self.w is not None:
            given.append(self.w)
        if isinstance(ridge, Tensor):
            given.append(ridge.expand(self.batch_shape))
        if self.tilt is not None:
            given.append(self.tilt)
        return tuple(given)

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
            # the reward of merged rows is a mean
            self.family.require_rewards(checks, self.r, merged=self.w is not None)
        self.require_convex(checks, weights=rows)
        checks.settle()

    def require_convex(
        self, checks: ValueChecks, *, weights: bool = True, least_ridge: float | Tensor = 0.0
    ) -> None:
        """Adds to ``checks`` that no weight and no regularisation is negative or not finite.

        Args:
            checks: what is checked.
            weights: look at the weights too.
            least_ridge: a negative ridge down to this is convex (:class:`ConvexRegion` proves it).
        """
        if weights and self.w is not None:
            checks.finite("w", self.w)
            checks.within("w", self.w, 0.0, math.inf, lambda: "non-negative weights")
        if isinstance(ridge := self.regularization, Tensor):
            checks.finite("regularization", ridge)
            expected = "non-negative numbers"
            if isinstance(least_ridge, Tensor):
                expected = "numbers that are no lower than minus the proven curvature"
            checks.require("regularization", ridge >= least_ridge, expected, ridge)

    def forward(self, theta: ArrayLike) -> Tensor:
        """L(theta), of shape ``theta.shape[:-1]``."""
        theta = as_like("theta", theta, self.X)
        points = () if self._single(theta) else ("P",)
        check_shape("theta", theta, (*self.batch_shape, *points, self.dim))
        return self.value(theta)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; by NumPy where it is faster: batches, few columns, and nothing recorded."""
    if torch.is_inference_mode_enabled() and a.device.type == "cpu" and a.numel() >= NUMPY_FROM:
        return torch.from_numpy(array(a) @ array(b))
    return a @ b
