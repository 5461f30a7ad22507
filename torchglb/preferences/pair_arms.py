"""Duels where policies choose arms: an arm is a pair of items.

The environment ``duels`` offers all pairs ``i <= j`` of K items, row ``(x_i - x_j)/2`` with the
parameter ``2 theta*`` in the ball of 2 S, and counts the regret of both items. The pair policies
play it under their names, so that presets and the command line can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import refuse
from torchglb.domain import Ball
from torchglb.environments.base import Environment
from torchglb.environments.base import register as register_environment
from torchglb.families import Bernoulli, GLMFamily
from torchglb.policies.base import Policy
from torchglb.policies.registry import register
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import PolicySettings
from torchglb.preferences.duels import DuelWorld
from torchglb.preferences.pair_policies import (
    DuelOFU,
    LaplacePairs,
    MaxInP,
    Pair,
    PairPolicy,
    RandomPairs,
    WidestPairs,
)
from torchglb.preferences.pairs import pair_ball
from torchglb.radii import Radius
from torchglb.sets import LikelihoodRatioSet


@register_environment
class Duels(Environment):
    """K items, drawn once, that meet in pairs; the regret is that of both items.

    Args:
        family: Bernoulli.
        S: ``|theta*| <= S``, of the items, ``(N)``.
        replicates: names, ``(N)``.
        seed: of everything random.
        dim: d.
        items: K.

    Example:
        >>> import torchglb as glb
        >>> world = glb.environments.make("duels", family=glb.Bernoulli(), S=3.0, items=5)
        >>> world.arms(0).shape
        torch.Size([1, 15, 2])
    """

    name = "duels"
    fixed = True
    pairs = True

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        seed: int = 0,
        dim: int = 2,
        items: int = 10,
    ) -> None:
        super().__init__(family, S, replicates, seed=seed, dim=dim)
        if not isinstance(family, Bernoulli):
            raise refuse("family", "bernoulli, for one winner of two", type(family).__name__)
        self.world = DuelWorld(items, dim, S.cpu(), self.replicates.cpu(), seed)
        self.domain = pair_ball(dim, S)
        self.theta_star = (2.0 * self.world.theta_star).to(S)
        first, second = torch.triu_indices(items, items)
        self._first, self._second = first.to(S.device), second.to(S.device)
        features = self.world.items.to(S)
        self._arms = 0.5 * (features[:, first] - features[:, second])

    def arms(self, t: int) -> Tensor:  # noqa: D102
        return self._arms

    def _pair(self, index: Tensor | None) -> Pair:
        assert index is not None
        return Pair(self._first[index].cpu(), self._second[index].cpu())

    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        return self.world.winner(t, self._pair(index)).to(self.S)

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        return self.world.regret(self._pair(index)).to(self.S)


def items_of(arms: Tensor) -> Tensor:
    """The items ``x_i - x_0 (*B, K, d)`` of all pairs ``i <= j`` in their order."""
    count = arms.shape[-2]
    K = (math.isqrt(8 * count + 1) - 1) // 2
    items = -2.0 * arms[..., :K, :]
    first, second = torch.triu_indices(K, K)
    rows = 0.5 * (items[..., first, :] - items[..., second, :])
    if rows.shape != arms.shape or not torch.allclose(rows, arms, rtol=0.0, atol=1e-6):
        raise refuse("arms", "all pairs (x_i - x_j)/2 with i <= j, in that order", "others")
    return items


class PairArms(Policy):
    """A pair policy where the arms are pairs.

    Args:
        family: Bernoulli.
        domain: the ball of 2 S.
        delta: the failure level.
        radius: of the confidence sets.
        aggregate: merge repeated pairs.
        settings: those of :class:`Policy`: at most one batch axis, float64, on a CPU.
    """

    requires = Requirements(families=(Bernoulli,), pairs=True)
    takes_weights = True
    chooses: ClassVar[type[PairPolicy]]

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        radius: str | Radius = "pac-bayes",
        aggregate: bool = True,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(family, domain, delta, **settings)
        if self.dtype != torch.float64 or self.device.type != "cpu":
            raise refuse("dtype, device", "float64 on a CPU", f"{self.dtype} on {self.device}")
        self.pairs = self.chooses(
            domain.dim,
            0.5 * domain.radius,
            delta,
            tuple(self.batch_shape),
            radius=radius,
            aggregate=aggregate,
            seed=settings.get("seed", 0),
            replicates=settings.get("replicates"),
            validate=self.validate,
        )

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the pair to compare."""
        items = items_of(self._check_arms(arms))
        pair, K = self.pairs._select(items), items.shape[-2]
        i, j = torch.minimum(*pair), torch.maximum(*pair)
        return i * K - i * (i - 1) // 2 + (j - i)

    def _scores(self, arms: Tensor) -> Tensor:
        """1 for the pair of :meth:`select`, else 0."""
        return torch.nn.functional.one_hot(self.select(arms), arms.shape[-2]).to(arms)

    def _update(self, x: Tensor, r: Tensor) -> None:
        self.pairs._rows.update(x, r)

    def _update_weighted(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        self.pairs._rows.update(x, r, w)

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set of ``2 theta``."""
        return self.pairs.confidence_set()

    def _state(self) -> dict[str, Any]:
        return self.pairs.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.pairs.load_state_dict(state)


@register
class DuelOFUArms(PairArms):
    """duel-ofu: the best at the estimate against its most dangerous rival, exactly."""

    name, chooses = DuelOFU.name, DuelOFU


@register
class MaxInPArms(PairArms):
    """max-in-p: the widest pair of the items that may be the best."""

    name, chooses = MaxInP.name, MaxInP


@register
class WidestPairArms(PairArms):
    """widest-pair: the pair whose difference is known least."""

    name, chooses = WidestPairs.name, WidestPairs


@register
class RandomPairArms(PairArms):
    """random-pairs: two different items, uniformly at random."""

    name, chooses = RandomPairs.name, RandomPairs


@register
class LaplacePairArms(PairArms):
    """laplace-pairs: the largest difference in the inverse Hessian, a heuristic."""

    name, chooses = LaplacePairs.name, LaplacePairs
