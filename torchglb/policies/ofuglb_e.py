"""OFUGLB-e (Lee, Yun, Jun, NeurIPS 2024): the bonus of the ellipsoid around the MLE, closed form.

``argmax_x <x, theta_hat> + sqrt(gamma) |x| in (H + lambda I)^-1``

theta_hat minimises the loss over ``|theta| <= S``, H is the Hessian there, ``lambda = 1/(8 S^2 (1 +
S R_s))``, and ``gamma = 2 (1 + S R_s)(4 S^2 lambda + beta^2)`` of Theorem 3.2 with beta^2 of
Theorem 3.1; or the sharper fixed point of :func:`torchglb.radii.theorem32_fixed_point`, which
costs a pass over the history. The constants are the paper's (``"theorem"``), proven there, or our
own, proven here (``"fixed_point"``).

The inverse by the cheapest exact route: while n < d by Woodbury, O(n^2 d), with theta_hat sought in
the span of the rows, where it lies; then by Cholesky, O(d^3); for Gaussian rewards, whose H does
not depend on theta, by rank-one steps, O(d^2). theta_hat and H are found when an observation
arrives, on a CPU from sums that are carried from round to round; in more than seven dimensions only
roughly, and ``select`` asks for no more digits than decide, while ``scores`` have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.arrays import idle
from torchglb.checks import check_choice, check_shape, refuse
from torchglb.estimate import Estimate
from torchglb.families import Gaussian
from torchglb.history import History
from torchglb.inference.estimator_base import HESSIAN_ERROR
from torchglb.inference.estimators import BallEstimator, ball_estimator
from torchglb.inference.fits import Fit
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import inverse_forms, woodbury_inverse_forms
from torchglb.mle import minimize_likelihood
from torchglb.optim import frank_wolfe_gap
from torchglb.policies.base import Policy, towards
from torchglb.policies.exact import PAPER, named_radius
from torchglb.policies.parts import certain_leader, farthest_point, learn_or_forget, taken
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

ELLIPSOIDS = ("theorem", "fixed_point")
#: tolerance on the loss while there are fewer rows than features
SPAN_TOLERANCE = 1e-12


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
        self._tol = SPAN_TOLERANCE if self.dtype == torch.float64 else 1e-6
        # beta^2 of the number of rows alone is the same for a rough estimate
        closed = self.radius.of_rows(self._problem, 1) is not None and not aggregate
        rough = closed and self.ellipsoid == "theorem"
        self._estimator = ball_estimator(family, domain, self._history, rough=rough)
        self._inverse: RankOneInverse | None = None  # of H + lambda I, where H is free of theta
        if isinstance(family, Gaussian):
            self._inverse = RankOneInverse.scaled_identity(self._lam, batch, domain.dim, like)
        self._fit = self._span(like.new_zeros((*batch, domain.dim)))
        self._ellipsoid = self._around(self._sums, self._fit)[0]
        self._refined: Ellipsoid | None = None  # the ellipsoid, fine: a cache

    # ---- the ellipsoid of this round -----------------------------------------------------

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic: an immutable snapshot."""
        theta, gamma, curvature = self._fine()
        eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
        shape = self._hessian(curvature) + self._lam[..., None, None] * eye
        return EllipsoidSet(self.family, self.domain, theta, shape, gamma)

    @torch.no_grad()
    def _fine(self) -> Ellipsoid:
        """The ellipsoid around theta_hat to eight digits."""
        if self._refined is None:
            fit = self._estimator.refined(self._fit, torch.zeros_like(self._S))
            known = fit is self._fit
            self._refined = self._ellipsoid if known else self._around(self._sums, fit)[0]
        return self._refined

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._estimator.passes

    @property
    def _few(self) -> bool:
        """Whether there are fewer rows than features."""
        return len(self._history) < self.domain.dim

    def _span(self, start: Tensor) -> Fit:
        """From the rows: the minimiser lies in their span, ``theta = Q u`` with ``X = R' Q'``.

        In the place of the Hessian ``w m''/g`` of every row, ``(*B, n)``.
        """
        X, r, w = self._history.whole()
        basis, corner = torch.linalg.qr(X.mT)  # (*B, d, n), (*B, n, n)
        if len(self._history):
            likelihood = NegativeLogLikelihood(self.family, corner.mT, r, w)
            ball = type(self.domain)(X.shape[-2], self.domain.radius)
            start = (basis.mT @ start[..., None])[..., 0]
            # flat directions: a tighter tolerance on the loss for the same one on theta
            mle = minimize_likelihood(likelihood, ball, start=start, tol=self._tol, throw=False)
            theta = (basis @ mle.theta[..., None])[..., 0]
            gradient = (basis @ mle.gradient[..., None])[..., 0]
            loss = mle.loss
        else:
            theta, loss = torch.zeros_like(start), torch.zeros_like(self._S)
            gradient = theta
        z = (X @ theta[..., None])[..., 0]
        weights = self.family.variance(z) / self.family.dispersion
        return Fit.exact(theta, loss, gradient, weights if w is None else w * weights)

    def _around(self, sums: dict[str, Tensor], fit: Fit) -> tuple[Ellipsoid, dict[str, Tensor]]:
        """The ellipsoid around an estimate, and the sums of its radius."""
        theta, curvature = fit.theta, fit.hessian
        likelihood = NegativeLogLikelihood.of(self.family, self._history)
        gap = frank_wolfe_gap(theta, fit.gradient, self._S) + 2.0 * self._S * fit.gradient_error
        known = Estimate(theta, fit.loss, fit.loss - gap, fit.gradient)
        found = self.radius.evaluate(self._problem, sums, likelihood, known)
        paid = fit.doubt.exp() * (1.0 + HESSIAN_ERROR)  # |.| in H may be so much larger
        if self.ellipsoid == "theorem":
            gamma = theorem32(found.radius, self._S, self._concordance, self._lam, gap)
            return Ellipsoid(theta, paid * gamma, curvature), found.state
        gamma = theorem32_fixed_point(
            found.radius,
            self._S,
            self._concordance,
            self._lam,
            torch.linalg.vector_norm(theta, dim=-1),
            likelihood.X,
            self._hessian(curvature),
            gap=gap,
            shards=likelihood.shards,
        )
        return Ellipsoid(theta, paid * gamma, curvature), found.state

    def _hessian(self, curvature: Tensor) -> Tensor:
        """H ``(*B, d, d)`` of an :class:`Ellipsoid`'s curvature."""
        if not self._few:
            return curvature
        X, _, _ = self._history.whole()
        return (X.mT * curvature[..., None, :]) @ X

    @torch.no_grad()
    def select_ball(self) -> Tensor:
        """The direction ``(*B, d)`` of the longest theta of the ellipsoid, in closed form."""
        ellipsoid = self.confidence_set()
        return towards(farthest_point(ellipsoid.center, ellipsoid.shape, ellipsoid.gamma))

    def _scores(self, arms: Tensor) -> Tensor:
        ellipsoid = self._fine()
        return self._products(arms, ellipsoid) + self._bonus(arms, ellipsoid)

    @torch.no_grad()
    def select(self, arms: Tensor) -> Tensor:
        """The index ``(*B)`` of the arm to play, certain for every estimate within its error.

        With lambda, theta is off by at most ``distance sqrt(1 + lambda/least eigenvalue of H)``
        times ``|x|`` in (H + lambda I)^-1, and this length by a factor of ``e^(doubt/2)``.
        """
        fit = self._fit
        if self._few or not self._estimator.rough:
            return super().select(arms)
        arms = self._check_arms(arms)
        ellipsoid = self._ellipsoid
        # gamma of an estimate without a gap: as that of a fine one, up to its eight digits
        gamma = theorem32(
            torch.as_tensor(self.radius.of_rows(self._problem, len(self._history))),
            self._S,
            self._concordance,
            self._lam,
        ).to(self.dtype)
        bonus = self._bonus(arms, ellipsoid._replace(gamma=gamma.expand_as(ellipsoid.gamma)))
        least = torch.linalg.eigvalsh(fit.hessian)[..., 0].clamp_min(0.0)
        off = fit.distance * (1.0 + self._lam / least).sqrt() * (0.5 * fit.doubt).exp()
        error = bonus * (torch.expm1(0.5 * fit.doubt) + off / gamma.sqrt() + 1e-7)[..., None]
        index, certain = certain_leader(self._products(arms, ellipsoid) + bonus, error)
        if idle(~certain):
            return index
        fine = self._estimator.refined(fit, torch.zeros_like(self._S), ~certain)
        exact = self._around(self._sums, fine)[0]
        scores = self._products(arms, exact) + self._bonus(arms, exact)
        return torch.where(certain, index, scores.argmax(-1))

    def _products(self, arms: Tensor, ellipsoid: Ellipsoid) -> Tensor:
        """``<x, theta_hat>``, ``(*B, K)``."""
        return (arms @ ellipsoid.theta[..., None])[..., 0]

    @torch.no_grad()
    def _bonus(self, arms: Tensor, ellipsoid: Ellipsoid) -> Tensor:
        """``sqrt(gamma) |x|`` in (H + lambda I)^-1, ``(*B, K)``."""
        _, gamma, curvature = ellipsoid
        if self._inverse is not None:
            forms = self._inverse.squared_norms(arms)
        elif self._few:
            X, _, _ = self._history.whole()
            forms = woodbury_inverse_forms(arms, X, curvature, self._lam)
        else:
            eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
            forms = inverse_forms(arms, curvature + self._lam[..., None, None] * eye)
        return (gamma[..., None] * forms).sqrt()

    # ---- learning and saving -------------------------------------------------------------

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[BallEstimator, Any, Fit, Ellipsoid, Any]:
            estimator, inverse = self._estimator.copy(), self._inverse
            with torch.no_grad():
                estimator.append(x, r)
                sums = self.radius.update(self._problem, self._sums, x, r)
                if inverse is not None:
                    weight = torch.full_like(r, 1.0 / self.family.dispersion)
                    inverse = inverse.plus_rows(x, weight)
                start = self._fit.theta
                fit = self._span(start) if self._few else estimator.fit(torch.zeros_like(self._S))
                ellipsoid, sums = self._around(sums, fit)
                return estimator, inverse, fit, ellipsoid, sums

        found = learn_or_forget([self._history], learn)
        self._estimator, self._inverse, self._fit, self._ellipsoid, self._sums = found
        self._refined = None

    def _state(self) -> dict[str, Any]:
        return {
            "history": self._history.state_dict(),
            "estimator": self._estimator.state_dict(),
            "sums": {name: t.clone() for name, t in self._sums.items()},
            "inverse": None if self._inverse is None else self._inverse.state_dict(),
            "fit": {name: t.clone() for name, t in self._fit._asdict().items()},
            "ellipsoid": {name: t.clone() for name, t in self._ellipsoid._asdict().items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        sums = {name: state["sums"][name].clone() for name in self._sums}
        for name, old in self._sums.items():
            check_shape(f"state['sums'][{name!r}]", sums[name], old.shape)
        kept, inverse, estimator = state["ellipsoid"], state["inverse"], self._estimator.copy()
        if (inverse is None) != (self._inverse is None):
            raise refuse("state['inverse']", "that of the same family", type(inverse).__name__)
        theta, gamma = (taken(kept, n, getattr(self._ellipsoid, n)) for n in ("theta", "gamma"))
        ellipsoid = Ellipsoid(theta, gamma, kept["curvature"].clone())
        fit = Fit(*(state["fit"][name].clone() for name in Fit._fields))
        estimator.load_state_dict(state["estimator"])
        loaded = None if self._inverse is None else self._inverse.loaded(inverse)
        self._history.load_state_dict(state["history"])
        self._estimator, self._inverse = estimator, loaded
        self._sums, self._fit, self._ellipsoid, self._refined = sums, fit, ellipsoid, None
