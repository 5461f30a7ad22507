"""One contract for every family; a new family inherits all of it by saying what is exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp
from problems import custom_family, draw_signs, pseudo_huber

import torchglb as glb
from torchglb.testing.families import FamilyContract, assert_exact


@pytest.fixture(autouse=True)
def high_precision():
    with mp.workdps(350):  # 1 - e^-700 is not 1
        yield


def logistic(trials: int) -> Callable[[int], Callable[[mpmath.mpf], mpmath.mpf]]:
    """Derivatives of ``N log(1 + e^z)``: from order 1 on, polynomials q(p) with q -> q' p (1 - p)."""

    def exact(order):
        if order == 0:
            return lambda z: (
                trials * mp.log1p(mp.exp(z)) if z < 0 else trials * (z + mp.log1p(mp.exp(-z)))
            )
        q = [mp.mpf(0), mp.mpf(1)]
        for _ in range(order - 1):
            slope = [k * c for k, c in enumerate(q)][1:]
            low, high = [0, *slope, 0], [0, 0, *slope]
            q = [a - b for a, b in zip(low, high, strict=True)]

        def value(z):
            return trials * mp.polyval(q[::-1], 1 / (1 + mp.exp(-z)))

        return value

    return exact


class TestBernoulli(FamilyContract):
    good_rewards = [0.0, 1.0, 0.3]
    bad_rewards = [-0.1, 1.0001, 2.0]
    highest_order = 8

    def make(self):
        return glb.Bernoulli()

    def exact(self, order):
        return logistic(1)(order)

    def assert_loss(self, got, z, exact, slope):
        # no cancellation: a success at z = 700 costs e^-700
        assert_exact(got, z, exact, slope)

    def test_slopes_keep_their_tails(self, family):
        z = torch.tensor([300.0, 700.0], dtype=torch.float64)
        success, failure = torch.ones_like(z), torch.zeros_like(z)
        torch.testing.assert_close(family.loss_terms(z, success).slope, -torch.exp(-z))
        torch.testing.assert_close(family.loss_terms(-z, failure).slope, torch.exp(-z))
        torch.testing.assert_close(family.loss_terms(z, success).curvature, torch.exp(-z))

    def test_self_concordance_is_exact(self, family):
        assert family.self_concordance(3.0) == math.tanh(1.5)


class TestBinomial(TestBernoulli):
    good_rewards = [0.0, 5.0, 1.0, 2.0]
    bad_rewards = [-0.1, 5.1, 2.5]

    def make(self):
        return glb.Binomial(5)

    def test_shares_of_trials_are_taken_where_asked(self):
        glb.Binomial(5, whole=False).check_rewards(torch.tensor([0.0, 2.5, 5.0]))
        glb.Binomial(1).check_rewards(torch.tensor([0.0, 0.5, 1.0]))

    def test_merged_rows_have_means_for_rewards(self):
        history = glb.History(2, aggregate=True)
        history.append([[1.0, 0.0], [1.0, 0.0]], [2.0, 5.0])
        fit = glb.constrained_mle(glb.Binomial(5), history, glb.Ball(2, 3.0))
        torch.testing.assert_close(5 * torch.sigmoid(fit.theta[0]), torch.tensor(3.5).double())
        merged = glb.Rows(*history.rows())
        with pytest.raises(glb.InputError, match="whole-number rewards of Binomial, got 3.5"):
            glb.constrained_mle(glb.Binomial(5), merged._replace(w=None), glb.Ball(2, 3.0))

    def exact(self, order):
        return logistic(5)(order)

    def test_slopes_keep_their_tails(self, family):
        z = torch.tensor([700.0], dtype=torch.float64)
        r = torch.full_like(z, 5.0)
        torch.testing.assert_close(family.loss_terms(z, r).slope, -5 * torch.exp(-z))

    @pytest.mark.parametrize("trials", [0, -1, 2.0, True, "3"])
    def test_trials_are_checked(self, trials):
        with pytest.raises(glb.InputError, match="trials: expected .* got"):
            glb.Binomial(trials)


class TestGaussian(FamilyContract):
    good_rewards = [0.0, -3.5, 1e3]
    bad_rewards = []

    def make(self):
        return glb.Gaussian(0.5)

    def exact(self, order):
        return (
            [lambda z: z * z / 2, lambda z: z, lambda z: mp.mpf(1)][order]
            if order < 3
            else (lambda z: mp.mpf(0))
        )

    def test_dispersion(self, family):
        assert family.dispersion == 0.25

    @pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan, "1", True])
    def test_sigma_is_checked(self, sigma):
        with pytest.raises(glb.InputError, match="sigma: expected .* got"):
            glb.Gaussian(sigma)


class TestPoisson(FamilyContract):
    good_rewards = [0.0, 1.0, 17.0, 0.5]
    bad_rewards = [-1.0, -1e-9]
    highest_order = 8

    def make(self):
        return glb.Poisson()

    def exact(self, order):
        return mp.exp


class QuasiContract(FamilyContract):
    good_rewards = [0.0, 1.0, 0.25]
    bad_rewards = [-0.5, 1.5]

    def assert_variance(self, variance, declared, error):
        # rewards are bounded, not exactly dispersed: g mu-dot dominates their variance
        assert (variance <= declared + error).all()

    def test_dispersion_is_the_least_that_dominates(self, family):
        ratio = []
        for k in range(-400, 101):
            mean, variance = (self.exact(order)(mp.mpf(k) / 20) for order in (1, 2))
            ratio.append(mean * (1 - mean) / variance if variance > 1e-300 else 0)
        assert max(ratio) <= family.dispersion * (1 + 1e-15)
        assert max(ratio) >= family.dispersion * (1 - 1e-8)


class TestProbit(QuasiContract):
    def make(self):
        return glb.QuasiBounded("probit")

    def exact(self, order):
        return [
            lambda z: z * mp.ncdf(z) + mp.npdf(z),
            mp.ncdf,
            mp.npdf,
            lambda z: -z * mp.npdf(z),
            lambda z: (z * z - 1) * mp.npdf(z),
        ][order]

    def test_dispersion_is_that_of_the_text(self, family):
        assert abs(family.dispersion - 0.6267) < 5e-5


class TestCloglog(QuasiContract):
    def make(self):
        return glb.QuasiBounded("cloglog")

    def exact(self, order):
        def m(z):
            v = mp.exp(z)
            if z < 1:  # the series of Ein
                return mp.nsum(lambda k: -((-v) ** k) / (k * mp.factorial(k)), [1, 80])
            return mp.e1(v) + z + mp.euler

        return [
            m,
            lambda z: -mp.expm1(-mp.exp(z)),
            lambda z: mp.exp(z - mp.exp(z)),
            lambda z: -mp.expm1(z) * mp.exp(z - mp.exp(z)),
            lambda z: (1 - 3 * mp.exp(z) + mp.exp(2 * z)) * mp.exp(z - mp.exp(z)),
        ][order]


class DifferentiatedContract(FamilyContract):
    """Families that only say what m is: precise against the largest value, not in every tail."""

    def assert_derivative(self, got, z, order):
        exact = torch.tensor(
            [float(self.exact(order)(mp.mpf(v))) for v in z.tolist()], dtype=z.dtype
        )
        tolerance = 8 * torch.finfo(z.dtype).eps * float(exact.abs().max())
        torch.testing.assert_close(got, exact, rtol=0, atol=tolerance)


class TestCustom(DifferentiatedContract):
    """Everything but m is differentiated."""

    good_rewards = [-1.0, 1.0, 0.1]
    bad_rewards = [-1.1, 1.1]
    closed_limit = 20.0  # sqrt(1 + z^2) is not written for tails

    def make(self):
        return custom_family()

    def exact(self, order):
        return [
            lambda z: mp.sqrt(1 + z * z),
            lambda z: z / mp.sqrt(1 + z * z),
            lambda z: (1 + z * z) ** mp.mpf(-1.5),
            lambda z: -3 * z * (1 + z * z) ** mp.mpf(-2.5),
            lambda z: (12 * z * z - 3) * (1 + z * z) ** mp.mpf(-3.5),
        ][order]

    def assert_variance(self, variance, declared, error):
        # the sampler draws signs, whose variance 1 - mu^2 is not that of the family
        assert (variance > 0).all()

    def test_declared_constants_are_used(self):
        family = glb.CustomFamily(
            pseudo_huber,
            dispersion=2.0,
            self_concordance=lambda radius: 3.0 * radius,
            max_variance=1.0,
            min_variance=lambda radius: (1 + radius**2) ** -1.5,
        )
        assert family.dispersion == 2.0
        assert family.self_concordance(2.0) == 6.0
        assert family.max_variance(2.0) == 1.0
        assert family.min_variance(2.0) == 5.0**-1.5

    def test_a_sampler_is_needed_to_sample(self):
        with pytest.raises(glb.InputError, match="sampler: expected .* got None"):
            glb.CustomFamily(pseudo_huber).sample(torch.zeros(2))

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"log_partition": 3}, "log_partition"),
            ({"dispersion": 0.0}, "dispersion"),
            ({"reward_range": (1.0, 0.0)}, "reward_range"),
        ],
    )
    def test_arguments_are_checked(self, arguments, name):
        with pytest.raises(glb.InputError, match=f"{name}: expected .* got"):
            glb.CustomFamily(**{"log_partition": pseudo_huber, **arguments})


class Exponential(glb.GLMFamily):
    """The least that a family can say: one function."""

    def log_partition(self, z):
        return torch.logaddexp(z, -z)


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
class TestLeastFamily(DifferentiatedContract):
    """Rewards -1 and 1: ``m(z) = log(e^z + e^-z)``, from ``log_partition`` alone."""

    good_rewards = [-1.0, 0.0, 5.0]  # no range is declared
    bad_rewards = []
    closed_limit = 5.0

    def make(self):
        return Exponential()

    def exact(self, order):
        def value(z):
            t = mp.tanh(z)
            c = 1 - t * t
            return [mp.log(2 * mp.cosh(z)), t, c, -2 * t * c, (6 * t * t - 2) * c][order]

        return value

    def test_samples_have_the_right_moments(self, family):
        with pytest.raises(NotImplementedError, match="Exponential does not define sample"):
            family.sample(torch.zeros(2))

    test_samples_follow_the_generator = None

    def test_constants_of_a_large_ball(self, family):
        # its own derivatives overflow there: the search says so instead of returning NaN
        for constant in (family.self_concordance, family.max_variance, family.min_variance):
            with pytest.raises(glb.InputError, match="log_partition: expected .* got nan at -2000"):
                constant(2000.0)

    def test_radius_is_checked(self, family):
        for constant in (family.self_concordance, family.max_variance, family.min_variance):
            with pytest.raises(glb.InputError, match="radius: expected a positive.*got -1"):
                constant(-1.0)

    def test_log_partition_is_required(self):
        with pytest.raises(NotImplementedError, match="must define log_partition"):
            glb.GLMFamily().mean(torch.zeros(2))


def test_link_is_checked():
    with pytest.raises(glb.InputError, match="link: expected one of 'probit', 'cloglog', got"):
        glb.QuasiBounded("logit")


def test_signs_have_the_mean_of_the_custom_family(generator):
    z = torch.full((40_000,), 0.7, dtype=torch.float64)
    r = draw_signs(z, generator)
    assert abs(r.mean() - 0.7 / math.sqrt(1.49)) < 4.5 / math.sqrt(40_000)


def test_integer_rewards_are_checked():
    family = glb.Poisson()
    family.integer_rewards = True
    family.check_rewards(torch.tensor([0.0, 3.0]))
    with pytest.raises(
        glb.InputError, match=r"r: expected whole-number rewards of Poisson, got 0.5"
    ):
        family.check_rewards(torch.tensor([0.5]))


@pytest.mark.parametrize(
    "family",
    [
        glb.Bernoulli(),
        glb.Binomial(5),
        glb.Gaussian(0.5),
        glb.Poisson(),
        glb.QuasiBounded("probit"),
        glb.QuasiBounded("cloglog"),
    ],
    ids=repr,
)
def test_compiled_family_has_the_declared_constants(family):
    found = family.compiled()
    assert found.scale == 1.0 / family.dispersion
    assert (found.low, found.high) == family.reward_range
    assert found.trials == getattr(family, "trials", 1)


def test_a_subclass_is_not_taken_for_its_parent():
    for parent, settings in ((glb.Bernoulli, ()), (glb.Gaussian, (1.0,)), (glb.Poisson, ())):
        child = type("Child", (parent,), {})
        assert child(*settings).compiled() is None
    assert custom_family().compiled() is None


def test_compiled_code_gets_numbers_of_one_type_whatever_a_family_declares():
    """Entries are bound to types once: an integer in the place of a float would be misread."""

    kinds = [int, float, float, float, float, bool, float]
    for family in (glb.Bernoulli(), glb.Binomial(3), glb.Gaussian(1), glb.Poisson()):
        assert [type(value) for value in family.compiled()] == kinds


@pytest.mark.parametrize(
    "make", [glb.Bernoulli, glb.Gaussian, glb.Poisson, lambda: glb.QuasiBounded("probit")]
)
def test_rewards_are_drawn_at_numbers_of_every_kind(make):
    family, plain = make(), torch.tensor([0.0, 1.0], dtype=torch.float64)

    def drawn(z):
        return family.sample(z, torch.Generator().manual_seed(0))

    for z in ([0.0, 1.0], np.array([0, 1]), torch.tensor([0, 1]), (0, 1)):
        assert torch.equal(drawn(z), drawn(plain))


@pytest.mark.parametrize("make", [glb.Bernoulli, lambda: glb.QuasiBounded("cloglog")])
def test_no_reward_is_drawn_at_no_number(make):
    assert bool(make().sample(torch.tensor([torch.nan])).isnan())
