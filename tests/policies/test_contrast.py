"""Optimism by contrasts: oful-contrast and ofuglb-contrast."""

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats

from torchglb import policies
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import Bernoulli, Gaussian, Poisson, QuasiBounded
from torchglb.radii import PACBayes
from torchglb.simulate import Configuration
from torchglb.testing.policies import PolicyContract


class TestOFULContrast(PolicyContract):
    name = "oful-contrast"
    families = (Gaussian(0.5),)
    uncovered = (Bernoulli(), Poisson())
    fixed_arms = True
    ball_arms = False


class TestOFUGLBContrast(PolicyContract):
    """The joint level as in the contract of ofuglb-pb, whose levels depend on when they are asked."""

    name = "ofuglb-contrast"
    options: ClassVar[dict[str, Any]] = {"radius": PACBayes(tolerance=1e-10, increments="rows")}
    families = (Bernoulli(), Gaussian(0.5))
    uncovered = (QuasiBounded("probit"),)
    fixed_arms = True
    ball_arms = False


def built(name, family, d, K, R=1, S=2.0, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randn((R, K, d), generator=generator, dtype=torch.float64)
    arms = 0.99 * arms / torch.linalg.vector_norm(arms, dim=-1, keepdim=True)
    star = torch.randn((R, d), generator=generator, dtype=torch.float64)
    star = 0.8 * S * star / torch.linalg.vector_norm(star, dim=-1, keepdim=True)
    policy = policies.make(
        name, family=family, domain=Ball(d, S), batch_shape=(R,), validate=False, **options
    )
    return policy, arms, star, generator


def play(policy, arms, star, generator, rounds, look):
    """Plays, and after each round calls ``look``; the regret on the linear scale, ``(R)``."""
    lost, R = torch.zeros(len(arms), dtype=torch.float64), torch.arange(len(arms))
    values = (arms @ star[..., None])[..., 0]
    for t in range(rounds):
        index = policy.select(arms)
        x = arms[R, index]
        policy.update(x, policy.family.sample((x * star).sum(-1), generator))
        lost += values.amax(-1) - values[R, index]
        look(t, x)
    return lost


CASES = [("oful-contrast", Gaussian(0.7)), ("ofuglb-contrast", Bernoulli())]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_bounds_of_arms_cover_and_are_never_wider_than_the_joint_ones(name, family):
    """All arms, all rounds, delta = 1/2: an exact binomial test over the replicates."""
    R, rounds = (40, 150) if name == "oful-contrast" else (10, 60)
    policy, arms, star, generator = built(name, family, 2, 5, R, delta=0.5)
    values, missed, narrower = (arms @ star[..., None])[..., 0], torch.zeros(R).bool(), []

    def look(t, x):
        nonlocal missed
        own = policy.contrast_bounds()
        missed |= ((values < own.lower) | (values > own.upper)).any(-1)
        if t == rounds - 1:
            joint = policy.confidence_set().interval(x)
            both = policy.bounds(x)
            assert bool((both.upper <= joint.upper + 1e-6 + 0.02 * joint.width).all())
            assert bool((both.lower >= joint.lower - 1e-6 - 0.02 * joint.width).all())
            narrower.append((own.upper - own.lower).amin(-1) < joint.width)
            scores = policy.scores(arms)
            assert bool((scores <= own.upper + 1e-9).all())

    play(policy, arms, star, generator, rounds, look)
    assert stats.binomtest(int(missed.sum()), R, 0.5, alternative="greater").pvalue > 1e-3
    if name == "oful-contrast":
        assert bool(narrower[0].any())  # the contrasts do something


@pytest.mark.parametrize(("name", "family"), CASES)
def test_arms_that_change_are_refused_by_name(name, family):
    policy, arms, *_ = built(name, family, 2, 4)
    policy.select(arms)
    other = arms.clone()
    other[..., 0, :] *= 0.5
    with pytest.raises(InputError, match=f"arms: expected the same arms .* {name}"):
        policy.select(other[:, :3])
    policy._declared._validate = policy.validate = True
    with pytest.raises(InputError, match=f"arms: expected the same arms .* {name}"):
        policy.select(other)
    policy.select(arms)
    table = dict(family="gaussian", environment="time-varying", dim=2, arms=4, S=[2.0], horizon=5)
    table["family"] = {"name": "gaussian", "sigma": 0.5}
    configuration = Configuration.load(table | {"policies": [name]})
    with pytest.raises(InputError, match=f"a fixed arm set for {name}"):
        configuration.try_out()


@pytest.mark.parametrize(("name", "family"), CASES)
def test_unvalidated_arms_that_change_get_the_joint_bound(name, family):
    policy, arms, star, generator = built(name, family, 2, 4, R=2)
    play(policy, arms, star, generator, 30, lambda t, x: None)
    moved = arms.clone()
    moved[:, 1] *= 0.5
    fresh = policies.make(
        name, family=family, domain=Ball(2, 2.0), batch_shape=(2,), validate=False
    )
    state = policy.state_dict()
    state["state"] = state["state"] | {"arms": None}
    if name == "oful-contrast":
        state["state"]["sums"] = state["state"]["sums"][..., :0, :]
    fresh.load_state_dict(state)  # the same rows, and no contrasts
    joint, scores = fresh.scores(moved), policy.scores(moved)
    torch.testing.assert_close(scores[:, 1], joint[:, 1], rtol=0, atol=1e-9)
    assert bool((scores <= joint + 1e-9).all())


def test_rows_before_the_first_choice_count_for_the_joint_set_only():
    policy, arms, star, generator = built("oful-contrast", Gaussian(0.5), 2, 4)
    x = arms[:, 0]
    policy.update(x, policy.family.sample((x * star).sum(-1), generator))
    policy.select(arms)
    assert bool(torch.isinf(policy.contrast_bounds().upper).all())
    policy.update(x, policy.family.sample((x * star).sum(-1), generator))
    assert bool(torch.isfinite(policy.contrast_bounds().upper[:, 0]).all())


@pytest.mark.parametrize("family", [Gaussian(0.5), Bernoulli(), Poisson()])
def test_bounds_of_arms_are_those_of_the_rows_that_count(family):
    """Masked rows are as if they had not come, and a row of weight 1 is a row."""
    options = {"radius": PACBayes(tolerance=1e-10, increments="rows")}
    policy, arms, star, generator = built("ofuglb-contrast", family, 2, 4, R=2, **options)
    alone, plain, whole, light = (
        built("ofuglb-contrast", family, 2, 4, R=R, **options)[0] for R in (1, 2, 2, 2)
    )
    alone.select(arms[1:])
    for one in (policy, plain, whole, light):
        one.select(arms)
    for t in range(60):
        x = arms[:, t % 4]
        r = family.sample((x * star).sum(-1), generator)
        seen = torch.tensor([True, t % 3 > 0])
        policy.update(x, r, mask=seen)
        if seen[1]:
            alone.update(x[1:], r[1:])
        plain.update(x, r)
        whole.update(x, r, weight=1.0)
        light.update(x, r, weight=0.25)
    masked, single, unweighted, full, quarter = (
        torch.stack(one.contrast_bounds()) for one in (policy, alone, plain, whole, light)
    )
    torch.testing.assert_close(masked[:, 0], unweighted[:, 0], rtol=0, atol=1e-7)
    torch.testing.assert_close(masked[:, 1], single[:, 0], rtol=0, atol=1e-7)
    torch.testing.assert_close(full, unweighted, rtol=0, atol=1e-7)
    assert bool((quarter[1] - quarter[0] > full[1] - full[0]).all())


def test_golden_bounds_of_a_linear_bandit():
    """OFUL's sums and every contrast's from scratch in NumPy."""
    sigma, S, delta, d, K = 0.5, 2.0, 0.1, 3, 4
    policy, arms, star, generator = built("oful-contrast", Gaussian(sigma), d, K, delta=delta)
    rows, rewards = [], []
    for _ in range(25):
        index = policy.select(arms)
        x = arms[0, index[0]]
        r = policy.family.sample(x @ star[0], generator)
        policy.update(x[None], r[None])
        rows.append(x.numpy())
        rewards.append(float(r))
    X, r = np.array(rows), np.array(rewards)
    own = policy.contrast_bounds()
    V_all = np.eye(d) + X.T @ X
    theta = np.linalg.solve(V_all, X.T @ r)
    growth = np.linalg.slogdet(V_all)[1]
    beta = sigma * math.sqrt(2 * math.log(1 / (0.1 * delta)) + growth) + S
    weights = np.array([1 / (k + 4) for k in range(14)])
    weights /= 2 * weights.sum()
    for k in range(K):
        arm = arms[0, k].numpy()
        length = np.linalg.norm(arm)
        c, V, w, AR, A2 = arm / length, np.eye(d), np.zeros(d), 0.0, 0.0
        for x, reward in zip(X, r, strict=True):
            toward = np.linalg.solve(V, c)
            a = toward @ x / (toward @ c)
            w, AR, A2 = w + a * x, AR + a * reward, A2 + a * a
            V = V + np.outer(x, x)
        toward = np.linalg.solve(V, c)
        alpha = toward @ w / (toward @ c)
        e = w - alpha * c
        u = 2.0 ** (1 - np.arange(14))
        slab = sigma * ((np.log(K / (weights * 0.9 * delta)) + u * u * A2 / 2) / u).min()
        half = (slab + beta * math.sqrt(e @ np.linalg.solve(V, e))) / alpha
        middle = c @ theta + (AR - w @ theta) / alpha
        assert float(own.upper[0, k]) == pytest.approx(length * (middle + half), rel=1e-5)
        assert float(own.lower[0, k]) == pytest.approx(length * (middle - half), rel=1e-5, abs=1e-5)


#: lower and upper ends for the history below, by a plain calculation in NumPy and SciPy
GOLDEN = {
    "gaussian": [
        [-0.18080402, -0.10971506, -0.16722429, -0.04636489],
        [0.16203478, 0.13909468, 0.12953338, 0.03657169],
    ],
    "bernoulli": [
        [-0.59996695, -0.77166854, -0.54433923, -0.18546715],
        [1.49869995, 0.55640144, 0.95906142, 0.25722285],
    ],
    "poisson": [
        [-3.48136406, -0.31619859, -1.13537239, -0.25612776],
        [0.53241194, 0.76838327, 0.10073248, 0.10539953],
    ],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bounds_of_arms_from_weighted_rows(name):
    """The formulas of :mod:`torchglb.contrasts.arm_kernels`, and the joint level of a mean loss."""
    s = np.arange(480)
    family, rewards = {
        "gaussian": (Gaussian(0.5), (s * 37 % 11 - 5) / 4),
        "bernoulli": (Bernoulli(), s * 7 % 5 < 3),
        "poisson": (Poisson(), s * s % 4),
    }[name]
    arms = np.array([[0.8, 0.1], [-0.3, 0.6], [0.5, -0.7], [0.1, -0.2]])
    policy = policies.make(
        "ofuglb-contrast",
        family=family,
        domain=Ball(2, 1.5),
        delta=0.1,
        joint_share=0.3,
        radius="mean-loss",
    )
    policy.select(arms)
    weights = np.array([1.0, 0.5, 1.0, 0.25])[s % 4]
    policy.update(arms[(s * s + s // 3) % 4], rewards.astype(float), weight=weights)
    for end, golden in zip(policy.contrast_bounds(), GOLDEN[name], strict=True):
        np.testing.assert_allclose(end, golden, rtol=1e-6, atol=1e-6)


def test_compiled_bounds_are_those_of_other_devices():
    """The same formulas in torch, after rows of which one arm is zero and one never played."""
    policy, arms, star, generator = built("oful-contrast", Gaussian(0.7), 3, 6, R=4)
    arms[:, 2] = 0.0
    play(policy, arms, star, generator, 60, lambda t, x: None)
    units, inverse = policy._units[0], policy._V.inverse
    own = policy.contrast_bounds()
    parts = policy._units, (inverse, policy.theta, policy.radius())
    torch_own = policy._bounds_on_device(*parts[0], *parts[1])
    for a, b in zip(own, torch_own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    x, r = arms[:, 1], star[:, 0]
    compiled = policy._weighed(units, inverse, x, r, policy._sums)
    policy.device = torch.device("meta")  # any but a CPU
    torch.testing.assert_close(compiled, policy._weighed(units, inverse, x, r, policy._sums))


@pytest.mark.slow
def test_contrasts_at_least_halve_the_regret_of_oful_in_twenty_dimensions():
    found = {}
    for name in ("oful", "oful-contrast"):
        policy, arms, star, generator = built(name, Gaussian(1.0), 20, 20, 20, S=3.0)
        found[name] = play(policy, arms, star, generator, 8000, lambda t, x: None)
    assert float(found["oful-contrast"].mean()) < 0.6 * float(found["oful"].mean())


@pytest.mark.parametrize("short", [1e-161, 1e-200, 1e-310])
@pytest.mark.parametrize(
    ("name", "family"), [("oful-contrast", Gaussian(0.5)), ("ofuglb-contrast", Bernoulli())]
)
def test_arms_whose_squares_underflow_keep_the_joint_bound(name, family, short):
    """Their length is not 0, and what is divided by the square of it is no score."""
    S = 0.01
    policy = policies.make(name, family=family, domain=Ball(2, S))
    arms = torch.eye(3, 2, dtype=torch.float64)
    arms[2, 0] = short
    for _ in range(6):
        policy.select(arms)
        policy.update(arms[0], 0.0)
        assert not bool(policy.scores(arms).isnan().any())
        lower, upper = policy.bounds(arms[2])
        assert float(lower) <= -S * short  # so few rows exclude nothing of so small a ball
        assert float(upper) >= S * short
