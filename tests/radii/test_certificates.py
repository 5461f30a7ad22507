"""What mutation tests found unguarded: a certificate pays for an estimate that is not the minimum."""

import math

import mpmath
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from torchglb import (
    Ball,
    Bernoulli,
    Binomial,
    ConfidenceSequence,
    Gaussian,
    NegativeLogLikelihood,
    radii,
)
from torchglb.errors import InputError
from torchglb.radii.posterior.candidates import posterior_at
from torchglb.radii.posterior.curvature import curved_region
from torchglb.radii.posterior.gaussian import normal_prior, tempered
from torchglb.radii.theorems.theorem32 import lengths_in_inverse

F64 = torch.float64


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


def test_ellipsoids_pay_for_the_gap_of_their_center():
    """beta^2 = 3, S = 2, R = 1, lam = 0.1, |theta_hat| = 1, gap = 0.5, by hand."""
    printed = radii.theorem32(number(3.0), 2.0, 1.0, 0.1, gap=0.5)
    assert float(printed) == pytest.approx(6.0 * (1.6 + 3.0 + 0.5), rel=1e-15)
    X, hessian = torch.eye(2, dtype=F64), torch.eye(2, dtype=F64)
    quadratic = radii.theorem32_fixed_point(
        number(3.0), 2.0, 0.0, 0.1, number(1.0), X, hessian, gap=0.5
    )
    assert float(quadratic) == pytest.approx(2.0 * 3.5 + 0.1 * 9.0, rel=1e-12)


def test_a_quadratic_level_set_lies_in_the_ellipsoid_around_a_point_that_is_not_its_minimum():
    """L = |theta - p|^2/2 around c: the level set reaches to |c - p| + sqrt(|c - p|^2 + 2 beta^2)."""
    S, beta2 = 4.0, 0.01
    p, c = torch.tensor([0.3, 0.0], dtype=F64), torch.tensor([0.9, 0.0], dtype=F64)
    gradient = c - p
    gap = float(gradient @ c + S * gradient.norm())  # Frank-Wolfe
    gamma = radii.theorem32_fixed_point(
        number(beta2),
        S,
        0.0,
        0.0,
        c.norm(),
        torch.eye(2, dtype=F64),
        torch.eye(2, dtype=F64),
        gap=gap,
    )
    farthest = float(gradient.norm()) + (float(gradient.norm()) ** 2 + 2.0 * beta2) ** 0.5
    assert float(gamma) ** 0.5 >= farthest
    unpaid = radii.theorem32_fixed_point(
        number(beta2), S, 0.0, 0.0, c.norm(), torch.eye(2, dtype=F64), torch.eye(2, dtype=F64)
    )
    assert float(unpaid) ** 0.5 < farthest  # what the gap is for


def test_the_divergence_from_a_gaussian_prior_is_that_of_two_normal_laws():
    """Every term of it, the centre's too, against torch's own formula."""
    values = torch.tensor([0.5, 2.0, 7.0], dtype=F64)
    point = torch.tensor([0.3, -1.0, 2.0], dtype=F64)
    variance, temper = 1.7, 0.8
    prior = normal_prior(Gaussian(), number(variance))
    found, root = posterior_at(prior, point, torch.diag(values), tempered(number(temper)))
    precision = torch.diag(values / temper + 1.0 / variance)
    posterior = MultivariateNormal(point, precision_matrix=precision)
    given = MultivariateNormal(torch.zeros_like(point), variance * torch.eye(3, dtype=F64))
    assert float(found) == pytest.approx(float(kl_divergence(posterior, given)), abs=2e-10)
    cover = root.mT @ root
    torch.testing.assert_close(cover.inverse(), precision, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_in_an_inverse_pay_for_the_condition(dtype, generator):
    eps, d = torch.finfo(dtype).eps, 6
    for smallest in (1e3 * eps, 1e4 * eps, 1e-2):
        turn, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        values = torch.logspace(0.0, math.log10(smallest), d, dtype=torch.float64)
        matrix = ((turn * values) @ turn.mT).to(dtype)
        matrix = 0.5 * (matrix + matrix.mT)
        X = torch.randn(40, d, generator=generator, dtype=dtype)
        found = lengths_in_inverse(X, matrix)
        with mpmath.workdps(60):
            exact = mpmath.matrix(matrix.tolist()) ** -1
            rows = [mpmath.matrix(row) for row in X.tolist()]
            truth = [mpmath.sqrt((row.T * exact * row)[0]) for row in rows]
        assert all(
            mpmath.mpf(mine) >= (1 - 4 * eps) * other
            for mine, other in zip(found.tolist(), truth, strict=True)
        )
        assert bool((found <= 1.5 * torch.tensor([float(t) for t in truth])).all())


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_a_direction_that_no_row_has_spoils_no_other_in_float32(scale):
    """Of lam a factor in float32 would leave nothing; nor is a derivative NaN."""
    found = []
    for dtype in (torch.float32, F64):
        X = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
        S, R, lam, norm = (torch.tensor(t, dtype=dtype) for t in (5.0, 1.0, 8e-4, 1.0))
        beta2 = torch.tensor(20.0, dtype=dtype)
        gamma = radii.theorem32_fixed_point(beta2, S, R, lam, norm, X, scale * (X.mT @ X))
        (slope,) = torch.autograd.grad(gamma, X)
        assert bool(torch.isfinite(slope).all())
        found.append(gamma.detach().double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0.0)


def test_a_region_pays_for_the_rounding_of_its_hessian(generator):
    """For a Gaussian ``|v|^2`` is at most ``2 height`` in the exact Hessian, to which lam comes."""
    family, d, n, S = Gaussian(0.05), 3, 20_000, number(30.0)
    X = torch.randn(n, d, generator=generator, dtype=F64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    theta = torch.tensor([20.0, -10.0, 5.0], dtype=F64)
    loss = NegativeLogLikelihood(family, X, X @ theta)
    at = loss.expand(theta, in_blocks=True)
    height, zero = number(3.0), number(0.0)
    region = curved_region(loss, theta, at, height, zero, S, zero, F64)
    far, lam = S + theta.norm(), radii.regularization_for(S, zero)
    paid = loss.lost_in_hessian() * at.hessian.trace() * far**2
    assert float(paid) > 1e-4
    assert float(region.size) >= float(2.0 * height + lam * far**2 + paid)


TWO = Binomial(2)


class Twice(Bernoulli):
    """Two trials, by formulas of its own, in a class that inherits from that of one."""

    def __init__(self):
        super().__init__()
        self.reward_range = TWO.reward_range


for _name in (
    *("log_partition", "mean", "variance", "third_derivative", "derivative", "nll", "loss"),
    *("slope_and_curvature", "loss_terms", "loss_derivatives", "derivative_ratio"),
    *("self_concordance", "max_variance", "min_variance"),
):
    setattr(Twice, _name, lambda self, *given, _name=_name: getattr(TWO, _name)(*given))


def test_what_inherits_from_a_family_is_not_bounded_by_its_formulas():
    """Levels for one trial, of a loss that is that of two, were below the valid ones."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 2, generator=generator, dtype=F64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    r, levels = TWO.sample(X.sum(-1), generator), []
    for family in (TWO, Twice()):
        sequence = ConfidenceSequence(family, Ball(2, 3.0), 0.05, "pac-bayes")
        sequence.update(X, r)
        levels.append(float(sequence.current().level))
    assert levels[1] >= levels[0] - 1e-9  # its general constants are no sharper


def test_a_normal_prior_refuses_formulas_that_it_does_not_know():
    with pytest.raises(InputError, match="Twice"):
        ConfidenceSequence(Twice(), Ball(2, 3.0), 0.05, "gaussian-prior")
