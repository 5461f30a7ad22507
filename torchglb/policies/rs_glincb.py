"""RS-GLinCB: rarely switching generalised linear contextual bandits (Sawarni et al. 2024).

``lambda = d log(T/delta)``, ``gamma = 25 R S sqrt(d log(T/delta))``, R the bound of the rewards.
Two matrices start at lambda I: V for the warm-up set, H for all other rounds. In a round:

- criterion I: if ``max_x |x|^2`` in V^-1 is at least ``1/(gamma^2 kappa R^2)``, play that arm, put
  the pair in the warm-up set, ``V += x x'``; theta_o is the minimiser over R^d of the warm-up loss
  with ridge lambda;
- otherwise, criterion II: if ``det H > 2 det H_tau``, switch: ``H_tau = H``, theta_tau = minimiser
  of the loss of the other rounds over the S-ball;
- keep the arms with ``<x, theta_o> + gamma sqrt(kappa) |x|`` in V^-1 at least the LARGEST
  ``<x, theta_o> - gamma sqrt(kappa) |x|``; among them maximise
  ``<x, theta_tau> + 150 sqrt(d log(T/delta)) |x|`` in H_tau^-1;
- after playing x, ``H += m''(<x, theta_o>)/e x x'``.

After the warm-up there are O(log^2 T) switches, and theta_tau is refitted at no other time.

Public code differs: it eliminates against the smallest lower end instead of the largest, so that no
arm is ever eliminated; it keeps H_tau as another name of H, so that criterion II never holds after
the first switch; or it replaces 25 and 150 by tuned constants (here ``scale`` tunes both, and the
theory's are the default). The constants are the paper's; it has no confidence set that we offer.

What belongs to the warm-up is decided by the arm that was played, when its reward arrives: in
rounds without delay that is criterion I. theta_o is fitted only when it is used, after the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import known_none, wait_for_indices
from torchglb.checks import check_positive
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.fits import minimum_in_ball, ridge_minimum
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.policies.base import Policy
from torchglb.policies.rank_one import RankOneInverse
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.saving import learn_or_forget, taken
from torchglb.policies.settings import PolicySettings
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History


@register
class RSGLinCB(Policy):
    """RS-GLinCB.

    In the warm-up the scores are ``|x|^2`` in V^-1, afterwards the index above; ``select`` takes
    the largest over the arms that are not eliminated (:meth:`kept`).

    Args:
        family: a GLM of bounded rewards with m'' > 0 on the ball.
        domain: the ball that contains theta*.
        delta: the failure level.
        scale: a factor of gamma and of 150; 1 is the theory.
        aggregate: merge repeated arms.
        settings: those of :class:`Policy`, with the horizon T.

    Example:
        >>> import torchglb as glb
        >>> policy = RSGLinCB(glb.Bernoulli(), glb.Ball(2, 3.0), horizon=1000)
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> policy.update(arms[0], 1.0)
        >>> int(policy.select(arms))
        1
    """

    name = "rs-glincb"
    requires = Requirements(bounded_rewards=True, horizon=True)

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        scale: float = 1.0,
        aggregate: bool = False,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        horizon = self.horizon
        assert horizon is not None  # by ``requires``
        d, shape = domain.dim, tuple(self.batch_shape)
        self.scale = check_positive("scale", scale)
        self._kappa = 1.0 / self._smallest_variance()
        self.regularization = d * math.log(horizon / self.delta)
        zero = torch.zeros((*shape, d), dtype=self.dtype, device=self.device)
        S = domain.radius_like(zero).expand(shape)
        reward_bound = max(abs(end) for end in family.reward_range)
        root = math.sqrt(self.regularization)
        self.gamma = 25 * self.scale * reward_bound * root * S
        self.bonus = 150 * self.scale * root
        self.level = 1 / (self.gamma.square() * self._kappa * reward_bound**2)

        def memory() -> History:
            return History(
                d, shape, aggregate, validate=False, dtype=self.dtype, device=self.device
            )

        def start() -> RankOneInverse:
            return RankOneInverse.scaled_identity(self.regularization, shape, d, zero)

        # every row is in both, with weight 0 in the one that it does not belong to
        self._warm_rows, self._other_rows = memory(), memory()
        self._V, self._H, self._H_tau = start(), start(), start()
        self._theta_o, self._theta_tau = zero, zero.clone()
        self._stale = torch.zeros(shape, dtype=torch.bool, device=self.device)
        #: switches so far, ``(*B)``
        self.switches = torch.zeros(shape, dtype=torch.int64, device=self.device)
        #: rounds of the warm-up so far, ``(*B)``
        self.warm_up_rounds = torch.zeros_like(self.switches)

    def warming_up(self, arms: Tensor) -> Tensor:
        """Criterion I, ``(*B)``."""
        return self._V.squared_norms(arms).amax(-1) >= self.level

    def kept(self, arms: Tensor) -> Tensor:
        """Which arms are not eliminated, ``(*B, K)``; in the warm-up all."""
        novelty = self._V.squared_norms(arms)
        warm = novelty.amax(-1) >= self.level
        centre = (arms @ self._warm_estimate(~warm)[..., None])[..., 0]
        width = (self.gamma * self._kappa.sqrt())[..., None] * novelty.sqrt()
        best_lower = (centre - width).amax(-1, keepdim=True)
        return warm[..., None] | (centre + width >= best_lower)

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play: the largest score of the arms kept."""
        arms = self._check_arms(arms)
        scores = self._scores(arms)
        return torch.where(self.kept(arms), scores, -torch.inf).argmax(-1)

    def estimate(self) -> Tensor:  # noqa: D102
        return self._theta_tau.clone()

    def _scores(self, arms: Tensor) -> Tensor:
        novelty = self._V.squared_norms(arms)
        warm = novelty.amax(-1) >= self.level
        index = (arms @ self._theta_tau[..., None])[..., 0] + self.bonus * self._H_tau.norms(arms)
        return torch.where(warm[..., None], novelty, index)

    def _update(self, x: Tensor, r: Tensor) -> None:
        def learn() -> dict[str, Any]:
            shadow = self._alias()  # with the same histories, and all else its own
            shadow._V, shadow._H, shadow._H_tau = (
                A.copy() for A in (self._V, self._H, self._H_tau)
            )
            with torch.no_grad():
                for i in range(x.shape[-2]):  # where a row belongs depends on the rows before
                    shadow._step(x[..., i, :], r[..., i])
            return vars(shadow)

        self.__dict__ = learn_or_forget([self._warm_rows, self._other_rows], learn)

    def _step(self, x: Tensor, r: Tensor) -> None:
        warm = self._V.squared_norms(x[..., None, :])[..., 0] >= self.level
        inside = warm.to(self.dtype)
        self._theta_o, self._stale = self._warm_estimate(~warm), self._stale & warm
        self._warm_rows.append(x, r, inside)
        self._other_rows.append(x, r, 1 - inside)
        self._V.add(x, inside)
        self._stale = self._stale | warm
        self.warm_up_rounds = self.warm_up_rounds + warm
        curvature = self.family.variance((x * self._theta_o).sum(-1)) / math.e
        # V and theta_o of a warm-up row are not those of criterion II: its weight is 0
        self._H.add(x, torch.where(warm, 0.0, curvature))
        switch = ~warm & (self._H.logdet - self._H_tau.logdet > math.log(2.0))
        if known_none(switch):
            return
        self._H_tau.take(switch, self._H)
        self._theta_tau = self._refitted(self._other_rows, switch, self._theta_tau, True)
        self.switches = self.switches + switch

    def _warm_estimate(self, mask: Tensor) -> Tensor:
        """theta_o, up to date for the replicates of the mask; changes nothing."""
        needed = mask & self._stale
        if known_none(needed):
            return self._theta_o
        return self._refitted(self._warm_rows, needed, self._theta_o, False)

    def _refitted(self, rows: History, mask: Tensor, theta: Tensor, in_ball: bool) -> Tensor:
        """Where the mask holds, the estimate of the rows: in the ball, or with the ridge."""
        index = wait_for_indices(mask.reshape(-1))
        if not index.numel():
            return theta
        N, d = mask.numel(), self.domain.dim
        X, r, w = rows.view()
        flat, n = theta.reshape(N, d), X.shape[-2]
        # picked as they lie in memory, feature by feature
        picked = Rows(
            X.mT.reshape(N, d, n)[index].mT,
            r.reshape(N, n)[index],
            None if w is None else w.reshape(N, n)[index],
        )
        ridge = 0.0 if in_ball else self.regularization
        loss = NegativeLogLikelihood(self.family, *picked, regularization=ridge, shards=rows.shards)
        if in_ball:
            S = self.domain.radius_like(theta).expand(mask.shape).reshape(-1)[index]
            found = minimum_in_ball(loss, self.domain.resized(S), flat[index])
        else:
            found = ridge_minimum(loss, flat[index])
        return flat.index_copy(0, index, found.theta).reshape(theta.shape)

    def _state(self) -> dict[str, Any]:
        return {
            "warm_rows": self._warm_rows.state_dict(),
            "other_rows": self._other_rows.state_dict(),
            "V": self._V.state_dict(),
            "H": self._H.state_dict(),
            "H_tau": self._H_tau.state_dict(),
            "theta_o": self._theta_o.clone(),
            "theta_tau": self._theta_tau.clone(),
            "stale": self._stale.clone(),
            "switches": self.switches.clone(),
            "warm_up_rounds": self.warm_up_rounds.clone(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        theta_o, theta_tau = (taken(state, n, self._theta_o) for n in ("theta_o", "theta_tau"))
        stale = taken(state, "stale", self._stale)
        switches, rounds = (taken(state, n, self.switches) for n in ("switches", "warm_up_rounds"))
        self._warm_rows.load_state_dict(state["warm_rows"])
        self._other_rows.load_state_dict(state["other_rows"])
        self._V.load_state_dict(state["V"])
        self._H.load_state_dict(state["H"])
        self._H_tau.load_state_dict(state["H_tau"])
        self._theta_o, self._theta_tau, self._stale = theta_o, theta_tau, stale
        self.switches, self.warm_up_rounds = switches, rounds
