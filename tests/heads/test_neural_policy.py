"""A policy on learnt features: any inner policy, replicates apart, bit-exact continuation."""

from functools import partial

import pytest
import torch
from encoders import DTYPE, FAULTS, Broken, network
from torch import nn

import torchglb as glb
from torchglb import policies
from torchglb.heads import NeuralPolicy, UnitBall
from torchglb.testing.policies import assert_same, reload

FAMILY, BALL = glb.Bernoulli(), glb.Ball(2, 3.0)


def neural(batch_shape=(), inner="ofuglb-e", encoder=network, **settings) -> NeuralPolicy:
    settings = {"train_every": 4, "steps": 3, "minibatch": 5, "horizon": 100} | settings
    return NeuralPolicy(encoder, inner, FAMILY, BALL, batch_shape=batch_shape, **settings)


class Contexts:
    """Raw contexts ``(rounds, *B, 3, 5)`` and the rewards of all of them, drawn beforehand."""

    def __init__(self, rounds: int, *batch_shape: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (rounds, *batch_shape, 3)
        self.arms = torch.randn((*shape, 5), generator=generator, dtype=DTYPE)
        chance = torch.sigmoid(3 * self.arms[..., 0] * self.arms[..., 1])
        self.rewards = (torch.rand(shape, generator=generator, dtype=DTYPE) < chance).to(DTYPE)

    def row(self, t: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = index[..., None, None].expand(*index.shape, 1, 5)
        x = self.arms[t].gather(-2, place)[..., 0, :]
        return x, self.rewards[t].gather(-1, index[..., None])[..., 0]


def play(policy: NeuralPolicy, world: Contexts, start: int, stop: int) -> torch.Tensor:
    choices = []
    for t in range(start, stop):
        index = policy.select(world.arms[t])
        policy.update(*world.row(t, index))
        choices.append(index)
    return torch.stack(choices)


@pytest.mark.parametrize("batch_shape", [(), (1,), (2, 2)])
def test_shapes(batch_shape):
    policy, world = neural(batch_shape), Contexts(9, *batch_shape)
    choices = play(policy, world, 0, 9)
    assert choices.shape == (9, *batch_shape)
    assert policy.rounds == policy.inner.rounds == 9
    assert policy.trainings == 2  # at 4 and at 8
    assert policy.scores(world.arms[0]).shape == (*batch_shape, 3)
    assert policy.features(world.arms[0]).shape == (*batch_shape, 3, 2)
    assert policy.features(world.arms[0][..., 0, :]).shape == (*batch_shape, 2)


def test_a_policy_on_a_leash_is_trained_with_the_weights():
    policy, world = (
        neural(inner=partial(policies.make, "ofuglb", conservative=(0, 0.2))),
        Contexts(6),
    )
    for t in range(6):
        policy.update(*world.row(t, policy.select(world.arms[t])), weight=0.25)
    assert policy.trainings == 1
    assert policy.inner.confidence_set().likelihood.w.tolist() == [0.25] * 6


FIXED_ARMS = {n for n in policies.available(FAMILY) if policies.requirements_of(n).fixed_arms}


@pytest.mark.parametrize("inner", sorted(FIXED_ARMS))
def test_policies_for_fixed_arms_are_refused_by_name(inner):
    with pytest.raises(glb.InputError, match=f"one whose arms may change, got {inner}"):
        neural((2,), inner)


@pytest.mark.parametrize(
    "inner", sorted(set(policies.available(FAMILY)) - {"oracle", "evill-theory"} - FIXED_ARMS)
)
def test_every_policy_of_the_registry(inner):
    policy, world = neural((2,), inner), Contexts(10, 2)
    play(policy, world, 0, 6)
    state = reload(policy.state_dict())
    copy = neural((2,), inner, encoder=network(seed=8), seed=5)
    copy.load_state_dict(state)
    ahead = play(policy, world, 6, 10)
    assert policy.trainings == 2
    assert torch.equal(play(copy, world, 6, 10), ahead)
    assert_same(copy.state_dict(), policy.state_dict())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_continues_bit_by_bit_through_trainings(optimizer):
    settings = dict(optimizer=partial(optimizer, lr=1e-2), inner="ts", replay=6)
    policy, world = neural((3,), **settings, seed=3), Contexts(24, 3)
    play(policy, world, 0, 10)
    state = reload(policy.state_dict())
    frozen = reload(state)
    copy = neural((3,), **settings, seed=4)
    play(copy, world, 0, 5)  # whatever it knew before is replaced
    copy.load_state_dict(state)
    assert_same(copy.state_dict(), policy.state_dict())
    ahead = play(policy, world, 10, 24)
    assert torch.equal(play(copy, world, 10, 24), ahead)
    assert_same(copy.state_dict(), policy.state_dict())
    assert_same(state, frozen)  # nothing of it is shared with the policies


@pytest.mark.parametrize("factory", [False, True])
def test_batch_equals_loop(factory):
    def encoder():
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).double()

    names, world = torch.tensor([7, 2, 11]), Contexts(13, 3)
    settings = dict(encoder=encoder if factory else network(), inner="ts")
    together = neural((3,), replicates=names, **settings)
    choices = play(together, world, 0, 13)
    features = together.features(world.arms[0])
    for b in range(3):
        alone = neural((), replicates=names[b], **settings)
        for t in range(13):
            index = alone.select(world.arms[t, b])
            assert int(index) == int(choices[t, b])
            alone.update(world.arms[t, b, index], world.rewards[t, b, index])
        mine = alone.features(world.arms[0, b])
        torch.testing.assert_close(mine, features[b], rtol=0, atol=1e-10)
        with torch.no_grad():
            module = UnitBall("smooth")(together.encoders.module(b)(world.arms[0, b]))
        torch.testing.assert_close(module, features[b], rtol=0, atol=1e-12)
    if factory:  # every replicate began with a network of its own
        assert float((features[0] - features[1]).abs().max()) > 1e-3


def test_the_given_encoder_and_torchs_randomness_are_left_alone():
    encoder, world = network(), Contexts(9)
    before = [p.detach().clone() for p in encoder.parameters()]
    state = torch.random.get_rng_state()
    play(neural(encoder=encoder), world, 0, 9)
    play(neural(encoder=network), world, 0, 9)
    assert torch.equal(torch.random.get_rng_state(), state)
    for old, new in zip(before, encoder.parameters(), strict=True):
        assert torch.equal(old, new)


def test_learns_what_no_linear_policy_can():
    """Rewards depend on the product of two raw numbers; the likelihood falls with training."""
    world = Contexts(300, 8)
    x, r = world.arms[:, :, 0].transpose(0, 1), world.rewards[:, :, 0].transpose(0, 1)

    def loss_after(policy):
        theta = glb.constrained_mle(FAMILY, glb.Rows(policy.features(x), r), BALL).theta
        return FAMILY.nll((policy.features(x) @ theta[..., None])[..., 0], r).mean(-1)

    settings = dict(minibatch=64, optimizer=partial(torch.optim.Adam, lr=1e-2), steps=150)
    learning = neural((8,), train_every=100, **settings)
    frozen = neural((8,), train_every=None, **settings)
    for start in range(0, 300, 100):
        for policy in (learning, frozen):
            policy.update(x[:, start : start + 100], r[:, start : start + 100])
    assert (learning.trainings, frozen.trainings) == (3, 0)
    # how far depends on the random beginning: 0.2 on average, with a standard deviation of 0.08
    gain = loss_after(frozen) - loss_after(learning)
    assert bool((gain > 0).all())
    assert float(gain.mean()) > 0.1
    # the inner policy has seen the history with the features of now
    torch.testing.assert_close(learning.inner._history.X, learning.features(x), rtol=0, atol=1e-12)


def test_a_frozen_representation_is_the_inner_policy_on_its_features():
    world, encoder = Contexts(12, 2), network()
    policy = neural((2,), "ofuglb", encoder=encoder, train_every=None)
    plain = policies.make("ofuglb", family=FAMILY, domain=BALL, batch_shape=(2,))
    for t in range(12):
        with torch.no_grad():
            features = UnitBall("smooth")(encoder(world.arms[t]))
        index = policy.select(world.arms[t])
        assert torch.equal(index, plain.select(features))
        x, r = world.row(t, index)
        policy.update(x, r)
        plain.update(features[torch.arange(2), index], r)


def test_replay_keeps_the_newest():
    policy, world = neural((2,), replay=5, train_every=6), Contexts(20, 2)
    x, r = world.arms[:, :, 0].transpose(0, 1), world.rewards[:, :, 0].transpose(0, 1)
    for t in range(17):
        policy.update(x[:, t], r[:, t])
        kept, rewards = policy.observations.rows()
        first = max(0, t - 4)
        assert torch.equal(kept, x[:, first : t + 1])
        assert torch.equal(rewards, r[:, first : t + 1])
    assert policy.trainings == 2
    assert policy.rounds == 17
    assert policy.inner.rounds == 5 + (17 - 12)  # rebuilt at 12 from the newest five


def test_trainings_become_rare_with_growth():
    policy, world = neural(train_every=2, growth=2.0, steps=1), Contexts(40)
    due = []
    for t in range(40):
        before = policy.trainings
        policy.update(world.arms[t, 0], world.rewards[t, 0])
        if policy.trainings > before:
            due.append(t + 1)
    assert due == [2, 4, 8, 16, 32]


def test_chunks_change_nothing():
    world = Contexts(8, 2)
    whole, parts = neural((2,)), neural((2,), chunk=3)
    assert torch.equal(play(whole, world, 0, 8), play(parts, world, 0, 8))
    torch.testing.assert_close(
        whole.features(world.arms[0]), parts.features(world.arms[0]), rtol=0, atol=1e-12
    )


def test_a_float32_encoder_under_a_float64_policy():
    policy = neural(encoder=network(dtype=torch.float32), bound=UnitBall(dtype=DTYPE))
    world = Contexts(6)
    for t in range(6):
        arms = world.arms[t].float()
        index = policy.select(arms)
        policy.update(arms[index], world.rewards[t, index])
    assert policy.features(arms).dtype == DTYPE
    assert policy.trainings == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_encoder_is_refused_by_name(fault):
    answer, message = FAULTS[fault]
    policy, world = neural((2,), encoder=Broken()), Contexts(8, 2)
    play(policy, world, 0, 5)
    saved = policy.state_dict()
    policy.encoders.base.answer = answer
    x, r = world.row(5, torch.zeros(2, dtype=torch.int64))
    for call in (
        lambda: policy.select(world.arms[5]),
        lambda: policy.scores(world.arms[5]),
        lambda: policy.update(x, r),
        lambda: policy.features(x),
    ):
        with pytest.raises(glb.InputError, match=message):
            call()
    assert_same(policy.state_dict(), saved)
    policy.encoders.base.answer = lambda features: features
    play(policy, world, 5, 8)
    assert policy.trainings == 2


class Exploding(torch.optim.SGD):
    """A learning rate that is far too large."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(torch.inf)


def test_a_training_that_goes_astray_is_reported_and_undone():
    policy = neural((2,), optimizer=Exploding)
    world = Contexts(9, 2)
    play(policy, world, 0, 3)
    weights = policy.encoders.state_dict()
    with pytest.raises(glb.SolverError, match="training 1 went astray: encoder Sequential"):
        play(policy, world, 3, 4)
    assert policy.rounds == policy.inner.rounds == len(policy.observations) == 4
    assert policy.trainings == 0
    assert_same(policy.encoders.state_dict(), weights)
    play(policy, world, 4, 7)  # goes on, until the next one
    with pytest.raises(glb.SolverError):
        play(policy, world, 7, 8)


def test_bad_input_changes_nothing():
    policy, world = neural((2,)), Contexts(8, 2)
    play(policy, world, 0, 5)
    saved = policy.state_dict()
    x, r = world.row(5, torch.zeros(2, dtype=torch.int64))
    for bad_x, bad_r, message in [
        (x, r + 5, "r: expected rewards of Bernoulli"),
        (x, r[:1], r"r: expected shape \(2,\)"),
        (x[:, :4], r, "x: expected shape"),
        (x[:1], r, "x: expected shape"),
        (x.cfloat(), r, "x: expected a dense tensor of real numbers"),
        (x.to("meta"), r, "x: expected a tensor on device cpu"),
        (x * torch.nan, r, "encoder Sequential: expected finite values"),
    ]:
        with pytest.raises(glb.InputError, match=message):
            policy.update(bad_x, bad_r)
    for bad in (x, world.arms[5, :1], world.arms[5] * torch.nan, [[0.0]]):
        with pytest.raises(glb.InputError):
            policy.select(bad)
    state = policy.state_dict()
    inner = dict(state["state"])
    for broken in (
        state | {"policy": "ofuglb"},
        state | {"state": {}},
        state | {"state": inner | {"theta": torch.zeros(3, dtype=DTYPE)}},
        state | {"state": inner | {"optimizer": {"state": {}, "param_groups": []}}},
        state
        | {
            "state": inner
            | {"inner": policies.make("random", family=FAMILY, domain=BALL).state_dict()}
        },
        state | {"state": inner | {"encoders": {"parameters": {}, "buffers": {}}}},
    ):
        with pytest.raises(glb.InputError, match="state"):
            policy.load_state_dict(broken)
    assert_same(policy.state_dict(), saved)


def test_settings_are_refused_by_name():
    for settings, message in [
        (dict(train_every=0), "train_every"),
        (dict(steps=0), "steps"),
        (dict(minibatch=0), "minibatch"),
        (dict(replay=0), "replay"),
        (dict(growth=0.5), "growth"),
        (dict(chunk=0), "chunk"),
        (dict(bound="squash"), "bound"),
        (dict(inner="somebody"), "name"),
        (dict(inner=lambda **settings: 3), "policy"),
        (dict(encoder=3), "encoder"),
        (dict(encoder=lambda: 3), "encoder"),
        (dict(encoder=network().to("meta")), "encoder Sequential: expected parameters on device"),
        (dict(delta=2.0), "delta"),
        (dict(batch_shape=(0,)), "batch_shape: expected one replicate or more"),
    ]:
        with pytest.raises(glb.InputError, match=message):
            neural(**settings)
    with pytest.raises(glb.InputError, match="train: expected at least one observation"):
        neural().train()


def test_an_interrupted_update_is_all_or_nothing(monkeypatch):
    """Observations that were kept and not learnt would be learnt by the next training."""
    policy, world = neural(), Contexts(4)
    play(policy, world, 0, 3)
    before = policy.observations.saved()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(policy.inner, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(policy, world, 3, 4)
    monkeypatch.undo()
    after = policy.observations.saved()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert policy.rounds == policy.inner.rounds == 3
    play(policy, world, 3, 4)
    assert len(policy.observations) == 4
