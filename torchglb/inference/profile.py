"""Profile-likelihood intervals: for a fixed sample, and asymptotic. Not for adaptive data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy import special
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_tensor, check_choice, check_probability, check_shape
from torchglb.choices import SCALES, ScaleName
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import constrained_mle
from torchglb.optim import Status, raise_unless_converged
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History
from torchglb.ucb import SublevelProgram, support

#: a maximiser this close to the sphere, relative to S, has been stopped by it
AT_SPHERE = 1e-6


class FixedSampleInterval(NamedTuple):
    """Ends of an interval for a sample whose size and features were fixed beforehand.

    Attributes:
        lower: the lower end, ``(*B, K)``, or ``(*B)`` for one direction of each problem.
        upper: the upper end.
        estimate: at the maximum-likelihood estimate.
        cut: whether the ball, and not the likelihood, has ended the interval on either side; it
            would be longer with a larger S.

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> from torchglb.inference import profile_interval
        >>> rows = glb.Rows([[1.0], [0.5]] * 20, [1.0, 0.0] * 20)
        >>> found = profile_interval(glb.Bernoulli(), rows, [1.0], domain=glb.Ball(1, 3.0))
        >>> bool(found.lower < found.estimate < found.upper)
        True
    """

    lower: Tensor
    upper: Tensor
    estimate: Tensor
    cut: Tensor


@torch.no_grad()
def profile_interval(
    family: GLMFamily,
    history: History | Rows,
    x: ArrayLike,
    *,
    domain: Ball,
    alpha: float = 0.05,
    scale: ScaleName = "linear",
    joint: bool = False,
    tol: float | None = None,
) -> FixedSampleInterval:
    """The profile-likelihood interval of ``<x, theta>``: fixed sample, asymptotic.

    All values of ``<x, theta>`` over ``{theta : L(theta) <= L_min + q/2}``, q the 1 - alpha
    quantile of chi^2 with one degree of freedom (Wilks): the coefficients, contrasts and means that
    a likelihood-ratio test at level alpha does not reject. Invariant to reparametrisation.

    Its coverage is 1 - alpha in the limit of large samples, for each x by itself (or for all x at
    once with ``joint``), if the model is right and **the size of the sample and its features were
    fixed beforehand**. It is NOT valid for adaptively chosen features (bandits, active learning),
    nor if one looks more than once or stops when the result pleases: theta* is then outside far
    more often than alpha. Use :class:`torchglb.ConfidenceSequence` for such data.

    Args:
        family: the GLM family; its dispersion is taken as known.
        history: the observations.
        x: directions, ``(*B, d)`` or ``(*B, K, d)``; a basis vector for a coefficient.
        domain: a ball that contains theta*; S may be as large as one likes (see ``cut``).
        alpha: one minus the coverage.
        scale: ``"linear"`` for ``<x, theta>``, ``"mean"`` for ``mu(<x, theta>)``.
        joint: simultaneous for all x: the quantile of chi^2 with d degrees of freedom.
        tol: of the estimate and of the ends, as in :func:`torchglb.constrained_mle` and
            :func:`torchglb.support`, as far as the arithmetic reaches; theirs if left out.

    Raises:
        SolverError: if a bound could not be certified.

    Example:
        >>> import torchglb as glb
        >>> rewards = torch.tensor([1.0] * 14 + [0.0] * 6).double()
        >>> rows = glb.Rows(torch.ones(20, 1).double(), rewards)
        >>> found = profile_interval(
        ...     glb.Bernoulli(), rows, [1.0], domain=glb.Ball(1, 10.0), scale="mean"
        ... )
        >>> [round(float(end), 3) for end in (found.lower, found.upper)]
        [0.483, 0.868]
    """
    check_probability("alpha", alpha)
    check_choice("scale", scale, SCALES)
    likelihood = NegativeLogLikelihood.of(family, history)
    batch, d = tuple(likelihood.batch_shape), likelihood.dim
    X = likelihood.X
    arms = as_tensor("x", x, dtype=X.dtype, device=X.device)
    single = arms.ndim == len(batch) + 1
    check_shape("x", arms, (*batch, *(() if single else ("K",)), d))
    checks = ValueChecks()
    checks.finite("x", arms)
    checks.settle()
    arms = arms[..., None, :] if single else arms
    fit = constrained_mle(family, history, domain, throw=tol is None)
    if tol is not None:
        fit = constrained_mle(
            family, history, domain, start=fit.theta, tol=tol, throw=False, validate=False
        )
    quantile = float(special.chdtri(d if joint else 1, alpha))
    program = SublevelProgram(likelihood, domain, fit.loss + 0.5 * quantile)
    both = torch.cat([arms, -arms], dim=-2)
    found = support(program, both, center=fit.theta, tol=tol, throw=tol is None)
    if tol is not None:
        limit = found.status == Status.INACCURATE  # narrower than the arithmetic allows
        status = torch.where(limit, int(Status.CONVERGED), found.status)
        raise_unless_converged(status, "support")
    upper, minus_lower = found.upper.chunk(2, dim=-1)
    S = domain.radius_like(fit.loss).expand(fit.loss.shape)[..., None]
    stopped = torch.linalg.vector_norm(found.theta, dim=-1) >= S * (1.0 - AT_SPHERE)
    above, below = stopped.chunk(2, dim=-1)
    estimate = (arms * fit.theta[..., None, :]).sum(-1)
    ends = [-minus_lower, upper, estimate]
    if scale == "mean":
        ends = [family.mean(end) for end in ends]
    parts = [*ends, above | below]
    return FixedSampleInterval(*(part[..., 0] if single else part for part in parts))
