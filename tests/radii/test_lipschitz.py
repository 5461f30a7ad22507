"""Lipschitz constants, Theorem 3.1, covering and Theorem 3.2 against independent calculations."""

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from scipy import optimize

from torchglb import Ball, Bernoulli, Gaussian, InputError, NegativeLogLikelihood, Poisson, radii
from torchglb.families import CustomFamily, QuasiBounded
from torchglb.mle import minimize_likelihood
from torchglb.radii.theorems.lipschitz import table1
from torchglb.radii.theorems.theorem32 import contraction


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(family, n, d, S, generator, star=0.8):
    X = torch.randn(n, d, dtype=torch.float64, generator=generator)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    X = X * torch.rand(n, 1, dtype=torch.float64, generator=generator)
    theta = torch.randn(d, dtype=torch.float64, generator=generator)
    theta = theta * star * S / torch.linalg.vector_norm(theta)
    return X, family.sample(X @ theta, generator)


def sums(family, X, r, S, w=None):
    problem = radii.Problem(family, Ball(X.shape[-1], S), 0.05, tuple(X.shape[:-2]))
    return problem, radii.update_statistics(problem, radii.empty_statistics(problem), X, r, w)


def largest_gradient(family, X, r, S, generator, w=None):
    """The maximum of |grad L| by ascent from many starts: a lower bound of L_t, usually exact."""
    d = X.shape[-1]
    theta = torch.randn(40, d, dtype=torch.float64, generator=generator)
    theta = S * theta / torch.linalg.vector_norm(theta, dim=-1, keepdim=True)
    loss = NegativeLogLikelihood(family, X, r, w)
    best = torch.zeros(())
    for _ in range(80):
        _, gradient, hessian = loss.expand(theta)
        best = torch.maximum(best, torch.linalg.vector_norm(gradient, dim=-1).max())
        up = (hessian @ gradient[..., None])[..., 0]
        size = torch.linalg.vector_norm(up, dim=-1, keepdim=True).clamp_min(1e-300)
        theta = S * up / size  # for the squared loss this climbs without a step size
    return best


# ---- Table 1 -----------------------------------------------------------------------------------


def test_bounded_rows_of_table1():
    n, S = torch.tensor([0.0, 7.0, 1000.0]), torch.tensor([0.5, 4.0, 10.0])
    found = radii.table1_bounded(n, S, 0.25, 1.0)  # Bernoulli
    assert found.failure == 0.0
    torch.testing.assert_close(found.value, torch.tensor([0.0, 21.0, 6000.0]))
    # probit: M = 1, R_mudot = 1/sqrt(2 pi), g = sqrt(pi/8)
    value = radii.table1_bounded(n, S, 1 / math.sqrt(2 * math.pi), 1.0, math.sqrt(math.pi / 8))
    expected = (1 + 2 * 4 * 0.3989422804014327) * 7 / 0.6266570686577501
    assert float(value.value[1]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [0, 1, 500])
def test_subgaussian_row_of_table1(n):
    mp.dps = 30
    S, d, delta, sigma = mpf(3), 5, mpf("0.0025"), mpf("0.5")
    inner = mp.log(mp.pi**2 * d * mpf(n + 1) ** 2 / (3 * delta))
    expected = 2 / sigma**2 * (S * n + 2 * mp.pi * sigma * mp.sqrt(n * inner))
    found = radii.table1_subgaussian(
        torch.tensor(float(n), dtype=torch.float64),
        torch.tensor(3.0, dtype=torch.float64),
        5,
        0.0025,
        sigma=0.5,
        dispersion=0.25,
    )
    assert found.failure == 0.0025
    assert float(found.value) == pytest.approx(float(expected), rel=1e-13)


@pytest.mark.parametrize("S", ["0.3", "1", "1.5", "10"])
def test_poisson_rows(S):
    mp.dps = 30
    n, d, delta, s = 250, 3, mpf("0.0025"), mpf(S)
    union = mp.log(mp.pi**2 * (d + 1) * mpf(n + 1) ** 2 / (3 * delta))
    if s > 1:
        q = 1 - 2 * mp.exp(-s)
        rate = q * (mp.exp(s) + 2 * s + 2 * mp.log(2 * q / mp.e)) / 4 + 2 * s * mp.exp(s)
        printed = rate * n + 2 / q * union
    else:
        rate = (mp.exp(s) + 4 * s + 4 * mp.log(8 + 2 * mp.exp(s))) / 16 + 2 * s * mp.exp(s)
        printed = rate * n + 4 * union
    half = mpf(1) / 2
    ours = 2 * mp.sinh(s) * n
    ours += ((mp.exp(half) - 1 - half) * mp.exp(s) * n + mp.log((d + 1) / delta)) / half
    arguments = (
        torch.tensor(float(n), dtype=torch.float64),
        torch.tensor(float(S), dtype=torch.float64),
        d,
        0.0025,
    )
    found, tighter = radii.table1_poisson(*arguments), radii.poisson_martingale(*arguments)
    assert float(found.value) == pytest.approx(float(printed), rel=1e-13)
    assert float(tighter.value) == pytest.approx(float(ours), rel=1e-13)
    assert float(tighter.value) < float(found.value)
    assert found.failure == tighter.failure == 0.0025


def test_our_poisson_bound_is_below_the_printed_one():
    S = torch.tensor([0.01, 0.3, 0.9, 1.0, 1.01, 1.2, 2.0, 10.0], dtype=torch.float64)
    n = torch.tensor([0.0, 1.0, 30.0, 1e6], dtype=torch.float64)[:, None]
    for d in (1, 2, 20):
        for delta in (0.2, 0.0025, 1e-6):
            ours = radii.poisson_martingale(n, S, d, delta).value
            assert (ours < radii.table1_poisson(n, S, d, delta).value).all()


def test_poisson_martingale_bounds_the_noise(generator):
    # 400 paths of 200 steps: the bound may fail on delta of them, at any time
    S, d, T, paths, delta = 1.0, 2, 200, 400, 0.2
    x = torch.randn(paths, T, d, dtype=torch.float64, generator=generator)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rate = torch.exp(S * x[..., 0])
    noise = ((torch.poisson(rate, generator=generator) - rate)[..., None] * x).cumsum(1)
    n = torch.arange(1, T + 1).double()
    bound = radii.poisson_martingale(n, torch.tensor(S, dtype=torch.float64), d, delta).value
    allowed = bound - 2 * math.sinh(S) * n
    missed = (torch.linalg.vector_norm(noise, dim=-1) > allowed).any(-1).sum()
    assert missed <= delta * paths


# ---- constants from the data -------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("family", "S"),
    [
        (Bernoulli(), 0.5),
        (Bernoulli(), 8.0),
        (Poisson(), 1.5),
        (Gaussian(0.5), 2.0),
        (QuasiBounded("probit"), 2.0),
        (QuasiBounded("cloglog"), 1.0),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, float) else f"S{v}",
)
def test_data_constant_bounds_every_gradient(family, S, weighted, generator):
    X, r = draw(family, 60, 3, S, generator)
    w = torch.rand(60, dtype=torch.float64, generator=generator) if weighted else None
    problem, statistics = sums(family, X, r, S, w)
    bound = radii.data_lipschitz(family, statistics, problem.S)
    reached = largest_gradient(family, X, r, S, generator, w)
    assert bound.failure == 0.0
    assert float(reached) <= float(bound.value)
    if isinstance(family, Gaussian):
        assert float(bound.value) == pytest.approx(float(reached), rel=1e-8)


@pytest.mark.parametrize(
    ("eigenvalues", "b"),
    [
        ((3.0, 1.0), (1.0, -2.0)),
        ((3.0, 3.0), (1.0, -2.0)),
        ((3.0, 1.0), (0.0, 2.0)),  # b orthogonal to the steepest direction
        ((3.0, 1.0), (0.0, 0.0)),
        ((0.0, 0.0), (1.0, 2.0)),
        ((5.0, 0.0), (1e-9, 40.0)),
        ((1e-6, 0.0), (30.0, 40.0)),
        ((0.0, 0.0), (0.0, 0.0)),
    ],
)
def test_gaussian_constant_is_exact(eigenvalues, b):
    S = 2.5
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    V = turn @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ turn.T
    moment = turn @ torch.tensor(b, dtype=torch.float64)
    found = radii.gaussian_lipschitz(V, moment, torch.tensor(S, dtype=torch.float64), 0.5)

    def value(angle):  # the maximum of a convex function lies on the circle
        v, c = np.array(eigenvalues), np.array(b)
        return np.hypot(v[0] * S * np.cos(angle) - c[0], v[1] * S * np.sin(angle) - c[1]) / 0.5

    angles = np.linspace(0, 2 * np.pi, 20001)
    at = angles[np.argmax(value(angles))]
    best = optimize.minimize_scalar(
        lambda a: -value(a), bounds=(at - 1e-3, at + 1e-3), method="bounded"
    )
    expected = max(-best.fun, value(at))
    assert float(found.value) >= expected * (1 - 1e-14)
    assert float(found.value) == pytest.approx(expected, rel=1e-7, abs=1e-30)


def test_data_constant_is_below_table1(generator):
    for family, S in [(Bernoulli(), 4.0), (Gaussian(), 2.0), (Poisson(), 1.0)]:
        X, r = draw(family, 300, 3, S, generator)
        problem, statistics = sums(family, X, r, S)
        data = radii.data_lipschitz(family, statistics, problem.S).value
        printed = table1(family, statistics, problem.S, problem.max_variance, 0.0025)
        assert data < printed.value


def test_sums_do_not_depend_on_the_order_of_arrival(generator):
    X, r = draw(Poisson(), 40, 3, 1.0, generator)
    w = torch.rand(40, dtype=torch.float64, generator=generator)
    problem, at_once = sums(Poisson(), X, r, 1.0, w)
    one_by_one = radii.empty_statistics(problem)
    for i in torch.randperm(40, generator=generator):
        row = slice(i, i + 1)
        one_by_one = radii.update_statistics(problem, one_by_one, X[row], r[row], w[row])
    for a, b in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(a, b)


# ---- Theorem 3.1 and the covering theorem ------------------------------------------------------


@pytest.mark.parametrize("slope", [-3.0, 0.0, 0.4, 2.9, 3.0, 3.1, 5e3])
def test_infimum_against_a_search(slope):
    d = 3
    grid = np.exp(np.linspace(-20, 0, 400001))
    searched = np.min(d * np.log(1 / grid) + grid * slope)
    exact = radii.shrinkage_infimum(torch.tensor(slope, dtype=torch.float64), d)
    assert float(exact) == pytest.approx(searched, abs=1e-7)
    closed = radii.shrinkage_infimum(torch.tensor(slope, dtype=torch.float64), d, "closed_form")
    assert float(closed) == pytest.approx(d * math.log(math.e * max(1, slope / d)))


def test_theorem31_golden_values():
    # Bernoulli, delta = 0.05, L_t = (1 + S/2) n; the last number is the published one
    mp.dps = 30
    for d, S, n, rounded in [
        (2, 4, 100, 19.2),
        (2, 4, 1000, 23.8),
        (2, 4, 10000, 28.4),
        (2, 10, 10000, 31.6),
        (5, 4, 10000, 61.9),
        (20, 4, 10000, 210.8),
        (20, 10, 10000, 243.0),
    ]:
        expected = mp.log(20) + d * mp.log(mp.e * 2 * S * (1 + mpf(S) / 2) * n / d)
        number, radius = (torch.tensor(float(v), dtype=torch.float64) for v in (n, S))
        constant = radii.table1_bounded(number, radius, 0.25, 1.0)
        found = radii.theorem31(constant, S, d, 0.05)
        assert float(found.radius) == pytest.approx(float(expected), rel=1e-14)
        assert float(found.radius) == pytest.approx(rounded, abs=0.05)
        assert (found.delta_likelihood, found.delta_lipschitz) == (0.05, 0.0)
    # t = 1: the exact infimum is 0, the closed form d; and a < d is the slope itself
    zero = torch.zeros((), dtype=torch.float64)
    assert float(radii.theorem31(zero, 4.0, 5, 0.05).radius) == pytest.approx(math.log(20))
    closed = radii.theorem31(zero, 4.0, 5, 0.05, inf="closed_form")
    assert float(closed.radius) == pytest.approx(math.log(20) + 5)
    some = torch.tensor(0.25, dtype=torch.float64)
    assert float(radii.theorem31(some, 4.0, 5, 0.05).radius) == pytest.approx(math.log(20) + 2)


def test_theorem31_pays_for_a_constant_that_may_fail():
    bound = radii.LipschitzBound(torch.tensor(10.0, dtype=torch.float64), 0.01)
    found = radii.theorem31(bound, 1.0, 2, 0.05)
    assert found.delta_likelihood + found.delta_lipschitz == pytest.approx(0.05)
    assert float(found.radius) == pytest.approx(-math.log(0.04) + 2 * math.log(10) + 2)
    for function in (radii.theorem31, radii.covering):
        with pytest.raises(InputError, match="fails with probability below delta"):
            function(bound, 1.0, 2, 0.01)


def test_covering_against_a_search():
    for d, S, lipschitz in [(1, 0.1, 0.0), (2, 4.0, 300.0), (20, 10.0, 6e4), (3, 50.0, 1e9)]:
        best = min(
            math.log((k + 1) * (k + 2))
            + d * math.log(1 + 2 * S / (S * 2.0**-k))
            + S * 2.0**-k * lipschitz
            for k in range(200)
        )
        found = radii.covering(torch.tensor(lipschitz, dtype=torch.float64), S, d, 0.05)
        assert float(found.radius) == pytest.approx(best + math.log(20), rel=1e-12)
        assert (
            found.radius
            > radii.theorem31(torch.tensor(lipschitz, dtype=torch.float64), S, d, 0.05).radius
        )


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_delta_outside_the_unit_interval(delta):
    one, X = torch.ones((), dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)
    loss = NegativeLogLikelihood(Bernoulli(), X, X[:, 0])
    centre, ball = torch.zeros(2, dtype=torch.float64), Ball(2, 1.0)
    for call in (
        lambda: radii.theorem31(one, 1.0, 2, delta),
        lambda: radii.covering(one, 1.0, 2, delta),
        lambda: radii.mean_loss_radius(one, one, 2, delta),
        lambda: radii.table1_poisson(one, one, 2, delta),
        lambda: radii.table1_subgaussian(one, one, 2, delta, sigma=1.0),
        lambda: radii.poisson_martingale(one, one, 2, delta),
        lambda: radii.pac_bayes_level(loss, ball, delta, centre),
        lambda: radii.mixture_level(loss, ball, delta, centre),
        lambda: radii.gaussian_prior_level(loss, delta, centre, 1.0),
        lambda: radii.Problem(Bernoulli(), ball, delta),
    ):
        with pytest.raises(InputError, match="delta"):
            call()


# ---- Theorem 3.2 -------------------------------------------------------------------------------


def test_contraction():
    mp.dps = 40
    D = torch.cat([torch.tensor([0.0]), torch.logspace(-8, 3, 45)]).double()
    exact = [
        float(mp.quad(lambda v, x=x: (1 - v) * mp.exp(-v * mpf(x)), [0, 1])) for x in D.tolist()
    ]
    torch.testing.assert_close(
        contraction(D), torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(
    ("family", "S"),
    [(Bernoulli(), 3.0), (Poisson(), 1.0), (Gaussian(0.7), 2.0), (QuasiBounded("probit"), 1.5)],
    ids=lambda v: type(v).__name__ if not isinstance(v, float) else "",
)
def test_ellipsoids_contain_the_set(family, S, generator):
    d, n, beta2 = 2, 80, torch.tensor(4.0, dtype=torch.float64)
    X, r = draw(family, n, d, S, generator)
    loss, ball = NegativeLogLikelihood(family, X, r), Ball(d, S)
    fit = minimize_likelihood(loss, ball)
    R = radii.self_concordance_of(family, S)
    lam = radii.regularization_for(S, R)
    assert 4 * S * S * lam <= 0.5
    points = torch.randn(8000, d, dtype=torch.float64, generator=generator)
    points = ball.project(fit.theta + 0.5 * points)
    inside = points[loss.value(points) <= fit.loss + beta2]
    assert len(inside) > 100
    step = inside - fit.theta
    W = fit.hessian + lam * torch.eye(d, dtype=torch.float64)
    farthest = (step * (step @ W)).sum(-1).max()
    norm = torch.linalg.vector_norm(fit.theta)
    printed = radii.theorem32(beta2, S, R, lam, fit.gap)
    outside = (
        2.0 * (1.0 + S * R) * (beta2 + fit.gap) + lam * (S + norm) ** 2
    )  # lam behind the factor
    fixed = radii.theorem32_fixed_point(beta2, S, R, lam, norm, X, fit.hessian, gap=fit.gap)
    assert farthest <= fixed <= outside <= printed


def test_theorem32_golden_values():
    beta2 = torch.tensor([3.0, 5.0], dtype=torch.float64)
    norm = torch.tensor([1.0, 2.0], dtype=torch.float64)
    S, R, lam = 2.0, 0.5, 0.125
    printed = radii.theorem32(beta2, S, R, lam)
    torch.testing.assert_close(printed, torch.tensor([20.0, 28.0], dtype=torch.float64))
    # the fixed point, by hand for rows along one axis
    X = torch.tensor([[[1.0, 0.0]], [[0.5, 0.0]]], dtype=torch.float64).expand(2, 30, 2)
    hessian = torch.diag_embed(torch.tensor([[20.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    found = radii.theorem32_fixed_point(beta2, S, R, lam, norm, X, hessian)
    for i in range(2):
        length, reach = float(X[i, 0, 0]), float(X[i, 0, 0]) * (S + float(norm[i]))
        local = length / math.sqrt(float(hessian[i, 0, 0]) + lam)
        D = R * reach
        for _ in range(50):
            gamma = (
                float(beta2[i]) * D * D / (D - 1 + math.exp(-D)) + lam * (S + float(norm[i])) ** 2
            )
            D = min(D, R * min(math.sqrt(gamma) * local, reach))
        assert float(found[i]) == pytest.approx(gamma, rel=1e-9)


def test_fixed_point_tends_to_twice_the_radius(generator):
    d, S, beta2 = 2, 3.0, torch.tensor(4.0, dtype=torch.float64)
    X, r = draw(Bernoulli(), 20000, d, S, generator)
    fit = minimize_likelihood(NegativeLogLikelihood(Bernoulli(), X, r), Ball(d, S))
    R = radii.self_concordance_of(Bernoulli(), S)
    lam, norm = radii.regularization_for(S, R), torch.linalg.vector_norm(fit.theta)
    fixed = radii.theorem32_fixed_point(beta2, S, R, lam, norm, X, fit.hessian)
    assert 8.0 < fixed < 8.0 * 1.1
    # without rows, or with rows of weight 0 only, the factor is exactly 2
    none = torch.zeros(20000, dtype=torch.float64)
    empty = radii.theorem32_fixed_point(beta2, S, R, lam, norm, X, 0 * fit.hessian, none)
    assert float(empty) == pytest.approx(8.0 + lam * float(S + norm) ** 2)
    no_rows = radii.theorem32_fixed_point(beta2, S, R, 0.0, norm, X[:0], 0 * fit.hessian)
    assert float(no_rows) == pytest.approx(8.0)


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
def test_family_without_self_concordance():
    family = CustomFamily(lambda z: z**4, self_concordance=math.inf)
    with pytest.raises(InputError, match="self-concordant family"):
        radii.self_concordance_of(family, 1.0)
    problem = radii.Problem(family, Ball(2, 1.0), 0.05)
    with pytest.raises(InputError, match="self-concordant family"):
        radii.PACBayes().init(problem)
    with pytest.raises(InputError, match="Table 1"):
        radii.Lipschitz().init(problem)
    assert radii.Lipschitz(constant="data").init(problem)


# ---- what the functions refuse -----------------------------------------------------------------

NAN = math.nan
#: each function, what it is called with, and what its arguments may not be
NEGATIVE = [-1.0, NAN, "1", True, torch.tensor(-1.0)]
DIMS = {"dim": [2.5, 0, -1, True, NAN]}
ASKED = {
    radii.theorem31: (dict(lipschitz=9.0, S=4.0, dim=2, delta=0.05), DIMS | dict(lipschitz=NEGATIVE, S=NEGATIVE)),
    radii.covering: (dict(lipschitz=9.0, S=4.0, dim=2, delta=0.05), DIMS | dict(lipschitz=NEGATIVE, S=NEGATIVE)),
    radii.shrinkage_infimum: (dict(slope=9.0, dim=2), DIMS),
    radii.mean_loss_radius: (dict(ball_loss=9.0, loss_hat=4.0, dim=2, delta=0.05), DIMS),
    radii.regularization_for: (dict(S=4.0, self_concordance=1.0), dict(S=[0.0, *NEGATIVE], self_concordance=NEGATIVE)),
    radii.theorem32: (
        dict(radius=3.0, S=2.0, self_concordance=1.0, regularization=0.1, gap=0.1),
        dict.fromkeys(["radius", "S", "self_concordance", "regularization", "gap"], NEGATIVE),
    ),
    radii.theorem32_fixed_point: (
        dict(radius=3.0, S=2.0, self_concordance=1.0, regularization=0.1, center_norm=1.0, X=[[1.0]], hessian=[[1.0]], gap=0.1),
        dict.fromkeys(["radius", "S", "self_concordance", "regularization", "center_norm", "gap"], NEGATIVE)
        | {"hessian": [[1.0]], "w": [[-1.0], [NAN], [1.0, 1.0]], "steps": [0, 1.5]},
    ),
    radii.table1_bounded: (
        dict(count=9.0, S=2.0, max_variance=1.0, noise=1.0, dispersion=1.0),
        dict.fromkeys(["count", "S", "max_variance", "noise"], NEGATIVE) | {"dispersion": [0.0, NAN]},
    ),
    radii.table1_subgaussian: (
        dict(count=9.0, S=2.0, dim=2, delta=0.05, sigma=1.0),
        DIMS | dict.fromkeys(["count", "S", "max_variance", "sigma"], NEGATIVE) | {"dispersion": [0.0, NAN]},
    ),
    radii.table1_poisson: (dict(count=9.0, S=2.0, dim=2, delta=0.05), DIMS | dict(count=NEGATIVE, S=NEGATIVE)),
    radii.poisson_martingale: (
        dict(weight=9.0, S=2.0, dim=2, delta=0.05), DIMS | dict(weight=NEGATIVE, S=NEGATIVE, tilt=[0.0, *NEGATIVE]),
    ),
    radii.gaussian_lipschitz: (
        dict(gram=[[1.0]], moment=[1.0], S=2.0),
        dict(gram=[[1.0], "V"], moment=[1.0, 'b'], S=[0.0, *NEGATIVE], dispersion=[0.0, NAN], steps=[-1, 1.5]),
    ),
}  # fmt: skip
WRONG = [
    (ask, name, value)
    for ask, (_, names) in ASKED.items()
    for name, values in names.items()
    for value in values
]


@pytest.mark.parametrize(("ask", "name", "value"), WRONG)
def test_wrong_numbers_are_refused_by_name(ask, name, value):
    with pytest.raises(InputError, match=f"^{name}: expected"):
        ask(**ASKED[ask][0] | {name: value})


@pytest.mark.parametrize("ask", ASKED, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("convert", [torch.tensor, np.array], ids=["tensor", "array"])
def test_numbers_of_any_kind_are_taken(ask, convert):
    def numbers(given):
        kept = ("dim", "delta", "sigma", "noise", "dispersion")
        return {name: v if name in kept else convert(v) for name, v in given.items()}

    given = ASKED[ask][0]
    found, plain = (
        parts[0] if isinstance(parts := ask(**each), tuple) else parts
        for each in (numbers(given), given)
    )
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(plain), check_dtype=False)


@pytest.mark.parametrize("failure", [-0.1, NAN])
def test_a_bound_that_fails_with_no_probability_is_refused(failure):
    bound = radii.LipschitzBound(torch.tensor(9.0), failure)
    with pytest.raises(InputError, match=r"^lipschitz.failure: expected"):
        radii.theorem31(bound, 4.0, 2, 0.05)


def test_data_lipschitz_refuses_what_are_no_sums():
    problem = radii.Problem(Bernoulli(), Ball(2, 4.0), 0.05)
    sums = radii.empty_statistics(problem)
    for given, name in (
        (("Bernoulli", sums, problem.S), "family"),
        ((Bernoulli(), None, problem.S), "statistics"),
        ((Bernoulli(), sums, -1.0), "S"),
    ):
        with pytest.raises(InputError, match=f"^{name}: expected"):
            radii.data_lipschitz(*given)
    assert float(radii.data_lipschitz(Bernoulli(), sums, 4.0).value) == 0.0
