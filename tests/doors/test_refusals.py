"""What no door of the static path may let in, each refused by name; and arms as short as they come."""

import math

import pytest
import torch

import torchglb as glb

DOUBLE = torch.float64
NAN = math.nan


def number(value):
    return torch.tensor(value, dtype=DOUBLE)


def rows(w=None):
    X = torch.eye(2, dtype=DOUBLE).repeat(5, 1)
    return glb.Rows(X, torch.tensor([1.0, 0.0] * 5, dtype=DOUBLE), w)


def program(w=None, ridge=0.0, level=4.0):
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows(w), regularization=ridge)
    return glb.SublevelProgram(loss, glb.Ball(2, 3.0), number(level))


ARMS = torch.eye(2, dtype=DOUBLE)
WEIGHTS = torch.ones(10, dtype=DOUBLE)
BAD_WEIGHTS = [-WEIGHTS, WEIGHTS * NAN, WEIGHTS * math.inf]


@pytest.mark.parametrize("solver", ["native", "conic", "layer"])
@pytest.mark.parametrize("w", BAD_WEIGHTS)
def test_weights(w, solver):
    with pytest.raises(glb.InputError, match="^w: expected .*, got"):
        glb.support(program(w), ARMS, solver)
    with pytest.raises(glb.InputError, match="^w: expected .*, got"):
        glb.constrained_mle(glb.Bernoulli(), rows(w), glb.Ball(2, 3.0))


@pytest.mark.parametrize("ridge", [-1.0, NAN, math.inf])
@pytest.mark.parametrize("as_number", [True, False])
def test_regularisation(ridge, as_number):
    value = ridge if as_number else number(ridge)
    with pytest.raises(glb.InputError, match="^regularization: expected .*, got"):
        glb.constrained_mle(glb.Bernoulli(), rows(), glb.Ball(2, 3.0), regularization=value)
    for solver in ("native", "conic"):
        with pytest.raises(glb.InputError, match="^regularization: expected .*, got"):
            glb.support(program(ridge=value), ARMS, solver)
    if as_number:
        with pytest.raises(glb.InputError, match="^regularization: expected .*, got"):
            glb.GLMHead(
                torch.nn.Linear(3, 2), glb.Bernoulli(), glb.Ball(2, 3.0), regularization=ridge
            )


@pytest.mark.parametrize("S", [-1.0, 0.0, NAN, math.inf])
def test_radius(S):
    for value in (S, number(S), number([1.0, S])):
        with pytest.raises(glb.InputError, match="^radius: expected .*, got"):
            glb.Ball(2, value)


@pytest.mark.parametrize("gamma", [-1.0, NAN])
def test_squared_radius_of_an_ellipsoid(gamma):
    zero, eye = torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)
    bad = glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(2, 3.0), zero, eye, number(gamma))
    with pytest.raises(glb.InputError, match="^gamma: expected non-negative numbers, got"):
        bad.upper_bound(ARMS)


@pytest.mark.parametrize("tol", [NAN, -1e-3, math.inf, "tight", True])
def test_tolerance(tol):
    with pytest.raises(glb.InputError, match="^tol: expected .*, got"):
        glb.constrained_mle(glb.Bernoulli(), rows(), glb.Ball(2, 3.0), tol=tol)
    for solver in ("native", "conic", "layer"):
        with pytest.raises(glb.InputError, match="^tol: expected .*, got"):
            glb.support(program(), ARMS, solver, tol=tol)


@pytest.mark.parametrize("length", [3.0 + 1e-9, 30.0, math.inf])
def test_center(length):
    center = torch.tensor([length, 0.0], dtype=DOUBLE)
    with pytest.raises(glb.InputError, match="^center: expected points of the ball.*, got"):
        glb.support(program(), ARMS, center=center)


def test_a_center_on_the_sphere_is_welcome():
    center = torch.tensor([1.8, -2.4], dtype=DOUBLE)
    level = float(program().likelihood(center)) + 1.0
    found = glb.support(program(level=level), ARMS, center=center)
    plain = glb.support(program(level=level), ARMS)
    assert (found.upper >= plain.lower).all()
    assert (found.lower <= plain.upper).all()


# ---- short arms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1e-100, 1e-150, 1e-162, 1e-200, 1e-250, 1e-300, 0.0])
@pytest.mark.parametrize("solver", ["native", "conic"])
def test_short_arms_have_their_share(length, solver):
    """``h`` is homogeneous, and nothing of it may underflow."""
    directions = torch.tensor([[0.6, 0.8], [-1.0, 0.0], [0.3, -0.3]], dtype=DOUBLE)
    whole = glb.support(program(), directions, tol=1e-12, throw=False)
    short = glb.support(program(), length * directions, solver)
    assert (short.upper >= length * whole.lower).all()
    assert (short.lower <= length * whole.upper).all()
    if length:
        assert (short.upper != 0).all()
        # the tolerance is absolute; the ball alone gives S |x|
        assert (short.upper <= 3.0 * length * directions.norm(dim=-1) * (1 + 1e-12)).all()


@pytest.mark.parametrize("length", [1e-20, 1e-30, 1e-37])
def test_short_arms_in_float32(length):
    family, X = glb.Bernoulli(), torch.eye(2).repeat(5, 1)
    loss = glb.NegativeLogLikelihood(family, X, torch.tensor([1.0, 0.0] * 5))
    narrow = glb.SublevelProgram(loss, glb.Ball(2, 3.0), torch.tensor(4.0))
    whole = glb.support(narrow, torch.eye(2))
    short = glb.support(narrow, length * torch.eye(2))
    assert (short.upper.double() >= torch.tensor(length).double() * whole.lower.double()).all()


@pytest.mark.parametrize("length", [1e-162, 1e-250, 1e-300])
def test_short_arms_over_the_ball(length):
    found = glb.Ball(2, 3.0).support(length * torch.tensor([[0.6, 0.8]], dtype=DOUBLE))
    assert float(found) == pytest.approx(3.0 * length, rel=1e-12)


# ---- rewards, flags, regions ---------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["native", "conic", "layer"])
@pytest.mark.parametrize(
    ("family", "reward"),
    [
        (glb.Bernoulli(), 7.0),
        (glb.Bernoulli(), -0.5),
        (glb.Poisson(), -1.0),
        (glb.Binomial(3), 1.5),
    ],
)
def test_rewards(family, reward, solver):
    X = torch.eye(2, dtype=DOUBLE)
    for w in (None, WEIGHTS[:2]):
        if w is not None and reward == 1.5:
            continue  # a merged row has the mean of its rewards
        loss = glb.NegativeLogLikelihood(family, X, number([1.0, reward]), w)
        made = glb.SublevelProgram(loss, glb.Ball(2, 3.0), 4.0)
        with pytest.raises(glb.InputError, match=f"^r: expected .*rewards of .*, got {reward}"):
            glb.support(made, ARMS, solver)
        if solver == "native":
            assert glb.support(made, ARMS, throw=False, validate=False).upper.shape == (2,)


@pytest.mark.parametrize("flag", ["no", 0, None])
def test_flags(flag):
    for solver in ("native", "conic", "layer"):
        with pytest.raises(glb.InputError, match="^throw: expected True or False"):
            glb.support(program(), ARMS, solver, throw=flag)
    with pytest.raises(glb.InputError, match="^validate: expected True or False"):
        glb.support(program(), ARMS, validate=flag)
    for name in ("throw", "validate"):
        with pytest.raises(glb.InputError, match=f"^{name}: expected True or False"):
            glb.constrained_mle(glb.Bernoulli(), rows(), glb.Ball(2, 3.0), **{name: flag})


@pytest.mark.parametrize("flag", [True, False])
def test_flags_are_no_numbers(flag):
    family, ball = glb.Bernoulli(), glb.Ball(2, 3.0)
    with pytest.raises(glb.InputError, match="^regularization: expected"):
        glb.constrained_mle(family, rows(), ball, regularization=flag)
    loss, zero = program().likelihood, torch.zeros(2, dtype=DOUBLE)
    with pytest.raises(glb.InputError, match="^level: expected"):
        glb.SublevelProgram(loss, ball, flag)
    with pytest.raises(glb.InputError, match="^level: expected"):
        glb.LikelihoodRatioSet(loss, ball, flag, zero)
    with pytest.raises(glb.InputError, match="^gamma: expected"):
        glb.EllipsoidSet(family, ball, zero, ARMS, flag)


@pytest.mark.parametrize("ridge", [-1.0, NAN, True, number(-1.0)])
def test_ridge_of_an_ellipsoid(ridge):
    made = program()
    found = glb.LikelihoodRatioSet(made.likelihood, made.domain, 8.0, [0.0, 0.0])
    with pytest.raises(glb.InputError, match="^regularization: expected"):
        found.ellipsoid(regularization=ridge)


def test_a_refutation_of_another_ball():
    made, zero = program(), [0.0, 0.0]
    for ball, delta, name in ((glb.Ball(3, 3.0), 0.05, "domain"), (made.domain, 2.0, "delta")):
        with pytest.raises(glb.InputError, match=f"^{name}: expected"):
            glb.radii.radius_refuted(made.likelihood, ball, zero, delta)
    assert not glb.radii.radius_refuted(made.likelihood, made.domain, zero, 0.05)


@pytest.mark.parametrize("count", [2**63, 10**30])
def test_steps_that_nobody_can_count(count):
    with pytest.raises(glb.InputError, match="^max_steps: expected an integer from 0 to 2"):
        glb.constrained_mle(glb.Bernoulli(), rows(), glb.Ball(2, 3.0), max_steps=count)
    with pytest.raises(glb.InputError, match="^max_steps: expected an integer from 0 to 2"):
        glb.support(program(), ARMS, max_steps=count)
    assert (glb.support(program(), ARMS, max_steps=2**63 - 1).status == 0).all()


def test_no_program_and_no_solver():
    for solver in ("native", "conic", "layer"):
        with pytest.raises(glb.InputError, match="^program: expected a SublevelProgram.*got Bern"):
            glb.support(glb.Bernoulli(), ARMS, solver)
    with pytest.raises(glb.InputError, match=r"^solver: .*the class Native \(write Native\(\)\)"):
        glb.support(program(), ARMS, glb.ucb.Native)


EYE = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("shape", [[1.0, 0.0], [0.0, -1.0]], "a positive definite matrix"),
        ("shape", [[1.0, 2.0], [0.0, 1.0]], "a symmetric matrix"),
        ("shape", [[NAN, 0.0], [0.0, 1.0]], "finite"),
        ("size", -1.0, "non-negative"),
        ("size", NAN, "non-negative"),
        ("curvature", -0.1, "non-negative finite"),
        ("curvature", math.inf, "non-negative finite"),
        ("center", [NAN, 0.0], "finite"),
        ("center", 0.0, "shape"),
    ],
)
def test_regions(part, value, message):
    given = dict(center=[0.0, 0.0], shape=EYE, size=1.0, curvature=0.1)
    glb.ucb.ConvexRegion(**given)
    with pytest.raises(glb.InputError, match=f"^{part}: expected {message}"):
        glb.ucb.ConvexRegion(**given | {part: value})
    for size in (0.0, math.inf):
        assert torch.equal(glb.ucb.ConvexRegion(**given | {"size": size}).size, number(size))


def test_a_region_of_another_kind():
    given = program()
    with pytest.raises(glb.InputError, match="^region: expected a ConvexRegion or None, got 'r'"):
        glb.SublevelProgram(given.likelihood, given.domain, 4.0, region="r")


def test_a_ball_that_does_not_fit_the_batch():
    with pytest.raises(glb.InputError, match="^domain: expected a radius that broadcasts"):
        glb.SublevelProgram(program().likelihood, glb.Ball(2, [1.0, 2.0]), 4.0)
