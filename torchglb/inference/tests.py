"""E-values and anytime-valid p-values for linear hypotheses about theta*.

Every likelihood-ratio set is ``{theta : L(theta) <= log(1/delta) + K_t}``, where K_t, the
divergence and the mean loss of a posterior (or a mixture itself), does not depend on delta, and
where ``exp(L_t(theta) - K_t)`` is at most a martingale of mean 1 if theta* = theta. For a null
hypothesis H0, a set of parameters,

    ``log E_t = min of L_t over H0 and the ball  -  K_t``

is below that martingale whichever theta of H0 is the true one. So by Ville's inequality
``P(E_t >= 1/alpha for some t) <= alpha`` under H0, however the features were chosen and whenever
one looks: E_t is an e-value at every stopping time, and ``1/max_{s <= t} E_s`` is a p-value that
is valid at all times. The minimum over H0 is replaced by a certified lower bound, so E_t errs
downwards only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_choice,
    check_entries,
    check_probability,
    check_shape,
    refuse,
)
from torchglb.choices import RELATIONS, Relation
from torchglb.domain import Ball
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim import Derivatives, frank_wolfe_gap, newton
from torchglb.rounding import EVALUATION, power_of_two, round_up
from torchglb.turns import TakesTurns


@dataclass(frozen=True)
class TestResult:
    """A test of one null hypothesis for each element of the batch.

    Attributes:
        log_e: ``(*B)``, the logarithm of the e-value; ``inf`` where no point of the ball is in H0.
        p: ``(*B)``, ``min(1, 1/E)``; of a :class:`RunningTest` with the largest E so far.
        theta: ``(*B, d)``, where the loss is (almost) least over H0; NaN where H0 is empty.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> found = sequence.current().test([0.0, 1.0], 0.0)
        >>> bool(found.p <= 1.0), found.theta.shape
        (True, torch.Size([2]))
    """

    __test__ = False  # not a class of tests

    log_e: Tensor
    p: Tensor
    theta: Tensor


def anytime_p(log_e: Tensor) -> Tensor:
    """``min(1, exp(-log_e))``, rounded upwards: 0 for an infinite e-value alone."""
    exact = torch.exp(-(log_e.double() if log_e.is_cpu else log_e).clamp_min(0.0))
    p = exact * (1.0 + EVALUATION * torch.finfo(exact.dtype).eps)
    # below the least normal number an exponential has few digits, or none
    p = round_up(p.clamp(torch.finfo(log_e.dtype).tiny, 1.0), log_e.dtype)
    return torch.where(torch.isposinf(log_e), 0.0, p)


@torch.no_grad()
def likelihood_ratio_test(
    likelihood: NegativeLogLikelihood,
    domain: Ball,
    evidence: Tensor,
    A: ArrayLike,
    b: ArrayLike,
    relation: Relation = "==",
    *,
    theta_hat: Tensor,
) -> TestResult:
    """Tests ``A theta* = b``, or ``<a, theta*> <= b``, or ``<a, theta*> >= b``.

    A subspace is parametrised by ``theta = theta_0 + N y`` with theta_0 its shortest point and N an
    orthonormal basis of the null space of A: a convex problem over the ball ``|y|^2 <= S^2 -
    |theta_0|^2``, whose Frank-Wolfe gap certifies the minimum. Over a half-space the minimum is
    that over its boundary, if theta_hat is outside: for theta' inside let p be where the way from
    theta_hat crosses the boundary; L is convex, so ``L(p) >= L(theta_hat)`` implies ``L(theta') >=
    L(p)``. Otherwise the certified minimum over the whole ball is taken.

    Args:
        likelihood: the loss L.
        domain: the ball that contains theta*.
        evidence: K_t, ``(*B)``: the level of a likelihood-ratio set less ``log(1/delta)``.
        A: ``(k, d)`` or ``(*B, k, d)``, of full rank; a vector ``(d,)`` for k = 1.
        b: ``(k,)`` or ``(*B, k)``; a number for k = 1.
        relation: ``"=="``, or ``"<="`` and ``">="`` for k = 1.
        theta_hat: a minimiser of L over the ball, ``(*B, d)``; the better, the larger E.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.6, 0.8]] * 20, [1.0, 0.0] * 20)
        >>> region = sequence.current()
        >>> evidence = region.likelihood(region.center)
        >>> given = (region.likelihood, region.domain, evidence, [[0.0, 1.0]], [0.0])
        >>> likelihood_ratio_test(*given, theta_hat=region.center).p
        tensor(3.2386e-08, dtype=torch.float64)
    """
    check_choice("relation", relation, RELATIONS)
    A, b = _hypothesis(likelihood, A, b, relation)
    S = domain.radius_like(evidence).expand(evidence.shape)
    plane = _subspace_minimum(likelihood, A, b, S, theta_hat)
    lower, theta = plane.lower, plane.theta
    if relation != "==":
        sign = 1.0 if relation == "<=" else -1.0
        room = sign * (b[..., 0] - (A[..., 0, :] * theta_hat).sum(-1))  # >= 0 in the half-space
        whole, loss, error = _certified(likelihood, theta_hat, S)
        # beyond the ball the boundary says nothing: all of the ball is in H0, or nothing
        everything = plane.empty & (sign * b[..., 0] > 0)
        nothing = plane.empty & ~everything
        length = torch.linalg.vector_norm(A[..., 0, :], dim=-1)
        surely_outside = room < -16.0 * A.shape[-1] * torch.finfo(S.dtype).eps * S * length
        use = nothing | (~plane.empty & surely_outside & (lower >= loss + error))
        lower = torch.where(use, lower, whole)
        theta = torch.where(use[..., None], theta, theta_hat)
    # one more rounding of the difference
    eps = torch.finfo(lower.dtype).eps
    finite = torch.isfinite(lower)
    size = torch.where(finite, lower.abs(), 0.0) + evidence.abs()
    log_e = lower - evidence - 2.0 * eps * size
    return TestResult(log_e, anytime_p(log_e), theta)


class _Minimum(NamedTuple):
    lower: Tensor  # (*B), of the loss over H0 and the ball; inf where both have nothing in common
    theta: Tensor  # (*B, d)
    empty: Tensor  # (*B)


def _hypothesis(
    likelihood: NegativeLogLikelihood, A: ArrayLike, b: ArrayLike, relation: Relation
) -> tuple[Tensor, Tensor]:
    """A ``(*B, k, d)`` and b ``(*B, k)``, checked."""
    X = likelihood.X
    batch, d = tuple(likelihood.batch_shape), likelihood.dim
    A = as_tensor("A", A, dtype=X.dtype, device=X.device)
    b = as_tensor("b", b, dtype=X.dtype, device=X.device)
    if A.ndim == 1:
        A, b = A[None], b[..., None]
    check_shape("A", A, ((*batch, "k", d) if A.ndim > 2 else ("k", d)))
    k = A.shape[-2]
    check_shape("b", b, ((*batch, k) if b.ndim > 1 else (k,)))
    if not 1 <= k <= d:
        raise refuse("A", f"1 to {d} rows", f"{k}")
    if relation != "==" and k != 1:
        raise refuse("A", f"one row for the relation {relation!r}", f"{k}")
    A, b = A.expand(*batch, k, d), b.expand(*batch, k)
    checks = ValueChecks()
    checks.finite("A", A)
    checks.finite("b", b)
    checks.settle()
    scale = power_of_two(A)  # rows of about one length: the condition is then that of their angles
    A, b = A / scale, b / scale[..., 0]
    singular = torch.linalg.svdvals(A)
    limit = d * torch.finfo(X.dtype).eps * singular[..., 0]
    checks.require("A", singular[..., -1] > limit, "rows that are independent", singular[..., -1])
    checks.settle()
    return A, b


def _subspace_minimum(
    likelihood: NegativeLogLikelihood, A: Tensor, b: Tensor, S: Tensor, theta_hat: Tensor
) -> _Minimum:
    k, d = A.shape[-2:]
    left, values, basis = torch.linalg.svd(A, full_matrices=True)
    across, along = basis[..., :k, :], basis[..., k:, :].mT  # (*B, k, d) and N, (*B, d, d - k)
    coordinates = (left.mT @ b[..., None])[..., 0] / values
    origin = (coordinates[..., None, :] @ across)[..., 0, :]  # theta_0
    eps = torch.finfo(S.dtype).eps
    # of the computed subspace, relative to its distance from 0: so far from H0 may it lie
    slip = 32.0 * d * eps * values[..., 0] / (values[..., -1] - d * eps * values[..., 0])
    # rounded up: a larger ball has a smaller minimum
    far = origin.square().sum(-1)
    room = S.square() - far + (16.0 * d * eps * S.square() + slip * far)
    empty = room < 0
    origin = torch.where(empty[..., None], 0.0, origin)  # any point will do
    if k == d:
        at, errors = likelihood.expand_with_errors(origin)
        off = _misplaced(origin, at.gradient, errors.gradient, S, slip)
        lower = at.loss - errors.loss - off
    else:
        radius = torch.where(empty, S, room.clamp_min(0.0).sqrt())

        def lift(y: Tensor) -> Tensor:
            return origin + (along @ y[..., None])[..., 0]

        def evaluate(y: Tensor) -> Derivatives:
            loss, gradient, hessian = likelihood.expand(lift(y))
            reduced = (along.mT @ gradient[..., None])[..., 0]
            return Derivatives(loss, reduced, along.mT @ hessian @ along)

        start = (along.mT @ (theta_hat - origin)[..., None])[..., 0]
        length = torch.linalg.vector_norm(start, dim=-1, keepdim=True)
        inside = (radius[..., None] / length.clamp_min(torch.finfo(S.dtype).tiny)).clamp_max(1.0)
        tol = 1e-10 if S.dtype == torch.float64 else 1e-5
        found, _ = newton(evaluate, inside * start, radius, tol=tol)
        theta = lift(found.point)
        at, errors = likelihood.expand_with_errors(theta)
        reduced = (along.mT @ at.gradient[..., None])[..., 0]
        gap = frank_wolfe_gap(found.point, reduced, radius) * (1.0 + 32.0 * d * eps)
        off = _misplaced(theta, at.gradient, errors.gradient, S, slip)
        lower = at.loss - errors.loss - gap - off
        origin = theta
    lower = torch.where(empty, torch.inf, lower)
    return _Minimum(lower, torch.where(empty[..., None], torch.nan, origin), empty)


def _misplaced(
    theta: Tensor, gradient: Tensor, error: Tensor, S: Tensor, slip: float | Tensor
) -> Tensor:
    """What a point beside H0, by a share of its length, and an inexact gradient do to a tangent.

    The share is about eps times the condition of A: that of a subspace found by its SVD.
    """
    reach = torch.maximum(S, torch.linalg.vector_norm(theta, dim=-1))
    return 2.0 * reach * (error + slip * torch.linalg.vector_norm(gradient, dim=-1))


def _certified(
    likelihood: NegativeLogLikelihood, theta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A lower bound on the minimum over the ball; the loss at theta, and its rounding error."""
    at, errors = likelihood.expand_with_errors(theta)
    gap = frank_wolfe_gap(theta, at.gradient, S)
    slip = 32.0 * theta.shape[-1] * torch.finfo(S.dtype).eps
    lower = at.loss - errors.loss - gap - _misplaced(theta, at.gradient, errors.gradient, S, slip)
    return lower, at.loss, errors.loss


# ---- over time -----------------------------------------------------------------------------------


class Sequence(Protocol):
    """What has a set that tests hypotheses at every time."""

    def current(self) -> Any:
        """The set now."""


class RunningTest(TakesTurns):
    """One hypothesis, looked at again and again; p counts the largest e-value so far.

    Args:
        sequence: a :class:`torchglb.ConfidenceSequence` of likelihood-ratio sets.
        A: as in :func:`likelihood_ratio_test`.
        b: the same.
        relation: the same.

    Example:
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> running = RunningTest(sequence, [1.0, 0.0], 0.0, "<=")
        >>> sequence.update([[1.0, 0.0]] * 40, [1.0] * 36 + [0.0] * 4)
        >>> bool(running.look().p < 0.01)
        True
    """

    in_turn = ("look", "state_dict", "load_state_dict")

    def __init__(
        self, sequence: Sequence, A: ArrayLike, b: ArrayLike, relation: Relation = "=="
    ) -> None:
        self.sequence, self.A, self.b = sequence, A, b
        self.relation = check_choice("relation", relation, RELATIONS)
        self._best: Tensor | None = None

    def look(self) -> TestResult:
        """The e-value now, and the p-value of all looks so far."""
        now: TestResult = self.sequence.current().test(self.A, self.b, self.relation)
        best = now.log_e if self._best is None else torch.maximum(self._best, now.log_e)
        self._best = best
        return TestResult(now.log_e, anytime_p(best), now.theta)

    def state_dict(self) -> dict[str, Any]:
        """The largest e-value so far."""
        return {"best": None if self._best is None else self._best.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        check_entries("state", state, ("best",))
        best = state["best"]
        self._best = None if best is None else best.clone()


def e_bh(log_e: Tensor, alpha: float) -> Tensor:
    """Which of m hypotheses to reject, with a false discovery rate of at most alpha (e-BH).

    With ``e_(1) >= e_(2) >= ...`` the largest k with ``e_(k) >= m/(alpha k)`` are rejected (Wang
    and Ramdas 2022). The e-values may depend on each other in any way.

    Args:
        log_e: logarithms of the e-values, ``(*, m)``.
        alpha: the false discovery rate.

    Returns:
        Booleans ``(*, m)``.

    Example:
        >>> e_bh(torch.tensor([5.0, 0.0, 4.0]), alpha=0.1)
        tensor([ True, False,  True])
    """
    check_probability("alpha", alpha)
    if not isinstance(log_e, Tensor) or log_e.ndim < 1 or not log_e.is_floating_point():
        got = getattr(log_e, "shape", type(log_e).__name__)
        raise refuse("log_e", "a floating-point tensor (*, m)", got)
    checks = ValueChecks()
    checks.require("log_e", ~torch.isnan(log_e), "numbers", log_e)
    checks.settle()
    m = log_e.shape[-1]
    ordered = log_e.sort(dim=-1, descending=True).values
    rank = torch.arange(1, m + 1, dtype=log_e.dtype, device=log_e.device)
    enough = ordered >= (m / (alpha * rank)).log()
    # all up to the last one that is enough
    count = torch.where(enough, rank, 0.0).amax(-1, keepdim=True) if m else rank
    return (log_e >= (m / (alpha * count.clamp_min(1.0))).log()) & (count > 0)
