"""Every public door x every kind of input: the accepted value, or the exact error and no change."""

import copy
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from input_kinds import KINDS, REFUSED, WHOLE, R, X, locked

import torchglb as glb
from torchglb import policies
from torchglb.checks import as_tensor
from torchglb.testing.policies import assert_same
from torchglb.ucb import RefitProgram


def family():
    return glb.Bernoulli()


def ball():
    return glb.Ball(2, 3.0)


class History:
    def __init__(self):
        self.made = glb.History(2, family=family())
        self.made.append([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.append(x, r)
        return self.made.X[1:]

    def state(self):
        return self.made.state_dict()


class Sequence(History):
    def __init__(self):
        self.made = glb.ConfidenceSequence(family(), ball(), 0.05)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.history.X[1:]


class Policy(History):
    def __init__(self, name="ofuglb"):
        options = {"theta_star": [1.0, 0.0]} if name == "oracle" else {}
        self.made = policies.make(name, family=family(), domain=ball(), horizon=50, **options)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        plain = copy.deepcopy(self.made)
        self.made.update(x, r)
        plain.update(torch.tensor(X).double(), torch.tensor(R).double())
        assert_same(self.made.state_dict(), plain.state_dict())


class Head(History):
    def __init__(self):
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 2)
        self.made = glb.GLMHead(network, family(), ball())
        self.made.update(torch.tensor([[0.6, 0.8]]), [1.0])

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.observations.rows()[0][1:]

    def state(self):
        return {"rows": self.made.get_extra_state()["observations"]}


class Neural(Head):
    """Replicates have a network each, and it is not trained."""

    def __init__(self):
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 2)
        self.made = glb.NeuralPolicy(network, "greedy", family(), ball(), train_every=None)
        self.made.update([0.6, 0.8], 1.0)

    def state(self):
        return self.made.state_dict()


class Pairs(Head):
    def __init__(self):
        torch.manual_seed(0)
        self.made = glb.PairHead(torch.nn.Linear(2, 2), dim=2, S=2.0)
        self.made.update([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        self.made.update(x, x, r)
        return self.made.head.observations.rows()[0][1:, 1]

    def state(self):
        return {"rows": self.made.head.get_extra_state()["observations"]}


class Preferences(History):
    def __init__(self):
        self.made = glb.PreferenceSequence(2, S=2.0, delta=0.05)
        self.made.update([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        self.made.update(x, [[0.0, 0.0]] * 3, r)
        return 2.0 * self.made.sequence.history.X[1:]


class Contrasts(History):
    def __init__(self):
        self.made = glb.ContrastSequence(family(), ball(), [[1.0, -1.0]], delta=0.05)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.joint.history.X[1:]


class Leashed(Policy):
    def __init__(self):
        self.made = policies.Conservative(Policy().made, np.int64(0), alpha=0.1)


class Refitted(History):
    def __init__(self):
        self.made = RefitProgram(family(), ball())
        self.made.append([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.append(x, r)
        return self.made.history.X[1:]


class Anchored(Refitted):
    def __init__(self):
        self.made = glb.AnchoredProgram(family(), ball())
        self.made.append([0.6, 0.8], 1.0)


POLICIES = {name: partial(Policy, name) for name in policies.available(glb.Bernoulli())}
OTHERS = [History, Sequence, Head, Neural, Pairs, Preferences, Contrasts, Leashed, Refitted]
OTHERS += [Anchored]
DOORS = {door.__name__: door for door in OTHERS} | POLICIES
#: contexts are the network's business
FREE = ("Head", "Neural", "Pairs")


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policies.make("ofuglb", family=family(), domain=3.0), "domain: expected a Ball"),
        (lambda: policies.make("ofuglb", family=family(), domain=ball(), batch_shape=4), "batch_shape: expected a tuple"),
        (lambda: glb.ConfidenceSequence(family(), 3.0, 0.05), "domain: expected a Ball"),
        (lambda: glb.ConfidenceSequence(family(), ball(), 0.05, batch_shape=4), "batch_shape"),
        (lambda: glb.GLMHead(torch.nn.Linear(2, 2), family(), 3.0), "domain: expected a Ball"),
        (lambda: glb.GLMHead(torch.nn.Linear(2, 2), family(), ball(), batch_shape=4), "batch_shape"),
        (lambda: glb.History(2, 4), "batch_shape"),
        (lambda: policies.make("ofuglb", family=family(), domain=glb.Ball(2, [1.0, 2.0, 3.0]), batch_shape=(2,)), "domain: expected a radius that broadcasts"),
        (lambda: policies.make("oful", family=glb.Gaussian(), domain=glb.Ball(2, [1.0, 2.0])), "domain: expected a radius that broadcasts"),
        (lambda: glb.NeuralPolicy(torch.nn.Linear(2, 2), "ofuglb", family(), ball(), colour=1), "setting: expected one of .*'colour'"),
        (lambda: glb.Ball(2, float("nan")), "radius: expected"),
        (lambda: glb.AnchoredProgram(family(), ball()).argmax(torch.eye(2).double(), float("nan")), "radius: expected numbers of at least 0"),
    ],
)  # fmt: skip
def test_raw_errors_have_names(call, message):
    with pytest.raises(glb.InputError, match=message):
        call()


# ---- weights and masks ---------------------------------------------------------------------------


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


# ---- states say what they belong to --------------------------------------------------------------


def test_states_of_other_settings_are_refused():
    def sequence(fam=None, S=3.0, delta=0.05, radius="pac-bayes"):
        return glb.ConfidenceSequence(fam or glb.Binomial(10), glb.Ball(2, S), delta, radius)

    def head(fam=None, **settings):
        torch.manual_seed(0)
        made = glb.GLMHead(torch.nn.Linear(2, 2), fam or glb.Binomial(10), ball(), **settings)
        made.update([[0.6, 0.8]], [1.0])
        return made

    def policy(fam=None, S=3.0, **settings):
        return policies.make(
            "ofuglb", family=fam or glb.Binomial(10), domain=glb.Ball(2, S), **settings
        )

    for build, other, part in [
        (sequence, dict(fam=glb.Binomial(20)), "trials"),
        (sequence, dict(fam=glb.Gaussian()), "class"),
        (sequence, dict(S=2.0), "S"),
        (sequence, dict(delta=0.1), "delta"),
        (sequence, dict(radius=glb.radii.Lipschitz()), "radius"),
        (head, dict(fam=glb.Binomial(20)), "trials"),
        (head, dict(delta=0.1), "delta"),
        (policy, dict(fam=glb.Binomial(20)), "trials"),
        (policy, dict(S=2.0), "S"),
        (policy, dict(delta=0.1), "delta"),
        (policy, dict(radius="lipschitz"), "inf"),
    ]:
        mine, state = build(), build(**other).state_dict()
        with pytest.raises(glb.InputError, match=rf"state\['settings'\].*{part}.*expected"):
            mine.load_state_dict(state)
        mine.load_state_dict(build().state_dict())
    a, b = (policies.make("oful", family=glb.Gaussian(s), domain=ball()) for s in (1.0, 0.5))
    with pytest.raises(glb.InputError, match="sigma"):
        a.load_state_dict(b.state_dict())


# ---- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_take_the_dtype_and_the_axes_of_their_network(dtype):
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    head = glb.GLMHead(network.to(dtype), family(), ball()).eval()
    images, rewards = torch.randn(30, 1, 4, 4), (torch.rand(30) > 0.5).float()
    head.update(images, rewards)
    assert head(images).dtype == head.logits(images).dtype == torch.float64
    torch.testing.assert_close(family().mean(head.logits(images)), head(images))
    assert head(images[0]).shape == head.select(images).shape == ()
    one_by_one = torch.func.vmap(head)(images)
    torch.testing.assert_close(
        one_by_one, head(images), rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(images).dtype == torch.float64
        head.update(images[:3], rewards[:3])
    if dtype == torch.float32:
        head.bfloat16()
        assert head(images).dtype == torch.float64


def test_a_frozen_head_can_be_exported():
    torch.manual_seed(2)
    head = glb.GLMHead(torch.nn.Linear(5, 2), family(), ball())
    contexts = torch.randn(40, 5)
    head.update(contexts, (torch.rand(40) > 0.3).float())
    frozen = head.freeze()
    served = torch.export.export(frozen, (contexts,)).module()(contexts)
    torch.testing.assert_close(served.mean, head.eval()(contexts), rtol=0, atol=1e-6)
    exact = head.confidence(contexts)
    assert bool((served.lower <= exact.lower + 1e-9).all())
    assert bool((served.upper >= exact.upper - 1e-9).all())
    head.update(contexts, torch.ones(40))
    assert torch.equal(frozen(contexts).mean, served.mean)  # it stays as it was


# ---- what is there on purpose --------------------------------------------------------------------


def test_rooms_and_classes_are_reachable():
    from torchglb.policies import OFUGLB, OFUL  # noqa: F401

    for name in ("radii", "policies", "simulate", "environments"):
        assert getattr(glb, name).__name__ == f"torchglb.{name}"
        assert name in dir(glb)
    with pytest.raises(AttributeError, match="kitchen"):
        glb.kitchen  # noqa: B018


def test_reprs_say_their_numbers():
    assert "10" in repr(glb.Binomial(10))
    assert "0.5" in repr(glb.Gaussian(0.5))
    assert repr(glb.Ball(2, 3.0)) == "Ball(dim=2, radius=3.0)"
    made = policies.make("ofuglb", family=glb.Binomial(10), domain=ball(), delta=0.1)
    assert all(word in repr(made) for word in ("OFUGLB", "10", "3.0", "0.1", "table1"))
    assert "table1" in repr(glb.radii.Lipschitz())


def test_a_likelihood_is_a_module_that_moves_and_saves_its_rows():
    rows = torch.tensor(X), torch.tensor(R)
    loss = glb.NegativeLogLikelihood(family(), *rows, torch.ones(3), tilt=torch.zeros(2))
    wide = copy.deepcopy(loss).double()
    assert {t.dtype for t in wide.tensors()} == {torch.float64}
    assert wide(torch.zeros(2).double()).dtype == torch.float64
    assert {t.device.type for t in copy.deepcopy(loss).to("meta").tensors()} == {"meta"}
    other = glb.NegativeLogLikelihood(
        family(), *(0 * t for t in rows), torch.ones(3), tilt=torch.ones(2)
    )
    other.load_state_dict(loss.state_dict())
    theta = torch.tensor([0.3, -0.2])
    assert torch.equal(other(theta), loss(theta))
    with pytest.raises(glb.InputError, match="dtype"):
        other.load_state_dict(wide.state_dict())


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policies.available() + policies.available(pairs=True))
def test_an_unknown_option_is_refused_with_the_nearest_known_one(name):
    made = glb.Gaussian() if "oful" in name else glb.Bernoulli()
    message = f"option of {re.escape(name)}: expected one of .*, got 'dleta' .did you mean 'delta'"
    with pytest.raises(glb.InputError, match=message):
        policies.make(name, family=made, domain=ball(), dleta=0.1)


def test_options_are_those_that_a_class_names():
    assert "forgetting" in policies.registry.options_of("ofuglb")
    assert "forgetting" not in policies.registry.options_of("ofuglb-contrast")
    with pytest.raises(glb.InputError, match=r"'greedi' \(did you mean 'greedy'\?\)"):
        policies.make("greedi", family=family(), domain=ball())
    with pytest.raises(glb.InputError, match=r"'sed' \(did you mean 'seed'\?\)"):
        glb.NeuralPolicy(torch.nn.Linear(2, 2), "ofuglb", family(), ball(), sed=1)
    with pytest.raises(glb.InputError, match=r"'arm' \(did you mean 'arms'\?\)"):
        glb.environments.make("fixed", family=family(), S=1.0, arm=3)
