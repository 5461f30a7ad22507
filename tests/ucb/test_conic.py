"""The conic oracle against closed forms, brute force and fifty digits, and in every failure."""

import math
from fractions import Fraction

import cvxpy as cp
import mpmath
import numpy as np
import pytest
import torch
from cvxpy.reductions.dcp2cone.cone_matrix_stuffing import ConeMatrixStuffing
from torch import Tensor

from torchglb.domain import Ball
from torchglb.errors import InputError, SolverError
from torchglb.families import Bernoulli, Binomial, CustomFamily, Gaussian, Poisson, QuasiBounded
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim.result import Status
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.conic.cones import ConicPoint, ConicProgram
from torchglb.ucb.solvers.conic.oracle import conic_minimum, conic_support, minimize
from torchglb.ucb.solvers.conic.problems import split
from torchglb.ucb.solvers.conic.verification import certify

FAMILIES = [Bernoulli(), Binomial(3), Poisson(), Gaussian(0.7)]


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def rows(family, n, d, generator, S=2.0, batch=()):
    """Features in the unit ball and rewards of a parameter of norm 0.7 S."""
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    X = X * torch.rand(*batch, n, 1, generator=generator, dtype=torch.float64)
    theta = torch.randn(*batch, d, 1, generator=generator, dtype=torch.float64)
    theta = 0.7 * S * theta / torch.linalg.vector_norm(theta, dim=-2, keepdim=True)
    return X, family.sample((X @ theta)[..., 0], generator)


def directions(K, d, generator, batch=()):
    x = torch.randn(*batch, K, d, generator=generator, dtype=torch.float64)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def level_of(loss, domain, beta2):
    return conic_minimum(loss, domain).loss + beta2


def brute_force(loss: NegativeLogLikelihood, S: float, level: float, x: Tensor) -> float:
    """h(x) for d = 2: the boundary on a polar grid around a feasible point, zoomed three times.

    Along the boundary of a convex set a linear function has one maximum, so zooming is safe.
    """
    side = torch.linspace(-S, S, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    grid = grid[torch.linalg.vector_norm(grid, dim=-1) <= S]
    center = grid[loss(grid).argmin()]
    assert loss(center) < level
    middle, half = 0.0, math.pi
    for _ in range(4):
        angle = middle + half * torch.linspace(-1, 1, 401, dtype=torch.float64)
        ray = torch.stack([angle.cos(), angle.sin()], -1)
        low, high = torch.zeros_like(angle), torch.full_like(angle, 2 * S)
        for _ in range(50):
            length = 0.5 * (low + high)
            point = center + length[:, None] * ray
            inside = (loss(point) <= level) & (torch.linalg.vector_norm(point, dim=-1) <= S)
            low, high = torch.where(inside, length, low), torch.where(inside, high, length)
        reached = (center + low[:, None] * ray) @ x
        middle, half = float(angle[reached.argmax()]), half / 100
    return float(reached.max())


# ---- the value ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize(
    ("n", "S", "beta2", "ridge"), [(3, 2.0, 0.5, 0.0), (12, 1.3, 2.0, 0.1), (30, 4.0, 1.0, 0.0)]
)
def test_agrees_with_brute_force(family, n, S, beta2, ridge, generator):
    X, r = rows(family, n, 2, generator, S)
    w = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)
    loss = NegativeLogLikelihood(family, X, r, w, regularization=ridge)
    ball, x = Ball(2, S), directions(2, 2, generator)
    level = level_of(loss, ball, beta2)
    result = conic_support(SublevelProgram(loss, ball, level), x)
    for k in range(2):
        reference = brute_force(loss, S, float(level), x[k])
        assert result.upper[k] >= reference - 1e-12
        assert result.upper[k] == pytest.approx(reference, abs=2e-6)
        assert result.lower[k] == pytest.approx(reference, abs=2e-6)
        assert result.value[k] == pytest.approx(reference, abs=2e-6)


def test_gaussian_in_one_dimension():
    # 2.5 theta^2/0.49 - ... : an interval around theta_hat, cut by the ball on one side only
    X, r = number([[1.0], [2.0]]), number([0.5, 1.2])
    loss = NegativeLogLikelihood(Gaussian(0.7), X, r)
    V, b = 5.0 / 0.49, 2.9 / 0.49
    center, width = b / V, math.sqrt(2 * 0.4 / V)
    level = number(-0.5 * b * b / V + 0.4)
    x = number([[1.0], [-1.0], [0.3]])
    result = conic_support(SublevelProgram(loss, Ball(1, 0.7), level), x)
    expected = number([0.7, width - center, 0.3 * 0.7])
    assert torch.allclose(result.upper, expected, atol=1e-12, rtol=0)
    assert result.multiplier[0] == 0
    assert result.multiplier[1] == pytest.approx(1 / math.sqrt(2 * 0.4 * V), rel=1e-9)
    assert result.ball_multiplier[0] == pytest.approx(1.0, rel=1e-12)  # dh/dS = |x|


@pytest.mark.parametrize(("ridge", "tilted"), [(0.0, False), (0.3, True)])
def test_gaussian_ellipsoid_inside_the_ball(ridge, tilted, generator):
    d, beta2 = 4, 0.7
    X, r = rows(Gaussian(0.5), 40, d, generator)
    w = torch.rand(40, generator=generator, dtype=torch.float64)
    tilt = directions(1, d, generator)[0] if tilted else None
    loss = NegativeLogLikelihood(Gaussian(0.5), X, r, w, regularization=ridge, tilt=tilt)
    V = X.mT @ (w[:, None] * X) / 0.25 + ridge * torch.eye(d).double()
    b = X.mT @ (w * r) / 0.25 + (tilt if tilted else 0.0)
    center = torch.linalg.solve(V, b)
    ball = Ball(d, 10.0)
    minimum = conic_minimum(loss, ball)
    assert torch.allclose(minimum.theta, center, atol=1e-9)
    assert minimum.loss == pytest.approx(float(-0.5 * b @ center), abs=1e-11)
    x = directions(3, d, generator)
    width = (x * torch.linalg.solve(V, x.mT).mT).sum(-1).sqrt()  # |x| in V^-1
    result = conic_support(SublevelProgram(loss, ball, minimum.loss + beta2), x)
    assert torch.allclose(result.upper, x @ center + math.sqrt(2 * beta2) * width, atol=1e-10)
    assert torch.allclose(result.multiplier, width / math.sqrt(2 * beta2), rtol=1e-7)
    assert torch.allclose(result.value, result.upper, atol=1e-7)  # the solver's own
    assert (result.ball_multiplier < 1e-9).all()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_without_observations_the_ball_remains(family, level):
    loss = NegativeLogLikelihood(family, torch.zeros(0, 3).double(), torch.zeros(0).double())
    x = number([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    program = SublevelProgram(loss, Ball(3, 0.7), number(level))
    result = conic_support(program, x)
    assert torch.allclose(result.upper, number([3.5, 0.0]), atol=1e-13)
    assert torch.allclose(result.lower, number([3.5, 0.0]), atol=1e-13)
    assert (result.multiplier == 0).all()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize(
    ("S", "beta2", "active"),
    [(0.5, 50.0, "ball"), (9.0, 0.5, "loss"), (2.0, 2.0, None), (2.0, 1e-7, None)],
)
def test_optimality_conditions(family, S, beta2, active, generator):
    """x = lambda grad L + nu theta, with complementary slackness, and a tiny certified gap."""
    X, r = rows(family, 60, 3, generator, min(S, 3.0))
    loss, ball = NegativeLogLikelihood(family, X, r), Ball(3, S)
    x = directions(3, 3, generator)
    level = level_of(loss, ball, beta2)
    result = conic_support(SublevelProgram(loss, ball, level), x)
    value, gradient = loss.value_and_gradient(result.theta)
    norm = torch.linalg.vector_norm(result.theta, dim=-1)
    assert (loss(result.theta) <= level).all()
    assert (norm <= S).all()
    assert torch.allclose(result.lower, (x * result.theta).sum(-1), atol=1e-14)
    assert (result.gap >= 0).all()
    assert (result.gap <= 1e-7 * (1 + result.upper.abs())).all()
    lam, nu = result.multiplier, result.ball_multiplier
    residual = lam[:, None] * gradient + nu[:, None] * result.theta / norm[:, None] - x
    assert torch.linalg.vector_norm(residual, dim=-1).max() < (1e-3 if beta2 < 1e-3 else 1e-6)
    assert (lam * (level - value)).abs().max() < 1e-6
    assert (nu * (S - norm)).abs().max() < 1e-6
    if active == "ball":
        assert torch.allclose(result.upper, S * torch.ones(3).double(), atol=1e-13)
        assert (lam == 0).all()
    if active == "loss":
        assert (lam > 0).all()
        assert (norm < S).all()


def test_multiplier_is_the_derivative_in_the_level(generator):
    X, r = rows(Bernoulli(), 25, 2, generator)
    loss, ball, x = NegativeLogLikelihood(Bernoulli(), X, r), Ball(2, 4.0), torch.eye(2).double()
    level, h = level_of(loss, ball, 1.0), 1e-5
    up, at, down = (
        conic_support(SublevelProgram(loss, ball, level + step), x) for step in (h, 0.0, -h)
    )
    assert torch.allclose(at.multiplier, (up.upper - down.upper) / (2 * h), rtol=1e-6)


EXACT = {
    Bernoulli: lambda z: mpmath.log1p(mpmath.exp(z)),
    Binomial: lambda z: 3 * mpmath.log1p(mpmath.exp(z)),
    Poisson: mpmath.exp,
    Gaussian: lambda z: z * z / 2,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_rounding_is_paid_for(family, generator):
    """The error of a computed loss is not zero, and below what the certificate adds."""
    mpmath.mp.dps = 50
    X, r = rows(family, 300, 1, generator, S=4.0)
    loss = NegativeLogLikelihood(family, X, r)
    points = number([[-3.3], [0.7], [3.9]])
    computed, allowed = loss(points), loss.expand_with_errors(points)[1].loss
    errors = []
    for point, value in zip(points[:, 0].tolist(), computed.tolist(), strict=True):
        z = [mpmath.mpf(x) * mpmath.mpf(point) for x in X[:, 0].tolist()]
        terms = (
            EXACT[type(family)](a) - mpmath.mpf(b) * a for a, b in zip(z, r.tolist(), strict=True)
        )
        exact = mpmath.fsum(terms) / mpmath.mpf(family.dispersion)
        errors.append(float(abs(exact - mpmath.mpf(value))))
    assert max(errors) > 0
    assert (number(errors) <= allowed).all()
    assert (allowed < 1e-10 * (1 + computed.abs())).all()  # and it is not paid for too dearly


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_bounds_enclose_fifty_digits(family, generator):
    """d = 1: the largest theta with L(theta) <= B is a root, known to 50 digits."""
    mpmath.mp.dps = 50
    m = EXACT[type(family)]
    dispersion = mpmath.mpf(family.dispersion)
    for beta2 in (0.1, 0.7, 1.3, 2.9, 5.0):
        X, r = rows(family, 60, 1, generator, S=1.0)
        loss, ball = NegativeLogLikelihood(family, X, r), Ball(1, 4.0)
        level = level_of(loss, ball, beta2)
        result = conic_support(SublevelProgram(loss, ball, level), number([[1.0]]))
        data = [(mpmath.mpf(float(a)), mpmath.mpf(float(b))) for a, b in zip(X, r, strict=True)]

        def excess(theta, data=data, level=level):
            loss = mpmath.fsum(m(a * theta) - b * a * theta for a, b in data)
            return loss / dispersion - mpmath.mpf(float(level))

        root = mpmath.findroot(excess, float(result.upper[0]))
        assert mpmath.mpf(float(result.lower[0])) <= root <= mpmath.mpf(float(result.upper[0]))
        assert float(result.gap[0]) < 1e-11  # 60 terms lose up to 31 eps of their sizes, not 4


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_any_point_proves_true_bounds(family, generator):
    X, r = rows(family, 20, 3, generator)
    loss, ball = NegativeLogLikelihood(family, X, r), Ball(3, 2.0)
    center = conic_minimum(loss, ball)
    level, x = center.loss + 1.0, directions(1, 3, generator)
    value = conic_support(SublevelProgram(loss, ball, level), x)
    points = 3 * torch.randn(200, 3, generator=generator, dtype=torch.float64)
    points[0], points[1], points[2] = torch.nan, 1e12, value.theta[0]
    proof = certify(loss, 2.0, float(level), center.theta, x[0], points)
    assert (proof.upper >= value.lower[0]).all()
    assert (proof.lower <= value.upper[0]).all()
    assert proof.upper[0] == torch.inf
    assert proof.upper[2] - proof.lower[2] < 1e-6
    assert proof.upper[3:].min() > value.upper[0] + 1e-4  # the others are not that good


@pytest.mark.parametrize("dim", [2, 7, 40])
def test_bounds_pay_for_the_rounding_of_products(dim, generator):
    """In exact fractions: a lower bound is below what its point attains, an upper one above S|x|."""
    X, r = rows(Gaussian(1.0), 4, dim, generator)
    loss, center = NegativeLogLikelihood(Gaussian(1.0), X, r), torch.zeros(dim).double()
    for _ in range(30):
        x = torch.randn(dim, generator=generator, dtype=torch.float64)
        pole = 2.0 * x / torch.linalg.vector_norm(x)
        proof = certify(loss, 2.0, 1e6, center, x, pole[None])  # the set is the ball
        exact = [Fraction(value) for value in x.tolist()]
        reached = [Fraction(value) for value in proof.theta[0].tolist()]
        attained = sum(a * b for a, b in zip(exact, reached, strict=True))
        assert Fraction(float(proof.lower[0])) <= attained
        assert Fraction(float(proof.upper[0])) ** 2 >= 4 * sum(a * a for a in exact)


def test_a_cut_of_many_equal_rows_pays_for_their_sum():
    """A plain matrix product of a million equal rows loses 1e5 roundings: the cut was too tight."""
    mpmath.mp.dps = 50
    n, a, b = 10**6, 0.7, 0.7
    loss = NegativeLogLikelihood(
        Bernoulli(), torch.full((n, 1), a).double(), torch.full((n,), b).double()
    )
    z, reward = (mpmath.mpf(float(v)) for v in (loss.X[0, 0], loss.r[0]))

    def exact(theta):
        return n * (mpmath.log1p(mpmath.exp(z * theta)) - reward * z * theta)

    level = float(exact(mpmath.mpf(-180)))  # where the loss is as good as linear
    most = -mpmath.findroot(lambda theta: exact(theta) - mpmath.mpf(level), mpmath.mpf(-180))
    center, x = number([-60.0]), number([-1.0])
    proof = certify(loss, 200.0, level, center, x, number([[-60.0], [-100.0], [-50.0]]))
    for upper in proof.upper.tolist():
        assert most <= mpmath.mpf(upper) <= most + 1e-10


@pytest.mark.parametrize("room", [1e-9, 1e-4])
def test_a_point_pays_for_its_own_rounding(room, generator):
    """A row that cancels at the centre, and is as good as gone at the point that is proposed."""
    mpmath.mp.dps = 50
    known = 0
    for angle in (0.2 + torch.rand(50, generator=generator, dtype=torch.float64)).tolist():
        u, v = math.cos(angle), math.sin(angle)
        X = number([[u, v, 0.0], [0.0, 0.0, 1e-9]])
        loss = NegativeLogLikelihood(Poisson(), X, number([0.0, 0.0]))
        center = number([u + 1e9 * v, v - 1e9 * u, 3e9])  # the exponents are 1, nearly, and 3
        level = float(loss(center)) * (1 + room)
        point = number([[-30 * u, -30 * v, 8e9]])  # here -30 and 8
        proof = certify(loss, 1e10, level, center, number([0.0, 0.0, 1.0]), point)
        if not bool(torch.isfinite(proof.lower[0])):
            continue
        known += 1
        theta = [mpmath.mpf(t) for t in proof.theta[0].tolist()]
        exponents = (mpmath.fdot(map(mpmath.mpf, row), theta) for row in X.tolist())
        assert mpmath.fsum(map(mpmath.exp, exponents)) <= mpmath.mpf(level)
    assert room < 1e-8 or known == 50


# ---- weights, ridge, batches ----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_weights_repeat_rows_and_zero_drops_them(family, generator):
    X, r = rows(family, 8, 2, generator)
    ball, x = Ball(2, 2.0), torch.eye(2).double()
    times = torch.tensor([1, 2, 3, 1, 1, 2, 1, 1])
    repeated = NegativeLogLikelihood(
        family, X.repeat_interleave(times, 0), r.repeat_interleave(times)
    )
    level = level_of(repeated, ball, 0.5)
    junk = torch.full((2, 2), torch.nan).double()
    weighted = NegativeLogLikelihood(
        family,
        torch.cat([X, junk]),
        torch.cat([r, junk[0]]),
        torch.cat([times, torch.zeros(2)]).double(),
    )
    one = conic_support(SublevelProgram(repeated, ball, level), x)
    other = conic_support(SublevelProgram(weighted, ball, level), x)
    assert torch.allclose(one.upper, other.upper, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_equals_loop(shape, dtype, generator):
    family = Poisson()
    X, r = rows(family, 5, 2, generator, batch=shape)
    X, r = X.to(dtype), r.to(dtype)
    radius = 1 + torch.rand(shape, generator=generator, dtype=dtype)
    ridge = torch.rand(shape, generator=generator, dtype=dtype)
    loss, ball = NegativeLogLikelihood(family, X, r, regularization=ridge), Ball(2, radius)
    x = directions(2, 2, generator, shape).to(dtype)
    center = conic_minimum(loss, ball)
    assert center.theta.shape == (*shape, 2)
    assert center.loss.dtype == dtype
    level = center.loss + 1
    result = conic_support(SublevelProgram(loss, ball, level), x)
    assert result.upper.shape == result.status.shape == result.solver_used.shape == (*shape, 2)
    assert result.theta.shape == (*shape, 2, 2)
    assert result.upper.dtype == result.theta.dtype == result.multiplier.dtype == dtype
    assert (result.upper >= result.lower).all()
    for b in np.ndindex(shape):
        alone = NegativeLogLikelihood(family, X[b], r[b], regularization=ridge[b])
        single = conic_support(SublevelProgram(alone, Ball(2, radius[b]), level[b]), x[b])
        assert torch.equal(single.upper, result.upper[b])
        assert torch.equal(single.theta, result.theta[b])


def test_float32_bounds_are_rounded_outwards(generator):
    X, r = rows(Bernoulli(), 20, 3, generator)
    X, r, x = X.float(), r.float(), directions(10, 3, generator).float()
    ball, level = Ball(3, 2.0), torch.tensor(14.0)
    narrow = conic_support(
        SublevelProgram(NegativeLogLikelihood(Bernoulli(), X, r), ball, level), x
    )
    wide = NegativeLogLikelihood(Bernoulli(), X.double(), r.double())
    exact = conic_support(SublevelProgram(wide, ball, level.double()), x.double())
    assert narrow.upper.dtype == torch.float32
    assert (narrow.upper.double() >= exact.upper).all()
    assert (narrow.lower.double() <= exact.lower).all()
    assert torch.allclose(narrow.upper.double(), exact.upper, atol=1e-6)


def test_no_arms_and_no_problems():
    loss = NegativeLogLikelihood(Gaussian(), torch.eye(2).double(), torch.ones(2).double())
    program = SublevelProgram(loss, Ball(2, 1.0), number(0.0))
    assert conic_support(program, torch.zeros(0, 2).double()).theta.shape == (0, 2)
    empty = NegativeLogLikelihood(
        Gaussian(), torch.zeros(0, 4, 2).double(), torch.zeros(0, 4).double()
    )
    program = SublevelProgram(empty, Ball(2, 1.0), torch.zeros(0).double())
    assert conic_support(program, torch.zeros(0, 3, 2).double()).upper.shape == (0, 3)
    assert conic_minimum(empty, Ball(2, 1.0)).theta.shape == (0, 2)


# ---- cvxpy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_program_is_dpp_and_its_duals_are_ours(family, generator):
    X, r = rows(family, 20, 3, generator)
    loss = NegativeLogLikelihood(family, X, r, regularization=0.1)
    ball, x = Ball(3, 2.0), directions(1, 3, generator)
    ((alone, radius),) = split(loss, ball)
    center = conic_minimum(loss, ball)
    program = ConicProgram(alone, radius, center.theta, 2.5)
    assert program.problem.is_dcp(dpp=True)
    assert {p.shape for p in program.problem.parameters()} == {(3,), ()}
    cones = [name for name in ("CLARABEL", "ECOS", "SCS") if name in cp.installed_solvers()]
    for beta2 in (0.5, 1.0, 2.0):  # one program for every level
        level = center.loss + beta2
        points = (program.solve(x[0], float(level), name) for name in cones)
        point = next(p for p in points if p.theta is not None)
        ours = conic_support(SublevelProgram(loss, ball, level), x)
        assert point.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE)
        assert float(x[0] @ point.theta) == pytest.approx(float(ours.upper), abs=1e-6)
        assert point.multiplier == pytest.approx(float(ours.multiplier), abs=1e-5)
        assert point.ball_multiplier == pytest.approx(float(ours.ball_multiplier), abs=1e-5)


def test_arms_share_one_canonicalisation(monkeypatch, generator):
    applied = []
    apply = ConeMatrixStuffing.apply
    monkeypatch.setattr(
        ConeMatrixStuffing, "apply", lambda self, p: applied.append(p) or apply(self, p)
    )
    X, r = rows(Bernoulli(), 20, 2, generator)
    program = SublevelProgram(NegativeLogLikelihood(Bernoulli(), X, r), Ball(2, 3.0), number(14.0))
    conic_support(program, directions(7, 2, generator))
    assert len(applied) == 2  # the minimum, and one program for seven arms


@pytest.mark.parametrize("solver", ["CLARABEL", "ECOS", "SCS"])
def test_every_solver_gives_the_answer(solver, generator):
    if solver not in cp.installed_solvers():
        pytest.skip(f"{solver} is not installed")
    X, r = rows(Poisson(), 10, 2, generator)
    loss, ball = NegativeLogLikelihood(Poisson(), X, r), Ball(2, 1.5)
    program = SublevelProgram(loss, ball, level_of(loss, ball, 1.0))
    x = torch.eye(2).double()
    result = conic_support(program, x, solver=solver, fallbacks=())
    assert (result.solver_used == solver).all()
    assert torch.allclose(result.upper, conic_support(program, x).upper, atol=1e-8)


def test_fallback_is_used_and_named(monkeypatch, generator):
    if "ECOS" not in cp.installed_solvers():
        pytest.skip("ECOS is not installed")
    solve = ConicProgram.solve

    def fails(self, x, level, solver, max_steps):
        if solver == "CLARABEL":
            return ConicPoint(None, math.nan, math.nan, cp.SOLVER_ERROR)
        return solve(self, x, level, solver, max_steps)

    X, r = rows(Bernoulli(), 10, 2, generator)
    loss, ball, x = NegativeLogLikelihood(Bernoulli(), X, r), Ball(2, 2.0), torch.eye(2).double()
    program = SublevelProgram(loss, ball, level_of(loss, ball, 1.0))
    expected = conic_support(program, x)
    assert (expected.solver_used == "CLARABEL").all()
    monkeypatch.setattr(ConicProgram, "solve", fails)
    result = conic_support(program, x)
    assert (result.solver_used == "ECOS").all()
    assert torch.allclose(result.upper, expected.upper, atol=1e-9)


def test_badly_scaled_poisson(generator):
    """Rates from e^-8 to e^8: an unscaled cone program makes the solvers fail here."""
    X, r = rows(Poisson(), 1500, 2, generator, S=8.0)
    loss, ball, x = NegativeLogLikelihood(Poisson(), X, r), Ball(2, 8.0), torch.eye(2).double()
    result = conic_support(SublevelProgram(loss, ball, level_of(loss, ball, 5.0)), x)
    assert (result.gap < 1e-9).all()


# ---- the minimum ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("S", [0.3, 5.0])
def test_minimum_satisfies_its_conditions(family, S, generator):
    X, r = rows(family, 50, 3, generator)
    loss = NegativeLogLikelihood(family, X, r, regularization=0.05)
    theta, value = conic_minimum(loss, Ball(3, S))
    _, gradient = loss.value_and_gradient(theta)
    norm = float(torch.linalg.vector_norm(theta))
    assert value == pytest.approx(float(loss(theta)), abs=1e-11)
    assert norm <= S
    gap = theta @ gradient + S * torch.linalg.vector_norm(gradient)
    assert gap < 1e-9
    assert (norm > S * (1 - 1e-12)) == (S == 0.3)  # on the sphere or inside


# ---- failures -------------------------------------------------------------------------------


def damaged(generator):
    """Three programs: a sound one, one with a NaN, one with a level below the minimum."""
    X, r = rows(Bernoulli(), 10, 2, generator, batch=(3,))
    sound = NegativeLogLikelihood(Bernoulli(), X, r)
    level = conic_minimum(sound, Ball(2, 2.0)).loss + 0.5
    level[2] -= 0.5 + 1e-6
    broken = X.clone()
    broken[1, 3, 0] = torch.nan
    return X, r, broken, level


def test_failures_stay_in_their_element(generator):
    X, r, broken, level = damaged(generator)
    ball, x = Ball(2, 2.0), directions(2, 2, generator, (3,))
    program = SublevelProgram(NegativeLogLikelihood(Bernoulli(), broken, r), ball, level)
    result = conic_support(program, x, throw=False)
    expected = [Status.CONVERGED, Status.NONFINITE, Status.INFEASIBLE]
    assert result.status.tolist() == [[s, s] for s in expected]
    alone = NegativeLogLikelihood(Bernoulli(), X[0], r[0])
    sound = conic_support(SublevelProgram(alone, ball, level[0]), x[0])
    assert torch.equal(result.upper[0], sound.upper)
    assert torch.equal(result.theta[0], sound.theta)
    assert torch.isnan(result.upper[1]).all()
    assert torch.isnan(result.theta[1]).all()
    assert (result.upper[2] == -torch.inf).all()  # the supremum over nothing
    with pytest.raises(SolverError, match=r"NONFINITE.*\(1, 0\).*INFEASIBLE.*\(2, 0\)"):
        conic_support(program, x)


def test_nan_in_level_and_arm(generator):
    X, r, _, level = damaged(generator)
    program = SublevelProgram(
        NegativeLogLikelihood(Bernoulli(), X[:2], r[:2]),
        Ball(2, 2.0),
        torch.stack([level[0], number(torch.nan)]),
    )
    x = directions(2, 2, generator, (2,))
    x[0, 1, 0] = torch.nan
    status = conic_support(program, x, throw=False).status
    assert status.tolist() == [[Status.CONVERGED, Status.NONFINITE], [Status.NONFINITE] * 2]
    with pytest.raises(InputError, match="arms"):
        conic_support(program, x)


def test_minimum_reports_the_nan(generator):
    _, r, broken, _ = damaged(generator)
    loss = NegativeLogLikelihood(Bernoulli(), broken, r)
    with pytest.raises(SolverError, match=r"NONFINITE.*\(1,\)"):
        conic_minimum(loss, Ball(2, 2.0))
    theta, value = conic_minimum(loss, Ball(2, 2.0), throw=False)
    assert torch.isnan(value).tolist() == [False, True, False]
    assert torch.isfinite(theta[[0, 2]]).all()


def test_minimum_reports_the_iteration_cap(generator):
    X, r = rows(Bernoulli(), 100, 4, generator, S=8.0)
    loss, ball = NegativeLogLikelihood(Bernoulli(), X, r), Ball(4, 8.0)
    with pytest.raises(SolverError, match="MAX_STEPS"):
        conic_minimum(loss, ball, max_steps=1, fallbacks=())
    theta, value = conic_minimum(loss, ball, max_steps=1, fallbacks=(), throw=False)
    assert torch.linalg.vector_norm(theta) <= 8.0
    least = conic_minimum(loss, ball).loss
    assert value > least
    for steps in (1, 3, 6, None):  # the gap bounds how far above the minimum the loss is
        center = minimize(loss, 8.0, ["CLARABEL"], 1e-7, steps)
        assert -1e-12 <= center.loss - least <= center.gap + 1e-12


def test_iteration_cap_keeps_the_bounds_true(generator):
    X, r = rows(Bernoulli(), 200, 5, generator, S=4.0)
    loss, ball = NegativeLogLikelihood(Bernoulli(), X, r), Ball(5, 20.0)
    program = SublevelProgram(loss, ball, level_of(loss, ball, 8.0))
    x = directions(3, 5, generator)
    exact = conic_support(program, x)
    capped = conic_support(program, x, max_steps=2, fallbacks=(), throw=False)
    assert (capped.status == Status.MAX_STEPS).all()
    assert (capped.upper >= exact.lower).all()
    assert (capped.lower <= exact.upper).all()
    assert (capped.gap > exact.gap).all()
    with pytest.raises(SolverError, match="MAX_STEPS"):
        conic_support(program, x, max_steps=2, fallbacks=())


@pytest.mark.parametrize(
    "family", [QuasiBounded("probit"), CustomFamily(torch.nn.functional.softplus)]
)
def test_families_without_a_conic_form_are_refused(family):
    loss = NegativeLogLikelihood(family, torch.eye(2).double(), torch.ones(2).double())
    with pytest.raises(InputError, match=r"Bernoulli, Binomial, Poisson, Gaussian.*got"):
        conic_minimum(loss, Ball(2, 1.0))
    program = SublevelProgram(loss, Ball(2, 1.0), number(1.0))
    with pytest.raises(InputError, match="conic form"):
        conic_support(program, torch.eye(2).double())


def test_a_subclass_that_keeps_m_is_covered():
    class Clicks(Bernoulli):
        """Another name for the same log-partition."""

    loss = NegativeLogLikelihood(Clicks(), torch.eye(2).double(), number([1.0, 0.0]))
    theta, _ = conic_minimum(loss, Ball(2, 3.0))
    assert torch.allclose(theta, number([1.0, -1.0]) * 3 / math.sqrt(2))


def test_bad_arguments_are_refused():
    X, r = torch.eye(2).double(), torch.ones(2).double()
    loss, ball = NegativeLogLikelihood(Gaussian(), X, r), Ball(2, 1.0)
    with pytest.raises(InputError, match=r"solver.*'NOSUCH'"):
        conic_minimum(loss, ball, solver="NOSUCH")
    with pytest.raises(InputError, match="w: expected non-negative"):
        conic_minimum(NegativeLogLikelihood(Gaussian(), X, r, -r), ball)
    with pytest.raises(InputError, match="arms: expected shape"):
        conic_support(SublevelProgram(loss, ball, number(1.0)), r)
