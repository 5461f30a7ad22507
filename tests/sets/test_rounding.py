"""The bounds of an ellipsoid hold at any condition: certified forms, against fifty digits."""

import mpmath
import pytest
import torch

import torchglb as glb
from torchglb.decisions import BestArm
from torchglb.errors import SolverError
from torchglb.linalg import cholesky, inverse_form_bounds, least_eigenvalue

DOUBLE = torch.float64


def shape_of(condition: float, d: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=DOUBLE))[0]
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), d, dtype=DOUBLE)
    W = basis @ torch.diag(values) @ basis.mT
    return (W + W.mT) / 2


def exact_forms(W: torch.Tensor, arms: torch.Tensor) -> list:
    with mpmath.workdps(60):
        matrix = mpmath.matrix(W.tolist())
        found = []
        for x in arms.tolist():
            y = mpmath.lu_solve(matrix, mpmath.matrix(x))
            found.append(mpmath.fdot(map(mpmath.mpf, x), y))
        return found


CONDITIONS = [1e2, 1e5, 1e8, 1e11, 1e13, 1e14]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("d", [1, 2, 5, 10])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_bounds_enclose_fifty_digits(condition, d, dtype):
    """No arm of an ellipsoid is above its upper or below its lower bound."""
    arms_in_all = 200 if (d, condition) == (2, 1e11) else 20
    if dtype == torch.float32 and condition > 1e6:
        condition = 1e6  # beyond, rounding to float32 leaves no positive definite matrix
    W = shape_of(condition, d, d)
    generator = torch.Generator().manual_seed(1)
    arms = torch.nn.functional.normalize(
        torch.randn(arms_in_all, d, generator=generator, dtype=DOUBLE), dim=-1
    )
    center = 0.3 * torch.nn.functional.normalize(
        torch.randn(d, generator=generator, dtype=DOUBLE), dim=0
    )
    W, arms, center, gamma = (
        t.to(dtype) for t in (W, arms, center, torch.tensor(2.7, dtype=DOUBLE))
    )
    ellipsoid = glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(d, 3.0), center, W, gamma)
    found = ellipsoid.support(arms)
    loosest = 0.0
    with mpmath.workdps(60):
        for k, form in enumerate(exact_forms(W, arms)):
            middle = mpmath.fdot(
                map(mpmath.mpf, arms[k].tolist()), map(mpmath.mpf, center.tolist())
            )
            value = middle + mpmath.sqrt(mpmath.mpf(float(gamma)) * form)
            upper, lower = (mpmath.mpf(float(t[k])) for t in (found.upper, found.lower))
            assert lower <= value <= upper, k
            loosest = max(loosest, float((upper - lower) / abs(value - middle)))
    assert torch.equal(ellipsoid.upper_bound(arms), found.upper)
    # about (eps cond)^2; plain sums may do up to 1e-10
    size = 1e-5 if dtype == torch.float32 else 4e-10 + 2000 * (2.2e-16 * d * condition) ** 2
    assert loosest <= size


@pytest.mark.parametrize("condition", CONDITIONS)
def test_least_eigenvalue_is_below_and_not_far(condition):
    for seed in range(20):
        W = shape_of(condition, 4, seed)
        bound = float(least_eigenvalue(W))
        with mpmath.workdps(50):
            exact = min(mpmath.eigsy(mpmath.matrix(W.tolist()), eigvals_only=True))
        assert bound <= exact
        assert bound >= 0.1 * float(exact)


def test_a_matrix_that_may_be_singular_bounds_nothing():
    """Condition 1e18: it has a Cholesky factor by luck, and proves nothing."""
    W = torch.tensor([[1.0, 1.0 - 2.0**-53], [1.0 - 2.0**-53, 1.0]], dtype=DOUBLE)
    factor = torch.linalg.cholesky(W + 1e-14 * torch.eye(2, dtype=DOUBLE))
    low, high = inverse_form_bounds(torch.eye(2, dtype=DOUBLE), W, factor)
    assert torch.isinf(high).all()
    assert (low <= high).all()


def test_a_form_is_the_same_beside_one_that_needs_more_digits():
    shapes = torch.stack([shape_of(1e2, 3, 0), shape_of(1e13, 3, 1)])
    x = torch.eye(3, dtype=DOUBLE).expand(2, 3, 3)
    both = inverse_form_bounds(x, shapes, torch.linalg.cholesky(shapes))
    for i in range(2):
        alone = inverse_form_bounds(x[i], shapes[i], torch.linalg.cholesky(shapes[i]))
        assert all(torch.equal(b[i], a) for a, b in zip(alone, both, strict=True))


@pytest.mark.parametrize("condition", [1e2, 1e8, 1e11, 1e14])
def test_with_the_ball_the_truth_lies_between_the_bounds(condition):
    """In the plane the support over both is found on a fine polygon of points of both."""
    S, gamma = 2.0, torch.tensor(1.5, dtype=DOUBLE)
    for seed in range(5):
        W = shape_of(condition, 2, seed)
        generator = torch.Generator().manual_seed(seed)
        center = torch.rand(2, generator=generator, dtype=DOUBLE)
        both = glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(2, S), center, W, gamma, with_ball=True)
        arms = torch.nn.functional.normalize(
            torch.randn(40, 2, generator=generator, dtype=DOUBLE), dim=-1
        )
        found = both.support(arms)
        assert (found.lower <= found.upper).all()
        assert float((found.upper - found.lower).max()) <= 2e-6
        # lower is attained by a point of both, in fifty digits
        with mpmath.workdps(50):
            for x, theta, lower in zip(arms, found.theta, found.lower, strict=True):
                away = [
                    mpmath.mpf(a) - mpmath.mpf(c)
                    for a, c in zip(theta.tolist(), center.tolist(), strict=True)
                ]
                form = sum(
                    away[i] * mpmath.mpf(float(W[i, j])) * away[j]
                    for i in range(2)
                    for j in range(2)
                )
                assert form <= mpmath.mpf(float(gamma))
                exact = mpmath.fdot(map(mpmath.mpf, x.tolist()), map(mpmath.mpf, theta.tolist()))
                assert mpmath.mpf(float(lower)) <= exact


@pytest.mark.parametrize("length", [1.0, 1e-150, 1e-170, 1e-250, 1e-300, 0.0])
@pytest.mark.parametrize("with_ball", [False, True])
def test_short_arms(length, with_ball):
    """The support is homogeneous: an arm of length 1e-300 has 1e-300 of it, not 0."""
    W = shape_of(1e3, 3, 0)
    center = torch.tensor([0.1, -0.2, 0.3], dtype=DOUBLE)
    gamma = torch.tensor(0.4, dtype=DOUBLE)
    some = glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(3, 2.0), center, W, gamma, with_ball)
    arms = torch.eye(3, dtype=DOUBLE)
    whole, short = some.upper_bound(arms), some.upper_bound(length * arms)
    torch.testing.assert_close(short, length * whole, rtol=1e-9, atol=0.0)
    assert (short >= length * whole * (1 - 1e-12)).all()


def exact_distance(x, y):
    """``|x - y|`` of the numbers as they are."""
    away = [mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return mpmath.sqrt(mpmath.fsum(a * a for a in away))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("kind", ["set", "running", "ellipsoid"])
@pytest.mark.parametrize("S", [0.7, 30.0, 600.0])
def test_a_difference_pays_for_its_own_rounding(S, kind, dtype):
    """Features in a plane that no row is about: the set has all of the ball's disc there."""
    options = {"running": True} if kind == "running" else {}
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, S), 0.05, dtype=dtype, **options)
    sequence.update([[1.0, 0.0, 0.0]] * 20, [1.0, 0.0] * 10)
    preferences = glb.PreferenceSequence(3, S, 0.05, dtype=dtype)
    preferences.update([[0.7, 0.0, 0.0]] * 20, [[-0.7, 0.0, 0.0]] * 20, [1.0, 0.0] * 10)
    region, chances, loose = sequence.current(), preferences.current(), 1e-6
    if kind == "ellipsoid":  # whose bounds are rough in float32
        region, loose = region.ellipsoid(with_ball=True), 1e-4
    ball = float(sequence.domain.radius_like(region.center))
    generator = torch.Generator().manual_seed(0)
    x, y = 0.7 * torch.rand((2, 40, 3), generator=generator, dtype=DOUBLE)
    x[:, 0] = y[:, 0] = 0.0
    x, y = x.to(dtype), y.to(dtype)
    found, pairs = region.contrast(x, y), chances.difference(x, y)
    with mpmath.workdps(60):
        for k in range(40):
            exact = ball * exact_distance(x[k], y[k])
            margin = BestArm(region, torch.stack([x[k], y[k]])).margin()
            for upper in (found.upper[k], -found.lower[k], margin, pairs.upper[k], -pairs.lower[k]):
                assert exact <= mpmath.mpf(float(upper)) <= exact * (1 + loose)


@pytest.mark.parametrize("with_ball", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_bounds_of_arms_that_underflow_are_outward(with_ball, dtype):
    """The product of a tiny arm and a set is a number with few digits, or with none."""
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    ball = glb.Ball(1, 1e-3)
    center, shape = torch.tensor([1e-4], dtype=dtype), torch.tensor([[1.7]], dtype=dtype)
    for gamma in (1e-9, 1e-7, 3.0):
        gamma = torch.tensor(gamma, dtype=dtype)
        made = glb.EllipsoidSet(glb.Bernoulli(), ball, center, shape, gamma, with_ball=with_ball)
        with mpmath.workdps(60):
            mid, half = float(center), mpmath.sqrt(mpmath.mpf(float(gamma)) / float(shape))
            low, high = mid - half, mid + half
            if with_ball:
                low, high = max(low, -mpmath.mpf("1e-3")), min(high, mpmath.mpf("1e-3"))
            for k in (1, 3, 1000, 123457):
                x = torch.tensor([[k * least]], dtype=dtype)
                found, size = made.support(x), mpmath.mpf(float(x))
                for upper in (found.upper, made.upper_bound(x)):
                    assert size * high <= float(upper)
                assert float(found.lower) <= size * high
                assert float(made.interval(x).lower) <= size * low


@pytest.mark.parametrize("with_ball", [False, True])
def test_an_ellipsoid_without_end_still_knows_the_zero_arm(with_ball):
    W, arms = torch.eye(2).double(), torch.tensor([[0.0, 0.0], [0.6, 0.0]]).double()
    wide = glb.EllipsoidSet(
        glb.Bernoulli(),
        glb.Ball(2, 3.0),
        torch.zeros(2).double(),
        W,
        torch.inf,
        with_ball=with_ball,
    )
    ends = wide.interval(arms)
    assert ends.lower[0].abs() < 1e-300
    assert ends.upper[0].abs() < 1e-300
    assert float(ends.upper[1]) == pytest.approx(1.8 if with_ball else torch.inf)
    assert float(wide.support(arms).upper[1]) == float(ends.upper[1])


def test_a_policy_whose_radius_overflows_still_knows_the_zero_arm():
    policy = glb.policies.make("gloc", family=glb.Bernoulli(), domain=glb.Ball(2, 200.0))
    arms = torch.tensor([[0.0, 0.0], [0.6, 0.0]])
    policy.update(arms[1], 1.0)
    assert policy.scores(arms).tolist() == [0.0, torch.inf]
    assert int(policy.select(arms)) == 1


def test_a_matrix_that_rounding_spoils_is_said():
    with pytest.raises(SolverError, match=r"float32.*dtype=torch.float64"):
        cholesky(torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-7]]))
