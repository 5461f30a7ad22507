"""Pairs as rows: ``P(a beats b) = sigma(<x_a - x_b, theta>)``.

A pair is the Bernoulli row ``z = (x_a - x_b)/2``, of norm at most 1, with the parameter ``2 theta``
in the ball of radius 2 S; a tie is half a win, since a reward in [0, 1] of the right mean is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    NUMBERS,
    ValueChecks,
    as_floats,
    as_tensor,
    check_positive,
    check_shape,
    refuse,
    renamed,
)
from torchglb.choices import ScaleName
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import Bernoulli
from torchglb.preferences.widest import WidestPair, widest_pair
from torchglb.radii import Radius
from torchglb.rows.buffers import Rows
from torchglb.rows.checks import TOO_LONG, within_norm
from torchglb.rows.history import History
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.sets.base import on_mean_scale


def pair_rows(left: ArrayLike, right: ArrayLike, like: Tensor | History) -> Tensor:
    """``(x_a - x_b)/2`` for features of norm at most 1, of any equal shape.

    Args:
        left: x_a, as a tensor or numbers.
        right: x_b.
        like: gives dtype, device and d.
    """
    a, b = item_features("left", left, like), item_features("right", right, like)
    check_shape("right", b, a.shape)
    return 0.5 * (a - b)


def item_features(name: str, given: ArrayLike, like: Tensor | History) -> Tensor:
    """Of items, ``(..., d)``, as a tensor: of norm at most 1, or longer by rounding only."""
    x = as_tensor(name, given, dtype=like.dtype, device=like.device)
    dim = like.dim if isinstance(like, History) else like.shape[-1]
    if x.ndim == 0 or x.shape[-1] != dim:
        raise refuse(name, f"features of dimension {dim}", f"shape {tuple(x.shape)}")
    x = within_norm(x, given)
    checks = ValueChecks()
    checks.finite(name, x)
    norm = torch.linalg.vector_norm(x.detach(), dim=-1)
    longest = 1.0 + 64 * torch.finfo(x.dtype).eps
    checks.within(name, norm, 0.0, longest, lambda: f"features of norm at most 1 ({TOO_LONG})")
    checks.settle()
    return x


def pair_ball(dim: int, S: ArrayLike) -> Ball:
    """The ball of radius 2 S; S is a number or one for each problem."""
    return Ball(
        dim, 2.0 * (check_positive("S", S) if isinstance(S, NUMBERS) else as_floats("S", S))
    )


class PairHistory:
    """Comparisons as rows of a :class:`torchglb.History`.

    Args:
        dim: d of the items' features.
        batch_shape: ``*B``.
        aggregate: merge repeated pairs.
        dtype: float64 or float32.

    Example:
        >>> history = PairHistory(2)
        >>> history.append([1.0, 0.0], [0.0, 1.0], 1.0)
        >>> history.rows().X.tolist()
        [[0.5, -0.5]]
    """

    def __init__(
        self,
        dim: int,
        batch_shape: tuple[int, ...] = (),
        aggregate: bool = False,
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.history = History(dim, batch_shape, aggregate, family=Bernoulli(), dtype=dtype)

    def __len__(self) -> int:
        """The number of comparisons."""
        return len(self.history)

    def append(self, left: ArrayLike, right: ArrayLike, winner: ArrayLike) -> None:
        """Adds comparisons: features ``(*B, d)`` or ``(*B, k, d)``, ``winner`` 1 for the left."""
        rows = pair_rows(left, right, self.history)
        try:
            self.history.append(rows, winner)
        except InputError as error:
            raise renamed(error, r="winner") from None

    def rows(self) -> Rows:
        """A copy of the rows."""
        return self.history.rows()


class PreferenceSet:
    """A snapshot of where theta can be, asked about items.

    Args:
        region: the set of ``2 theta``.

    Example:
        >>> sequence = PreferenceSequence(2, S=2.0, delta=0.05)
        >>> sequence.update([1.0, 0.0], [0.0, 1.0], 1.0)
        >>> chance = sequence.current().probability([1.0, 0.0], [0.0, 1.0])
        >>> bool(0 < chance.lower < chance.upper < 1)
        True
    """

    def __init__(self, region: LikelihoodRatioSet) -> None:
        self.region = region

    def difference(self, left: ArrayLike, right: ArrayLike) -> Interval:
        """Where ``<x_a - x_b, theta>`` can be: features ``(*B, d)`` or ``(*B, K, d)``."""
        return self._interval(left, right, "linear")

    def probability(self, left: ArrayLike, right: ArrayLike) -> Interval:
        """Where the chance that the left item wins can be."""
        return self._interval(left, right, "mean")

    def _interval(self, left: ArrayLike, right: ArrayLike, scale: ScaleName) -> Interval:
        like = self.region.center
        a, b = item_features("left", left, like), item_features("right", right, like)
        check_shape("right", b, a.shape)
        found = self.region.contrast(0.5 * a, 0.5 * b)
        return on_mean_scale(self.region.family, found) if scale == "mean" else found

    def widest(self, items: ArrayLike, tol: float = 0.01) -> list[WidestPair]:
        """The pair of items ``(*B, K, d)`` whose difference is known least, for each problem."""
        items = item_features("items", items, self.region.center)
        check_shape("items", items, (*self.region.batch_shape, "K", self.region.dim))
        return [
            widest_pair(region, features, tol=tol) for region, features in each(self.region, items)
        ]


def each(region: LikelihoodRatioSet, items: Tensor) -> list[tuple[LikelihoodRatioSet, Tensor]]:
    """The problems of a batch, one by one; a batch of several axes is refused."""
    if len(region.batch_shape) > 1:
        raise refuse("batch_shape", "at most one axis", tuple(region.batch_shape))
    if not region.batch_shape:
        return [(region, items)]
    return [(region[b], items[b]) for b in range(len(items))]


class PreferenceSequence:
    """Confidence sets for preferences: valid at all times, however the pairs were chosen.

    Args:
        dim: d of the items' features, which have norm at most 1.
        S: ``|theta*| <= S``; a number, or one for each problem.
        delta: the failure probability.
        radius: as in :class:`torchglb.ConfidenceSequence`.
        batch_shape: ``*B``.
        aggregate: merge repeated pairs.
        dtype: float64 or float32.

    Example:
        >>> sequence = PreferenceSequence(2, S=2.0, delta=0.05)
        >>> sequence.update([[1.0, 0.0]] * 80, [[0.0, 1.0]] * 80, [1.0] * 70 + [0.0] * 10)
        >>> chance = sequence.current().probability([1.0, 0.0], [0.0, 1.0])
        >>> bool(chance.lower > 0.5)
        True
    """

    def __init__(
        self,
        dim: int,
        S: ArrayLike,
        delta: float,
        radius: str | Radius = "pac-bayes",
        batch_shape: tuple[int, ...] = (),
        *,
        aggregate: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.sequence = ConfidenceSequence(
            Bernoulli(),
            pair_ball(dim, S),
            delta,
            radius,
            batch_shape=batch_shape,
            aggregate=aggregate,
            dtype=dtype,
        )

    def __len__(self) -> int:
        """The number of comparisons so far."""
        return len(self.sequence)

    def update(
        self,
        left: ArrayLike,
        right: ArrayLike,
        winner: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds comparisons: features ``(*B, d)`` or ``(*B, k, d)``.

        Results may come late and out of order, as long as the delay does not depend on who won,
        given the pair and the past.

        Args:
            left: of the first items.
            right: of the second ones.
            winner: 1 if the first one won, 0 if the second one did, 1/2 for a tie.
            weight: in [0, 1], fixed before the result was seen; 1 if left out.
            mask: False where there is no result, whatever ``winner`` is there.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        rows = pair_rows(left, right, self.sequence.history)
        try:
            self.sequence.update(rows, winner, weight, mask)
        except InputError as error:
            raise renamed(error, r="winner") from None

    def current(self) -> PreferenceSet:
        """The set now."""
        return PreferenceSet(self.confidence_set())

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set of ``2 theta``, for rows ``(x_a - x_b)/2``.

        :class:`torchglb.decisions.BestArm` takes the sequence together with half of the items.
        """
        found = self.sequence.current()
        assert isinstance(found, LikelihoodRatioSet)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return self.sequence.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.sequence.load_state_dict(state)
