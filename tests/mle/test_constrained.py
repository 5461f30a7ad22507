import itertools
import math
import sys

import numpy as np
import pytest
import torch
from problems import random_problem, reference_families, uncompiled
from torch.autograd import forward_ad

import torchglb as glb
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap, newton
from torchglb.optim.numbers import numbers
from torchglb.rows.sums import RowSums

BATCHES = [(), (1,), (3,), (2, 3)]
DTYPES = [torch.float32, torch.float64]
SOLVERS = ["newton", "lbfgs"]
FAMILIES = list(reference_families())

#: by torch's own forward mode
deprecated = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def data(batch, n, d, generator, family=None, weighted=True, dtype=torch.float64) -> glb.Rows:
    X = torch.randn((*batch, n, d), generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    r = (family or glb.Bernoulli()).sample(1.5 * X[..., 0], generator)
    w = 0.5 + torch.rand((*batch, n), generator=generator, dtype=torch.float64)
    return glb.Rows(X.to(dtype), r.to(dtype), w.to(dtype) if weighted else None)


def elements(batch):
    return itertools.product(*(range(k) for k in batch))


def assert_optimal(
    fit: glb.MLEResult, likelihood: glb.NegativeLogLikelihood, ball: glb.Ball, tol: float
):
    """Everything the result says is true."""
    loss, gradient, hessian = likelihood.expand(fit.theta)
    dtype = fit.theta.dtype
    close = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(fit.loss, loss, **close)
    torch.testing.assert_close(fit.gradient, gradient, **close)
    torch.testing.assert_close(fit.hessian, hessian, **close)
    radius = ball.radius_like(fit.theta).expand(fit.loss.shape)
    gap = frank_wolfe_gap(fit.theta, fit.gradient, radius)
    torch.testing.assert_close(fit.gap, gap, **close)
    assert (fit.gap <= tol * (1 + loss.abs())).all()
    assert (fit.status == Status.CONVERGED).all()
    assert ball.contains(fit.theta).all()


# ---- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_batch_equals_loop(batch, solver, dtype, generator):
    """Radii from deep inside to active, one per problem."""
    d, n = 4, 40
    rows = data(batch, n, d, generator, dtype=dtype)
    count = math.prod(batch)
    radius = torch.linspace(0.3, 6.0, max(count, 1), dtype=torch.float64).reshape(batch).to(dtype)
    ball, family = glb.Ball(d, radius), glb.Bernoulli()
    fit = glb.constrained_mle(family, rows, ball, solver=solver)
    shapes = [batch + (d,), batch, batch + (d,), batch + (d, d), batch, batch, batch]
    names = ("theta", "loss", "gradient", "hessian", "gap", "status", "num_steps")
    for value, shape in zip((getattr(fit, name) for name in names), shapes, strict=True):
        assert value.shape == shape
        assert value.dtype == (dtype if value.is_floating_point() else torch.int64)
    tol = 1e-9 if dtype == torch.float64 else 1e-4
    assert_optimal(fit, glb.NegativeLogLikelihood(family, *rows), ball, tol)
    for i in elements(batch):
        alone = glb.constrained_mle(
            family, glb.Rows(*(t[i] for t in rows)), glb.Ball(d, radius[i].item()), solver=solver
        )
        assert alone.status == fit.status[i]
        close = (
            {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
        )
        torch.testing.assert_close(alone.theta, fit.theta[i], **close)
        torch.testing.assert_close(alone.loss, fit.loss[i], **close)
        torch.testing.assert_close(alone.hessian, fit.hessian[i], **close)


@pytest.mark.parametrize("solver", SOLVERS)
def test_splitting_and_permuting_change_nothing(solver, generator):
    d, n, count = 3, 30, 10
    family = glb.Poisson()
    rows = data((count,), n, d, generator, family)
    radius = torch.linspace(0.1, 8.0, count, dtype=torch.float64)

    def fit(part):
        picked = glb.Rows(*(t[part] for t in rows))
        return glb.constrained_mle(family, picked, glb.Ball(d, radius[part]), solver=solver)

    whole = fit(slice(None))
    order = torch.randperm(count, generator=generator)
    for part in [order, slice(0, 1), slice(0, 4), slice(4, None)]:
        some = fit(part)
        assert torch.equal(some.num_steps, whole.num_steps[part])
        assert torch.equal(some.status, whole.status[part])
        # up to the rounding of batched matrix products
        for name in ("theta", "loss", "gradient", "hessian", "gap"):
            expected = getattr(whole, name)[part]
            torch.testing.assert_close(getattr(some, name), expected, rtol=1e-9, atol=1e-9)


def test_a_hard_companion_does_not_disturb(generator):
    """An element that fails leaves the others as they are alone."""
    family = glb.Bernoulli()
    rows = data((3,), 20, 2, generator, weighted=False)
    alone = glb.constrained_mle(family, rows, glb.Ball(2, 2.0))
    bad = glb.Rows(rows.X.clone(), rows.r)
    bad.X[1, 0, 0] = math.nan
    fit = glb.constrained_mle(family, bad, glb.Ball(2, 2.0), validate=False, throw=False)
    assert fit.status.tolist() == [0, int(Status.NONFINITE), 0]
    torch.testing.assert_close(fit.theta[[0, 2]], alone.theta[[0, 2]])
    with pytest.raises(glb.SolverError, match=r"constrained_mle: NONFINITE .*\(1,\)"):
        glb.constrained_mle(family, bad, glb.Ball(2, 2.0), validate=False)


# ---- special problems -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_no_data(name, batch):
    family = reference_families()[name].family
    fit = glb.constrained_mle(family, glb.History(3, batch), glb.Ball(3, 2.0))
    assert fit.theta.abs().max() == 0
    assert fit.gap.abs().max() == 0
    assert (fit.num_steps == 0).all()


def test_gaussian_inside_is_least_squares(generator):
    rows = data((), 50, 5, generator, glb.Gaussian(0.5), weighted=False)
    fit = glb.constrained_mle(glb.Gaussian(0.5), rows, glb.Ball(5, 100.0))
    expected = torch.linalg.lstsq(rows.X, rows.r[:, None]).solution[:, 0]
    torch.testing.assert_close(fit.theta, expected)
    assert fit.num_steps == 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_ridge_is_the_augmented_least_squares(solver, generator):
    rows = data((2,), 30, 4, generator, glb.Gaussian(0.5))
    ridge = torch.tensor([0.1, 3.0], dtype=torch.float64)
    family = glb.Gaussian(0.5)
    fit = glb.constrained_mle(family, rows, glb.Ball(4, 50.0), regularization=ridge, solver=solver)
    X, r, w = rows
    gram = X.mT @ (w[..., None] * X) / 0.25 + ridge[:, None, None] * torch.eye(4, dtype=X.dtype)
    expected = torch.linalg.solve(gram, (X.mT @ (w * r)[..., None])[..., 0] / 0.25)
    torch.testing.assert_close(fit.theta, expected, rtol=1e-6, atol=1e-8)
    one = glb.constrained_mle(family, rows, glb.Ball(4, 50.0), regularization=3.0, solver=solver)
    torch.testing.assert_close(one.theta[1], fit.theta[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_separable_data_end_on_the_sphere(solver):
    rows = glb.Rows(
        torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    )
    fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(2, 3.0), solver=solver)
    corner = 3.0 / math.sqrt(2.0)
    torch.testing.assert_close(fit.theta, torch.tensor([corner, -corner], dtype=torch.float64))


def test_rank_deficient_answer_has_no_part_in_the_kernel(generator):
    """Directions without information stay at zero: the answer does not wander."""
    rows = data((5,), 3, 6, generator, weighted=False)
    fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(6, 4.0), regularization=0.0)
    kernel = torch.linalg.svd(rows.X)[2][:, 3:]
    assert (kernel @ fit.theta[..., None]).abs().max() < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
def test_merged_history_has_the_same_estimate(solver, generator):
    arms = data((), 6, 3, generator).X
    histories = [glb.History(3, (2,), aggregate=a, family=glb.Bernoulli()) for a in (False, True)]
    for _ in range(60):
        x = arms[torch.randint(6, (2,), generator=generator)]
        r = glb.Bernoulli().sample(x.sum(-1), generator)
        for history in histories:
            history.append(x, r)
    plain, merged = (
        glb.constrained_mle(glb.Bernoulli(), h, glb.Ball(3, 3.0), solver=solver) for h in histories
    )
    torch.testing.assert_close(plain.theta, merged.theta, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(plain.loss, merged.loss)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_good_start_saves_steps(solver, generator):
    rows = data((4,), 60, 3, generator)
    ball = glb.Ball(3, torch.tensor([0.5, 1.0, 4.0, 8.0], dtype=torch.float64))

    def fit(start):
        # theta is as good as the square root of the gap
        return glb.constrained_mle(
            glb.Bernoulli(), rows, ball, solver=solver, start=start, tol=1e-12
        )

    cold = fit(None)
    warm = fit(cold.theta)
    assert (warm.num_steps == 0).all()
    torch.testing.assert_close(warm.theta, cold.theta)
    far = torch.full((4, 3), 1e3, dtype=torch.float64)  # projected first
    torch.testing.assert_close(fit(far).theta, cold.theta, rtol=0, atol=1e-5)
    assert torch.equal(far, torch.full_like(far, 1e3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_features_are_approached_by_gradients(dtype, generator, monkeypatch):
    """The Hessian is computed when asked for; the answer is that of Newton in torch."""
    d, n, count = 40, 500, 5
    rows = data((count,), n, d, generator, dtype=dtype)
    radius = torch.tensor([0.3, 1.0, 30.0, 30.0, 30.0], dtype=dtype)  # the ball holds the first two
    family, ball = glb.Bernoulli(), glb.Ball(d, radius)
    tol = 1e-11 if dtype == torch.float64 else 1e-4
    fit = glb.constrained_mle(family, rows, ball, tol=tol)
    assert_optimal(fit, glb.NegativeLogLikelihood(family, *rows), ball, tol)

    passes = []
    gram = RowSums._gram
    monkeypatch.setattr(RowSums, "_gram", lambda *a: passes.append(1) or gram(*a))
    inside = glb.Rows(*(t[2:] for t in rows))
    some = glb.constrained_mle(family, inside, glb.Ball(d, 30.0), tol=tol)
    assert not passes
    assert some.hessian is some.hessian
    assert len(passes) == 1
    assert torch.equal(some.theta, fit.theta[2:])
    assert torch.equal(some.num_steps, fit.num_steps[2:])
    alone = glb.constrained_mle(uncompiled(family), rows, ball, tol=tol)
    close = 1e-5 if dtype == torch.float64 else 2e-1
    torch.testing.assert_close(alone.theta, fit.theta, rtol=close, atol=close)


@pytest.mark.parametrize("name", list(reference_families()))
def test_an_approach_ends_where_newton_does(name, generator):
    """With weights, ridge, tilt and starts, for every family that is compiled."""
    family = reference_families()[name].family
    if family.compiled() is None:
        pytest.skip("a custom family")
    d = 33
    X = torch.randn((4, 300, d), generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    r = family.sample(X[..., 0], generator)
    w = 2.0 * torch.rand((4, 300), generator=generator, dtype=torch.float64)
    tilt = torch.randn((4, d), generator=generator, dtype=torch.float64)
    start = torch.randn((4, d), generator=generator, dtype=torch.float64)
    ball = glb.Ball(d, torch.tensor([0.5, 2.0, 9.0, 9.0], dtype=torch.float64))
    found = []
    for kind in (family, uncompiled(family)):
        loss = glb.NegativeLogLikelihood(kind, X, r, w, regularization=0.5, tilt=tilt)
        for begin in (None, start):
            fit = minimize_likelihood(loss, ball, start=begin, tol=1e-12)
            assert_optimal(fit, loss, ball, 1e-12)
            found.append(fit.theta)
    for theta in found[1:]:
        torch.testing.assert_close(theta, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (4,)])
def test_looking_back_saves_steps(batch, generator, monkeypatch):
    rows, family = data(batch, 200, 3, generator), uncompiled(glb.Bernoulli())
    steps = []
    for _ in range(2):
        fit = glb.constrained_mle(family, rows, glb.Ball(3, 10.0), tol=1e-12)
        steps.append(int(fit.num_steps.sum()))
        monkeypatch.setattr(
            sys.modules["torchglb.optim.newton"],
            "look_back",
            lambda g, H, s: numbers(0.0 * g.sum(-1)),
        )
    assert steps[0] < steps[1]


@pytest.mark.parametrize("radius", [10.0, 0.5])
def test_many_features_have_an_exact_hessian(radius, generator):
    """Inside, the approach starts from one in single precision; no trace of that is returned."""
    d, n = 40, 400
    rows = data((2,), n, d, generator)
    family, ball = glb.Bernoulli(), glb.Ball(d, radius)
    likelihood = glb.NegativeLogLikelihood(family, *rows)
    fit = glb.constrained_mle(family, rows, ball)
    assert_optimal(fit, likelihood, ball, 1e-9)
    warm = glb.constrained_mle(family, rows, ball, start=fit.theta)
    assert (warm.num_steps == 0).all()
    torch.testing.assert_close(warm.hessian, likelihood.expand(warm.theta).hessian)


def test_the_hessian_is_computed_when_asked_for(generator):
    rows, family = data((), 300, 30, generator), glb.Bernoulli()
    fit, late = (glb.constrained_mle(family, rows, glb.Ball(30, 40.0)) for _ in range(2))
    hessian = fit.hessian
    rows.X.mul_(0.5)
    assert fit.hessian is hessian
    with pytest.raises(glb.InputError, match="hessian: expected the rows as they were at the fit"):
        _ = late.hessian


def test_later_rows_leave_the_hessian_alone(generator):
    X, r, _ = data((), 2000, 10, generator)
    history = glb.History(10, family=glb.Bernoulli())
    history.append(X[:1500], r[:1500])
    fit = glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(10, 9.0))
    expected = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history).expand(fit.theta).hessian
    for k in range(1500, 2000):  # the buffers move on the way
        history.append(X[k], r[k])
    torch.testing.assert_close(fit.hessian, expected)


def test_a_hessian_of_a_detached_fit_is_detached(generator):
    rows = data((), 1000, 10, generator)
    rows.X.requires_grad_()
    with torch.no_grad():
        fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(10, 9.0))
    assert not fit.hessian.requires_grad
    fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(10, 9.0))
    assert fit.hessian.requires_grad


def test_tilted_likelihood(generator):
    rows = data((), 40, 3, generator)
    tilt = torch.randn(3, generator=generator, dtype=torch.float64)
    likelihood = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows, tilt=tilt, regularization=0.1)
    fit = minimize_likelihood(likelihood, glb.Ball(3, 5.0))
    assert_optimal(fit, likelihood, glb.Ball(3, 5.0), 1e-9)


def test_default_solver_goes_by_size(generator, monkeypatch):
    import torchglb.mle.constrained as module

    used = []
    for name in (*SOLVERS, "fit_bound"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, real=real, **k: used.append(name) or real(*a, **k)
        )
    for d in (3, 300):
        rows = data((), 10, d, generator)
        for family in (glb.Bernoulli(), uncompiled(glb.Bernoulli())):
            glb.constrained_mle(family, rows, glb.Ball(d, 1.0))
    assert used == ["fit_bound", "newton", "lbfgs", "lbfgs"]


def test_step_limit_and_throw(generator):
    rows = data((2,), 40, 3, generator)
    ball = glb.Ball(3, 5.0)
    fit = glb.constrained_mle(glb.Bernoulli(), rows, ball, max_steps=1, throw=False)
    assert fit.status.tolist() == [int(Status.MAX_STEPS)] * 2
    assert (fit.gap > 0).all()  # still a valid certificate
    best = glb.constrained_mle(glb.Bernoulli(), rows, ball)
    assert (fit.loss - fit.gap <= best.loss).all()
    with pytest.raises(glb.SolverError, match="MAX_STEPS"):
        glb.constrained_mle(glb.Bernoulli(), rows, ball, max_steps=1)


def test_tolerance_is_kept(generator):
    rows = data((), 40, 3, generator)
    loose, tight = (
        glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(3, 5.0), tol=tol)
        for tol in (1e-2, 1e-13)
    )
    assert loose.gap <= 1e-2 * (1 + loose.loss)
    assert tight.gap <= 1e-13 * (1 + tight.loss)
    assert loose.num_steps < tight.num_steps


@pytest.mark.parametrize("seed", range(0, 56, 3))
def test_float32_is_as_good_as_it_says(seed):
    """Against the float64 answer of the same rounded data."""
    single, double = (random_problem(seed, dtype) for dtype in DTYPES)
    exact = glb.Rows(*(None if t is None else t.double() for t in single.rows))
    best = glb.constrained_mle(double.family, exact, double.domain, validate=False)
    fit = glb.constrained_mle(single.family, single.rows, single.domain, throw=False)
    assert fit.theta.dtype == torch.float32
    assert single.domain.contains(fit.theta)
    assert fit.status in (Status.CONVERGED, Status.INACCURATE)
    assert fit.status == Status.CONVERGED or "poisson" in single.name
    loss = glb.NegativeLogLikelihood(double.family, *exact)(fit.theta.double())
    assert loss - best.loss <= 2e-4 * (1 + best.loss.abs())


# ---- derivatives ----------------------------------------------------------------------------------


def small(family, generator, n=7, d=3):
    X, r, w = data((2,), n, d, generator, family)
    return X, r, w, torch.tensor([0.3, 0.5], dtype=torch.float64)


def fit_of(family, tol=1e-13):
    """theta and loss as a function of features, rewards, weights, ridge and radius."""

    def fit(X, r, w, ridge, radius):
        result = glb.constrained_mle(
            family,
            glb.Rows(X, r, w),
            glb.Ball(X.shape[-1], radius),
            regularization=ridge,
            tol=tol,
            throw=False,
            validate=False,  # finite differences leave the support of the rewards
        )
        return result.theta, result.loss

    return fit


RADII = {"interior": (20.0, 30.0), "active": (0.3, 0.2), "mixed": (0.2, 20.0)}


def check_inputs(family, radii, generator):
    """Inputs for gradcheck, after making sure that the ball is active where it is meant to be."""
    inputs = (*small(family, generator, n=4, d=2), torch.tensor(radii, dtype=torch.float64))
    norm = torch.linalg.vector_norm(fit_of(family)(*inputs)[0], dim=-1)
    active = norm > inputs[-1] * (1 - 1e-6)
    assert active.tolist() == [radius < 1.0 for radius in radii]
    return tuple(t.requires_grad_() for t in inputs)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, "mixed", marks=pytest.mark.slow if name == "cloglog" else [])
        for name in FAMILIES
    ]
    + [("bernoulli", "interior"), ("bernoulli", "active")],
)
def test_gradcheck(name, where, generator):
    family = reference_families()[name].family
    inputs = check_inputs(family, RADII[where], generator)
    assert torch.autograd.gradcheck(fit_of(family), inputs)


@pytest.mark.parametrize(
    ("name", "where"), [("bernoulli", "interior"), ("bernoulli", "active"), ("poisson", "mixed")]
)
def test_gradgradcheck(name, where, generator):
    family = reference_families()[name].family
    inputs = check_inputs(family, RADII[where], generator)
    assert torch.autograd.gradgradcheck(fit_of(family), inputs)


def test_gradient_and_hessian_are_differentiable_too(generator):
    inputs = check_inputs(glb.Bernoulli(), RADII["mixed"], generator)

    def fit(X, r, w, ridge, radius):
        result = glb.constrained_mle(
            glb.Bernoulli(),
            glb.Rows(X, r, w),
            glb.Ball(2, radius),
            regularization=ridge,
            tol=1e-13,
            validate=False,
        )
        return result.gradient, result.hessian

    assert torch.autograd.gradcheck(fit, inputs)


def test_gradients_do_not_depend_on_the_solver(generator):
    inputs = check_inputs(glb.Bernoulli(), RADII["mixed"], generator)
    X, r, w, ridge, radius = inputs
    grads = []
    for solver in SOLVERS:
        fit = glb.constrained_mle(
            glb.Bernoulli(),
            glb.Rows(X, r, w),
            glb.Ball(2, radius),
            regularization=ridge,
            solver=solver,
        )
        grads.append(torch.autograd.grad(fit.theta.square().sum(), inputs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_third_derivatives(generator):
    """What two Newton steps give exactly: derivatives up to the third."""
    X, r, w, ridge = (t[0] for t in small(glb.Bernoulli(), generator, n=5, d=2))
    radius = torch.tensor(0.3, dtype=torch.float64)

    def theta(t):
        return fit_of(glb.Bernoulli())(X, r, t * w, ridge, radius)[0][0]

    one = torch.tensor(1.0, dtype=torch.float64)
    derivative = theta
    for _ in range(3):
        derivative = torch.func.grad(derivative)
    step = 1e-2

    def second(t):
        return torch.func.grad(torch.func.grad(theta))(t)

    difference = (second(one + step) - second(one - step)) / (2 * step)
    torch.testing.assert_close(derivative(one), difference, rtol=1e-3, atol=1e-6)


def test_gradients_through_a_history(generator):
    """Rows that require grad keep their graph through append and fit."""
    X, r, _, _ = (t[0] for t in small(glb.Bernoulli(), generator))
    X.requires_grad_()
    history = glb.History(3)
    history.append(X[:4], r[:4])
    history.append(X[4:], r[4:])
    fit = glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(3, 0.5))
    (through,) = torch.autograd.grad(fit.theta.sum(), X)
    direct = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(3, 0.5))
    (expected,) = torch.autograd.grad(direct.theta.sum(), X)
    torch.testing.assert_close(through, expected)


def test_transforms_see_through_a_history(generator):
    X, r, _, _ = (t[0] for t in small(glb.Bernoulli(), generator))

    def loss(r):
        history = glb.History(3, family=glb.Bernoulli())
        history.append(X, r)
        return glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(3, 0.5)).loss

    expected = torch.func.grad(
        lambda r: glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(3, 0.5)).loss
    )(r)
    torch.testing.assert_close(torch.func.grad(loss)(r), expected)


def test_loss_gradient_is_the_envelope(generator):
    X, r, w, ridge = small(glb.Bernoulli(), generator)
    r.requires_grad_()
    fit = glb.constrained_mle(
        glb.Bernoulli(), glb.Rows(X, r, w), glb.Ball(3, 0.5), regularization=ridge
    )
    (gradient,) = torch.autograd.grad(fit.loss.sum(), r)
    z = (X @ fit.theta.detach()[..., None])[..., 0]
    torch.testing.assert_close(gradient, -w * z, rtol=1e-6, atol=1e-8)


def test_values_do_not_depend_on_asking_for_gradients(generator):
    X, r, w, ridge = small(glb.Bernoulli(), generator)
    plain = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r, w), glb.Ball(3, 0.5))
    tracked = glb.constrained_mle(
        glb.Bernoulli(), glb.Rows(X.clone().requires_grad_(), r, w), glb.Ball(3, 0.5)
    )
    for name in ("theta", "loss", "gradient", "hessian"):
        torch.testing.assert_close(
            getattr(tracked, name).detach(), getattr(plain, name), rtol=1e-7, atol=1e-8
        )
    with torch.no_grad():
        quiet = glb.constrained_mle(
            glb.Bernoulli(), glb.Rows(X.clone().requires_grad_(), r, w), glb.Ball(3, 0.5)
        )
    assert not quiet.theta.requires_grad


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_rough_solve_still_knows_whether_the_ball_is_active(solver, generator):
    """The ball is active although a rough theta is not quite on the sphere; the polish lands there."""
    X, r, w, ridge = small(glb.Bernoulli(), generator)
    X.requires_grad_()
    radius = torch.tensor([0.3, 20.0], dtype=torch.float64)
    grads = []
    for tol in (1e-2, 1e-12):
        fit = glb.constrained_mle(
            glb.Bernoulli(),
            glb.Rows(X, r, w),
            glb.Ball(3, radius),
            regularization=ridge,
            solver=solver,
            tol=tol,
            throw=False,
        )
        assert fit.theta.norm(dim=-1)[0].item() == pytest.approx(0.3, rel=1e-4)
        grads.append(torch.autograd.grad(fit.theta.sum(), X)[0])
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


def test_float32_gradients_on_the_sphere(generator):
    X, r, w, ridge = small(glb.Bernoulli(), generator)
    radius = torch.tensor([0.3, 0.9], dtype=torch.float64)
    grads = []
    for dtype in DTYPES:
        inputs = [t.to(dtype).requires_grad_() for t in (X, r, w, ridge, radius)]
        theta, _ = fit_of(glb.Bernoulli(), tol=None)(*inputs)
        grads.append(torch.autograd.grad(theta.sum(), inputs))
    for single, double in zip(*grads, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


def test_no_derivative_where_theta_is_not_unique():
    X = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([0.6], dtype=torch.float64)
    with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
        glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(2, 5.0))
    # a ridge makes it so
    fit = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(2, 5.0), regularization=0.1)
    (gradient,) = torch.autograd.grad(fit.theta.sum(), X)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 3), (3, 5), (9, 12)])
def test_curvature_of_rounding_is_none(n, d, dtype):
    """Whether a pivot is exactly 0 or only nearly is chance; it must not decide."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
        X = X / (2 * torch.linalg.vector_norm(X, dim=-1, keepdim=True))
        r = 0.4 + 0.2 * torch.rand(n, generator=generator, dtype=torch.float64).to(dtype)
        rows = glb.Rows(X.requires_grad_(), r)
        with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
            glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(d, 9.0))
        slope = torch.func.jacrev(
            lambda X, r=r: (
                glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(d, 9.0)).theta
            )
        )(X.detach())
        assert bool(torch.isnan(slope).all())  # a transform cannot look: no number, no error


def test_a_fit_with_gradients_stays_in_the_ball():
    """Curvature below the solver's tolerance must not send the last Newton steps out of the ball."""
    X = torch.tensor([[0.8, 0.0], [0.8, 1e-5], [0.8, -1e-5]], dtype=torch.float64)
    r = torch.tensor([0.6, 0.6 + 5e-5, 0.6 - 5e-5], dtype=torch.float64)
    start = torch.tensor([math.log(1.5) / 0.8, 0.0], dtype=torch.float64)  # good enough
    ball, family = glb.Ball(2, 2.0), glb.Bernoulli()
    with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
        glb.constrained_mle(family, glb.Rows(X.requires_grad_(), r), ball, start=start)
    likelihood = glb.NegativeLogLikelihood(family, X, r)
    fit = minimize_likelihood(likelihood, ball, start=start, loss_only=True)
    theta = fit.theta.detach()
    assert float(torch.linalg.vector_norm(theta)) <= 2.0
    (slope,) = torch.autograd.grad(fit.loss, X)
    expected = (torch.sigmoid(X.detach() @ theta) - r)[:, None] * theta
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-12)


# ---- torch.func -----------------------------------------------------------------------------------


@pytest.fixture(params=["interior", "active"])
def function(request, generator):
    """theta as a function of the features of one problem."""
    X, r, w, ridge = (t[0] for t in small(glb.Bernoulli(), generator, n=5, d=2))
    radius = 20.0 if request.param == "interior" else 0.2

    def theta(X):
        return glb.constrained_mle(
            glb.Bernoulli(),
            glb.Rows(X, r, w),
            glb.Ball(2, radius),
            regularization=ridge,
            tol=1e-13,
        ).theta

    return theta, X


def finite_jacobian(function, x, step=1e-5):
    columns = []
    for k in range(x.numel()):
        shift = torch.zeros_like(x).reshape(-1)
        shift[k] = step
        shift = shift.reshape(x.shape)
        columns.append((function(x + shift) - function(x - shift)) / (2 * step))
    return torch.stack(columns, dim=-1).reshape(*columns[0].shape, *x.shape)


def test_vmap_equals_batch(generator):
    X, r, w = data((4,), 12, 3, generator)
    radius = torch.tensor([0.2, 0.5, 3.0, 9.0], dtype=torch.float64)
    family, tol = glb.Bernoulli(), 1e-13
    batched = glb.constrained_mle(family, glb.Rows(X, r, w), glb.Ball(3, radius), tol=tol)

    def fit(X, r, w, radius):
        ball = glb.Ball(3, 1.0).resized(radius)
        result = glb.constrained_mle(family, glb.Rows(X, r, w), ball, tol=tol)
        return result.theta, result.loss, result.gradient, result.hessian, result.status

    mapped = torch.vmap(fit)(X, r, w, radius)
    for got, name in zip(mapped, ("theta", "loss", "gradient", "hessian", "status"), strict=True):
        torch.testing.assert_close(got, getattr(batched, name), rtol=1e-7, atol=1e-7)
    # along another axis, some arguments shared, and nested
    shared = torch.vmap(lambda X: fit(X, r[0], w[0], radius[2])[0], in_dims=1)(X.movedim(0, 1))
    for k in range(4):
        alone = glb.constrained_mle(family, glb.Rows(X[k], r[0], w[0]), glb.Ball(3, 3.0), tol=tol)
        torch.testing.assert_close(shared[k], alone.theta, rtol=1e-7, atol=1e-7)
    nested = torch.vmap(torch.vmap(lambda X, r, w: fit(X, r, w, radius[1])[0]))(
        *(t.unflatten(0, (2, 2)) for t in (X, r, w))
    )
    expected = glb.constrained_mle(family, glb.Rows(X, r, w), glb.Ball(3, 0.5), tol=tol).theta
    torch.testing.assert_close(nested.flatten(0, 1), expected, rtol=1e-7, atol=1e-7)


def test_jacrev(function):
    theta, X = function
    jacobian = torch.func.jacrev(theta)(X)
    torch.testing.assert_close(jacobian, finite_jacobian(theta, X), rtol=1e-5, atol=1e-7)
    by_autograd = torch.autograd.functional.jacobian(theta, X)
    torch.testing.assert_close(jacobian, by_autograd, rtol=1e-9, atol=1e-10)


@deprecated
def test_jacfwd(function):
    theta, X = function
    torch.testing.assert_close(torch.func.jacfwd(theta)(X), torch.func.jacrev(theta)(X))


@deprecated
def test_second_derivatives(function):
    theta, X = function
    twice = torch.func.jacrev(torch.func.jacrev(theta))(X)
    torch.testing.assert_close(
        twice, finite_jacobian(torch.func.jacrev(theta), X), rtol=1e-4, atol=1e-6
    )
    mixed = torch.func.jacfwd(torch.func.jacrev(theta))(X)
    torch.testing.assert_close(mixed, twice, rtol=1e-7, atol=1e-8)


def test_grad_under_vmap(function):
    theta, X = function
    stacked = torch.stack([X, 0.9 * X, 0.8 * X])
    grads = torch.vmap(torch.func.grad(lambda X: theta(X).sum()))(stacked)
    for k in range(3):
        alone = torch.func.grad(lambda X: theta(X).sum())(stacked[k])
        torch.testing.assert_close(grads[k], alone, rtol=1e-8, atol=1e-9)


def test_jacobian_in_the_radius(generator):
    X, r, w, ridge = (t[0] for t in small(glb.Bernoulli(), generator))

    def theta(radius):
        return fit_of(glb.Bernoulli())(X, r, w, ridge, radius)[0]

    radius = torch.tensor(0.3, dtype=torch.float64)
    jacobian = torch.func.jacrev(theta)(radius)
    torch.testing.assert_close(jacobian, finite_jacobian(theta, radius), rtol=1e-6, atol=1e-8)
    inside = torch.tensor(50.0, dtype=torch.float64)
    assert torch.func.jacrev(theta)(inside).abs().max() == 0


# ---- bad input ------------------------------------------------------------------------------------

D = torch.float64
GOOD = glb.Rows(torch.eye(2, dtype=D), torch.tensor([1.0, 0.0], dtype=D))
BALL = glb.Ball(2, 1.0)
NAN, INF = math.nan, math.inf


def call(rows=GOOD, domain=BALL, family=None, **keywords):
    return glb.constrained_mle(family or glb.Bernoulli(), rows, domain, **keywords)


BAD = {
    "nan in X": ("X", lambda: call(glb.Rows(GOOD.X * NAN, GOOD.r))),
    "inf in X": ("X", lambda: call(glb.Rows(GOOD.X + INF, GOOD.r))),
    "shape of X": ("X", lambda: call(glb.Rows(GOOD.r, GOOD.r))),
    "complex X": ("X", lambda: call(glb.Rows(GOOD.X.cfloat(), GOOD.r))),
    "nan in r": ("r", lambda: call(glb.Rows(GOOD.X, GOOD.r * NAN))),
    "r outside the support": ("r", lambda: call(glb.Rows(GOOD.X, GOOD.r + 0.5))),
    "negative count": ("r", lambda: call(glb.Rows(GOOD.X, -GOOD.r), family=glb.Poisson())),
    "shape of r": ("r", lambda: call(glb.Rows(GOOD.X, GOOD.r[:1]))),
    "dtype of r": ("r", lambda: call(glb.Rows(GOOD.X.float(), GOOD.r + 1e-12))),
    "device of r": ("r", lambda: call(glb.Rows(GOOD.X, GOOD.r.to("meta")))),
    "negative weight": ("w", lambda: call(glb.Rows(GOOD.X, GOOD.r, GOOD.r - 1))),
    "nan weight": ("w", lambda: call(glb.Rows(GOOD.X, GOOD.r, GOOD.r * NAN))),
    "shape of w": ("w", lambda: call(glb.Rows(GOOD.X, GOOD.r, GOOD.X))),
    "S = 0": ("radius", lambda: call(domain=glb.Ball(2, 0.0))),
    "S < 0": ("radius", lambda: call(domain=glb.Ball(2, -1.0))),
    "S infinite": ("radius", lambda: call(domain=glb.Ball(2, INF))),
    "one S < 0": ("radius", lambda: call(domain=glb.Ball(2, torch.tensor([1.0, -1.0])))),
    "shape of S": ("radius", lambda: call(domain=glb.Ball(2, torch.ones(3, dtype=D)))),
    "device of S": ("radius", lambda: call(domain=BALL.resized(torch.ones((), device="meta")))),
    "dimension of the ball": ("domain", lambda: call(domain=glb.Ball(3, 1.0))),
    "not a ball": ("domain", lambda: call(domain=1.0)),
    "solver": ("solver", lambda: call(solver="adam")),
    "shape of start": ("start", lambda: call(start=torch.zeros(3, dtype=D))),
    "nan in start": ("start", lambda: call(start=torch.full((2,), NAN, dtype=D))),
    "word as start": ("start", lambda: call(start="zero")),
    "negative ridge": ("regularization", lambda: call(regularization=-1.0)),
    "nan ridge": ("regularization", lambda: call(regularization=NAN)),
    "negative ridge tensor": (
        "regularization",
        lambda: call(regularization=torch.tensor(-1.0, dtype=D)),
    ),
    "shape of ridge": ("regularization", lambda: call(regularization=torch.ones(3, dtype=D))),
    "dtype of ridge": ("regularization", lambda: call(regularization=torch.tensor(1.0 + 0.0j))),
    "tol": ("tol", lambda: call(tol=-1.0)),
    "nan tol": ("tol", lambda: call(tol=NAN)),
    "max_steps": ("max_steps", lambda: call(max_steps=-1)),
    "fractional max_steps": ("max_steps", lambda: call(max_steps=2.5)),
    "history": ("history", lambda: call(rows="rows")),
    "family": ("family", lambda: call(family="bernoulli")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    name, bad = BAD[case]
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+"):
        bad()


def test_unchecked_values(generator):
    """A history that checked its rows on arrival is not checked again; nor is anything on request."""
    history = glb.History(2, family=glb.Bernoulli())
    history.append(GOOD.X, GOOD.r)
    call(history)
    call(glb.Rows(GOOD.X, GOOD.r), validate=False)
    other = glb.History(2)  # rewards unchecked, so they are checked now
    other.append(GOOD.X, GOOD.r + 5)
    with pytest.raises(glb.InputError, match="^r: expected rewards of Bernoulli"):
        call(other)


# ---- every way of differentiating, through rows and through a history ----------------------------


@pytest.fixture
def rows_and_direction(generator):
    X = torch.nn.functional.normalize(torch.randn(30, 2, generator=generator, dtype=D), dim=-1)
    r = torch.bernoulli(torch.full((30,), 0.6, dtype=D), generator=generator)
    return 0.9 * X, r, 0.1 * torch.randn(30, 2, generator=generator, dtype=D)


@deprecated
@pytest.mark.parametrize("kept", ["rows", "history"])
@pytest.mark.parametrize("S", [0.5, 5.0], ids=["on the ball", "inside"])
def test_forward_mode_is_reverse_mode(rows_and_direction, kept, S):
    """Tangents pass through the history, by torch.func and by dual numbers alike."""
    X, r, V = rows_and_direction
    family = glb.Bernoulli()

    def fitted(X):
        data = glb.Rows(X, r)
        if kept == "history":
            data = glb.History(2, family=family)
            data.append(X[:10], r[:10])
            data.append(X[10:], r[10:])
        return glb.constrained_mle(family, data, glb.Ball(2, S), tol=1e-13).theta.sum()

    expected = (torch.func.grad(fitted)(X) * V).sum()
    assert expected.abs() > 1e-3
    torch.testing.assert_close(torch.func.jvp(fitted, (X,), (V,))[1], expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(fitted(forward_ad.make_dual(X, V))).tangent
    torch.testing.assert_close(found, expected)
    stacked = torch.stack([X, 0.5 * X])
    torch.testing.assert_close(
        torch.vmap(fitted)(stacked), torch.stack([fitted(X), fitted(0.5 * X)])
    )


# ---- wherever it starts -------------------------------------------------------------------------


def test_no_start_is_led_astray_by_a_long_first_step():
    """Five successes in six: from -1.48 the first step is so long that looking back leads up."""
    starts = torch.linspace(-6.0, 6.0, 4001, dtype=torch.float64)[:, None]
    X = torch.ones(len(starts), 6, 1, dtype=torch.float64)
    r = torch.ones(len(starts), 6, dtype=torch.float64)
    r[:, 0] = 0.0
    loss = NegativeLogLikelihood(glb.Bernoulli(), X, r)
    radius = torch.full((len(starts),), 6.0, dtype=torch.float64)
    compiled = minimize_likelihood(loss, glb.Ball(1, 6.0), start=starts, throw=False)
    arrays, _ = newton(loss.expand, starts, radius, tol=1e-9)
    for status, theta in ((compiled.status, compiled.theta), (arrays.status, arrays.point)):
        assert bool((status == Status.CONVERGED).all())
        np.testing.assert_allclose(theta, math.log(5.0), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "S"),
    [(glb.Bernoulli(), 4.0), (glb.QuasiBounded("probit"), 50.0), (glb.Binomial(8), 50.0)],
    ids=["bernoulli", "probit", "binomial"],
)
@pytest.mark.parametrize("d", [2, 4])
def test_warm_starts_end_where_cold_ones_do(family, S, d):
    """From the estimates of fewer rows, from their opposites, from anywhere on the sphere."""
    generator = torch.Generator().manual_seed(d)
    N, n, ball = 1500, 31, glb.Ball(d, S)

    def directions(*shape):
        x = torch.randn(*shape, d, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(x, dim=-1)

    X = directions(N, n) * 10.0 ** (
        -3 * torch.rand(N, n, 1, generator=generator, dtype=torch.float64)
    )
    z = (X * (1.2 * S * directions(N))[:, None]).sum(-1)
    r = family.sample(z.clamp(-30, 30), generator)
    loss = NegativeLogLikelihood(family, X, r)
    cold = minimize_likelihood(loss, ball)
    few = NegativeLogLikelihood(family, X[:, :27].contiguous(), r[:, :27].contiguous())
    for start in (minimize_likelihood(few, ball).theta, -cold.theta, S * directions(N)):
        warm = minimize_likelihood(loss, ball, start=start, throw=False)
        assert bool((warm.status == Status.CONVERGED).all())
        assert bool(((warm.loss - cold.loss).abs() <= 2e-9 * (1 + cold.loss)).all())
