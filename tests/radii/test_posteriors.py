"""Averages over posteriors, and the levels that rest on them, calculated independently."""

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from scipy import integrate, special

from torchglb import (
    Ball,
    Bernoulli,
    Binomial,
    ConfidenceSequence,
    Gaussian,
    History,
    InputError,
    NegativeLogLikelihood,
    Poisson,
    radii,
)
from torchglb.estimate import Estimate
from torchglb.families import CustomFamily, QuasiBounded
from torchglb.radii.ball_mean import ball_rule
from torchglb.radii.posterior.increments import growth, increment
from torchglb.radii.posterior.laws import BallLaw, NormalLaw, series_terms

LOG_PARTITION = {
    "Bernoulli": lambda z: np.logaddexp(0, z),
    "Gaussian": lambda z: z * z / 2,
    "Poisson": np.exp,
    "probit": lambda z: z * special.ndtr(z) + np.exp(-z * z / 2) / math.sqrt(2 * math.pi),
}
FAMILIES = {
    "Bernoulli": Bernoulli(),
    "Gaussian": Gaussian(),
    "Poisson": Poisson(),
    "probit": QuasiBounded("probit"),
}


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


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
    theta = torch.randn(d, dtype=torch.float64, generator=generator)
    theta = theta * star * S / torch.linalg.vector_norm(theta)
    return NegativeLogLikelihood(family, X, family.sample(X @ theta, generator)), theta


ANGLE, ANGLE_WEIGHT = special.roots_legendre(600)


def average(function, nu):
    """``E function(U)`` for the density (1 - u^2)^(nu - 1/2): u = +-sin(a), a in [0, pi/2]."""
    a = (ANGLE + 1) * np.pi / 4
    weight = ANGLE_WEIGHT * np.cos(a) ** (2 * nu)
    return (weight * (function(np.sin(a)) + function(-np.sin(a)))).sum() / (2 * weight.sum())


# ---- one coordinate ----------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.5, 10.0, 42.0])
def test_law_of_a_coordinate(nu):
    mp.dps = 30
    s = np.array([0.0, 1e-4, 0.1, 1.0, 3.0, 8.0, 20.0, 49.0])
    law = BallLaw(tensor(nu), series_terms(50.0))
    assert float(law.second_moment()) == pytest.approx(average(lambda u: u * u, nu), rel=1e-9)
    assert float(law.mean_absolute()) == pytest.approx(average(np.abs, nu), rel=1e-12)
    exact = [float(mp.hyp0f1(nu + 1, mpf(v) ** 2 / 4) - 1) for v in s]
    found = law.hyperbolic(tensor(s) ** 2).numpy()
    np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-30)
    assert (found >= np.array(exact) * (1 - 1e-14)).all()
    both = [average(lambda u, v=v: np.expm1(v * abs(u)) - v * abs(u), nu) for v in s[2:]]
    found = law.exponential(tensor(s[2:])).numpy()
    np.testing.assert_allclose(found[:-1], both[:-1], rtol=1e-8)
    assert both[-1] <= found[-1] <= both[-1] * 1.001  # 70 terms for a = 49: the bounded tail shows


def test_few_terms_still_bound_the_series():
    mp.dps = 30
    s = np.logspace(-2, 1.7, 20)
    for nu in (0.5, 3.0, 20.0):
        even = np.array([float(mp.hyp0f1(nu + 1, mpf(v) ** 2 / 4) - 1) for v in s])
        both = [average(lambda u, v=v: np.expm1(v * abs(u)) - v * abs(u), nu) for v in s]
        for terms in (1, 3, 12):
            law = BallLaw(tensor(nu), terms)
            assert (law.hyperbolic(tensor(s) ** 2).numpy() >= even * (1 - 1e-14)).all()
            assert (law.exponential(tensor(s)).numpy() >= np.array(both) * (1 - 1e-9)).all()


def test_law_of_a_normal():
    u, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / w.sum()
    law, s = NormalLaw(), np.array([0.1, 1.0, 3.0])
    expected = (np.cosh(s[:, None] * u) - 1) @ w
    np.testing.assert_allclose(law.hyperbolic(tensor(s) ** 2).numpy(), expected, rtol=1e-9)
    z = np.linspace(-12, 16, 400001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    for a in (0.1, 1.0, 3.0):
        values = (np.exp(a * abs(z)) - 1 - a * abs(z)) * density
        expected = integrate.trapezoid(values, z)
        assert float(law.exponential(tensor(a))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("d", [1, 2, 20])
def test_mean_over_the_ball(name, d):
    for S in (0.1, 4.0, 50.0):
        rule = ball_rule(FAMILIES[name], d, S)
        s = np.array([0.0, 0.3, 1.0]) * S
        exact = np.array([average(lambda u, v=v: LOG_PARTITION[name](v * u), d / 2) for v in s])
        found = rule(FAMILIES[name], tensor(s)).numpy()
        assert (found >= exact * (1 - 1e-12)).all()
        # Gauss's rule is exact to its stated error; chords, which need no constant, to 1e-3
        loose = 2e-3 if name == "probit" else 1e-9
        assert (found <= exact + loose * (exact - LOG_PARTITION[name](0.0)) + 1e-9).all()


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
def test_mean_over_the_ball_of_any_convex_function():
    family = CustomFamily(lambda z: torch.log(torch.cosh(z)) + 0.01 * z**4)
    for d in (1, 3):
        s = tensor([0.5, 2.0])
        exact = [
            average(lambda u, v=v: np.log(np.cosh(v * u)) + 0.01 * (v * u) ** 4, d / 2)
            for v in (0.5, 2.0)
        ]
        found = ball_rule(family, d, 2.0)(family, s).numpy()
        assert (found >= exact).all()
        np.testing.assert_allclose(found, exact, rtol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_increments_bound_the_average(name):
    family = FAMILIES[name]
    for nu in (0.5, 1.0, 6.0):
        for S in (1.0, 4.0):
            R, top = tensor(family.self_concordance(S)), tensor(family.max_variance(S))
            law = BallLaw(tensor(nu), series_terms(S))
            for z in (-2.0, 0.0, 0.7):
                for s in (1e-2, 0.3, 1.0, S - min(abs(z), S - 0.1)):
                    m = LOG_PARTITION[name]
                    exact = average(lambda u, z=z, s=s, m=m: m(z + s * u), nu) - m(z)
                    if abs(z) + s > S:
                        continue
                    s2 = tensor(s**2)
                    found = float(increment(family, law, tensor(z), s2, R, top))
                    assert found >= exact - 1e-13
                    cap = float(family.variance(tensor(z)) * growth(family, law, s2, R))
                    assert found <= cap * (1 + 1e-12)
                    if name in ("Gaussian", "Poisson"):
                        assert found == pytest.approx(exact, rel=1e-6, abs=1e-12)
                    if s <= 0.3:
                        loose = 0.5 if name == "probit" else 0.15  # m'' varies fast on its flank
                        assert found == pytest.approx(exact, rel=loose, abs=1e-12)


def test_increment_of_wide_posteriors_is_lipschitz():
    law = BallLaw(tensor(1.0), series_terms(50.0))
    for trials in (1, 7):
        family = Binomial(trials)
        z = torch.linspace(-40, 40, 41, dtype=torch.float64)
        found = increment(family, law, z, tensor(2500.0), tensor(1.0), tensor(0.25 * trials))
        exact = [
            trials * (average(lambda u, v=v: np.logaddexp(0, v + 50 * u), 1.0) - np.logaddexp(0, v))
            for v in z.numpy()
        ]
        assert (found.numpy() >= np.array(exact) - 1e-9).all()
        assert (found <= 0.5 * trials * 50 * law.mean_absolute() + 1e-12).all()


# ---- posteriors on ellipsoids ------------------------------------------------------------------


def reference_ellipsoid(loss, S, centre, kappa, rho2):
    """W written out from its formula, and its inverse."""
    H = loss.expand(centre).hessian.numpy()
    c = centre.numpy()
    q = S * S - c @ c
    W = H / rho2 + (np.eye(len(c)) + np.outer(c, c) / ((1 - kappa) * q)) / (kappa * q)
    return W


@pytest.mark.parametrize("kappa", [0.5, 0.9])
@pytest.mark.parametrize("edge", [0.0, 0.5, 0.999])
def test_ellipsoid_lies_in_the_ball(kappa, edge, generator):
    S, d = 3.0, 3
    loss, theta = draw(Bernoulli(), 30, d, S, generator)
    centre = theta / torch.linalg.vector_norm(theta) * S * edge
    W = reference_ellipsoid(loss, S, centre, kappa, 5.0)
    u = torch.randn(20000, d, dtype=torch.float64, generator=generator).numpy()
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    points = centre.numpy() + u @ np.linalg.inv(np.linalg.cholesky(W))
    assert np.linalg.norm(points, axis=1).max() <= S * (1 + 1e-12)


@pytest.mark.parametrize(
    ("kappa", "rho2", "shape"), [(0.5, None, 0.0), (0.8, 3.0, 0.0), (0.5, None, 2.5)]
)
@pytest.mark.parametrize("name", ["Bernoulli", "Gaussian", "Poisson"])
def test_pac_bayes_level_in_the_plane(name, kappa, rho2, shape, generator):
    family, S, delta = FAMILIES[name], 2.0, 0.05
    loss, theta = draw(family, 25, 2, S, generator, star=0.6)
    centre = 0.9 * theta
    found = radii.pac_bayes_level(
        loss, Ball(2, S), delta, centre, kappa=kappa, rho2=rho2, shape=shape
    )
    W = reference_ellipsoid(loss, S, centre, kappa, 4.0 + 2 * shape if rho2 is None else rho2)
    # polar quadrature over the ellipse; the density is (1 - r^2)^k, normalised numerically
    radius, weight = special.roots_legendre(200)
    radius, weight = (radius + 1) / 2, weight / 2
    angle = 2 * np.pi * np.arange(200) / 200
    density = (1 - radius**2) ** shape
    mass = weight * radius * density
    mass /= mass.sum() * len(angle)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = radius[:, None, None] * circle @ np.linalg.inv(np.linalg.cholesky(W))
    losses = loss.value(tensor((centre.numpy() + points).reshape(-1, 2))).numpy().reshape(200, 200)
    mean_loss = (mass[:, None] * losses).sum()
    normaliser = 2 * np.pi * (weight * radius * density).sum()  # of (1 - |u|^2)^k on the disc
    log_density = np.log(density / normaliser) + 0.5 * np.linalg.slogdet(W)[1]
    divergence = (mass * len(angle) * log_density).sum() + math.log(math.pi * S * S)
    expected = math.log(1 / delta) + divergence + mean_loss
    if name == "Bernoulli":  # Jensen in the increments, nothing else
        assert expected - 1e-9 <= float(found) <= expected + 0.1
    else:
        assert float(found) == pytest.approx(expected, abs=1e-6)
    lazy = radii.pac_bayes_level(
        loss,
        Ball(2, S),
        delta,
        centre,
        kappa=kappa,
        rho2=rho2,
        shape=shape,
        increments="aggregated",
    )
    assert float(found) - 1e-9 <= float(lazy)


def test_pac_bayes_level_in_many_dimensions_by_sampling(generator):
    d, S, n = 8, 3.0, 60
    loss, theta = draw(Bernoulli(), n, d, S, generator, star=0.5)
    centre = 0.8 * theta
    found = radii.pac_bayes_level(loss, Ball(d, S), 0.05, centre)
    W = reference_ellipsoid(loss, S, centre, 0.5, d + 2)
    u = torch.randn(200000, d, dtype=torch.float64, generator=generator).numpy()
    u *= (torch.rand(200000, dtype=torch.float64, generator=generator).numpy() ** (1 / d))[
        :, None
    ] / (np.linalg.norm(u, axis=1, keepdims=True))
    points = centre.numpy() + u @ np.linalg.inv(np.linalg.cholesky(W))
    losses = loss.value(tensor(points)).numpy()
    error = losses.std() / math.sqrt(len(losses))
    divergence = d * math.log(S) + 0.5 * np.linalg.slogdet(W)[1]
    expected = math.log(20) + divergence + losses.mean()
    assert expected - 4 * error <= float(found) <= expected + 0.5


def test_pac_bayes_level_is_batched_and_weighted(generator):
    S, d = 2.0, 2
    loss, theta = draw(Bernoulli(), 12, d, S, generator)
    w = torch.rand(12, dtype=torch.float64, generator=generator)
    alone = [
        radii.pac_bayes_level(
            NegativeLogLikelihood(Bernoulli(), loss.X, loss.r, v), Ball(d, S), 0.05, c
        )
        for v in (w, torch.ones_like(w))
        for c in (theta, 0.5 * theta)
    ]
    X, r = loss.X.expand(2, 2, 12, d), loss.r.expand(2, 2, 12)
    weights = torch.stack([w, torch.ones_like(w)])[:, None].expand(2, 2, 12)
    centres = torch.stack([theta, 0.5 * theta]).expand(2, 2, d)
    batch = NegativeLogLikelihood(Bernoulli(), X, r, weights)
    ball = Ball(d, torch.full((2, 1), S, dtype=torch.float64))
    together = radii.pac_bayes_level(batch, ball, 0.05, centres)
    torch.testing.assert_close(together.flatten(), torch.stack(alone))
    # a merged row of weight 2 counts as the row twice
    history = History(d, aggregate=True)
    for _ in range(2):
        history.append(loss.X, loss.r)
    double = NegativeLogLikelihood.of(Bernoulli(), history)
    twice = NegativeLogLikelihood(Bernoulli(), loss.X.repeat(2, 1), loss.r.repeat(2))
    torch.testing.assert_close(
        radii.pac_bayes_level(double, ball.__class__(d, S), 0.05, theta),
        radii.pac_bayes_level(twice, ball.__class__(d, S), 0.05, theta),
    )


def test_pac_bayes_level_refuses(generator):
    loss, theta = draw(Bernoulli(), 5, 2, 1.0, generator)
    ball = Ball(2, 1.0)
    for bad in ({"kappa": 1.0}, {"rho2": 0.0}, {"shape": -1.0}, {"increments": "some"}):
        with pytest.raises(InputError):
            radii.pac_bayes_level(loss, ball, 0.05, theta, **bad)
    with pytest.raises(InputError, match="strictly inside"):
        radii.pac_bayes_level(loss, ball, 0.05, 2 * theta)
    ridged = NegativeLogLikelihood(Bernoulli(), loss.X, loss.r, regularization=1.0)
    for level in (radii.pac_bayes_level, radii.mixture_level):
        with pytest.raises(InputError, match="without ridge"):
            level(ridged, ball, 0.05, theta)


# ---- Gaussian prior ----------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3])
def test_gaussian_prior_is_conjugate(d, generator):
    # with a Gaussian likelihood and a = 1 the posterior is exact: the level is the log-evidence
    sigma, variance, n = 0.7, 2.0, 20
    loss, _ = draw(Gaussian(sigma), n, d, 3.0, generator)
    X, r = loss.X.numpy(), loss.r.numpy()
    precision = X.T @ X / sigma**2 + np.eye(d) / variance
    centre = np.linalg.solve(precision, X.T @ r / sigma**2)
    found = radii.gaussian_prior_level(loss, 0.05, tensor(centre), variance)
    covariance = sigma**2 * np.eye(n) + variance * X @ X.T
    log_evidence = -0.5 * (r @ np.linalg.solve(covariance, r) + np.linalg.slogdet(covariance)[1])
    at_zero = -0.5 * (r @ r / sigma**2 + n * math.log(sigma**2))  # L(0) = 0 drops this
    assert float(found) == pytest.approx(math.log(20) - (log_evidence - at_zero), abs=1e-9)


def exact_gaussian_level(X, r, sigma, variance, delta):
    """``log(1/delta)`` less the log-evidence of a Gaussian likelihood and prior, in 40 digits."""
    with mp.workdps(40):
        X, r, g = mp.matrix(X.tolist()), mp.matrix(r.tolist()), mpf(sigma) ** 2
        precision, pull = X.T * X / g + mp.eye(X.cols) / variance, X.T * r / g
        gain = (pull.T * mp.lu_solve(precision, pull))[0]
        return float(-mp.log(delta) - (gain - mp.log(mp.det(variance * precision))) / 2)


@pytest.mark.parametrize("increments", ["auto", "rows", "aggregated"])
@pytest.mark.parametrize(
    ("dtype", "sigma", "S", "d", "n"),
    [
        (torch.float64, 0.007, 400.0, 2, 5),
        (torch.float64, 0.0006, 700.0, 8, 300),
        (torch.float32, 0.02, 600.0, 2, 1),
        (torch.float32, 0.1, 30.0, 3, 50),
    ],
)
def test_a_posterior_that_is_narrow_along_the_rows_and_wide_across_them(
    dtype, sigma, S, d, n, increments, generator
):
    """Products of rows with a covariance of such a condition cancel to nothing."""
    for _ in range(6):
        direction = torch.randn(d, dtype=torch.float64, generator=generator)
        direction = direction / torch.linalg.vector_norm(direction)
        length = 0.3 + 0.69 * torch.rand(n, dtype=torch.float64, generator=generator)
        X = (length[:, None] * direction).to(dtype)
        noise = sigma * torch.randn(n, dtype=torch.float64, generator=generator)
        r = (0.8 * length + noise).to(dtype)
        radius = radii.GaussianPrior(increments=increments)
        sequence = ConfidenceSequence(Gaussian(sigma), Ball(d, S), 0.05, radius, dtype=dtype)
        sequence.update(X, r)
        found = float(sequence.evaluation().level)
        floor = exact_gaussian_level(X.double(), r.double(), sigma, mpf(S) ** 2 / d, mpf("0.05"))
        assert found >= floor
        if dtype == torch.float64 and increments != "aggregated":  # a trace hardly tells
            assert found <= floor + 0.01


@pytest.mark.parametrize("temper", [1.0, 0.5])
@pytest.mark.parametrize("name", ["Bernoulli", "Poisson", "probit"])
def test_gaussian_prior_level_in_the_plane(name, temper, generator):
    family, variance = FAMILIES[name], 1.5
    loss, theta = draw(family, 20, 2, 1.0, generator)
    found = radii.gaussian_prior_level(loss, 0.05, theta, variance, temper)
    H = loss.expand(theta).hessian
    W = H / temper + torch.eye(2, dtype=torch.float64) / variance
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(2).double(), variance * torch.eye(2).double()
    )
    posterior = torch.distributions.MultivariateNormal(theta, precision_matrix=W)
    divergence = torch.distributions.kl_divergence(posterior, prior)
    u, w = np.polynomial.hermite_e.hermegauss(60)
    grid = np.stack(np.meshgrid(u, u, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(w, w).flatten() / w.sum() ** 2
    points = theta + tensor(grid) @ posterior.scale_tril.T
    mean_loss = (tensor(weights) * loss.value(points)).sum()
    expected = float(math.log(20) + divergence + mean_loss)
    slack = {"Bernoulli": 0.1, "Poisson": 1e-6, "probit": 1e-6}[name]
    assert expected - 1e-6 <= float(found) <= expected + slack


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
def test_gaussian_prior_refuses_constants_of_the_ball_only():
    family = CustomFamily(torch.nn.functional.softplus, reward_range=(0.0, 1.0))
    loss = NegativeLogLikelihood(family, torch.eye(2).double(), torch.ones(2).double())
    with pytest.raises(InputError, match="whole line"):
        radii.gaussian_prior_level(loss, 0.05, torch.zeros(2).double(), 1.0)
    with pytest.raises(InputError, match="whole line"):
        radii.GaussianPrior().init(radii.Problem(family, Ball(2, 1.0), 0.05))


# ---- the mixture -------------------------------------------------------------------------------


def log_mean(losses, weights):
    """``log sum weights exp(-losses)``."""
    return special.logsumexp(-losses, b=weights)


def dense_mixture(loss, S, d, nodes):
    """``-log E_Q exp(-L)`` by product quadrature in polar coordinates about the origin."""
    x, w = special.roots_legendre(nodes)
    if d == 1:
        return -log_mean(loss.value(tensor(S * x[:, None])).numpy(), w / 2)
    r, wr = S * (x + 1) / 2, w / 2 * ((x + 1) / 2) ** (d - 1) * d
    angle = 2 * np.pi * np.arange(2 * nodes) / (2 * nodes)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if d == 2:
        directions, wd = circle, np.full(len(angle), 1 / len(angle))
    else:
        height = np.sqrt(1 - x**2)
        flat = height[:, None, None] * circle
        directions = np.concatenate(
            [flat, np.broadcast_to(x[:, None, None], (*flat.shape[:2], 1))], -1
        )
        directions, wd = directions.reshape(-1, 3), np.repeat(w / 2, len(angle)) / len(angle)
    parts = []
    for radius, weight in zip(r, wr, strict=True):
        losses = loss.value(tensor(radius * directions)).numpy()
        parts.append(log_mean(losses, weight * wd))
    return -special.logsumexp(parts)


@pytest.mark.parametrize(
    ("name", "d", "S", "n", "star"),
    [
        ("Bernoulli", 1, 4.0, 3, 0.5),
        ("Bernoulli", 1, 30.0, 60, 1.0),
        ("Bernoulli", 2, 0.5, 10, 1.0),
        ("Bernoulli", 2, 4.0, 1, 0.5),
        ("Bernoulli", 2, 4.0, 60, 1.0),
        ("Bernoulli", 2, 30.0, 15, 1.0),
        ("Bernoulli", 3, 3.0, 15, 1.0),
        ("Gaussian", 2, 2.0, 30, 0.5),
        ("Gaussian", 3, 1.0, 10, 1.0),
        ("Poisson", 2, 1.5, 30, 0.8),
        ("probit", 1, 3.0, 20, 0.5),
    ],
)
def test_mixture_level(name, d, S, n, star, generator):
    loss, theta = draw(FAMILIES[name], n, d, S, generator, star)
    problem = radii.Problem(FAMILIES[name], Ball(d, S), 0.05)
    radius = radii.Mixture()
    state = radius.update(problem, radius.init(problem), loss.X, loss.r)
    result = radius.evaluate(problem, state, loss, Estimate.at(loss, problem.domain, theta))
    centre = radius.inner.centres(problem, result.state)[0]
    found = float(radii.mixture_level(loss, Ball(d, S), 0.05, centre))
    expected = math.log(20) + dense_mixture(loss, S, d, {1: 3000, 2: 250, 3: 48}[d])
    assert expected - 1e-6 <= found <= expected + (0.02 if d == 3 else 0.01)
    assert expected - 1e-6 <= float(result.level) <= found + 1e-9
    # any centre is valid
    other = radii.mixture_level(loss, Ball(d, S), 0.05, 0.3 * centre)
    assert expected - 1e-6 <= float(other)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_mixture_seen_from_far_off_the_mode(d):
    """There the loss is so much larger than at the mode that their quotient overflows."""
    X, r = torch.eye(d, dtype=torch.float64), torch.full((d,), 3500.0).double()
    loss, mode = NegativeLogLikelihood(Binomial(4000), X, r), math.log(7.0) * torch.ones_like(r)
    near, far = (radii.mixture_level(loss, Ball(d, 6.0), 0.05, c * mode) for c in (1.0, 0.0))
    assert float(near) - 0.02 <= float(far) < math.inf


@pytest.mark.parametrize(("dtype", "sigma"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_mixture_of_losses_whose_rounding_is_large(dtype, sigma, d, generator):
    """The last digit of the loss at the mode is more than the logarithm of any number."""
    X = torch.randn(200, d, generator=generator)
    X = 0.99 * X / torch.linalg.vector_norm(X, dim=-1).max()
    r = 2.0 * X[:, 0] + sigma * torch.randn(200, generator=generator)
    sequence = ConfidenceSequence(Gaussian(sigma), Ball(d, 3.0), 0.05, "mixture", dtype=dtype)
    sequence.update(X.to(dtype), r.to(dtype))
    with mp.workdps(50):
        rows, rewards = (mp.matrix(t.double().tolist()) for t in (X, r))
        hessian, moment = (rows.T * t / mpf(sigma) ** 2 for t in (rows, rewards))
        least = -(moment.T * mp.lu_solve(hessian, moment))[0] / 2
        # the ball holds all of the mass
        half = mpf(d) / 2
        volume = mp.pi**half / mp.gamma(half + 1) * mpf(3) ** d
        density = mp.log(volume) - half * mp.log(2 * mp.pi)
        level = mp.log(20) + least + density + mp.log(mp.det(hessian)) / 2
        assert level <= float(sequence.current().level) < level + abs(least) * 1e-4


def test_mixture_without_rows():
    for d in (1, 2, 3):
        X = torch.zeros(0, d, dtype=torch.float64)
        loss = NegativeLogLikelihood(Bernoulli(), X, X[:, 0])
        for S in (0.1, 50.0):
            level = radii.mixture_level(loss, Ball(d, S), 0.05, torch.zeros(d).double())
            assert math.log(20) - 1e-9 <= float(level) <= math.log(20) + 0.01


def test_mixture_of_four_dimensions_is_refused():
    X = torch.zeros(0, 4, dtype=torch.float64)
    loss = NegativeLogLikelihood(Bernoulli(), X, X[:, 0])
    with pytest.raises(InputError, match="at most 3"):
        radii.mixture_level(loss, Ball(4, 1.0), 0.05, torch.zeros(4).double())
    with pytest.raises(InputError, match="at most 3"):
        radii.Mixture().init(radii.Problem(Bernoulli(), Ball(4, 1.0), 0.05))


# ---- what levels refuse ------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
LEVELS = {
    "pac-bayes": lambda loss, c: radii.pac_bayes_level(loss, Ball(2, 4.0), 0.05, c),
    "mixture": lambda loss, c: radii.mixture_level(loss, Ball(2, 4.0), 0.05, c),
    "gaussian": lambda loss, c: radii.gaussian_prior_level(loss, 0.05, c, 8.0),
    "centred": lambda loss, c: radii.centred_level(loss, 0.05, c, 0.5),
}


def small_loss(r=(1.0, 0.0), w=None, batch=()):
    parts = (tensor(np.eye(2)), tensor(r), *(() if w is None else (tensor(w),)))
    return NegativeLogLikelihood(Bernoulli(), *(t.expand(batch + t.shape) for t in parts))


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize(
    ("change", "centre", "message"),
    [
        (
            {"w": [5.0, 1.0]},
            [0.0, 0.0],
            r"w: expected weights in \[0, 1\] \(of merged rows.*got 5.0",
        ),
        ({"w": [-1.0, 1.0]}, [0.0, 0.0], "w: expected non-negative weights"),
        ({"r": [7.0, 1.0]}, [0.0, 0.0], "r: expected rewards of Bernoulli"),
        ({}, [NAN, 0.0], "centre: expected finite"),
        ({}, [0.0, 0.0, 0.0], r"centre: expected shape \(2,\), got shape \(3,\)"),
        ({}, "middle", "centre: expected a tensor"),
    ],
)
def test_levels_refuse_rows_and_centres_by_name(level, change, centre, message):
    with pytest.raises(InputError, match=f"^{message}"):
        level(small_loss(**change), centre)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_levels_take_centres_of_any_kind(level):
    plain = level(small_loss(), tensor([0.5, 0.25]))
    for centre in ([0.5, 0.25], np.array([0.5, 0.25])):
        assert torch.equal(level(small_loss(), centre), plain)
    together = level(small_loss(batch=(3,)), tensor([0.5, 0.25]))
    torch.testing.assert_close(together, plain.expand(3))
    with pytest.raises(InputError, match="likelihood: expected a NegativeLogLikelihood, got str"):
        level("loss", [0.0, 0.0])


@pytest.mark.parametrize("level", [radii.pac_bayes_level, radii.mixture_level])
@pytest.mark.parametrize("ball", [Ball(1, 4.0), Ball(3, 4.0), 4.0])
def test_levels_refuse_a_ball_of_other_problems(level, ball):
    with pytest.raises(InputError, match="^domain: expected"):
        level(small_loss(), ball, 0.05, torch.zeros(2))


@pytest.mark.parametrize("size", [0.0, -1.0, NAN, INF, "8", True, [1.0, 2.0], tensor(-1.0)])
def test_levels_refuse_scales_by_name(size):
    with pytest.raises(InputError, match="^variance: expected"):
        radii.gaussian_prior_level(small_loss(), 0.05, torch.zeros(2), size)
    with pytest.raises(InputError, match="^scale: expected"):
        radii.centred_level(small_loss(), 0.05, torch.zeros(2), size)
