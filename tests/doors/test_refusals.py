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
