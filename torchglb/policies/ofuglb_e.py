"""OFUGLB-e (Lee, Yun, Jun, NeurIPS 2024): the bonus of the ellipsoid around the MLE, closed form.

``argmax_x <x, theta_hat> + sqrt(gamma) |x| in (H + lambda I)^-1``

theta_hat minimises the loss over ``|theta| <= S``, H is the Hessian there, ``lambda = 1/(8 S^2 (1 +
S R_s))``, and ``gamma = 2 (1 + S R_s)(4 S^2 lambda + beta^2)`` of Theorem 3.2 with beta^2 of
Theorem 3.1; or the sharper fixed point of :func:`torchglb.radii.theorem32_fixed_point`, which
costs a pass over the history.

The inverse by the cheapest exact route: while n < d by Woodbury, O(n^2 d), with theta_hat sought in
the span of the rows, where it lies; then by Cholesky, O(d^3); for Gaussian rewards, whose H does
not depend on theta, by rank-one steps, O(d^2). theta_hat and H come from a Taylor model that is
carried from round to round, with passes over the history only where it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_shape, refuse
from torchglb.families import Gaussian
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import inverse_forms, woodbury_inverse_forms
from torchglb.mle import minimize_likelihood
from torchglb.optim import frank_wolfe_gap
from torchglb.policies.base import Policy, towards
from torchglb.policies.carried import fit
from torchglb.policies.exact import PAPER, named_radius
from torchglb.policies.parts import farthest_point
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.radii import (
    Problem,
    Radius,
    regularization_for,
    theorem32,
    theorem32_fixed_point,
)
from torchglb.sets import EllipsoidSet
from torchglb.ucb.minimum import CarriedMinimum, FlatHistory

ELLIPSOIDS = ("theorem", "fixed_point")
#: the minimum of the loss and, relatively, its Hessian are certified to these
PRECISION, HESSIAN_TOLERANCE = 1e-10, 1e-8


class Ellipsoid(NamedTuple):
    """The ellipsoid of this round.

    Attributes:
        theta: theta_hat, ``(*B, d)``.
        gamma: the squared radius, ``(*B)``.
        curvature: H, ``(*B, d, d)``, if n >= d; else ``w m''/g`` of every row, ``(*B, n)``.
    """

    theta: Tensor
    gamma: Tensor
    curvature: Tensor


@register
class OFUGLBE(Policy):
    """The paper's ellipsoidal algorithm, for any self-concordant GLM.

    Args:
        radius: beta^2; the paper's by default, or any name or :class:`torchglb.radii.Radius`.
        ellipsoid: ``"theorem"`` (as printed) or ``"fixed_point"`` (sharper, as valid).
        aggregate: merge repeated arms, so that a fixed arm set costs the same at every time.
        settings: of :class:`torchglb.policies.Policy`.
    """

    name = "ofuglb-e"

    def __init__(
        self,
        *args: Any,
        radius: str | Radius = PAPER,
        ellipsoid: str = "theorem",
        aggregate: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.radius = named_radius(radius)
        self.ellipsoid = check_choice("ellipsoid", ellipsoid, ELLIPSOIDS)
        family, domain, batch = self.family, self.domain, tuple(self.batch_shape)
        if not self.radius.confined:
            raise refuse("radius", "one that keeps to the ball, for ellipsoids", self.radius)
        self._problem = Problem(family, domain, self.delta, batch, self.dtype, self.device)
        self._concordance = self._problem.self_concordance.to(self.dtype)  # refuses what has none
        self._sums = self.radius.init(self._problem)
        self._history = History(
            domain.dim, batch, aggregate, validate=False, dtype=self.dtype, device=self.device
        )
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        self._S = self._problem.S.to(self.dtype)
        self._lam = torch.as_tensor(regularization_for(self._S, self._concordance))
        precision = PRECISION if self.dtype == torch.float64 else 1e-4
        self._tol = 0.01 * precision
        self._minimum = CarriedMinimum(
            FlatHistory(family, self._history), domain, self._S.reshape(-1), precision
        )
        self._start = like.new_zeros((*batch, domain.dim))
        self._inverse: RankOneInverse | None = None  # of H + lambda I, where H is free of theta
        if isinstance(family, Gaussian):
            self._inverse = RankOneInverse.scaled_identity(self._lam, batch, domain.dim, like)
        self._fresh: Ellipsoid | None = None

    # ---- the ellipsoid of this round -----------------------------------------------------

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic: an immutable snapshot."""
        theta, gamma, _ = ellipsoid = self._current()
        eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
        shape = self._hessian(ellipsoid) + self._lam[..., None, None] * eye
        return EllipsoidSet(self.family, self.domain, theta, shape, gamma)

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._minimum.passes.reshape(self.batch_shape)

    @property
    def _few(self) -> bool:
        """Whether there are fewer rows than features."""
        return len(self._history) < self.domain.dim

    def _current(self) -> Ellipsoid:
        if self._fresh is None:
            self._fresh = self._span() if self._few else self._carried()
            self._start = self._fresh.theta
        return self._fresh

    def _carried(self) -> Ellipsoid:
        """From the carried model of the loss."""
        shape, d = tuple(self.batch_shape), self.domain.dim
        zero = torch.zeros_like(self._minimum._radius)
        tolerance = HESSIAN_TOLERANCE if self.dtype == torch.float64 else 1e-4
        found = fit(self._minimum, zero, tolerance)
        theta, loss = found.theta.reshape(*shape, d), found.loss.reshape(shape)
        gradient, hessian = found.gradient.reshape(*shape, d), found.hessian.reshape(*shape, d, d)
        return self._around(theta, loss, gradient, hessian)

    def _span(self) -> Ellipsoid:
        """From the rows: the minimiser lies in their span, ``theta = Q u`` with ``X = R' Q'``."""
        X, r, w = self._history.whole()
        basis, corner = torch.linalg.qr(X.mT)  # (*B, d, n), (*B, n, n)
        if len(self._history):
            likelihood = NegativeLogLikelihood(self.family, corner.mT, r, w)
            ball = type(self.domain)(X.shape[-2], self.domain.radius)
            start = (basis.mT @ self._start[..., None])[..., 0]
            # flat directions: a tighter tolerance on the loss for the same one on theta
            mle = minimize_likelihood(likelihood, ball, start=start, tol=self._tol, throw=False)
            theta = (basis @ mle.theta[..., None])[..., 0]
            gradient = (basis @ mle.gradient[..., None])[..., 0]
            loss = mle.loss
        else:
            theta, loss = torch.zeros_like(self._start), torch.zeros_like(self._S)
            gradient = theta
        z = (X @ theta[..., None])[..., 0]
        weights = self.family.variance(z) / self.family.dispersion
        return self._around(theta, loss, gradient, weights if w is None else w * weights)

    def _around(
        self, theta: Tensor, loss: Tensor, gradient: Tensor, curvature: Tensor
    ) -> Ellipsoid:
        likelihood = NegativeLogLikelihood.of(self.family, self._history)
        found = self.radius.evaluate(self._problem, self._sums, likelihood, theta, loss)
        self._sums = found.state
        gap = frank_wolfe_gap(theta, gradient, self._S)
        if self.ellipsoid == "theorem":
            gamma = theorem32(found.radius, self._S, self._concordance, self._lam, gap)
            return Ellipsoid(theta, gamma, curvature)
        gamma = theorem32_fixed_point(
            found.radius,
            self._S,
            self._concordance,
            self._lam,
            torch.linalg.vector_norm(theta, dim=-1),
            likelihood.X,
            self._hessian(Ellipsoid(theta, loss, curvature)),
            gap=gap,
            shards=likelihood.shards,
        )
        return Ellipsoid(theta, gamma, curvature)

    def _hessian(self, ellipsoid: Ellipsoid) -> Tensor:
        if not self._few:
            return ellipsoid.curvature
        X, _, _ = self._history.whole()
        return (X.mT * ellipsoid.curvature[..., None, :]) @ X

    @torch.no_grad()
    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        ellipsoid = self.confidence_set()
        return towards(farthest_point(ellipsoid.center, ellipsoid.shape, ellipsoid.gamma))

    @torch.no_grad()
    def _scores(self, arms: Tensor) -> Tensor:
        theta, gamma, curvature = self._current()
        if self._inverse is not None:
            forms = self._inverse.squared_norms(arms)
        elif self._few:
            X, _, _ = self._history.whole()
            forms = woodbury_inverse_forms(arms, X, curvature, self._lam)
        else:
            eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
            forms = inverse_forms(arms, curvature + self._lam[..., None, None] * eye)
        return (arms @ theta[..., None])[..., 0] + (gamma[..., None] * forms).sqrt()

    # ---- learning and saving -------------------------------------------------------------

    @torch.no_grad()
    def _update(self, x: Tensor, r: Tensor) -> None:
        self._history.append(x, r)
        flat_x, flat_r = x.reshape(-1, *x.shape[-2:]), r.reshape(-1, r.shape[-1])
        self._minimum.observe(flat_x, flat_r, torch.ones_like(flat_r))
        self._sums = self.radius.update(self._problem, self._sums, x, r)
        if self._inverse is not None:
            self._inverse.add_rows(x, torch.full_like(r, 1.0 / self.family.dispersion))
        self._fresh = None

    def _state(self) -> dict[str, Any]:
        fresh = self._fresh
        kept = None if fresh is None else {k: t.clone() for k, t in fresh._asdict().items()}
        return {
            "history": self._history.state_dict(),
            "minimum": self._minimum.state_dict(),
            "sums": {name: t.clone() for name, t in self._sums.items()},
            "start": self._start.clone(),
            "inverse": None if self._inverse is None else self._inverse.state_dict(),
            "ellipsoid": kept,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        sums = {name: state["sums"][name].clone() for name in self._sums}
        for name, old in self._sums.items():
            check_shape(f"state['sums'][{name!r}]", sums[name], old.shape)
        history, minimum, fresh = state["history"], state["minimum"], state["ellipsoid"]
        start, inverse = state["start"].clone(), state["inverse"]
        if (inverse is None) != (self._inverse is None):
            raise refuse("state['inverse']", "that of the same family", type(inverse).__name__)
        check_shape("state['start']", start, self._start.shape)
        self._history.load_state_dict(history)
        self._minimum.load_state_dict(minimum)
        if self._inverse is not None:
            self._inverse.load_state_dict(inverse)
        self._sums, self._start = sums, start
        self._fresh = (
            None if fresh is None else Ellipsoid(**{k: t.clone() for k, t in fresh.items()})
        )
