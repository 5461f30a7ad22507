"""The best arm of the unit ball: global in one and two dimensions, bounded beyond."""

import math

import mpmath
import pytest
import torch
from programs import FAMILIES, family_of

import torchglb as glb
from torchglb.optim import Status
from torchglb.ucb import native_support


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(family, d, n, S, beta2, generator, batch=(), ridge=0.0):
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    X = X * torch.rand(*batch, n, 1, generator=generator, dtype=torch.float64)
    theta = torch.nn.functional.normalize(torch.randn(d, 1, generator=generator).double(), dim=0)
    r = family_of(family).sample((X @ (0.4 * S * theta))[..., 0], generator)
    domain = glb.Ball(d, S)
    fit = glb.constrained_mle(family_of(family), glb.Rows(X, r), domain, regularization=ridge)
    loss = glb.NegativeLogLikelihood(family_of(family), X, r, regularization=ridge)
    return glb.SublevelProgram(loss, domain, fit.loss + beta2)


def check(program, choice):
    """The arm is a unit vector, theta is feasible and attains lower along it."""
    ones = torch.ones_like(choice.lower)
    assert (choice.status == Status.CONVERGED).all()
    assert (choice.lower <= choice.upper).all()
    torch.testing.assert_close(torch.linalg.vector_norm(choice.arm, dim=-1), ones)
    torch.testing.assert_close((choice.arm * choice.theta).sum(-1), choice.lower)
    assert program.domain.contains(choice.theta).all()
    excess = program.likelihood(choice.theta) - program.level
    assert (excess <= 1e-12 * (1 + program.level.abs())).all()


def longest_on_grid(program, count):
    """The longest boundary point on a dense grid of rays from the minimiser (d = 2)."""
    loss, S = program.likelihood, program.domain.max_radius
    fit = glb.constrained_mle(
        loss.family,
        glb.Rows(loss.X, loss.r),
        program.domain,
        regularization=loss.regularization,
    )
    angle = torch.linspace(0, 2 * math.pi, count, dtype=torch.float64)
    ray = torch.stack([angle.cos(), angle.sin()], -1)
    low, high = torch.zeros_like(angle), torch.full_like(angle, 2 * S)
    for _ in range(50):
        length = 0.5 * (low + high)
        point = fit.theta + length[:, None] * ray
        inside = loss(point) <= program.level
        inside = inside & (torch.linalg.vector_norm(point, dim=-1) <= S)
        low, high = torch.where(inside, length, low), torch.where(inside, high, length)
    return torch.linalg.vector_norm(fit.theta + low[:, None] * ray, dim=-1).max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "S", "beta2"), [(5, 3.0, 1.0), (60, 6.0, 1.5), (100, 3.0, 0.1)])
def test_plane_is_solved_globally(family, n, S, beta2, generator):
    program = make(family, 2, n, S, beta2, generator)
    choice = glb.argmax_ball(program)
    check(program, choice)
    assert choice.is_global
    assert choice.upper - choice.lower <= 1e-6 * (1 + choice.upper)
    best = longest_on_grid(program, 4001)
    assert choice.upper >= best
    assert choice.lower >= best - 1e-6 * (1 + best)


def test_plane_with_two_opposite_maxima():
    """An ellipse around the origin has two ends of equal length; a shift decides between them."""
    X = torch.diag(torch.tensor([1.0, 0.2])).double()
    for shift, side in ((0.3, 1.0), (-0.3, -1.0), (0.0, None)):
        r = torch.tensor([0.0, 0.2 * shift]).double()
        loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)
        level = loss(torch.tensor([0.0, shift]).double()) + 0.02
        program = glb.SublevelProgram(loss, glb.Ball(2, 10.0), level)
        choice = glb.argmax_ball(program)
        check(program, choice)
        expected = abs(shift) + math.sqrt(0.04 / 0.04)
        torch.testing.assert_close(choice.upper, torch.tensor(expected).double(), rtol=2e-6, atol=0)
        assert choice.is_global
        if side is not None:
            assert choice.theta[1] * side > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_dimension_is_the_larger_of_two_ends(family, generator):
    program = make(family, 1, 20, 4.0, 1.0, generator)
    choice = glb.argmax_ball(program)
    check(program, choice)
    ends = native_support(program, torch.tensor([[1.0], [-1.0]]).double())
    torch.testing.assert_close(choice.upper, ends.upper.max(), rtol=1e-6, atol=1e-7)
    assert choice.is_global


def test_ball_that_lies_in_the_set(generator):
    for d in (1, 2, 3):
        program = make("bernoulli", d, 10, 2.0, 1e3, generator)
        choice = glb.argmax_ball(program)
        check(program, choice)
        torch.testing.assert_close(choice.upper, torch.tensor(2.0).double())
        assert choice.is_global


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [3, 5])
def test_higher_dimensions_are_bounded(family, d, generator):
    """lower is attained; upper is at least the longest feasible point that brute force finds."""
    program = make(family, d, 80, 5.0, 1.0, generator)
    choice = glb.argmax_ball(program)
    check(program, choice)
    directions = torch.randn(2000, d, generator=generator, dtype=torch.float64)
    directions = torch.nn.functional.normalize(directions, dim=-1)
    result = native_support(program, directions, tol=1e-6)
    longest = torch.linalg.vector_norm(result.theta, dim=-1).max()
    assert choice.upper >= longest
    assert choice.upper <= 5.0 * (1 + 1e-12)
    # the ascent ends at a local maximum: no direction nearby does better
    assert choice.lower >= result.lower.max() * (1 - 1e-6)
    near = torch.nn.functional.normalize(choice.arm + 0.05 * directions[:50], dim=-1)
    assert (native_support(program, near, tol=1e-6).lower <= choice.lower * (1 + 1e-6)).all()


def test_ellipsoid_in_higher_dimensions():
    """A Gaussian ellipsoid centred at the origin: the longest axis is known."""
    curvature = torch.tensor([4.0, 1.0, 2.0, 0.5]).double()
    X = torch.diag(curvature.sqrt() / 2)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(0.5), X, torch.zeros(4).double())
    program = glb.SublevelProgram(loss, glb.Ball(4, 50.0), torch.tensor(1.0).double())
    choice = glb.argmax_ball(program)
    check(program, choice)
    expected = torch.tensor(math.sqrt(2.0 / 0.5)).double()
    torch.testing.assert_close(choice.lower, expected, rtol=1e-6, atol=0)
    assert choice.upper >= expected


def test_batch_equals_loop(generator):
    for d in (2, 3):
        batch = make("bernoulli", d, 40, 4.0, 1.0, generator, batch=(2, 2))
        together = glb.argmax_ball(batch)
        assert together.lower.shape == together.status.shape == (2, 2)
        assert together.arm.shape == (2, 2, d)
        for i in range(2):
            for j in range(2):
                alone = glb.argmax_ball(batch.rebuild(tuple(t[i, j] for t in batch.tensors())))
                torch.testing.assert_close(together.lower[i, j], alone.lower, rtol=2e-6, atol=0)
                torch.testing.assert_close(together.upper[i, j], alone.upper, rtol=2e-6, atol=0)


def test_infeasible_level_stays_in_its_element(generator):
    for d in (2, 3):
        good = make("bernoulli", d, 40, 4.0, 1.0, generator, batch=(3,))
        level = good.level.clone()
        level[1] = -1.0
        bad = glb.SublevelProgram(good.likelihood, good.domain, level)
        before, after = glb.argmax_ball(good), glb.argmax_ball(bad, throw=False)
        assert after.status.tolist() == [0, int(Status.INFEASIBLE), 0]
        assert not after.is_global[1]
        assert after.lower[1] == after.upper[1] == -torch.inf
        assert torch.isnan(after.theta[1]).all()
        torch.testing.assert_close(after.lower[::2], before.lower[::2], rtol=2e-6, atol=0)
        torch.testing.assert_close(after.upper[::2], before.upper[::2], rtol=2e-6, atol=0)
        with pytest.raises(glb.SolverError, match=r"INFEASIBLE .*\(1,\)"):
            glb.argmax_ball(bad)


def test_nan_stays_in_its_element(generator):
    for d in (1, 2, 3):
        good = make("bernoulli", d, 40, 4.0, 1.0, generator, batch=(3,))
        X, r, radius, level = (t.clone() for t in good.tensors())
        X[1, 3, 0] = torch.nan
        bad = good.rebuild((X, r, radius, level))
        before, after = glb.argmax_ball(good), glb.argmax_ball(bad, throw=False)
        assert after.status.tolist() == [0, int(Status.NONFINITE), 0]
        assert not after.is_global[1]
        assert torch.isnan(after.theta[1]).all()
        torch.testing.assert_close(after.lower[::2], before.lower[::2], rtol=2e-6, atol=0)
        torch.testing.assert_close(after.upper[::2], before.upper[::2], rtol=2e-6, atol=0)


def longest_exactly(X, r, S, level):
    """The longest theta of ``|X theta|^2/2 - <r, X theta> <= level`` in the disc, to forty digits."""
    X, r = mpmath.matrix(X.tolist()), mpmath.matrix(r.tolist())
    eigenvalues, basis = mpmath.eigsy(X.T * X)
    c = basis.T * mpmath.lu_solve(X.T * X, X.T * r)
    least = -sum(e * u * u for e, u in zip(eigenvalues, c, strict=True)) / 2
    room = 2 * (mpmath.mpf(level) - least)

    def on_ellipse(mu):  # where c + u is longest, u_i = c_i/(mu e_i - 1) for the largest such mu
        return [u / (mu * e - 1) for e, u in zip(eigenvalues, c, strict=True)]

    low, high = 1 / min(eigenvalues), 2 / min(eigenvalues)

    def size(mu):
        return sum(e * u * u for e, u in zip(eigenvalues, on_ellipse(mu), strict=True))

    while size(high) > room:
        high *= 2
    for _ in range(140):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) > room else (low, middle)
    longest = sum((a + u) ** 2 for a, u in zip(c, on_ellipse(high), strict=True))
    return min(mpmath.sqrt(longest), mpmath.mpf(S))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bounds_hold_to_the_last_digit(dtype, generator):
    """In single precision the length of a rounded point was above the longest of the set."""
    family, S = glb.Gaussian(1.0), 3.3
    with mpmath.workdps(40):
        for trial in range(40):
            X = torch.randn(6, 2, generator=generator, dtype=torch.float64)
            X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
            noise = torch.randn(6, generator=generator, dtype=torch.float64)
            X, r = X.to(dtype), (X.sum(-1) + 0.3 * noise).to(dtype)
            fit = glb.constrained_mle(family, glb.Rows(X, r), glb.Ball(2, S))
            level = fit.loss + 10.0 ** (trial % 5 - 3)
            program = glb.SublevelProgram(
                glb.NegativeLogLikelihood(family, X, r), glb.Ball(2, S), level
            )
            choice = glb.argmax_ball(program, throw=False)
            exact = longest_exactly(X, r, S, float(level))
            assert mpmath.mpf(float(choice.lower)) <= exact <= mpmath.mpf(float(choice.upper))
            assert choice.lower.dtype == choice.arm.dtype == dtype
            assert float(choice.upper - choice.lower) <= 1e-5


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": -1.0}, "w: expected non-negative weights, got -1.0"),
        ({"r": 7.0}, "r: expected rewards of Bernoulli"),
        ({"ridge": torch.tensor(-0.5).double()}, "regularization: expected non-negative"),
    ],
)
def test_what_is_not_convex_or_no_reward_is_refused(d, change, message):
    X = torch.eye(3, d).double()
    r, w = torch.full((3,), change.get("r", 1.0)), torch.full((3,), change.get("w", 1.0))
    ridge = change.get("ridge", 0.0)
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w, regularization=ridge)
    program = glb.SublevelProgram(loss, glb.Ball(d, 3.0), 4.0)
    with pytest.raises(glb.InputError, match=f"^{message}"):
        glb.argmax_ball(program)
    assert glb.argmax_ball(program, throw=False, validate=False).arm.shape == (d,)


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_rounds=0), "max_rounds: expected an integer of at least 1, got 0"),
        (dict(max_rounds=-1), "max_rounds: expected"),
        (dict(max_rounds=2.5), "max_rounds: expected"),
        (dict(tol=-1.0), "tol: expected a non-negative finite number, got -1.0"),
        (dict(tol=math.nan), "tol: expected"),
        (dict(throw="no"), "throw: expected True or False"),
        (dict(validate="no"), "validate: expected True or False"),
    ],
)
def test_settings_are_refused_by_name(d, settings, message, generator):
    program = make("bernoulli", d, 10, 3.0, 1.0, generator)
    with pytest.raises(glb.InputError, match=f"^{message}"):
        glb.argmax_ball(program, **settings)
    with pytest.raises(glb.InputError, match="^program: expected a SublevelProgram"):
        glb.argmax_ball(program.likelihood)
