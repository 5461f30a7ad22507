"""Replay: what would a policy have earned, judged by the log of another one?

A logged event is the arms that were shown, the arm that was played and its reward. The policy sees
the events one after the other. An event is kept only where the policy picks the logged arm: it then
learns the reward; all other events are passed over, and it never hears of them. If the log was
written by choosing arms uniformly at random, and events are independent, the kept events have the
same law as rounds that the policy plays itself, so their mean reward is an unbiased estimate of its
own. Other logging laws p(arm) are made uniform by keeping a match with probability c / p only: an
event is then kept with probability c whichever arm the policy picks, if the constant c is at most
the propensity of every arm of every event, played or not. The smallest propensity of those that
were played will not do: it depends on the choices, and may be above that of an arm that never was.
Nor will the smallest of a log whose law learns: it depends on rewards that came later, and events
are then kept or not for what they earned. There c has to be fixed before the log is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.checks import (
    ValueChecks,
    as_floats,
    as_indices,
    as_like,
    check_count,
    check_shape,
    kind_of,
    refuse,
)
from torchglb.environments.base import Environment
from torchglb.policies import Policy
from torchglb.random_streams import RandomStreams, derived_seed
from torchglb.rows.checks import within_norm

#: bits of the numbers that the choices between two observations may use
STRIDE = 32
#: propensities that differ by no more than this share are the same, but for roundings
SAME = 1e-6


@dataclass(frozen=True)
class Log:
    """Logged events; each element of a batch has its own, in its own order.

    Args:
        arms: that were shown, ``(*B, n, K, d)``.
        index: that were played, ``(*B, n)``.
        rewards: of these, ``(*B, n)``.
        propensity: the probability of every arm, ``(*B, n, K)``, or of the logged one alone,
            ``(*B, n)``; left out, the log was written by a uniform choice.
        floor: a number, fixed before the log was written, that no arm's propensity was ever below.
            Where all K propensities are given and their least one is the same in every event (one
            law, or epsilon-greedy choices), that one serves as well.

    Example:
        >>> import torchglb as glb
        >>> arms = [[[1.0, 0.0], [0.0, 1.0]]] * 3  # of three events
        >>> log = Log(arms, index=[0, 1, 1], rewards=[1.0, 0.0, 1.0])
        >>> log.arms.shape
        torch.Size([3, 2, 2])
    """

    arms: Tensor
    index: Tensor
    rewards: Tensor
    propensity: Tensor | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        arms = within_norm(as_floats("arms", self.arms), self.arms)
        if arms.ndim < 3:
            raise refuse("arms", "shape (*B, n, K, d)", f"shape {tuple(arms.shape)}")
        given = {"arms": arms, "rewards": as_like("rewards", self.rewards, arms)}
        given["index"] = as_indices("index", self.index, arms.device)
        if self.propensity is not None:
            given["propensity"] = as_floats("propensity", self.propensity)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        events = self.arms.shape[:-2]
        check_shape("index", self.index, events)
        check_shape("rewards", self.rewards, events)
        checks = ValueChecks()
        number = self.arms.shape[-2]
        checks.within("index", self.index, 0, number - 1, lambda: f"arms from 0 to {number - 1}")
        self._require_propensity(checks)
        checks.settle()

    def _require_propensity(self, checks: ValueChecks) -> None:
        given, floor = self.propensity, self.floor
        if floor is not None and not 0.0 < floor <= 1.0 / self.arms.shape[-2]:
            raise refuse("floor", "a number in (0, 1/K]", floor)
        if given is None:
            return
        of_all = given.ndim == self.arms.ndim - 1
        check_shape("propensity", given, self.arms.shape[:-1] if of_all else self.index.shape)
        if of_all:
            off = (given.sum(-1) - 1.0).abs()
            checks.require("propensity", off <= 1e-6, "K numbers that add up to 1", given.sum(-1))
            checks.require("propensity", given >= 0, "numbers in [0, 1]", given)
        # an index that is out of range is refused by its own name
        played = self.played_propensity(self.index.clamp(0, self.arms.shape[-2] - 1))
        possible = (played > 0) & (played <= 1)
        checks.require("propensity", possible, "numbers in (0, 1] for what was played", played)
        if floor is not None:
            least = given if of_all else played
            expected = f"numbers of at least the floor {floor:g}"
            checks.require("propensity", least >= floor * (1 - 1e-12), expected, least)

    def played_propensity(self, index: Tensor | None = None) -> Tensor:
        """The probability with which each logged arm was chosen, ``(*B, n)``."""
        index = self.index if index is None else index
        if self.propensity is None:
            return torch.full_like(self.rewards, 1.0 / self.arms.shape[-2])
        if self.propensity.ndim == self.index.ndim:
            return self.propensity
        return torch.take_along_dim(self.propensity, index[..., None], -1)[..., 0]

    def least_propensity(self) -> Tensor:
        """What no propensity is below, ``(*B)``: the floor, or the least of all K of every event.

        Raises:
            InputError: where only the propensities of the played arms are known, or one is 0, or
                the least one changes from event to event: the least of all would look ahead.
        """
        least = self.least_of_each()
        low, high = least.aminmax(dim=-1)
        if bool((high > low * (1.0 + SAME)).any()):
            expected = "a bound below all propensities, fixed before the log was written"
            got = f"None, and least propensities from {low.min():g} to {high.max():g}"
            raise refuse("floor", expected, got)
        return low

    def least_of_each(self) -> Tensor:
        """What no propensity of an event is below, ``(*B, n)``: known before its reward.

        Raises:
            InputError: where only the propensities of the played arms are known, or one is 0.
        """
        like = self.rewards
        if self.floor is not None:
            return torch.full_like(like, self.floor)
        if self.propensity is None:
            return torch.full_like(like, 1.0 / self.arms.shape[-2])
        if self.propensity.ndim == self.index.ndim:
            expected = "a bound below the propensities of all arms (or all K propensities)"
            raise refuse("floor", expected, "None, with those of the played arms only")
        least = self.propensity.amin(-1)
        checks = ValueChecks()
        checks.require("propensity", least > 0, "positive numbers for all arms", least)
        checks.settle()
        return least


def uniform_log(environment: Environment, events: int) -> Log:
    """The log of a uniform choice among the arms of an environment, for its N elements.

    Example:
        >>> from torchglb import environments, families
        >>> world = environments.make("fixed", family=families.Bernoulli(), S=3.0, replicates=2)
        >>> uniform_log(world, 5).arms.shape
        torch.Size([2, 5, 20, 2])
    """
    check_count("events", events, least=1)
    if not isinstance(environment, Environment):
        raise refuse("environment", "an environment, such as make(...)", kind_of(environment))
    choice = environment.streams("logged choices")
    arms, played, rewards = [], [], []
    for t in range(events):
        shown = environment.arms(t)
        u = choice.uniform_at(t, 1, dtype=torch.float64)[..., 0]
        index = (u * shown.shape[-2]).long()
        x = torch.take_along_dim(shown, index[..., None, None], -2)[..., 0, :]
        arms.append(shown)
        played.append(index)
        rewards.append(environment.rewards(t, x, index))
    return Log(torch.stack(arms, 1), torch.stack(played, 1), torch.stack(rewards, 1))


@dataclass(frozen=True)
class Replay:
    """What a policy would have earned; each ``(*B)``.

    Attributes:
        value: the mean reward of the kept events; NaN where none was kept.
        iid_error: the standard error that this would have, were the kept rewards independent and of
            one law; NaN with fewer than two. They are so for a policy that does not learn. Rewards
            of one that learns are not, and their error shows in the spread over replicates:
            :meth:`mean_over_replicates`.
        kept: the number of kept events.
        used: the number of events that were looked at.

    Example:
        >>> from torchglb import environments, families
        >>> world = environments.make("fixed", family=families.Bernoulli(), S=3.0, replicates=2)
        >>> from torchglb import policies
        >>> given = {"family": world.family, "domain": world.domain, "batch_shape": (2,)}
        >>> found = replay(policies.make("greedy", **given), uniform_log(world, 200))
        >>> bool((found.kept <= found.used).all()), found.value.shape
        (True, torch.Size([2]))
    """

    value: Tensor
    iid_error: Tensor
    kept: Tensor
    used: Tensor

    def mean_over_replicates(self) -> tuple[Tensor, Tensor]:
        """The mean value of the batch and its standard error, for two replicates or more.

        Right for learning policies too, if the logs of the batch are independent and of one law.
        """
        if self.value.numel() < 2:
            raise refuse("value", "two replicates or more", self.value.numel())
        return self.value.mean(), self.value.std() / self.value.numel() ** 0.5


@torch.no_grad()
def replay(policy: Policy, log: Log, horizon: int | None = None, seed: int = 0) -> Replay:
    """Evaluates a fresh policy on logged events.

    Every element of the batch goes through its own events until its choice matches; those that have
    a match wait for the others, and then all learn at once.

    Unbiased if the arms and rewards of the events are independent and of one law, given the choices
    of the log. Its propensities may depend on the past if the log has a floor that does not.

    Args:
        policy: of batch shape ``*B``; it learns on the way.
        log: events of the same batch.
        horizon: kept events after which an element stops; all that the log gives if left out.
        seed: of the thinning of a log with propensities.

    Example:
        >>> from torchglb import environments, families, policies
        >>> world = environments.make("fixed", family=families.Bernoulli(), S=3.0, replicates=2)
        >>> played = policies.make(
        ...     "greedy", family=world.family, domain=world.domain, batch_shape=(2,)
        ... )
        >>> found = replay(played, uniform_log(world, 200))
        >>> bool((found.kept > 0).all())
        True
    """
    for name, given, kind in (("policy", policy, Policy), ("log", log, Log)):
        if not isinstance(given, kind):
            raise refuse(name, f"a {kind.__name__}", kind_of(given))
    check_shape("log.arms", log.arms, (*policy.batch_shape, "n", "K", policy.domain.dim))
    if policy.rounds:
        raise refuse("policy", "one that has learnt nothing yet", f"{policy.rounds} observations")
    number = log.arms.shape[-3]
    horizon = number if horizon is None else check_count("horizon", horizon, least=1)
    usable = _usable(policy, log, seed)
    place = torch.zeros_like(log.index[..., 0])  # the next event
    kept = torch.zeros_like(place)
    total = torch.zeros_like(place, dtype=torch.float64)
    squares = torch.zeros_like(total)
    while True:
        wanted = kept < horizon
        at, found = _next_match(policy, log, usable, place, wanted)
        place = torch.where(wanted, torch.where(found, at + 1, number), place)
        if not bool(found.any()):
            break
        shown, index, r = _event(log, at)
        x = torch.take_along_dim(shown, index[..., None, None], -2)[..., 0, :]
        policy.update(x, r)  # what an element learns after its end no longer counts
        gain = torch.where(found, r.double(), torch.zeros_like(total))
        total, squares, kept = total + gain, squares + gain.square(), kept + found
    count = kept.double()
    value = total / count
    spread = (squares - count * value.square()).clamp_min(0.0) / (count - 1.0)
    error = torch.where(kept > 1, (spread / count).sqrt(), torch.full_like(value, torch.nan))
    return Replay(value, error, kept, place)


def _usable(policy: Policy, log: Log, seed: int) -> Tensor:
    """Which events may be kept, ``(*B, n)``: all, or a share c / p of those of propensity p."""
    if log.propensity is None:
        return torch.ones_like(log.index, dtype=torch.bool)
    names = policy.random.state_dict()["replicates"]
    streams = RandomStreams(
        derived_seed(seed, "replay"), tuple(policy.batch_shape), names, policy.device
    )
    u = streams.uniform(log.index.shape[-1], dtype=torch.float64)
    return u * log.played_propensity() <= log.least_propensity()[..., None]


def _next_match(
    policy: Policy, log: Log, usable: Tensor, place: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """The first event from ``place`` on whose logged arm the policy picks; whether there is one."""
    number = log.arms.shape[-3]
    at, found = place.clone(), torch.zeros_like(wanted)
    _rewind(policy, _event(log, at)[0])
    while bool((searching := wanted & ~found & (at < number)).any()):
        shown, index, _ = _event(log, at)
        agrees = policy.select(shown) == index
        keep = torch.take_along_dim(usable, at.clamp_max(number - 1)[..., None], -1)[..., 0]
        hit = searching & agrees & keep
        found = found | hit
        at = torch.where(searching & ~hit, at + 1, at)
    return at, found


def _rewind(policy: Policy, arms: Tensor) -> None:
    """Lets the i-th choice after an observation draw the same numbers whoever else is waiting.

    How many choices were made before depends on the companions of an element, so the streams are
    set to a position that depends on the number of observations only; a choice is thrown away for
    the policies that draw the numbers of the next one beforehand.
    """
    state = policy.random.state_dict()
    if state["count"]:
        policy.random.load_state_dict(state | {"count": (policy.rounds + 1) << STRIDE})
        policy.select(arms)


def _event(log: Log, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arms ``(*B, K, d)``, logged arm ``(*B)`` and reward ``(*B)``; beyond the end, the last."""
    at = at.clamp_max(log.arms.shape[-3] - 1)[..., None]
    shown = torch.take_along_dim(log.arms, at[..., None, None], -3)[..., 0, :, :]
    index, r = (torch.take_along_dim(entry, at, -1)[..., 0] for entry in (log.index, log.rewards))
    return shown, index, r
