"""Each inequality on which a contrast's interval rests, against independent calculations."""

import math

import mpmath
import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import ContrastSequence
from torchglb.backend import entry
from torchglb.contrasts.arm_kernels import reaches
from torchglb.contrasts.arms import ArmContrasts
from torchglb.contrasts.enclosure import centred_budgets, enclose
from torchglb.contrasts.kernels import least_dual
from torchglb.contrasts.lines import (
    SCALES,
    Line,
    LinearisedRows,
    LineSums,
    largest_on_ellipsoid,
    mixture_ends,
    scale_weights,
)
from torchglb.contrasts.look import Joint, look
from torchglb.contrasts.rows import bend_bound, contraction, expansion, least_curvature
from torchglb.contrasts.weights import WeighedRows
from torchglb.likelihood import NegativeLogLikelihood

DTYPE = torch.float64
FAMILIES = [glb.Gaussian(0.7), glb.Bernoulli(), glb.Binomial(4), glb.Poisson()]
ALL = [*FAMILIES, glb.QuasiBounded("probit"), glb.QuasiBounded("cloglog")]


def named(family):
    return getattr(family, "link", type(family).__name__)


def test_the_two_functions_of_self_concordance():
    mpmath.mp.dps = 40
    for D in (0.0, 1e-6, 9e-3, 1.1e-2, 0.5, 3.0, 20.0):
        x = mpmath.mpf(D)
        low = (x - 1 + mpmath.exp(-x)) / x**2 if D else mpmath.mpf("0.5")
        high = (mpmath.exp(x) - 1 - x) / x**2 if D else mpmath.mpf("0.5")
        D = torch.tensor(D, dtype=DTYPE)
        assert low * (1 - 1e-6) <= float(contraction(D)) <= low * (1 + 1e-12)
        assert high * (1 - 1e-12) <= float(expansion(D)) <= high * (1 + 1e-4)


@pytest.mark.parametrize("family", ALL, ids=named)
def test_curvature_and_bend_along_a_row(family):
    """For random z, shift and reach, on a grid of t up to the reach."""
    generator = torch.Generator().manual_seed(0)
    S, longest = 3.0, 2.0
    R, wide = family.self_concordance(S), family.self_concordance(S + longest)
    reach = 1.5 * torch.rand(400, generator=generator, dtype=DTYPE)
    z = (S - reach) * (2.0 * torch.rand(400, generator=generator, dtype=DTYPE) - 1.0)
    h = longest * (2.0 * torch.rand(400, generator=generator, dtype=DTYPE) - 1.0)
    t = torch.linspace(-1.0, 1.0, 201, dtype=DTYPE)[:, None] * reach
    m, mu = family.log_partition, family.mean
    rise = m(z + t) - m(z) - mu(z) * t
    slip = 1e-10 * (1.0 + m(z + t).abs())
    assert bool((rise >= least_curvature(family, z, reach, R) * t**2 - slip).all())
    D = m(z + t + h) - m(z + t) - (m(z + h) - m(z)) - (mu(z + h) - mu(z)) * t
    k = bend_bound(family, z, h, reach, R, wide)
    slip = 1e-10 * (1.0 + m(z + t + h).abs())
    assert bool((0.5 * k * t**2 + slip >= D).all())
    if type(family) in (glb.Bernoulli, glb.Poisson):  # and not by far too much
        small = 0.01 * reach
        near = bend_bound(family, z, h, small, R, wide)
        exact = family.variance(z + h) - family.variance(z)
        torch.testing.assert_close(near, exact, rtol=0.2, atol=0.02)


def test_the_largest_value_on_an_ellipsoid():
    """Against the stationary points of the Lagrangian, and random points."""
    generator = torch.Generator().manual_seed(1)
    for d in (1, 2, 5):
        for sign in (1.0, -1.0, 0.0):
            root = torch.randn((d, d), generator=generator, dtype=DTYPE)
            matrix = root @ root.mT + 0.1 * torch.eye(d, dtype=DTYPE)
            A = torch.randn((d, d), generator=generator, dtype=DTYPE)
            A = A + A.mT if sign == 0.0 else sign * A @ A.mT
            e = torch.randn(d, generator=generator, dtype=DTYPE)
            factor = torch.linalg.cholesky(matrix)
            bound = largest_on_ellipsoid(e, A, factor)
            y = torch.randn((1000, d), generator=generator, dtype=DTYPE)
            y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
            y = torch.cat([y, y * torch.rand((1000, 1), generator=generator, dtype=DTYPE)])
            for _ in range(200):  # climb on the sphere
                u = torch.linalg.solve_triangular(factor.mT, y.mT, upper=True).mT
                slope = torch.linalg.solve_triangular(factor, (e + u @ A).mT, upper=False).mT
                y = y + 0.1 * slope / (1.0 + torch.linalg.vector_norm(A))
                y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min(1.0)
            u = torch.linalg.solve_triangular(factor.mT, y.mT, upper=True).mT
            best = float((u @ e + 0.5 * ((u @ A) * u).sum(-1)).max())
            assert bound >= best
            assert bound <= best + 0.02 * (1.0 + abs(best))


def test_the_ends_of_a_mixture():
    """Against a root found by mpmath in 40 digits."""
    mpmath.mp.dps = 40
    weights = scale_weights()
    assert sum(2.0 * w for w in weights) == pytest.approx(1.0, rel=1e-12)
    lines = []
    for k in (2, 3, 4):
        u = 2.0 ** (1 - k)
        lines += [
            Line(math.log(weights[k]), -0.5 * u * u * 50.0, sign * u * 50.0, 0.0, 0.0, 0.0)
            for sign in (1.0, -1.0)
        ]
    level = math.log(1 / 0.04)
    low, high = mixture_ends(lines, level)

    def excess(v):
        terms = [mpmath.exp(mpmath.mpf(x.log_weight) + x.base - x.alpha * v) for x in lines]
        return mpmath.log(sum(terms)) - mpmath.log(25)

    root = mpmath.findroot(excess, 0.5)
    assert float(root) <= high <= float(root) + 1e-6
    assert low == pytest.approx(-high, rel=1e-9)
    alone = min((level - x.log_weight - x.base) / abs(x.alpha) for x in lines)
    assert high < alone  # more than one scale counts
    assert mixture_ends([], level) == (-math.inf, math.inf)


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Poisson()], ids=named)
def test_the_centred_budget_is_below_the_mixture(family):
    """``log E exp(L(theta) - L(nu))``, nu ~ N(theta, 1/lam), by quadrature in one dimension."""
    mpmath.mp.dps = 25
    generator = torch.Generator().manual_seed(2)
    X = 2.0 * torch.rand((30, 1), generator=generator, dtype=DTYPE) - 1.0
    r = family.sample(0.8 * X[:, 0], generator)
    w = torch.rand(30, generator=generator, dtype=DTYPE)
    loss = NegativeLogLikelihood(family, X, r, w)
    fit = glb.constrained_mle(family, glb.Rows(X, r, w), glb.Ball(1, 2.0))
    hessian = loss.hessian(fit.theta)
    budgets = centred_budgets(loss, fit.theta, hessian, 2.0, log_level=0.0)
    assert budgets
    nodes, chances = np.polynomial.hermite_e.hermegauss(80)
    for budget in budgets:
        for theta in (-1.0, 0.3, 1.2):
            nu = torch.tensor(theta + nodes / math.sqrt(budget.lam), dtype=DTYPE)[:, None]
            here = loss.value(torch.tensor([theta], dtype=DTYPE))
            ratio = torch.exp(here - loss.value(nu)).numpy()
            log_mean = math.log(float((ratio * chances).sum() / chances.sum()))
            away = theta - float(fit.theta)
            # what the budget claims of a mixture with all weight on this scale
            height = budget.height - math.log(8.0)
            claimed = float(here - fit.loss) - height - 0.5 * budget.lam * away**2
            assert claimed <= log_mean + 1e-9


def scene(family, d, n, S=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn((n, d), generator=generator, dtype=DTYPE)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    star = torch.zeros(d, dtype=DTYPE)
    star[0] = 0.6 * S
    r = family.sample(X @ star, generator)
    contrast = torch.randn(d, generator=generator, dtype=DTYPE)
    contrast = contrast / torch.linalg.vector_norm(contrast)
    fit = glb.constrained_mle(family, glb.Rows(X, r), glb.Ball(d, S))
    rows = WeighedRows(NegativeLogLikelihood(family, X, r), contrast.numpy()[None], S)
    return X, r, rows, fit, contrast, weights_of(rows)[:, 0]


def weights_of(rows):
    """``(n, m)``."""
    return torch.cat([block.b for block in rows.blocks()])


@pytest.mark.parametrize("family", ALL, ids=named)
def test_lines_are_below_the_martingale_on_the_whole_joint_set(family):
    """The exponent itself at random parameters of the set, against its line."""
    d, n, S = 3, 200, 2.0
    X, r, weighed, fit, c, b = scene(family, d, n, S)
    loss = weighed.likelihood
    height, g, R = 8.0, family.dispersion, family.self_concordance(S)
    joint = Joint(weighed, fit.theta, height, math.log(20.0), S, R, centred=False)
    seen = look(joint, [6.0])
    assert seen.enclosure is not None
    generator = torch.Generator().manual_seed(3)
    points = torch.randn((1200, d), generator=generator, dtype=DTYPE)
    points = fit.theta + torch.linalg.solve_triangular(
        seen.enclosure.factor.mT,
        (1.1 * points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)).mT,
        upper=True,
    ).mT * torch.rand((1200, 1), generator=generator, dtype=DTYPE)  # fmt: skip
    inside = (loss.value(points) <= fit.loss + height) & (
        torch.linalg.vector_norm(points, dim=-1) <= S
    )
    points = points[inside]
    assert len(points) > 150
    # the ellipsoid and the reach of each row contain the set
    away = points - fit.theta
    assert bool((((away @ seen.enclosure.matrix) * away).sum(-1) <= 1.0 + 1e-9).all())
    assert bool(((away @ X.mT).abs() <= seen.enclosure.reach.along(X) + 1e-9).all())
    rows = LinearisedRows.of(family, X, r, fit.theta, seen.enclosure)
    z, checked = points @ X.mT, 0
    for k in (2, 4, 6):
        u = 2.0 ** (1 - k) * math.sqrt(g)
        sums = LineSums(family, d, [k], float(b.abs().max()), S, R)
        sums.add(rows, b)
        for line in sums.lines(c, seen.enclosure):
            h = math.copysign(u, line.alpha) * b
            shifted = family.log_partition(z + h) - family.log_partition(z)
            exponent = (h * r - shifted).sum(-1) / g
            claimed = line.base - line.alpha * (away @ c)
            assert bool((claimed <= exponent + 1e-8).all())
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize("centred", [False, True])
def test_golden_interval_of_a_gaussian_contrast(centred):
    """The whole interval by plain NumPy and mpmath, from the formulas of the docs page."""
    sigma, S, delta, share, d, n = 0.5, 2.0, 0.05, 0.1, 3, 60
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    r = X @ np.array([0.8, -0.5, 0.3]) + sigma * rng.normal(size=n)
    c = np.array([0.6, 0.0, 0.8])
    sequence = ContrastSequence(
        glb.Gaussian(sigma), glb.Ball(d, S), c[None], delta, share, centred=centred
    )
    sequence.update(X, r)
    region = sequence.joint.current()
    lower, upper = (float(end) for end in sequence.current())

    g = sigma**2
    b, H = np.zeros(n), np.eye(d) / g
    for s in range(n):
        toward = np.linalg.solve(H, c)
        b[s] = X[s] @ toward / (c @ toward)
        H = H + np.outer(X[s], X[s]) / g
    gram = X.T @ X
    hat = np.linalg.solve(gram, X.T @ r)  # inside the ball here
    assert np.linalg.norm(hat) < S
    loss = lambda t: ((X @ t) ** 2 / 2 - r * (X @ t)).sum() / g  # noqa: E731
    height = float(region.level) - loss(hat)
    wide = S + np.linalg.norm(hat)
    K = gram / (2 * g)
    shapes = [K / height, (K + np.eye(d) / wide**2) / (height + 1)]
    if centred:
        for k in range(8):
            lam = d / S**2 * 4**k
            if lam > 2 * np.linalg.eigvalsh(gram / g)[-1]:
                break
            W = gram / g + lam * np.eye(d)
            cover = np.linalg.inv(W)
            spread = 0.5 * np.einsum("ij,jk,ik->", X, cover, X) / g
            divergence = 0.5 * (
                lam * np.trace(cover) - d + np.linalg.slogdet(W)[1] - d * math.log(lam)
            )
            budget = math.log(2 / (delta * share)) + math.log(8) + spread + divergence
            shapes.append((K - 0.5 * lam * np.eye(d)) / budget)
    possible = [M for M in shapes if np.linalg.eigvalsh(M)[0] > 0]
    M = min(possible, key=lambda M: np.trace(np.linalg.solve(M, K)))
    Mi = np.linalg.inv(M)
    joint = math.sqrt(c @ Mi @ c)
    w = (b @ X) / g
    alpha = c @ Mi @ w / (c @ Mi @ c)
    e = w - alpha * c
    leak = math.sqrt(max(e @ Mi @ e, 0.0))
    G, V = b @ (r - X @ hat) / g, (b**2).sum() / g
    mpmath.mp.dps = 30
    weights = [1 / mpmath.mpf(k + 4) for k in range(SCALES)]
    total = 2 * sum(weights)
    best = 1 - 0.5 * math.log2(2 * (math.log(1 / (delta * (1 - share))) + 3) / (V * g))
    chosen = range(max(round(best) - 1, 0), round(best) + 2)

    def excess(v):
        found = mpmath.mpf(0)
        for k in chosen:
            u = mpmath.mpf(2) ** (1 - k) * sigma
            for sign in (1, -1):
                exponent = sign * u * G - u**2 * V / 2 - u * leak - sign * u * alpha * v
                found += weights[k] / total * mpmath.exp(exponent)
        return mpmath.log(found) - mpmath.log(1 / (delta * (1 - share)))

    ends = [float(mpmath.findroot(excess, G / alpha + sign * 3 / math.sqrt(V))) for sign in (-1, 1)]
    low, high = (c @ hat + v for v in (max(ends[0], -joint), min(ends[1], joint)))
    assert lower == pytest.approx(low, abs=1e-3 * (high - low))
    assert upper == pytest.approx(high, abs=1e-3 * (high - low))
    assert lower <= low + 1e-9
    assert upper >= high - 1e-9


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_arm_bounds_contain_whoever_obeys_both_events(family, weighted):
    """Parameters of the joint set at which the carried martingale is below its level."""
    generator = torch.Generator().manual_seed(4)
    d, K, n, S, delta, g = 2, 5, 400, 2.0, 0.01, family.dispersion
    arms = torch.randn((K, d), generator=generator, dtype=DTYPE)
    arms = 0.9 * arms / torch.linalg.vector_norm(arms, dim=-1, keepdim=True)
    pick = torch.randint(0, K, (n,), generator=generator)
    X = arms[pick]
    r = family.sample(X @ torch.tensor([1.0, 0.4], dtype=DTYPE), generator)
    w = 0.5 + 0.5 * torch.rand(n, generator=generator, dtype=DTYPE) if weighted else None
    fit = glb.constrained_mle(family, glb.Rows(X, r, w), glb.Ball(d, S))
    contrasts = ArmContrasts(family, np.array([S]), arms.numpy()[None], delta)
    given = [t.numpy()[None] for t in (X, r, w) if t is not None]
    contrasts = contrasts.with_rows(*given)
    height = 6.0
    lower, upper = (
        torch.from_numpy(end[0])
        for end in contrasts.bounds(fit.theta.numpy()[None], np.array([height]))
    )
    # the carried sums from scratch
    loss = NegativeLogLikelihood(family, X, r, w)
    b = weights_of(WeighedRows(loss, (arms / 0.9).numpy(), S))
    one_hot = torch.nn.functional.one_hot(pick, K).to(DTYPE)
    torch.testing.assert_close(torch.from_numpy(contrasts.sums.B[0]), b.mT @ one_hot)
    counts = one_hot.sum(0) if w is None else w @ one_hot
    torch.testing.assert_close(torch.from_numpy(contrasts.sums.counts[0]), counts)
    torch.testing.assert_close(torch.from_numpy(contrasts.sums.Y[0]), b.mT @ r)
    points = fit.theta + 0.6 * torch.randn((6000, d), generator=generator, dtype=DTYPE)
    inside = loss.value(points) <= fit.loss + height
    points = points[inside & (torch.linalg.vector_norm(points, dim=-1) <= S)]
    assert len(points) > 100
    z = points @ X.mT
    for k in range(K):
        obeys = torch.ones(len(points), dtype=torch.bool)
        for scale, weight in zip(range(11), scale_weights()[:11], strict=True):
            for sign in (1.0, -1.0):
                h = sign * 2.0 ** (1 - scale) * math.sqrt(g) * b[:, k]
                shifted = family.log_partition(z + h) - family.log_partition(z)
                exponent = (h * r - shifted).sum(-1) / g
                obeys &= exponent <= math.log(1 / (weight * delta))
        value = points[obeys] @ arms[k]
        assert bool(((value >= lower[k]) & (value <= upper[k])).all())
        assert len(value) > 20
        assert float(upper[k] - lower[k]) < 4.0  # it says something


@entry
def find_reach(family, arms, z, variances, counts, height, wide, reach, matrix, factor, y):
    return reaches(family, arms, z, variances, counts, height, wide, reach, matrix, factor, y)


def test_the_reach_of_arms_holds_where_the_matrix_is_nearly_singular():
    """Millions of rows in a large ball, condition up to 1e14: lengths against sixty digits."""
    generator, height, looked_at = np.random.default_rng(3), 3.0, 0
    family, z, ones = glb.Gaussian(1.0).compiled(), np.zeros(4), np.ones(4)
    for wide in np.repeat([30.0, 300.0, 3000.0], 15):
        arms = generator.normal(size=(4, 3)) * [1.0, 1e-3, 1e-5]
        arms = arms @ np.linalg.qr(generator.normal(size=(3, 3)))[0]
        arms /= np.linalg.norm(arms, axis=1).max()
        counts = np.floor(10.0 ** generator.uniform(0, 7, size=4))
        reach, y = np.zeros(4), np.zeros(3)
        parts = (reach, np.zeros((3, 3)), np.zeros((3, 3)), y)
        if not find_reach(family, arms, z, ones, counts, height, wide, *parts):
            continue
        looked_at += 1
        with mpmath.workdps(60):
            x = mpmath.matrix(arms.tolist())
            half = mpmath.diag([mpmath.mpf(v) / 2 for v in counts.tolist()])
            matrix = (x.T * half * x + mpmath.eye(3) / mpmath.mpf(float(wide)) ** 2) / (height + 1)
            for i in range(4):
                form = (x[i, :] * mpmath.lu_solve(matrix, x[i, :].T))[0]
                ball = mpmath.norm(x[i, :]) * float(wide)
                assert min(mpmath.sqrt(form), ball) <= reach[i]
    assert looked_at > 30


def test_enclosure_is_refused_where_nothing_bounds_it():
    X = torch.tensor([[1.0, 0.0]], dtype=DTYPE)
    r = torch.tensor([0.0], dtype=DTYPE)
    loss = NegativeLogLikelihood(glb.Gaussian(), X, r)
    assert enclose(loss, torch.zeros(2, dtype=DTYPE), 2.0, 0.0, [], 0.0) is None


@pytest.mark.parametrize(
    ("a", "f2", "largest"),
    [
        ([0.0, 1.0], [0.0, 0.0], 0.5),
        ([3.0, 1.0], [0.0, 0.01], 1.5 + 0.0025),
        ([-1.0, -2.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 0.25], 0.5),
    ],
)
def test_a_direction_without_slope_is_no_zero_by_zero(a, f2, largest):
    # max sum_i f_i y_i + a_i y_i^2/2 over |y| <= 1; rows along the axes have f = 0 exactly
    found = least_dual(np.array(a), np.array(f2))
    assert largest <= found <= largest + 1e-11
