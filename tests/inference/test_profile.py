"""Profile-likelihood intervals against published ones, and against profiles by SciPy."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

import torchglb as glb
from torchglb.errors import InputError
from torchglb.inference import profile_interval


def budworms():
    """Tobacco budworms killed by six doses, of 20 males and 20 females each (Collett 1991).

    Columns: female, male, log2 of the dose.
    """
    dose = torch.arange(6, dtype=torch.float64).repeat(2)
    male = torch.tensor([1.0] * 6 + [0.0] * 6, dtype=torch.float64)
    dead = torch.tensor([1, 4, 9, 13, 18, 20, 0, 2, 6, 10, 12, 16], dtype=torch.float64)
    return glb.Rows(torch.stack([1 - male, male, dose], dim=-1), dead)


def profile_ends(loss, d, coordinate, start, quantile):
    """Where the profile of one coordinate crosses the level, by root finding; NumPy and SciPy."""
    best = scipy.optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-9})

    def excess(value):
        def inner(rest):
            return loss(np.insert(rest, coordinate, value))

        rest = np.delete(best.x, coordinate)
        found = scipy.optimize.minimize(inner, rest, method="BFGS", options={"gtol": 1e-9})
        return found.fun - best.fun - 0.5 * quantile

    centre = best.x[coordinate]
    return tuple(
        scipy.optimize.brentq(excess, *sorted((centre, centre + step)), xtol=1e-10)
        for step in (-3.0, 3.0)
    )


def logistic_loss(X, r, trials):
    return lambda theta: (trials * np.logaddexp(0.0, X @ theta) - r * (X @ theta)).sum()


def test_budworms_by_independent_profiles():
    rows = budworms()
    found = profile_interval(
        glb.Binomial(20), rows, torch.eye(3).double(), domain=glb.Ball(3, 50.0)
    )
    loss = logistic_loss(rows.X.numpy(), rows.r.numpy(), 20.0)
    quantile = scipy.stats.chi2.ppf(0.95, 1)
    for k in range(3):
        low, high = profile_ends(loss, 3, k, np.zeros(3), quantile)
        assert float(found.lower[k]) == pytest.approx(low, abs=1e-5)
        assert float(found.upper[k]) == pytest.approx(high, abs=1e-5)
    assert not bool(found.cut.any())


def test_budworms_as_published():
    """Venables and Ripley (2002), pages 190-192; R's confint gives 0.8228708 and 1.3390581.

    R interpolates the profile between a few points, which explains a difference of 2e-5.
    """
    found = profile_interval(
        glb.Binomial(20), budworms(), [0.0, 0.0, 1.0], domain=glb.Ball(3, 50.0)
    )
    assert float(found.lower) == pytest.approx(0.8228708, abs=3e-5)
    assert float(found.upper) == pytest.approx(1.3390581, abs=3e-5)


def test_binomial_proportion_has_the_closed_form():
    """14 of 20: p with 14 log(p/0.7) + 6 log((1-p)/0.3) = -chi2/2."""
    rows = glb.Rows(torch.ones(20, 1).double(), torch.tensor([1.0] * 14 + [0.0] * 6).double())
    found = profile_interval(glb.Bernoulli(), rows, [1.0], domain=glb.Ball(1, 20.0), scale="mean")

    def excess(p):
        drop = 14 * math.log(p / 0.7) + 6 * math.log((1 - p) / 0.3)
        return drop + scipy.stats.chi2.ppf(0.95, 1) / 2

    low = scipy.optimize.brentq(excess, 1e-9, 0.7, xtol=1e-14)
    high = scipy.optimize.brentq(excess, 0.7, 1 - 1e-9, xtol=1e-14)
    assert float(found.lower) == pytest.approx(low, abs=1e-7)
    assert float(found.upper) == pytest.approx(high, abs=1e-7)
    assert float(found.estimate) == pytest.approx(0.7, abs=1e-6)


def test_gaussian_profiles_are_those_of_least_squares(generator):
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64) / 2
    r = X @ torch.tensor([1.0, -0.5, 0.2]).double()
    r = r + 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    gram = torch.linalg.inv(X.T @ X)
    for joint, degrees in ((False, 1), (True, 3)):
        found = profile_interval(
            glb.Gaussian(0.3), glb.Rows(X, r), x, domain=glb.Ball(3, 100.0), joint=joint, alpha=0.1
        )
        root = math.sqrt(scipy.stats.chi2.ppf(0.9, degrees))
        half = 0.3 * root * ((x @ gram) * x).sum(-1).sqrt()
        middle = x @ gram @ (X.T @ r)
        torch.testing.assert_close(found.lower, middle - half, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.upper, middle + half, rtol=0, atol=1e-6)


def test_batches_are_loops(generator):
    X = torch.randn(2, 30, 2, generator=generator, dtype=torch.float64)
    r = (torch.rand(2, 30, generator=generator) < 0.4).double()
    x = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    ball = glb.Ball(2, 30.0)
    both = profile_interval(glb.Bernoulli(), glb.Rows(X, r), x, domain=ball)
    assert both.lower.shape == (2,)
    for b in range(2):
        one = profile_interval(glb.Bernoulli(), glb.Rows(X[b], r[b]), x[b], domain=ball)
        for part, whole in zip(one, both, strict=True):
            torch.testing.assert_close(part, whole[b], rtol=0, atol=1e-8)


def test_a_ball_that_ends_the_interval_is_named():
    rows = glb.Rows(torch.ones(5, 1).double(), torch.ones(5).double())
    found = profile_interval(glb.Bernoulli(), rows, [1.0], domain=glb.Ball(1, 8.0))
    assert bool(found.cut)
    assert float(found.upper) == pytest.approx(8.0)


def test_fixed_samples_only(generator):
    """As documented: after many looks theta* has been outside far more often than alpha."""
    R, n = 200, 400
    r = (torch.rand(R, n, generator=generator) < 0.5).double()
    missed = torch.zeros(R, dtype=torch.bool)
    fixed = 0
    for size in range(20, n + 1, 20):
        rows = glb.Rows(torch.ones(R, size, 1).double(), r[:, :size])
        found = profile_interval(
            glb.Bernoulli(), rows, torch.ones(R, 1).double(), domain=glb.Ball(1, 10.0)
        )
        outside = (found.lower > 0) | (found.upper < 0)
        missed |= outside
        fixed = int(outside.sum())
    assert scipy.stats.binomtest(fixed, R, 0.05, alternative="greater").pvalue >= 0.05
    assert scipy.stats.binomtest(int(missed.sum()), R, 0.05, alternative="greater").pvalue < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"scale": "log"}, "scale: expected one of"),
        ({"x": [1.0, 0.0]}, "x: expected shape"),
        ({"x": [math.nan, 0.0, 0.0]}, "x: expected finite"),
    ],
)
def test_bad_questions_are_refused(change, message):
    given = {"x": [1.0, 0.0, 0.0]} | change
    with pytest.raises(InputError, match=message):
        profile_interval(
            glb.Binomial(20), budworms(), given.pop("x"), domain=glb.Ball(3, 50.0), **given
        )
