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
    array,
    at_least,
    finite,
    length,
    library,
    quiet,
    tensor,
    which,
)
from torchglb.checks import check_tensors, refuse
from torchglb.distributed import Shards
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.history import History, Rows
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim.ball import frank_wolfe_gap, minimize_model
from torchglb.ucb.taylor import (
    Bracket,
    Nature,
    add_to_diagonal,
    certify,
    choose_order,
    derivative_sums,
    evaluate_model,
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
        # picked as they lie in memory, feature by feature
        return Rows(X.mT[index].mT, r[index], None if w is None else w[index])

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
        self._everyone = torch.arange(data.problems, device=radius.device)
        self._sums = [radius.new_zeros((data.problems, d**k)) for k in range(self.order + 1)]
        self._point = radius.new_zeros((data.problems, d))
        self._shift = torch.zeros_like(self._point)
        self.longest = torch.zeros_like(radius)
        self.passes = torch.zeros_like(radius)

    def observe(self, X: Tensor, r: Tensor, w: Tensor | None = None) -> None:
        """Carries the model forward by rows ``(N, k, d)``: O(k d^q)."""
        rows, longest = array(X), array(self.longest)
        xp = library(rows)
        self.longest = tensor(xp.maximum(longest, xp.amax(length(rows), -1)))
        added = derivative_sums(self.data.family, self._point, X, r, w, self.order)
        self._sums = [old + more for old, more in zip(self._sums, added, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit."""
        names = ("_point", "_shift", "longest", "passes")
        return {"sums": [t.clone() for t in self._sums]} | {
            name.lstrip("_"): getattr(self, name).clone() for name in names
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        mine = self.state_dict()
        if missing := sorted(set(mine) - set(state)):
            raise refuse("state['minimum']", f"the entries {sorted(mine)}", f"no {missing}")
        orders = [str(k) for k in range(len(mine["sums"]))]
        if len(state["sums"]) != len(orders):
            expected = f"derivatives of {len(orders)} orders"
            raise refuse("state['minimum']['sums']", expected, f"{len(state['sums'])}")
        given = dict(zip(orders, state["sums"], strict=True))
        check_tensors(
            "state['minimum']['sums']", given, dict(zip(orders, mine.pop("sums"), strict=True))
        )
        check_tensors("state['minimum']", state, mine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self._sums = [t.clone() for t in state["sums"]]
        self._point, self._shift = state["point"].clone(), state["shift"].clone()
        self.longest, self.passes = state["longest"].clone(), state["passes"].clone()

    def find(self, ridge: Tensor) -> tuple[Tensor, Bracket]:
        """A point of the ball and an enclosure of the minimum, no wider than the tolerance.

        Args:
            ridge: lambda of every problem, ``(N)``; it may change between calls.
        """
        theta, bracket = self._step(self._everyone, ridge)
        open_ = self._open(bracket)
        for _ in range(2):
            if not open_.numel():
                break
            # move the model to its own minimum: one pass
            self._recenter(open_, theta[open_])
            theta, bracket = self._merge(open_, theta, bracket, *self._step(open_, ridge))
            open_ = self._open(bracket)
        if open_.numel():
            theta, bracket = self._merge(
                open_, theta, bracket, *self._from_scratch(open_, theta[open_], ridge)
            )
        return theta, bracket

    def _open(self, bracket: Bracket) -> Tensor:
        """The problems whose minimum is not yet known to the tolerance."""
        return tensor(which(~(array(bracket.high) - array(bracket.low) <= self.tol)))

    def _step(self, index: Tensor, ridge: Tensor) -> tuple[Tensor, Bracket]:
        """One Newton step on the model, and what it certifies."""
        everyone = self.data.is_all(index)
        state = (
            self._point,
            self._shift,
            ridge,
            self._radius,
            self.longest,
            self._ratio,
            self.concordance,
            *self._sums,
        )
        c, p, lam, S, *constants = (array(t if everyone else t[index]) for t in state)
        nature, sums = Nature(*constants[:3]), constants[3:]
        xp, d = library(c), c.shape[-1]
        with quiet():
            model = evaluate_model(sums, p)
            gradient = model.gradient + lam[:, None] * (c + p)
            hessian = add_to_diagonal(model.hessian, lam)
            curved, turn = xp.linalg.eigh(finite(hessian))
            theta = minimize_model(at_least(curved, 0.0), turn, c + p, gradient, S)
            p = theta - c
            model = evaluate_model(sums, p)
            eigenvalues, basis = xp.linalg.eigh(finite(sums[2].reshape(-1, d, d)))
            bracket = certify(
                model,
                eigenvalues,
                basis,
                theta,
                p,
                lam,
                S,
                nature,
                self.order,
                4.0 + len(self.data.history),
            )
        shift = tensor(p)
        self._shift = shift if everyone else self._shift.index_copy(0, index, shift)
        return tensor(theta), Bracket(*(tensor(end) for end in bracket))

    def _recenter(self, index: Tensor, theta: Tensor) -> None:
        rows = self.data.rows(index)
        here = derivative_sums(self.data.family, theta, *rows, self.order)
        sums = self.data.shards.sum(*here)
        self._sums = [
            old.index_copy(0, index, new) for old, new in zip(self._sums, sums, strict=True)
        ]
        self._point = self._point.index_copy(0, index, theta)
        self._shift = self._shift.index_fill(0, index, 0.0)
        self.passes = self.passes.index_add(0, index, torch.ones_like(theta[:, 0]))

    def _from_scratch(self, index: Tensor, start: Tensor, ridge: Tensor) -> tuple[Tensor, Bracket]:
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
        return fit.theta, Bracket(fit.loss - gap, fit.loss)

    @staticmethod
    def _merge(
        index: Tensor, theta: Tensor, bracket: Bracket, new_theta: Tensor, new: Bracket
    ) -> tuple[Tensor, Bracket]:
        theta = theta.index_copy(0, index, new_theta)
        low, high = (a.index_copy(0, index, b) for a, b in zip(bracket, new, strict=True))
        return theta, Bracket(low, high)
