"""The negative log-likelihood of a history, as a torch module of theta.

``L(theta) = sum_s w_s (m(<x_s, theta>) - r_s <x_s, theta>) / g + (lambda/2)|theta|^2 - <tilt,
theta>``

One evaluation of loss, gradient and Hessian is one *pass* over the history: O(n d^2) per point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_floats,
    as_like,
    check_shape,
    check_tensors,
    refuse,
    refuse_flag,
)
from torchglb.distributed import WHOLE, Shards
from torchglb.families import GLMFamily, check_family
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History
from torchglb.rows.sums import NUMBER, RowSums

#: what a likelihood holds of its rows
ROW_TENSORS = ("X", "r", "w", "regularization", "tilt")


class NegativeLogLikelihood(RowSums, nn.Module):
    """The weighted GLM loss of fixed rows, evaluated at parameters ``theta``.

    Numbers may be tensors or NumPy arrays of any real dtype, or lists: X as float32 or float64 is
    taken as it is, everything else is widened without loss, to the dtype of X. As in a dataset of
    torch, tensors that need no widening are held and not copied: rows may be many, and gradients
    reach them. Histories, sequences, policies and heads copy what they are given.

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
        >>> import torch
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
    #: whether rows were merged, so that a weight is a sum of weights
    merged: bool = False
    #: whether they came through a history that looked at rewards, or was told not to
    arrived: bool = False

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
        check_family(family)
        X = as_floats("X", X)
        if X.ndim < 2:
            check_shape("X", X, ("*B", "n", "d"))
        r = as_like("r", r, X)
        check_shape("r", r, X.shape[:-1])
        if w is not None:
            w = as_like("w", w, X)
            check_shape("w", w, X.shape[:-1])
        refuse_flag("regularization", regularization)
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
        made = cls(family, *rows, regularization=regularization, tilt=tilt, shards=shards)
        return made.came_from(history) if isinstance(history, History) else made

    def came_from(self, rows: History | NegativeLogLikelihood) -> NegativeLogLikelihood:
        """Itself; from now on it knows whose rows these are: a history's, or another loss's."""
        if isinstance(rows, History):
            known = rows.aggregate, rows.family is self.family
        else:
            known = rows.merged, rows.arrived
        vars(self).update(merged=known[0], arrived=known[1])  # no module has to register these
        return self

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
        made = NegativeLogLikelihood(
            self.family, X, r, w, regularization=ridge, tilt=tilt, shards=self.shards
        )
        return made.came_from(self)

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

    def require_rewards(self, checks: ValueChecks) -> None:
        """Adds to ``checks`` that no reward that is a number is outside of the support.

        Nobody looks at what came through a history of this family, which has done so or was told
        not to; nor on one rank of several, since a refusal there would leave the others waiting.
        """
        if self.arrived or not self.shards.is_whole:
            return
        low, high = self.family.reward_range
        r, merged = self.r.detach(), self.w is not None
        known = torch.where(torch.isfinite(r), r, min(max(0.0, low), high))
        if merged:  # a mean, which is rounded
            inside = known.clamp(low, high)
            near = (known - inside).abs() <= 8 * torch.finfo(r.dtype).eps * inside.abs()
            known = torch.where(near, inside, known)
        self.family.require_rewards(checks, known, merged=merged)

    def forward(self, theta: ArrayLike) -> Tensor:
        """L(theta), of shape ``theta.shape[:-1]``."""
        theta = as_like("theta", theta, self.X)
        points = () if self._single(theta) else ("P",)
        check_shape("theta", theta, (*self.batch_shape, *points, self.dim))
        return self.value(theta)
