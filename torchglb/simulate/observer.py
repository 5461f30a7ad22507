"""What is measured of a policy that plays: regret, certificate, coverage, passes and time.

The observer looks on. Its questions go to a tracker (:class:`torchglb.policies.base.BoundTracker`)
with anchors of its own, so the policy plays as if nobody looked, and none of it is in its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.environments import Environment
from torchglb.errors import InputError
from torchglb.policies import Policy
from torchglb.policies.exact import ExactPolicy
from torchglb.sets import ConfidenceSet, LikelihoodRatioSet
from torchglb.theory import realised_certificate
from torchglb.ucb import argmax_ball

#: points of a boundary, directions in which an area is measured
OUTLINE, SPOKES = 200, 64
#: the certificate is made tight on the first hundred rounds and on every fifth; in between it uses
#: what is known already, which is as valid and a few per cent wider
REFINE_EVERY = 5

#: to which exact policies tell arms apart, relative to 1 + their bound
TIE = {torch.float64: 1e-7, torch.float32: 1e-4}


class Observer:
    """Measures one policy on a batch of N elements.

    Args:
        policy: who plays.
        world: where.
        rounds: after which the curves are recorded.
    """

    def __init__(self, policy: Policy, world: Environment, rounds: np.ndarray) -> None:
        self._policy, self._world, self._rounds = policy, world, rounds
        certifies = policy.confidence_set() is not None and not (world.pairs or world.changes)
        self._tracker = policy.tracker() if certifies else None
        # whether it knows nothing of arms but what its set says
        own = (type(policy).bounds, type(policy).tracker)
        self._asks_set = own == (Policy.bounds, Policy.tracker)
        self._recorded = 0
        self._spent, self._since = 0.0, 0  # seconds and rounds since the last recorded one
        self._seconds = np.zeros(len(rounds))
        N, like = len(world.S), world.S
        self.regret = torch.zeros(N, dtype=torch.float64, device=like.device)
        self.certificate = torch.zeros_like(self.regret)
        self.missed = torch.zeros(N, dtype=torch.bool, device=like.device)
        ends = world.family.mean(torch.stack([-like, like]))
        self._largest_gap = (ends[1] - ends[0]).double()
        kept = {
            "regret": True,
            "certificate": self._tracker is not None,
            "passes": policy.passes is not None,
        }
        self._curves = {
            name: torch.zeros((len(rounds), N), dtype=torch.float64, device=like.device)
            for name, needed in kept.items()
            if needed
        }

    def before_learning(self, t: int, arms: Tensor | None, x: Tensor) -> None:
        """What the set of round t says of the arms, and whether it has theta*.

        Args:
            t: the round.
            arms: from which the policy chose, ``(N, K, d)``; None for the whole unit ball.
            x: what it chose, ``(N, d)``.
        """
        if t + 1 == self._rounds[self._recorded]:
            self._look_for_theta()
        if self._tracker is None:
            return
        low, high = self._ends(t, arms, x)
        lower, upper = (self._world.family.mean(z.double())[:, None] for z in (low, high))
        self.certificate += realised_certificate(upper, lower, self._largest_gap[:, None])[:, 0]

    def _ends(self, t: int, arms: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Certified, ``(N)``: a lower bound of what was chosen, an upper bound of the best arm."""
        if arms is not None and self._asks_set:  # all in one question
            region = self._policy.confidence_set()
            assert region is not None
            found = region.upper_bound(torch.cat([arms, -x[:, None, :]], dim=-2))
            return -found[:, -1], found[:, :-1].amax(-1)
        assert self._tracker is not None
        bounds = self._tracker.bounds(x, refine=t < 100 or t % REFINE_EVERY == 0)
        assert bounds is not None
        return bounds.lower, largest_bound(self._policy, arms, bounds.upper)

    def after_learning(self, t: int, x: Tensor, index: Tensor | None, seconds: float) -> None:
        """Round t is over; the policy has needed so many seconds for it."""
        self.regret += self._world.regret(t, x, index)
        self._spent, self._since = self._spent + seconds, self._since + 1
        if t + 1 == self._rounds[self._recorded]:
            self._record()

    def _look_for_theta(self) -> None:
        region = self._policy.confidence_set()
        if region is not None and self._world.theta_star is not None:
            self.missed |= ~region.contains(self._world.theta_star)

    def _record(self) -> None:
        place = self._recorded
        self._curves["regret"][place] = self.regret
        if self._tracker is not None:
            self._curves["certificate"][place] = self.certificate
        if (passes := self._policy.passes) is not None:
            self._curves["passes"][place] = passes
        self._seconds[place] = self._spent / self._since
        self._recorded, self._spent, self._since = place + 1, 0.0, 0

    # ---- the end -------------------------------------------------------------------------

    def result(self, outlined: Sequence[int]) -> dict[str, np.ndarray]:
        """Everything recorded; arrays over the elements start with N.

        Args:
            outlined: the places of those elements of which the boundary of the last set is kept.
        """
        policy, world = self._policy, self._world
        self._look_for_theta()  # in the last set too
        found = {name: curve.mT for name, curve in self._curves.items()}
        if world.theta_star is not None:
            found["theta_star"] = world.theta_star
        if (estimate := policy.estimate()) is not None:
            found["theta_hat"] = estimate
        if policy.confidence_set() is not None and world.theta_star is not None:
            found["missed"] = self.missed
        if (refuted := policy.on_boundary()) is not None:
            found["on_boundary"] = refuted
        region = policy.confidence_set()
        if region is not None and world.dim == 2:
            found["boundary"], found["area"] = _outlines(region, len(world.S), outlined)
        arrays = {name: value.cpu().numpy() for name, value in found.items()}
        return arrays | {"rounds": self._rounds, "seconds": self._seconds}

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit by bit."""
        done = self._recorded
        return {
            "tracker": {} if self._tracker is None else self._tracker.state_dict(),
            "regret": self.regret.clone(),
            "certificate": self.certificate.clone(),
            "missed": self.missed.clone(),
            "rounds": torch.from_numpy(self._rounds[:done].copy()),
            "curves": {name: curve[:done].clone() for name, curve in self._curves.items()},
            "seconds": torch.from_numpy(self._seconds[:done].copy()),
            "spent": self._spent,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, of a run that may have had fewer rounds.

        Raises:
            InputError: if other rounds were recorded so far.
        """
        rounds = state["rounds"].cpu().numpy()
        done = len(rounds)
        if not np.array_equal(rounds, self._rounds[:done]):
            raise InputError("state: expected one with the recorded rounds of this run, got others")
        if self._tracker is not None:
            self._tracker.load_state_dict(state["tracker"])
        self.regret, self.certificate = state["regret"], state["certificate"]
        self.missed = state["missed"]
        for name, curve in self._curves.items():
            curve[:done] = state["curves"][name]
        self._seconds[:done] = state["seconds"].cpu().numpy()
        self._recorded, self._spent, self._since = done, state["spent"], state["since"]


def largest_bound(policy: Policy, arms: Tensor | None, chosen: Tensor) -> Tensor:
    """A certified upper bound on ``<x, theta>`` over the policy's set and all arms, ``(N)``.

    The regret of a round is measured against the best arm, and that may be another one than the
    arm of the largest bound: an exact policy takes arms for equal whose bounds are within a
    tolerance, in more than two dimensions the best arm of the ball is a local maximum, and the
    index of a policy need not be the bound of its set.

    Args:
        policy: one with a set.
        arms: from which it chose, ``(N, K, d)``; None for the whole unit ball.
        chosen: the upper bound of the arm that it chose, ``(N)``.
    """
    tied = chosen + TIE[chosen.dtype] * (1.0 + chosen.abs())
    exact = policy if isinstance(policy, ExactPolicy) and policy.solver == "native" else None
    if arms is not None and exact is not None and exact.plays_largest_bound:
        return tied
    region = policy.confidence_set()
    assert region is not None
    if arms is not None:
        return region.upper_bound(arms).amax(-1)
    S = policy.domain.radius_like(chosen).expand(chosen.shape)
    if isinstance(region, LikelihoodRatioSet):
        found = argmax_ball(region.program, throw=False, validate=False).upper
        return torch.where(found <= S, found, S)
    return torch.minimum(tied, S)  # ellipsoids: the longest theta in closed form


def _outlines(
    region: ConfidenceSet, elements: int, outlined: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The boundaries ``(n0, M, 2)`` of n0 elements, and the areas ``(N)`` of all.

    Element by element: a search over the whole history for all directions of all elements would
    fill the memory.
    """
    areas = [region[place].volume(SPOKES, tol=1e-4) for place in range(elements)]
    boundaries = [region[place].boundary(OUTLINE, tol=1e-4) for place in outlined]
    empty = region.center.new_zeros((0, OUTLINE, 2))
    return torch.stack(boundaries) if boundaries else empty, torch.stack(areas)
