"""EVILL: exploration by linear perturbations of the loss (Janz et al. 2024).

With ``F(theta) = L(theta) + (lambda/2)|theta|^2``, theta_hat its minimiser over R^d and H the
Hessian of L there, draw Z ~ N(0, I_d) and z_s ~ N(0, 1) for every observation,

    ``W = a (sqrt(lambda) Z + sum_s sqrt(m''(<x_s, theta_hat>) / g) z_s x_s)``,
    ``theta_W = argmin F(theta) - <W, theta>``,  index ``<x, theta_W>``.

The sum is a d-vector, ``W ~ N(0, a^2 (lambda I + H))``: one d-dimensional Gaussian through the
Cholesky factor of lambda I + H has the same law and costs nothing in n.

theta_hat and theta_W come from Taylor polynomials of L at points that are carried from round to
round, with a certified distance (:mod:`torchglb.carried.free_certificate`). ``select`` stops as
soon as the best arm is certain, whatever H may be within its error; ``scores`` are exact.

- ``evill``: a = 1, lambda = 1, no warm-up; the heuristic of the paper's main figures.
- ``evill-theory``: the constants of Appendix E and a warm-up that samples from the G-optimal
  design of the arms until every arm is known well enough.

Public code differs: one implementation adds the normal numbers to the loss without multiplying them
by the arms, so W does not have this covariance. Ours has, and it is tested.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import known_none, wait_for_all
from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.estimator_base import TiltedChoice
from torchglb.inference.estimators import FreeEstimator
from torchglb.inference.fits import Fit
from torchglb.linalg import cholesky
from torchglb.policies.design import g_optimal
from torchglb.policies.fitted import FittedPolicy
from torchglb.policies.geometry import cholesky_change, towards
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import taken
from torchglb.policies.settings import FittedSettings

#: at which the loss is carried in the plane
POINTS = 64


class Perturbed(FittedPolicy):
    """What both settings share: the perturbed minimiser.

    The normal numbers of a choice are drawn beforehand, so that ``scores`` shows what ``select`` is
    about to do; ``select`` then draws those of the next choice.
    """

    rough = True
    _estimator: FreeEstimator
    _a: Tensor  # (*B)
    _lam: Tensor  # (*B)

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        **settings: Unpack[FittedSettings],
    ) -> None:
        # perturbed minimisers come back to where others have been in the plane, hardly beyond
        self.points = POINTS if domain.dim <= 2 else 2
        super().__init__(family, domain, delta, **settings)
        self._noise = self.random.normal(domain.dim, dtype=self.dtype)

    def ridge(self) -> Tensor:  # noqa: D102
        return self._lam

    def perturbation(self, noise: Tensor | None = None) -> Tensor:
        """W of a standard normal vector ``(*B, d)``; of the next choice if left out."""
        return self._perturbation(self.fit(), self._noise if noise is None else noise)

    def _perturbation(self, fit: Fit, noise: Tensor) -> Tensor:
        factor = cholesky(fit.hessian)
        return self._a[..., None] * (factor @ noise[..., None])[..., 0]

    @torch.no_grad()
    def perturbed(self, tilt: Tensor) -> Tensor:
        """``argmin F(theta) - <tilt, theta>``, of shape ``(*B, d)``, to eight digits."""
        fit = self.fit()
        start = fit.theta + torch.linalg.solve(fit.hessian, tilt)
        return self._estimator.copy().tilted(self._lam, tilt, start)

    def _scores(self, arms: Tensor) -> Tensor:
        theta = self.perturbed(self.perturbation())
        return (arms @ theta[..., None])[..., 0]

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play; draws the perturbation of the next choice."""
        arms = self._check_arms(arms)
        index = self._winner(arms)
        self._draw()
        return index

    def _draw(self) -> None:
        """The numbers of the next choice."""
        self._noise = self.random.normal(self.domain.dim, dtype=self.dtype)

    def _winner(self, arms: Tensor) -> Tensor:
        """The arm with the largest score: certain, or to eight digits where arms tie."""
        fit = self._rough_fit()
        choice = self._choose(fit, arms)
        undecided = ~choice.certain & (fit.doubt > 0.0)
        if known_none(undecided):
            return choice.arm
        fine = self._estimator.refined(fit, self._lam, undecided)
        return torch.where(undecided, self._choose(fine, arms).arm, choice.arm)

    @torch.no_grad()
    def _choose(self, fit: Fit, arms: Tensor) -> TiltedChoice:
        """The best arm of the perturbed minimiser for an H that may be off.

        W is then off by ``a L G Z`` (:func:`torchglb.policies.geometry.cholesky_change`), at most
        ``a |G| |Z|`` in the dual norm of H, and ``e^doubt`` times that of the Hessian at theta_hat,
        with theta in its place.
        """
        tilt = self._perturbation(fit, self._noise)
        size = torch.linalg.vector_norm(self._noise, dim=-1)
        doubt = self._a * cholesky_change(fit.doubt, self.domain.dim) * size * fit.doubt.exp()
        start = fit.theta + torch.linalg.solve(fit.hessian, tilt)
        return self._estimator.choose(self._lam, tilt, start, arms, doubt, fit.theta)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"noise": self._noise.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        noise = taken(state, "noise", self._noise)
        super()._load(state)
        self._noise = noise


@register
class EVILL(Perturbed):
    """EVILL with a = 1, lambda = 1 and no warm-up.

    Args:
        family: any GLM.
        domain: the ball that contains theta*.
        scale: a.
        regularization: lambda.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = EVILL(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "evill"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        scale: float = 1.0,
        regularization: float = 1.0,
        **settings: Unpack[FittedSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        self.scale = check_positive("scale", scale)
        self.regularization = check_positive("regularization", regularization)
        self._a = self._constant(lambda radius: self.scale)
        self._lam = self._constant(lambda radius: self.regularization)

    def select_ball(self) -> Tensor:
        """The direction of the perturbed minimiser; draws the perturbation of the next choice."""
        x = towards(self.perturbed(self.perturbation()))
        self._noise = self.random.normal(self.domain.dim, dtype=self.dtype)
        return x


@register
class EVILLTheory(Perturbed):
    """EVILL with the constants of Appendix E of Janz et al. and the warm-up they ask for.

    With ``M = log max(3/delta, e sqrt(1 + T/(4d)))`` and ``delta' = min(delta/(3T), 1/200)``:

    - ``lambda = max(1, (2d/S) M)``, ``a = sqrt(lambda)(1/2 + S) + (2d/sqrt(lambda)) M``;
    - warm-up: arms are drawn from the G-optimal design until ``max_x |x|^2`` in V^-1 is at most
      ``b = 1/(22 (1 + D C^2) C^2 a sqrt(kappa))``, where ``V = lambda I + sum x x'``,
      ``C = sqrt(d) + sqrt(2 log(1/delta'))``, ``D = Xi + Xi^2``, ``Xi = sqrt(2)(2S + 1/2)``.

    While a replicate is in the warm-up its scores are ``|x|^2`` in V^-1 and its choice is a draw.
    The constants are those of logistic rewards (``m'' <= 1/4``, self-concordance 1); with other
    families they are used as they are, and nothing is known to hold.
    The theory is for a fixed arm set; where arms change, the design is that of the present ones.
    Warm-up observations stay in the loss. With theory constants the warm-up usually outlasts any
    horizon that can be simulated.

    Args:
        family: any GLM with m'' > 0 on the ball.
        domain: the ball that contains theta*.
        level: b, instead of the one above.
        settings: those of :class:`Policy` and ``aggregate``.

    Example:
        >>> import torchglb as glb
        >>> policy = EVILLTheory(glb.Bernoulli(), glb.Ball(2, 3.0), horizon=1000)
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        0
    """

    name = "evill-theory"
    requires = Requirements(horizon=True)

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        level: float | None = None,
        **settings: Unpack[FittedSettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        horizon = self.horizon
        assert horizon is not None  # by ``requires``
        self._smallest_variance()  # refuses a family without kappa

        def constant(place: int) -> Tensor:
            return self._constant(
                lambda radius: theory_constants(
                    domain.dim, radius, self.delta, horizon, 1.0 / family.min_variance(radius)
                )[place]
            )

        #: lambda, a and b, each ``(*B)``
        self.regularization, self.scale, self.level = constant(0), constant(1), constant(2)
        if level is not None:
            self.level = torch.full_like(self.level, check_positive("level", level))
        self._lam, self._a = self.regularization, self.scale
        self._track_design(self._lam)
        self._uniform = self.random.uniform(dtype=self.dtype)
        self._known_design: tuple[Tensor, Tensor] | None = None  # a cache

    def warming_up(self, arms: Tensor) -> Tensor:
        """Which replicates are still in the warm-up, ``(*B)``."""
        return self._design.squared_norms(arms.double()).to(self.dtype).amax(-1) > self.level

    def design(self, arms: Tensor) -> Tensor:
        """The G-optimal design of the arms, ``(*B, K)``."""
        known = self._known_design
        if known is None or known[0].shape != arms.shape or not wait_for_all(known[0] == arms):
            known = arms.clone(), g_optimal(arms).weights
        self._known_design = known
        return known[1]

    def _scores(self, arms: Tensor) -> Tensor:
        novelty = self._design.squared_norms(arms.double()).to(self.dtype)
        warm = novelty.amax(-1) > self.level
        if known_none(~warm):
            return novelty
        return torch.where(warm[..., None], novelty, super()._scores(arms))

    def _draw(self) -> None:
        streams = copy.copy(self.random)
        noise = streams.normal(self.domain.dim, dtype=self.dtype)
        uniform = streams.uniform(dtype=self.dtype)
        self.random, self._noise, self._uniform = streams, noise, uniform  # all, or none

    def _winner(self, arms: Tensor) -> Tensor:
        warm = self.warming_up(arms)
        if known_none(warm):
            return super()._winner(arms)
        steps = self.design(arms).cumsum(-1)
        # the first arm whose cumulated weight exceeds the uniform number
        drawn = (steps <= self._uniform[..., None] * steps[..., -1:]).sum(-1)
        drawn = drawn.clamp_max(arms.shape[-2] - 1)
        return drawn if known_none(~warm) else torch.where(warm, drawn, super()._winner(arms))

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"uniform": self._uniform.clone()}

    def _load(self, state: Mapping[str, Any]) -> None:
        uniform = taken(state, "uniform", self._uniform)
        super()._load(state)
        self._uniform = uniform


def theory_constants(
    dim: int, radius: float, delta: float, horizon: int, kappa: float
) -> tuple[float, float, float]:
    """lambda, a and b of Appendix E of Janz et al. (2024).

    Args:
        dim: d.
        radius: S.
        delta: the failure level.
        horizon: T.
        kappa: max 1/m'' over the ball.
    """
    failure = min(delta / (3 * horizon), 1 / 200)
    size = math.log(max(3 / delta, math.e * math.sqrt(1 + horizon / (4 * dim))))
    lam = max(1.0, 2 * dim / radius * size)
    gamma = math.sqrt(lam) * (0.5 + radius) + 2 * dim / math.sqrt(lam) * size
    C = math.sqrt(dim) + math.sqrt(2 * math.log(1 / failure))
    Xi = math.sqrt(2) * (2 * radius + 0.5)
    D = Xi + Xi**2
    level = 1 / (22 * (1 + D * C**2) * C**2 * gamma * math.sqrt(kappa))
    return lam, gamma, level
