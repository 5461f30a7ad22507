"""Preferences: pairs as rows, widest pairs, duels."""

from __future__ import annotations

import copy

import encoders
import numpy as np
import pytest
import scipy.stats
import torch

import torchglb as glb
from torchglb.errors import InputError
from torchglb.preferences import (
    PAIR_POLICIES,
    DuelWorld,
    PairHead,
    PairHistory,
    PreferenceSequence,
    compare_duels,
    in_race,
    make_pair_policy,
    widest_pair,
)
from torchglb.preferences.widest import exact_widths, rough_supports
from torchglb.testing.policies import assert_same

F64 = torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=F64)
    return 0.999 * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def learnt(n, K=12, d=3, seed=0, batch=()):
    """Items, and a sequence that has seen n random pairs of them."""
    items = unit(*batch, K, d, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    theta = torch.tensor([1.0, 0.6, -0.4], dtype=F64)[:d]
    sequence = PreferenceSequence(d, 2.0, 0.05, batch_shape=batch)
    i, j = (torch.randint(0, K, (n,), generator=generator) for _ in range(2))
    left, right = items[..., i, :], items[..., j, :]
    chance = torch.sigmoid((left - right) @ theta)
    sequence.update(left, right, torch.bernoulli(chance, generator=generator))
    return items, theta, sequence


def test_a_pair_is_a_row_of_half_the_difference():
    history = PairHistory(2)
    history.append([[1.0, 0.0], [0.6, 0.8]], [[0.0, 1.0], [0.6, 0.8]], [1.0, 0.5])
    assert history.rows().X.tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert history.rows().r.tolist() == [1.0, 0.5]
    assert len(history) == 2
    with pytest.raises(InputError, match="left: expected features of norm at most 1"):
        history.append([2.0, 0.0], [0.0, 1.0], 1.0)
    with pytest.raises(InputError, match="r: "):
        history.append([1.0, 0.0], [0.0, 1.0], 2.0)
    assert len(history) == 2


def test_the_set_is_that_of_the_rows_in_a_ball_twice_as_large():
    items, _, sequence = learnt(40)
    plain = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 4.0), 0.05)
    rows = sequence.sequence.history.rows()
    plain.update(rows.X, rows.r)
    found = sequence.current().difference(items[:4], items[4:8])
    wanted = plain.current().interval(0.5 * (items[:4] - items[4:8]))
    torch.testing.assert_close(found.lower, wanted.lower, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.upper, wanted.upper, rtol=1e-5, atol=1e-6)
    chance = sequence.current().probability(items[:4], items[4:8])
    torch.testing.assert_close(chance.upper, torch.sigmoid(found.upper))
    turned = sequence.current().difference(items[4:8], items[:4])
    torch.testing.assert_close(turned.upper, -found.lower, rtol=1e-5, atol=1e-6)


def test_differences_are_covered():
    """200 sequences, pairs chosen by what came before; looked at three times."""
    runs, delta = 200, 0.2
    items, theta = unit(6, 2), torch.tensor([1.2, -0.8], dtype=F64)
    sequence = PreferenceSequence(2, 2.0, delta, batch_shape=(runs,), aggregate=True)
    generator = torch.Generator().manual_seed(0)
    wins = torch.zeros(runs, 6, dtype=F64)
    missed = torch.zeros(runs, dtype=torch.bool)
    for t in range(60):
        order = (wins + 0.1 * torch.rand(runs, 6, generator=generator, dtype=F64)).argsort(-1)
        left, right = items[order[:, -1]], items[order[:, t % 5]]
        won = torch.bernoulli(torch.sigmoid((left - right) @ theta), generator=generator)
        sequence.update(left, right, won)
        wins.scatter_add_(-1, order[:, -1:], 2.0 * won[:, None] - 1.0)
        if t in (9, 29, 59):
            missed |= ~sequence.confidence_set().contains(2.0 * theta.expand(runs, 2))
    hits = int(missed.sum())
    assert scipy.stats.binomtest(hits, runs, delta, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1.0, 0.0], [0.0, 1.0], 2.0), "winner: expected"),
        (([1.0, 0.0], [0.0, 1.0], "left"), "winner: expected"),
        (([1.0, 0.0], [0.0, 1.0], [1.0]), "winner: expected"),
        (([1.0, 0.0, 0.0], [0.0, 1.0], 1.0), "left: expected features of dimension 2"),
        (([1.0, 0.0], [0.0, 1.0, 3.0], 1.0), "right: expected features of dimension 2"),
        ((1.0, [0.0, 1.0], 1.0), "left: expected features of dimension 2"),
    ],
    ids=str,
)
def test_comparisons_are_refused_by_the_names_of_their_arguments(pair, message):
    log, history = PreferenceSequence(2, S=2.0, delta=0.05), PairHistory(2)
    policy = make_pair_policy("random-pairs", dim=2, S=2.0)
    for update in (log.update, policy.update, history.append):
        with pytest.raises(InputError, match=f"^{message}"):
            update(*pair)
    assert (len(log), policy.rounds, len(history)) == (0, 0, 0)
    head = glb.PairHead(torch.nn.Identity(), dim=2, S=2.0)
    if message.startswith("winner"):
        with pytest.raises(InputError, match=f"^{message}"):
            head.update(*pair)
    else:
        with pytest.raises(InputError, match=f"^{message}"):
            log.current().probability(*pair[:2])


def test_states_continue():
    items, _, sequence = learnt(20)
    other = PreferenceSequence(3, 2.0, 0.05)
    other.load_state_dict(sequence.state_dict())
    for one in (sequence, other):
        one.update(items[0], items[1], 1.0)
    assert torch.equal(sequence.confidence_set().level, other.confidence_set().level)


# ---- the widest pair ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 15, 150])
def test_the_widest_pair_is_the_widest_of_all(n):
    items, _, sequence = learnt(n)
    region = sequence.confidence_set()
    i, j = torch.triu_indices(12, 12, 1)
    widths = exact_widths(region, 0.5 * (items[i] - items[j]))
    rough = rough_supports(region, items)
    assert bool((rough[i, j] + rough[j, i] >= widths - 1e-9).all())
    found = widest_pair(region, items, tol=0.0)
    assert found.width >= float(widths.max()) * (1 - 1e-3)
    own = widths[(i == found.left) & (j == found.right)]
    assert abs(float(own) - found.width) <= 1e-3 * found.width
    assert found.bound >= float(widths.max()) * (1 - 1e-3)
    lower = sequence.current().difference(items[found.left], items[found.right])
    assert abs(float(lower.width) - found.width) < 1e-2 * found.width


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("S", [0.7, 30.0, 300.0, 3000.0])
@pytest.mark.parametrize("radius", ["pac-bayes", "centred"])
def test_the_width_of_a_pair_that_no_row_is_about(dtype, S, radius):
    """It is 2 S times the length of the row: the set reaches both poles there."""
    for seed in range(3):
        items = unit(4, 3, seed=seed)
        items[:2, 2], items[2:, :2], items[2, 2], items[3, 2] = 0.0, 0.0, 0.7, -0.63
        items = items.to(dtype)
        sequence = PreferenceSequence(3, S=S, delta=0.05, radius=radius, dtype=dtype)
        sequence.update(items[[0] * 20], items[[1] * 20], [1.0, 0.0] * 10)
        region, far = sequence.confidence_set(), torch.tensor([False, False, True, True])
        S_pair = float(region.domain.radius_like(region.level))
        pole = torch.tensor([0.0, 0.0, S_pair], dtype=dtype)
        assert bool(region.contains(torch.stack([pole, -pole])).all())
        exact = S_pair * float(items[2, 2].double() - items[3, 2].double())
        found = widest_pair(region, items, far)
        assert exact <= found.width <= found.bound <= exact * (1 + 1e-5)
        assert bool(in_race(region, items)[2:].all())
        assert sequence.current().widest(items)[0].bound >= exact


def test_a_thousand_items_are_no_trouble():
    items = unit(1000, 3, seed=4)
    _, _, sequence = learnt(60)
    region = sequence.confidence_set()
    found = widest_pair(region, items)
    assert found.solved <= 4096
    i, j = (
        torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    some = exact_widths(region, 0.5 * (items[i] - items[j]))
    assert found.bound >= float(some.max()) * (1 - 1e-6)
    assert found.width >= float(some.max()) * (1 - 1e-2)


def test_only_allowed_items_are_paired():
    items, _, sequence = learnt(30)
    allowed = torch.zeros(12, dtype=torch.bool)
    allowed[[2, 5, 7]] = True
    found = widest_pair(sequence.confidence_set(), items, allowed)
    assert {found.left, found.right} <= {2, 5, 7}
    with pytest.raises(InputError, match="at least two items"):
        widest_pair(sequence.confidence_set(), items, allowed & (torch.arange(12) == 2))


@pytest.mark.parametrize("n", [0, 40, 800])
def test_the_race_is_that_of_all_exact_contrasts(n):
    items, theta, sequence = learnt(n, K=7)
    region = sequence.confidence_set()
    h = torch.stack([region.upper_bound(0.5 * (items - x)) for x in items])  # h[j, i]
    h.fill_diagonal_(0.0)
    expected = (h >= 0.0).all(0)
    found = in_race(region, items)
    assert torch.equal(found, expected)
    assert bool(found[(items @ theta).argmax()])
    assert bool(expected.all()) == (n < 800)


# ---- policies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIR_POLICIES)
def test_the_contract_of_pair_policies(name):
    items = unit(3, 5, 2)
    policy = make_pair_policy(name, dim=2, S=2.0, batch_shape=(3,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        pair = policy.select(items)
        assert pair.left.shape == pair.right.shape == (3,)
        assert bool(((pair.left >= 0) & (pair.left < 5)).all())
        place = torch.arange(3)
        won = torch.bernoulli(torch.full((3,), 0.7, dtype=F64), generator=generator)
        policy.update(items[place, pair.left], items[place, pair.right], won)
    assert policy.rounds == 6
    copied = copy.deepcopy(policy)
    loaded = make_pair_policy(name, dim=2, S=2.0, batch_shape=(3,))
    loaded.load_state_dict(policy.state_dict())
    wanted = policy.select(items)
    for other in (copied, loaded):
        for one, two in zip(other.select(items), wanted, strict=True):
            assert torch.equal(one, two)
    before = policy.confidence_set().level
    for bad in ((3.0 * items[:, 0], items[:, 1], won), (items[:, 0], items[:, 1], won + 3.0)):
        with pytest.raises(InputError):
            policy.update(*bad)
    assert torch.equal(policy.confidence_set().level, before)
    with pytest.raises(InputError, match="items"):
        policy.select(items[:, :1])
    with pytest.raises(InputError, match="state"):
        policy.load_state_dict({"pair_policy": "another"})


@pytest.mark.parametrize("name", ["duel-ofu", "max-in-p", "widest-pair"])
def test_an_element_never_depends_on_its_companions(name):
    items = unit(2, 4, 2)
    both = make_pair_policy(name, dim=2, S=2.0, batch_shape=(2,))
    alone = [make_pair_policy(name, dim=2, S=2.0, batch_shape=(1,)) for _ in range(2)]
    for t in range(5):
        pair = both.select(items)
        won = torch.tensor([1.0, float(t % 2)], dtype=F64)
        place = torch.arange(2)
        both.update(items[place, pair.left], items[place, pair.right], won)
        for b, policy in enumerate(alone):
            own = policy.select(items[b : b + 1])
            assert int(own.left) == int(pair.left[b])
            assert int(own.right) == int(pair.right[b])
            policy.update(items[[b], own.left], items[[b], own.right], won[b : b + 1])


def test_duel_ofu_plays_the_exact_best_response():
    items, _, sequence = learnt(60, K=8)
    policy = make_pair_policy("duel-ofu", dim=3, S=2.0)
    rows = sequence.sequence.history.rows()
    policy._rows.update(rows.X, rows.r)
    pair = policy.select(items)
    region = policy.confidence_set()
    left = int((items @ region.center).argmax())
    assert int(pair.left) == left
    bounds = region.upper_bound(0.5 * (items - items[left]))
    assert float(bounds[pair.right]) >= float(bounds.max()) - 1e-5


def test_the_world_of_duels():
    world = DuelWorld(items=4, dim=2, S=3.0, replicates=5, seed=1)
    length = torch.linalg.vector_norm(world.theta_star, dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, 2.0))
    best = world.best
    assert bool((world.regret((best, best)) == 0).all())
    other = (best + 1) % 4
    assert bool((world.regret((best, other)) > 0).all())
    torch.testing.assert_close(2.0 * world.regret((best, other)), world.regret((other, other)))
    wins = torch.stack([world.winner(t, (best, other)) for t in range(800)]).mean(0)
    gap = world.scores.amax(-1) - world.scores.gather(-1, other[:, None])[:, 0]
    torch.testing.assert_close(wins, torch.sigmoid(gap), atol=0.07, rtol=0.0)


def test_duels_lose_less_than_random_pairs():
    found = compare_duels(
        ["duel-ofu", "random-pairs"], items=6, dim=2, replicates=3, horizon=80, look_every=40
    )
    final = {name: result.regret[:, -1].mean() for name, result in found.items()}
    assert final["duel-ofu"] < 0.7 * final["random-pairs"]
    for result in found.values():
        assert result.regret.shape == (3, 80)
        assert np.all(np.diff(result.regret, axis=-1) >= 0)
        assert result.right.all()


# ---- the head ----------------------------------------------------------------------------------


def test_the_head_is_a_sequence_on_embeddings():
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2).double()
    head = PairHead(network, 2, 2.0)
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 60, 4, generator=generator, dtype=F64)
    won = torch.bernoulli(torch.full((60,), 0.6, dtype=F64), generator=generator)
    head.update(left, right, won)
    plain = PreferenceSequence(2, 2.0, 0.05)
    plain.update(head.embed(left), head.embed(right), won)
    found = head.probability(left[:3], right[:3])
    wanted = plain.current().probability(head.embed(left[:3]), head.embed(right[:3]))
    torch.testing.assert_close(found.lower, wanted.lower, rtol=1e-5, atol=1e-6)
    middle = head.eval()(left[:3], right[:3])
    assert bool(((found.lower <= middle) & (middle <= found.upper)).all())
    torch.testing.assert_close(head(right[:3], left[:3]), 1.0 - middle)
    pair = head.widest(left[:10])
    assert pair == widest_pair(head.confidence_set(), head.embed(left[:10]))
    with pytest.raises(InputError, match="right"):
        head.update(left, right[:3], won)
    with pytest.raises(InputError, match="left"):
        head.update(won[0], won[0], 1.0)
    assert len(head) == 60


def test_a_refused_state_leaves_encoder_and_comparisons():
    """Torch alone had loaded the other encoder before the comparisons were refused."""
    heads = []
    for seed, delta in ((0, 0.05), (1, 0.1)):
        torch.manual_seed(seed)
        head = PairHead(torch.nn.Linear(4, 2).double(), 2, 2.0, delta=delta)
        head.update(*torch.randn(2, 20, 4, dtype=F64), torch.ones(20, dtype=F64))
        heads.append(head)
    mine, other = heads
    before, left = copy.deepcopy(mine.state_dict()), torch.randn(3, 4, dtype=F64)
    bounds = mine.probability(left, -left)
    with pytest.raises(InputError, match="delta"):
        mine.load_state_dict(other.state_dict())
    assert_same(dict(mine.state_dict()), dict(before))
    assert torch.equal(mine.probability(left, -left).lower, bounds.lower)


def test_gradients_reach_the_encoder():
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2).double()
    head = PairHead(network, 2, 2.0, regularization=0.1).train()
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 40, 4, generator=generator, dtype=F64)
    won = torch.bernoulli(torch.full((40,), 0.5, dtype=F64), generator=generator)
    head.update(left, right, won)

    def width():
        return head.probability(left[:1], right[:1], "linear", differentiable=True).width.sum()

    for answer in (lambda: head(left[:2], right[:2]).sum(), width):
        network.zero_grad()
        answer().backward()
        slope = network.weight.grad[0, 1].item()
        ends = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                network.weight[0, 1] += step
            ends.append(float(answer().detach()))
            with torch.no_grad():
                network.weight[0, 1] -= step
        assert abs(slope - (ends[0] - ends[1]) / 2e-4) < 2e-3 * (1.0 + abs(slope))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pair_head_takes_networks_in_half_precision(dtype):
    left, right = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(0))
    head = PairHead(encoders.network(dtype=dtype), 2, 2.0)
    head.update(left, right, torch.ones(20))
    found = head.probability(left[:3], right[:3])
    assert found.lower.dtype == torch.float64
    assert (found.lower < found.upper).all()
    assert head.embed(left).dtype == torch.float64
    assert head.widest(left[:4]).width > 0


@pytest.mark.parametrize("fault", [f for f in encoders.FAULTS if f not in ("rows", "device")])
def test_a_pair_head_refuses_a_broken_encoder_by_name(fault):
    spoil, message = encoders.FAULTS[fault]
    encoder = encoders.Broken()
    head = PairHead(encoder, 2, 2.0)
    left, right = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    head.update(left, right, torch.ones(8))
    encoder.answer = spoil
    head.head.refresh()
    with pytest.raises(glb.InputError, match=message):
        head.update(left, right, torch.ones(8))
    encoder.answer = lambda features: features
    assert len(head) == len(head.head.sequence()) == 8
