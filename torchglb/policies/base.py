"""The base of every bandit policy: what it is asked, what it may cover, how it is saved.

Settings are fixed when a policy is built; the state is what ``state_dict`` holds. All replicates of
a batch run at once, and what one does never depends on the others.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend.value_checks import rewards_within, rows_within
from torchglb.checks import (
    ValueChecks,
    as_device,
    as_tensor,
    check_batch_shape,
    check_count,
    check_dtype,
    check_entries,
    check_flag,
    check_probability,
    check_shape,
    refuse,
)
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.identity import check_belongs, describe, reading_state
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.policies.requirements import Requirements, check_covered
from torchglb.policies.saving import own_settings
from torchglb.radii import radius_refuted, warn_of_boundary
from torchglb.random_streams import RandomStreams
from torchglb.recording import is_transformed
from torchglb.rows.checks import TOO_LONG, as_rows, as_weights, within_norm
from torchglb.rows.history import History
from torchglb.sets import ConfidenceSet, Interval
from torchglb.turns import TakesTurns


def _check_radius(domain: Ball, batch: torch.Size) -> None:
    """Refuses radii that do not fit the batch."""
    if isinstance(radius := domain.radius, Tensor):
        fits = zip(radius.shape[::-1], batch[::-1], strict=False)
        if radius.ndim > len(batch) or not all(have in (1, want) for have, want in fits):
            expected = f"a radius that broadcasts to the batch shape {tuple(batch)}"
            raise refuse("domain", expected, f"radius of shape {tuple(radius.shape)}")


class BoundTracker:
    """Asks a policy for bounds in every round; may keep what helps with the next question.

    What it keeps is its own: the policy plays as if it were not there.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def bounds(self, x: Tensor, refine: bool = True) -> Interval | None:
        """:meth:`Policy.bounds`, with what earlier questions have taught."""
        return self._policy.bounds(x, refine)

    def state_dict(self) -> dict[str, Any]:
        """What it keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, of the same policy at the same time."""


class Policy(TakesTurns, ABC):
    """A bandit policy for a batch of replicates.

    Args:
        family: the GLM family of the rewards.
        domain: the ball that contains theta*; it may have a radius S for every replicate.
        delta: the failure level.
        horizon: T, where the policy needs it.
        batch_shape: ``*B``, replicates that run together; one at least.
        seed: of the policy's own randomness. It is a number and not a ``torch.Generator``, whose
            draws would depend on the size and the order of the batch: each replicate counts
            through a stream of its own (:class:`torchglb.random_streams.RandomStreams`).
        replicates: names of the replicates, integers of shape ``*B``, by default 0, 1, ...: a
            replicate draws the same numbers in every batch it is part of.
        validate: look at the values of what is passed in.
        dtype: float64 or float32.
        device: where the state lives.

    Example:
        >>> import torchglb as glb
        >>> family, domain = glb.Bernoulli(), glb.Ball(2, 3.0)
        >>> policy = glb.policies.make("ofuglb", family=family, domain=domain)
        >>> isinstance(policy, Policy)
        True
        >>> arms = [[1.0, 0.0], [0.0, 1.0]]
        >>> arm = int(policy.select(arms))
        >>> policy.update(arms[arm], 1.0)
        >>> policy.rounds
        1
    """

    in_turn: ClassVar[tuple[str, ...]] = (
        "select",
        "scores",
        "select_ball",
        "update",
        "bounds",
        "confidence_set",
        "on_boundary",
        "tracker",
        "estimate",
        "state_dict",
        "load_state_dict",
    )
    #: the name in the registry
    name: ClassVar[str]
    requires: ClassVar[Requirements] = Requirements()
    #: whether rows may have weights in [0, 1]; rewards may be missing everywhere
    takes_weights: bool = False
    #: whether the set, if there is one, is proven to hold theta* with probability 1 - delta
    guaranteed: bool = True
    #: of constants and of what is carried, where it is not that of the rows
    _carried_dtype: ClassVar[torch.dtype | None] = None

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        horizon: int | None = None,
        batch_shape: tuple[int, ...] = (),
        seed: int = 0,
        replicates: ArrayLike | None = None,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        check_covered(self.name, self.requires, family, horizon)
        if not isinstance(domain, Ball):
            raise refuse("domain", "a Ball, such as Ball(dim, S)", repr(domain))
        check_dtype(dtype)
        self.family = family
        self.domain = domain
        self.delta = check_probability("delta", delta)
        self.horizon = None if horizon is None else int(horizon)
        self.batch_shape = torch.Size(check_batch_shape(batch_shape))
        _check_radius(domain, self.batch_shape)
        if not self.batch_shape.numel():
            raise refuse("batch_shape", "one replicate or more", tuple(self.batch_shape))
        self.validate = check_flag("validate", validate)
        self.dtype = dtype
        self.device = as_device(device)
        self.random = RandomStreams(seed, self.batch_shape, replicates, self.device)
        self.rounds = 0  # observations so far
        self._warned, self._next_look = False, 1  # of a ball that is too small
        self._compiled = family.compiled()
        self._longest = 1.0 + 64 * torch.finfo(dtype).eps  # of a row: 1, but for roundings

    def _constant(self, of_radius: Callable[[float], float]) -> Tensor:
        """A constant of the theory for every replicate, ``(*B)``: a function of its own S."""
        like = torch.zeros((), dtype=self._carried_dtype or self.dtype, device=self.device)
        return self.domain.constant(of_radius, like).expand(self.batch_shape)

    def _smallest_variance(self) -> Tensor:
        """``min m''`` = 1/kappa over the ball, ``(*B)``; refuses a family for which it is 0."""

        def positive(radius: float) -> float:
            least = self.family.min_variance(radius)
            if not 0.0 < least < float("inf"):
                expected = (
                    f"one whose m'' is bounded away from 0 on the ball, which {self.name} needs"
                )
                got = f"{type(self.family).__name__} with min m'' = {least:g}"
                raise refuse("family", expected, got)
            return least

        return self._constant(positive)

    # ---- choosing ------------------------------------------------------------------------

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play, of ``arms (*B, K, d)``.

        Arms, rows and rewards may be tensors or NumPy arrays of any real dtype, or lists
        (:func:`torchglb.checks.as_tensor`).
        """
        return self.scores(arms).argmax(-1)

    def scores(self, arms: ArrayLike) -> Tensor:
        """The index that is maximised over the arms, ``(*B, K)``."""
        return self._scores(self._check_arms(arms))

    @abstractmethod
    def _scores(self, arms: Tensor) -> Tensor:
        """The scores of arms that have passed the checks."""

    def select_ball(self) -> Tensor:
        """The arm ``(*B, d)`` to play where every point of the unit ball is one.

        Raises:
            InputError: unless the policy can maximise over the ball;
                :func:`torchglb.policies.playing_the_ball` names those that can.
        """
        raise refuse("arms", f"finitely many, of which {self.name} takes the best", "the unit ball")

    def _check_arms(self, given: ArrayLike) -> Tensor:
        """The arms as a tensor of the policy's dtype, once they have passed the checks.

        What a policy keeps has no derivatives: a graph would grow with every round.
        """
        arms = as_tensor("arms", given, dtype=self.dtype, device=self.device).detach()
        shape = arms.shape
        if shape[:-2] != self.batch_shape or len(shape) < 2 or shape[-1] != self.domain.dim:
            check_shape("arms", arms, (*self.batch_shape, "K", self.domain.dim))
        if shape[-2] == 0:
            raise refuse("arms", "at least one arm", f"shape {tuple(shape)}")
        if self.validate and not self._rows_within(arms):
            arms = within_norm(arms, given)
            checks = ValueChecks()
            self._require_rows(checks, "arms", arms)
            checks.settle()
        return arms

    def _check_point(self, x: ArrayLike) -> Tensor:
        """One direction for each replicate, ``(*B, d)``, as a tensor of the policy's dtype."""
        x = as_tensor("x", x, dtype=self.dtype, device=self.device)
        check_shape("x", x, (*self.batch_shape, self.domain.dim))
        if self.validate and not is_transformed(x):
            checks = ValueChecks()
            checks.finite("x", x)
            checks.settle()
        return x

    def _rows_within(self, rows: Tensor) -> bool:
        """Whether the values of some rows can be seen at once and are fine."""
        if not rows.is_cpu or is_transformed(rows):
            return False
        return rows_within(rows.detach().numpy().reshape(-1, rows.shape[-1]), self._longest)

    def _rewards_within(self, r: Tensor) -> bool:
        """The same of rewards."""
        known = self._compiled
        if known is None or not r.is_cpu or is_transformed(r):
            return False
        return rewards_within(r.detach().numpy().reshape(-1), known.low, known.high, known.whole)

    def _require_rows(self, checks: ValueChecks, name: str, rows: Tensor) -> None:
        checks.finite(name, rows)
        norm = torch.linalg.vector_norm(rows, dim=-1)
        checks.require(name, norm <= self._longest, f"rows of norm at most 1 ({TOO_LONG})", norm)

    # ---- learning ------------------------------------------------------------------------

    def update(
        self,
        x: ArrayLike,
        r: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds one observation, ``x (*B, d)``, ``r (*B)``, or k, ``x (*B, k, d)``, ``r (*B, k)``.

        Observations may come late and out of order. Confidence sets stay valid as long as the delay
        does not depend on the reward, given x and the past (:class:`torchglb.ConfidenceSequence`).

        Args:
            x: features of norm at most 1.
            r: rewards.
            weight: of the rows, shaped like ``r`` or one number, in [0, 1] and fixed before the
                reward was seen; 1 if left out. Only where the policy's theory allows it
                (``takes_weights``), else refused.
            mask: booleans shaped like ``r``: False where there is no reward (a replicate that did
                not play, a label that is not in), whatever ``x`` and ``r`` are there. Whether a
                reward is there must not depend on it. For that replicate the round is one on the
                arm 0, whose reward tells nothing: no estimate moves, and what holds for all arms of
                the unit ball still holds. It counts as a round where a radius counts them.

        Raises:
            InputError: on any argument that does not fit; the state is then unchanged.
        """
        plain = weight is None and mask is None
        if plain and (rows := self._learn_at_once(x, r)):
            self.rounds += rows
            return
        given, x = x, as_tensor("x", x, dtype=self.dtype, device=self.device).detach()
        r = as_tensor("r", r, dtype=self.dtype, device=self.device).detach()
        x, r = as_rows(x, r, tuple(self.batch_shape), self.domain.dim)
        w = None
        if not plain:
            w = self._weights(r, weight, mask)
            x = torch.where((w > 0)[..., None], x, 0.0)
            r = torch.where(w > 0, r, self._some_reward)
        if self.validate and not (self._rows_within(x) and self._rewards_within(r)):
            x = within_norm(x, given)
            checks = ValueChecks()
            self._require_rows(checks, "x", x)
            self.family.require_rewards(checks, r)
            checks.settle()
        if w is None or not self.takes_weights:
            self._update(x, r)
        else:
            self._update_weighted(x, r, w)
        self.rounds += x.shape[-2]

    def _weights(self, r: Tensor, weight: ArrayLike | None, mask: ArrayLike | None) -> Tensor:
        """Weights ``(*B, k)`` like the rewards, 0 where the mask says so."""
        if weight is not None and not self.takes_weights:
            expected = f"none, since {self.name} is stated for rows of weight 1"
            got = "one (a policy with takes_weights, such as ofuglb, does)"
            raise refuse("weight", expected, got)
        return as_weights(r, weight, mask, tuple(self.batch_shape)).detach()

    @property
    def _some_reward(self) -> float:
        """A reward that the family can have, for rows that do not count."""
        low, high = self.family.reward_range
        return min(max(0.0, low), high)

    def _update_weighted(self, x: Tensor, r: Tensor, w: Tensor) -> None:
        """:meth:`_update` of rows with weights ``(*B, k)``, where ``takes_weights``."""
        raise NotImplementedError(f"{type(self).__name__} says takes_weights and has none")

    def _learn_at_once(self, x: ArrayLike, r: ArrayLike) -> int:
        """Checks and learns plain rows in one compiled call, where a policy has one.

        Returns:
            How many rows; 0 where nothing was changed, so that :meth:`update` goes the long way.
        """
        return 0

    @abstractmethod
    def _update(self, x: Tensor, r: Tensor) -> None:
        """Learns from ``x (*B, k, d)`` and ``r (*B, k)`` that have passed the checks.

        ``self.rounds`` is the number of observations before these.
        """

    # ---- what it knows -------------------------------------------------------------------

    def confidence_set(self) -> ConfidenceSet | None:
        """The set over which the policy is optimistic, a snapshot; None if it has none."""
        return None

    def bounds(self, x: ArrayLike, refine: bool = True) -> Interval | None:
        """Certified ends of ``<x, theta>`` over the set; None without a set.

        Args:
            x: ``(*B, d)``.
            refine: whether to spend passes over the history on ends that what is already known
                leaves wide.
        """
        x = self._check_point(x)
        region = self.confidence_set()
        return None if region is None else region.interval(x)

    def _observed(self) -> History | None:
        """The rows, where the policy keeps them and S is part of its theory."""
        return None

    @torch.no_grad()
    def on_boundary(self) -> Tensor | None:
        """Whether the observations refute ``|theta*| <= S`` at level delta, ``(*B)``.

        Then S is too small, and nothing that the policy promises holds
        (:func:`torchglb.radii.radius_refuted`). Warns of it, once in the life of this object: one
        that continues from a state says it again. A question that costs a fit and that no round
        asks; runs of experiments ask it at their end. None where the rows are not kept.
        """
        rows = self._observed()
        if rows is None:
            return None
        likelihood = NegativeLogLikelihood.of(self.family, rows)
        fit = minimize_likelihood(likelihood, self.domain, throw=False, loss_only=True)
        found = radius_refuted(likelihood, self.domain, fit.theta, self.delta)
        if not self._warned and bool(found.any()):
            self._warned = True
            warn_of_boundary(self.domain, self.delta, stacklevel=3)
        return found

    def _look_at_boundary(self) -> None:
        """Asks :meth:`on_boundary` once in every doubling of the rows, which costs next to nothing.

        For those who are asked for their set.
        """
        if self.rounds >= self._next_look and self.device.type == "cpu":
            self._next_look = 2 * max(self.rounds, 1)
            self.on_boundary()

    def tracker(self) -> BoundTracker:
        """Whoever asks for bounds in every round asks this instead, which may be faster."""
        return BoundTracker(self)

    def estimate(self) -> Tensor | None:
        """The estimate of theta on which the next choice rests, ``(*B, d)``; None without one."""
        found = self.confidence_set()
        return None if found is None else found.center

    @property
    def passes(self) -> Tensor | None:
        """Passes over the history so far, ``(*B)``; None where they are not counted."""
        return None

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as plain tensors, numbers, lists and dictionaries of them."""
        return {
            "policy": self.name,
            "settings": self._belongs_to(),
            "rounds": self.rounds,
            "random": self.random.state_dict(),
            "state": self._state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues bit by bit from a saved state of the same policy and settings."""
        check_entries("state", state, ("policy", "settings", "rounds", "random", "state"))
        if state["policy"] != self.name:
            raise refuse("state", f"a state of {self.name}", f"one of {state['policy']}")
        check_belongs("state['settings']", state["settings"], self._belongs_to())
        rounds = check_count("state['rounds']", state["rounds"])
        before, streams = self._state(), copy.copy(self.random)
        try:
            with reading_state(self.name):
                streams.load_state_dict(state["random"])
                self._load(state["state"])
        except BaseException:
            self._load(before)  # what is refused or interrupted changes nothing
            raise
        # no call from here on: nothing can come in between
        self.random, self.rounds = streams, rounds

    def _belongs_to(self) -> dict[str, Any]:
        """Family, ball and settings, without which the state means nothing."""
        return {
            "family": describe(self.family),
            "d": self.domain.dim,
            "S": describe(self.domain.radius),
            "delta": self.delta,
            "horizon": self.horizon if self.requires.horizon else None,
            **{name: describe(value) for name, value in own_settings(self, Policy).items()},
        }

    def __repr__(self) -> str:
        horizon = self.horizon if self.requires.horizon else None
        given = {"delta": self.delta, "horizon": horizon, **own_settings(self, Policy)}
        words = [f"{self.family!r}", f"{self.domain!r}"]
        words += [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"{type(self).__name__}({', '.join(words)}, rounds={self.rounds})"

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What the policy has learnt."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`_state` gave."""
