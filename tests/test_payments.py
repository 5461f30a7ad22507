"""What bounds pay for rounding, one payment at a time: each errs to its side, and by little."""

from fractions import Fraction

import pytest
import torch

import torchglb as glb
from torchglb.inference.tests import likelihood_ratio_test
from torchglb.likelihood import Errors, Expansion, NegativeLogLikelihood
from torchglb.ucb.bounds import certified_cut, value_at_least


def exact_dot(a: torch.Tensor, b: torch.Tensor) -> Fraction:
    return sum(
        (Fraction(s) * Fraction(t) for s, t in zip(a.tolist(), b.tolist(), strict=True)),
        Fraction(0),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 20])
def test_values_are_rounded_down(dtype, d):
    """Also below the value of the point that is drawn back by some roundings into the ball."""
    torch.manual_seed(0)
    eps, S = torch.finfo(dtype).eps, torch.tensor(4.0, dtype=dtype)
    x = torch.randn(200, d, dtype=dtype)
    point = S * torch.nn.functional.normalize(x + 0.1 * torch.randn(200, d, dtype=dtype), dim=-1)
    value = value_at_least(x, point, S)
    for arm, end, shown in zip(x, point, value.tolist(), strict=True):
        exact = exact_dot(arm, end)
        least = exact - 4 * Fraction(eps) * abs(exact)
        assert Fraction(shown) <= least
        paid = (20 + d) * eps * 4.0 * float(torch.linalg.vector_norm(arm))
        assert shown >= float(exact) - paid


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("size", [1e-12, 1e-3])
def test_a_cut_pays_for_the_errors_of_loss_and_gradient(d, size):
    """A linear loss, evaluated too high, with a gradient that errs where it hurts most."""
    torch.manual_seed(0)
    S = torch.tensor(2.0).double()
    true = torch.randn(d).double()
    towards = torch.nn.functional.normalize(torch.randn(d).double(), dim=-1)
    theta, point = S * towards, -S * towards
    computed = true + size * towards
    level = true @ theta  # theta lies on the boundary of the set
    at = Expansion(true @ point + size, computed, torch.zeros(d, d).double())
    size = torch.tensor(size).double()
    offset, paid = certified_cut(point, at, Errors(size, size, size), level, S)
    assert float(computed @ theta) <= float(offset)
    assert float(paid) == pytest.approx(5.0 * float(size), rel=1e-2)  # 1 + 2 S


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_log_of_an_e_value_is_rounded_down(dtype):
    """Without rows the least loss is 0, and E is exp(-evidence): no more than that is claimed."""
    evidence = torch.tensor([0.1, 1.0 / 3.0, 7.7, 1e6], dtype=dtype)
    none = NegativeLogLikelihood(
        glb.Bernoulli(), torch.zeros(4, 0, 2, dtype=dtype), torch.zeros(4, 0, dtype=dtype)
    )
    found = likelihood_ratio_test(
        none, glb.Ball(2, 3.0), evidence, [1.0, 0.0], 0.5, theta_hat=torch.zeros(4, 2, dtype=dtype)
    )
    assert bool((found.log_e <= -evidence).all())
    torch.testing.assert_close(found.log_e, -evidence, rtol=1e-5, atol=0.0)
