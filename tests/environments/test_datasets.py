"""Bandits of real data, and the replay of logged events."""

import importlib

import pytest
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.environments import datasets
from torchglb.environments.replay import Log, replay, uniform_log
from torchglb.errors import InputError

TABLES = {"digits": (1797, 10), "breast-cancer": (569, 2), "randhie": (20190, None)}


def world_of(name, replicates=3, S=3.0, **options):
    family = glb.Poisson() if name == "randhie" else glb.Bernoulli()
    return environments.make(name, family=family, S=S, replicates=replicates, **options)


# ---- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_points_of_the_unit_ball(name):
    rows = datasets.unit_ball_rows(name, 6)
    assert rows.shape == (TABLES[name][0], 6)
    assert rows.dtype == torch.float64
    assert (torch.linalg.vector_norm(rows, dim=-1) <= 1.0).all()
    assert torch.allclose(rows[:, 0], torch.full_like(rows[:, 0], 0.5**0.5))
    assert torch.linalg.matrix_rank(rows) == 6
    length = torch.linalg.vector_norm(rows, dim=-1)
    assert (length > 0.999).double().mean() == pytest.approx(0.05, abs=0.01)


def test_more_axes_keep_the_first_ones_apart_from_the_scale():
    few, many = datasets.unit_ball_rows("digits", 4), datasets.unit_ball_rows("digits", 9)
    inner = torch.linalg.vector_norm(many, dim=-1) < 0.99  # neither was drawn in
    inner &= torch.linalg.vector_norm(few, dim=-1) < 0.99
    ratio = few[inner, 1:] / many[inner, 1:4]
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-8)


def test_too_many_axes_are_refused():
    with pytest.raises(
        InputError, match="dim: expected between 2 and 31 for breast-cancer, got 40"
    ):
        datasets.unit_ball_rows("breast-cancer", 40)
    with pytest.raises(InputError, match="name: expected one of 'digits'"):
        datasets.load_table("iris")


@pytest.mark.parametrize(
    ("name", "package"), [("digits", "scikit-learn"), ("randhie", "statsmodels")]
)
def test_a_missing_package_is_named_with_its_extra(name, package, monkeypatch):
    def missing(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    datasets.load_table.cache_clear()
    with pytest.raises(
        InputError, match=rf"{package}, which is not installed.*pip install {package}"
    ):
        datasets.load_table(name)


# ---- environments ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_an_element_meets_the_same_world_in_every_batch(name):
    together = world_of(name, 4, arms=5, dim=6)
    alone = world_of(name, torch.tensor([2]), arms=5, dim=6)
    index = torch.tensor([0, 1, 2, 3])
    for t in (7, 0, 3):
        arms = together.arms(t)
        assert arms.shape == (4, 5, 6)
        assert torch.equal(arms[2:3], alone.arms(t))
        x = arms[torch.arange(4), index]
        found = together.rewards(t, x, index), together.regret(t, x, index)
        single = alone.rewards(t, x[2:3], index[2:3]), alone.regret(t, x[2:3], index[2:3])
        assert torch.equal(found[0][2:3], single[0])
        assert torch.equal(found[1][2:3], single[1])
        assert (found[1] >= 0).all()
    assert not torch.equal(together.arms(0)[0], together.arms(0)[1])
    assert not torch.equal(together.arms(0), together.arms(1))


def test_finding_a_digit_pays_for_that_digit_only():
    world = world_of("digits", 2, target=7, dim=8)
    rows, target = datasets.unit_ball_rows("digits", 8), datasets.load_table("digits").target
    for t in range(30):
        arms = world.arms(t)
        index = torch.tensor([t % 10, (3 * t) % 10])
        x = arms[torch.arange(2), index]
        for b in range(2):
            of = int((rows == x[b]).all(-1).nonzero()[0])
            assert world.rewards(t, x, index)[b] == float(target[of] == 7)
        hits = torch.stack([world.rewards(t, x, torch.full((2,), k)) for k in range(10)])
        expected = hits.amax(0) - hits[index, torch.arange(2)]
        assert torch.equal(world.regret(t, x, index), expected)


def test_labelling_has_one_right_arm_and_block_features():
    world = world_of("breast-cancer", 3, task="label", arms=2, dim=8)
    for t in range(10):
        arms = world.arms(t)
        assert arms.shape == (3, 2, 8)
        assert torch.equal(arms[:, 0, :4], arms[:, 1, 4:])
        assert not arms[:, 0, 4:].any()
        assert not arms[:, 1, :4].any()
        r = torch.stack([world.rewards(t, arms[:, k], torch.full((3,), k)) for k in (0, 1)])
        assert torch.equal(r.sum(0), torch.ones(3).double())
        assert torch.equal(world.regret(t, arms[:, 0], torch.zeros(3, dtype=torch.int64)), 1 - r[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(task="guess"), "task: expected one of 'find', 'label', got 'guess'"),
        (dict(target=10), "target: expected a class from 0 to 9, got 10"),
        (dict(task="label", dim=25), "dim: expected a multiple of the 10 classes"),
        (dict(task="label", dim=40, arms=4), "arms: expected 10, one for each class, got 4"),
        (dict(arms=0), "arms: expected an integer of at least 1, got 0"),
        (dict(theta="paper"), "option of digits"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        world_of("digits", **options)


def test_families_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="rewards of Bernoulli"):
        environments.make("randhie", family=glb.Bernoulli(), S=3.0)
    with pytest.raises(InputError, match="family: expected Poisson for randhie, got Gaussian"):
        environments.make("randhie", family=glb.Gaussian(), S=3.0)


def test_visits_are_judged_by_the_best_poisson_model():
    world = world_of("randhie", 2, S=4.0, arms=6, dim=5)
    rows = glb.Rows(
        datasets.unit_ball_rows("randhie", 5),
        torch.from_numpy(datasets.load_table("randhie").target).double(),
    )
    theta = glb.constrained_mle(glb.Poisson(), rows, glb.Ball(5, 4.0)).theta
    arms = world.arms(0)
    means = torch.exp(arms @ theta)
    index = torch.tensor([1, 4])
    found = world.regret(0, arms[torch.arange(2), index], index)
    expected = means.amax(-1) - means[torch.arange(2), index]
    assert torch.allclose(found, expected, rtol=1e-9)


def test_float32_rows_stay_in_the_ball():
    world = world_of("digits", 2, dtype=torch.float32)
    assert world.arms(0).dtype == torch.float32
    assert (torch.linalg.vector_norm(world._rows, dim=-1) <= 1.0).all()


def test_a_policy_learns_to_find_a_digit():
    world = world_of("digits", 8, S=6.0, target=0, arms=5, dim=8)
    policy = policies.make("ts", family=world.family, domain=world.domain, batch_shape=(8,))
    gained = []
    for t in range(200):
        arms = world.arms(t)
        index = policy.select(arms)
        x = arms[torch.arange(8), index]
        policy.update(x, world.rewards(t, x, index))
        gained.append(world.rewards(t, x, index).mean())
    gained = torch.stack(gained)
    assert gained[100:].mean() > 2 * 0.1  # a random choice finds one in ten
    assert gained[100:].mean() > gained[:50].mean()


# ---- replay ----------------------------------------------------------------------------------


def small_world(replicates, arms=3):
    return environments.make(
        "time-varying", family=glb.Bernoulli(), S=5.0, replicates=replicates, arms=arms,
        shared_arms=False, seed=5,
    )  # fmt: skip


def fresh(name, world, replicates=None):
    return policies.make(
        name, family=world.family, domain=world.domain, batch_shape=tuple(world.S.shape),
        replicates=world.replicates, horizon=100,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["greedy", "ofuglb", "rs-glincb"])
def test_replay_is_the_loop_over_events(name):
    world = small_world(3)
    log = uniform_log(world, 60)
    found = replay(fresh(name, world), log)
    for b in range(3):
        single = environments.make(
            "time-varying",
            family=glb.Bernoulli(),
            S=5.0,
            replicates=torch.tensor([b]),
            arms=3,
            seed=5,
        )
        policy, kept = fresh(name, single), []
        for event in range(60):
            arms = log.arms[b : b + 1, event]
            if policy.select(arms) == log.index[b, event]:
                policy.update(arms[:, log.index[b, event]], log.rewards[b : b + 1, event])
                kept.append(log.rewards[b, event])
        kept = torch.stack(kept)
        assert found.kept[b] == len(kept)
        assert found.value[b] == pytest.approx(kept.mean().item(), rel=1e-12)
        assert found.iid_error[b] == pytest.approx((kept.std() / len(kept) ** 0.5).item(), rel=1e-9)
        assert found.used[b] == 60


@pytest.mark.parametrize("name", ["ts", "evill", "random", "ofuglb-pb"])
def test_replay_of_an_element_does_not_depend_on_its_companions(name):
    world = small_world(5)
    log = uniform_log(world, 60)
    together = replay(fresh(name, world), log, horizon=8)
    for b in (0, 3):
        single = small_world(torch.tensor([b]))
        part = Log(log.arms[b : b + 1], log.index[b : b + 1], log.rewards[b : b + 1])
        alone = replay(fresh(name, single), part, horizon=8)
        for key in ("value", "kept", "used"):
            assert torch.equal(getattr(alone, key)[0], getattr(together, key)[b])


def played(name, world, rounds):
    """Mean reward of a policy that plays itself, for every element."""
    policy, total = fresh(name, world), torch.zeros(len(world.S)).double()
    for t in range(1000, 1000 + rounds):  # other rounds than those of the log
        arms = world.arms(t)
        index = policy.select(arms)
        x = torch.take_along_dim(arms, index[:, None, None], 1)[:, 0]
        r = world.rewards(t, x, index)
        policy.update(x, r)
        total += r
    return total / rounds


@pytest.mark.parametrize("skewed", [False, True])
def test_replay_is_unbiased(skewed):
    """Against 300 runs of the policy itself; the logging law may be uniform or not."""
    world, rounds = small_world(300), 12
    log = uniform_log(world, 300)
    if skewed:
        generator = torch.Generator().manual_seed(0)
        law = torch.tensor([0.6, 0.25, 0.15]).double()
        index = torch.multinomial(law, 300 * 300, replacement=True, generator=generator).view(
            300, 300
        )
        x = torch.take_along_dim(log.arms, index[..., None, None], -2)[..., 0, :]
        mean = world.family.mean((x * world.theta_star[:, None]).sum(-1))
        r = (torch.rand(300, 300, generator=generator).double() < mean).double()
        log = Log(log.arms, index, r, law.expand(300, 300, 3))
    found = replay(fresh("ts", world), log, horizon=rounds)
    assert (found.kept == rounds).all()
    direct = played("ts", world, rounds)
    error = (found.value.var() / 300 + direct.var() / 300).sqrt()
    assert abs(found.value.mean() - direct.mean()) < 3.5 * error
    uniform = log.rewards.mean()
    assert direct.mean() - uniform > 6 * error  # an estimate that ignores the policy would be seen


def test_replay_of_a_log_that_ends():
    world = small_world(4, arms=8)
    log = uniform_log(world, 3)
    found = replay(fresh("greedy", world), log)
    assert (found.used == 3).all()
    assert torch.equal(found.value.isnan(), found.kept == 0)
    assert torch.equal(found.iid_error.isnan(), found.kept < 2)


def test_bad_logs_are_refused():
    world = small_world(2)
    log = uniform_log(world, 4)
    with pytest.raises(InputError, match="index: expected arms from 0 to 2, got 3"):
        Log(log.arms, torch.full_like(log.index, 3), log.rewards)
    with pytest.raises(InputError, match="propensity"):
        Log(log.arms, log.index, log.rewards, torch.zeros_like(log.rewards))
    with pytest.raises(InputError, match=r"rewards: expected shape \(2, 4\)"):
        Log(log.arms, log.index, log.rewards[:, :2])
    policy = fresh("greedy", world)
    policy.update(log.arms[:, 0, 0], log.rewards[:, 0])
    with pytest.raises(InputError, match="learnt nothing yet"):
        replay(policy, log)
    with pytest.raises(InputError, match="log.arms"):
        replay(fresh("greedy", small_world(3)), log)
