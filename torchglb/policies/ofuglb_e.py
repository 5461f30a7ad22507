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

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import known_none
from torchglb.checks import refuse
from torchglb.choices import EllipsoidKind
from torchglb.domain import Ball
from torchglb.families import Gaussian, GLMFamily, has_formulas_of
from torchglb.inference.estimation import CarriedEstimate, estimate_of
from torchglb.inference.estimators import BallEstimator, ball_estimator
from torchglb.inference.fits import Fit
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import inverse_forms, woodbury_inverse_forms
from torchglb.mle import minimize_likelihood
from torchglb.policies.base import Policy
from torchglb.policies.exact import PAPER, named_radius
from torchglb.policies.geometry import certain_leader, farthest_point, towards
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.saving import learn_or_forget, taken
from torchglb.policies.settings import PolicySettings
from torchglb.radii import Problem, Radius
from torchglb.radii.theorems.theorem32 import printed_gamma
from torchglb.rows.history import History
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import EllipsoidSet

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

    Example:
        >>> import torchglb as glb
        >>> policy = OFUGLBE(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "ofuglb-e"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = PAPER,
        ellipsoid: EllipsoidKind = "theorem",
        aggregate: bool = False,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        batch = tuple(self.batch_shape)
        rows = History(
            self.domain.dim,
            batch,
            aggregate,
            validate=False,
            dtype=self.dtype,
            device=self.device,
        )
        family, domain = self.family, self.domain
        radius = named_radius(radius)
        # beta^2 of the number of rows alone is the same for a rough estimate
        problem = Problem(family, domain, self.delta, batch, self.dtype, self.device)
        closed = radius.of_rows(problem, 1) is not None and not aggregate
        rough = closed and ellipsoid == "theorem"
        self._sequence = ConfidenceSequence(
            family,
            domain,
            self.delta,
            radius,
            ellipsoidal=True,
            batch_shape=batch,
            estimator=CarriedEstimate(ball_estimator(family, domain, rows, rough=rough)),
            ellipsoid=ellipsoid,
            dtype=self.dtype,
            device=self.device,
        )
        self.radius, self.ellipsoid = radius, self._sequence.ellipsoid
        self._history = rows
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        self._S = self._sequence.problem.S.to(self.dtype)
        self._lam = self._sequence.ridge
        self._tol = SPAN_TOLERANCE if self.dtype == torch.float64 else 1e-6
        self._inverse: RankOneInverse | None = None  # of H + lambda I, where H is free of theta
        if has_formulas_of(family, Gaussian):
            self._inverse = RankOneInverse.scaled_identity(self._lam, batch, domain.dim, like)
        self._fit = self._span(like.new_zeros((*batch, domain.dim)))
        self._ellipsoid = self._around(self._fit)
        self._refined: Ellipsoid | None = None  # the ellipsoid, fine: a cache

    # ---- the ellipsoid of this round -----------------------------------------------------

    def _observed(self) -> History:
        return self._history

    def confidence_set(self) -> EllipsoidSet:
        """The ellipsoid over which the policy is optimistic: an immutable snapshot."""
        self._look_at_boundary()
        theta, gamma, curvature = self._fine()
        eye = torch.eye(self.domain.dim, dtype=self.dtype, device=self.device)
        shape = self._hessian(curvature) + self._lam[..., None, None] * eye
        return EllipsoidSet(self.family, self.domain, theta.clone(), shape, gamma.clone())

    @torch.no_grad()
    def _fine(self) -> Ellipsoid:
        """The ellipsoid around theta_hat to eight digits."""
        if self._refined is None:
            fit = self._estimator.refined(self._fit, torch.zeros_like(self._S))
            known = fit is self._fit
            self._refined = self._ellipsoid if known else self._around(fit)
        return self._refined

    @property
    def passes(self) -> Tensor:  # noqa: D102
        return self._estimator.passes.clone()

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

    @property
    def _estimator(self) -> BallEstimator:
        fitted = self._sequence.fitted
        assert isinstance(fitted, CarriedEstimate)
        return fitted.estimator

    def _around(self, fit: Fit, *, advance: bool = False) -> Ellipsoid:
        """The ellipsoid around an estimate; its radius may keep what it found on the way."""
        likelihood = NegativeLogLikelihood.of(self.family, self._history)
        known = estimate_of(fit._replace(hessian=self._hessian(fit.hessian)), self._S)
        radius = self._sequence.radius_at(likelihood, known, advance=advance)
        assert known.hessian is not None
        gamma = self._sequence.ellipsoid_radius(likelihood, known, radius, known.hessian)
        return Ellipsoid(fit.theta, gamma, fit.hessian)

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
    def select(self, arms: ArrayLike) -> Tensor:
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
        gamma = printed_gamma(
            torch.as_tensor(self.radius.of_rows(self._sequence.problem, len(self._history))),
            self._S,
            self._sequence.problem.self_concordance.to(self.dtype),
            self._lam,
        ).to(self.dtype)
        bonus = self._bonus(arms, ellipsoid._replace(gamma=gamma.expand_as(ellipsoid.gamma)))
        least = torch.linalg.eigvalsh(fit.hessian)[..., 0].clamp_min(0.0)
        off = fit.distance * (1.0 + self._lam / least).sqrt() * (0.5 * fit.doubt).exp()
        error = bonus * (torch.expm1(0.5 * fit.doubt) + off / gamma.sqrt() + 1e-7)[..., None]
        index, certain = certain_leader(self._products(arms, ellipsoid) + bonus, error)
        if known_none(~certain):
            return index
        fine = self._estimator.refined(fit, torch.zeros_like(self._S), ~certain)
        exact = self._around(fine)
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

    @torch.no_grad()
    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> tuple[RankOneInverse | None, Fit, Ellipsoid]:
            inverse = self._inverse
            self._sequence.learn(x, r)
            if inverse is not None:
                weight = torch.full_like(r, 1.0 / self.family.dispersion)
                inverse = inverse.plus_rows(x, weight)
            if self._few:
                fit = self._span(self._fit.theta)
            else:
                fit = self._estimator.fit(torch.zeros_like(self._S))
            return inverse, fit, self._around(fit, advance=True)

        self._inverse, self._fit, self._ellipsoid = learn_or_forget([self._sequence], learn)
        self._refined = None

    def _state(self) -> dict[str, Any]:
        return {
            "history": self._history.state_dict(),
            "estimator": self._estimator.state_dict(),
            "sums": self._sequence.sums(),
            "inverse": None if self._inverse is None else self._inverse.state_dict(),
            "fit": {name: t.clone() for name, t in self._fit._asdict().items()},
            "ellipsoid": {name: t.clone() for name, t in self._ellipsoid._asdict().items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        sums = self._sequence.checked_sums(state["sums"])
        kept, inverse, estimator = state["ellipsoid"], state["inverse"], self._estimator.copy()
        if (inverse is None) != (self._inverse is None):
            raise refuse("state['inverse']", "that of the same family", type(inverse).__name__)
        rows = copy.copy(self._history)
        rows.load_state_dict(state["history"])
        d = self.domain.dim
        # below d rows the curvature is that of each row (see Ellipsoid)
        curvature = (
            rows.view().r
            if len(rows) < d
            else self._lam[..., None, None].expand(*self._S.shape, d, d)
        )
        like = {
            "fit": self._fit._replace(hessian=curvature)._asdict(),
            "ellipsoid": self._ellipsoid._replace(curvature=curvature)._asdict(),
        }
        fit = Fit(*(taken(state["fit"], name, t) for name, t in like["fit"].items()))
        ellipsoid = Ellipsoid(*(taken(kept, name, t) for name, t in like["ellipsoid"].items()))
        estimator.load_state_dict(state["estimator"])
        loaded = None if self._inverse is None else self._inverse.loaded(inverse)
        self._history.load_state_dict(state["history"])
        self._sequence.fitted, self._inverse = CarriedEstimate(estimator), loaded
        self._sequence.resume(sums)
        self._fit, self._ellipsoid, self._refined = fit, ellipsoid, None
