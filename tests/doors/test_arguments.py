"""Arguments of constructors: refused by name, found by name, and said by repr."""

import copy
import io
import re

import numpy as np
import pandas as pd
import pytest
import torch
from door_objects import ball, family
from input_kinds import R, X

import torchglb as glb
from torchglb import policies
from torchglb.simulate import simulate
from torchglb.ucb import RefitProgram


def custom(**settings):
    return glb.CustomFamily(torch.nn.functional.softplus, **settings)


def history():
    return glb.History(2)


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
        (lambda: glb.ConfidenceSequence(glb.Bernoulli, ball(), 0.05), r"family: .*, got the class Bernoulli \(write Bernoulli\(\)\)"),
        (lambda: glb.History(2, family=glb.Bernoulli), r"family: .* or None, got the class Bernoulli \(write"),
        (lambda: policies.available(glb.Gaussian), r"family: .* or None, got the class Gaussian"),
        (lambda: policies.available("gaussian"), "family: .* or None, got str"),
        (lambda: glb.ConfidenceSequence(family(), ball(), 0.05, glb.radii.PACBayes), r"radius: .*, got the class PACBayes \(write"),
        (lambda: glb.ConfidenceSequence(family(), ball(), 0.05, estimator=glb.Refit), r"estimator: .*, got the class Refit \(write"),
        (lambda: glb.GLMHead(torch.nn.Linear, family(), ball()), "module: .*, got the class Linear"),
        (lambda: glb.GLMHead(torch.nn.Linear(2, 2), family(), ball(), dtype="float64"), "dtype: expected torch.float32 or torch.float64, got 'float64'"),
        (lambda: glb.GLMHead(torch.nn.Linear(2, 2), family(), ball(), bound="clap"), r"bound: .* \(did you mean 'clip'\?\)"),
        (lambda: glb.Binomial(3, whole="no"), "whole: expected True or False"),
        (lambda: custom(reward_range=1.0), "reward_range: expected a pair"),
        (lambda: custom(reward_range=("0", "1")), "reward_range: expected a pair"),
        (lambda: custom(reward_range=(1.0, 0.0)), "reward_range: expected a pair"),
        (lambda: custom(self_concordance=-1.0), "self_concordance: expected a number of at least 0"),
        (lambda: custom(self_concordance="1"), "self_concordance: expected a number of at least 0"),
        (lambda: custom(max_variance=float("nan")), "max_variance: expected a number of at least 0"),
        (lambda: custom(min_variance=True), "min_variance: expected a number of at least 0"),
        (lambda: custom(sampler=3), "sampler: expected a function"),
        (lambda: family().sample("0"), "z: expected a tensor or real numbers"),
        (lambda: family().sample([0.0], 3), r"generator: expected a torch.Generator, such as .*, got 3"),
        (lambda: ball().contains([0.0, 0.0], "tight"), "tolerance: expected a non-negative number"),
        (lambda: RefitProgram(family(), ball(), forgetting=3), "forgetting: expected Discount"),
        (lambda: history().append([10**400, 0], 1.0), "x: expected .*, got list"),
        (lambda: simulate("ts", horizon=3, replicates=1, S=2.0), r"policies: expected a list of labels, such as \['ts'\]"),
        (lambda: simulate({"ts": 3}, horizon=3, replicates=1, S=2.0), r"policies\['ts'\]: expected a table"),
        (lambda: simulate(["ts"], horizon=3, replicates=1, S=2.0, out=3), "out: expected the path"),
        (lambda: simulate(["ts"], horizon=3, replicates=1, S=2.0, watch=3), "watch: expected"),
    ],
)  # fmt: skip
def test_raw_errors_have_names(call, message):
    with pytest.raises(glb.InputError, match=message):
        call()


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(replicates=torch.tensor(1.5)), "replicates: expected whole numbers"),
        (dict(replicates=[1]), "replicates: expected shape"),
        (dict(replicates="one"), "replicates: expected whole numbers"),
        (dict(validate=2), "validate: expected True or False, got 2"),
        (dict(aggregate="no"), "aggregate: expected True or False, got 'no'"),
        (dict(device="cudaa"), "device: expected a device of this machine, .* got 'cudaa'"),
        (dict(device=3.5), "device: expected a device of this machine"),
        (dict(seed=1.5), "seed: expected an integer, got 1.5"),
    ],
)  # fmt: skip
def test_settings_of_policies_are_refused_by_name(setting, message):
    with pytest.raises(glb.InputError, match=message):
        glb.policies.make("ofuglb", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0), **setting)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *g: glb.ConfidenceSequence(*g, 0.1, device="cudaa"), "device: expected"),
        (lambda *g: glb.ConfidenceSequence(*g, 0.1, running="no"), "running: expected True or"),
        (lambda *g: glb.ConfidenceSequence(*g, 0.1, aggregate=1), "aggregate: expected True or"),
        (lambda *g: glb.GLMHead(torch.nn.Identity(), *g, delta="5%"), "delta: expected a number"),
        (lambda *g: glb.GLMHead(torch.nn.Identity(), *g, ellipsoidal="no"), "ellipsoidal: expected"),
        (lambda *g: glb.GLMHead(torch.nn.Identity(), *g, device="cudaa"), "device: expected"),
    ],
)  # fmt: skip
def test_settings_of_sequences_and_heads_are_refused_by_name(call, message):
    with pytest.raises(glb.InputError, match=message):
        call(glb.Bernoulli(), glb.Ball(2, 3.0))


def test_settings_may_be_numbers_of_numpy():
    """And states then hold plain numbers, which ``torch.load`` reads without trust."""
    given = dict(family=glb.Bernoulli(), domain=glb.Ball(2, pd.Series([3.0, 2.0])))
    made = [
        glb.policies.make(
            "ts", **given, delta=np.float32(0.5), seed=np.int64(3), replicates=np.array([4, 7]),
            batch_shape=(np.int64(2),), horizon=np.int32(9), validate=np.bool_(True),
        ),
        glb.ConfidenceSequence(**given, delta=np.float32(0.5), batch_shape=(2,)),
    ]  # fmt: skip
    for one in made:
        buffer = io.BytesIO()
        torch.save(one.state_dict(), buffer)
        buffer.seek(0)
        one.load_state_dict(torch.load(buffer, weights_only=True))
    plain = glb.policies.make(
        "ts", **given, delta=0.5, seed=3, replicates=torch.tensor([4, 7]), batch_shape=(2,)
    )
    arms = [[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]] * 2
    assert torch.equal(plain.scores(arms), made[0].scores(arms))


PROGRAMS = [glb.AnchoredProgram, glb.ucb.RefitProgram]


def program(make):
    made = make(family(), ball())
    made.append(X, R)
    return made


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, ball()), "family: expected a GLMFamily such as Bernoulli"),
        ((family(), 3.0), "domain: expected a Ball"),
        ((family(), glb.Ball(2, [1.0, 2.0, 3.0]), (2,)), "domain: expected a radius that broadcasts"),
    ],
)  # fmt: skip
def test_programs_refuse_what_they_cannot_be_about(make, arguments, message):
    with pytest.raises(glb.InputError, match=f"^{message}"):
        make(*arguments)


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda p: p.argmax(X, 1.0, regularization=float("inf")), "regularization: expected non-negative finite"),
        (lambda p: p.argmax(X, 1.0, regularization=torch.tensor(float("inf"))), "regularization: expected non-negative finite"),
        (lambda p: p.bound(X, 1.0, regularization=float("inf")), "regularization: expected non-negative finite"),
        (lambda p: p.minimum(float("inf")), "regularization: expected non-negative finite"),
        (lambda p: p.argmax(X, 1.0, throw="no"), "throw: expected True or False"),
        (lambda p: p.bound(X, 1.0, throw="no"), "throw: expected True or False"),
        (lambda p: p.argmax(X, 1.0, max_steps=2**63), "max_steps: expected an integer from 0 to"),
        (lambda p: p.beside(-3), "anchors: expected an integer of at least 1"),
        (lambda p: p.load_state_dict(None), "state: expected what state_dict"),
    ],
)  # fmt: skip
def test_questions_that_are_refused_change_nothing(make, question, message):
    asked, quiet = program(make), program(make)
    with pytest.raises(glb.InputError, match=f"^{message}"):
        question(asked)
    for one in (asked, quiet):
        one.argmax(X, 1.0)
    assert torch.equal(asked.argmax(X, 0.5).upper, quiet.argmax(X, 0.5).upper)


@pytest.mark.parametrize("make", PROGRAMS)
def test_a_radius_may_be_a_tuple(make):
    made = make(family(), ball(), (1,))
    made.append([X], [R])
    plain = made.fork().bound([X], [1.0]).upper
    assert torch.equal(made.fork().bound([X], (1.0,)).upper, plain)


@pytest.mark.parametrize("anchor", [-1, 0.5, 10**6, True])
def test_an_anchor_that_is_not_there(anchor):
    made = program(glb.AnchoredProgram)
    with pytest.raises(glb.InputError, match="^anchor: expected"):
        made.self_check(anchor)
    made.self_check(0)


def test_a_radius_without_a_finite_constant():
    cloglog = glb.QuasiBounded("cloglog")
    with pytest.raises(glb.InputError, match="^family: expected a family with a finite R_s.*= inf"):
        glb.AnchoredProgram(cloglog, glb.Ball(2, 720.0))
    made = glb.AnchoredProgram(cloglog, glb.Ball(2, 700.0))
    made.append(X, R)
    assert made.argmax(X, 1.0).status == glb.Status.CONVERGED


def test_names_of_radii_are_all_told():
    with pytest.raises(glb.InputError, match="^radius: expected one of 'auto', .*mean 'auto'"):
        glb.ConfidenceSequence(family(), ball(), 0.05, "Auto")


def test_a_sequence_of_no_problems():
    with pytest.raises(glb.InputError, match="^batch_shape: expected at least one problem"):
        glb.ConfidenceSequence(family(), ball(), 0.05, batch_shape=(0,))
