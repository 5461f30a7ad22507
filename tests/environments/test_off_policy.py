"""Replay with propensities and off-policy values: unbiased, with intervals that cover at all times."""

import pytest
import scipy.stats
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.environments import Log, off_policy_value, replay
from torchglb.errors import InputError

RUNS, EVENTS, K = 400, 300, 3
LAW = torch.tensor([0.7, 0.28, 0.02], dtype=torch.float64)
MEANS = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)


def logged(generator, runs=RUNS, events=EVENTS, law=LAW, rewards="binary", **given):
    """Arms that are their own names, played by a skewed law."""
    arms = torch.eye(K, dtype=torch.float64).expand(runs, events, K, K)
    index = torch.multinomial(law, runs * events, replacement=True, generator=generator)
    index = index.view(runs, events)
    u = torch.rand(runs, events, generator=generator, dtype=torch.float64)
    mean = MEANS[index]
    r = (u < mean).double() if rewards == "binary" else mean + (2 * u - 1) * 0.2
    return Log(arms, index, r, **given), law[index]


def within(found, truth, errors=4.0):
    """The mean over runs, within some standard errors of the truth."""
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - truth) < errors * error, (found.mean(), truth, error)
    return error


# ---- replay ------------------------------------------------------------------------------------


class Always(policies.Policy):
    """Plays the same arm whatever happens."""

    name = "always"

    def __init__(self, arm, runs):
        super().__init__(glb.Bernoulli(), glb.Ball(K, 1.0), batch_shape=(runs,))
        self.arm = arm

    def _scores(self, arms):
        return torch.nn.functional.one_hot(
            torch.full(arms.shape[:-2], self.arm), arms.shape[-2]
        ).to(arms)

    def _update(self, x, r): ...

    def _state(self):
        return {}

    def _load(self, state): ...


@pytest.mark.parametrize("floor", [0.02, 0.01])
def test_replay_needs_a_floor_for_all_arms(generator, floor):
    log, played = logged(generator)
    log = Log(log.arms, log.index, log.rewards, played)
    with pytest.raises(InputError, match="floor: expected a bound below the propensities of all"):
        replay(Always(1, RUNS), log)
    log = Log(log.arms, log.index, log.rewards, played, floor=floor)
    found = replay(Always(1, RUNS), log)
    seen = found.kept > 0
    error = within(found.value[seen], 0.5)
    assert error < 0.02
    # every arm is kept with the same probability
    share = found.kept.double().mean() / EVENTS
    assert abs(share - floor) < 4 * (floor / (RUNS * EVENTS)) ** 0.5


class Explores(Always):
    """The first arm until its first failure, then the last one: it learns from what is kept."""

    name = "explores"

    def __init__(self, runs):
        super().__init__(0, runs)
        self.failed = torch.zeros(runs, dtype=torch.bool)

    def _scores(self, arms):
        arm = torch.where(self.failed, 2, 0)
        return torch.nn.functional.one_hot(arm, arms.shape[-2]).to(arms)

    def _update(self, x, r):
        self.failed = self.failed | (r[..., 0] == 0)


def test_replay_of_a_learning_policy_with_all_propensities(generator):
    """The mean reward of two rounds is 0.2/2 + (0.2 0.2 + 0.8 0.8)/2."""
    log, _ = logged(generator)
    log = Log(log.arms, log.index, log.rewards, LAW.expand(RUNS, EVENTS, K))
    found = replay(Explores(RUNS), log, horizon=2)
    complete = found.kept == 2
    assert complete.double().mean() > 0.9
    within(found.value[complete], 0.1 + 0.34)
    mean, error = found.mean_over_replicates()
    torch.testing.assert_close(mean, found.value.mean())
    torch.testing.assert_close(error, found.value.std() / RUNS**0.5)


def learning_log(generator, runs, **given):
    """Two events of fair coins: who wins the first hardly plays two of the arms any more."""
    arms = torch.eye(K, dtype=torch.float64).expand(runs, 2, K, K)
    r = torch.randint(2, (runs, 2), generator=generator).double()
    even, skewed = torch.tensor([[1 / K] * K, [0.98, 0.01, 0.01]], dtype=torch.float64)
    law = torch.stack([even.expand(runs, K), torch.where(r[:, :1] == 1, skewed, even)], 1)
    index = torch.multinomial(law.view(-1, K), 1, generator=generator).view(runs, 2)
    return Log(arms, index, r, law, **given)


def test_replay_of_a_log_that_learns(generator):
    """The least propensity of all events knows the rewards: thinned by it, a fair coin has 0.27."""
    runs = 20_000
    with pytest.raises(InputError, match="floor: expected .* got None, and least .* 0.01 to 0.333"):
        replay(Always(0, runs), learning_log(generator, runs))
    log = learning_log(generator, runs, floor=0.01)
    found = replay(Always(0, runs), log)
    error = within(found.value[found.kept > 0], 0.5)
    assert error < 0.03


def test_a_least_propensity_that_stays_is_a_floor(generator):
    """Epsilon-greedy choices learn, but no arm is ever below epsilon/K."""
    runs, events, floor = 400, 60, 0.1
    greedy = torch.randint(K, (runs, events), generator=generator)
    law = torch.full((runs, events, K), floor, dtype=torch.float64)
    law.scatter_(-1, greedy[..., None], 1.0 - floor * (K - 1))
    index = torch.multinomial(law.view(-1, K), 1, generator=generator).view(runs, events)
    r = (torch.rand(runs, events, generator=generator).double() < MEANS[index]).double()
    log = Log(torch.eye(K).double().expand(runs, events, K, K), index, r, law)
    assert log.least_propensity().tolist() == [floor] * runs
    found = replay(Always(1, runs), log)
    within(found.value[found.kept > 0], 0.5)


def test_bad_propensities_are_refused(generator):
    log, played = logged(generator, runs=2, events=4)
    parts = (log.arms, log.index, log.rewards)
    every = LAW.expand(2, 4, K)
    with pytest.raises(InputError, match="propensity: expected K numbers that add up to 1"):
        Log(*parts, 0.9 * every)
    with pytest.raises(InputError, match=r"floor: expected a number in \(0, 1/K\], got 0.5"):
        Log(*parts, every, floor=0.5)
    with pytest.raises(InputError, match="propensity: expected numbers of at least the floor 0.1"):
        Log(*parts, every, floor=0.1)
    with pytest.raises(InputError, match="propensity: expected numbers in .* what was played"):
        Log(*parts, 0 * played)
    never = torch.zeros_like(log.index)
    certain = Log(log.arms, never, log.rewards, torch.eye(K).double()[never])
    with pytest.raises(InputError, match="positive numbers for all arms"):
        certain.least_propensity()


# ---- values of fixed policies --------------------------------------------------------------------

TARGETS = {
    "index": lambda: torch.full((RUNS, EVENTS), 2),
    "probabilities": lambda: torch.tensor([0.1, 0.3, 0.6]).double().expand(RUNS, EVENTS, K),
}
VALUES = {"index": 0.8, "probabilities": 0.65}
PREDICTIONS = {
    "inverse": lambda: None,
    "doubly robust": lambda: torch.tensor([0.3, 0.4, 0.7]).double().expand(RUNS, EVENTS, K),
    "doubly robust, wrong": lambda: torch.tensor([1.0, 0.0, 0.0]).double().expand(RUNS, EVENTS, K),
}


@pytest.mark.parametrize("predictions", PREDICTIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rewards", ["binary", "uniform"])
def test_values_are_unbiased_and_intervals_cover(generator, target, predictions, rewards):
    log, played = logged(generator, rewards=rewards)
    log = Log(log.arms, log.index, log.rewards, played, floor=0.02)
    delta = 0.2
    found = off_policy_value(
        log, TARGETS[target](), reward_range=(0.0, 1.0), predictions=PREDICTIONS[predictions](),
        delta=delta,
    )  # fmt: skip
    truth = VALUES[target]
    within(found.value, truth)
    # the estimated errors are those of the spread
    assert found.error.square().mean().sqrt() == pytest.approx(found.value.std().item(), rel=0.15)
    missed = ((found.lower > truth) | (found.upper < truth)).any(-1).sum()
    test = scipy.stats.binomtest(int(missed), RUNS, delta, alternative="greater")
    assert test.pvalue >= 0.05, missed
    assert bool((found.lower.diff() >= 0).all() & (found.upper.diff() <= 0).all())


def test_a_wrong_interval_would_be_found_out(generator):
    """Of a fixed-sample interval at the same level far more miss at one time or another."""
    log, played = logged(generator, law=torch.full((K,), 1 / 3).double())
    phi = (log.index == 1) * log.rewards / played
    count = torch.arange(1, EVENTS + 1)
    mean = phi.cumsum(-1) / count
    spread = (phi.square().cumsum(-1) / count - mean.square()).clamp_min(1e-9).sqrt()
    half = 1.28 * spread / count.sqrt()
    missed = ((mean - 0.5).abs() > half)[:, 20:].any(-1).sum()
    assert scipy.stats.binomtest(int(missed), RUNS, 0.2, alternative="greater").pvalue < 1e-6


def test_propensities_that_depend_on_the_past(generator):
    """An adaptive log: the arm that has just failed is played less often."""
    runs, events = RUNS, 200
    index, r, law = [], [], []
    p = torch.full((runs, K), 1 / 3, dtype=torch.float64)
    for _ in range(events):
        a = torch.multinomial(p, 1, generator=generator)[:, 0]
        reward = (torch.rand(runs, generator=generator) < MEANS[a]).double()
        index.append(a), r.append(reward), law.append(p)
        p = torch.full((runs, K), 0.45, dtype=torch.float64)
        p = p.scatter(1, a[:, None], torch.where(reward == 0, 0.1, 0.6)[:, None].double())
        p = p / p.sum(-1, keepdim=True)
    arms = torch.eye(K, dtype=torch.float64).expand(runs, events, K, K)
    log = Log(arms, torch.stack(index, 1), torch.stack(r, 1), torch.stack(law, 1), floor=0.1)
    predictions = PREDICTIONS["doubly robust"]()[:, :events]
    for given in (None, predictions):
        target = torch.ones(runs, events, dtype=torch.int64)
        found = off_policy_value(log, target, reward_range=(0, 1), predictions=given, delta=0.2)
        within(found.value, 0.5)
        missed = ((found.lower > 0.5) | (found.upper < 0.5)).any(-1).sum()
        assert scipy.stats.binomtest(int(missed), runs, 0.2, alternative="greater").pvalue >= 0.05


def test_the_interval_is_the_inequality_of_the_docstring(generator):
    """Lower ends, one event after the other, by a loop over plain numbers."""
    import math

    log, played = logged(generator, runs=1, events=40)
    log = Log(log.arms, log.index, log.rewards, played, floor=0.02)
    q = torch.tensor([0.3, 0.4, 0.7]).double().expand(1, 40, K)
    target = torch.zeros(1, 40, dtype=torch.int64)
    found = off_policy_value(log, target, reward_range=(0, 1), predictions=q, delta=0.1)
    c, best = 50.0, 0.0
    phis, sum_l, sum_gain, deviations = [], 0.0, 0.0, 0.25
    for s in range(40):
        a, r, p = int(log.index[0, s]), float(log.rewards[0, s]), float(played[0, s])
        phi = 0.3 + ((r - 0.3) / p if a == 0 else 0.0)
        x = min(1.0, max(0.0, (0.5 + sum(phis)) / (s + 1)))
        variance = deviations / (s + 1)
        bet = min(0.5, math.sqrt(2 * math.log(20) / (variance * (s + 1) * math.log(s + 2))))
        u = (phi - x) / c
        sum_l, sum_gain = sum_l + bet, sum_gain + bet * phi - c * (-math.log(1 - bet) - bet) * u * u
        best = max(best, (sum_gain - c * math.log(20)) / sum_l)
        assert float(found.lower[0, s]) == pytest.approx(best, abs=1e-12)
        phis.append(phi)
        mean = min(1.0, max(0.0, (0.5 + sum(phis)) / (s + 2)))
        deviations += ((phi - mean) / c) ** 2


def test_scale_of_the_rewards(generator):
    log, played = logged(generator, runs=3)
    plain = Log(log.arms, log.index, log.rewards, played, floor=0.02)
    moved = Log(log.arms, log.index, 4 * log.rewards - 1, played, floor=0.02)
    target = torch.ones(3, EVENTS, dtype=torch.int64)
    q = PREDICTIONS["doubly robust"]()[:3]
    first = off_policy_value(plain, target, reward_range=(0, 1), predictions=q)
    second = off_policy_value(moved, target, reward_range=(-1, 3), predictions=4 * q - 1)
    for name in ("value", "lower", "upper"):
        expected = 4 * getattr(first, name) - 1
        torch.testing.assert_close(getattr(second, name), expected)
    torch.testing.assert_close(second.error, 4 * first.error)


def test_bad_policies_are_refused(generator):
    log, played = logged(generator, runs=2, events=4)
    target = torch.ones(2, 4, dtype=torch.int64)
    bounded = Log(log.arms, log.index, log.rewards, played)
    for given, change, message in (
        (target + 2, {}, "target: expected arms from 0 to 2, got 3"),
        (torch.ones(2, 4, K).double(), {}, "target: expected K numbers that add up to 1"),
        (target, {"reward_range": (0.0, 0.5)}, r"rewards: expected rewards in \[0, 0.5\]"),
        (target, {"reward_range": (1.0, 0.0)}, "reward_range: expected two finite numbers"),
        (target, {"delta": 2.0}, "delta"),
        (target, {"predictions": 2 * torch.ones(2, 4, K).double()}, "predictions: expected means"),
        (target, {"predictions": torch.ones(2, 4, K).double()}, "floor"),
    ):
        with pytest.raises(InputError, match=message):
            off_policy_value(bounded, given, **({"reward_range": (0.0, 1.0)} | change))
    unseen = torch.tensor([0.5, 0.5, 0.0]).double()[None, None].expand(2, 4, K)
    other = Log(log.arms, log.index.clamp_max(1), log.rewards, unseen)
    with pytest.raises(InputError, match="no probability for arms that the log could not play"):
        off_policy_value(other, LAW.expand(2, 4, K), reward_range=(0.0, 1.0))


def test_uniform_logs_know_their_propensities():
    world = environments.make("fixed", family=glb.Bernoulli(), S=3.0, replicates=2, arms=5)
    log = environments.uniform_log(world, 50)
    assert torch.equal(log.played_propensity(), torch.full((2, 50), 0.2, dtype=torch.float64))
    assert torch.equal(log.least_propensity(), torch.full((2,), 0.2, dtype=torch.float64))


def falling(events, least):
    """A log whose propensities fall from uniform ones to the least, linearly."""
    share = torch.linspace(0.0, 1.0, events, dtype=torch.float64)[:, None]
    end = torch.tensor([1.0 - 2.0 * least, least, least], dtype=torch.float64)
    law = (1.0 - share) / K + share * end
    generator = torch.Generator().manual_seed(3)
    index = torch.multinomial(law, 1, generator=generator)[:, 0]
    r = (torch.rand(events, generator=generator, dtype=torch.float64) < MEANS[index]).double()
    return torch.eye(K, dtype=torch.float64).expand(events, K, K), index, r, law


@pytest.mark.parametrize("robust", [False, True])
def test_ends_do_not_look_ahead(robust):
    """Those after 200 events are the same whatever propensities come later."""
    arms, index, r, law = falling(300, 0.01)
    q = MEANS.expand(300, K) if robust else None
    target = torch.ones(300, dtype=torch.int64)

    def ends(n):
        log = Log(arms[:n], index[:n], r[:n], propensity=law[:n])
        given = None if q is None else q[:n]
        return off_policy_value(log, target[:n], reward_range=(0.0, 1.0), predictions=given)

    some, more = ends(200), ends(300)
    assert torch.equal(some.lower, more.lower[:200])
    assert torch.equal(some.upper, more.upper[:200])


def test_arms_that_could_not_be_played_are_refused_by_their_number_too():
    law = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(4, K)
    log = Log(torch.eye(K).double().expand(4, K, K), [0, 1, 0, 1], [1.0, 0.0, 1.0, 0.0], law)
    with pytest.raises(InputError, match="could not play"):
        off_policy_value(log, [2, 2, 2, 2], reward_range=(0.0, 1.0))
