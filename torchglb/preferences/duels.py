"""Duels: a world of items with hidden scores, the regret of both items, and curves of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_count, refuse
from torchglb.decisions import BestArm
from torchglb.environments.bandits import uniform_in_ball
from torchglb.preferences.pair_policies import Pair, PairPolicy, make_pair_policy
from torchglb.random_streams import RandomStreams, derived_seed


class DuelWorld:
    """K items with features in the unit ball; ``P(a beats b) = sigma(<x_a - x_b, theta*>)``.

    Everything random is a function of (seed, replicate, round): policies that are compared meet the
    same items and the same luck.

    Args:
        items: K.
        dim: d.
        S: ``|theta*| = S - 1``, in a random direction for each replicate; a number or ``(N)``.
        replicates: N, or the names of N replicates.
        seed: of everything random.

    Example:
        >>> world = DuelWorld(items=5, dim=2, S=3.0, replicates=4)
        >>> world.items.shape
        torch.Size([4, 5, 2])
    """

    def __init__(
        self, items: int, dim: int, S: ArrayLike, replicates: int | Tensor, seed: int = 0
    ) -> None:
        check_count("items", items, least=2)
        check_count("dim", dim, least=1)
        if not isinstance(replicates, Tensor):
            replicates = torch.arange(check_count("replicates", replicates, least=1))
        self._names, self.replicates = replicates, len(replicates)
        radius = torch.as_tensor(S, dtype=torch.float64).expand(self.replicates)
        if not bool((radius > 1.0).all()):
            raise refuse("S", "a number above 1, for |theta*| = S - 1", S)
        self.S, self.dim, self.seed = S, dim, seed
        direction = self._streams("theta").normal(dim, dtype=torch.float64)
        length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        self.theta_star = (radius - 1.0)[:, None] * direction / length
        drawn = uniform_in_ball(self._streams("items"), 0, 1, items, dim, torch.float64)
        self.items = drawn[:, 0]  # (N, K, d)
        self.scores = (self.items * self.theta_star[:, None, :]).sum(-1)  # (N, K)
        self._luck = self._streams("winners")

    def _streams(self, purpose: str) -> RandomStreams:
        seed = derived_seed(self.seed, f"duels {purpose}")
        return RandomStreams(seed, (self.replicates,), self._names, torch.device("cpu"))

    @property
    def best(self) -> Tensor:
        """The best item, ``(N)``."""
        return self.scores.argmax(-1)

    def features(self, index: Tensor) -> Tensor:
        """Of items by index, ``(N, d)``."""
        return self.items[torch.arange(self.replicates), index]

    def winner(self, t: int, pair: Pair) -> Tensor:
        """1 where the left item wins round t, else 0, ``(N)``."""
        left, right = (self._score(index) for index in pair)
        luck = self._luck.uniform_at(t, 1, dtype=torch.float64)[:, 0]
        return (luck < torch.sigmoid(left - right)).double()

    def regret(self, pair: Pair) -> Tensor:
        """How much likelier than even the best item is to beat the two, on average, ``(N)``."""
        top = self.scores.amax(-1)
        left, right = (torch.sigmoid(top - self._score(index)) for index in pair)
        return 0.5 * (left + right) - 0.5

    def _score(self, index: Tensor) -> Tensor:
        return self.scores.gather(-1, index[:, None])[:, 0]


@dataclass(frozen=True)
class DuelResult:
    """What a policy did.

    Attributes:
        regret: cumulated, ``(N, T)``.
        certified: the round after which the best item was certain, ``(N)``; T + 1 if never.
        right: whether the item that was certified first is the best one, ``(N)``; True if none was.
        missed: whether theta* was ever seen outside the confidence set, ``(N)``.

    Example:
        >>> world = DuelWorld(items=4, dim=2, S=3.0, replicates=2)
        >>> policy = make_pair_policy("random-pairs", dim=2, S=3.0, batch_shape=(2,))
        >>> found = play_duels(policy, world, horizon=5)
        >>> found.missed.shape, bool((found.regret >= 0).all())
        ((2,), True)
    """

    regret: np.ndarray[Any, Any]
    certified: np.ndarray[Any, Any]
    right: np.ndarray[Any, Any]
    missed: np.ndarray[Any, Any]


@torch.no_grad()
def play_duels(
    policy: PairPolicy, world: DuelWorld, horizon: int, look_every: int = 10
) -> DuelResult:
    """Plays a pair policy.

    Args:
        policy: with the batch ``(N,)`` of the world.
        world: the items.
        horizon: T.
        look_every: rounds between looks at the set: whether it has theta*, and whether the best
            item is certified.

    Example:
        >>> world = DuelWorld(items=4, dim=2, S=3.0, replicates=2)
        >>> policy = make_pair_policy("random-pairs", dim=2, S=3.0, batch_shape=(2,))
        >>> play_duels(policy, world, horizon=5).regret.shape
        (2, 5)
    """
    check_count("horizon", horizon, least=1)
    check_count("look_every", look_every, least=1)
    N = world.replicates
    regret = torch.zeros(N, horizon, dtype=torch.float64)
    certified = torch.full((N,), horizon + 1)
    right, missed = torch.ones(N, dtype=torch.bool), torch.zeros(N, dtype=torch.bool)
    for t in range(horizon):
        pair = policy.select(world.items)
        features = (world.features(pair.left), world.features(pair.right))
        policy.update(*features, world.winner(t, pair))
        regret[:, t] = world.regret(pair)
        if (t + 1) % look_every == 0:
            region = policy.confidence_set()
            missed |= ~region.contains(2.0 * world.theta_star)
            best = BestArm(region, 0.5 * world.items)
            new = best.should_stop() & (certified > horizon)
            certified = torch.where(new, t + 1, certified)
            right &= ~new | (best.recommendation()[:, 0] == world.best)
    return DuelResult(regret.cumsum(-1).numpy(), certified.numpy(), right.numpy(), missed.numpy())


def compare_duels(
    names: Sequence[str],
    *,
    items: int = 10,
    dim: int = 3,
    S: float = 3.0,
    replicates: int = 10,
    horizon: int = 500,
    delta: float = 0.05,
    seed: int = 0,
    look_every: int = 10,
) -> dict[str, DuelResult]:
    """Plays several pair policies against the same items and luck.

    Example:
        >>> found = compare_duels(["random-pairs"], items=3, dim=2, replicates=2, horizon=5)
        >>> found["random-pairs"].regret.shape
        (2, 5)
    """
    found = {}
    for name in names:
        world = DuelWorld(items, dim, S, replicates, seed)
        policy = make_pair_policy(
            name,
            dim=dim,
            S=S,
            delta=delta,
            batch_shape=(replicates,),
            aggregate=True,
            seed=derived_seed(seed, f"policy {name}"),
        )
        found[name] = play_duels(policy, world, horizon, look_every)
    return found
