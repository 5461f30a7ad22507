"""Every public door x every kind of input: the accepted value, or the exact error and no change."""

import warnings

import numpy as np
import pytest
import torch
from door_objects import DOORS, FREE, Policy, Sequence, ball, family
from input_kinds import KINDS, REFUSED, WHOLE, R, X, locked

import torchglb as glb
from torchglb import policies, preferences
from torchglb.checks import as_tensor
from torchglb.testing.policies import assert_same


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("kind", [*KINDS])
def test_rows_of_every_kind(door, kind):
    stored = DOORS[door]().put(KINDS[kind](X), KINDS[kind](R))
    if stored is not None:
        assert stored.tolist() == X


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("kind", [*WHOLE])
def test_whole_rewards_of_every_kind(door, kind):
    DOORS[door]().put(X, WHOLE[kind](R))


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("kind", [*REFUSED])
def test_refusals_change_nothing(door, kind):
    make, message = REFUSED[kind]
    opened = DOORS[door]()
    before = opened.state()
    if not (door in FREE and kind == "too long"):
        with pytest.raises(glb.InputError, match=message):
            opened.put(make(X), R)
    if kind not in ("too long", "ragged"):
        with pytest.raises(glb.InputError, match=message):
            opened.put(X, make(R))
    assert_same(opened.state(), before)


@pytest.mark.parametrize("name", policies.available(glb.Bernoulli()))
@pytest.mark.parametrize("kind", [*KINDS])
def test_arms_of_every_kind(name, kind):
    options = {"theta_star": [1.0, 0.0]} if name == "oracle" else {}
    made = [
        policies.make(name, family=family(), domain=ball(), horizon=50, **options) for _ in range(2)
    ]
    chosen, expected = made[0].select(KINDS[kind](X)), made[1].select(torch.tensor(X).double())
    assert int(chosen) == int(expected)
    assert torch.equal(made[0].scores(KINDS[kind](X)), made[1].scores(torch.tensor(X).double()))
    ends = [one.bounds(point) for one, point in zip(made, (KINDS[kind](X[1]), X[1]), strict=True)]
    assert (ends[0] is None) == (ends[1] is None)
    if ends[0] is not None:
        assert torch.equal(ends[0].upper, ends[1].upper)


@pytest.mark.parametrize("name", [n for n in policies.available() if n != "oracle"])
def test_bounds_of_every_kind(name):
    """Before and after arms are known, some of which a policy keeps sums of."""
    family = next(f for f in (glb.Bernoulli(), glb.Gaussian()) if name in policies.available(f))
    policy = policies.make(name, family=family, domain=glb.Ball(2, 3.0), horizon=50)
    for _ in range(2):
        found = [policy.bounds(kind(X[1])) for kind in KINDS.values()]
        assert all(one is None for one in found) or all(
            torch.equal(one.lower, found[0].lower) and torch.equal(one.upper, found[0].upper)
            for one in found
        )
        policy.update(X[int(policy.select(X))], 1.0)


@pytest.mark.parametrize("kind", [*KINDS])
def test_sets_and_estimates_take_every_kind(kind):
    sequence = glb.ConfidenceSequence(family(), ball(), 0.05)
    sequence.update(X, R)
    region, convert = sequence.current(), KINDS[kind]
    assert torch.equal(region.interval(convert(X)).upper, region.interval(X).upper)
    assert torch.equal(region.support(convert(X)).upper, region.support(X).upper)
    assert bool(region.contains(convert(X[1])))
    rows = glb.Rows(torch.tensor(X).double(), torch.tensor(R).double())
    fit = glb.constrained_mle(family(), rows, ball())
    other = glb.constrained_mle(family(), glb.Rows(convert(X), convert(R)), ball())
    # in float32 the loss is certified to 1e-4
    torch.testing.assert_close(other.loss.double(), fit.loss, rtol=0, atol=1e-3)


@pytest.mark.parametrize("scalar", [1, True, 1.0, np.int64(1), np.float32(1), np.bool_(True)])
def test_scalars(scalar):
    for made in (Policy().made, Sequence().made):
        made.update([1.0, 0.0], scalar)
    for S in (np.float32(3.0), np.int64(3), [1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1, 2])):
        assert glb.Ball(np.int64(2), S).max_radius in (2.0, 3.0)


def test_float64_into_float32_only_if_nothing_is_lost():
    def into(value):
        return as_tensor("x", value, dtype=torch.float32, device=torch.device("cpu"))

    for value in (torch.tensor([0.1]).double() + 1e-12, np.array([0.1]), torch.tensor([2**24 + 1])):
        with pytest.raises(glb.InputError, match="x: expected dtype torch.float32, or numbers"):
            into(value)
    assert into(torch.tensor([0.5]).double()).tolist() == into(np.array([0.5])).tolist() == [0.5]
    assert into([0.1]).dtype == torch.float32  # numbers without a dtype are rounded
    with pytest.raises(glb.InputError, match="x: expected dtype torch.float64"):
        as_tensor("x", torch.tensor(2**53 + 1), dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_normalised_in_another_dtype_are_scaled_back(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(200, 3, generator=generator).to(dtype), dim=-1)
    domain = glb.Ball(3, 2.0)
    for given in (rows, rows.double()) if dtype == torch.float32 else (rows,):
        history = glb.History(3)
        history.append(given, torch.ones(200))
        assert float(history.X.norm(dim=-1).max()) <= 1.0 + 1e-12
        torch.testing.assert_close(history.X, rows.double(), rtol=2e-2, atol=0)
        policy = policies.make("ofuglb", family=family(), domain=domain)
        for row in given[:20]:
            policy.select(given[:5])
            policy.update(row, 1)
        assert policy.rounds == 20
    with pytest.raises(glb.InputError, match="norm at most 1 .*UnitBall.*Scaler.*got 1.04"):
        glb.History(3).append(
            rows.double()
            * 1.05
            / rows.double().norm(dim=-1, keepdim=True)
            * torch.tensor(1.04 / 1.05).double(),
            torch.ones(200),
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, "widened", "numpy"])
def test_items_and_logs_normalised_in_another_dtype_are_scaled_back(kind):
    generator = torch.Generator().manual_seed(1)
    short = torch.randn(40, 3, generator=generator).to(
        kind if isinstance(kind, torch.dtype) else torch.float32
    )
    items = torch.nn.functional.normalize(short, dim=-1)
    assert float(items.double().norm(dim=-1).max()) > 1.0 + 1e-9
    items = items.double() if kind == "widened" else items.numpy() if kind == "numpy" else items
    sequence = glb.PreferenceSequence(3, S=[1.0], delta=0.05, batch_shape=(1,))
    sequence.update(items[None, :20], items[None, 20:], [[1.0] * 20])
    sequence.current().widest(items[None, :3])
    assert len(sequence) == 20
    policy = preferences.make_pair_policy("random-pairs", dim=3, S=np.float32(2.0))
    left, right = policy.select(items)
    policy.update(items[left], items[right], 1)
    log = glb.environments.Log(items[None, None, :4], index=[[0]], rewards=[[1.0]])
    assert float(log.arms.norm(dim=-1).max()) <= 1.0 + 1e-12
    for refused in (1.01 * items, 1.2 * items):
        with pytest.raises(glb.InputError, match="items: expected .*norm at most 1.*UnitBall"):
            policy.select(refused)


def test_only_who_says_bfloat16_has_rounded_to_it():
    for given in ([1.0078125, 0.0], np.array([1.0078125, 0.0]), torch.tensor([1.0078125, 0.0])):
        with pytest.raises(glb.InputError, match="x: expected rows of norm at most 1"):
            glb.History(2).append(given, 1.0)
    glb.History(2).append(torch.tensor([1.0078125, 0.0], dtype=torch.bfloat16), 1.0)


def test_a_locked_array_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        glb.History(2).append(locked(X), locked(R))


def test_what_was_passed_in_may_change():
    S, x = torch.tensor([1.0, 2.0]).double(), torch.tensor(X).double()
    made, history = glb.Ball(2, S), glb.History(2)
    array = np.array(X)
    history.append(x, R)
    history.append(array, R)
    S[0], x[0], array[0] = 9.0, 9.0, 9.0
    history.rows().X[0] = 9.0
    assert made.radius.tolist() == [1.0, 2.0]
    assert history.X.tolist() == X + X


def test_settings_that_were_passed_in_may_change():
    theta, S, first = torch.tensor([1.0, 0.0]).double(), torch.full((1,), 2.0), torch.tensor([1])
    names, queries = torch.tensor([5]), torch.tensor(X).double()
    given = dict(family=family(), domain=ball())
    oracle = policies.make("oracle", **given, theta_star=theta)
    safe = policies.make("ofuglb", **given, batch_shape=(1,), conservative=(first, 0.1))
    world = glb.environments.make("fixed", family=family(), S=S, replicates=names, arms=3)
    running = glb.ConfidenceSequence(**given, delta=0.05, running=True, queries=queries)
    for passed in (theta, S, first, names, queries):
        passed.fill_(0)
    assert oracle.theta_star.tolist() == [1.0, 0.0]
    assert safe.baseline.tolist() == [1]
    assert (world.S.tolist(), world.replicates.tolist()) == ([2.0], [5])
    assert torch.equal(
        running.look().upper, running.current().upper_bound(torch.tensor(X).double())
    )


@pytest.mark.parametrize("radius", ["lipschitz", "pac-bayes"])
def test_a_masked_replicate_learns_nothing(radius):
    settings = {"family": family(), "domain": ball(), "radius": radius}
    both = policies.make("ofuglb", batch_shape=(2,), **settings)
    alone = policies.make("ofuglb", **settings)
    generator = torch.Generator().manual_seed(3)
    for t in range(30):
        x = 0.9 * torch.nn.functional.normalize(torch.randn(2, 2, generator=generator), dim=-1)
        r = torch.tensor([float(t % 2), torch.nan if t % 3 else 1.0])
        both.update(x, r, mask=[True, t % 3 == 0])
        if t % 3 == 0:
            alone.update(x[1], r[1])
    assert both.rounds == 30
    torch.testing.assert_close(both.estimate()[1], alone.estimate(), rtol=0, atol=1e-4)
    level = both.confidence_set().level[1] - alone.confidence_set().level
    assert float(level) >= -1e-6  # a masked row never makes a set smaller


def test_weights_where_the_theory_allows_them():
    policy = policies.make("ofuglb", family=family(), domain=ball(), radius="pac-bayes")
    sequence = glb.ConfidenceSequence(family(), ball(), 0.05)
    for made in (policy, sequence):
        made.update(X, R, weight=[0.5, 1.0, 0.25])
    torch.testing.assert_close(
        policy.confidence_set().level, sequence.current().level, rtol=1e-6, atol=1e-6
    )
    before = policy.state_dict()
    with pytest.raises(glb.InputError, match=r"weight: expected weights in \[0, 1\]"):
        policy.update(X, R, weight=2.0)
    with pytest.raises(glb.InputError, match="mask: expected booleans"):
        policy.update(X, R, mask=[0.5, 1.0, 1.0])
    assert_same(policy.state_dict(), before)
