"""Duels as an environment, and the pair policies that play it by name."""

from __future__ import annotations

import pytest
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.errors import InputError
from torchglb.preferences import PAIR_POLICIES, DuelWorld, make_pair_policy
from torchglb.preferences.pair_arms import items_of
from torchglb.simulate import simulate

SETTINGS = {"family": glb.Bernoulli(), "S": 3.0, "replicates": 3, "seed": 5}


def duels(items=4):
    return environments.make("duels", items=items, dim=2, **SETTINGS)


def test_the_environment_is_the_world_of_duels_with_pairs_as_arms():
    found, world = duels(), DuelWorld(4, 2, 3.0, 3, seed=5)
    torch.testing.assert_close(found.theta_star, 2.0 * world.theta_star)
    assert found.domain.radius.tolist() == [6.0] * 3
    pairs = [(i, j) for i in range(4) for j in range(i, 4)]
    assert found.arms(0).shape == (3, len(pairs), 2)
    for place, (i, j) in enumerate(pairs):
        index, own = torch.full((3,), place), (torch.full((3,), i), torch.full((3,), j))
        rows = 0.5 * (world.items[:, i] - world.items[:, j])
        assert torch.equal(found.arms(0)[:, place], rows)
        assert torch.equal(found.regret(7, rows, index), world.regret(own))
        assert torch.equal(found.rewards(7, rows, index), world.winner(7, own))
    items = items_of(found.arms(0))
    torch.testing.assert_close(items, world.items - world.items[:, :1])


@pytest.mark.parametrize("name", PAIR_POLICIES)
def test_by_name_a_policy_plays_what_the_pair_policy_plays(name):
    world = duels()
    arms, rows = world.arms(0), torch.arange(3)
    policy = policies.make(name, family=world.family, domain=world.domain, batch_shape=(3,))
    pairs = make_pair_policy(name, dim=2, S=3.0, batch_shape=(3,), aggregate=True)
    for t in range(4):
        index, wanted = policy.select(arms), pairs.select(world.world.items)
        both = torch.stack(wanted, -1).sort(-1).values
        first, second = torch.triu_indices(4, 4)
        assert torch.equal(torch.stack([first[index], second[index]], -1), both)
        x, r = arms[rows, index], world.rewards(t, arms[rows, index], index)
        policy.update(x, r)
        pairs._rows.update(x, r)
    other = policies.make(name, family=world.family, domain=world.domain, batch_shape=(3,))
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.select(arms), policy.select(arms))


def test_a_run_counts_coverage_and_claims_no_certificate():
    given = {"family": "bernoulli", "dim": 2, "items": 3, "S": [3.0], "replicates": 2}
    record = simulate(["duel-ofu", "random-pairs"], "duels", horizon=5, **given)
    for label in record.labels:
        arrays = record.arrays(label)
        assert arrays["regret"].shape == (1, 2, 5)
        assert arrays["missed"].shape == (1, 2)
        assert "certificate" not in arrays


def test_what_is_no_pair_is_refused():
    world = duels()
    policy = policies.make("duel-ofu", family=world.family, domain=world.domain, batch_shape=(3,))
    for bad in (world.arms(0)[:, :7], world.arms(0).flip(-2)):
        with pytest.raises(InputError, match="^arms: expected all pairs"):
            policy.select(bad)
    with pytest.raises(InputError, match="one of pairs, such as duels"):
        simulate(["duel-ofu"], "fixed", horizon=2, replicates=1, S=[3.0])
    with pytest.raises(InputError, match="^family: expected bernoulli"):
        environments.make("duels", family=glb.Gaussian(1.0), S=3.0)
    assert "duel-ofu" not in policies.available()
    assert set(policies.available(pairs=True)) == set(PAIR_POLICIES)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_incumbent_is_arm_0_and_has_the_rank_that_is_asked_for(rank):
    given = SETTINGS | {"arms": 5, "dim": 2, "shared_arms": False, "theta": "random"}
    world, plain = (
        environments.make("incumbent", rank=rank, **given),
        environments.make("fixed", **given),
    )
    arms = world.arms(3)
    means = torch.sigmoid((arms * world.theta_star[:, None, :]).sum(-1))
    assert ((means > means[:, :1]).sum(-1) == rank - 1).all()
    for b in range(3):
        assert sorted(arms[b].tolist()) == sorted(plain.arms(3)[b].tolist())
    index = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(world.regret(3, arms[:, 0], index), means.amax(-1) - means[:, 0])
    with pytest.raises(InputError, match="^rank"):
        environments.make("incumbent", rank=6, **given)


def test_weights_reach_the_rows():
    family, domain = glb.Bernoulli(), glb.Ball(2, 4.0)
    arms = policies.make("duel-ofu", family=family, domain=domain)
    pairs = make_pair_policy("duel-ofu", dim=2, S=2.0, aggregate=True)
    left, right, winner = [[1.0, 0.0]] * 3, [[0.0, 1.0]] * 3, [1.0, 0.0, 1.0]
    arms.update([[0.5, -0.5]] * 3, winner, weight=[0.5, 1.0, 0.25])
    pairs.update(left, right, winner, weight=[0.5, 1.0, 0.25])
    assert torch.equal(arms.confidence_set().level, pairs.confidence_set().level)
    with pytest.raises(glb.InputError, match=r"weight: expected weights in \[0, 1\]"):
        arms.update([0.5, -0.5], 1.0, weight=2.0)
    assert arms.rounds == 3
