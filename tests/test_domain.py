import math

import pytest
import torch

import torchglb as glb

DTYPES = [torch.float32, torch.float64]
BATCHES = [(), (1,), (3,), (2, 3)]


def points(batch: tuple[int, ...], dim: int, dtype: torch.dtype, generator) -> torch.Tensor:
    """Some inside the unit ball, some outside."""
    return torch.randn((*batch, dim), generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_projection_is_the_nearest_point(batch, dim, dtype, generator):
    ball = glb.Ball(dim, 1.3)
    theta = points(batch, dim, dtype, generator)
    nearest = ball.project(theta)
    assert nearest.shape == theta.shape
    assert nearest.dtype == dtype
    assert ball.contains(nearest).all()
    assert ball.contains(nearest).shape == batch
    inside = ball.contains(theta, tolerance=0.0)
    assert torch.equal(nearest[inside], theta[inside])
    # no other point of the ball is nearer
    others = ball.project(points((200, *batch), dim, dtype, generator))
    distance = torch.linalg.vector_norm(theta - nearest, dim=-1)
    eps = torch.finfo(dtype).eps
    assert (distance <= torch.linalg.vector_norm(theta - others, dim=-1) + 8 * eps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_support_is_the_largest_inner_product(dtype, generator):
    ball = glb.Ball(3, 2.5)
    x = points((4,), 3, dtype, generator)
    support = ball.support(x)
    assert support.dtype == dtype
    attained = (ball.project(1e6 * x) * x).sum(-1)
    torch.testing.assert_close(support, attained)
    others = ball.project(3 * points((500, 4), 3, dtype, generator))
    assert ((others * x).sum(-1) <= support * (1 + 8 * torch.finfo(dtype).eps)).all()
    assert ball.support(torch.zeros(3, dtype=dtype)) == 0


def test_one_radius_per_problem(generator):
    radius = torch.tensor([[0.5, 1.0, 2.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
    ball = glb.Ball(4, radius)
    theta = 10 * points((2, 3), 4, torch.float64, generator)
    nearest = ball.project(theta)
    torch.testing.assert_close(torch.linalg.vector_norm(nearest, dim=-1), radius)
    for i in range(2):
        for j in range(3):
            alone = glb.Ball(4, radius[i, j].item())
            assert torch.equal(alone.project(theta[i, j]), nearest[i, j])
            assert torch.equal(alone.support(theta[i, j]), ball.support(theta)[i, j])
            assert math.isclose(alone.log_volume(), ball.log_volume()[i, j].item())
    assert ball.max_radius == 5.0


@pytest.mark.parametrize("dim", [1, 2, 3, 6, 50, 400])
@pytest.mark.parametrize("radius", [0.1, 1.0, 30.0])
def test_log_volume(dim, radius):
    # V_1 = 2 S, V_2 = pi S^2, V_d = V_{d-2} 2 pi S^2 / d
    log_volume = math.log(2 * radius) if dim % 2 else 0.0
    for k in range(3 if dim % 2 else 2, dim + 1, 2):
        log_volume += math.log(2 * math.pi * radius**2 / k)
    assert math.isclose(
        glb.Ball(dim, radius).log_volume(), log_volume, rel_tol=1e-12, abs_tol=1e-12
    )


def test_contains_allows_roundings_only():
    ball = glb.Ball(2, 1.0)
    on = torch.tensor([0.6, 0.8], dtype=torch.float64)
    assert ball.contains(on)
    assert ball.contains(on * (1 + 1e-15))
    assert not ball.contains(on * (1 + 1e-12))
    assert ball.contains(on * (1 + 1e-12), tolerance=1e-11)
    assert not ball.contains(torch.tensor([math.nan, 0.0]))


def test_gradients_of_the_projection(generator):
    ball = glb.Ball(3, 1.0)
    inside = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    outside = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ball.project, (inside,))
    assert torch.autograd.gradcheck(ball.project, (outside,))
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ball.project(zero).sum(), zero)
    assert torch.equal(gradient, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: glb.Ball(0, 1.0), "dim"),
        (lambda: glb.Ball(-3, 1.0), "dim"),
        (lambda: glb.Ball(2.0, 1.0), "dim"),
        (lambda: glb.Ball(True, 1.0), "dim"),
        (lambda: glb.Ball(2, 0.0), "radius"),
        (lambda: glb.Ball(2, -1.0), "radius"),
        (lambda: glb.Ball(2, math.nan), "radius"),
        (lambda: glb.Ball(2, math.inf), "radius"),
        (lambda: glb.Ball(2, "1"), "radius"),
        (lambda: glb.Ball(2, True), "radius"),
        (lambda: glb.Ball(2, torch.tensor([1.0, 0.0])), "radius"),
        (lambda: glb.Ball(2, torch.tensor([1.0, math.nan])), "radius"),
        (lambda: glb.Ball(2, torch.tensor([1, -2])), "radius"),
        (lambda: glb.Ball(2, 1.0).project(torch.zeros(3)), "theta"),
        (lambda: glb.Ball(2, 1.0).project(torch.tensor(1.0)), "theta"),
        (lambda: glb.Ball(2, 1.0).project(["a", "b"]), "theta"),
        (lambda: glb.Ball(2, 1.0).contains(torch.zeros(2, dtype=torch.complex64)), "theta"),
        (lambda: glb.Ball(2, 1.0).support(torch.zeros(4, 1)), "x"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+"):
        call()


def test_lists_and_whole_numbers_are_points_too():
    ball = glb.Ball(2, 1.0)
    assert ball.project([0.0, 2.0]).tolist() == [0.0, 1.0]
    assert bool(ball.contains(torch.zeros(2, dtype=torch.int64)))


def test_is_immutable():
    ball = glb.Ball(2, 1.0)
    with pytest.raises(AttributeError):
        ball.radius = 2.0


def test_a_constant_of_the_theory_is_that_of_each_radius():
    like = torch.zeros((), dtype=torch.float64)
    sizes = torch.tensor([[1.0, 2.0], [2.0, 5.0]], dtype=torch.float64)
    found = glb.Ball(2, sizes).constant(lambda S: S**2 + 1, like)
    assert torch.equal(found, sizes**2 + 1)
    alone = glb.Ball(2, 3.0).constant(lambda S: S**2 + 1, like)
    assert alone.shape == ()
    assert alone.item() == 10.0
