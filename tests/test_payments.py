"""What bounds pay for rounding, one payment at a time: each errs to its side, and by little."""

from fractions import Fraction

import mpmath
import numba
import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.carried.free_minimum import FreeMinimum
from torchglb.carried.kernels import workspace
from torchglb.carried.monomials import monomials
from torchglb.carried.rounding import compensated
from torchglb.carried.source import RowSource
from torchglb.inference.tests import likelihood_ratio_test
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rows.sums import Errors, Expansion
from torchglb.ucb.bounds import certified_cut, value_at_least
from torchglb.ucb.kernels import cut_value, feasible_share

EPS = np.finfo(np.float64).eps


@numba.njit(error_model="numpy")  # without a cache, which would not see that a kernel has changed
def compiled_cut(x, normal, steep, offset, radius):
    return cut_value(x, normal, steep, offset, radius)


@numba.njit(error_model="numpy")
def compiled_share(loss, center_loss, level):
    return feasible_share(loss, center_loss, level)


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


@pytest.mark.parametrize("d", [1, 2, 20])
def test_a_compiled_cut_is_rounded_up(d):
    """``max <x, theta>`` over ball and half-space in fifty digits, where the cut passes inside."""
    rng, S = np.random.default_rng(0), 4.0
    seen = 0
    with mpmath.workdps(50):
        for _ in range(300):
            x, normal = rng.standard_normal(d), 3.0 * rng.standard_normal(d)
            x /= np.linalg.norm(x)
            offset = float(rng.uniform(-0.9, 0.9) * S * np.linalg.norm(normal))
            arm, by = (mpmath.matrix(v.tolist()) for v in (x, normal))
            steep = mpmath.norm(by)
            reach, along = offset / steep, (arm.T * by)[0] / steep
            if S * along <= reach:
                continue  # the ball decides
            seen += 1
            across = mpmath.sqrt(max(mpmath.norm(arm) ** 2 - along**2, mpmath.mpf(0)))
            exact = reach * along + mpmath.sqrt(S**2 - reach**2) * across
            shown = compiled_cut(x, normal, float(steep), offset, S)
            assert exact <= shown <= exact + 4 * (8 + d) * EPS * S
    assert seen > 100


def test_a_compiled_point_is_feasible_whatever_the_rounding():
    """On a chord along which the loss is linear, at the share that is said to be feasible."""
    rng = np.random.default_rng(0)
    for size in (1e-8, 1.0, 1e6):
        for center, level, loss in np.sort(size * rng.uniform(0.1, 1.0, (300, 3)), axis=1):
            share = compiled_share(loss, center, level)
            assert 0.0 <= share <= 1.0
            there = Fraction(center) + Fraction(share) * (Fraction(loss) - Fraction(center))
            assert there <= Fraction(level)
            assert float(there) >= level - 64 * EPS * level or share == 0.0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "family",
    [
        *(glb.Bernoulli(), glb.Binomial(1000, whole=False), glb.Gaussian(0.5), glb.Poisson()),
        *(glb.QuasiBounded("probit"), glb.QuasiBounded("cloglog")),
    ],
    ids=repr,
)
def test_an_expansion_pays_for_what_each_term_loses(family, share):
    """Also far out, where the loss is far below the numbers that it is computed from."""
    top = family.reward_range[1]
    r = torch.tensor([share * (top if np.isfinite(top) else 3.0)])
    for z in torch.linspace(-60.0, 60.0, 241):
        loss = NegativeLogLikelihood(family, torch.ones(1, 1), r)
        at, errors = loss.expand_with_errors(z[None])
        exact = NegativeLogLikelihood(family, torch.ones(1, 1).double(), r.double())
        off = abs(at.loss.double() - exact.value(z[None].double()))
        underflow = torch.finfo(torch.float32).tiny  # which nobody pays for
        assert float(off) <= float(errors.loss) + underflow, float(z)


def test_a_length_in_many_dimensions_is_paid_for():
    """Squares that are lost one by one beside a large one: the length comes out too small."""
    d, S = 1000, 3.0
    x = torch.full((d,), 7.4e-9, dtype=torch.float64)
    x[0] = 0.70711
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S))
    upper = program.argmax(x[None], level=1e3).upper[0]
    with mpmath.workdps(40):
        exact = S * mpmath.sqrt(sum(mpmath.mpf(entry) ** 2 for entry in x.tolist()))
        assert mpmath.mpf(float(upper)) >= exact
        assert mpmath.mpf(float(upper)) <= exact * (1 + 2 * d * EPS)


def test_slopes_that_cancel_are_paid_for_without_rewards():
    """Counts of 0: the gradient at the origin is the sum of the rows, 2^-54, and is rounded to 0."""
    family = glb.Poisson()
    history = glb.History(1, family=family)
    history.append([[1.0], [2.0**-54], [-1.0]], [0.0, 0.0, 0.0])
    source, ridge, tilt = RowSource(family, history), np.ones(1), np.zeros((1, 1))
    found = FreeMinimum(source, glb.Ball(1, 5.0)).find(ridge, tilt, 1e-12)
    minimiser = -(2.0**-54) / 3.0  # the Hessian is 2 + 1
    assert abs(found.theta[0, 0] - minimiser) <= found.length[0] <= 1e-12


class Counts(glb.Poisson):
    """Passes are made by torch."""

    def compiled(self):
        return None


def test_a_pass_by_torch_rounds_no_more_than_it_says():
    """Equal rows, whose roundings do not cancel."""
    n, x, r = 300_000, 0.1, 0.7
    family = Counts()
    history = glb.History(1, family=family)
    history.append(np.full((n, 1), x), np.full(n, r))
    table = monomials(1, 2)
    work = workspace(1, table.count)
    RowSource(family, history).pass_at(0, np.zeros(1), table, work)
    exact = n * Fraction(x) * Fraction(1.0 - r)
    assert abs(Fraction(float(work.sums[1])) - exact) <= compensated(1) * EPS * exact
