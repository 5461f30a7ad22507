"""Minimisers over R^d: the distance that is certified bounds the true one, and choices are exact."""

from __future__ import annotations

import pytest
import torch
from policy_contract import unit_arms

from torchglb import policies
from torchglb.domain import Ball
from torchglb.families import Bernoulli, Gaussian, Poisson, QuasiBounded
from torchglb.history import History
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.linalg import inverse_forms
from torchglb.policies.free import FreeMinimum, Near
from torchglb.policies.parts import farthest_point, ridge_minimum
from torchglb.ucb.minimum import FlatHistory

DTYPE = torch.float64
FAMILIES = (Bernoulli(), Gaussian(0.5), Poisson(), QuasiBounded("probit"))
PROBLEMS = 6


def carried(family, rows: int, dim: int, seed: int = 0, aggregate: bool = False) -> FreeMinimum:
    """A minimum of so many problems, with rows drawn at a random parameter."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn((PROBLEMS, 1, dim), generator=generator, dtype=DTYPE)
    x = unit_arms(PROBLEMS, rows, dim, seed=seed)
    r = family.sample((x * theta).sum(-1), generator)
    history = History(dim, (PROBLEMS,), aggregate, validate=False)
    reach = torch.full((PROBLEMS,), 12.0, dtype=DTYPE)
    minimum = FreeMinimum(FlatHistory(family, history), Ball(dim, reach), reach, 1e-9)
    history.append(x, r)
    minimum.observe(x, r, torch.ones_like(r))
    return minimum


def reference(minimum: FreeMinimum, ridge, tilt):
    everyone = torch.arange(PROBLEMS)
    rows = minimum.data.rows(everyone)
    loss = NegativeLogLikelihood.of(minimum.data.family, rows, regularization=ridge, tilt=tilt)
    return ridge_minimum(loss, torch.zeros_like(tilt))


def assert_within(near: Near, exact) -> None:
    away = exact - near.theta
    local = (away * (near.metric @ away[..., None])[..., 0]).sum(-1).sqrt()
    slack = 1e-8  # the reference is no better
    assert bool((local <= near.distance + slack * local.add(1.0)).all())
    assert bool((torch.linalg.vector_norm(away, dim=-1) <= near.length + slack).all())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dim", [1, 2, 4])
def test_certified_distance_bounds_the_true_one(family, dim):
    informative = 0
    for rows in (5, 60, 600):
        minimum = carried(family, rows, dim)
        ridge = torch.linspace(0.5, 3.0, PROBLEMS, dtype=DTYPE)
        theta, hessian = minimum.settle(ridge, 1e-9, 1e-8)
        found = reference(minimum, ridge, torch.zeros_like(theta))
        torch.testing.assert_close(theta, found.theta, rtol=0, atol=1e-7)
        torch.testing.assert_close(hessian, found.hessian, rtol=1e-6, atol=1e-6)
        generator = torch.Generator().manual_seed(rows)
        for size in (0.1, 1.0, 3.0):
            noise = torch.randn((PROBLEMS, dim), generator=generator, dtype=DTYPE)
            tilt = size * (torch.linalg.cholesky(hessian) @ noise[..., None])[..., 0]
            exact = reference(minimum, ridge, tilt).theta
            start = theta + torch.linalg.solve(hessian, tilt)
            everyone = torch.arange(PROBLEMS)
            model = minimum.by_model(everyone, ridge, tilt, start - minimum._point)
            passed = minimum.by_pass(everyone, ridge, tilt, start)
            for near in (model, passed):
                assert_within(near, exact)
                informative += int((near.length < 0.05).sum())
            minimum.by_pass(everyone[1:3], ridge, tilt, start[1:3])  # some of the problems only
    assert informative > 30  # not by saying nothing


def test_a_model_without_a_bound_is_no_certificate():
    minimum = carried(Bernoulli(), 40, 2)
    ridge = torch.ones(PROBLEMS, dtype=DTYPE)
    minimum.settle(ridge, 1e-9, 1e-8)
    far = torch.full((PROBLEMS, 2), 40.0, dtype=DTYPE)  # its minimiser leaves the ball
    near = minimum.by_model(torch.arange(PROBLEMS), ridge, far, torch.zeros_like(far))
    assert bool(torch.isinf(near.length).all())
    found = minimum.tilted(ridge, far, torch.zeros_like(far), lambda n: n.length <= 1e-9)
    torch.testing.assert_close(found, reference(minimum, ridge, far).theta, rtol=0, atol=1e-6)


def test_tilted_makes_passes_only_for_those_who_need_them():
    minimum = carried(Bernoulli(), 2000, 2)
    ridge = torch.ones(PROBLEMS, dtype=DTYPE)
    theta, _ = minimum.settle(ridge, 1e-9, 1e-8)
    before = minimum.passes.clone()
    demanding = torch.tensor([True, False] * (PROBLEMS // 2))
    tilt = torch.full((PROBLEMS, 2), 20.0, dtype=DTYPE)

    def enough(near: Near):
        return torch.where(demanding, near.length <= 1e-10, near.length <= 0.3)

    found = minimum.tilted(ridge, tilt, theta, enough)
    assert torch.equal(minimum.passes - before > 0, demanding)
    exact = reference(minimum, ridge, tilt).theta
    torch.testing.assert_close(found[demanding], exact[demanding], rtol=0, atol=1e-8)
    assert bool((torch.linalg.vector_norm(found - exact, dim=-1) <= 0.3).all())


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
