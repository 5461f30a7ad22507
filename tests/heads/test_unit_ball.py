"""Features end up in the closed unit ball exactly, with finite gradients."""

import pytest
import torch

import torchglb as glb
from torchglb.heads import UnitBall
from torchglb.heads.unit_ball import MODES

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def exact_square(x: torch.Tensor) -> list[float]:
    """|x|^2 of each row in exact arithmetic, less 1."""
    from fractions import Fraction

    return [float(sum(Fraction(v) ** 2 for v in row) - 1) for row in x.tolist()]


@every_mode
@every_dtype
@pytest.mark.parametrize("dim", [1, 2, 3, 17, 640])
def test_the_norm_is_at_most_one_in_exact_arithmetic(mode, dtype, dim, generator):
    rows = 200 if dim < 100 else 20  # fractions are slow
    x = torch.randn(rows, dim, generator=generator, dtype=dtype)
    x = x * 10.0 ** torch.linspace(-8, 8, rows, dtype=dtype)[:, None]
    assert max(exact_square(UnitBall(mode)(x))) <= 0.0
    # just around the sphere is where rounding decides
    near = torch.nn.functional.normalize(x, dim=-1) * (
        1 + torch.linspace(-3, 3, rows, dtype=dtype)[:, None] * torch.finfo(dtype).eps
    )
    assert max(exact_square(UnitBall(mode)(near))) <= 0.0


@every_dtype
def test_values(dtype, generator):
    x = 3 * torch.randn(50, 4, generator=generator, dtype=dtype)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    tight = dict(rtol=64 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(UnitBall("clip")(x), x / norm.clamp_min(1.0), **tight)
    torch.testing.assert_close(UnitBall("normalize")(x), x / norm, **tight)
    torch.testing.assert_close(UnitBall("smooth")(x), x / (1 + norm**2).sqrt(), **tight)
    inside = 0.3 * x / norm
    assert torch.equal(UnitBall("clip")(inside), inside)


@every_mode
@every_dtype
def test_any_finite_size_is_safe(mode, dtype):
    numbers = torch.finfo(dtype)
    sizes = [0.0, numbers.tiny * numbers.eps, numbers.tiny, 1e-30, 1.0, 1e30, numbers.max]
    x = torch.tensor([[s, -s, 0.0] for s in sizes], dtype=dtype, requires_grad=True)
    y = UnitBall(mode)(x)
    assert bool(torch.isfinite(y).all())
    assert bool((y[4:].detach().norm(dim=-1) > 0.5).all())
    assert torch.equal(y[0], torch.zeros(3, dtype=dtype))
    y.sum().backward()
    assert bool(torch.isfinite(x.grad).all())


@every_mode
def test_gradients_of_both_orders(mode, generator):
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    x = (x * torch.tensor([0.1, 0.3, 1.0, 3.0, 30.0, 1e3])[:, None].double()).requires_grad_()
    assert torch.autograd.gradcheck(UnitBall(mode), (x,))
    assert torch.autograd.gradgradcheck(UnitBall(mode), (x,))


@every_mode
def test_batch_and_vmap(mode, generator):
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    ball = UnitBall(mode)
    assert torch.equal(torch.vmap(torch.vmap(ball))(x), ball(x))
    assert torch.equal(ball(x)[1, 2], ball(x[1, 2]))


@every_mode
def test_trouble_is_not_hidden(mode):
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not bool(torch.isfinite(UnitBall(mode)(torch.tensor([bad, 1.0]))).all())


def test_conversion_comes_before_the_scaling():
    x = torch.randn(100, 5)
    y = UnitBall("normalize", dtype=torch.float64)(x)
    assert y.dtype == torch.float64
    assert max(exact_square(y)) <= 0.0
    assert min(exact_square(y)) > -1e-13


def test_refusals():
    with pytest.raises(glb.InputError, match="mode: expected one of 'clip', 'normalize', 'smooth'"):
        UnitBall("squash")
    with pytest.raises(glb.InputError, match="dtype"):
        UnitBall(dtype=torch.int64)
    with pytest.raises(glb.InputError, match="x: expected dtype"):
        UnitBall()(torch.ones(3, dtype=torch.int64))
    with pytest.raises(glb.InputError, match=r"x: expected shape \(..., d\)"):
        UnitBall()(torch.tensor(1.0))
