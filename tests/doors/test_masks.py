"""Rewards that are missing, and weights: at policies, sequences, heads and pairs."""

import pytest
import torch

import torchglb as glb
from torchglb import policies
from torchglb.policies.registry import _POLICIES
from torchglb.testing.policies import assert_same

S = 3.0
#: their radius or ridge counts rounds, also those that a replicate has missed
COUNTING = {"glm-ucb", "ofulog-r", "ofulog+", "evill-theory", "rs-glincb", "log-ucb-1"}


def family_of(name):
    return glb.Gaussian(0.5) if name in ("oful", "oful-contrast") else glb.Bernoulli()


def policy_of(name, batch=(), **options):
    if name == "oracle":
        options["theta_star"] = [1.0, 0.0]
    return policies.make(
        name,
        family=family_of(name),
        domain=glb.Ball(2, S),
        horizon=60,
        batch_shape=batch,
        **options,
    )


def rows(n=30, batch=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(n, batch, 2, generator=generator), dim=-1)
    return 0.9 * x.double(), (torch.rand(n, batch, generator=generator) < 0.6).double()


NAMES = sorted({*policies.available(), *policies.available(glb.Gaussian())})


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_row_did_not_happen(name):
    """Replicate 1 gets every third row; alone it gets just these."""
    masked, plain, alone = policy_of(name, (2,)), policy_of(name, (2,)), policy_of(name)
    x, r = rows()
    if masked.requires.fixed_arms:
        arms = torch.eye(2).double()
        for one in (masked, plain):
            one.select(arms.expand(2, 2, 2))
        alone.select(arms)
        x = torch.nn.functional.one_hot((x[..., 0] > 0).long(), 2).double()
    for t in range(len(x)):
        seen = t % 3 == 0
        given = torch.where(torch.tensor([True, seen]), r[t], torch.nan)
        masked.update(x[t], given, mask=[True, seen])
        plain.update(x[t], r[t])
        if seen:
            alone.update(x[t, 1], r[t, 1])
    assert masked.rounds == 30
    sets = [one.confidence_set() for one in (masked, plain, alone)]
    points = torch.tensor([[1.0, 0.0], [0.6, -0.8], [-0.5, 0.5]]).double()
    if sets[0] is not None:
        inner, full, fewer = (
            s.interval(points.expand(*s.batch_shape, 3, 2), throw=False)
            if isinstance(s, glb.LikelihoodRatioSet)
            else s.interval(points.expand(*s.batch_shape, 3, 2))
            for s in sets
        )
        torch.testing.assert_close(inner.upper[0], full.upper[0], rtol=0, atol=1e-6)
        assert bool((inner.upper[1] >= fewer.upper - 1e-6).all())  # never smaller
        assert bool((inner.lower[1] <= fewer.lower + 1e-6).all())
        if name in ("oful", "oful-contrast", "gloc", "ofuglb-pb"):
            torch.testing.assert_close(inner.upper[1], fewer.upper, rtol=0, atol=1e-6)
    if masked.estimate() is not None and name not in COUNTING:
        torch.testing.assert_close(masked.estimate()[1], alone.estimate(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_weights_where_the_theory_allows_them_and_else_a_name(name):
    policy, (x, r) = policy_of(name), rows(batch=1)
    x, r = x[:3, 0], r[:3, 0]
    before = policy.state_dict()
    if type(policy).takes_weights:
        policy.update(x, r, weight=[0.5, 1.0, 0.25])
        assert policy.rounds == 3
    else:
        with pytest.raises(
            glb.InputError, match=f"weight: expected none, since {name}".replace("+", r"\+")
        ):
            policy.update(x, r, weight=[0.5, 1.0, 0.25])
        assert_same(policy.state_dict(), before)
    before = policy.state_dict()
    for bad, message in (
        ([0.5, 1.0, 1.0], "mask: expected booleans"),
        ([True, False], "mask: expected shape"),
        ("yes", "mask: expected a tensor"),
    ):
        with pytest.raises(glb.InputError, match=message):
            policy.update(x, r, mask=bad)
    assert_same(policy.state_dict(), before)


def test_every_registered_policy_is_here():
    assert set(NAMES) == {n for n, p in _POLICIES.items() if not p.requires.pairs}


# ---- heads and pairs -----------------------------------------------------------------------------


def head(**options):
    torch.manual_seed(0)
    return glb.GLMHead(torch.nn.Linear(3, 2), glb.Bernoulli(), glb.Ball(2, S), **options)


def contexts(n=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, 3, generator=generator)
    return drawn, (torch.rand(n, generator=generator) < 0.5).double()


def test_a_head_leaves_masked_rows_out():
    masked, plain = head(), head()
    c, r = contexts()
    seen = torch.arange(12) % 3 != 1
    hidden, rewards = c.clone(), r.clone()
    hidden[~seen], rewards[~seen] = torch.nan, torch.nan
    masked.update(hidden, rewards, mask=seen)
    plain.update(c[seen], r[seen])
    assert len(masked) == 12
    torch.testing.assert_close(masked.theta(), plain.theta(), rtol=0, atol=1e-6)
    found, other = masked.confidence(c), plain.confidence(c)
    torch.testing.assert_close(found.upper, other.upper, rtol=0, atol=1e-6)
    again = head()
    again.load_state_dict(masked.state_dict())  # with the weights
    torch.testing.assert_close(again.theta(), plain.theta(), rtol=0, atol=1e-6)
    again.refresh()  # embedded anew, with the weights
    torch.testing.assert_close(again.confidence(c).upper, found.upper, rtol=0, atol=1e-9)


def test_a_head_weighs_rows_as_a_sequence_does():
    c, r = contexts()
    w = torch.linspace(0.0, 1.0, 12)
    weighed, sequence = head(), glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), 0.05)
    weighed.update(c, r, weight=w)
    with torch.no_grad():
        features = weighed.features(c)
    sequence.update(features, r, weight=w)
    expected = sequence.current().interval(features, scale="mean")
    torch.testing.assert_close(weighed.confidence(c).upper, expected.upper, rtol=0, atol=1e-6)
    before = weighed.get_extra_state()["observations"]
    for options, message in (
        (dict(weight=2.0), r"weight: expected weights in \[0, 1\]"),
        (dict(mask=torch.full((12,), 0.5)), "mask: expected booleans"),
    ):
        with pytest.raises(glb.InputError, match=message):
            weighed.update(c, r, **options)
    assert_same(weighed.get_extra_state()["observations"], before)


@pytest.mark.parametrize("inner", ["greedy", "ofuglb"])
def test_a_neural_policy_leaves_masked_rows_out(inner):
    def build():
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 2)
        return glb.NeuralPolicy(
            network, inner, glb.Bernoulli(), glb.Ball(2, S), train_every=8, steps=5
        )

    masked, other = build(), build()
    c, r = contexts()
    seen = torch.arange(12) % 3 != 1
    shown = torch.where(seen, r, torch.nan)
    for t in range(12):
        masked.update(c[t], shown[t], mask=seen[t])
        other.update(torch.where(seen[t], c[t], 7.0), torch.where(seen[t], r[t], 1.0), mask=seen[t])
    assert masked.trainings == 1  # also trained without looking at them
    assert_same(masked.state_dict(), other.state_dict())
    before = masked.state_dict()
    if inner == "greedy":
        with pytest.raises(glb.InputError, match="weight: expected none, since greedy"):
            masked.update(c[:2], r[:2], weight=0.5)
    else:
        masked.update(c[:2], r[:2], weight=0.5)
        assert masked.rounds == 14
        return
    assert_same(masked.state_dict(), before)


def test_pairs_leave_masked_comparisons_out():
    generator = torch.Generator().manual_seed(5)
    left, right = 0.7 * torch.rand(2, 9, 2, generator=generator)
    winner = (torch.rand(9, generator=generator) < 0.5).double()
    seen = torch.arange(9) % 3 != 0
    shown = torch.where(seen, winner, torch.nan)

    def pair_head():
        torch.manual_seed(0)
        return glb.PairHead(torch.nn.Linear(2, 2), dim=2, S=2.0)

    def preferences():
        return glb.PreferenceSequence(2, S=2.0, delta=0.05)

    for build, ask in (
        (pair_head, lambda made: made.probability(left, right).upper),
        (preferences, lambda made: made.current().probability(left, right).upper),
    ):
        masked, plain = build(), build()
        masked.update(left, right, shown, mask=seen)
        plain.update(left[seen], right[seen], winner[seen])
        torch.testing.assert_close(ask(masked), ask(plain), rtol=0, atol=1e-6)


def test_contrasts_leave_masked_rows_out():
    x, r = rows(batch=1)
    x, r = x[:, 0], r[:, 0]
    seen = torch.arange(30) % 3 != 0
    made = [
        glb.ContrastSequence(glb.Bernoulli(), glb.Ball(2, S), [[1.0, -1.0]], delta=0.05)
        for _ in range(2)
    ]
    made[0].update(x, torch.where(seen, r, torch.nan), mask=seen)
    made[1].update(x[seen], r[seen])
    ends = [one.current().upper for one in made]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(n for n, p in _POLICIES.items() if p.requires.pairs))
def test_pairs_as_arms_leave_masked_comparisons_out(name):
    masked, plain, alone = (
        policies.make(name, family=glb.Bernoulli(), domain=glb.Ball(2, 2 * S), batch_shape=batch)
        for batch in ((2,), (2,), ())
    )
    x, r = rows(n=12)
    x = 0.5 * x  # halves of differences of items
    for t in range(len(x)):
        seen = t % 3 == 0
        given = torch.where(torch.tensor([True, seen]), r[t], torch.nan)
        masked.update(x[t], given, mask=[True, seen])
        plain.update(x[t], r[t])
        if seen:
            alone.update(x[t, 1], r[t, 1])
    points = torch.tensor([[1.0, 0.0], [0.6, -0.8]]).double()
    inner, full = (one.confidence_set().interval(points.expand(2, 2, 2)) for one in (masked, plain))
    fewer = alone.confidence_set().interval(points)
    torch.testing.assert_close(inner.upper[0], full.upper[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(inner.upper[1], fewer.upper, rtol=0, atol=1e-6)
    torch.testing.assert_close(inner.lower[1], fewer.lower, rtol=0, atol=1e-6)
