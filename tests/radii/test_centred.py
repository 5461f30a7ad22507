"""The centred radius: its formulas by an independent calculation, its proof of convexity."""

import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.errors import InputError
from torchglb.estimate import Estimate
from torchglb.radii.posterior.centred import PRICES, average_priors
from torchglb.radii.posterior.curvature import curved_region

DELTA = 0.05
FAMILIES = {
    "bernoulli": glb.Bernoulli(),
    "binomial": glb.Binomial(3),
    "gaussian": glb.Gaussian(0.7),
    "poisson": glb.Poisson(),
    "probit": glb.QuasiBounded("probit"),
    "cloglog": glb.QuasiBounded("cloglog"),
}


def rows(
    family: glb.GLMFamily, n: int, d: int, seed: int = 0, size: float = 1.5
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    theta = torch.full((d,), size / math.sqrt(d), dtype=torch.float64)
    return X, family.sample(X @ theta, generator)


def evaluated(
    family: glb.GLMFamily, n: int, d: int, S: float = 3.0, radius: radii.Radius | None = None
) -> tuple[radii.Evaluation, glb.NegativeLogLikelihood, Tensor]:
    """The evaluation, the loss, and the estimate."""
    X, r = rows(family, n, d)
    radius = radii.Centred() if radius is None else radius
    problem = radii.Problem(family, glb.Ball(d, S), DELTA)
    state = radius.update(problem, radius.init(problem), X, r)
    loss = glb.NegativeLogLikelihood(family, X, r)
    fit = glb.constrained_mle(family, glb.Rows(X, r), glb.Ball(d, S))
    return radius.evaluate(problem, state, loss, fit.estimate()), loss, fit.theta


# ---- golden values ---------------------------------------------------------------------------------


def test_gaussian_case_in_closed_form():
    """For squared loss the posterior is exact, and B is minus the log of a Gaussian integral."""
    g, lam, w = 0.49, 1.7, 0.125
    X, r = rows(glb.Gaussian(0.7), 12, 2)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(0.7), X, r)
    V = (X.mT @ X / g).numpy()
    c = np.linalg.solve(V, (X.mT @ r / g).numpy())
    level = float(radii.centred_level(loss, DELTA, torch.from_numpy(c), lam, w))
    # L(nu) = L(c) + (nu - c)'V(nu - c)/2; with nu ~ N(theta, I/lam),
    # -log E exp(-L(nu)) = L(c) + log det(I + V/lam)/2 + (theta - c)'(V^-1 + I/lam)^-1(theta - c)/2
    least = float(loss(torch.from_numpy(c)))
    constant = least + 0.5 * np.linalg.slogdet(np.eye(2) + V / lam)[1] - math.log(w * DELTA)
    assert level == pytest.approx(constant, abs=1e-9)
    # the martingale's own set is smaller than the quadratic superset, and touches it at c
    theta = c + np.array([0.3, -0.2])
    exact = 0.5 * (theta - c) @ np.linalg.inv(np.linalg.inv(V) + np.eye(2) / lam) @ (theta - c)
    assert 0.5 * lam * (theta - c) @ (theta - c) >= exact


def test_level_by_mpmath():
    """B_k of a small Bernoulli data set in 30 digits: with the documented bound on E_P m(z), which
    it is, and with E_P m(z) itself by quadrature, below which it must not be."""
    mpmath.mp.dps = 30
    X, r, lam, w = [[0.6, 0.8], [1.0, 0.0], [-0.3, 0.5]], [1.0, 0.0, 1.0], 0.8, 0.0625
    c = [0.2, 0.7]
    features = [mpmath.mpf(x[0]) * c[0] + mpmath.mpf(x[1]) * c[1] for x in X]
    variances = [1 / (2 + 2 * mpmath.cosh(z)) for z in features]
    W = lam * mpmath.eye(2)
    for x, v in zip(X, variances, strict=True):
        for i in range(2):
            for j in range(2):
                W[i, j] += v * mpmath.mpf(x[i]) * x[j]
    cov = W**-1
    exact = bound = mpmath.mpf(0)
    for x, reward, z, v in zip(X, r, features, variances, strict=True):
        s2 = sum(x[i] * cov[i, j] * x[j] for i in range(2) for j in range(2))
        s = mpmath.sqrt(s2)

        def density(u, z=z, s=s):
            return mpmath.log1p(mpmath.exp(z + s * u)) * mpmath.npdf(u)

        exact += mpmath.quad(density, [-12, -4, 0, 4, 12]) - reward * z
        jensen = mpmath.log1p(2 * v * mpmath.expm1(s2 / 2)) / 2
        flat = mpmath.sqrt(2 / mpmath.pi) * s / 2
        bound += mpmath.log1p(mpmath.exp(z)) + min(jensen, s2 / 8, flat) - reward * z
    divergence = (lam * (cov[0, 0] + cov[1, 1]) - 2 + mpmath.log(mpmath.det(W) / lam**2)) / 2
    rest = divergence - mpmath.log(w * DELTA)
    numbers = [torch.tensor(t, dtype=torch.float64) for t in (X, r, c)]
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *numbers[:2])
    level = float(radii.centred_level(loss, DELTA, numbers[2], lam, w))
    assert level == pytest.approx(float(bound + rest), abs=1e-9)
    assert float(exact + rest) <= level <= float(exact + rest) + 0.05


def test_poisson_level_is_exact():
    """E_P e^z is closed-form, so the level is the exact one."""
    X, r = rows(glb.Poisson(), 6, 2, size=0.5)
    c, lam = torch.tensor([0.1, 0.3]).double(), 2.0
    loss = glb.NegativeLogLikelihood(glb.Poisson(), X, r)
    H = loss.hessian(c).numpy()
    cov = np.linalg.inv(H + lam * np.eye(2))
    z, s2 = X.numpy() @ c.numpy(), np.einsum("ni,ij,nj->n", X.numpy(), cov, X.numpy())
    mean = (np.exp(z + s2 / 2) - r.numpy() * z).sum()
    divergence = 0.5 * (lam * np.trace(cov) - 2 - np.linalg.slogdet(lam * cov)[1])
    expected = mean + divergence - math.log(DELTA)
    assert float(radii.centred_level(loss, DELTA, c, lam)) == pytest.approx(expected, abs=1e-9)


def test_set_holds_the_mixture_itself_in_one_dimension():
    """{sum of the martingales < 1/delta} by quadrature, against the reported set, d = 1."""
    family, S, n = glb.Bernoulli(), 3.0, 400
    found, loss, theta_hat = evaluated(family, n, 1, S)
    outer, level, ridge, center, region = found.refinement
    assert float(ridge) < 0
    X, r = loss.X[:, 0].numpy(), loss.r.numpy()
    grid = np.linspace(-S, S, 4001)

    def L(t):
        z = np.multiply.outer(t, X)
        return np.logaddexp(0, z).sum(-1) - z @ r

    values, least = L(grid), float(loss.value(theta_hat))
    uniform = scipy.integrate.simpson(np.exp(least - values), x=grid) / (2 * S)
    radius = radii.Centred()
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    held = 0
    for t in grid[::20]:
        total = radius.uniform * uniform
        for k in range(radius.scales):
            lam = radius.ratio**k / S**2
            average = weights @ np.exp(least - L(t + nodes / math.sqrt(lam)))
            total += (1 - radius.uniform) / radius.scales * average
        if float(L(np.array([t]))[0]) - least + math.log(total) < math.log(1 / DELTA):
            held += 1
            point = torch.tensor([t])
            bent = float(loss.value(point) + 0.5 * ridge * t * t - ridge * center[0] * t)
            assert bent <= float(level)
            assert float(loss.value(point)) <= float(found.level)
            assert float(region.excess(point[None])) <= 0
    assert held > 5


def test_average_of_priors_is_the_formula():
    """B_q = log(1/delta) + sum q (A + log(q/w)), lambda_q = sum q lambda, for the softmax q."""
    generator = torch.Generator().manual_seed(3)
    costs = 5.0 * torch.rand(2, 4, generator=generator, dtype=torch.float64)
    scales = torch.tensor([0.0, 1.0, 4.0, 16.0]).double().expand(2, 4)
    w = torch.tensor([0.5, 0.2, 0.2, 0.1]).double()
    prices = torch.tensor([0.1, 1.0, 3.0]).double().expand(2, 3)
    found = average_priors(math.log(1 / DELTA), costs, scales, w.log(), prices)
    for b in range(2):
        for j in range(3):
            q = w * torch.exp(-costs[b] - 0.5 * scales[b] * prices[b, j])
            q = q / q.sum()
            excess = math.log(1 / DELTA) + float((q * (costs[b] + (q / w).log())).sum())
            assert float(found.excess[b, j]) == pytest.approx(excess, abs=1e-10)
            assert float(found.excess[b, j]) >= excess - 1e-15
            assert float(found.scale[b, j]) == pytest.approx(float(q @ scales[b]), abs=1e-12)
    # a larger price, a smaller lambda
    assert bool((found.scale.diff(dim=-1) < 0).all())


# ---- convex by proof -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_curvature_is_a_lower_bound_all_over_the_region(name):
    family, d, S = FAMILIES[name], 3, 2.0
    X, r = rows(family, 300, d)
    w = torch.linspace(0.1, 1.0, 300).double()
    loss = glb.NegativeLogLikelihood(family, X, r, w)
    fit = glb.constrained_mle(family, glb.Rows(X, r, w), glb.Ball(d, S))
    at, number = loss.expand(fit.theta), torch.tensor(S).double()
    concordance = torch.tensor(radii.self_concordance_of(family, S)).double()
    height, gap = torch.tensor(4.0).double(), torch.tensor(1e-6).double()
    given = (loss, fit.theta, at, height, gap, number, concordance)
    region = curved_region(*given, torch.float64)
    assert float(region.curvature) > 0
    generator = torch.Generator().manual_seed(1)
    factor = torch.linalg.cholesky(region.shape)
    v = torch.nn.functional.normalize(torch.randn(200, d, generator=generator).double(), dim=-1)
    away = torch.linalg.solve_triangular(factor.mT, v.mT, upper=True).mT
    points = fit.theta + region.size.sqrt() * away * torch.linspace(0.5, 1.0, 200)[:, None]
    points = points[torch.linalg.vector_norm(points, dim=-1) <= S]
    assert len(points) > 20
    least = torch.linalg.eigvalsh(loss.hessian(points))[:, 0]
    assert bool((least >= region.curvature).all())
    # every point of the outer set is in the region
    ball = S * v * torch.rand(200, 1, generator=generator).double()
    inner = ball[loss.value(ball) <= at.loss + height]
    assert len(inner) > 0
    assert bool((region.excess(inner) <= 0).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_second_derivatives_are_least_at_an_end(name):
    """What the proof rests on: m'' is log-concave."""
    z = torch.linspace(-8.0, 8.0, 2001, dtype=torch.float64)
    log = FAMILIES[name].variance(z).log()
    log = log[log > -600]
    assert bool((log[2:] - 2 * log[1:-1] + log[:-2] <= 1e-9).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_with_the_negative_ridge_is_convex_there(name):
    found, loss, theta_hat = evaluated(FAMILIES[name], 1500, 2)
    _, _, ridge, center, region = found.refinement
    assert float(ridge) < 0, "no scale was proven convex"
    assert float(-ridge) <= float(region.curvature)
    generator = torch.Generator().manual_seed(2)
    ball = 3.0 * torch.nn.functional.normalize(torch.randn(400, 2, generator=generator), dim=-1)
    points = region.pull_in(ball.double())
    one, other = points[:200], points[200:]

    def bent(theta: Tensor) -> Tensor:
        return loss.value(theta) + 0.5 * ridge * (theta - center).square().sum(-1)

    middle = 0.5 * (one + other)
    assert bool((bent(middle) <= 0.5 * (bent(one) + bent(other)) + 1e-9).all())


def test_nothing_is_refined_where_nothing_is_proven():
    """Rows that do not span: the outer set is left, and its level is that of the uniform prior."""
    family, ball = glb.Bernoulli(), glb.Ball(2, 3.0)
    X = torch.tensor([[1.0, 0.0]]).double().repeat(50, 1)
    r = torch.tensor([1.0, 0.0]).double().repeat(25)
    radius, problem = radii.Centred(), radii.Problem(family, ball, DELTA)
    state = radius.update(problem, radius.init(problem), X, r)
    loss = glb.NegativeLogLikelihood(family, X, r)
    known = Estimate.at(loss, ball, torch.zeros(2).double())
    found = radius.evaluate(problem, state, loss, known)
    half = radii.Problem(family, ball, 0.5 * DELTA)
    inner = radii.PACBayes()
    state = inner.update(half, inner.init(half), X, r)
    alone = inner.evaluate(half, state, loss, known)
    assert float(found.refinement.ridge) == 0.0
    assert float(found.level) == float(found.refinement.outer) == float(alone.level)


def test_level_bounds_the_loss_over_the_set():
    """Evaluation.level holds for every point of the refined set, and is below the outer level."""
    found, loss, theta_hat = evaluated(glb.Bernoulli(), 20_000, 2)
    outer, level, ridge, center, region = found.refinement
    assert float(found.level) < float(outer) - 0.5
    angle = torch.linspace(0, 2 * math.pi, 12, dtype=torch.float64)
    ray = torch.stack([angle.cos(), angle.sin()], dim=-1)
    t = torch.linspace(0, 0.4, 30, dtype=torch.float64)
    points = (theta_hat + t[:, None, None] * ray).reshape(-1, 2)
    value = loss.value(points)
    bent = value + 0.5 * ridge * points.square().sum(-1) - ridge * (points @ center)
    inside = (bent <= level) & (region.excess(points) <= 0) & (value <= outer)
    assert bool(inside.any())
    assert bool((value[inside] <= found.level).all())


# ---- the object -------------------------------------------------------------------------------------


def test_scales_of_a_batch_are_chosen_element_by_element():
    """Elements that differ in S and in their rows: each as it would be alone."""
    family, radius = glb.Bernoulli(), radii.Centred()
    X, r = rows(family, 600, 2)
    S = torch.tensor([2.0, 3.0, 6.0]).double()
    keep = torch.tensor([600, 40, 3])
    w = (torch.arange(600) < keep[:, None]).double()
    problem = radii.Problem(family, glb.Ball(2, S), DELTA, (3,))
    Xs, rs = X.expand(3, 600, 2), r.expand(3, 600)
    state = radius.update(problem, radius.init(problem), Xs, rs, w)
    loss = glb.NegativeLogLikelihood(family, Xs, rs, w)
    fit = glb.mle.minimize_likelihood(loss, glb.Ball(2, S))
    together = radius.evaluate(problem, state, loss, fit.estimate())
    assert float(together.refinement.ridge[0]) < 0
    assert float(together.refinement.ridge[2]) == 0
    for b in range(3):
        alone = radii.Problem(family, glb.Ball(2, float(S[b])), DELTA)
        part = radius.update(alone, radius.init(alone), X, r, w[b])
        single = glb.NegativeLogLikelihood(family, X, r, w[b])
        found = radius.evaluate(
            alone, part, single, Estimate.at(single, alone.domain, fit.theta[b])
        )
        for one, many in zip(
            found.refinement.tensors(), together.refinement.tensors(), strict=True
        ):
            torch.testing.assert_close(one, many[b], rtol=1e-9, atol=1e-9)


def test_weights_and_prices():
    assert PRICES[0] == 4.0
    assert PRICES[-1] < 1e-6
    wide = radii.Centred(scales=3, ratio=10.0, uniform=0.9)
    found, loss, theta = evaluated(glb.Gaussian(0.5), 500, 2, radius=wide)
    lam = -float(found.refinement.ridge)
    assert 0 < lam <= 2 / 9.0 * 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scales": 0}, "scales: expected"),
        ({"ratio": 1.0}, "ratio: expected a number above 1"),
        ({"uniform": 1.0}, r"uniform: expected a number in \(0, 1\)"),
        ({"inner": radii.Mixture()}, "inner: expected a PACBayes radius"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        radii.Centred(**settings)


def test_wrong_arguments_of_the_level_are_refused():
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), torch.eye(2), torch.ones(2))
    for settings, name in (({"scale": 0.0}, "scale"), ({"weight": 2.0}, "weight")):
        with pytest.raises(InputError, match=f"{name}: expected"):
            radii.centred_level(loss, DELTA, torch.zeros(2), **({"scale": 1.0} | settings))


def test_families_without_constants_on_the_line_are_refused():
    family = glb.families.CustomFamily(lambda z: z**2 / 2 + 0.01 * torch.cos(z))
    with pytest.raises(InputError, match="whose constants hold on the whole line"):
        radii.Centred().init(radii.Problem(family, glb.Ball(2, 1.0), DELTA))
