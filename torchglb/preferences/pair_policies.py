"""Which pair to compare next: dueling bandits and active queries, with exact confidence sets.

The contract of a pair policy is that of :class:`torchglb.policies.Policy` with two choices instead
of one: ``select(items) -> (left, right)``, ``update(left, right, winner)``, ``confidence_set()``,
``state_dict()``. The set is that of OFUGLB on rows ``(x_a - x_b)/2`` in the ball of 2 S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    check_batch_shape,
    check_choice,
    check_entries,
    check_shape,
    refuse,
    renamed,
)
from torchglb.errors import InputError
from torchglb.families import Bernoulli
from torchglb.identity import reading_state
from torchglb.policies.ofuglb import OFUGLB
from torchglb.preferences.pairs import each, item_features, pair_ball, pair_rows
from torchglb.preferences.widest import in_double, rough_supports, widest_pair
from torchglb.radii import Radius
from torchglb.sets import LikelihoodRatioSet
from torchglb.turns import TakesTurns


class Pair(NamedTuple):
    """Indices of two items, ``(*B)`` each; they may be the same one.

    Example:
        >>> policy = make_pair_policy("random-pairs", dim=2, S=3.0)
        >>> left, right = policy.select([[1.0, 0.0], [0.0, 1.0]])
        >>> left.shape
        torch.Size([])
    """

    left: Tensor
    right: Tensor


class PairPolicy(TakesTurns, ABC):
    """Chooses pairs of items for a batch of replicates.

    Args:
        dim: d of the items' features, which have norm at most 1.
        S: ``|theta*| <= S``; a number, or one for each replicate.
        delta: the failure probability of the sets.
        batch_shape: ``*B``; at most one axis.
        radius: of the confidence sets.
        aggregate: merge repeated pairs: for fixed items.
        seed: of the policy's own randomness.
        replicates: names of the replicates.
        validate: look at the values of what is passed in.

    Example:
        >>> items = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
        >>> policy = make_pair_policy("widest-pair", dim=2, S=3.0)
        >>> pair = policy.select(items)
        >>> policy.update(items[pair.left], items[pair.right], 1.0)
        >>> policy.rounds
        1
    """

    in_turn = ("select", "update", "confidence_set", "best", "state_dict", "load_state_dict")

    name: ClassVar[str]

    def __init__(
        self,
        dim: int,
        S: ArrayLike,
        delta: float = 0.05,
        batch_shape: tuple[int, ...] = (),
        *,
        radius: str | Radius = "pac-bayes",
        aggregate: bool = False,
        seed: int = 0,
        replicates: ArrayLike | None = None,
        validate: bool = True,
    ) -> None:
        if len(check_batch_shape(batch_shape)) > 1:
            raise refuse("batch_shape", "at most one axis", batch_shape)
        self._rows = OFUGLB(
            Bernoulli(),
            pair_ball(dim, S),
            delta,
            batch_shape=batch_shape,
            radius=radius,
            aggregate=aggregate,
            seed=seed,
            replicates=replicates,
            validate=validate,
        )
        self.dim, self.delta, self.batch_shape = dim, delta, torch.Size(batch_shape)

    @property
    def rounds(self) -> int:
        """Comparisons so far."""
        return self._rows.rounds

    def select(self, items: ArrayLike) -> Pair:
        """The pair to compare, of items ``(*B, K, d)`` with K at least 2."""
        items = item_features("items", items, self._like)
        check_shape("items", items, (*self.batch_shape, "K", self.dim))
        if items.shape[-2] < 2:
            raise refuse("items", "at least two", f"shape {tuple(items.shape)}")
        return self._select(items)

    @property
    def _like(self) -> Tensor:
        return torch.zeros(self.dim, dtype=self._rows.dtype, device=self._rows.device)

    @abstractmethod
    def _select(self, items: Tensor) -> Pair:
        """The pair of items that have passed the checks."""

    def update(
        self,
        left: ArrayLike,
        right: ArrayLike,
        winner: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Learns from a comparison, or from k: features ``(*B, d)`` or ``(*B, k, d)``.

        Results may come late and out of order, as long as the delay does not depend on who won,
        given the pair and the past.

        Args:
            left: of the first item.
            right: of the second one.
            winner: 1 if the first one won, 0 if the second one did, 1/2 for a tie.
            weight: in [0, 1], fixed before the result was seen; 1 if left out.
            mask: False where there is no result, whatever ``winner`` is there.

        Raises:
            InputError: on any argument that does not fit; the state is then unchanged.
        """
        rows = pair_rows(left, right, self._like)
        try:
            self._rows.update(rows, winner, weight, mask)
        except InputError as error:
            raise renamed(error, r="winner") from None

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set of ``2 theta``, for rows ``(x_a - x_b)/2``."""
        return self._rows.confidence_set()

    def best(self, items: Tensor) -> Tensor:
        """The item that is best at the estimate, ``(*B)``."""
        center = self.confidence_set().center
        return (items * center[..., None, :]).sum(-1).argmax(-1)

    def state_dict(self) -> dict[str, Any]:
        """The whole state."""
        return {"pair_policy": self.name, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues bit by bit from a saved state of the same policy and settings."""
        check_entries("state", state, ())
        if state.get("pair_policy") != self.name:
            raise refuse("state", f"a state of {self.name}", state.get("pair_policy"))
        with reading_state(self.name):
            self._rows.load_state_dict(state["rows"])

    def _one_by_one(self, items: Tensor) -> list[tuple[LikelihoodRatioSet, Tensor]]:
        return each(self.confidence_set(), items)

    def _pair(self, found: list[tuple[int, int]]) -> Pair:
        index = torch.tensor(found, dtype=torch.int64).reshape(*self.batch_shape, 2)
        return Pair(index[..., 0], index[..., 1])


class DuelOFU(PairPolicy):
    """The best at the estimate against its most dangerous rival, ``argmax h(x - x_a)``, exactly.

    Once the best item is certified it meets itself, and there is nothing left to lose.

    Example:
        >>> policy = DuelOFU(2, S=2.0)
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> pair = policy.select(items)
        >>> policy.update(items[pair.left], items[pair.right], 1.0)
        >>> policy.rounds
        1
    """

    name = "duel-ofu"

    def _select(self, items: Tensor) -> Pair:
        left = self.best(items)
        place = left[..., None, None].expand(*left.shape, 1, items.shape[-1])
        right = self._rows.select(0.5 * (items - items.gather(-2, place)))
        return Pair(left, right)


class WidestPairs(PairPolicy):
    """The pair whose difference is known least: active queries for the whole order."""

    name = "widest-pair"

    def _select(self, items: Tensor) -> Pair:
        found = [widest_pair(region, features) for region, features in self._one_by_one(items)]
        return self._pair([(pair.left, pair.right) for pair in found])


class MaxInP(PairPolicy):
    """The widest pair of the items that may be the best (Maximum-Informative-Pair, Saha 2021).

    Item i is in the race as long as ``h(x_i - x_j) >= 0`` for all j.
    """

    name = "max-in-p"

    def _select(self, items: Tensor) -> Pair:
        found = []
        for region, features in self._one_by_one(items):
            race = in_race(region, features)
            if int(race.sum()) == 1:
                best = int(race.nonzero()[0, 0])
                found.append((best, best))
            else:
                pair = widest_pair(region, features, race)
                found.append((pair.left, pair.right))
        return self._pair(found)


class RandomPairs(PairPolicy):
    """Two different items, uniformly at random."""

    name = "random-pairs"

    def _select(self, items: Tensor) -> Pair:
        K = items.shape[-2]
        u = self._rows.random.uniform(2, dtype=torch.float64)
        left = (u[..., 0] * K).long()
        right = (left + 1 + (u[..., 1] * (K - 1)).long()) % K
        return Pair(left, right)


class LaplacePairs(PairPolicy):
    """The largest ``|x_i - x_j|`` in the inverse Hessian: the usual heuristic, without guarantee.

    Its sets are valid all the same: they do not ask how pairs were chosen.
    """

    name = "laplace-pairs"

    def _select(self, items: Tensor) -> Pair:
        found = []
        for region, features in self._one_by_one(items):
            hessian = region.likelihood.hessian(region.center)
            S = region.domain.radius_like(features)
            matrix = hessian + torch.eye(self.dim, dtype=hessian.dtype) / S.square()
            local = torch.linalg.solve_triangular(
                torch.linalg.cholesky(matrix), features.mT, upper=False
            ).mT
            place = int(torch.cdist(local, local).argmax())
            found.append(divmod(place, len(features)))
        return self._pair(found)


@torch.no_grad()
def in_race(region: LikelihoodRatioSet, items: Tensor) -> Tensor:
    """Which items of ``(K, d)`` may be the best, ``(K)``: ``h(x_i - x_j) >= 0`` for every j.

    Exact programs are solved only for pairs that an ellipsoid does not decide, the likeliest first:
    one that is lost for certain is enough.

    Example:
        >>> from torchglb.preferences import PreferenceSequence
        >>> sequence = PreferenceSequence(2, S=3.0, delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 200, [[0.0, 1.0]] * 200, [1.0] * 180 + [0.0] * 20)
        >>> in_race(sequence.current().region, torch.eye(2).double())
        tensor([ True, False])
    """
    region, items = in_double(region, items)
    values = 0.5 * (items @ region.center)
    middle = values[:, None] - values[None, :]
    left = (rough_supports(region, items) >= 0.0).all(-1)
    strongest = int(values.argmax())
    for rivals in ([strongest], list(range(len(items)))):
        i, j = torch.nonzero((middle < 0.0) & left[:, None], as_tuple=True)
        asked = torch.isin(j, torch.tensor(rivals))
        i, j = i[asked], j[asked]
        if len(i):
            lost = region.upper_bound(0.5 * (items[i] - items[j]), tol=1e-6) < 0.0
            left[i[lost]] = False
    return left


PAIR_POLICIES: dict[str, type[PairPolicy]] = {
    policy.name: policy for policy in (DuelOFU, MaxInP, WidestPairs, RandomPairs, LaplacePairs)
}


def make_pair_policy(
    name: str,
    *,
    dim: int,
    S: ArrayLike,
    delta: float = 0.05,
    batch_shape: tuple[int, ...] = (),
    radius: str | Radius = "pac-bayes",
    aggregate: bool = False,
    seed: int = 0,
    replicates: ArrayLike | None = None,
) -> PairPolicy:
    """Builds a pair policy by name: duel-ofu, max-in-p, widest-pair, random-pairs, laplace-pairs.

    Example:
        >>> make_pair_policy("duel-ofu", dim=2, S=3.0).rounds
        0
    """
    policy = PAIR_POLICIES[check_choice("name", name, tuple(PAIR_POLICIES))]
    return policy(
        dim,
        S,
        delta,
        batch_shape,
        radius=radius,
        aggregate=aggregate,
        seed=seed,
        replicates=replicates,
    )
