"""Minimisers over R^d: the distance that is certified bounds the true one, and choices are exact."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from torchglb import policies
from torchglb.carried.carried_minimum import CarriedMinimum
from torchglb.carried.free_minimum import FreeMinimum
from torchglb.carried.source import RowSource
from torchglb.domain import Ball
from torchglb.families import Bernoulli, Gaussian, GLMFamily, Poisson, QuasiBounded
from torchglb.inference.fits import minimum_in_ball, ridge_minimum
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import inverse_forms
from torchglb.policies.geometry import cholesky_change, farthest_point
from torchglb.rows.history import History
from torchglb.testing.policies import unit_arms

DTYPE = torch.float64


class Softplus(GLMFamily):
    """The logistic model as a user writes it: no compiled derivatives."""

    name = "softplus"
    reward_range = (0.0, 1.0)

    def log_partition(self, z):
        return torch.nn.functional.softplus(z)

    def self_concordance(self, radius):
        return 1.0

    def max_variance(self, radius):
        return 0.25

    def min_variance(self, radius):
        return float(Bernoulli().min_variance(radius))

    def sample(self, z, generator=None):
        return Bernoulli().sample(z, generator)


FAMILIES = (Bernoulli(), Gaussian(0.5), Poisson(), QuasiBounded("probit"), Softplus())
PROBLEMS = 4
BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)


def rows_for(family, rows: int, dim: int, seed: int = 0):
    """Rows of some problems, drawn at random parameters."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn((PROBLEMS, 1, dim), generator=generator, dtype=DTYPE)
    x = unit_arms(PROBLEMS, rows, dim, seed=seed)
    return x, family.sample((x * theta).sum(-1), generator)


def source_of(family, rows: int, dim: int) -> RowSource:
    history = History(dim, (PROBLEMS,), validate=False)
    history.append(*rows_for(family, rows, dim))
    return RowSource(family, history)


def exact(source: RowSource, ridge, tilt):
    X, r, w = source.history.rows()
    loss = NegativeLogLikelihood(
        source.family,
        X,
        r,
        w,
        regularization=torch.from_numpy(ridge),
        tilt=torch.from_numpy(tilt),
    )
    return ridge_minimum(loss, torch.zeros((PROBLEMS, X.shape[-1]), dtype=DTYPE))


@BY_NAME
@pytest.mark.parametrize("dim", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 4))])
def test_certified_distance_bounds_the_true_one(family, dim):
    generator, informative = np.random.default_rng(dim), []
    for rows in (5, 60, 600):
        source = source_of(family, rows, dim)
        minimum = FreeMinimum(source, Ball(dim, 12.0), points=3)
        ridge, zero = np.linspace(0.5, 3.0, PROBLEMS), np.zeros((PROBLEMS, dim))
        found, truth = minimum.find(ridge, zero, 1e-9, 1e-8), exact(source, ridge, zero)
        np.testing.assert_allclose(found.theta, truth.theta.numpy(), rtol=0, atol=1e-7)
        np.testing.assert_allclose(found.hessian, truth.hessian.numpy(), rtol=1e-6, atol=1e-6)
        assert (found.high >= truth.loss.numpy() - 1e-9).all()
        assert (found.high <= truth.loss.numpy() + 1e-8 + 1e-9 * truth.loss.abs().numpy()).all()
        for size in (0.1, 1.0, 3.0):
            noise = generator.normal(size=(PROBLEMS, dim, 1))
            tilt = size * (np.linalg.cholesky(found.hessian) @ noise)[..., 0]
            best = exact(source, ridge, tilt).theta.numpy()
            for tol in (0.1, 1e-4, 1e-9):
                near = minimum.copy().find(ridge, tilt, tol)
                away = np.linalg.norm(best - near.theta, axis=-1)
                assert (away <= near.length + 1e-8 * (1.0 + away)).all()
                known = np.isfinite(near.length)
                wished = tol * (1.0 + np.linalg.norm(near.theta, axis=-1))
                assert (near.length[known] <= 1.01 * wished[known] + 1e-8).all()
                informative.append(known.mean())
    assert np.mean(informative) > 0.9  # not by saying nothing


@BY_NAME
def test_the_best_arm_is_certain_when_a_search_ends_early(family):
    generator, source = np.random.default_rng(3), source_of(family, 300, 2)
    minimum = FreeMinimum(source, Ball(2, 40.0), points=16)
    ridge, saved = np.ones(PROBLEMS), 0
    for _ in range(60):
        tilt, arms = 5.0 * generator.normal(size=(PROBLEMS, 2)), unit_arms(PROBLEMS, 10, 2).numpy()
        found = minimum.find(ridge, tilt, 1e-9, np.inf, arms)
        scores = np.einsum("nkd,nd->nk", arms, exact(source, ridge, tilt).theta.numpy())
        chosen = np.take_along_axis(scores, found.leader[:, None], 1)[:, 0]
        assert (chosen >= scores.max(-1) - 1e-7).all()
        saved += int((found.length > 1e-6).sum())
    assert saved > 50 or family.derivative_ratio(3, 1.0) == 0.0  # mostly without all digits


def test_a_minimiser_outside_of_the_ball_of_constants_is_not_certain():
    minimum = FreeMinimum(source_of(Bernoulli(), 40, 2), Ball(2, 5.0))
    found = minimum.find(np.ones(PROBLEMS), np.full((PROBLEMS, 2), 40.0), 1e-9)
    assert np.isinf(found.length).all()


def test_a_hessian_is_as_good_as_is_said():
    """Also after a rough search, which may end where it only has an upper bound on it."""
    source, informative = source_of(Bernoulli(), 20, 1), 0
    for tilt in np.linspace(-2.0, 2.0, 21).repeat(PROBLEMS).reshape(-1, PROBLEMS, 1):
        minimum = FreeMinimum(source, Ball(1, 20.0), largest=2)
        for tol in (1.0, 0.3, 0.1):
            found = minimum.find(np.full(PROBLEMS, 0.1), tilt, tol)
            X, _, _ = source.history.rows()
            variance = Bernoulli().variance((X @ torch.from_numpy(found.theta)[..., None])[..., 0])
            true = (variance * X[..., 0] ** 2).sum(-1).numpy() + 0.1
            off = np.abs(found.hessian[:, 0, 0] / true - 1.0)
            assert (off <= found.hessian_error + 1e-9).all()
            informative += np.isfinite(found.hessian_error).sum()
    assert informative > 100  # not by saying nothing


def test_passes_become_rare():
    source = source_of(Bernoulli(), 200, 2)
    minimum = FreeMinimum(source, Ball(2, 60.0), points=64)
    generator, ridge = np.random.default_rng(0), np.ones(PROBLEMS)
    passes = []
    for _ in range(300):
        tilt = 8.0 * generator.normal(size=(PROBLEMS, 2))
        arms = unit_arms(PROBLEMS, 10, 2, seed=len(passes)).numpy()
        passes.append(minimum.find(ridge, tilt, 1e-8, np.inf, arms).passes.mean())
    first, last = np.mean(passes[:50]), np.mean(passes[-100:])
    assert first > 0.0
    assert last < 0.25 * first


@BY_NAME
@pytest.mark.parametrize("aggregate", [False, True])
def test_rows_are_carried_and_a_missed_row_is_made_up_for(family, aggregate):
    history = History(2, (PROBLEMS,), aggregate, validate=False)
    source = RowSource(family, history)
    minimum, ridge, tilt = (
        FreeMinimum(source, Ball(2, 30.0), 2),
        np.ones(PROBLEMS),
        np.zeros((PROBLEMS, 2)),
    )
    x, r = rows_for(family, 30, 2)
    for s in range(30):
        history.append(x[:, s], r[:, s])  # as if carrying it had been interrupted
        if s % 3:
            minimum.carried.append(
                source, x[:, s : s + 1].numpy(), r[:, s : s + 1].numpy(), np.ones((PROBLEMS, 1))
            )
        found = minimum.find(ridge, tilt, 1e-9).theta
        np.testing.assert_allclose(found, exact(source, ridge, tilt).theta, rtol=0, atol=1e-7)


@BY_NAME
def test_estimate_in_the_ball_with_its_hessian(family):
    for rows, radius in ((5, 1.0), (200, 0.4), (200, 20.0)):
        source = source_of(family, rows, 3)
        minimum, zero = CarriedMinimum(source, Ball(3, radius)), np.zeros((PROBLEMS, 3))
        found, model = minimum.estimate(np.ones(PROBLEMS), zero, 1e-11, 1e-9)
        given = {"theta": found.theta, "gradient": model.gradient, "hessian": model.hessian}
        X, r, w = source.history.rows()
        loss = NegativeLogLikelihood(family, X, r, w, regularization=1.0)
        truth = minimum_in_ball(loss, Ball(3, radius), torch.zeros((PROBLEMS, 3), dtype=DTYPE))
        for name, value in given.items():
            wanted = getattr(truth, name).numpy()
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=2e-5)
        at = loss.expand(torch.from_numpy(found.theta))
        np.testing.assert_allclose(model.hessian, at.hessian.numpy(), rtol=1e-7, atol=1e-8)
        assert (found.high >= at.loss.numpy() - 1e-9).all()


@BY_NAME
def test_an_imagined_row_counts_and_leaves_no_trace(family):
    source = source_of(family, 25, 2)
    minimum, ridge, zero = (
        CarriedMinimum(source, Ball(2, 3.0)),
        np.ones(PROBLEMS),
        np.zeros((PROBLEMS, 2)),
    )
    x, r = rows_for(family, 3, 2, seed=9)
    for s in range(3):
        row, w = x[:, s].contiguous().numpy(), np.full(PROBLEMS, 2.0)
        found = minimum.predict(row, 2.0 * r[:, s].numpy(), w, ridge, zero, 1e-12)
        other = copy.deepcopy(source.history)
        other.append(x[:, s], r[:, s], torch.full((PROBLEMS,), 2.0, dtype=DTYPE))
        fresh = CarriedMinimum(RowSource(family, other), Ball(2, 3.0))
        wanted, _ = fresh.estimate(ridge, zero, 1e-12, np.inf)
        np.testing.assert_allclose(found.theta, wanted.theta, rtol=0, atol=1e-6)
        fresh = CarriedMinimum(source, Ball(2, 3.0))
        fresh.carried.rebuild(source, minimum.carried.points)
        np.testing.assert_allclose(minimum.carried.memory, fresh.carried.memory, atol=1e-10)
        assert minimum.carried.rows == 25


@pytest.mark.parametrize("family", [Bernoulli(), Poisson()], ids=["bernoulli", "poisson"])
def test_choices_of_evill_are_those_of_its_exact_scores(family):
    generator = torch.Generator().manual_seed(5)
    radius = torch.tensor([1.0, 2.0, 4.0, 6.0], dtype=DTYPE)
    theta = unit_arms(4, 2, seed=3) * radius[:, None]
    policy = policies.make("evill", family=family, domain=Ball(2, radius), batch_shape=(4,))
    x = unit_arms(4, 400, 2, seed=4)
    policy.update(x, family.sample((x * theta[:, None]).sum(-1), generator))
    for t in range(60):
        arms = unit_arms(4, 20, 2, seed=100 + t)
        exact = policy.perturbed(policy.perturbation())
        scores = (arms @ exact[..., None])[..., 0]
        index = policy.select(arms)
        chosen = scores.gather(-1, index[:, None])[:, 0]
        assert bool((chosen >= scores.amax(-1) - 1e-8).all())
        row = arms.gather(-2, index[:, None, None].expand(4, 1, 2))
        policy.update(row, family.sample((row * theta[:, None]).sum(-1), generator))


@pytest.mark.parametrize("name", ["evill", "ts", "greedy", "ofuglb-e"])
def test_rough_estimates_choose_as_exact_ones_in_ten_dimensions(name):
    family, dim, batch = Bernoulli(), 10, 3
    generator = torch.Generator().manual_seed(7)
    theta = 2.0 * unit_arms(batch, dim, seed=3)
    policy = policies.make(name, family=family, domain=Ball(dim, 3.0), batch_shape=(batch,))
    assert policy._estimator.rough
    x = unit_arms(batch, 300, dim, seed=4)
    policy.update(x, family.sample((x * theta[:, None]).sum(-1), generator))
    roughly = 0
    for t in range(25):
        arms = unit_arms(batch, 12, dim, seed=200 + t)
        scores = policy.scores(arms)
        index = policy.select(arms)
        chosen = scores.gather(-1, index[:, None])[:, 0]
        assert bool((chosen >= scores.amax(-1) - 1e-7).all())
        roughly += int((policy._fit.doubt > 1e-7).sum())
        row = arms.gather(-2, index[:, None, None].expand(batch, 1, dim))
        policy.update(row, family.sample((row * theta[:, None]).sum(-1), generator))
        X, r, _ = policy._estimator.history.rows()
        ridge = 0.0 if name == "ofuglb-e" else 1.0
        loss = NegativeLogLikelihood(family, X, r, regularization=ridge)
        start = torch.zeros((batch, dim), dtype=DTYPE)
        if name == "ofuglb-e":
            truth = minimum_in_ball(loss, Ball(dim, 3.0), start)
            found = policy.confidence_set().center
        else:
            truth = ridge_minimum(loss, start)
            found = policy.fit().theta
        torch.testing.assert_close(found, truth.theta, rtol=0, atol=3e-6)
        rough = policy._fit
        if name != "greedy":  # distance and doubt of the rough one are certified
            away, probe = truth.theta - rough.theta, unit_arms(batch, 40, dim, seed=t)
            limit = rough.distance[:, None] * inverse_forms(probe, rough.hessian).sqrt()
            assert bool(((probe @ away[..., None])[..., 0].abs() <= limit + 3e-6).all())
            bend = loss.expand(truth.theta).hessian
            factor = torch.linalg.cholesky(rough.hessian)
            inner = torch.linalg.solve_triangular(factor, bend, upper=False)
            inner = torch.linalg.solve_triangular(factor, inner.mT, upper=False)
            spread = torch.linalg.eigvalsh(inner).log().abs().amax(-1)
            assert bool((spread <= rough.doubt + 1e-6).all())
            off = torch.linalg.cholesky(inner) - torch.eye(dim, dtype=DTYPE)
            change = cholesky_change(rough.doubt + 1e-6, dim)
            assert bool((torch.linalg.matrix_norm(off) <= change).all())
    assert roughly > 25  # not by being exact


@pytest.mark.parametrize("dim", [1, 2, 3, 6])
@pytest.mark.parametrize("centre", ["random", "zero", "on the short axis", "far"])
def test_farthest_point_of_an_ellipsoid(dim, centre, generator):
    count = 40
    root = torch.randn((count, dim, dim), generator=generator, dtype=DTYPE)
    W = root @ root.mT + 0.1 * torch.eye(dim, dtype=DTYPE)
    gamma = 0.5 + torch.rand(count, generator=generator, dtype=DTYPE)
    if centre == "on the short axis":  # no component along the long one: a sign is free
        c = torch.linalg.eigh(W).eigenvectors[..., -1] if dim > 1 else torch.zeros(count, 1)
        c = 0.05 * c.to(DTYPE)
    else:
        scale = {"random": 1.0, "zero": 0.0, "far": 50.0}[centre]
        c = scale * torch.randn((count, dim), generator=generator, dtype=DTYPE)
    theta = farthest_point(c, W, gamma)
    away = theta - c
    on = (away * (W @ away[..., None])[..., 0]).sum(-1)
    torch.testing.assert_close(on, gamma, rtol=1e-8, atol=1e-8)
    longest = torch.linalg.vector_norm(theta, dim=-1)
    x = torch.nn.functional.normalize(
        torch.randn((count, 4000, dim), generator=generator, dtype=DTYPE), dim=-1
    )
    index = (x @ c[..., None])[..., 0] + (gamma[:, None] * inverse_forms(x, W)).sqrt()
    assert bool((index <= longest[:, None] * (1 + 1e-9)).all())
    at = (theta / longest[:, None])[:, None]
    own = (at @ c[..., None])[..., 0] + (gamma[:, None] * inverse_forms(at, W)).sqrt()
    torch.testing.assert_close(own[:, 0], longest, rtol=1e-8, atol=1e-8)
