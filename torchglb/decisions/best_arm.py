"""The best arm, and when to stop looking for it.

Arm i is the best up to eps for certain once ``max over j of h(x_j - x_i) <= eps``, h the support
function of a confidence set. The set is valid at all times at once, whatever chose the arms; so is
this, and one may look after every observation.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_tensor,
    check_count,
    check_shape,
    check_tolerance,
    kind_of,
    refuse,
)
from torchglb.sets import ConfidenceSet

#: with a tolerance, the arm that is certified first need not be the estimated best: so many are
#: tried
LEADERS = 3


@runtime_checkable
class _HasSet(Protocol):
    def confidence_set(self) -> ConfidenceSet | None: ...


@runtime_checkable
class _HasCurrent(Protocol):
    def current(self) -> ConfidenceSet: ...


class BestArm:
    """Certified stopping for a policy, a confidence sequence or a log.

    Args:
        source: a policy with a confidence set, a :class:`torchglb.ConfidenceSequence` that a log is
            fed to, or a confidence set.
        arms: ``(K, d)``, or ``(*B, K, d)``.
        epsilon: an arm counts as the best if no other is better by more, in ``<x, theta>``.
        k: look for the k best; any of them then is at most epsilon behind any of the others.

    Example:
        >>> import torchglb as glb
        >>> log = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
        >>> log.update([[1.0, 0.0], [0.0, 1.0]] * 200, ([1.0, 0.0] * 9 + [0.0, 1.0]) * 20)
        >>> best = BestArm(log, torch.eye(2).double())
        >>> bool(best.should_stop()), best.candidates().tolist()
        (True, [True, False])
        >>> best.statement().partition(", at")[0]
        'With probability at least 0.95, arm 0 is the best of 2'
    """

    def __init__(self, source: Any, arms: ArrayLike, epsilon: float = 0.0, k: int = 1) -> None:
        if not isinstance(source, ConfidenceSet | _HasSet | _HasCurrent):
            expected = "a policy, a confidence sequence or a confidence set"
            raise refuse("source", expected, kind_of(source))
        self._source = source
        region = self._region()
        like = region.center
        arms = as_tensor("arms", arms, dtype=like.dtype, device=like.device)
        if arms.ndim == 2:
            arms = arms.expand(*region.batch_shape, *arms.shape)
        check_shape("arms", arms, (*region.batch_shape, "K", region.dim))
        checks = ValueChecks()
        checks.finite("arms", arms)
        checks.settle()
        self.arms, self.epsilon = arms, check_tolerance("epsilon", epsilon)
        self.k = check_count("k", k, least=1)
        if arms.shape[-2] < 2:
            raise refuse("arms", "at least two, to compare", arms.shape[-2])
        if self.k >= arms.shape[-2]:
            raise refuse("k", f"fewer than the {arms.shape[-2]} arms", k)

    def _region(self) -> ConfidenceSet:
        source = self._source
        if isinstance(source, ConfidenceSet):
            return source
        found = source.confidence_set() if isinstance(source, _HasSet) else source.current()
        if not isinstance(found, ConfidenceSet):
            raise refuse("source", "one with a confidence set", kind_of(source))
        return found

    # ---- decisions -----------------------------------------------------------------------

    def leaders(self) -> Tensor:
        """The k arms that are best at the estimate, ``(*B, k)``, the best first."""
        return self._values(self._region()).topk(self.k, -1).indices

    def margin(self) -> Tensor:
        """``max over others j and leaders i of h(x_j - x_i)``, certified from above, ``(*B)``.

        What the best of the others may be ahead of the leaders, at most.
        """
        return self._certified(self._region())[1]

    def should_stop(self) -> Tensor:
        """Whether the k best are known up to epsilon, ``(*B)``."""
        return self.margin() <= self.epsilon

    def recommendation(self) -> Tensor:
        """The arms to name, ``(*B, k)``: those of :meth:`should_stop`, else the leaders."""
        return self._certified(self._region())[0]

    def candidates(self) -> Tensor:
        """Which arms may be among the k best, ``(*B, K)``.

        Not those of which k others are better for certain: ``h(x_i - x_j) < 0``.
        """
        region, arms = self._region(), self.arms
        K, leaders = arms.shape[-2], self.leaders()
        best = _rows(arms, leaders)
        ahead = self._bounds(region, arms[..., :, None, :], best[..., None, :, :]) >= 0.0
        possible = ahead.any(-1) | torch.zeros_like(ahead[..., 0]).scatter(-1, leaders, True)
        # an arm may be behind others than the leaders: all pairs of those that are left
        index = [places.nonzero()[:, 0] for places in possible.reshape(-1, K)]
        most = max(len(places) for places in index)
        chosen = torch.stack([_padded(places, most) for places in index])
        rivals = chosen.reshape(*possible.shape[:-1], most)
        left = _rows(arms, rivals)
        bounds = self._bounds(region, left[..., :, None, :], arms[..., None, :, :])
        behind = (bounds < 0.0).sum(-1)
        found = torch.zeros_like(possible).scatter(-1, rivals, behind < self.k)
        return found & possible

    def statement(self) -> Any:
        """What is certain now, in words; a list of sentences for a batch."""
        region = self._region()
        named, margin = self._certified(region)
        stop = margin <= self.epsilon
        possible = self.candidates()
        sentences = [
            self._sentence(region, arms.tolist(), bool(done), may.nonzero()[:, 0].tolist())
            for arms, done, may in zip(
                named.reshape(-1, self.k),
                stop.reshape(-1),
                possible.reshape(-1, possible.shape[-1]),
                strict=True,
            )
        ]
        return sentences if region.batch_shape else sentences[0]

    def _sentence(self, region: ConfidenceSet, named: list[int], done: bool, may: list[int]) -> str:
        K, delta = self.arms.shape[-2], region.delta
        sure = f"With probability at least {1.0 - delta:.4g}, " if delta is not None else ""
        close = f" up to {self.epsilon:g}" if self.epsilon else ""
        rest = "at whatever time this is read and however the arms were chosen."
        if not done:
            return f"{sure}the best of {K} is among {_listed(may)}; more is not certain yet, {rest}"
        if self.k == 1:
            return f"{sure}arm {named[0]} is the best of {K}{close}, {rest}"
        return f"{sure}arms {_listed(named)} are the {self.k} best of {K}{close}, {rest}"

    # ---- contrasts -----------------------------------------------------------------------

    def _values(self, region: ConfidenceSet) -> Tensor:
        return (self.arms * region.center[..., None, :]).sum(-1)

    def _certified(self, region: ConfidenceSet) -> tuple[Tensor, Tensor]:
        """The k arms with the least margin, and that margin."""
        arms, values = self.arms, self._values(region)
        K = arms.shape[-2]
        tried = min(LEADERS, K) if self.epsilon > 0 and self.k == 1 else 1
        order = values.topk(max(self.k, tried), -1).indices
        sets = [order[..., : self.k]] if tried == 1 else [order[..., [i]] for i in range(tried)]
        margins = torch.stack([self._margin(region, leaders) for leaders in sets], -1)
        best = margins.argmin(-1, keepdim=True)
        place = best[..., None].expand(*best.shape, self.k)
        named = torch.stack(sets, -2).gather(-2, place)[..., 0, :]
        return named, margins.gather(-1, best)[..., 0]

    def _margin(self, region: ConfidenceSet, leaders: Tensor) -> Tensor:
        """``max h(x_j - x_i)`` over leaders i and all others j."""
        best = _rows(self.arms, leaders)[..., :, None, :]
        bounds = self._bounds(region, self.arms[..., None, :, :], best)  # (*B, k, K)
        own = leaders[..., None, :].expand(*bounds.shape[:-1], self.k)
        return bounds.scatter(-1, own, -torch.inf).amax((-2, -1))

    def _bounds(self, region: ConfidenceSet, first: Tensor, second: Tensor) -> Tensor:
        """``h(x - y)``, from above, for arms that broadcast to ``(*B, P, Q, d)``; 0 for x = y."""
        first, second = torch.broadcast_tensors(first, second)
        one, other = first.flatten(-3, -2), second.flatten(-3, -2)
        bounds = region.difference_bound(one, other)
        bounds = torch.where((one == other).all(-1), torch.zeros_like(bounds), bounds)
        return bounds.reshape(first.shape[:-1])


def _rows(arms: Tensor, index: Tensor) -> Tensor:
    """The arms ``(*B, k, d)`` of an index ``(*B, k)``."""
    return arms.gather(-2, index[..., None].expand(*index.shape, arms.shape[-1]))


def _padded(places: Tensor, length: int) -> Tensor:
    """So many places: the first one is repeated."""
    return torch.cat([places, places[:1].expand(length - len(places))])


def _listed(places: list[int]) -> str:
    shown = ", ".join(str(i) for i in places[:10])
    return shown + (f" and {len(places) - 10} more" if len(places) > 10 else "")
