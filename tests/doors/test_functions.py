"""Every public function that takes numbers x every kind of input: the same answer, or its name."""

import numpy as np
import pytest
import torch
from input_kinds import KINDS, REFUSED, R, X

import torchglb as glb
from torchglb import environments, policies, theory
from torchglb.policies.design import g_optimal
from torchglb.ucb import ConvexRegion, RefitProgram

W = [1.0, 0.5, 0.25]
POINT = X[1]
LEVELS = [2.5, 3.0, 3.5]
ARMS = [X, X, X]  # of three events


def family():
    return glb.Bernoulli()


def ball():
    return glb.Ball(2, 3.0)


def loss(convert=KINDS["float64"], **options):
    return glb.NegativeLogLikelihood(family(), convert(X), convert(R), **options)


def program():
    return glb.SublevelProgram(loss(), ball(), 3.0)


def three_programs(levels):
    """The same rows under three levels."""
    rows = glb.NegativeLogLikelihood(family(), [X] * 3, [R] * 3)
    return glb.SublevelProgram(rows, ball(), levels)


def fit(X, r, w=None, **options):
    return glb.constrained_mle(family(), glb.Rows(X, r, w), ball(), **options).loss


def sequence():
    made = glb.ConfidenceSequence(family(), ball(), 0.05)
    made.update(X, R)
    return made


def refit_program():
    made = RefitProgram(family(), ball())
    made.append(X, R)
    return made


def anchored_program():
    made = glb.AnchoredProgram(family(), ball())
    made.append(X, R)
    return made


def log(arms=ARMS, rewards=R, index=(0, 1, 2), **options):
    return environments.Log(arms, index, rewards, **options)


def value(given, target=(0, 0, 1), **options):
    return environments.off_policy_value(given, target, reward_range=(0.0, 1.0), **options).value


def region(**changes):
    parts = dict(center=[0.0, 0.0], shape=[[1.0, 0.0], [0.0, 1.0]], size=1.0, curvature=0.0)
    made = ConvexRegion(**parts | changes)
    return made.excess(torch.tensor(X).to(made.center))


#: the door, the argument that is of every kind, and what is asked
DOORS = {
    "likelihood X": ("X", lambda v: glb.NegativeLogLikelihood(family(), v(X), R)(POINT)),
    "likelihood r": ("r", lambda v: glb.NegativeLogLikelihood(family(), X, v(R))(POINT)),
    "likelihood w": ("w", lambda v: glb.NegativeLogLikelihood(family(), X, R, v(W))(POINT)),
    "likelihood tilt": ("tilt", lambda v: loss(tilt=v(POINT))(POINT)),
    "likelihood ridge": (
        "regularization",
        lambda v: glb.NegativeLogLikelihood(family(), [X] * 3, [R] * 3, regularization=v(W))(X),
    ),
    "likelihood theta": ("theta", lambda v: loss()(v(POINT))),
    "likelihood of rows": (
        "X",
        lambda v: glb.NegativeLogLikelihood.of(family(), glb.Rows(v(X), R))(POINT),
    ),
    "mle X": ("X", lambda v: fit(v(X), R)),
    "mle r": ("r", lambda v: fit(X, v(R))),
    "mle w": ("w", lambda v: fit(X, R, v(W))),
    "mle start": ("start", lambda v: fit(X, R, start=v(POINT))),
    "program level": ("level", lambda v: glb.support(three_programs(v(LEVELS)), [X] * 3).upper),
    "native arms": ("arms", lambda v: glb.support(program(), v(X)).upper),
    "native center": ("center", lambda v: glb.support(program(), X, center=v(POINT)).upper),
    "conic arms": ("arms", lambda v: glb.support(program(), v(X), "conic").upper),
    "layer arms": ("arms", lambda v: glb.support(program(), v(X), "layer").upper),
    "anchored arms": ("arms", lambda v: anchored_program().argmax(v(X), 1.0).upper),
    "refit arms": ("arms", lambda v: refit_program().argmax(v(X), 1.0).upper),
    "region center": ("center", lambda v: region(center=v([0.0, 0.0]))),
    "region shape": ("shape", lambda v: region(shape=v([[1.0, 0.0], [0.0, 1.0]]))),
    "ratio set center": (
        "theta_hat",
        lambda v: glb.LikelihoodRatioSet(loss(), ball(), 3.0, v(POINT)).interval(X).upper,
    ),
    "ellipsoid center": (
        "theta_hat",
        lambda v: glb.EllipsoidSet(
            family(), ball(), v(POINT), [[2.0, 0.0], [0.0, 1.0]], 0.5
        ).interval(X).upper,
    ),
    "ellipsoid shape": (
        "shape",
        lambda v: glb.EllipsoidSet(
            family(), ball(), POINT, v([[2.0, 0.0], [0.0, 1.0]]), 0.5
        ).interval(X).upper,
    ),
    "set interval": ("x", lambda v: sequence().current().interval(v(X)).upper),
    "set contains": ("theta", lambda v: sequence().current().slack(v(POINT))),
    "set contrast": ("x1", lambda v: sequence().current().contrast(v(X), X[::-1]).upper),
    "ball project": ("theta", lambda v: ball().project(v(X))),
    "ball contains": ("theta", lambda v: ball().contains(v(X))),
    "ball support": ("x", lambda v: ball().support(v(X))),
    "design": ("arms", lambda v: g_optimal(v(X)).weights),
    "kappa": ("z", lambda v: theory.kappa_star(family(), v(R))),
    "certificate": ("lower", lambda v: theory.realised_certificate([2.0, 1.5, 1.0], v(R))),
    "log arms": ("arms", lambda v: value(log(arms=v(ARMS)))),
    "log rewards": ("rewards", lambda v: value(log(rewards=v(R)))),
    "log propensity": ("propensity", lambda v: value(log(propensity=v([0.5, 0.25, 0.25])))),
    "target": ("target", lambda v: value(log(), v([[0.5, 0.25, 0.25]] * 3))),
    "predictions": ("predictions", lambda v: value(log(), predictions=v([W] * 3))),
    "best arm": ("arms", lambda v: glb.BestArm(sequence(), v(X)).margin()),
    "contrasts": (
        "contrasts",
        lambda v: glb.ContrastSequence(family(), ball(), v(X), delta=0.05).current().upper,
    ),
    "oracle": (
        "theta_star",
        lambda v: policies.Oracle(family(), ball(), theta_star=v(POINT)).scores(X),
    ),
}  # fmt: skip
#: float32 rows are rows of a float32 object
KEEPS_FLOAT32 = {
    "likelihood X", "likelihood of rows", "mle X", "ellipsoid center", "ball project",
    "ball support", "design", "kappa", "region center", "log arms",
}  # fmt: skip


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("kind", [*KINDS])
def test_every_kind_gives_the_same_answer(door, kind):
    _, ask = DOORS[door]
    found, plain = ask(KINDS[kind]), ask(KINDS["float64"])
    if kind == "float32" and door in KEEPS_FLOAT32:
        # in float32 the loss is certified to 1e-4
        torch.testing.assert_close(found.to(plain.dtype), plain, rtol=0, atol=1e-3)
    else:
        assert torch.equal(found, plain)
        assert found.dtype == plain.dtype


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("kind", ["complex", "words", "nothing", "ragged"])
def test_what_is_not_numbers_is_refused_by_name(door, kind):
    name, ask = DOORS[door]
    make, message = REFUSED[kind]
    with pytest.raises(glb.InputError, match=f"^{name}(\\[.*\\])?: {message}"):
        ask(make)


SCALARS = [3, 3.0, np.float32(3), np.int64(3), np.array(3.0), torch.tensor(3), torch.tensor(3.0)]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_scalars_of_every_kind(scalar):
    plain = glb.support(program(), X).upper
    assert torch.equal(glb.support(glb.SublevelProgram(loss(), ball(), scalar), X).upper, plain)
    ridged = [loss(regularization=ridge)(POINT) for ridge in (scalar, 3.0)]
    assert torch.equal(*ridged)
    assert torch.equal(fit(X, R, regularization=scalar), fit(X, R, regularization=3.0))
    sets = [glb.LikelihoodRatioSet(loss(), ball(), level, POINT) for level in (scalar, 3.0)]
    assert torch.equal(*(one.interval(X).upper for one in sets))
    asked = [refit_program().argmax(X, height).upper for height in (scalar, 3.0)]
    assert torch.equal(*asked)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glb.SublevelProgram(sequence().history, ball(), 3.0), "likelihood: expected a NegativeLogLikelihood, got History"),
        (lambda: glb.SublevelProgram(loss(), 3.0, 3.0), "domain: expected a Ball"),
        (lambda: glb.SublevelProgram(loss(), ball(), LEVELS), r"level: expected shape \(\), got shape \(3,\)"),
        (lambda: glb.NegativeLogLikelihood(family(), torch.tensor(X), np.array([0.1, 0.2, 0.3])), "r: expected dtype torch.float32, or numbers that it holds"),
        (lambda: glb.support(program(), torch.tensor(X).to("meta")), "arms: expected a tensor on device cpu"),
        (lambda: log(index=[0.0, 1.0, 2.0]), "index: expected whole numbers, got dtype float64"),
        (lambda: log(index=torch.zeros(3)), "index: expected whole numbers, got dtype torch.float32"),
        (lambda: log(index=[0, 1, 3]), "index: expected arms from 0 to 2"),
        (lambda: value(log(), [0.5, 0.5, 0.5]), "target: expected whole numbers"),
        (lambda: policies.Conservative(policies.make("ofuglb", family=family(), domain=ball()), 0.5, 0.1), "baseline: expected whole numbers"),
    ],
)  # fmt: skip
def test_real_refusals_say_what_was_expected(call, message):
    with pytest.raises(glb.InputError, match=message):
        call()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16, torch.int32, torch.uint8, "list"])
def test_whole_numbers_of_every_kind(kind):
    def indices(values):
        if kind == "list":
            return values
        make = torch.tensor if isinstance(kind, torch.dtype) else np.array
        return make(values, dtype=kind)

    plain = value(log(), [0, 0, 1])
    assert torch.equal(value(log(index=indices([0, 1, 2])), indices([0, 0, 1])), plain)
