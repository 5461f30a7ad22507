"""Conservative play: never certifiably worse than a share of a baseline.

An arm is played only if, whatever theta of the confidence set is true, the cumulated mean reward so
far and of this round stays at or above ``1 - alpha`` times that of the baseline; else the baseline
is. With probability 1 - delta the constraint holds in every round (Wu et al. 2016, Kazerouni et al.
2017, here with certified bounds on the means of a GLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_indices,
    as_tensor,
    check_probability,
    check_same,
    check_shape,
    refuse,
)
from torchglb.policies.base import BoundTracker, Policy
from torchglb.sets import ConfidenceSet, Interval

#: roundings in the sums of the ledger
ROUNDING = 1e-9


class Conservative(Policy):
    """A policy on a leash; ``make(name, conservative=(baseline, alpha))`` builds one too.

    The ledger keeps, for every arm of the current arm set, how often it was played, with the best
    bounds on its mean so far (a running intersection, which costs no probability). When the arm set
    changes, what the old one has earned is carried over with the bounds of that time. A call of
    :meth:`select` is a round that is played: rewards may come later.

    Args:
        policy: with a confidence set that is proven to hold theta* (``policy.guaranteed``); its
            delta is that of the constraint.
        baseline: the index of the baseline among the arms, a number or ``(*B)``.
        alpha: the share that may be lost, in (0, 1).
        baseline_mean: the baseline's mean reward, if it is known; a number or ``(*B)``.

    Example:
        >>> import torchglb as glb
        >>> inner = glb.policies.OFUGLBPB(glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> safe = Conservative(inner, baseline=1, alpha=0.1)
        >>> int(safe.select(torch.eye(2).double()))  # nothing is known yet
        1
    """

    name = "conservative"

    def __init__(
        self,
        policy: Policy,
        baseline: ArrayLike,
        alpha: float,
        baseline_mean: ArrayLike | None = None,
    ) -> None:
        if not isinstance(policy, Policy) or policy.confidence_set() is None:
            raise refuse("policy", "a policy with a confidence set", type(policy).__name__)
        if not policy.guaranteed:
            expected = "one whose set is proven to hold theta* (constants='proven')"
            raise refuse("policy", expected, f"{policy.name}, whose set is not")
        if getattr(policy, "forgetting", None) is not None:
            raise refuse("policy", "one that forgets nothing: sums need all rounds", policy)
        super().__init__(
            policy.family,
            policy.domain,
            policy.delta,
            horizon=policy.horizon,
            batch_shape=tuple(policy.batch_shape),
            validate=policy.validate,
            dtype=policy.dtype,
            device=policy.device,
        )
        low, _ = policy.family.reward_range
        if low < 0.0:
            expected = "one of non-negative rewards, of which a share can be asked for"
            raise refuse("family", expected, type(policy.family).__name__)
        self.policy, self.alpha = policy, check_probability("alpha", alpha)
        self.takes_weights = policy.takes_weights
        self.baseline = self._index(baseline)
        self._known = None if baseline_mean is None else self._mean(baseline_mean)
        shape = policy.batch_shape
        #: earned for certain beyond (1 - alpha) of the baseline, by earlier arm sets
        self._earned = torch.zeros(shape, dtype=torch.float64, device=policy.device)
        self._arms: Tensor | None = None
        self._plays = self._lower = self._upper = torch.zeros(0)

    def _index(self, baseline: ArrayLike) -> Tensor:
        policy = self.policy
        index = as_indices("baseline", baseline, policy.device)
        if bool((index < 0).any()):
            raise refuse("baseline", "indices of arms, whole numbers from 0 on", baseline)
        try:
            return index.expand(policy.batch_shape).clone()
        except RuntimeError:
            wanted = f"a number or shape {tuple(policy.batch_shape)}"
            raise refuse("baseline", wanted, f"shape {tuple(index.shape)}") from None

    def _mean(self, given: ArrayLike) -> Tensor:
        """In float64: a mean that is rounded down is no bound from above."""
        policy = self.policy
        mean = as_tensor("baseline_mean", given, dtype=torch.float64, device=policy.device)
        low, high = policy.family.reward_range
        checks = ValueChecks()
        checks.finite("baseline_mean", mean)
        checks.within("baseline_mean", mean, low, high, lambda: f"means in [{low:g}, {high:g}]")
        checks.settle()
        try:
            return mean.detach().expand(policy.batch_shape).clone()
        except RuntimeError:
            wanted = f"a number or shape {tuple(policy.batch_shape)}"
            raise refuse("baseline_mean", wanted, f"shape {tuple(mean.shape)}") from None

    # ---- choosing ------------------------------------------------------------------------

    @torch.no_grad()
    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the policy's arm where that is safe, else of the baseline."""
        arms = self._check_arms(arms)
        if bool((self.baseline >= arms.shape[-2]).any()):
            raise refuse("arms", "more than the index of the baseline", f"{arms.shape[-2]} arms")
        wish = self.policy.select(arms)
        earned, plays, lower, upper = self._brought_up(arms)
        tried = plays + torch.nn.functional.one_hot(wish, arms.shape[-2])
        safe = earned + self._value(tried, lower, upper) >= ROUNDING * (1.0 + tried.sum(-1))
        index = torch.where(safe, wish, self.baseline)
        plays = plays + torch.nn.functional.one_hot(index, arms.shape[-2])
        self._earned, self._arms = earned, arms.clone()
        self._plays, self._lower, self._upper = plays, lower, upper
        return index

    def _brought_up(self, arms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What was earned before this arm set, and plays, lower and upper bounds within it."""
        region = self.policy.confidence_set()
        assert region is not None
        lower, upper = self._bounds(region, arms)
        earned, plays = self._earned, torch.zeros_like(lower, dtype=torch.int64)
        if self._arms is None:
            return earned, plays, lower, upper
        closed = earned + self._value(self._plays, self._lower, self._upper)
        if self._arms.shape != arms.shape:
            return closed, plays, lower, upper
        # each replicate by itself: its arms may stay where those of others change
        same = (self._arms == arms).all(-1).all(-1)
        plays = torch.where(same[..., None], self._plays, plays)
        lower = torch.where(same[..., None], torch.maximum(lower, self._lower), lower)
        upper = torch.where(same, torch.minimum(upper, self._upper), upper)
        return torch.where(same, earned, closed), plays, lower, upper

    def _bounds(self, region: ConfidenceSet, arms: Tensor) -> tuple[Tensor, Tensor]:
        """On the means of all arms, ``(*B, K)``, and of the baseline from above, ``(*B)``."""
        lower, upper = (end.double() for end in region.interval(arms, "mean"))
        place = self.baseline[..., None]
        if self._known is None:
            return lower, upper.gather(-1, place)[..., 0]
        return lower.scatter(-1, place, self._known[..., None]), self._known

    def _value(self, plays: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """``sum_s mu(x_s) - (1 - alpha) mu(b)``, from below: for the baseline ``alpha mu(b)``."""
        place, share = self.baseline[..., None], 1.0 - self.alpha
        gain = lower - share * upper[..., None]
        gain = gain.scatter(-1, place, self.alpha * lower.gather(-1, place))
        return (plays * gain).sum(-1)

    @property
    def budget(self) -> Tensor:
        """What is earned for certain beyond the constraint, ``(*B)``; never negative."""
        if self._arms is None:
            return self._earned.clone()
        return self._earned + self._value(self._plays, self._lower, self._upper)

    # ---- as the policy does --------------------------------------------------------------

    def _scores(self, arms: Tensor) -> Tensor:
        return self.policy.scores(arms)

    def update(
        self,
        x: ArrayLike,
        r: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """As the policy's own."""
        before = self.policy.rounds
        try:
            self.policy.update(x, r, weight, mask)
        finally:
            if self.policy.rounds != before:  # it has learnt, whatever came then
                self.rounds = self.policy.rounds

    def _update(self, x: Tensor, r: Tensor) -> None:
        self.policy.update(x, r)

    def confidence_set(self) -> ConfidenceSet | None:
        """That of the policy."""
        return self.policy.confidence_set()

    def bounds(self, x: ArrayLike, refine: bool = True) -> Interval | None:
        """Those of the policy."""
        return self.policy.bounds(x, refine)

    def on_boundary(self) -> Tensor | None:
        """That of the policy."""
        return self.policy.on_boundary()

    def tracker(self) -> BoundTracker:
        """That of the policy."""
        return self.policy.tracker()

    @property
    def passes(self) -> Tensor | None:
        """Those of the policy; the bounds of the ledger are not counted."""
        return self.policy.passes

    def _state(self) -> dict[str, Any]:
        ledger = {
            "earned": self._earned.clone(),
            "arms": None if self._arms is None else self._arms.clone(),
            "plays": self._plays.clone(),
            "lower": self._lower.clone(),
            "upper": self._upper.clone(),
        }
        leash = {"baseline": self.baseline.clone(), "mean": self._known}
        return {"policy": self.policy.state_dict(), "ledger": ledger, "leash": leash}

    def _load(self, state: Mapping[str, Any]) -> None:
        ledger, leash = state["ledger"], state["leash"]
        if not torch.equal(leash["baseline"], self.baseline):
            raise refuse("state['leash']['baseline']", f"{self.baseline}", leash["baseline"])
        if (leash["mean"] is None) != (self._known is None) or (
            self._known is not None and not torch.equal(leash["mean"], self._known)
        ):
            raise refuse("state['leash']['mean']", f"{self._known}", leash["mean"])
        check_same("state['ledger']['earned']", ledger["earned"], "the ledger", self._earned)
        check_shape("state['ledger']['earned']", ledger["earned"], self._earned.shape)
        self.policy.load_state_dict(state["policy"])
        self._earned = ledger["earned"].clone()
        self._arms = None if ledger["arms"] is None else ledger["arms"].clone()
        self._plays, self._lower, self._upper = (
            ledger[name].clone() for name in ("plays", "lower", "upper")
        )


def leashed(policy: Policy, given: object) -> Policy:
    """The policy with the option ``conservative`` of :func:`torchglb.policies.make`.

    Args:
        policy: with a confidence set.
        given: ``(baseline, alpha)``, or a table with ``baseline``, ``alpha`` and, if it is known,
            ``baseline_mean``.
    """
    if isinstance(given, list | tuple) and len(given) == 2:
        return Conservative(policy, *given)
    if isinstance(given, Mapping):
        wanted = {"baseline", "alpha"} <= set(given) <= {"baseline", "alpha", "baseline_mean"}
        if wanted:
            return Conservative(policy, **given)
    expected = "(baseline, alpha), or a table with baseline, alpha and perhaps baseline_mean"
    raise refuse("conservative", expected, repr(given))
