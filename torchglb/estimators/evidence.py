"""E-values without a ball: the least loss over an affine subspace of R^d, certified.

For a prior that covers all of R^d the null hypothesis ``A theta = b`` is the whole subspace. At a
point of it with gradient g and Hessian H along the subspace, rows of length at most 1, and
``|m'''| <= R m''``, a step v along it changes the loss by at least (MATH 3.3)

    ``-|g| |v| + lam_min(H) |v|^2 phi(R |v|)``,   ``phi(D) = (D - 1 + e^-D)/D^2``.

Where that is not negative on a sphere ``|v| = rho``, the least loss lies within it, by convexity,
and is at least ``L - |g| rho``. Where the Hessian shows no such sphere (separated data), every
row is given its own best mean, which no parameter beats.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchglb.checks import refuse
from torchglb.choices import Relation
from torchglb.families import Binomial, Gaussian, Poisson, has_formulas_of
from torchglb.inference.tests import TestResult, anytime_p
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rows.sums import Expansion

STEPS = 60
#: rows that are summed at a time
PART = 1 << 15
#: a minimum is near enough if a quadratic model promises less than this
ENOUGH = 1e-11


def phi(D: float) -> float:
    """``(D - 1 + e^-D)/D^2``, 1/2 at 0; from below."""
    if D < 1e-3:
        return 0.5 - D / 6.0
    return (D - 1.0 + math.exp(-D)) / D**2


def whole_space_test(
    likelihood: NegativeLogLikelihood,
    evidence: float,
    A: np.ndarray,
    b: np.ndarray,
    *,
    theta_hat: Tensor,
    hessian_hat: Tensor | None = None,
    relation: Relation = "==",
) -> TestResult:
    """Tests ``A theta* = b``, or one inequality, without a bound on theta*.

    Args:
        likelihood: the loss of one problem (no batch), rows of length at most 1.
        evidence: the level of an unconfined likelihood-ratio set less ``log(1/delta)``.
        A: ``(k, d)`` of full rank.
        b: ``(k,)``.
        theta_hat: about the minimiser of the loss, ``(d,)``.
        hessian_hat: of the loss there, if known.
        relation: ``"=="``, or ``"<="`` and ``">="`` for k = 1.
    """
    if np.linalg.matrix_rank(A) < len(A):
        raise refuse("test", "sums of coefficients that are independent, and not 0", A.tolist())
    lower, theta = subspace_minimum(likelihood, A, b, theta_hat, hessian_hat)
    if relation != "==":
        sign = 1.0 if relation == "<=" else -1.0
        room = sign * (float(b[0]) - float(A[0] @ theta_hat.numpy()))
        everywhere, _ = subspace_minimum(likelihood, A[:0], b[:0], theta_hat)
        at_hat = float(likelihood.value(theta_hat))
        # with theta_hat outside the half-space its minimum is on the boundary
        outside = room < 0 and lower >= at_hat + 1e-12 * abs(at_hat)
        lower = lower if outside else everywhere
    value = lower - evidence - 1e-15 * (abs(evidence) + (abs(lower) if lower > -math.inf else 0.0))
    log_e = torch.tensor(value, dtype=torch.float64)
    return TestResult(log_e, anytime_p(log_e), theta)


def parts_of(likelihood: NegativeLogLikelihood) -> list[NegativeLogLikelihood]:
    """The loss as a sum over blocks of rows, whose numbers stay in the cache; itself if few."""
    n = len(likelihood.r)
    if n <= PART or likelihood.is_ridged or likelihood.tilt is not None:
        return [likelihood]
    return [
        likelihood.rebuild([t[first : first + PART] for t in likelihood.tensors()])
        for first in range(0, n, PART)
    ]


def expand(likelihood: NegativeLogLikelihood, theta: Tensor) -> Expansion:
    """Loss, gradient and Hessian of one problem, summed part by part."""
    found = [part.expand(theta) for part in parts_of(likelihood)]
    return Expansion(*(torch.stack(terms).sum(0) for terms in zip(*found, strict=True)))


def expand_with_errors(
    likelihood: NegativeLogLikelihood, theta: Tensor
) -> tuple[Expansion, float, float]:
    """The same, and bounds on the errors of the loss and of the gradient."""
    found = [part.expand_with_errors(theta) for part in parts_of(likelihood)]
    at = Expansion(
        *(torch.stack(terms).sum(0) for terms in zip(*(f[0] for f in found), strict=True))
    )
    eps = len(found) * torch.finfo(torch.float64).eps
    loss = sum(float(errors.loss + eps * part.loss.abs()) for part, errors in found)
    slope = sum(float(errors.gradient + eps * part.gradient.norm()) for part, errors in found)
    return at, loss, slope


def subspace_minimum(
    likelihood: NegativeLogLikelihood,
    A: np.ndarray,
    b: np.ndarray,
    start: Tensor,
    hessian: Tensor | None = None,
) -> tuple[float, Tensor]:
    """A lower bound of the least loss over ``A theta = b``, and about where it is.

    Newton's method from the point of the subspace that is nearest to a start: one pass per step,
    and one for the certificate. What is left to gain where it stops, :data:`ENOUGH`, lowers the
    bound.

    Args:
        likelihood: the loss of one problem, rows of length at most 1.
        A: ``(k, d)`` of full rank, k >= 0.
        b: ``(k,)``.
        start: ``(d,)``.
        hessian: of the loss there, if known.
    """
    theta, along, condition = _onto(likelihood, A, b, start, hessian)
    if not along.shape[1]:
        return _certified(likelihood, theta, along, condition), theta
    here = expand(likelihood, theta)
    for _ in range(STEPS):
        slope = along.mT @ here.gradient
        curve = along.mT @ here.hessian @ along
        step = -torch.linalg.lstsq(curve, slope[:, None], driver="gelsd").solution[:, 0]
        gain = float(-(slope @ step))
        if gain <= ENOUGH:
            break
        size = 1.0
        while size > 1e-6:
            moved = theta + size * (along @ step)
            there = expand(likelihood, moved)
            if float(there.loss) < float(here.loss) - 1e-4 * size * gain:
                break
            size *= 0.5
        else:  # no more to gain than rounding shows
            break
        theta, here = moved, there
    found = _certified(likelihood, theta, along, condition)
    return (found if found > -math.inf else saturated(likelihood)), theta


def _onto(
    likelihood: NegativeLogLikelihood,
    A: np.ndarray,
    b: np.ndarray,
    start: Tensor,
    hessian: Tensor | None,
) -> tuple[Tensor, Tensor, float]:
    """The point of the subspace nearest to a start in the Hessian's metric, and its directions.

    And the condition of A: so many roundings may the point lie beside the subspace.
    """
    d, k = likelihood.dim, len(A)
    eye = torch.eye(d, dtype=torch.float64)
    if not k:
        return start, eye, 1.0
    given, values = torch.from_numpy(np.asarray(A, float)), torch.from_numpy(np.asarray(b, float))
    left, singular, basis = torch.linalg.svd(given, full_matrices=True)
    rows, target = basis[:k], (left.mT @ values) / singular  # orthonormal
    hessian = expand(likelihood, start).hessian if hessian is None else hessian
    # without rows that count the Hessian is 0: the plain metric, whose inverse is still a number
    metric = hessian + 1e-10 * (torch.diagonal(hessian).mean() + 1e-100) * eye
    way = torch.linalg.solve(metric, rows.mT)  # (d, k)
    theta = start - way @ torch.linalg.solve(rows @ way, rows @ start - target)
    # once more in the plain metric: the subspace is met to rounding
    theta = theta - rows.mT @ (rows @ theta - target)
    return theta, basis[k:].mT, float(singular[0] / singular[-1])


def _certified(
    likelihood: NegativeLogLikelihood, theta: Tensor, along: Tensor, condition: float
) -> float:
    at, lost, lost_slope = expand_with_errors(likelihood, theta)
    eps, d = torch.finfo(torch.float64).eps, likelihood.dim
    size = float(torch.linalg.vector_norm(theta)) + 1.0
    # some roundings beside the subspace
    off = 64.0 * d * eps * condition * size * float(torch.linalg.vector_norm(at.gradient))
    floor = float(at.loss) - lost - off
    if not along.shape[1]:
        return floor
    steepness = float(torch.linalg.vector_norm(along.mT @ at.gradient)) + lost_slope
    values = torch.linalg.eigvalsh(along.mT @ at.hessian @ along)
    lam = float(values[0]) - 1e-12 * float(values[-1])
    if lam <= 0:
        return -math.inf
    rho = 2.0 * steepness / lam
    for _ in range(60):
        if rho > 50.0:
            break
        R = likelihood.family.self_concordance(size + rho)
        if lam * rho * phi(R * rho) >= steepness:
            return floor - steepness * rho
        rho *= 1.25
    return -math.inf


def saturated(likelihood: NegativeLogLikelihood) -> float:
    """``sum_s w_s min_z (m(z) - r_s z)/g``, rounded down: no parameter has a smaller loss."""
    family, r = likelihood.family, likelihood.r
    if has_formulas_of(family, Gaussian):
        each = -0.5 * r.square()
    elif has_formulas_of(family, Poisson):
        each = r - torch.xlogy(r, r)
    elif has_formulas_of(family, Binomial):
        p = r / family.trials
        each = -family.trials * (torch.xlogy(p, p) + torch.xlogy(1.0 - p, 1.0 - p))
    else:
        return -math.inf
    each = each / family.dispersion
    each = each if likelihood.w is None else each * likelihood.w
    total = float(each.sum())
    return total - 1e-12 * float(each.abs().sum())
