"""The compiled estimate against the torch one, fifty digits, plain Python, and itself in parts."""

from __future__ import annotations

from pathlib import Path

import mpmath
import pytest
import torch
from problems import random_problem, reference_families, uncompiled

import torchglb as glb
from torchglb.mle import minimize_likelihood
from torchglb.optim import Status, frank_wolfe_gap

FAMILIES = list(reference_families())
TESTS = Path(__file__).parent


def both(likelihood, domain, **options):
    """The compiled fit and the one in torch."""
    data = (likelihood.X, likelihood.r, likelihood.w)
    plain = glb.NegativeLogLikelihood(
        uncompiled(likelihood.family),
        *data,
        regularization=likelihood.regularization,
        tilt=likelihood.tilt,
    )
    assert likelihood.family.compiled() is not None
    assert plain.family.compiled() is None
    return tuple(minimize_likelihood(loss, domain, **options) for loss in (likelihood, plain))


def rows_of(family, batch, n, d, generator):
    X = torch.randn((*batch, n, d), generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    r = family.sample(2.0 * X[..., 0], generator)
    w = 3.0 * torch.rand((*batch, n), generator=generator, dtype=torch.float64)
    return X, r, w


@pytest.mark.parametrize("seed", range(0, 112, 2))
def test_random_problems(seed):
    """Of every kind and family, as in torch: within the sum of the gaps."""
    problem = random_problem(seed, most_rows=800, most_features=20)
    if problem.family.compiled() is None:
        pytest.skip("a custom family")
    likelihood = glb.NegativeLogLikelihood.of(problem.family, problem.rows)
    ours, other = both(likelihood, problem.domain, throw=False)
    assert ours.status == Status.CONVERGED
    size = 1.0 + abs(float(other.loss))
    # each is within its own gap of the minimum
    assert abs(float(ours.loss - other.loss)) <= float(ours.gap + other.gap) + 1e-12 * size
    assert float(torch.linalg.vector_norm(ours.theta)) <= problem.radius * (1 + 1e-15)
    at = likelihood.expand(ours.theta)
    torch.testing.assert_close(ours.loss, at.loss, rtol=1e-12, atol=1e-12 * size)
    steep = float(torch.diagonal(at.hessian).sum()) ** 0.5 * size**0.5
    torch.testing.assert_close(ours.gradient, at.gradient, rtol=1e-9, atol=1e-12 * (1 + steep))
    torch.testing.assert_close(ours.hessian, at.hessian, rtol=1e-9, atol=1e-12 * size)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("radius", [0.3, 8.0])
def test_weights_ridge_and_tilt(name, radius, generator):
    family = reference_families()[name].family
    if family.compiled() is None:
        pytest.skip("a custom family")
    X, r, w = rows_of(family, (2, 3), 70, 4, generator)
    tilt = 2.0 * torch.randn((2, 3, 4), generator=generator, dtype=torch.float64)
    ridge = torch.rand((2, 3), generator=generator, dtype=torch.float64)
    likelihood = glb.NegativeLogLikelihood(family, X, r, w, regularization=ridge, tilt=tilt)
    ours, other = both(likelihood, glb.Ball(4, radius), tol=1e-12, throw=False)
    torch.testing.assert_close(ours.theta, other.theta, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.loss, other.loss, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "poisson"])
@pytest.mark.parametrize("radius", [0.5, 6.0])
def test_one_feature_to_fifty_digits(name, radius, generator):
    family = {
        "bernoulli": glb.Bernoulli(),
        "gaussian": glb.Gaussian(0.5),
        "poisson": glb.Poisson(),
    }[name]
    X, r, w = rows_of(family, (), 40, 1, generator)
    fit = glb.constrained_mle(
        family, glb.Rows(X, r, w), glb.Ball(1, radius), tol=1e-14, throw=False
    )
    with mpmath.workdps(50):
        scale = mpmath.mpf(family.dispersion)
        terms = [
            (mpmath.mpf(a), mpmath.mpf(b), mpmath.mpf(c) / scale)
            for a, b, c in zip(X[:, 0].tolist(), r.tolist(), w.tolist(), strict=True)
        ]
        mean = {
            "bernoulli": lambda z: 1 / (1 + mpmath.exp(-z)),
            "gaussian": lambda z: z,
            "poisson": mpmath.exp,
        }[name]

        def slope(t):
            return mpmath.fsum(c * a * (mean(a * t) - b) for a, b, c in terms)

        S = mpmath.mpf(radius)
        if slope(S) <= 0:
            exact = S
        elif slope(-S) >= 0:
            exact = -S
        else:
            exact = mpmath.findroot(slope, (-S, S), solver="anderson", tol=1e-60)
        assert abs(float(fit.theta) - exact) <= 1e-13 * (1 + abs(exact))


def test_parts_of_a_batch_are_the_same_bit_by_bit(generator, monkeypatch):
    family = glb.Bernoulli()
    X, r, w = rows_of(family, (13,), 300, 5, generator)
    radius = 0.5 + 6.0 * torch.rand(13, generator=generator, dtype=torch.float64)

    def fit(index):
        rows = glb.Rows(X[index], r[index], w[index])
        return glb.constrained_mle(family, rows, glb.Ball(5, radius[index]))

    whole = fit(torch.arange(13))

    def assert_same(part, index):
        for name in ("theta", "loss", "gradient", "gap", "status", "num_steps", "hessian"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[index]), name

    order = torch.randperm(13, generator=generator)
    assert_same(fit(order), order)
    for index in (torch.arange(0, 13, 3), torch.arange(5)):
        assert_same(fit(index), index)
    for b in range(13):
        assert_same(fit(b), b)
    monkeypatch.setattr("torchglb.compiled_rows.BLOCK", 3 * 300 * 7)  # three problems at a time
    assert_same(fit(torch.arange(13)), torch.arange(13))
    spread = torch.empty((13, 400, 5), dtype=torch.float64)[:, :300]  # as a history keeps them
    spread.copy_(X)
    assert not spread.is_contiguous()
    moved = glb.constrained_mle(family, glb.Rows(spread, r, w), glb.Ball(5, radius))
    assert_same(moved, torch.arange(13))


def test_statuses(generator):
    family = glb.Bernoulli()
    X, r, w = rows_of(family, (5,), 50, 3, generator)
    X[1, 3, 0], r[2, 0], w[3, 7] = torch.nan, torch.nan, torch.inf
    ball = glb.Ball(3, 4.0)
    options = {"validate": False, "throw": False}
    fit = glb.constrained_mle(family, glb.Rows(X, r, w), ball, **options)
    assert fit.status.tolist() == [0, 2, 2, 2, 0]
    alone = glb.constrained_mle(family, glb.Rows(X[4], r[4], w[4]), ball)
    assert torch.equal(alone.theta, fit.theta[4])
    limited = glb.constrained_mle(family, glb.Rows(X, r, w), ball, max_steps=1, **options)
    assert limited.status.tolist() == [1, 2, 2, 2, 1]
    assert limited.num_steps.tolist() == [1, 0, 0, 0, 1]
    sharp = glb.constrained_mle(family, glb.Rows(X[0], r[0], w[0]), ball, tol=1e-30, throw=False)
    assert sharp.status == Status.INACCURATE
    with pytest.raises(glb.SolverError, match="NONFINITE"):
        glb.constrained_mle(family, glb.Rows(X, r, w), ball, validate=False)


@pytest.mark.parametrize("radius", [0.7, 3.0, 20.0])
def test_single_precision_is_a_storage_format(radius, generator):
    """The answer is that of the rounded rows in double precision, rounded into the ball."""
    family = glb.Bernoulli()
    rows = glb.Rows(*(t.float() for t in rows_of(family, (6,), 400, 5, generator)))
    wide = glb.Rows(*(t.double() for t in rows))
    S = torch.tensor(radius, dtype=torch.float32).double()
    narrow = glb.constrained_mle(family, rows, glb.Ball(5, radius), tol=1e-5)
    exact = glb.constrained_mle(family, wide, glb.Ball(5, float(S)), tol=1e-5)
    torch.testing.assert_close(narrow.theta, exact.theta.float(), rtol=1e-6, atol=1e-6)
    assert narrow.theta.dtype == narrow.gap.dtype == narrow.hessian.dtype == torch.float32
    theta = narrow.theta.double()
    assert bool((torch.linalg.vector_norm(theta, dim=-1) <= S).all())
    loss, gradient = glb.NegativeLogLikelihood(family, *wide).value_and_gradient(theta)
    gap = frank_wolfe_gap(theta, gradient, S.expand(6))
    assert bool((narrow.gap.double() >= gap * (1 - 1e-12)).all())
    assert bool((gap <= 1e-5 * (1 + loss)).all())


def test_no_rows_and_empty_batches():
    family = glb.Poisson()
    rows = glb.Rows(torch.zeros(2, 0, 3).double(), torch.zeros(2, 0).double())
    fit = glb.constrained_mle(family, rows, glb.Ball(3, 1.0))
    assert fit.theta.tolist() == [[0.0] * 3] * 2
    rows = glb.Rows(torch.zeros(0, 4, 3).double(), torch.zeros(0, 4).double())
    fit = glb.constrained_mle(family, rows, glb.Ball(3, 1.0))
    assert fit.theta.shape == (0, 3)
    assert fit.hessian.shape == (0, 3, 3)
