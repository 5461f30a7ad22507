"""Radii, confidence sets and sequences on an accelerator: nothing on the CPU, no waiting host."""

import pytest
import torch
from devices import assert_stays, on_every_device

import torchglb as glb
from torchglb import radii
from torchglb.estimate import Estimate

BATCH, D = (2,), 2


def numbers(device, *shape):
    return 0.5 * torch.rand(*BATCH, *shape, dtype=torch.float64, device=device)


def loss_of(device, family):
    return glb.NegativeLogLikelihood(family, numbers(device, 5, D), numbers(device, 5))


# ---- radii: update and evaluate -------------------------------------------------------------------


def build_radius(name, family):
    def build(device):
        problem = radii.Problem(family, glb.Ball(D, 2.0), 0.05, BATCH, device=device)
        radius = radii.by_name(name)
        return radius, problem, radius.init(problem)

    return build


def evaluate(family, known):
    def call(device, made):
        radius, problem, state = made
        state = radius.update(problem, state, numbers(device, 5, D), numbers(device, 5))
        loss = loss_of(device, family)
        at = [numbers(device, *shape) for shape in ((D,), (), (), (D,), (D, D))]
        found = radius.evaluate(problem, state, loss, Estimate(*(at if known else at[:3])))
        return found.level, found.radius, found.state

    return call


@on_every_device
@pytest.mark.parametrize("found", [(), ("all",) * 2, ("one",)])
@pytest.mark.parametrize("name", radii.NAMED)
def test_radius(name, found, device_name):
    family = glb.Bernoulli()
    call = evaluate(family, known=not found)
    assert_stays(device_name, call, build_radius(name, family), found=found)


@on_every_device
@pytest.mark.parametrize("family", [glb.Gaussian(0.5), glb.Poisson()])
@pytest.mark.parametrize("name", radii.NAMED)
def test_radius_of_other_families(name, family, device_name):
    assert_stays(device_name, evaluate(family, known=True), build_radius(name, family))


LEVELS = {
    "theorem32": lambda d: radii.theorem32(numbers(d), 2.0, 1.0, 0.1),
    "fixed point": lambda d: radii.theorem32_fixed_point(
        numbers(d), 2.0, 1.0, numbers(d), numbers(d), numbers(d, 5, D), numbers(d, D, D)
    ),
    "infimum": lambda d: radii.shrinkage_infimum(numbers(d), dim=2),
    "theorem31": lambda d: radii.theorem31(numbers(d), 2.0, 2, 0.05).radius,
    "covering": lambda d: radii.covering(numbers(d), 2.0, 2, 0.05).radius,
    "mean loss": lambda d: radii.mean_loss_radius(numbers(d), numbers(d), 2, 0.05),
}


@on_every_device
@pytest.mark.parametrize("level", LEVELS)
def test_theorem(level, device_name):
    assert_stays(device_name, LEVELS[level])


# ---- sets -----------------------------------------------------------------------------------------


def ratio_set(device, confined=True):
    loss = loss_of(device, glb.Bernoulli())
    level, center = 10.0 + numbers(device), numbers(device, D)
    return glb.LikelihoodRatioSet(loss, glb.Ball(D, 2.0), level, center, confined)


def ellipsoid(device, with_ball=False):
    shape = numbers(device, D, D)
    center, gamma = numbers(device, D), numbers(device)
    ball = glb.Ball(D, 2.0)
    return glb.EllipsoidSet(glb.Bernoulli(), ball, center, shape, gamma, with_ball)


SETS = {
    "ratio": ratio_set,
    "unconfined": lambda d: ratio_set(d, confined=False),
    "ellipsoid": ellipsoid,
    "ellipsoid in the ball": lambda d: ellipsoid(d, with_ball=True),
    "ellipsoid of a ratio set": lambda d: ratio_set(d).ellipsoid(),
    "intersection": lambda d: ratio_set(d).intersect(ellipsoid(d)),
}
QUESTIONS = {
    "slack": lambda s, d: (s.slack(numbers(d, D)), s.contains(numbers(d, 3, D))),
    "interval": lambda s, d: s.interval(numbers(d, D), **options_of(s)),
    "interval of the mean": lambda s, d: s.interval(numbers(d, 3, D), "mean", **options_of(s)),
    "contrast": lambda s, d: s.contrast(numbers(d, D), numbers(d, D), **options_of(s)),
}


def options_of(found):
    """The native solver looks at its statuses and at the arms unless it is told not to."""
    native = isinstance(found, glb.LikelihoodRatioSet)
    return {"throw": False, "validate": False} if native else {}


@on_every_device
@pytest.mark.parametrize(
    "question",
    # the interval of the mean comes from that of the linear predictor
    [pytest.param(q, marks=pytest.mark.slow if q == "interval" else []) for q in QUESTIONS],
)
@pytest.mark.parametrize("kind", SETS)
def test_set(kind, question, device_name):
    def call(device):
        return QUESTIONS[question](SETS[kind](device), device)

    assert_stays(device_name, call, steps=1, doors=True)


@on_every_device
@pytest.mark.parametrize("kind", ["ratio", "ellipsoid in the ball", "intersection"])
def test_boundary_and_volume(kind, device_name):
    def call(device):
        found = SETS[kind](device)
        return found.boundary(8), found.volume()

    assert_stays(device_name, call, steps=1, doors=True)


# ---- sequences ------------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("found", [pytest.param((), marks=pytest.mark.slow), ("all",) * 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"radius": "lipschitz"}, id="lipschitz", marks=pytest.mark.slow),
        pytest.param({"radius": "gaussian-prior"}, id="gaussian-prior", marks=pytest.mark.slow),
        pytest.param({"ellipsoidal": True}, id="ellipsoid"),
        pytest.param({"ellipsoidal": True, "ellipsoid": "theorem"}, id="ellipsoid of the theorem"),
        pytest.param({"aggregate": True}, id="merged"),
    ],
)
def test_sequence(options, found, device_name):
    def build(device):
        return glb.ConfidenceSequence(
            glb.Bernoulli(),
            glb.Ball(D, 2.0),
            0.05,
            batch_shape=BATCH,
            validate=False,
            device=device,
            **options,
        )

    def call(device, sequence):
        sequence.update(numbers(device, 5, D), numbers(device, 5))
        now = sequence.current()
        sequence.update(numbers(device, D), numbers(device), numbers(device))
        later = sequence.current()
        bounds = later.interval(numbers(device, D), **options_of(later))
        return now.slack(numbers(device, D)), bounds, sequence.evaluation()[:2]

    assert_stays(device_name, call, build, steps=1, found=found, doors=True)
