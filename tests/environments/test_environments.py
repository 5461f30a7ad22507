"""Environments: laws of arms and rewards, common luck, independence of batch and order."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import torchglb as glb
from torchglb import environments
from torchglb.families import Bernoulli, Binomial, Gaussian, Poisson, QuasiBounded

FAMILIES = [
    Bernoulli(),
    Binomial(5),
    Gaussian(0.5),
    Poisson(),
    QuasiBounded("probit"),
    QuasiBounded("cloglog"),
]
NAMES = ("time-varying", "fixed", "ball")


def world(name="time-varying", family=None, S=3.0, replicates=4, **options):
    if name != "ball":
        options.setdefault("arms", 5)
    return environments.make(
        name, family=family or Bernoulli(), S=S, replicates=replicates, **options
    )


def play(environment, t):
    """Something to play in round t, the same for all replicates."""
    if environment.whole_ball:
        x = torch.zeros_like(environment.theta_star)
        x[:, 0] = 1.0
        return x, None
    index = torch.full((len(environment.replicates),), t % environment.count)
    arms = environment.arms(t)
    return arms[torch.arange(len(index)), index], index


# ---- the law of the rewards ------------------------------------------------------------------


def exact_cdf(family, z):
    """scipy's law of the family at z."""
    mean = float(family.mean(torch.tensor(z, dtype=torch.float64)))
    if isinstance(family, Gaussian):
        return stats.norm(z, family.sigma)
    if isinstance(family, Poisson):
        return stats.poisson(mean)
    if isinstance(family, Binomial):
        return stats.binom(family.trials, mean / family.trials)
    return stats.bernoulli(mean)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{type(f).__name__}")
@pytest.mark.parametrize("z", [-2.5, 0.0, 1.7])
def test_quantile_is_the_inverse_distribution_function(family, z):
    u = torch.cat(
        [torch.logspace(-12, -2, 60), torch.linspace(0.0101, 0.9899, 4000)]
    ).double()  # not at a jump
    u = torch.cat([u, 1 - torch.logspace(-2, -12, 60).double()])
    got = family.quantile(torch.full_like(u, z), u)
    expected = torch.from_numpy(exact_cdf(family, z).ppf(u.numpy())).to(u)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert bool((got.diff()[u.diff() > 0] >= 0).all())


@pytest.mark.parametrize("rate", [0.01, 3.0, 250.0, 8000.0])
def test_poisson_quantile_at_all_rates(rate):
    u = (torch.arange(2000).double() + 0.5) / 2000
    got = Poisson().quantile(torch.full_like(u, math.log(rate)), u)
    torch.testing.assert_close(
        got, torch.from_numpy(stats.poisson(rate).ppf(u.numpy())), atol=0, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{type(f).__name__}")
def test_rewards_follow_the_family(family):
    replicates = 20_000
    environment = world("fixed", family, replicates=replicates, arms=3)
    x, index = play(environment, 1)
    r = environment.rewards(7, x, index).numpy()
    law = exact_cdf(family, float((x[0] * environment.theta_star[0]).sum()))
    if isinstance(family, Gaussian):
        assert stats.kstest(r, law.cdf).pvalue > 1e-4
        return
    # chi-square over the values that are expected at least ten times
    values = [k for k in range(int(r.max()) + 2) if replicates * law.pmf(k) >= 10]
    seen = [(r == k).sum() for k in values]
    expected = [replicates * law.pmf(k) for k in values]
    seen.append(replicates - sum(seen))
    expected.append(replicates - sum(expected))
    if expected[-1] < 1e-6:
        assert seen.pop() == 0
        expected.pop()
    seen, expected = np.array(seen), np.array(expected)
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, len(seen) - 1) > 1e-4


def test_rewards_of_rounds_and_replicates_are_independent():
    environment = world("fixed", replicates=500)
    luck = torch.stack([environment.luck(t) for t in range(400)])  # (rounds, replicates)
    assert stats.kstest(luck.flatten().numpy(), "uniform").pvalue > 1e-4
    centred = (luck - 0.5) * math.sqrt(12)
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(shifted.mean())) < 4.5 / math.sqrt(shifted.numel())


# ---- arms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_arms_are_uniform_in_the_ball(dim):
    environment = world(arms=50, dim=dim, replicates=1)
    arms = torch.cat([environment.arms(t)[0] for t in range(60)])
    norm = torch.linalg.vector_norm(arms, dim=-1)
    assert bool((norm <= 1).all())
    assert stats.kstest((norm**dim).numpy(), "uniform").pvalue > 1e-4
    # every direction alike: for a uniform direction, E <v, e>^2 = 1/d
    square = (arms / norm[:, None]).square()
    assert bool(((square.mean(0) - 1 / dim).abs() < 5 / math.sqrt(len(arms))).all())
    assert bool((arms.mean(0).abs() < 5 / math.sqrt(len(arms))).all())


def test_arms_change_or_stay():
    changing, fixed = world(), world("fixed")
    assert not torch.equal(changing.arms(0), changing.arms(1))
    assert torch.equal(fixed.arms(0), fixed.arms(999))


def test_arms_are_shared_or_not():
    assert bool((world().arms(3) == world().arms(3)[:1]).all())
    own = world(shared_arms=False).arms(3)
    assert not torch.equal(own[0], own[1])


@pytest.mark.parametrize("name", NAMES)
def test_regret_is_the_gap_to_the_best_arm(name):
    environment = world(name, theta="random", S=[2.0, 2.0, 4.0, 4.0])
    family = environment.family
    for t in (0, 5):
        x, index = play(environment, t)
        mean = family.mean((x * environment.theta_star).sum(-1))
        if environment.whole_ball:
            best = family.mean(torch.linalg.vector_norm(environment.theta_star, dim=-1))
        else:
            arms = environment.arms(t)
            best = family.mean((arms @ environment.theta_star[..., None])[..., 0]).amax(-1)
        torch.testing.assert_close(environment.regret(t, x, index), best - mean)
        assert bool((environment.regret(t, x, index) >= 0).all())


# ---- theta -----------------------------------------------------------------------------------


def test_theta_of_the_paper():
    theta = world(S=[4.0, 10.0], replicates=2, dim=3).theta_star
    expected = torch.tensor([3.0, 9.0]).double()[:, None] / math.sqrt(3) * torch.ones(3).double()
    torch.testing.assert_close(theta, expected)


def test_random_theta_has_its_length_and_its_own_direction():
    theta = world(S=[4.0, 10.0, 4.0], replicates=torch.tensor([0, 0, 1]), theta="random").theta_star
    torch.testing.assert_close(
        torch.linalg.vector_norm(theta, dim=-1), torch.tensor([3.0, 9, 3]).double()
    )
    torch.testing.assert_close(theta[0] * 3, theta[1])  # one replicate, two S
    assert not torch.allclose(theta[0], theta[2])


# ---- independence of batch, order and policies -----------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{type(f).__name__}")
def test_an_element_meets_the_same_world_in_every_batch(name, family):
    S, replicates = torch.tensor([2.0, 3.0, 2.0, 5.0]).double(), torch.tensor([0, 1, 2, 0])
    options = {"theta": "random"} | ({} if name == "ball" else {"shared_arms": False})
    whole = world(name, family, S, replicates, **options)
    for pick in (torch.tensor([2]), torch.tensor([3, 1])):
        part = world(name, family, S[pick], replicates[pick], **options)
        torch.testing.assert_close(part.theta_star, whole.theta_star[pick], rtol=0, atol=0)
        for t in (130, 0, 5):  # in any order, over the edge of a block
            x, index = play(whole, t)
            some = None if index is None else index[pick]
            torch.testing.assert_close(
                part.rewards(t, x[pick], some), whole.rewards(t, x, index)[pick]
            )
            torch.testing.assert_close(
                part.regret(t, x[pick], some), whole.regret(t, x, index)[pick]
            )


def test_luck_is_common_to_all_arms():
    """A larger mean never gives a smaller reward in the same round of the same replicate."""
    environment = world("fixed", Poisson(), S=3.0, replicates=50, arms=6)
    order = environment.family.mean(environment.arms(0)[0] @ environment.theta_star[0]).argsort()
    rows = torch.arange(50)
    drawn = [environment.rewards(11, environment.arms(0)[rows, k], k.expand(50)) for k in order]
    assert bool((torch.stack(drawn).diff(dim=0) >= 0).all())


def test_seeds_differ():
    assert not torch.equal(world(seed=0).arms(0), world(seed=1).arms(0))
    assert not torch.equal(world(seed=0).luck(0), world(seed=1).luck(0))


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(name="nowhere"), "environment: expected one of 'ball', .* got 'nowhere'"),
        (dict(colour=3), "option of time-varying: expected one of arms, .* got 'colour'"),
        (dict(arms=0), "arms: expected an integer of at least 1, got 0"),
        (dict(theta="north"), "theta: expected one of 'paper', 'random', got 'north'"),
        (dict(S=0.5), "S: expected numbers above 1"),
        (dict(replicates=0), "replicates: expected an integer of at least 1, got 0"),
        (dict(shared_arms="yes"), "shared_arms: expected true or false, got 'yes'"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(glb.InputError, match=message):
        world(**change)


def test_arms_of_the_ball_cannot_be_listed():
    with pytest.raises(glb.InputError, match="the whole unit ball"):
        world("ball").arms(0)
