"""The constrained minimum of a growing history's loss, certified, mostly without a pass.

A Taylor model of the loss near its minimum is carried forward from round to round. While its
certified remainder stays below the tolerance, the minimum costs a few operations on d x d matrices;
when it does not, the model is moved to its own minimum by one pass over the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import (
    Array,
    array,
    at_least,
    careful_sum,
    dot,
    finite,
    idle,
    length,
    library,
    quiet,
    tensor,
    which,
)
from torchglb.checks import check_tensors
from torchglb.distributed import Shards
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History, Rows
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim.ball import frank_wolfe_gap, minimize_model
from torchglb.optim.numbers import surely
from torchglb.ucb.bounds import trace
from torchglb.ucb.monomials import monomials_for
from torchglb.ucb.taylor import (
    Bracket,
    Nature,
    add_to_diagonal,
    certify,
    choose_order,
    derivative_sums,
    local_square,
    remainder,
    remainder_ratio,
)


class FlatHistory:
    """A history seen as N problems in one batch axis, of which some may be picked."""

    def __init__(self, family: GLMFamily, history: History) -> None:
        self.family = family
        self.history = history
        self.problems = history.batch_shape.numel()

    @property
    def shards(self) -> Shards:
        """Completes the sums over rows that other ranks hold."""
        return self.history.shards

    def rows(self, index: Tensor) -> Rows:
        """The rows of the problems ``index``."""
        X, r, w = self.history.rows()
        X, r = X.reshape(self.problems, *X.shape[-2:]), r.reshape(self.problems, -1)
        w = None if w is None else w.reshape(self.problems, -1)
        if self.is_all(index):
            return Rows(X, r, w)

        def some(values: Tensor) -> Tensor:
            return tensor(array(values)[array(index)])

        # picked as they lie in memory, feature by feature
        return Rows(some(X.mT).mT, some(r), None if w is None else some(w))

    def likelihood(self, index: Tensor, ridge: Tensor | None = None) -> NegativeLogLikelihood:
        """The loss of the problems ``index``, with their ridge."""
        ridge_of = 0.0 if ridge is None else ridge[index]
        rows = self.rows(index)
        return NegativeLogLikelihood(
            self.family, *rows, regularization=ridge_of, shards=self.shards
        )

    def is_all(self, index: Tensor) -> bool:
        """Whether every problem is meant."""
        return index.shape[0] == self.problems


class CarriedMinimum:
    """``min L`` over the ball, followed through time for N problems.

    Args:
        data: the history, flattened.
        domain: the ball.
        radius: S of every problem, ``(N)``.
        tol: the minimum is certified to this.

    Attributes:
        longest: the largest |x_s| so far, ``(N)``.
        concordance: R, ``(N)``.
        passes: over the history so far, ``(N)``.
    """

    def __init__(self, data: FlatHistory, domain: Ball, radius: Tensor, tol: float) -> None:
        self.data = data
        self.domain = domain
        self.tol = tol
        self._radius = radius
        d, family = domain.dim, data.family
        self.order = choose_order(family, d, domain.max_radius)

        def per_problem(constant: Callable[[float], float]) -> Tensor:
            values = domain.constant(constant, radius)
            return values.expand(data.history.batch_shape).reshape(-1)

        self._ratio = per_problem(remainder_ratio(family, self.order))
        self.concordance = per_problem(family.self_concordance)
        self._constants = self._radius, self._ratio, self.concordance
        self._everyone = torch.arange(data.problems, device=radius.device)
        self.monomials = monomials_for(d, self.order, radius)
        self._sums = radius.new_zeros((data.problems, self.monomials.count))
        # what rounding has added to the loss and its gradient
        self._rest = radius.new_zeros((data.problems, 1 + d))
        self._point = radius.new_zeros((data.problems, d))
        self._shift = torch.zeros_like(self._point)
        self.longest = torch.zeros_like(radius)
        self.passes = torch.zeros_like(radius)

    def observe(self, X: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        """Carries the model forward by rows ``(N, k, d)``: O(k d^q)."""
        self.add(array(self.sums_at(self._point, Rows(X, r, w))), length(array(X)))

    def add(self, sums: Array, lengths: Array) -> None:
        """The same, from the derivatives of the new rows' loss at ``point`` and their lengths."""
        xp, known, rest = library(sums), array(self._sums), array(self._rest)
        first = rest.shape[-1]
        with quiet():
            low, rest = careful_sum(known[:, :first], rest, sums[:, :first])
            high = known[:, first:] + sums[:, first : known.shape[-1]]
        self._sums, self._rest = tensor(xp.concatenate([low, high], -1)), tensor(rest)
        self.longest = tensor(xp.maximum(array(self.longest), xp.amax(lengths, -1)))

    @property
    def point(self) -> Tensor:
        """Where the model is exact, ``(N, d)``."""
        return self._point

    def sums_at(self, point: Tensor, rows: Rows) -> Tensor:
        """The derivatives that the model keeps, for some rows: ``(N, count)``."""
        return derivative_sums(self.data.family, point, *rows, self.monomials)

    def model(self) -> Expansion:
        """The data's loss at the last minimiser, as the Taylor model has it."""
        jet = self.monomials.jet(array(self._sums))
        return Expansion(*(tensor(t[:, 0]) for t in jet.at(array(self._shift)[:, None])))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit."""
        names = ("_sums", "_rest", "_point", "_shift", "longest", "passes")
        return {name.lstrip("_"): getattr(self, name).clone() for name in names}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors("state['minimum']", state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self._sums, self._rest = state["sums"].clone(), state["rest"].clone()
        self._point, self._shift = state["point"].clone(), state["shift"].clone()
        self.longest, self.passes = state["longest"].clone(), state["passes"].clone()

    def find(self, ridge: Tensor) -> tuple[Array, Bracket]:
        """A point of the ball and an enclosure of the minimum, no wider than the tolerance.

        Args:
            ridge: lambda of every problem, ``(N)``; it may change between calls.
        """
        theta, bracket = self._step(self._everyone, ridge)
        if surely(bracket.high - bracket.low <= self.tol):
            return theta, bracket
        open_ = self._open(bracket)
        for _ in range(2):
            if not open_.shape[0]:
                return theta, bracket
            # move the model to its own minimum: one pass
            index = tensor(open_)
            self._recenter(index, tensor(theta[open_]))
            self._put(open_, theta, bracket, *self._step(index, ridge))
            open_ = self._open(bracket)
        if open_.shape[0]:
            found = self._from_scratch(tensor(open_), tensor(theta[open_]), ridge)
            self._put(open_, theta, bracket, *found)
        return theta, bracket

    def _open(self, bracket: Bracket) -> Array:
        """The problems whose minimum is not yet known to the tolerance."""
        return which(~(bracket.high - bracket.low <= self.tol))

    @staticmethod
    def _put(index: Array, theta: Array, bracket: Bracket, new_theta: Array, new: Bracket) -> None:
        """What is known of the problems ``index`` now, in the place of what was."""
        theta[index] = new_theta
        for old, end in zip(bracket, new, strict=True):
            old[index] = end

    def _step(self, index: Tensor, ridge: Tensor) -> tuple[Array, Bracket]:
        """One Newton step on the model, and what it certifies."""
        everyone = self.data.is_all(index)
        state = (self._sums, self._point, self._shift, ridge, self.longest, *self._constants)
        sums, c, p, lam, longest, S, ratio, concordance = (
            array(t if everyone else t[index]) for t in state
        )
        xp, jet = library(c), self.monomials.jet(sums)
        nature, carried = Nature(longest, ratio, concordance), 4.0 + len(self.data.history)
        with quiet():
            _, gradient, hessian = (t[:, 0] for t in jet.at(p[:, None]))
            theta = c + p
            loaded = not idle(lam)
            if loaded:
                gradient = gradient + lam[:, None] * theta
                hessian = add_to_diagonal(hessian, lam)
            eigenvalues, basis = xp.linalg.eigh(finite(hessian))
            before = theta
            theta = minimize_model(at_least(eigenvalues, 0.0), basis, before, gradient, S)
            q = theta - c
            value, gradient = (t[:, 0] for t in jet.slope(q[:, None]))
            if loaded:
                value = value + 0.5 * lam * dot(theta, theta)
                gradient = gradient + lam[:, None] * theta
            around = self.monomials.hessian(sums)
            local = local_square(q, around, trace(around), carried)
            distance = xp.maximum(length(p), length(q))
            error = remainder(distance, local, nature, self.order)
            moved = length(theta - before)
            bracket = certify(value, gradient, eigenvalues, basis, theta, moved, error, S, nature)
        shift = tensor(q)
        self._shift = shift if everyone else self._shift.index_copy(0, index, shift)
        return theta, bracket

    def _recenter(self, index: Tensor, theta: Tensor) -> None:
        (sums,) = self.data.shards.sum(self.sums_at(theta, self.data.rows(index)))
        self._sums = self._sums.index_copy(0, index, sums)
        self._rest = self._rest.index_fill(0, index, 0.0)
        self._point = self._point.index_copy(0, index, theta)
        self._shift = self._shift.index_fill(0, index, 0.0)
        self.passes = self.passes.index_add(0, index, torch.ones_like(theta[:, 0]))

    def _from_scratch(self, index: Tensor, start: Tensor, ridge: Tensor) -> tuple[Array, Bracket]:
        """A solve over the history, for few rows or a model that moved too far."""
        likelihood = self.data.likelihood(index, ridge)
        S = self._radius[index]
        finite = torch.where(torch.isfinite(start), start, 0.0)
        tol = 1e-10 if S.dtype == torch.float64 else 1e-5
        fit = minimize_likelihood(
            likelihood, self.domain.resized(S), start=finite, tol=tol, throw=False
        )
        self.passes = self.passes.index_add(0, index, fit.num_steps.to(ridge.dtype) + 1.0)
        self._recenter(index, fit.theta)
        gap = frank_wolfe_gap(fit.theta, fit.gradient, S)
        return array(fit.theta), Bracket(array(fit.loss - gap), array(fit.loss))
