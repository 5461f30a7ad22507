"""Forgetting: old rows count less, or not at all, so that a changing theta* can be followed.

Rows get weights ``gamma^age`` or leave after n rounds. Weights in [0, 1] that do not depend on the
rewards keep the likelihood ratio of each single time below 1 on average (Jensen), but their ratios
are no martingale: validity at all times is bought time by time, with ``delta/(t (t + 1))`` for the
set after t - 1 rows, ``log(t (t + 1))`` more in the level. The statement is about a theta* that did
not change within the rows that count: a theta* that drifts adds a bias that no likelihood sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_count,
    check_probability,
    check_shape,
    refuse,
)
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.likelihood import Expansion, NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.radii import Problem, Radius, by_name
from torchglb.sets import Event, LikelihoodRatioSet

#: rows whose weight has fallen below this are let go
FAINT = 1e-6
#: the anchor moves, and its sums are computed anew by a pass, after so many rows at least and at
#: most: soon while much is learnt, and always before rounding accumulates
SOON, LATE = 16, 1024


@dataclass(frozen=True)
class Discount:
    """A row of age a has the weight ``gamma^a``; the newest has age 0.

    Args:
        gamma: in (0, 1). About 1/(1 - gamma) rows count.
    """

    gamma: float

    def __post_init__(self) -> None:
        check_probability("gamma", self.gamma)

    @property
    def memory(self) -> int:
        """How many rows are kept: the weights of all others are below 1e-6, and set to 0."""
        return max(1, math.ceil(math.log(FAINT) / math.log(self.gamma)))

    @property
    def scale(self) -> float:
        """What all weights are multiplied by when a row comes."""
        return self.gamma

    def weights(self, rows: int, like: Tensor) -> Tensor:
        """Of the last rows, the oldest first."""
        age = torch.arange(rows - 1, -1, -1, dtype=like.dtype, device=like.device)
        return torch.pow(self.gamma, age)


@dataclass(frozen=True)
class Window:
    """The last n rows count, all others do not.

    Args:
        n: at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("n", self.n, least=1)

    @property
    def memory(self) -> int:
        """n."""
        return self.n

    @property
    def scale(self) -> float:
        """Weights do not change."""
        return 1.0

    def weights(self, rows: int, like: Tensor) -> Tensor:
        """All 1."""
        return torch.ones(rows, dtype=like.dtype, device=like.device)


Forgetting = Discount | Window


class _Kept(NamedTuple):
    """All that a sequence has, replaced as a whole."""

    X: Tensor  # (*B, m, d), the rows that count, the oldest first
    r: Tensor  # (*B, m)
    time: int  # rows seen so far
    anchor: Tensor  # (*B, d)
    sums: Expansion  # the weighted loss there and its derivatives, carried
    since: int  # rows since they were computed by a pass


class ForgettingSequence:
    """Confidence sets from rows that are forgotten.

    ``P(theta* in C_t for all t) >= 1 - delta`` if theta* did not change within the rows that count
    at those times; see the module for what that costs.

    The loss at an anchor is carried forward: scaled by gamma, a new row added, a row that leaves
    subtracted. A fit starts with a Newton step from there, and so does the next anchor.

    Args:
        family: the GLM family.
        domain: the ball that contains theta*.
        delta: the failure probability.
        forgetting: ``Discount(gamma)`` or ``Window(n)``.
        radius: as in :class:`torchglb.ConfidenceSequence`; one whose level is log(1/delta) plus
            what does not depend on delta.
        batch_shape: ``*B``.
        dtype: float64 or float32.
        device: where everything lives.

    Example:
        >>> import torchglb as glb
        >>> domain = glb.Ball(2, 3.0)
        >>> sequence = ForgettingSequence(glb.Bernoulli(), domain, 0.05, Discount(0.99))
        >>> sequence.update([0.6, 0.8], 1.0)
        >>> sequence.current().contains(torch.zeros(2).double())
        tensor(True)
    """

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float,
        forgetting: Forgetting,
        radius: str | Radius = "pac-bayes",
        batch_shape: tuple[int, ...] = (),
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(forgetting, Discount | Window):
            raise refuse("forgetting", "Discount(gamma) or Window(n)", repr(forgetting))
        self.family, self.domain, self.delta, self.forgetting = family, domain, delta, forgetting
        self.radius = by_name(radius) if isinstance(radius, str) else radius
        if not isinstance(self.radius, Radius) or not self.radius.confined:
            raise refuse("radius", "a name or a Radius that keeps to the ball", repr(radius))
        self._problem = Problem(family, domain, delta, batch_shape, dtype, device)
        self.batch_shape = torch.Size(batch_shape)
        self.event = Event(delta)
        X = torch.zeros((*batch_shape, 0, domain.dim), dtype=dtype, device=device)
        zero = torch.zeros((*batch_shape, domain.dim), dtype=dtype, device=device)
        sums = Expansion(zero[..., 0].clone(), zero.clone(), zero[..., None] * zero[..., None, :])
        self._kept = _Kept(X, X[..., 0], 0, zero, sums, 0)
        self._fresh: LikelihoodRatioSet | None = None

    def __len__(self) -> int:
        """The number of rows so far, forgotten ones included."""
        return self._kept.time

    # ---- rows ----------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, x: Any, r: Any) -> None:
        """Adds one row, ``x (*B, d)``, or k in their order, ``x (*B, k, d)``.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        kept = self._kept
        x = as_tensor("x", x, dtype=kept.X.dtype, device=kept.X.device)
        r = as_tensor("r", r, dtype=kept.X.dtype, device=kept.X.device)
        batch, d = self.batch_shape, self.domain.dim
        if x.ndim == len(batch) + 1:
            x, r = x[..., None, :], r[..., None]
        check_shape("x", x, (*batch, "k", d))
        check_shape("r", r, (*batch, x.shape[-2]))
        checks = ValueChecks()
        checks.finite("x", x)
        longest = 1.0 + 64 * torch.finfo(x.dtype).eps
        norm = torch.linalg.vector_norm(x, dim=-1)
        checks.within("x", norm, 0.0, longest, lambda: "rows of norm at most 1")
        self.family.require_rewards(checks, r)
        checks.settle()
        for i in range(x.shape[-2]):
            kept = self._with(kept, x[..., i : i + 1, :], r[..., i : i + 1])
        self._kept, self._fresh = kept, None

    def _with(self, kept: _Kept, x: Tensor, r: Tensor) -> _Kept:
        """With one more row: everything is scaled, it is added, and the oldest may leave."""
        forgetting, memory = self.forgetting, self.forgetting.memory
        sums = _combined(kept.sums, forgetting.scale, self._at(kept.anchor, x, r), 1.0)
        X, rewards = torch.cat([kept.X, x], -2), torch.cat([kept.r, r], -1)
        if X.shape[-2] > memory:
            old = self._at(kept.anchor, X[..., :1, :], rewards[..., :1])
            sums = _combined(sums, 1.0, old, -(forgetting.scale**memory))
            X, rewards = X[..., 1:, :], rewards[..., 1:]
        kept = _Kept(X, rewards, kept.time + 1, kept.anchor, sums, kept.since + 1)
        due = min(max(kept.time - kept.since, SOON), LATE)
        return self._rebuilt(kept) if kept.since >= due else kept

    def _at(self, anchor: Tensor, X: Tensor, r: Tensor) -> Expansion:
        return NegativeLogLikelihood(self.family, X, r).expand(anchor)

    def _rebuilt(self, kept: _Kept) -> _Kept:
        """With the anchor at what its sums take for the minimum: a function of the rows alone."""
        anchor = self._start(kept)
        return kept._replace(anchor=anchor, sums=self._loss(kept).expand(anchor), since=0)

    def _loss(self, kept: _Kept) -> NegativeLogLikelihood:
        w = self.forgetting.weights(kept.X.shape[-2], kept.X).expand(kept.r.shape)
        return NegativeLogLikelihood(self.family, kept.X, kept.r, w)

    @property
    def anchor(self) -> Tensor:
        """Where the loss is carried, ``(*B, d)``."""
        return self._kept.anchor

    def carried(self) -> Expansion:
        """The weighted loss at the anchor and its derivatives, as carried."""
        return self._kept.sums

    def likelihood(self) -> NegativeLogLikelihood:
        """The weighted loss of the rows that count."""
        return self._loss(self._kept)

    # ---- the set -------------------------------------------------------------------------

    @torch.no_grad()
    def current(self) -> LikelihoodRatioSet:
        """The set now: an immutable snapshot. Costs a fit and the passes of the radius."""
        if self._fresh is not None:
            return self._fresh
        kept = self._kept
        loss = self._loss(kept)
        fit = minimize_likelihood(loss, self.domain, start=self._start(kept), loss_only=True)
        problem = self._problem
        state = self.radius.update(problem, self.radius.init(problem), kept.X, kept.r, loss.w)
        found = self.radius.evaluate(problem, state, loss, fit.estimate())
        if found.delta_lipschitz:
            raise refuse("radius", "one that spends all of delta on the likelihood", self.radius)
        time = kept.time + 1
        level = found.level + math.log(time * (time + 1.0))
        region = LikelihoodRatioSet(loss, self.domain, level, fit.theta, True, self.event)
        self._fresh = region
        return region

    def confidence_set(self) -> LikelihoodRatioSet:
        """The same, under the name that policies have for it."""
        return self.current()

    def _start(self, kept: _Kept) -> Tensor:
        """A Newton step from the carried sums, drawn into the ball; the anchor where that fails."""
        eye = torch.eye(self.domain.dim, dtype=kept.X.dtype, device=kept.X.device)
        S = self.domain.radius_like(kept.X).expand(self.batch_shape)
        matrix = kept.sums.hessian + eye / S.square()[..., None, None]
        factor, failed = torch.linalg.cholesky_ex(matrix)
        step = torch.cholesky_solve(kept.sums.gradient[..., None], factor)[..., 0]
        theta = kept.anchor - torch.where((failed == 0)[..., None], step, 0.0)
        theta = torch.where(torch.isfinite(theta).all(-1, keepdim=True), theta, kept.anchor)
        return self.domain.project(theta)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit."""
        kept = self._kept
        return {
            "forgetting": repr(self.forgetting),
            "X": kept.X.clone(),
            "r": kept.r.clone(),
            "time": kept.time,
            "anchor": kept.anchor.clone(),
            "sums": [part.clone() for part in kept.sums],
            "since": kept.since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another kind."""
        mine = self.state_dict()
        if missing := set(mine) - set(state):
            raise refuse("state", "the entries of state_dict()", f"no {sorted(missing)}")
        if state["forgetting"] != mine["forgetting"]:
            raise refuse("state['forgetting']", mine["forgetting"], state["forgetting"])
        batch, d = self.batch_shape, self.domain.dim
        check_shape("state['X']", state["X"], (*batch, "m", d))
        check_shape("state['r']", state["r"], (*batch, state["X"].shape[-2]))
        check_shape("state['anchor']", state["anchor"], (*batch, d))
        sums = Expansion(*(part.clone() for part in state["sums"]))
        tensors = (state["X"].clone(), state["r"].clone())
        time, since = check_count("state['time']", state["time"]), int(state["since"])
        self._kept = _Kept(*tensors, time, state["anchor"].clone(), sums, since)
        self._fresh = None


def _combined(first: Expansion, scale: float, second: Expansion, weight: float) -> Expansion:
    pairs = zip(first, second, strict=True)
    return Expansion(*(scale * one + weight * other for one, other in pairs))
