"""Newton's method on the optimality conditions, with the loss itself in the place of a model."""

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.arrays import quiet, solve
from torchglb.ucb import native_support
from torchglb.ucb.follow import follow

N, ROWS = 24, 60


def programs(d, S, beta, generator, family=None):
    """N programs, one arm each, and the exact answers."""
    family = family or glb.Bernoulli()
    draw = torch.randn(N, ROWS, d, generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(draw, dim=-1)
    truth = torch.randn(N, d, generator=generator, dtype=torch.float64)
    r = family.sample((X @ truth[..., None])[..., 0], generator)
    loss = glb.NegativeLogLikelihood(family, X, r)
    ball = glb.Ball(d, S)
    level = glb.constrained_mle(family, glb.Rows(X, r), ball).loss + beta
    arms = torch.randn(N, 1, d, generator=generator, dtype=torch.float64)
    program = glb.SublevelProgram(loss, ball, level)
    return loss, level, arms, native_support(program, arms, tol=1e-11, throw=False)


def followed(loss, level, arms, start, S):
    def expand(points):
        at = loss.expand(torch.from_numpy(points))
        return type(at)(*(t.numpy() for t in at))

    radius = np.full(N, S)
    with quiet():
        return follow(arms[:, 0].numpy(), start.numpy(), expand, level.numpy(), radius)


@pytest.mark.parametrize(
    ("d", "S", "beta", "case"),
    [
        (1, 4.0, 0.5, "level"),
        (2, 6.0, 0.5, "level"),
        (5, 8.0, 0.3, "level"),
        (2, 1.0, 3.0, "both"),
        (4, 1.2, 2.0, "both"),
        (1, 0.4, 50.0, "ball"),
        (3, 0.5, 80.0, "ball"),
    ],
)
def test_each_case_is_found(d, S, beta, case, generator):
    loss, level, arms, exact = programs(d, S, beta, generator)
    theta, weight = exact.theta[:, 0], exact.multiplier[:, 0]
    on_sphere = torch.linalg.vector_norm(theta, dim=-1) > S * (1 - 1e-7)
    cases = {"level": ~on_sphere, "ball": weight < 1e-9, "both": on_sphere & (weight > 1e-6)}
    mine = cases[case].numpy()
    assert mine.sum() >= 3
    away = torch.randn(N, d, generator=generator, dtype=torch.float64)
    found = followed(loss, level, arms, theta + 0.02 * away, S)
    assert found.settled[mine].all()
    np.testing.assert_allclose(found.point[mine], theta[mine], atol=1e-6)
    value = (found.point * arms[:, 0].numpy()).sum(-1)
    np.testing.assert_allclose(value[mine], exact.upper[:, 0][mine], atol=1e-9)
    np.testing.assert_allclose(found.weight[mine], weight[mine], rtol=1e-4, atol=1e-6)
    assert (np.linalg.norm(found.point, axis=-1) <= S).all()


@pytest.mark.parametrize("d", [1, 2, 4])
def test_whoever_has_settled_is_at_a_maximiser(d, generator):
    """From anywhere in the ball, if the loss is the true one: conditions that suffice."""
    loss, level, arms, exact = programs(d, 3.0, 1.0, generator)
    direction = torch.randn(N, d, generator=generator, dtype=torch.float64)
    length = torch.rand(N, 1, generator=generator, dtype=torch.float64)
    start = 3.0 * length * torch.nn.functional.normalize(direction, dim=-1)
    found = followed(loss, level, arms, start, 3.0)
    value = (found.point * arms[:, 0].numpy()).sum(-1)
    error = abs(value - exact.upper[:, 0].numpy())
    assert found.settled.sum() >= 2
    assert (error[found.settled] < 1e-8).all()


def test_companions_do_not_matter(generator):
    loss, level, arms, exact = programs(2, 2.0, 1.0, generator)
    start = exact.theta[:, 0] + 0.05 * torch.randn(N, 2, generator=generator, dtype=torch.float64)
    together = followed(loss, level, arms, start, 2.0)
    # a start and an arm without a direction: the conditions of these problems have no solution
    start[::2], arms[::2] = 0.0, 0.0
    apart = followed(loss, level, arms, start, 2.0)
    for mine, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(mine[1::2], other[1::2], rtol=1e-9, atol=1e-10)


def test_one_singular_matrix_harms_nobody():
    matrices = np.stack([np.eye(2), np.ones((2, 2)), np.diag([2.0, 4.0])])
    found = solve(matrices, np.ones((3, 2, 1)))
    np.testing.assert_allclose(found[[0, 2], :, 0], [[1.0, 1.0], [0.5, 0.25]])
