"""A preference model as the last layer of any encoder: "a beats b", with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.checks import check_choice, check_count, kind_of, refuse, renamed
from torchglb.choices import SCALES, BallMode, ScaleName
from torchglb.errors import InputError
from torchglb.families import Bernoulli
from torchglb.heads import GLMHead, UnitBall
from torchglb.heads.embedding import at_least_float32, in_dtype_of
from torchglb.heads.unit_ball import unit_ball
from torchglb.preferences.pairs import PreferenceSet, pair_ball
from torchglb.preferences.widest import WidestPair
from torchglb.radii import Radius
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.turns import TakesTurns


class _PairEncoder(nn.Module):
    """``(phi(a) - phi(b))/2`` of stacked pairs ``(N, 2, *E)``."""

    def __init__(self, module: nn.Module, bound: UnitBall) -> None:
        super().__init__()
        self.module, self.bound = module, bound

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = self.embed(pairs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return 0.5 * (left - right)

    def embed(self, items: Tensor) -> Tensor:
        """phi of items ``(N, *E)``, in the unit ball."""
        raw, name = self.module(items), f"encoder {type(self.module).__name__}"
        if not isinstance(raw, Tensor):
            raise refuse(name, "a tensor of features", type(raw).__name__)
        if not raw.is_floating_point():
            raise refuse(name, "features of a floating-point dtype", raw.dtype)
        return self.bound(at_least_float32(raw))


class PairHead(TakesTurns, nn.Module):
    """Puts a calibrated Bradley-Terry model on the embedding of a network.

    ``P(a beats b) = sigma(<phi(a) - phi(b), theta>)`` with phi in the unit ball: a
    :class:`torchglb.GLMHead` on rows ``(phi(a) - phi(b))/2``. What that says of guarantees and
    gradients holds here: for an encoder that was fixed before the comparisons the intervals hold at
    all times at once, however pairs were chosen; in training mode gradients pass through the fit.

    Args:
        module: the encoder, from ``(N, *E)`` to ``(N, d)``: of prompts, items, images.
        dim: d.
        S: ``|theta*| <= S``.
        delta: the failure probability of the intervals.
        radius: of :class:`torchglb.ConfidenceSequence`.
        bound: how embeddings get into the unit ball, a mode of :class:`torchglb.UnitBall`.
        regularization: lambda of a ridge in the fit behind ``forward``.
        item_dims: the number of axes in ``*E``.
        dtype: of features and results.

    Example:
        >>> head = PairHead(nn.Linear(5, 2).double(), dim=2, S=3.0)
        >>> left, right = torch.randn(2, 20, 5).double()
        >>> head.update(left, right, torch.ones(20).double())
        >>> head.probability(left[:3], right[:3]).lower.shape
        torch.Size([3])
    """

    in_turn = (
        "update",
        "forward",
        "probability",
        "confidence_set",
        "widest",
        "state_dict",
        "load_state_dict",
    )

    def __init__(
        self,
        module: nn.Module,
        dim: int,
        S: float,
        *,
        delta: float = 0.05,
        radius: str | Radius = "pac-bayes",
        bound: BallMode | UnitBall = "smooth",
        regularization: float = 0.0,
        item_dims: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise refuse("module", "an nn.Module", kind_of(module))
        self._axes = check_count("item_dims", item_dims)
        self._encoder = _PairEncoder(module, unit_ball(bound))
        self.head = GLMHead(
            self._encoder,
            Bernoulli(),
            pair_ball(dim, S),
            delta=delta,
            radius=radius,
            bound="clip",  # half a difference is in the ball already
            regularization=regularization,
            context_dims=1 + item_dims,
            dtype=dtype,
        )
        # refusals name what was given, not what it is wrapped in
        self.head._door = replace(self.head._door, name=type(module).__name__)

    def __len__(self) -> int:
        """The number of comparisons so far."""
        return len(self.head)

    def _pairs(self, left: ArrayLike, right: ArrayLike) -> Tensor:
        rows = self.head.observations
        left, right = rows.as_contexts(left, "left"), rows.as_contexts(right, "right")
        for name, items in (("left", left), ("right", right)):
            if items.ndim not in (self._axes, self._axes + 1):
                expected = f"{self._axes} axes, or one more for several items"
                raise refuse(name, expected, f"shape {tuple(items.shape)}")
        if left.shape != right.shape:
            raise refuse("right", f"the shape of left {tuple(left.shape)}", tuple(right.shape))
        if left.dtype != right.dtype:
            dtype = torch.promote_types(left.dtype, right.dtype)
            left, right = left.to(dtype), right.to(dtype)
        return torch.stack([left, right], dim=left.ndim - self._axes)

    def update(
        self,
        left: ArrayLike,
        right: ArrayLike,
        winner: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds comparisons of items ``(*E)`` or ``(k, *E)``; winner 1 for the left, ties 1/2.

        Results may come late and out of order, as long as the delay does not depend on who won,
        given the pair and the past. ``weight`` and ``mask`` are those of
        :meth:`torchglb.GLMHead.update`.
        """
        pairs = self._pairs(left, right)
        try:
            self.head.update(pairs, winner, weight, mask)
        except InputError as error:
            raise renamed(error, rewards="winner") from None

    def forward(self, left: ArrayLike, right: ArrayLike) -> Tensor:
        """The chance that the left items win, by the fit; differentiable in training mode."""
        return self.head(self._pairs(left, right))

    def probability(
        self,
        left: ArrayLike,
        right: ArrayLike,
        scale: ScaleName = "mean",
        *,
        differentiable: bool = False,
    ) -> Interval:
        """Where the chance that the left items win can be.

        Args:
            left: items ``(*E)`` or ``(K, *E)``.
            right: the same.
            scale: ``"mean"``, or ``"linear"`` for ``<phi(a) - phi(b), theta>``.
            differentiable: with respect to items and the encoder's parameters.
        """
        check_choice("scale", scale, SCALES)
        pairs = self._pairs(left, right)
        return self.head.confidence(pairs, scale, differentiable=differentiable)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's, but a state that is refused leaves weights and comparisons as they were."""
        with self.head.unchanged_within(self):
            return super().load_state_dict(state_dict, strict, assign)

    @torch.no_grad()
    def embed(self, items: ArrayLike) -> Tensor:
        """The embeddings ``(K, d)`` of items ``(K, *E)``, in the unit ball."""
        items = self.head.observations.as_contexts(items, "items")
        items = in_dtype_of(items, self._encoder.parameters())
        return self._encoder.embed(items).to(self.head.observations.rewards.dtype)

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set of ``2 theta``, for :class:`torchglb.decisions.BestArm` with half embeddings."""
        found = self.head.sequence().current()
        assert isinstance(found, LikelihoodRatioSet)
        return found

    def widest(self, items: ArrayLike) -> WidestPair:
        """The pair of items ``(K, *E)`` to ask about next: whose difference is known least."""
        return PreferenceSet(self.confidence_set()).widest(self.embed(items))[0]
