"""A ball that is too small is said by name: by sequences, policies, heads and reports."""

import copy

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import policies
from torchglb.report import summarise, table, write_report
from torchglb.simulate import simulate
from torchglb.testing.policies import assert_same


def family():
    return glb.Bernoulli()


# ---- a ball that is too small --------------------------------------------------------------------


def sequence_of(length, S, seed=0, n=600):
    generator = torch.Generator().manual_seed(seed)
    rows = 0.99 * torch.nn.functional.normalize(torch.randn(n, 2, generator=generator), dim=-1)
    made = glb.ConfidenceSequence(family(), glb.Ball(2, S), 0.05)
    made.update(rows, family().sample(rows @ torch.tensor([length, 0.0]), generator))
    return made


def test_a_ball_that_is_too_small_is_said_once():
    made = sequence_of(6.0, 2.0)
    with pytest.warns(glb.BoundaryWarning, match=r"refute \|theta\*\| <= S = 2.0"):
        assert bool(made.current().on_boundary)
    made.update([1.0, 0.0], 1.0)
    assert bool(made.current().on_boundary)  # no second warning: it would be an error here


@pytest.mark.parametrize("seed", range(20))
def test_a_ball_that_is_large_enough_is_left_alone(seed):
    assert not bool(sequence_of(2.0, 2.0, seed, n=200).current().on_boundary)


def test_the_level_against_which_S_is_held():
    """500 rewards of 6 at x = 1, S = 2: all of it by hand."""
    from torchglb.radii import radius_refuted

    def refuted(n, mean):
        loss = glb.NegativeLogLikelihood(
            glb.Gaussian(), torch.ones(n, 1).double(), torch.full((n,), mean).double()
        )
        return bool(radius_refuted(loss, glb.Ball(1, 2.0), torch.tensor([2.0]).double(), 0.05))

    def by_hand(n, mean):
        fall = n * ((4.0**2 / 2 - mean * 4.0) - (2.0**2 / 2 - mean * 2.0))  # L(4) - L(2), mean > 4
        steepness = n * (mean + 4.0)
        c = np.linspace(1e-6, 1.0, 2_000_001)
        price = (np.log(1 / c) + 8.0 * c * steepness).min()
        return -fall > price + np.log(20.0)

    answers = [(n, mean) for n in (1, 2, 3, 4, 6, 9) for mean in (4.1, 5.0, 6.0)]
    assert [refuted(*a) for a in answers] == [by_hand(*a) for a in answers]
    assert len({refuted(*a) for a in answers}) == 2


# ---- policies, heads, reports --------------------------------------------------------------------


def rows_of(length, n=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = 0.99 * torch.nn.functional.normalize(torch.randn(n, 2, generator=generator), dim=-1)
    return rows, family().sample(rows @ torch.tensor([length, 0.0]), generator)


NAMES = ("ofuglb", "ofuglb-pb", "ofuglb-e", "ofulog-r", "emk", "greedy", "glm-ucb", "ts")


@pytest.mark.parametrize("name", NAMES)
def test_policies_say_that_S_is_too_small(name):
    small, large = (policies.make(name, family=family(), domain=glb.Ball(2, S)) for S in (2.0, 8.0))
    for policy in (small, large):
        policy.update(*rows_of(6.0))
    before = small.state_dict()
    with pytest.warns(glb.BoundaryWarning, match=r"refute \|theta\*\| <= S = 2.0 at level 0.05"):
        assert bool(small.on_boundary())
    assert bool(small.on_boundary())  # no second warning: it would be an error here
    assert_same(small.state_dict(), before)  # a question
    assert not bool(large.on_boundary())


@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-e"])
def test_a_policy_that_is_asked_for_its_set_warns(name):
    policy = policies.make(name, family=family(), domain=glb.Ball(2, 2.0))
    policy.update(*rows_of(6.0))
    with pytest.warns(glb.BoundaryWarning):
        policy.confidence_set()
    policy.confidence_set()


def test_only_those_who_know_answer():
    def answer(**options):
        made = policies.make(family=options.pop("family", family()), domain=ball(), **options)
        made.update(*rows_of(6.0, 50))
        return made.on_boundary()

    def ball():
        return glb.Ball(2, 2.0)

    assert answer(name="oful", family=glb.Gaussian()) is None  # it keeps no rows
    assert answer(name="ofuglb", radius="gaussian-prior") is None  # it needs no S
    assert answer(name="ofuglb", forgetting=glb.Window(20)) is None  # theta* may change


def test_each_replicate_is_judged_by_its_own_rows():
    x, r = rows_of(6.0)
    near = rows_of(1.0)
    policy = policies.make("ofuglb", family=family(), domain=glb.Ball(2, 2.0), batch_shape=(2,))
    policy.update(torch.stack([x, near[0]]), torch.stack([r, near[1]]))
    with pytest.warns(glb.BoundaryWarning):
        assert policy.on_boundary().tolist() == [True, False]


@pytest.mark.parametrize("ellipsoidal", [False, True])
def test_heads_say_that_S_is_too_small(ellipsoidal):
    x, r = rows_of(6.0)
    head = glb.GLMHead(
        torch.nn.Identity(), family(), glb.Ball(2, 2.0), bound="clip", ellipsoidal=ellipsoidal
    )
    head.update(x, r)
    assert bool(head.on_boundary())
    with pytest.warns(glb.BoundaryWarning, match="S = 2.0"):
        head.confidence(x[:3])
    neural = glb.NeuralPolicy(
        torch.nn.Linear(2, 2), "ofuglb", family(), glb.Ball(2, 2.0), train_every=None, bound="clip"
    )
    with torch.no_grad():
        neural.encoders.parameters["weight"].copy_(torch.eye(2)[None])
        neural.encoders.parameters["bias"].zero_()
    neural.update(x, r)
    with pytest.warns(glb.BoundaryWarning):
        assert bool(neural.on_boundary())
    leashed = policies.Conservative(copy.deepcopy(neural.inner), 0, 0.1)
    assert bool(leashed.on_boundary())


def test_reports_show_it(tmp_path):
    record = simulate(
        ["ofuglb", "random"], "fixed", horizon=20, replicates=2, S=[3.0], arms=5,
        out=tmp_path / "run",
    )  # fmt: skip
    arrays = record.arrays("ofuglb")
    assert arrays["on_boundary"].shape == (1, 2)
    assert not arrays["on_boundary"].any()
    assert "on_boundary" not in record.arrays("random")
    page = write_report(record, tmp_path / "a.html").read_text()
    assert "refute" not in page
    assert "refute" not in table(record)
    told = {k: np.array([[True, False]]) if k == "on_boundary" else v for k, v in arrays.items()}
    plain = record.arrays
    object.__setattr__(record, "arrays", lambda label: told if label == "ofuglb" else plain(label))
    sentence = "ofuglb, S = 3: the observations of 1 of 2 replicates refute |theta*|"
    assert summarise(record).cells["ofuglb", 3.0].refuted == 1
    assert f"warning: {sentence}" in table(record)
    page = write_report(record, tmp_path / "b.html").read_text()
    assert sentence in page
    assert 'class="warning"' in page


def test_rounds_do_not_look(monkeypatch):
    """The question is never asked by select or update."""
    from torchglb.policies import base

    asked = []
    monkeypatch.setattr(base, "radius_refuted", lambda *given: asked.append(given))
    for name in ("ofuglb", "ofuglb-pb", "ofuglb-e", "greedy"):
        policy = policies.make(name, family=family(), domain=glb.Ball(2, 2.0))
        x, r = rows_of(6.0, 40)
        for t in range(40):
            policy.select(x[:5])
            policy.update(x[t], r[t])
    assert not asked
