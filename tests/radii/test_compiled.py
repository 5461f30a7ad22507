"""The compiled radii: against torch, in any batch, as pure functions, and in plain Python."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

from torchglb import Ball, Bernoulli, Binomial, Gaussian, NegativeLogLikelihood, Poisson, radii
from torchglb.carried.kernels import carried_in
from torchglb.carried.monomials import monomials
from torchglb.estimate import Estimate
from torchglb.families import QuasiBounded
from torchglb.mle import minimize_likelihood
from torchglb.radii.base import as_level
from torchglb.radii.statistics import carried_statistics

FAMILIES = {
    "Bernoulli": Bernoulli(),
    "Binomial": Binomial(3),
    "Gaussian": Gaussian(0.5),
    "Poisson": Poisson(),
    "probit": QuasiBounded("probit"),
    "cloglog": QuasiBounded("cloglog"),
}
HELD = {"pac-bayes": radii.PACBayes(), "gaussian-prior": radii.GaussianPrior()}


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(family, n, d, generator, batch=(), size=1.0):
    X = torch.randn(*batch, n, d, dtype=torch.float64, generator=generator)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    X = X * torch.rand(*batch, n, 1, dtype=torch.float64, generator=generator).sqrt()
    return X, family.sample(size * X.sum(-1), generator)


def evaluate(radius, problem, state, X, r, w=None):
    loss = NegativeLogLikelihood(problem.family, X, r, w)
    fit = minimize_likelihood(loss, problem.domain, throw=False)
    return radius.evaluate(problem, state, loss, fit.estimate())


# ---- against torch -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("d", [1, 4])
def test_statistics(name, d, generator):
    family = FAMILIES[name]
    X, r = draw(family, 30, d, generator, (2,))
    w = torch.rand(2, 30, dtype=torch.float64, generator=generator)
    w[:, 3] = 0.0
    problem = radii.Problem(family, Ball(d, torch.tensor([0.5, 3.0]).double()), 0.05, (2,))
    empty = radii.empty_statistics(problem)
    expected = radii.update_statistics(problem, empty, X, r, w)
    found = radii.RowStatistics.of(carried_statistics(problem, empty.packed(), X, r, w), d)
    for field, mine, theirs in zip(expected._fields, found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13, msg=field)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", HELD)
def test_the_level_is_that_of_torch(kind, name, weighted, generator):
    """Both search all posteriors around exact centres."""
    family, d = FAMILIES[name], 3
    X, r = draw(family, 120, d, generator, (2,))
    w = torch.rand(2, 120, dtype=torch.float64, generator=generator) if weighted else None
    problem = radii.Problem(family, Ball(d, 2.0), 0.05, (2,))
    levels = []
    for increments in ("auto", "rows"):
        radius = dataclasses.replace(HELD[kind], increments=increments, tolerance=1e-9)
        state = radius.update(problem, radius.init(problem), X, r, w)
        assert ("posterior" in state) == (increments == "auto")
        levels.append(evaluate(radius, problem, state, X, r, w).level)
    torch.testing.assert_close(*levels, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", HELD)
def test_carried_sums_are_those_of_a_pass(kind, generator):
    family, d, radius, n = Bernoulli(), 3, HELD[kind], 90
    X, r = draw(family, n, d, generator)
    problem = radii.Problem(family, Ball(d, 2.0), 0.05)
    state = radius.init(problem)
    for t in range(n):
        state = radius.update(problem, state, X[t : t + 1], r[t : t + 1])
        loss = NegativeLogLikelihood(family, X[: t + 1], r[: t + 1])
        state = radius.levels(problem, state, lambda loss=loss: loss)[1]
    P, count = len(radius.centre_weights(problem)), monomials(d, 2).count
    carried = carried_in(state["posterior"].numpy()[d * d + 4 :], d, P + 1, count)
    points = torch.from_numpy(carried.points.T.copy())
    assert bool((points != 0.0).any(-1).all())  # every centre has moved
    expected = loss.expand(points)
    np.testing.assert_allclose(carried.sums[0], expected.loss.numpy(), rtol=1e-12)
    np.testing.assert_allclose(carried.sums[1 : 1 + d].T, expected.gradient, atol=1e-11)
    upper = torch.triu_indices(d, d)
    hessian = expected.hessian[:, upper[0], upper[1]]
    np.testing.assert_allclose(carried.sums[1 + d :].T, hessian.numpy(), atol=1e-11)
    assert carried.totals[2] == n


# ---- through time ------------------------------------------------------------------------------


def play(radius, family, S, X, r, batch):
    """Levels of all rounds, ``(n, *B)``, and the last state; every third round needs an estimate."""
    problem = radii.Problem(family, Ball(X.shape[-1], S), 0.05, batch)
    state, seen = radius.init(problem), []
    for t in range(X.shape[-2]):
        state = radius.update(problem, state, X[..., t : t + 1, :], r[..., t : t + 1])
        loss = NegativeLogLikelihood(family, X[..., : t + 1, :], r[..., : t + 1])
        if t % 3:
            levels, state = radius.levels(problem, state, lambda loss=loss: loss)
            level = as_level(problem, levels)
        else:
            known = Estimate.at(loss, problem.domain, torch.zeros_like(X[..., 0, :]))
            found = radius.evaluate(problem, state, loss, known)
            level, state = found.level, found.state
        seen.append(level)
    return torch.stack(seen), state


@pytest.mark.parametrize("name", ["Bernoulli", "probit", "Poisson"])
@pytest.mark.parametrize("kind", HELD)
def test_every_batch_gives_the_same_bits(kind, name, generator):
    family, radius, n = FAMILIES[name], HELD[kind], 40
    S = torch.tensor([0.5, 2.0, 3.0, 1.0], dtype=torch.float64)
    X, r = draw(family, n, 3, generator, (4,))
    whole, state = play(radius, family, S, X, r, (4,))
    turned, other = play(radius, family, S.flip(0), X.flip(0), r.flip(0), (4,))
    assert torch.equal(whole, turned.flip(1))
    assert all(torch.equal(state[key], other[key].flip(0)) for key in state)
    shape = (2, 2)
    square, _ = play(radius, family, S.view(shape), X.view(*shape, n, 3), r.view(*shape, n), shape)
    assert torch.equal(whole, square.reshape(n, 4))
    for b in range(4):
        alone, own = play(radius, family, float(S[b]), X[b], r[b], ())
        assert torch.equal(whole[:, b], alone)
        assert all(torch.equal(state[key][b], own[key]) for key in state)


@pytest.mark.parametrize("kind", [*HELD, "mixture"])
def test_questions_change_nothing_and_copies_continue(kind, generator):
    radius, family, d = radii.by_name(kind), Bernoulli(), 2
    X, r = draw(family, 60, d, generator, (2,))
    problem = radii.Problem(family, Ball(d, 2.0), 0.05, (2,))
    state = radius.update(problem, radius.init(problem), X[:, :40], r[:, :40])
    kept = {key: value.clone() for key, value in state.items()}
    found = [evaluate(radius, problem, state, X[:, :40], r[:, :40]) for _ in range(2)]
    assert torch.equal(found[0].level, found[1].level)
    assert all(torch.equal(state[key], kept[key]) for key in kept)
    file = io.BytesIO()
    torch.save(found[0].state, file)
    file.seek(0)
    made = (radius, problem, found[0].state)
    copies = [
        made,
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        (radius, problem, torch.load(file, weights_only=True)),
    ]
    levels = []
    for own, asked, carried in copies:
        later = own.update(asked, carried, X[:, 40:], r[:, 40:])
        levels.append(evaluate(own, asked, later, X, r).level)
    assert all(torch.equal(levels[0], level) for level in levels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_level_without_an_estimate(dtype, generator):
    """Above the floor of all posteriors, close to the level with an estimate, rows rarely read."""
    family, d, S, n = Bernoulli(), 2, 3.0, 150
    radius, lavish = radii.PACBayes(), radii.PACBayes(increments="rows", tolerance=1e-6)
    X, r = (t.to(dtype) for t in draw(family, n, d, generator, (3,), size=2.0))
    problem = radii.Problem(family, Ball(d, S), 0.05, (3,), dtype)
    state, asked, excess = radius.init(problem), 0, []
    best = lavish.init(problem)
    for t in range(n):
        rows = slice(t, t + 1)
        state = radius.update(problem, state, X[:, rows], r[:, rows])
        best = lavish.update(problem, best, X[:, rows], r[:, rows])
        loss = NegativeLogLikelihood(family, X[:, : t + 1], r[:, : t + 1])
        read = []
        levels, state = radius.levels(
            problem, state, lambda loss=loss, read=read: read.append(1) or loss
        )
        level = as_level(problem, levels)
        asked += len(read) * (t >= 50)
        assert level.dtype == dtype
        if t % 10 == 9:
            floor = radii.mixture_level(loss, problem.domain, 0.05, torch.zeros(3, d, dtype=dtype))
            fit = minimize_likelihood(loss, problem.domain, throw=False)
            with_all = lavish.evaluate(problem, best, loss, fit.estimate())
            assert bool((level.double() >= floor.double() - 0.02).all())
            if t >= 50:
                excess.append((level - with_all.level) / with_all.radius)
    assert asked < 60  # for three problems in a hundred rounds
    assert float(torch.stack(excess).mean()) < 0.01


def test_radii_of_sums_need_an_estimate():
    problem = radii.Problem(Bernoulli(), Ball(2, 1.0), 0.05)
    for name in ("mean-loss", "lipschitz"):
        radius = radii.by_name(name)
        assert radius.levels(problem, radius.init(problem), lambda: None) is None


@pytest.mark.parametrize("kind", HELD)
def test_a_posterior_of_unknown_numbers_gives_no_level(kind, generator):
    """Not even when rows were added to them since."""
    family, radius = Bernoulli(), HELD[kind]
    X, r = draw(family, 4, 2, generator)
    problem = radii.Problem(family, Ball(2, 2.0), 0.05)
    state = radius.update(problem, radius.init(problem), X, r)
    assert radius.levels(problem, state, lambda: NegativeLogLikelihood(family, X, r)) is not None
    unknown = state | {"posterior": torch.full_like(state["posterior"], torch.nan)}
    later = radius.update(problem, unknown, X, r)
    assert radius.levels(problem, later, lambda: None) is None


# ---- rows that torch records -------------------------------------------------------------------


@pytest.mark.parametrize("kind", HELD)
def test_recorded_rows_are_carried_too(kind, generator):
    radius, family = HELD[kind], Bernoulli()
    X, r = draw(family, 40, 2, generator)
    problem = radii.Problem(family, Ball(2, 2.0), 0.05)
    plain = radius.update(problem, radius.init(problem), X, r)
    recorded = radius.update(problem, radius.init(problem), X.clone().requires_grad_(), r)
    assert recorded["statistics"].requires_grad
    assert torch.equal(plain["posterior"], recorded["posterior"])


@pytest.mark.parametrize("kind", HELD)
def test_rows_under_a_transform(kind, generator):
    """The sums cannot be carried, and the level is found anew: same value, same derivative."""
    radius, family = HELD[kind], Bernoulli()
    X, r = draw(family, 30, 2, generator)
    problem = radii.Problem(family, Ball(2, 2.0), 0.05)

    def level(rows):
        state = radius.update(problem, radius.init(problem), rows, r)
        loss = NegativeLogLikelihood(family, rows, r)
        theta = torch.zeros(2, dtype=torch.float64)
        return radius.evaluate(problem, state, loss, Estimate.at(loss, problem.domain, theta)).level

    recorded = X.clone().requires_grad_()
    value = level(recorded)
    value.backward()
    gradient, found = torch.func.grad_and_value(level)(X)
    torch.testing.assert_close(found, value.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, recorded.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("radius", HELD.values(), ids=list(HELD))
def test_a_loss_that_stands_for_all_problems_is_read_as_such(radius, generator, monkeypatch):
    """Compiled code reads numbers in a row, which an expanded tensor does not have."""
    X, r = draw(Bernoulli(), 30, 2, generator)
    X, r = X.expand(3, 30, 2), r.expand(3, 30)
    problem = radii.Problem(Bernoulli(), Ball(2, 3.0), 0.05, batch_shape=(3,))
    state, loss = radius.update(problem, radius.init(problem), X, r), []
    search = type(radius)._search

    def watched(self, problem, state, likelihood, loss_hat, offers):
        loss.append(loss_hat)
        return search(self, problem, state, likelihood, loss_hat, offers)

    monkeypatch.setattr(type(radius), "_search", watched)
    likelihood, theta = NegativeLogLikelihood(Bernoulli(), X, r), X.new_zeros(3, 2)
    one = likelihood.value(theta)[:1].expand(3)
    radius.evaluate(problem, state, likelihood, Estimate(theta, one, one))
    assert loss[0].flags.c_contiguous
    assert loss[0].tolist() == one.tolist()
