"""A GLM head on a network: predictions, intervals, gradients, refusals."""

import copy
import io
import pickle

import pytest
import torch
from encoders import DTYPE, FAULTS, Broken, network
from torch import nn

import torchglb as glb
from torchglb.errors import TrainingModeWarning
from torchglb.heads import GLMHead, UnitBall
from torchglb.radii import Lipschitz


def data(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE):
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randn((*shape, 5), generator=generator, dtype=DTYPE)
    rewards = torch.rand(shape, generator=generator) < torch.sigmoid(contexts[..., 0])
    return contexts.to(dtype), rewards.to(dtype)


def head_of(batch_shape=(), net=None, **settings) -> GLMHead:
    net = network() if net is None else net
    return GLMHead(net, glb.Bernoulli(), glb.Ball(2, 3.0), batch_shape=batch_shape, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_shape", [(), (1,), (2, 3)])
def test_shapes_and_dtypes(batch_shape, dtype):
    head = head_of(batch_shape, network(dtype=dtype), dtype=dtype)
    contexts, rewards = data(*batch_shape, 4, dtype=dtype)
    for _ in range(2):  # before and after the first observations
        assert head(contexts).shape == (*batch_shape, 4)
        assert head(contexts[..., 0, :]).shape == batch_shape
        interval = head.confidence(contexts)
        assert interval.lower.shape == (*batch_shape, 4)
        assert bool((interval.lower <= interval.upper).all())
        index = head.select(contexts)
        assert index.shape == batch_shape
        chosen = interval.upper.gather(-1, index[..., None])[..., 0]
        assert bool((chosen >= interval.upper.amax(-1) - 1e-5).all())
        for value in (*interval, head(contexts), head.features(contexts)):
            assert value.dtype == dtype
        head.update(contexts, rewards)
    head.update(contexts[..., 0, :], rewards[..., 0])
    assert len(head) == 9


def test_agrees_with_the_parts_it_is_made_of():
    contexts, rewards = data(60)
    questions, _ = data(7, seed=1)
    head = head_of()
    head.update(contexts[:20], rewards[:20])
    for row, r in zip(contexts[20:], rewards[20:], strict=True):
        head.update(row, r)
    with torch.no_grad():
        X, Q = (UnitBall("smooth")(head.module(c)) for c in (contexts, questions))
    sequence = glb.ConfidenceSequence(head.family, head.domain, 0.05)
    sequence.update(X, rewards)
    expected = sequence.current().interval(Q, scale="mean")
    for mine, other in zip(head.confidence(questions), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    theta = glb.constrained_mle(head.family, glb.Rows(X, rewards), head.domain).theta
    mean = head.family.mean(Q @ theta)
    torch.testing.assert_close(head.eval()(questions).detach(), mean, rtol=0, atol=1e-6)


def test_batch_equals_loop():
    contexts, rewards = data(3, 30)
    together = head_of((3,))
    together.update(contexts, rewards)
    for b in range(3):
        alone = head_of()
        alone.update(contexts[b], rewards[b])
        torch.testing.assert_close(alone(contexts[b]), together(contexts)[b], rtol=0, atol=1e-9)
        mine, theirs = alone.confidence(contexts[b]), together.confidence(contexts)
        torch.testing.assert_close(mine.upper, theirs.upper[b], rtol=0, atol=1e-7)


def test_training_moves_the_features_of_the_past():
    contexts, rewards = data(60)
    head = head_of()
    head.update(contexts, rewards)
    before = head.confidence(contexts[:5])
    again = head.confidence(contexts[:5])
    assert torch.equal(before.upper, again.upper)
    optimizer = torch.optim.Adam(head.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = head.family.nll(head.features(contexts) @ head.theta(), rewards).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.02
    fresh = head_of(net=head.module)
    fresh.update(contexts, rewards)
    after, expected = head.confidence(contexts[:5]), fresh.confidence(contexts[:5])
    assert float((after.upper - before.upper).abs().max()) > 1e-3
    torch.testing.assert_close(after.upper, expected.upper, rtol=0, atol=1e-7)
    with torch.no_grad():  # a change behind autograd's back needs a word
        head.module[2].weight.data.mul_(0.5)
    head.refresh()
    fresh = head_of(net=head.module)
    fresh.update(contexts, rewards)
    after, expected = head.confidence(contexts[:5]), fresh.confidence(contexts[:5])
    torch.testing.assert_close(after.upper, expected.upper, rtol=0, atol=1e-7)


def small(dim: int = 2) -> nn.Module:
    """Few parameters, since finite differences take a call for each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, dim, bias=False), nn.Tanh()).double()


def with_parameters(head, call):
    """``call`` as a function of the encoder's parameters."""
    names = [name for name, _ in head.module.named_parameters()]

    def function(*values):
        twin = copy.deepcopy(head)
        for name, value in zip(names, values, strict=True):
            owner = twin.module.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            del owner._parameters[leaf]
            setattr(owner, leaf, value)
            owner._parameters[leaf] = value  # a plain tensor that still counts as a parameter
        twin.refresh()
        return call(twin)

    return function, tuple(p.detach().clone().requires_grad_() for p in head.module.parameters())


@pytest.mark.parametrize("radius", [3.0, 0.5])  # in the interior, and with the ball active
def test_gradients_through_the_fit(radius):
    contexts, rewards = data(40)
    head = GLMHead(small(), glb.Bernoulli(), glb.Ball(2, radius))
    head.update(contexts, rewards)
    norm = float(head.theta().detach().norm())
    assert (norm < radius - 1e-3) == (radius == 3.0)
    function, values = with_parameters(head, lambda twin: twin(contexts[:4]))
    assert torch.autograd.gradcheck(function, values, atol=1e-6)


@pytest.mark.parametrize("radius", ["pac-bayes", Lipschitz()])  # which depends on features, or not
def test_gradients_through_the_interval(radius):
    contexts, rewards = data(40)
    head = head_of(net=small(), radius=radius)
    head.update(contexts, rewards)

    def ends(twin):
        return torch.stack(tuple(twin.confidence(contexts[:3], differentiable=True)))

    function, values = with_parameters(head, ends)
    assert torch.autograd.gradcheck(function, values, atol=1e-5)
    question = contexts[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c: head.confidence(c, "linear", differentiable=True).width, (question,), atol=1e-5
    )


def test_evaluation_mode_holds_the_last_layer():
    contexts, rewards = data(40)
    head = head_of()
    head.update(contexts, rewards)
    assert head.theta().requires_grad
    assert not head.eval().theta().requires_grad
    head(contexts[:3]).sum().backward()
    assert head.module[0].weight.grad is not None
    assert not head.confidence(contexts[:3]).upper.requires_grad


def test_too_few_observations_for_a_derivative_are_reported():
    contexts, _ = data(1)
    contexts, rewards = contexts.expand(2, 5), torch.tensor([0.0, 1.0], dtype=DTYPE)
    head = head_of()
    head.update(contexts, rewards)  # theta_hat is free to move across the one direction seen
    with pytest.raises(glb.SolverError, match="regularization"):
        head(contexts)
    assert head.eval()(contexts).shape == (2,)
    ridged = head_of(regularization=0.1)
    ridged.update(contexts, rewards)
    assert ridged(contexts).requires_grad


@pytest.mark.parametrize("seed", range(3))
def test_intervals_of_few_observations_have_gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randn(4, 5, generator=generator, dtype=DTYPE)
    head = GLMHead(small(3), glb.Bernoulli(), glb.Ball(3, 9.0))
    head.update(contexts[:2], torch.tensor([0.45, 0.55], dtype=DTYPE))

    def ends(twin):
        return torch.stack(tuple(twin.confidence(contexts[2:], differentiable=True)))

    function, values = with_parameters(head, ends)
    assert torch.autograd.gradcheck(function, values, atol=1e-5)
    ellipsoidal = GLMHead(head.module, glb.Bernoulli(), glb.Ball(3, 9.0), ellipsoidal=True)
    ellipsoidal.update(contexts[:2], torch.tensor([0.45, 0.55], dtype=DTYPE))
    with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
        ellipsoidal.confidence(contexts[2:], differentiable=True)


def test_images_and_a_float32_network():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    ball = UnitBall("smooth", dtype=DTYPE)
    head = GLMHead(net, glb.Bernoulli(), glb.Ball(2, 2.0), bound=ball, context_dims=3)
    images = torch.rand(10, 1, 6, 6)
    head.update(images, (torch.arange(10) % 2).double())
    assert head(images).dtype == DTYPE
    assert head.select(images).shape == ()


def test_saves_observations_and_moves_with_them():
    contexts, rewards = data(2, 30)
    head = head_of((2,))
    head.update(contexts, rewards)
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    copy_ = head_of((2,), network(seed=5))
    copy_.load_state_dict(torch.load(buffer, weights_only=True))
    assert len(copy_) == 30
    torch.testing.assert_close(copy_(contexts), head(contexts), rtol=0, atol=1e-9)
    single = copy_.float()
    assert single(contexts.float()).dtype == torch.float32
    torch.testing.assert_close(single(contexts.float()).double(), head(contexts), rtol=0, atol=1e-3)
    with pytest.raises(glb.InputError, match="state"):
        head_of((3,)).load_state_dict(head.state_dict())


def reloaded(head, **settings):
    """From a file, into a head that was made with other weights."""
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    other = head_of(tuple(head.batch_shape), network(seed=5), **settings)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


def played(head, contexts, rewards):
    """What a head answers while it goes on learning."""
    answers = []
    for k in range(rewards.shape[-1]):
        now = contexts[..., k : k + 3, :]
        answers += [head(now), *head.confidence(now), head.select(now)]
        mask = torch.ones_like(rewards[..., k]) * (k != 1)
        head.update(now[..., 0, :], rewards[..., k], mask=mask)
    return answers


SAVED = {
    "state": reloaded,
    "state of a state": lambda head, **settings: reloaded(reloaded(head, **settings), **settings),
    "deepcopy": lambda head, **_: copy.deepcopy(head),
    "pickle": lambda head, **_: pickle.loads(pickle.dumps(head)),
}


@pytest.mark.parametrize("way", SAVED)
@pytest.mark.parametrize(
    ("batch_shape", "settings"),
    [((), {}), ((2,), {}), ((), dict(ellipsoidal=True)), ((), dict(radius="centred"))],
)
def test_a_saved_head_continues_bit_by_bit(way, batch_shape, settings):
    contexts, rewards = data(*batch_shape, 40)
    head = head_of(batch_shape, **settings)
    played(head, contexts[..., :24, :], rewards[..., :20])
    twin = SAVED[way](head, **settings)
    last = contexts[..., 24:, :], rewards[..., 24:36]
    for mine, other in zip(played(head, *last), played(twin, *last), strict=True):
        assert torch.equal(mine, other)


def test_equal_questions_have_equal_answers():
    """In training mode too, where every answer is a fit of its own; also from a copy in between."""
    contexts, rewards = data(40)
    head = head_of()
    for k in (10, 20, 40):
        head.update(contexts[:k], rewards[:k])
        first = head(contexts)
        for other in (head, copy.deepcopy(head), reloaded(head)):
            assert torch.equal(other(contexts), first)
        with torch.no_grad():
            head.module[0].weight.mul_(1.01)


def test_an_empty_head_can_be_saved():
    contexts, rewards = data(20)
    head, twin = head_of(), reloaded(head_of())
    for mine, other in zip(
        played(head, contexts, rewards[:5]), played(twin, contexts, rewards[:5]), strict=True
    ):
        assert torch.equal(mine, other)


class Scaled(nn.Module):
    """A network with a number that is no parameter."""

    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = network(), scale

    def forward(self, contexts):
        return self.scale * self.inner(contexts)


@pytest.mark.parametrize("change", ["weights", "use", "mode"])
def test_a_head_with_another_network_embeds_the_observations_anew(change):
    contexts, rewards = data(30)
    head = head_of(net=Scaled(1.0))
    head.update(contexts, rewards)
    state = head.state_dict()
    twin = head_of(net=Scaled(0.5 if change == "use" else 1.0))
    if change == "weights":
        name = next(n for n in state if n.endswith("weight"))
        state[name] = state[name] * 1.01
    twin.load_state_dict(state)
    if change == "mode":
        twin.eval()
    fresh = head_of(net=copy.deepcopy(twin.module)).train(twin.training)
    fresh.update(contexts, rewards)
    for mine, other in zip(twin.confidence(contexts), fresh.confidence(contexts), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(twin.theta(), fresh.theta())
    assert torch.equal(twin.confidence(contexts).upper, head.confidence(contexts).upper) == (
        change == "mode"
    )


def test_a_state_of_observations_alone_is_embedded_anew():
    contexts, rewards = data(30)
    head, twin = head_of(), head_of()
    head.update(contexts, rewards)
    state = head.get_extra_state()
    twin.set_extra_state({key: state[key] for key in ("observations", "settings")})
    torch.testing.assert_close(twin(contexts), head(contexts), rtol=0, atol=1e-9)


def test_computed_features_of_other_observations_are_refused():
    contexts, rewards = data(30)
    head, other = head_of(), head_of()
    head.update(contexts, rewards)
    other.update(contexts[:20], rewards[:20])
    state = head.get_extra_state() | {"computed": other.get_extra_state()["computed"]}
    with pytest.raises(glb.InputError, match="computed.*expected features of 30 observations"):
        head.set_extra_state(state)
    with pytest.raises(glb.InputError, match="state"):
        head.set_extra_state(head.get_extra_state() | {"start": torch.zeros(3)})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("spoilt", ["0.weight", "_extra_state", "an entry more"])
def test_a_refused_state_leaves_weights_and_observations(spoilt, assign):
    """Torch alone would have loaded all that came before the fault."""
    contexts, rewards = data(30)
    head, other = head_of(), head_of(net=network(seed=5))
    head.update(contexts, rewards)
    other.update(contexts[:20], rewards[:20])
    state = other.state_dict()
    key = next((name for name in state if name.endswith(spoilt)), spoilt)
    state[key] = torch.zeros(3)
    before, answers = copy.deepcopy(head.state_dict()), head(contexts)
    bounds = head.confidence(contexts)
    with pytest.raises((glb.InputError, RuntimeError)):
        head.load_state_dict(state, assign=assign)
    assert len(head) == 30
    assert torch.equal(head(contexts), answers)
    assert torch.equal(head.confidence(contexts).upper, bounds.upper)
    after = head.state_dict()
    assert list(after) == list(before)
    for name in after:
        if isinstance(before[name], torch.Tensor):
            assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_encoder_is_refused_by_name(fault):
    answer, message = FAULTS[fault]
    contexts, rewards = data(12)
    head = head_of(net=Broken())
    head.update(contexts, rewards)
    before = head.confidence(contexts)
    head.module.answer = answer
    for call in (
        lambda: head.update(contexts, rewards),
        lambda: head.select(contexts),
        lambda: head.confidence(contexts),
        lambda: head.features(contexts),
        lambda: head(contexts),
    ):
        with pytest.raises(glb.InputError, match=message):
            call()
    head.module.answer = lambda features: features
    assert len(head) == 12
    assert torch.equal(head.confidence(contexts).upper, before.upper)


def test_questions_are_refused_by_name():
    contexts, _ = data(12)
    with pytest.raises(glb.InputError, match="differentiable: expected True or False"):
        head_of().confidence(contexts, differentiable="yes")
    with pytest.raises(glb.InputError, match="contexts: expected at least one to choose from"):
        head_of().select(contexts[:0])


def test_bad_input_changes_nothing():
    contexts, rewards = data(12)
    head = head_of()
    head.update(contexts, rewards)
    before = head.confidence(contexts)
    for bad_contexts, bad_rewards, message in [
        (contexts, rewards + 5, "rewards: expected rewards of Bernoulli"),
        (contexts, rewards * torch.nan, "rewards: expected rewards of Bernoulli"),
        (contexts, rewards[:3], r"rewards: expected shape \(12,\)"),
        (contexts[:, :4], rewards, r"contexts: expected shape \(K, 5\)"),
        (contexts.to("meta"), rewards, "contexts: expected a tensor on device cpu"),
        ([[1.0], [2.0, 3.0]], rewards, "contexts: expected a tensor or numbers"),
        (contexts * torch.nan, rewards, "contexts: expected finite values"),
    ]:
        with pytest.raises(glb.InputError, match=message):
            head.update(bad_contexts, bad_rewards)
    with pytest.raises(glb.InputError, match="contexts: expected shape"):
        head.select(contexts[0])
    assert len(head) == 12
    assert torch.equal(head.confidence(contexts).upper, before.upper)


def test_settings_are_refused_by_name():
    for settings, message in [
        (dict(bound="squash"), "bound"),
        (dict(bound=3), "bound"),
        (dict(delta=2.0), "delta"),
        (dict(radius="wide"), "radius"),
        (dict(dtype=torch.int64), "dtype"),
        (dict(context_dims=-1), "context_dims"),
    ]:
        with pytest.raises(glb.InputError, match=message):
            head_of(**settings)
    with pytest.raises(glb.InputError, match="module"):
        GLMHead(lambda x: x, glb.Bernoulli(), glb.Ball(2, 3.0))


def test_intervals_of_a_fixed_representation_hold(generator):
    """theta* lies in the ball for features fixed beforehand: the sequence misses at most delta."""
    replicates, delta = 60, 0.2
    net = network()
    head = head_of((replicates,), net, delta=delta, ellipsoidal=True)
    theta = torch.tensor([1.5, -1.0], dtype=DTYPE)
    missed = torch.zeros(replicates, dtype=torch.bool)
    for _ in range(5):
        contexts = torch.randn(replicates, 20, 5, generator=generator, dtype=DTYPE)
        with torch.no_grad():
            z = head.features(contexts) @ theta
        head.update(contexts, head.family.sample(z, generator))
        low, high = head.confidence(contexts, "linear")
        missed |= ((z < low) | (z > high)).any(-1)
    assert int(missed.sum()) <= 12  # 60 delta; far fewer are expected


@pytest.mark.parametrize("committed", [False, True])
def test_an_interrupted_update_is_all_or_nothing(committed, monkeypatch):
    """A row that was learnt but not kept would count twice when it is given again."""
    from torchglb.heads.embedding import Observations

    contexts, rewards = data(30)
    head, twin = head_of(), head_of()
    for each in (head, twin):
        each.update(contexts[:20], rewards[:20])
    append = Observations.append

    def interrupted(self, *rows):
        if committed:
            append(self, *rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(Observations, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        head.update(contexts[20:], rewards[20:])
    monkeypatch.undo()
    if not committed:
        assert len(head) == 20
        assert torch.equal(head.confidence(contexts).upper, twin.confidence(contexts).upper)
        head.update(contexts[20:], rewards[20:])
    twin.update(contexts[20:], rewards[20:])
    assert len(head) == len(twin) == len(head.sequence()) == 30
    assert torch.equal(head.confidence(contexts).upper, twin.confidence(contexts).upper)
    assert torch.equal(head(contexts), twin(contexts))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(6)])
def test_training_mode_of_random_features_is_warned_of(layer):
    """A network begins in training mode; its features are then no function of the context."""
    net = network()
    net.insert(1, layer.double())
    contexts, rewards = data(20)
    head = head_of(net=net)
    with pytest.warns(TrainingModeWarning, match=rf"1 \({type(layer).__name__}\) is in training"):
        head.update(contexts, rewards)
    with pytest.warns(TrainingModeWarning):
        head.select(contexts[:3])
    head.eval()
    first, again = (head.confidence(contexts[:3]).upper for _ in range(2))
    assert torch.equal(first, again)


def test_training_mode_of_plain_layers_is_no_reason_to_warn():
    net = network()
    net.insert(1, nn.Dropout(0.0))
    head = head_of(net=net)
    head.update(*data(20))
    assert head.training
