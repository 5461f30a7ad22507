"""The loss carried at fixed points: sums, polynomial and remainder, against what they stand for."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.carried.carried_loss import CarriedLoss, choose_order
from torchglb.carried.monomials import monomials
from torchglb.carried.source import RowSource
from torchglb.errors import SolverError

FAMILIES = [
    glb.Bernoulli(),
    glb.Binomial(3),
    glb.Poisson(),
    glb.Gaussian(0.5),
    glb.QuasiBounded("probit"),
    glb.QuasiBounded("cloglog"),
]
HIGH_ORDER = FAMILIES[:3]
S = 3.0
SIZES = [(1, 2), (1, 6), (2, 3), (2, 6), (3, 4), (4, 5), (10, 3), (20, 2)]


def by_name(family):
    if isinstance(family, glb.QuasiBounded):
        return family.link
    return type(family).__name__


def rows_of(x, r, w=None):
    """Rows as ``CarriedLoss.append`` takes them: x, w r and w."""
    x, r = np.asarray(x, np.float64), np.asarray(r, np.float64)
    w = np.ones_like(r) if w is None else np.asarray(w, np.float64)
    return x, w * r, w


def in_ball(generator, *shape):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    length = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64)
    return S * torch.nn.functional.normalize(x, dim=-1) * length


class Carried:
    """N weighted problems, their loss carried at A random points."""

    def __init__(self, family, d, generator, N=4, rows=80, points=3, order=None, dtype=None):
        self.family, self.d = family, d
        dtype = dtype or torch.float64
        ball = glb.Ball(d, S)
        X = in_ball(generator, N, rows, d) / S
        truth = in_ball(generator, N, d)
        r = family.sample((X @ truth[..., None])[..., 0], generator)
        w = 0.5 + torch.rand(N, rows, generator=generator, dtype=torch.float64)
        if dtype == torch.float32:  # it keeps w r, from which r would come back rounded
            w = torch.ones_like(w)
        self.X, self.r, self.w = (t.to(dtype) for t in (X, r, w))
        self.history = glb.History(d, (N,), family=family, dtype=dtype)
        self.source = RowSource(family, self.history)
        order = choose_order(family, d, S, 256) if order is None else order
        self.loss = CarriedLoss(family, ball, N, points, order)
        self.points = in_ball(generator, N, points, d)
        half = rows // 2
        self.history.append(self.X[:, :half], self.r[:, :half], self.w[:, :half])
        self.loss.rebuild(self.source, self.points.numpy())  # passes ...
        self.history.append(self.X[:, half:], self.r[:, half:], self.w[:, half:])
        self.loss.catch_up(self.source)  # ... and rows carried

    @property
    def likelihood(self):
        rows = (t.double() for t in self.history.rows())
        return glb.NegativeLogLikelihood(self.family, *rows)


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "q"), SIZES)
def test_tables_of_monomials(d, q):
    names = [n for k in range(q + 1) for n in itertools.combinations_with_replacement(range(d), k)]
    table = monomials(d, q)
    assert (table.dim, table.order, table.count) == (d, q, len(names))
    assert table.degree.tolist() == [len(name) for name in names]
    assert table.ends.tolist() == [math.comb(d + k, k) for k in range(q + 1)]
    for i, name in enumerate(names[1:], 1):
        assert tuple(sorted((*names[table.parent[i]], int(table.variable[i])))) == name
    for i in range(d):
        assert [names[at] for at in table.gradient[i]] == [
            tuple(sorted((*name, i))) for name in names if len(name) < q
        ]
    for i, j in itertools.product(range(d), repeat=2):
        assert [names[at] for at in table.hessian[i, j]] == [
            tuple(sorted((*name, i, j))) for name in names if len(name) < q - 1
        ]
    counts = [[name.count(v) for v in set(name)] for name in names]
    factorials = [math.prod(math.factorial(c) for c in count) for count in counts]
    np.testing.assert_allclose(table.scale, 1.0 / np.array(factorials, dtype=float))


# ---- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_sums_are_those_of_the_loss(family, d, dtype, generator):
    """Loss and gradient, and the Hessian and more in the polynomial at the point itself."""
    given = Carried(family, d, generator, dtype=dtype)
    fresh = given.likelihood.expand(given.points)
    np.testing.assert_allclose(given.loss.loss, fresh.loss, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(given.loss.gradient, fresh.gradient, rtol=1e-11, atol=1e-11)
    for slot in range(3):
        value, gradient, hessian, _ = given.loss.expand(given.points[:, slot].numpy(), slot)
        np.testing.assert_allclose(value, fresh.loss[:, slot], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gradient, fresh.gradient[:, slot], rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(hessian, fresh.hessian[:, slot], rtol=1e-11, atol=1e-11)
        for b in range(4):
            given.loss.check(given.source, b, slot)


@pytest.mark.parametrize("family", HIGH_ORDER, ids=by_name)
def test_sums_of_third_order(family, generator):
    given = Carried(family, 3, generator, N=1, points=1, order=3)
    step = 1e-4 * torch.eye(3, dtype=torch.float64)
    point = given.points[:, 0]
    after, before = (
        given.likelihood.expand(point[:, None] + h * step).hessian[0] for h in (1.0, -1.0)
    )
    third = (after - before) / 2e-4  # (direction, row, column)
    names = list(itertools.combinations_with_replacement(range(3), 3))
    wanted = torch.stack([third[name] for name in names])
    found = given.loss.of(0).sums[-len(names) :, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_sum_that_was_tampered_with_is_found(generator):
    given = Carried(glb.Bernoulli(), 2, generator)
    given.loss.check(given.source, 1, 2)
    for entry in range(given.loss.table.count):
        wrong = given.loss.copy()
        wrong.of(1).sums[entry, 2] *= 1.0 + 1e-9
        wrong.of(1).sums[entry, 2] += 1e-9
        with pytest.raises(SolverError, match="problem 1 at point 2 are off: entry"):
            wrong.check(given.source, 1, 2)
        wrong.check(given.source, 1, 1)


def test_rows_one_by_one_or_together_or_by_a_pass(generator):
    given = Carried(glb.Poisson(), 2, generator)
    carried = CarriedLoss(glb.Poisson(), glb.Ball(2, S), 4, 3, given.loss.table.order)
    empty = RowSource(glb.Poisson(), glb.History(2, (4,)))
    carried.rebuild(empty, given.points.numpy())
    x, y, w = rows_of(given.X, given.r, given.w)
    for s in range(0, 80, 7):
        carried.append(given.source, x[:, s : s + 7], y[:, s : s + 7], w[:, s : s + 7])
    np.testing.assert_allclose(carried.loss, given.loss.loss, rtol=1e-13)
    np.testing.assert_allclose(carried.gradient, given.loss.gradient, rtol=1e-12, atol=1e-12)
    assert carried.rows == 80
    again = carried.copy()
    again.rebuild(given.source)
    np.testing.assert_allclose(again.memory, carried.memory, rtol=1e-10, atol=1e-10)
    other = in_ball(generator, 2).numpy()
    before = again.memory.copy()
    again.move(given.source, 3, 1, other)
    assert (again.points[3, 1] == other).all()
    assert (again.memory[:3] == before[:3]).all()
    again.check(given.source, 3, 1)


def test_equal_rows_lose_nothing(generator):
    """100 000 equal rows one by one: as exact as one rounding allows, where a plain sum is not."""
    family, rows = glb.Poisson(), 100_000
    carried = CarriedLoss(family, glb.Ball(2, 2.0), 1, 5, 2)
    source = RowSource(family, glb.History(2, (1,)))
    carried.rebuild(source, in_ball(generator, 1, 5, 2).numpy() / S)
    x = torch.nn.functional.normalize(in_ball(generator, 2), dim=-1).numpy()
    carried.append(source, *rows_of(np.tile(x, (1, rows, 1)), np.full((1, rows), 3.0)))
    z = carried.points[0] @ x
    size = rows * (np.exp(z) + 3.0 * (1.0 + np.abs(z)))
    eps = np.finfo(float).eps
    assert (np.abs(carried.loss[0] - rows * (np.exp(z) - 3.0 * z)) <= 8 * eps * size).all()
    slope = rows * (np.exp(z) - 3.0)[:, None] * x
    assert (np.abs(carried.gradient[0] - slope) <= 8 * eps * size[:, None]).all()
    naive = np.cumsum(np.tile(np.exp(z) - 3.0 * z, (rows, 1)), axis=0)[-1]
    assert np.abs(naive - rows * (np.exp(z) - 3.0 * z)).max() > 64 * eps * size.max()


def test_an_infinite_loss_stays_infinite():
    """A sum that overflows has no rest; afterwards it is no NaN."""
    carried = CarriedLoss(glb.Poisson(), glb.Ball(1, 2.0), 1, 2, 2)
    source = RowSource(glb.Poisson(), glb.History(1, (1,)))
    carried.of(0).sums[0] = 1e308
    for _ in range(3):
        carried.append(
            source, *rows_of(np.ones((1, 1, 1)), np.zeros((1, 1)), np.full((1, 1), 1e308))
        )
    assert (carried.loss == math.inf).all()


# ---- the polynomial ------------------------------------------------------------------------------


#: the slower families in two dimensions only, by default
DIMENSIONS = [
    pytest.param(
        family, d, marks=pytest.mark.slow if isinstance(family, glb.QuasiBounded) and d != 2 else []
    )
    for family in FAMILIES
    for d in (1, 2, 3)
]


@pytest.mark.parametrize("distance", [1e-3, 0.1, 1.0, 4.0])
@pytest.mark.parametrize(("family", "d"), DIMENSIONS)
def test_the_polynomial_never_says_more_than_is_true(family, d, distance, generator):
    """The loss lies within its error; and nowhere in the ball below the tangent, but for it."""
    N = 30
    given = Carried(family, d, generator, N=N, points=1)
    step = distance * torch.nn.functional.normalize(in_ball(generator, N, d), dim=-1)
    ball = glb.Ball(d, S)
    trial = ball.project(given.points[:, 0] + step)
    loss = given.likelihood
    *found, errors = given.loss.expand(trial.numpy())
    value, gradient, hessian = map(torch.from_numpy, found)
    names = ("value", "slope", "hessian", "trace")
    off, slope, bend, trace = (torch.from_numpy(errors[name].copy()) for name in names)
    true = loss.expand(trial[:, None])
    assert ((true.loss[:, 0] - value).abs() <= off).all()
    # the gradient's error in the dual norm of the Hessian there
    H = true.hessian[:, 0]
    wrong = true.gradient[:, 0] - gradient
    dual = (wrong * torch.linalg.lstsq(H, wrong[..., None]).solution[..., 0]).sum(-1)
    assert (dual.clamp_min(0).sqrt() <= slope * (1 + 1e-9) + 1e-6).all()
    # the Hessian's, relative to the Hessian
    small = 1e-9 * torch.eye(d, dtype=torch.float64) * trace[:, None, None]
    for sign in (1.0, -1.0):
        left = bend[:, None, None] * H + small - sign * (H - torch.as_tensor(hessian))
        assert (torch.linalg.eigvalsh(left)[:, 0] >= -1e-9 * trace).all()
    # the tangent
    R = family.self_concordance(S)
    dip = 0.5 * slope.square() * (1.0 + R * given.X.norm(dim=-1).amax(-1) * S)
    spread = torch.logspace(-6, 0, 200, dtype=torch.float64)[None, :, None]
    near = trial[:, None] + spread * in_ball(generator, N, 200, d)
    where = ball.project(torch.cat([near, in_ball(generator, N, 200, d)], dim=1))
    tangent = value[:, None] + ((where - trial[:, None]) * gradient[:, None]).sum(-1)
    assert (loss.value(where) >= tangent - (off + dip)[:, None]).all()


@pytest.mark.parametrize("family", HIGH_ORDER, ids=by_name)
def test_the_remainder_is_of_seventh_order(family, generator):
    sizes = []
    for distance in (1e-3, 0.2, 0.4):
        generator.manual_seed(5)
        given = Carried(family, 2, generator, N=40, points=1)
        assert given.loss.table.order == 6
        step = distance * torch.nn.functional.normalize(in_ball(generator, 40, 2), dim=-1)
        sizes.append(given.loss.expand((given.points[:, 0] + step).numpy()).errors["value"])
    assert (sizes[0] < 1e-9).all()
    growth = np.median((sizes[2] - sizes[0]) / (sizes[1] - sizes[0]))
    assert 128 < growth < 128 * math.exp(0.2)  # for the curvature that may have grown on the way


def test_without_the_remainder_it_would_say_too_much(generator):
    """The planted fault: the same points refute a polynomial that is taken for the loss itself."""
    given = Carried(glb.Bernoulli(), 2, generator, N=40, points=1)
    step = torch.nn.functional.normalize(in_ball(generator, 40, 2), dim=-1)
    trial = glb.Ball(2, S).project(given.points[:, 0] + step)
    off = given.likelihood.value(trial[:, None])[:, 0].numpy() - given.loss.expand(trial.numpy())[0]
    assert (off > 1e-9).any()
    assert (off < -1e-9).any()


# ---- problems are apart --------------------------------------------------------------------------


def test_problems_are_bit_by_bit_the_same_alone(generator):
    given = Carried(glb.Bernoulli(), 2, generator)
    alone = glb.History(2, (1,))
    source = RowSource(glb.Bernoulli(), alone)
    carried = CarriedLoss(glb.Bernoulli(), glb.Ball(2, S), 1, 3, given.loss.table.order)
    alone.append(given.X[2:3, :40], given.r[2:3, :40], given.w[2:3, :40])
    carried.rebuild(source, given.points[2:3].numpy())
    alone.append(given.X[2:3, 40:], given.r[2:3, 40:], given.w[2:3, 40:])
    carried.catch_up(source)
    assert (carried.memory[0] == given.loss.memory[2]).all()


@pytest.mark.parametrize(
    ("family", "at", "asked"),
    [
        (glb.QuasiBounded("cloglog"), 7.0, 0.0),  # m'' underflows at the carried point
        (glb.QuasiBounded("cloglog"), 8.0, 0.0),
        (glb.QuasiBounded("probit"), 45.0, 0.0),
        (glb.Poisson(), -360.0, 360.0),
    ],
    ids=["cloglog-7", "cloglog-8", "probit", "poisson"],
)
def test_a_remainder_beyond_all_numbers_is_infinite(family, at, asked):
    """A cap on ``e^(R D)`` is no bound: it had certified 1e-10 where the error was 22."""
    history = glb.History(1, (1,), family=family)
    history.append(torch.ones(1, 100, 1).double(), torch.zeros(1, 100).double())
    carried = CarriedLoss(family, glb.Ball(1, abs(at)), 1, 1, 2)
    carried.rebuild(RowSource(family, history), np.full((1, 1, 1), at))
    found = carried.expand(np.full((1, 1), asked))
    exact = float(glb.NegativeLogLikelihood.of(family, history)(torch.full((1, 1), asked).double()))
    assert found.errors["value"][0] >= abs(found.value[0] - exact)
    assert found.errors["value"][0] == math.inf


@pytest.mark.parametrize("S", [30.0, 1e7])
def test_sums_pay_for_the_rounding_of_products(S):
    """Poisson: z errs by some ``d eps S``, and ``e^z`` by that share of itself."""
    generator = torch.Generator().manual_seed(1)
    d, family = 8, glb.Poisson()
    theta = torch.randn(d, generator=generator, dtype=torch.float64)
    theta = 0.99 * S * theta / theta.norm()
    X = torch.randn(400, d, generator=generator, dtype=torch.float64)
    X = X - torch.outer(X @ theta, theta) / theta.square().sum()
    X = 0.9 * X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    X = X + 5.0 / S * theta / theta.norm()  # all z are 5, by large products that cancel
    history = glb.History(d, (1,), family=family)
    history.append(X[None], torch.zeros(1, 400).double())
    carried = CarriedLoss(family, glb.Ball(d, S), 1, 1, 2)
    carried.rebuild(RowSource(family, history), theta.numpy()[None, None])
    found = carried.expand(theta.numpy()[None])
    with mpmath.workdps(40):
        point = [mpmath.mpf(v) for v in theta.tolist()]
        exact = mpmath.fsum(
            mpmath.exp(mpmath.fsum(mpmath.mpf(v) * t for v, t in zip(x, point, strict=True)))
            for x in X.tolist()
        )
        assert found.errors["rounding"][0] >= abs(mpmath.mpf(found.value[0]) - exact)
